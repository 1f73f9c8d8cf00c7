"""Whether two revisions collect the same data, bit for bit: `python -m benchmarks.house.frozen --before REVISION`.

The runs are those of `tests/support/frozen.py`. Both revisions run here, one after the other, on the same machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
_RUN = """
import sys, torch
import tests.support.frozen as frozen
torch.set_num_threads(1)
torch.save({name: frozen.leaves(run()) for name, run in frozen.RUNS.items() if sys.argv[2] in name}, sys.argv[1])
"""


def collected(package: Path, out: Path, only: str) -> dict[str, dict[str, torch.Tensor]]:
    """The leaves of all runs, by the package in the folder `package`."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join((str(package), str(ROOT)))}
    subprocess.run([sys.executable, "-c", _RUN, str(out), only], cwd=out.parent, env=paths, check=True)
    loaded: dict[str, dict[str, torch.Tensor]] = torch.load(out, weights_only=True)
    return loaded


def difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> str:
    """What differs between the leaves of two runs; empty if nothing does."""
    if one.keys() != two.keys():
        return f"keys {sorted(one.keys() ^ two.keys())}"
    return ", ".join(
        key
        for key, leaf in one.items()
        if leaf.dtype != two[key].dtype or leaf.shape != two[key].shape or not leaf.view(-1).equal(two[key].view(-1))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, metavar="REVISION")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only the runs whose name holds this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "before"
        old.mkdir()
        archive = subprocess.run(
            ["git", "archive", arguments.before, "funcollect"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(old)], input=archive, check=True)
        new = Path(folder) / "after"
        new.mkdir()
        (new / "funcollect").symlink_to(ROOT / "funcollect")
        before, after = (
            collected(package, Path(folder) / f"{package.name}.pt", arguments.only) for package in (old, new)
        )
    wrong = {name: difference(run, after[name]) for name, run in before.items()}
    for name, text in wrong.items():
        print(f"{name:24} {text or 'the same, bit for bit'}")
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    main()

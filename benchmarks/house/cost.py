"""What `make test` costs, beside the size of the house: `python -m benchmarks.house.cost [PART ...]`.

The parts of the Makefile run one after another, so leave the machine alone meanwhile. For each, the wall time and the
processor time of its processes are written to `benchmarks/results/house.json`, with lines, files, functions and imports
of the package and its tests. Parts that are named replace their numbers in that file, and the others stay. Ray's
servers leave the tree of processes, so their processor time is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import time
from typing import Any

from benchmarks.house.sizes import ROOT, counts, parts

RESULTS = ROOT / "benchmarks" / "results" / "house.json"


def targets() -> list[str]:
    """The targets that `make test` runs, in its order."""
    listed = re.search(r"^ALL := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert listed, "the Makefile has no list ALL"
    return listed[1].replace("\\\n", " ").split()


def cost(target: str) -> dict[str, Any]:
    """The seconds that a target takes, and whether it passes."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["make", "--no-print-directory", target], cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(time.perf_counter() - began), "cpu": round(spent), "passed": done.returncode == 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="such as tests-core; by default all of `make test`")
    chosen = parser.parse_args().parts or targets()
    if unknown := {*chosen} - {*targets()}:
        parser.error(f"{sorted(unknown)} are no parts of `make test`: name some of {targets()}")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"seconds": {}}
    for target in chosen:
        found["seconds"][target] = cost(target)
    seconds = {target: found["seconds"][target] for target in targets() if target in found["seconds"]}
    folders = {folder: dict(counts(folder)) for folder in ("funcollect", "tests", "benchmarks")}
    found = {"cores": os.cpu_count(), "seconds": seconds, "lines": parts(), **folders}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for target, each in seconds.items():
        print(f"{target:16} {each['wall']:5} s, {each['cpu']:5} s of processors{'' if each['passed'] else ', failed'}")
    print(f"{'sum':16} {sum(e['wall'] for e in seconds.values()):5} s, {sum(e['cpu'] for e in seconds.values()):5} s")


if __name__ == "__main__":
    main()

"""Checkpoints of a memory-mapped buffer in which 1 % of the frames are new, beside writing the bytes of these frames.

``python -m benchmarks.studies.checkpoints`` prints the seconds of each for buffers of several sizes: the first
checkpoint, which writes everything, and the medians of the later ones. All bytes are on the disk at the end of a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import funcollect as fc
from benchmarks.harness.report import setting
from benchmarks.harness.runner import Options
from funcollect.files import sync

SHARE = 100  # one frame in so many is new


def frames(count: int, first: int) -> TensorDict:
    """Frames with a screen of 84x84 bytes, no two of them alike."""
    screens = torch.randint(0, 255, (count, 84, 84), dtype=torch.uint8)
    leaves = {"observation": screens, "action": torch.zeros(count, dtype=torch.int64), "reward": torch.ones(count)}
    return TensorDict({**leaves, "index": torch.arange(first, first + count)}, batch_size=[count])


def seconds(call: Callable[[], Any]) -> float:
    """The time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def written(path: Path, data: bytes) -> None:
    """Write the bytes, and wait until they are on the disk."""
    path.write_bytes(data)
    sync(path)


def measure(gigabytes: float, rounds: int, directory: Path) -> dict[str, Any]:
    """The times of a buffer of this size."""
    one = frames(1, 0)
    new = round(gigabytes * 1e9 / sum(leaf.nbytes for leaf in one.values())) // SHARE
    buffer = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(new * SHARE), batch_size=64)
    for number in range(SHARE):
        buffer.extend(frames(new, number * new))
    checkpoint = fc.Checkpoint(directory / "checkpoints", keep=2)
    first = seconds(partial(checkpoint.save, 0, buffer=buffer))
    saving, writing = [], []
    for step in range(1, rounds + 1):
        batch = frames(new, (SHARE + step - 1) * new)
        data = b"".join(leaf.numpy().tobytes() for leaf in batch.values())
        buffer.extend(batch)
        saving.append(seconds(partial(checkpoint.save, step, buffer=buffer)))
        writing.append(seconds(partial(written, directory / "bytes", data)))
    restored = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(new * SHARE), batch_size=64)
    restoring = seconds(partial(checkpoint.restore, buffer=restored))
    assert restored[:]["index"].sort().values.equal(torch.arange(rounds * new, (rounds + SHARE) * new))
    times = {"first": first, "saving": saving, "writing": writing, "restoring": restoring}
    return {"gigabytes": gigabytes, "frames": new * SHARE, **times}


def main() -> None:
    """Print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "checkpoints.json")
    options = parser.parse_args()
    table = []
    print(f"{'GB':>4} {'first':>7} {'1 % new':>8} {'writing 1 %':>12} {'ratio':>6} {'restoring':>10}")
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory() as directory:
            row = measure(gigabytes, options.rounds, Path(directory))
        table.append(row)
        saving, writing = statistics.median(row["saving"]), statistics.median(row["writing"])
        shown = f"{gigabytes:4} {row['first']:7.2f} {saving:8.3f} {writing:12.3f} {saving / writing:6.2f}"
        print(shown, f"{row['restoring']:10.2f}", flush=True)
    facts = setting(Options(rounds=options.rounds, scale=1.0, only=""))
    options.out.write_text(json.dumps({**facts, "results": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()

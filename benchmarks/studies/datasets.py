"""A dataset of HalfCheetah, written while it is collected, read by another process, and cloned there.

``python -m benchmarks.studies.datasets`` prints frames per second of collecting alone, of collecting and writing, and
of reading; how far memory grows while the frames are written; and the mean return of the network that acted, of one
that learned its actions from the dataset, and of random actions.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import funcollect as fc
from benchmarks.harness.report import setting
from benchmarks.harness.runner import Options

ENV, LANES, BATCH = "HalfCheetah-v5", 8, 8_000
UPDATES, EPISODES = 5_000, 8


def network(seed: int) -> nn.Module:
    """The network of the teacher and of its clone: actions of a useful size, in [-1, 1]."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6), nn.Tanh())
    with torch.no_grad():
        layers[4].weight *= 5
    return layers


def collected(frames: int) -> Any:
    """A collector of the teacher's frames, whose actions have some noise."""
    policy = fc.torch_policy(network(0), head=fc.heads.clipped_normal(scale=0.1))
    return fc.SyncDataCollector(
        fc.make_env(ENV, num_envs=LANES), policy, frames_per_batch=BATCH, total_frames=frames, seed=0
    )


def peak() -> float:
    """The most memory that this process has had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024


def write(frames: int, folder: Path) -> dict[str, float]:
    """Collect and write frames; the seconds of both, and the peak of memory after a fifth of them and at the end."""
    peaks = []

    def batches() -> Iterator[Any]:
        for batch in collected(frames):
            yield batch
            peaks.append(peak())

    collector = collected(frames // 10)
    next(collector)
    began = time.perf_counter()
    counted = sum(batch.numel() for batch in collector)
    alone, began = counted / (time.perf_counter() - began), time.perf_counter()
    written = fc.datasets.write_minari(folder, batches(), env=fc.make_env(ENV, num_envs=LANES), seed=0)
    seconds = time.perf_counter() - began
    rates = {"collecting": alone, "collecting and writing": frames / seconds}
    return {"frames": written, **rates, "MB after a fifth": peaks[len(peaks) // 5], "MB at the end": peaks[-1]}


def clone(folder: Path) -> dict[str, float]:
    """Read the dataset in this process, learn its actions, and act."""
    began = time.perf_counter()
    count = sum(map(len, fc.datasets.read_minari(folder)))
    reading = count / (time.perf_counter() - began)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(count), batch_size=1_024)
    fc.datasets.read_minari(folder, buffer=buffer)
    student, env = network(1), fc.make_env(ENV, num_envs=EPISODES)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    for _ in range(UPDATES):
        sample = buffer.sample()
        loss = nn.functional.mse_loss(student(sample["observation"]), sample["action"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    acting = {"teacher": network(0), "clone": student}
    policies = {name: fc.torch_policy(each, head=fc.heads.clipped_normal(scale=0.1)) for name, each in acting.items()}
    policies["random"] = fc.random_policy(env)
    returns = {name: fc.evaluate(env, each, episodes=EPISODES, seed=1).mean_return for name, each in policies.items()}
    return {"reading": reading, "squared error": loss.item(), **returns}


def main() -> None:
    """Print the numbers, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "datasets.json")
    options = parser.parse_args()
    if options.read is not None:
        print(json.dumps(clone(options.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = write(options.frames, Path(folder) / "cheetah")
        again = [sys.executable, "-m", "benchmarks.studies.datasets", "--read", f"{folder}/cheetah"]
        found |= json.loads(subprocess.run(again, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    for name, value in found.items():
        print(f"{name:24} {value:14,.6g}")
    about = setting(Options(rounds=1, scale=1.0, only=""))
    options.out.write_text(json.dumps({**about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

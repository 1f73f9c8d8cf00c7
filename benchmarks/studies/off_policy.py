"""SAC and TD3 with one update for each frame, as a script by hand has them and with ours: do both learn the same?

``python -m benchmarks.studies.off_policy [--seeds N] [--frames F] [--only NAME] [--out FILE]`` trains the programs of
``benchmarks daily`` in InvertedDoublePendulum. It prints the mean return of the actor, without noise, in ten episodes
after each fifth of a run: the median of the seeds, their least and largest, and in how many of them ours ended higher.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import funcollect as fc
from benchmarks.contestants import daily_host, sac
from benchmarks.harness.report import setting
from benchmarks.harness.runner import Options, quiet_mujoco

ENV, PARTS, EPISODES = "InvertedDoublePendulum-v5", 5, 10
HEADS = {"SAC": fc.heads.tanh_normal, "TD3": fc.heads.clipped_normal(scale=0.1)}
PROGRAMS: dict[str, dict[str, Any]] = {
    "SAC": {
        "funcollect": partial(sac.Program, sac.ours, learns=True),
        "by hand": partial(sac.Program, sac.by_hand, learns=True),
    },
    "TD3": {"funcollect": daily_host.td3, "by hand": daily_host.td3_by_hand},
}


def curve(program: Any, head: fc.Head, frames: int) -> list[float]:
    """The mean return after each part of a run."""
    policy, returns, made = fc.torch_policy(program.actor, head=head), list[float](), 0
    for part in range(1, PARTS + 1):
        while made * PARTS < part * frames:
            made += program.run()
        found = fc.evaluate(fc.make_env(ENV, num_envs=EPISODES), policy, episodes=EPISODES, seed=1)
        returns.append(float(found.returns.mean()))
    program.close()
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=5_000)
    parser.add_argument("--only", default="", choices=["", *PROGRAMS])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "off_policy.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet_mujoco()
    programs = {name: sides for name, sides in PROGRAMS.items() if arguments.only in name}
    curves: dict[str, dict[str, Any]] = {name: {side: [] for side in sides} for name, sides in programs.items()}
    for seed in range(arguments.seeds):
        for name, sides in programs.items():
            for side, make in sides.items():
                np.random.seed(seed)  # from which Stable-Baselines3's buffer samples
                curves[name][side].append(curve(make(env_id=ENV, seed=seed), HEADS[name], arguments.frames))
    for name, sides in curves.items():
        for side, runs in sides.items():
            parts = [f"{median(part):.0f} ({min(part):.0f} to {max(part):.0f})" for part in zip(*runs, strict=True)]
            print(f"{name} {side:11}", ", ".join(parts))
        higher = sum(one[-1] > other[-1] for one, other in zip(*sides.values(), strict=True))
        print(f"{name}: ours ended higher in {higher} of {arguments.seeds} seeds")
    about = setting(Options(rounds=1, scale=1.0, only=""))
    found = {"env": ENV, "frames": arguments.frames, "returns": curves}
    arguments.out.write_text(json.dumps({**about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

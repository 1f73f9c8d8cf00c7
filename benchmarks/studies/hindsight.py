"""Goals in hindsight: the learner of docs/guides/goals.md beside Stable-Baselines3's DQN with its `HerReplayBuffer`.

``python -m benchmarks.studies.hindsight [--seeds N] [--out FILE]`` lets both learn to reach places from as many frames,
by as many updates of the same network, for N seeds, and prints the share of 100 goals that each reaches.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch

import funcollect as fc
from benchmarks.harness.report import setting
from benchmarks.harness.runner import Options

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "goals.md"
FRAMES, LANES, UPDATES = 4_800, 8, 40  # updates for 240 frames


def ours(seed: int) -> tuple[float, Any]:
    """The share of goals that the page's learner reaches, and the page's environment."""
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    program = program.replace("manual_seed(0)", f"manual_seed({seed})").replace("seed=0)", f"seed={seed})")
    names: dict[str, Any] = {"__name__": "page"}
    exec(program.replace("assert after > 0.8", ""), names)
    return names["after"], names["Reach"]


def theirs(make: Any, seed: int) -> float:
    """The share of the same goals that Stable-Baselines3's learner reaches."""
    from stable_baselines3 import DQN, HerReplayBuffer
    from stable_baselines3.common.env_util import make_vec_env

    gymnasium.register("Reach-v0", make)
    learner = DQN(
        "MultiInputPolicy", make_vec_env("Reach-v0", LANES, seed=seed), replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"}, seed=seed, device="cpu",
        policy_kwargs={"net_arch": [128, 128]}, learning_rate=1e-3, gamma=0.95, batch_size=256, buffer_size=20_000,
        learning_starts=240, train_freq=240 // LANES, gradient_steps=UPDATES, tau=0.02, target_update_interval=1,
        exploration_initial_eps=0.2, exploration_final_eps=0.2,
    )  # fmt: skip
    learner.learn(FRAMES)

    def greedy(observation: Any) -> Any:
        seen = {name: leaf.numpy() for name, leaf in observation.items()}
        return torch.from_numpy(np.asarray(learner.predict(seen, deterministic=True)[0]))

    stats = fc.evaluate(fc.make_env(make, num_envs=LANES), fc.torch_policy(greedy), episodes=100, seed=1)
    return float((stats.returns > -20).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "hindsight.json")
    arguments = parser.parse_args()
    shares: dict[str, list[float]] = {"funcollect": [], "stable_baselines3": []}
    for seed in range(arguments.seeds):
        share, make = ours(seed)
        shares["funcollect"].append(share)
        shares["stable_baselines3"].append(theirs(make, seed))
    for name, each in shares.items():
        print(f"{name:18} {median(each):.2f}, from {min(each):.2f} to {max(each):.2f}")
    about = setting(Options(rounds=1, scale=1.0, only=""))
    arguments.out.write_text(json.dumps({**about, "found": {"frames": FRAMES, "reached": shares}}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How long freely run paths agree, and what the hashes of a rollout on the host cost.

``python -m benchmarks.studies.randomness`` runs the same network with the same seed on several paths, and prints after
how many steps a lane's data first differ from those of the first path. Then it prints the share of a rollout's time
that its hashes take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import funcollect as fc
from benchmarks.contestants.networks import discrete, jax_network, torch_module
from benchmarks.harness.report import setting
from benchmarks.harness.runner import Options
from funcollect.keys import Purpose, lane_keys, random_words

LANES, ROLLOUT = 16, 1000
ENVS = ("CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1", "HalfCheetah-v5")
SHAPES = ((8, 64), (8, 128), (64, 8), (64, 128))  # lanes and steps of a rollout


def policies(name: str) -> dict[str, Any]:
    """The same network on each path over an environment."""
    env: Any = fc.make_env(name)
    head = fc.heads.categorical if discrete(env) else fc.heads.normal
    module = torch_module(env)
    params, apply = jax_network(env)
    return {
        "eager": fc.torch_policy(module, head=head, compile="eager"),
        "xla": fc.torch_policy(module, head=head, compile="xla"),
        "jax": fc.jax_policy(lambda params, x: apply(params, x), params, head=head),
    }


def agreement(name: str, steps: int) -> dict[str, list[int]]:
    """For each path, the step at which each lane first differs by more than 1e-5; `steps` if it does not."""
    env = fc.make_env(name, num_envs=LANES)
    runs = {path: (policy, fc.init(env, policy, seed=3)) for path, policy in policies(name).items()}
    found = {path: [steps] * LANES for path in runs}
    for start in range(0, steps, ROLLOUT):
        batches = {}
        for path, (policy, state) in runs.items():
            after, batches[path] = fc.rollout(env, policy, state, ROLLOUT)
            runs[path] = policy, after
        first = next(iter(batches.values()))
        for path, batch in batches.items():
            apart = differing(batch, first)
            for lane in range(LANES):
                if apart[lane].any():
                    found[path][lane] = min(found[path][lane], start + int(apart[lane].nonzero()[0]))
    return found


def differing(one: Any, other: Any) -> Tensor:
    """[P, T], whether observations or actions differ."""
    apart = [(one[key].double() - other[key].double()).abs() > 1e-5 for key in ("observation", "action")]
    return torch.stack([each.reshape(*each.shape[:2], -1).any(-1) for each in apart]).any(0)


def share(name: str, policy: str, lanes: int, steps: int, repeats: int = 41) -> float:
    """The median share of a rollout that its hashes take."""
    env = fc.make_env(name, num_envs=lanes)
    made = fc.random_policy(env) if policy == "random" else policies(name)["eager"]
    noise = made.noise(env.action_spec)
    assert noise is not None
    state = fc.init(env, made, seed=0)
    shares = []
    for _ in range(repeats):
        began = time.perf_counter()
        keys = lane_keys(state.key, Purpose.NOISE, state.lane_ids)
        random_words(keys, np.arange(state.steps_made, state.steps_made + steps)[:, None], noise.words)
        drawn = time.perf_counter()
        state, _ = fc.rollout(env, made, state, steps)
        shares.append((drawn - began) / (time.perf_counter() - drawn))
    return statistics.median(shares)


def main() -> None:
    """Print both tables, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "randomness.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"first_difference": {}, "share_of_hashes": {}}
    for name in ENVS:
        results["first_difference"][name] = found = agreement(name, options.steps)
        for path, steps in found.items():
            print(f"{name:20} {path:6} earliest {min(steps):6,}  median {statistics.median(steps):8,.0f}", flush=True)
    for name, policy in (("CartPole-v1", "random"), ("CartPole-v1", "network"), ("HalfCheetah-v5", "network")):
        for lanes, steps in SHAPES:
            cell = f"{name} {policy} {lanes} x {steps}"
            results["share_of_hashes"][cell] = value = share(name, policy, lanes, steps)
            print(f"{cell:40} {value:.2%}", flush=True)
    facts = setting(Options(rounds=1, scale=1.0, only=""))
    options.out.write_text(json.dumps({**facts, "steps": options.steps, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Frames (environment steps) per second: ours, TorchRL, Stable-Baselines3, and loops written by hand as the limit.

Every network is 2x64 tanh and records the log-probability; Stable-Baselines3 evaluates a value network besides. `loop`
resets without a seed, `loop-reseed` seeds each episode as ours does; both store nothing but the observation.
`loop-record` seeds, too, and keeps the columns of a batch but for log-probabilities, ids and counters. All run on bare
Gymnasium environments without its checker. A JAX network's jitted call draws its noise itself in these loops, and gets
it as an argument, drawn ahead as ours does, in `loop-ahead`, `loop-ahead-reseed` and `loop-record`. The cells of
`suites` (EnvPool, Atari games) and `torchrl` (its environments and actors), which can be run by themselves, come after.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import suites, torchrl
from benchmarks.contestants import loops
from benchmarks.contestants.peers import Batches, dummy_loop, torchrl_collector
from benchmarks.harness.runner import Cell, Factory, quiet_mujoco

ENVS = ("CartPole-v1", "HalfCheetah-v5")
LENGTHS = {1: 2000, 8: 500, 64: 100}  # num_envs: steps of each environment per batch
POLICIES = ("torch", "jax", "random")
OURS = "funcollect"
_LOOPS = {
    "torch": {"loop": loops.torch_act},
    "jax": {"loop": loops.jax_act, "loop-ahead": loops.jax_ahead_act},
    "random": {"loop": loops.random_act},
}


def cells() -> Iterator[Cell]:
    """Gymnasium's environments, then the cells of `suites` and `torchrl`."""
    quiet_mujoco()
    yield from gymnasium_cells()
    yield from suites.cells()
    yield from torchrl.cells()


def gymnasium_cells() -> Iterator[Cell]:
    for env_id in ENVS:
        for policy in POLICIES:
            for num_envs, length in LENGTHS.items():
                batch = f"frames_per_batch {num_envs * length:,} ({length:,} per environment)"
                yield Cell(
                    name=f"{env_id} {policy} {num_envs}",
                    note=batch,
                    contestants=_contestants(env_id, policy, num_envs, length),
                )


def _contestants(env_id: str, policy: str, num_envs: int, length: int) -> dict[str, Factory]:
    work = (env_id, num_envs, length)
    contestants: dict[str, Factory] = {OURS: partial(ours, *work, policy)}
    for name, make_act in _LOOPS[policy].items():
        contestants[name] = partial(loops.Loop, *work, make_act, reseed=False)
        contestants[f"{name}-reseed"] = partial(loops.Loop, *work, make_act, reseed=True)
    *_, last = _LOOPS[policy].values()
    contestants["loop-record"] = partial(loops.RecordingLoop, *work, last, reseed=True)
    if policy != "jax":
        contestants["torchrl"] = partial(torchrl_collector, *work, random=policy == "random")
    if policy == "torch":
        contestants["sb3"] = partial(dummy_loop, *work)
    return contestants


def ours(env_id: str, num_envs: int, length: int, policy: str) -> Batches:
    import funcollect as fc

    env = fc.make_env(env_id, num_envs=None if num_envs == 1 else num_envs)
    return Batches(
        fc.SyncDataCollector(env, our_policy(env, policy), frames_per_batch=length * num_envs, total_frames=-1, seed=0)
    )


def our_policy(env: Any, kind: str) -> Any:
    import funcollect as fc
    from benchmarks.contestants.networks import discrete, jax_network, torch_module

    head = fc.heads.categorical if discrete(env) else fc.heads.normal
    match kind:
        case "torch":
            return fc.torch_policy(torch_module(env), head=head)
        case "jax":
            params, apply = jax_network(env)
            return fc.jax_policy(apply, params, head=head)
        case _:
            return fc.random_policy(env)

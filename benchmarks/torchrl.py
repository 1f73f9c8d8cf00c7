"""TorchRL's `ProbabilisticActor` on CartPole: TorchRL's collector, and ours with the same actor.

Ours runs over the same environment of TorchRL's (`from_torchrl`), and over Gymnasium's own (`from_gymnasium`). `loop`
is the limit of TorchRL's parts: its environment and its actor in a loop that stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.contestants.peers import Batches, TorchRLLoop, torchrl_actor, torchrl_collector, torchrl_env
from benchmarks.harness.runner import Cell

ENV = "CartPole-v1"
LENGTHS = {1: 1000, 8: 250}  # num_envs: steps of each environment per batch
OURS = "funcollect"


def cells() -> Iterator[Cell]:
    for num_envs, length in LENGTHS.items():
        for adapter in ("from_torchrl", "from_gymnasium"):
            yield Cell(
                name=f"{adapter} {num_envs}",
                note=f"frames_per_batch {num_envs * length:,} ({length:,} per environment)",
                contestants={
                    OURS: partial(ours, adapter, num_envs, length),
                    "torchrl": partial(torchrl_collector, ENV, num_envs, length, random=False),
                    "loop": partial(TorchRLLoop, ENV, num_envs, length),
                },
            )


def ours(adapter: str, num_envs: int, length: int) -> Batches:
    import funcollect as fc

    if adapter == "from_torchrl":
        env = fc.envs.from_torchrl(partial(torchrl_env, ENV, num_envs))
    else:
        env = fc.make_env(ENV, num_envs=None if num_envs == 1 else num_envs)
    return Batches(
        fc.SyncDataCollector(env, torchrl_actor(ENV), frames_per_batch=length * num_envs, total_frames=-1, seed=0)
    )

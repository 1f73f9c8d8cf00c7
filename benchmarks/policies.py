"""Torch policies, frames per second: lowered, called back and called eagerly, against the same network in JAX.

In JAX environments (gymnax CartPole) `native` is the network written by hand in JAX; `lowered`,
`callback` and `eager` are `torch_policy` with these ways of running, the last crossing at each step. In Gymnasium ones
(CartPole) `host xla` and `host eager` are ours, `loop` is the eager loop written by hand (MLP alone).
Policies sample choices and record the log-probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.loops import Loop, torch_act
from benchmarks.policy_networks import Network, network
from benchmarks.report import compare
from benchmarks.runner import Cell, Factory, Options, Result, measure

OURS = "lowered"
FRAMES = 16_384  # at least, per batch
STEPS = 32  # at least, per environment
SIZES = {"mlp": (1, 8, 64, 1024, 4096), "lstm": (1, 64, 1024, 4096)}  # environments at once
MOST_SIMULATORS = 64
WAYS = {"lowered": "xla", "callback": "callback", "eager": "eager", "host xla": "xla", "host eager": "eager"}


def results(options: Options) -> Iterator[Result]:
    for name, sizes in SIZES.items():
        for num_envs in sizes:
            cell = _cell(name, num_envs)
            if options.only in cell.name:
                yield compare(cell, measure(cell, options), OURS)


def _cell(name: str, num_envs: int) -> Cell:
    length = max(STEPS, -(-FRAMES // num_envs))
    names = ["lowered", "native", "callback", "eager"]
    names += ["host xla", "host eager"] if num_envs <= MOST_SIMULATORS else []
    contestants: dict[str, Factory] = {each: partial(Ours, name, each, num_envs, length) for each in names}
    if name == "mlp" and num_envs <= MOST_SIMULATORS:
        contestants["loop"] = partial(Loop, "CartPole-v1", num_envs, length, torch_act, reseed=False)
    note = f"frames_per_batch {num_envs * length:,} ({length:,} per environment)"
    return Cell(name=f"{name} {num_envs}", note=note, contestants=contestants, block=1.0)


class Ours:
    """Our rollout, state in and state out."""

    def __init__(self, name: str, way: str, num_envs: int, length: int) -> None:
        import funcollect as fc

        self._env = _env(num_envs, host=way.startswith("host"))
        self._policy = _policy(network(name), way)
        self._state = fc.init(self._env, self._policy, seed=0)
        self._length = length

    def run(self) -> int:
        import funcollect as fc

        self._state, batch = fc.rollout(self._env, self._policy, self._state, self._length)
        return int(batch.numel())

    def close(self) -> None:
        import funcollect as fc

        fc.close(self._state)


def _env(num_envs: int, *, host: bool) -> Any:
    import funcollect as fc

    return fc.make_env("CartPole-v1" if host else "gymnax/CartPole-v1", num_envs=num_envs)


def _policy(made: Network, way: str) -> Any:
    import torch

    import funcollect as fc

    head = fc.heads.categorical
    if way == "native":
        return fc.jax_policy(made.apply, made.params, head=head, initial_state=made.initial_state)
    state = None if made.initial_state is None else tuple(map(torch.from_numpy, made.initial_state))
    return fc.torch_policy(made.module, head=head, initial_state=state, compile=WAYS[way])

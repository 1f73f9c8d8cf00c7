"""Torch policies, frames per second: lowered, crossing, on the host, and the same network in JAX.

In JAX environments `native` is the network written by hand in JAX; `lowered` and `crossing` are `torch_policy` with
these ways of running (`compile="xla"`, `"eager"`). In Gymnasium ones `host xla` and `host eager` are ours with one call
of XLA or of Torch per step, `loop` is the eager loop written by hand (MLP alone). MLP and LSTM act in CartPole, the CNN
in pixels that roll. Policies sample choices and record the log-probability.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.contestants.loops import Loop, torch_act
from benchmarks.contestants.peers import Rollouts
from benchmarks.contestants.pixels import HostPixels, jax_pixels
from benchmarks.contestants.policy_networks import Network, network
from benchmarks.harness.report import compare
from benchmarks.harness.runner import Cell, Factory, Options, Result, measure

OURS = "lowered"
FRAMES = {"mlp": 16_384, "lstm": 16_384, "cnn": 512}  # at least, per batch
STEPS = {"mlp": 32, "lstm": 32, "cnn": 8}  # at least, per environment
SIZES = {"mlp": (1, 8, 64, 1024, 4096), "lstm": (1, 8, 64, 1024, 4096), "cnn": (1, 8, 64)}  # environments at once
CALLED = 64  # environments with which calls of Torch at each step of a JAX environment are measured
MOST_SIMULATORS = 64
WAYS = {"lowered": "xla", "crossing": "eager", "host xla": "xla", "host eager": "eager"}
PAIRS = (("lowered", "native"), ("host xla", "host eager"), ("host xla", "loop"))


def results(options: Options) -> Iterator[Result]:
    for cell in cells():
        if options.only in cell.name:
            measured = measure(cell, options)
            yield _with_pairs(compare(cell, measured, OURS), measured.rates)


def cells() -> Iterator[Cell]:
    for name, sizes in SIZES.items():
        for num_envs in sizes:
            yield _cell(name, num_envs)


def _cell(name: str, num_envs: int) -> Cell:
    length = max(STEPS[name], -(-FRAMES[name] // num_envs))
    names = ["lowered", "native"]
    names += ["crossing"] if num_envs == CALLED else []
    names += ["host xla", "host eager"] if num_envs <= MOST_SIMULATORS else []
    contestants: dict[str, Factory] = {each: partial(ours, name, each, num_envs, length) for each in names}
    if name == "mlp" and num_envs <= MOST_SIMULATORS:
        contestants["loop"] = partial(Loop, "CartPole-v1", num_envs, length, torch_act, reseed=False)
    note = f"frames_per_batch {num_envs * length:,} ({length:,} per environment)"
    return Cell(name=f"{name} {num_envs}", note=note, contestants=contestants, block=1.0, ours=names)


def _with_pairs(result: Result, rates: Mapping[str, Sequence[float]]) -> Result:
    """The ratios that are asked for, medians over rounds, in a line of their own."""
    pairs = {
        f"{one} / {other}": statistics.median(x / y for x, y in zip(rates[one], rates[other], strict=True))
        for one, other in PAIRS
        if one in rates and other in rates
    }
    line = ", ".join(f"{name} {ratio:.2f}" for name, ratio in pairs.items())
    return replace(result, table=f"{result.table}\n  {line}", data={**result.data, "pairs": pairs})


def ours(name: str, way: str, num_envs: int, length: int) -> Rollouts:
    return Rollouts(_env(name, num_envs, host=way.startswith("host")), _policy(network(name), way), length)


def _env(name: str, num_envs: int, *, host: bool) -> Any:
    import funcollect as fc

    if name == "cnn":
        return fc.make_env(HostPixels, num_envs=num_envs) if host else jax_pixels(num_envs)
    return fc.make_env("CartPole-v1" if host else "gymnax/CartPole-v1", num_envs=num_envs)


def _policy(made: Network, way: str) -> Any:
    import torch

    import funcollect as fc

    head = fc.heads.categorical
    if way == "native":
        return fc.jax_policy(made.apply, made.params, head=head, initial_state=made.initial_state)
    state = None if made.initial_state is None else tuple(map(torch.from_numpy, made.initial_state))
    return fc.torch_policy(made.module, head=head, initial_state=state, compile=WAYS[way])

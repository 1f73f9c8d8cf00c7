"""The collection of eleven algorithms, frames per second: as a script by hand has it, and with ours.

PPO in HalfCheetah and, as PureJaxRL has it, in one compiled program; SAC and TD3 in Hopper (one frame for each update),
DQN on Atari's screens, recurrent PPO, an evolution strategy and levels to begin from in a fused CartPole, IMPALA's
workers, a search over tic-tac-toe, and a world model's recurrent policy. Networks, environments and numbers of frames
are the same on both sides; SAC, TD3, DQN and the compiled PPO learn, too. The lines are those of each side's function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from benchmarks.contestants import daily_host, daily_jax, sac
from benchmarks.harness.report import compared
from benchmarks.harness.runner import Cell, Factory, Options, Result, quiet_mujoco

OURS = "funcollect"
NAMES: Mapping[str, tuple[ModuleType, str]] = {
    "PPO, continuous": (daily_host, "ppo"),
    "TD3": (daily_host, "td3"),
    "DQN on Atari": (daily_host, "dqn"),
    "PPO in JAX, with its updates": (daily_jax, "jax_ppo"),
    "recurrent PPO in JAX": (daily_jax, "recurrent_ppo"),
    "IMPALA": (daily_host, "impala"),
    "evolution strategy": (daily_jax, "evolution"),
    "AlphaZero": (daily_jax, "alphazero"),
    "Dreamer": (daily_host, "dreamer"),
    "levels (PLR)": (daily_jax, "levels"),
}


def results(options: Options) -> Iterator[Result]:
    yield from compared(cells(), options, OURS)


def cells() -> Iterator[Cell]:
    quiet_mujoco()
    for name, (module, function) in NAMES.items():
        own, hand = getattr(module, function), getattr(module, f"{function}_by_hand")
        yield _cell(f"{name} ({_lines(own)} lines, {_lines(hand)} by hand)", _sentence(hand), own, hand)
    name = f"SAC ({_lines(sac.ours)} lines, {_lines(sac.by_hand)} by hand)"
    programs = (partial(sac.Program, each, learns=True) for each in (sac.ours, sac.by_hand))
    yield _cell(name, f"{sac.ENV}, one frame for each update.", *programs)


def _cell(name: str, note: str, own: Factory, hand: Factory) -> Cell:
    return Cell(name=name, note=note, contestants={OURS: own, "by hand": hand}, block=1.0)


def _sentence(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0]


def _lines(function: Callable[..., Any]) -> int:
    """The lines of a function that hold code."""
    return sum(bool(line.strip()) for line in inspect.getsource(function).splitlines())

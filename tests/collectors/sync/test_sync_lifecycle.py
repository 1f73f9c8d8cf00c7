"""Interrupting and closing a collector; and what importing the library brings in."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect import SyncDataCollector

LIVE: list[Any] = []


class Simulator(gymnasium.Env):
    """Shows its step; raises what it is told to, once."""

    observation_space = spaces.Box(-1e6, 1e6, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.closed = 0
        self.error: tuple[str, BaseException] | None = None
        LIVE.append(self)

    def _trip(self, where: str) -> None:
        if self.error is not None and self.error[0] == where:
            error, self.error = self.error[1], None
            raise error

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._trip("reset")
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._trip("step")
        self.t += 1
        return np.float32([self.t]), 1.0, self.t == 8, False, {}

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def live() -> list[Any]:
    LIVE.clear()
    return LIVE


def make(*, total_frames: int = -1, policy: Any = None, **options: Any) -> Any:
    options = {"frames_per_batch": 10, "seed": 0, **options}
    return SyncDataCollector([Simulator, Simulator], policy, total_frames=total_frames, **options)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("in the simulator")], ids=repr)
@pytest.mark.parametrize("where", ["step", "reset"])
def test_after_an_exception_the_next_batch_begins_new_episodes(error: BaseException, where: str) -> None:
    collector = make()
    first = next(collector)
    LIVE[-1].error = (where, error)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else fc.EnvError, match=r"lane 1|^$"):
        next(collector)
    batch = next(collector)
    assert (batch["collector", "step"][:, 0] == 0).all()
    assert batch["observation"][:, :, 0].tolist() == [[0, 1, 2, 3, 4]] * 2
    ids = [set(part["collector", "traj_ids"].flatten().tolist()) for part in (first, batch)]
    assert not ids[0] & ids[1]
    assert collector.frames == 20
    assert next(collector)["observation"][0, :, 0].tolist() == [5, 6, 7, 0, 1]


def test_a_policy_that_fails_leaves_the_collector_usable() -> None:
    failing = [False]

    def module(x: torch.Tensor) -> torch.Tensor:
        if failing[0]:
            raise ZeroDivisionError
        return torch.zeros(len(x)).long()

    collector = make(policy=fc.torch_policy(module))
    next(collector)
    failing[0] = True
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            next(collector)
    failing[0] = False
    assert (next(collector)["collector", "step"][:, 0] == 0).all()


def test_simulators_are_closed_by_with_and_with_a_collector_that_is_dropped() -> None:
    with make() as collector:
        next(collector)
    collector.shutdown()
    assert collector.stats()["frames"] == 10
    failing = make()
    LIVE[-1].error = ("step", ZeroDivisionError())
    with pytest.raises(fc.EnvError), failing:
        next(failing)
    dropped = make()
    batch = next(dropped)
    del dropped
    gc.collect()
    assert [simulator.closed for simulator in LIVE] == [1] * 6
    assert batch["observation"].shape == (2, 5, 1)


IMPORTS = """
import sys, funcollect
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "ray", "torchrl", "matplotlib", "tqdm"}))
collector = funcollect.SyncDataCollector("CartPole-v1", frames_per_batch=10)
next(collector)
print("jax" in sys.modules)
missing = [name for name in funcollect.__all__ if not hasattr(funcollect, name)]
print(missing, "jax_policy" in dir(funcollect), "jax" in sys.modules)
"""


def test_importing_the_library_imports_neither_jax_nor_ray() -> None:
    answer = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["[]", "False", "[] True False"]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rolout'"):
        _ = fc.rolout

"""Iterating, breaking off, ending, interrupting and closing a collector; and what importing the library brings in."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect import SyncDataCollector
from tests.support.compare import assert_same, joined

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


@pytest.mark.parametrize(("total", "count"), [(1, 1), (10, 1), (11, 2), (40, 4)])
def test_a_run_ends_with_a_whole_last_batch(total: int, count: int) -> None:
    collector = make(total_frames=total)
    assert len(collector) == count
    batches = list(collector)
    assert [batch.batch_size for batch in batches] == [(2, 5)] * count
    assert collector.frames == 10 * count
    assert list(collector) == []
    with pytest.raises(StopIteration):
        next(collector)
    assert collector.rollout().batch_size == (2, 5)


def test_frames_are_rounded_up_to_whole_steps() -> None:
    collector = make(frames_per_batch=7, total_frames=15)
    assert collector.frames_per_batch == 7
    assert len(collector) == 2
    assert [batch.batch_size for batch in collector] == [(2, 4), (2, 4)]


def test_an_endless_run_has_no_length() -> None:
    collector = make()
    with pytest.raises(TypeError, match="endless"):
        len(collector)
    for index, batch in enumerate(collector):
        assert batch["observation"][0, 0, 0] == index * 5 % 8
        if index == 20:
            break
    assert collector.frames == 210


def test_breaking_off_and_going_on_is_one_run() -> None:
    whole = joined(list(make(total_frames=60)))
    collector, parts = make(total_frames=60), []
    for stop in (2, 1, 99):
        for count, batch in enumerate(collector, 1):
            parts.append(batch)
            if count == stop:
                break
        else:
            assert stop == 99
    assert_same(joined(parts), whole)


def test_batches_are_the_callers_own() -> None:
    collector, other = make(), make()
    batch = next(collector)
    batch["new"] = torch.zeros(2, 5)
    del batch["action"]
    for leaf in batch.values(True, True):
        leaf.zero_()
    next(other)
    assert_same(next(collector), next(other))


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


def test_reset_begins_new_episodes_in_some_lanes_or_all() -> None:
    collector = make()
    next(collector)
    collector.reset(torch.tensor([True, False]))
    batch = next(collector)
    assert batch["collector", "step"][:, 0].tolist() == [0, 5]
    collector.reset()
    assert next(collector)["collector", "step"][:, 0].tolist() == [0, 0]


USES: dict[str, Callable[[Any], Any]] = {
    "next": next,
    "rollout": lambda collector: collector.rollout(),
    "reset": lambda collector: collector.reset(),
    "set_seed": lambda collector: collector.set_seed(1),
    "update_policy_weights_": lambda collector: collector.update_policy_weights_(),
    "load_state_dict": lambda collector: collector.load_state_dict(collector.state_dict()),
}


@pytest.mark.parametrize("use", USES)
def test_shutdown_closes_the_simulators_once_and_for_all(use: str) -> None:
    collector = make(total_frames=30)
    next(collector)
    collector.shutdown()
    collector.shutdown()
    assert [simulator.closed for simulator in LIVE] == [1, 1]
    with pytest.raises(fc.ClosedError, match="shut down"):
        USES[use](collector)
    assert collector.stats()["frames"] == 10


def test_with_shuts_down_also_after_an_exception() -> None:
    with make() as collector:
        next(collector)
    assert [simulator.closed for simulator in LIVE] == [1, 1]
    LIVE.clear()
    collector = make()
    LIVE[0].error = ("step", ZeroDivisionError())
    with pytest.raises(fc.EnvError), collector:
        next(collector)
    assert [simulator.closed for simulator in LIVE] == [1, 1]


def test_a_collector_that_is_dropped_closes_its_simulators() -> None:
    collector = make()
    batch = next(collector)
    del collector
    gc.collect()
    assert [simulator.closed for simulator in LIVE] == [1, 1]
    assert batch["observation"].shape == (2, 5, 1)


def test_a_collector_leaves_every_global_generator_as_it_was() -> None:
    policy = fc.torch_policy(lambda x: torch.randint(2, (len(x),)))
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with make(policy=policy) as collector:
        next(collector)
        collector.set_seed(3)
        next(collector)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


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

"""`check_collector` passes every collector, and each of its checks catches the faults that it claims to catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import funcollect as fc
from tests.support.cases import mlp
from tests.support.check_collector import COLLECTOR_CHECKS, check_collector
from tests.support.faulty import faulty_collectors as faulty
from tests.support.faulty.faulty_envs import Walk
from tests.support.running import scaled

NAMES = [check.__name__ for check in COLLECTOR_CHECKS]


def policy() -> Any:
    return fc.torch_policy(mlp(2, 3), head=fc.heads.categorical)


def check(make: Callable[..., Any], **kwargs: Any) -> Any:
    """The report on a collector of a walk, by default."""
    kwargs = {"create_env_fn": Walk, "frames_per_batch": 40} | kwargs
    return check_collector(make, **kwargs, policy=policy() if kwargs["create_env_fn"] is Walk else None)


GOOD: dict[str, dict[str, Any]] = {
    "single": {},
    "batch": {"create_env_kwargs": {"num_envs": 3}},
    "torch": {"create_env_fn": "torch/CartPole-v1", "frames_per_batch": 30},
    "a limit and random frames": {"max_frames_per_traj": 5, "init_random_frames": 10},
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_collector_passes_every_check(name: str) -> None:
    report = check(fc.SyncDataCollector, batches=scaled(3), **GOOD[name])
    assert report.passed == tuple(NAMES)


def test_a_function_without_arguments_is_checked_as_far_as_it_goes() -> None:
    def make() -> fc.SyncDataCollector:
        return fc.SyncDataCollector(Walk, policy(), frames_per_batch=40)

    report = check_collector(make)
    assert {*NAMES} - {*report.passed} == {"total_frames", "seeds", "batch_memory", "exception", "postproc"}
    assert "make takes no total_frames: pass the class and its keyword arguments" in str(report)


FAULTS: list[tuple[str, Callable[..., Any], str]] = [
    ("layout", faulty.Locks, r"a batch: expected unlocked, the caller's own, got locked"),
    ("layout", faulty.DropsAKey, r"collector.policy_version: expected .*got None"),
    ("layout", faulty.ShrinksItsBatches, r"a later batch: expected .*40.*39"),
    ("counted", faulty.CountsSteps, r"frames: expected 120, as delivered, got 60"),
    ("counted", faulty.RoundsDown, r"the frames of a batch: expected frames_per_batch=42.*got 40"),
    ("trajectories", faulty.DropsARollout, r"lane 0, step \d+, (collector.step|observation): expected"),
    ("trajectories", faulty.NumbersEachBatch, r"collector.traj_ids"),
    ("total_frames", faulty.CutsTheLastBatch, r"total_frames=41: expected two whole batches of 40 frames.*\[40, 1\]"),
    ("total_frames", faulty.EndsByItself, r"total_frames=-1: expected no end"),
    ("total_frames", faulty.HasALength, r"len of an endless collector: expected TypeError, got 1000000000"),
    ("broken_off", faulty.BeginsAgain, r"lane 0, step 40, collector.step: expected"),
    ("seeds", faulty.IgnoresItsSeed, r"the run with seed=1: expected other data, got those of seed=0"),
    ("seeds", faulty.KeepsItsSeed, r"a run after set_seed\(1\), lane 0"),
    ("seeds", faulty.ReturnsNoSeed, r"set_seed: expected the next seed, an int, got None"),
    ("batch_memory", faulty.ReusesItsMemory, r"a batch after later ones were collected.*no view of it lives"),
    ("batch_memory", faulty.ReadsItsLastBatch, r"the run whose batches were zeroed, lane 0"),
    ("weights", faulty.ForgetsWeights, r"update_policy_weights_\(params\): expected other data"),
    ("weights", faulty.CountsNoVersion, r"before and after one update: expected 0, then 1, got \[0\], then \[0\]"),
    ("checkpoint", faulty.SavesAFunction, r"UnpicklingError: Weights only load failed"),
    ("checkpoint", faulty.ForgetsFrames, r"frames after loading: expected 120, got 0"),
    ("checkpoint", faulty.ForgetsItsVersion, r"collector.policy_version after loading: expected \[1\], got \[0\]"),
    ("checkpoint", faulty.ForgetsItsEpisodes, r"collector.traj_ids: expected one trajectory per id"),
    ("checkpoint", faulty.ForgetsItsKey, r"a second run from one state_dict, lane 0"),
    ("exception", faulty.Swallows, r"an exception in the environment: expected raised, got swallowed"),
    ("exception", faulty.StaysBroken, r"StaleStateError"),
    ("postproc", faulty.SplitsLast, r"postproc: expected a batch that is split already"),
    ("postproc", faulty.ShowsHiddenKeys, r"and not '_hidden', got .*'_hidden'"),
    ("context", faulty.StaysOpen, r"the next batch after its with block: expected ClosedError"),
    ("context", faulty.EntersAnother, r"`with` on it: expected the collector itself"),
    ("shutdown", faulty.ShutsDownOnce, r"ClosedError: .*was shut down"),
    ("broken_off|seeds", faulty.DrawsASeed, r"with seed=0|the run in one loop"),
    ("context|shutdown|total_frames", faulty.JustStops, "expected ClosedError, got none"),
]


@pytest.mark.parametrize(("names", "make", "words"), FAULTS, ids=[make.__name__ for _, make, _ in FAULTS])
def test_a_planted_fault_is_caught_by_its_check(names: str, make: Callable[..., Any], words: str) -> None:
    with pytest.raises(fc.CheckError, match=words) as caught:
        check(make)
    assert caught.value.check in names.split("|"), str(caught.value)


def test_every_check_has_a_planted_fault() -> None:
    assert {name for names, *_ in FAULTS for name in names.split("|")} == {*NAMES}

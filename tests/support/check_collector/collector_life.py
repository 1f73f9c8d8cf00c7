"""What `check_collector` finds by interfering: weights, checkpoints, exceptions, the end."""

from __future__ import annotations

import io
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from funcollect.errors import ClosedError
from funcollect.testing.check_env import expect_counters, expect_used_once
from funcollect.testing.check_policy import other_weights, own_weights
from funcollect.testing.report import fail
from funcollect.tree import flatten
from tests.support.check_collector.collecting import CollectorTrial, expect_same_lanes, ids_of, lanes_of, take

_SCALE = 20.0  # by how much weights are moved: an argmax has to follow
_LONGEST_LAG = 10  # batches in flight when weights are updated


class Stumbles(gymnasium.Env[Any, Any]):
    """Raises once, in its seventh step."""

    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """A start that the seed decides."""
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Nothing moves."""
        self._steps += 1
        if self._steps == 7:
            raise ArithmeticError("stumbled")
        return np.zeros(2, np.float32), 1.0, self._steps % 5 == 0, False, {}


def weights(trial: CollectorTrial) -> str | None:
    """New weights show in later batches, and each update counts as a version."""
    with trial.built() as collector:
        policy: Any = getattr(collector, "policy", None)
        given = policy is not None and bool(own_weights(policy))
        batches = take(collector, 1)
        collector.update_policy_weights_(other_weights(policy, _SCALE) if given else None)
        while _versions(batches[-1]) != [1] and len(batches) <= _LONGEST_LAG:
            batches += take(collector, 1)
    if _versions(batches[0]) != [0] or _versions(batches[-1]) != [1]:
        raise fail(
            "collector.policy_version before and after one update",
            expected="0, then 1",
            got=f"{_versions(batches[0])}, then {_versions(batches[-1])}",
            mend="count each update",
        )
    if given and trial.repeatable:
        with trial.built() as collector:
            _expect_other_actions(batches[-1], take(collector, len(batches))[-1])
    lag = len(batches) - 2
    return "" if given and not lag else f"after {lag} batches" if given else "it has none: only versions were looked at"


def _versions(batch: TensorDictBase) -> list[int]:
    return sorted(set(batch["collector", "policy_version"].flatten().tolist()))


def _expect_other_actions(later: TensorDictBase, before: TensorDictBase) -> None:
    own = {path: leaf for path, leaf in flatten(before).items() if path != ("collector", "policy_version")}
    got = flatten(later)
    if all(torch.equal(leaf, got[path]) for path, leaf in own.items()):
        raise fail(
            "the batch after update_policy_weights_(params)",
            expected="other data",
            got="those of the old weights",
            mend="act with the params that were given last",
        )


def checkpoint(trial: CollectorTrial) -> None:
    """`load_state_dict` goes on with the weights and counts of `state_dict`, under ids not used before."""
    with trial.built() as collector:
        collector.update_policy_weights_()
        before = trial.take(collector)
        saved, frames = _through_a_file(collector.state_dict()), collector.frames
    runs = []
    for _ in range(2):
        with trial.built() as collector:
            collector.load_state_dict(saved)
            if collector.frames != frames:
                raise fail("frames after loading", expected=frames, got=collector.frames, mend="save and restore them")
            runs.append(trial.take(collector))
    wanted, got = _versions(before[-1]), _versions(runs[0][0])
    if got != wanted:
        raise fail("collector.policy_version after loading", expected=wanted, got=got, mend="save and restore it")
    expect_used_once([each for part in (before, runs[0]) for rows in lanes_of(part).values() for each in ids_of(rows)])
    expect_same_lanes(
        runs[1], runs[0], what="a second run from one state_dict", source="the first", mend="save key, counts, weights"
    )


def _through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def exception(trial: CollectorTrial) -> str | None:
    """After an exception in the environment the next batch begins new episodes, under new ids; or it is shut down."""
    given = trial.kwargs.get("create_env_fn")
    many = [Stumbles] * len(given) if isinstance(given, (list, tuple)) else Stumbles
    workers = len(many) if isinstance(many, list) else trial.kwargs.get("num_workers", 1)
    changes = {"create_env_fn": many, "policy": None, "frames_per_batch": 4 * workers, "create_env_kwargs": None}
    with trial.built(**changes) as collector:
        before = _until_it_stumbles(collector, limit=4)
        if before is None:
            raise fail("an exception in the environment", expected="raised", got="swallowed", mend="raise it")
        try:
            for _ in range(workers - 1):  # each worker's environment stumbles once
                before += _until_it_stumbles(collector, limit=1) or []
            after = take(collector, trial.batches)
        except ClosedError:
            return "an exception shuts it down"
    for lane, rows in lanes_of(after).items():
        expect_counters(rows)
        first = int(rows["collector", "step"][0, 0])
        if first:
            raise fail(f"lane {lane}, the first step after an exception", expected=0, got=first, mend="begin episodes")
    expect_used_once([each for part in (before, after) for rows in lanes_of(part).values() for each in ids_of(rows)])
    return None


def _until_it_stumbles(collector: Any, limit: int) -> list[Any] | None:
    """The batches before the exception; None where none came."""
    batches = []
    try:
        for _ in range(limit):
            batches += take(collector, 1)
    except Exception as error:
        if "stumbled" not in str(error):
            raise
        return batches
    return None


class _Postproc:
    """Notes what it is given, and marks it."""

    def __init__(self) -> None:
        self.masked: list[bool] = []

    def __call__(self, batch: Any) -> Any:
        self.masked.append(("collector", "mask") in batch.keys(True))
        batch["shown"] = torch.ones(batch.shape)
        batch["_hidden"] = torch.ones(batch.shape)
        return batch


def postproc(trial: CollectorTrial) -> None:
    """A batch is first split, then post-processed, then rid of keys that begin with an underscore."""
    process = _Postproc()
    with trial.built(postproc=process, split_trajs=True) as collector:
        (batch,) = take(collector, 1)
    if not all(process.masked) or not process.masked:
        raise fail("postproc", expected="a batch that is split already", got="one that is not", mend="split before")
    names = {path[0] for path in flatten(batch)}
    if "shown" not in names or "_hidden" in names:
        raise fail(
            "the delivered batch",
            expected="the key 'shown' that postproc set, and not '_hidden'",
            got=sorted(names),
            mend="deliver what postproc returned, without keys that begin with an underscore",
        )


def context(trial: CollectorTrial) -> None:
    """It is a context manager, which shuts it down."""
    with trial.built() as collector:
        with collector as entered:
            if entered is not collector:
                raise fail("`with` on it", expected="the collector itself", got=entered, mend="return self")
            take(collector, 1)
        _expect_closed(collector, "after its with block")


def shutdown(trial: CollectorTrial) -> None:
    """It can be shut down, twice, and says so when it is asked for more."""
    with trial.built() as collector:
        take(collector, 1)
        collector.shutdown()
        collector.shutdown()
        _expect_closed(collector, "after shutdown")


def _expect_closed(collector: Any, when: str) -> None:
    try:
        next(collector)
    except (ClosedError, StopIteration) as error:
        if isinstance(error, ClosedError):
            return
    raise fail(f"the next batch {when}", expected="ClosedError", got="none", mend="raise it")

"""What `check_collector` finds in the batches of a run."""

from __future__ import annotations

from typing import Any

import torch

from funcollect.testing.check_env import (
    expect_chained,
    expect_counters,
    expect_flags,
    expect_layout,
    expect_used_once,
)
from funcollect.testing.report import NotApplicableError, expect_equal, fail
from funcollect.tree import flatten
from tests.support.check_collector.collecting import CollectorTrial, expect_same_lanes, ids_of, lanes_of, take

SEED = "derive all randomness from the seed: the environments', the policy's, the workers'"


def layout(trial: CollectorTrial) -> None:
    """Every batch has the keys, shapes and dtypes of the contract, and is the caller's own."""
    for batch in trial.delivered:
        expect_layout(batch)
        if batch.shape != trial.delivered[0].shape:
            raise fail("a later batch", expected=trial.delivered[0].shape, got=batch.shape, mend="keep the shape")
    with trial.built() as collector:
        if next(iter(collector)).is_locked:
            raise fail("a batch", expected="unlocked, the caller's own", got="locked", mend="unlock it")


def counted(trial: CollectorTrial) -> None:
    """Frames are counted, at least `frames_per_batch` in each batch, rounded up to whole steps."""
    with trial.built() as collector:
        total = sum(batch.numel() for batch in take(collector, trial.batches))
        counts = {"frames": collector.frames, "stats()['frames']": collector.stats()["frames"]}
        asked, lanes = collector.frames_per_batch, len(lanes_of(trial.delivered))
        for name, value in counts.items():
            if value != total:
                raise fail(name, expected=f"{total}, as delivered", got=value, mend="count what is delivered")
        if not asked <= trial.frames < asked + lanes:
            raise fail(
                "the frames of a batch",
                expected=f"frames_per_batch={asked}, rounded up for {lanes} lanes",
                got=trial.frames,
                mend="collect ceil(frames_per_batch / lanes) steps",
            )


def trajectories(trial: CollectorTrial) -> None:
    """Over all batches and lanes, steps count from 0, ids are used once, flags agree and rows follow each other."""
    used: list[int] = []
    for rows in lanes_of(trial.delivered).values():
        expect_flags(rows)
        expect_counters(rows)
        expect_chained(rows)
        used += ids_of(rows)
    expect_used_once(used)


def total_frames(trial: CollectorTrial) -> None:
    """`total_frames` ends the run, with a whole last batch; -1 does not."""
    with trial.built(total_frames=trial.frames + 1) as collector:
        sizes = [batch.numel() for batch in collector]
        length = len(collector)
    if sizes != [trial.frames] * 2 or length != 2:
        raise fail(
            f"a run with total_frames={trial.frames + 1}",
            expected=f"two whole batches of {trial.frames} frames, and len 2",
            got=f"{sizes}, and len {length}",
            mend="end when frames >= total_frames, and not in the middle of a batch",
        )
    with trial.built(total_frames=-1) as collector:
        if len(take(collector, trial.batches)) < trial.batches:
            raise fail("a run with total_frames=-1", expected="no end", got="one", mend="end at total_frames only")
        try:
            length = len(collector)
        except TypeError:
            return
        raise fail("len of an endless collector", expected="TypeError", got=length, mend="raise it")


def broken_off(trial: CollectorTrial) -> None:
    """A loop that is broken off can be taken up again where it stood; nothing is lost."""
    with trial.built() as collector:
        batches = []
        for batch in collector:
            batches.append(batch.clone())
            break
        batches += trial.take(collector, batches)
    for rows in lanes_of(batches).values():
        expect_counters(rows)
        expect_chained(rows)
    if trial.repeatable:
        expect_same_lanes(
            batches, trial.delivered, what="a run broken off", source="the run in one loop", mend="keep its place"
        )


def seeds(trial: CollectorTrial) -> None:
    """The same seed gives the same data, another others; `set_seed` at the start is as building with it."""
    other = trial.seed + 1
    again, another = trial.run(seed=trial.seed), trial.run(seed=other)
    expect_same_lanes(again, trial.delivered, what="a second run", source=f"the one with seed={trial.seed}", mend=SEED)
    ours, theirs = lanes_of(another), lanes_of(trial.delivered)
    if all(_equal(theirs[lane], ours[lane]) for lane in ours.keys() & theirs.keys()):
        raise fail(f"the run with seed={other}", expected="other data", got=f"those of seed={trial.seed}", mend=SEED)
    with trial.built() as collector:
        following = collector.set_seed(other)
        reseeded = trial.take(collector)
    if not isinstance(following, int):
        raise fail("set_seed", expected="the next seed, an int", got=following, mend="return it")
    expect_same_lanes(
        reseeded, another, what=f"a run after set_seed({other})", source=f"the run built with seed={other}", mend=SEED
    )


def _equal(one: Any, two: Any) -> bool:
    ours, length = flatten(two), min(one.shape[1], two.shape[1])
    return all(torch.equal(leaf[:, :length], ours[path][:, :length]) for path, leaf in flatten(one).items())


def batch_memory(trial: CollectorTrial) -> None:
    """Whatever is written into a batch, later ones are the same; and later ones write into none."""
    if not trial.repeatable:
        raise NotApplicableError("make takes no seed")
    with trial.built() as collector:
        batches, held = [], []
        for batch in trial.enough(collector):
            batches.append(batch)
            held.append(batch.clone())
        for batch, kept in zip(batches, held, strict=True):
            _expect_kept(batch, kept)
    with trial.built() as collector:
        scribbled = []
        for batch in trial.enough(collector):
            scribbled.append(batch.clone())
            for leaf in flatten(batch).values():
                leaf.zero_()
    expect_same_lanes(
        scribbled,
        held,
        what="the run whose batches were zeroed",
        source="the run whose batches were left alone",
        mend="copy what is kept: a batch is the caller's own",
    )


def _expect_kept(batch: Any, kept: Any) -> None:
    expect_equal(
        batch.reshape(1, -1),
        kept.reshape(1, -1),
        what="a batch after later ones were collected (its rows in one lane)",
        source="the batch when it came",
        mend="write a slot again only when no view of it lives",
    )

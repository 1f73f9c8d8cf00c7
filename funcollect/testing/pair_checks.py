"""Checks for every environment with every policy: determinism, copies, and that nothing is shared with the outside."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from funcollect.core import api, saving
from funcollect.core.state import CollectorState
from funcollect.errors import ReplayError
from funcollect.testing.report import NotApplicableError, expect_equal, fail
from funcollect.testing.trial import Trial, by_lane, freed
from funcollect.tree import flatten

OWN_RANDOMNESS = (
    "draw from what is seeded: an environment from self.np_random, which reset(seed=...) seeds, a policy from its "
    "head's noise or its key"
)


def generators(trial: Trial) -> None:
    """No call changes the global generators of Torch, NumPy and Python."""
    before = _generators()
    with trial.started() as state:
        _expect_unmoved(before, "init")
        state, _ = api.rollout(trial.env, trial.policy, state, trial.steps)
        _expect_unmoved(before, "rollout")
        api.reset(trial.env, state)
        _expect_unmoved(before, "reset")


def _generators() -> dict[str, Any]:
    """The states of the global generators of Torch, NumPy and Python, in a form that can be compared."""
    name, words, *rest = np.random.get_state()
    return {
        "Torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": (name, np.asarray(words).tobytes(), *rest),
        "Python": random.getstate(),
    }


def _expect_unmoved(before: dict[str, Any], call: str) -> None:
    """Fail if a call, which the message names, has changed the global generators, whose states were `before`."""
    after = _generators()
    for name, state in before.items():
        if after[name] != state:
            raise fail(f"{name}'s global generator", expected="unmoved", got=f"moved by {call}", mend=OWN_RANDOMNESS)


def same_seed(trial: Trial) -> None:
    """The same seed gives the same bits twice."""
    what, source = "the second run", f"the first run with seed={trial.seed}"
    mend = OWN_RANDOMNESS + ", and keep nothing from before a reset"
    expect_equal(trial.run(trial.steps), trial.batch, what=what, source=source, mend=mend)


def cuts(trial: Trial) -> None:
    """How a run is cut into batches does not change its data."""
    lengths = [1, trial.third, 1, trial.third]
    got = trial.run(*lengths)
    what, source = f"the run cut into {lengths}", "the run in one piece"
    mend = (
        "keep what outlives a call in the state: simulators in rows that stay the same arrays, a policy in its "
        "recurrent state (buffers that it writes are reset with each batch); in JAX draw from the key, since NumPy's "
        "random numbers are drawn once, while JAX traces"
    )
    expect_equal(got, trial.batch[:, : got.shape[1]], what=what, source=source, mend=mend)


def batch_memory(trial: Trial) -> None:
    """Writing into a batch does not change later batches, and collecting does not change earlier ones."""
    with trial.started() as state:
        state, first = api.rollout(trial.env, trial.policy, state, trial.third)
        kept = by_lane(trial.env, first).clone()
        state, second = api.rollout(trial.env, trial.policy, state, trial.third)
        batches = [kept, by_lane(trial.env, second).clone()]
        what, source = "the first batch after the second was collected", "the same batch when it was returned"
        expect_equal(by_lane(trial.env, first), kept, what=what, source=source, mend="copy what goes into a batch")
        for leaf in (*flatten(first).values(), *flatten(second).values()):
            leaf.zero_()
        batches.append(trial.go_on(state, trial.third)[1])
    got = torch.cat(batches, 1)
    what, source = "the run whose batches were zeroed", "the run whose batches were left alone"
    mend = "copy what is kept: a batch belongs to the caller"
    expect_equal(got, trial.batch[:, : got.shape[1]], what=what, source=source, mend=mend)


def fork(trial: Trial) -> None:
    """A fork continues exactly as its source does, and neither affects the other."""
    _continue_as_source(trial, lambda state: api.fork(trial.env, state), "the fork")


def save(trial: Trial) -> None:
    """A state that is saved and loaded continues exactly as it would have, and saving does not affect it."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "state")

        def through_a_file(state: CollectorState) -> CollectorState:
            saving.save(path, state)
            return saving.load(path, trial.env, trial.policy)

        _continue_as_source(trial, through_a_file, "the state that was saved and loaded")


def _continue_as_source(trial: Trial, copied: Callable[[CollectorState], CollectorState], what: str) -> None:
    """Compare a copy of a state, and the state itself, with the run without a copy."""
    third, before = trial.third, _into_a_second_episode(trial)
    with trial.started() as state:
        state, _ = trial.go_on(state, before)
        try:
            twin = copied(state)
        except ReplayError as error:
            env = trial.env
            if env.backend != "host" or env.forking == "snapshot":
                raise
            if env.forking == "replay" and env.seeding == "episode":
                raise
            raise NotApplicableError(f"forking is {env.forking!r}, seeding is {env.seeding!r}") from error
        with freed(twin):
            _, other = trial.go_on(twin, third)
        _, own = trial.go_on(state, third)
    wanted = trial.batch[:, before : before + third]
    source = "the run without a copy"
    mend = (
        "let a step be a function of the episode's seed and actions (reset sets back all that a step changes), and a "
        "policy's call one of its state, which holds arrays; share nothing between environments"
    )
    for batch, which in ((other, what), (own, f"the source of {what}, which ran first")):
        expect_equal(batch, wanted, what=which, source=source, mend=mend)


def _into_a_second_episode(trial: Trial) -> int:
    """Steps after which a lane is past an end, if a third of the run is left then; else a third of the run's steps.

    A copy made there begins its episode in new simulators, and shows what the source has kept of an earlier one.
    """
    ends = trial.done.any(0).nonzero()[:, 0].tolist()
    before = max(trial.third, ends[0] + 2) if ends else trial.third
    return before if before + trial.third <= trial.steps else trial.third

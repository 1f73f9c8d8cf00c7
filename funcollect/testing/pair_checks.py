"""What holds for every environment with every policy: determinism, and nothing shared with the outside."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from funcollect.core import api
from funcollect.testing.compare import expect_equal
from funcollect.testing.report import fail
from funcollect.testing.trial import Trial, by_lane, release
from funcollect.tree import flatten

OWN_RANDOMNESS = (
    "draw from what is seeded: an environment from self.np_random, which reset(seed=...) seeds, a policy from its "
    "head's noise or its key"
)


def generators(trial: Trial) -> None:
    """Torch's, NumPy's and Python's global generators are as before after every call."""
    before = _generators()
    state = _unmoved(before, "init", lambda: api.init(trial.env, trial.policy, seed=trial.seed))
    try:
        length = trial.steps
        state, _ = _unmoved(before, "rollout", lambda: api.rollout(trial.env, trial.policy, state, length))
        state = _unmoved(before, "reset", lambda: api.reset(trial.env, state))
    finally:
        release(state)


def _generators() -> dict[str, Any]:
    name, words, *rest = np.random.get_state()
    return {
        "Torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": (name, np.asarray(words).tobytes(), *rest),
        "Python": random.getstate(),
    }


def _unmoved(before: dict[str, Any], what: str, call: Callable[[], Any]) -> Any:
    answer = call()
    after = _generators()
    for name, state in before.items():
        if after[name] != state:
            raise fail(f"{name}'s global generator", expected="unmoved", got=f"moved by {what}", mend=OWN_RANDOMNESS)
    return answer


def same_seed(trial: Trial) -> None:
    """The same seed gives the same bits twice."""
    expect_equal(
        trial.run(trial.steps),
        trial.batch,
        what="the second run",
        source=f"the first run with seed={trial.seed}",
        mend=OWN_RANDOMNESS + ", and keep nothing from before a reset",
    )


def cuts(trial: Trial) -> None:
    """How a run is cut into batches changes nothing."""
    lengths = [1, trial.third, 1, trial.third]
    got = trial.run(*lengths)
    expect_equal(
        got,
        trial.batch[:, : got.shape[1]],
        what=f"the run cut into {lengths}",
        source="the run in one piece",
        mend="keep what outlives a call in the state: simulators, with rows that stay; a policy's memory "
        "in its recurrent state (buffers that it writes begin anew with each batch)",
    )


def batch_memory(trial: Trial) -> None:
    """Whatever is written into a batch, later ones are the same; and later ones write into none."""
    batches, first, kept = [], None, None
    with trial.started() as state:
        for _ in range(2):
            state, batch = api.rollout(trial.env, trial.policy, state, trial.third)
            batches.append(by_lane(trial.env, batch).clone())
            if first is None:
                first, kept = batch, batch.clone()
            else:
                _expect_kept(trial, first, kept)
                _zero(batch)
        _zero(first)
        batches.append(trial.go_on(state, trial.third)[1])
    got = torch.cat(batches, 1)
    expect_equal(
        got,
        trial.batch[:, : got.shape[1]],
        what="the run whose batches were zeroed",
        source="the run whose batches were left alone",
        mend="copy what is kept: a batch is the caller's own",
    )


def _expect_kept(trial: Trial, batch: TensorDict, kept: TensorDict | None) -> None:
    expect_equal(
        by_lane(trial.env, batch),
        by_lane(trial.env, kept if kept is not None else batch),
        what="the first batch after the second was collected",
        source="the same batch when it came",
        mend="copy what goes into a batch",
    )


def _zero(batch: Any) -> None:
    for leaf in flatten(batch).values():
        leaf.zero_()

"""What `check_policy` finds by giving a policy other weights."""

from __future__ import annotations

from typing import Any

import torch

from funcollect.testing.compare import bits_differ, expect_equal
from funcollect.testing.parameters import other_weights, own_weights
from funcollect.testing.policies.queries import PolicyTrial
from funcollect.testing.report import NotApplicableError, fail
from funcollect.tree import flatten

_SCALES = (0.5, 3.0, 20.0)  # an argmax may not move at once


def params_argument(trial: PolicyTrial) -> None:
    """`params=` acts instead of the policy's own, which stay as they are; its own, passed, change nothing."""
    weights = _weights(trial)
    expect_equal(
        trial.run(trial.steps, params=trial.policy.params),
        trial.batch,
        what="the run with params=policy.params",
        source="the run with params=None",
        mend="let prepare(None) stand for the policy's own",
    )
    if not any(_shows(trial, params=other_weights(trial.policy, scale)) for scale in _SCALES):
        raise fail(
            "the run with other params",
            expected="other outputs",
            got="the same",
            mend="use the params that the call is given, not those that it was built with",
        )
    _expect_unmoved(trial, weights)


def _weights(trial: PolicyTrial) -> dict[str, torch.Tensor]:
    weights = own_weights(trial.policy)
    if not any(value.is_floating_point() for value in weights.values()):
        raise NotApplicableError("it has no parameters")
    return weights


def _shows(trial: PolicyTrial, **options: Any) -> bool:
    ours = flatten(trial.run(trial.steps, **options))
    return any(bool(bits_differ(leaf, ours[path]).any()) for path, leaf in flatten(trial.batch).items())


def _expect_unmoved(trial: PolicyTrial, weights: dict[str, torch.Tensor]) -> None:
    for name, value in own_weights(trial.policy).items():
        if not torch.equal(value, weights[name]):
            raise fail(f"the policy's own {name}", expected="unchanged", got="another value", mend="write none of it")


def state_dict(trial: PolicyTrial) -> None:
    """`load` takes what `state_dict` gave, and the policy acts as it did then."""
    policy: Any = trial.policy
    weights = _weights(trial)
    if not hasattr(policy, "state_dict") or not hasattr(policy, "load"):
        raise NotApplicableError("it has no state_dict and load")
    saved, whole = policy.state_dict(), trial.batch
    try:
        for scale in _SCALES:
            policy.load(other_weights(policy, scale))
            if moved := _shows(trial):
                break
    finally:
        policy.load(saved)
    if not moved:
        raise fail("the run after load", expected="other outputs", got="the same", mend="let load take its argument")
    _expect_unmoved(trial, weights)
    expect_equal(
        trial.run(trial.steps),
        whole,
        what="the run after load(state_dict())",
        source="the run before",
        mend="let state_dict hold a copy of everything that load needs",
    )

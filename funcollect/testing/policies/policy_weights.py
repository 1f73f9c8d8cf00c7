"""Checks of `check_policy` that give a policy other weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.policies.weights import state_dict_of
from funcollect.protocols import Policy
from funcollect.testing.compare import bits_differ, expect_bits, expect_equal
from funcollect.testing.policies.policy_trial import PolicyTrial
from funcollect.testing.report import NotApplicableError, fail
from funcollect.tree import flatten

_SCALES = (0.5, 3.0, 20.0)  # tried in turn, since a small change of the weights may not change an argmax


def own_weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of the policy's own parameters and buffers, by name; whatever its `state_dict` returns."""
    leaves = state_dict_of(policy.params, policy.backend)
    return {f"params{name}": leaf for name, leaf in leaves.items()}


def other_weights(policy: Policy, scale: float) -> dict[str, Tensor]:
    """The policy's `state_dict` with noise of standard deviation `scale`; its buffers are unchanged."""
    module = policy.module if isinstance(policy, TorchBacked) else None
    kept = {name for name, _ in module.named_buffers()} if isinstance(module, nn.Module) else set()
    generator = torch.Generator().manual_seed(0)

    def moved(leaf: Tensor) -> Tensor:
        return leaf + scale * torch.randn(leaf.shape, generator=generator).to(leaf)

    return {
        name: moved(leaf) if leaf.is_floating_point() and name not in kept else leaf
        for name, leaf in policy.state_dict().items()
    }


def params_argument(trial: PolicyTrial) -> None:
    """`params=` replaces the policy's own parameters in a rollout, and leaves those unchanged."""
    weights = _trainable_weights(trial)
    got = trial.run(trial.steps, params=trial.policy.params)
    mend = "let prepare(None) stand for the policy's own"
    what, source = "the run with params=policy.params", "the run with params=None"
    expect_equal(got, trial.batch, what=what, source=source, mend=mend)
    if not any(_changes_outputs(trial, params=other_weights(trial.policy, scale)) for scale in _SCALES):
        mend = "use the params that the call is given, not those of the constructor"
        raise fail("the run with other params", expected="other outputs", got="the same", mend=mend)
    expect_unchanged(trial, weights)


def _trainable_weights(trial: PolicyTrial) -> dict[str, Tensor]:
    """The policy's `own_weights`; NotApplicableError if none of them is floating."""
    weights = own_weights(trial.policy)
    if not any(value.is_floating_point() for value in weights.values()):
        raise NotApplicableError("it has no parameters")
    return weights


def _changes_outputs(trial: PolicyTrial, **options: Any) -> bool:
    """Whether a run with these options of `rollout`, and with the present weights, differs from `trial.batch`."""
    ours = flatten(trial.run(trial.steps, **options))
    return any(bool(bits_differ(leaf, ours[path]).any()) for path, leaf in flatten(trial.batch).items())


def expect_unchanged(trial: PolicyTrial, weights: dict[str, Tensor]) -> None:
    """Fail if the policy's own parameters or buffers no longer have the bits of `weights`, an earlier copy."""
    mend = "let a rollout write to no weight or buffer, and load restore all of them"
    for name, value in own_weights(trial.policy).items():
        expect_bits(value, weights[name], f"the policy's own {name}", mend)


def state_dict(trial: PolicyTrial) -> None:
    """After `load` of an earlier `state_dict`, the policy acts as it did then."""
    policy, weights = trial.policy, _trainable_weights(trial)
    saved, before = policy.state_dict(), trial.batch
    try:
        for scale in _SCALES:
            policy.load(other_weights(policy, scale))
            if changed := _changes_outputs(trial):
                break
    finally:
        policy.load(saved)
    if not changed:
        raise fail("the run after load", expected="other outputs", got="the same", mend="let load use its argument")
    expect_unchanged(trial, weights)
    what = "the run after load(state_dict())"
    mend = "let state_dict hold a copy of everything that load needs"
    expect_equal(trial.run(trial.steps), before, what=what, source="the run before", mend=mend)

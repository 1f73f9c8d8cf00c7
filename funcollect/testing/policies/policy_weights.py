"""Checks of `check_policy` that give a policy other weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import Policy
from funcollect.testing.compare import bits_differ, expect_equal, to_tensor
from funcollect.testing.policies.policy_trial import PolicyTrial
from funcollect.testing.report import NotApplicableError, fail
from funcollect.tree import NAMESPACE, flatten, nest

_SCALES = (0.5, 3.0, 20.0)  # a small change of the weights may not change an argmax


def own_weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of the policy's own parameters and buffers, by name."""
    params = policy.params
    if params is None:
        return {}
    if isinstance(params, TensorDictBase):
        return {".".join(path): leaf.detach().clone() for path, leaf in flatten(params).items()}
    if policy.backend == "jax":
        tree = import_jax().tree_util
        return {tree.keystr(path): to_tensor(leaf) for path, leaf in tree.tree_leaves_with_path(params)}
    paths, leaves, _ = optree.tree_flatten_with_path(params, namespace=NAMESPACE)
    return {".".join(map(str, path)): to_tensor(leaf) for path, leaf in zip(paths, leaves, strict=True)}


def other_weights(policy: Any, scale: float) -> Any:
    """The policy's own parameters with noise of standard deviation `scale`, and its buffers unchanged."""
    generator = np.random.default_rng(0)

    def moved(leaf: Any) -> Any:
        array = to_tensor(leaf).cpu().numpy()
        if array.dtype.kind != "f":
            return leaf
        drawn = (array + scale * generator.standard_normal(array.shape)).astype(array.dtype)
        return torch.from_numpy(drawn).to(leaf.device) if isinstance(leaf, Tensor) else drawn

    if isinstance(policy.params, TensorDictBase):
        module = getattr(policy, "module", None)
        buffers = {name for name, _ in module.named_buffers()} if isinstance(module, torch.nn.Module) else ()
        given = flatten(policy.params).items()
        return nest({path: leaf if ".".join(path) in buffers else moved(leaf) for path, leaf in given})
    if policy.backend == "jax":
        return import_jax().tree.map(moved, policy.params)
    return optree.tree_map(moved, policy.params, namespace=NAMESPACE)


def params_argument(trial: PolicyTrial) -> None:
    """`params=` replaces the policy's own parameters in a rollout, and leaves those unchanged."""
    weights = _trainable_weights(trial)
    expect_equal(
        trial.run(trial.steps, params=trial.policy.params),
        trial.batch,
        what="the run with params=policy.params",
        source="the run with params=None",
        mend="let prepare(None) stand for the policy's own",
    )
    if not any(_changes_outputs(trial, params=other_weights(trial.policy, scale)) for scale in _SCALES):
        mend = "use the params that the call is given, not those of the constructor"
        raise fail("the run with other params", expected="other outputs", got="the same", mend=mend)
    _expect_unchanged(trial, weights)


def _trainable_weights(trial: PolicyTrial) -> dict[str, Tensor]:
    weights = own_weights(trial.policy)
    if not any(value.is_floating_point() for value in weights.values()):
        raise NotApplicableError("it has no parameters")
    return weights


def _changes_outputs(trial: PolicyTrial, **options: Any) -> bool:
    ours = flatten(trial.run(trial.steps, **options))
    return any(bool(bits_differ(leaf, ours[path]).any()) for path, leaf in flatten(trial.batch).items())


def _expect_unchanged(trial: PolicyTrial, weights: dict[str, Tensor]) -> None:
    for name, value in own_weights(trial.policy).items():
        if not torch.equal(value, weights[name]):
            raise fail(f"the policy's own {name}", expected="unchanged", got="another value", mend="do not write to it")


def state_dict(trial: PolicyTrial) -> None:
    """After `load` of an earlier `state_dict`, the policy acts as it did then."""
    policy: Any = trial.policy
    weights = _trainable_weights(trial)
    if not hasattr(policy, "state_dict") or not hasattr(policy, "load"):
        raise NotApplicableError("it has no state_dict and load")
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
    _expect_unchanged(trial, weights)
    expect_equal(
        trial.run(trial.steps),
        before,
        what="the run after load(state_dict())",
        source="the run before",
        mend="let state_dict hold a copy of everything that load needs",
    )

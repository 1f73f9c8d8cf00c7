"""The check of log-probabilities, which recomputes them from recorded rows with Torch's own distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcollect.core.evaluate_actions import evaluate_actions
from funcollect.interop.bridge import to_jax
from funcollect.interop.jax_setup import import_jax
from funcollect.keys import key_from_seed
from funcollect.policies.actors.actor import split_answer
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy, JaxPolicy
from funcollect.policies.numerics import TORCH
from funcollect.policies.torch_backed import TorchBacked
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.specs import ActionSpec, assemble
from funcollect.testing.compare import first_row, shown, spot, to_tensor
from funcollect.testing.policies.policy_trial import PolicyTrial, recurrent_of
from funcollect.testing.report import NotApplicableError, fail
from funcollect.tree import select, to_tensordict

HeadOutputs = tuple[Tensor, ...]  # the parameters of the distribution, each [P, T, ...]

td: Any = torch.distributions

_SATURATED = 0.999  # beyond this value of the tanh, a float32 action is too coarse to recover its argument


def log_probs(trial: PolicyTrial) -> None:
    """Log-probabilities equal those recomputed from the recorded observations and actions."""
    if "action_log_prob" not in trial.batch:
        raise NotApplicableError("it records no action_log_prob")
    wanted = _expected(trial)
    got = trial.batch["action_log_prob"].double().reshape(wanted.shape)
    wrong = ~torch.isclose(got, wanted, rtol=1e-2, atol=1e-2) & wanted.isfinite()
    if place := first_row(wrong):
        mend = (
            "score the recorded action under the weights and the observation that chose it; call module.eval() if "
            "there is dropout or batch norm"
        )
        where = spot(*place, ("action_log_prob",))
        raise fail(where, expected=shown(wanted[place]), got=shown(got[place]), mend=mend)


def evaluation(trial: PolicyTrial) -> None:
    """`evaluate_actions` returns the recorded log-probabilities."""
    if "action_log_prob" not in trial.batch:
        raise NotApplicableError("it records no action_log_prob")
    policy, batch = trial.policy, trial.batch
    given = to_jax(batch) if isinstance(policy, FunctionPolicy) else batch
    start = policy.init(key_from_seed(trial.seed), trial.lanes)
    try:
        with torch.no_grad():
            now = evaluate_actions(policy, None, given, env=trial.env, policy_state=start)
    except TypeError as error:
        raise NotApplicableError(str(error)) from error
    wanted, got = (to_tensor(each["action_log_prob"]).double() for each in (batch, now))
    wrong = ~torch.isclose(got, wanted.reshape(got.shape), rtol=1e-3, atol=1e-3)
    if place := first_row(wrong):
        mend = "let log_prob of the head depend on its arguments only, and record return the keys that sample returns"
        where = f"evaluate_actions, {spot(*place[:2], ('action_log_prob',))}"
        raise fail(where, expected=shown(wanted[place]), got=shown(got[place]), mend=mend)


def _expected(trial: PolicyTrial) -> Tensor:
    """The log-probabilities, recomputed: [P, T] float64, NaN where that is not possible."""
    policy: Any = trial.policy
    if isinstance(policy, (TorchPolicy, JaxPolicy)):
        if isinstance(policy, JaxPolicy) and policy.takes_key:
            raise NotApplicableError("the function draws with its key")
        density = _DENSITIES.get(policy.head.name if policy.head else "")
        if density is None:
            raise NotApplicableError(f"how {policy.head!r} scores is not known here")
        return density(_parameters(trial), trial.batch["action"], trial.env.action_spec, policy.head)
    module: Any = policy.module if isinstance(policy, TorchBacked) else None
    if not hasattr(module, "get_dist"):
        raise NotApplicableError("it has neither a head nor get_dist")
    read = [key if isinstance(key, tuple) else (key,) for key in module.in_keys]  # including hidden states and is_init
    leaves = {path: trial.batch[path] for path in read}
    flat = to_tensordict({path: leaf.flatten(0, 1) for path, leaf in leaves.items()}, (trial.batch.numel(),))
    with torch.no_grad():
        scored: Tensor = module.get_dist(flat).log_prob(trial.batch["action"].flatten(0, 1))
    return scored.double().reshape(trial.batch.shape)


def _parameters(trial: PolicyTrial) -> HeadOutputs:
    """The parameters of the head's distribution, recomputed step by step with the policy's own module."""
    policy: Any = trial.policy
    initial = state = recurrent_of(policy.init(key_from_seed(trial.seed), trial.lanes))
    steps = []
    for t in range(trial.steps):
        row = trial.batch[:, t]
        leaves = {leaf.path: row[leaf.path].clone() for leaf in trial.env.observation_leaves}
        observation = assemble(trial.env.observation_space, leaves)
        if state is None:
            answer = _call(policy, observation)
        else:
            begun = row["collector", "step"] == 0
            answer, state = _call(policy, observation, select(begun, _tensors(initial), _tensors(state)))
        parsed = policy.head.parse(TORCH, split_answer(answer, policy.head)[0], trial.env.action_spec)
        steps.append(tuple(each.double() for each in parsed))
    return tuple(torch.stack(column, 1) for column in zip(*steps, strict=True))


def _call(policy: TorchPolicy | JaxPolicy, *inputs: Any) -> Any:
    """Call the policy's module or function on an observation and, if it is recurrent, its state; return tensors."""
    if isinstance(policy, JaxPolicy):
        arrays = [import_jax().tree.map(np.asarray, each) for each in inputs]
        return _tensors(policy.apply(policy.params, *arrays))
    with torch.no_grad():
        return policy.module(*inputs)


def _tensors(tree: Any) -> Any:
    """A pytree of arrays, of Torch, JAX or NumPy, as one of tensors."""
    return import_jax().tree.map(to_tensor, tree)


def _choices(parameters: HeadOutputs, action: Tensor, spec: ActionSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """For each component of a discrete action, the head's outputs [P, T, choices] and the chosen index [P, T]."""
    sizes = list(spec.categories)
    if spec.one_hot:
        indices = [part.argmax(-1) for part in torch.split(action, sizes, -1)]
    else:
        indices = list((action - torch.as_tensor(spec.start)).reshape(*action.shape[:2], -1).unbind(-1))
    return zip(torch.split(parameters[0], sizes, -1), indices, strict=True)


def _categorical(parameters: HeadOutputs, action: Tensor, spec: ActionSpec, head: Any) -> Tensor:
    """Log-probabilities [P, T] of discrete actions whose components are drawn from a softmax over logits."""
    choices = _choices(parameters, action, spec)
    return torch.stack([td.Categorical(logits=logits).log_prob(index) for logits, index in choices]).sum(0)


def _epsilon_greedy(parameters: HeadOutputs, action: Tensor, spec: ActionSpec, head: Any) -> Tensor:
    """Log-probabilities [P, T] of the best choices or, with the probability ``head.epsilon``, uniform ones."""
    scores = []
    for values, index in _choices(parameters, action, spec):
        best = (values.argmax(-1) == index).double()
        scores.append((best * (1 - head.epsilon) + head.epsilon / values.shape[-1]).log())
    return torch.stack(scores).sum(0)


def _tanh_normal(parameters: HeadOutputs, action: Tensor, spec: ActionSpec, head: Any) -> Tensor:
    """Log-densities [P, T] of the tanh of a normal variable, scaled to the space's bounds; NaN close to a bound."""
    space: Any = spec.space
    low, high = (torch.as_tensor(bound).double() for bound in (space.low, space.high))
    half = (high - low) / 2
    unit = (action.double() - low) / half - 1
    score = td.Normal(*parameters).log_prob(unit.atanh()) - (1 - unit.square()).log() - half.log()
    return _summed(torch.where(unit.abs() < _SATURATED, score, torch.nan))


def _summed(score: Tensor) -> Tensor:
    """The sum over an action's components: [P, T] from [P, T, ...], also if there are no more dimensions."""
    return score.reshape(*score.shape[:2], -1).sum(-1)


_DENSITIES: dict[str, Callable[[HeadOutputs, Tensor, ActionSpec, Any], Tensor]] = {
    "categorical": _categorical,
    "epsilon_greedy": _epsilon_greedy,
    "normal": lambda parameters, action, spec, head: _summed(td.Normal(*parameters).log_prob(action.double())),
    "tanh_normal": _tanh_normal,
}

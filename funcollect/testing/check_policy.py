"""`check_policy`, and the checks that only policies need."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import optree
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

from funcollect.core.api import check_pair
from funcollect.core.evaluate_actions import evaluate_actions
from funcollect.envs.registry import make_env
from funcollect.interop.bridge import to_jax
from funcollect.keys import key_from_seed
from funcollect.policies.as_policy import as_policy
from funcollect.policies.checks import check_action
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.policies.weights import state_dict_of
from funcollect.protocols import Policy
from funcollect.specs import ExplorationType
from funcollect.testing import pair_checks
from funcollect.testing.report import (
    Check,
    NotApplicableError,
    Report,
    bits_differ,
    digits,
    expect_bits,
    expect_equal,
    expect_rows,
    fail,
    first_row,
    numbers_differ,
    run_checks,
    to_tensor,
)
from funcollect.testing.trial import PolicyTrial, check_run, recurrent_of
from funcollect.tree import NAMESPACE, flatten

DETERMINISTIC, RANDOM = ExplorationType.DETERMINISTIC, ExplorationType.RANDOM
DRAWS = "it draws by itself, whatever the exploration type"
_SCALES = (0.5, 3.0, 20.0)  # tried in turn, since a small change of the weights may not change an argmax
_MOST_ACTIONS = 64  # whose probabilities are added up
_CLOSE = 1e-3  # tolerance of log-probabilities


def suits(trial: PolicyTrial) -> None:
    """It is a policy, and suits these spaces."""
    check_pair(trial.env, trial.policy)


def answers(trial: PolicyTrial) -> None:
    """Actions have the shape and dtype of their space; all outputs have a row per lane, and always the same keys."""
    spec, wanted = trial.env.action_spec, None
    for rows in trial.seen:
        for way in (RANDOM, DETERMINISTIC):
            columns = flatten(trial.query(rows, steps=2, exploration_type=way).columns)
            check_action(columns[("action",)][:, 0], spec, trial.count)
            for path, column in columns.items():
                if column.shape[:2] != (trial.count, 2):
                    expected = f"[{trial.count}, ...], a row for each environment"
                    got = list(column.shape[:1] + column.shape[2:]) if column.ndim > 1 else []
                    mend = "return [P, ...] for P environments"
                    raise fail(f"the output {'.'.join(path)}", expected=expected, got=got, mend=mend)
            kinds = {".".join(path): (list(each.shape[2:]), each.dtype) for path, each in columns.items()}
            if wanted not in (None, kinds):
                where = f"the outputs with exploration_type={way.name}"
                raise fail(where, expected=wanted, got=kinds, mend="keep keys, shapes and dtypes the same")
            wanted = kinds


def acts(trial: PolicyTrial) -> str | None:
    """It acts in the environment without NaN; discrete actions lie in the space."""
    trial.run(*[1] * 4, trial.steps, exploration_type=DETERMINISTIC)
    space, action = trial.env.action_space, trial.batch["action"]
    if not isinstance(space, spaces.Box):
        return None  # every rollout checks discrete actions
    numbers = action.cpu().numpy()
    outside = ((numbers < space.low) | (numbers > space.high)).reshape(*numbers.shape[:2], -1).any(-1)
    if not outside.any():
        return None
    return f"{np.sum(outside)} of {outside.size} actions are outside the Box: the environment has to clip them"


def pure(trial: PolicyTrial) -> None:
    """It modifies neither its observation nor its own parameters and buffers, and remembers nothing by itself."""
    before, weights = trial.seen[0], own_weights(trial.policy)
    start = trial.policy.init(key_from_seed(trial.seed), trial.count)
    first = trial.query(exploration_type=RANDOM, policy_state=_copied(start))
    for path, rows in before.items():
        what = f"the observation {'.'.join(path)} after the policy was called"
        expect_bits(first.rows[path], rows, what, "copy it before writing")
    trial.query(trial.seen[1], exploration_type=RANDOM, steps=2)
    trial.run(trial.steps)
    expect_unchanged(trial, weights)
    again = trial.query(exploration_type=RANDOM, policy_state=_copied(start))
    what, source = "the second of two equal calls", "the first, with the same observation, state and noise"
    mend = "keep nothing in self: what a policy remembers is its recurrent state, and its randomness is given"
    expect_equal(again.columns, first.columns, what=what, source=source, mend=mend)


def _copied(tree: Any) -> Any:
    """A pytree with copies of its tensors, since a policy may write into the state that it is given."""
    return optree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree, namespace=NAMESPACE, none_is_leaf=True
    )


def deterministic(trial: PolicyTrial) -> None:
    """In deterministic mode, its outputs do not depend on the seed."""
    if place := _seed_changes(trial, noise=True):
        if not _knows_exploration(trial.policy):
            raise NotApplicableError(DRAWS)
        where = f"{place}, with exploration_type=DETERMINISTIC"
        mend = "take the mode if exploration_type says so; call module.eval() if there is dropout"
        raise fail(where, expected="the same for every seed", got="another for another seed", mend=mend)


def _seed_changes(trial: PolicyTrial, *, noise: bool) -> str:
    """The first row and key of the outputs that change with the seed, as text; empty if none changes.

    The seed is that of the policy's own draws and, with `noise`, also that of the noise for its head.
    """
    key, one = key_from_seed(trial.seed), flatten(trial.query().columns)
    for shift in range(1, 9):  # with few choices and rows, two seeds may draw the same
        other = key_from_seed(trial.seed + shift)
        two = flatten(trial.query(key=other, noise_key=other if noise else key).columns)
        for path, column in one.items():
            if place := first_row(numbers_differ(column, two[path])):
                return f"row {place[0]}, {'.'.join(path)}"
    return ""


def _knows_exploration(policy: Policy) -> bool:
    """Whether the policy can read the exploration type where it draws, and so take the mode instead."""
    if isinstance(policy, RandomPolicy):
        return False
    if isinstance(policy, FunctionPolicy):
        return policy.head is not None and not policy.takes_key
    if not isinstance(policy, TorchBacked) or policy.head is not None:
        return True
    module = policy.module
    return isinstance(module, nn.Module) and any(
        isinstance(each, ProbabilisticTensorDictModule) for each in module.modules()
    )


def rows_apart(trial: PolicyTrial) -> None:
    """Its outputs for a row depend on that row only, not on the other rows or on its position."""
    if _seed_changes(trial, noise=False):
        raise NotApplicableError(DRAWS)
    rows, others = trial.seen
    mend = "let no operation mix the batch dimension; batch norm in training mode does: call module.eval()"
    wanted = trial.query().columns
    beside = {path: torch.cat((rows[path][:1], others[path][1:])) for path in rows}
    order = torch.arange(trial.count).flip(0)
    turned = {path: value[order] for path, value in rows.items()}
    for what, got in (
        ("the output beside other rows", trial.query(beside).columns[:1]),
        ("the outputs for the rows in reverse order", trial.query(turned, order=order).columns[order]),
    ):
        source = "the output for the same row (here called a lane) before"
        expect_equal(got, wanted[: len(got)], what=what, source=source, mend=mend, differs=numbers_differ)


def recurrent(trial: PolicyTrial) -> None:
    """The recurrent state is reset in a lane that begins an episode, and only there."""
    state = recurrent_of(trial.policy.init(key_from_seed(trial.seed), trial.count))
    if not optree.tree_leaves(state, namespace=NAMESPACE):
        raise NotApplicableError("it has no recurrent state")
    if _seed_changes(trial, noise=False):
        raise NotApplicableError(DRAWS)
    once, twice, restarted = (
        [to_tensor(leaf) for leaf in optree.tree_leaves(output.recurrent, namespace=NAMESPACE)]
        for output in (trial.query(), trial.query(steps=2), trial.query(steps=2, restart=[0]))
    )
    for number, (one, two, got) in enumerate(zip(once, twice, restarted, strict=True)):
        wanted = torch.cat((one[:1], two[1:])).unsqueeze(1)
        if place := first_row(numbers_differ(got.unsqueeze(1), wanted)):
            where = f"lane {place[0]}, leaf {number} of the recurrent state after a restart of lane 0"
            how = "begun anew, as after the episode's first step" if place[0] == 0 else "going on, as in its episode"
            mend = "let restart(lanes) give the initial state to these lanes, with the batch dimension first"
            raise fail(where, expected=f"{how}, {digits(wanted[place])}", got=digits(got[place[0]]), mend=mend)


def log_probs(trial: PolicyTrial) -> None:
    """Log-probabilities are those of `evaluate_actions`; over all discrete actions, probabilities add up to one."""
    wanted = _scores(trial, trial.batch)
    got = trial.batch["action_log_prob"].double().cpu().reshape(wanted.shape)
    mend = (
        "score the recorded action under the weights and the observation that chose it (call module.eval() if there is "
        "dropout or batch norm), let log_prob of the head depend on its arguments only, and let record return the keys "
        "that sample returns"
    )
    wrong = ~torch.isclose(got, wanted, rtol=_CLOSE, atol=_CLOSE)
    expect_rows(wrong, ("action_log_prob",), got, wanted, mend, note=", by evaluate_actions")
    if 1 <= math.prod(trial.env.action_spec.categories or (0,)) <= _MOST_ACTIONS:
        _expect_normalised(trial)


def _expect_normalised(trial: PolicyTrial) -> None:
    """Fail unless the probabilities of all actions, in the run's first rows, add up to one."""
    spec = trial.env.action_spec
    first = trial.batch[:, :1].clone()
    total = torch.zeros(first.shape, dtype=torch.float64)
    for chosen in itertools.product(*map(range, spec.categories)):
        if spec.one_hot:
            action = torch.cat([torch.eye(size)[one] for size, one in zip(spec.categories, chosen, strict=True)])
        else:
            action = torch.as_tensor(np.reshape(chosen, spec.start.shape) + spec.start)
        first["action"] = action.to(first["action"]).expand_as(first["action"])
        total += _scores(trial, first).exp()
    mend = "let log_prob of the head return the log of a probability, normalised over all actions"
    expect_rows((total - 1).abs() > _CLOSE, ("the sum of all actions' probabilities",), total, "1.0", mend)


def _scores(trial: PolicyTrial, batch: TensorDict) -> Tensor:
    """The log-probabilities of the actions of a batch [P, T], from the run's first step on: [P, T] float64."""
    policy = trial.policy
    if "action_log_prob" not in batch:
        raise NotApplicableError("it records no action_log_prob")
    start = policy.init(key_from_seed(trial.seed), trial.lanes)
    given = to_jax(batch) if isinstance(policy, FunctionPolicy) else batch
    try:
        with torch.no_grad():
            now = evaluate_actions(policy, None, given, env=trial.env, policy_state=start)
    except TypeError as error:
        raise NotApplicableError(str(error)) from error
    return to_tensor(now["action_log_prob"]).double().cpu().reshape(batch.shape)


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


CHECKS: tuple[Check[PolicyTrial], ...] = (
    suits,
    answers,
    acts,
    pair_checks.generators,
    pure,
    pair_checks.same_seed,
    pair_checks.cuts,
    pair_checks.batch_memory,
    pair_checks.save,
    deterministic,
    rows_apart,
    recurrent,
    log_probs,
    params_argument,
    state_dict,
)


def check_policy(policy: Any, env: Any, *, steps: int = 40, seed: int = 0, **kwargs: Any) -> Report:
    """Check that a policy keeps the contract, in an environment that passes `check_env`.

    Args:
        policy: a `Policy`, or anything that a collector accepts as one. Its weights are changed, and then restored.
        env: an `Env`, or anything that `make_env` accepts.
        steps: T, the number of steps of a run; some episodes should end within it.
        seed: the seed of the runs.
        **kwargs: arguments of `make_env`, such as ``num_envs=3``.

    Returns:
        The report; `print` shows one line for each check.

    Raises:
        CheckError: at the first check that fails, with the place, the expectation, the value and the fix.
        TypeError, ValueError: if no policy or environment can be made of the arguments.

    >>> import torch, funcollect as fc
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> "log_probs" in check_policy(policy, "CartPole-v1", num_envs=2).passed
    True
    """
    check_run(steps, seed)
    made = make_env(env, **kwargs)
    trial = PolicyTrial(env=made, policy=as_policy(policy, made), steps=steps, seed=seed)
    return run_checks(f"{type(trial.policy).__name__} in {made!r}", CHECKS, trial)

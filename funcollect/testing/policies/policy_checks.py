"""Checks of `check_policy` that call the policy on chosen rows: shapes, purity, independent rows, recurrent state."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
from gymnasium import spaces
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

from funcollect.core.api import check_pair
from funcollect.keys import key_from_seed
from funcollect.policies.actors.checks import check_action
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_backed import TorchBacked
from funcollect.protocols import Policy
from funcollect.specs import ExplorationType
from funcollect.testing.compare import expect_bits, expect_equal, first_row, numbers_differ, shown, to_tensor
from funcollect.testing.policies.policy_trial import PolicyTrial, recurrent_of
from funcollect.testing.policies.policy_weights import expect_unchanged, own_weights
from funcollect.testing.report import NotApplicableError, fail
from funcollect.tree import NAMESPACE, flatten

DETERMINISTIC, RANDOM = ExplorationType.DETERMINISTIC, ExplorationType.RANDOM
DRAWS = "it draws by itself, whatever the exploration type"


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
            raise fail(where, expected=f"{how}, {shown(wanted[place])}", got=shown(got[place[0]]), mend=mend)

"""Numbers of a policy that may change during a run, such as epsilon, and their values in one rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from funcollect.arguments import check_function
from funcollect.messages import shown
from funcollect.policies.base import HeadedPolicy
from funcollect.policies.heads.head import Head
from funcollect.policies.tensordict_modules.calling import carries_action
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.protocols import Policy
from funcollect.tree import Path

EXPLORATION: Path = ("collector", "exploration")  # a batch's key of the values
NO_VALUES: Mapping[str, Any] = MappingProxyType({})
Value = float | Callable[[int], float]  # a number, or a function of the frames of the whole run so far


def check_values(exploration: Any) -> None:
    """Raise TypeError unless `exploration` is a dict from names to values."""
    if not isinstance(exploration, Mapping) or not all(isinstance(name, str) for name in exploration):
        raise TypeError(
            f"exploration is {shown(exploration)}, expected a dict from names to numbers: pass for example "
            '{"epsilon": 0.1}, or {"epsilon": lambda frames: max(0.05, 1 - frames / 1e5)}'
        )


def check_given(policy: Policy, given: Mapping[str, Any]) -> None:
    """Raise what `exploration_values` would raise, without calling the functions among the values."""
    constants = dict(given)
    for name, value in given.items():
        if callable(value):
            check_function(f"exploration[{name!r}]", value, "a function of the number of frames", 1)
            constants[name] = policy.exploration.get(name, 0.0)
    exploration_values(policy, constants, lambda: 0)


def exploration_values(
    policy: Policy, given: Mapping[str, Any], frames: Callable[[], int] | None = None
) -> Mapping[str, Any]:
    """Return the values of `Policy.exploration`: the `given` ones, and the policy's own for all other names.

    `given` are numbers, or functions of the number of frames, which `frames` returns; it may wait for a device, so it
    is only called if a value is a function. Values become Python numbers, rounded to float32. In traced code they are
    arrays, and `frames` is None. TypeError for a value that is no number, ValueError for one out of its range, and for
    a name that the policy does not have.
    """
    own = policy.exploration
    if not own and not given:
        return NO_VALUES
    if unknown := sorted(given.keys() - own.keys()):
        raise ValueError(
            f"exploration has {unknown}, expected names out of {sorted(own)}, the numbers that the policy's head has: "
            "check the spelling, or leave them out"
        )
    values = {**own, **given}
    if frames is None and (functions := [name for name, value in values.items() if callable(value)]):
        raise TypeError(
            f"exploration has functions for {functions}, expected numbers in traced code: call them, pass the results"
        )
    if frames is not None:
        values = {name: value(frames()) if callable(value) else value for name, value in values.items()}
        values = {name: _number(name, value) for name, value in values.items()}
    if head := head_of(policy):
        head.at(values)  # checks their ranges
    return values


def _number(name: str, value: Any) -> float:
    try:
        return float(np.float32(float(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"exploration[{name!r}] is {shown(value)}, expected a number: pass for example {{{name!r}: 0.1}}"
        ) from error


def with_values(batch: TensorDict, values: Mapping[str, float]) -> TensorDict:
    """Return a batch that also holds these values, each [P, T]: views of one number."""
    if not values:
        return batch
    batch.unlock_()
    for name, value in values.items():
        batch[(*EXPLORATION, name)] = torch.tensor(value, device=batch["next", "done"].device).expand(batch.batch_size)
    return batch.lock_()


def head_of(policy: Policy) -> Head | None:
    """Return the head of a policy over a module or a function, if it has one."""
    return policy.head if isinstance(policy, HeadedPolicy) else None


def own_action_warning(policy: Policy, random_frames: int | None) -> str:
    """Return a warning for random first frames of a policy that may carry its own action; empty for any other."""
    if not random_frames or random_frames < 0:
        return ""
    source = policy.source if isinstance(policy, LoweredPolicy) else policy
    if isinstance(source, TensorDictPolicy):
        carries = carries_action(source.module, [*source.written.values()])
    else:
        carries = isinstance(source, HeadedPolicy) and source.initial_state is not None and source.head is None
    if not carries:
        return ""
    return (
        f"init_random_frames is {random_frames} with a recurrent policy that chooses its action itself: if it carries "
        "that action from step to step, it carries one that was not executed in the random frames, expected the "
        "executed one: give the policy a head (funcollect.heads), carry only what follows from observations, or leave "
        "init_random_frames out"
    )

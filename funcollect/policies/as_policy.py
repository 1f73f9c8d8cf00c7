"""Turns whatever a user passes as a policy into a `Policy`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from funcollect.arguments import check_call, checked_device
from funcollect.messages import shown
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.tensordict_modules.calling import initial_hidden_states
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy, is_policy


def as_policy(policy: Any, env: Env, device: torch.device | str | None = None) -> Policy:
    """The policy that a collector runs.

    Args:
        policy: a `Policy`; None for random actions; a `TensorDictModule`, or a callable with one argument that is named
            ``tensordict`` or ``td`` or annotated as a TensorDict; any other module or function from observation to
            action. For a Dict space it may take the keys as arguments, by their names or all in their order.
        env: the environment, for its action space.
        device: the device on which the policy runs; None leaves it where it is.

    Raises:
        TypeError: for a policy that cannot be called, or takes other arguments.
        ValueError: for a device that does not exist, or a policy that cannot be copied to it.
    """
    place = checked_device(device, "policy_device")
    if isinstance(policy, type):
        raise TypeError(
            f"policy is the class {policy.__name__}, expected an instance: build it, {policy.__name__}(...)"
        )
    if policy is None:
        return RandomPolicy(env.action_spec)
    if isinstance(policy, TorchPolicy) and place is not None and policy.run_device not in (None, place):
        return policy.on(place)
    if is_policy(policy):
        return policy
    if not callable(policy):
        raise TypeError(
            f"policy is {shown(policy)}, expected a Policy, a torch.nn.Module, a function from observation to action, "
            "or None for random actions: pass one of these"
        )
    parameters = _parameters(policy)
    required = [each for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if isinstance(policy, TensorDictModuleBase) or (len(required) == 1 and _is_tensordict(required[0])):
        return _on_tensordict(policy, env, place)
    keys, wanted = [], "one argument, the observation (a recurrent policy: funcollect.torch_policy with initial_state=)"
    if isinstance(env.observation_space, spaces.Dict):
        every = [*env.observation_space.spaces]
        keys = _keys_of_arguments(every, parameters, [each.name for each in required])
        wanted += f", or one for each of some of its keys {every}, by their names"
    check_call("policy", policy, wanted, len(keys) or 1)
    return TorchPolicy(policy, None, None, place, keys=keys)


def _on_tensordict(policy: Any, env: Env, place: torch.device | None) -> TensorDictPolicy:
    """A policy on a TensorDict. Its hidden states begin as its own primers say, or else as the environment's do."""
    hidden_states = initial_hidden_states(policy, None, env.primers if env.backend == "host" else None)
    if taken := sorted({leaf.path for leaf in env.observation_leaves} & set(hidden_states)):
        raise ValueError(
            f"the environment delivers {['.'.join(path) for path in taken]}, which the policy carries from step to "
            "step: take the TensorDictPrimer out of the environments inside, the policy's state needs none"
        )
    return TensorDictPolicy(policy, place, hidden_states)


def _keys_of_arguments(keys: list[str], parameters: list[inspect.Parameter], required: list[str]) -> list[str]:
    """The keys of a Dict space that the policy takes as arguments: those it names, else all of them in their order.

    Empty if the policy takes one argument without the name of a key. These are TorchRL's rules.
    """
    named = [each.name for each in parameters if each.name in keys]
    if named and set(required) <= set(keys):
        if [each.name for each in parameters if each.kind != each.KEYWORD_ONLY][: len(named)] != named:
            raise TypeError(
                f"the policy's arguments {named} are keys of the observation, which are passed by position, expected "
                "them before all others and not keyword-only: reorder its arguments"
            )
        return named
    return keys if len(required) == len(keys) > 1 else []


def _parameters(policy: Any) -> list[inspect.Parameter]:
    """The parameters of a module's forward or of a function; empty if they cannot be inspected."""
    try:
        return list(inspect.signature(policy.forward if isinstance(policy, nn.Module) else policy).parameters.values())
    except (TypeError, ValueError):
        return []


def _is_tensordict(argument: inspect.Parameter) -> bool:
    """Whether an argument is a TensorDict, by its name or annotation."""
    annotation = argument.annotation
    if isinstance(annotation, str):
        annotated = "TensorDict" in annotation
    else:
        annotated = isinstance(annotation, type) and issubclass(annotation, TensorDictBase)
    return annotated or argument.name in ("tensordict", "td")

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
    if isinstance(policy, TorchPolicy):
        moved = place is not None and policy.run_device not in (None, place)
        return policy.on(place) if moved else policy
    if is_policy(policy):
        return policy
    if not callable(policy):
        raise TypeError(
            f"policy is {shown(policy)}, expected a Policy, a torch.nn.Module, a function from observation to action, "
            "or None for random actions: pass one of these"
        )
    if isinstance(policy, TensorDictModuleBase) or _takes_tensordict(policy):
        return _on_tensordict(policy, env, place)
    keys = _keys_of_arguments(policy, env)
    _check_arguments(policy, env, keys)
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


def _keys_of_arguments(policy: Any, env: Env) -> list[str]:
    """The keys of a Dict space that the policy takes as arguments: those it names, else all of them in their order.

    Empty if the policy takes one argument without the name of a key. These are TorchRL's rules.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        return []
    parameters, keys = _parameters(policy), list(space.spaces)
    required = [each.name for each in _required(parameters)]
    named = [each.name for each in parameters if each.name in keys]
    if named and set(required) <= set(keys):
        if [each.name for each in parameters if each.kind != each.KEYWORD_ONLY][: len(named)] != named:
            raise TypeError(
                f"the policy's arguments {named} are keys of the observation, which are passed by position, expected "
                "them before all others and not keyword-only: reorder its arguments"
            )
        return named
    return keys if len(required) == len(keys) > 1 else []


def _check_arguments(policy: Any, env: Env, keys: list[str]) -> None:
    """Raise TypeError unless the policy takes the observation, or these keys of it."""
    wanted = "one argument, the observation (a recurrent policy: funcollect.torch_policy with initial_state=)"
    if isinstance(env.observation_space, spaces.Dict):
        wanted += f", or one for each of some of its keys {[*env.observation_space.spaces]}, by their names"
    check_call("policy", policy, wanted, len(keys) or 1)


def _parameters(policy: Any) -> list[inspect.Parameter]:
    """The parameters of a module's forward or of a function; empty if they cannot be inspected."""
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _required(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """The arguments without which a policy cannot be called."""
    return [each for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD]


def _takes_tensordict(policy: Any) -> bool:
    """Whether the one argument of a policy is a TensorDict, by its name or annotation."""
    required = _required(_parameters(policy))
    if len(required) != 1:
        return False
    name, annotation = required[0].name, required[0].annotation
    if name in ("tensordict", "td"):
        return True
    if isinstance(annotation, str):
        return "TensorDict" in annotation
    return isinstance(annotation, type) and issubclass(annotation, TensorDictBase)

"""Populations: one policy with N versions of its parameters, each of which acts for an equal group of lanes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from funcollect.messages import shown
from funcollect.policies.jax_functions.jax_policy import JaxPolicy
from funcollect.policies.populations.jax_population import JaxPopulation
from funcollect.policies.populations.torch_population import TorchPopulation
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Policy

Population = TorchPopulation | JaxPopulation


def population(policy: Policy, params: Any) -> TorchPopulation | JaxPopulation:
    """A policy that acts with N versions of its parameters: lane ``l`` of L with number ``l * N // L``.

    L counts all lanes, over workers and actors too, and is a multiple of N. So a batch [L, T] holds the members in N
    equal groups, one after the other, and each has the data of a separate run in these lanes, within rounding.

    Args:
        policy: one member: made by `torch_policy`, `jax_policy`, or `normalized`. It stays as it is.
        params: the parameters of all members, each leaf with a leading axis N. For a policy in JAX a pytree like
            ``policy.params``; for one in Torch tensors by dotted name, such as `torch.func.stack_module_state` returns,
            or a TensorDict. Buffers may be left out. The population has copies of them as its `params`; rollouts and
            collectors take other parameters of the same form.

    In JAX the members are one call under `jax.vmap`; in Torch one under `torch.func.vmap` where the module allows it,
    else a call for each.

    A module keeps what it writes into buffers in place, not a buffer that its `forward` assigns. Random numbers that a
    module or a function draws by itself differ from those of a separate run.

    Raises:
        TypeError: for another kind of policy, and for a scripted module.
        ValueError: for parameters unlike the policy's own behind the leading axis.

    A rollout raises PolicyError for a number of lanes that is not a multiple of N.

    >>> import torch, funcollect as fc
    >>> modules = [torch.nn.Linear(4, 2) for _ in range(4)]
    >>> params, _ = torch.func.stack_module_state(modules)
    >>> policy = fc.population(fc.torch_policy(modules[0], head=fc.heads.categorical), params)
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 16)
    >>> batch["next", "reward"].reshape(4, -1).sum(-1)
    tensor([32., 32., 32., 32.])
    """
    if isinstance(policy, Population):
        raise TypeError("policy is a population already, expected one member: pass the policy below, and its params")
    if isinstance(policy, TorchPolicy) and isinstance(policy.module, torch.jit.ScriptModule):
        raise TypeError("policy has a scripted module, whose parameters cannot be exchanged: pass the module itself")
    if isinstance(policy, TorchPolicy) and isinstance(policy.module, nn.Module):
        return TorchPopulation(policy, params)
    if isinstance(policy, JaxPolicy):
        return JaxPopulation(policy, params)
    raise TypeError(
        f"policy is {shown(policy)}, expected one of funcollect.torch_policy over a module, or of "
        "funcollect.jax_policy: make one of them"
    )

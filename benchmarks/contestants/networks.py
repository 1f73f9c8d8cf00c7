"""The policies that every contestant runs: 2x64 tanh, with the same weights for Torch and for JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

HIDDEN = 64
JaxApply = Callable[[Mapping[str, Any], Any], Any]


def discrete(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether actions are choices (categorical) or vectors (normal)."""
    return isinstance(env.action_space, gymnasium.spaces.Discrete)


def tanh_mlp(inputs: int, outputs: int) -> nn.Sequential:
    """2x64 tanh; its weights depend on the sizes alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
        )


def mlp(env: gymnasium.Env[Any, Any]) -> nn.Sequential:
    """Return a network from observations [P, n] to logits or means."""
    outputs = int(env.action_space.n) if discrete(env) else env.action_space.shape[0]
    return tanh_mlp(env.observation_space.shape[0], outputs)


class Gaussian(nn.Module):
    """Means from a network, and scales that do not depend on the observation."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net
        self.log_scale = nn.Parameter(torch.full((net[-1].out_features,), -0.5))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc = self.net(observation)
        return loc, self.log_scale.exp().expand_as(loc)


def torch_module(env: gymnasium.Env[Any, Any]) -> nn.Module:
    """From observations [P, n] to logits [P, k], or to (loc, scale), each [P, m]."""
    net = mlp(env)
    return net if discrete(env) else Gaussian(net)


def jax_network(env: gymnasium.Env[Any, Any]) -> tuple[dict[str, Any], JaxApply]:
    """The same function of a dict of parameters."""
    import jax.numpy as jnp

    net = mlp(env)
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    params = {}
    for i, layer in enumerate(layers):
        params[f"w{i}"] = jnp.array(layer.weight.detach().numpy().T.copy())
        params[f"b{i}"] = jnp.array(layer.bias.detach().numpy().copy())

    def logits(params: Mapping[str, Any], observation: Any) -> Any:
        hidden = jnp.tanh(observation @ params["w0"] + params["b0"])
        hidden = jnp.tanh(hidden @ params["w1"] + params["b1"])
        return hidden @ params["w2"] + params["b2"]

    def gaussian(params: Mapping[str, Any], observation: Any) -> Any:
        loc = logits(params, observation)
        return loc, jnp.broadcast_to(jnp.exp(params["log_scale"]), loc.shape)

    if discrete(env):
        return params, logits
    return {**params, "log_scale": jnp.full(layers[-1].out_features, -0.5)}, gaussian

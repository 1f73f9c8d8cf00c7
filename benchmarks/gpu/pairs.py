"""The pairs of environment and policy, ours and by hand, all with the same 2x64 tanh network; Nature-CNN on pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contestants import policy_networks, scans
from benchmarks.contestants.pixels import jax_pixels
from benchmarks.gpu import peer
from benchmarks.gpu.torch_loop import CapturedLoop, TorchLoop
from benchmarks.harness.isolated import Isolated
from benchmarks.harness.runner import Factory

BY_HAND = "by hand"
TORCH_CARTPOLE = "torch/CartPole-v1"
GYMNAX_CARTPOLE = "gymnax/CartPole-v1"
TORCH_PENDULUM = "torch/Pendulum-v1"
TWINS = {TORCH_CARTPOLE: GYMNAX_CARTPOLE, TORCH_PENDULUM: "gymnax/Pendulum-v1"}  # of the same sizes, in JAX
PIXELS = "pixels"
CAPTURED = "Torch policy, CUDA graphs"
BY_GRAPH = f"{BY_HAND}, one CUDA graph"

Pair = tuple[Any, Any]  # an environment and a policy
Make = Callable[[str, int, str], Pair]  # from an environment's id, its lanes and the device


class Size(NamedTuple):
    """The lanes and steps of one cell."""

    env_id: str
    lanes: int
    length: int  # steps of one batch


class Network(nn.Module):
    """The network of `scans.network` in Torch, with the same weights.

    Args:
        params: three matrices [inputs, outputs].
        gaussian: whether to answer with (loc, scale) rather than with logits.
    """

    def __init__(self, params: list[Any], *, gaussian: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*each.shape, bias=False) for each in params)
        with torch.no_grad():
            for layer, each in zip(self.layers, params, strict=True):
                layer.weight.copy_(torch.from_numpy(np.array(each)).T)
        self._gaussian = gaussian

    def forward(self, x: Tensor) -> Any:
        x = x.flatten(1).float()
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.tanh(layer(x))
        x = last(x)
        return (x, torch.full_like(x, 0.5)) if self._gaussian else x


def make_env(env_id: str, lanes: int, device: str) -> Any:
    """Return the environment; JAX environments are on JAX's default device."""
    import funcollect as fc

    if env_id == PIXELS:
        return jax_pixels(lanes)
    options = {"device": device} if env_id.startswith("torch/") else {}
    return fc.make_env(env_id, num_envs=lanes, **options)


def jax_pair(env_id: str, lanes: int, device: str) -> Pair:
    """Return the environment and a JAX policy."""
    import funcollect as fc

    env = make_env(env_id, lanes, device)
    params, apply, _ = _networks(env_id)
    return env, fc.jax_policy(apply, params, head=_head(env))


def torch_pair(env_id: str, lanes: int, device: str, *, compile: str | None = None) -> Pair:  # noqa: A002
    """Return the environment and a Torch policy; `compile` is the argument of `funcollect.torch_policy`."""
    import funcollect as fc

    env = make_env(env_id, lanes, device)
    _, _, module = _networks(env_id)
    return env, fc.torch_policy(module.to(device), head=_head(env), compile=compile)  # type: ignore[arg-type]


ROUTES: Mapping[str, Mapping[str, Make]] = {
    "jax": {  # the environment's backend
        "JAX policy, fused": jax_pair,
        "Torch policy, lowered": partial(torch_pair, compile="xla"),
        "Torch policy, crossing": partial(torch_pair, compile="eager"),
    },
    "torch": {
        "Torch policy": torch_pair,
        CAPTURED: partial(torch_pair, compile="cudagraph"),
        "JAX policy": jax_pair,
        "Torch policy, one XLA call per step": partial(torch_pair, compile="xla"),
    },
}


def routes(env_id: str, device: str) -> Mapping[str, Make]:
    """Return every route of this environment by name; for brax, which compiles slowly, only the fused ones."""
    ways = dict(ROUTES["torch" if env_id.startswith("torch/") else "jax"])
    if device == "cpu":
        ways.pop(CAPTURED, None)
    return {name: make for name, make in ways.items() if not (env_id.startswith("brax/") and "crossing" in name)}


def contestants(env_id: str, lanes: int, length: int, device: str) -> dict[str, Factory]:
    """Return the contestants, the hand-written loop first, because every ratio needs it."""
    by_hand: dict[str, Factory] = {BY_HAND: partial(_by_hand, env_id, lanes, length, device)}
    if env_id in TWINS and device == "cuda":
        by_hand[BY_GRAPH] = partial(_by_hand, env_id, lanes, length, device, loop=CapturedLoop)
    ours = {name: partial(Ours, make, env_id, lanes, length, device) for name, make in routes(env_id, device).items()}
    return by_hand | ours | (_peers(env_id, lanes, length, device) if env_id == TORCH_CARTPOLE else {})


def _peers(env_id: str, lanes: int, length: int, device: str) -> dict[str, Factory]:
    """TorchRL's ways. A capture that fails may spoil all later work of its process, so that one has its own."""
    if not find_spec("torchrl"):
        return {}
    makers = {name: partial(_peer, name, env_id, lanes, length, device) for name in peer.ways(device)}
    return {name: partial(Isolated, make) if name == peer.CAPTURED else make for name, make in makers.items()}


def _peer(name: str, env_id: str, lanes: int, length: int, device: str) -> Any:
    options = peer.WAYS[name]
    return peer.collector(make_env(env_id, lanes, device), _networks(env_id)[2].to(device), length, **options)


class Ours:
    """Our rollout, state in and state out, finished on the device when `run` returns."""

    def __init__(self, make: Make, env_id: str, lanes: int, length: int, device: str) -> None:
        import funcollect as fc

        self.env, self.policy = make(env_id, lanes, device)
        self._state = fc.init(self.env, self.policy, seed=0)
        self._length, self._device = length, device

    def run(self) -> int:
        return int(self.batch().numel())

    def batch(self) -> Any:
        import funcollect as fc

        self._state, batch = fc.rollout(self.env, self.policy, self._state, self._length)
        if self._device == "cuda" and not torch.cuda.current_stream().query():  # it has read what was computed last
            torch.cuda.synchronize()  # of the context that JAX shares
        return batch

    def close(self) -> None:
        import funcollect as fc

        fc.close(self._state)


def _by_hand(env_id: str, lanes: int, length: int, device: str, loop: type[TorchLoop] = TorchLoop) -> Any:
    if env_id in TWINS:
        return loop(make_env(env_id, lanes, device), _networks(env_id)[2].to(device), length)
    return scans.Scan(make_env(env_id, lanes, device), lanes, length, _networks(env_id)[:2])


def _networks(env_id: str) -> tuple[Any, Any, nn.Module]:
    """Parameters and function in JAX, and the module in Torch with the same weights."""
    if env_id == PIXELS:
        made = policy_networks.network("cnn")
        return made.params, made.apply, made.module
    env = scans.make_env(TWINS.get(env_id, env_id), 1)
    params, apply = scans.network(env)
    return params, apply, Network(params, gaussian=not scans.discrete(env))


def _head(env: Any) -> Any:
    import funcollect as fc

    return fc.heads.categorical if scans.discrete(env) else fc.heads.normal

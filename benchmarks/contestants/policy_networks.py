"""Networks, each as a Torch module and by hand in JAX with the same weights: 2x64 MLP, LSTM, Nature-CNN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contestants.networks import HIDDEN, tanh_mlp
from benchmarks.contestants.pixels import ACTIONS, SHAPE

LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # of the CNN (Mnih et al., 2015): channels, kernel, stride
GRID = (64, 7, 7)  # what the last of them gives


class Network(NamedTuple):
    """A Torch module, the same function of (params, observation[, state]) in JAX, and the recurrent state."""

    module: nn.Module
    params: Any
    apply: Callable[..., Any]
    initial_state: Any = None  # NumPy


class Lstm(nn.Module):
    """An LSTM cell between the observation and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, HIDDEN)
        self.out = nn.Linear(HIDDEN, ACTIONS)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, cell = self.cell(x, state)
        return self.out(hidden), (hidden, cell)


class NatureCnn(nn.Module):
    """From pixels [P, 84, 84, 4] uint8."""

    def __init__(self) -> None:
        super().__init__()
        inputs = (SHAPE[-1], *(channels for channels, _, _ in LAYERS))
        layers = [(nn.Conv2d(before, *layer), nn.ReLU()) for before, layer in zip(inputs, LAYERS, strict=False)]
        self.convolutions = nn.Sequential(*(part for layer in layers for part in layer), nn.Flatten())
        self.out = nn.Sequential(nn.Linear(math.prod(GRID), 512), nn.ReLU(), nn.Linear(512, ACTIONS))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.convolutions(x.permute(0, 3, 1, 2).float() / 255))


def network(name: str) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {"mlp": _mlp, "lstm": _lstm, "cnn": _cnn}[name]()


def _arrays(module: nn.Module) -> list[Any]:
    """The weights in order, as one lays them out in JAX: matrices [in, out], kernels [height, width, in, out]."""
    import jax.numpy as jnp

    axes = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
    weights = [parameter.detach().numpy() for parameter in module.parameters()]
    return [jnp.array(weight.transpose(axes[weight.ndim])) for weight in weights]


def _mlp() -> Network:
    import jax.numpy as jnp

    module = tanh_mlp(4, ACTIONS)

    def apply(params: Any, x: Any) -> Any:
        x = jnp.tanh(x @ params[0] + params[1])
        x = jnp.tanh(x @ params[2] + params[3])
        return x @ params[4] + params[5]

    return Network(module, _arrays(module), apply)


def _lstm() -> Network:
    import jax
    import jax.numpy as jnp

    module = Lstm()

    def apply(params: Any, x: Any, state: Any) -> Any:
        hidden, cell = state
        gates = x @ params[0] + params[2] + hidden @ params[1] + params[3]
        entry, forget, new, out = jnp.split(gates, 4, -1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(entry) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return hidden @ params[4] + params[5], (hidden, cell)

    zeros = np.zeros(HIDDEN, np.float32)
    return Network(module, _arrays(module), apply, (zeros, zeros))


def _cnn() -> Network:
    import jax
    import jax.numpy as jnp

    module = NatureCnn()
    params = _arrays(module)
    first = 2 * len(LAYERS)  # of the matrices, which reads channels first
    params[first] = params[first].reshape(*GRID, -1).transpose(1, 2, 0, 3).reshape(math.prod(GRID), -1)

    def apply(params: Any, x: Any) -> Any:
        x = x.astype(jnp.float32) / 255
        for i, (_, _, stride) in enumerate(LAYERS):
            x = jax.lax.conv_general_dilated(
                x, params[2 * i], (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + params[2 * i + 1])
        x = jax.nn.relu(x.reshape(len(x), -1) @ params[first] + params[first + 1])
        return x @ params[first + 2] + params[first + 3]

    return Network(module, params, apply)

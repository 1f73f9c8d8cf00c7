"""Networks, each as a Torch module and by hand in JAX with the same weights: 2x64 MLP, LSTM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

ACTIONS = 2
HIDDEN = 64


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


def network(name: str) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {"mlp": _mlp, "lstm": _lstm}[name]()


def _arrays(module: nn.Module) -> list[Any]:
    """The weights in order, matrices as [in, out]."""
    import jax.numpy as jnp

    return [jnp.array(parameter.detach().numpy().T) for parameter in module.parameters()]


def _mlp() -> Network:
    import jax.numpy as jnp

    sizes = [nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, ACTIONS)]
    module = nn.Sequential(*sizes)

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

"""Two multi-layer perceptrons over one observation, initialised as PPO's usually are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
from flax import nnx


class ActorCritic(nnx.Module):
    """From observations [P, ...] to the actor's answer [P, outputs] and the critic's values [P, 1]."""

    def __init__(self, size: int, outputs: int, *, widths: Sequence[int], rngs: nnx.Rngs) -> None:
        self.actor = _layers([size, *widths, outputs], last=0.01, rngs=rngs)
        self.critic = _layers([size, *widths, 1], last=1.0, rngs=rngs)

    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both answers."""
        rows = observation.reshape(len(observation), -1).astype("float32")
        return self.actor(rows), self.critic(rows)


def _layers(sizes: Sequence[int], *, last: float, rngs: nnx.Rngs) -> nnx.Sequential:
    """Linear layers with tanh between them, orthogonal at the start, the last one scaled by `last`."""
    layers = []
    for index, (size, width) in enumerate(itertools.pairwise(sizes), 2):
        scale = last if index == len(sizes) else math.sqrt(2)
        layers += [nnx.Linear(size, width, kernel_init=nnx.initializers.orthogonal(scale), rngs=rngs), nnx.tanh]
    return nnx.Sequential(*layers[:-1])

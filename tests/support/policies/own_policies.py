"""Policies that derive from `fc.PolicyBase`, whose batches show which of their weights acted."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

import funcollect as fc


class Layer(NamedTuple):
    weight: Any
    bias: Any


class Recording(fc.PolicyBase):
    """Records two of its parameters, so that a batch shows which weights acted."""

    backend = "torch"

    def __init__(self, version=0.0):
        self.params = self.version(version)

    @staticmethod
    def version(number):
        """Parameters of all kinds, whose numbers are all `number`."""
        layer = Layer(torch.full((4, 2), float(number)), torch.full((), float(number), dtype=torch.bfloat16))
        return {"layers": [layer], "steps": torch.tensor(int(number)), "none": None, "rate": number}

    def __call__(self, params, state, observation, noise, spec, exploration, /):
        (layer,) = params["layers"]
        scores = observation @ layer.weight
        seen = torch.stack([layer.weight.sum() / 8, layer.bias.float(), params["steps"].float()])
        return state, {"action": scores.argmax(-1), "seen": seen.expand(len(observation), 3)}


class InJax(Recording):
    backend = "jax"

    @staticmethod
    def version(number):
        layer = Layer(jnp.full((4, 2), float(number)), jnp.full((), number, jnp.bfloat16))
        return {"layers": [layer], "steps": np.int32(number), "none": None, "rate": number}

    def __call__(self, params, state, observation, noise, spec, exploration, /):
        (layer,) = params["layers"]
        scores = observation @ layer.weight
        seen = jnp.stack([layer.weight.sum() / 8, layer.bias.astype(jnp.float32), params["steps"]])
        return state, {"action": scores.argmax(-1), "seen": jnp.broadcast_to(seen, (len(observation), 3))}


KINDS = (Recording, InJax)


def seen_by(collector):
    """The version of the weights in each batch, shown to be whole."""
    for batch in collector:
        (version,) = set(batch["seen"].flatten().tolist())
        yield version


def until(collector, version):
    """Collect until all workers act with `version`; those of an asynchronous collector may have begun before."""
    versions = seen_by(collector)
    before = 0
    for each in versions:
        before = before + 1 if each == version else 0
        if before == 6:
            return

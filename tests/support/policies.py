"""Policies whose batches show their weights, one with a memory, and a network that changes in every way."""

import types
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import funcollect as fc


class Layer(NamedTuple):
    weight: Any
    bias: Any


class Recording(fc.PolicyBase):
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


class Lean(fc.PolicyBase):
    """What a policy of a user's own has at least."""

    backend, params = "torch", None

    def __call__(self, params, policy_state, observation, noise, spec, exploration, /):
        return policy_state, {"action": (observation[:, 2] > 0).long()}


def linear(bias):
    """A network that chooses action 1 where the bias is positive, whatever it sees."""
    module = nn.Linear(4, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([0.0, bias]))
    return module


class Count(TensorDictModuleBase):
    """Counts its calls in a key that it does not announce."""

    in_keys = ("observation",)
    out_keys = ("action", "count")

    def forward(self, td):
        count = td.get("count", None)
        count = torch.zeros(td.batch_size, dtype=torch.long) if count is None else count + 1
        return td.update({"count": count, "action": td["observation"][..., 2].gt(0).long()})


class Config:
    def __init__(self):
        self.bias = 0.0
        self.inner = types.SimpleNamespace(power=1.0)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


class Net(nn.Module):
    """Answers an action [P] and the logits [P, 2] that it is chosen by."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.act = torch.sin
        self.gate = gate(1.0)
        self.temperature = 1.0
        self.scales = [1.0, 1.0]
        self.options = {"gain": {"value": 1.0}}
        self.config = Config()
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, observation):
        x = self.gate(self.act(self.body(observation)))
        x = x * self.temperature * self.scales[0] * self.options["gain"]["value"] + self.offset
        x = x * self.config.inner.power + self.config.bias
        if not self.training:
            x = x + 0.25
        return {"action": x.argmax(-1), "logits": x}


class TensorNet(Net):
    """Has a tensor that is neither a parameter nor a buffer, so that it cannot be lowered."""

    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(2)

    def forward(self, observation):
        x = super().forward(observation)["logits"] + self.shift
        return {"action": x.argmax(-1), "logits": x}


class Louder(Net):
    def forward(self, observation):
        x = super().forward(observation)["logits"] * 1.5
        return {"action": x.argmax(-1), "logits": x}


def gate(factor):
    return lambda x: factor * x


def _patched(self, observation):
    x = type(self).forward(self, observation)["logits"] - 0.5
    return {"action": x.argmax(-1), "logits": x}


def _shifted(_module, _inputs, answer):
    return answer + 0.125


def _loaded(net):
    net.load_state_dict({name: value + 0.05 for name, value in net.state_dict().items()}, assign=True)


CHANGES = {
    "a number": lambda net: setattr(net, "temperature", 0.5),
    "the mode": lambda net: net.eval(),
    "a submodule": lambda net: net.body.__setitem__(2, nn.Linear(8, 2)),
    "a wider submodule": lambda net: setattr(net, "body", nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))),
    "an activation module": lambda net: net.body.__setitem__(1, nn.Softsign()),
    "a layer more": lambda net: net.body.append(nn.Linear(2, 2)),
    "an activation function": lambda net: setattr(net, "act", torch.cos),
    "a closure": lambda net: setattr(net, "gate", gate(0.5)),
    "a hook": lambda net: net.body.register_forward_hook(_shifted),
    "forward of the instance": lambda net: setattr(net, "forward", types.MethodType(_patched, net)),
    "an element of a list": lambda net: net.scales.__setitem__(0, 0.75),
    "an entry of a dict in a dict": lambda net: net.options["gain"].update(value=1.25),
    "an attribute of an object": lambda net: setattr(net.config, "bias", 0.375),
    "an attribute of an object in an object": lambda net: setattr(net.config.inner, "power", 1.125),
    "a parameter": lambda net: setattr(net.body[0], "bias", nn.Parameter(torch.linspace(-1, 1, len(net.body[0].bias)))),
    "a buffer": lambda net: setattr(net, "offset", torch.tensor([0.5, -0.5])),
    "weights assigned": _loaded,
    "a parametrization": lambda net: parametrize.register_parametrization(net.body[0], "weight", Double()),
    "a spectral norm": lambda net: parametrizations.spectral_norm(net.body[2]),
    "the class": lambda net: setattr(net, "__class__", Louder),
}

TENSOR_CHANGES = {
    "a tensor": lambda net: setattr(net, "shift", torch.tensor([0.5, -0.25])),
    "a tensor in place": lambda net: net.shift.add_(0.25),
}


def expected(net, batch):
    """What the network itself answers, as it is now, to the observations of a batch."""
    with torch.no_grad():
        logits = net(batch["observation"].flatten(0, -2))["logits"]
    return logits.reshape(*batch.batch_size, 2)

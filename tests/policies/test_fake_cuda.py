"""Policies on a GPU that is not there: outputs and states lie on it, and no step waits for the host."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import funcollect as fc
from funcollect.core.loops import eager
from funcollect.core.loops.eager import NoiseAhead, Stepper, inputs_of, open_actor
from funcollect.core.request import Request, exploration_values
from funcollect.keys import key_from_seed, random_words
from funcollect.policies import base, random_policy
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.tensordict_modules import tensordict_policy
from funcollect.policies.torch_modules import torch_policy
from funcollect.specs import ActionSpec
from funcollect.tree import NAMESPACE
from tests.support.running import once

CUDA = torch.device("cuda", 0)


class Linear(nn.Linear):
    """A layer that can be made on a device that is not there."""

    def reset_parameters(self):
        """Leave the parameters as they are."""


class FakeCuda(TorchFunctionMode):
    """Makes the CUDA device usable within ``with``.

    Attributes:
        waits: the names of the functions that brought numbers from the host to the device, or back, so far.
    """

    def __init__(self):
        super().__init__()
        self.waits = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._patches = [
            *(mock.patch.object(module, "memory_of", id) for module in (base, torch_policy)),  # there is no memory
            *(mock.patch.object(module, "draw_ahead", _noise) for module in (eager, random_policy)),  # no numbers
            *(
                mock.patch.object(module, "torch_generator", _no_generator)
                for module in (torch_policy, tensordict_policy)
            ),
        ]

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._fake.__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if function in _READS and _on_cuda(args):
            self.waits.append(name)
            return _READS[function]
        answer = _STAND_INS.get(function, function)(*args, **(kwargs or {}))
        from_host = bool(_tensors(args)) and not _on_cuda((args, kwargs))
        if isinstance(answer, Tensor) and (from_host if answer.is_cuda else _on_cuda(args)):
            self.waits.append(name)
        return answer


def devices_of(tree):
    return {leaf.device for leaf in _tensors(tree)}


def _noise(noise, key, lanes, start, length, *_, **__):
    place = lanes.device if isinstance(lanes, Tensor) else "cpu"
    return torch.zeros(length, len(lanes), *([2] if noise.kind == "keys" else noise.shape), device=place)


def _no_generator(state, device):
    assert device == CUDA
    return torch.no_grad()


def _tensors(tree):
    return [leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(leaf, Tensor)]


def _on_cuda(tree):
    return CUDA in devices_of(tree)


def _selected(tensor, index):
    """What ``tensor[index]`` is, by operators, since Torch's own needs the library of the device."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor) for part in parts):
        return torch.ops.aten.index.Tensor(tensor, list(parts))
    if Ellipsis in parts:
        at, named = parts.index(Ellipsis), sum(part is not None for part in parts) - 1
        parts = (*parts[:at], *[slice(None)] * (tensor.ndim - named), *parts[at + 1 :])
    axis = 0
    for part in parts:
        if isinstance(part, int):
            tensor = tensor.select(axis, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(axis)
        else:
            start, stop, _ = part.indices(tensor.shape[axis])
            tensor = torch.narrow(tensor, axis, start, max(stop - start, 0))
        axis += 1
    return tensor


def _assign(tensor, index, value):
    if not tensor.is_cuda:
        tensor[index] = value
        return
    part = _selected(tensor, index)
    fill = torch.ops.aten.copy_.default if isinstance(value, Tensor) else torch.ops.aten.fill_.Scalar
    fill(part, value)


def _stacked(tensors, dim=0, *, out=None):
    stacked = torch.stack(tensors, dim)
    return stacked if out is None else torch.ops.aten.copy_.default(out, stacked)


_READS = {Tensor.item: 0.0, Tensor.__bool__: False, torch.equal: True}
_STAND_INS = {
    Tensor.__getitem__: _selected,
    Tensor.__setitem__: _assign,
    Tensor.copy_: torch.ops.aten.copy_.default,
    torch.stack: _stacked,
}


P, STEPS, SIZE = 3, 4, 8
SAMPLED = fc.ExplorationType.RANDOM

DISCRETE = ActionSpec(spaces.Discrete(2))
BOX = ActionSpec(spaces.Box(-1, 2, (1,), np.float32))
CHOICE = partial(torch.distributions.Categorical, validate_args=False)

HEADS = {
    "no head": (None, DISCRETE),
    "categorical": (fc.heads.categorical, DISCRETE),
    "categorical, several": (fc.heads.categorical, ActionSpec(spaces.MultiDiscrete([2, 3], start=[1, 0]))),
    "categorical, one-hot": (fc.heads.categorical, ActionSpec(spaces.Discrete(2), one_hot=True)),
    "greedy": (fc.heads.greedy, DISCRETE),
    "epsilon_greedy": (fc.heads.epsilon_greedy(0.5), DISCRETE),
    "boltzmann": (fc.heads.boltzmann(2.0), DISCRETE),
    "normal": (fc.heads.normal, BOX),
    "tanh_normal": (fc.heads.tanh_normal, BOX),
    "clipped_normal": (fc.heads.clipped_normal([0.1, 0.2]), ActionSpec(spaces.Box(-1, 1, (2,)))),
    "from_distribution": (fc.heads.from_distribution(CHOICE, "logits"), DISCRETE),
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


def shorten(size):
    return lambda x: x[:, :size]


class Memory(Linear):
    def forward(self, x, hidden):
        return super().forward(x), hidden + x[:, :2]


def a_recurrent_function(size):
    return lambda x, hidden: (x[:, :size] + hidden[:, :1], hidden + 1)


def acting(module, x, *state):
    """The actions with the largest of a module's numbers, and its state if it has one."""
    answer = module(x, *state)
    return (answer[0].argmax(-1), answer[1]) if state else answer.argmax(-1)


def without_head(module):
    return Calls(partial(acting, module)) if isinstance(module, nn.Module) else partial(acting, module)


FORMS = {  # and the recurrent state
    "function": (shorten, None),
    "module without parameters": (lambda size: Calls(shorten(size)), None),
    "module": (lambda size: Linear(SIZE, size, device=CUDA), None),
    "recurrent function": (a_recurrent_function, torch.zeros(2)),
    "recurrent module": (lambda size: Memory(SIZE, size, device=CUDA), torch.zeros(2)),
}


def run(make, spec, *, masked=False, random_steps=0, **given):
    """Three rollouts and a call of a policy over observations on a GPU; return the columns of the last rollout."""
    with FakeCuda() as mode:
        policy = make()
        tensor = torch.zeros(P, SIZE, device=CUDA)
        allowed = torch.ones(P, spec.choices, dtype=torch.int8, device=CUDA)
        observation = {"action_mask": allowed, "seen": tensor} if masked else tensor
        key = key_from_seed(0)
        lane = torch.arange(P, device=CUDA)
        state = SimpleNamespace(key=key, lane=lane, lane_ids=np.arange(P), num_lanes=P, total_lanes=P)
        state.policy_state = policy.init(key, P)
        values = exploration_values(policy, given, state)
        env = SimpleNamespace(action_spec=spec, num_envs=P)
        for rollout, way in enumerate([SAMPLED, SAMPLED, fc.ExplorationType.DETERMINISTIC]):
            asked = Request(length=STEPS, random_steps=random_steps, exploration_type=way, exploration=values)
            state.step, state.steps_made = torch.zeros(P, dtype=torch.int64, device=CUDA), rollout * STEPS
            stepper = Stepper(env, policy, state, asked)
            stepper.observation = observation
            actor = open_actor(stepper, inputs_of(stepper, NoiseAhead(stepper, random_words)(state)))
            with actor.running():
                if policy.remembers(state.policy_state):
                    actor.restart([0, 2])  # as `crossing` does, which keeps the steps on the host
                mode.waits.clear()
                for t in range(STEPS):
                    assert actor.act(t).device == CUDA
                    if policy.remembers(state.policy_state):
                        actor.restart(torch.zeros(P, dtype=torch.bool, device=CUDA))
                assert mode.waits == []
                state.policy_state, columns = actor.finish()
            assert devices_of(columns) == {CUDA}
            assert devices_of(getattr(state.policy_state, "recurrent", state.policy_state)) <= {CUDA}
        if not isinstance(policy, Own):  # which gets its arguments as they are
            noise = policy.noise(spec)
            drawn = None if noise is None else torch.zeros(P, *([2] if noise.kind == "keys" else noise.shape))
            exploration = fc.Exploration(SAMPLED, values)
            _, outputs = policy(None, policy.init(key, P), observation, drawn, spec, exploration)
            assert devices_of(outputs) == {CUDA}
    return columns


@pytest.mark.parametrize(("name", "form"), once(HEADS, FORMS))
def test_a_torch_policy(name, form):
    (head, spec), (make, initial) = HEADS[name], FORMS[form]
    size = spec.choices or 2
    given = dict.fromkeys(head.values if head else (), 0.25)

    def policy():
        module = make(size) if head else without_head(make(size))
        return fc.torch_policy(module, head=head, initial_state=initial, record_state=True)

    columns = run(policy, spec, **given)
    assert (initial is None) or ("recurrent",) in columns


def network():
    return TensorDictModule(Linear(SIZE, 2, device=CUDA), ["observation"], ["logits"])


def tensordict_actor():
    """What TorchRL's probabilistic actors are."""
    keys = {"in_keys": ["logits"], "out_keys": ["action"]}
    drawing = {"distribution_class": CHOICE, "return_log_prob": True, "default_interaction_type": "random"}
    draw = ProbabilisticTensorDictModule(**keys, **drawing)
    return fc.tensordict_policy(ProbabilisticTensorDictSequential(network(), draw))


def reader_of_is_init():
    def choose(x, first):
        return x.argmax(-1).masked_fill(first[:, 0], 0)

    choice = TensorDictModule(choose, ["logits", "is_init"], ["action"])
    return fc.tensordict_policy(TensorDictSequential(network(), choice))


def carrier():
    def act(batch):
        count = batch.get("count", None)
        batch["count"] = batch["observation"][:, 0] if count is None else count + 1
        batch["action"] = batch["observation"].argmax(-1) % 2
        return batch

    return fc.tensordict_policy(act)


def with_hidden_state():
    def act(x, hidden):
        return x.argmax(-1) % 2, hidden + x[:, :2]

    module = TensorDictModule(act, ["observation", "hidden"], ["action", ("next", "hidden")])
    return fc.tensordict_policy(module, initial_state={"hidden": torch.zeros(2)})


def of_head(name):
    return fc.torch_policy(Linear(SIZE, 2, device=CUDA), head=HEADS[name][0])


class Own(fc.PolicyBase):
    """A policy of a user's own, with noise and a state, which knows of no device."""

    backend, params = "torch", None

    def noise(self, spec, /):
        return fc.Noise(kind="gumbel", shape=(2,))

    def init(self, key, num_envs, /):
        return {"count": torch.zeros(num_envs)}

    def __call__(self, params, state, observation, noise, spec, exploration, /):
        count = state["count"] + 1
        return {"count": count}, {"action": (observation[:, :2] + noise).argmax(-1), "count": count}


RANDOM = [
    spaces.Discrete(2),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 2, (2,), np.float32),
    spaces.Box(np.float32([-1, -np.inf]), np.inf, (2,), np.float32),
    spaces.Box(-1, 2, (2,), np.int32),
]
OTHERS = {
    **{make.__name__: (make, DISCRETE) for make in (tensordict_actor, reader_of_is_init, carrier, with_hidden_state)},
    **{f"random in {space}": (partial(RandomPolicy, ActionSpec(space)), ActionSpec(space)) for space in RANDOM},
    "random, masked": (partial(RandomPolicy, DISCRETE), DISCRETE, {"masked": True}),
    **{f"random at first, then {name}": (partial(of_head, name), HEADS[name][1], {"random_steps": 2})
       for name in ("categorical", "epsilon_greedy", "tanh_normal")},
    "epsilon per lane": (partial(of_head, "epsilon_greedy"), DISCRETE, {"epsilon": [0.5] * P}),
    "one's own": (Own, DISCRETE),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_policies(name):
    make, spec, *options = OTHERS[name]
    run(make, spec, **dict(*options))


def test_what_waits_is_noticed():
    with FakeCuda() as mode:
        x = torch.zeros(3, device=CUDA)
        x + 0.5 * torch.ones(())
        assert mode.waits == []
        x.sum().item()
        x.cpu()
        torch.zeros(3).to(CUDA)
        assert mode.waits == ["item", "cpu", "to"]

"""What programs bake in of a module is seen as it is; modules that Torch makes otherwise than most."""

import pickle
from types import MappingProxyType

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from funcollect.policies.torch_modules.settings import Look, ModuleSettings
from tests.support import cases
from tests.support.policies import gate
from tests.support.running import in_soak, once


def module():
    made = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))
    made.sizes, made.scales, made.many, made.count = [1, 2], {"a": 1.0}, list(range(1_000, 1_300)), 1
    made.fixed = MappingProxyType(made.scales)
    return made


CHANGES = {
    "mode": lambda made: made.eval(),
    "mode of a part": lambda made: made[2].eval(),
    "rate": lambda made: setattr(made[1], "p", 0.2),
    "an equal value of another type": lambda made: setattr(made, "count", True),
    "new attribute": lambda made: setattr(made, "flag", None),
    "attribute under another name": lambda made: setattr(made, "other", vars(made).pop("many")),
    "element of a list": lambda made: made.sizes.__setitem__(0, 3),
    "length of a list": lambda made: made.sizes.append(3),
    "entry of a dict": lambda made: made.scales.update(b=2.0),
    "hook": lambda made: made[2][0].register_forward_hook(lambda *_: None),
    "submodule": lambda made: made[2].__setitem__(0, nn.ReLU()),
    "submodule more": lambda made: made.append(nn.Tanh()),
    "class": lambda made: setattr(made[2][0], "__class__", nn.ReLU),
    "submodule gone": lambda made: setattr(made, "1", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change):
    made = module()
    settings, look = ModuleSettings(made), Look.at(made)
    before = settings.number
    assert look.holds()
    CHANGES[change](made)
    assert not look.holds()
    assert not look.alike()
    assert settings.number != before


def test_weights_are_no_settings():
    made = module()
    settings = ModuleSettings(made)
    before = settings.number
    with torch.no_grad():
        made[0].weight.add_(1)
    made[0].weight = nn.Parameter(torch.zeros(8, 4))
    assert settings.number == before
    made[0].weight = nn.Parameter(torch.zeros(9, 4))
    assert settings.number != before


def test_settings_are_recognised_again():
    made = module()
    settings = ModuleSettings(made)
    numbers = []
    for scale in (0.5, 2.0, 0.5, 2.0):
        made.eval().train()
        made.scales = {"a": float(scale), "b": [1, (2, scale)]}  # an equal one, not the same
        made.gate = gate(scale)
        numbers.append(settings.number)
    assert numbers == [numbers[0], numbers[1]] * 2
    assert numbers[0] != numbers[1]
    made.scales["b"].append(3)
    assert settings.number not in numbers


def test_a_copy_in_another_process_looks_by_itself():
    made = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    settings = ModuleSettings(made)
    before = settings.number
    other = pickle.loads(pickle.dumps((settings, made)))
    first = other[0].number
    other[1].eval()
    assert other[0].number != first
    assert settings.number == before


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Lazy modules:UserWarning")
ENVS = ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"]


def collected(policy, name):
    env = fc.make_env(name, num_envs=2)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    fc.close(state)
    return batch


@pytest.mark.parametrize("name", [ENVS[0], ENVS[2], *in_soak([ENVS[1]])])
def test_a_program_of_torchscript_acts_as_the_module_that_it_was_made_from(name):
    module = cases.mlp(4, 2)
    programs = [torch.jit.script(module), torch.jit.trace(module, torch.zeros(2, 4))]
    policies = [fc.torch_policy(each, head=fc.heads.categorical) for each in (module, *programs)]
    for bias in (0.0, 1.0, -1.0):  # of weights that they share
        with torch.no_grad():
            module[2].bias += torch.tensor([0.0, bias])
        wanted, *found = (collected(policy, name) for policy in policies)
        assert all(torch.equal(batch["action"], wanted["action"]) for batch in found)
    if name.startswith("gymnax"):
        plan = fc.explain(fc.make_env(name, num_envs=2), fc.torch_policy(programs[0], head=fc.heads.categorical))
        assert "TorchScript" in str(plan)


class Best(nn.Module):
    def forward(self, scores):
        return scores.argmax(-1)


def on_tensordict(net):
    return TensorDictModule(nn.Sequential(net, Best()), ["observation"], ["action"])


LAZY = {
    "module": lambda net: fc.torch_policy(net, head=fc.heads.categorical),
    "function": lambda net: fc.torch_policy(lambda x: net(x), head=fc.heads.categorical),
    "tensordict": lambda net: fc.tensordict_policy(on_tensordict(net)),
}


@pytest.mark.parametrize(("kind", "name"), once(LAZY, ENVS))
def test_init_makes_the_parameters_of_lazy_layers(kind, name):
    net = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.0), nn.LazyLinear(2))
    batch = collected(LAZY[kind](net), name)
    again = collected(LAZY[kind](net), name)
    assert [*net[0].weight.shape] == [8, 4]
    assert net.training
    assert torch.equal(batch["action"], again["action"])


class OfBoard(nn.Module):
    """Scores of the cells of a board."""

    def __init__(self):
        super().__init__()
        self.scores = nn.LazyLinear(9)

    def forward(self, seen):
        return self.scores(seen["observation"].flatten(1).float())


def lazy(net):
    return fc.torch_policy(net, head=fc.heads.categorical)


@pytest.mark.parametrize("name", ["pettingzoo/mpe/simple_tag_v3", *in_soak(["jaxmarl/MPE_simple_tag_v3"]), "board"])
def test_it_makes_those_of_several_policies(name):
    if name == "board":
        env = fc.make_env("pettingzoo/classic/tictactoe_v3", num_envs=2)
        policy = fc.by_player([lazy(OfBoard()), lazy(OfBoard())])
    else:
        env = fc.make_env(name, num_envs=2)
        policy = fc.by_group({k: lazy(nn.LazyLinear(5)) for k in ("adversary", "agent")})
    state = fc.init(env, policy, seed=0)
    assert fc.rollout(env, policy, state, 4)[1].shape == (2, 4)


PARTS = {"alone": lambda: nn.LazyLinear(2), "group": lambda: fc.by_group({"a": fc.torch_policy(nn.LazyLinear(2))})}


@pytest.mark.parametrize("kind", PARTS)
def test_lazy_layers_are_not_sent_to_workers(kind):
    with pytest.raises(ValueError, match=r"policy has lazy layers, .* with parameters: call the module once"):
        fc.MultiSyncDataCollector(["CartPole-v1"], PARTS[kind](), frames_per_batch=8, total_frames=8)

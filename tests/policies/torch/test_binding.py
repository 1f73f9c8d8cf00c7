"""Parameters as an argument, those of the policy at each rollout, and a module that a trainer uses meanwhile."""

import copy
import functools
import threading
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.testing import assert_close

import funcollect as fc
from tests.support import compare
from tests.support.cases import Recurrent, jax_weights, make_env, mlp
from tests.support.compare import assert_same, joined
from tests.support.running import pairwise


def linear(bias):
    """Chooses action 1 where the bias is positive, whatever it sees."""
    module = nn.Linear(4, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([0.0, bias]))
    return module


def make_policy(module):
    return fc.torch_policy(module, head=fc.heads.greedy)


@pytest.fixture
def env():
    return fc.make_env("CartPole-v1", num_envs=2)


def collect(env, policy, **options):
    return compare.collect(env, policy, 12, seed=0, **options)


def snapshot(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in tensors.items()}


def assert_untouched(module, before):
    after = snapshot(module)
    assert after.keys() == before.keys()
    assert all(after[name][0] == before[name][0] for name in before)
    assert all(torch.equal(after[name][1], before[name][1]) for name in before)


def test_a_trainer_may_use_the_module_during_a_rollout(env):
    """The module that runs is a skeleton: hooks see it, and the user's own keeps its gradients and parameters."""
    module, seen = linear(1.0), []
    module.register_forward_hook(lambda called, *_: seen.append(called is module))
    module(torch.ones(1, 4)).sum().backward()
    gradient, before, thread = module.weight.grad.clone(), snapshot(module), threading.get_ident()
    collect(env, make_policy(module))
    assert seen[0]
    assert not any(seen[1:])
    assert len(seen) == 13
    assert torch.equal(module.weight.grad, gradient)
    assert_untouched(module, before)
    assert thread == threading.get_ident()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        dropped = self.drop(torch.ones_like(x))
        mode = torch.tensor([part.training for part in self.modules()]).expand(len(x), -1)
        return {"action": torch.zeros(len(x)).long(), "normed": self.norm(x), "dropped": dropped, "mode": mode}


def test_the_mode_of_every_submodule_is_honoured_and_kept(env):
    module = Normed()
    policy = fc.torch_policy(module)
    for training, dropping in [(True, True), (False, False), (True, False), (False, True)]:
        module.train(training)
        module.drop.train(dropping)
        batch = collect(env, policy)
        assert batch["mode"][0, 0].tolist() == [training, training, dropping]
        assert batch["dropped"].unique().tolist() == ([0, 2] if dropping else [1])
        assert [part.training for part in module.modules()] == [training, training, dropping]


def test_buffers_that_a_forward_pass_writes_stay_as_they_are(env):
    module = Normed().train()
    before = snapshot(module)
    one = collect(env, fc.torch_policy(module))
    assert_untouched(module, before)
    policy = fc.torch_policy(module)
    collect(env, policy)
    with pytest.warns(match=r"Normed writes its buffers .*evaluate_actions do not keep that.*module.eval\(\)"):
        collect(env, policy)
    assert_same(collect(env, policy).exclude("dropped"), one.exclude("dropped"))
    assert_untouched(module, before)


@pytest.mark.filterwarnings("ignore:Normed writes its buffers")
def test_buffers_are_part_of_the_params(env):
    module = Normed().eval()
    policy = fc.torch_policy(module)
    shifted = copy.deepcopy(module)
    shifted.norm.running_mean.fill_(100.0)
    batch = collect(env, policy, params=TensorDict.from_module(shifted))
    assert (batch["normed"] < -90).all()
    assert (collect(env, policy)["normed"] > -90).all()
    module.norm.running_mean.fill_(100.0)
    assert (collect(env, policy)["normed"] < -90).all()
    assert (collect(env, policy, params=dict(module.named_parameters()))["normed"] < -90).all()


def test_shared_parameters_stay_shared(env):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = linear(1.0)
            self.two = self.one

        def forward(self, x):
            assert self.one.weight is self.two.weight
            return self.two(x)

    assert collect(env, make_policy(Tied()))["action"].unique().tolist() == [1]


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("holds a socket")


def test_a_module_that_refuses_to_be_copied_takes_params_all_the_same(env):
    module = Uncopyable(4, 2)
    policy, before = make_policy(module), snapshot(module)
    for params in (None, linear(1.0).state_dict()):
        batch = collect(env, policy, params=params)
        acted = module if params is None else linear(1.0)
        assert torch.equal(batch["action"], acted(batch["observation"]).argmax(-1))
    assert_untouched(module, before)


class Entangled(nn.Module):
    """Reaches its own submodule in a way that no copy follows."""

    def __init__(self, how):
        super().__init__()
        self.inner = linear(1.0)
        held = {
            "a closure": lambda x: self.inner(x),
            "an object": SimpleNamespace(module=self.inner),
            "a parameter": [self.inner.weight],
            "a closure in a partial": functools.partial(lambda inner, x: inner(x) + self.inner.bias, self.inner),
        }
        self.held = held[how]

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("how", ["a closure", "an object", "a parameter", "a closure in a partial"])
def test_a_module_that_reaches_itself_acts_with_its_own_parameters_only(env, how):
    module = Entangled(how)
    policy = make_policy(module)
    assert collect(env, policy)["action"].unique().tolist() == [1]
    with pytest.raises(ValueError, match=r"params= cannot act: 'held' of Entangled refers to.*policy_factory"):
        collect(env, policy, params=TensorDict.from_module(module))
    with pytest.raises(ValueError, match=r"cannot be copied to meta: 'held'.*move it there before.*policy_factory"):
        fc.torch_policy(module, device="meta")


class Reaching(nn.Module):
    """Reaches its own submodules and methods in ways that a copy follows."""

    def __init__(self):
        super().__init__()
        self.one, self.two = linear(1.0), linear(1.0)
        self.method = self.doubled
        self.methods = {"add": self.added, "parts": [functools.partial(self.part, "one")]}
        self.listed = (self.two, [self.two])
        self.__dict__["hidden"] = nn.Sequential(self.two)

    def doubled(self, x):
        return 2 * self.one(x)

    def added(self, x):
        return self.one(x) + self.two(x)

    def part(self, name, x):
        return getattr(self, name)(x)

    def forward(self, x):
        held = (self.methods["add"], self.methods["parts"][0], self.listed[0], self.listed[1][0], self.hidden)
        ways = [self.method(x), *(way(x) for way in held)]
        return {"action": torch.zeros(len(x)).long(), "seen": torch.stack(ways, 1)}


def test_params_reach_every_way_in_which_a_module_holds_its_own_parts(env):
    module, other = Reaching(), Reaching()
    for part in other.parameters():
        nn.init.normal_(part)
    policy = fc.torch_policy(module)
    for params in (None, other.state_dict()):
        batch = collect(env, policy, params=params)
        acted = module if params is None else other
        assert_close(batch["seen"], torch.stack([acted(each)["seen"] for each in batch["observation"]]))


def test_a_compiled_module_takes_params_and_stays_apart(env):
    module = Normed().train()
    policy, before = fc.torch_policy(torch.compile(module, backend="eager")), snapshot(module)
    batch = collect(env, policy, params={f"_orig_mod.{name}": value for name, value in module.state_dict().items()})
    assert_untouched(module, before)
    assert batch["mode"].all()


def test_a_scripted_module_is_followed(env):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        module = torch.jit.script(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)))
    policy = make_policy(module)
    for acted in (module.eval(), module.train().eval()):
        with torch.no_grad():
            acted[0].bias.add_(1.0)
        batch = collect(env, policy)
        assert torch.equal(batch["action"], acted(batch["observation"]).argmax(-1))


HIDDEN = 5


def policies(seed=0):
    plain, recurrent, inner = mlp(4, 2, seed), Recurrent(4, 2, seed), mlp(4, 2, seed)
    tensordict = TensorDictModule(nn.Sequential(inner, Argmax()), ["observation"], ["action"])
    head = fc.heads.categorical
    return {
        "plain": (plain, fc.torch_policy(plain, head=head)),
        "recurrent": (recurrent, fc.torch_policy(recurrent, head=head, initial_state=torch.zeros(HIDDEN))),
        "tensordict": (tensordict, fc.tensordict_policy(tensordict)),
    }


class Argmax(nn.Module):
    def forward(self, answer):
        return (answer + torch.randn_like(answer)).argmax(-1)


KINDS = ["plain", "recurrent", "tensordict"]


def collect_twice(env, policy, between=lambda batch: None, params=(None, None)):
    state = fc.init(env, policy, seed=0)
    state, first = fc.rollout(env, policy, state, 30, params=params[0])
    between(first)
    state, second = fc.rollout(env, policy, state, 30, params=params[1])
    fc.close(state)
    return joined([first, second])


def copies_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train(module, fused=True):
    optimizer = torch.optim.Adam(module.parameters(), lr=2.0, fused=fused)
    sum(parameter.square().sum() + parameter.sum() for parameter in module.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "num_envs", "name"), pairwise(KINDS, [None, 3], ["CartPole-v1", "torch/CartPole-v1"]))
def test_a_fused_optimizer_step_is_seen_by_the_next_rollout(kind, num_envs, name):
    """With no parameters given, as with the module's before and after the step given as an argument."""
    env = make_env(name, num_envs)
    module, policy = policies()[kind]
    versions = []

    def between(batch):
        versions.append(copies_of(module))
        versions.append(batch.clone())
        train(module)
        versions.append(copies_of(module))

    trained = collect_twice(env, policy, between)
    before, _, after = versions
    assert not torch.equal(before[next(iter(before))], after[next(iter(after))])
    untrained_module, untrained = policies()[kind]
    still = collect_twice(env, untrained)
    assert not torch.equal(trained["action"][..., 30:], still["action"][..., 30:])
    assert_same(trained[..., :30], still[..., :30])
    assert_same(trained, collect_twice(env, untrained, params=(before, after)))
    assert_same(trained, collect_twice(env, untrained, params=(TensorDict(before), TensorDict(after))))
    assert all(torch.equal(tensor, before[key]) for key, tensor in untrained_module.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_given_parameters_leave_the_module_alone(kind):
    env = make_env("CartPole-v1", 3)
    module, policy = policies()[kind]
    others, other = policies(seed=1)[kind]
    wanted = collect_twice(env, other)
    train_flags = [each.training for each in module.modules()]
    before, tensors = copies_of(module), list(module.parameters())
    nested = TensorDict.from_module(others).detach()
    for given in (others.state_dict(), nested, nested.flatten_keys("."), nested.to_dict()):
        assert_same(wanted, collect_twice(env, policy, params=(given, given)))
        assert all(one is two for one, two in zip(module.parameters(), tensors, strict=True))
        assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
        assert [each.training for each in module.modules()] == train_flags
        assert all(tensor.grad is None for tensor in tensors)
    assert all(tensor.requires_grad for tensor in others.parameters())
    assert_same(collect_twice(env, policy), collect_twice(env, policies()[kind][1]))  # its own again


def jax_policy(params):
    return fc.jax_policy(lambda params, x: x @ params["w"], params, head=fc.heads.categorical)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_replaced_jax_parameters_are_seen(name):
    env = make_env(name, 3)
    one, two = {"w": jax_weights(4, 2, 0) * 5}, {"w": jax_weights(4, 2, 1) * 5}
    policy = jax_policy(one)

    def between(_):
        policy.params = two

    replaced = collect_twice(env, policy, between)
    policy.params = one
    assert_same(replaced, collect_twice(env, policy, params=(None, two)))
    assert_same(replaced, collect_twice(env, jax_policy(two), params=(one, None)))
    assert policy.params is one
    assert not torch.equal(replaced["action"], collect_twice(env, policy)["action"])


def test_numpy_parameters_written_in_place_are_seen():
    env = make_env("CartPole-v1", 3)
    one, two = np.asarray(jax_weights(4, 2, 0)) * 5, np.asarray(jax_weights(4, 2, 1)) * 5
    policy = jax_policy({"w": one.copy()})

    def between(_):
        policy.params["w"][...] = two

    wanted = collect_twice(env, jax_policy({"w": jnp.asarray(one)}), params=(None, {"w": jnp.asarray(two)}))
    assert_same(wanted, collect_twice(env, policy, between))

"""Parameters as an argument, those of the policy at each rollout, and a module that a trainer uses meanwhile."""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
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
from tests.support.cases import HIDDEN, Recurrent, jax_weights, make_env, mlp
from tests.support.compare import assert_same, joined
from tests.support.policies import linear
from tests.support.running import pairwise


def make_policy(module):
    return fc.torch_policy(module, head=fc.heads.greedy)


@pytest.fixture
def env():
    return fc.make_env("CartPole-v1", num_envs=2)


def collect(env, policy, **options):
    return compare.collect(env, policy, 12, seed=0, **options)


def snapshot(module):
    return {name: (tensor.data_ptr(), tensor.tolist()) for name, tensor in module.state_dict().items()}


class Asking(nn.Linear):
    ask = staticmethod(lambda: None)

    def forward(self, x):
        self.ask()
        return super().forward(x)


def test_another_thread_may_score_with_other_weights_during_a_rollout(env, monkeypatch):
    module, main = Asking(4, 2), threading.current_thread()
    module.load_state_dict(linear(60.0).state_dict())
    policy = fc.torch_policy(module, head=fc.heads.categorical)
    batch = collect(env, policy)
    with ThreadPoolExecutor(1) as other:

        def score():
            if threading.current_thread() is main:
                other.submit(fc.evaluate_actions, policy, None, batch).result()

        monkeypatch.setattr(Asking, "ask", staticmethod(score))
        assert collect(env, policy, params=linear(-60.0).state_dict())["action"].unique().tolist() == [0]


def test_a_trainer_may_use_the_module_during_a_rollout(env):
    """The module that runs is a skeleton: hooks see it, and the user's own keeps its gradients and parameters."""
    module, seen = linear(1.0), []
    module.register_forward_hook(lambda called, *_: seen.append(called is module))
    module(torch.ones(1, 4)).sum().backward()
    gradient, before = module.weight.grad.clone(), snapshot(module)
    collect(env, make_policy(module))
    assert seen[0]
    assert not any(seen[1:])
    assert len(seen) == 13
    assert torch.equal(module.weight.grad, gradient)
    assert snapshot(module) == before


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
    policy = fc.torch_policy(module)
    one = collect(env, policy)
    with pytest.warns(match=r"Normed writes its buffers .*evaluate_actions do not keep that.*module.eval\(\)"):
        collect(env, policy)
    assert_same(collect(env, policy).exclude("dropped"), one.exclude("dropped"))
    assert snapshot(module) == before


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


def test_a_shared_submodule_has_all_its_names(env):
    module = nn.Sequential()
    module.one = module.two = linear(1.0)
    module.forward = lambda x: module.two(x)
    policy = make_policy(module)
    saved, once = policy.state_dict(), dict(linear(-1.0).named_parameters(prefix="one"))
    assert list(saved) == list(module.state_dict())
    assert collect(env, policy)["action"].unique().tolist() == [1]
    for params in (once, {name: -value for name, value in saved.items()}):
        policy.load(params)
        assert collect(env, policy)["action"].unique().tolist() == [0]
        policy.load(saved)
        assert collect(env, policy)["action"].unique().tolist() == [1]
    with pytest.raises(ValueError, match="holds one submodule in two places"):
        fc.population(policy, {name: value[None] for name, value in saved.items()})


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
    assert snapshot(module) == before


class Entangled(nn.Module):
    """Reaches its own submodule in a way that no copy follows."""

    def __init__(self, hold):
        super().__init__()
        self.inner = linear(1.0)
        self.held = hold(self)

    def forward(self, x):
        return self.inner(x)


HOLDS = {
    "a closure": lambda module: lambda x: module.inner(x),
    "an object": lambda module: SimpleNamespace(module=module.inner),
    "a parameter": lambda module: [module.inner.weight],
    "a closure in a partial": lambda module: functools.partial(lambda part, x: part(x) + module.held, module.inner),
}


@pytest.mark.parametrize("how", HOLDS)
def test_a_module_that_reaches_itself_acts_with_its_own_parameters_only(env, how):
    module = Entangled(HOLDS[how])
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
    assert snapshot(module) == before
    assert batch["mode"].all()


class Argmax(nn.Module):
    def forward(self, answer):
        return (answer + torch.randn_like(answer)).argmax(-1)


def on_tensordict(seed):
    module = nn.Sequential(mlp(4, 2, seed), Argmax())
    return fc.tensordict_policy(TensorDictModule(module, ["observation"], ["action"]))


HEAD = {"head": fc.heads.categorical}
KINDS = {  # by seed
    "plain": lambda seed: fc.torch_policy(mlp(4, 2, seed), **HEAD),
    "recurrent": lambda seed: fc.torch_policy(Recurrent(4, 2, seed), **HEAD, initial_state=torch.zeros(HIDDEN)),
    "tensordict": on_tensordict,
}


def collect_twice(env, policy, between=lambda: None, params=(None, None)):
    state = fc.init(env, policy, seed=0)
    state, first = fc.rollout(env, policy, state, 30, params=params[0])
    between()
    state, second = fc.rollout(env, policy, state, 30, params=params[1])
    fc.close(state)
    return joined([first, second])


def copies_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=2.0, fused=True)
    sum(parameter.square().sum() + parameter.sum() for parameter in module.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "num_envs", "name"), pairwise(KINDS, [None, 3], ["CartPole-v1", "torch/CartPole-v1"]))
def test_a_fused_optimizer_step_is_seen_by_the_next_rollout(kind, num_envs, name):
    """With no parameters given, as with the module's before and after the step given as an argument."""
    env, policy, untrained = make_env(name, num_envs), KINDS[kind](0), KINDS[kind](0)
    before = copies_of(policy.module)
    trained = collect_twice(env, policy, lambda: train(policy.module))
    after = copies_of(policy.module)
    still = collect_twice(env, untrained)
    assert not torch.equal(trained["action"][..., 30:], still["action"][..., 30:])
    assert_same(trained[..., :30], still[..., :30])
    assert_same(trained, collect_twice(env, untrained, params=(before, after)))
    assert_same(trained, collect_twice(env, untrained, params=(TensorDict(before), TensorDict(after))))
    assert all(torch.equal(tensor, before[key]) for key, tensor in untrained.module.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_given_parameters_leave_the_module_alone(kind):
    env, policy, other = make_env("CartPole-v1", 3), KINDS[kind](0), KINDS[kind](1)
    wanted, module = collect_twice(env, other), policy.module
    train_flags = [each.training for each in module.modules()]
    before, tensors = snapshot(module), list(module.parameters())
    nested = TensorDict.from_module(other.module).detach()
    for given in (other.module.state_dict(), nested, nested.flatten_keys("."), nested.to_dict()):
        assert_same(wanted, collect_twice(env, policy, params=(given, given)))
        assert all(one is two for one, two in zip(module.parameters(), tensors, strict=True))
        assert snapshot(module) == before
        assert [each.training for each in module.modules()] == train_flags
        assert all(tensor.grad is None for tensor in tensors)
    assert all(tensor.requires_grad for tensor in other.module.parameters())
    assert_same(collect_twice(env, policy), collect_twice(env, KINDS[kind](0)))  # its own again


def test_numpy_parameters_written_in_place_are_seen():
    env = make_env("CartPole-v1", 3)
    one, two = np.asarray(jax_weights(4, 2, 0)) * 5, np.asarray(jax_weights(4, 2, 1)) * 5

    def policy(weights):
        return fc.jax_policy(lambda params, x: x @ params["w"], {"w": weights}, **HEAD)

    written = policy(one.copy())
    wanted = collect_twice(env, policy(jnp.asarray(one)), params=(None, {"w": jnp.asarray(two)}))
    assert_same(wanted, collect_twice(env, written, lambda: np.copyto(written.params["w"], two)))

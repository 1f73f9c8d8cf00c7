"""Populations: each member does in its lanes what it does alone."""

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from funcollect.policies.population import MemberLanes
from tests.support.compare import assert_same, collect
from tests.support.running import in_soak
from tests.support.workers import multi

SIZE, LANES, STEPS = 2, 4, 24
HEAD = fc.heads.categorical
HOST, TORCH, JAX = "CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"


class Memory(nn.Module):
    """A recurrent network; the operator of its cell has no rule for `vmap`."""

    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, x, state):
        state = self.cell(x, state)
        return {"logits": self.last(state), "memory": state}, state


class Branching(nn.Linear):
    """Control flow that depends on data: neither `vmap` nor lowering takes it."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        return super().forward(x if bool(x.abs().max() < 1e6) else 0 * x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x):
        assert self.one.weight is self.two.weight
        return self.two(self.one(x))[:, :2]


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).eval()


def apply(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]


def recurrent(params, x, state):
    state = jnp.tanh(x @ params["first"] + state)
    return {"logits": state @ params["last"], "memory": state}, state


def arrays(seed):
    first, last = jax.random.split(jax.random.PRNGKey(seed))
    return {"first": jax.random.normal(first, (4, 8)), "last": jax.random.normal(last, (8, 2))}


def together(members):
    """The population of these members, and the members."""
    if members[0].backend == "jax":
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(member.params for member in members))
    else:
        saved = [member.state_dict() for member in members]
        stacked = {name: torch.stack([each[name] for each in saved]) for name in saved[0]}
    return fc.population(members[0], stacked), members


def in_torch(make, **keywords):
    torch.manual_seed(0)
    return together([fc.torch_policy(make(), head=HEAD, **keywords) for _ in range(SIZE)])


def in_jax(function, **keywords):
    return together([fc.jax_policy(function, arrays(seed), head=HEAD, **keywords) for seed in range(SIZE)])


def normalised(make):
    _, members = make()
    space, backend = fc.make_env(HOST).observation_space, members[0].backend
    for seed, member in enumerate(members):
        rows = torch.tensor(np.random.default_rng(seed).normal(size=(9, 4)).astype(np.float32) * (1 + seed))
        stats = fc.running_statistics.init(space, backend=backend)
        given = fc.interop.to_jax(rows) if backend == "jax" else rows
        members[seed] = fc.normalized(member, fc.running_statistics.update(stats, {"observation": given}))
    return together(members)


POPULATIONS = {
    "torch": partial(in_torch, network, compile="eager"),
    "lowered": lambda: (in_torch(network, compile="xla")[0], in_torch(network, compile="eager")[1]),
    "branching": partial(in_torch, Branching),
    "tied": partial(in_torch, Tied),
    "recurrent": partial(in_torch, Memory, initial_state=torch.zeros(8)),
    "jax": partial(in_jax, apply),
    "recurrent jax": partial(in_jax, recurrent, initial_state=np.zeros(8, np.float32)),
    "normalised": partial(normalised, partial(in_jax, apply)),
    "normalised torch": partial(normalised, partial(in_torch, network)),
}
PAIRS = [(HOST, name) for name in ("torch", "branching", "tied", "recurrent", "normalised", "normalised torch")]
PAIRS += [(TORCH, "torch"), (JAX, "torch"), (JAX, "lowered")]  # `test_traced` has that of a function of JAX
PAIRS += in_soak([(env, name) for env in (HOST, TORCH, JAX) for name in POPULATIONS if (env, name) not in PAIRS])


def blank(policy):
    other = copy.deepcopy(policy)
    other.load({name: 0 * leaf for name, leaf in other.state_dict().items()})
    return other


def environment(name, **keywords):
    return fc.make_env(name, num_envs=LANES, **keywords)


def collected(env, policy, **keywords):
    return collect(env, policy, STEPS, STEPS, seed=0, **keywords)


def assert_members(batch, alone):
    """The batch of a population has in each group of lanes what the members did `alone`."""
    for index, group in enumerate(batch.unflatten(0, (SIZE, -1))):
        own = alone[index].unflatten(0, (SIZE, -1))[index]
        assert torch.equal(group["action"], own["action"])
        for key, leaf in group.items(include_nested=True, leaves_only=True):
            torch.testing.assert_close(leaf, own[key], rtol=1e-4, atol=1e-5)
    assert not torch.equal(alone[0]["action"], alone[1]["action"])


def assert_as_alone(policy, members, name=HOST, **keywords):
    env = environment(name)
    assert_members(collected(env, policy, **keywords), [collected(env, member) for member in members])


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_members_do_what_they_do_alone(name, kind):
    assert_as_alone(*POPULATIONS[kind](), name)


@pytest.mark.parametrize("lanes", [1, 2, *in_soak([4])])
def test_workers_hold_parts_of_the_population(lanes):
    """Members are counted over the lanes of all workers: with one lane each, one of two or four does."""
    policy, members = POPULATIONS["torch"]()
    frames = {"frames_per_batch": LANES * STEPS, "total_frames": 2 * LANES * STEPS}
    envs = [fc.make_env(HOST, num_envs=lanes)] * (LANES // lanes)

    def run(policy):
        with multi(create_env_fn=envs, policy=policy, **frames) as collector:
            return torch.cat([batch.clone() for batch in collector], -1).flatten(0, -2)

    assert_members(run(policy), [run(member) for member in members])


def test_parameters_that_are_given_act():
    policy, members = POPULATIONS["torch"]()
    swapped = {name: leaf.flip(0) for name, leaf in policy.state_dict().items()}
    assert_as_alone(policy, members[::-1], params=swapped)
    policy.load(swapped)
    assert_as_alone(policy, members[::-1])


def test_copies_are_populations_and_changes_of_the_module_act():
    policy, _ = POPULATIONS["torch"]()
    env = environment(HOST)
    before = collected(env, policy)
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert_same(collected(env, copied), before)
    policy.module.train()
    assert not torch.equal(collected(env, policy)["action_log_prob"], before["action_log_prob"])
    policy.module.eval()
    assert torch.equal(collected(env, policy)["action_log_prob"], before["action_log_prob"])
    policy.module.forward = lambda x: x[:, :2] * 0
    assert not torch.equal(collected(env, policy)["action_log_prob"], before["action_log_prob"])
    del policy.module.forward
    assert torch.equal(collected(env, policy)["action_log_prob"], before["action_log_prob"])


SAVED = [("recurrent", HOST), ("jax", HOST), *in_soak([("torch", HOST), ("normalised torch", HOST), ("jax", JAX)])]


@pytest.mark.parametrize(("kind", "name"), SAVED)
def test_a_saved_run_continues(kind, name, tmp_path):
    policy, _ = POPULATIONS[kind]()
    env = environment(name)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), STEPS)
    fc.save(tmp_path / "state", state)
    _, wanted = fc.rollout(env, policy, state, STEPS)
    env = environment(name)
    assert_same(fc.rollout(env, policy, fc.load(tmp_path / "state", env, policy), STEPS)[1], wanted)
    frames = {"frames_per_batch": LANES * STEPS, "seed": 1}
    with fc.SyncDataCollector(environment(name), policy, **frames) as collector:
        next(collector)
        collector.save(tmp_path / "run")
        wanted = next(collector).clone()
    with fc.SyncDataCollector.load(tmp_path / "run", environment(name), blank(policy)) as collector:
        assert_same(next(collector), wanted)


def test_gradients_reach_all_members():
    policy, _ = POPULATIONS["torch"]()
    policy.module(torch.ones(LANES, 4)).sum().backward()
    gradients = [parameter.grad for parameter in policy.module.parameters()]
    assert all(gradient is not None and gradient.reshape(SIZE, -1).any(-1).all() for gradient in gradients[-2:])


def test_evaluation_gives_each_lane_of_each_member_as_many_episodes():
    policy, members = POPULATIONS["torch"]()
    env = environment(HOST)
    found, *alone = (
        fc.evaluate(env, each, episodes=2 * LANES, seed=0).returns.reshape(SIZE, -1) for each in (policy, *members)
    )
    for index in range(SIZE):
        assert torch.equal(found[index], alone[index][index])


def test_traced():
    policy, members = POPULATIONS["jax"]()
    env = environment(JAX)

    def run(policy, *params):
        state = fc.traced.init(env, policy, params[0], key=jax.random.PRNGKey(0))
        rollout = jax.jit(partial(fc.traced.rollout, env, policy, length=STEPS))
        return [rollout(each, state)[1]["action"] for each in params]

    (whole,) = run(policy, policy.params)
    for index, alone in enumerate(run(members[0], *(member.params for member in members))):
        lanes = slice(index * LANES // SIZE, (index + 1) * LANES // SIZE)
        assert jnp.array_equal(whole[:, lanes], alone[:, lanes])


def test_members_that_draw_random_numbers():
    def answer(params, drawn):
        return {"action": (drawn > params).astype(jnp.int32), "drawn": drawn}

    one_key = fc.jax_policy(lambda p, x, key: answer(p, jax.random.uniform(key, (len(x),))), jnp.array(0.5))
    all_keys = fc.jax_policy(lambda p, x, keys: answer(p, jax.vmap(jax.random.uniform)(keys)), jnp.array(0.5))
    env = environment(HOST)
    for member in (one_key, all_keys):
        drawn = collected(env, fc.population(member, jnp.array([0.2, 0.8])))["drawn"]
        assert len(drawn.unique()) > 0.9 * drawn.numel()
    assert torch.equal(drawn, collected(env, all_keys)["drawn"])


def test_a_module_that_vmap_refuses_draws_and_writes_as_often_as_its_members_do():
    class Noisy(Branching):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return {"logits": super().forward(x) + torch.rand(len(x), 2), "calls": self.calls.expand(len(x))}

    policy, _ = in_torch(Noisy)
    env = environment(HOST)
    first = collected(env, policy)
    assert first["calls"][0, :STEPS].tolist() == [*range(1, STEPS + 1)]
    assert torch.equal(first["action_log_prob"], collected(env, policy)["action_log_prob"])


def test_what_vmap_takes_may_depend_on_the_mode_of_the_module():
    class Checked(Branching):
        def forward(self, x):
            return super().forward(x) if self.training else nn.Linear.forward(self, x)

    policy, members = in_torch(Checked)
    for training in (False, True):
        for each in (policy, *members):
            each.module.train(training)
        assert_as_alone(policy, members)


def test_parameters_have_the_dtypes_and_the_number_of_the_members():
    policy, members = POPULATIONS["torch"]()
    doubles = fc.population(members[0], {name: leaf.double() for name, leaf in policy.state_dict().items()})
    assert torch.equal(collected(environment(HOST), doubles)["action"], collected(environment(HOST), policy)["action"])
    left_out, _ = torch.func.stack_module_state([member.module for member in members])  # buffers may be
    assert fc.population(members[0], left_out).module[1].running_mean.shape == (SIZE, 8)
    policy, _ = POPULATIONS["jax"]()
    policy.params = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), policy.params)
    with pytest.raises(ValueError, match="params have 4 members, expected 2"):
        fc.init(environment(HOST), policy, seed=0)


def test_lanes_that_do_not_divide_or_are_not_all():
    policy, in_jax, env = POPULATIONS["torch"]()[0], POPULATIONS["jax"]()[0], environment(JAX)
    state = fc.traced.init(env, in_jax, in_jax.params, key=jax.random.PRNGKey(0), total_lanes=2 * LANES)
    for call, says in (
        (lambda: MemberLanes.of_lanes(2, [4, 5], 4), "not in lanes added later"),
        (
            lambda: fc.init(fc.make_env(HOST, num_envs=3), policy, seed=0),
            "of 2 acts in 3 lanes, expected a multiple of",
        ),
        (lambda: policy.module(torch.zeros(3, 4)), "2 members of a population were given 3 rows"),
        (lambda: fc.traced.step(env, in_jax, in_jax.params, state), "acts in 4 of 8 lanes, expected all in tr"),
    ):
        with pytest.raises(PolicyError, match=says):
            call()


def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="deprecated"):  # the second since Torch 2.15
        return fc.torch_policy(torch.jit.trace(network(), torch.ones(2, 4)), head=HEAD)


def test_what_cannot_be_a_population():
    policy, (member, other) = POPULATIONS["torch"]()
    whole, jax_member = policy.state_dict(), POPULATIONS["jax"]()[1][0]
    short = {name: leaf for name, leaf in whole.items() if name != "0.bias"}
    wide = {"first": jnp.zeros((2, 4, 8)), "last": jnp.zeros((2, 8, 3))}
    for given, params, error, message in (
        (policy, policy.params, TypeError, "is a population already"),
        (fc.random_policy(environment(HOST)), {}, TypeError, r"expected one of funcollect\.torch_policy"),
        (scripted(), {}, TypeError, "has a scripted module"),
        (fc.torch_policy(lambda x: x), {}, TypeError, "over a module"),
        (member, [member.params, other.params], TypeError, "params is "),
        (fc.torch_policy(torch.nn.LazyLinear(2)), whole, ValueError, "has lazy layers"),
        (member, {}, ValueError, "first axes"),
        (member, whole | {"0.bias": whole["0.bias"][:1]}, ValueError, "first axes"),
        (member, short, ValueError, "params differ"),
        (member, whole | {"other": whole["0.bias"]}, ValueError, "params differ"),
        (jax_member, wide, ValueError, "params differ"),
    ):
        with pytest.raises(error, match=message):
            fc.population(given, params)
    for whole_one in (policy, fc.lower_policy(policy, environment(JAX))):
        with pytest.raises(TypeError, match="expected one member"):
            fc.evaluate_actions(whole_one, None, collected(environment(HOST), policy))
    with pytest.raises(TypeError, match="a population"):
        fc.normalized(policy, fc.running_statistics.init(environment(HOST).observation_space))

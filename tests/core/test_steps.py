"""Short rollouts in a row: the loop that they keep open changes no data, and saves the cost of opening it again."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.core.loops import eager
from tests.support.cases import mlp, torch_mlp
from tests.support.compare import assert_same, fresh, leaves
from tests.support.envs.jax_counting import counting
from tests.support.running import entered, in_soak, scaled

SOLO = {"exploration_type": fc.ExplorationType.DETERMINISTIC}


def steps(env, policy, state, count):
    """Some steps; return the state after them, and their batches."""
    batches = []
    for _ in range(count):
        state, batch = fc.step(env, policy, state)
        batches.append(batch)
    return state, batches


def linear(kind):
    torch.manual_seed(0)
    if kind == "torch":
        return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)
    return fc.jax_policy(lambda params, x: x @ params, jnp.full((4, 2), 0.1), head=fc.heads.categorical)


NET = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
IN_TORCH = fc.torch_policy(NET, head=fc.heads.categorical)


@pytest.mark.parametrize(("name", "policy", "num_envs", "most"), [
    ("CartPole-v1", IN_TORCH, None, 250), ("CartPole-v1", IN_TORCH, 1, 250), ("CartPole-v1", IN_TORCH, 8, 400),
    ("gymnax/CartPole-v1", linear("torch"), 3, 300), ("gymnax/CartPole-v1", linear("jax"), 3, 140),
])  # fmt: skip
def test_a_step_enters_few_functions(name, policy, num_envs, most):
    """The counts include the functions of the environment and the network, some 45 for each lane's step."""
    env, _, state = fresh(name, policy, num_envs=num_envs)
    state, _ = steps(env, policy, state, 3)
    names = entered(fc.step, env, policy, state)
    assert len(names) <= most, names


def epsilon_greedy():
    return fc.torch_policy(mlp(4, 2), head=fc.heads.epsilon_greedy(0.3))


CALLS = {
    "a step": lambda env, policy, state: fc.step(env, policy, state),
    "four": lambda env, policy, state: fc.rollout(env, policy, state, 4),
    "deterministic": lambda env, policy, state: fc.step(env, policy, state, **SOLO),
    "another epsilon": lambda env, policy, state: fc.step(env, policy, state, exploration={"epsilon": 0.9}),
    "a schedule": lambda env, policy, state: fc.step(env, policy, state, exploration={"epsilon": lambda n: n % 7 / 7}),
    "a limit": lambda env, policy, state: fc.rollout(env, policy, state, 4, max_frames_per_traj=3),
    "weights": lambda env, policy, state: fc.step(env, policy, state, params=mlp(4, 2, seed=3)),
    "a version": lambda env, policy, state: fc.step(env, policy, state.replace(policy_version=5)),
    "more lanes elsewhere": lambda env, policy, state: fc.step(env, policy, state.replace(total_lanes=7)),
    "a reset": lambda env, policy, state: fc.step(env, policy, fc.reset(env, state)),
    "an observation": lambda env, policy, state: fc.step(
        env, policy, state.replace(observation={("observation",): torch.ones(3, 4)})
    ),
}


@pytest.mark.parametrize("number", range(scaled(2)))
def test_an_open_state_gives_what_a_copy_of_it_gives(number):
    """Any calls in any order, over two pairs. A pickled copy has no open loop."""
    env, generator = fc.envs.CartPole(num_envs=3), torch.Generator().manual_seed(number)
    policies = epsilon_greedy(), epsilon_greedy()
    states = [fc.init(env, policy, seed=number) for policy in policies]
    for _ in range(60):
        which, call, again = (int(torch.randint(each, (), generator=generator)) for each in (2, len(CALLS), 3))
        for _ in range(1 + again):
            given = env, policies[which], states[which]
            copied = pickle.loads(pickle.dumps(states[which]))
            (after, wanted), (state, batch) = (
                [*CALLS.values()][call](*given[:2], each) for each in (copied, states[which])
            )
            assert_same(batch, wanted)
            assert torch.equal(state.returns, after.returns)
            assert torch.equal(state.step, after.step)
            states[which] = state


def test_a_state_that_is_a_value_serves_two_threads():
    env = fc.envs.CartPole(num_envs=3)
    policy = torch_mlp(env)
    state, _ = steps(env, policy, fc.init(env, policy, seed=0), 3)
    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(lambda _: steps(env, policy, state, 50)[1], range(8)))
    for run in runs[1:]:
        assert_same(run, runs[0])


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize(("name", "length"), [("CartPole-v1", 1), ("torch/CartPole-v1", 1), ("CartPole-v1", 4)])
def test_what_is_done_to_a_batch_changes_no_other(name, length, kind):
    """Neither writing into it, nor `share_memory_`, as a queue to another process calls it."""
    runs = []
    for do in (torch.Tensor.clone, lambda leaf: leaf.fill_(1), torch.Tensor.share_memory_):
        env, policy, state = fresh(name, linear(kind), num_envs=2)
        batches = []
        for _ in range(70):
            state, batch = fc.rollout(env, policy, state, length)
            batches.append(batch.clone())
            for leaf in leaves(batch).values():
                do(leaf)
        runs.append(batches)
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_a_file_of_a_step_holds_that_step_alone(tmp_path):
    _, _, state = pair = fresh("CartPole-v1", linear("torch"), num_envs=2)
    _, batches = steps(*pair[:2], state, 5)
    for name, batch in (("own", batches[-1]), ("copied", batches[-1].clone())):
        torch.save(batch, tmp_path / name)
    assert (tmp_path / "own").stat().st_size < 1.5 * (tmp_path / "copied").stat().st_size


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.start = nn.Linear(4, 2), nn.Parameter(torch.zeros(3))

    def forward(self, observation, hidden):
        return self.out(observation), hidden


def changed_start():
    net = Recurrent()
    head, own = fc.heads.categorical, {"initial_state": net.start, "record_state": True}
    return fc.envs.CartPole(num_envs=2), fc.torch_policy(net, head=head, **own), lambda: net.start.data.fill_(5), 5.0


class Explores(fc.PolicyBase):
    backend, params, exploration = "jax", jnp.zeros(()), {"epsilon": 0.25}

    def __call__(self, params, state, observation, noise, spec, exploration):
        return state, {"action": jnp.zeros(2, int), "seen": jnp.full((2,), exploration.values["epsilon"])}


def changed_exploration(name):
    policy = Explores()
    return fc.make_env(name, num_envs=2), policy, lambda: vars(policy).update(exploration={"epsilon": 0.75}), 0.75


def changed_limit():
    env = fc.envs.CartPole(num_envs=2)
    return env, fc.random_policy(env), lambda: setattr(env, "max_episode_steps", 1), True


@pytest.mark.parametrize(("make", "key"), [
    (changed_start, "recurrent"),
    (lambda: changed_exploration("gymnax/CartPole-v1"), "seen"),
    (lambda: changed_exploration("torch/CartPole-v1"), "seen"),
    (lambda: changed_exploration("CartPole-v1"), "seen"),
    (changed_limit, ("next", "truncated")),
])  # fmt: skip
def test_what_is_set_between_steps_acts_at_once(make, key):
    env, policy, change, wanted = make()
    state, batches = steps(env, policy, fc.init(env, policy, seed=0), 3)
    assert not (batches[-1][key] == wanted).any()
    change()
    _, batch = fc.step(env, policy, fc.reset(env, state))
    assert (batch[key] == wanted).all()


@pytest.mark.parametrize("name", ["gymnax/CartPole-v1", "torch/CartPole-v1", "CartPole-v1"])
def test_what_is_compiled_of_a_policy_cannot_be_set(name):
    env, policy, state = fresh(name, linear("jax"), steps=1, num_envs=2)
    policy.head = fc.heads.epsilon_greedy(0.5)
    with pytest.raises(fc.PolicyError, match="reads head, set since it was compiled"):
        fc.step(env, policy, state)


class Odd(fc.envs.CartPole):
    """Returns another transition from the third step on."""

    changes, count = {}, 0

    def step(self, *arguments):
        self.count += 1
        transition = super().step(*arguments)
        return transition._replace(**{n: f(getattr(transition, n)) for n, f in self.changes.items() if self.count > 2})


@pytest.mark.parametrize("changes", [
    {"reward": lambda reward: reward[:1]},
    {"observation": lambda seen: seen.double()},
    {"observation": lambda seen: seen[:1]},
    {"truncated": lambda flags: flags[0]},
    {"terminated": lambda flags: flags.float()},
    {"reward": lambda reward: 1.0},
])  # fmt: skip
@pytest.mark.parametrize("length", [1, 4])
def test_every_step_of_an_environment_is_checked(changes, length):
    env = Odd(num_envs=2)
    env.changes = changes
    policy = fc.random_policy(env)
    state, _ = steps(env, policy, fc.init(env, policy, seed=0), 2)
    with pytest.raises(fc.EnvError, match=rf"{next(iter(changes))}.* of .*Odd.* is "):
        fc.rollout(env, policy, state, length)


def test_a_state_that_has_lost_its_recurrent_state_is_refused():
    env, policy, _, _ = changed_start()
    state, _ = steps(env, policy, fc.init(env, policy, seed=0), 2)
    with pytest.raises(ValueError, match=r"continue with state\.replace"):
        fc.step(env, policy, state.replace(policy_state=state.policy_state._replace(recurrent=None)))


class Planner(fc.PolicyBase):
    """Chooses the action by making steps of its own from the state of a model."""

    backend, params = "torch", None

    def __init__(self, env, inner):
        self.env, self.inner, self.state = env, inner, fc.init(env, inner, seed=1)

    def __call__(self, params, policy_state, observation, noise, spec, exploration):
        self.state, seen = steps(self.env, self.inner, self.state, 2)
        return policy_state, {"action": seen[-1]["action"]}


def test_a_policy_may_make_steps_itself():
    env = fc.envs.CartPole(num_envs=2)
    inner = torch_mlp(env)
    _, wanted = steps(env, inner, fc.init(env, inner, seed=1), 20)
    policy = Planner(env, inner)
    _, batches = steps(env, policy, fc.init(env, policy, seed=0), 10)
    for batch, each in zip(batches, wanted[1::2], strict=True):
        assert torch.equal(batch["action"], each["action"])


def test_a_loop_stays_open_after_bad_arguments(monkeypatch):
    env, policy = fc.envs.CartPole(num_envs=2), linear("torch")
    state, _ = steps(env, policy, fc.init(env, policy, seed=0), 3)
    wanted = fc.step(env, policy, state)[1]
    with pytest.raises(ValueError, match="params differ"):
        fc.step(env, policy, state, params={"weigth": torch.ones(2, 4)})
    monkeypatch.setattr(eager, "open_actor", pytest.fail)
    assert_same(fc.step(env, policy, state)[1], wanted)


def test_an_interrupt_while_noise_is_drawn_leaves_no_noise_of_other_steps(monkeypatch):
    env, policy = fc.envs.CartPole(num_envs=2), linear("torch")
    wanted = fc.rollout(env, policy, fc.init(env, policy, seed=0), 1200)[1][:, 600:]
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 600)
    with monkeypatch.context() as patch:
        patch.setattr(eager, "draw_ahead", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            fc.rollout(env, policy, state, 600)
    assert_same(fc.rollout(env, policy, state, 600)[1], wanted)


def ctrl_c(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture(scope="module", params=["jax", *in_soak(["torch"])])
def open_pair(request):
    env, policy, state = fresh("gymnax/CartPole-v1", linear(request.param), num_envs=3)
    return request.param, env, policy, steps(env, policy, state, 3)[0]


def test_states_are_values_and_pairs_alternate(open_pair):
    kind, env, policy, state = open_pair
    other = linear(kind)
    first = fc.step(env, policy, state)
    others = fc.step(env, other, state)
    rollouts = [fc.rollout(env, policy, state, 4)[1] for _ in range(2)]
    again, alike = fc.step(env, policy, state), fc.step(env, other, state)
    assert_same(first[1], again[1])
    assert_same(others[1], alike[1])
    assert_same(*rollouts)
    assert_same(rollouts[0][:, 0], first[1])
    assert_same(fc.step(env, policy, first[0])[1], rollouts[0][:, 1])


def test_other_parameters_act_at_once(open_pair):
    kind, env, policy, state = open_pair
    before = fc.step(env, policy, state)[1]
    if kind == "torch":
        with torch.no_grad():
            policy.module.weight.mul_(-3.0)
    else:
        policy.params = policy.params.at[:, 0].set(5.0)
    after = fc.step(env, policy, state)[1]
    assert not torch.equal(after["action_log_prob"], before["action_log_prob"])
    assert_same(after, fc.rollout(env, policy, state.replace(step=state.step + 0), 1)[1][:, 0])


def test_large_columns_stay_apart():
    env, policy, state = fresh(counting(3))
    whole = fc.rollout(env, policy, state, 3000)[1]
    for t in range(0, 40, 10):
        state, part = fc.rollout(env, policy, state, 10)
        assert_same(part, whole[:, t : t + 10])
    assert whole["count"].untyped_storage().nbytes() < 3000 * 64

"""Every path takes the decisions that one path recorded, from the same observations, hidden states, lanes and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from tests.support.envs.replayed import replay_of
from tests.support.running import SCALE, in_soak

SEED, LANES, STEPS = 3, 16, 125
DECISIONS = 500_000 if SCALE > 1 else 2 * LANES * STEPS
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor
PATHS = [  # the environment's kind and the policy: its way of running, or "jax"
    *((kind, way) for kind in ("host", "torch") for way in ("eager", "xla", "inductor", "jax")),
    *(("jax", way) for way in ("eager", "inductor", "xla", "jax", "traced")),
]


class Network(nn.Module):
    """A layer of 32 units."""

    def __init__(self, size, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(size, 32), nn.Linear(32, outputs)

    def forward(self, observation):
        return self.second(torch.tanh(self.first(observation)))


class Cell(nn.Module):
    """A recurrent network: 32 hidden units of the observation and of the hidden state."""

    def __init__(self, size, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(size + 32, 32), nn.Linear(32, outputs)

    def forward(self, observation, hidden):
        hidden = torch.tanh(self.first(torch.cat([observation, hidden], -1)))
        return self.second(hidden), hidden


def in_jax(module):
    """The same network as a JAX function and its parameters."""
    params = {name: jnp.asarray(each.detach().numpy()) for name, each in module.named_parameters()}

    def apply_cell(params, observation, hidden):
        joined = jnp.concatenate([observation, hidden], -1)
        hidden = jnp.tanh(joined @ params["first.weight"].T + params["first.bias"])
        return hidden @ params["second.weight"].T + params["second.bias"], hidden

    def apply(params, observation):
        first = observation @ params["first.weight"].T + params["first.bias"]
        return jnp.tanh(first) @ params["second.weight"].T + params["second.bias"]

    return (apply_cell if isinstance(module, Cell) else apply), params


def network(env, head, recurrent):
    """A network with random weights, the same at every call, whose outputs differ enough to matter."""
    actions = env.action_spec.space
    outputs = int(actions.n) if head is fc.heads.categorical else 2 * actions.shape[0]
    torch.manual_seed(0)
    module = (Cell if recurrent else Network)(env.observation_space.shape[0], outputs)
    nn.init.normal_(module.second.weight, std=0.3)
    return module


def policy_of(module, head, way=None):
    recurrent = isinstance(module, Cell)
    if way in ("jax", "traced"):
        return fc.jax_policy(*in_jax(module), head=head, initial_state=jnp.zeros(32) if recurrent else None)
    return fc.torch_policy(module, head=head, compile=way, initial_state=torch.zeros(32) if recurrent else None)


def loop_of(kind, way):
    """The loop that runs on a path, so that no two paths are the same one."""
    if kind != "jax":
        return kind
    return "crossing" if way in ("eager", "inductor") else "fused"


def taken(path, env, module, head, **options):
    """A function from tables of observations [P, T + 1, ...], one after another, to the actions [P, T] of this path."""
    kind, way = path
    policy = policy_of(module, head, way)
    replay = None
    state = None

    @jax.jit
    def traced(params, state):
        return fc.traced.rollout(replay, policy, params, state, STEPS, **options)

    def act(table):
        nonlocal replay, state
        if replay is None:
            replay = replay_of(kind, env, table, SEED)
            state = fc.init(replay, policy, seed=SEED)
            assert fc.explain(replay, policy).loop == loop_of(kind, way)
        state = replay.show(state, table)
        if way == "traced":
            state, arrays = traced(policy.params, state)
            return np.asarray(arrays["action"]).swapaxes(0, 1)
        state, batch = fc.rollout(replay, policy, state, STEPS, **options)
        return batch["action"].numpy()

    return act


def differences(name, head, recurrent=False, **options):
    """Record a run, and compare the actions of every path: for each the differences |a - b| of all decisions.

    The hidden states of a recurrent network follow from the observations, and are carried from rollout to rollout.
    """
    env = fc.make_env(name, num_envs=LANES, **({"max_episode_steps": 10**9} if recurrent else {}))
    module = network(env, head, recurrent)
    policy = policy_of(module, head)
    acting = {path: taken(path, env, module, head, **options) for path in PATHS}
    found = {path: [] for path in PATHS}
    state = fc.init(env, policy, seed=SEED)
    for _ in range(DECISIONS // (LANES * STEPS)):
        state, batch = fc.rollout(env, policy, state, STEPS, **options)
        last = np.asarray(state.observation["observation",])[:, None]
        table = np.concatenate([batch["observation"].numpy(), last], 1)
        for path, act in acting.items():
            apart = np.abs(act(table).astype(np.float64) - batch["action"].numpy())
            found[path].append(apart.reshape(LANES * STEPS, -1))
    return {path: np.concatenate(each).max(1) for path, each in found.items()}


DISCRETE = in_soak(
    [("CartPole-v1", "RANDOM"), ("gymnax/CartPole-v1", "DETERMINISTIC"), ("CartPole-v1", "DETERMINISTIC")]
)


@pytest.mark.parametrize(("name", "exploration"), [("gymnax/CartPole-v1", "RANDOM"), *DISCRETE])
def test_categorical_decisions_are_the_same_on_every_path(name, exploration):
    found = differences(name, fc.heads.categorical, exploration_type=fc.ExplorationType[exploration])
    wrong = {path: int((each > 0).sum()) for path, each in found.items()}
    assert max(wrong.values()) <= 1e-5 * DECISIONS, wrong


CONTINUOUS = in_soak([("HalfCheetah-v5", "RANDOM"), ("HalfCheetah-v5", "DETERMINISTIC")])


@pytest.mark.parametrize(("name", "exploration"), [("Pendulum-v1", "RANDOM"), *CONTINUOUS])
def test_actions_of_a_tanh_normal_head_agree_to_rounding_on_every_path(name, exploration):
    """The network of Pendulum is recurrent. Its table shows an episode without an end, so that rounding adds up."""
    options = {"recurrent": name == "Pendulum-v1", "exploration_type": fc.ExplorationType[exploration]}
    found = differences(name, fc.heads.tanh_normal, **options)
    largest = {path: float(each.max()) for path, each in found.items()}
    assert max(largest.values()) < 1e-5, largest

"""Every path takes the decisions that one path recorded, from the same observations, hidden states, lanes and steps.

The environments show recorded observations whatever the actions are, so that every path takes the same decisions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed
from tests.support.running import SCALE, in_soak

SEED, LANES, STEPS, HIDDEN = 3, 16, 125, 32
DECISIONS = 500_000 if SCALE > 1 else 2 * LANES * STEPS
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor
PATHS = [  # the environment's kind and the policy: its way of running, or "jax"
    *((kind, way) for kind in ("host", "torch") for way in ("eager", "xla", "inductor", "jax")),
    *(("jax", way) for way in ("eager", "inductor", "xla", "jax", "traced")),
]


def row(steps, table):
    """The row of the table after so many steps in all, of which each table holds as many as it has rows but one."""
    return (steps - 1) % (table.shape[1] - 1) + 1


class HostReplay(fc.envs.HostEnvBase):
    """Shows ``table[:, 0]`` at first and ``table[:, t]`` after the step t of a rollout; `table` is [P, T + 1, ...]."""

    def __init__(self, observation_space, action_space, table):
        self.observation_space, self.action_space = observation_space, action_space
        super().__init__(num_envs=len(table))
        self.table = table

    def open(self):
        return ReplayedSimulators(self)

    def show(self, state, table):
        """Go on with another table, which begins where the last one ended."""
        self.table = table
        return state


class ReplayedSimulators(fc.envs.SimulatorsBase):
    def __init__(self, env):
        super().__init__(env)
        self.env, self.steps = env, 0

    def reset(self, lanes, seeds, /):
        self.observation["observation",][lanes] = self.env.table[lanes, 0]

    def step(self, lanes, action, /):
        self.steps += 1
        self.observation["observation",][lanes] = self.env.table[lanes, row(self.steps, self.env.table)]
        over = np.zeros(len(lanes), bool)
        return np.zeros(len(lanes)), over, over, ()


class TorchReplay(fc.envs.TorchEnvBase):
    """`HostReplay` in Torch; the table is the environment's parameters."""

    def __init__(self, observation_space, action_space, table):
        self.observation_space, self.action_space = observation_space, action_space
        self.params = torch.from_numpy(table)
        super().__init__(num_envs=len(table))

    def reset(self, key, params, /):
        return torch.zeros(len(key), dtype=torch.int64), params[:, 0]

    def step(self, key, steps, action, params, /):
        steps, over = steps + 1, torch.zeros(len(key), dtype=torch.bool)
        return fc.envs.Transition(steps, params[torch.arange(len(key)), row(steps, params)], over.float(), over, over)

    def show(self, state, table):
        return state.replace(env_params=torch.from_numpy(table))


class JaxReplay(fc.envs.JaxEnvBase):
    """`HostReplay` in JAX; a lane finds its row of the table by the key of its first episode."""

    def __init__(self, observation_space, action_space, table):
        self.observation_space, self.action_space = observation_space, action_space
        keys = [fold(key_from_seed(SEED), Purpose.RESET, lane, 0) for lane in range(len(table))]
        self.keys = jnp.array(keys, jnp.uint32)
        self.params = self.keys, jnp.asarray(table)
        super().__init__(num_envs=len(table))

    def reset(self, key, params, /):
        keys, table = params
        lane = (keys == key).all(-1).argmax()
        return (lane, jnp.int32(0)), table[lane, 0]

    def step(self, key, state, action, params, /):
        lane, steps = state
        table = params[1]
        return fc.envs.Transition((lane, steps + 1), table[lane, row(steps + 1, table)], 0.0, False, False)

    def show(self, state, table):
        return state.replace(env_params=(self.keys, jnp.asarray(table)))


REPLAYS = {"host": HostReplay, "torch": TorchReplay, "jax": JaxReplay}


def answer(xp, params, observation, hidden=None):
    """A layer of hidden units, of the hidden state too if there is one."""
    inputs = observation if hidden is None else xp.concatenate([observation, hidden], -1)
    units = xp.tanh(inputs @ params["first"] + params["bias"])
    return units @ params["second"] if hidden is None else (units @ params["second"], units)


class Network(nn.Module):
    """The same function in Torch, with random weights, the same in each, whose outputs differ enough to matter."""

    def __init__(self, env, head, recurrent):
        super().__init__()
        actions, (size,) = env.action_spec.space, env.observation_space.shape
        outputs = int(actions.n) if head is fc.heads.categorical else 2 * actions.shape[0]
        shapes = {"first": (size + HIDDEN * recurrent, HIDDEN), "bias": (HIDDEN,), "second": (HIDDEN, outputs)}
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            scale = 0.3 if name == "second" else 0.5 / shape[0] ** 0.5  # a hidden state fades
            self.register_parameter(name, nn.Parameter(scale * torch.randn(shape, generator=generator)))
        self.recurrent = recurrent

    def forward(self, observation, hidden=None):
        return answer(torch, {"first": self.first, "bias": self.bias, "second": self.second}, observation, hidden)


def policy_of(module, head, way=None):
    if way not in ("jax", "traced"):
        initial = torch.zeros(HIDDEN) if module.recurrent else None
        return fc.torch_policy(module, head=head, compile=way, initial_state=initial)
    params = {name: jnp.asarray(each.detach().numpy()) for name, each in module.named_parameters()}
    if module.recurrent:
        apply = lambda params, x, hidden: answer(jnp, params, x, hidden)  # noqa: E731
        return fc.jax_policy(apply, params, head=head, initial_state=jnp.zeros(HIDDEN))
    return fc.jax_policy(lambda params, x: answer(jnp, params, x), params, head=head)


def loop_of(kind, way):
    """The loop that runs on a path, so that no two paths are the same one."""
    if kind != "jax":
        return kind
    return "crossing" if way in ("eager", "inductor") else "fused"


def taken(path, env, module, head, **options):
    """A function from tables of observations [P, T + 1, ...], one after another, to the actions [P, T] of this path."""
    kind, way = path
    policy, replay, state = policy_of(module, head, way), None, None

    @jax.jit
    def traced(params, state):
        return fc.traced.rollout(replay, policy, params, state, STEPS, **options)

    def act(table):
        nonlocal replay, state
        if replay is None:
            space = spaces.Box(-np.inf, np.inf, table.shape[2:], table.dtype.type)
            replay = REPLAYS[kind](space, env.action_space, table)
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
    module = Network(env, head, recurrent)
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


MORE = in_soak([("CartPole-v1", "RANDOM"), ("gymnax/CartPole-v1", "DETERMINISTIC"), ("CartPole-v1", "DETERMINISTIC")])


@pytest.mark.parametrize(("name", "exploration"), [("gymnax/CartPole-v1", "RANDOM"), *MORE])
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

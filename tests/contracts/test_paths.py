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
from tests.support.compare import rollouts
from tests.support.running import SCALE, in_soak

SEED, LANES, STEPS, HIDDEN = 3, 16, 125, 32
ROLLOUTS = 250 if SCALE > 1 else 2
DECISIONS = ROLLOUTS * LANES * STEPS
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # Inductor
PATHS = [  # the environment's kind and the policy: its way of running, or "jax"
    *((kind, way) for kind in ("host", "torch") for way in ("eager", "xla", "inductor", "jax")),
    *(("jax", way) for way in ("eager", "inductor", "xla", "jax", "traced")),
]


class HostReplay(fc.envs.HostEnvBase):
    """Shows ``table[:, t]`` after t steps; `table` is [P, T + 1, ...]."""

    def __init__(self, observation_space, action_space, table):
        self.observation_space, self.action_space = observation_space, action_space
        super().__init__(num_envs=len(table))
        self.table = table

    def open(self):
        return ReplayedSimulators(self)


class ReplayedSimulators(fc.envs.SimulatorsBase):
    def __init__(self, env):
        super().__init__(env)
        self.table, self.steps = env.table, 0

    def reset(self, lanes, seeds, /):
        self.observation["observation",][lanes] = self.table[lanes, 0]

    def step(self, lanes, action, /):
        self.steps += 1
        self.observation["observation",][lanes] = self.table[lanes, self.steps]
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
        return fc.envs.Transition(steps, params[torch.arange(len(key)), steps], over.float(), over, over)


class JaxReplay(fc.envs.JaxEnvBase):
    """`HostReplay` in JAX; a lane finds its row of the table by the key of its first episode."""

    def __init__(self, observation_space, action_space, table):
        self.observation_space, self.action_space = observation_space, action_space
        keys = [fold(key_from_seed(SEED), Purpose.RESET, lane, 0) for lane in range(len(table))]
        self.params = jnp.array(keys, jnp.uint32), jnp.asarray(table)
        super().__init__(num_envs=len(table))

    def reset(self, key, params, /):
        keys, table = params
        lane = (keys == key).all(-1).argmax()
        return (lane, jnp.int32(0)), table[lane, 0]

    def step(self, key, state, action, params, /):
        lane, steps = state
        return fc.envs.Transition((lane, steps + 1), params[1][lane, steps + 1], 0.0, False, False)


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


def taken(path, env, module, head, table, **options):
    """The actions [P, T] of a path, given the observations [P, T + 1, ...]."""
    kind, way = path
    policy, space = policy_of(module, head, way), spaces.Box(-np.inf, np.inf, table.shape[2:], table.dtype.type)
    replay, actions = REPLAYS[kind](space, env.action_space, table), []
    state = fc.init(replay, policy, seed=SEED)
    in_jax = "crossing" if way in ("eager", "inductor") else "fused"
    assert fc.explain(replay, policy).loop == (in_jax if kind == "jax" else kind)  # so no two paths are the same
    traced = jax.jit(lambda params, state: fc.traced.rollout(replay, policy, params, state, STEPS, **options))
    for _ in range(ROLLOUTS):
        if way == "traced":
            state, arrays = traced(policy.params, state)
            actions.append(np.asarray(arrays["action"]).swapaxes(0, 1))
        else:
            state, batch = fc.rollout(replay, policy, state, STEPS, **options)
            actions.append(batch["action"].numpy())
    return np.concatenate(actions, 1)


# Inductor, whose program is the same in each loop, compiles once; recurrent networks take a path of each loop.
ALL = [path for path in PATHS if SCALE > 1 or path[1] != "inductor" or path[0] == "host"]
FEW = [("host", "xla"), ("torch", "jax"), ("jax", "eager"), ("jax", "jax"), ("jax", "traced")]
RECURRENT = PATHS if SCALE > 1 else FEW


def differences(name, head, recurrent=False, **options):
    """Record a run, and compare the actions of every path: for each the largest |a - b| of every decision.

    The hidden states of a recurrent network follow from the observations, and are carried from rollout to rollout.
    """
    env = fc.make_env(name, num_envs=LANES, **({"max_episode_steps": 10**9} if recurrent else {}))
    module = Network(env, head, recurrent)
    policy = policy_of(module, head)
    state, run = rollouts(env, policy, fc.init(env, policy, seed=SEED), [STEPS] * ROLLOUTS, **options)
    last = np.asarray(state.observation["observation",])[:, None]
    table, wanted = np.concatenate([run["observation"].numpy(), last], 1), run["action"].numpy()
    found = {path: taken(path, env, module, head, table, **options) for path in (RECURRENT if recurrent else ALL)}
    apart = {path: np.abs(actions.astype(np.float64) - wanted) for path, actions in found.items()}
    return {path: each.reshape(LANES, ROLLOUTS * STEPS, -1).max(-1) for path, each in apart.items()}


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

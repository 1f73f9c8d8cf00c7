"""Every shipped policy can be called as `fc.Policy` says, and one of a user's own needs little.

Wrong arguments raise where that is known, and keys of a Dict space are passed by name.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import funcollect as fc
from funcollect.keys import draw_ahead
from funcollect.specs import assemble
from tests.envs.test_agents import Leaving
from tests.support.cases import mlp
from tests.support.compare import assert_same
from tests.support.compare import collect as run_of
from tests.support.envs.light_envs import Nested
from tests.support.misuse import Rigged
from tests.support.policies import Lean
from tests.support.running import once

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # of torch.compile's imports

LANES = 3


def push(observation):
    return (observation[:, 2] > 0).long()


OF_HEADS = {
    "torch": lambda head: fc.torch_policy(mlp(4, 2), head=head),
    "jax": lambda head: fc.jax_policy(lambda params, x: x @ params, jnp.eye(4)[:, :2], head=head),
}
HEADS = (fc.heads.categorical, fc.heads.greedy, fc.heads.epsilon_greedy(0.5))
SHIPPED = {
    "random": fc.random_policy,
    "torch": lambda env: fc.torch_policy(push),
    "tensordict": lambda env: fc.tensordict_policy(TensorDictModule(push, ["observation"], ["action"])),
    "mlp": lambda env: fc.make_policy("mlp", env),
    **{f"{kind}, {head.name}": lambda env, kind=kind, head=head: OF_HEADS[kind](head)
       for kind in OF_HEADS for head in HEADS},
}  # fmt: skip


@pytest.mark.parametrize("way", [fc.ExplorationType.RANDOM, fc.ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_call_answers_as_a_step_does(name, way):
    env = fc.make_env("CartPole-v1", num_envs=LANES)
    policy = SHIPPED[name](env)
    state = fc.init(env, policy, seed=4)
    wanted = policy.noise(env.action_spec)
    noise = None if wanted is None else draw_ahead(wanted, state.key, np.arange(LANES), 0, 1)[0]
    observation = assemble(env.observation_space, state.observation)
    if policy.backend == "jax":
        observation, noise = observation.numpy(), None if noise is None else noise.numpy()
    before = state.policy_state
    _, outputs = policy(policy.prepare(None), before, observation, noise, env.action_spec, fc.Exploration(way))
    _, batch = fc.step(env, policy, state, exploration_type=way)
    assert set(outputs) <= set(batch.keys())
    np.testing.assert_array_equal(np.asarray(outputs["action"]), batch["action"])
    if "action_log_prob" in outputs:
        np.testing.assert_allclose(np.asarray(outputs["action_log_prob"]), batch["action_log_prob"], rtol=1e-5)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_a_policy_of_ones_own_needs_a_call_alone(name):
    env = fc.make_env(name, num_envs=LANES)
    assert isinstance(Lean(), fc.Policy)
    _, batch = fc.rollout(env, Lean(), fc.init(env, Lean(), seed=0), 10)
    assert torch.equal(batch["action"], (batch["observation"][..., 2] > 0).long())


class Noisy(fc.PolicyBase):
    """Takes its noise, and its observation, for arrays of JAX, and records the noise and the number of its calls."""

    backend, params = "jax", None

    def __init__(self, noise):
        self.wanted = noise

    def noise(self, spec, /):
        return self.wanted

    def init(self, key, num_envs, /):
        return jnp.zeros(num_envs, jnp.int32)

    def __call__(self, params, count, observation, noise, spec, exploration, /):
        lanes = len(observation)
        if self.wanted.kind == "key":
            assert (noise.shape, noise.dtype) == ((2,), jnp.uint32)
            drawn = jax.random.normal(noise, (lanes, 2))
        else:
            assert (noise.shape, noise.dtype) == ((lanes, *self.wanted.shape), jnp.float32)
            drawn = jnp.sin(noise)
        action = (jnp.tanh(observation[:, 2]) + drawn.sum(-1) > 0).astype(jnp.int32)
        return count + 1, {"action": action, "drawn": drawn, "count": count}


NOISES = [fc.Noise(kind="normal", shape=(2,)), fc.Noise(kind="key")]


@pytest.mark.parametrize(("name", "noise"), once(["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"], NOISES))
def test_a_jax_policy_of_ones_own_gets_its_noise_as_arrays_of_jax_and_begins_with_each_episode(name, noise):
    env = fc.make_env(name, num_envs=LANES)
    policy = Noisy(noise)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 60)
    assert batch["drawn"].shape == (LANES, 60, 2)
    assert len(batch["drawn"].unique()) == 360  # another draw for each lane and step
    assert batch["next", "done"].any()
    assert torch.equal(batch["count"].long(), batch["collector", "step"])


def test_policies_by_group_act_for_their_groups_in_any_order():
    env = fc.envs.from_pettingzoo(Leaving, num_envs=LANES)

    def run(**actions):
        constant = {name: fc.torch_policy(lambda x, n=n: torch.full((len(x),), n)) for name, n in actions.items()}
        return run_of(env, fc.by_group(constant), 20)

    assert_same(run(ant=1, bee=2), run(bee=2, ant=1))  # rewards show which action an agent took


class Bare:
    backend, params = "torch", None
    noise = init = prepare = lambda self, *_: None
    __call__ = Lean.__call__


def test_what_a_policy_lacks_is_named():
    env = fc.make_env("CartPole-v1")
    lacking = r"lacks .'exploration', .*'actor', 'finish'.: derive from funcollect.PolicyBase"
    with pytest.raises(TypeError, match=lacking):
        fc.init(env, Bare(), seed=0)


class Takes(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


class Own(fc.PolicyBase):
    backend, params = "torch", None

    def __call__(self, params, observation):
        return observation


def one(observation):
    return torch.zeros(len(observation), dtype=torch.int64)


def two(observation, other):
    return one(observation)


def many(*arguments):
    return one(arguments[0])


def three(pixels, mode, other):
    return torch.zeros(len(mode), 2)


def network(function, *keys):
    return TensorDictModule(Takes(function), [*keys], ["action"])


def collect(policy=None, env="CartPole-v1", **kwargs):
    kind = kwargs.pop("kind", fc.SyncDataCollector)
    return kind(env, policy, frames_per_batch=8, total_frames=8, **kwargs)


WORKERS = functools.partial(fc.MultiSyncDataCollector, in_process=True)
GREEDY = fc.torch_policy(nn.Linear(4, 2), head=fc.heads.epsilon_greedy(0.5))
WRONG = {
    "a function": (lambda: collect(two), r"policy takes \(observation.*, other.*, expected one argument, the obs"),
    "a module": (lambda: collect(Takes(two)), r"policy takes .*other"),
    "in workers": (lambda: collect(Takes(two), ["CartPole-v1"], kind=WORKERS), r"policy takes .*other"),
    "of keys": (lambda: collect(three, Nested), r"for each of some of its keys \['mode', 'pixels'\]"),
    "torch_policy": (lambda: fc.torch_policy(Takes(two)), r"module takes .*other.* \(a recurrent one: initial_state="),
    "a recurrent one": (lambda: fc.torch_policy(Takes(one), initial_state=torch.zeros(3)), "observation and the state"),
    "jax_policy": (lambda: fc.jax_policy(one, None), r"apply takes .*, expected a function \(params, observation\)"),
    "three for JAX": (lambda: fc.jax_policy(lambda p, x, h: x, None), r"takes \(p, x, h\).*recurrent one: initial"),
    "beside a key": (lambda: fc.jax_policy(lambda p, x, *, key, to: x, None), r"\(params, observation, key\) ->"),
    "recurrent in JAX": (lambda: fc.jax_policy(two, None, initial_state=0.0), r"\(params, observation, state\)"),
    "postproc": (lambda: collect(postproc=lambda: 0), r"postproc takes \(\), expected a function from batch to batch"),
    "a factory": (lambda: collect(policy_factory=one), r"policy_factory takes \(observation\), .*without arguments"),
    "a schedule": (lambda: collect(GREEDY, exploration={"epsilon": two}), r"exploration\['epsilon'\] takes .*expect"),
    "on a TensorDict": (lambda: fc.tensordict_policy(two), r"module takes .*expected a TensorDictModule or"),
    "a network on one": (lambda: collect(TensorDictSequential(network(two, "observation"))), r"of the in_keys .* its"),
    "a compiled module": (lambda: collect(torch.compile(Takes(two))), r"policy takes .*other"),
    "too few": (lambda: fc.tensordict_policy(network(one, "observation", "done")), "in_keys"),
    "of one's own": (lambda: fc.init(fc.make_env("CartPole-v1"), Own(), seed=0), r"__call__ takes .*collect.Policy"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_number_of_arguments_is_found_before_any_step(kind):
    make, message = WRONG[kind]
    with pytest.raises((TypeError, fc.WorkerError), match=message) as raised:
        make()
    assert "change its parameters" in str(raised.value)


class Called(nn.Module):
    def __call__(self, observation):
        return one(observation)

    def forward(self, observation, other, third): ...


@functools.wraps(two)
def supplied(*arguments):
    return two(*arguments, None)


PASSES = [one, many, supplied, functools.partial(two, other=0), Takes(many), Called(), network(many, "observation")]
COMPILED = TensorDictModule(torch.compile(Takes(one), backend="eager"), ["observation"], ["action"])


@pytest.mark.parametrize("policy", [*PASSES, COMPILED])
def test_any_number_of_arguments_passes(policy):
    with collect(policy, env=lambda: fc.make_env("CartPole-v1", num_envs=2)) as collector:
        assert next(collector)["action"].eq(0).all()


class TwoKeys(Rigged):
    action_space = spaces.Box(-1, 1, (2,))

    def __init__(self):
        space = spaces.Dict(a=self.action_space, b=self.action_space)
        super().__init__(space=space, good={"a": np.zeros(2, np.float32), "b": np.full(2, 0.5, np.float32)})


BY_NAME = [
    lambda a, b=None: a if b is None else b,
    lambda b=None, a=None: a if b is None else b,
    lambda b, a: b + 0 * a,
    lambda b, a, scale=1.0: scale * b + 0 * a,
]


@pytest.mark.parametrize("function", BY_NAME)
@pytest.mark.parametrize("kwargs", [{}, {"num_envs": 3}])
def test_keys_are_passed_by_name(function, kwargs):
    with collect(Takes(function), TwoKeys, create_env_kwargs=kwargs) as collector:
        assert (next(collector)["action"] == 0.5).all()


@pytest.mark.parametrize("function", [lambda a, *, b: b, lambda a, scale=1.0, b=None: b])
def test_what_cannot_be_passed_by_position_is_refused(function):
    with pytest.raises(TypeError, match=r"\['a', 'b'\] are keys of the observation.*reorder its arguments"):
        collect(Takes(function), TwoKeys)

"""Policies of JAX functions, over NumPy rows and over tensors, and of networks of Flax, Equinox and Haiku.

Tests of plugins have a network of `flax.nnx`.
"""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen
from gymnasium import spaces
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional

import funcollect as fc
from funcollect.core.loops import tensor
from funcollect.interop import to_torch
from funcollect.specs import assemble
from tests.policies.test_policy_protocol import Noisy
from tests.support.cases import jax_keyed, jax_mlp, jax_recurrent, make_env
from tests.support.compare import assert_close, assert_same, bits, collect
from tests.support.misuse import Rigged
from tests.support.running import in_soak, once

EXAMPLE = jnp.zeros((1, 4))


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.BatchNorm(use_running_average=True)(linen.Dense(16)(x)))
        return {"logits": linen.Dense(2)(x), "state_value": linen.Dense(1)(x)}


def in_linen(seed):
    module = LinenNetwork()
    return module.apply, module.init(jax.random.key(seed), EXAMPLE)


class EqxNetwork(eqx.Module):
    torso: eqx.nn.MLP
    actor: eqx.nn.Linear
    critic: eqx.nn.Linear

    def __call__(self, x):
        x = self.torso(x)
        return {"logits": self.actor(x), "state_value": self.critic(x)}


def in_equinox(seed):
    one, two, three = jax.random.split(jax.random.key(seed), 3)
    torso = eqx.nn.MLP(4, 16, 16, 1, activation=jax.nn.tanh, key=one)
    module = EqxNetwork(torso, eqx.nn.Linear(16, 2, key=two), eqx.nn.Linear(16, 1, key=three))
    params, static = eqx.partition(module, eqx.is_array)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params


def haiku_network(x):
    x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(jax.nn.tanh(hk.Linear(16)(x)))
    return {"logits": hk.Linear(2)(x), "state_value": hk.Linear(1)(x)}


def in_haiku(seed):
    pair = hk.without_apply_rng(hk.transform(haiku_network))
    return pair.apply, pair.init(jax.random.key(seed), EXAMPLE)


LIBRARIES = {"linen": in_linen, "equinox": in_equinox, "haiku": in_haiku}


SCALE = 1.0
ENVS = ["CartPole-v1", "torch/CartPole-v1"]
GYMNAX = "gymnax/CartPole-v1"
both = pytest.mark.parametrize("name", ENVS)
each_loop = pytest.mark.parametrize("name", [*ENVS, GYMNAX])


def push(x):
    return (x[:, 2] > 0).astype(jnp.int32)


DTYPES = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16"]
EXTRAS = {dtype: lambda x, dtype=dtype: (abs(x) * 100).astype(dtype) for dtype in DTYPES}
EDGES = {
    "integers": np.array([-(2**31), 2**31 - 1], np.int32),
    "words": np.array([2**32 - 1, 2**31], np.uint32),
    "float": np.array([np.inf, -0.0, 1e-40, 3.4e38], np.float32),
    "half": np.array([65504.0, 6e-8], np.float16),
    "brain": np.array([3.0e38, -1.0], jnp.bfloat16),
}
EXTRAS |= {name: lambda x, row=row: jnp.tile(jnp.asarray(row), (len(x), 1)) for name, row in EDGES.items()}
EXTRAS |= {"[P,3,2]": lambda x: x[:, :3, None] * x[:, None, :2], "[P]": lambda x: x[:, 0], "[P,0]": lambda x: x[:, :0]}


@pytest.mark.parametrize(("name", "num_envs"), once([*ENVS, GYMNAX], [3, None]))
def test_extras_of_any_shape_and_dtype_are_recorded_as_they_are(name, num_envs):
    extras = EXTRAS | ({"complex64": lambda x: x.astype("complex64")} if name == GYMNAX else {})

    def apply(_, x):
        return {"action": push(x), **{key: make(x) for key, make in extras.items()}}

    batch = collect(fc.make_env(name, num_envs=num_envs), fc.jax_policy(apply, {}), 80)
    assert batch["next", "done"].any()
    rows = batch["observation"].reshape(-1, 4)
    assert batch["action"].dtype == torch.int64
    for key, wanted in to_torch(jax.jit(lambda x: apply({}, x))(jnp.asarray(rows.numpy()))).items():
        assert batch[key].dtype == (torch.int64 if key == "action" else wanted.dtype), key
        assert bits(batch[key].reshape(wanted.shape)) == bits(wanted.to(batch[key].dtype)), key


def keyed(params, x, key):
    own = jnp.broadcast_to(key, (len(x), 2))
    return {"logits": x[:, :2] * params, "key": own, "drawn": jax.random.uniform(key, (len(x), 2))}


@each_loop
def test_a_function_with_a_key_gets_a_fresh_one_at_every_step(name):
    env, policy = fc.make_env(name, num_envs=3), fc.jax_policy(keyed, 1.0, head=fc.heads.categorical)
    batch = collect(env, policy, 60)
    assert batch["key"].dtype == torch.uint32
    keys = batch["key"].long()
    assert len({tuple(key) for key in keys[0].tolist()}) == 60
    assert (keys == keys[:1]).all()
    assert len(batch["drawn"].unique()) == 360
    assert_same(collect(env, policy, 20, 20, 20), batch)
    assert not (collect(env, policy, 60, seed=2)["key"].long() == keys).any(-1).all()


def test_the_heads_noise_is_independent_of_the_functions_key():
    """With equal logits the head's choice is a fair coin, whatever the function drew from its own key."""
    policy = fc.jax_policy(keyed, 0.0, head=fc.heads.categorical)
    batch = collect(fc.make_env("torch/CartPole-v1", num_envs=16), policy, 500)
    for half in (batch["drawn"][..., 0] < 0.5, batch["drawn"][..., 1] < 0.5):
        share = batch["action"][half].double().mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / half.sum() ** 0.5


def weights(b):
    return {"w": jnp.zeros((4, 2)), "b": jnp.array([0.0, b])}


@both
@pytest.mark.parametrize("as_numpy", [False, True])
def test_it_compiles_once_over_many_rollouts_with_new_weights(name, as_numpy):
    traces, env = [], fc.make_env(name, num_envs=3)

    def apply(params, x):
        traces.append(1)
        return x @ params["w"] + params["b"]

    policy = fc.jax_policy(apply, weights(0.0), head=fc.heads.greedy)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    first = len(traces)
    assert first <= 2
    for i in range(20):
        params = jax.tree.map(np.asarray, weights(i % 2 - 0.5)) if as_numpy else weights(i % 2 - 0.5)
        state, batch = fc.rollout(env, policy, state, 1 + i % 3, params=params)
        assert batch["action"].unique().tolist() == [i % 2]
    assert len(traces) == first


def test_params_are_prepared_once_per_version():
    policy = fc.jax_policy(lambda params, x: x, weights(1.0))
    own = policy.prepare(None)
    assert policy.prepare(None) is own
    assert policy.prepare(dict(policy.params)) is own
    with pytest.raises(ValueError, match="is absent"):
        policy.prepare(dict(zip("xyz", jax.tree.leaves(policy.params), strict=False)))
    other = policy.prepare(weights(2.0))
    assert other is not own
    assert other["b"].tolist() == [0, 2]


def recurrent(params, observation, state):
    state = jnp.concatenate([observation, state], -1) @ params
    return state[:, :2], state


@pytest.mark.parametrize(("policy", "note"), [
    (
        fc.jax_policy(lambda observation, params: observation @ params["w"], {"w": jnp.zeros((4, 2))}),
        "the policy's function was called with ({w: float32 [4, 2]}, float32 [3, 4])",
    ),
    (fc.jax_policy(recurrent, jnp.zeros((9, 5)), initial_state=jnp.zeros((3, 5))), "without a dimension of lanes"),
])  # fmt: skip
def test_an_exception_of_a_function_tells_what_it_was_called_with(policy, note):
    with pytest.raises(TypeError) as error:
        collect(fc.make_env("CartPole-v1", num_envs=3), policy, 5)
    assert any(note in each for each in error.value.__notes__)


@pytest.mark.parametrize("name", ["CartPole-v1", GYMNAX])
def test_a_variable_that_was_set_since_it_was_compiled_is_named(name, monkeypatch):
    scale, traces = 1.0, 0

    def apply(params, observation):
        nonlocal traces
        traces += 1  # its own: it is set while the function is traced
        return jax.tree.map(lambda leaf: leaf[:, :2] * params * scale * SCALE, observation)  # read in an inner function

    env = fc.make_env(name, num_envs=2)
    policy = fc.jax_policy(apply, jnp.ones(2), head=fc.heads.greedy)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)
    state, _ = fc.rollout(env, policy, state, 3)
    assert traces
    scale = 2.0
    with pytest.raises(fc.PolicyError, match=r"reads scale, set since.*pass changing values in params"):
        fc.rollout(env, policy, state, 3)
    scale = 1.0
    state, _ = fc.rollout(env, policy, state, 3)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    with pytest.raises(fc.PolicyError, match=r"reads SCALE, set since it was compiled, which has no effect"):
        fc.rollout(env, policy, state, 3)


@each_loop
def test_code_that_jax_cannot_trace_is_named_with_the_remedy(name):
    env = fc.make_env(name, num_envs=2)
    policy = fc.jax_policy(lambda params, x: push(x) if x[0, 0] > 0 else push(-x), {})
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    assert "the policy's function is traced by JAX" in "".join(caught.value.__notes__)


WIDE = spaces.Box(0, 2**62, (1,), np.int64)


@pytest.mark.parametrize("x64", [False, True])
def test_an_integer_that_needs_64_bits(x64):
    def read(params, observation):
        return {"action": observation[:, 0] * 0, "seen": observation}

    for number in (2**31 - 1, 2**31):
        env = fc.make_env([Rigged(space=WIDE, good=np.array([number])) for _ in range(2)])
        with jax.enable_x64(x64):
            policy = fc.jax_policy(read, jnp.zeros(()))
            if number < 2**31 or x64:
                assert (collect(env, policy, 3)["seen"] == number).all()
                continue
            with pytest.raises(fc.PolicyError, match=r"lane 0, step 0 .*'observation' does not fit .* \[2147483648\]"):
                collect(env, policy, 3)


def over_tensors(patch):
    """The path that an accelerator takes, taken on the CPU."""
    patch.setattr(tensor, "as_read", lambda env, policy, root: assemble(env.observation_space, root))


CASES = once([jax_recurrent, jax_keyed, *in_soak([jax_mlp])], ("torch/CartPole-v1", "torch/Pendulum-v1"))
CASES.append((lambda env: Noisy(fc.Noise(kind="normal", shape=(2,))), "torch/CartPole-v1"))


@pytest.mark.parametrize(("make", "name"), CASES)
def test_over_tensors_as_over_rows_and_however_it_is_cut(make, name, monkeypatch):
    env = make_env(name, 3)
    policy = make(env)
    wanted = collect(env, policy, 40)
    over_tensors(monkeypatch)
    whole = collect(env, policy, 40)
    assert_same(whole, collect(env, policy, 1, 2, 37))
    assert_close(whole, wanted)
    assert whole["next", "done"].any()


def test_nan_from_the_policy_over_tensors_is_said(monkeypatch):
    over_tensors(monkeypatch)
    env = make_env("torch/Pendulum-v1", 3)
    policy = fc.jax_policy(lambda params, x: x[:, :1] * jnp.nan, None)
    with pytest.raises(fc.PolicyError, match="lane 0, step 0 of this batch: action is NaN"):
        collect(env, policy, 3)


@pytest.mark.gpu
def test_on_a_gpu_cuts_change_nothing():
    env = fc.make_env("torch/CartPole-v1", num_envs=3, device="cuda")
    policy = jax_mlp(env)
    whole = collect(env, policy, 40)
    assert whole["action"].is_cuda
    assert_same(whole, collect(env, policy, 1, 2, 37))


LOOPS = {
    "host": lambda: fc.make_env("CartPole-v1", num_envs=3),
    "torch": lambda: fc.make_env("torch/CartPole-v1", num_envs=3),
    "fused": lambda: fc.envs.from_functional(CartPoleFunctional(), num_envs=3, max_episode_steps=500),
}


def assert_records_what(apply, params, batch):
    said = apply(params, batch["observation"].flatten(0, 1).numpy())
    log_probs, value = map(to_torch, (jax.nn.log_softmax(said["logits"]), said["state_value"]))
    chosen = log_probs.gather(1, batch["action"].reshape(-1, 1))[:, 0]
    torch.testing.assert_close(batch["state_value"].flatten(0, 1), value)
    torch.testing.assert_close(batch["action_log_prob"].flatten(), chosen)


@pytest.mark.parametrize(("library", "loop"), once(LIBRARIES, LOOPS))
def test_a_network_acts_and_changes_between_rollouts(library, loop):
    apply, params = LIBRARIES[library](0)
    _, others = LIBRARIES[library](1)
    traced = []

    def counted(params, x):
        traced.append(1)
        return apply(params, x)

    policy = fc.jax_policy(counted, params, head=fc.heads.categorical)
    env = LOOPS[loop]()
    assert fc.explain(env, policy).loop == loop
    assert_records_what(apply, params, collect(env, policy, 40))
    traces = len(traced)
    policy.params = others
    assert_records_what(apply, others, collect(env, policy, 40))
    assert_records_what(apply, params, collect(env, policy, 40, params=params))
    assert len(traced) == traces

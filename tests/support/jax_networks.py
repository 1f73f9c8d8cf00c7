"""One actor-critic, 4 numbers to 2 logits and a value, in each JAX library: a pair of `apply` and `params`."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

EXAMPLE = jnp.zeros((1, 4))


class NnxNetwork(nnx.Module):
    def __init__(self, rngs):
        self.torso, self.norm = nnx.Linear(4, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.actor, self.critic = nnx.Linear(16, 2, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.norm(self.torso(x)))
        return {"logits": self.actor(x), "state_value": self.critic(x)}


def in_nnx(seed):
    module = NnxNetwork(nnx.Rngs(seed))
    module.eval()
    graph, params = nnx.split(module)
    return lambda params, x: nnx.merge(graph, params)(x), params


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


LIBRARIES = {"nnx": in_nnx, "linen": in_linen, "equinox": in_equinox, "haiku": in_haiku}

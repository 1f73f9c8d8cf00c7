"""As a script: a run over a mesh of 8 forced host devices, against the same lanes on one device."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import funcollect as fc
from funcollect.envs.jax_envs.like_gymnax import from_gymnax
from tests.support.envs.jax_counting import counting

DEVICES, LANES, LENGTH = 8, 3, 20
KEY = jnp.array([0, 7], jnp.uint32)


def counting_random(lanes):
    env = counting(lanes)
    return env, fc.random_policy(env), None, unchanged


def planets(lanes):
    env = from_gymnax("CartPole-v1", num_envs=lanes)
    params = jax.random.normal(jax.random.PRNGKey(3), (4, 2)) * 0.3
    policy = fc.jax_policy(lambda params, x: x @ params, params, head=fc.heads.categorical)
    return env, policy, params, other_gravity


def unchanged(env, state):
    return state


def other_gravity(env, state):
    """Another gravity for each lane and rollout, and another mass of the pole for all, from the next episodes on."""
    gravity = 5.0 + state.lane + state.steps[0]
    return fc.traced.set_env_params(env, state, env.default_params.replace(gravity=gravity, masspole=0.2))


def part(env, policy, params, change, first_lane):
    state = fc.traced.init(env, policy, params, key=KEY, first_lane=first_lane, total_lanes=DEVICES * LANES)
    return fc.traced.rollout(env, policy, params, change(env, state), LENGTH)


def over_mesh(env, policy, params, change):
    """Begun on the mesh, then carried on from the state that came back: (batch of one rollout, of the next)."""
    mesh = Mesh(np.array(jax.devices()), ("lanes",))
    replicated, split = PartitionSpec(), PartitionSpec(None, "lanes")
    whole = fc.traced.init(env, policy, params, key=KEY, total_lanes=DEVICES * LANES)
    states = fc.traced.partition(change(env, whole), "lanes")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=replicated, out_specs=(states, split))
    def begin(params):
        return part(env, policy, params, change, jax.lax.axis_index("lanes") * LANES)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(replicated, states), out_specs=(states, split))
    def go_on(params, state):
        return fc.traced.rollout(env, policy, params, change(env, state), LENGTH)

    state, first = begin(params)
    state, second = go_on(params, state)
    assert state.frames == 2 * LENGTH * DEVICES * LANES
    return first, second


def alone(env, policy, params, change):
    rollout = jax.jit(lambda state: fc.traced.rollout(env, policy, params, change(env, state), LENGTH))
    state, first = rollout(fc.traced.init(env, policy, params, key=KEY))
    return first, rollout(state)[1]


def check(make, tolerance):
    env, *others = make(LANES)
    meshed, wanted = over_mesh(env, *others), alone(*make(DEVICES * LANES))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=0, atol=tolerance), meshed, wanted)
    actions = np.asarray(meshed[0]["action"]).reshape(LENGTH, DEVICES, LANES)
    assert len({actions[:, device].tobytes() for device in range(DEVICES)}) == DEVICES, "devices drew the same noise"
    batch = fc.deliver(meshed[1], env)
    assert batch.batch_size == (DEVICES * LANES, LENGTH)
    assert batch["collector", "lane"][:, 0].tolist() == list(range(DEVICES * LANES))


def main():
    assert len(jax.devices()) == DEVICES
    check(counting_random, 0)
    check(planets, 1e-5)
    print("equal")


if __name__ == "__main__":
    sys.exit(main())

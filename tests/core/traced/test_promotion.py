"""JAX's strict settings of promotion may be set: the library's own code adds only arrays of one rank and one dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import funcollect as fc
from tests.support.running import in_soak


class Walk(fc.envs.JaxEnvBase):
    """Adds arrays of one rank and one dtype only, as networks and environments have to under strict promotion."""

    observation_space = spaces.Box(-9, 9, (2,))

    def __init__(self, action_space):
        self.action_space = action_space
        super().__init__(3)

    def reset(self, key, params):
        place = jax.random.uniform(key, (2,), jnp.float32)
        return place, place

    def step(self, key, place, action, params):
        moved = place + jnp.float32(0.5)
        lost = moved.sum() > 4
        return fc.envs.Transition(moved, moved, moved[0], lost, jnp.zeros_like(lost))


def answering(space):
    """A function of JAX whose answer a head for this space takes."""
    count = {spaces.Discrete: 3, spaces.MultiDiscrete: 5}.get(type(space))

    def answer(params, observation):
        if count:
            return jnp.tile(observation[:, :1], count)
        loc = jnp.broadcast_to(observation.sum(-1)[:, None, None] - 1, (len(observation), *space.shape))
        return loc, jnp.exp(loc)

    return answer


CHOICES, SEVERAL, BOX = spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2, 3))
INTEGERS, UNBOUNDED = spaces.Box(-5, 5, (2,), np.int32), spaces.Box(-np.inf, 1, (2,))
HEADS = [(BOX, fc.heads.tanh_normal)]
HEADS += in_soak(
    [
        (CHOICES, fc.heads.epsilon_greedy(0.3)),
        (CHOICES, fc.heads.categorical),
        (SEVERAL, fc.heads.categorical),
        (BOX, fc.heads.normal),
    ]
)
HEADS += in_soak([(space, None) for space in (CHOICES, SEVERAL, BOX, INTEGERS, UNBOUNDED, spaces.MultiBinary(3))])


def all_of(space, head):
    """What the loops, the traced functions, statistics and buffers give."""
    env = Walk(space)
    policy = fc.random_policy(env) if head is None else fc.jax_policy(answering(space), None, head=head)
    state, first = fc.rollout(env, policy, fc.init(env, policy, seed=7), 20)
    _, second = fc.rollout(env, policy, state, 20, max_frames_per_traj=4)
    key = jnp.array([0, 7], jnp.uint32)
    _, batch = fc.traced.rollout(env, policy, None, fc.traced.init(env, policy, None, key=key), 20)
    results = [first.to_dict(), second.to_dict(), batch, fc.traced.episode_stats(batch)]
    results.append(fc.traced.evaluate(env, policy, None, key, 4))
    if head is not None:
        results.append(fc.evaluate_actions(policy, None, batch))
    stats = fc.running_statistics.init(env.observation_space, backend="jax")
    stats = fc.running_statistics.update(fc.running_statistics.update(stats, batch), batch)
    ring = fc.jax_ring.extend(fc.jax_ring.init(batch, steps=30), batch)
    scaled = fc.running_statistics.normalize(stats, batch["observation"])
    results += [stats, fc.running_statistics.denormalize(stats, scaled), fc.jax_ring.sample(ring, key, 4)]
    results.append(fc.jax_ring.sample_slices(ring, key, num_slices=4, slice_len=3))
    return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize(("space", "head"), HEADS)
def test_strict_promotion_is_kept(space, head):
    wanted = all_of(space, head)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.tree.map(np.testing.assert_array_equal, all_of(space, head), wanted)

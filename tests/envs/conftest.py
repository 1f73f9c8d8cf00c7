"""What the tests of environments share."""

from functools import partial

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import funcollect as fc

# The processes are forked: TorchRL, once imported, has them spawned, each of which imports the tests.
VECTORS = {"here": SyncVectorEnv, "in processes": partial(AsyncVectorEnv, context="fork")}


def begun(env, steps=0, *, seed=0, **kwargs):
    """An environment, a random policy, and the state after so many steps."""
    env = fc.make_env(env, **kwargs)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=seed)
    return env, policy, fc.rollout(env, policy, state, steps)[0] if steps else state

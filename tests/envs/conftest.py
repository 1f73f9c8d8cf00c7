"""What the tests of environments share."""

import funcollect as fc


def begun(env, steps=0, *, seed=0, **kwargs):
    """An environment, a random policy, and the state after so many steps."""
    env = fc.make_env(env, **kwargs)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=seed)
    return env, policy, fc.rollout(env, policy, state, steps)[0] if steps else state

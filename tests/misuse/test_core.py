"""States and arguments of the functions used wrongly: the state that was good before is good afterwards."""

import pickle

import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.errors import ClosedError, EvaluationError, InUseError, ReplayError, StaleStateError
from tests.support.misuse import Rigged, refused, runs, swaps, table


@pytest.fixture(params=["CartPole-v1", "torch/CartPole-v1"])
def env(request):
    return fc.make_env(request.param, num_envs=3)


def seeded(seed):
    def act(env, policy, state):
        fc.init(env, policy, seed=seed)

    return act


def rolled(length=4, **how):
    def act(env, policy, state):
        fc.rollout(env, policy, state, length, **how)

    return act


def masked(mask):
    def act(env, policy, state):
        fc.reset(env, state, mask)

    return act


def evaluated(**how):
    def act(env, policy, state):
        fc.evaluate(env, policy, episodes=1000, seed=0, **how)

    return act


MASK = "expected bool (3,) … one flag per lane"
TYPE = "exploration_type is 'random' … expected a member of … RANDOM … funcollect.ExplorationType.DETERMINISTIC"


@table(
    ("seed 2**64", seeded(2**64), ValueError, f"seed is {2**64} … expected 0 <= seed < 2**64 … take it modulo"),
    ("length 2**31", rolled(2**31), ValueError, f"length is {2**31} … expected less than … several rollouts"),
    ("length 0", rolled(0), ValueError, "length is 0 … expected at least 1 … length=128"),
    ("exploration by name", rolled(exploration_type="random"), TypeError, TYPE),
    ("a short mask", masked(torch.ones(2, dtype=torch.bool)), ValueError, f"torch.bool (2,) … {MASK}"),
    ("a mask of numbers", masked([0, 2, 1]), ValueError, f"torch.int64 (3,) … {MASK}"),
    ("a ragged mask", masked([[True], [True, False]]), ValueError, f"mask is … {MASK}"),
    ("swapped", lambda e, p, s: fc.init(p, e, seed=0), TypeError, "env is … env comes first … make"),
    ("a class", lambda e, p, s: fc.init(type(e), p, seed=0), TypeError, "env is the class … an Env … make_env"),
    ("none", lambda e, p, s: fc.init(e, None, seed=0), TypeError, "policy is None … a Policy … torch_policy"),
    ("swapped later", lambda e, p, s: fc.rollout(p, e, s, 2), TypeError, "policy is the environment … env comes first"),
    ("a list", lambda e, p, s: fc.fork(e, [s]), TypeError, "state is [CollectorState( … expected … pass the state"),
    ("too few", evaluated(max_frames=3), EvaluationError, "of 1000 episodes ended within max_frames=3 … raise max"),
)
def test_arguments_that_do_not_do(misuse, env):
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        misuse.do(env, policy, state)
    fc.close(runs(env, policy, state))


def test_a_stale_state():
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    after, _ = fc.rollout(env, policy, state, 4)
    says = (
        "simulators of HostEnv('CartPole-v1', num_envs=3) … a later state has taken its place … "
        "state, batch = funcollect.rollout(env, policy, state, 128) … fork(env, state) … recover(env, state)"
    )
    for use in (
        lambda: fc.rollout(env, policy, state, 4),
        lambda: fc.step(env, policy, state),
        lambda: fc.fork(env, state),
        lambda: fc.reset(env, state, torch.tensor([True, False, False])),
        lambda: fc.reset(env, state),
    ):
        with refused(StaleStateError, says):
            use()
    after, _ = fc.rollout(env, policy, after, 4)  # the live one goes on
    runs(env, policy, fc.recover(env, state))
    with refused(StaleStateError, "a later state has taken its place"):
        fc.rollout(env, policy, after, 4)  # the recovered state has superseded it


def test_a_state_whose_call_did_not_end_says_so():
    env = fc.make_env(Rigged(lambda answer: None))
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(fc.EnvError):
        fc.rollout(env, policy, state, 8)
    with refused(StaleStateError, "the call that used it did not end (an exception, or Ctrl-C) … funcollect.recover"):
        fc.rollout(env, policy, state, 8)
    runs(env, policy, fc.recover(env, state))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("CartPole-v1", "CartPole-v1"),
        ("torch/CartPole-v1", "CartPole-v1"),
        ("torch/CartPole-v1", "torch/CartPole-v1"),
        ("gymnax/CartPole-v1", "gymnax/CartPole-v1"),
    ],
)
def test_a_state_of_another_environment(name, other):
    env, wrong = (fc.make_env(each, num_envs=3) for each in (name, other))
    state = fc.init(env, fc.random_policy(env), seed=0)
    for use in (
        lambda: fc.rollout(wrong, fc.random_policy(wrong), state, 4),
        lambda: fc.reset(wrong, state),
        lambda: fc.fork(wrong, state),
    ):
        with refused(ValueError, f"belongs to another environment … {wrong!r} … pass the env that it was made with"):
            use()
    if name.startswith("gymnax"):  # its parameters would act silently, since all shapes fit
        with refused(ValueError, "belongs to another environment"):
            fc.traced.rollout(wrong, fc.random_policy(wrong), None, state, 4)
        state = pickle.loads(pickle.dumps(state))  # whose origin is unknown
    runs(env, state=state)


def test_a_state_of_another_number_of_lanes(env):
    state = fc.init(env, fc.random_policy(env), seed=0)
    wrong = fc.make_env("torch/CartPole-v1", num_envs=2)
    with refused(ValueError, ("the state has 3 lanes", "CartPole(num_envs=2) has 2", "pass its own env")):
        fc.rollout(wrong, fc.random_policy(wrong), state, 4)
    runs(env, state=state)


def test_a_closed_state():
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    fc.close(state)
    fc.close(state)
    for use in (lambda: fc.rollout(env, policy, state, 4), lambda: fc.reset(env, state), lambda: fc.fork(env, state)):
        with refused(ClosedError, "HostEnv('CartPole-v1', num_envs=3) were closed … a new state with funcollect.init"):
            use()
    runs(env, policy)


class Global(Rigged):
    """Draws from NumPy's global generator."""

    def step(self, action):
        return swaps(0, np.random.uniform(-1, 1, 2))(super().step(action))


def test_a_fork_of_what_does_not_follow_from_its_seed():
    env = fc.make_env([Rigged, Global])
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    says = "lane 1 … gave another observation … expected the same … self.np_random … the state can still be used"
    with refused(ReplayError, says):
        fc.fork(env, state)
    runs(env, policy, state)


def test_a_fork_of_an_instance_that_cannot_be_built_again():
    env = fc.make_env(Rigged())
    state = fc.init(env, fc.random_policy(env), seed=0)
    with refused(InUseError, "cannot be rebuilt … it has no spec … pass an id or a factory, or a list of"):
        fc.fork(env, state)
    runs(env, state=state)

"""Policies that answer wrongly, at their first step or later; the first wrong lane and step are named."""

import itertools
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule

import funcollect as fc
from funcollect.errors import PolicyError
from funcollect.policies.as_policy import as_policy
from tests.support.misuse import Acting, Misuse, Once, fails_then_runs, refused, runs, table

HEADS = fc.heads
NAN, INF = float("nan"), float("inf")


cartpole = partial(fc.make_env, "CartPole-v1", num_envs=3)
pendulum = partial(fc.make_env, "Pendulum-v1", num_envs=3)


def with_one(good, value):
    bad = good.clone()
    bad[1, ..., -1] = value
    return bad


def wrong(what, make_env, good, bad, *says, head=None, at=2, **how):
    """A policy whose call number `at` answers with `bad`, the others with `good`."""

    def policy():
        return fc.torch_policy(Once(good, bad, at), head=head, **how)

    return Misuse(what, lambda: (make_env(), policy()), PolicyError, says)


OF = {
    "torch": lambda shape, head: fc.torch_policy(lambda observation: torch.zeros(shape), head=head),
    "jax": lambda shape, head: fc.jax_policy(lambda params, observation: jnp.zeros(shape), {}, head=head),
}
LOGITS = torch.zeros(3, 2)
ACTIONS = torch.zeros(3, dtype=torch.int64)
TORQUES = torch.zeros(3, 1)
INFINITE = torch.tensor([[INF], [-INF], [0.0]])
PAIR = (TORQUES, torch.ones(3, 1))
ROWS = ("[3, ...]", "return one row per environment")
AT = "lane 1, step 2 of this batch"
LOOK = "look at the policy's parameters"
STILL = torch.zeros(3, 5)
STATE = {"initial_state": torch.zeros(5)}


def mixed(**extras):
    return {"action": ACTIONS, **extras}


HEADS_OF = {
    "CartPole-v1": (HEADS.categorical, HEADS.epsilon_greedy(0.1)),
    "Pendulum-v1": (HEADS.normal, HEADS.tanh_normal),
}
ANSWERING = [(name, kind, head) for name, heads in HEADS_OF.items() for kind in OF for head in heads]
ANSWERING += [("CartPole-v1", "torch", HEADS.from_distribution(torch.distributions.Categorical, "logits"))]
SHAPES = [(3, (1,)), (3, ()), (2, ()), (3, (4,)), (1, ()), (2, (2, 1))]  # lanes, and what stands before the numbers


@pytest.mark.parametrize(
    ("num_envs", "lead", "name", "kind", "head"),
    [(*SHAPES[number % len(SHAPES)], *each) for number, each in enumerate(ANSWERING)],
)
def test_a_network_without_a_row_per_environment(num_envs, lead, name, kind, head):
    """Its answer would be broadcast, or give the batch another shape."""
    env, policy = fc.make_env(name, num_envs=num_envs), OF[kind]((*lead, 2), head)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(PolicyError, match=r"per environment|wants (a pair.*)?\['?P"):
        fc.rollout(env, policy, state, 3)


@table(
    wrong("NaN logits", cartpole, LOGITS, with_one(LOGITS, NAN), AT, "logits is NaN", LOOK, head=HEADS.categorical),
    wrong("a negative scale", pendulum, PAIR, (TORQUES, -PAIR[1]), "NaN", "has to be positive", head=HEADS.tanh_normal),
    wrong("an infinite loc", pendulum, PAIR, (with_one(TORQUES, INF), PAIR[1]), AT, "infinite", head=HEADS.normal),
    wrong("both infinities", pendulum, PAIR, (INFINITE, PAIR[1]), "step 2", "infinite", head=HEADS.normal),
    wrong("a NaN action", pendulum, TORQUES, with_one(TORQUES, NAN), AT, "action is NaN", "expected numbers", LOOK),
    wrong("NaN in an extra", cartpole, mixed(value=STILL), mixed(value=with_one(STILL, NAN)), AT, "value is NaN", LOOK),
    wrong("a dimension too many", cartpole, ACTIONS, ACTIONS[:, None], "shape (3, 1)", "wants (3,)", "return one"),
    wrong("a float action", cartpole, ACTIONS, ACTIONS.float(), "torch.float32", "wants torch.int64", "cast", at=0),
    wrong("another dtype later", cartpole, mixed(v=ACTIONS), mixed(v=ACTIONS + 0.5), "step 2", "float32", "after"),
    wrong("a list", cartpole, ACTIONS, [0, 1, 0], "action is list", "expected an array of shape (3,)", "return", at=0),
    wrong("a NumPy array", cartpole, ACTIONS, ACTIONS.numpy(), "a numpy.ndarray", "expected a torch.Tensor", at=0),
    wrong("no action", cartpole, mixed(), {"value": STILL}, "['value']", "expected ['action']", "return the", at=0),
    wrong("no logits", cartpole, LOGITS, {"v": STILL}, "['v']", "['logits']", "categorical", head=HEADS.categorical),
    wrong("too many logits", cartpole, LOGITS, STILL, "(3, 5)", "[P, 2]", "one number", head=HEADS.categorical, at=0),
    wrong("a NumPy answer", cartpole, LOGITS, LOGITS.numpy(), "is ndarray", "a tensor of", head=HEADS.greedy, at=0),
    wrong("one number", pendulum, PAIR, TORQUES, "(3, 1)", "a pair (loc, scale)", "return these", head=HEADS.normal),
    wrong("an extra for one lane", cartpole, mixed(v=STILL), mixed(v=STILL[:1]), "'v' is of shape (1, 5)", *ROWS, at=0),
    wrong("another extra later", cartpole, mixed(v=STILL), mixed(u=STILL), "['u'] after ['v']", "keep them the same"),
    wrong("a key of a batch", cartpole, ACTIONS, mixed(next=STILL), "['next']", "a batch uses", "rename", at=0),
    wrong("no state", cartpole, (ACTIONS, STILL), ACTIONS, "Tensor", "(answer, next_state)", "return", at=0, **STATE),
    wrong("a short one", cartpole, (ACTIONS, STILL), (ACTIONS, STILL[0]), "[[5]]", "[[3, 5]]", "return", at=0, **STATE),
)
def test_a_policy_that_answers_wrongly(misuse):
    fails_then_runs(lambda: misuse.do()[0], lambda env: misuse.do()[1], misuse.error, misuse.says)


@pytest.mark.parametrize(("space", "good", "bad", "one_hot"), [
    (spaces.Discrete(2), [0, 0, 1], [0, 2, 1], False),
    (spaces.Discrete(2, start=5), [5, 6, 5], [5, 4, 5], False),
    (spaces.Discrete(2), [[1, 0]] * 3, [[1, 0], [2, -1], [0, 1]], True),
    (spaces.MultiDiscrete([2, 3]), [[1, 2]] * 3, [[1, 2], [2, 1], [0, 0]], False),
    (spaces.MultiDiscrete([2, 2]), [[1, 0, 0, 1]] * 3, [[1, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1]], True),
    (spaces.MultiBinary(2), [[1, 0]] * 3, [[1, 0], [0, 7], [0, 0]], False),
    (spaces.Box(0, 255, (1,), np.uint8), [[9]] * 3, [[9], [-1], [255]], False),
])  # fmt: skip
def test_an_action_outside_its_space(space, good, bad, one_hot):
    says = (AT, "outside its space", "expected", "one-hot rows for" if one_hot else str(space), "return one of these")
    answers = [torch.tensor(each) for each in (good, bad)]
    make = lambda: fc.make_env([Acting(space) for _ in range(3)], one_hot=one_hot)  # noqa: E731
    fails_then_runs(make, lambda env: fc.torch_policy(Once(*answers)), PolicyError, says)


@pytest.mark.parametrize("action", [5, -1])
def test_an_environment_that_refuses_an_action_outside_its_space(action):
    says = f"lane 1 … step(np.int64({action})) raised AssertionError … the action is not in Discrete(2) … the policy"
    bad = torch.tensor([0, action, 0])
    fails_then_runs(cartpole, lambda env: fc.torch_policy(Once(ACTIONS, bad)), fc.EnvError, says)


def test_an_output_under_the_key_of_an_observation():
    env = cartpole()
    state = fc.init(env, fc.torch_policy(lambda _: ACTIONS), seed=0)
    says = ("output 'observation' collides", "the observation 'observation'", "rename the output")
    with refused(PolicyError, says):
        fc.rollout(env, fc.torch_policy(lambda _: {"action": ACTIONS, "observation": STILL}), state, 4)
    runs(env, fc.torch_policy(lambda _: {"action": ACTIONS, "other": STILL}), fc.recover(env, state))


def zeros(x):
    return jnp.zeros(len(x), jnp.int32)


@pytest.mark.parametrize(("answer", "says"), [
    (lambda x, hidden: (0, hidden), "shape () … Discrete(2) wants (3,) … return one action"),
    (lambda x, hidden: ({"action": zeros(x), "v": {"w": x}}, hidden), "'v' is dict … return one row"),
    (lambda x, hidden: zeros(x), "and returned … expected the pair (answer, next_state) … leave"),
    (lambda x, hidden: (zeros(x), hidden[0]), "next state has the shapes [[5]] … expected [[3, 5]] … return"),
    (lambda x, hidden: (hidden, {"action": zeros(x)}), "next state is dict … return (answer, next_state)"),
])  # fmt: skip
def test_a_jax_function_that_is_wrong_is_found_as_it_is_traced_and_leaves_the_state_good(answer, says):
    env, recurrent = cartpole(), {"initial_state": jnp.zeros(5)}
    policy = fc.jax_policy(lambda _, x, hidden: answer(x, hidden), {}, **recurrent)
    state = fc.init(env, policy, seed=0)
    with refused(PolicyError, says):
        fc.rollout(env, policy, state, 4)
    runs(env, fc.jax_policy(lambda _, x, hidden: (zeros(x), hidden), {}, **recurrent), state)


def poisoned(env, head, outputs, at=NAN):
    """A JAX policy whose last output is `at` in every lane whose first observation is positive."""

    def apply(params, x):
        return jnp.where(jnp.arange(outputs) == outputs - 1, params, 0.5) * jnp.ones((len(x), 1))

    return fc.jax_policy(apply, jnp.float32(at), head=head)


def cure(policy):
    policy.params = jnp.float32(0.5)


@pytest.mark.parametrize(("make_env", "head", "outputs", "value", "says"), [
    (cartpole, HEADS.categorical, 2, NAN, "action_log_prob is NaN"),
    (cartpole, HEADS.greedy, 2, NAN, "what the head reads is NaN"),
    (pendulum, HEADS.normal, 2, NAN, "action is NaN"),
    (pendulum, None, 1, float("inf"), "the action is infinite … expected finite numbers"),
])  # fmt: skip
def test_nan_and_infinity_from_jax(make_env, head, outputs, value, says):
    where = f"lane 0, step 0 of this batch … {says} … look at the policy's parameters"
    fails_then_runs(make_env, lambda env: poisoned(env, head, outputs, value), PolicyError, where, repair=cure)


@pytest.mark.parametrize("head", [HEADS.categorical, HEADS.greedy, HEADS.epsilon_greedy(0.0)])
def test_values_that_mask_actions_out_are_no_error(head):
    masked = torch.tensor([[-float("inf"), 0.0]] * 3)
    runs(cartpole(), fc.torch_policy(lambda x: masked, head=head))
    runs(cartpole(), fc.jax_policy(lambda params, x: params, jnp.asarray(masked.numpy()), head=head))


def writing(change, at):
    """Writes what `change` makes of a good answer, once, at call number `at`."""
    calls = itertools.count()

    def module(tensordict):
        action = torch.zeros(len(tensordict), dtype=torch.int64)
        return change(tensordict, action) if next(calls) == at else tensordict.set("action", action)

    return module


def writes(**entries):
    def change(tensordict, action):
        for name, make in entries.items():
            tensordict.set(name, make(action))
        return tensordict

    return change


def written(what, change, *says, at=0):
    return Misuse(what, lambda env: as_policy(writing(change, at), env), PolicyError, says)


@table(
    written("no action", writes(value=abs), "wrote ['value']", "expected 'action'", "out_keys"),
    written("the action alone", lambda tensordict, action: action, "returned Tensor", "expected the", "return it"),
    written("a wide one", writes(action=lambda a: a[:, None]), "(3, 1)", "wants (3,)", "return one action", at=2),
    written("a reward", writes(action=abs, reward=abs), "wrote ['reward']", "a batch uses", "rename these out_keys"),
)
def test_a_callable_on_tensordicts_that_goes_wrong(misuse):
    fails_then_runs(cartpole, misuse.do, misuse.error, misuse.says)


def test_in_keys_that_the_environment_lacks():
    wrong = TensorDictModule(lambda x: x[:, 0].long() * 0, ["pixels"], ["action"])
    says = ("reads the in_keys ['pixels']", "the environment gives ['observation']", "name these")
    with fc.SyncDataCollector(cartpole(), wrong, frames_per_batch=6) as collector, refused(PolicyError, says):
        next(collector)

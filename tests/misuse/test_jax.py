"""JAX functions that answer wrongly: what is wrong by its shape is found before the first step."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support.misuse import Misuse, fails_then_runs, refused, runs, table

HEADS = fc.heads
NAN = float("nan")
ROWS = ("expected an array of shape [3, ...]", "return one row per environment")


def cartpole() -> Any:
    return fc.make_env("CartPole-v1", num_envs=3)


def pendulum() -> Any:
    return fc.make_env("Pendulum-v1", num_envs=3)


def zeros(x: Any) -> Any:
    return jnp.zeros(len(x), jnp.int32)


def traced(what: str, make_env: Any, answer: Any, *says: str, **how: Any) -> Misuse:
    """A function of an observation that is wrong from the start: found when it is traced."""
    return Misuse(what, lambda: (make_env(), fc.jax_policy(lambda _, x: answer(x), {}, **how)), PolicyError, says)


@table(
    traced("no batch dimension", cartpole, lambda x: 0, "shape ()", "Discrete(2) wants (3,)", "return one action"),
    traced("a dimension too many", cartpole, lambda x: zeros(x)[:, None], "shape (3, 1)", "wants (3,)", "return one"),
    traced("a float action", cartpole, lambda x: x[:, 0], "dtype float32", "wants torch.int64", "cast it"),
    traced("an integer torque", pendulum, lambda x: zeros(x)[:, None], "dtype int32", "wants torch.float32", "cast it"),
    traced("a list", cartpole, lambda x: [zeros(x)], "action is list", "expected an array", "return a tensor or array"),
    traced("no action", cartpole, lambda x: {"value": x}, "['value']", "expected ['action']", "return the action"),
    traced("a misfit head", pendulum, lambda x: x, "(3, 3)", "(loc, scale)", "return these", head=HEADS.normal),
    traced("a scalar extra", cartpole, lambda x: {"action": zeros(x), "v": 0.0}, "'v' is of shape ()", *ROWS),
    traced("a short extra", cartpole, lambda x: {"action": zeros(x), "v": x[:1]}, "'v' is of shape (1, 4)", *ROWS),
    traced("a nested extra", cartpole, lambda x: {"action": zeros(x), "v": {"w": x}}, "'v' is dict", *ROWS),
    traced("the extra next", cartpole, lambda x: {"action": zeros(x), "next": x}, "['next']", "a batch uses", "rename"),
)
def test_a_jax_function_that_is_wrong_leaves_the_state_good(misuse: Misuse) -> None:
    env, policy = misuse.do()
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        fc.rollout(env, policy, state, 4)
    runs(env, fc.jax_policy(lambda _, x: zeros(x) if env.action_space.shape == () else x[:, :1], {}), state)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            lambda x, hidden: zeros(x),
            ("and returned", "expected the pair (answer, next_state)", "leave"),
        ),
        (
            lambda x, hidden: (zeros(x), hidden[0]),
            ("next state has the shapes [[5]]", "expected [[3, 5]]", "return"),
        ),
    ],
)
def test_a_recurrent_jax_function_that_is_wrong(answer: Any, says: tuple[str, ...]) -> None:
    env = cartpole()
    policy = fc.jax_policy(lambda _, x, hidden: answer(x, hidden), {}, initial_state=jnp.zeros(5))
    state = fc.init(env, policy, seed=0)
    with refused(PolicyError, says):
        fc.rollout(env, policy, state, 4)
    runs(env, fc.jax_policy(lambda _, x, hidden: (zeros(x), hidden), {}, initial_state=jnp.zeros(5)), state)


def poisoned(env: Any, head: Any, outputs: int, at: Any = NAN) -> Any:
    """A JAX policy whose last output is `at` in every lane whose first observation is positive."""

    def apply(params: Any, x: Any) -> Any:
        return jnp.where(jnp.arange(outputs) == outputs - 1, params, 0.5) * jnp.ones((len(x), 1))

    return fc.jax_policy(apply, jnp.float32(at), head=head)


def cure(policy: Any) -> None:
    policy.params = jnp.float32(0.5)


@pytest.mark.parametrize(
    ("make_env", "head", "outputs", "value", "says"),
    [
        (cartpole, HEADS.categorical, 2, NAN, ("action_log_prob is NaN", "look at the policy's parameters")),
        (cartpole, HEADS.epsilon_greedy(0.5), 2, NAN, ("action_log_prob is NaN", "look at the policy's parameters")),
        (cartpole, HEADS.greedy, 2, NAN, ("what the head reads is NaN", "look at the policy's parameters")),
        (pendulum, HEADS.normal, 2, NAN, ("action is NaN", "look at the policy's parameters")),
        (pendulum, HEADS.tanh_normal, 2, NAN, ("action is NaN", "look at the policy's parameters")),
        (pendulum, None, 1, NAN, ("action is NaN", "look at the policy's parameters")),
        (
            pendulum,
            None,
            1,
            float("inf"),
            ("the action is infinite", "expected finite numbers", "look at"),
        ),
    ],
)
def test_nan_and_infinity_from_jax(make_env: Any, head: Any, outputs: int, value: float, says: Any) -> None:
    where = ("lane 0, step 0 of this batch", *says)
    fails_then_runs(make_env, lambda env: poisoned(env, head, outputs, value), PolicyError, where, repair=cure)


@pytest.mark.parametrize("head", [HEADS.categorical, HEADS.greedy, HEADS.epsilon_greedy(0.0)])
def test_values_that_mask_actions_out_are_no_error(head: Any) -> None:
    masked = torch.tensor([[-float("inf"), 0.0]] * 3)
    runs(cartpole(), fc.torch_policy(lambda x: masked, head=head))
    runs(cartpole(), fc.jax_policy(lambda params, x: params, jnp.asarray(masked.numpy()), head=head))

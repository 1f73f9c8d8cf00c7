"""JAX functions, callables on TensorDicts and policies of the protocol that answer wrongly."""

import jax.numpy as jnp
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from funcollect.policies.as_policy import as_policy
from tests.support.misuse import Misuse, fails_then_runs, refused, runs, table

HEADS = fc.heads
NAN = float("nan")
ROWS = ("expected an array of shape [3, ...]", "return one row per environment")
ACTIONS = torch.zeros(3, dtype=torch.int64)


def cartpole():
    return fc.make_env("CartPole-v1", num_envs=3)


def pendulum():
    return fc.make_env("Pendulum-v1", num_envs=3)


def zeros(x):
    return jnp.zeros(len(x), jnp.int32)


def traced(what, make_env, answer, *says, **how):
    """A function of an observation that is wrong from the start: found when it is traced."""
    return Misuse(what, lambda: (make_env(), fc.jax_policy(lambda _, x: answer(x), {}, **how)), PolicyError, says)


@table(
    traced("no batch dimension", cartpole, lambda x: 0, "shape ()", "Discrete(2) wants (3,)", "return one action"),
    traced("a float action", cartpole, lambda x: x[:, 0], "dtype float32", "wants torch.int64", "cast it"),
    traced("no action", cartpole, lambda x: {"value": x}, "['value']", "expected ['action']", "return the action"),
    traced("too many logits", cartpole, lambda x: x[:, :3], "(3, 3)", "wants [P, 2]", head=HEADS.categorical),
    traced("no logits", cartpole, lambda x: {"v": x}, "the keys ['v']", "expected ['logits']", head=HEADS.categorical),
    traced("a scalar extra", cartpole, lambda x: {"action": zeros(x), "v": 0.0}, "'v' is of shape ()", *ROWS),
    traced("a nested extra", cartpole, lambda x: {"action": zeros(x), "v": {"w": x}}, "'v' is dict", *ROWS),
    traced("the extra next", cartpole, lambda x: {"action": zeros(x), "next": x}, "['next']", "a batch uses", "rename"),
)
def test_a_jax_function_that_is_wrong_leaves_the_state_good(misuse):
    env, policy = misuse.do()
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        fc.rollout(env, policy, state, 4)
    runs(env, fc.jax_policy(lambda _, x: zeros(x) if env.action_space.shape == () else x[:, :1], {}), state)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda x, hidden: zeros(x), "and returned … expected the pair (answer, next_state) … leave"),
        (lambda x, hidden: (zeros(x), hidden[0]), "next state has the shapes [[5]] … expected [[3, 5]] … return"),
        (lambda x, hidden: (hidden, {"action": zeros(x)}), "next state is dict … return (answer, next_state)"),
    ],
)
def test_a_recurrent_jax_function_that_is_wrong(answer, says):
    env = cartpole()
    policy = fc.jax_policy(lambda _, x, hidden: answer(x, hidden), {}, initial_state=jnp.zeros(5))
    state = fc.init(env, policy, seed=0)
    with refused(PolicyError, says):
        fc.rollout(env, policy, state, 4)
    runs(env, fc.jax_policy(lambda _, x, hidden: (zeros(x), hidden), {}, initial_state=jnp.zeros(5)), state)


def poisoned(env, head, outputs, at=NAN):
    """A JAX policy whose last output is `at` in every lane whose first observation is positive."""

    def apply(params, x):
        return jnp.where(jnp.arange(outputs) == outputs - 1, params, 0.5) * jnp.ones((len(x), 1))

    return fc.jax_policy(apply, jnp.float32(at), head=head)


def cure(policy):
    policy.params = jnp.float32(0.5)


@pytest.mark.parametrize(
    ("make_env", "head", "outputs", "value", "says"),
    [
        (cartpole, HEADS.categorical, 2, NAN, "action_log_prob is NaN"),
        (cartpole, HEADS.greedy, 2, NAN, "what the head reads is NaN"),
        (pendulum, HEADS.normal, 2, NAN, "action is NaN"),
        (pendulum, None, 1, float("inf"), "the action is infinite … expected finite numbers"),
    ],
)
def test_nan_and_infinity_from_jax(make_env, head, outputs, value, says):
    where = f"lane 0, step 0 of this batch … {says} … look at the policy's parameters"
    fails_then_runs(make_env, lambda env: poisoned(env, head, outputs, value), PolicyError, where, repair=cure)


@pytest.mark.parametrize("head", [HEADS.categorical, HEADS.greedy, HEADS.epsilon_greedy(0.0)])
def test_values_that_mask_actions_out_are_no_error(head):
    masked = torch.tensor([[-float("inf"), 0.0]] * 3)
    runs(cartpole(), fc.torch_policy(lambda x: masked, head=head))
    runs(cartpole(), fc.jax_policy(lambda params, x: params, jnp.asarray(masked.numpy()), head=head))


class Writing(nn.Module):
    """Writes what `change` makes of a good answer, once, at call number `at`."""

    def __init__(self, change, at):
        super().__init__()
        self.change, self.at, self.calls = change, at, 0

    def forward(self, tensordict):
        action = torch.zeros(len(tensordict), dtype=torch.int64)
        self.calls += 1
        if self.calls == self.at + 1:
            return self.change(tensordict, action)
        return tensordict.set("action", action)


def writes(**entries):
    """A change that sets entries made from the good action."""

    def change(tensordict, action):
        for name, make in entries.items():
            tensordict.set(name, make(action))
        return tensordict

    return change


def written(what, change, *says, at=0):
    return Misuse(what, lambda env: as_policy(Writing(change, at), env), PolicyError, says)


def same(action):
    return action


@table(
    written("no action", writes(value=same), "wrote ['value']", "expected 'action'", "out_keys"),
    written("nothing", lambda tensordict, action: None, "returned NoneType", "expected the TensorDict", "return it"),
    written("the action alone", lambda tensordict, action: action, "returned Tensor", "expected the", "return it"),
    written("a wide one", writes(action=lambda a: a[:, None]), "(3, 1)", "wants (3,)", "return one action", at=2),
    written("a reward", writes(action=same, reward=same), "wrote ['reward']", "a batch uses", "rename these out_keys"),
)
def test_a_callable_on_tensordicts_that_goes_wrong(misuse):
    fails_then_runs(cartpole, misuse.do, misuse.error, misuse.says)


def test_in_keys_that_the_environment_lacks():
    env = cartpole()
    wrong = TensorDictModule(lambda x: x[:, 0].long() * 0, ["pixels"], ["action"])
    says = ("reads the in_keys ['pixels']", "the environment gives ['observation']", "name these")
    with fc.SyncDataCollector(env, wrong, frames_per_batch=6) as collector, refused(PolicyError, says):
        next(collector)
    right = TensorDictModule(lambda x: x[:, 0].long() * 0, ["observation"], ["action"])
    with fc.SyncDataCollector(env, right, frames_per_batch=6) as collector:
        next(collector)


class Plain(fc.PolicyBase):
    """The protocol and nothing else; `answers` one after the other, the last one from then on."""

    backend = "torch"
    params = None

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, params, state, observation, noise, spec, exploration):
        return None, self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


GOOD = {"action": ACTIONS}


def plain(what, answers, *says):
    return Misuse(what, lambda env: Plain(*answers, GOOD), PolicyError, says)


@table(
    plain("no action", ({"value": ACTIONS},), "['value']", "expected ['action']", "return the action"),
    plain("a wide one", (GOOD, {"action": ACTIONS[:, None]}), "(3, 1)", "wants (3,)", "return one action"),
)
def test_a_policy_of_the_protocol_that_goes_wrong(misuse):
    fails_then_runs(cartpole, misuse.do, misuse.error, misuse.says)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.jax_policy(lambda x: x, None), r"apply takes \(x\), expected a function \(params, observation\)"),
        (lambda: fc.jax_policy(lambda p, x, h: x, None), r"takes \(p, x, h\), .*recurrent one: initial_state="),
        (lambda: fc.jax_policy(lambda p, x, *, key, to: x, None), r"function \(params, observation, key\) -> answer"),
        (lambda: fc.jax_policy(lambda p, x: x, None, initial_state=0.0), r"\(params, observation, state\)"),
        (lambda: fc.torch_policy(lambda x, h: x), r"takes \(x, h\), .*the observation \(a recurrent one: initial_st"),
        (lambda: fc.torch_policy(nn.Tanh(), initial_state=torch.zeros(2)), "a function of the observation and the sta"),
        (lambda: fc.tensordict_policy(lambda: None), r"takes \(\), expected a TensorDictModule or a function of a Ten"),
        (lambda: collector(postproc=lambda: None), r"postproc takes \(\), expected a function from batch to batch"),
        (lambda: collector(policy_factory=lambda env: None), r"policy_factory takes \(env\), .*without arguments"),
        (lambda: collector(exploration={"epsilon": lambda: 0.1}), r"exploration\['epsilon'\] takes \(\), expected"),
    ],
)
def test_functions_take_what_they_are_called_with(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def collector(**kwargs):
    if "policy_factory" not in kwargs:
        kwargs["policy"] = fc.torch_policy(nn.Linear(4, 2), head=fc.heads.epsilon_greedy(0.5))
    return fc.SyncDataCollector("CartPole-v1", frames_per_batch=10, total_frames=10, **kwargs)

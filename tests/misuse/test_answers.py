"""Torch policies that answer wrongly: at their first step or later; the first wrong lane and step are named."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support.misuse import Acting, Misuse, Once, fails_then_runs, refused, runs, table

HEADS = fc.heads
NAN, INF = float("nan"), float("inf")


def cartpole():
    return fc.make_env("CartPole-v1", num_envs=3)


def pendulum():
    return fc.make_env("Pendulum-v1", num_envs=3)


def acting(space, **how):
    return fc.make_env([Acting(space) for _ in range(3)], **how)


def with_one(good, value):
    """The same, with `value` in the last place of lane 1."""
    bad = good.clone()
    bad[1, ..., -1] = value
    return bad


def wrong(what, make_env, good, bad, *says, head=None, at=2, **how):
    """A policy whose call number `at` answers with `bad`, the others with `good`."""

    def policy():
        return fc.torch_policy(Once(good, bad, at), head=head, **how)

    return Misuse(what, lambda: (make_env(), policy()), PolicyError, says)


def of_torch(shape, head):
    return fc.torch_policy(lambda observation: torch.zeros(shape), head=head)


def of_jax(shape, head):
    return fc.jax_policy(lambda params, observation: jnp.zeros(shape), {}, head=head)


LOGITS = torch.zeros(3, 2)
ACTIONS = torch.zeros(3, dtype=torch.int64)
TORQUES = torch.zeros(3, 1)
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
ANSWERING = [
    (name, kind, head) for name, heads in HEADS_OF.items() for kind in (of_torch, of_jax) for head in heads
] + [("CartPole-v1", of_torch, HEADS.from_distribution(torch.distributions.Categorical, "logits"))]
SHAPES = [(3, (1,)), (3, ()), (2, ()), (3, (4,)), (1, ()), (2, (2, 1))]  # lanes, and what stands before the numbers


@pytest.mark.parametrize(
    ("num_envs", "lead", "name", "kind", "head"),
    [(*SHAPES[number % len(SHAPES)], *each) for number, each in enumerate(ANSWERING)],
)
def test_a_network_without_a_row_per_environment(num_envs, lead, name, kind, head):
    """Its answer would be broadcast, or give the batch another shape."""
    env, policy = fc.make_env(name, num_envs=num_envs), kind((*lead, 2), head)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(PolicyError, match=r"per environment|wants (a pair.*)?\['?P"):
        fc.rollout(env, policy, state, 3)


@table(
    wrong("NaN logits", cartpole, LOGITS, with_one(LOGITS, NAN), AT, "logits is NaN", LOOK, head=HEADS.categorical),
    wrong("NaN values", cartpole, LOGITS, with_one(LOGITS, NAN), AT, "action_value is NaN", LOOK, head=HEADS.greedy),
    wrong("a NaN loc", pendulum, PAIR, (with_one(TORQUES, NAN), PAIR[1]), AT, "loc is NaN", LOOK, head=HEADS.normal),
    wrong("a negative scale", pendulum, PAIR, (TORQUES, -PAIR[1]), "NaN", "has to be positive", head=HEADS.tanh_normal),
    wrong("an infinite loc", pendulum, PAIR, (with_one(TORQUES, INF), PAIR[1]), AT, "infinite", head=HEADS.normal),
    wrong("a NaN action", pendulum, TORQUES, with_one(TORQUES, NAN), AT, "action is NaN", "expected numbers", LOOK),
    wrong("an infinite action", pendulum, TORQUES, with_one(TORQUES, -INF), AT, "infinite", "expected finite", LOOK),
    wrong("NaN in an extra", cartpole, mixed(value=STILL), mixed(value=with_one(STILL, NAN)), AT, "value is NaN", LOOK),
    wrong("no batch dimension", cartpole, ACTIONS, ACTIONS[0], "shape ()", "Discrete(2) wants (3,)", "return", at=0),
    wrong("a dimension too many", cartpole, ACTIONS, ACTIONS[:, None], "shape (3, 1)", "wants (3,)", "return one"),
    wrong("a float action", cartpole, ACTIONS, ACTIONS.float(), "torch.float32", "wants torch.int64", "cast", at=0),
    wrong("another dtype later", cartpole, mixed(v=ACTIONS), mixed(v=ACTIONS + 0.5), "step 2", "float32", "after"),
    wrong("a list", cartpole, ACTIONS, [0, 1, 0], "action is list", "expected an array of shape (3,)", "return", at=0),
    wrong("a NumPy array", cartpole, ACTIONS, ACTIONS.numpy(), "a numpy.ndarray", "expected a torch.Tensor", at=0),
    wrong("no action", cartpole, mixed(), {"value": STILL}, "['value']", "expected ['action']", "return the", at=0),
    wrong("no logits", cartpole, LOGITS, {"v": STILL}, "['v']", "['logits']", "categorical", head=HEADS.categorical),
    wrong("too many logits", cartpole, LOGITS, STILL, "(3, 5)", "[P, 2]", "one number", head=HEADS.categorical, at=0),
    wrong(
        "a NumPy answer", cartpole, LOGITS, LOGITS.numpy(), "is ndarray", "a tensor of shape [3", head=HEADS.categorical
    ),
    wrong("one number", pendulum, PAIR, TORQUES, "(3, 1)", "a pair (loc, scale)", "return these", head=HEADS.normal),
    wrong("an extra for one lane", cartpole, mixed(v=STILL), mixed(v=STILL[:1]), "'v' is of shape (1, 5)", *ROWS, at=0),
    wrong("an extra that is no tensor", cartpole, mixed(v=STILL), mixed(v=[1, 2, 3]), "'v' is list", *ROWS, at=0),
    wrong("another extra later", cartpole, mixed(v=STILL), mixed(u=STILL), "['u'] after ['v']", "keep them the same"),
    wrong("a wider extra later", cartpole, mixed(v=STILL), mixed(v=STILL[:, :4]), "step 2", "[3, 4]", "after", "keep"),
    wrong("a key of a batch", cartpole, ACTIONS, mixed(next=STILL), "['next']", "a batch uses", "rename", at=0),
    wrong("no state", cartpole, (ACTIONS, STILL), ACTIONS, "Tensor", "(answer, next_state)", "return", at=0, **STATE),
    wrong("a short one", cartpole, (ACTIONS, STILL), (ACTIONS, STILL[0]), "[[5]]", "[[3, 5]]", "return", at=0, **STATE),
)
def test_a_policy_that_answers_wrongly(misuse):
    fails_then_runs(lambda: misuse.do()[0], lambda env: misuse.do()[1], misuse.error, misuse.says)


@pytest.mark.parametrize(
    ("space", "good", "bad", "one_hot"),
    [
        (spaces.Discrete(2), [0, 0, 1], [0, 2, 1], False),
        (spaces.Discrete(2, start=5), [5, 6, 5], [5, 4, 5], False),
        (spaces.Discrete(2), [[1, 0]] * 3, [[1, 0], [2, -1], [0, 1]], True),
        (spaces.MultiDiscrete([2, 3]), [[1, 2]] * 3, [[1, 2], [2, 1], [0, 0]], False),
        (spaces.MultiDiscrete([2, 2]), [[1, 0, 0, 1]] * 3, [[1, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1]], True),
        (spaces.MultiBinary(2), [[1, 0]] * 3, [[1, 0], [0, 7], [0, 0]], False),
        (spaces.Box(0, 255, (1,), np.uint8), [[9]] * 3, [[9], [-1], [255]], False),
    ],
)
def test_an_action_outside_its_space(space, good, bad, one_hot):
    says = (AT, "outside its space", "expected", "one-hot rows for" if one_hot else str(space), "return one of these")
    answers = [torch.tensor(each) for each in (good, bad)]
    make = lambda: acting(space, one_hot=one_hot)  # noqa: E731
    fails_then_runs(make, lambda env: fc.torch_policy(Once(*answers)), PolicyError, says)


@pytest.mark.parametrize("action", [5, -1])
def test_an_environment_that_refuses_an_action_outside_its_space(action):
    says = f"lane 1 … step(np.int64({action})) raised AssertionError … the action is not in Discrete(2) … the policy"
    bad = torch.tensor([0, action, 0])
    fails_then_runs(cartpole, lambda env: fc.torch_policy(Once(ACTIONS, bad)), fc.EnvError, says)


@pytest.mark.parametrize("name", ["observation", "position"])
def test_an_output_under_the_key_of_an_observation(name):
    nested = spaces.Dict({"position": spaces.Box(-1, 1, (2,))})
    env = cartpole() if name == "observation" else fc.make_env([_dict_env(nested) for _ in range(3)])
    discrete = torch.zeros(3, dtype=torch.int64)
    policy = fc.torch_policy(lambda _: {"action": discrete, name: STILL})
    state = fc.init(env, policy, seed=0)
    with refused(PolicyError, (f"output '{name}' collides", f"the observation '{name}'", "rename the output")):
        fc.rollout(env, policy, state, 4)
    runs(env, fc.torch_policy(lambda _: {"action": discrete, "other": STILL}), fc.recover(env, state))


def _dict_env(space):
    env = Acting(spaces.Discrete(2))
    env.observation_space, env.good = space, {"position": np.zeros(2, np.float32)}
    return env


def test_a_module_that_raises_is_heard_itself_and_the_collector_goes_on():
    class Picky(nn.Linear):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("mine")
            return super().forward(observation)

    before = torch.get_rng_state()
    policy = fc.torch_policy(nn.Sequential(Picky(4, 2)), head=HEADS.categorical)
    torch.set_rng_state(before)
    with fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=5) as collector:
        with pytest.raises(ZeroDivisionError, match="mine"):
            next(collector)
        assert torch.equal(torch.get_rng_state(), before)
        assert next(collector)["collector", "traj_ids"].tolist() == [1] * 5

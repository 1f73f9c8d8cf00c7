"""`check_policy` passes every form of policy, and each of its checks catches the faults that it claims to catch."""

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.policies.heads import categorical
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.testing import POLICY_CHECKS, check_policy
from tests.support.cases import POLICIES, make_env, mlp, sizes
from tests.support.faulty.faulty_envs import Walk, over
from tests.support.running import in_soak, scaled

NAMES = [check.__name__ for check in POLICY_CHECKS]
DRAWS = {"deterministic", "rows_apart"}
UNSCORED = {"log_probs"}
STATELESS = {"recurrent"}
WEIGHTLESS = {"params_argument", "state_dict"}

# What does not apply to the forms of `cases.POLICIES`.
IDLE = {
    "torch_recurrent": set(),
    "jax_recurrent": set(),
    "jax_keyed": STATELESS | DRAWS | UNSCORED,
    "tensordict_module": STATELESS | DRAWS | UNSCORED,
    "random": STATELESS | {"deterministic"} | UNSCORED | WEIGHTLESS,
}


# Each kind once, those that compile in the first; those with a state are checked for all that the plain ones are.
PLACES = [("torch/Pendulum-v1", 3), ("CartPole-v1", None)]
PAIRS = [(kind, *PLACES[n % 2 if kind[:3] != "jax" else 0]) for n, kind in enumerate(POLICIES) if kind != "jax_mlp"]
PAIRS += in_soak(pair for pair in ((kind, *place) for kind in POLICIES for place in PLACES) if pair not in PAIRS)


@pytest.mark.parametrize(("kind", "name", "num_envs"), PAIRS)
def test_every_form_passes_every_check_that_applies(kind, name, num_envs):
    env = make_env(name, num_envs)
    report = check_policy(POLICIES[kind](env), env, steps=scaled(36))
    assert [result.name for result in report.results] == NAMES
    assert {*report.passed} == {*NAMES} - IDLE.get(kind, STATELESS), str(report)


class Grid(Walk):
    action_space = spaces.MultiDiscrete([3, 2], start=[1, 0])

    def push(self, action):
        assert action in self.action_space
        return super().push(action - self.action_space.start)


def walks(kind=Walk, **kwargs):
    return lambda: fc.envs.from_gymnasium(kind, num_envs=3, **kwargs)


def linear(inputs=2, outputs=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs)


def logits(function):
    return lambda: fc.torch_policy(function, head=fc.heads.categorical)


def torch_policy(*layers, head=fc.heads.categorical):
    return lambda: fc.torch_policy(nn.Sequential(*layers), head=head)


class Plain(fc.PolicyBase):
    """By the bare protocol: pushes away from where it stands, or draws. `more` may add outputs, or write over them."""

    backend, params, calls = "torch", None, 0

    def noise(self, spec):
        return fc.heads.categorical.noise(spec)

    def prepare(self, params):
        return params

    def scores(self, params, observation):
        return torch.stack([-observation[:, 0], observation[:, 1] * 0, observation[:, 0]], -1)

    def more(self, scores, noise, random, state):
        return {}

    def __call__(self, params, state, observation, noise, spec, exploration):
        scores = self.scores(params, observation)
        random = exploration.type is fc.ExplorationType.RANDOM
        outputs = {"action": (scores + noise if random else scores).argmax(-1), "scores": scores}
        return state, outputs | self.more(scores, noise, random, state)


class Weighted(Plain):
    def __init__(self):
        self.params = {"weight": torch.ones(3)}

    prepare = fc.PolicyBase.prepare

    def scores(self, params, observation):
        return super().scores(params, observation) * params["weight"]


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(4, 2), linear()

    def forward(self, observation, hidden):
        after = self.first(torch.cat((observation, hidden), -1)).tanh()
        return {"logits": self.second(after), "hidden": after}, after


def recurrent():
    return fc.torch_policy(Hidden(), head=fc.heads.categorical, initial_state=torch.ones(2))


OTHERS = {
    "greedy": (torch_policy(mlp(2, 3), head=fc.heads.greedy), walks(), STATELESS | UNSCORED),
    "one-hot": (torch_policy(mlp(2, 3)), walks(one_hot=True), STATELESS),
    "components": (torch_policy(mlp(2, 5)), walks(Grid), STATELESS),
    "components, epsilon": (torch_policy(mlp(2, 5), head=fc.heads.epsilon_greedy(0.4)), walks(Grid), STATELESS),
    "function": (lambda: lambda x: (x[:, 0] > 0).long(), walks(), STATELESS | UNSCORED | WEIGHTLESS),
    "None": (lambda: None, walks(), STATELESS | {"deterministic"} | UNSCORED | WEIGHTLESS),
    "protocol": (Plain, walks(), STATELESS | UNSCORED | WEIGHTLESS),
    "protocol with parameters": (Weighted, walks(), STATELESS | UNSCORED),
    "recurrent": (recurrent, walks(), set()),
    "batch norm, eval": (torch_policy(nn.BatchNorm1d(2).eval(), mlp(2, 3)), walks(), STATELESS),
}


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "components"] + in_soak(["components"]))
def test_other_forms_pass_too(name):
    make, make_env_, idle = OTHERS[name]
    report = check_policy(make(), make_env_())
    assert {*report.passed} == {*NAMES} - idle, str(report)


def planted(base=Plain, **members):
    return type("Planted", (base,), members)


def counting(self, params, observation):
    self.calls += 1
    return Plain.scores(self, params, observation) * self.calls


def widening(self, params, state, *args):
    return state.double() + 1, Plain.__call__(self, params, None, *args)[1]


def adopting(self, params):
    self.params = Weighted.prepare(self, params)
    return self.params


def scored(change):
    return planted(scores=lambda self, params, x: Plain.scores(self, params, change(x)))


class LearnsAsItActs(nn.Linear):
    def forward(self, observation):
        with torch.no_grad():
            self.weight += 0.01
        return super().forward(observation)


class Acting:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def acting(make, **members):
    class Wrapped(TorchPolicy):
        def actor(self, inputs):
            return planted(Acting, **members)(super().actor(inputs))

    policy = make()
    return lambda: Wrapped(policy.module, policy.head, policy.initial_state, None)


def hesitating(self):
    """The first scores of every batch are others."""
    state, columns = self.inner.finish()
    columns["scores",][0] += len(columns["scores",]) > 2
    return state, columns


def keeping(self):
    """Its state is a view of what it recorded."""
    state, columns = self.inner.finish()
    return type(state)(columns["hidden",][-1], state.generator), columns


def all_lanes(self, lanes):
    if len(lanes):
        self.inner.restart(range(3))


class Unnormalised(type(categorical)):
    """Takes the logit for the log-probability."""

    def log_prob(self, xp, parameters, outputs, spec):
        return parameters[0].gather(-1, outputs["action"][..., None])[..., 0]


@dataclasses.dataclass(frozen=True)
class Forgetful(type(categorical)):
    """Scores by something that `record` does not return."""

    def sample(self, xp, parameters, noise, spec):
        return {**super().sample(xp, parameters, noise, spec), "luck": parameters[0].sum(-1) * 0 + 1}

    def log_prob(self, xp, parameters, outputs, spec):
        return super().log_prob(xp, parameters, outputs, spec) - outputs.get("luck", 0)


def scored_twice(observation):
    answer = observation @ torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
    return {"logits": answer, "scores": answer}


UNNORMALISED, FORGETFUL = Unnormalised(*dataclasses.astuple(categorical)), Forgetful(name="forgetful")


def in_torch(**members):
    return lambda: planted(TorchPolicy, **members)(linear(), fc.heads.categorical, None, None)


def more(change, **members):
    return planted(more=lambda self, *given: change(*given), **members)


def anyhow(self, key, num_envs):
    return torch.from_numpy(np.random.default_rng().normal(size=(num_envs, 1)))


BY_ITS_OWN = planted(Weighted, scores=lambda self, _, x: Weighted.scores(self, self.params, x))
AS_GIVEN = planted(Weighted, prepare=lambda self, params: self.params if params is None else params)
WITH_A_BIAS = in_torch(state_dict=lambda self, *given: TorchPolicy.state_dict(self, *given) | {"bias": torch.zeros(3)})
WITHOUT_A_COPY = in_torch(state_dict=lambda self, params=None: dict(self.module.named_parameters()))


FAULTS = [
    ("answers", torch_policy(mlp(2, 3), head=fc.heads.normal), r"normal needs a floating Box action space"),
    ("answers", more(lambda scores, *_: {"scores": scores[:, :2].mean(0)}), r"\[3, ...\], a row for .*got \[2\]"),
    ("answers", more(lambda _, noise, random, __: {"noise": noise} if random else {}), r"INISTIC: .*'noise'.*got"),
    ("acts", logits(lambda x: (0.8 - x.abs()).log() @ torch.ones(2, 3)), r"lane \d, step \d+ .* logits is NaN"),
    ("generators", scored(lambda x: x + 0 * np.random.rand()), r"NumPy's global generator"),
    ("pure", scored(lambda x: x.mul_(2)), r"observation observation after the policy was called: expected unchan"),
    ("pure", planted(scores=counting), r"the second of two equal calls.*keep nothing in self"),
    ("pure", torch_policy(LearnsAsItActs(2, 3)), r"the policy's own params..0...'weight'.: expected unchanged"),
    ("same_seed", more(lambda x, *given: {"scores": x + given[-1]}, init=anyhow), r"the second run, lane \d.*seed=0"),
    ("cuts", acting(logits(scored_twice), finish=hesitating), r"cut into \[1, 13, 1, 13\], lane 0, step 0"),
    ("batch_memory", acting(recurrent, finish=keeping), r"batches were zeroed, lane \d.*copy what is kept"),
    ("save", planted(init=lambda self, _, lanes: torch.zeros(lanes), __call__=widening), r"is float64, here .*32"),
    ("deterministic", more(lambda x, y, *_: {"action": (x + y).argmax(-1)}), r"row \d, action, .*DETERMINISTIC"),
    ("deterministic", torch_policy(nn.Linear(2, 3), nn.Dropout()), r"call module.eval\(\) if there is dropout"),
    ("log_probs", torch_policy(linear(), head=UNNORMALISED), r"all actions' probabilities: expected 1.0, got \d"),
    ("log_probs", torch_policy(linear(), head=FORGETFUL), r"log_prob: expected -\d\.\d+, by evaluate_actions"),
    ("rows_apart", scored(lambda x: x - x.mean(0)), r"the output beside other rows, lane 0"),
    ("rows_apart", scored(lambda x: x + torch.arange(len(x))[:, None]), r"rows in reverse order, lane 0"),
    ("rows_apart", torch_policy(nn.BatchNorm1d(2), mlp(2, 3)), r"the output beside other .*call module.eval\(\)"),
    ("recurrent", acting(recurrent, restart=all_lanes), r"lane 1, leaf 0 of the recurrent state.*going on"),
    ("recurrent", acting(recurrent, restart=lambda *_: None), r"lane 0, leaf 0 of the recurrent state.*restarted"),
    ("params_argument", BY_ITS_OWN, r"with other params: expected other outputs, got"),
    ("params_argument", AS_GIVEN, r"KeyError: 'weight'"),
    ("params_argument", planted(Weighted, prepare=adopting), r"policy's own params..weight..: expected unchanged"),
    ("state_dict", WITH_A_BIAS, r"the policy's own params..bias..: expected unchanged"),
    ("state_dict", WITHOUT_A_COPY, r"the policy's own params..\w+..: expected unchanged"),
    ("state_dict", in_torch(load=lambda self, _: None), r"after load: expected other outputs, got the same"),
]


@pytest.mark.filterwarnings("ignore:Sequential writes its buffers")  # batch norm
@pytest.mark.parametrize(("check", "make", "words"), FAULTS, ids=[f"{check} {words:.20}" for check, _, words in FAULTS])
def test_a_planted_fault_is_caught_by_its_check(check, make, words):
    with pytest.raises(fc.CheckError, match=words) as caught:
        check_policy(make(), over(Walk)())
    assert caught.value.check == check, str(caught.value)
    assert [result.name for result in caught.value.report.results] == NAMES[: NAMES.index(check)]


def test_every_check_has_a_planted_fault():
    assert {check for check, *_ in FAULTS} == {*NAMES}


def test_the_policys_weights_are_put_back():
    module = mlp(*sizes(make_env("CartPole-v1", 2)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    check_policy(fc.torch_policy(module, head=fc.heads.categorical), "CartPole-v1", num_envs=2)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_actions_outside_a_box_are_noted():
    policy = fc.torch_policy(mlp(3, 2), head=fc.heads.normal)
    report = check_policy(policy, "torch/Pendulum-v1", num_envs=2)
    (note,) = [result.note for result in report.results if result.name == "acts"]
    assert note == "" or "are outside the Box: the environment has to clip them" in note
    wide = fc.torch_policy(lambda x: torch.full((len(x), 1), 3.0))
    (note,) = [result.note for result in check_policy(wide, "torch/Pendulum-v1").results if result.name == "acts"]
    assert note.startswith("40 of 40 actions are outside the Box")

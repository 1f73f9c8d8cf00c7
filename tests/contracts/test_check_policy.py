"""`check_policy` passes every form of policy, and each of its checks catches the faults that it claims to catch."""

import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.testing import POLICY_CHECKS, check_env, check_policy
from tests.support.cases import POLICIES, make_env, mlp, sizes
from tests.support.faulty import faulty_policies as faulty
from tests.support.faulty.faulty_envs import Walk, over
from tests.support.running import SCALE, scaled

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


@pytest.mark.parametrize(
    ("kind", "name", "num_envs"),
    [(kind, "torch/Pendulum-v1", 3) for kind in POLICIES]
    + [(kind, "CartPole-v1", None) for kind in POLICIES if SCALE > 1 or not kind.startswith("jax")],  # they compile
)
def test_every_form_passes_every_check_that_applies(kind, name, num_envs):
    env = make_env(name, num_envs)
    report = check_policy(POLICIES[kind](env), env, steps=scaled(36))
    assert [result.name for result in report.results] == NAMES
    assert {*report.passed} == {*NAMES} - IDLE.get(kind, STATELESS), str(report)


class Grid(Walk):
    """Two components of three and two choices."""

    action_space = spaces.MultiDiscrete([3, 2], start=[1, 0])

    def push(self, action):
        assert action in self.action_space
        return super().push(action - self.action_space.start)


def walks(kind, **kwargs):
    return fc.envs.from_gymnasium(kind, num_envs=3, **kwargs)


def function(observation):
    return (observation[:, 0] > 0).long()


OTHERS = {
    "greedy": (lambda: fc.torch_policy(mlp(2, 3), head=fc.heads.greedy), over(Walk), STATELESS | UNSCORED),
    "one-hot": (
        lambda: fc.torch_policy(mlp(2, 3), head=fc.heads.categorical),
        lambda: walks(Walk, one_hot=True),
        STATELESS,
    ),
    "components": (lambda: fc.torch_policy(mlp(2, 5), head=fc.heads.categorical), lambda: walks(Grid), STATELESS),
    "components, epsilon": (
        lambda: fc.torch_policy(mlp(2, 5), head=fc.heads.epsilon_greedy(0.4)),
        lambda: walks(Grid),
        STATELESS,
    ),
    "function": (lambda: function, over(Walk), STATELESS | UNSCORED | WEIGHTLESS),
    "None": (lambda: None, over(Walk), STATELESS | {"deterministic"} | UNSCORED | WEIGHTLESS),
    "protocol": (faulty.Plain, over(Walk), STATELESS | UNSCORED | WEIGHTLESS),
    "protocol with parameters": (faulty.Weighted, over(Walk), STATELESS | UNSCORED),
    "recurrent": (faulty.recurrent, over(Walk), set()),
    "batch norm, eval": (
        lambda: fc.torch_policy(nn.Sequential(nn.BatchNorm1d(2), mlp(2, 3)).eval(), head=fc.heads.categorical),
        over(Walk),
        STATELESS,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_pass_too(name):
    make, make_env_, idle = OTHERS[name]
    report = check_policy(make(), make_env_())
    assert {*report.passed} == {*NAMES} - idle, str(report)


def explosive():
    return fc.torch_policy(faulty.Explodes(), head=fc.heads.categorical, initial_state=torch.ones(3))


FAULTS = [
    ("answers", lambda: fc.torch_policy(mlp(2, 3), head=fc.heads.normal), r"normal needs a floating Box action space"),
    ("answers", faulty.AnswersOneRow, r"the output scores: expected \[3, ...\], a row for each environment, got \[2\]"),
    ("answers", faulty.SaysMoreAtRandom, r"the outputs with exploration_type=DETERMINISTIC: expected .*'noise'.*got"),
    ("acts", explosive, r"lane \d, step \d+ of this batch: logits is NaN"),
    ("generators", faulty.DrawsFromNumPy, r"NumPy's global generator"),
    (
        "pure",
        faulty.WritesItsObservation,
        r"the observation observation after the policy was called: expected unchanged",
    ),
    ("pure", faulty.Counts, r"the second of two equal calls.*keep nothing in self"),
    (
        "pure",
        faulty.choosing(faulty.LearnsAsItActs(2, 3)),
        r"the policy's own params..0...'weight'.: expected unchanged",
    ),
    ("same_seed", faulty.StartsAnyhow, r"the second run, lane \d.*seed=0"),
    ("cuts", faulty.hesitant, r"the run cut into \[1, 13, 1, 13\], lane 0, step 0, scores"),
    (
        "batch_memory",
        lambda: faulty.recurrent(faulty.KeepsItsColumns),
        r"batches were zeroed, lane \d.*copy what is kept",
    ),
    ("save", faulty.Widens, r"a leaf of the saved policy_state is float64, here it is float32"),
    ("deterministic", faulty.DrawsRegardless, r"row \d, action, with exploration_type=DETERMINISTIC.*for every seed"),
    ("deterministic", faulty.choosing(nn.Linear(2, 3), nn.Dropout()), r"call module.eval\(\) if there is dropout"),
    ("log_probs", faulty.unnormalised, r"lane 0, step 0, the sum of all actions' probabilities: expected 1.0, got \d"),
    ("log_probs", faulty.forgetful, r"lane 0, step 0, action_log_prob: expected -\d\.\d+, by evaluate_actions"),
    ("rows_apart", faulty.ComparesItsRows, r"the output beside other rows, lane 0"),
    ("rows_apart", faulty.CountsItsRows, r"the outputs for the rows in reverse order, lane 0"),
    ("recurrent", lambda: faulty.recurrent(faulty.Forgets), r"lane 1, leaf 0 of the recurrent state.*going on"),
    ("recurrent", lambda: faulty.recurrent(faulty.NeverForgets), r"lane 0, leaf 0 of the recurrent state.*begun anew"),
    ("params_argument", faulty.IgnoresItsParams, r"the run with other params: expected other outputs, got the same"),
    ("params_argument", faulty.TakesNoStateDict, r"KeyError: 'weight'"),
    ("params_argument", faulty.TakesParamsForItsOwn, r"the policy's own params..weight..: expected unchanged"),
    ("state_dict", faulty.linear_in(faulty.LosesABias), r"the policy's own params..bias..: expected unchanged"),
    ("state_dict", faulty.linear_in(faulty.SavesNoCopy), r"the policy's own params..\w+..: expected unchanged"),
    ("state_dict", faulty.linear_in(faulty.LoadsNothing), r"the run after load: expected other outputs, got the same"),
]


@pytest.mark.parametrize(("check", "make", "words"), FAULTS, ids=[f"{check} {words:.20}" for check, _, words in FAULTS])
def test_a_planted_fault_is_caught_by_its_check(check, make, words):
    with pytest.raises(fc.CheckError, match=words) as caught:
        check_policy(make(), over(Walk)())
    assert caught.value.check == check, str(caught.value)
    assert [result.name for result in caught.value.report.results] == NAMES[: NAMES.index(check)]


@pytest.mark.filterwarnings("ignore:Sequential writes its buffers")
def test_batch_norm_in_training_mode_is_caught():
    policy = fc.torch_policy(nn.Sequential(nn.BatchNorm1d(2), mlp(2, 3)), head=fc.heads.categorical)
    with pytest.raises(fc.CheckError, match=r"the output beside other rows.*call module.eval\(\)"):
        check_policy(policy, over(Walk)())


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


def test_the_environments_of_these_tests_are_good():
    check_env(over(Grid)(), steps=30)

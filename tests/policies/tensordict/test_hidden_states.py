"""Hidden states that a policy carries as keys: as in a loop by hand, lowered, and when each step crosses."""

from functools import cache, partial

import jax
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import Compose, GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, set_recurrent_mode

import funcollect as fc
from funcollect.core import routes
from funcollect.policies.as_policy import as_policy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.testing import POLICY_CHECKS, check_policy
from tests.support.cases import mlp
from tests.support.compare import assert_close, collect, joined, leaves, rollouts
from tests.support.running import in_soak, once, scaled


class Cell(nn.Module):
    """Adds to what it remembers, which is nested, and counts."""

    def __init__(self):
        super().__init__()
        self.net = mlp(9, 5)

    def forward(self, observation, memory, count):
        memory = torch.tanh(self.net(torch.cat((observation, memory), -1)))
        return memory, memory, count + 1


def seeded(make, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(input_size=4, hidden_size=5, **kwargs)


def lstm():
    return seeded(LSTMModule, in_key="observation", out_key="embedding")


def gru():
    return seeded(GRUModule, in_keys=["observation", "hidden"], out_keys=["embedding", ("next", "hidden")])


def own():
    after = ["embedding", ("next", "agent", "memory"), ("next", "count")]
    return TensorDictModule(Cell(), ["observation", ("agent", "memory"), "count"], after)


class ArgMax(nn.Module):
    def forward(self, values):
        return values.argmax(-1)


START = {"own": {"agent": {"memory": torch.full((5,), 0.5)}, "count": torch.tensor([7])}}


@cache
def policy_of(make, compiler=None):
    choose = TensorDictModule(ArgMax(), ["logits"], ["action"])
    module = TensorDictSequential(make(), TensorDictModule(mlp(5, 2), ["embedding"], ["logits"]), choose)
    return fc.tensordict_policy(module, initial_state=START.get(make.__name__), compile=compiler)


def recurrent_actor(memory):
    logits = TensorDictSequential(memory, TensorDictModule(mlp(5, 2), ["embedding"], ["logits"]))
    kind = torch.distributions.Categorical
    return ProbabilisticActor(logits, in_keys=["logits"], distribution_class=kind, return_log_prob=True)


MEMORIES = [(lstm, ["recurrent_state_h", "recurrent_state_c"]), (gru, ["hidden"])]
BY_HAND = [("CartPole-v1", None), ("CartPole-v1", "xla"), ("torch/CartPole-v1", "xla")]


@pytest.mark.parametrize(("kind", "num_envs", "way"), once(MEMORIES, [None, 3], BY_HAND))
def test_hidden_states_are_those_of_a_loop_by_hand(kind, num_envs, way):
    (memory, keys), (name, compiler) = kind, way
    batch = collect(fc.make_env(name, num_envs=num_envs), policy_of(memory, compiler), scaled(20), scaled(20), seed=2)
    batch = batch[None] if num_envs is None else batch
    assert batch["next", "done"].any()
    first = batch["collector", "step"] == 0
    assert torch.equal(batch["is_init"][..., 0], first)
    assert not batch["next", "is_init"].any()
    module = memory()
    carried = {key: torch.zeros_like(batch[key][:, 0]) for key in keys}
    for t in range(batch.shape[-1]):
        for key in keys:
            carried[key][first[:, t]] = 0
            torch.testing.assert_close(batch[key][:, t], carried[key], rtol=1e-4, atol=1e-5)
        step = batch[:, t].select("observation", "is_init").update(carried)
        with torch.no_grad():
            step = module(step)
        torch.testing.assert_close(batch["embedding"][:, t], step["embedding"], rtol=1e-4, atol=1e-5)
        carried = {key: step["next", key].clone() for key in keys}
        for key in keys:
            torch.testing.assert_close(batch["next", key][:, t], carried[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", [lstm, *in_soak([gru])])
def test_every_check_of_a_policy_passes(memory):
    report = check_policy(recurrent_actor(memory()), fc.make_env("CartPole-v1", num_envs=3))
    assert {*report.passed} == {check.__name__ for check in POLICY_CHECKS}, str(report)


one_cartpole = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)


def test_a_primer_around_the_environment_says_how_hidden_states_begin():
    memory = lstm()
    transforms = Compose(InitTracker(), memory.make_tensordict_primer())
    env = fc.make_env(lambda: TransformedEnv(SerialEnv(2, one_cartpole), transforms))
    assert set(env.observation_space) == {"observation", "is_init"}
    batch = collect(env, as_policy(recurrent_actor(memory), env), 40)
    assert torch.equal(batch["is_init"][..., 0], batch["collector", "step"] == 0)
    assert (batch["recurrent_state_h"][batch["is_init"][..., 0]] == 0).all()
    goes_on = ~batch["next", "done"][:, :-1, 0]
    after = batch["next", "recurrent_state_h"][:, :-1]
    assert torch.equal(batch["recurrent_state_h"][:, 1:][goes_on], after[goes_on])


def assert_states(one, two):
    assert type(one) is type(two)
    assert torch.equal(one.generator, two.generator)
    assert one.recurrent.keys() == two.recurrent.keys()
    for path, leaf in one.recurrent.items():
        torch.testing.assert_close(leaf, two.recurrent[path], atol=1e-5, rtol=1e-5)


def run(env, policy, *lengths, **options):
    return rollouts(env, policy, fc.init(env, policy, seed=1), lengths, **options)


@pytest.mark.parametrize("make", [lstm, own, *in_soak([gru])])
def test_a_fused_batch_is_that_of_crossing_at_each_step(cartpole, make):
    fused, eager = policy_of(make, "xla"), policy_of(make, "eager")
    assert isinstance(routes.route_of(cartpole, fused).policy, LoweredPolicy)
    halved = {name: leaf * 0.5 for name, leaf in fused.state_dict().items()}
    ways = [((24, 24), None), ((24, 1), halved)]  # at its end an episode ends, or has just begun
    for cuts, params in ways if make is lstm else ways[:1] + in_soak(ways[1:]):
        state, batch = run(cartpole, fused, *cuts, max_frames_per_traj=12, params=params)
        wanted, reference = run(cartpole, eager, *cuts, max_frames_per_traj=12, params=params)
        assert reference["next", "done"].any()
        assert_close(batch, reference)
        assert_states(state.policy_state, wanted.policy_state)
        step = batch["collector", "step"]
        if make is own:
            assert (batch["agent", "memory"][step == 0] == 0.5).all()
            assert torch.equal(batch["count"][..., 0], 7 + step)
            assert torch.equal(batch["next", "count"][..., 0], 8 + step)
            assert "is_init" not in [*batch.keys()]
        else:
            assert torch.equal(batch["is_init"][..., 0], step == 0)
            assert not batch["next", "is_init"].any()


@pytest.mark.parametrize("make", [lstm, *in_soak([gru])])
def test_ways_take_over_from_one_another(cartpole, make):
    fused, eager = policy_of(make, "xla"), policy_of(make, "eager")
    whole = collect(cartpole, eager, 72)
    state, first = run(cartpole, fused, 24)
    other = fc.fork(cartpole, state)
    state, second = fc.rollout(cartpole, eager, state, 24)
    state, third = fc.rollout(cartpole, fused, state, 24)
    assert_close(joined([first, second, third]), whole)
    for rows in (whole[:, 24:48], whole[:, 48:]):
        other, batch = fc.rollout(cartpole, fused, other, 24)
        assert_close(batch, rows)


def test_inside_a_function_of_the_caller(cartpole):
    policy = policy_of(own, "xla")
    lowered = fc.lower_policy(policy, cartpole)
    state = fc.init(cartpole, lowered, seed=1)
    rollout = jax.jit(lambda params, state: fc.traced.rollout(cartpole, lowered, params, state, 24))
    batch = fc.deliver(rollout(lowered.params, state)[1], cartpole)
    wanted = collect(cartpole, policy, 24)
    assert leaves(batch).keys() == leaves(wanted).keys()
    for path in (("agent", "memory"), ("next", "agent", "memory"), ("embedding",)):
        torch.testing.assert_close(batch[path], wanted[path])


def test_gradients_go_back_through_the_hidden_states(cartpole):
    policy = policy_of(lstm)
    _, batch = fc.differentiable_rollout(cartpole, policy, fc.init(cartpole, policy, seed=0), scaled(30))
    assert batch["is_init"][:, 1:].any()
    batch["embedding"].sum().backward()
    memory = lstm()
    with set_recurrent_mode(True):
        again = memory(batch.detach().select(*memory.in_keys).clone())
    torch.testing.assert_close(again["embedding"], batch["embedding"])
    again["embedding"].sum().backward()
    for mine, wanted in zip(policy.module[0].parameters(), memory.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, atol=1e-4, rtol=1e-4)


HOSTED = ("CartPole-v1", "torch/CartPole-v1")
WAYS = [*(("gymnax/CartPole-v1", way) for way in ("xla", *in_soak(["eager"]))), *((name, "eager") for name in HOSTED)]


@pytest.mark.parametrize(("name", "way"), WAYS + in_soak((name, "xla") for name in HOSTED))
def test_the_first_step_is_told_to_what_carries_nothing(name, way):
    def act(x, first):
        return (x[:, 2] > 0).long() * ~first[:, 0]

    policy = fc.tensordict_policy(TensorDictModule(act, ["observation", "is_init"], ["action"]), compile=way)
    batch = collect(fc.make_env(name, num_envs=3), policy, 12, 12, max_frames_per_traj=7)
    first = batch["collector", "step"] == 0
    assert first[:, 1:].any()
    assert torch.equal(batch["is_init"][..., 0], first)
    assert torch.equal(batch["action"], ((batch["observation"][..., 2] > 0) & ~first).long())
    assert not batch["next", "is_init"].any()


class Carrying(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def forward(self, observation, memory):
        return (observation[..., 2] > 0).long(), self.after(memory)


def carrying(after, initial=None, compiler=None):
    module = TensorDictModule(Carrying(after), ["observation", "memory"], ["action", ("next", "memory")])
    return module if initial is None else fc.tensordict_policy(module, initial_state=initial, compile=compiler)


def test_what_no_loop_of_jax_can_carry_crosses(cartpole):
    learned = fc.torch_policy(Carrying(lambda memory: memory + 1), initial_state=nn.Parameter(torch.zeros(1)))
    assert fc.explain(cartpole, learned).loop == "crossing"
    assert collect(cartpole, learned, 3).batch_size == (3, 3)
    for after, initial, why in (
        (lambda memory: memory.half(), torch.ones(1), r"the hidden states \[\('memory',\)\] change their dtypes"),
        (lambda memory: memory, torch.ones(1, requires_grad=True), "initial_state requires grad, so it may change"),
    ):
        policy = carrying(after, {"memory": initial})
        assert fc.explain(cartpole, policy).loop == "crossing"
        assert collect(cartpole, policy, 3)["next", "memory"].shape == (3, 3, 1)
        with pytest.raises(fc.LoweringError, match=why):
            fc.init(cartpole, carrying(after, {"memory": initial}, "xla"), seed=0)


class Silent(nn.Module):
    in_keys, out_keys = ("observation", "memory"), ("action", ("next", "memory"))

    def forward(self, tensordict):
        return tensordict.set("action", (tensordict["observation"][..., 2] > 0).long())


def test_misuses_of_hidden_states_are_said(cartpole):
    env, wide = fc.make_env("CartPole-v1", num_envs=3), lambda memory: memory.repeat(1, 2)
    primed = lambda: TransformedEnv(one_cartpole(), lstm().make_tensordict_primer())  # noqa: E731
    primed_inside = fc.make_env(lambda: SerialEnv(2, primed))
    for make, error, message in (
        (lambda: as_policy(carrying(wide), env), ValueError, r"reads 'memory' and .* under 'next'.*state=\{'memory'"),
        (lambda: carrying(wide, {"other": torch.zeros(2)}), ValueError, r"holds \[\('other',\)\], .*\[\('memory',\)\]"),
        (lambda: carrying(wide, torch.zeros(2)), TypeError, "initial_state is Tensor, expected a dict"),
        (lambda: fc.tensordict_policy(Silent), TypeError, "expected a TensorDictModule or a function"),
        (lambda: as_policy(recurrent_actor(lstm()), primed_inside), ValueError, "_h'.*take the TensorDictPrimer out"),
    ):
        with pytest.raises(error, match=message):
            make()
    initial = {"memory": torch.zeros(2)}
    widened, silent = carrying(wide, initial), fc.tensordict_policy(Silent(), initial_state=initial)
    misshapen = r"\(3, 4\), expected \(3, 2\)"
    for where, policy, message in ((env, widened, misshapen), (cartpole, widened, misshapen), (env, silent, "None")):
        with pytest.raises(fc.PolicyError, match=f"hidden state 'next.memory' is {message}"):
            collect(where, policy, 3)

"""Policies on a TensorDict, and what they find at the next step of what they wrote."""

import warnings

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import (
    ConsistentDropoutModule,
    MultiStepActorWrapper,
    NormalParamExtractor,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    TanhNormal,
)

import funcollect as fc
from tests.support.cases import HIDDEN, Recurrent, mlp
from tests.support.compare import assert_same
from tests.support.compare import collect as run
from tests.support.policies import Count
from tests.support.running import in_soak, once


def collect(policy, env="CartPole-v1", **options):
    env = fc.make_env(env, num_envs=3)
    with fc.SyncDataCollector(env, policy, frames_per_batch=90, seed=1, **options) as collector:
        return next(collector)


def push(x):
    return (x[..., 2] > 0).long()


def by_name_td(td):
    return td.set("action", push(td["observation"]))


def by_name_tensordict(tensordict, *, scale=1.0):
    return tensordict.set("action", push(tensordict["observation"] * scale))


def by_annotation(batch: TensorDictBase) -> TensorDictBase:
    return by_name_td(batch)


def by_evaluated_annotation(batch):
    return by_name_td(batch)


by_evaluated_annotation.__annotations__["batch"] = TensorDict


class ModuleOfTd(nn.Module):
    def forward(self, tensordict):
        return TensorDict({"action": push(tensordict["observation"])}, tensordict.batch_size)


class CallableOfTd:
    def __call__(self, td):
        return by_name_td(td)


CALLABLES = [by_name_td, by_name_tensordict, by_annotation, by_evaluated_annotation, ModuleOfTd(), CallableOfTd()]


@pytest.mark.parametrize("policy", CALLABLES, ids=lambda each: getattr(each, "__name__", type(each).__name__))
def test_callables_on_a_tensordict_are_known_by_their_argument(policy):
    batch = collect(policy)
    assert torch.equal(batch["action"], push(batch["observation"]))


@pytest.mark.parametrize("default", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
def test_the_interaction_type_follows_the_exploration_type(default):
    network = nn.Sequential(mlp(3, 2), NormalParamExtractor())
    pair = TensorDictModule(network, ["observation"], ["loc", "scale"])
    bounded = {"distribution_class": TanhNormal, "distribution_kwargs": {"low": -2.0, "high": 2.0}}
    actor = ProbabilisticActor(pair, ["loc", "scale"], default_interaction_type=default, **bounded)
    mode, drawn = (
        collect(actor, "Pendulum-v1", exploration_type=each)
        for each in (fc.ExplorationType.DETERMINISTIC, fc.ExplorationType.RANDOM)
    )
    torch.testing.assert_close(mode["action"], 2 * mode["loc"].tanh(), rtol=1e-4, atol=1e-4)
    assert (drawn["action"] - 2 * drawn["loc"].tanh()).abs().mean() > 0.1


class Overwriting(nn.Module):
    """Writes into its input and into a buffer that it hands out."""

    def __init__(self):
        super().__init__()
        self.out = torch.zeros(3, dtype=torch.long)

    def forward(self, tensordict):
        self.out.copy_(push(tensordict["observation"]))
        tensordict["observation"].zero_()
        tensordict["observation"] = tensordict["observation"] + 5
        return tensordict.set("action", self.out).set("_hidden", self.out * 2)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_a_module_that_overwrites_what_it_was_given_corrupts_nothing(name):
    batch = collect(Overwriting(), name)
    assert_same(batch, collect(push, name))


theirs_warn = pytest.mark.filterwarnings("ignore:Creating .*WeightUpdater:DeprecationWarning")


def count(tensordict):
    return Count()(tensordict)


def by_keys():
    """Counts under a key that it reads and writes; TensorDictModule gives None for a key that is not there yet."""

    def call(observation, count):
        count = observation[..., 0].long() * 0 if count is None else count + 1
        return push(observation), count

    return TensorDictModule(call, ["observation", "count"], ["action", "count"])


def assert_counts(batch, lanes):
    """From 0 in the first trajectory of a lane; a restarted lane is given zeros, so it goes on with 1."""
    later = batch["collector", "traj_ids"] % 2**40 >= lanes
    assert torch.equal(batch["count"], batch["collector", "step"] + later.long())


ENVS = ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"]


@pytest.mark.parametrize(("make", "name"), once([Count, lambda: count, by_keys], ENVS))
@pytest.mark.parametrize("lengths", [(20, 20, 20), *in_soak([(60,), (1, 20, 39)])])
def test_what_is_written_is_read_at_the_next_step(name, make, lengths):
    env, policy = fc.make_env(name, num_envs=3), fc.tensordict_policy(make())
    assert_counts(run(env, policy, *lengths, seed=0, max_frames_per_traj=12), 3)


def test_what_is_written_once_stays():
    def policy(tensordict):
        if "value" not in tensordict.keys():  # noqa: SIM118  (a TensorDict's own test for keys)
            tensordict["value"] = torch.arange(1.0, 4.0)
        return tensordict.set("action", tensordict["observation"][:, 2].gt(0).long())

    batch = run(fc.make_env("CartPole-v1", num_envs=3), fc.tensordict_policy(policy), 9)
    assert torch.equal(batch["value"], torch.arange(1.0, 4.0)[:, None].expand(3, 9))


@theirs_warn
@pytest.mark.parametrize("lanes", [None, 2])
def test_the_first_episodes_are_those_of_torchrl(lanes):
    from torchrl.collectors import Collector

    def env():
        return GymEnv("Pendulum-v1") if lanes is None else SerialEnv(lanes, lambda: GymEnv("Pendulum-v1"))

    def policy(td):
        before = td.get("count", torch.full(td.batch_size, -1.0))
        return td.update({"count": before + 1, "action": 0.1 * before.unsqueeze(-1)})

    theirs = next(iter(Collector(env(), policy, frames_per_batch=100, total_frames=100, trust_policy=True)))
    with fc.SyncDataCollector(env(), fc.tensordict_policy(policy), frames_per_batch=100) as collector:
        ours = next(collector)
    assert torch.equal(ours["count"], theirs["count"])
    assert torch.equal(ours["action"], theirs["action"])


@theirs_warn
@pytest.mark.parametrize("derived", [*in_soak([False]), True])
def test_noise_of_ornstein_and_uhlenbeck_is_correlated(derived):
    from torchrl.collectors import Collector

    class Derived(OrnsteinUhlenbeckProcessModule):
        """A user's own, which changes nothing."""

    env = GymEnv("Pendulum-v1")
    actor = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    for parameter in actor.parameters():
        nn.init.zeros_(parameter)
    noise = (Derived if derived else OrnsteinUhlenbeckProcessModule)(
        spec=env.action_spec, sigma=0.2, theta=0.15, eps_init=1.0, eps_end=1.0, annealing_num_steps=10
    )
    policy = TensorDictSequential(actor, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchRL, about the key is_init
        theirs = next(iter(Collector(env, policy, frames_per_batch=200, total_frames=200)))
        ours = next(fc.SyncDataCollector(GymEnv("Pendulum-v1"), policy, frames_per_batch=200))
        lanes = next(fc.SyncDataCollector(["Pendulum-v1"] * 2, policy, frames_per_batch=400))
    for batch in (theirs, ours, lanes[0], lanes[1]):
        action = batch["action"][:, 0] - batch["action"].mean()
        assert (action[1:] * action[:-1]).mean() / action.square().mean() > 0.8


def test_actions_of_several_steps_are_played_out():
    network = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(-1, (4, 1)))
    policy = MultiStepActorWrapper(TensorDictModule(network, ["observation"], ["action"]), n_steps=4)
    envs = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), InitTracker())
    for env in (envs, ["Pendulum-v1"] * 2):
        with fc.SyncDataCollector(env, policy, frames_per_batch=36, max_frames_per_traj=6) as collector:
            batch = next(collector)
        step = batch["collector", "step"]
        assert torch.equal(batch["counter"][..., 0], step.int() % 4 + 1)
        for lane in range(2):
            for t, at in enumerate(step[lane].tolist()):
                planned = network(batch["observation"][lane, t - at % 4])
                torch.testing.assert_close(batch["action"][lane, t], planned[at % 4].detach())


class Memory(Recurrent):
    def forward(self, observation, memory):
        logits, memory = super().forward(observation, memory)
        return logits.argmax(-1), logits, memory


WAYS = [("CartPole-v1", None), ("torch/CartPole-v1", None), ("gymnax/CartPole-v1", "xla")]
WAYS += in_soak([("CartPole-v1", "xla"), ("gymnax/CartPole-v1", "eager")])


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_an_announced_state_begins_with_each_trajectory(name, way):
    network = Memory(4, 2)
    module = TensorDictModule(network, ["observation", "memory"], ["action", "logits", "memory"])
    policy = fc.tensordict_policy(module, initial_state={"memory": torch.full((HIDDEN,), 0.5)}, compile=way)
    env = fc.make_env(name, num_envs=3)
    batch = run(env, policy, 20, 20, seed=0, max_frames_per_traj=12)
    memory = torch.full((3, HIDDEN), 0.5)
    for t in range(40):
        fresh = batch["collector", "step"][:, t] == 0
        memory = torch.where(fresh[:, None], 0.5, memory)
        _, logits, memory = network(batch["observation"][:, t], memory)
        torch.testing.assert_close(batch["logits"][:, t], logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch["memory"][:, t], memory, rtol=1e-4, atol=1e-5)


@theirs_warn
def test_a_start_that_is_drawn_at_random_is_refused():
    drop = ConsistentDropoutModule(p=0.5, in_keys="hidden", input_shape=(2,))
    module = TensorDictSequential(TensorDictModule(nn.Linear(4, 2), ["observation"], ["hidden"]), drop)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"ConsistentDropoutModule draws the initial state.* initial_state="):
        fc.SyncDataCollector("CartPole-v1", module, frames_per_batch=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_exception_of_a_module_tells_what_it_was_called_with():
    pictures = TensorDictModule(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), ["observation"], ["action"])
    with pytest.raises(IndexError) as error:
        run(fc.make_env("CartPole-v1"), fc.tensordict_policy(pictures), 5)
    notes = "; ".join(error.value.__notes__)
    assert "the policy's module was called with ({observation: float32 [4]})" in notes
    assert "make the environment with num_envs=1" in notes

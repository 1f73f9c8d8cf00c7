"""Simulators on the host with a policy on a GPU: they read its actions, and batches are on the host."""

from functools import partial

import gymnasium
import pytest
import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical

import funcollect as fc
from funcollect import running_statistics
from tests.support.cases import HIDDEN, Recurrent, mlp
from tests.support.compare import fresh
from tests.support.devices import each_device
from tests.support.envs.light_envs import BOX, Sampling
from tests.support.running import once
from tests.support.workers import COLLECTORS

LANES, LENGTH = 4, 12
DISABLED = gymnasium.vector.AutoresetMode.DISABLED
SPREADS = {"one process": {}, "workers": {"num_workers": 2}}


def vector():
    kwargs = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": DISABLED}}
    return gymnasium.make_vec("Pendulum-v1", LANES, **kwargs)


ENVS = {
    "discrete": ("CartPole-v1", {"num_envs": LANES}),
    "one-hot": ("CartPole-v1", {"num_envs": LANES, "one_hot": True}),
    "box": ("Pendulum-v1", {"num_envs": LANES}),
    "several discrete": (partial(Sampling, BOX, gymnasium.spaces.MultiDiscrete([3, 2])), {"num_envs": LANES}),
    "lanes of Gymnasium": (vector, {}),
}
PLACES = [*once([*ENVS][:-1], SPREADS), ("lanes of Gymnasium", "one process")]


def make(name, spread="one process"):
    factory, own = ENVS[name]
    return fc.make_env(factory, **own, **SPREADS[spread])


class OutOfReach(Tensor):
    """A tensor that the host cannot read, like one on a GPU."""

    is_cpu = False

    def _refuse(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor")

    numpy = tolist = __array__ = _refuse

    def cpu(self):
        return self.as_subclass(Tensor)


class Away(fc.PolicyBase):
    backend, params = "torch", None

    def __call__(self, params, policy_state, observation, noise, spec, exploration, /):
        action = torch.zeros(len(observation), *spec.shape, dtype=spec.dtype)
        if spec.one_hot:
            action[:, 0] = 1
        return policy_state, {"action": action.as_subclass(OutOfReach)}


@pytest.mark.parametrize(("name", "spread"), PLACES)
def test_simulators_read_actions_that_are_not_on_the_host(name, spread):
    env = make(name, spread)
    state, batch = fc.rollout(env, Away(), fc.init(env, Away(), seed=0), LENGTH)
    fc.close(state)
    assert type(batch["action"]) is Tensor
    assert batch["next", "reward"].isfinite().all()


def discrete(device):
    return fc.torch_policy(mlp(4, 2).to(device), head=fc.heads.categorical)


def recurrent(device):
    module = Recurrent(4, 2).to(device)
    return fc.torch_policy(module, head=fc.heads.categorical, initial_state=torch.zeros(HIDDEN), record_state=True)


def box(device):
    return fc.torch_policy(nn.Sequential(mlp(3, 2), NormalParamExtractor()).to(device), head=fc.heads.normal)


def in_tensordicts(device):
    head = {"in_keys": ["logits"], "out_keys": ["action"], "distribution_class": Categorical, "return_log_prob": True}
    inner = TensorDictModule(mlp(4, 2).to(device), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticTensorDictSequential(inner, ProbabilisticTensorDictModule(**head))


@pytest.mark.parametrize(("policy", "spread"), once([discrete, recurrent, in_tensordicts, box], SPREADS))
@each_device
def test_batches_are_on_the_host_and_go_on(device, policy, spread):
    env = make("box" if policy is box else "discrete", spread)
    collector_of = {"frames_per_batch": LANES * LENGTH, "seed": 0}
    with fc.SyncDataCollector(env, policy(device), **collector_of) as collector:
        batches = [next(collector), next(collector)]
        scores = fc.evaluate_actions(collector.policy, None, batches[0])
        lone = fc.rollout(env, collector.policy, fc.init(env, collector.policy, seed=0), LENGTH)[1]
    assert {leaf.device.type for batch in batches for leaf in batch.values(True, True)} == {"cpu"}
    one, two = batches
    goes_on = ~one["next", "done"][:, -1, 0]
    assert torch.equal(one["next", "observation"][:, -1][goes_on], two["observation"][:, 0][goes_on])
    assert torch.equal(one["observation"][:, 0], lone["observation"][:, 0])
    assert scores["action_log_prob"].device.type == device
    torch.testing.assert_close(scores["action_log_prob"].cpu(), one["action_log_prob"], atol=1e-3, rtol=1e-3)
    if policy is not in_tensordicts:  # that one draws from the device's own generator
        with fc.SyncDataCollector(env, policy("cpu"), **collector_of) as on_cpu:
            first = next(on_cpu)["action"][:, 0]
        torch.testing.assert_close(one["action"][:, 0], first, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", COLLECTORS)
@each_device
def test_workers_act_on_the_device(device, kind):
    made = [partial(fc.make_env, "CartPole-v1", num_envs=2)] * 2
    options = {"policy_device": device, "frames_per_batch": 2 * LENGTH, "total_frames": -1, "seed": 0}
    policy = discrete("cpu")
    with kind(made, policy, **options) as collector:
        next(collector)
        with torch.no_grad():
            policy.module[2].weight.zero_(), policy.module[2].bias.copy_(torch.tensor([0.0, 30.0]))
        collector.update_policy_weights_()
        batch = next(each for each in collector if (each["collector", "policy_version"] == 1).all())
    assert batch.device is None or batch.device.type == "cpu"
    assert batch["action"].device.type == "cpu"
    assert batch["action"].all()


@each_device
def test_a_run_that_stores_on_the_device_is_saved_and_goes_on(device, tmp_path):
    env = make("box", "workers")
    options = {"frames_per_batch": LANES * LENGTH, "seed": 0, "storing_device": device}
    with fc.SyncDataCollector(env, box(device), **options) as collector:
        assert next(collector)["observation"].device.type == device
        collector.save(tmp_path / "run")
        wanted = next(collector)
    with fc.SyncDataCollector.load(tmp_path / "run", env, box(device), **options) as other:
        again = next(other)
    torch.testing.assert_close(again["action"], wanted["action"])
    assert torch.equal(again["collector", "traj_ids"], wanted["collector", "traj_ids"])


@each_device
def test_a_copy_of_the_run_goes_on_by_itself(device):
    env, policy, state = fresh(make("discrete"), recurrent(device), steps=LENGTH)
    copy = fc.fork(env, state)
    _, one = fc.rollout(env, policy, state, LENGTH)
    _, two = fc.rollout(env, policy, copy, LENGTH)
    torch.testing.assert_close(one["action"], two["action"])
    assert fc.evaluate(env, policy, episodes=2, seed=0).returns.device.type == "cpu"


@each_device
def test_statistics_follow_the_policy(device):
    env = make("box")
    fresh = running_statistics.init(env.observation_space)
    policy = fc.normalized(box(device), fresh)
    options = {"frames_per_batch": LANES * LENGTH, "seed": 0, "update_statistics": True}
    with fc.SyncDataCollector(env, policy, **options) as collector:
        one, _ = next(collector), next(collector)
        wanted = running_statistics.update(fresh, one)
        merged = running_statistics.merge(fresh, policy.statistics)
    assert policy.statistics.count.device.type == device
    assert merged.count.device.type == "cpu"
    torch.testing.assert_close(policy.statistics.mean["observation"].cpu(), wanted.mean["observation"])
    torch.testing.assert_close(merged.mean["observation"], wanted.mean["observation"])

"""Simulators on the host whose policy is on a GPU: they read its actions, and batches are on the host."""

import gymnasium
import numpy as np
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
from tests.support.devices import each_device

LANES, LENGTH = 4, 12
DISABLED = gymnasium.vector.AutoresetMode.DISABLED
SPREADS = {"one process": {}, "workers": {"num_workers": 2}}


class Many(gymnasium.Env):
    """An environment with several numbers per action."""

    observation_space = gymnasium.spaces.Box(0, 255, (4,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        assert isinstance(action, np.ndarray)
        return np.full(4, action[0], np.float32), float(action[1]), False, False, {}


def vector():
    return gymnasium.make_vec(
        "Pendulum-v1", LANES, vectorization_mode="sync", vector_kwargs={"autoreset_mode": DISABLED}
    )


ENVS = {
    "discrete": ("CartPole-v1", {"num_envs": LANES}),
    "one-hot": ("CartPole-v1", {"num_envs": LANES, "one_hot": True}),
    "box": ("Pendulum-v1", {"num_envs": LANES}),
    "several discrete": (Many, {"num_envs": LANES}),
    "lanes of Gymnasium": (vector, {}),
}


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
    """A policy whose actions are out of reach."""

    backend = "torch"
    params = None

    def __call__(self, params, policy_state, observation, noise, spec, exploration, /):
        action = torch.zeros(len(observation), *spec.shape, dtype=spec.dtype)
        if spec.one_hot:
            action[:, 0] = 1
        return policy_state, {"action": action.as_subclass(OutOfReach)}


@pytest.mark.parametrize(
    ("name", "spread"),
    [(name, spread) for name in ENVS for spread in SPREADS if name != "lanes of Gymnasium" or spread == "one process"],
)
def test_simulators_read_actions_that_are_not_on_the_host(name, spread):
    env = make(name, spread)
    state, batch = fc.rollout(env, Away(), fc.init(env, Away(), seed=0), LENGTH)
    fc.close(state)
    assert type(batch["action"]) is Tensor
    assert batch["next", "reward"].isfinite().all()


class Memory(nn.Module):
    """A network with a recurrent state."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, observation, recurrent):
        recurrent = self.cell(observation, recurrent)
        return self.out(recurrent), recurrent


def seeded(make_module, device):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make_module().to(device)


def discrete(device):
    return fc.torch_policy(seeded(lambda: nn.Linear(4, 2), device), head=fc.heads.categorical)


def recurrent(device):
    module = seeded(Memory, device)
    return fc.torch_policy(module, head=fc.heads.categorical, initial_state=torch.zeros(8), record_state=True)


def box(device):
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()), device)
    return fc.torch_policy(module, head=fc.heads.normal)


def in_tensordicts(device):
    head = {"in_keys": ["logits"], "out_keys": ["action"], "distribution_class": Categorical, "return_log_prob": True}
    inner = seeded(lambda: nn.Linear(4, 2), device)
    inner = TensorDictModule(inner, in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticTensorDictSequential(inner, ProbabilisticTensorDictModule(**head))


POLICIES = {
    discrete: "discrete",
    recurrent: "discrete",
    in_tensordicts: "discrete",
    box: "box",
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("policy", POLICIES)
@each_device
def test_batches_are_on_the_host_and_go_on(device, policy, spread):
    env = make(POLICIES[policy], spread)
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
    if policy is not in_tensordicts:  # which draws from the device's own generator
        with fc.SyncDataCollector(env, policy("cpu"), **collector_of) as on_cpu:
            first = next(on_cpu)["action"][:, 0]
        torch.testing.assert_close(one["action"][:, 0], first, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", [fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector])
@each_device
def test_workers_act_on_the_device(device, kind):
    made = [make_cartpole] * 2
    options = {"policy_device": device, "frames_per_batch": 2 * LENGTH, "total_frames": -1, "seed": 0}
    policy = discrete("cpu")
    with kind(made, policy, **options) as collector:
        next(collector)
        with torch.no_grad():
            policy.module.weight.zero_(), policy.module.bias.copy_(torch.tensor([0.0, 30.0]))
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
    env, policy = make("discrete"), recurrent(device)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), LENGTH)
    copy = fc.fork(env, state)
    _, one = fc.rollout(env, policy, state, LENGTH)
    _, two = fc.rollout(env, policy, copy, LENGTH)
    torch.testing.assert_close(one["action"], two["action"])
    assert fc.evaluate(env, policy, episodes=2, seed=0).returns.device.type == "cpu"


def make_cartpole():
    return fc.make_env("CartPole-v1", num_envs=2)


@each_device
def test_statistics_follow_the_policy(device):
    env = make("box")
    policy = fc.normalized(box(device), running_statistics.init(env.observation_space))
    options = {"frames_per_batch": LANES * LENGTH, "seed": 0, "update_statistics": True}
    with fc.SyncDataCollector(env, policy, **options) as collector:
        one, _ = next(collector), next(collector)
        wanted = running_statistics.update(running_statistics.init(env.observation_space), one)
        merged = running_statistics.merge(running_statistics.init(env.observation_space), policy.statistics)
    assert policy.statistics.count.device.type == device
    assert merged.count.device.type == "cpu"
    torch.testing.assert_close(policy.statistics.mean["observation"].cpu(), wanted.mean["observation"])
    torch.testing.assert_close(merged.mean["observation"], wanted.mean["observation"])

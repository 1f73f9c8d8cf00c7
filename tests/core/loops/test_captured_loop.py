"""The loop over Torch environments as on an accelerator, run on the CPU, and the same loop captured.

With `compile="cudagraph"`, operations are recorded and repeated in the place of CUDA graphs.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.core.loops import tensor
from funcollect.core.loops.eager import Clock
from funcollect.core.request import Request
from funcollect.envs import Transition
from funcollect.errors import LoweringError
from funcollect.interop import cuda_graph
from funcollect.interop.memory import reads_together
from tests.support.cases import HIDDEN, Recurrent, mlp, torch_mlp
from tests.support.compare import assert_same, fresh, rollouts
from tests.support.devices import NoReads, capture_on_the_cpu
from tests.support.running import in_soak, once, pairwise

CARTPOLE, PENDULUM = "torch/CartPole-v1", "torch/Pendulum-v1"


class Counting(nn.Module):
    """Keeps observations in buffers, one written in place and one replaced, and acts by them."""

    def __init__(self):
        super().__init__()
        self.score = mlp(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        self.calls = self.calls + 1
        return self.score(x - self.mean) + self.calls.sin()


class Extras(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = mlp(3, 1)

    def forward(self, x):
        mean = self.mean(x)
        return {"loc": mean, "scale": torch.ones_like(mean), "value": x.sum(-1)}


def upright(x):
    return (x[..., 2] > 0).long()


CATEGORICAL = {"head": fc.heads.categorical}
MODULES = {
    "network": (CARTPOLE, lambda: mlp(4, 2), CATEGORICAL),
    "epsilon": (CARTPOLE, lambda: mlp(4, 2), {"head": fc.heads.epsilon_greedy(0.3)}),
    "gaussian": (PENDULUM, Extras, {"head": fc.heads.normal}),
    "within bounds": (PENDULUM, Extras, {"head": fc.heads.tanh_normal}),
    "recurrent": (
        CARTPOLE, lambda: Recurrent(4, 2), CATEGORICAL | {"initial_state": torch.ones(HIDDEN), "record_state": True},
    ),
    "buffers": (CARTPOLE, Counting, CATEGORICAL),
    "function": (CARTPOLE, lambda: upright, {}),
}  # fmt: skip


def pair(name, compiler, num_envs=4):
    env_name, make, kwargs = MODULES[name]
    return fc.make_env(env_name, num_envs=num_envs), fc.torch_policy(make(), compile=compiler, **kwargs)


def assert_same_counters(one, two):
    for field in ("episode", "step", "returns", "terminated", "truncated"):
        own, other = getattr(one, field), getattr(two, field)
        assert (own.dtype, own.tolist()) == (other.dtype, other.tolist()), field


@pytest.fixture(autouse=True)
def short_graphs(monkeypatch):
    monkeypatch.setattr(tensor, "STEPS", 8)


CHECKED = [{}, {"max_frames_per_traj": 2}, {"exploration_type": fc.ExplorationType.DETERMINISTIC}]


@pytest.mark.filterwarnings("ignore:Counting writes its buffers")
@pytest.mark.parametrize(("name", "num_envs", "kwargs"), once(MODULES, [None, 4], CHECKED))
def test_data_are_those_of_the_eager_loop(name, num_envs, kwargs, monkeypatch):
    def run(compiler):
        env, policy = pair(name, compiler, num_envs)
        return rollouts(env, policy, fc.init(env, policy, seed=1), (18, 5, 8), **kwargs)

    before, wanted = run("eager")
    captures = capture_on_the_cpu(monkeypatch)
    after, got = run("cudagraph")
    assert captures
    assert_same(wanted, got)
    assert_same_counters(before, after)
    assert before.steps == after.steps
    for path, root in before.observation.items():
        assert torch.equal(root, after.observation[path]), path


class Windy(fc.envs.TorchEnvBase):
    """Each step moves a lane by random numbers times the parameter `wind`, twice as far for action 1."""

    observation_space = spaces.Box(-torch.inf, torch.inf, (2,))
    action_space = spaces.Discrete(2)
    params = {"wind": torch.tensor(0.1)}  # noqa: RUF012
    reads = False

    def reset(self, key, params, /):
        place = key.uniform(2).float()
        return place, place

    def step(self, key, env_state, action, params, /):
        place = env_state + params["wind"] * key.uniform(2).float() * (1 + action[:, None])
        if self.reads and bool((place > 1).any()):
            place = place / 2
        ended = place[:, 0] > 1.5
        return Transition(place, place, place[:, 1], ended, torch.zeros_like(ended), {"far": place[:, 1] > 1})


def windy(compiler):
    return Windy(3), fc.torch_policy(mlp(2, 2), head=fc.heads.categorical, compile=compiler)


def test_values_that_lie_in_the_memory_to_write():
    one, two, other = torch.zeros(3), torch.ones(3), torch.full((3,), 2.0)
    swapped, kept, wide = cuda_graph.written((one, two, other), (two, one, other.double()))
    assert swapped is one
    assert kept is two
    assert wide.dtype == torch.float64
    assert torch.equal(one, torch.ones(3))
    assert torch.equal(two, torch.zeros(3))
    assert cuda_graph.written((one,), {"one": two}) == {"one": two}  # of another structure


def test_an_environments_own_noise_and_parameters(monkeypatch):
    def batches(compiler):
        env, policy = windy(compiler)
        state, one = fc.rollout(env, policy, fc.init(env, policy, seed=0), 10)
        other = fc.init(env, policy, seed=7)
        state, two = fc.rollout(env, policy, state.replace(env_params={"wind": torch.tensor(0.4)}), 10)
        return one, two, fc.rollout(env, policy, other, 10)[1]

    wanted = batches("eager")
    captures = capture_on_the_cpu(monkeypatch)
    assert_same(wanted, batches("cudagraph"))
    assert len(captures) == 2  # of 8 steps and of 2, for all seeds and parameters


@pytest.mark.parametrize("name", ["recurrent", *in_soak(["network"])])
def test_lanes_that_stay_finished_and_random_steps(name, monkeypatch):
    def batches(compiler):
        env, policy = pair(name, compiler)
        kwargs = {"frames_per_batch": 4 * 18, "total_frames": 4 * 36, "seed": 2}
        with fc.SyncDataCollector(env, policy, reset_when_done=False, **kwargs) as finished:
            yield from finished
        with fc.SyncDataCollector(env, policy, init_random_frames=4 * 20, **kwargs) as random:
            yield from random
        yield fc.evaluate(env, policy, episodes=6, seed=1)

    *wanted, report = batches("eager")
    capture_on_the_cpu(monkeypatch)
    *got, again = batches("cudagraph")
    assert_same(wanted, got)
    assert torch.equal(report.returns, again.returns)


def test_what_changes_between_rollouts(monkeypatch):
    captures = capture_on_the_cpu(monkeypatch)
    env, policy = pair("epsilon", "cudagraph")
    eager = fc.torch_policy(policy.module, head=policy.head)
    state = fc.init(env, policy, seed=0)

    def compare(added, **kwargs):
        before = len(captures)
        with torch.no_grad():
            one, two = (fc.rollout(env, each, state, 8, **kwargs)[1] for each in (policy, eager))
        assert_same(one, two)
        assert len(captures) - before == added

    compare(1)
    compare(0)
    with torch.no_grad():
        policy.module[2].bias += torch.tensor([0.0, 1.0])
    compare(0)
    compare(0, params={name: -leaf for name, leaf in policy.module.state_dict().items()})
    compare(0, exploration={"epsilon": 0.9})
    compare(1, max_frames_per_traj=5)
    policy.module.register_forward_hook(lambda module, inputs, out: -out)
    compare(1)


def test_what_cannot_be_captured(monkeypatch):
    env, policy = pair("network", "cudagraph")
    with pytest.raises(LoweringError, match=r"steps of a Torch environment on a CUDA device, and .* runs on cpu"):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    for other in ("CartPole-v1", "gymnax/CartPole-v1"):
        with pytest.raises(LoweringError, match=r"is not written in Torch: make it there .* or leave compile out"):
            fc.explain(fc.make_env(other, num_envs=2), policy)
    capture_on_the_cpu(monkeypatch)
    assert "CUDA graphs of 32 steps" in fc.explain(env, policy).why
    env, policy = windy("cudagraph")
    monkeypatch.setattr(Windy, "reads", True)
    with pytest.raises(LoweringError, match=r"cannot capture the steps of .*: read no value of a tensor on the host"):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)


def test_a_graph_made_in_inference_mode_serves_outside_of_it(monkeypatch):
    env, policy = pair("network", "cudagraph")
    captures = capture_on_the_cpu(monkeypatch)
    with torch.inference_mode():
        _, first = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    _, second = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    assert_same(first, second)
    assert len(captures) == 1


def test_random_numbers_of_a_module_follow_from_the_state(monkeypatch):
    env = fc.make_env(CARTPOLE, num_envs=4)
    module = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 2))
    policy = fc.torch_policy(module, head=fc.heads.categorical, compile="cudagraph")
    capture_on_the_cpu(monkeypatch)
    state, before = fc.init(env, policy, seed=0), torch.get_rng_state()
    after, one = fc.rollout(env, policy, state, 10)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert_same(one, fc.rollout(env, policy, state, 10)[1])
    assert not torch.equal(state.policy_state.generator, after.policy_state.generator)


def test_after_a_failed_capture_the_stream_is_the_one_from_before(monkeypatch):
    current = ["own"]

    def stream(name=None):
        return SimpleNamespace(name=name, wait_stream=lambda other: None)

    @contextmanager
    def graph(*_, **__):
        """What Torch does: if the end of a capture raises, the stream of the capture stays."""
        current[0] = "capture"
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    stand_ins = {
        "device": nullcontext,
        "Stream": stream,
        "stream": nullcontext,
        "current_stream": lambda: stream(current[0]),
        "set_stream": lambda stream: current.__setitem__(0, stream.name),
        "CUDAGraph": SimpleNamespace,
        "graph": graph,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(cuda_graph.CaptureError, match="during capture"):
        cuda_graph.capture(lambda: None, torch.device("cuda"))
    assert current == ["own"]


PAIRS = [(CARTPOLE, fc.random_policy), (PENDULUM, fc.random_policy), (CARTPOLE, torch_mlp)]
KWARGS = [{}, {"max_frames_per_traj": 7}, {"reset_when_done": False}, {"init_random_frames": 90}]


def batches(name, make, num_envs, **kwargs):
    env = fc.make_env(name, num_envs=num_envs)
    with fc.SyncDataCollector(env, make(env), frames_per_batch=40 * (num_envs or 1), seed=1, **kwargs) as one:
        return [next(one) for _ in range(2)], one.state


@pytest.mark.parametrize(("pair", "kwargs", "num_envs"), pairwise(PAIRS, KWARGS, [None, 3]))
def test_data_and_states_are_those_of_the_cpu(pair, kwargs, num_envs, monkeypatch):
    wanted, before = batches(*pair, num_envs, **kwargs)
    monkeypatch.setattr(tensor, "reads_wait", lambda device: True)
    got, after = batches(*pair, num_envs, **kwargs)
    assert_same(wanted, got)
    assert_same_counters(before, after)


@pytest.mark.parametrize(("kwargs", "name"), once(KWARGS[:3], [CARTPOLE, PENDULUM]))
def test_nothing_is_read_before_the_batch_is_delivered(name, kwargs, monkeypatch):
    monkeypatch.setattr(tensor, "reads_wait", lambda device: True)
    env, policy, state = fresh(name, num_envs=4)
    request = Request(length=30, **kwargs)
    stepper = tensor.TensorStepper(env, policy, state, request, tensor.TensorLanes.of(state))
    stepper.begin()
    action = torch.zeros(4, *env.action_spec.shape, dtype=env.action_spec.dtype)
    still = SimpleNamespace(act=lambda t: action, restart=lambda lanes: None)
    actions = {("action",): action.expand(30, *action.shape)}
    with reads_together(), NoReads():
        stepper.make_steps(still.act, still.restart)
        stepper.deliver(actions)


def test_an_accelerator_is_waited_for_before_and_after_each_call_that_is_timed():
    events = []
    clock = Clock(lambda: events.append("wait"))
    assert clock.timed("part", lambda x: events.append("call") or 2 * x)(3) == 6
    first = clock.seconds["part"]
    with pytest.raises(ZeroDivisionError):
        clock.timed("part", lambda: 1 / 0)()
    assert events == ["wait", "call", "wait", "wait", "wait"]
    assert clock.seconds["part"] > first > 0

"""`Evaluator`: its results are those of `evaluate`, the newest weights come first, and nothing is left behind."""

import os
import signal
import time

import gymnasium
import imageio_ffmpeg
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.processes.system import PORTABLE, run_as_batch_work
from tests.support.cases import jax_mlp, make_env, torch_mlp
from tests.support.running import in_soak, once
from tests.support.workers import gone, wait_until

pytestmark = pytest.mark.usefixtures("sent_by_value")
GIVEN = {"episodes": 5, "seed": 3}


class Waiting(gymnasium.Wrapper):
    """CartPole whose first episode begins only once a file is there; one that says "odd" is an error."""

    def __init__(self, file):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.file = file

    def reset(self, **kwargs):
        wait_until(lambda: os.path.exists(self.file))
        if self.file.read_text():
            raise RuntimeError("out of petrol")
        return self.env.reset(**kwargs)


class Scheduled(gymnasium.Wrapper):
    """CartPole whose episode ends at once unless its process is idle work; its return is the scheduling class."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.steps = 0

    def step(self, action):
        observation, _, _, _, info = self.env.step(action)
        found = os.sched_getscheduler(0)
        self.steps += 1
        ended = found != os.SCHED_IDLE or self.steps == 500
        time.sleep(0.01)
        return observation, float(found * ended), ended, False, info


def same(one, two):
    assert torch.equal(one.returns, two.returns)
    assert torch.equal(one.lengths, two.lengths)


def evaluated(evaluator, *args, **kwargs):
    evaluator.submit(*args, **kwargs)
    (found,) = evaluator.wait()
    return found


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def policy_over(module):
    return fc.torch_policy(module, head=fc.heads.categorical)


@pytest.mark.parametrize(("kind", "name"), once([torch_mlp, jax_mlp], ["CartPole-v1", "gymnax/CartPole-v1"]))
def test_the_results_are_those_of_evaluate(kind, name):
    env = make_env(name, 2)
    policy = kind(env)
    with fc.Evaluator(name, policy, create_env_kwargs={"num_envs": 2}, **GIVEN) as evaluator:
        found = evaluated(evaluator, step=10)
        assert (found.step, found.film) == (10, None)
        same(found.stats, fc.evaluate(env, policy, **GIVEN))
        params = {name: torch.zeros_like(each) for name, each in policy.state_dict(None).items()}
        same(evaluated(evaluator, params, step=11).stats, fc.evaluate(env, policy, params=params, **GIVEN))
        same(evaluated(evaluator, step=12).stats, fc.evaluate(env, policy, **GIVEN))  # its own again
        assert evaluator.wait() == evaluator.results() == []


def test_modules_statistics_and_random_policies():
    env = fc.make_env("CartPole-v1", num_envs=2)
    module = linear()
    policy = policy_over(module)
    normalised = fc.normalized(policy, fc.running_statistics.init(env.observation_space))
    normalised.statistics = fc.running_statistics.update(normalised.statistics, torch.randn(50, 4) * 3 + 1)
    for each in (policy, normalised, None):
        with fc.Evaluator(lambda: fc.make_env("CartPole-v1", num_envs=2), each, **GIVEN) as evaluator:
            found = evaluated(evaluator)
        same(found.stats, fc.evaluate(env, fc.random_policy(env) if each is None else each, **GIVEN))
    # A module without a head answers with two numbers, not an action.
    with fc.Evaluator("CartPole-v1", module, **GIVEN) as evaluator, pytest.raises(fc.EvaluationError):
        evaluated(evaluator)


class Placed(nn.Linear):
    place = torch.device("cpu")

    def forward(self, x):
        return super().forward(x.to(self.place))


def test_what_lies_on_a_gpu_is_sent_to_the_cpu(monkeypatch):
    module = Placed(4, 2)
    policy = policy_over(module)
    wanted = fc.evaluate(fc.make_env("CartPole-v1"), policy, **GIVEN)
    module.place = torch.device("cuda", 0)
    there = {each.data_ptr() for each in module.parameters()}
    device = property(lambda memory: torch.device("cuda", 0) if memory.data_ptr() in there else torch.device("cpu"))
    monkeypatch.setattr(torch.UntypedStorage, "device", device)  # which Torch reads to pickle
    with fc.Evaluator("CartPole-v1", policy, **GIVEN) as evaluator:
        same(evaluated(evaluator).stats, wanted)


def test_the_newest_weights_go_first_and_only_some_wait(tmp_path):
    file = tmp_path / "go"
    with fc.Evaluator(lambda: Waiting(file), policy_over(linear()), episodes=1, seed=0, waiting=3) as evaluator:
        for step in range(6):
            evaluator.submit(step=step)
            assert evaluator.results() == []
        assert evaluator.dropped == 2  # 1 and 2; 0 has begun
        file.touch()
        assert [each.step for each in evaluator.wait()] == [0, 5, 4, 3]


@pytest.mark.parametrize("given", [False, True])
def test_weights_are_those_of_the_moment(given, tmp_path):
    """Also those that are given where there is no policy that could name them, with `policy_factory`."""
    file, module = tmp_path / "go", linear()
    policy = policy_over(module)
    wanted = fc.evaluate(fc.make_env("CartPole-v1"), policy, **GIVEN)
    weights = {name: each.detach().clone() for name, each in module.named_parameters()} if given else None
    source = {"policy_factory": lambda: policy} if given else {"policy": policy}
    with fc.Evaluator(lambda: Waiting(file), **source, **GIVEN) as evaluator:
        for step in range(2):
            evaluator.submit(weights, step=step)
        with torch.no_grad():
            for each in weights.values() if given else [module.weight]:
                each.mul_(-1)
        file.touch()
        for found in evaluator.wait():
            same(found.stats, wanted)


def is_idle_work(thread):
    """Whether a thread runs only while a core has nothing else to do, or as the last, where that is all there is."""
    if PORTABLE:
        return os.getpriority(os.PRIO_PROCESS, thread) == 19
    return os.sched_getscheduler(thread) == os.SCHED_IDLE


def test_every_thread_of_it_is_idle_work():
    def make():
        env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
        fc.init(env, fc.random_policy(env), seed=0)
        return env

    with fc.Evaluator(make, None, **GIVEN) as evaluator:
        threads = [int(each) for each in os.listdir(f"/proc/{evaluator._child.pid}/task")]
        assert len(threads) > 1
        first = threads[:1]  # Linux has niceness by thread, macOS by process
        assert all(map(is_idle_work, first if PORTABLE else threads))


def test_it_is_not_idle_work_while_it_is_waited_for():
    with fc.Evaluator(Scheduled, None, episodes=1, seed=0) as evaluator:
        pid = evaluator._child.pid
        try:
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
            wanted = os.SCHED_IDLE if PORTABLE else os.SCHED_BATCH  # only Linux can change it from outside
        except PermissionError:
            wanted = os.SCHED_IDLE
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        assert evaluated(evaluator).stats.returns.tolist() == [wanted]
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE


def test_an_exception_is_raised_once_and_the_next_weights_are_evaluated(tmp_path):
    file = tmp_path / "go"
    file.touch()
    with fc.Evaluator(lambda: Waiting(file), policy_over(linear()), **GIVEN) as evaluator:
        evaluator.submit(step=1)
        evaluator._pool.await_all(evaluator._calls)
        file.write_text("odd")
        evaluator.submit(step=2)
        with pytest.raises(fc.EvaluationError, match=r"the evaluation of step 2 raised .*out of petrol") as caught:
            evaluator.wait()
        assert "The traceback in the evaluator's process" in caught.value.__notes__[0]
        file.write_text("")
        evaluator.submit(step=3)
        assert [each.step for each in evaluator.wait()] == [1, 3]


def test_a_process_that_dies_is_reported_and_one_that_is_closed_stays_closed():
    evaluator = fc.Evaluator("CartPole-v1", None, **GIVEN)
    assert is_idle_work(evaluator._child.pid)
    os.kill(evaluator._child.pid, signal.SIGKILL)
    evaluator.submit()
    before = os.sched_getscheduler(0)
    with pytest.raises(fc.EvaluationError, match="was killed by SIGKILL"):
        evaluator.wait()
    run_as_batch_work(idle=True, pid=0)  # a process that never began: not this one
    assert os.sched_getscheduler(0) == before
    for call in (evaluator.submit, evaluator.results, evaluator.wait):
        with pytest.raises(fc.ClosedError, match="make another one"):
            call()
    evaluator.close()
    evaluator = fc.Evaluator("CartPole-v1", None, **GIVEN)
    pid = evaluator._child.pid
    del evaluator
    wait_until(lambda: gone(pid))  # without a privilege, its end has idle priority too


@pytest.mark.parametrize("members", [True, *in_soak([False])])
def test_a_film_of_the_first_of_several_environments(members, tmp_path):
    given = {"create_env_kwargs": {"render_mode": "rgb_array", "num_envs": 4}, "film": f"{tmp_path}/{{step:05}}.mp4"}
    policy = policy_over(linear())
    if members:
        own = policy.state_dict()
        policy = fc.population(policy, {name: torch.stack([each, -each]) for name, each in own.items()})
    with fc.Evaluator("CartPole-v1", policy, **given, episodes=4, seed=0) as evaluator:
        found = evaluated(evaluator, step=7)
    assert found.film == tmp_path / "00007.mp4"
    frames, _ = imageio_ffmpeg.count_frames_and_secs(str(found.film))
    assert frames == int(found.stats.lengths[found.stats.lanes == 0]) + 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"film": "{run}/{step}.gif"}, ValueError, r"expected \{step\} in it and no other field"),
        ({"film": "{step}.png"}, ValueError, "expected a name that ends in"),
        ({"film": "{step}.gif"}, fc.EvaluationError, "could not be built or filmed: .*has the render mode None"),
        ({"create_env_fn": "NoSuchEnv-v0"}, fc.EvaluationError, "could not be built: .*NoSuchEnv"),
        ({"create_env_fn": (each for each in ())}, TypeError, "cannot be sent to another process"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        fc.Evaluator(**({"create_env_fn": "CartPole-v1"} | GIVEN | arguments))


def test_weights_that_do_not_fit_are_refused_where_they_are_given():
    with fc.Evaluator("CartPole-v1", policy_over(linear()), **GIVEN) as evaluator:
        with pytest.raises(ValueError, match="weight"):
            evaluator.submit({"weight": torch.zeros(3, 4), "bias": torch.zeros(2)})
        with pytest.raises(ValueError, match="step is -1"):
            evaluator.submit(step=-1)
        assert evaluator.wait() == []

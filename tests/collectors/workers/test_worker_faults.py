"""Workers that are killed, stopped, hang or raise: what the reader is told, how soon, and what is left."""

import functools
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import funcollect as fc
from funcollect.processes import child, pool
from funcollect.processes.serving import InProcessTransport
from tests.support.faulty.faulty_workers import (
    BadInit,
    BadReset,
    Failing,
    Plain,
    SlowToReturn,
    bad_policy,
    die,
    hold_the_gil,
    leave,
    sleep_forever,
    stop,
    stumble,
)
from tests.support.misuse import Rigged, raises, swaps
from tests.support.running import LOSES_WORKERS, ROOT, scaled
from tests.support.worker_runs import (
    check_trajectories,
    children_of,
    descendants,
    gone,
    processes_of,
    run_out,
    wait_until,
)
from tests.support.workers import COLLECTORS, FOREVER, TRANSPORTS, HangClock, by_lane, multi

SYNC, ASYNC = COLLECTORS


def failing(act, **kwargs):
    """The second of two workers fails at the seventh step of its second lane."""
    lanes = [Plain, functools.partial(Failing, act, **kwargs)]
    return [lambda: fc.make_env([Plain, Plain]), lambda: fc.make_env(lanes)]


def hang_clock(monkeypatch, begun, shown):
    """Give the collector of this test a `HangClock`, and its workers all the time to show their stacks."""
    clock = HangClock(begun, shown)
    monkeypatch.setattr(pool, "time", clock)
    monkeypatch.setattr(child, "_TO_REPORT", FOREVER)
    return clock


def expect_failure(kind, act, *patterns, once=None, clock=None, **kwargs):
    """The run ends with an error that matches; every process is gone."""
    collector = multi(kind, create_env_fn=failing(act, at=20, once=once), policy=None, frames_per_batch=16, **kwargs)
    if clock is not None:
        clock.collector = collector
    pids = processes_of(collector)
    assert not any(map(gone, pids))
    with pytest.raises(fc.errors.WorkerError) as raised:
        run_out(collector)
    assert all(map(gone, pids))
    assert raised.value.worker == 1
    for pattern in patterns:
        raised.match(pattern)
    with pytest.raises(fc.errors.ClosedError):
        next(collector)
    collector.shutdown()
    return raised.value


@pytest.mark.parametrize("kind", COLLECTORS)
@pytest.mark.parametrize(("act", "how"), [(die, "killed by SIGKILL"), (leave, "exit code 3")])
def test_a_death_is_told_at_once(kind, act, how):
    expect_failure(kind, act, how)


@pytest.mark.parametrize("kind", COLLECTORS)
@pytest.mark.parametrize(
    ("act", "shown"), [(sleep_forever, "in sleep_forever"), (hold_the_gil, "in hold_the_gil"), (stop, "it is stopped")]
)
def test_a_hang_is_told_within_its_timeout_with_its_python_stack(kind, act, shown, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    clock = hang_clock(monkeypatch, begun, shown)
    error = expect_failure(kind, act, "timeout=0.5", shown, timeout=0.5, once=str(begun), clock=clock)
    assert shown in error.traceback


def test_a_stack_is_that_of_now(monkeypatch):
    monkeypatch.setattr(child, "_TO_REPORT", FOREVER)
    with multi(SYNC, create_env_fn=[Plain], frames_per_batch=16) as collector:
        next(collector)
        stacks = [collector.run.records[0].handle.where() for _ in range(3)]
    assert [stack.count("Current thread") for stack in stacks] == [1, 1, 1]


@pytest.mark.parametrize("kind", COLLECTORS)
def test_an_exception_comes_with_worker_lane_and_traceback(kind):
    raised = "worker 1, lane 3 of the run: raised EnvError"
    error = expect_failure(kind, stumble, raised, "ArithmeticError", "in stumble")
    assert (error.worker, error.lane) == (1, 3)
    assert isinstance(error.__cause__, fc.errors.EnvError)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exceptions_in_reset_and_policy(transport):
    for env, policy in ((BadReset, None), (Plain, bad_policy)):
        collector = multi(SYNC, transport, create_env_fn=[env] * 2, policy=policy, frames_per_batch=16)
        with pytest.raises(fc.errors.WorkerError, match="stumbled"):
            next(collector)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_worker_that_cannot_be_built_ends_the_construction(transport, on_failure):
    with pytest.raises(fc.errors.WorkerError, match=r"worker 1: raised .*stumbled"):
        multi(SYNC, transport, create_env_fn=[Plain, BadInit], frames_per_batch=16, on_failure=on_failure)


def test_no_memory_for_the_slots():
    collector = multi(SYNC, create_env_fn=[Plain] * 2, frames_per_batch=20_000)
    pids = processes_of(collector)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(fc.errors.WorkerError, match=r"no shared memory for .* MiB"):
            next(collector)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(map(gone, pids))


@pytest.mark.parametrize("kind", COLLECTORS)
@pytest.mark.parametrize(
    ("act", "why"), [(die, "killed by SIGKILL"), (stumble, "in stumble"), (sleep_forever, "in sleep_forever")]
)
def test_a_worker_is_replaced_and_the_run_goes_on(kind, act, why, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    clock = hang_clock(monkeypatch, begun, "in sleep_forever")
    made = failing(act, at=23, once=str(begun))
    timeouts = {"timeout": 0.5} if act is sleep_forever else {}
    kwargs = {"frames_per_batch": 16 if kind is SYNC else 8, "on_failure": "restart"}
    with multi(kind, create_env_fn=made, policy=None, **timeouts, **kwargs) as collector:
        clock.collector = collector if timeouts else None
        with pytest.warns(RuntimeWarning, match="another takes its place") as warned:
            batches = until_a_restart(collector)
        assert why in str(warned[0].message)
        after = len(batches)
        while len(batches) < after + 10 or {*by_lane(batches[-5:])} != {0, 1, 2, 3}:
            batches.append(next(collector).clone())
        stats = collector.stats()
    assert (stats["restarts"], stats["lost_frames"]) == (1, 8)
    check_trajectories(batches)


def until_a_restart(collector):
    batches = []
    while not collector.stats()["restarts"]:
        batches.append(next(collector).clone())
    return batches


@pytest.mark.parametrize("act", ["kill", "shutdown"])
def test_processes_of_an_environment_go_with_their_worker(act):
    made = [lambda: fc.make_env("CartPole-v1", num_envs=2, parallel=True)]
    collector = multi(SYNC, create_env_fn=made, frames_per_batch=20)
    next(collector)
    (worker,) = processes_of(collector)
    others = descendants(worker)
    assert len(others) == 3  # the server that forks, and two workers of the environment
    if act == "kill":
        os.kill(worker, signal.SIGSTOP)
        collector.run.records[0].handle.kill()
    collector.shutdown()
    assert gone(worker)
    wait_until(lambda: all(map(gone, others)))


@pytest.mark.parametrize("kind", COLLECTORS)
@LOSES_WORKERS
def test_random_kills_of_one_run(kind):
    """Processes are killed at moments that the seed chooses; every batch is whole, with the latest weights."""
    generator = torch.Generator().manual_seed(0)
    kwargs = {"create_env_fn": ["CartPole-v1"] * 2, "create_env_kwargs": {"num_envs": 2}, "frames_per_batch": 200}
    module = torch.nn.Linear(4, 2)
    policy = fc.torch_policy(module, head=fc.heads.categorical)
    kills = scaled(2)
    with multi(kind, policy=policy, on_failure="restart", **kwargs) as collector:
        batches = []
        for kill in range(kills):
            collector.update_policy_weights_()
            count = int(torch.randint(1, 6, (), generator=generator))
            batches += [next(collector).clone() for _ in range(count)]
            victim = collector.run.records[int(torch.randint(2, (), generator=generator))].handle
            os.kill(victim.pid, signal.SIGKILL)
            while collector.stats()["restarts"] == kill:
                batches.append(next(collector).clone())
        collector.update_policy_weights_()
        batches_of_lane = dict.fromkeys(range(4), 0)
        while min(batches_of_lane.values()) < 3:  # two of each worker may have been ready or begun
            batches.append(next(collector).clone())
            for lane in batches[-1]["collector", "lane"].unique().tolist():
                batches_of_lane[lane] += 1
        assert collector.stats()["restarts"] == kills
    assert set(batches[-1]["collector", "policy_version"].flatten().tolist()) == {kills + 1}
    check_trajectories(batches)


@LOSES_WORKERS
def test_a_worker_that_is_killed_as_it_returns_is_built_once_a_process(tmp_path):
    log = tmp_path / "builds"
    made = [functools.partial(SlowToReturn, log), Plain]
    with multi(SYNC, create_env_fn=made, frames_per_batch=16, on_failure="restart") as collector:
        batches = [next(collector).clone() for _ in range(4)]
        assert collector.stats()["restarts"] == 3
    assert log.stat().st_size == 4
    check_trajectories(batches)


@LOSES_WORKERS
def test_a_worker_that_fails_again_and_again_ends_the_run():
    made = [Plain, functools.partial(Failing, stumble, at=3)]
    collector = multi(SYNC, create_env_fn=made, frames_per_batch=16, on_failure="restart")
    with pytest.raises(fc.errors.WorkerError, match=r"worker 1.*6 times in a row"):
        next(collector)


READER = """
import sys
sys.path.insert(0, {root!r})
import funcollect as fc
from tests.support.faulty.faulty_workers import *
envs = [lambda act=act: Failing(act, at=40) for act in (hold_the_gil, stop, sleep_forever)]
while True:
    collector = fc.MultiSyncDataCollector(envs, None, frames_per_batch=16, seed=0, timeout=1e6, start_timeout=1e6)
    next(collector)
    print(*[record.handle.pid for record in collector.run.records], flush=True)
    try:
        while True:
            next(collector)
    except KeyboardInterrupt:
        collector.shutdown()
        print("ended", flush=True)
"""


def test_a_reader_that_waits_for_workers_that_hang_is_interrupted_and_then_killed():
    """A script without a main guard. Ctrl-C ends its wait, and it builds another collector; nothing outlives it."""

    def hanging():
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == 3
        wait_until(lambda: all(map(hangs, pids)))
        return pids

    code = READER.format(root=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        pids = hanging()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ended\n"
        assert all(map(gone, pids))
        pids = hanging()
        servers = children_of(process.pid)
        assert servers
        process.kill()
    wait_until(lambda: all(map(gone, [*pids, *servers])))


def hangs(pid):
    """Whether a process sleeps in a call of its environment, or is stopped."""
    with open(f"/proc/{pid}/wchan") as file:
        place = file.read()
    with open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    return state == "T" or "nanosleep" in place


def test_jobs_that_cannot_be_sent_release_the_transport_and_leave_no_newcomer(monkeypatch):
    left, own = [], {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 4}
    monkeypatch.setattr(InProcessTransport, "leave", lambda self: left.append(1))
    lock = threading.Lock()

    def make():
        return lock

    with pytest.raises(TypeError, match=r"worker 0: policy_factory cannot be sent to a worker .*lock"):
        multi(transport="serial", **own, policy_factory=make)
    assert left == [1]
    with multi(fc.MultiaSyncDataCollector, "serial", **own) as collector:
        job = collector.run.records[0].job
        bad = replace(job, source=replace(job.source, policy=None, policy_factory=make))
        with pytest.raises(TypeError, match="cannot be sent to a worker"):
            collector.run.add([job, bad], lambda info: None)
        assert collector.run.workers == [0, 1]
        assert next(collector).numel()


@pytest.mark.parametrize("spoil", [raises(RuntimeError("out of petrol")), swaps(1, float("nan"))])
def test_a_failure_in_a_worker_gives_no_advice_for_a_loop(spoil):
    envs = [lambda: fc.make_env([Rigged(spoil)])]
    with (
        pytest.raises(fc.errors.WorkerError) as raised,
        multi(SYNC, create_env_fn=envs, policy=None, frames_per_batch=16) as collector,
    ):
        run_out(collector)
    message, _, _ = str(raised.value).partition("\n")
    assert message.endswith("all workers were ended, so build another collector, or pass on_failure='restart'")
    assert "recover" not in message

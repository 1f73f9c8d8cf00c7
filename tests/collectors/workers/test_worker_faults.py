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
from tests.collectors.conftest import over, pid_of
from tests.support.faulty import faulty_workers as faulty
from tests.support.faulty.faulty_workers import Failing, Plain, die, hold_the_gil, leave, sleep_forever, stop, stumble
from tests.support.misuse import Rigged, raises, swaps
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, LOSES_WORKERS, ROOT, in_soak, once, scaled
from tests.support.workers import (
    COLLECTORS,
    FOREVER,
    TRANSPORTS,
    HangClock,
    by_lane,
    check_trajectories,
    descendants,
    gone,
    multi,
    processes_of,
    run_out,
    wait_until,
)

SYNC, ASYNC = COLLECTORS
pytestmark = [pytest.mark.usefixtures("ray_cluster_if_marked"), FORKS_OF_RAY]


def failing(act, **kwargs):
    """The second of two workers fails at some step of its second lane."""
    lanes = [Plain, functools.partial(Failing, act, **kwargs)]
    return [lambda: fc.make_env([Plain, Plain]), lambda: fc.make_env(lanes)]


def hang_clock(monkeypatch, begun, shown):
    """Give the collector of this test a `HangClock`, and its workers all the time to show their stacks."""
    clock = HangClock(begun, shown)
    monkeypatch.setattr(pool, "time", clock)
    monkeypatch.setattr(child, "_TO_REPORT", FOREVER)
    return clock


# What the second worker does, and what the error shows, in its words or in its traceback.
SHOWN = {
    die: "killed by SIGKILL", leave: "exit code 3", stumble: "in stumble", sleep_forever: "in sleep_forever",
    hold_the_gil: "in hold_the_gil", stop: "it is stopped",
}  # fmt: skip
LOST = r"worker [01] \(actor \w+ on node [\d.]+ .*was lost \(Actor"
SHOWN_OF_ACTORS = SHOWN | {die: LOST, hold_the_gil: "interpreter is held"}
HANGS = (sleep_forever, hold_the_gil, stop)
FAULTS = [("processes", *each) for each in once(COLLECTORS, SHOWN)]
OF_ACTORS = [("ray", ASYNC, act) for act in (stumble, *in_soak([die, sleep_forever, hold_the_gil]))]


@pytest.mark.parametrize(
    ("transport", "kind", "act"), [*FAULTS, *(pytest.param(*each, marks=pytest.mark.ray) for each in OF_ACTORS)]
)
def test_a_failure_ends_the_run_at_once_and_every_process(transport, kind, act, tmp_path, monkeypatch):
    shown = (SHOWN_OF_ACTORS if transport == "ray" else SHOWN)[act]
    made, timeout = failing(act, at=20, once=str(tmp_path / "begun")), {"timeout": 1.0} if act in HANGS else {}
    clock = hang_clock(monkeypatch, tmp_path / "begun", shown)
    if transport == "ray" and act is not hold_the_gil:
        monkeypatch.setattr("funcollect.collectors.cluster.transport._TO_REPORT", FOREVER)
    collector = over(transport, kind, create_env_fn=made, policy=None, frames_per_batch=16, **timeout)
    pids = [pid_of(collector, worker) for worker in range(2)]
    assert not any(map(gone, pids))
    clock.collector = collector if timeout else None
    says = "timeout=1" if timeout else "worker 1, lane 3 of the run.*: raised EnvError" if act is stumble else shown
    with pytest.raises(fc.errors.WorkerError, match=says) as raised:
        run_out(collector)
    if transport == "ray":
        wait_until(lambda: all(map(gone, pids)))
    assert all(map(gone, pids))
    error = raised.value
    assert (error.worker, error.lane) == (1, 3 if act is stumble else None)
    assert isinstance(error.__cause__, fc.errors.EnvError if act is stumble else type(None))
    assert act in (die, leave) or shown in error.traceback
    with pytest.raises(fc.errors.ClosedError):
        next(collector)
    collector.shutdown()


def test_a_stack_is_that_of_now(monkeypatch):
    monkeypatch.setattr(child, "_TO_REPORT", FOREVER)
    with multi(SYNC, create_env_fn=[Plain], frames_per_batch=16) as collector:
        next(collector)
        stacks = [collector.run.records[0].handle.where() for _ in range(3)]
    assert [stack.count("Current thread") for stack in stacks] == [1, 1, 1]


@pytest.mark.parametrize(("transport", "case"), once(TRANSPORTS, [(faulty.BadReset, None), (Plain, faulty.bad_policy)]))
def test_exceptions_in_reset_and_policy(transport, case):
    env, policy = case
    collector = multi(SYNC, transport, create_env_fn=[env] * 2, policy=policy, frames_per_batch=16)
    with pytest.raises(fc.errors.WorkerError, match="stumbled"):
        next(collector)


@pytest.mark.parametrize(("transport", "on_failure"), once(TRANSPORTS, ["raise", "restart"]))
def test_a_worker_that_cannot_be_built_ends_the_construction(transport, on_failure):
    with pytest.raises(fc.errors.WorkerError, match=r"worker 1: raised .*stumbled"):
        multi(SYNC, transport, create_env_fn=[Plain, faulty.BadInit], frames_per_batch=16, on_failure=on_failure)


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


@pytest.mark.parametrize(("kind", "act"), once(COLLECTORS, [die, stumble, sleep_forever]))
def test_a_worker_is_replaced_and_the_run_goes_on(kind, act, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    clock = hang_clock(monkeypatch, begun, "in sleep_forever")
    timeouts = {"timeout": 0.5} if act is sleep_forever else {}
    kwargs = {"create_env_fn": failing(act, at=23, once=str(begun)), "policy": None, **timeouts}
    kwargs |= {"frames_per_batch": 16 if kind is SYNC else 8, "on_failure": "restart"}
    with multi(kind, **kwargs) as collector:
        clock.collector = collector if timeouts else None
        with pytest.warns(RuntimeWarning, match="another takes its place") as warned:
            batches = until_a_restart(collector)
        assert SHOWN[act] in str(warned[0].message)
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


def test_processes_of_an_environment_go_with_their_worker_if_that_is_killed():
    """In `test_signs_of_life.py`, they go if it is shut down."""
    made = [lambda: fc.make_env("CartPole-v1", num_envs=2, parallel=True)]
    collector = multi(SYNC, create_env_fn=made, frames_per_batch=20)
    next(collector)
    (worker,) = processes_of(collector)
    others = descendants(worker)
    assert len(others) == 3  # the server that forks, and two workers of the environment
    os.kill(worker, signal.SIGSTOP)
    collector.run.records[0].handle.kill()
    collector.shutdown()
    assert gone(worker)
    wait_until(lambda: all(map(gone, others)))


@pytest.mark.parametrize(("transport", "kind"), [
    *(("processes", kind) for kind in COLLECTORS),
    *(pytest.param("ray", kind, marks=AN_EVENING_OVER_RAY) for kind in (ASYNC, SYNC)),
])  # fmt: skip
def test_workers_that_are_killed_at_random_moments(transport, kind):
    """Every batch is whole, with the latest weights; ids are used once; each lane goes on."""
    generator = torch.Generator().manual_seed(0)
    kwargs = {"create_env_fn": ["CartPole-v1"] * 2, "create_env_kwargs": {"num_envs": 2}, "frames_per_batch": 200}
    policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    kills = scaled(1 if transport == "ray" else 2)
    lost = pytest.warns(RuntimeWarning, match=rf"{LOST if transport == 'ray' else 'by SIGKILL'}.*another takes its")
    with over(transport, kind, policy=policy, on_failure="restart", **kwargs) as collector, lost:
        batches = []
        for kill in range(kills):
            collector.update_policy_weights_()
            batches += [next(collector).clone() for _ in range(int(torch.randint(1, 6, (), generator=generator)))]
            os.kill(pid_of(collector, int(torch.randint(2, (), generator=generator))), signal.SIGKILL)
            while collector.stats()["restarts"] == kill:
                batches.append(next(collector).clone())
        lanes = set()  # that act with the latest weights; a rollout under way may have had others
        while lanes != {0, 1, 2, 3}:
            batches.append(next(collector).clone())
            collected = batches[-1]["collector"]
            lanes |= set(collected["lane"][collected["policy_version"] == kills].tolist())
        stats = collector.stats()
    assert stats["restarts"] == kills
    assert transport == "processes" or stats["lost_frames"] > 0
    check_trajectories(batches)


@pytest.mark.parametrize(("transport", "times"), [("processes", 3), pytest.param("ray", 2, marks=AN_EVENING_OVER_RAY)])
@LOSES_WORKERS
def test_a_worker_that_is_killed_as_it_returns_is_built_once_a_process(transport, times, tmp_path):
    log = tmp_path / "builds"
    made = [functools.partial(faulty.SlowToReturn, log, times), Plain]
    with over(transport, create_env_fn=made, frames_per_batch=16, on_failure="restart") as collector:
        check_trajectories([next(collector).clone() for _ in range(4)])
        assert collector.stats()["restarts"] == times
    assert log.stat().st_size == times + 1


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
    pipe = {"stdout": subprocess.PIPE, "text": True, "process_group": 0}
    with subprocess.Popen([sys.executable, "-c", code], **pipe) as process:
        pids = hanging()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal and Jupyter do
        assert process.stdout.readline() == "ended\n"
        assert all(map(gone, pids))
        pids = hanging()
        servers = descendants(process.pid)
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
    collector = multi(SYNC, create_env_fn=[lambda: fc.make_env([Rigged(spoil)])], frames_per_batch=16)
    with pytest.raises(fc.errors.WorkerError) as raised:
        run_out(collector)
    message, _, _ = str(raised.value).partition("\n")
    assert message.endswith("all workers were ended, so build another collector, or pass on_failure='restart'")
    assert "recover" not in message

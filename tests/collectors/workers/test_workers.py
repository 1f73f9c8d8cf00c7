"""Collectors with workers: shapes, order of rows, equality over transports, keywords."""

import contextlib
import functools
import itertools
import os
import signal
import time

import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.collectors.workers.gathering import Gathering
from funcollect.core.api import init_lanes
from funcollect.processes import fork_server
from tests.support.cases import make_env
from tests.support.check_collector import check_collector
from tests.support.compare import assert_same
from tests.support.envs.counting import Counting, always, check
from tests.support.faulty.faulty_workers import Failing, Plain, Uneven, stumble
from tests.support.running import LOSES_WORKERS, in_soak, once, scaled
from tests.support.workers import (
    COLLECTORS,
    TRANSPORTS,
    by_lane,
    check_trajectories,
    multi,
    policy_for,
)

SYNC, ASYNC = COLLECTORS
LANES = ({"lengths": (3, 2)}, {"lengths": (2,), "truncated": (1,)}), ({"lengths": (4, 1)}, {"lengths": (3,)})
WORDS = ("0.0 0.1 0.2t", "0.0 0.1t 1.0"), ("0.0 0.1 0.2", "0.0 0.1 0.2t")


def counting_workers(*workers, batched=True):
    """A factory for each worker; each of `workers` lists the `Counting` arguments of its lanes."""

    def make(first, lanes):
        factories = [functools.partial(Counting, first + i, **lane) for i, lane in enumerate(lanes)]
        return fc.make_env(factories if batched else factories[0])

    return [functools.partial(make, w * len(lanes), lanes) for w, lanes in enumerate(workers)]


BY_HAND = [("stack", True, (2, 2, 3)), (0, True, (4, 3)), (-1, True, (2, 6))]
BY_HAND += [("stack", False, (2, 3)), (0, False, (6,)), (-1, False, (6,))]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("cat_results", "batched", "shape"), BY_HAND)
def test_environments_by_hand(transport, cat_results, batched, shape):
    made = counting_workers(*(lanes if batched else lanes[:1] for lanes in LANES), batched=batched)
    kwargs = {"frames_per_batch": 11 if batched else 5, "cat_results": cat_results}
    with multi(SYNC, transport, create_env_fn=made, policy=always(0), **kwargs) as c:
        batch = next(c)
        assert batch.batch_size == shape
        assert c.frames_of_batch == batch.numel()
        assert not batch.is_locked
        if batched and cat_results == -1:  # [P, W * T]: lanes 0 and 1 beside 2 and 3
            batch = torch.cat([batch[:, :3], batch[:, 3:]])
        check(batch.reshape(-1, 3), *([*WORDS[0], *WORDS[1]] if batched else [WORDS[0][0], WORDS[1][0]]))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_with_frames_of_their_own(transport):
    made = counting_workers(LANES[0][:1], LANES[1][:1], batched=False)
    with multi(SYNC, transport, create_env_fn=made, policy=always(0), frames_per_batch=[3, 5], cat_results=-1) as c:
        batch = next(c)
        assert batch["collector", "lane"].tolist() == [0] * 3 + [1] * 5
        assert (c.frames, c.frames_of_batch, c.frames_per_batch) == (8, 8, 8)
    with multi(ASYNC, transport, create_env_fn=made, policy=always(0), frames_per_batch=np.int64(3)) as c:
        assert next(c).batch_size == (3,)
    with pytest.raises(ValueError, match=r"\[3, 5\] steps"):
        multi(SYNC, transport, create_env_fn=made, policy=always(0), frames_per_batch=[3, 5])


# Environment, policy, workers, how their rollouts are put together, and whether a batch is begun ahead.
BITS = [
    ("CartPole-v1", "torch_mlp", 3, -1, True),
    # Before, the last bits of JAX's log-probabilities differ between a worker and this process.
    pytest.param("CartPole-v1", "jax_mlp", 1, -1, False, marks=pytest.mark.needs("jax>=0.10.1")),
    ("CartPole-v1", "tensordict_actor", 2, 0, False),
    ("CartPole-v1", "torch_recurrent", 2, 0, True),
    ("torch/Pendulum-v1", "torch_normal", 2, "stack", False),
    ("envpool/CartPole-v1", "torch_mlp", 2, "stack", False),
]
BITS += in_soak([("HalfCheetah-v5", "torch_normal", 2, "stack", False), ("CartPole-v1", "torch_mlp", 1, 0, True)])
NAMES = ("CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1")
BITS += in_soak((*each, "stack", False) for each in itertools.product(NAMES, ("torch_mlp", "jax_mlp"), (1, 2, 3)))


@pytest.mark.parametrize(("name", "kind", "workers", "cat_results", "prefetch"), BITS)
def test_processes_equal_the_serial_transport(name, kind, workers, cat_results, prefetch):
    runs = []
    kwargs = {"create_env_fn": name, "num_workers": workers, "create_env_kwargs": {"num_envs": 2}, "prefetch": prefetch}
    kwargs |= {"policy": policy_for(name, kind, 2), "frames_per_batch": 40 * workers, "cat_results": cat_results}
    for transport in TRANSPORTS:
        with multi(SYNC, transport, **kwargs) as collector:
            runs.append([batch.clone() for batch in itertools.islice(collector, scaled(3))])
    for one, two in zip(*runs, strict=True):
        assert_same(one, two)


def test_an_asynchronous_worker_collects_what_the_synchronous_one_does():
    kwargs = {"create_env_fn": ["CartPole-v1"] * 2, "policy": policy_for("CartPole-v1", "torch_mlp", 1)}
    with multi(SYNC, frames_per_batch=160, **kwargs) as collector:
        wanted = by_lane([next(collector)])
    with multi(ASYNC, frames_per_batch=20, **kwargs) as collector:
        lanes = by_lane(batch.clone() for batch in itertools.islice(collector, 4))
    for lane, rows in lanes.items():
        assert_same(rows, wanted[lane][: len(rows)])


class Drawing(torch.nn.Module):
    """Draws from Torch's generator itself, as TorchRL's actors do."""

    def forward(self, observation):
        drawn = torch.rand(len(observation))
        return {"action": (drawn > 0.5).long(), "drawn": drawn}


def test_lanes_over_a_jax_environment_begin_with_a_generator_of_their_own():
    env, policy = make_env("gymnax/CartPole-v1", 2), fc.torch_policy(Drawing())
    states = [init_lanes(env, policy, seed=0, first_lane=lane, total_lanes=4).policy_state for lane in (0, 2)]
    assert not torch.equal(*(state.generator for state in states))


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_a_module_that_draws_for_itself_draws_other_numbers_in_every_worker(name):
    kwargs = {"create_env_fn": [name] * 2, "create_env_kwargs": {"num_envs": 2}, "policy": Drawing()}
    with multi(SYNC, "serial", frames_per_batch=40, **kwargs) as collector:
        drawn = next(collector)["drawn"]
        collector.set_seed(0)
        again = next(collector)["drawn"]
    assert not bool((drawn[0] == drawn[1]).any())
    assert not bool((again[0] == again[1]).any())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("order", [1, -1])
def test_workers_whose_batches_have_other_leaves_are_named(transport, order):
    policies = [Drawing, lambda: fc.torch_policy(torch.nn.Linear(2, 2), head=fc.heads.categorical)][::order]
    keywords = {"create_env_fn": [Plain] * 2, "policy_factory": policies, "frames_per_batch": 20}
    says = "worker 1: its batch has other leaves than that of worker 0"
    with multi(SYNC, transport, **keywords) as collector, pytest.raises(fc.WorkerError, match=says):
        next(collector)


@LOSES_WORKERS
def test_a_worker_that_takes_anothers_place_draws_other_numbers_than_that_did(tmp_path):
    made = [functools.partial(Failing, stumble, at=25, once=str(tmp_path / "once"))]
    kwargs = {"create_env_fn": made, "policy": Drawing(), "frames_per_batch": 10, "on_failure": "restart"}
    with multi(SYNC, "serial", **kwargs) as collector:
        drawn = torch.cat([next(collector)["drawn"].flatten() for _ in range(4)])
        assert collector.stats()["restarts"] == 1
    assert len(drawn.unique()) == len(drawn)


@pytest.mark.filterwarnings("ignore:the reader keeps every batch")
@pytest.mark.parametrize(("kind", "transport"), once(COLLECTORS, TRANSPORTS[::-1]))
def test_check_collector(kind, transport):
    kwargs = {"create_env_fn": ["CartPole-v1"] * 2, "create_env_kwargs": {"num_envs": 2}, "frames_per_batch": 40}
    policy = policy_for("CartPole-v1", "torch_mlp", 2)
    report = check_collector(kind, policy=policy, in_process=transport == "serial", lanes=4, **kwargs)
    assert {"layout", "trajectories", "seeds", "batch_memory", "weights", "checkpoint", "ends"} <= {*report.passed}


class Interrupted(Plain):
    """Signals the collector's process in one step of each of its first trajectories."""

    def __init__(self, reader):
        super().__init__()
        self.reader = reader

    def step(self, action):
        made = super().step(action)
        if self.total % 307 == 5 and self.total < 4_000:
            os.kill(self.reader, signal.SIGINT)
        return made


@pytest.fixture
def interrupts():
    """The numbers of Ctrl-C's that came while a batch was gathered; others, in the test, are ignored."""
    noticed = []

    def handle(number, frame):
        while frame is not None and frame.f_code is not Gathering.next.__code__:
            frame = frame.f_back
        if frame is not None:
            noticed.append(number)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    yield noticed
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("kind", "transport"), [*itertools.product(COLLECTORS, TRANSPORTS)])
def test_ctrl_c_leaves_collectors_open_and_loses_no_batch(kind, transport, interrupts):
    reader, batches = os.getpid(), []
    made = [lambda: Interrupted(reader), Plain]
    with multi(kind, transport, create_env_fn=made, frames_per_batch=100, total_frames=20_000) as collector:
        while collector.is_running():
            with contextlib.suppress(KeyboardInterrupt):
                batches.append(next(collector).clone())
        assert len(interrupts) > 1
        assert sum(batch.numel() for batch in batches) == collector.frames
    if transport == "processes":
        check_trajectories(batches)


@pytest.mark.parametrize("threads", [2, *in_soak([1])])
def test_workers_run_as_many_threads_as_they_are_told(threads):
    def policy(observation):
        zeros = torch.zeros(len(observation), dtype=torch.int64)
        return {"action": zeros, "threads": zeros + torch.get_num_threads()}

    with multi(SYNC, create_env_fn=[Plain], policy=policy, frames_per_batch=10, num_threads=threads) as collector:
        assert set(next(collector)["threads"].flatten().tolist()) == {threads}


def test_a_policy_device_for_each_worker_and_a_storing_device():
    devices = {"policy_device": ["cpu", "cpu"], "storing_device": "meta"}
    with multi(SYNC, create_env_fn=["CartPole-v1"] * 2, frames_per_batch=10, **devices) as collector:
        assert next(collector)["observation"].device.type == "meta"


def test_reader_and_workers_count_how_long_they_wait():
    with multi(SYNC, create_env_fn=[lambda: Uneven(0.005)] * 2, frames_per_batch=20, total_frames=100) as c:
        for _ in c:
            time.sleep(0.05)  # as long as a batch takes the workers: both wait
        waited = {name: c.stats()[name] for name in ("reader_waited", "workers_waited")}
    assert min(waited.values()) > 0.1


def test_a_server_of_processes_that_is_killed_is_replaced():
    with multi(SYNC, create_env_fn=[Plain] * 2, frames_per_batch=20):
        (server,) = fork_server._SERVERS
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
    with multi(SYNC, create_env_fn=[Plain] * 2, frames_per_batch=20) as collector:
        assert next(collector).batch_size == (2, 10)


@pytest.mark.evening
def test_processes_begin_afresh_where_a_fork_would_not_be_safe(monkeypatch):
    program = fork_server.program

    def threaded(*args):
        *command, code = program(*args)
        return [*command, _THREADED + code]

    monkeypatch.setattr(fork_server, "program", threaded)
    monkeypatch.setattr(fork_server, "_SERVERS", [])  # the others' goes on
    try:
        with multi(SYNC, create_env_fn=["CartPole-v1"], frames_per_batch=20) as collector:
            batch = next(collector).clone()
    finally:
        fork_server._close()
    with multi(SYNC, "serial", create_env_fn=["CartPole-v1"], frames_per_batch=20) as collector:
        assert_same(batch, next(collector))


_THREADED = "import threading, signal; threading.Thread(target=signal.pause, daemon=True).start(); "

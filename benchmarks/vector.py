"""Frames per second of many simulators with one policy: ours over worker processes, one process, and the peers.

Every contestant runs one Torch policy, which samples actions and computes their log-probabilities. The peers' loops
store nothing. The limit is what the processors could do if none of them ever waited: their number, divided by the CPU
time of a frame in a bare loop in one process, which steps the simulators, calls the policy and stores nothing. For an
environment that sleeps it is the number of workers, divided by the time of a step.

PufferLib is measured if it is installed; of what it requires, its module `vector` needs this:
``pip install --no-deps pufferlib==1.0.1 pettingzoo==1.24.1 gym==0.23 gym_notices rich_argparse``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.contestants.networks import tanh_mlp
from benchmarks.contestants.peers import Batches
from benchmarks.contestants.worker_envs import continuous, make, network
from benchmarks.harness.report import compare, table
from benchmarks.harness.runner import AbsentError, Cell, Options, Result, measure, one_thread
from benchmarks.suites import chosen

OURS = "2 workers"
SLOW_POLICY = 5e-3  # seconds


@dataclass(frozen=True)
class Work:
    """The work of one cell.

    Attributes:
        name: of the environment; see `benchmarks.contestants.worker_envs.make`.
        num_envs: P.
        length: steps of each environment per batch.
        policy: ``"network"``, or ``"slow"`` for one that computes for 5 ms.
        workers: of the contestant that stands for ours.
        peers: whether the peers run it, too.
        device: of the policy.
    """

    name: str
    num_envs: int
    length: int
    policy: str = "network"
    workers: int = 2
    peers: bool = True
    device: str = "cpu"

    def module(self) -> nn.Module:
        own = (tanh_mlp(4, 2) if self.name.startswith(("work/", "sleep/")) else network(self.name)).to(self.device)
        return Slow(own) if self.policy == "slow" else own


WORK = {
    "CartPole 64": Work("CartPole-v1", 64, 100),
    "HalfCheetah 16": Work("HalfCheetah-v5", 16, 50),
    "Pong 16": Work("ale/Pong", 16, 16),
    "HalfCheetah 16, a policy of 5 ms": Work("HalfCheetah-v5", 16, 25, "slow"),
    "200 µs of work 2": Work("work/0.0002", 2, 200),
    "200 µs of work 16": Work("work/0.0002", 16, 50),
    "1 ms of sleep 64": Work("sleep/0.001", 64, 20, workers=16),
}
WORK_BESIDE_A_GPU = {  # for 16 processors
    "HalfCheetah 60, policy on a GPU": Work("HalfCheetah-v5", 60, 50, workers=15, device="cuda"),
    "200 µs of work 60, policy on a GPU": Work("work/0.0002", 60, 50, workers=15, device="cuda"),
}


PUFFER_SPINS = 0.6  # seconds: PufferLib's workers look for orders without a pause for half a second

COSTS = "CPU time per step of the process with the policy"
COUNTS = [(1, 1), (4, 4), (16, 16), (64, 64), (16, 64), (16, 256)]  # workers, lanes


def costs(options: Options) -> Result:
    """What a worker and a lane cost the process that has the policy: their steps take no time."""
    import funcollect as fc

    one_thread()
    measured = []
    for workers, lanes in COUNTS:
        env = fc.make_env(partial(make, "work/0"), num_envs=lanes, num_workers=workers)
        policy = fc.random_policy(env)
        state = fc.init(env, policy, seed=0)
        state, _ = fc.rollout(env, policy, state, 64)
        steps, cpu = 0, time.process_time()
        until = time.perf_counter() + options.scale
        while time.perf_counter() < until:
            state, _ = fc.rollout(env, policy, state, 64)
            steps += 64
        measured.append(1e6 * (time.process_time() - cpu) / steps)
        fc.close(state)
    rows = [(str(workers), str(lanes), f"{cost:.1f}") for (workers, lanes), cost in zip(COUNTS, measured, strict=True)]
    design = np.array([(1, workers, lanes) for workers, lanes in COUNTS], float)
    step, worker, lane = np.linalg.lstsq(design, np.array(measured), rcond=None)[0].tolist()
    note = f"least squares: {step:.1f} µs per step, {worker:.1f} per worker, {lane:.2f} per lane"
    data = {"counts": COUNTS, "microseconds": measured, "per_step": step, "per_worker": worker, "per_lane": lane}
    return Result(name=COSTS, table=f"{table((COSTS, 'lanes', 'µs'), rows)}\n  {note}", data=data)


STEPS = "time of a step of 2 workers with a lane each"


def steps(options: Options) -> Result:
    """How long a step takes the workers, whose environments work or not, at once after the one before or after a pause.

    They wait awake for 50 µs; after that they sleep, and have to be woken.
    """
    import funcollect as fc

    one_thread()
    rows, data = [], {}
    lanes, action = range(2), np.zeros(2, np.int64)
    for work, pause in ((0.0, 0.0), (0.0, 1e-3), (200e-6, 0.0), (200e-6, 1e-3)):
        simulators = fc.make_env(partial(make, f"work/{work}"), num_envs=2, num_workers=2).open()
        simulators.reset(lanes, (0, 1))
        times = []
        until = time.perf_counter() + 2 * options.scale
        while time.perf_counter() < until:
            _work(pause)
            begun = time.perf_counter()
            simulators.send(lanes, action)
            simulators.receive()
            times.append(1e6 * (time.perf_counter() - begun))
        simulators.close()
        low, median, high = np.percentile(times, (25, 50, 75)).tolist()
        rows.append(
            (f"{1e6 * work:.0f} µs of work, {1e6 * pause:.0f} µs before", f"{median:.0f}", f"{low:.0f}-{high:.0f}")
        )
        data[f"work {1e6 * work:.0f}, pause {1e6 * pause:.0f}"] = {
            "quartiles": [low, median, high],
            "steps": len(times),
        }
    return Result(name=STEPS, table=table((STEPS, "median µs", "quartiles"), rows), data=data)


def _work(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Slow(nn.Module):
    """A network after 5 ms of work."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, observation: Tensor) -> Any:
        _work(SLOW_POLICY)
        return self.inner(observation)


def results(options: Options) -> Iterator[Result]:
    if options.only in COSTS:
        yield costs(options)
    if options.only in STEPS:
        yield steps(options)
    for cell in cells():
        if options.only not in cell.name:
            continue
        work = (WORK | WORK_BESIDE_A_GPU)[cell.name]
        ours = f"{work.workers} workers"
        limit, source = limit_of(work, options)
        result = compare(cell, measure(cell, options), ours)
        medians = result.data["median"]
        shares = {name: medians[name] / limit for name in medians}
        best = max(medians, key=lambda name: medians[name] if "worker" in name else 0.0)
        note = f"limit {limit:,.0f} frames/s ({source}); {best}: {shares[best]:.2f} of it"
        data = {**result.data, "limit": limit, "of_limit": shares}
        yield replace(result, table=f"{result.table}\n  {note}", data=data)


def cells() -> Iterator[Cell]:
    for name, work in (WORK | (WORK_BESIDE_A_GPU if torch.cuda.is_available() else {})).items():
        contestants: dict[str, Callable[[], Any]] = {
            f"{work.workers} workers": partial(ours, work, num_workers=work.workers),
            "one process": partial(ours, work),
        }
        for count in {1, 2, 4} - {work.workers}:
            if count <= work.num_envs:
                contestants[f"{count} worker{'s' if count > 1 else ''}"] = partial(ours, work, num_workers=count)
        if work.peers:
            contestants["AsyncVectorEnv"] = partial(Vector, work)
            contestants["SubprocVecEnv"] = partial(Subproc, work)
            contestants["PufferLib"] = partial(Puffer, work)
            if work.name in POOLS:
                contestants["EnvPool"] = partial(Pool, work)
        ours_names = tuple(key for key in contestants if "worker" in key or key == "one process")
        note, rest = f"{work.length} steps per batch", PUFFER_SPINS if "PufferLib" in contestants else 0.0
        yield Cell(name=name, note=note, contestants=contestants, ours=ours_names, rest=rest)


def limit_of(work: Work, options: Options) -> tuple[float, str]:
    """The frames per second that could be reached, and how that was found."""
    if work.name.startswith("sleep/"):
        return work.workers / float(work.name.removeprefix("sleep/")), f"{work.workers} sleepers"
    one_thread()
    alone = Bare(work)
    alone.run()
    frames, cpu = 0, time.process_time()
    until = time.perf_counter() + 2 * options.scale
    while time.perf_counter() < until:
        frames += alone.run()
    cpu = time.process_time() - cpu
    alone.close()
    cores = len(os.sched_getaffinity(0))
    return cores * frames / cpu, f"{cores} processors, {1e6 * cpu / frames:.1f} µs of CPU time per frame in a bare loop"


def ours(work: Work, **spread: Any) -> Batches:
    import funcollect as fc

    head = fc.heads.normal if continuous(work.name) else fc.heads.categorical
    env = fc.make_env(partial(make, work.name), num_envs=work.num_envs, **spread)
    frames = work.num_envs * work.length
    policy = fc.torch_policy(work.module(), head=head)
    return Batches(fc.SyncDataCollector(env, policy, frames_per_batch=frames, total_frames=-1, seed=0))


def acted(work: Work, module: nn.Module, rows: Any) -> Any:
    """Actions for observations, NumPy arrays [P, ...] each, sampled with Torch's own functions."""
    tensor = torch.as_tensor(np.asarray(rows)).to(work.device)
    if not continuous(work.name):
        return chosen(module, tensor).cpu().numpy()
    loc, scale = module(tensor.float())
    action = loc + scale * torch.randn_like(loc)
    (-0.5 * ((action - loc) / scale) ** 2 - scale.log()).sum(-1)  # the log-probability, but for a constant
    return action.cpu().numpy()


class Peer:
    """A loop of the policy over a peer's vector environment, which a subclass makes and resets."""

    _env: Any
    _observation: Any

    def __init__(self, work: Work) -> None:
        self._work, self._module = work, work.module()

    def _step(self, action: Any) -> Any:
        return self._env.step(action)

    def run(self) -> int:
        with torch.inference_mode():
            for _ in range(self._work.length):
                self._observation, *_ = self._step(acted(self._work, self._module, self._observation))
        return self._work.num_envs * self._work.length

    def close(self) -> None:
        self._env.close()


class Bare(Peer):
    """Lanes that are stepped one after another."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._lanes = [make(work.name) for _ in range(work.num_envs)]
        self._observation = np.stack([lane.reset(seed=place)[0] for place, lane in enumerate(self._lanes)])

    @override
    def _step(self, action: Any) -> Any:
        return (np.stack([_stepped(lane, own) for lane, own in zip(self._lanes, action, strict=True)]),)

    @override
    def close(self) -> None:
        for lane in self._lanes:
            lane.close()


def _stepped(lane: Any, action: Any) -> Any:
    """The observation after a step, or at the start of the next episode."""
    observation, _, terminated, truncated, _ = lane.step(action)
    return lane.reset()[0] if terminated or truncated else observation


class Vector(Peer):
    """Gymnasium's `AsyncVectorEnv`: a process for each lane, observations in shared memory."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        factories = [partial(make, work.name)] * work.num_envs
        self._env = gymnasium.vector.AsyncVectorEnv(factories, shared_memory=True, copy=False, context="fork")
        self._observation, _ = self._env.reset(seed=0)


class Subproc(Peer):
    """Stable-Baselines3's `SubprocVecEnv`: a process for each lane, pickled messages."""

    def __init__(self, work: Work) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        super().__init__(work)
        self._env = SubprocVecEnv([partial(make, work.name)] * work.num_envs, start_method="fork")
        self._observation = self._env.reset()


class Puffer(Peer):
    """PufferLib's `Multiprocessing`: as many workers as ours, shared memory, and waiting without sleep."""

    def __init__(self, work: Work) -> None:
        import pufferlib.vector

        if continuous(work.name):
            raise AbsentError("takes no vectors as actions")
        super().__init__(work)
        self._env = pufferlib.vector.make(
            partial(_for_puffer, work.name),
            num_envs=work.num_envs,
            num_workers=work.workers,
            backend=pufferlib.vector.Multiprocessing,
        )
        self._observation, _ = self._env.reset()

    @override
    def _step(self, action: Any) -> Any:
        self._env.send(action)
        return self._env.recv()


def _for_puffer(name: str) -> Any:
    import pufferlib.emulation

    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=partial(make, name))


POOLS = {"CartPole-v1": "CartPole-v1", "HalfCheetah-v5": "HalfCheetah-v4", "ale/Pong": "Pong-v5"}


class Pool(Peer):
    """EnvPool, which steps its own simulators in C++ in as many threads as there are workers."""

    def __init__(self, work: Work) -> None:
        import envpool

        super().__init__(work)
        self._env = envpool.make_gymnasium(POOLS[work.name], num_envs=work.num_envs, num_threads=work.workers, seed=0)
        self._observation, _ = self._env.reset()

"""Contestants with several processes: our collectors, TorchRL's, Stable-Baselines3, Gymnasium, and bare processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.contestants.peers import Batches, StableBaselines, probabilistic_actor
from benchmarks.contestants.worker_envs import continuous, make, network
from benchmarks.suites import chosen


def ours(kind: str, name: str, workers: int, length: int, **options: Any) -> Batches:
    """Return one of our collectors; a batch of the synchronous one has the frames of all workers."""
    import funcollect as fc

    share = workers if kind == "MultiSyncDataCollector" or options.get("sync") else 1
    return Batches(
        getattr(fc, kind)(
            [partial(make, name)] * workers, our_policy(name), frames_per_batch=length * share, seed=0, **options
        )
    )


def our_policy(name: str) -> Any:
    """Return the network with its head; None (random actions) for payload environments."""
    import funcollect as fc

    if name.startswith("payload/"):
        return None
    return fc.torch_policy(network(name), head=fc.heads.normal if continuous(name) else fc.heads.categorical)


def torchrl(kind: str, name: str, workers: int, length: int) -> Batches:
    """One of TorchRL's collectors over `GymWrapper`s."""
    import torchrl.collectors

    share = workers if kind == "MultiSyncCollector" else 1
    collector = getattr(torchrl.collectors, kind)(
        [partial(torchrl_env, name)] * workers,
        torchrl_actor(name),
        frames_per_batch=length * share,
        total_frames=-1,
        device=None,
        auto_register_policy_transforms=False,
    )
    return Batches(collector)


def torchrl_env(name: str) -> Any:
    """A `GymWrapper`."""
    from torchrl.envs import GymWrapper

    torch.set_num_threads(1)
    return GymWrapper(make(name), categorical_action_encoding=True, device=None)


def torchrl_actor(name: str) -> Any:
    """Return TorchRL's `ProbabilisticActor` around the network; None (random actions) for payload environments."""
    return None if name.startswith("payload/") else probabilistic_actor(network(name), choices=not continuous(name))


class VectorLoop:
    """A hand-written loop over Gymnasium's `AsyncVectorEnv`: one worker per environment, one forward for all."""

    def __init__(self, name: str, workers: int, length: int) -> None:
        from gymnasium.vector import AsyncVectorEnv

        self._env = AsyncVectorEnv([partial(make, name)] * workers, context="forkserver")
        self._act = _acting(name)
        self._rows, _ = self._env.reset(seed=0)
        self._length = length

    def run(self) -> int:
        kept = []
        with torch.inference_mode():
            for _ in range(self._length):
                action = self._act(self._rows)
                rows, *outcome, _ = self._env.step(action)
                kept.append((self._rows, action, *outcome))
                self._rows = rows
        for column in zip(*kept, strict=True):
            np.stack(column)
        return self._length * self._env.num_envs

    def close(self) -> None:
        self._env.close()


def _acting(name: str) -> Callable[[Any], Any]:
    module = network(name)

    def normal(rows: Any) -> Any:
        loc, scale = module(torch.from_numpy(rows).float())
        noise = torch.randn_like(loc)
        action = loc + scale * noise
        (-0.5 * noise * noise - torch.log(scale)).sum(-1)
        return action.numpy()

    return normal if continuous(name) else lambda rows: chosen(module, torch.from_numpy(rows)).numpy()


def subproc_loop(name: str, workers: int, length: int) -> StableBaselines:
    """Stable-Baselines3's PPO over `SubprocVecEnv`."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([partial(make, name)] * workers, start_method="forkserver")
    return StableBaselines(env, length, pixels=name.startswith("ale/"))


class Independent:
    """The limit: processes that each run a `SyncDataCollector` for so many seconds and deliver to nobody.

    With `in_step` each begins its next batch when all have ended their last one: the limit of what is synchronous.
    """

    def __init__(self, name: str, workers: int, length: int, seconds: float, in_step: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._seconds, self._in_step = seconds, in_step
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(workers):
            own, theirs = context.Pipe()
            process = context.Process(target=_alone, args=(theirs, name, length), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(own)
            self._processes.append(process)

    def rate(self) -> float:
        """Return the frames per second of all processes; none waits for the last one's batch, unless all do."""
        if not self._in_step:
            return sum(frames / seconds for frames, seconds in self._ask(self._seconds))
        frames, began = 0, time.monotonic()
        while (elapsed := time.monotonic() - began) < self._seconds or not frames:
            frames += sum(each for each, _ in self._ask(0.0))
        return frames / elapsed

    def _ask(self, seconds: float) -> list[tuple[int, float]]:
        """Let all collect for so many seconds, but at least a batch; the frames and the seconds of each."""
        for end in self._ends:
            end.send(seconds)
        return [end.recv() for end in self._ends]

    def run(self) -> int:
        return int(self.rate() * self._seconds)

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def _alone(end: Connection, name: str, length: int) -> None:
    import funcollect as fc

    os.setsid()  # as our workers do: Linux shares cores out among sessions
    torch.set_num_threads(1)
    collector = fc.SyncDataCollector(partial(make, name), our_policy(name), frames_per_batch=length, seed=0)
    while (seconds := end.recv()) is not None:
        frames, began = 0, time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds or not frames:
            frames += next(collector).numel()
        end.send((frames, elapsed))
    collector.shutdown()


def peers(name: str, workers: int, length: int) -> dict[str, Callable[[], Any]]:
    """Return the other libraries' contestants of one cell."""
    return {
        "torchrl sync": partial(torchrl, "MultiSyncCollector", name, workers, length),
        "torchrl async": partial(torchrl, "MultiAsyncCollector", name, workers, length),
        "sb3": partial(subproc_loop, name, workers, length),
        "gymnasium": partial(VectorLoop, name, workers, length),
    }

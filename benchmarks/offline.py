"""Datasets of whole episodes, frames per second: written and read, ours beside Minari's own `DataCollector`.

Both write the same HDF5 by Minari's library. In `collect`, HalfCheetah runs with random actions, and the environment is
a part of the work; `bare` steps it and writes nothing. In `write` the episodes are there already: Minari's collector
steps an environment that replays them, ours gets them as batches. In `read`, Minari's dataset is iterated by episode,
ours by batch; `buffer` also extends a buffer. Each has a folder of its own, on the same disk.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from benchmarks.harness.runner import Cell, quiet_mujoco

FRAMES, LANES, EPISODE = 5_000, 4, 250
PEER = "DataCollector"


class Task:
    """A contestant that is a function of an empty folder, which returns a number of frames."""

    def __init__(self, make: Callable[[Path], Callable[[Path], int]]) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="datasets"))
        self._call = make(self._root)

    def run(self) -> int:
        try:
            return self._call(self._root / "new")
        finally:
            shutil.rmtree(self._root / "new", ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root)


class Replayed(gymnasium.Env[Any, Any]):
    """Episodes of noise with HalfCheetah's shapes, at no cost."""

    observation_space = spaces.Box(-np.inf, np.inf, (17,), np.float32)
    action_space = spaces.Box(-1, 1, (6,), np.float32)
    spec = None

    def __init__(self) -> None:
        self._rows = np.random.default_rng(0).normal(size=(EPISODE + 1, 17)).astype(np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._rows[0], {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._rows[self._step], 1.0, False, self._step == EPISODE, {}


def cells() -> Iterator[Cell]:
    quiet_mujoco()
    tasks: dict[str, dict[str, Callable[[Path], Callable[[Path], int]]]] = {
        "collect": {"funcollect": partial(ours, cheetah), PEER: partial(theirs, cheetah), "bare": bare},
        "write": {"funcollect": written, PEER: partial(theirs, Replayed)},
        "read": {"funcollect": partial(read, buffer=False), "buffer": partial(read, buffer=True), "Minari": iterated},
    }
    for name, makers in tasks.items():
        mine = tuple(who for who in makers if who in ("funcollect", "buffer"))
        note = f"{FRAMES:,} frames of 17 numbers, episodes of {EPISODE}, {LANES} lanes for ours"
        contestants = {who: partial(Task, make) for who, make in makers.items()}
        yield Cell(name=name, note=note, contestants=contestants, ours=mine)


def cheetah() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("HalfCheetah-v5", max_episode_steps=EPISODE)


def collected(make: Callable[[], Any]) -> Any:
    """The environment, and a collector of all frames in it."""
    import funcollect as fc

    env = fc.make_env([make] * LANES, max_episode_steps=EPISODE)
    return env, fc.SyncDataCollector(env, frames_per_batch=1_000, total_frames=FRAMES, seed=0)


def ours(make: Callable[[], Any], root: Path) -> Callable[[Path], int]:
    import funcollect as fc

    def run(folder: Path) -> int:
        env, collector = collected(make)
        with collector:
            return fc.datasets.write_minari(folder, collector, env=env)

    return run


def written(root: Path) -> Callable[[Path], int]:
    import funcollect as fc

    env, collector = collected(Replayed)
    with collector:
        batches = [*collector]
    return lambda folder: fc.datasets.write_minari(folder, batches, env=env)


def theirs(make: Callable[[], Any], root: Path) -> Callable[[Path], int]:
    import os

    import minari

    def run(folder: Path) -> int:
        folder.mkdir()
        os.environ["MINARI_DATASETS_PATH"] = str(folder)
        env = minari.DataCollector(make())
        acting = env.action_space
        for _ in range(FRAMES // EPISODE):
            env.reset()
            for _ in range(EPISODE):
                env.step(acting.sample())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            env.create_dataset("offline/replayed-v0")
        env.close()
        return FRAMES

    return run


def bare(root: Path) -> Callable[[Path], int]:
    env = cheetah()

    def run(folder: Path) -> int:
        for _ in range(FRAMES // EPISODE):
            env.reset()
            for _ in range(EPISODE):
                env.step(env.action_space.sample())
        return FRAMES

    return run


def dataset_in(root: Path) -> Path:
    written(root)(root / "kept")
    return root / "kept"


def read(root: Path, *, buffer: bool) -> Callable[[Path], int]:
    import funcollect as fc

    kept = dataset_in(root)
    if not buffer:
        return lambda folder: sum(map(len, fc.datasets.read_minari(kept)))
    held = fc.ReplayBuffer(storage=fc.LazyTensorStorage(FRAMES))

    def run(folder: Path) -> int:
        held.empty()
        return len(fc.datasets.read_minari(kept, buffer=held))

    return run


def iterated(root: Path) -> Callable[[Path], int]:
    import minari

    dataset = minari.MinariDataset(dataset_in(root))
    return lambda folder: sum(len(episode.rewards) for episode in dataset)

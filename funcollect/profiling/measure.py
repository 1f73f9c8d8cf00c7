"""`profile`: measures a collector, or an environment and a policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from funcollect.arguments import check_function, check_optional_positive, check_positive
from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.envs.host.lane_workers.advice import cores_here
from funcollect.messages import shown
from funcollect.profiling.one_process import profile_here
from funcollect.profiling.report import Profile
from funcollect.profiling.workers import profile_workers
from funcollect.protocols import Env, is_env

_STEPS = 128  # of a rollout
_BUSY = 1.5  # processes that run or wait for each processor, from which on that is reported


def profile(
    target: CollectorBase | Env,
    policy: Any = None,
    *,
    frames: int = 10_000,
    length: int | None = None,
    reader: Callable[[Any], Any] | None = None,
) -> Profile:
    """Measure where the time of a frame goes, compared with the machine's limits, with one sentence of advice.

    Collects one batch, or one of each asynchronous worker, which is not counted since it may compile programs. Then
    collects at least `frames` frames with an environment and a policy whose calls are timed. What timing costs is
    measured and subtracted. The parts of a frame's time:

    - environment: steps and resets. Where its lanes live in workers, those of the slowest worker.
    - policy: its calls, and the log-probabilities and checks of their outputs.
    - recording: the rest of each step: copies into the batch, flags, the loop itself.
    - preparation: at the start of a rollout, memory, parameters and random numbers.
    - delivery: at its end, ids, counters and the batch; and the rest of the collector's work between rollouts.
    - hand-over: between processes, copies into and out of shared memory, and messages.
    - reader: your function.
    - waiting: workers for the reader or for each other, the reader for workers.

    Over JAX environments in a compiled loop, the environment is measured with random actions in a loop of the same
    kind, and the policy is the rest.

    A collector continues from where it is, and its weights do not change. The batches are its next ones: they count as
    delivered, and go to `reader`, or are dropped. An environment and a policy run as a new collector, which is
    closed.

    Args:
        target: a collector; or an environment, for a run of the functions `init` and `rollout`.
        policy: with an environment, what acts there, as a collector takes it; None for random actions.
        frames: frames to time, rounded up to whole batches, three at least with workers.
        length: with an environment, the steps of each rollout; None for 128.
        reader: a function that is called with each batch, such as a step of training.

    Returns:
        The profile; `str` is a table, and `funcollect.plots.profile` draws it.

    Raises:
        TypeError: for another target.
        ValueError: for a policy or a length beside a collector, and if the collector has no batches left.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> profile = fc.profile(env, fc.random_policy(env), frames=2_000)
    >>> profile.loop, list(profile.parts)
    ('host', ['environment', 'policy', 'recording', 'preparation', 'delivery'])
    >>> abs(sum(profile.parts.values()) - profile.microseconds) < 1e-6
    True
    """
    check_positive("frames", frames, example=10_000)
    check_optional_positive("length", length)
    if reader is not None:
        check_function("reader", reader, "a function of a batch", 1)
    if isinstance(target, CollectorBase):
        for name, value, where in (("policy", policy, "has its own"), ("length", length, "has frames_per_batch")):
            if value is not None:
                raise ValueError(
                    f"{name} is {shown(value, 60)}, but target is a collector, which {where}: leave it out"
                )
    load = os.getloadavg()[0]
    measured = _measured(target, policy, frames, length, reader)
    if load <= _BUSY * (cores := cores_here()):
        return measured
    note = f"The machine had a load of {load:.1f} on {cores} processors before, so parts may hold other programs' time."
    return replace(measured, notes=(*measured.notes, note))


def _measured(target: CollectorBase | Env, policy: Any, frames: int, length: int | None, reader: Any) -> Profile:
    """Do what `profile` does, with checked arguments."""
    if isinstance(target, SyncDataCollector):
        return profile_here(target, frames, reader, repr(target))
    if isinstance(target, WorkerCollector):
        return profile_workers(target, frames, reader)
    if not is_env(target):
        raise TypeError(
            f"target is {type(target).__name__}, expected a collector or an Env: make one with funcollect.make_env"
        )
    size = (target.num_envs or 1) * (_STEPS if length is None else length)
    with SyncDataCollector(target, policy, frames_per_batch=size, seed=0) as own:
        return profile_here(own, frames, reader, f"{target!r} with {type(own.policy).__name__}")

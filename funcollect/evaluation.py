"""`Evaluator`: whole episodes in a separate process, while the run continues."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import cloudpickle
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_count, check_kind, check_positive
from funcollect.collectors.options import Options, RunnerSpec
from funcollect.core.api import check_pair
from funcollect.core.request import check_exploration
from funcollect.core.whole_episodes import evaluate
from funcollect.errors import ClosedError, EvaluationError
from funcollect.keys import key_from_seed, seed_of
from funcollect.plots.recording import check_film, check_filmed, record
from funcollect.policies.torch_modules.settings import dumps
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.processes.failures import Failure, sending
from funcollect.processes.pool import Call, FailurePolicy, Loss, WorkerPool, WorkerRecord
from funcollect.processes.serving import ProcessTransport, Served, serve
from funcollect.processes.system import run_as_batch_work
from funcollect.protocols import Env, Policy, is_policy
from funcollect.specs import ExplorationType
from funcollect.trajectories.stats import EpisodeStats

_PATIENT = FailurePolicy(math.inf, math.inf)  # an evaluation may take as long as it likes


@dataclass(frozen=True)
class Evaluation:
    """The result of one `submit`.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> evaluation = Evaluation(step=100, stats=fc.evaluate(env, fc.random_policy(env), episodes=4, seed=0))
    >>> evaluation.step, len(evaluation.stats), evaluation.film
    (100, 4, None)
    """

    step: int  # as submitted
    stats: EpisodeStats
    film: Path | None = None


class Evaluator:
    """Evaluates weights as `evaluate` does, in a separate process while the run continues.

    Weights are copied when they are submitted. If the process falls behind, it evaluates the newest ones first. It runs
    on one thread, on the CPU, and only while a core has nothing else to do (Linux's idle priority); during `wait` it
    has normal priority, if the system permits that. It ends with `close`, with this object, and with the process that
    made it. `dropped` counts the submitted weights that were replaced by later ones before their evaluation.

    Args:
        create_env_fn, create_env_kwargs: the environment, as a collector takes it: a function or an id, since the
            process builds its own.
        policy, policy_factory: the policy, as a collector takes it; it is copied once, to the CPU, and later only
            weights are sent. One with ``compile="cudagraph"`` cannot run there: pass another of the same module.
        episodes: whole episodes in each evaluation.
        seed: an int: all evaluations then start the same episodes. None draws a new seed for each evaluation.
        max_frames: frames after which an evaluation gives up.
        exploration_type: by default deterministic.
        film: where to save a film of the first episode, with ``{step}`` in its name: ``"films/{step}.mp4"``. This needs
            environments that render arrays (see `record`). None for no film.
        waiting: how many submitted weights may wait; further ones replace the oldest.

    Raises:
        TypeError, ValueError: for a bad argument.
        EvaluationError: if the process cannot build the environment or the policy, or cannot film the environment.
        OSError: on Windows.

    >>> import torch, funcollect as fc
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> with fc.Evaluator("CartPole-v1", policy, episodes=5, seed=0) as evaluator:
    ...     evaluator.submit(step=100)
    ...     [evaluation] = evaluator.wait()
    >>> evaluation.step, len(evaluation.stats)
    (100, 5)
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        episodes: int,
        seed: int | None,
        max_frames: int = 10_000_000,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        create_env_kwargs: Mapping[str, Any] | None = None,
        policy_factory: Callable[[], Any] | None = None,
        film: str | None = None,
        waiting: int = 8,
    ) -> None:
        check_positive("episodes", episodes, 20)
        check_positive("max_frames", max_frames, 10_000_000)
        check_positive("waiting", waiting, 8)
        check_exploration(exploration_type)
        key_from_seed(seed)  # raises for a seed out of range
        if film is not None:
            check_kind("film", film, str, "pass for example 'films/{step}.mp4'")
            check_film(_film_name(film), None)
        given: dict[str, Any] = {"create_env_kwargs": create_env_kwargs, "policy_factory": policy_factory}
        source = RunnerSpec(create_env_fn=create_env_fn, policy=policy, **given)
        job = EvaluatorJob(source, episodes, seed, max_frames, exploration_type, film)
        as_it_is = policy is None or is_policy(policy)
        self._policy: Policy | None = policy if as_it_is else TorchPolicy(policy, None, None, None)
        self._waiting: deque[tuple[int, Mapping[str, Tensor], Any]] = deque(maxlen=int(waiting))  # the newest last
        self._calls: list[Call] = []  # the evaluations that were begun; only the last may still be running
        self.dropped = 0
        self._pool = _Process(_EndsAtOnce(__name__, "call evaluate in the loop instead"), [job], _PATIENT)
        self._child = self._pool.records[0].handle
        self._finalizer = weakref.finalize(self, self._pool.stop)

    def submit(self, params: Any = None, step: int = 0) -> None:
        """Evaluate the weights as they are now, as soon as the process is free.

        `params` are the policy's parameters, None for its own; `step` is a number of your choice that comes back with
        the result. ValueError for parameters that do not fit; EvaluationError if the process has ended.
        """
        self._check_open()
        check_count("step", step)
        weights: Mapping[str, Tensor] = {}
        if self._policy is not None:
            if params is not None:
                self._policy.prepare(params)
            named = self._policy.state_dict(params)
            weights = {name: torch.as_tensor(leaf).detach().to("cpu", copy=True) for name, leaf in named.items()}
        packed = None if weights or params is None else dumps(params, on_cpu=True)  # as they are now
        self.dropped += len(self._waiting) == self._waiting.maxlen
        self._waiting.append((step, weights, packed))
        self._send()

    def results(self) -> list[Evaluation]:
        """The evaluations that have ended since the last call, in the order in which they ended; does not wait.

        EvaluationError if an evaluation raised, or the process has ended. The next call returns the others.
        """
        self._check_open()
        self._pool.poll()
        self._send()
        return self._taken()

    def wait(self) -> list[Evaluation]:
        """Wait until all submitted weights are evaluated, and return the `results`."""
        self._check_open()
        _prioritize(self._child, idle=False)
        try:
            while self._send():
                self._pool.wait()
        finally:
            _prioritize(self._child, idle=True)
        return self._taken()

    def _send(self) -> bool:
        """Send the newest waiting weights if the process is free; return whether it is at work now."""
        at_work = bool(self._calls) and not self._calls[-1].done
        if self._waiting and not at_work:
            self._calls.append(self._pool.call(0, "evaluate", *self._waiting.pop()))
            at_work = True
        return at_work

    def _taken(self) -> list[Evaluation]:
        """The results that have arrived; if one of them is an exception, raise the first instead."""
        for call in self._calls:
            if call.error is not None:
                self._calls.remove(call)
                raise call.error
        taken = [call for call in self._calls if call.done]
        self._calls = self._calls[len(taken) :]
        return [call.value for call in taken]

    def _check_open(self) -> None:
        if not self._child.open:
            raise ClosedError("the evaluator was closed: make another one")

    def close(self) -> None:
        """End the process at once. Does nothing the second time."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _film_name(film: str) -> str:
    """The file name of the film of step 0; ValueError unless each step gets another name."""
    with contextlib.suppress(LookupError, AttributeError, TypeError, ValueError):
        first, second = (film.format(step=step) for step in (0, 1))
        if first != second:
            return first
    rule = "expected {step} in it and no other field, so that each film has its own name"
    raise ValueError(f"film is {film!r}, {rule}: pass for example 'films/{{step}}.mp4'")


class _Process(WorkerPool):
    """A pool of one process, which continues after an evaluation that raised."""

    @override
    def _refusal(self, record: WorkerRecord, call: Call, failure: Failure) -> EvaluationError:
        what = f"the environment or the policy could not be built{' or filmed' if record.job.film else ''}"
        if call.name == "evaluate":
            what = f"the evaluation of step {call.args[0]} raised an exception"
        error = EvaluationError(f"{what}: {failure.message}")
        error.__cause__ = failure.error()
        error.add_note(f"The traceback in the evaluator's process:\n{failure.traceback}")
        return error

    @override
    def _error(self, worker: int, loss: Loss) -> EvaluationError:
        return EvaluationError(f"the process of the evaluator {loss.what}: make another Evaluator")


class _EndsAtOnce(ProcessTransport):
    """Ends the process without asking it to close. With idle priority its end would wait for an idle core."""

    @override
    def close(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            _prioritize(handle, idle=False)
            handle.kill()


def _prioritize(child: Any, *, idle: bool) -> None:
    """Change the priority of a process, unless it has ended: its number may by then be another process's."""
    if child.open and child.owned and not child.ended_by(0):
        run_as_batch_work(idle=idle, pid=child.pid)


@dataclass(frozen=True)
class EvaluatorJob(Served):
    """What is evaluated, and how; see `Evaluator`. A copy of it in the process answers the calls."""

    source: RunnerSpec
    episodes: int
    seed: int | None
    max_frames: int
    exploration_type: ExplorationType
    film: str | None
    place: int = 0  # among the workers of the pool, which has only this one

    def pack(self) -> bytes:
        """The job as bytes, with all tensors on the CPU; TypeError if it cannot be sent."""
        mend = "pass functions that build them, create_env_fn and policy_factory"
        with sending("the environment or the policy", "another process", mend):
            return dumps(self, on_cpu=True)

    @cached_property
    def _pair(self) -> tuple[Env, Policy]:
        return self.source.build(Options(frames_per_batch=1, policy_device="cpu"))

    @override
    def describe(self) -> None:
        check_pair(*self._pair)
        if self.film is not None:  # an error only after the episodes would lose their statistics
            check_filmed(*self._pair)
        run_as_batch_work(idle=True)  # from here on

    def evaluate(self, step: int, weights: Mapping[str, Tensor], packed: bytes | None) -> Evaluation:
        """Evaluate `weights` by name, or `packed` params; without both, the policy's own parameters."""
        env, policy = self._pair
        if weights:
            policy.load(dict(weights))
        params = None if packed is None else cloudpickle.loads(packed)
        seed = seed_of(key_from_seed(self.seed))  # one for the episodes and for the film
        given: dict[str, Any] = {"seed": seed, "params": params, "exploration_type": self.exploration_type}
        stats = evaluate(env, policy, episodes=self.episodes, max_frames=self.max_frames, **given)
        film = None if self.film is None else Path(self.film.format(step=step))
        if film is not None:
            record(env, policy, film, **given)
        return Evaluation(step, stats, film)


def main(fds: Sequence[int]) -> None:
    """Serve the process that has started this one."""
    serve(fds, cloudpickle.loads)

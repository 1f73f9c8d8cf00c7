"""All worker processes of an environment: orders, answers, and what happens when a worker is lost."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from funcollect.envs.host.host_env import ONWARD, SimulatedEnv, without_advice
from funcollect.envs.host.lane_workers.bells import Bell
from funcollect.envs.host.lane_workers.block import CALL, CLOSE, NO_RESTART, BlockLayout
from funcollect.envs.host.lane_workers.lane_worker import SLICE, LaneWorker
from funcollect.envs.host.lane_workers.served import Applied
from funcollect.envs.host.lane_workers.worker_process import LaneJob
from funcollect.errors import ClosedError, EnvError, NotCalledError
from funcollect.interop.settings import send_main_by_value
from funcollect.processes.failures import Failure, UnsentResultError, warn_of_restart
from funcollect.processes.shared_memory import shared_memory
from funcollect.processes.system import current_cpu, place, usable_cpus

_TO_CLOSE = 1.0  # seconds until a worker that is at work is no longer asked to close: Ctrl-C should end a script soon
_TO_COME_BACK = 1.0  # seconds to finish a call that was broken off
_PAUSE = 1e-3  # seconds between two looks at workers after one was lost
_FAILURES_IN_A_ROW = 5  # of one worker, without a step in between
_STARTED = itertools.count()  # workers of this process


class LaneProcesses:
    """The workers, the memory that they share, and the bells by which orders and answers are announced.

    Each group of lanes has at most one order at a time, and one part's groups are ordered and awaited together.

    Attributes:
        groups: all groups, in the order of their lanes.
        block: the shared memory.
        lost: the reason by group, for groups whose simulators are gone, until `begin_again`.
        restarts: the number of workers that were lost so that others take their places.
        applied: by group, the functions that its lanes were called with (the arguments of `served.apply`).
    """

    def __init__(self, env: SimulatedEnv) -> None:
        assert env.workers is not None
        assert env.open_group is not None
        send_main_by_value()
        self._env = env
        self._options = env.workers
        self._open_group = env.open_group
        num_envs = env.num_envs or 1
        self.groups = self._options.groups(num_envs)
        leaves, action = env.observation_leaves, env.action_spec
        self._informs = bool(env.info_keys)
        self._layout = BlockLayout(leaves, action, num_envs, len(self.groups), infos=self._informs)
        self._owner = os.getpid()
        self._memory, (whole,) = shared_memory(1, self._layout.size)
        self.block = self._layout.over(whole)
        self.block.next_seeds[:] = NO_RESTART
        self._heard = [0, 0]  # answers of each part that no call has taken yet
        self._open = 0  # groups with an order whose answer no call has taken, more if a call was broken off
        self._calling = False  # whether `call` has begun, and has not ended or was broken off
        self._unread = False  # whether workers may have sent infos that nobody has read
        self._closed = False
        self.lost: dict[int, Exception] = {}
        self.restarts = 0
        self.applied: list[list[Applied]] = [[] for _ in self.groups]
        self._workers: list[LaneWorker] = []
        self._answers = Bell()
        cpus = usable_cpus()
        first = place() * self._options.num_workers  # so that the workers of several processes are spread
        try:
            for index in range(self._options.num_workers):
                cpu = cpus[(first + next(_STARTED)) % len(cpus)]
                self._workers.append(LaneWorker(index, self.groups, cpu))
            self._start(self._workers)
        except BaseException:
            self._free()
            raise

    def counts(self, groups: Sequence[int]) -> tuple[int, int]:
        """The number of these groups in each part."""
        second = sum(self.groups[index].part for index in groups)
        return len(groups) - second, second

    def worker_of(self, index: int) -> LaneWorker:
        """The worker of a group."""
        return self._workers[self.groups[index].worker]

    def order(self, order: int, groups: Sequence[int]) -> None:
        """Let the workers of these groups begin."""
        if self._calling and order not in (CALL, CLOSE):
            self._end_call()
        self._open += len(groups)  # first of all, since Ctrl-C may come at any moment
        rows = _rows(groups)
        self.block.order[rows] = order
        self.block.asked[rows] += 1
        here, beside = current_cpu(), []
        for index in groups:
            worker, part = self.worker_of(index), self.groups[index].part
            if worker.cpu == here:
                beside.append((worker, part))
            else:
                worker.bell.ring(part)
        # A worker takes its processor as soon as it is woken: one on this processor would keep the others waiting.
        for worker, part in beside:
            worker.bell.ring(part)

    def check_owner(self) -> None:
        """Raise ClosedError in a process that was forked from the one that has started the workers."""
        if os.getpid() != self._owner:
            raise ClosedError(
                f"the workers of {self._env} belong to the process that forked this one: make a state of your own here"
            )

    def wait(self, groups: Sequence[int], counts: tuple[int, int]) -> None:
        """Wait until these groups, so many in each part, have answered.

        Raises what a group has raised, and EnvError if a worker is lost; with ``on_failure="restart"``, the groups of
        that worker are in `lost` instead. A worker counts as hung after `timeout` seconds without a sign of life.
        """
        if self.lost and not self.lost.keys().isdisjoint(groups):
            self._wait_for_others(groups, counts)
            return
        heard, (first, second) = self._heard, counts
        last = time.monotonic()
        while heard[0] < first or heard[1] < second:
            rings = self._answers.wait(SLICE)
            if rings is not None:
                heard[0] += rings[0]
                heard[1] += rings[1]
                continue
            now = time.monotonic()
            waited, last = min(now - last, SLICE), now
            if self._look(groups, waited):
                self._wait_for_others(groups, counts)
                return
        heard[0] -= first
        heard[1] -= second
        if any(self.block.failed[_rows(groups)].tolist()):
            self._fail(groups)
        self._unread = self._informs  # before the next line, since Ctrl-C may come at any moment
        self._open -= len(groups)

    def infos_read(self) -> None:
        """Note that the infos of the groups that were awaited last have been read."""
        self._unread = False

    def _wait_for_others(self, groups: Sequence[int], counts: tuple[int, int]) -> None:
        """Wait for the groups that are not lost. What a lost one may have counted in these parts is dropped."""
        while (others := [index for index in groups if index not in self.lost]) and self._unanswered(others):
            time.sleep(_PAUSE)
            self._look(others, _PAUSE)
        rings = self._answers.heard() or (0, 0)
        for part, count in enumerate(counts):
            self._heard[part] = 0 if count else self._heard[part] + rings[part]
        if self.block.failed[others].any():
            self._fail(others)
        self._open -= len(groups)

    def _unanswered(self, groups: Iterable[int]) -> list[int]:
        """Those of the groups that have an order, and have not rung after it."""
        return [index for index in groups if self.block.asked[index] != self.block.answered[index]]

    def _look(self, groups: Sequence[int] = (), waited: float = 0.0) -> bool:
        """Lose workers that have ended, or that hang over an order to one of these groups; whether one was lost.

        `waited` is how many seconds were waited for the groups since the last look.
        """
        found = False
        for worker in self._workers:
            if worker.has_ended() and not self.lost.keys() >= worker.groups.keys():
                self._lose(worker, worker.ended())
                found = True
        for worker in dict.fromkeys(self.worker_of(index) for index in self._unanswered(groups)):
            if worker.silent_for(waited) > self._options.timeout:
                self._lose(worker, worker.hung(self._options.timeout))
                found = True
        return found

    def _fail(self, groups: Sequence[int]) -> None:
        """Lose the workers in which one of these groups has failed."""
        errors: dict[int, Exception] = {}
        for index in groups:
            if self.block.failed[index]:  # every message is read, so that none is left
                worker = self.worker_of(index)
                errors.setdefault(worker.index, worker.raised(worker.message(index)))
        for index, error in errors.items():
            self._lose(self._workers[index], error)

    def _lose(self, worker: LaneWorker, error: Exception) -> None:
        """Raise the error, or let a worker go so that another one can take its place."""
        if self._options.on_failure == "raise":
            raise error
        worker.failures += 1
        if worker.failures > _FAILURES_IN_A_ROW:
            error.add_note(f"This happened {worker.failures} times in a row.")
            raise error
        warn_of_restart(without_advice(str(error)), "\n".join(getattr(error, "__notes__", ())))
        worker.kill(self._answers)
        self.restarts += 1
        self.lost |= dict.fromkeys(worker.groups, error)
        groups = [*worker.groups]
        self.block.answered[groups] = self.block.asked[groups]
        self.block.failed[groups] = False

    def begin_again(self, groups: Iterable[int]) -> None:
        """Replace the lost simulators of these groups by new ones, which have to be reset."""
        self._look()
        for worker in {self.groups[index].worker: self.worker_of(index) for index in groups}.values():
            while not worker.may_answer():
                try:
                    self._start([worker])
                except Exception as error:
                    self._lose(worker, error)
        for index in groups:
            del self.lost[index]

    def step_made(self, groups: Iterable[int]) -> None:
        """Note that the workers of these groups work, after one was lost."""
        for index in groups:
            self.worker_of(index).failures = 0

    def call(self, function: Callable[..., Any], arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a function with the simulators of each of these groups, and their arguments, in all workers at once.

        Raises what it has raised, `UnsentResultError` only if it has returned everywhere; the workers continue. If one
        of them has ended, the function is called in none.
        """
        groups = [*arguments]
        try:
            self._look()
            self._raise_if_lost(groups)
        except EnvError as error:
            raise NotCalledError(str(error)) from error
        if self._calling:
            self._end_call()
            self._raise_if_lost(groups)
        self._calling = True
        for index in groups:
            self.worker_of(index).send((int(self.block.asked[index]) + 1, function, arguments[index]))
        self.order(CALL, groups)
        self.wait(groups, self.counts(groups))
        self._raise_if_lost(groups)
        answers = [self.worker_of(index).message(index) for index in groups]
        self._calling = False
        errors = [
            self.worker_of(index).raised(answer)
            for index, answer in zip(groups, answers, strict=True)
            if isinstance(answer, Failure)
        ]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, UnsentResultError))
        return answers

    def _raise_if_lost(self, groups: Iterable[int]) -> None:
        for index in groups:
            if index in self.lost:
                raise EnvError(f"{self.worker_of(index)}: its process was lost: {ONWARD}") from self.lost[index]

    def _end_call(self) -> None:
        """Let the workers finish a call that was broken off; lose those that hang in it."""
        self._take_answers(SLICE)
        while self._calling:
            self._look(range(len(self.groups)), SLICE)
            self._take_answers(SLICE)

    def _take_answers(self, patience: float) -> None:
        """Wait, at most so many seconds, until all living workers have finished; drop their answers."""
        if not self._wait_until_answered(range(len(self.groups)), patience):
            return
        for worker in self._workers:
            worker.forget_messages()
        self._answers.heard()
        self._heard[:] = 0, 0
        self._open = 0
        self._calling = self._unread = False

    def settle(self) -> bool:
        """Bring all workers back to where they wait for orders, also after a call that was broken off.

        Returns whether there are new workers, which need seeds.
        """
        ended = any(worker.has_ended() for worker in self._workers)
        if not (self._open or self._unread or self._calling or self.lost or ended):
            return False
        self._take_answers(_TO_COME_BACK)
        stuck = {self.groups[index].worker for index in self._unanswered(range(len(self.groups)))}
        gone = [worker for worker in self._workers if worker.index in stuck or worker.has_ended()]
        self._start(gone)
        self.lost.clear()
        self.block.answered[:] = self.block.asked
        self.block.failed[:] = False
        self._take_answers(0)
        return bool(gone)

    def _start(self, workers: Sequence[LaneWorker]) -> None:
        """Start these workers, and wait until they have opened their simulators."""
        env = replace(self._env, opener=_not_here, open_group=None, workers=None)
        for worker in workers:
            groups = {
                index: (group, self._open_group(group.first, group.end)) for index, group in worker.groups.items()
            }
            applied = {index: list(self.applied[index]) for index in groups}
            job = LaneJob(env, self._layout, groups, worker.cpu, applied)
            worker.start(job, self._memory, self._answers)
        for worker in workers:
            worker.join(self._answers)

    def close(self) -> None:
        """Close all environments and end the processes; then raise the first error of a lane that could not be."""
        if self._closed:
            return
        try:
            errors = self._say_close() if os.getpid() == self._owner else []
        finally:
            self._free()
        for error in errors:
            raise error

    def _say_close(self) -> list[Exception]:
        """Ask the workers to close; return what some have raised. Those that do not answer in time are left alone."""
        self._take_answers(_TO_CLOSE)
        busy = {self.groups[index].worker for index in self._unanswered(range(len(self.groups)))}
        asked = [
            next(iter(worker.groups)) for worker in self._workers if worker.may_answer() and worker.index not in busy
        ]
        if asked:
            self.order(CLOSE, asked)
        while not self._wait_until_answered(asked, SLICE):
            silence = [self.worker_of(index).silent_for(SLICE) for index in self._unanswered(asked)]
            if min(silence, default=0.0) > self._options.timeout:
                break
        for index in self._unanswered(asked):
            if not self.worker_of(index).has_ended():
                warnings.warn(
                    f"{self.worker_of(index)}: close() has not returned in {self._options.timeout:g} s (timeout="
                    f"{self._options.timeout:g}), and its process is ended: find out what it waits for",
                    RuntimeWarning,
                    stacklevel=2,
                )
        failed = [index for index in asked if self.block.failed[index]]
        return [self.worker_of(index).raised(self.worker_of(index).message(index)) for index in failed]

    def _wait_until_answered(self, groups: Iterable[int], patience: float) -> bool:
        """Wait, so many seconds at most, until those of these groups whose workers live have no order to do."""
        until = time.monotonic() + patience
        while any(not self.worker_of(index).has_ended() for index in self._unanswered(groups)):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE)
        return True

    def _free(self) -> None:
        """End the processes at once, and free their shared memory."""
        self._closed = True
        for worker in self._workers:
            worker.kill(self._answers)
            worker.bell.close()
        self._answers.close()
        os.close(self._memory)


def _rows(groups: Sequence[int]) -> slice | Sequence[int]:
    """An index of arrays by group: a slice, which NumPy reads sooner, for a range of groups."""
    return slice(groups.start, groups.stop) if isinstance(groups, range) else groups


def _not_here(env: SimulatedEnv) -> NoReturn:
    raise AssertionError("each group has an opener of its own")

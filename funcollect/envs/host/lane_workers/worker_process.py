"""The worker process: it steps and resets its lanes when its bell rings, in memory that it shares."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from funcollect.envs.host.host_env import NOT_RECORDED, SimulatedEnv, bad_info, bad_outcome, check_outcome
from funcollect.envs.host.lane_workers.bells import Bell
from funcollect.envs.host.lane_workers.block import (
    CALL,
    CLOSE,
    INFO_BYTES,
    NO_RESTART,
    NO_SEED,
    RESET,
    STEP,
    BlockLayout,
    LaneBlock,
)
from funcollect.envs.host.lane_workers.served import Applied, apply
from funcollect.messages import shown
from funcollect.processes.channel import Channel
from funcollect.processes.child import enter_child
from funcollect.processes.failures import Failure
from funcollect.processes.life import SIGNS
from funcollect.processes.shared_memory import mapped
from funcollect.processes.system import PORTABLE, run_on
from funcollect.protocols import Simulators

Opener = Callable[[SimulatedEnv], Simulators]


@dataclass(frozen=True)
class LaneJob:
    """What a worker serves.

    Attributes:
        env: the whole environment, but for what opens its simulators.
        layout: where the arrays lie in the shared memory.
        index: the worker's.
        lanes: its own.
        opener: opens their simulators.
        cpu: the processor to run on.
        applied: the functions that lost simulators were called with, and these have to be.
    """

    env: SimulatedEnv
    layout: BlockLayout
    index: int
    lanes: range
    opener: Opener
    cpu: int
    applied: list[Applied]

    def pack(self, worker: str) -> bytes:
        """The job as bytes, functions of a script or a notebook by value; TypeError if it cannot be sent."""
        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:
            raise TypeError(
                f"{worker}: its environments cannot be sent to another process ({shown(error, 200)}): pass an id, or a "
                "function that builds them"
            ) from error


def main(fds: Sequence[int]) -> None:
    """Serve the process that has started this one, until it asks to close or has ended."""
    channel = enter_child(fds)
    with contextlib.suppress(EOFError, OSError):  # that process has ended
        message = channel.receive()
        assert message is not None
        (setup, packed), (memory, *bells) = message
        setup.apply()
        served = None
        try:
            job: LaneJob = cloudpickle.loads(packed)
            run_on(job.cpu)
            (whole,) = mapped(memory, 1, job.layout.size)
            os.close(memory)
            served = ServedLanes(job, channel, job.layout.over(whole), Bell(bells[len(bells) // 2 :]))
        except BaseException as error:
            channel.send(Failure.of(error))
        if served is not None:
            channel.send(None)
            bell = Bell(bells[: len(bells) // 2])
            if PORTABLE:  # nothing else ends a worker whose server was killed together with its parent
                bell.watch(fds[1])
            while bell.wait() and served.serve():
                pass
    sys.stdout.flush()
    sys.stderr.flush()


class ServedLanes:
    """The simulators of a worker's lanes, and the memory and messages by which they are used."""

    def __init__(self, job: LaneJob, channel: Channel, block: LaneBlock, answers: Bell) -> None:
        self._channel = channel
        self._block = block
        self._answers = answers
        self._info_keys = job.env.info_keys
        self._index, self._lanes, self._rows = job.index, job.lanes, slice(job.lanes.start, job.lanes.stop)
        memory = {path: array[self._rows] for path, array in block.observation.items()}
        env = replace(job.env, num_envs=len(job.lanes), first_lane=job.lanes.start, memory=memory)
        self._simulators = job.opener(env)
        if not job.applied:
            return
        try:
            self._simulators.reset(range(len(job.lanes)), [0] * len(job.lanes))  # as they were at the calls
            for order in job.applied:
                apply(self._simulators, *order)
        except BaseException:
            with contextlib.suppress(Exception):
                self._simulators.close()
            raise

    def serve(self) -> bool:
        """Carry out the order in the block, and answer it; False once the worker was asked to close."""
        number, order, failed = self._block.asked[self._index], self._block.order[self._index], False
        try:
            if order == CALL:
                self._call(number)
            elif order == CLOSE:
                self._simulators.close()
                sys.stdout.flush()  # after the answer this process may be killed
                sys.stderr.flush()
            elif order == STEP:
                self._step()
            else:
                self._act_in_chosen(order)
        except BaseException as error:
            self._channel.send(Failure.of(error))
            failed = True
        self._block.failed[self._index] = failed
        SIGNS.count[0] += 1
        self._answers.ring()
        self._block.answered[self._index] = number
        return bool(order != CLOSE)

    def _step(self) -> None:
        """Step all lanes, and begin the next episodes where that was announced."""
        block, rows = self._block, self._rows
        self._simulators.send(range(len(self._lanes)), block.action[rows])
        _, outcome = self._simulators.receive()
        check_outcome(outcome, self._lanes)
        try:
            block.reward[rows], block.terminated[rows], block.truncated[rows], infos = outcome
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, self._lanes) from error
        packed = self._packed(infos)  # before a restart, which may write over them
        over = block.terminated[rows] | block.truncated[rows]
        if over.any():
            self._restart(over)
        self._inform(packed)

    def _act_in_chosen(self, order: int) -> None:
        """Reset or step the lanes that are marked."""
        block, rows = self._block, self._rows
        chosen = block.chosen[rows].nonzero()[0]
        own = chosen.tolist()
        if order == RESET:
            self._simulators.reset(own, _seeds(block.seeds[rows][chosen]))
            return
        self._simulators.send(own, block.action[rows][chosen])
        _, outcome = self._simulators.receive()
        lanes = [self._lanes[lane] for lane in own]
        check_outcome(outcome, lanes)
        try:
            for column, values in zip((block.reward, block.terminated, block.truncated), outcome, strict=False):
                column[rows][chosen] = values
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, lanes) from error
        self._inform(self._packed(outcome[3]))

    def _restart(self, over: npt.NDArray[np.bool_]) -> None:
        """Begin the next episodes of lanes that are over, [k] bool, if that was announced."""
        block, rows = self._block, self._rows
        seeds = block.next_seeds[rows]
        own = (over & (seeds != NO_RESTART)).nonzero()[0]
        for path, ends in block.ends.items():
            ends[rows][own] = block.observation[path][rows][own]
        self._simulators.reset(own.tolist(), _seeds(seeds[own]))

    def _packed(self, infos: Sequence[Any]) -> bytes:
        """A step's infos, an array for each key; nothing without any."""
        if not infos:
            return b""
        return pickle.dumps([_regular(key, values) for key, values in zip(self._info_keys, infos, strict=True)], -1)

    def _inform(self, packed: bytes) -> None:
        """Pass on what `_packed` returned."""
        if not packed:
            return
        small = len(packed) <= INFO_BYTES
        if small:
            self._block.info[self._index, : len(packed)] = np.frombuffer(packed, np.uint8)
        else:
            self._channel.send(packed)
        self._block.info_size[self._index] = len(packed) if small else -1

    def _call(self, number: int) -> None:
        """Carry out the message of this order, and answer it; orders before it may have been broken off."""
        sent = 0
        while sent != number:
            message = self._channel.receive()
            assert message is not None
            sent, function, args = message[0]
        try:
            self._channel.send(function(self._simulators, *args))
        except Exception as error:
            self._channel.send(Failure.of(error))


def _seeds(seeds: npt.NDArray[np.int64]) -> list[int | None]:
    return [None if seed == NO_SEED else seed for seed in seeds.tolist()]


def _regular(key: str, values: Any) -> npt.NDArray[Any]:
    """An info's values as one array; EnvError unless they are numbers, or arrays of one shape."""
    try:
        array = np.array(values)
    except (TypeError, ValueError) as error:
        raise bad_info(key, values, error) from error
    if array.dtype.kind not in "biufc":
        raise bad_info(key, values, TypeError(f"an array of them has the dtype {array.dtype}"))
    return array

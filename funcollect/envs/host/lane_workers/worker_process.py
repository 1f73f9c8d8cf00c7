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
from funcollect.envs.host.lane_workers.options import Group
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
        groups: the worker's own groups by index, with what opens their simulators.
        cpu: the processor to run on.
        applied: by group, the functions that lost simulators were called with, and these have to be.
    """

    env: SimulatedEnv
    layout: BlockLayout
    groups: dict[int, tuple[Group, Opener]]
    cpu: int
    applied: dict[int, list[Applied]]

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
            while (rings := bell.wait()) is not None and served.serve(rings):
                pass
    sys.stdout.flush()
    sys.stderr.flush()


class ServedLanes:
    """The simulators of a worker's groups, and the memory and messages by which they are used."""

    def __init__(self, job: LaneJob, channel: Channel, block: LaneBlock, answers: Bell) -> None:
        self._channel = channel
        self._block = block
        self._answers = answers
        self._info_keys = job.env.info_keys
        self._served: list[tuple[int, Group, Simulators]] = []  # by part
        try:
            for index, (group, opener) in sorted(job.groups.items()):
                memory = {path: array[group.first : group.end] for path, array in block.observation.items()}
                lanes = group.end - group.first
                env = replace(job.env, num_envs=lanes, first_lane=group.first, memory=memory)
                simulators = opener(env)
                self._served.append((index, group, simulators))
                if job.applied[index]:
                    simulators.reset(range(lanes), [0] * lanes)  # as they were when the functions were called
                    for order in job.applied[index]:
                        apply(simulators, *order)
        except BaseException:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def serve(self, rings: tuple[int, int]) -> bool:
        """Serve the parts whose bell rang; False once the worker was asked to close."""
        for index, group, simulators in self._served:
            if not rings[group.part]:
                continue
            number, order, failed = self._block.asked[index], self._block.order[index], False
            try:
                if order == CALL:
                    self._call(index, number, simulators)
                elif order == CLOSE:
                    self.close()
                    sys.stdout.flush()  # after the answer this process may be killed
                    sys.stderr.flush()
                else:
                    self._do(order, index, group, simulators)
            except BaseException as error:
                self._channel.send((index, Failure.of(error)))
                failed = True
            self._block.failed[index] = failed
            SIGNS.count[0] += 1
            self._answers.ring(group.part)
            self._block.answered[index] = number
            if order == CLOSE:
                return False
        return True

    def _do(self, order: int, index: int, group: Group, simulators: Simulators) -> None:
        """Step or reset lanes of a group."""
        block, lanes = self._block, slice(group.first, group.end)
        if order == STEP:
            simulators.send(range(group.end - group.first), block.action[lanes])
            _, outcome = simulators.receive()
            check_outcome(outcome, range(group.first, group.end))
            try:
                block.reward[lanes], block.terminated[lanes], block.truncated[lanes], infos = outcome
            except NOT_RECORDED as error:
                raise bad_outcome(outcome, range(group.first, group.end)) from error
            packed = self._packed(infos)  # before a restart, which may write over them
            over = block.terminated[lanes] | block.truncated[lanes]
            if over.any():
                self._restart(group, simulators, over)
            self._inform(index, packed)
            return
        chosen = block.chosen[lanes].nonzero()[0]
        own = chosen.tolist()
        if order == RESET:
            simulators.reset(own, _seeds(block.seeds[lanes][chosen]))
            return
        simulators.send(own, block.action[lanes][chosen])
        _, outcome = simulators.receive()
        check_outcome(outcome, [group.first + lane for lane in own])
        try:
            for column, values in zip((block.reward, block.terminated, block.truncated), outcome, strict=False):
                column[lanes][chosen] = values
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, [group.first + lane for lane in own]) from error
        self._inform(index, self._packed(outcome[3]))

    def _restart(self, group: Group, simulators: Simulators, over: npt.NDArray[np.bool_]) -> None:
        """Begin the next episodes of lanes that are over, [k] bool, if that was announced."""
        block, lanes = self._block, slice(group.first, group.end)
        seeds = block.next_seeds[lanes]
        own = (over & (seeds != NO_RESTART)).nonzero()[0]
        for path, ends in block.ends.items():
            ends[lanes][own] = block.observation[path][lanes][own]
        simulators.reset(own.tolist(), _seeds(seeds[own]))

    def _packed(self, infos: Sequence[Any]) -> bytes:
        """A step's infos, an array for each key; nothing without any."""
        if not infos:
            return b""
        return pickle.dumps([_regular(key, values) for key, values in zip(self._info_keys, infos, strict=True)], -1)

    def _inform(self, index: int, packed: bytes) -> None:
        """Pass on what `_packed` returned."""
        if not packed:
            return
        small = len(packed) <= INFO_BYTES
        if small:
            self._block.info[index, : len(packed)] = np.frombuffer(packed, np.uint8)
        else:
            self._channel.send((index, packed))
        self._block.info_size[index] = len(packed) if small else -1

    def _call(self, index: int, number: int, simulators: Simulators) -> None:
        """Carry out the message of this order, and answer it; orders before it may have been broken off."""
        sent = 0
        while sent != number:
            message = self._channel.receive()
            assert message is not None
            sent, function, args = message[0]
        try:
            self._channel.send((index, function(simulators, *args)))
        except Exception as error:
            self._channel.send((index, Failure.of(error)))

    def close(self) -> None:
        """Close all simulators; raise the first error at the end."""
        errors = []
        for _, _, simulators in self._served:
            try:
                simulators.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


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

"""The worker process: it steps and resets its lanes in shared memory when its bell rings."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import cloudpickle
import numpy as np
from typing_extensions import override

from funcollect.envs.host import host_env
from funcollect.envs.host.host_env import SimulatedEnv, check_outcome
from funcollect.envs.host.lane_workers.block import INFO_BYTES, NO_RESTART, RESET, STEP, STEP_APART, Bell, LaneBlock
from funcollect.processes.channel import Channel
from funcollect.processes.failures import Failure, UnsentResultError, check_sendable, sending
from funcollect.processes.memory import MemoryLayout, mapped
from funcollect.processes.serving import Served, serve
from funcollect.processes.system import SIGNS, run_on
from funcollect.protocols import SavableSnapshots, Simulators, SimulatorsOfLanes

Applied = tuple[list[int], bytes]  # lanes, counted from the worker's first, and a pickled function with its arguments


class Snapshot(NamedTuple):
    """The snapshots of a worker's lanes."""

    lanes: list[Any]  # an entry for each lane, as plain data if possible
    refusal: str = ""  # why it is not; empty if it is, or if the simulators have no `snapshot_data`


@dataclass(frozen=True)
class LaneJob:
    """The lanes of a worker, and how to open their simulators."""

    env: SimulatedEnv  # the whole environment, without its opener
    layout: MemoryLayout  # of the shared memory
    index: int  # the worker's
    lanes: range  # the worker's
    opener: Callable[[SimulatedEnv], Simulators]  # of the lanes
    cpu: int  # the processor to run on
    applied: Sequence[Applied] = ()  # calls of functions with the lost simulators, which a replacement repeats
    place: int = 0  # all workers have the place of the process that starts them

    @property
    def label(self) -> str:
        """The worker and its lanes, for messages."""
        first, last = self.lanes[0], self.lanes[-1]
        lanes = f"lane {first}" if first == last else f"lanes {first} to {last}"
        return f"{lanes} (worker {self.index})"

    def pack(self) -> bytes:
        """The pickled job, with a script's or notebook's functions by value; TypeError if it cannot be sent."""
        mend = "pass an id, or a function that builds them"
        with sending(f"{self.label}: its environments", "another process", mend):
            return bytes(cloudpickle.dumps(self))


def main(fds: Sequence[int]) -> None:
    """Serve the process that started this one, until it asks to close or ends."""
    serve(fds, ServedLanes, ServedLanes.attend)


class ServedLanes(Served):
    """The simulators of a worker's lanes, which carry out orders in shared memory and answer calls."""

    _failure: Failure  # of the last order that raised
    _infos = b""  # the last infos that were too large for the block, pickled

    def __init__(self, packed: bytes, memory: int, *bells: int) -> None:
        self._job = job = cast(LaneJob, cloudpickle.loads(packed))
        self._index, self._lanes, self._rows = job.index, job.lanes, slice(job.lanes.start, job.lanes.stop)
        run_on(job.cpu)
        (whole,) = mapped(memory, 1, job.layout.size)
        self._block = LaneBlock.over(whole, job.layout)
        observation = {path: array[self._rows] for path, array in self._block.observation.items()}
        count, half, fds = len(job.lanes), len(bells) // 2, [*map(os.dup, bells)]
        self._bell, self._answers = Bell(fds[:half]), Bell(fds[half:])
        env = replace(job.env, num_envs=count, first_lane=job.lanes.start, memory=observation)
        self._simulators: Any = job.opener(env)
        try:
            if job.applied:
                self._simulators.reset(range(count), [0] * count)  # functions were called after a reset
            for call in job.applied:
                with contextlib.suppress(UnsentResultError):  # the results are not needed again
                    self.apply(*call)
        except BaseException:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def attend(self, channel: Channel) -> None:
        """Carry out orders until the channel is readable, so a call may have arrived."""
        self._bell.watch(channel.fileno())
        while self._bell.wait():
            self._carry_out()

    def _carry_out(self) -> None:
        block, index = self._block, self._index
        number, order, failed = block.asked[index], block.order[index], False
        if number == block.answered[index]:
            return  # the bell was rung twice for one order
        try:
            if order == STEP:
                self._step(range(len(self._lanes)), self._lanes, self._rows, restarts=True)
            else:
                chosen = block.chosen[self._rows].nonzero()[0]
                rows = chosen + self._lanes.start
                if order == RESET:
                    self._simulators.reset(chosen.tolist(), LaneBlock.decoded(block.seeds[rows]))
                else:
                    self._step(chosen.tolist(), rows.tolist(), rows, restarts=order == STEP_APART)
        except BaseException as error:
            self._failure, failed = Failure.of(error), True
        block.failed[index] = failed
        block.carried_out[index] = number
        SIGNS.count[0] += 1
        self._answers.ring()
        block.answered[index] = number

    def _step(self, own: Sequence[int], lanes: Sequence[int], rows: Any, *, restarts: bool) -> None:
        """Step `lanes`, in the block's `rows` and by the worker's `own` numbers; `restarts`: those with a next seed."""
        block = self._block
        self._simulators.send(own, block.action[rows])
        _, outcome = self._simulators.receive()
        check_outcome(outcome, lanes)
        try:
            block.reward[rows], block.terminated[rows], block.truncated[rows], infos = outcome
        except host_env.NOT_RECORDED as error:
            raise host_env.bad_outcome(outcome, lanes) from error
        if infos:  # before a restart, which may write over them
            self._inform(infos)
        if not restarts or not (over := block.terminated[rows] | block.truncated[rows]).any():
            return
        ended = np.array(lanes)[over]
        seeds = block.next_seeds[ended]
        again, seeds = ended[seeds != NO_RESTART], seeds[seeds != NO_RESTART]
        for path, ends in block.ends.items():
            ends[again] = block.observation[path][again]
        self._simulators.reset((again - self._lanes.start).tolist(), LaneBlock.decoded(seeds))

    def _inform(self, infos: Sequence[Any]) -> None:
        """Deliver a step's infos, an array for each key, in the block if they fit; EnvError if they are no numbers."""
        arrays = []
        for key, values in zip(self._job.env.info_keys, infos, strict=True):
            try:
                arrays.append(np.array(values))
                if (dtype := arrays[-1].dtype).kind not in "biufc":
                    raise TypeError(f"an array of them has the dtype {dtype}")
            except (TypeError, ValueError) as error:
                raise host_env.bad_info(key, values, error) from error
        packed = pickle.dumps(arrays, -1)
        if small := len(packed) <= INFO_BYTES:
            self._block.info[self._index, : len(packed)] = np.frombuffer(packed, np.uint8)
        else:
            self._infos = packed
        self._block.info_size[self._index] = len(packed) if small else -1

    def infos(self) -> bytes:
        """The last order's infos, pickled, if they were too large for the block."""
        return self._infos

    def raised(self) -> Failure:
        """The failure of the last order that raised."""
        return self._failure

    def snapshot(self) -> Snapshot:
        """A snapshot of all lanes."""
        taken, refusal = self._simulators.snapshot(), ""
        try:
            if isinstance(self._simulators, SavableSnapshots):
                taken = self._simulators.snapshot_data(taken)
        except TypeError as error:
            refusal = str(error)
        return Snapshot(list(taken), refusal)

    def restore(self, lanes: list[Any], refusal: str) -> None:
        """Restore what `snapshot` returned."""
        plain = isinstance(self._simulators, SavableSnapshots) and not refusal
        self._simulators.restore(self._simulators.snapshot_from(lanes) if plain else lanes)

    @override
    def describe(self) -> bool:
        """Whether the simulators' resets take options."""
        return host_env.takes_options(self._simulators)

    def reset(self, lanes: list[int], packed: bytes) -> None:
        """Start an episode in some lanes, from packed seeds and options."""
        self._simulators.reset(lanes, *cloudpickle.loads(packed))

    def apply(self, lanes: list[int], packed: bytes) -> list[Any]:
        """Call a function with the environments of some lanes; UnsentResultError if the results cannot be sent."""
        if not isinstance(self._simulators, SimulatorsOfLanes):
            raise TypeError("the lanes have no objects that a function could be called with")
        function, args = cloudpickle.loads(packed)
        results = self._simulators.apply(lanes, function, args)
        check_sendable(results)
        return results

    def camera(self, lane: int) -> tuple[str | None, float | None]:
        """The render mode and the frames per second of a lane; TypeError if it cannot be filmed."""
        if not hasattr(self._simulators, "camera"):
            raise TypeError(f"lane {lane} cannot be filmed, expected a Gymnasium environment that renders: film that")
        camera = self._simulators.camera(lane)
        return camera.mode, camera.fps

    def picture(self, lane: int) -> Any:
        """The current picture of a lane."""
        return self._simulators.camera(lane).shoot()

    @override
    def close(self) -> None:
        """Close the simulators. Does nothing the second time."""
        simulators, self._simulators = self._simulators, None
        if simulators is not None:
            simulators.close()
        sys.stdout.flush()  # this process may be killed after its answer
        sys.stderr.flush()

    shut = close  # unlike "close", a call of this name does not end the process

"""The loop over simulators that hold all lanes as tensors on one device, and restart lanes by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from funcollect.core.batch import restarted
from funcollect.core.loops import eager
from funcollect.core.loops.tensor import TensorLanes, TensorStepper, by_path, check_tensors
from funcollect.core.request import Request, Rollout
from funcollect.core.simulators import LiveSimulators, SimulatorHandle
from funcollect.core.state import CollectorState, first_state
from funcollect.errors import NoResetError, ReplayError
from funcollect.keys import Key, Purpose, fold
from funcollect.protocols import DeviceEnv, DeviceSimulators, Policy, Transition
from funcollect.tree import Path, select

_SEEDS = 1 << 31  # simulators take seeds of 31 bits
_NO_KEYS = (None, None), (None, None)


class _DeviceSimulation(LiveSimulators):
    """Simulators on a device, seeded once."""

    env: DeviceEnv
    simulators: DeviceSimulators

    def __init__(self, env: DeviceEnv, key: Key, first_lane: int) -> None:
        super().__init__(env, env.open())
        self._first_lane = first_lane
        self.has_finished = False  # whether states may show lanes as finished that the simulators have restarted
        self.rekey(key, [], 0)

    def rekey(self, key: Key, episodes: list[int], steps: int) -> None:
        """Take the next seed from `key`, as if lanes had made `steps`."""
        self.steps = steps
        self.episode: Tensor | None = None  # [P], the latest episode of each lane, of all states
        self._seed: int | None = int(fold(key, Purpose.RESET, self._first_lane, steps)[0]) % _SEEDS

    def reset(self) -> dict[Path, Tensor]:
        """Begin an episode in each lane; return copies of the observations by path, each [P, ...], checked."""
        root = by_path(self.env, self.simulators.reset(self._seed))
        self._seed, self.has_finished = None, False
        check_tensors(self.env, root, self.env.num_envs or 1)
        return {path: value.clone() for path, value in root.items()}

    def reset_some(self, lanes: Tensor, observation: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
        """Begin an episode in the `lanes` of a mask [P]; return the observations, the given ones in other lanes."""
        root = by_path(self.env, self.simulators.restart(lanes))
        check_tensors(self.env, root, self.env.num_envs or 1)
        return {path: select(lanes, value, observation[path]) for path, value in root.items()}


def init(env: DeviceEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`."""
    lane = torch.arange(first_lane, first_lane + (env.num_envs or 1), device=env.device)
    simulation = _DeviceSimulation(env, key, first_lane)
    try:
        root = simulation.reset()
        return first_state(env, policy, key, lane, total_lanes, env_state=simulation.release(), observation=root)
    except BaseException:
        simulation.close()
        raise


def reset(env: DeviceEnv, state: CollectorState, lanes: Tensor, *, stale: bool = False) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]; with `stale`, `funcollect.recover`."""
    some = not bool(lanes.all())
    if some and not env.resets_lanes:
        raise NoResetError(f"{env} resets its lanes itself, and otherwise all at once: leave the mask out")
    simulation: _DeviceSimulation = state.env_state.claim(stale=stale)
    root = simulation.reset_some(lanes, state.observation) if some else simulation.reset()
    simulation.has_finished &= bool(((state.terminated | state.truncated) & ~lanes).any())
    begun = state.episode if simulation.episode is None else torch.maximum(state.episode, simulation.episode)
    simulation.episode = begun + lanes
    steps, env_state = max(simulation.steps, state.steps_made), simulation.release()
    return restarted(state, lanes, simulation.episode, env_state=env_state, observation=root, steps=steps)


def fork(env: DeviceEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: impossible."""
    state.env_state.check()
    raise ReplayError(f"{env} is seeded by run and gives no snapshot, so it cannot be forked: make another state")


def check_uncut(env: DeviceEnv, limit: int | None) -> None:
    """Raise ValueError for a limit on trajectories if the simulators cannot reset single lanes."""
    if limit is not None and limit > 0 and not env.resets_lanes:
        what = f"max_frames_per_traj is {limit}, but {env} resets its lanes itself"
        raise ValueError(f"{what}: set a limit in the simulators")


def run(env: DeviceEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout`."""
    check_uncut(env, request.max_frames_per_traj)
    state.env_state.check()
    make = partial(_DeviceStepper, lanes=TensorLanes.of(state, _NO_KEYS))
    return eager.run(make, env, policy, state, request)


class _DeviceStepper(TensorStepper):
    """Steps simulators over tensors. In the batch, lanes that stay finished repeat their last observation."""

    @override
    def begin(self) -> None:
        held: SimulatorHandle = self.state.env_state
        if held.simulation.has_finished and self.request.reset_when_done:
            mend = "begin other episodes with funcollect.reset(env, state)"
            raise ValueError(f"lanes of the state are finished, and {self.env} has begun others in them: {mend}")
        self._simulation: _DeviceSimulation = held.claim()
        self.waits = True
        self._move = eager.timed("environment", self._simulation.simulators.step)

    @override
    def _answer(self, t: int, action: Tensor) -> Any:
        self._moved, self._after = self._move(action)
        return self._moved

    @override
    def _continue(self, answer: Transition, observed: list[Tensor]) -> Iterable[Tensor]:
        return by_path(self.env, self._after).values() if self.request.reset_when_done else observed

    @override
    def _restart(self, t: int, done: Tensor) -> Tensor:
        self.ended = True  # it is not known
        if self._limit is not None:
            cut = done & ~(self._moved.terminated | self._moved.truncated)
            root = eager.timed("environment", self._simulation.reset_some)(cut, self.root)
            for path, value in root.items():
                self.root[path].copy_(value)
            self._limit.restart(t, done)
        return done

    @override
    def end(self, counters: dict[str, Tensor]) -> tuple[Any, dict[Path, Tensor]]:
        simulation = self._simulation
        simulation.simulators.check()
        simulation.episode, simulation.steps = counters["episode"], self.state.steps_made + self.request.length
        simulation.has_finished = not self.request.reset_when_done
        return simulation.release(), {path: value.clone() for path, value in self.root.items()}

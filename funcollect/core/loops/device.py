"""The loop over simulators that hold all lanes as tensors on one device, and reset lanes themselves."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import OUTCOME_KEYS
from funcollect.core.loops import device_delivery
from funcollect.core.loops.delivery import new_columns, reset_counters
from funcollect.core.loops.eager import step_all
from funcollect.core.loops.tensor import as_read, as_tensor, by_path, check_step, check_tensors, keep_infos
from funcollect.core.request import Request, open_actor
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState, all_lanes, first_state
from funcollect.errors import ReplayError
from funcollect.interop.memory import fixed
from funcollect.interop.reads import reads_together
from funcollect.keys import Key, Purpose, fold
from funcollect.protocols import DeviceEnv, DeviceSimulators, Policy
from funcollect.tree import Path, select

_SEEDS = 1 << 31  # simulators take seeds of 31 bits


class DeviceSimulation:
    """Simulators and the version of the state that may use them; see `Simulation`, which has lanes on the host."""

    renewed = None  # they are in this process

    def __init__(self, env: DeviceEnv, key: Key, first_lane: int) -> None:
        self.env = env
        self.simulators = env.open()
        self.version = 0
        self.busy = self.closed = False
        self.steps = 0
        self.episode: Tensor | None = None  # [P], the latest one of each lane, whichever state is given
        self.has_finished = False  # whether lanes may have been kept finished
        self._first_lane = first_lane
        self.rekey(key, [], 0)
        self._finalizer = weakref.finalize(self, self.simulators.close)

    def rekey(self, key: Key, episodes: list[int], steps: int) -> None:
        """Seed the next reset from `key`, for a run that continues after these episodes and steps."""
        self.steps, self.episode = steps, None
        self._seed: int | None = int(fold(key, Purpose.RESET, self._first_lane, steps)[0]) % _SEEDS

    def seed_again(self) -> None:
        """Do nothing: simulators that continue from any point need no seed."""

    def reset(self) -> dict[Path, Tensor]:
        """Begin an episode in each lane; return the observations, checked."""
        root = by_path(self.env, self.simulators.reset(self._seed))
        self._seed, self.has_finished = None, False
        check_tensors(self.env, root, self.env.num_envs or 1)
        return root

    def release(self) -> SimulatorHandle:
        """Return the handle of the next state."""
        self.busy = False
        simulation: Any = self  # as far as a handle uses it, a `Simulation`
        return SimulatorHandle(simulation, self.version)

    def close(self) -> None:
        """Free the simulators, once."""
        self.closed = True
        self._finalizer()


def init(env: DeviceEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`."""
    lane = torch.arange(first_lane, first_lane + (env.num_envs or 1), device=env.device)
    simulation = DeviceSimulation(env, key, first_lane)
    try:
        root = {path: value.clone() for path, value in simulation.reset().items()}
        return first_state(env, policy, key, lane, total_lanes, env_state=simulation.release(), observation=root)
    except BaseException:
        simulation.close()
        raise


def reset(env: DeviceEnv, state: CollectorState, lanes: Tensor, *, stale: bool = False) -> CollectorState:
    """Implement `funcollect.reset`, of all lanes only."""
    if not bool(lanes.all()):
        raise ValueError(f"{env} resets its lanes itself, and otherwise all at once: leave the mask out")
    simulation: Any = state.env_state.claim(stale=stale)
    root = {path: value.clone() for path, value in simulation.reset().items()}
    begun = state.episode if simulation.episode is None else torch.maximum(state.episode, simulation.episode)
    simulation.episode = begun + 1
    return state.replace(
        env_state=simulation.release(),
        observation=root,
        steps=max(simulation.steps, state.steps_made),
        **reset_counters(state, lanes, simulation.episode),
    )


def recover(env: DeviceEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.recover`, also of a superseded state."""
    return reset(env, state, all_lanes(state), stale=True)


def fork(env: DeviceEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: impossible."""
    state.env_state.check()
    raise ReplayError(f"{env} is seeded by run and gives no snapshot, so it cannot be forked: make another state")


def check_uncut(env: DeviceEnv, max_frames_per_traj: int | None) -> None:
    """Raise ValueError for a limit on trajectories, which the simulators would not notice."""
    if max_frames_per_traj is not None and max_frames_per_traj > 0:
        raise ValueError(
            f"max_frames_per_traj is {max_frames_per_traj}, but {env} resets its lanes itself: set a limit in the "
            "simulators"
        )


def run(env: DeviceEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    check_uncut(env, request.max_frames_per_traj)
    state.env_state.check()
    root = {path: fixed(value) for path, value in state.observation.items()}
    columns = new_columns(root, request)
    actor = open_actor(env, policy, state, request, as_read(env, policy, root))
    if state.env_state.simulation.has_finished and request.reset_when_done:
        raise ValueError(
            f"lanes of the state are finished, and {env} has begun other episodes in them: begin new ones with "
            "funcollect.reset(env, state)"
        )
    simulation: Any = state.env_state.claim()  # not before: bad arguments have raised, and the state is unused
    lanes = _Lanes(simulation.simulators, env, state, request, root, columns)
    with reads_together():
        with actor.running(), torch.no_grad():
            step_all(lanes, actor, request.length)
            policy_state, outputs = actor.finish()
        counters, batch = device_delivery.deliver(env, state, request, columns, outputs)
    simulation.simulators.check()
    simulation.episode, simulation.steps = counters["episode"], state.steps_made + request.length
    simulation.has_finished = not request.reset_when_done
    after = state.replace(
        env_state=simulation.release(),
        observation={path: value.clone() for path, value in root.items()},
        policy_state=policy_state,
        steps=simulation.steps,
        **counters,
    )
    return after, batch


class _Lanes:
    """The stepper of simulators over tensors."""

    def __init__(
        self,
        simulators: DeviceSimulators,
        env: DeviceEnv,
        state: CollectorState,
        request: Request,
        root: dict[Path, Tensor],
        columns: dict[Path, Tensor],
    ) -> None:
        self._simulators = simulators
        self._env, self._request, self._root, self._columns = env, request, root, columns
        self._reward, self._terminated, self._truncated = (columns[path] for path in OUTCOME_KEYS)
        self._finished = (state.terminated | state.truncated).to(env.device)

    def record(self, t: int) -> None:
        """See `Stepper`."""
        for path, value in self._root.items():
            self._columns[path][t] = value

    def step(self, t: int, action: Any) -> Tensor | None:
        """See `Stepper`; the lanes that began another episode are a mask [P].

        The simulators step on with the finished lanes, which repeat their last observation in the batch.
        """
        answer, after = self._simulators.step(as_tensor(action, self._env.device))
        if t == 0:
            check_step(self._env, answer, len(self._finished))
        observed, following = by_path(self._env, answer.observation), by_path(self._env, after)
        done: Tensor = answer.terminated | answer.truncated
        if not self._request.reset_when_done:
            kept = {path: self._columns[path][t] for path in self._root}
            observed = select(self._finished, kept, observed)
            self._finished = self._finished | done
            following = observed
        for path, value in observed.items():
            self._columns["next", *path][t] = value
            self._root[path].copy_(following[path])
        self._reward[t], self._terminated[t], self._truncated[t] = answer.reward, answer.terminated, answer.truncated
        keep_infos(self._columns, t, self._request.length, answer.info)
        return done if self._request.reset_when_done else None

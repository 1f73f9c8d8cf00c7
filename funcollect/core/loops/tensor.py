"""The loop over environments written in Torch: states are values, all lanes step at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.core.batch import OUTCOME_KEYS, new_columns, reset_counters
from funcollect.core.loops import eager
from funcollect.core.loops.eager import Stepper, TrajectoryLimit, timed
from funcollect.core.request import Request, step_limit
from funcollect.core.state import CollectorState, all_lanes, first_state
from funcollect.envs.base import checked_start, checked_transition
from funcollect.errors import EnvError
from funcollect.interop.memory import fixed
from funcollect.keys import Key, LaneKeys, Purpose
from funcollect.messages import shown
from funcollect.protocols import DeviceEnv, Policy, TorchEnv, Transition
from funcollect.specs import assemble, disassemble, torch_dtype
from funcollect.tree import NAMESPACE, Path, select

Start = tuple[Any, dict[Path, Tensor]]  # state and observation [P, ...] at the start of an episode


def init(env: TorchEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`."""
    lane = torch.arange(first_lane, first_lane + (env.num_envs or 1), device=env.device)
    env_state, observation = _begin(env, LaneKeys.of(key, Purpose.RESET, lane, torch.zeros_like(lane)), env.params)
    check_tensors(env, observation, len(lane))
    for leaf in optree.tree_leaves(env_state, namespace=NAMESPACE):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != lane.shape:
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else shown(leaf)
            raise EnvError(
                f"the env_state that reset of {env} returned holds {got}, expected tensors [{len(lane)}, ...] in nodes "
                f"that optree knows: keep constants in params, register classes with optree in {NAMESPACE!r}"
            )
    return first_state(env, policy, key, lane, total_lanes, env_state=env_state, observation=observation)


def reset(env: TorchEnv, state: CollectorState, lanes: Tensor) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]."""
    episode = state.episode + lanes
    start = _begin(env, LaneKeys.of(state.key, Purpose.RESET, state.lane, episode), state.env_params)
    env_state, observation = select(lanes, start, (state.env_state, dict(state.observation)))
    return state.replace(env_state=env_state, observation=observation, **reset_counters(state, lanes, episode))


def recover(env: TorchEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.recover`: states are values and never stale."""
    return reset(env, state, all_lanes(state))


def fork(env: TorchEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: the state itself, which is a value."""
    return state


def run(env: TorchEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    return eager.run(TensorStepper(env, policy, state, request, TensorLanes.of(state), step_limit(env, request)))


def _begin(env: TorchEnv, keys: LaneKeys, params: Any) -> Start:
    """Return state and observation of all lanes at the start of their episodes: a function of the arguments."""
    env_state, observation = checked_start(env, timed("environment", env.reset)(keys, params))
    return env_state, by_path(env, observation)


def by_path(env: TorchEnv | DeviceEnv, observation: Any) -> dict[Path, Tensor]:
    """Return the leaves of an observation by their keys in a batch; EnvError if it lacks its space's structure."""
    try:
        leaves = disassemble(env.observation_space, observation)
        return {leaf.path: value for leaf, value in zip(env.observation_leaves, leaves, strict=True)}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EnvError(
            f"the observation of {env} is {type(observation).__name__} and lacks the structure of its space "
            f"{env.observation_space} ({error!r}): correct the environment or the space"
        ) from error


def check_tensors(env: TorchEnv | DeviceEnv, root: dict[Path, Tensor], num_lanes: int) -> None:
    """Raise EnvError unless every leaf is [P, *shape] of the space's dtype."""
    for leaf in env.observation_leaves:
        shape = (num_lanes, *leaf.shape)
        _check_tensor(env, f"observation {leaf.name!r}", root[leaf.path], shape, torch_dtype(leaf.dtype))


def _check_step(env: TorchEnv | DeviceEnv, answer: Any, num_lanes: int) -> None:
    """Raise EnvError unless `step` returned reward and flags [P], the flags bool, and an observation of the space."""
    transition = checked_transition(env, answer)
    reward = transition.reward
    _check_tensor(env, "reward", reward, (num_lanes,), getattr(reward, "dtype", torch.float32))
    _check_tensor(env, "terminated", transition.terminated, (num_lanes,), torch.bool)
    _check_tensor(env, "truncated", transition.truncated, (num_lanes,), torch.bool)
    check_tensors(env, by_path(env, transition.observation), num_lanes)


def _check_tensor(env: TorchEnv | DeviceEnv, name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != (shape, dtype):
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise EnvError(f"{name} of {env} is {got}, expected {dtype} {shape}: correct reset, step or the space")


def reads_wait(device: torch.device) -> bool:
    """Whether to read a tensor of this device is to wait for all work on it, so that the loop reads none."""
    return device.type != "cpu"


def as_read(env: TorchEnv | DeviceEnv, policy: Policy, root: dict[Path, Tensor]) -> Any:
    """Return the memory that a policy reads, in the space's structure. On the CPU, JAX reads NumPy faster."""
    in_numpy = policy.backend != "torch" and env.device.type == "cpu"
    return assemble(env.observation_space, {path: row.numpy() if in_numpy else row for path, row in root.items()})


class TensorLanes(NamedTuple):
    """All lanes between two steps, everything that a loop continues from: a pytree whose tensors are [P, ...]."""

    env_state: Any
    env_params: Any
    observation: dict[Path, Tensor]
    lane: Tensor
    episode: Tensor
    step: Tensor  # only kept up to date where trajectories are limited
    finished: Tensor  # lanes that stay finished, bool
    steps: int | Tensor  # since the beginning of the run: an int, or int64 [1] on the device
    start_keys: tuple[Any, Any]  # each lane's key to the starts of its episodes
    step_keys: tuple[Any, Any]  # and to its steps

    @classmethod
    def of(cls, state: CollectorState, *, keyed: bool = True) -> TensorLanes:
        """The lanes of a state; without keys unless they are `keyed`."""
        start_keys, step_keys = (
            LaneKeys.of(state.key, purpose, state.lane, 0).keys if keyed else (None, None)
            for purpose in (Purpose.RESET, Purpose.DYNAMICS)
        )
        return cls(
            env_state=state.env_state,
            env_params=state.env_params,
            observation=dict(state.observation),
            lane=state.lane,
            episode=state.episode,
            step=state.step,
            finished=state.terminated | state.truncated,
            steps=state.steps_made,
            start_keys=start_keys,
            step_keys=step_keys,
        )


class TensorStepper(Stepper):
    """The stepper of environments whose lanes are tensors; `state` is only needed for the batch.

    Attributes:
        root: the observation by key, each [P, ...]: the same memory throughout.
    """

    def __init__(
        self, env: Any, policy: Policy, state: Any, request: Request, lanes: TensorLanes, limit: int | None = None
    ) -> None:
        super().__init__(env, policy, state, request)
        self.waits = reads_wait(env.device)
        self.root = {leaf.path: fixed(lanes.observation[leaf.path]) for leaf in env.observation_leaves}
        self.observation = as_read(env, policy, self.root)
        self.columns = new_columns(self.root, request)
        self._reward, self._terminated, self._truncated = (self.columns[path] for path in OUTCOME_KEYS)
        self._roots = [self.columns[path] for path in self.root]
        self._nexts = [self.columns["next", *path] for path in self.root]
        self._lanes, self._env_state, self._episode = lanes, lanes.env_state, lanes.episode
        self._finished = lanes.finished
        self._limit = None if limit is None else TrajectoryLimit(lanes.step, limit)

    def lanes(self) -> TensorLanes:
        """The lanes after all steps."""
        length = self.request.length
        return self._lanes._replace(
            env_state=self._env_state,
            observation=self.root,
            episode=self._episode,
            step=self._lanes.step if self._limit is None else self._limit.steps(length),
            finished=self._finished,
            steps=self._lanes.steps + length,
        )

    @override
    def begin(self) -> None:
        self._move = timed("environment", self.env.step)

    @override
    def record(self, t: int) -> None:
        for column, root in zip(self._roots, self.root.values(), strict=True):
            column[t] = root

    @override
    def step(self, t: int, action: Any) -> Tensor | None:
        """See `Stepper`; the lanes that began another episode are a mask [P]."""
        env, restarting = self.env, self.request.reset_when_done
        with torch.no_grad():
            # a copy, since an environment's state may keep it
            at_hand = isinstance(action, Tensor)
            action = action.to(env.device, copy=True) if at_hand else torch.from_numpy(np.array(action)).to(env.device)
            answer = self._answer(t, action)
            if t == 0:
                _check_step(env, answer, len(self._finished))
            truncated = answer.truncated
            if self._limit is not None:
                truncated = truncated | self._limit.reached(t)
            observed = disassemble(env.observation_space, answer.observation)
            done: Tensor = answer.terminated | truncated
            if not restarting:
                observed = select(self._finished, [column[t] for column in self._roots], observed)
            for column, value in zip(self._nexts, observed, strict=True):
                column[t] = value
            self._reward[t] = answer.reward
            self._terminated[t] = answer.terminated
            self._truncated[t] = truncated
            for name, value in answer.info.items():
                path = ("next", "info", name)
                if t == 0:
                    self.columns[path] = value.new_empty(self.request.length, *value.shape)
                self.columns[path][t] = value
            for root, value in zip(self.root.values(), self._continue(answer, observed), strict=True):
                root.copy_(value)
            if restarting:
                return self._restart(t, done)
            self._finished = self._finished | done
            return None

    def _answer(self, t: int, action: Tensor) -> Transition:
        lanes = self._lanes
        key = LaneKeys(lanes.lane, lanes.step_keys, lanes.steps + t)
        answer: Transition = self._move(key, self._env_state, action, lanes.env_params)
        return answer

    def _continue(self, answer: Transition, observed: list[Tensor]) -> Iterable[Tensor]:
        """Keep the environment's state; return the observations [P, ...] that the policy reads next."""
        restarting = self.request.reset_when_done
        before, after = self._env_state, answer.env_state
        self._env_state = after if restarting else select(self._finished, before, after)
        return observed

    def _restart(self, t: int, done: Tensor) -> Tensor | None:
        """Begin another episode in the lanes of the mask `done` [P]; return the mask, or None if it has no lane.

        Where reads wait, the mask is not read.
        """
        if not self.waits and not bool(done.any()):
            return None
        lanes = self._lanes
        self._episode = self._episode + done
        if self._limit is not None:
            self._limit.restart(t, done)
        fresh, root = _begin(self.env, LaneKeys(lanes.lane, lanes.start_keys, self._episode), lanes.env_params)
        self._env_state = select(done, fresh, self._env_state)
        for path, value in root.items():
            self.root[path].copy_(select(done, value, self.root[path]))
        return done

    @override
    def end(self, counters: dict[str, Tensor]) -> tuple[Any, dict[Path, Tensor]]:
        return self._env_state, {path: root.clone() for path, root in self.root.items()}

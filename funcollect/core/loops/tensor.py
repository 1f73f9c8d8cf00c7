"""The loop over environments written in Torch: states are values, all lanes step at once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import OUTCOME_KEYS
from funcollect.core.loops import device_delivery
from funcollect.core.loops.delivery import TrajectoryLimit, deliver, new_columns, reset_counters
from funcollect.core.loops.eager import step_all
from funcollect.core.request import Request, open_actor, step_limit
from funcollect.core.state import CollectorState, all_lanes, first_state
from funcollect.envs.base import checked_start, checked_transition
from funcollect.errors import EnvError
from funcollect.interop.memory import fixed
from funcollect.interop.reads import reads_together
from funcollect.keys import Key, LaneKeys, Purpose
from funcollect.messages import shown
from funcollect.protocols import DeviceEnv, Policy, TorchEnv
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
    fresh, root = _begin(env, LaneKeys.of(state.key, Purpose.RESET, state.lane, episode), state.env_params)
    return state.replace(
        env_state=select(lanes, fresh, state.env_state),
        observation=select(lanes, root, dict(state.observation)),
        **reset_counters(state, lanes, episode),
    )


def _begin(env: TorchEnv, keys: LaneKeys, params: Any) -> Start:
    """Return state and observation of all lanes at the start of their episodes: a function of the arguments."""
    env_state, observation = checked_start(env, env.reset(keys, params))
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


def check_step(env: TorchEnv | DeviceEnv, answer: Any, num_lanes: int) -> None:
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


def recover(env: TorchEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.recover`: states are values and never stale."""
    return reset(env, state, all_lanes(state))


def fork(env: TorchEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: the state itself, which is a value."""
    return state


def run(env: TorchEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    loop = TensorLoop(env, request, TensorLanes.of(env, state))
    actor = open_actor(env, policy, state, request, as_read(env, policy, loop.root))
    wait = reads_wait(env.device)
    with reads_together() if wait else nullcontext():
        with actor.running():
            step_all(loop, actor, request.length)
            policy_state, outputs = actor.finish()
        if wait:
            counters, batch = device_delivery.deliver(env, state, request, loop.columns, outputs)
        else:
            no_ages = torch.zeros(state.num_lanes, dtype=torch.int64)  # nothing is replayed
            counters, batch, _ = deliver(env, state, request, loop.columns, outputs, no_ages)
        after = state.replace(
            env_state=loop.env_state,
            observation={path: root.clone() for path, root in loop.root.items()},
            policy_state=policy_state,
            steps=state.steps_made + request.length,
            **counters,
        )
    return after, batch


def reads_wait(device: torch.device) -> bool:
    """Whether to read a tensor of this device is to wait for all work on it, so that the loop reads none."""
    return device.type != "cpu"


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
    def of(cls, env: TorchEnv, state: CollectorState) -> TensorLanes:
        """The lanes of a state."""
        lane = state.lane.to(env.device)
        return cls(
            env_state=state.env_state,
            env_params=state.env_params,
            observation=dict(state.observation),
            lane=lane,
            episode=state.episode.to(env.device),
            step=state.step.to(env.device),
            finished=(state.terminated | state.truncated).to(env.device),
            steps=state.steps_made,
            start_keys=LaneKeys.of(state.key, Purpose.RESET, lane, 0).keys,
            step_keys=LaneKeys.of(state.key, Purpose.DYNAMICS, lane, 0).keys,
        )


class TensorLoop:
    """The stepper of environments written in Torch.

    Attributes:
        env_state: the environment's state.
        root: the observation by key, each [P, ...]: the same memory throughout, which the policy reads.
        columns: the recorded entries, each [T, P, ...], under the batch's keys.
    """

    def __init__(self, env: TorchEnv, request: Request, lanes: TensorLanes) -> None:
        self._env = env
        self._request = request
        self._begun = lanes
        self.env_state: Any = lanes.env_state
        self.root = {path: fixed(value) for path, value in lanes.observation.items()}
        self._episode = lanes.episode
        limit = step_limit(env, request)
        self._limit = None if limit is None else TrajectoryLimit(lanes.step, limit)
        self._finished = lanes.finished
        self._reads_wait = reads_wait(env.device)
        self.columns = new_columns(self.root, request)
        self._reward, self._terminated, self._truncated = (self.columns[path] for path in OUTCOME_KEYS)
        self._roots = [self.columns[path] for path in self.root]
        self._nexts = [self.columns["next", *path] for path in self.root]

    def record(self, t: int) -> None:
        """See `Stepper`."""
        for column, root in zip(self._roots, self.root.values(), strict=True):
            column[t] = root

    def lanes(self) -> TensorLanes:
        """The lanes after all steps."""
        length = self._request.length
        return self._begun._replace(
            env_state=self.env_state,
            observation=self.root,
            episode=self._episode,
            step=self._begun.step if self._limit is None else self._limit.steps(length),
            finished=self._finished,
            steps=self._begun.steps + length,
        )

    def step(self, t: int, action: Any) -> Tensor | None:
        """See `Stepper`; the lanes that began another episode are a mask [P]."""
        action, lanes = as_tensor(action, self._env.device), self._begun
        with torch.no_grad():
            key = LaneKeys(lanes.lane, lanes.step_keys, lanes.steps + t)
            answer = self._env.step(key, self.env_state, action, lanes.env_params)
            if t == 0:
                check_step(self._env, answer, len(lanes.lane))
            terminated, truncated, env_state = answer.terminated, answer.truncated, answer.env_state
            if self._limit is not None:
                truncated = truncated | self._limit.reached(t)
            observed = disassemble(self._env.observation_space, answer.observation)
            done: Tensor = terminated | truncated
            if not self._request.reset_when_done:
                kept = [column[t] for column in self._roots]
                before = self.env_state, kept
                env_state, observed = select(self._finished, before, (env_state, observed))
                self._finished = self._finished | done
            for root, column, value in zip(self.root.values(), self._nexts, observed, strict=True):
                column[t] = value
                root.copy_(value)
            self._reward[t] = answer.reward
            self._terminated[t] = terminated
            self._truncated[t] = truncated
            keep_infos(self.columns, t, self._request.length, answer.info)
            self.env_state = env_state
            return self._restart(t, done) if self._request.reset_when_done else None

    def _restart(self, t: int, done: Tensor) -> Tensor | None:
        """Begin another episode in the lanes of the mask `done` [P]; return the mask, or None if it has no lane.

        Where reads wait, the mask is not read.
        """
        if not self._reads_wait and not bool(done.any()):
            return None
        lanes = self._begun
        self._episode = self._episode + done
        if self._limit is not None:
            self._limit.restart(t, done)
        fresh, root = _begin(self._env, LaneKeys(lanes.lane, lanes.start_keys, self._episode), lanes.env_params)
        self.env_state = select(done, fresh, self.env_state)
        for path, value in root.items():
            self.root[path].copy_(select(done, value, self.root[path]))
        return done


def as_read(env: TorchEnv | DeviceEnv, policy: Policy, root: dict[Path, Tensor]) -> Any:
    """Return the memory that a policy reads, in the space's structure. On the CPU, JAX reads NumPy faster."""
    leaves: dict[Path, Any] = root
    if policy.backend != "torch" and env.device.type == "cpu":
        leaves = {path: value.numpy() for path, value in root.items()}
    return assemble(env.observation_space, leaves)


def keep_infos(columns: dict[Path, Tensor], t: int, length: int, info: Mapping[str, Tensor]) -> None:
    """Record a step's infos, in columns that are made at the first step."""
    for name, value in info.items():
        path = ("next", "info", name)
        if t == 0:
            columns[path] = value.new_empty(length, *value.shape)
        columns[path][t] = value


def as_tensor(action: Any, device: torch.device) -> Tensor:
    """A copy of a policy's action as a tensor on `device`: an environment's state may keep it."""
    if isinstance(action, Tensor):
        return action.to(device, copy=True)
    return torch.from_numpy(np.array(action)).to(device)

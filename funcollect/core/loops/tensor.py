"""The loop over environments written in Torch: states are values, all lanes step at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.loops.delivery import RolloutColumns, count, deliver, reset_counters
from funcollect.core.request import Request, open_actor
from funcollect.core.state import CollectorState, all_lanes, first_state, policy_start
from funcollect.envs.torch_envs.torch_env import TorchEnv, TorchEnvState, TorchStep
from funcollect.errors import EnvError
from funcollect.interop.memory import aligned, fixed
from funcollect.keys import Key
from funcollect.specs import Policy, assemble, disassemble
from funcollect.tree import Path, select


def init(env: TorchEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """`funcollect.init`."""
    count = env.num_envs or 1
    policy_state = policy_start(policy, key, count, first_lane)
    lane = torch.arange(first_lane, first_lane + count, device=env.device)
    env_state = env.reset(key, lane, torch.zeros_like(lane))
    observation = root_of(env, env_state)
    check_root(env, observation, count)
    parts = {"env_state": env_state, "observation": observation, "policy_state": policy_state}
    return first_state(env, key=key, lane=lane, total_lanes=total_lanes, **parts)


def reset(env: TorchEnv, state: CollectorState, lanes: Tensor) -> CollectorState:
    """`funcollect.reset` of the lanes of a mask [P]."""
    episode = state.episode + lanes
    fresh = env.reset(state.key, state.lane, episode)
    return state.replace(
        env_state=select(lanes, fresh, state.env_state),
        observation=select(lanes, root_of(env, fresh), dict(state.observation)),
        **reset_counters(state, lanes, episode),
    )


def recover(env: TorchEnv, state: CollectorState) -> CollectorState:
    """`funcollect.recover`: states are values and never stale."""
    return reset(env, state, all_lanes(state))


def fork(env: TorchEnv, state: CollectorState) -> CollectorState:
    """`funcollect.fork`: the state itself, which is a value."""
    return state


def root_of(env: TorchEnv, env_state: TorchEnvState) -> dict[Path, Tensor]:
    """The observation of an environment's state, by key."""
    return _by_path(env, env.observe(env_state.physics))


def _by_path(env: TorchEnv, observation: Any) -> dict[Path, Tensor]:
    try:
        leaves = disassemble(env.observation_space, observation)
        return {leaf.path: value for leaf, value in zip(env.observation_leaves, leaves, strict=True)}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EnvError(
            f"the observation of {env} is {type(observation).__name__} and lacks the structure of its space "
            f"{env.observation_space} ({error!r}): correct observe or the space"
        ) from error


def check_root(env: TorchEnv, root: dict[Path, Tensor], num_lanes: int) -> None:
    """Raise EnvError unless every leaf is [P, *shape] of the space's dtype."""
    for leaf in env.observation_leaves:
        value, wanted = root[leaf.path], (num_lanes, *leaf.shape)
        dtype = torch.from_numpy(aligned((1,), leaf.dtype)).dtype
        if not isinstance(value, Tensor) or tuple(value.shape) != wanted or value.dtype != dtype:
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise EnvError(
                f"observation {leaf.name!r} of {env} is {got}, its space wants "
                f"{dtype} {wanted}: correct observe or the space"
            )


def check_step(env: TorchEnv, answer: TorchStep, num_lanes: int) -> None:
    """Raise EnvError unless what `advance` gave is [P], the flag bool, and the observation as `check_root` wants it."""
    for name, value in (("reward", answer.reward), ("terminated", answer.terminated)):
        if not isinstance(value, Tensor) or value.shape != (num_lanes,):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise EnvError(f"the {name} of {env} is {got}, expected a tensor of shape ({num_lanes},): correct advance")
    if answer.terminated.dtype != torch.bool:
        raise EnvError(f"terminated of {env} is {answer.terminated.dtype}, expected torch.bool: compare in advance")
    check_root(env, _by_path(env, answer.observation), num_lanes)


def run(env: TorchEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """`funcollect.rollout`."""
    loop = _TensorLoop(env, state, request)
    actor = open_actor(env, policy, state, request, loop.observation(policy.backend))
    with actor.running():
        for t in range(request.length):
            loop.keep_root(t)
            mask = loop.step(t, as_tensor(actor.act(t), env.device))
            if mask is not None:
                actor.restart(mask)
        policy_state, outputs = actor.finish()
    columns = loop.to_columns(outputs)
    counters = count(
        state, columns, torch.zeros(state.num_lanes, dtype=torch.int64), reset_when_done=request.reset_when_done
    )
    after = state.replace(
        env_state=loop.env_state,
        observation={path: root.clone() for path, root in loop.root.items()},
        policy_state=policy_state,
        steps=state.steps + request.length,
        **counters.after,
    )
    return after, deliver(state, columns, counters, batched=env.num_envs is not None)


class _TensorLoop:
    """Columns that fill up, and the current state of all lanes."""

    def __init__(self, env: TorchEnv, state: CollectorState, request: Request) -> None:
        self._env = env
        self._state = state
        self._request = request
        self.env_state: TorchEnvState = state.env_state
        self.root = {path: fixed(value) for path, value in state.observation.items()}
        self._episode = state.episode.to(env.device)
        self._lane = state.lane.to(env.device)
        self._step = state.step.to(env.device)
        self._frozen = (state.terminated | state.truncated).to(env.device)
        shape = (request.length, state.num_lanes)
        self._roots = {path: request.column(path, value) for path, value in self.root.items()}
        self._nexts = {path: request.column(("next", *path), value) for path, value in self.root.items()}
        self._reward = torch.empty(shape, device=env.device)
        self._terminated = torch.empty(shape, dtype=torch.bool, device=env.device)
        self._truncated = torch.empty_like(self._terminated)

    def observation(self, backend: str) -> Any:
        """What the policy reads at each step: the same memory throughout; on the CPU, JAX reads NumPy arrays faster."""
        leaves: dict[Path, Any] = self.root
        if backend != "torch" and self._env.device.type == "cpu":
            leaves = {path: value.numpy() for path, value in self.root.items()}
        return assemble(self._env.observation_space, leaves)

    def keep_root(self, t: int) -> None:
        """Record what the policy is about to read, and may write."""
        for path, root in self.root.items():
            self._roots[path][t] = root

    def step(self, t: int, action: Tensor) -> Tensor | None:
        """Step all lanes; the mask [P] of those that began another episode, or None."""
        with torch.no_grad():
            answer = self._env.step(self.env_state, action)
            if t == 0:
                check_step(self._env, answer, self._state.num_lanes)
            answer = self._limited(answer)
            observed = disassemble(self._env.observation_space, answer.observation)
            if not self._request.reset_when_done:
                answer, observed = self._thawed(t, answer, observed)
            for root, nexts, value in zip(self.root.values(), self._nexts.values(), observed, strict=True):
                nexts[t] = value
                root.copy_(value)
            self._reward[t] = answer.reward
            self._terminated[t] = answer.terminated
            self._truncated[t] = answer.truncated
            self.env_state = answer.state
            return self._restarted(answer) if self._request.reset_when_done else None

    def _limited(self, answer: TorchStep) -> TorchStep:
        limit = self._request.max_frames_per_traj
        if limit is None:
            return answer
        self._step = self._step + 1
        truncated = answer.truncated | (self._step >= limit)
        self._step = torch.where(answer.terminated | truncated, 0, self._step)
        return answer._replace(truncated=truncated)

    def _thawed(self, t: int, answer: TorchStep, observed: list[Tensor]) -> tuple[TorchStep, list[Tensor]]:
        """Finished lanes repeat what they were, without reward."""
        frozen = self._frozen
        terminated = self._terminated[t - 1] if t else self._state.terminated.to(frozen.device)
        truncated = self._truncated[t - 1] if t else self._state.truncated.to(frozen.device)
        answer = answer._replace(
            state=select(frozen, self.env_state, answer.state),
            reward=torch.where(frozen, 0.0, answer.reward),
            terminated=torch.where(frozen, terminated, answer.terminated),
            truncated=torch.where(frozen, truncated, answer.truncated),
        )
        roots = [column[t] for column in self._roots.values()]
        observed = [select(frozen, root, value) for root, value in zip(roots, observed, strict=True)]
        self._frozen = frozen | answer.terminated | answer.truncated
        return answer, observed

    def _restarted(self, answer: TorchStep) -> Tensor | None:
        done: Tensor = answer.terminated | answer.truncated
        if self._env.device.type == "cpu" and not bool(done.any()):
            return None
        self._episode = self._episode + done
        fresh = self._env.reset(self._state.key, self._lane, self._episode)
        self.env_state = select(done, fresh, self.env_state)
        for path, value in root_of(self._env, fresh).items():
            self.root[path].copy_(select(done, value, self.root[path]))
        return done

    def to_columns(self, outputs: dict[Path, Tensor]) -> RolloutColumns:
        """All columns."""
        return RolloutColumns(
            observation=self._roots,
            next_observation=self._nexts,
            outputs=outputs,
            reward=self._reward,
            terminated=self._terminated,
            truncated=self._truncated,
            info={},
        )


def as_tensor(action: Any, device: torch.device) -> Tensor:
    """A copy of a policy's action as a tensor on `device`: an environment's state may keep it."""
    if isinstance(action, Tensor):
        return action.to(device, copy=True)
    return torch.from_numpy(np.array(action)).to(device)

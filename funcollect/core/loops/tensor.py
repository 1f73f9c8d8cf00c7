"""The loop over environments written in Torch: states are values, all lanes step at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.loops.delivery import RolloutColumns, count, deliver, reset_counters
from funcollect.core.request import Request, open_actor, step_limit
from funcollect.core.state import CollectorState, all_lanes, first_state, policy_start
from funcollect.errors import EnvError
from funcollect.interop.memory import aligned, fixed
from funcollect.keys import Key, LaneKeys, Purpose
from funcollect.protocols import Policy, TorchEnv, Transition
from funcollect.specs import assemble, disassemble
from funcollect.tree import Path, select


def init(env: TorchEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """`funcollect.init`."""
    count = env.num_envs or 1
    policy_state = policy_start(policy, key, count, first_lane)
    lane = torch.arange(first_lane, first_lane + count, device=env.device)
    env_state, observation = _begin(env, key, lane, torch.zeros_like(lane), env.params)
    check_root(env, observation, count)
    return first_state(
        env,
        key=key,
        lane=lane,
        total_lanes=total_lanes,
        env_state=env_state,
        env_params=env.params,
        observation=observation,
        policy_state=policy_state,
    )


def reset(env: TorchEnv, state: CollectorState, lanes: Tensor) -> CollectorState:
    """`funcollect.reset` of the lanes of a mask [P]."""
    episode = state.episode + lanes
    fresh, root = _begin(env, state.key, state.lane, episode, state.env_params)
    return state.replace(
        env_state=select(lanes, fresh, state.env_state),
        observation=select(lanes, root, dict(state.observation)),
        **reset_counters(state, lanes, episode),
    )


def recover(env: TorchEnv, state: CollectorState) -> CollectorState:
    """`funcollect.recover`: states are values and never stale."""
    return reset(env, state, all_lanes(state))


def fork(env: TorchEnv, state: CollectorState) -> CollectorState:
    """`funcollect.fork`: the state itself, which is a value."""
    return state


def _begin(env: TorchEnv, key: Key, lane: Tensor, episode: Tensor, params: Any) -> tuple[Any, dict[Path, Tensor]]:
    """State and observation of all lanes at the start of their episodes [P], a function of key, lane and episode."""
    begun = env.reset(LaneKeys(key, Purpose.RESET, lane, episode), params)
    if not isinstance(begun, tuple) or len(begun) != 2:
        raise EnvError(
            f"reset of {env} returned {type(begun).__name__}, expected the pair (env_state, observation): return both"
        )
    return begun[0], _by_path(env, begun[1])


def _by_path(env: TorchEnv, observation: Any) -> dict[Path, Tensor]:
    try:
        leaves = disassemble(env.observation_space, observation)
        return {leaf.path: value for leaf, value in zip(env.observation_leaves, leaves, strict=True)}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EnvError(
            f"the observation of {env} is {type(observation).__name__} and lacks the structure of its space "
            f"{env.observation_space} ({error!r}): correct the environment or the space"
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
                f"{dtype} {wanted}: correct the environment or the space"
            )


def check_step(env: TorchEnv, answer: Any, num_lanes: int) -> None:
    """Raise EnvError unless `step` returned reward and flags [P], the flags bool, and a right observation."""
    if not isinstance(answer, Transition):
        raise EnvError(
            f"step of {env} returned {type(answer).__name__}, expected a Transition: return "
            "funcollect.envs.Transition(env_state, observation, reward, terminated, truncated)"
        )
    flags = {"terminated": answer.terminated, "truncated": answer.truncated}
    for name, value in {"reward": answer.reward, **flags}.items():
        if not isinstance(value, Tensor) or value.shape != (num_lanes,):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise EnvError(f"the {name} of {env} is {got}, expected a tensor of shape ({num_lanes},): correct step")
    for name, flag in flags.items():
        if flag.dtype != torch.bool:
            raise EnvError(f"{name} of {env} is {flag.dtype}, expected torch.bool: compare in step")
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
        steps=state.steps_made + request.length,
        **counters.after,
    )
    return after, deliver(state, columns, counters, batched=env.num_envs is not None)


class _TensorLoop:
    """Columns that fill up, and the current state of all lanes."""

    def __init__(self, env: TorchEnv, state: CollectorState, request: Request) -> None:
        self._env = env
        self._state = state
        self._request = request
        self.env_state: Any = state.env_state
        self.root = {path: fixed(value) for path, value in state.observation.items()}
        self._episode = state.episode.to(env.device)
        self._lane = state.lane.to(env.device)
        self._step = state.step.to(env.device)
        self._limit = step_limit(env, request)
        self._steps = state.steps_made
        self._frozen = (state.terminated | state.truncated).to(env.device)
        shape = (request.length, state.num_lanes)
        self._roots = {path: request.column(path, value) for path, value in self.root.items()}
        self._nexts = {path: request.column(("next", *path), value) for path, value in self.root.items()}
        self._reward = torch.empty(shape, device=env.device)
        self._terminated = torch.empty(shape, dtype=torch.bool, device=env.device)
        self._truncated = torch.empty_like(self._terminated)
        self._info: dict[str, Tensor] = {}

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
            key = LaneKeys(self._state.key, Purpose.DYNAMICS, self._lane, self._steps + t)
            answer = self._env.step(key, self.env_state, action, self._state.env_params)
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
            if answer.info:
                self._inform(t, answer.info)
            self.env_state = answer.env_state
            return self._restarted(answer) if self._request.reset_when_done else None

    def _inform(self, t: int, info: Mapping[str, Tensor]) -> None:
        for name, value in info.items():
            if t == 0:
                self._info[name] = value.new_empty(self._request.length, *value.shape)
            self._info[name][t] = value

    def _limited(self, answer: Transition) -> Transition:
        if self._limit is None:
            return answer
        self._step = self._step + 1
        truncated = answer.truncated | (self._step >= self._limit)
        self._step = torch.where(answer.terminated | truncated, 0, self._step)
        return answer._replace(truncated=truncated)

    def _thawed(self, t: int, answer: Transition, observed: list[Tensor]) -> tuple[Transition, list[Tensor]]:
        """Finished lanes repeat what they were, without reward."""
        frozen = self._frozen
        terminated = self._terminated[t - 1] if t else self._state.terminated.to(frozen.device)
        truncated = self._truncated[t - 1] if t else self._state.truncated.to(frozen.device)
        answer = answer._replace(
            env_state=select(frozen, self.env_state, answer.env_state),
            reward=torch.where(frozen, 0.0, answer.reward),
            terminated=torch.where(frozen, terminated, answer.terminated),
            truncated=torch.where(frozen, truncated, answer.truncated),
        )
        roots = [column[t] for column in self._roots.values()]
        observed = [select(frozen, root, value) for root, value in zip(roots, observed, strict=True)]
        self._frozen = frozen | answer.terminated | answer.truncated
        return answer, observed

    def _restarted(self, answer: Transition) -> Tensor | None:
        done: Tensor = answer.terminated | answer.truncated
        if self._env.device.type == "cpu" and not bool(done.any()):
            return None
        self._episode = self._episode + done
        state = self._state
        fresh, root = _begin(self._env, state.key, self._lane, self._episode, state.env_params)
        self.env_state = select(done, fresh, self.env_state)
        for path, value in root.items():
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
            info={(name,): column for name, column in self._info.items()},
        )


def as_tensor(action: Any, device: torch.device) -> Tensor:
    """A copy of a policy's action as a tensor on `device`: an environment's state may keep it."""
    if isinstance(action, Tensor):
        return action.to(device, copy=True)
    return torch.from_numpy(np.array(action)).to(device)

"""The loop over real simulators: one policy call per step for all lanes, rows written where they stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.deliver import Track, count, deliver
from funcollect.core.request import Request, open_actor
from funcollect.core.simulation import Simulation
from funcollect.core.state import CollectorState
from funcollect.envs.host_env import HostEnv, Outcome
from funcollect.envs.rows import Rows
from funcollect.errors import EnvError
from funcollect.policies.actor import Actor
from funcollect.specs import Policy
from funcollect.tree import Path


def run(env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """`rollout` for a host environment."""
    simulation: Simulation = state.env_state.claim()
    simulation.steps = state.steps + request.length
    rows = simulation.simulators.rows
    rows.set(state.observation)
    recording = Recording(rows, request.length, env.info_keys)
    observation = rows.torch_observation if policy.backend == "torch" else rows.observation
    actor = open_actor(env, policy, state, request, observation)
    with actor.running():
        _loop(simulation, actor, recording, state, request)
        policy_state, outputs = actor.finish()
    track = recording.track(state.observation, outputs)
    counters = count(state, track, simulation.journal.ages, reset_when_done=request.reset_when_done)
    batch = deliver(state, track, counters, batched=env.num_envs is not None)
    simulation.journal.extend(outputs[("action",)], counters.age)
    after = state.replace(
        env_state=simulation.release(),
        observation=simulation.observation(),
        policy_state=policy_state,
        steps=simulation.steps,
        **counters.after,
    )
    return after, batch


def _loop(simulation: Simulation, actor: Actor, recording: Recording, state: CollectorState, request: Request) -> None:
    act, step, record = actor.act, simulation.simulators.step, recording.record
    limit = Limit(state.step, request.max_frames_per_traj) if request.max_frames_per_traj else None
    frozen = set((state.terminated | state.truncated).nonzero()[:, 0].tolist())
    for t in range(request.length):
        outcome = step(act(t), frozen)
        if limit is not None:
            outcome = limit.apply(outcome, frozen)
        record(t, outcome)
        if True in outcome.terminated or True in outcome.truncated:
            ended = recording.end(t, outcome)
            if request.reset_when_done:
                _restart(simulation, actor, recording, t, ended)
            else:
                frozen.update(ended)


def _restart(simulation: Simulation, actor: Actor, recording: Recording, t: int, ended: list[int]) -> None:
    simulation.restart(ended)
    recording.reset(t, ended)
    actor.restart(ended)


class Limit:
    """`max_frames_per_traj`: truncates what goes on too long."""

    def __init__(self, step: Tensor, limit: int) -> None:
        self._step = step.tolist()
        self._limit = limit

    def apply(self, outcome: Outcome, frozen: set[int]) -> Outcome:
        """The outcome, with lanes truncated that reach the limit."""
        truncated = list(outcome.truncated)
        for lane, terminated in enumerate(outcome.terminated):
            if lane in frozen:
                continue
            self._step[lane] += 1
            truncated[lane] = bool(truncated[lane]) or self._step[lane] >= self._limit
            if terminated or truncated[lane]:
                self._step[lane] = 0
        return Outcome(outcome.reward, outcome.terminated, truncated, outcome.info)


class Recording:
    """What the simulators answered, written as it comes. Root observations follow from it at the end."""

    def __init__(self, rows: Rows, length: int, info_keys: Sequence[str]) -> None:
        self._rows = rows
        self._next = {path: np.empty((length, *array.shape), array.dtype) for path, array in rows.arrays.items()}
        self._pairs = [(self._next[path], array) for path, array in rows.arrays.items()]
        shape = (length, len(rows.leaves[0].array))
        self._reward = np.empty(shape, np.float32)
        self._terminated = np.zeros(shape, bool)
        self._truncated = np.zeros(shape, bool)
        self._info: dict[str, list[Any]] = {key: [] for key in info_keys}
        self._resets: list[tuple[int, list[int]]] = []
        self._roots: list[list[npt.NDArray[Any]]] = [[] for _ in self._pairs]

    def record(self, t: int, outcome: Outcome) -> None:
        """Keep step `t`: the rows as they stand now, before any reset."""
        for store, array in self._pairs:
            store[t] = array
        try:
            self._reward[t] = outcome.reward
        except (TypeError, ValueError) as error:
            raise _bad_reward(outcome.reward) from error
        if self._info:
            for values, value in zip(self._info.values(), outcome.info, strict=True):
                values.append(value)

    def end(self, t: int, outcome: Outcome) -> list[int]:
        """Keep the flags of a step at which some lane is done: which lanes are."""
        self._terminated[t] = outcome.terminated
        self._truncated[t] = outcome.truncated
        ended: list[int] = (self._terminated[t] | self._truncated[t]).nonzero()[0].tolist()
        return ended

    def reset(self, t: int, lanes: list[int]) -> None:
        """Keep the reset observations, the roots of step ``t + 1``."""
        if t + 1 < len(self._reward):
            self._resets.append((t + 1, lanes))
            for roots, (_, array) in zip(self._roots, self._pairs, strict=True):
                roots.append(array[lanes])

    def track(self, first: dict[Path, Tensor], outputs: dict[Path, Tensor]) -> Track:
        """All of it, as columns."""
        return Track(
            observation={path: torch.from_numpy(root) for path, root in self._observations(first).items()},
            next_observation={path: torch.from_numpy(rows) for path, rows in self._next.items()},
            outputs=outputs,
            reward=torch.from_numpy(self._reward),
            terminated=torch.from_numpy(self._terminated),
            truncated=torch.from_numpy(self._truncated),
            info={(key,): _info_column(key, values) for key, values in self._info.items()},
        )

    def _observations(self, first: dict[Path, Tensor]) -> dict[Path, npt.NDArray[Any]]:
        """Every root is the next observation of the row before, or what a reset gave."""
        times = [t for t, lanes in self._resets for _ in lanes]
        lanes = [lane for _, lanes in self._resets for lane in lanes]
        roots = {}
        for (path, after), reset_rows in zip(self._next.items(), self._roots, strict=True):
            root = np.empty_like(after)
            root[0] = first[path].numpy()
            root[1:] = after[:-1]
            if reset_rows:
                root[times, lanes] = np.concatenate(reset_rows)
            roots[path] = root
        return roots


def _bad_reward(rewards: Sequence[Any]) -> EnvError:
    for lane, reward in enumerate(rewards):
        if np.shape(reward) or not isinstance(reward, (int, float, np.number, np.ndarray)):
            return EnvError(f"lane {lane}: reward is {reward!r:.60}, expected a number: return a float")
    return EnvError(f"the rewards are {rewards!r:.60}, expected one number per lane")


def _info_column(key: str, values: list[Any]) -> Tensor:
    try:
        column = np.array(values)
        return torch.from_numpy(column.astype(np.float32) if column.dtype == np.float64 else column)
    except (TypeError, ValueError) as error:
        raise EnvError(
            f"the info key {key!r} holds {type(values[0][0]).__name__} of varying shape or no number ({error}): "
            "name keys that hold numbers or arrays of one shape"
        ) from error

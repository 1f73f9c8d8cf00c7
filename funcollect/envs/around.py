"""Clipped actions, clipped rewards and further `inputs`, the keywords of `make_env` for environments of any kind.

All of them depend on one step only, so an environment's state does not change. They run where the simulators live.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from funcollect.arguments import check_choice, check_flags, check_keys
from funcollect.envs.arrays import arrays_like
from funcollect.envs.base import AdaptedEnv, box, checked_start, checked_transition, observer_of
from funcollect.envs.host.host_env import NOT_RECORDED, SimulatedEnv, bad_outcome, batch_decoder
from funcollect.envs.jax_envs.jax_env import as_delivered
from funcollect.errors import EnvError
from funcollect.interop.memory import aligned
from funcollect.protocols import Env, Outcome, PacedSimulators, Transition
from funcollect.specs import GroupedSpec, Leaf, Space, TurnSpec, observation_leaves
from funcollect.tree import Path

INPUTS = PREVIOUS_ACTION, PREVIOUS_REWARD, FIRST = "prev_action", "prev_reward", "is_first"
OWN_REWARD = "reward"  # the info with the rewards before they are clipped
KEYWORDS = ("clip_actions", "clip_rewards", "inputs")
_FLAG = np.dtype(bool)
# Optional members of simulators, which are passed through.
_OPTIONAL = ("apply", "camera", "snapshot", "restore", "snapshot_data", "snapshot_from", "takes_options")
_PACE = ("least_ready", "most_ahead")  # of simulators that are paced


def around(env: Any, *, clip_actions: bool = False, clip_rewards: bool = False, inputs: Sequence[str] = ()) -> Env:
    """A changed copy of the environment; `make_env` documents the keywords."""
    _check(env, clip_actions, clip_rewards, inputs)
    between = _Between(env, clip_actions, clip_rewards, tuple(inputs))
    if env.backend == "host":
        members = _host_members(between)
    elif env.backend == "device":
        members = {"opener": partial(_AroundTensors, between)}
    else:
        members = {"reset": between.around_reset(env.reset), "step": between.around_step(env.step)}
        if (observe := observer_of(env)) is not None:
            members["observation_of"] = lambda env_state, params: between.begun(observe(env_state, params))
        if not isinstance(env, AdaptedEnv):
            members = {name: staticmethod(function) for name, function in members.items()}
    members |= between.observed() | {"between": between}
    if isinstance(env, AdaptedEnv):
        return replace(env, **members)  # type: ignore[return-value]
    changed: Any = copy.copy(env)
    for name in members:
        vars(changed).pop(name, None)
    changed.__class__ = type(type(env).__name__, (type(env),), members)  # whose properties would win over attributes
    return cast(Env, changed)


def _check(env: Any, clip_actions: bool, clip_rewards: bool, inputs: Sequence[str]) -> None:
    """Raise TypeError or ValueError for changes that this environment does not allow."""
    check_flags(clip_actions=clip_actions, clip_rewards=clip_rewards)
    check_keys("inputs", inputs, FIRST)
    for name in inputs:
        check_choice("inputs", name, INPUTS)
    action = env.action_space
    if clip_actions and not (isinstance(action, spaces.Box) and np.dtype(action.dtype).kind == "f"):
        what = f"clip_actions=True was given for {env}, whose action space is {action}"
        raise ValueError(f"{what}, expected a Box of floating numbers: leave it out")
    grouped, in_turns = (isinstance(env.action_spec, kind) for kind in (GroupedSpec, TurnSpec))
    if (inputs and grouped) or (PREVIOUS_REWARD in inputs and in_turns):
        what = f"inputs are {list(inputs)} for {env}, which has {'actions and ' * grouped}rewards of several agents"
        raise ValueError(f"{what}, expected those of one: leave them out")
    if clip_rewards and isinstance(env.action_spec, GroupedSpec | TurnSpec):
        what = f"clip_rewards=True was given for {env}, which has rewards of several agents"
        raise ValueError(f"{what}, expected those of one: leave it out, and take the signs of a batch's")
    if any((inputs and inside.clips_actions) or (clip_rewards and inside.inputs) for inside in _changes(env)):
        what = f"{env} was made with some of {', '.join(KEYWORDS)}, and others were given for it"
        raise ValueError(f"{what}, expected one call, as inputs are clipped, too: pass all of them together")
    if clip_rewards and any(inside.clips_rewards for inside in _changes(env)):
        raise ValueError(f"clip_rewards=True was given for {env}, which was made with it: leave it out")
    if clip_rewards and OWN_REWARD in getattr(env, "info_keys", ()):
        raise ValueError(f"info_keys has {OWN_REWARD!r}, under which clip_rewards=True records rewards: leave it out")


def _changes(env: Any) -> list[_Between]:
    """The changes that an environment was made with, the last one first."""
    between = getattr(env, "between", None)
    return [] if between is None else [between, *_changes(between.env)]


def _with_zero(action: Any) -> Space:
    """The space of previous actions, of which the first of an episode is 0."""
    dtype = np.dtype(action.dtype)
    if isinstance(action, spaces.Box):
        return box(action.shape, dtype, np.minimum(action.low, 0), np.maximum(action.high, 0))
    start = getattr(action, "start", 0)
    stop = start + getattr(action, "nvec", getattr(action, "n", 0))
    low, high = np.minimum(start, 0), np.maximum(stop, 1)
    if isinstance(action, spaces.Discrete):
        return spaces.Discrete(int(high - low), start=int(low), dtype=dtype.type)
    if isinstance(action, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(high - low, dtype=dtype.type, start=low)
    return cast(Space, action)


@dataclass(frozen=True)
class _Between:
    """The changes to a step of the environment `env`: in NumPy, in Torch, or in JAX for one lane."""

    env: Any
    clips_actions: bool
    clips_rewards: bool
    inputs: tuple[str, ...]

    @cached_property
    def space(self) -> spaces.Dict:
        """The spaces of the `inputs` by name, in their order."""
        first, reward, flag = _with_zero(self.env.action_space), box((1,), np.float32), box((1,), bool)
        known = {PREVIOUS_ACTION: first, PREVIOUS_REWARD: reward, FIRST: flag}
        parts = {name: as_delivered(known[name]) if self.env.backend == "jax" else known[name] for name in self.inputs}
        return spaces.Dict(OrderedDict(parts))

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the `inputs`, in their order."""
        return observation_leaves(self.space) if self.inputs else ()

    def observed(self) -> dict[str, Any]:
        """The attributes that describe an observation with the inputs; empty without inputs."""
        if not self.inputs:
            return {}
        space = self.env.observation_space
        children = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        if taken := sorted(children.keys() & {*self.inputs}):
            raise ValueError(f"inputs are {list(self.inputs)}, and {self.env} observes {taken} itself: leave them out")
        wider = spaces.Dict(OrderedDict(children | self.space.spaces))
        kept = {leaf.path: leaf for leaf in self.env.observation_leaves}  # whose dtypes may differ from the space's
        leaves = tuple(kept.get(leaf.path, leaf) for leaf in observation_leaves(wider))
        return {"observation_space": wider, "observation_leaves": leaves}

    def bare(self, env: Any) -> Any:
        """The environment without the changes, but with the lanes of `env`: some of them, in a worker."""
        kept = {name: getattr(self.env, name) for name in ("observation_space", "observation_leaves", "info_keys")}
        if isinstance(env, AdaptedEnv):
            return replace(env, **kept)
        bare = copy.copy(env)
        bare.__class__ = type(self.env)
        vars(bare).update({name: value for name, value in kept.items() if name in vars(self.env)})
        return bare

    def action(self, action: Any) -> Any:
        """The action as the environment gets it."""
        if not self.clips_actions:
            return action
        low, high = self.env.action_space.low, self.env.action_space.high
        if isinstance(action, Tensor):
            low, high = (torch.as_tensor(bound, device=action.device) for bound in (low, high))
            return action.clamp(low, high)  # in float64 if the space is: rounded bounds may lie outside
        return action.clip(low, high)

    def around_reset(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def observed(key: Any, params: Any) -> tuple[Any, Any]:
            env_state, observation = checked_start(self.env, reset(key, params))
            return env_state, self.begun(observation)

        vars(observed)["__wrapped__"] = reset  # for `inspect.unwrap`
        return observed

    def around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def observed(key: Any, env_state: Any, action: Any, params: Any) -> Transition:
            action = self.action(action)
            return self.moved(checked_transition(self.env, step(key, env_state, action, params)), action)

        vars(observed)["__wrapped__"] = step
        return observed

    def begun(self, observation: Any) -> Any:
        """The first observation of an episode, with the inputs."""
        if not self.inputs:
            return observation
        xp = arrays_like(self.env.backend, observation)
        inputs = {leaf.name: xp.zeros((*xp.lanes, *leaf.shape), leaf.dtype) for leaf in self.leaves}
        return self._joined(observation, inputs | ({FIRST: ~inputs[FIRST]} if FIRST in inputs else {}))

    def first(self, root: dict[Path, Any]) -> dict[Path, Any]:
        """Observations by path, each [P, ...], with the inputs of the first step of an episode."""
        for leaf in self.leaves:
            value = root[leaf.path]
            xp: Any = torch if isinstance(value, Tensor) else value.__array_namespace__()
            root[leaf.path] = (xp.ones_like if leaf.name == FIRST else xp.zeros_like)(value)
        return root

    def moved(self, transition: Transition, action: Any) -> Transition:
        """The changed transition; `action` is the one that the environment got."""
        if not (self.inputs or self.clips_rewards):
            return transition
        xp = arrays_like(self.env.backend, transition.observation)
        reward = xp.cast(transition.reward, np.dtype(np.float32))
        if reward.ndim > len(xp.lanes):
            what = f"{self.env} has the rewards of several players, {list(reward.shape)}"
            raise EnvError(f"{what}, expected one for `inputs` and `clip_rewards`: leave both out")
        if self.clips_rewards:
            if OWN_REWARD in transition.info:
                what = f"{self.env} has an info {OWN_REWARD!r}, under which clip_rewards=True records rewards"
                raise EnvError(f"{what}, expected none: rename it there, or leave clip_rewards out")
            infos, reward = {**transition.info, OWN_REWARD: reward}, xp.module.sign(reward)
            transition = transition._replace(info=infos, reward=reward)
        values = {PREVIOUS_ACTION: action, PREVIOUS_REWARD: reward[..., None], FIRST: xp.zeros((*xp.lanes, 1), _FLAG)}
        inputs = {leaf.name: xp.cast(values[leaf.name], leaf.dtype) for leaf in self.leaves}
        return transition._replace(observation=self._joined(transition.observation, inputs))

    def _joined(self, observation: Any, inputs: Mapping[str, Any]) -> Any:
        """The environment's observation and the inputs by name, as one dict."""
        if not inputs:
            return observation
        is_dict = isinstance(self.env.observation_space, spaces.Dict)
        return {**(observation if is_dict else {"observation": observation}), **inputs}


class _AroundTensors:
    def __init__(self, between: _Between, _: Any = None) -> None:
        self._between, self._inner = between, between.env.open()
        self.check, self.close = self._inner.check, self._inner.close

    def restart(self, lanes: Tensor) -> Any:
        return self._between.begun(self._inner.restart(lanes))

    def reset(self, seed: int | None) -> Any:
        return self._between.begun(self._inner.reset(seed))

    def step(self, action: Tensor) -> tuple[Transition, Any]:
        between, action = self._between, self._between.action(action)
        moved, after = self._inner.step(action)
        last, begun = between.moved(moved, action), between.begun(after)
        for name in between.inputs:  # in lanes whose episodes go on, they are those after the step
            done = (last.terminated | last.truncated).view(-1, *[1] * (begun[name].ndim - 1))
            begun[name] = torch.where(done, begun[name], last.observation[name])
        return last, begun


def _host_members(between: _Between) -> dict[str, Any]:
    """The members of a changed environment over simulators on the host, which open changed ones."""
    env = between.env
    members: dict[str, Any] = {"info_keys": (*env.info_keys, OWN_REWARD)} if between.clips_rewards else {}
    if not isinstance(env, SimulatedEnv):
        if between.inputs and env.forking == "snapshot":
            mend = "take previous actions and rewards into its own observation"
            raise TypeError(f"inputs were given for {env}, whose snapshots would lack what is observed: {mend}")
        kind = type(env)
        return members | {"open": lambda self: _AroundLanes(between, kind.open, self)}
    if env.open_group is None:
        return members | {"opener": partial(_AroundLanes, between, env.opener)}
    open_group = env.open_group
    return members | {"open_group": lambda *lanes: partial(_AroundLanes, between, open_group(*lanes))}


class _AroundLanes:
    """Changed simulators on the host; for lanes in processes, each worker has its own."""

    def __init__(self, between: _Between, opener: Callable[[Any], Any], env: Any) -> None:
        """Open the inner simulators. `env` is the changed environment; in a worker it has some of the lanes only."""
        inner, num_envs, memory = opener(between.bare(env)), env.num_envs or 1, getattr(env, "memory", None)
        self._between, self._inner, self._num_envs = between, inner, num_envs
        self.close = inner.close
        if isinstance(inner, PacedSimulators):
            self.send_some = lambda lanes, action: self._send(inner.send_some, lanes, action)
            self.receive_some = lambda least: self._received(*inner.receive_some(least))
        for name in (member for member in (*_OPTIONAL, *_PACE) if hasattr(inner, member)):
            setattr(self, name, getattr(inner, name))
        self._decode = batch_decoder(between.env.action_spec)
        self._inputs = {
            leaf.name: aligned((num_envs, *leaf.shape), leaf.dtype) if memory is None else memory[leaf.path]
            for leaf in between.leaves
        }
        self._sent = np.zeros_like(self._inputs.get(PREVIOUS_ACTION, ()))  # [P, ...]: the last action of each lane
        self.observation: dict[Path, Any] = {**inner.observation, **{(k,): rows for k, rows in self._inputs.items()}}
        if self._inputs and hasattr(inner, "snapshot"):
            self.snapshot, self.restore = self._snapshot, self._restore
            self.snapshot_data = lambda lanes: self._converted(inner.snapshot_data, lanes)
            self.snapshot_from = lambda lanes: self._converted(inner.snapshot_from, lanes)

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], *options: Any) -> None:
        self._inner.reset(lanes, seeds, *options)
        for name, rows in self._inputs.items():
            rows[lanes] = name == FIRST

    @property
    def busy(self) -> Any:
        """As in `PacedSimulators`."""
        return self._inner.busy

    def send(self, lanes: Sequence[int], action: Any) -> None:
        self._send(self._inner.send, lanes, action)

    def receive(self) -> tuple[Sequence[int], Outcome]:
        return self._received(*self._inner.receive())

    def _send(self, send: Callable[[Sequence[int], Any], None], lanes: Sequence[int], action: Any) -> None:
        if len(lanes):
            action = self._between.action(action)
            if PREVIOUS_ACTION in self._inputs:
                self._sent[self._rows(lanes)] = self._decode(action)
        send(lanes, action)

    def _received(self, lanes: Sequence[int], outcome: Outcome) -> tuple[Sequence[int], Outcome]:
        """The changed outcome of these lanes; the one of no lanes is not recorded."""
        if not len(lanes):
            return lanes, outcome
        rows, (reward, terminated, truncated, infos) = self._rows(lanes), outcome
        try:
            if self._between.clips_rewards:
                clipped = np.sign(np.asarray(reward, np.float64)).tolist()
                reward, outcome = clipped, (clipped, terminated, truncated, [*infos, reward])
            if PREVIOUS_REWARD in self._inputs:
                self._inputs[PREVIOUS_REWARD][rows, 0] = reward
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, lanes) from error
        if PREVIOUS_ACTION in self._inputs:
            self._inputs[PREVIOUS_ACTION][rows] = self._sent[rows]
        if FIRST in self._inputs:
            self._inputs[FIRST][rows] = False
        return lanes, outcome

    def _rows(self, lanes: Sequence[int]) -> Any:
        """Their index: a slice for all in a row, by which NumPy copies faster than by a list."""
        return slice(None) if lanes.__class__ is range and len(lanes) == self._num_envs else lanes

    def _snapshot(self) -> list[Any]:
        """For each lane, the snapshot of the inner simulators and a copy of the inputs' rows."""
        rows = ([column[lane].copy() for column in self._inputs.values()] for lane in itertools.count())
        return [*zip(self._inner.snapshot(), rows)]  # noqa: B905  (the rows have no end)

    def _restore(self, lanes: Sequence[Any]) -> None:
        self._inner.restore([inner for inner, _ in lanes])
        for lane, (_, values) in enumerate(lanes):
            for rows, value in zip(self._inputs.values(), values, strict=True):
                rows[lane] = value

    def _converted(self, convert: Callable[[list[Any]], list[Any]], lanes: Sequence[Any]) -> list[Any]:
        """The same with the inner snapshots converted, to plain data or from it."""
        return [*zip(convert([inner for inner, _ in lanes]), (rows for _, rows in lanes), strict=True)]

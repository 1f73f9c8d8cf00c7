"""Simulators that hold all lanes as tensors on one device, behind Gymnasium's vector interface."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import optree
import torch
from gymnasium.wrappers import OrderEnforcing
from torch import Tensor

from funcollect.arguments import check_choice, check_keys, checked_device
from funcollect.envs import base
from funcollect.envs.base import FINAL, AdaptedEnv, first_then_new, info_names, info_place, leaves_of
from funcollect.envs.plain_spaces import batch_structure, plain_actions, to_gymnasium
from funcollect.errors import EnvError, InUseError
from funcollect.messages import shown
from funcollect.protocols import DeviceSimulators, Transition
from funcollect.specs import ActionSpec, Space, assemble, observation_leaves, torch_dtype
from funcollect.tree import Path

_RESETS = ("reset_mask", "env_ids", "env_idx")
_NEEDED = ("num_envs", "single_observation_space", "single_action_space")


def from_torch_vector_env(
    env: Any,
    *,
    info_keys: Sequence[str] = (),
    one_hot: bool = False,
    device: torch.device | str | None = None,
    autoreset_mode: str | None = None,
    partial_reset: str | None = None,
) -> DeviceVectorEnv:
    """An environment over simulators that hold all lanes as tensors, such as Isaac Lab's, ManiSkill's and mjlab's.

    They have Gymnasium's vector interface over tensors: `num_envs`, `single_observation_space`, `single_action_space`,
    ``reset(seed=)`` and ``step(action)``. Tensors stay on their device. Actions of Tuple and Dict spaces are joined, as
    in `from_gymnasium`. The simulators get one seed, at the beginning. States can be used once, and neither forked nor
    saved in mid-episode.

    Args:
        env: the environment, or a function that builds one. What is built already can serve one state: evaluations, and
            collectors that are restored from a file, want a function.
        info_keys: infos to record, tensors [P, ...]; the rows of lanes that ended come from ``"final_info"`` if there
            is one.
        one_hot: discrete actions as one-hot int64 rows, TorchRL's encoding, instead of integers.
        device: where the tensors are; by default the environment's own attribute `device`.
        autoreset_mode: how the simulators begin an episode after an end, if they do not say so. ``"SAME_STEP"``, the
            default: in the step of the end, whose infos hold the last observations [P, ...] as ``"final_obs"`` or
            ``"final_observation"``; rows of lanes that ended are read, and nothing waits for the device. mjlab's
            ``"terminal"``, of these lanes alone, is read as well.
            ``"DISABLED"``: the library does, by a partial reset. ``"NEXT_STEP"``: in the next step, but before that the
            library does it by a partial reset, without which this mode is refused.
        partial_reset: how some lanes are reset, for these modes, limits and masks. ``"env_ids"``, the default if
            `reset` takes it: ``reset(env_ids=…)``, int64 indices. ``"env_idx"``, the default for ManiSkill's: the same
            by ``reset(options={"env_idx": …})``. ``"reset_mask"``, the default for ``"DISABLED"``: a mask bool [P] by
            ``reset(options={"reset_mask": …})``. Of a mask on an accelerator nothing is read, so it may be empty there;
            for indices, each step waits for the device.

    Raises TypeError or ValueError for an environment without these members, or that resets its lanes in another way.

    >>> import torch, funcollect as fc
    >>> from gymnasium import spaces
    >>> class Walks:
    ...     num_envs, device = 3, torch.device("cpu")
    ...     single_observation_space, single_action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)
    ...     def reset(self, seed=None):
    ...         self.place = torch.zeros(3, 1)
    ...         return self.place, {}
    ...     def step(self, action):
    ...         final = self.place + 2 * action[:, None] - 1
    ...         over = final[:, 0].abs() > 5
    ...         self.place = torch.where(over[:, None], 0.0, final)
    ...         return self.place, 1.0 - over.float(), over, over & False, {"final_obs": final}
    >>> env = fc.envs.from_torch_vector_env(Walks)
    >>> policy = fc.random_policy(env)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 40)
    >>> batch["next", "observation"][batch["next", "terminated"]].abs().unique()
    tensor([6.])
    """
    check_keys("info_keys", info_keys, "success")
    given = hasattr(env, "step") and not isinstance(env, type)
    if not given and not callable(env):
        raise TypeError(f"env is {type(env).__name__}, expected a vector environment, or a function: pass one")
    made = env if given else env()
    label, unused = type(made).__name__, [made]  # until a state uses it
    with contextlib.ExitStack() as on_failure:
        if not given:
            on_failure.callback(_close_unused, unused)
        lanes, space, action_space = found = [_member(made, name) for name in _NEEDED]
        if missing := [name for name, member in zip(_NEEDED, found, strict=True) if member is None]:
            raise TypeError(f"{label} lacks {missing}, expected Gymnasium's vector interface: wrap it so")
        mode, partial_reset = _resets_of(made, label, autoreset_mode, partial_reset)
        own = (to_gymnasium(each) if base.is_of("mjlab", each) else each for each in (space, action_space))
        space, action_space = own
        place = checked_device(device if device is not None else _member(made, "device"))
        if place is None:
            raise TypeError(f"{label} has no device, expected where its tensors are: pass device=, or set it there")
        adapted = DeviceVectorEnv(
            label=label,
            num_envs=lanes,
            observation_space=space,
            action_spec=ActionSpec(plain_actions(action_space), one_hot),
            own_actions=action_space,
            observation_leaves=observation_leaves(space),
            info_keys=tuple(info_keys),
            device=place,
            same_step=mode == "SAME_STEP",
            partial_reset=partial_reset,
            build=partial(first_then_new, unused, _only_once if given else env),
            truncates=True,  # by the simulators' own limit, since no wrapper can set one
        )
        on_failure.pop_all()
    if not given:
        weakref.finalize(adapted, _close_unused, unused)
    return adapted


def _resets_of(env: Any, label: str, mode: str | None, way: str | None) -> tuple[str, str | None]:
    """The autoreset mode, and the way to reset some lanes, None if there is none; ValueError for wrong arguments.

    ManiSkill declares SAME_STEP even if it resets nothing; mjlab declares the mode in its configuration only.
    """
    mode = getattr(mode, "name", mode)  # Gymnasium's enum has these names
    if way is not None:
        check_choice("partial_reset", way, _RESETS)
    resets = _member(env, "auto_reset")
    resets = getattr(_member(env, "cfg"), "auto_reset", None) if resets is None else resets
    declared = base.autoreset_mode(env) if resets is None else "SAME_STEP" if resets else "DISABLED"
    if mode is not None and declared not in (None, mode):
        what = f"autoreset_mode is {shown(mode)}, and {label} declares {declared}"
        raise ValueError(f"{what}: leave it out, or build that so")
    mode = declared or "SAME_STEP" if mode is None else mode
    check_choice("autoreset_mode", mode, base.AUTORESET_MODES)
    takes_ids = False
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        takes_ids = "env_ids" in inspect.signature(getattr(_behind(env), "reset", None)).parameters  # type: ignore[arg-type]
    if way == "env_ids" and not takes_ids:
        raise ValueError(f"partial_reset is 'env_ids', which reset of {label} does not take: pass another way of it")
    if way is None:
        of_maniskill = base.is_of("mani_skill", getattr(env, "unwrapped", env))
        way = "env_ids" if takes_ids else "env_idx" if of_maniskill else None
    if mode == "NEXT_STEP" and way is None:
        what = f"{label} resets lanes by NEXT_STEP, in a step of all others, expected SAME_STEP, DISABLED, or a way to"
        mend = f"build it so, or pass partial_reset=, one of {_RESETS}, that its reset takes"
        raise ValueError(f"{what} reset some lanes before: {mend}")
    return mode, way or ("reset_mask" if mode == "DISABLED" else None)


def _behind(env: Any) -> Any:
    """The environment under wrappers whose `reset` only passes its arguments on."""
    while isinstance(env, gymnasium.Wrapper) and type(env).reset in (gymnasium.Wrapper.reset, OrderEnforcing.reset):
        env = env.env
    return env


def _close_unused(unused: list[Any]) -> None:
    """Close the simulators that were made to read their spaces, unless a state has taken them from the list."""
    while unused:
        _close(unused.pop())


def _close(simulators: Any) -> None:
    if hasattr(simulators, "close"):
        simulators.close()


def _only_once() -> Any:
    raise InUseError("the vector environment is in use by another state: pass a function that builds one instead")


def _member(env: Any, name: str) -> Any:
    """An attribute of the environment or, if that is None or missing, of the unwrapped one; else None."""
    value = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", env), name, None) if value is None else value


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class DeviceVectorEnv(AdaptedEnv):
    """The environment that `from_torch_vector_env` returns."""

    info_keys: tuple[str, ...]
    own_actions: Space  # the simulators' action space, before `plain_spaces` changed it
    device: torch.device
    same_step: bool  # whether the simulators begin an episode in the step in which another ends
    partial_reset: str | None  # see `from_torch_vector_env`; None if only all lanes can be reset
    build: Callable[[], Any]
    backend: Literal["device"] = "device"
    seeding: Literal["run"] = "run"
    forking: Literal["none"] = "none"
    opener: Callable[[Any], DeviceSimulators] | None = None  # makes changed simulators (`funcollect.envs.around`)

    @property
    def resets_lanes(self) -> bool:
        """Whether some lanes can be reset."""
        return self.partial_reset is not None

    def open(self) -> DeviceSimulators:
        """Make live simulators, without a reset."""
        return (self.opener or VectorSimulators)(self)


class VectorSimulators:
    """The simulators of one state."""

    def __init__(self, env: DeviceVectorEnv) -> None:
        self._env = env
        self._simulators = env.build()
        self._lanes = env.num_envs or 1
        spec, space = env.action_spec, env.own_actions
        decode: Callable[[Any], Any] | None = partial(spec.from_one_hot, numpy=torch) if spec.one_hot else None
        if space is not spec.space:
            cast = lambda part, dtype: part.to(torch_dtype(np.dtype(dtype)))  # noqa: E731
            decode = batch_structure(space, decode or (lambda action: action), cast)
        self._decode = decode  # None if the simulators take the actions as they are
        self._kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}  # of the infos that have come so far
        # Whether an episode ended without its last observation, and whether one began too early; tensors, so that the
        # host need not wait.
        self.lacking = self.untimely = torch.zeros((), dtype=torch.bool, device=env.device)
        self._latest: dict[Path, Tensor] = {}  # the observations [P, ...] for the next step

    def reset(self, seed: int | None) -> Any:
        """Begin an episode in each lane; return the observations [P, ...]."""
        self.lacking = self.untimely = torch.zeros_like(self.lacking)
        self._latest = self._begun(self._simulators.reset(seed=seed))
        return assemble(self._env.observation_space, self._latest)

    def restart(self, lanes: Tensor) -> Any:
        """Begin an episode in the lanes of a mask bool [P]; return the current observations [P, ...] of all lanes."""
        way, simulators = self._env.partial_reset, self._simulators
        chosen = lanes if way == "reset_mask" else lanes.nonzero()[:, 0]
        if not len(chosen) or (chosen is lanes and lanes.is_cpu and not bool(lanes.any())):
            return assemble(self._env.observation_space, self._latest)  # Gymnasium's take no empty mask
        if way == "env_ids":
            answer = _behind(simulators).reset(env_ids=chosen)
        else:
            answer = simulators.reset(options={way: chosen})
        fresh = self._begun(answer)
        self._latest = {path: _chosen(lanes, fresh[path], value) for path, value in self._latest.items()}
        return assemble(self._env.observation_space, self._latest)

    def _begun(self, answer: Any) -> dict[Path, Tensor]:
        """The checked leaves of the observation that a reset returned."""
        return self._observed("observation", self._parts("reset", answer, "observation, info")[0])

    def step(self, action: Tensor) -> tuple[Transition, Any]:
        """Step all lanes; return the transition, and the observations for the next step."""
        space = self._env.observation_space
        answer = self._simulators.step(action if self._decode is None else self._decode(action))
        names = "observation, reward, terminated, truncated, info"
        observation, reward, terminated, truncated, info = self._parts("step", answer, names)
        info = self._mapping("info", info)
        self._check("reward", reward, (self._lanes,))
        for name, flags in (("terminated", terminated), ("truncated", truncated)):
            self._check(name, flags, (self._lanes,), torch.bool)
        done = terminated | truncated
        self._latest = last = self._observed("observation", observation)
        final = self._final(done, info)
        if self._env.same_step and final is not None:
            last = {path: _chosen(done, final[path], value) for path, value in last.items()}
        elif final is not None:
            for path, value in last.items():
                equal = torch.isclose(final[path], value, rtol=0, atol=0, equal_nan=True)
                changed = ~equal.reshape(self._lanes, -1).all(-1)
                self.untimely = self.untimely | (done & changed).any()
        moved = Transition(None, assemble(space, last), reward, terminated, truncated, self._infos(done, info))
        if self._env.same_step:
            return moved, assemble(space, self._latest)
        kept: Any = optree.tree_map(torch.clone, moved)  # type: ignore[arg-type]  # a reset may write into its tensors
        self._latest = self._observed("observation", kept.observation)
        return kept, self.restart(done)

    def _final(self, done: Tensor, info: Mapping[str, Any]) -> dict[Path, Tensor] | None:
        """The last observations [P, ...] in the infos, valid in the lanes `done`; None if there are none."""
        if (key := next((key for key in FINAL if key in info), None)) is None:
            if isinstance(ended := info.get("terminal"), Mapping) and "env_ids" in ended:
                return self._final_of_mjlab(done, ended)
            self.lacking = self.lacking | done.any()
            return None
        if isinstance(reported := info.get(f"_{key}"), Tensor):  # Gymnasium's mask of lanes
            self.lacking = self.lacking | (done & ~reported).any()
        return self._observed("final observation", info[key])

    def _final_of_mjlab(self, done: Tensor, ended: Mapping[str, Any]) -> dict[Path, Tensor]:
        """What `_final` returns, from the rows of lanes that ended alone."""
        lanes = ended["env_ids"]
        self.lacking = self.lacking | (done & ~torch.zeros_like(done).index_fill(0, lanes, True)).any()
        rows = self._observed("final observation", ended["observations"], len(lanes))
        return {path: self._latest[path].index_copy(0, lanes, row) for path, row in rows.items()}

    def _parts(self, call: str, answer: Any, names: str) -> Any:
        """Check that a call returned a tuple of as many values as there are `names`, and return it; else EnvError."""
        if not isinstance(answer, tuple) or len(answer) != names.count(",") + 1:
            raise EnvError(f"{call} of {self._env} returned {shown(answer)}, expected ({names}): return these")
        return answer

    def _observed(self, name: str, observation: Any, lanes: int | None = None) -> dict[Path, Tensor]:
        """The checked leaves of an observation, of all lanes or of that many; floating ones are cast to float32."""
        count = self._lanes if lanes is None else lanes
        leaves = {}
        for leaf, value in leaves_of(self._env, observation, f"the {name} of {self._env}"):
            tensor = value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
            self._check(f"{name} {leaf.name!r}", tensor, (count, *leaf.shape), torch_dtype(leaf.dtype))
            leaves[leaf.path] = tensor
        return leaves

    def _infos(self, done: Tensor, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """The infos to record, from before the resets of lanes; EnvError if one's shape or dtype changes."""
        if not self._env.info_keys:
            return {}
        final = self._mapping("final_info", info.get("final_info"))
        places = {name: [info_place(infos, name) for infos in (final, info)] for name in self._env.info_keys}
        if missing := [name for name, pairs in places.items() if not any(key in holder for holder, key in pairs)]:
            what = f"the infos of {self._env} are {info_names(info)}"
            raise EnvError(f"{what}, expected {missing} among them: correct info_keys")
        infos = {}
        for name, pairs in places.items():
            values = [holder[key] for holder, key in pairs if key in holder]  # the final one, the current one, or both
            for value in values:
                shape, dtype = self._kinds.get(name, ((self._lanes, *getattr(value, "shape", ())[1:]), None))
                self._check(f"info {name!r}", value, shape, dtype)
                self._kinds[name] = value.shape, value.dtype
            infos[name] = _chosen(done, *values) if len(values) == 2 else values[0]
        return infos

    def _mapping(self, name: str, value: Any) -> Mapping[str, Any]:
        """The dict, or an empty one for None; EnvError for anything else."""
        if value is not None and not isinstance(value, Mapping):
            raise EnvError(f"the {name} of {self._env} is {type(value).__name__}, expected a dict: return that")
        return value or {}

    def _check(self, name: str, value: Any, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
        if not isinstance(value, Tensor) or value.shape != tuple(shape) or value.dtype != (dtype or value.dtype):
            got = f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
            kind = "" if isinstance(value, Tensor) else f" of {type(value).__module__.partition('.')[0]}"
            wanted = f"a tensor {dtype or ''}".rstrip()
            raise EnvError(f"{name} of {self._env} is {got}{kind}, expected {wanted} {list(shape)}: return that")

    def check(self) -> None:
        """Raise EnvError if an episode's last observation is lost; this waits for the device."""
        if self._env.same_step and bool(self.lacking):
            raise EnvError(
                f"{self._env} resets its lanes and does not report the last observations of their episodes, expected "
                f"them in the infos as {FINAL[0]!r}, since the value of a truncated state depends on them: let it add "
                "them (in its configuration, Isaac Lab: compute_final_obs=True, mjlab, in versions that have it: "
                "capture_terminal_observations=True), or reset nothing (mjlab and ManiSkill: auto_reset=False, others: "
                "autoreset_mode='DISABLED', if it takes a partial reset)"
            )
        if bool(self.untimely):
            what = f"{self._env} begins other episodes in the step of an end, as its infos show"
            raise EnvError(f"{what}, expected that of SAME_STEP alone: declare or pass that as autoreset_mode")

    def close(self) -> None:
        """Free the simulators."""
        _close(self._simulators)


def _chosen(done: Tensor, final: Tensor, after: Tensor) -> Tensor:
    """The rows of `final` in the lanes of a mask [P], and those of `after` in the others."""
    return torch.where(done.view(-1, *[1] * (after.ndim - 1)), final, after)

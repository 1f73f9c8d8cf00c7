"""Simulators that hold all lanes as tensors on one device, behind Gymnasium's vector interface."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from funcollect.arguments import check_keys, checked_device
from funcollect.envs.base import AdaptedEnv, autoreset_mode, first_then_new, info_names, info_place, leaves_of
from funcollect.envs.host.plain_spaces import batch_structure, plain_actions
from funcollect.errors import EnvError, InUseError
from funcollect.messages import shown
from funcollect.protocols import DeviceSimulators, Transition
from funcollect.specs import ActionSpec, Space, assemble, observation_leaves, torch_dtype
from funcollect.tree import Path

_FINAL = ("final_obs", "final_observation")  # in the infos: Gymnasium's name, and its older one
_NEEDED = ("num_envs", "single_observation_space", "single_action_space")


def from_torch_vector_env(
    env: Any, *, info_keys: Sequence[str] = (), one_hot: bool = False, device: torch.device | str | None = None
) -> DeviceVectorEnv:
    """An environment over simulators that hold all lanes as tensors and reset them themselves, such as ManiSkill's.

    They have Gymnasium's vector interface over tensors: `num_envs`, `single_observation_space`, `single_action_space`,
    ``reset(seed=)`` and ``step(action)``, which begins a new episode in the same step in which one ends. The infos of
    such a step hold the last observations as ``"final_obs"`` or ``"final_observation"``, [P, ...], of which the rows of
    lanes that ended are read. Tensors stay on their device, and nothing waits for it. The simulators get one seed, at
    the beginning. States can be used once, and neither forked nor saved in mid-episode. Limits are the simulators' own.

    `env` is the environment, or a function that builds one. What is built already can serve one state: evaluations, and
    collectors that are restored from a file, want a function. `info_keys` name infos to record, tensors [P, ...]; the
    rows of lanes that ended come from ``"final_info"`` if there is one. `device` is where the tensors are, by default
    the environment's own attribute `device`: only one without it needs the argument. Actions of Tuple and Dict spaces
    are joined, as in `from_gymnasium`.

    Raises TypeError or ValueError for an environment without these members, or one that does not reset its lanes so.

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
    label, unused = type(made).__name__, [made]
    with contextlib.ExitStack() as on_failure:
        if not given:
            on_failure.callback(_close_unused, unused)
        lanes, space, action_space = facts = [_member(made, name) for name in _NEEDED]
        if missing := [name for name, fact in zip(_NEEDED, facts, strict=True) if fact is None]:
            raise TypeError(f"{label} lacks {missing}, expected Gymnasium's vector interface: wrap it so")
        if (mode := autoreset_mode(made)) not in (None, "SAME_STEP"):
            raise ValueError(f"{label} has autoreset_mode={mode}, expected SAME_STEP: build it so")
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
            build=partial(first_then_new, unused, _only_once if given else env),
            truncates=True,  # no wrapper can: such simulators reset their lanes themselves
        )
        on_failure.pop_all()
    if not given:
        weakref.finalize(adapted, _close_unused, unused)
    return adapted


def _close_unused(unused: list[Any]) -> None:
    """Close what was made for the facts about it and is used by no state; a copy of the environment makes others."""
    while unused:
        _close(unused.pop())


def _close(simulators: Any) -> None:
    if hasattr(simulators, "close"):
        simulators.close()


def _only_once() -> Any:
    raise InUseError("the vector environment is in use by another state: pass a function that builds one instead")


def _member(env: Any, name: str) -> Any:
    own = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", env), name, None) if own is None else own


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class DeviceVectorEnv(AdaptedEnv):
    """The environment that `from_torch_vector_env` returns."""

    info_keys: tuple[str, ...]
    own_actions: Space  # of the simulators: see `plain_spaces`
    device: torch.device
    build: Callable[[], Any]
    backend: Literal["device"] = "device"
    seeding: Literal["run"] = "run"
    forking: Literal["none"] = "none"
    opener: Callable[[Any], DeviceSimulators] | None = None  # of what lies around the simulators

    def open(self) -> DeviceSimulators:
        """Make live simulators, which are not reset yet."""
        return (self.opener or VectorSimulators)(self)


class VectorSimulators:
    """The simulators of one state."""

    def __init__(self, env: DeviceVectorEnv) -> None:
        self._env = env
        self._simulators = env.build()
        self._lanes = env.num_envs or 1
        spec, own = env.action_spec, env.own_actions
        decode: Callable[[Any], Any] | None = partial(spec.from_one_hot, numpy=torch) if spec.one_hot else None
        if own is not spec.space:
            cast = lambda part, dtype: part.to(torch_dtype(np.dtype(dtype)))  # noqa: E731
            decode = batch_structure(own, decode or (lambda action: action), cast)
        self._decode = decode  # None if the simulators take the actions as they are
        self._kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}  # of the infos, once they have come
        # Whether episodes have ended without a last observation; a tensor, so that the host need not wait.
        self.lacking = torch.zeros((), dtype=torch.bool, device=env.device)

    def reset(self, seed: int | None) -> Any:
        """Begin an episode in each lane; return the observations [P, ...]."""
        self.lacking = torch.zeros_like(self.lacking)
        observation, _ = self._parts("reset", self._simulators.reset(seed=seed), "observation, info")
        return assemble(self._env.observation_space, self._observed("observation", observation))

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
        after = last = self._observed("observation", observation)
        key = next((key for key in _FINAL if key in info), None)
        if key is None:
            self.lacking = self.lacking | done.any()
        else:
            final = self._observed("final observation", info[key])
            last = {path: _chosen(done, final[path], value) for path, value in after.items()}
            if isinstance(reported := info.get(f"_{key}"), Tensor):  # in which lanes, as Gymnasium says it
                self.lacking = self.lacking | (done & ~reported).any()
        infos = self._infos(done, info)
        return Transition(None, assemble(space, last), reward, terminated, truncated, infos), assemble(space, after)

    def _parts(self, call: str, answer: Any, names: str) -> Any:
        """The parts of what a call returned; EnvError for another number of them."""
        if not isinstance(answer, tuple) or len(answer) != names.count(",") + 1:
            raise EnvError(f"{call} of {self._env} returned {shown(answer)}, expected ({names}): return these")
        return answer

    def _observed(self, name: str, observation: Any) -> dict[Path, Tensor]:
        """The leaves of an observation, checked, floating ones as float32."""
        leaves = {}
        for leaf, value in leaves_of(self._env, observation, f"the {name} of {self._env}"):
            tensor = value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
            self._check(f"{name} {leaf.name!r}", tensor, (self._lanes, *leaf.shape), torch_dtype(leaf.dtype))
            leaves[leaf.path] = tensor
        return leaves

    def _infos(self, done: Tensor, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """The infos to record, as they were before lanes were reset; each is always of the same kind."""
        if not self._env.info_keys:
            return {}
        final = self._mapping("final_info", info.get("final_info"))
        places = {name: [info_place(each, name) for each in (final, info)] for name in self._env.info_keys}
        if missing := [name for name, each in places.items() if not any(last in holder for holder, last in each)]:
            what = f"the infos of {self._env} are {info_names(info)}"
            raise EnvError(f"{what}, expected {missing} among them: correct info_keys")
        infos = {}
        for name, found in places.items():
            parts = [holder[last] for holder, last in found if last in holder]
            for part in parts:
                shape, dtype = self._kinds.get(name, ((self._lanes, *getattr(part, "shape", ())[1:]), None))
                self._check(f"info {name!r}", part, shape, dtype)
                self._kinds[name] = part.shape, part.dtype
            infos[name] = _chosen(done, *parts) if len(parts) == 2 else parts[0]
        return infos

    def _mapping(self, name: str, value: Any) -> Mapping[str, Any]:
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
        """Raise EnvError if an episode has ended without a last observation; this waits for the device."""
        if bool(self.lacking):
            what = f"{self._env} resets its lanes and does not report the last observations of their episodes"
            wanted = f"them in the infos as {_FINAL[0]!r}, since the value of a truncated state depends on them"
            mend = "add them (in Isaac Lab by compute_final_obs=True, or in older releases by overriding _reset_idx)"
            raise EnvError(f"{what}, expected {wanted}: {mend}")

    def close(self) -> None:
        """Free the simulators."""
        _close(self._simulators)


def _chosen(done: Tensor, final: Tensor, after: Tensor) -> Tensor:
    """The last values of the lanes that are done [P], and the current ones of the others."""
    return torch.where(done.view(-1, *[1] * (after.ndim - 1)), final, after)

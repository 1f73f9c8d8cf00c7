"""The collector state: everything that the next rollout depends on, in one immutable value."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn

import numpy as np
import numpy.typing as npt
import optree
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import TypeVar

from funcollect.envs.jax_envs.jax_env import JaxEnvState
from funcollect.interop.jax_setup import import_jax, notice_jax, with_jax, without_weak_types
from funcollect.interop.memo import memo_of
from funcollect.interop.words import number
from funcollect.keys import Key, Purpose, fold, generator_state, seed_of
from funcollect.messages import dtypes_and_shapes, form
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import Env, Policy
from funcollect.tree import NAMESPACE, Path

Array = TypeVar("Array", default=Any)  # Tensor, or jax.Array over a JAX environment
_STATIC = ("total_lanes", "origin")
_PARTS = ("env_state", "env_params", "policy_state")  # pytrees whose structure an environment or a policy chose
_OF_STARTS = {"env_state", "env_params", "key"}  # if one is replaced, JAX environments make their next starts again
_ORIGINS = itertools.count(1)
_LANE_IDS: Any = WeakIdKeyDictionary()  # copies on the CPU of `lane` tensors on devices


class ReadOnlyDict(dict[Path, Any]):
    """A dict by path that refuses every change; a node in optree's `NAMESPACE` and in JAX."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        mend = "make another state with state.replace(observation={**state.observation, ...})"
        raise TypeError(f"the observation of a state cannot be changed: {mend}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return ReadOnlyDict, (dict(self),)


class Handle:
    """The base of an `env_state` that stands for simulators, which hold the key of their seeds."""


@dataclass(frozen=True, kw_only=True)
class CollectorState(Generic[Array]):
    """The state of a collection: made by `init`, threaded through `rollout`, never changed.

    Its arrays are Torch tensors; over a JAX environment they are JAX arrays, with 32 bits where the list below states
    64. It is a node in optree's namespace ``"funcollect"`` and in JAX, whose children are all fields but `total_lanes`
    and `origin`. Objects that JAX does not know, such as a TensorDict, are leaves to JAX.

    Attributes:
        env_state: the environment's own state; over simulators a handle that can be used once.
        env_params: the environment's parameters, a pytree; None without any.
        observation: the current root observation by key, each [P, ...]; a dict that cannot be changed.
        policy_state: the recurrent state of a JAX policy, a pytree of [P, ...], or None; of a Torch policy a tuple
            with the fields ``recurrent`` (that state), ``generator`` and ``carried``.
        key: uint32[2], from which all randomness follows; a NumPy array, unless the environment is written in JAX.
        lane: [P] int64, the lanes' ids over all workers.
        episode: [P] int64, which episode each lane is in.
        step: [P] int64, steps since that episode began.
        returns: [P] float64, the sum of the episode's rewards so far; [P, players] for several players.
        terminated, truncated: [P] bool, set only for finished lanes that are kept finished.
        total_lanes: the number of lanes over all workers.
        origin: the number of the environment in this process; None after unpickling.
        steps: steps of every lane since `init`: an int, or over JAX uint32[2], low word first; see `steps_made`.
        policy_version: which weights act, 0 at first and one more per update: an int, or over JAX int32 [].

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=3), 5)
    >>> state.steps, state.step.tolist()
    (5, [5, 5])
    """

    env_state: Any
    observation: Mapping[Path, Array]
    policy_state: Any
    key: Key | Array
    lane: Array
    episode: Array
    step: Array
    returns: Array
    terminated: Array
    truncated: Array
    total_lanes: int
    origin: int | None = None
    steps: int | Array = 0
    policy_version: int | Array = 0
    env_params: Any = None

    opened: ClassVar[Any] = None  # the loop that made this state, still open for the next rollout (`OpenFor`)

    def __post_init__(self) -> None:
        notice_jax()
        kind = type(self.observation)
        if kind is dict or (kind is not ReadOnlyDict and isinstance(self.observation, Mapping)):  # JAX may pass others
            object.__setattr__(self, "observation", ReadOnlyDict(self.observation))

    @property
    def seed(self) -> int:
        """The integer seed of the run: the argument of `init`, or the one that it drew."""
        return seed_of(np.asarray(self.key))

    @property
    def lane_ids(self) -> npt.NDArray[np.int64]:
        """[P], `lane` in NumPy; this runs no JAX program, and reads a device only once."""
        lanes: Any = self.lane
        if isinstance(lanes, Tensor):
            if lanes.device.type != "cpu":
                if lanes not in _LANE_IDS:
                    _LANE_IDS[lanes] = lanes.cpu()
                lanes = _LANE_IDS[lanes]
            lanes = lanes.numpy()
        return np.asarray(lanes).astype(np.int64, copy=False)

    @property
    def num_lanes(self) -> int:
        """P."""
        lanes: Any = self.lane
        return len(lanes)

    @property
    def steps_made(self) -> int:
        """`steps` as an int."""
        return self.steps if isinstance(self.steps, int) else number(self.steps)

    @property
    def frames(self) -> int:
        """Frames collected since `init`: steps times lanes."""
        return self.steps_made * self.num_lanes

    @property
    def traj_ids(self) -> Tensor | npt.NDArray[np.int64]:
        """[P] int64, the trajectories that the lanes are in; NumPy over JAX, whose traced code lacks them."""
        lane: Any = self.lane
        episode: Any = self.episode
        if not isinstance(lane, Tensor):
            lane, episode = (np.asarray(counter).astype(np.uint32).astype(np.int64) for counter in (lane, episode))
        ids: Tensor | npt.NDArray[np.int64] = trajectory_ids(lane, episode, self.total_lanes)
        return ids

    def replace(self, **changes: Any) -> CollectorState[Array]:
        """Return a state with some fields changed; another `env_state` needs its observation beside it.

        Another observation has the same keys, shapes and dtypes, unless lanes are replaced, too.
        Other `env_params` act at once, and are the same for all lanes; see also `set_env_params`. Over simulators, the
        `key` cannot be replaced.
        """
        if "observation" not in changes and changes.get("env_state", self.env_state) is not self.env_state:
            why = "the policy would act on the observation of another state; pass observation=other.observation, too"
            raise ValueError(f"state.replace got env_state without observation, expected both: {why}")
        observation = changes.get("observation")
        if isinstance(observation, Mapping) and "lane" not in changes:
            pair = self.observation, observation
            own, given = ({path: dtypes_and_shapes(leaf) for path, leaf in each.items()} for each in pair)
            if all(isinstance(leaf, Tensor) for leaf in self.observation.values()):
                given |= {path: form(leaf) for path, leaf in observation.items() if not isinstance(leaf, Tensor)}
            if own != given:
                what = f"state.replace got the observation {given}, expected one like its own, {own}"
                raise ValueError(f"{what}: change only the values of state.observation")
        if unknown := sorted(changes.keys() - _FIELDS.keys()):
            raise TypeError(f"state.replace got {unknown}, expected fields of a CollectorState: check the spelling")
        env_state = changes.get("env_state", self.env_state)
        differing = {name for name, value in changes.items() if value is not getattr(self, name)}
        if isinstance(env_state, JaxEnvState) and differing & _OF_STARTS:
            changes["env_state"] = env_state.with_used_starts()
        if isinstance(env_state, Handle) and "key" in differing:
            what = "state.replace got another key, but simulators keep the seeds of theirs, expected none"
            raise ValueError(f"{what}: begin another run with funcollect.init(env, policy, seed=...)")
        return self.changed(**changes)

    __replace__ = replace  # of `copy.replace`

    def changed(self, **changes: Any) -> CollectorState[Array]:
        """Do what `replace` does, unchecked: the observation and the next starts belong to the `env_state`."""
        changed = object.__new__(type(self))  # rather than dataclasses.replace, which takes three times as long
        vars(changed).update(vars(self), **changes)
        if "observation" in changes:
            changed.__post_init__()
        return changed

    def __getstate__(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _FIELDS}
        return {**values, "origin": None}  # which has no meaning in another process


def origin_of(env: Any) -> int:
    """Return the number of an environment in this process. A copy of an environment has another number."""
    memo: dict[Hashable, int] = memo_of(env)
    return memo.get("origin") or memo.setdefault("origin", next(_ORIGINS))


def check_origin(env: Any, state: CollectorState) -> None:
    """Raise ValueError for a state that another environment made."""
    fits = state.origin == origin_of(env)
    if state.origin is None:
        shapes = {path: value.shape[1:] for path, value in state.observation.items()}
        fits = shapes == {leaf.path: leaf.shape for leaf in env.observation_leaves}
    if not fits:
        raise ValueError(f"the state belongs to another environment than {env!r}: pass the env that it was made with")


def trajectory_ids(lane: Any, episode: Any, total_lanes: int) -> Any:
    """Return int64 ids [...] that are unique over all lanes and episodes; with one lane they are 0, 1, 2, ..."""
    first = ((lane // total_lanes) << 40) + lane % total_lanes
    return first + episode * total_lanes


def first_state(
    env: Env, policy: Policy, key: Key, lane: Tensor, total_lanes: int, *, env_state: Any, observation: Any
) -> CollectorState:
    """Return the state of lanes [P] that begin their first episode, with tensors on the device of `lane`."""
    zeros = partial(torch.zeros, len(lane), device=lane.device)
    return CollectorState(
        env_state=env_state,
        env_params=env.params if env.backend == "torch" else None,
        observation=observation,
        policy_state=policy_start(policy, key, len(lane), int(lane[0])),
        key=key,
        lane=lane,
        episode=zeros(dtype=torch.int64),
        step=zeros(dtype=torch.int64),
        returns=zeros(dtype=torch.float64),
        terminated=zeros(dtype=torch.bool),
        truncated=zeros(dtype=torch.bool),
        total_lanes=total_lanes,
        origin=origin_of(env),
    )


def policy_start(policy: Policy, key: Key, num_envs: int, first_lane: int, steps: int = 0) -> Any:
    """Return the policy's first state in the lanes from `first_lane` on, in a run that has made `steps` steps."""
    policy_state = policy.init(key, num_envs)
    if policy.backend == "jax":
        return without_weak_types(policy_state)
    if not isinstance(policy_state, TorchPolicyState) or first_lane == steps == 0:
        return policy_state
    # a module that draws from Torch's generator gets other numbers in other lanes, and in a replaced worker
    return policy_state._replace(generator=generator_state(seed_of(fold(key, Purpose.GENERATOR, first_lane, steps))))


_FIELDS = {each.name: None for each in fields(CollectorState)}  # in order
LEAVES = tuple(name for name in _FIELDS if name not in _STATIC)


def flatten_part(part: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the tree definition of a part of a state: JAX's, if it has nodes that only JAX knows."""
    leaves, treedef = optree.tree_flatten(part, namespace=NAMESPACE)
    if "jax" in sys.modules and not import_jax().tree_util.all_leaves(leaves):
        leaves, treedef = import_jax().tree.flatten(part)
    return leaves, treedef


def _flatten(state: CollectorState) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
    children = {name: getattr(state, name) for name in LEAVES}
    treedefs: dict[str, Any] = {}
    for name in _PARTS:
        leaves, treedef = flatten_part(children[name])
        if not isinstance(treedef, optree.PyTreeSpec):
            children[name], treedefs[name] = tuple(leaves), treedef
    static = tuple(getattr(state, name) for name in _STATIC)
    return tuple(children.values()), (static, tuple(treedefs.items())), LEAVES


def _unflatten(metadata: tuple[Any, ...], values: tuple[Any, ...]) -> CollectorState:
    static, treedefs = metadata
    children = dict(zip(LEAVES, values, strict=True))
    for name, treedef in treedefs:
        children[name] = treedef.unflatten(children[name])
    return CollectorState(**children, **dict(zip(_STATIC, static, strict=True)))


def _flatten_dict(node: ReadOnlyDict) -> tuple[list[Any], tuple[Path, ...], tuple[Path, ...]]:
    paths = tuple(sorted(node))
    return [node[path] for path in paths], paths, paths


def _unflatten_dict(paths: tuple[Path, ...], children: Any) -> ReadOnlyDict:
    return ReadOnlyDict(zip(paths, children, strict=True))


def _register(jax: Any) -> None:
    def with_keys(node: ReadOnlyDict) -> Any:
        children, paths, _ = _flatten_dict(node)
        return [*zip(map(jax.tree_util.DictKey, paths), children, strict=True)], paths

    register = jax.tree_util.register_pytree_with_keys
    register(ReadOnlyDict, with_keys, _unflatten_dict, lambda node: _flatten_dict(node)[:2])
    jax.tree_util.register_dataclass(CollectorState, list(LEAVES), list(_STATIC))


_register_in_optree: Any = optree.register_pytree_node  # which is typed for collections only
_register_in_optree(ReadOnlyDict, _flatten_dict, _unflatten_dict, namespace=NAMESPACE)
_register_in_optree(CollectorState, _flatten, _unflatten, namespace=NAMESPACE)
with_jax(_register)

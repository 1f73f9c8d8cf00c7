"""Read a TorchRL environment's spaces and the keys of its TensorDict; the one module that imports TorchRL."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

from funcollect.envs import agents
from funcollect.envs.base import box, has_time_limit
from funcollect.specs import ActionSpec, Group, Space
from funcollect.tree import Path, as_path, flatten

NestedKey = str | tuple[str, ...]

_FLAGS = {"done", "terminated", "truncated"}


@dataclass(frozen=True, kw_only=True)
class TorchRLLayout:
    """The spaces of an environment, and the keys of its TensorDict."""

    observation_space: Space  # without the keys of `primers`
    action: ActionSpec
    actions: dict[NestedKey, torch.dtype]  # the key of the action, or of each group's, and its dtype in `env`
    reward_keys: tuple[NestedKey, ...]  # one, or one for each group
    writes_truncated: bool
    primers: dict[Path, Tensor]  # initial recurrent states of a policy, which `TensorDictPrimer`s declare
    bare: bool  # whether a step reads nothing but the action
    # Whether `_step` can be called instead of `step`, which implies `bare`. TorchRL's own adapters of Gymnasium write
    # the whole result in `_step`, and `step` spends a quarter of its time on checking it again.
    raw: bool


def layout_of(env: Any) -> TorchRLLayout:
    """The layout of an `EnvBase`; raises ValueError for one that cannot be adapted, TypeError for an unknown spec."""
    from torchrl.envs import GymLikeEnv

    if len(env.batch_size) > 1:
        mend = "build it with one batch dimension"
        raise ValueError(f"the environment has the batch size {list(env.batch_size)}, expected [] or [P]: {mend}")
    groups = groups_of(env)
    done_keys = [key for key in env.done_keys if as_path(key)[0] not in groups]
    if not {"done", "terminated"} <= set(done_keys) <= _FLAGS:
        what = f"the environment has the done keys {done_keys}, expected {sorted(_FLAGS)} at the root"
        raise ValueError(f"{what}: flags of agents have to be aggregated in a transform")
    if groups:
        names = sorted(name for group in groups.values() for name in group.names)
        action: ActionSpec = agents.action_spec(groups, names)
    else:
        _only("actions", env.action_keys, "join them in one, or write a transform that splits one")
        reward_key = _only("rewards", env.reward_keys, "add them up in a transform")
        reward = env.full_reward_spec_unbatched[reward_key]
        if reward.shape.numel() != 1:
            what = f"the reward {reward_key!r} has shape {list(reward.shape)}, expected one number per environment"
            raise ValueError(f"{what}: add the parts up in a transform")
        action = action_spec(env.full_action_spec_unbatched[env.action_keys[0]])
    space, primers = _observation_space(env, groups)
    single = not (env.batch_size or groups)
    bare = single and not hasattr(type(env), "transform") and not list(env.state_spec.keys(True, True))
    return TorchRLLayout(
        observation_space=space,
        action=action,
        actions={key: env.full_action_spec_unbatched[key].dtype for key in env.action_keys},
        reward_keys=tuple(env.reward_keys),
        writes_truncated="truncated" in done_keys,
        primers=primers,
        bare=bare,
        raw=bare and isinstance(env, GymLikeEnv) and type(env)._step is GymLikeEnv._step and not env.run_type_checks,
    )


def groups_of(env: Any) -> dict[str, Group]:
    """The groups of agents of an `EnvBase`; empty if it has one action and one reward, those of a single agent.

    ValueError for groups whose agents have different spaces, or one-hot actions.
    """
    actions, rewards = env.full_action_spec_unbatched, env.full_reward_spec_unbatched
    one_each = len(env.action_keys) == len(env.reward_keys) == 1 and rewards[env.reward_keys[0]].shape.numel() == 1
    keys = [as_path(key) for key in env.action_keys]
    rooted = not any(as_path(key)[1:] for key in env.done_keys)
    if (one_each and rooted) or not all(key[1:] == ("action",) for key in keys):
        return {}
    groups, known = {}, vars(_without_transforms(env)[0]).get("group_map") or {}
    for name, _ in keys:
        action, node = actions[name, "action"], env.full_observation_spec_unbatched.get(name, {})
        observed = node.get("observation", None)
        if observed is None or {*env.reward_keys} != {(group, "reward") for group, _ in keys}:
            what = f"the group {name!r} lacks an observation or a reward, expected {name}.observation and {name}.reward"
            raise ValueError(f"{what}: rename them in a transform")
        of_agents = [(observation_space(observed[i]), action_spec(action[i])) for i in range(action.shape[0])]
        (space, spec), *others = of_agents
        if any(other != (space, spec) for other in others) or spec.one_hot:
            what = f"the agents of the group {name!r} have the spaces {of_agents}, expected equal ones, not one-hot"
            raise ValueError(f"{what}: pass group_map= that parts them, and categorical_actions=True")
        names = known.get(name) or [f"{name}_{i}" for i in range(action.shape[0])]
        groups[name] = Group(tuple(names), space, spec.space)
    return groups


def truncates(env: Any) -> bool:
    """Whether an `EnvBase` ends all episodes: by a `StepCounter`, a `TimeLimit` or ``truncates = True``."""
    from torchrl.envs import GymLikeEnv, ParallelEnv, SerialEnv, StepCounter

    env, transforms = _without_transforms(env)
    if any(isinstance(transform, StepCounter) and transform.max_steps is not None for _, transform in transforms):
        return True
    if isinstance(env, (SerialEnv, ParallelEnv)):
        first, *others = env.create_env_fn
        if any(env.create_env_kwargs) or any(other is not first for other in others):
            return False  # lanes may differ
        lane = first()
        try:
            return truncates(lane)
        finally:
            lane.close()
    return bool(getattr(type(env), "truncates", False)) or (isinstance(env, GymLikeEnv) and has_time_limit(env._env))


def _without_transforms(env: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """The environment under all transforms, and pairs (transformed environment, transform), outermost first."""
    from torchrl.envs import Compose

    found: list[tuple[Any, Any]] = []
    while hasattr(type(env), "transform"):
        inner = env.transform if isinstance(env.transform, Compose) else [env.transform]
        found += [(env, transform) for transform in inner]
        env = env.base_env
    return env, found


def _only(what: str, keys: Iterable[NestedKey], mend: str) -> NestedKey:
    """The single key; ValueError if there is none or several."""
    names = list(keys)
    if len(names) != 1:
        raise ValueError(f"the environment has the {what} {names}, expected exactly one: {mend}")
    return names[0]


def _observation_space(env: Any, groups: Mapping[str, Group]) -> tuple[Space, dict[Path, Tensor]]:
    """The observation space, with the flags of agents, and the initial recurrent states of one lane from primers."""
    from tensordict import TensorDict
    from torchrl.envs import TensorDictPrimer

    primers: dict[Path, Tensor] = {}
    for around, primer in _without_transforms(env)[1]:
        if isinstance(primer, TensorDictPrimer):
            values = flatten(primer(TensorDict({}, batch_size=primer.primers.shape)))
            primers |= {path: value[0] if around.batch_size else value for path, value in values.items()}
    space = observation_space(env.full_observation_spec_unbatched, without=primers)
    assert isinstance(space, spaces.Dict)
    for key in env.done_keys:
        name, *flag = as_path(key)
        if flag:
            node: Any = space[name]
            node[flag[0]] = box((groups[name].n, 1), bool)
    if not len(space):
        raise ValueError("the environment's observation spec is empty, expected at least one key: add it")
    return space["observation"] if list(space) == ["observation"] else space, primers


def observation_space(spec: Any, path: Path = (), without: Collection[Path] = ()) -> Space:
    """The space of an observation's spec: Boxes, and Discrete for single choices; the paths `without` are left out."""
    from torchrl.data import Binary, Categorical, Composite, OneHot

    if isinstance(spec, Composite):
        children = {key: (child, (*path, key)) for key, child in spec.items() if (*path, key) not in without}
        return spaces.Dict({key: observation_space(*child, without) for key, child in children.items()})
    name = ".".join(path)
    dtype, shape = _numpy_dtype(spec, name), tuple(spec.shape)
    if isinstance(spec, (Binary, OneHot)) or dtype.kind == "b":
        return box(shape, dtype, 0, 1)
    if isinstance(spec, Categorical):
        counts = _counts(spec)
        return box(shape, dtype, 0, counts - 1) if shape or dtype != np.int64 else spaces.Discrete(int(counts))
    return _box(spec, dtype, f"the spec of {name!r}", "leave it out with torchrl.envs.ExcludeTransform")


def action_spec(spec: Any) -> ActionSpec:
    """The `ActionSpec` of an action's spec, one-hot if that is."""
    from torchrl.data import Binary, Categorical, MultiOneHot, OneHot

    if isinstance(spec, OneHot):
        several = isinstance(spec, MultiOneHot)
        sizes = [part.n for part in spec.space] if several else [spec.space.n]
        if list(spec.shape) != [sum(sizes)]:
            raise TypeError(f"the one-hot action has shape {list(spec.shape)}, expected [{sum(sizes)}]: flatten it")
        return ActionSpec(spaces.MultiDiscrete(sizes) if several else spaces.Discrete(int(sizes[0])), one_hot=True)
    dtype = _numpy_dtype(spec, "action")
    if isinstance(spec, Binary):
        return ActionSpec(spaces.MultiBinary(tuple(spec.shape)))
    if isinstance(spec, Categorical):
        counts = _counts(spec)
        return ActionSpec(spaces.MultiDiscrete(counts) if spec.shape else spaces.Discrete(int(counts)))
    return ActionSpec(_box(spec, dtype, "the action spec", "write a transform that gives one of these"))


def _counts(spec: Any) -> npt.NDArray[np.int64]:
    """The number of choices of each component of a `Categorical` or `MultiCategorical`, in the spec's shape."""
    counts = spec.nvec.cpu().numpy() if hasattr(spec, "nvec") else spec.space.n
    return np.broadcast_to(np.asarray(counts, np.int64), tuple(spec.shape))


def _box(spec: Any, dtype: np.dtype[Any], what: str, mend: str) -> Space:
    """The box of a bounded or unbounded spec; TypeError, with the fix `mend`, for any other kind of spec."""
    from torchrl.data import Bounded, Unbounded

    if isinstance(spec, Unbounded):  # it may name finite bounds, which are those of its dtype
        return box(tuple(spec.shape), dtype)
    if isinstance(spec, Bounded):
        return box(tuple(spec.shape), dtype, spec.space.low.cpu().numpy(), spec.space.high.cpu().numpy())
    known = "Bounded, Unbounded, Categorical, MultiCategorical, OneHot, MultiOneHot, Binary"
    raise TypeError(f"{what} is {type(spec).__name__}, expected {known} or, for observations, Composite: {mend}")


def _numpy_dtype(spec: Any, name: str) -> np.dtype[Any]:
    """The NumPy dtype of the spec called `name`; TypeError if there is none, or if the spec's shape varies."""
    try:
        if any(size < 0 for size in spec.shape):
            raise TypeError("its shape varies")
        return torch.empty(0, dtype=spec.dtype).numpy().dtype
    except (TypeError, AttributeError) as error:
        found = f"{type(spec).__name__} of {getattr(spec, 'dtype', None)} {list(spec.shape)} ({error})"
        wanted = "a fixed shape and a dtype that NumPy has: cast it or leave it out with a transform"
        raise TypeError(f"the spec of {name!r} is {found}, expected {wanted}") from error

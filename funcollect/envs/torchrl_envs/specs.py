"""TorchRL's specs as Gymnasium spaces, and what its environments may look like. The one module that imports TorchRL."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from funcollect.specs import ActionSpec, Space
from funcollect.tree import Path, flatten

NestedKey = str | tuple[str, ...]

_GROUP = {"done", "terminated", "truncated"}


@dataclass(frozen=True, kw_only=True)
class TorchRLLayout:
    """Where things stand in an environment's TensorDict, and what they look like in one environment.

    Attributes:
        observation_space: the space of the leaves in the observation spec, less the primers' keys.
        action: how an action looks in a batch.
        action_key, action_dtype: where the environment reads it, and as what.
        reward_key: where it writes the reward.
        truncates: whether it writes ``truncated``.
        primers: recurrent states of a policy that transforms of the environment declare: their initial values.
        bare: whether a step reads nothing but the action.
        raw: whether, besides, `_step` writes everything that `step` gives: TorchRL's own adapters of Gymnasium do, and
            checking that again takes a quarter of their step.
    """

    observation_space: Space
    action: ActionSpec
    action_key: NestedKey
    action_dtype: torch.dtype
    reward_key: NestedKey
    truncates: bool
    primers: dict[Path, Tensor]
    bare: bool
    raw: bool


def layout_of(env: Any) -> TorchRLLayout:
    """What `env`, an `EnvBase`, reads and writes.

    Raises:
        ValueError: for several batch dimensions, actions, rewards or groups of done flags.
        TypeError: for a spec without a space.
    """
    if len(env.batch_size) > 1:
        raise ValueError(
            f"the environment has the batch size {list(env.batch_size)}, expected [] or [P]: build it with one batch "
            "dimension"
        )
    action_key = _only("actions", env.action_keys, "join them in one, or write a transform that splits one")
    reward_key = _only("rewards", env.reward_keys, "add them up in a transform")
    done_keys = list(env.done_keys)
    if not {"done", "terminated"} <= set(done_keys) <= _GROUP:
        raise ValueError(
            f"the environment has the done keys {done_keys}, expected {sorted(_GROUP)} at the root: flags of agents "
            "have to be aggregated in a transform"
        )
    action = env.full_action_spec_unbatched[action_key]
    reward = env.full_reward_spec_unbatched[reward_key]
    if reward.shape.numel() != 1:
        raise ValueError(
            f"the reward {reward_key!r} has shape {list(reward.shape)}, expected one number per environment: add the "
            "parts up in a transform"
        )
    primers = _primers(env)
    bare = not env.batch_size and not hasattr(type(env), "transform") and not list(env.state_spec.keys(True, True))
    return TorchRLLayout(
        observation_space=_observation_space(env.full_observation_spec_unbatched, primers),
        action=action_spec(action),
        action_key=action_key,
        action_dtype=action.dtype,
        reward_key=reward_key,
        truncates="truncated" in done_keys,
        primers=primers,
        bare=bare,
        raw=bare and _writes_all(env),
    )


def _writes_all(env: Any) -> bool:
    from torchrl.envs import GymLikeEnv

    return isinstance(env, GymLikeEnv) and type(env)._step is GymLikeEnv._step and not env.run_type_checks


def _only(what: str, keys: Iterable[NestedKey], mend: str) -> NestedKey:
    names = list(keys)
    if len(names) != 1:
        raise ValueError(f"the environment has the {what} {names}, expected exactly one: {mend}")
    return names[0]


def _primers(env: Any) -> dict[Path, Tensor]:
    """What `TensorDictPrimer`s around the environment put in at a reset."""
    from torchrl.envs import Compose, TensorDictPrimer

    found: dict[Path, Tensor] = {}
    while hasattr(type(env), "transform"):
        transforms = env.transform if isinstance(env.transform, Compose) else [env.transform]
        for primer in transforms:
            if isinstance(primer, TensorDictPrimer):
                values = flatten(_primed(primer))
                found |= {path: value[0] if env.batch_size else value for path, value in values.items()}
        env = env.base_env
    return found


def _primed(primer: Any) -> Any:
    from tensordict import TensorDict

    return primer(TensorDict({}, batch_size=primer.primers.shape))


def _observation_space(spec: Any, primers: Collection[Path]) -> Space:
    space = observation_space(spec, without=primers)
    assert isinstance(space, spaces.Dict)
    if list(space) == ["observation"]:
        return space["observation"]
    if not len(space):
        raise ValueError("the environment's observation spec is empty, expected at least one key: add it")
    return space


def observation_space(spec: Any, path: Path = (), without: Collection[Path] = ()) -> Space:
    """The space of an observation's spec, less the leaves at the paths `without`.

    Composite gives Dict; a single Categorical gives Discrete; all else gives a Box in the spec's shape and dtype, of
    zeros and ones for OneHot, MultiOneHot, Binary and bool.
    """
    from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded

    if isinstance(spec, Composite):
        parts = {key: (child, (*path, key)) for key, child in spec.items() if (*path, key) not in without}
        return spaces.Dict({key: observation_space(*part, without) for key, part in parts.items()})
    name = ".".join(path)
    dtype = _numpy_dtype(spec, name)
    shape = tuple(spec.shape)
    if isinstance(spec, (Binary, OneHot)) or dtype.kind == "b":
        return _limits(0, 1, shape, dtype)
    if isinstance(spec, MultiCategorical):
        return _limits(0, np.asarray(spec.nvec.cpu()) - 1, shape, dtype)
    if isinstance(spec, Categorical):
        count = int(spec.space.n)
        return _limits(0, count - 1, shape, dtype) if shape or dtype != np.int64 else spaces.Discrete(count)
    if isinstance(spec, (Bounded, Unbounded)):
        return _box(spec, dtype)
    raise TypeError(
        f"the spec of {name!r} is {type(spec).__name__}, expected Bounded, Unbounded, Categorical, MultiCategorical, "
        "OneHot, MultiOneHot, Binary or Composite: leave it out with torchrl.envs.ExcludeTransform"
    )


def action_spec(spec: Any) -> ActionSpec:
    """How an action of this spec looks in a batch: as the environment wants it."""
    from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded

    if isinstance(spec, OneHot):
        counts = [part.n for part in spec.space] if isinstance(spec, MultiOneHot) else [spec.space.n]
        if list(spec.shape) != [sum(counts)]:
            raise TypeError(f"the one-hot action has shape {list(spec.shape)}, expected [{sum(counts)}]: flatten it")
        several = isinstance(spec, MultiOneHot)
        return ActionSpec(spaces.MultiDiscrete(counts) if several else spaces.Discrete(int(counts[0])), one_hot=True)
    dtype = _numpy_dtype(spec, "action")
    if isinstance(spec, Binary):
        return ActionSpec(spaces.MultiBinary(tuple(spec.shape)))
    if isinstance(spec, MultiCategorical):
        return ActionSpec(spaces.MultiDiscrete(np.broadcast_to(np.asarray(spec.nvec.cpu()), tuple(spec.shape))))
    if isinstance(spec, Categorical):
        count = int(spec.space.n)
        choice: Space = (
            spaces.MultiDiscrete(np.full(tuple(spec.shape), count)) if spec.shape else spaces.Discrete(count)
        )
        return ActionSpec(choice)
    if isinstance(spec, (Bounded, Unbounded)):
        return ActionSpec(_box(spec, dtype))
    raise TypeError(
        f"the action spec is {type(spec).__name__}, expected Bounded, Unbounded, Categorical, MultiCategorical, "
        "OneHot, MultiOneHot or Binary: write a transform that gives one of these"
    )


def _box(spec: Any, dtype: np.dtype[Any]) -> spaces.Box:
    """The box of a bounded or unbounded spec; an unbounded float has infinite bounds, whatever finite ones it names."""
    from torchrl.data import Unbounded

    if isinstance(spec, Unbounded) and dtype.kind == "f":
        return _limits(-np.inf, np.inf, tuple(spec.shape), dtype)
    return _limits(spec.space.low.cpu().numpy(), spec.space.high.cpu().numpy(), tuple(spec.shape), dtype)


def _limits(low: Any, high: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> spaces.Box:
    low, high = (np.broadcast_to(bound, shape).astype(dtype) for bound in (low, high))
    return spaces.Box(low, high, dtype=dtype.type)


def _numpy_dtype(spec: Any, name: str) -> np.dtype[Any]:
    try:
        if any(size < 0 for size in spec.shape):
            raise TypeError("its shape varies")
        return torch.empty(0, dtype=spec.dtype).numpy().dtype
    except (TypeError, AttributeError) as error:
        raise TypeError(
            f"the spec of {name!r} is {type(spec).__name__} of {getattr(spec, 'dtype', None)} "
            f"{list(spec.shape)} ({error}), expected a fixed shape and a dtype that NumPy has: cast it or leave it out "
            "with a transform"
        ) from error

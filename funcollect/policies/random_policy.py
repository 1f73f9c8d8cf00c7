"""Random actions: as a policy, and in place of another policy's at the start of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from funcollect.keys import Key, Noise, Purpose, draw_ahead
from funcollect.messages import kind_of
from funcollect.policies.base import PolicyBase, device_of, rows_of
from funcollect.policies.numerics import TORCH, encode_choices, jax_numerics
from funcollect.protocols import Actor, ActorInputs, Columns, Env, Exploration, is_env
from funcollect.specs import ActionSpec, GroupedSpec
from funcollect.tree import Path

# From actions and log-probabilities, as `draw_actions` returns them, to the outputs that belong to these actions.
OfRandom = Callable[[Any, Any], dict[Path, Any]]


def random_policy(env: Env) -> RandomPolicy:
    """A policy that draws uniformly from the environment's action space.

    If the observation, or that of an agent, is a Dict with an entry ``action_mask`` of the actions' size, only the
    actions that it allows are drawn; the first action if it allows none, as after the end of an episode. Unbounded
    components of a Box are drawn as Gymnasium's `Box.sample` draws them: normal, or exponential from the side that is
    bounded. Raises TypeError if `env` is not an environment.

    >>> import funcollect as fc
    >>> policy = random_policy(fc.make_env("Pendulum-v1", num_envs=2))
    """
    if not is_env(env):
        raise TypeError(f"env is {kind_of(env)}, expected an Env: make one with funcollect.make_env")
    return RandomPolicy(env.action_spec)


class RandomPolicy(PolicyBase):
    """See `random_policy`."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, spec: ActionSpec) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.space})"

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return random_noise(spec)

    @override
    def prepare(self, params: Any, /) -> None:
        """Raise ValueError if parameters are given, since a random policy has none."""
        if params is not None:
            raise ValueError("params were given to a random policy, which has none: leave them out")

    @override
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: ActionSpec, exploration: Exploration, /
    ) -> tuple[None, Mapping[str, Any]]:
        if isinstance(noise, Tensor):
            return None, {"action": _draw(self.spec, noise.to(device_of(observation)), observation)[0]}
        return None, {"action": draw_actions(jax_numerics(), spec, noise, action_mask(observation, spec))[0]}

    @override
    def actor(self, inputs: ActorInputs, /) -> RandomActor:
        return RandomActor(inputs)


class RandomActor(Actor):
    """Draws the actions of the whole rollout at once, or step by step if there is a mask to obey."""

    def __init__(self, inputs: ActorInputs) -> None:
        self.again(inputs)

    @override
    def again(self, inputs: ActorInputs, /) -> bool:
        assert inputs.noise is not None
        self._observation, self._spec = inputs.observation, inputs.spec
        noise = inputs.noise.to(device_of(inputs.observation))
        self._noise = noise if action_mask(inputs.observation, inputs.spec) is not None else None
        if self._noise is None:
            self.actions, self.log_prob = _draw(inputs.spec, noise, inputs.observation)
        else:
            shape = (*noise.shape[:2], *inputs.spec.shape)
            self.actions = torch.empty(shape, dtype=inputs.spec.dtype, device=noise.device)
            self.log_prob = torch.empty_like(noise)
        self._rows = rows_of(self.actions, noise.device)
        return True

    @override
    def act(self, t: int) -> Tensor:
        row: Tensor = next(self._rows)
        if self._noise is not None:
            action, self.log_prob[t] = _draw(self._spec, self._noise[t], self._observation)
            row.copy_(action)
        return row

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """There is no recurrent state."""

    @override
    def finish(self) -> tuple[None, Columns]:
        return None, {("action",): self.actions}


class RandomStart:
    """Another actor with its first `count` actions replaced by random ones. It is still called, for other outputs."""

    def __init__(
        self, actor: Actor, inputs: ActorInputs, key: Key, lanes: Any, start: int, count: int, outputs: OfRandom
    ) -> None:
        self._actor, self._outputs, self._count = actor, outputs, count
        noise = draw_ahead(random_noise(inputs.spec), key, lanes, start, count, Purpose.RANDOM_ACTION)
        self._random = RandomActor(inputs._replace(noise=noise))
        self.running, self.restart = actor.running, actor.restart

    def again(self, inputs: ActorInputs, /) -> bool:
        """False, since the policy's own actor begins the next rollout."""
        return False

    def act(self, t: int) -> Any:
        """A random action at first, then the policy's."""
        action = self._actor.act(t)
        return self._random.act(t) if t < self._count else action

    def finish(self) -> tuple[Any, Columns]:
        """The policy's outputs, with the actions and log-probabilities of the random steps replaced."""
        policy_state, columns = self._actor.finish()
        put_random(columns, self._outputs(self._random.actions, self._random.log_prob), slice(self._count))
        return policy_state, columns


def put_random(columns: Columns, drawn: Columns, rows: Any) -> None:
    """Replace `rows` of a policy's outputs by those that belong to random actions, as far as the policy has them."""
    action = columns["action",]
    nodes = {path[:-1] for path, column in columns.items() if column is action}  # of a nested action, too
    for path, column in columns.items():
        if (value := drawn.get(path, drawn.get(path[-1:]) if path[:-1] in nodes else None)) is not None:
            column[rows] = (in_shares(value, column.shape) if value.ndim < column.ndim else value)[rows]


def _draw(spec: ActionSpec, uniform: Tensor, observation: Any) -> tuple[Tensor, Tensor]:
    action, log_prob = draw_actions(TORCH, spec, uniform, action_mask(observation, spec))
    return action.to(spec.dtype), log_prob


def action_mask(observation: Any, spec: ActionSpec, lead: int = 1) -> list[Any] | None:
    """The mask [P, n] of allowed actions for each choice, an array of Torch, NumPy or JAX; None if there is none.

    A mask counts if it has `lead` dimensions before its last one.
    """
    if isinstance(spec, GroupedSpec):
        return _masks_of_agents(observation, spec)
    if not isinstance(observation, Mapping) or not isinstance(spec.space, spaces.Discrete):
        return None
    mask = observation.get("action_mask")
    return [mask] if getattr(mask, "shape", ())[lead:] == (int(spec.space.n),) else None


def _masks_of_agents(observation: Any, spec: GroupedSpec) -> list[Any] | None:
    """The masks of all agents, group after group, with None for agents of groups without a mask."""
    masks: list[Any] = []
    for name, group in spec.groups.items():
        node = observation[name]  # TorchRL's have the mask beside the observation
        seen = node if "action_mask" in node else node["observation"]
        of_group = action_mask(seen, group.action_spec, 2)
        masks += [*of_group[0].swapaxes(0, 1)] if of_group else [None] * (group.n * len(group.action_spec.categories))
    return None if all(mask is None for mask in masks) else masks


def in_shares(log_prob: Any, shape: Sequence[int]) -> Any:
    """Log-probabilities [...] split evenly into the `shape` [..., *parts] of a policy's own, which add up to them."""
    parts = shape[log_prob.ndim :]
    return log_prob.reshape(*log_prob.shape, *[1] * len(parts)) / math.prod(parts)


def random_noise(spec: ActionSpec) -> Noise:
    """One uniform number per choice or component."""
    return Noise(kind="uniform", shape=(len(spec.categories),) if spec.categories else tuple(spec.space.shape or ()))


def draw_actions(xp: Any, spec: ActionSpec, uniform: Any, masks: Any) -> tuple[Any, Any]:
    """Actions [..., *spec.shape] from the numbers that `random_noise` describes, and log-probabilities like `uniform`.

    Those of the components of one action add up to its log-probability.
    """
    if isinstance(spec, GroupedSpec) and any(map(spec.integers_of, spec.groups)):
        return _of_groups(xp, spec, uniform, masks)
    if spec.categories:
        return _choices(xp, spec, uniform, masks)
    space: Any = spec.space
    if isinstance(space, spaces.MultiBinary):
        return xp.floor_int(2 * uniform), xp.full(uniform.shape, -math.log(2), uniform)
    return (_components if space.dtype.kind == "f" else _integers)(xp, space, uniform)


def _of_groups(xp: Any, spec: GroupedSpec, uniform: Any, masks: Any) -> tuple[Any, Any]:
    """Actions and log-probabilities [..., A] of groups that have discrete actions and floating ones."""
    actions, log_probs, masks = [], [], iter(masks or ())
    for name, group in spec.groups.items():
        joint, own = ActionSpec(group.joint_space), uniform[..., spec.parts[name]]
        shape = random_noise(joint).shape
        of_group = [*itertools.islice(masks, len(joint.categories))] or None
        action, log_prob = draw_actions(xp, joint, own.reshape(*own.shape[:-1], *shape), of_group)
        actions.append(xp.as_float(action).reshape(own.shape))
        log_probs.append(log_prob.reshape(own.shape))
    return xp.concatenate(actions), xp.concatenate(log_probs)


def _choices(xp: Any, spec: ActionSpec, uniform: Any, masks: Any) -> tuple[Any, Any]:
    if masks is None:
        counts = xp.constant(np.array(spec.categories, np.float32), uniform)
        chosen = xp.minimum(xp.floor_int(uniform * counts), xp.floor_int(counts) - 1)
        log_prob = _everywhere(xp, -np.log(spec.categories), uniform)
        return encode_choices(xp, [chosen[..., i] for i in range(len(spec.categories))], spec), log_prob
    choices = enumerate(zip(spec.categories, masks, strict=True))
    pairs = [_choice(xp, uniform[..., i], count, mask) for i, (count, mask) in choices]
    return encode_choices(xp, [index for index, _ in pairs], spec), xp.stack([log_prob for _, log_prob in pairs])


def _choice(xp: Any, uniform: Any, count: int, mask: Any) -> tuple[Any, Any]:
    """One choice [...] among those that a mask [..., count] allows, and its log-probability."""
    if mask is None:
        chosen = xp.clip(xp.floor_int(uniform * count), 0, count - 1)
        return chosen, xp.full(uniform.shape, -math.log(count), uniform)
    allowed = xp.floor_int(xp.constant(mask, uniform) != 0)
    number = xp.clip(allowed.sum(-1), 1, count)  # nothing may be allowed to finished lanes and absent agents
    rank = xp.minimum(xp.floor_int(uniform * xp.as_float(number)), number - 1)
    chosen = xp.floor_int(allowed.cumsum(-1) > rank[..., None]).argmax(-1)
    return chosen, -xp.log(xp.as_float(number))


def _everywhere(xp: Any, value: Any, like: Any) -> Any:
    """An array of NumPy, one number per component, broadcast to the shape of `like` [..., *components]."""
    return xp.broadcast(xp.constant(value.astype(np.float32), like), like)[0]


def _integers(xp: Any, space: Any, uniform: Any) -> tuple[Any, Any]:
    """Integers of a Box and their log-probabilities. Bounds beyond `xp.integers`, in JAX beyond int32, are clipped."""
    limits = (max(xp.integers[0], np.iinfo(space.dtype).min), min(xp.integers[1], np.iinfo(space.dtype).max))
    low, high = (np.clip(bound, *limits).astype(np.int64) for bound in (space.low, space.high))
    counts = (high.astype(np.float64) - low + 1).astype(np.float32)
    action = xp.integers_between(low, high, uniform * xp.constant(counts, uniform))
    return action, _everywhere(xp, -np.log(high.astype(np.float64) - low + 1), uniform)


def _components(xp: Any, space: Any, uniform: Any) -> tuple[Any, Any]:
    """Components of a floating Box and their log-densities, each like `uniform`; see `random_policy`."""
    below, above = np.isfinite(space.low), np.isfinite(space.high)
    wide = below & above & (space.low < space.high)  # a component that is constant has the log-density 0
    width = np.where(wide, space.high.astype(np.float64) - space.low, 1)
    ends = (np.where(finite, end, 0) for finite, end in ((below, space.low), (above, space.high)))
    low, high, density = (xp.constant(array.astype(np.float32), uniform) for array in (*ends, -np.log(width)))
    inside = xp.minimum(xp.maximum(low * (1 - uniform) + high * uniform, low), high)
    if (below & above).all():
        return inside, xp.broadcast(density, inside)[0]
    has_low, has_high, bounded = (xp.constant(mask, uniform) for mask in (below, above, below & above))
    tail, normal = -xp.log(uniform), xp.ndtri(uniform)
    unbounded = xp.where(has_low, low + tail, xp.where(has_high, high - tail, normal))
    one_sided = xp.where(has_low | has_high, -tail, -0.5 * normal**2 - 0.5 * math.log(2 * math.pi))
    return xp.where(bounded, inside, unbounded), xp.where(bounded, density, one_sided)

"""Random actions: as a policy of their own, and in place of another policy's at the start of a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from funcollect.keys import Key, Noise, Purpose, normals, random_words, uniforms
from funcollect.policies.base import PolicyBase
from funcollect.protocols import Actor, ActorInputs, Columns, Env, Exploration, is_env
from funcollect.specs import ActionSpec

MASK_KEY = "action_mask"


def random_policy(env: Env) -> RandomPolicy:
    """A policy that draws uniformly from the environment's action space.

    Where the observation is a Dict with an entry ``action_mask`` of the actions' size, only actions that it allows are
    drawn. Unbounded Box components are drawn as Gymnasium's `Box.sample` draws them: normal, or exponential from the
    side that is bounded.

    Raises:
        TypeError: for something that is no environment.

    >>> import funcollect as fc
    >>> env = fc.make_env("Pendulum-v1", num_envs=2)
    >>> policy = random_policy(env)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> batch["action"].shape
    torch.Size([2, 4, 1])
    """
    if not is_env(env):
        raise TypeError(f"env is {type(env).__name__}, expected an Env: make one with funcollect.make_env")
    return RandomPolicy(env.action_spec)


class RandomPolicy(PolicyBase):
    """See `random_policy`."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, spec: ActionSpec) -> None:
        self.spec = spec

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """One uniform number per choice or component."""
        return Noise(kind="uniform", shape=_draw_shape(spec))

    @override
    def prepare(self, params: Any, /) -> None:
        """There are no parameters.

        Raises:
            ValueError: where some are given.
        """
        if params is not None:
            raise ValueError("params were given to a random policy, which has none: leave them out")

    @override
    def __call__(
        self,
        params: Any,
        policy_state: Any,
        observation: Any,
        noise: Any,
        spec: ActionSpec,
        exploration: Exploration,
        /,
    ) -> tuple[None, Mapping[str, Any]]:
        """Actions from uniform `noise`, whatever the exploration."""
        return None, {"action": draw_actions(self.spec, noise, action_mask(observation, self.spec))}

    @override
    def actor(self, inputs: ActorInputs, /) -> RandomActor:
        return RandomActor(inputs)


class RandomActor:
    """Actions for the whole rollout at once, or step by step where a mask has to be heeded."""

    def __init__(self, actor_inputs: ActorInputs) -> None:
        assert actor_inputs.noise is not None
        self._spec = actor_inputs.spec
        self._observation = actor_inputs.observation
        self._noise = actor_inputs.noise
        self._masked = action_mask(actor_inputs.observation, actor_inputs.spec) is not None
        self.actions = torch.empty(
            actor_inputs.noise.shape[:2] + actor_inputs.spec.shape, dtype=actor_inputs.spec.dtype
        )
        if not self._masked:
            self.actions.copy_(draw_actions(actor_inputs.spec, actor_inputs.noise, None))
        if _is_uneven(actor_inputs.spec):
            self.log_prob = _uneven(actor_inputs.spec, self.actions)
        else:
            self.log_prob = torch.full(actor_inputs.noise.shape[:2], _log_density(actor_inputs.spec))
        self._rows = self.actions.unbind(0)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing is needed."""
        return contextlib.nullcontext()

    def act(self, t: int) -> Tensor:
        """The action [P, ...] of step `t`."""
        if self._masked:
            mask = action_mask(self._observation, self._spec)
            assert mask is not None
            self._rows[t].copy_(draw_actions(self._spec, self._noise[t], mask))
            self.log_prob[t] = -mask.sum(-1).float().log()
        return self._rows[t]

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """There is no state."""

    def finish(self) -> tuple[None, Columns]:
        """The actions, [T, P, ...]."""
        return None, {("action",): self.actions}


class RandomStart:
    """Another actor whose first `count` actions are random; it runs all the same, so every batch has the same keys."""

    def __init__(self, actor: Actor, actor_inputs: ActorInputs, key: Key, lane: int, start: int, count: int) -> None:
        self._actor = actor
        self._count = count
        shape = _draw_shape(actor_inputs.spec)
        width = actor_inputs.num_envs * math.prod(shape)
        drawn = uniforms(random_words(key, Purpose.RANDOM_ACTION, lane, start, count, width))
        noise = torch.from_numpy(drawn.reshape(count, actor_inputs.num_envs, *shape))
        self._random = RandomActor(ActorInputs(**{**vars(actor_inputs), "noise": noise}))
        self.running = actor.running
        self.restart = actor.restart

    def act(self, t: int) -> Any:
        """A random action at first, then the policy's."""
        action = self._actor.act(t)
        return self._random.act(t) if t < self._count else action

    def finish(self) -> tuple[Any, Columns]:
        """The policy's outputs, with the actions and log-probabilities that were acted on."""
        policy_state, columns = self._actor.finish()
        columns[("action",)][: self._count] = self._random.actions
        if ("action_log_prob",) in columns:
            self._score(columns[("action_log_prob",)][: self._count])
        return policy_state, columns

    def _score(self, log_prob: Tensor) -> None:
        """Write the log-probabilities [count, P]; over components [count, P, n], shares that add up to them."""
        parts = log_prob.shape[2:]
        log_prob.copy_(self._random.log_prob.reshape(*log_prob.shape[:2], *[1] * len(parts)) / math.prod(parts))


def action_mask(observation: Any, spec: ActionSpec) -> Tensor | None:
    """The mask [P, n] of allowed actions that an observation holds, or None."""
    if not isinstance(observation, Mapping) or not isinstance(spec.space, spaces.Discrete):
        return None
    mask = torch.as_tensor(observation.get(MASK_KEY, ()))
    return mask.bool() if mask.shape[1:] == (int(spec.space.n),) else None


def _draw_shape(spec: ActionSpec) -> tuple[int, ...]:
    return (len(spec.categories),) if spec.categories else tuple(spec.space.shape or ())


def draw_actions(spec: ActionSpec, uniform: Tensor, mask: Tensor | None) -> Tensor:
    """Actions [..., *spec.shape] from uniform numbers, one per component of each action."""
    if spec.categories:
        return _draw_choices(spec, uniform, mask)
    if isinstance(spec.space, spaces.MultiBinary):
        return (uniform < 0.5).to(spec.dtype)
    return torch.from_numpy(_draw_box(spec.space, uniform.numpy()))  # type: ignore[arg-type]


def _draw_choices(spec: ActionSpec, uniform: Tensor, mask: Tensor | None) -> Tensor:
    counts = torch.tensor(spec.categories)
    if mask is None:
        chosen = torch.minimum((uniform.double() * counts).long(), counts - 1)
    else:
        rank = (uniform[..., 0].double() * mask.sum(-1)).long()
        chosen = (mask.cumsum(-1) > rank[..., None]).long().argmax(-1, keepdim=True)
    if spec.one_hot:
        hot = [torch.nn.functional.one_hot(chosen[..., i], count) for i, count in enumerate(spec.categories)]
        return torch.cat(hot, -1)
    shaped = chosen.reshape(*chosen.shape[:-1], *spec.shape)
    return shaped + torch.from_numpy(spec.start)


def _draw_box(space: spaces.Box, uniform: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not np.issubdtype(space.dtype, np.floating):
        return np.floor(low + uniform * (high - low + 1)).clip(low, high).astype(space.dtype)
    below, above = np.isfinite(low), np.isfinite(high)
    bounded = np.where(below & above, low, 0) + uniform * np.where(below & above, high - low, 0)
    tail = -np.log(uniform)
    drawn = np.where(
        below & above, bounded, np.where(below, low + tail, np.where(above, high - tail, normals(uniform)))
    )
    return drawn.astype(space.dtype)


def _is_uneven(spec: ActionSpec) -> bool:
    return isinstance(spec.space, spaces.Box) and not spec.space.is_bounded()


def _log_density(spec: ActionSpec) -> float:
    """The log-probability of any one action, where all are equally likely."""
    if spec.categories:
        return -sum(math.log(count) for count in spec.categories)
    if isinstance(spec.space, spaces.MultiBinary):
        return -math.prod(spec.shape) * math.log(2)
    space: Any = spec.space
    width = space.high.astype(np.float64) - space.low + (space.dtype.kind != "f")
    return -float(np.log(width).sum()) if np.isfinite(width).all() else math.nan


def _uneven(spec: ActionSpec, actions: Tensor) -> Tensor:
    """The log-density of actions of which some components are unbounded: [T, P]."""
    space: Any = spec.space
    value = actions.numpy().astype(np.float64)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    below, above = np.isfinite(low), np.isfinite(high)
    with np.errstate(invalid="ignore"):
        inside = -np.log(np.where(below & above, high - low, 1))
        normal = -0.5 * value**2 - 0.5 * math.log(2 * math.pi)
        each = np.where(below & above, inside, np.where(below, low - value, np.where(above, value - high, normal)))
    return torch.from_numpy(each.reshape(*value.shape[:2], -1).sum(-1).astype(np.float32))

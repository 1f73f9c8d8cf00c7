"""Random actions: as a policy of their own, and in place of another policy's at the start of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from funcollect.keys import Key, Noise, Purpose, normals, random_words, uniforms
from funcollect.policies.base import PolicyBase
from funcollect.policies.numerics import TORCH, encode_choices
from funcollect.protocols import Actor, ActorInputs, Columns, Env, Exploration, is_env
from funcollect.specs import ActionSpec


def random_policy(env: Env) -> RandomPolicy:
    """A policy that draws uniformly from the environment's action space.

    If the observation is a Dict with an entry ``action_mask`` of the actions' size, only the actions that it allows
    are drawn. Unbounded components of a Box are drawn as Gymnasium's `Box.sample` draws them: normal, or exponential
    from the side that is bounded.

    Raises:
        TypeError: if `env` is not an environment.

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
        """Raise ValueError if parameters are given, since a random policy has none."""
        if params is not None:
            raise ValueError("params were given to a random policy, which has none: leave them out")

    @override
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: ActionSpec, exploration: Exploration, /
    ) -> tuple[None, Mapping[str, Any]]:
        return None, {"action": _draw(self.spec, noise, action_mask(observation, self.spec))[0]}

    @override
    def actor(self, inputs: ActorInputs, /) -> RandomActor:
        return RandomActor(inputs)


class RandomActor(Actor):
    """Draws the actions of the whole rollout at once, or step by step if there is a mask to obey."""

    def __init__(self, inputs: ActorInputs) -> None:
        assert inputs.noise is not None
        self._inputs, self._noise = inputs, inputs.noise
        self._masked = action_mask(inputs.observation, inputs.spec) is not None
        if self._masked:
            steps_and_lanes = self._noise.shape[:2]
            self.actions = torch.empty((*steps_and_lanes, *inputs.spec.shape), dtype=inputs.spec.dtype)
            self.log_prob = torch.empty(steps_and_lanes)
        else:
            self.actions, self.log_prob = _draw(inputs.spec, self._noise, None)
        self._rows = self.actions.unbind(0)

    @override
    def act(self, t: int) -> Tensor:
        if self._masked:
            mask = action_mask(self._inputs.observation, self._inputs.spec)
            action, self.log_prob[t] = _draw(self._inputs.spec, self._noise[t], mask)
            self._rows[t].copy_(action)
        return self._rows[t]

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """There is no recurrent state."""

    @override
    def finish(self) -> tuple[None, Columns]:
        return None, {("action",): self.actions}


class RandomStart:
    """Another actor with its first `count` actions replaced by random ones. It is still called, for its outputs."""

    def __init__(self, actor: Actor, inputs: ActorInputs, key: Key, lane: int, start: int, count: int) -> None:
        self._actor = actor
        self._count = count
        shape = _draw_shape(inputs.spec)
        width = inputs.num_envs * math.prod(shape)
        drawn = uniforms(random_words(key, Purpose.RANDOM_ACTION, lane, start, count, width))
        noise = torch.from_numpy(drawn.reshape(count, inputs.num_envs, *shape))
        self._random = RandomActor(replace(inputs, noise=noise))
        self.running = actor.running
        self.restart = actor.restart

    def act(self, t: int) -> Any:
        """A random action at first, then the policy's."""
        action = self._actor.act(t)
        return self._random.act(t) if t < self._count else action

    def finish(self) -> tuple[Any, Columns]:
        """The policy's outputs, with the actions and log-probabilities of the random steps replaced."""
        policy_state, columns = self._actor.finish()
        columns[("action",)][: self._count] = self._random.actions
        if (column := columns.get(("action_log_prob",))) is not None:
            shares = math.prod(column.shape[2:])  # 1, or the components, whose shares add up to the log-probability
            log_prob = self._random.log_prob.reshape(self._count, -1, *[1] * (column.ndim - 2))
            column[: self._count] = log_prob / shares
        return policy_state, columns


def action_mask(observation: Any, spec: ActionSpec) -> Any:
    """The mask [P, n] of allowed actions in an observation, an array of Torch, NumPy or JAX; None if there is none."""
    if not isinstance(observation, Mapping) or not isinstance(spec.space, spaces.Discrete):
        return None
    mask = observation.get("action_mask")
    return mask if getattr(mask, "shape", ())[1:] == (int(spec.space.n),) else None


def _draw_shape(spec: ActionSpec) -> tuple[int, ...]:
    return (len(spec.categories),) if spec.categories else tuple(spec.space.shape or ())


def _draw(spec: ActionSpec, uniform: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """Actions [..., *spec.shape] from uniform numbers, one per component, and their log-probabilities [...]."""
    if spec.categories:
        return _draw_choices(spec, uniform, mask)
    lead = uniform.shape[: uniform.ndim - len(spec.shape)]
    if isinstance(spec.space, spaces.MultiBinary):
        return (uniform < 0.5).to(spec.dtype), torch.full(lead, -math.prod(spec.shape) * math.log(2))
    space: Any = spec.space
    drawn, low, high = uniform.numpy(), space.low.astype(np.float64), space.high.astype(np.float64)
    width = high - low
    if space.dtype.kind != "f":
        width += 1
        action = np.floor(low + drawn * width).clip(low, high)
    elif space.is_bounded():
        action = low + drawn * width
    else:
        action, density = draw_box(np, space, drawn.astype(np.float64), normals(drawn))
        return torch.from_numpy(action.astype(space.dtype)), torch.from_numpy(density.reshape(*lead, -1).sum(-1))
    return torch.from_numpy(action.astype(space.dtype)), torch.full(lead, -float(np.log(width).sum()))


def _draw_choices(spec: ActionSpec, uniform: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """Discrete actions among those that `mask` [P, n] allows, and their log-probabilities."""
    counts = torch.tensor(spec.categories)
    if mask is None:
        chosen = torch.minimum((uniform.double() * counts).long(), counts - 1).unbind(-1)
        log_prob = torch.full(uniform.shape[:-1], -sum(map(math.log, spec.categories)))
    else:
        allowed = torch.as_tensor(mask).bool()
        rank = (uniform[..., 0].double() * allowed.sum(-1)).long()
        chosen = ((allowed.cumsum(-1) > rank[..., None]).long().argmax(-1),)
        log_prob = -allowed.sum(-1).float().log()
    action: Tensor = encode_choices(TORCH, chosen, spec)
    return action.to(spec.dtype), log_prob


def draw_box(xp: Any, space: Any, uniform: Any, normal: Any) -> tuple[Any, Any]:
    """Components of a floating Box and their log-densities, each like `uniform`.

    Bounded components are uniform; others normal, or exponential from the side that is bounded. `xp` is NumPy or
    `jax.numpy`.
    """
    low, high = space.low.astype(uniform.dtype), space.high.astype(uniform.dtype)
    below, above = np.isfinite(low), np.isfinite(high)
    width = np.where(below & above, high - np.where(above, low, 0), 1)
    inside = np.where(below & above, low, 0) + uniform * width
    tail = -xp.log(uniform)
    unbounded = xp.where(below, low + tail, xp.where(above, high - tail, normal))
    one_sided = xp.where(below | above, -tail, -0.5 * normal**2 - 0.5 * math.log(2 * math.pi))
    action = xp.where(below & above, inside, unbounded)
    return action, xp.where(below & above, -np.log(width), one_sided)

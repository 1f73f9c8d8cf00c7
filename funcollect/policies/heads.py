"""Heads turn what a network returns into an action and its log-probability.

A head is pure and serves Torch and JAX alike. The noise with which it samples is an argument, drawn ahead for a whole
rollout. `categorical`, `greedy`, `normal` and `tanh_normal` are heads; `epsilon_greedy(epsilon)` makes one.

A network returns the distribution's parameters for P environments. It may also return them in a dict, under the names
that each head's docstring lists, together with further outputs to record. Actions have the dtype of the space.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_number
from funcollect.errors import PolicyError
from funcollect.keys import Noise
from funcollect.messages import shown
from funcollect.policies.numerics import encode_choices
from funcollect.specs import ActionSpec

__all__ = ["Head", "categorical", "epsilon_greedy", "greedy", "normal", "tanh_normal"]

Parameters = tuple[Any, ...]  # of the distribution, each [..., n]


class Head(Protocol):
    """The members of a head. `xp` holds the functions of `funcollect.policies.numerics`.

    The network returns what `parse` reads, or a dict that holds it under the keys `names`.
    """

    @property
    def name(self) -> str:
        """The head's name in `funcollect.heads`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys under which a dict answer holds the parameters."""

    def check(self, spec: ActionSpec) -> None:
        """Raise ValueError if the action space does not suit."""

    def noise(self, spec: ActionSpec) -> Noise | None:
        """The random numbers to draw ahead for one step of one lane, or None."""

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        """The distribution's parameters, of checked shapes, from the network's answer."""

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Any:
        """An action; `noise` is None for the mode."""

    def log_prob(self, xp: Any, parameters: Parameters, action: Any, noise: Any, spec: ActionSpec) -> Any:
        """The log-probability of a sampled action, [...]; None if the head defines none."""


@dataclass(frozen=True)
class _Discrete:
    """Base class of heads that read one number for each choice."""

    name: str
    names: tuple[str, ...]

    def check(self, spec: ActionSpec) -> None:
        if not spec.categories:
            raise ValueError(
                f"the head {self.name} needs a Discrete or MultiDiscrete action space, got {spec.space}: "
                "use normal or tanh_normal for a Box, no head for MultiBinary"
            )

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        wanted = spec.choices
        if not hasattr(answer, "shape") or answer.shape[-1:] != (wanted,):
            raise PolicyError(
                f"the policy returned {_shape(answer)}, the head {self.name} wants [P, {wanted}]: "
                f"one number for each choice of {spec.space}"
            )
        return (answer,)

    def _split(self, array: Any, spec: ActionSpec) -> list[Any]:
        """One array [..., choices] for each component of the action."""
        ends = np.cumsum((0, *spec.categories))
        return [array[..., start:end] for start, end in itertools.pairwise(ends)]

    def _decode(self, action: Any, spec: ActionSpec) -> list[Any]:
        """The index of the choice [...] for each component of the action: the inverse of `encode_choices`."""
        if spec.one_hot:
            return [part.argmax(-1) for part in self._split(action, spec)]
        lead = action.shape[: action.ndim - len(spec.shape)]
        flat = action.reshape(*lead, -1)
        starts = np.broadcast_to(spec.start.ravel(), len(spec.categories))
        return [flat[..., i] - int(start) for i, start in enumerate(starts)]


@dataclass(frozen=True)
class Categorical(_Discrete):
    """Samples a Discrete or MultiDiscrete action; its mode is the choice with the largest logit.

    The network returns unnormalised log-probabilities [P, n] float, n = the number of choices; for a MultiDiscrete
    space n is their sum over the components, one component after the other. In a dict: ``logits``.
    """

    name: str = "categorical"
    names: tuple[str, ...] = ("logits",)

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="gumbel", shape=(spec.choices,))

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Any:
        (logits,) = parameters
        perturbed = logits if noise is None else logits + noise  # the Gumbel-max trick
        if spec.plain:
            return xp.argmax(perturbed)
        if len(spec.categories) == 1:
            return encode_choices(xp, [xp.argmax(perturbed)], spec)
        return encode_choices(xp, [xp.argmax(part) for part in self._split(perturbed, spec)], spec)

    def log_prob(self, xp: Any, parameters: Parameters, action: Any, noise: Any, spec: ActionSpec) -> Any:
        if spec.plain:
            return xp.log_categorical(parameters[0], action)
        logits = self._split(parameters[0], spec)
        indices = self._decode(action, spec)
        scores = [xp.log_categorical(part, index) for part, index in zip(logits, indices, strict=True)]
        return functools.reduce(operator.add, scores)


@dataclass(frozen=True)
class EpsilonGreedy(_Discrete):
    """As `greedy`, but with probability `epsilon` a choice drawn uniformly; see `epsilon_greedy`.

    The network returns the same as for `greedy`.
    """

    name: str = "epsilon_greedy"
    names: tuple[str, ...] = ("action_value",)
    epsilon: float = 0.0

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="uniform", shape=(2, len(spec.categories))) if self.epsilon else None

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Any:
        best = [part.argmax(-1) for part in self._split(parameters[0], spec)]
        if noise is None:
            return encode_choices(xp, best, spec)
        chosen = []
        for i, (index, count) in enumerate(zip(best, spec.categories, strict=True)):
            anything = xp.clip(xp.floor_int(noise[..., 1, i] * count), 0, count - 1)
            chosen.append(xp.where(noise[..., 0, i] < self.epsilon, anything, index))
        return encode_choices(xp, chosen, spec)

    def log_prob(self, xp: Any, parameters: Parameters, action: Any, noise: Any, spec: ActionSpec) -> Any:
        if not self.epsilon:
            return None
        total: Any = 0.0
        indices = self._decode(action, spec)
        for part, index, count in zip(self._split(parameters[0], spec), indices, spec.categories, strict=True):
            share = self.epsilon / count
            nan = xp.where(part == part, 0.0, part).sum(-1)
            total = total + xp.log(xp.where(part.argmax(-1) == index, share + (1 - self.epsilon), share)) + nan
        return total


@dataclass(frozen=True)
class Greedy(EpsilonGreedy):
    """The choice with the largest value in a Discrete or MultiDiscrete space, without a log-probability.

    The network returns one value per choice, [P, n] float, laid out as for `categorical`. In a dict: ``action_value``.
    """

    name: str = "greedy"


@dataclass(frozen=True)
class Normal:
    """Samples from a normal distribution with independent components, for a floating Box; its mode is the mean.

    The network returns a pair (loc, scale), each [P, *action] float, scale positive; or one array [P, *action[:-1],
    2 * action[-1]], whose second half along the last dimension becomes the scale through softplus. In a dict: ``loc``
    and ``scale``. Actions may lie outside the bounds of the space.
    """

    name: str = "normal"
    names: tuple[str, ...] = ("loc", "scale")

    def check(self, spec: ActionSpec) -> None:
        if not isinstance(spec.space, spaces.Box) or not np.issubdtype(spec.space.dtype, np.floating):
            raise ValueError(
                f"the head {self.name} needs a floating Box action space, got {spec.space}: "
                "use categorical for discrete actions"
            )

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="normal", shape=spec.shape)

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        dims = len(spec.shape)
        if isinstance(answer, (tuple, list)) and len(answer) == 2:
            loc, scale = answer
            if _tail(loc, dims) == spec.shape and _tail(scale, dims) == spec.shape:
                return (loc, scale) if loc.shape == scale.shape else tuple(xp.broadcast(loc, scale))
        elif hasattr(answer, "shape") and spec.shape and _tail(answer, dims) == (*spec.shape[:-1], 2 * spec.shape[-1]):
            size = spec.shape[-1]
            return answer[..., :size], xp.softplus(answer[..., size:])
        raise PolicyError(
            f"the policy returned {_shape(answer)}, the head {self.name} wants a pair (loc, scale), each "
            f"{['P', *spec.shape]}, or one array of twice the size along its last dimension: return these"
        )

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Any:
        loc, scale = parameters
        return loc if noise is None else loc + scale * noise

    def log_prob(self, xp: Any, parameters: Parameters, action: Any, noise: Any, spec: ActionSpec) -> Any:
        return self._total(self._density(xp, parameters, action), spec)

    def _density(self, xp: Any, parameters: Parameters, value: Any) -> Any:
        loc, scale = parameters
        deviation = (value - loc) / scale
        return -0.5 * deviation * deviation - xp.log(scale) - 0.5 * math.log(2 * math.pi)

    def _total(self, density: Any, spec: ActionSpec) -> Any:
        return density.sum(tuple(range(-len(spec.shape), 0))) if spec.shape else density


@dataclass(frozen=True)
class TanhNormal(Normal):
    """As `normal`, squashed by tanh to the bounds of the Box, which has to be bounded.

    See Haarnoja et al., 2018, appendix C. The network returns the same as for `normal`: loc and scale before the
    squashing.
    """

    name: str = "tanh_normal"

    def check(self, spec: ActionSpec) -> None:
        super().check(spec)
        if not spec.space.is_bounded():  # type: ignore[attr-defined]
            raise ValueError(f"the head tanh_normal needs bounds on every action, got {spec.space}: use normal")

    def _bounds(self, xp: Any, spec: ActionSpec, like: Any) -> tuple[Any, Any]:
        space: Any = spec.space
        return xp.constant(space.low, like), xp.constant(space.high, like)

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Any:
        squashed = xp.tanh(super().sample(xp, parameters, noise, spec))
        low, high = self._bounds(xp, spec, squashed)
        return xp.clip(low + (squashed + 1) * (high - low) / 2, low, high)

    def log_prob(self, xp: Any, parameters: Parameters, action: Any, noise: Any, spec: ActionSpec) -> Any:
        raw = super().sample(xp, parameters, noise, spec)
        low, high = self._bounds(xp, spec, raw)
        # Torch's softplus rounds by a number's place in memory; these functions do not, so no cut of a run shows.
        slope = 2 * (math.log(2) - abs(raw) - xp.log1p(xp.exp(-2 * abs(raw)))) + xp.log((high - low) / 2)
        return self._total(self._density(xp, parameters, raw) - slope, spec)


def check_head(head: Any) -> None:
    """Raise TypeError unless `head` is a head or None."""
    if head is not None and (isinstance(head, type) or not hasattr(head, "log_prob")):
        raise TypeError(
            f"head is {shown(head)}, expected one of funcollect.heads: categorical, greedy, normal, tanh_normal or "
            "epsilon_greedy(0.1)"
        )


def _tail(array: Any, dims: int) -> tuple[int, ...] | None:
    """The last `dims` dimensions of an array's shape; None if it has fewer."""
    shape = tuple(getattr(array, "shape", ()))
    return shape[len(shape) - dims :] if len(shape) >= dims else None


def _shape(answer: Any) -> str:
    if hasattr(answer, "shape"):
        return f"an array of shape {tuple(answer.shape)}"
    if isinstance(answer, (tuple, list)):
        return f"a {type(answer).__name__} of {[_shape(part) for part in answer]}"
    if isinstance(answer, Mapping):
        return f"a dict with the keys {sorted(map(str, answer))}"
    return type(answer).__name__


categorical: Head = Categorical()
greedy: Head = Greedy()
normal: Head = Normal()
tanh_normal: Head = TanhNormal()


def epsilon_greedy(epsilon: float) -> Head:
    """A head that takes the choice with the largest value, or with probability `epsilon` one drawn uniformly from all.

    The network returns the same as for `greedy`. Each component of a MultiDiscrete action explores by itself. The
    log-probability is that of the mixture.

    Args:
        epsilon: in [0, 1]; with 0 there is no log-probability, as for `greedy`.

    Raises:
        TypeError, ValueError: if `epsilon` is not a number in [0, 1].

    >>> epsilon_greedy(0.1).names
    ('action_value',)
    """
    check_number("epsilon", epsilon, most=1, example=0.1)
    return EpsilonGreedy(epsilon=float(epsilon))

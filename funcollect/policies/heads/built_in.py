"""Heads for Discrete and MultiDiscrete actions, and for a floating Box."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_number
from funcollect.errors import PolicyError
from funcollect.keys import Noise
from funcollect.messages import form
from funcollect.policies.heads.head import Head, Outputs, Parameters
from funcollect.policies.numerics import encode_choices, in_32_bits
from funcollect.specs import ActionSpec
from funcollect.tree import ranked

__all__ = ["boltzmann", "categorical", "clipped_normal", "epsilon_greedy", "greedy", "normal", "tanh_normal"]

_UNSQUASHED = "action_unsquashed"
_INSIDE = 1 - 1e-6  # the largest tanh that is inverted
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)  # for expectations over a standard normal distribution


def _split(array: Any, spec: ActionSpec) -> list[Any]:
    """One array [..., choices] for each component of a discrete action."""
    ends = np.cumsum((0, *spec.categories))
    return [array[..., start:end] for start, end in itertools.pairwise(ends)]


def _decode(action: Any, spec: ActionSpec) -> list[Any]:
    """The index of the choice [...] for each component of the action: the inverse of `encode_choices`."""
    if spec.one_hot:
        return [part.argmax(-1) for part in _split(action, spec)]
    flat = action.reshape(*action.shape[: action.ndim - len(spec.shape)], -1)
    starts = np.broadcast_to(spec.start.ravel(), len(spec.categories))
    return [flat[..., i] - int(start) for i, start in enumerate(starts)]


@dataclass(frozen=True)
class _Discrete(Head):
    """Base class of heads that read one number for each choice."""

    def check(self, spec: ActionSpec) -> None:
        if not spec.categories:
            what = f"the head {self.name} needs a Discrete or MultiDiscrete action space, got {spec.space}"
            raise ValueError(f"{what}: use normal or tanh_normal for a Box, no head for MultiBinary")

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        shape: Sequence[int] = getattr(answer, "shape", ())
        if len(shape) < 2 or shape[-1] != spec.choices:
            what = f"the policy returned {form(answer)}, the head {self.name} wants [P, {spec.choices}]"
            beside = "; with other outputs beside it, return a dict such as {'logits': …, 'value': …}"
            mend = f"one number for each choice of {spec.space}{beside if isinstance(answer, tuple) else ''}"
            raise PolicyError(f"{what}: {mend}")
        return (answer if answer.dtype.itemsize >= 4 else in_32_bits(xp, answer),)


@dataclass(frozen=True)
class Categorical(_Discrete):
    """Samples a Discrete or MultiDiscrete action; its mode is the choice with the largest logit.

    The network returns unnormalised log-probabilities [P, n] float, n = the number of choices; for a MultiDiscrete
    space n is their sum over the components, one component after the other. In a dict: ``logits``.

    >>> import funcollect as fc, torch
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    """

    name: str = "categorical"
    names: tuple[str, ...] = ("logits",)

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="gumbel", shape=(spec.choices,))

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        logits = self._logits(parameters)
        if spec.plain:
            return {"action": xp.gumbel_max(logits, noise)}
        drawn = [None for _ in spec.categories] if noise is None else _split(noise, spec)
        return {"action": encode_choices(xp, list(map(xp.gumbel_max, _split(logits, spec), drawn)), spec)}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        logits, action = self._logits(parameters), outputs["action"]
        if spec.plain:
            return xp.log_categorical(logits, action)
        return functools.reduce(operator.add, map(xp.log_categorical, _split(logits, spec), _decode(action, spec)))

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        logs = map(xp.log_softmax, _split(self._logits(parameters), spec))
        # The logit of a choice that is ruled out is minus infinity, and adds nothing.
        parts = [-(xp.exp(log) * xp.where(log == -math.inf, 0.0, log)).sum(-1) for log in logs]
        return functools.reduce(operator.add, parts)

    def _logits(self, parameters: Parameters) -> Any:
        return parameters[0]


@dataclass(frozen=True)
class Boltzmann(Categorical):
    """See `boltzmann`."""

    name: str = "boltzmann"
    names: tuple[str, ...] = ("action_value",)
    temperature: Any = 1.0
    varying: ClassVar[Mapping[str, Mapping[str, Any]]] = {"temperature": {"positive": True, "example": 1.0}}

    def _logits(self, parameters: Parameters) -> Any:
        temperature = self.temperature
        return parameters[0] / (temperature if isinstance(temperature, float) else temperature[..., None])


@dataclass(frozen=True)
class Greedy(_Discrete):
    """The choice with the largest value in a Discrete or MultiDiscrete space, without a log-probability.

    The network returns one value per choice, [P, n] float, laid out as for `categorical`. In a dict: ``action_value``.
    """

    name: str = "greedy"
    names: tuple[str, ...] = ("action_value",)

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        return {"action": encode_choices(xp, [part.argmax(-1) for part in _split(parameters[0], spec)], spec)}


@dataclass(frozen=True)
class EpsilonGreedy(Greedy):
    """See `epsilon_greedy`."""

    name: str = "epsilon_greedy"
    epsilon: Any = 0.0
    varying: ClassVar[Mapping[str, Mapping[str, Any]]] = {"epsilon": {"most": 1, "example": 0.1}}

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="uniform", shape=(2, len(spec.categories)))

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        if noise is None:
            return super().sample(xp, parameters, noise, spec)
        chosen = []
        for i, (part, count) in enumerate(zip(_split(parameters[0], spec), spec.categories, strict=True)):
            random = xp.clip(xp.floor_int(noise[..., 1, i] * count), 0, count - 1)
            chosen.append(xp.where(noise[..., 0, i] < self.epsilon, random, part.argmax(-1)))
        return {"action": encode_choices(xp, chosen, spec)}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        total: Any = 0.0
        indices = _decode(outputs["action"], spec)
        for part, index, count in zip(_split(parameters[0], spec), indices, spec.categories, strict=True):
            share = self.epsilon / count
            nan = xp.where(part == part, 0.0, part).sum(-1)  # 0, or NaN if a value is
            total = total + xp.log(xp.where(part.argmax(-1) == index, share + (1 - self.epsilon), share)) + nan
        return total

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        def surprise(probability: Any) -> Any:  # 0 for a probability of 0
            return -probability * xp.log(xp.where(probability == 0, 1.0, probability))

        first = parameters[0][..., 0]
        total: Any = xp.where(first == first, 0.0, first)  # a NaN stays one
        for count in spec.categories:
            share = total * 0 + self.epsilon / count
            total = total + surprise(share + (1 - self.epsilon)) + (count - 1) * surprise(share)
        return total


def epsilon_greedy(epsilon: float) -> Head:
    """A head that takes the choice with the largest value, or with probability `epsilon` one drawn uniformly from all.

    The network returns the same as for `greedy`. Each component of a MultiDiscrete action explores by itself. The
    log-probability is the mixture's. Rollouts may be given another value, ``exploration={"epsilon": 0.1}``. Raises
    TypeError or ValueError if `epsilon` is not a number in [0, 1].

    >>> epsilon_greedy(0.1).names
    ('action_value',)
    """
    check_number(
        "epsilon", epsilon, **EpsilonGreedy.varying["epsilon"]
    )  # before `float`, whose error would not name it
    return EpsilonGreedy(epsilon=float(epsilon))


def boltzmann(temperature: float) -> Head:
    """A head that samples a choice with a probability proportional to ``exp(value / temperature)``.

    The network returns the same as for `greedy`. The mode is the choice with the largest value. Rollouts may be given
    another temperature, ``exploration={"temperature": 0.5}``. Raises TypeError or ValueError for no positive number.

    >>> boltzmann(0.5).values
    {'temperature': 0.5}
    """
    check_number("temperature", temperature, **Boltzmann.varying["temperature"])
    return Boltzmann(temperature=float(temperature))


@dataclass(frozen=True)
class Normal(Head):
    """Samples from a normal distribution with independent components, for a floating Box; its mode is the mean.

    The network returns a pair (loc, scale), each [P, *action] float, scale positive; or one array [P, *action[:-1],
    2 * action[-1]], whose second half along the last dimension becomes the scale through softplus. In a dict: ``loc``
    and ``scale``. Actions may lie outside the bounds of the space.

    >>> import funcollect as fc, torch
    >>> policy = fc.torch_policy(torch.nn.Linear(3, 2), head=fc.heads.normal)
    """

    name: str = "normal"
    names: tuple[str, ...] = ("loc", "scale")

    def check(self, spec: ActionSpec) -> None:
        if not isinstance(spec.space, spaces.Box) or not np.issubdtype(spec.space.dtype, np.floating):
            mend = "use categorical"
            raise ValueError(f"the head {self.name} needs a floating Box action space, got {spec.space}: {mend}")

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="normal", shape=spec.shape)

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        dims = len(spec.shape)
        if isinstance(answer, (tuple, list)) and len(answer) == 2:
            if tail_of(answer[0], dims, rows=True) == tail_of(answer[1], dims) == spec.shape:
                loc, scale = in_32_bits(xp, answer[0]), in_32_bits(xp, answer[1])
                if loc.shape == scale.shape:
                    return loc, scale
                sizes = zip(reversed(loc.shape), reversed(scale.shape), strict=False)
                if all(1 in pair or pair[0] == pair[1] for pair in sizes):
                    return tuple(xp.broadcast(loc, scale))
        elif spec.shape and tail_of(answer, dims, rows=True) == (*spec.shape[:-1], 2 * spec.shape[-1]):
            answer, size = in_32_bits(xp, answer), spec.shape[-1]
            return answer[..., :size], xp.softplus(answer[..., size:])
        what = f"the policy returned {form(answer)}, the head {self.name} wants a pair (loc, scale)"
        mend = "or one array of twice the size along its last dimension: return these"
        raise PolicyError(f"{what}, each {['P', *spec.shape]}, {mend}")

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        loc, scale = parameters
        return {"action": loc if noise is None else loc + scale * noise}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        return _total(_density(xp, parameters, outputs["action"]), spec)

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        return _total(xp.log(parameters[1]) + 0.5 * math.log(2 * math.pi * math.e), spec)


def tail_of(array: Any, dims: int, *, rows: bool = False) -> tuple[int, ...] | None:
    """The last `dims` dimensions of an array's shape; None if it has fewer, or with `rows` none before them."""
    shape = tuple(getattr(array, "shape", ()))
    return shape[len(shape) - dims :] if len(shape) >= dims + rows else None


def _density(xp: Any, parameters: Parameters, value: Any) -> Any:
    loc, scale = parameters
    deviation = (value - loc) / scale
    return -0.5 * deviation * deviation - xp.log(scale) - 0.5 * math.log(2 * math.pi)


def _total(density: Any, spec: ActionSpec) -> Any:
    return density.sum(tuple(range(-len(spec.shape), 0))) if spec.shape else density


@dataclass(frozen=True)
class Bounded(Normal):
    """Base class of heads that need the bounds of a Box."""

    squashes: ClassVar[bool] = False  # whether it divides by their difference

    def check(self, spec: ActionSpec) -> None:
        super().check(spec)
        space: Any = spec.space
        if not space.is_bounded():
            raise ValueError(f"the head {self.name} needs bounds on every action, got {space}: use normal")
        width = space.high.astype(np.float64) - space.low
        if self.squashes and not ((width > 0) & (width <= np.finfo(np.float32).max)).all():
            what = f"the head {self.name} needs bounds with low < high, whose difference is a float32, got {space}"
            raise ValueError(f"{what}: leave out actions that are constant, and take other bounds")

    def _bounds(self, xp: Any, spec: ActionSpec, like: Any) -> tuple[Any, Any]:
        space: Any = spec.space
        return in_32_bits(xp, xp.constant(space.low, like)), in_32_bits(xp, xp.constant(space.high, like))


@dataclass(frozen=True)
class TanhNormal(Bounded):
    """Like `normal`, with actions squashed by tanh to the bounds of the Box, which has to be bounded.

    See Haarnoja et al., 2018, appendix C. The network returns the same as for `normal`: loc and scale before the
    squashing. A batch also holds ``action_unsquashed``, the sample before the squashing. The log-probability is
    computed from it, so it is exact even where tanh saturates. For actions that the head did not sample, such as random
    ones, it is the inverse of the squashing, limited to ±7.25. The entropy is exact to 1e-3 for scales up to 2.
    """

    name: str = "tanh_normal"
    squashes: ClassVar[bool] = True

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        raw = super().sample(xp, parameters, noise, spec)["action"]
        low, high = self._bounds(xp, spec, raw)
        return {"action": xp.clip(low + (xp.tanh(raw) + 1) * (high - low) / 2, low, high), _UNSQUASHED: raw}

    def record(self, xp: Any, action: Any, spec: ActionSpec) -> Outputs:
        low, high = self._bounds(xp, spec, action)
        squashed = xp.clip(2 * (in_32_bits(xp, action) - low) / (high - low) - 1, -_INSIDE, _INSIDE)
        return {"action": action, _UNSQUASHED: 0.5 * (xp.log1p(squashed) - xp.log1p(-squashed))}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        raw = outputs[_UNSQUASHED]
        return _total(_density(xp, parameters, raw) - self._slope(xp, raw, *self._bounds(xp, spec, raw)), spec)

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        (loc, scale), (low, high) = parameters, self._bounds(xp, spec, parameters[0])
        loc, scale = loc[..., None], scale[..., None]
        nodes, weights = (xp.constant(row.astype(np.float32), loc) for row in (_NODES, _WEIGHTS / _WEIGHTS.sum()))
        raw = loc + scale * nodes
        slope = self._slope(xp, raw, *(ranked(bound[..., None], raw) for bound in (low, high)))
        return super().entropy(xp, parameters, spec) + _total((slope * weights).sum(-1), spec)

    def _slope(self, xp: Any, raw: Any, low: Any, high: Any) -> Any:
        """The logarithm of the squashing's slope. With Torch's softplus, bits would depend on a number's position."""
        return 2 * (math.log(2) - abs(raw) - xp.log1p(xp.exp(-2 * abs(raw)))) + xp.log((high - low) / 2)


@dataclass(frozen=True)
class ClippedNormal(Bounded):
    """See `clipped_normal`."""

    name: str = "clipped_normal"
    names: tuple[str, ...] = ("loc",)
    scale: Any = 0.0  # a number, arrays that broadcast against a batch [...], or nested lists [*action], which stay
    varying: ClassVar[Mapping[str, Mapping[str, Any]]] = {"scale": {"example": 0.1}}

    log_prob, entropy = Head.log_prob, Head.entropy

    def check(self, spec: ActionSpec) -> None:
        super().check(spec)
        if isinstance(self.scale, list) and (shape := np.shape(self.scale)) != spec.shape:
            wanted = f"expected a number or {list(spec.shape)}, as an action has: pass a number for each component"
            raise ValueError(f"scale has shape {list(shape)}, {wanted}")

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        if tail_of(answer, len(spec.shape), rows=True) != spec.shape:
            wanted = f"the head {self.name} wants {['P', *spec.shape]}: return the action"
            raise PolicyError(f"the policy returned {form(answer)}, {wanted}")
        return (in_32_bits(xp, answer),)

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        action, scale = parameters[0], self.scale
        if noise is not None:
            if isinstance(scale, list):
                scale = xp.constant(np.asarray(scale, np.float32), action)
            elif not isinstance(scale, float):
                scale = scale.reshape((*scale.shape, *[1] * len(spec.shape)))
            action = action + scale * noise
        return {"action": xp.clip(action, *self._bounds(xp, spec, action))}


def clipped_normal(scale: Any) -> Head:
    """A head that adds normal noise to the network's action and clips the sum to the bounds of a floating Box.

    DDPG and TD3 act so (Fujimoto et al., 2018, https://arxiv.org/abs/1802.09477). The network returns the action, [P,
    *action] float; in a dict: ``loc``. The batch has the clipped action, the one that is executed. The mode has no
    noise. There is no log-probability: an action at a bound has a probability, one inside a density. `scale` is the
    standard deviation in units of the action, at least 0: a number, for which rollouts may be given another one,
    ``exploration={"scale": 0.05}``, or a fixed array [*action]. Raises TypeError or ValueError for anything else.

    >>> clipped_normal(0.1).values
    {'scale': 0.1}
    """
    array = np.asarray(scale)
    for number in array.ravel().tolist():
        check_number("scale", number, **ClippedNormal.varying["scale"])
    return ClippedNormal(scale=array.astype(float).tolist())


categorical: Head = Categorical()
greedy: Head = Greedy()
normal: Head = Normal()
tanh_normal: Head = TanhNormal()

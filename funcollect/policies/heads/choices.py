"""Heads for Discrete and MultiDiscrete actions, which read one number for each choice."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from funcollect.arguments import check_number
from funcollect.errors import PolicyError
from funcollect.keys import Noise
from funcollect.messages import form
from funcollect.policies.heads.head import Head, HeadBase, Outputs, Parameters
from funcollect.policies.numerics import encode_choices, in_32_bits
from funcollect.specs import ActionSpec

__all__ = ["boltzmann", "categorical", "epsilon_greedy", "greedy"]


_BESIDE = "; with other outputs beside it, return a dict such as {'logits': …, 'value': …}"


@dataclass(frozen=True)
class _Discrete(HeadBase):
    """Base class of heads that read one number for each choice."""

    def check(self, spec: ActionSpec) -> None:
        if not spec.categories:
            raise ValueError(
                f"the head {self.name} needs a Discrete or MultiDiscrete action space, got {spec.space}: "
                "use normal or tanh_normal for a Box, no head for MultiBinary"
            )

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        wanted = spec.choices
        shape: Sequence[int] = getattr(answer, "shape", ())
        if len(shape) < 2 or shape[-1] != wanted:
            raise PolicyError(
                f"the policy returned {form(answer)}, the head {self.name} wants [P, {wanted}]: "
                f"one number for each choice of {spec.space}{_BESIDE if isinstance(answer, tuple) else ''}"
            )
        return (answer if answer.dtype.itemsize >= 4 else in_32_bits(xp, answer),)

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

    >>> import funcollect as fc, torch
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> batch["action"].shape
    torch.Size([2, 4])
    """

    name: str = "categorical"
    names: tuple[str, ...] = ("logits",)

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="gumbel", shape=(spec.choices,))

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        logits = self._logits(parameters)
        if spec.plain:
            return {"action": xp.gumbel_max(logits, noise)}
        drawn = [None for _ in spec.categories] if noise is None else self._split(noise, spec)
        chosen = map(xp.gumbel_max, self._split(logits, spec), drawn)
        return {"action": encode_choices(xp, list(chosen), spec)}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        logits, action = self._logits(parameters), outputs["action"]
        if spec.plain:
            return xp.log_categorical(logits, action)
        scores = map(xp.log_categorical, self._split(logits, spec), self._decode(action, spec))
        return functools.reduce(operator.add, scores)

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        logs = map(xp.log_softmax, self._split(self._logits(parameters), spec))
        # The logit of a choice that is ruled out is minus infinity; it adds nothing.
        parts = [-(xp.exp(log) * xp.where(log == -math.inf, 0.0, log)).sum(-1) for log in logs]
        return functools.reduce(operator.add, parts)

    def _logits(self, parameters: Parameters) -> Any:
        return parameters[0]


@dataclass(frozen=True)
class Boltzmann(Categorical):
    """Samples a choice with a probability proportional to ``exp(value / temperature)``; see `boltzmann`.

    The network returns the same as for `greedy`.
    """

    name: str = "boltzmann"
    names: tuple[str, ...] = ("action_value",)
    temperature: Any = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.temperature, float):
            check_number("temperature", self.temperature, positive=True, example=1.0)

    @property
    def values(self) -> Mapping[str, Any]:
        return {"temperature": self.temperature}

    def _logits(self, parameters: Parameters) -> Any:
        temperature = self.temperature
        return parameters[0] / (temperature if isinstance(temperature, float) else temperature[..., None])


@dataclass(frozen=True)
class Greedy(_Discrete):
    """The choice with the largest value in a Discrete or MultiDiscrete space, without a log-probability.

    The network returns one value per choice, [P, n] float, laid out as for `categorical`. In a dict: ``action_value``.

    >>> import funcollect as fc, torch
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.greedy)
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> batch["action"].shape
    torch.Size([2, 4])
    """

    name: str = "greedy"
    names: tuple[str, ...] = ("action_value",)

    def noise(self, spec: ActionSpec) -> Noise | None:
        return None

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        return {"action": encode_choices(xp, self._best(parameters, spec), spec)}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        return None

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        return None

    def _best(self, parameters: Parameters, spec: ActionSpec) -> list[Any]:
        return [part.argmax(-1) for part in self._split(parameters[0], spec)]


@dataclass(frozen=True)
class EpsilonGreedy(Greedy):
    """As `greedy`, but with probability `epsilon` a choice drawn uniformly; see `epsilon_greedy`.

    The network returns the same as for `greedy`.
    """

    name: str = "epsilon_greedy"
    epsilon: Any = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.epsilon, float):
            check_number("epsilon", self.epsilon, most=1, example=0.1)

    @property
    def values(self) -> Mapping[str, Any]:
        return {"epsilon": self.epsilon}

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="uniform", shape=(2, len(spec.categories)))

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        if noise is None:
            return super().sample(xp, parameters, noise, spec)
        chosen = []
        for i, (index, count) in enumerate(zip(self._best(parameters, spec), spec.categories, strict=True)):
            anything = xp.clip(xp.floor_int(noise[..., 1, i] * count), 0, count - 1)
            chosen.append(xp.where(noise[..., 0, i] < self.epsilon, anything, index))
        return {"action": encode_choices(xp, chosen, spec)}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        total: Any = 0.0
        indices = self._decode(outputs["action"], spec)
        for part, index, count in zip(self._split(parameters[0], spec), indices, spec.categories, strict=True):
            share = self.epsilon / count
            nan = xp.where(part == part, 0.0, part).sum(-1)
            total = total + xp.log(xp.where(part.argmax(-1) == index, share + (1 - self.epsilon), share)) + nan
        return total

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        first = parameters[0][..., 0]
        total: Any = xp.where(first == first, 0.0, first)  # a NaN stays one
        for count in spec.categories:
            share = total * 0 + self.epsilon / count
            total = total + _surprise(xp, share + (1 - self.epsilon)) + (count - 1) * _surprise(xp, share)
        return total


def _surprise(xp: Any, probability: Any) -> Any:
    """What a choice adds to the entropy; nothing if its probability is 0."""
    return -probability * xp.log(xp.where(probability == 0, 1.0, probability))


categorical: Head = Categorical()
greedy: Head = Greedy()


def epsilon_greedy(epsilon: float) -> Head:
    """A head that takes the choice with the largest value, or with probability `epsilon` one drawn uniformly from all.

    The network returns the same as for `greedy`. Each component of a MultiDiscrete action explores by itself. The
    log-probability is the mixture's.

    Args:
        epsilon: in [0, 1]; rollouts may be given another value, ``exploration={"epsilon": 0.1}``.

    Raises:
        TypeError, ValueError: if `epsilon` is not a number in [0, 1].

    >>> epsilon_greedy(0.1).names
    ('action_value',)
    """
    check_number("epsilon", epsilon, most=1, example=0.1)  # which may be no number
    return EpsilonGreedy(epsilon=float(epsilon))


def boltzmann(temperature: float) -> Head:
    """A head that samples a choice with a probability proportional to ``exp(value / temperature)``.

    The network returns the same as for `greedy`. The mode is the choice with the largest value.

    Args:
        temperature: positive; rollouts may be given another value, ``exploration={"temperature": 0.5}``.

    Raises:
        TypeError, ValueError: if `temperature` is not a positive number.

    >>> boltzmann(0.5).values
    {'temperature': 0.5}
    """
    check_number("temperature", temperature, positive=True, example=1.0)
    return Boltzmann(temperature=float(temperature))

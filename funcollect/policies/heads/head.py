"""The base class of heads, and heads over a distribution of another library."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import distributions

from funcollect.arguments import check_number
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax, own_generator
from funcollect.keys import Noise
from funcollect.messages import name_of, shown
from funcollect.policies.numerics import TORCH, in_32_bits
from funcollect.specs import ActionSpec

__all__ = ["Head", "from_distribution"]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Parameters = tuple[Any, ...]  # of the distribution, each [..., n]
Outputs = Mapping[str, Any]  # by their keys in a batch


@dataclass(frozen=True)
class Head:
    """Base class of heads. By default a head needs no noise and gives no log-probability.

    `xp` holds the functions of `funcollect.policies.numerics`. The network returns what `parse` reads, or a dict that
    holds it under the keys `names`.

    >>> class Greedy(Head):
    ...     def parse(self, xp, answer, spec):
    ...         return (answer,)
    ...     def sample(self, xp, parameters, noise, spec):
    ...         return {"action": parameters[0].argmax(-1)}
    >>> Greedy("greedy", ("scores",))
    Greedy(name='greedy', names=('scores',))
    """

    name: str  # in `funcollect.heads`
    names: tuple[str, ...]  # of the parameters that it reads, in a dict that the network returns
    chooses: ClassVar[bool] = True  # whether its discrete actions always lie in the space
    # The fields that may change during a run, with their rules, as arguments of `check_number`.
    varying: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        """Raise ValueError for a number that breaks the rules of its field; arrays are not checked."""
        for name, rules in self.varying.items():
            if isinstance(value := getattr(self, name), float):
                check_number(name, value, **rules)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The numbers that may change during a run, by name."""
        fields = {name: getattr(self, name) for name in self.varying}
        return {name: value for name, value in fields.items() if not isinstance(value, list)}

    def at(self, values: Mapping[str, Any]) -> Any:
        """The head with other `values`: numbers, or arrays that broadcast against a batch [...]."""
        return replace(self, **values)

    def check(self, spec: ActionSpec) -> None:
        """Raise ValueError if the head cannot act in the action space."""

    def noise(self, spec: ActionSpec) -> Noise | None:
        """The random numbers to draw ahead for one step of one lane, or None."""
        return None

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        """The distribution's parameters, of checked shapes, from the network's answer."""
        raise NotImplementedError

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        """The ``action`` and the entries to record with it; `noise` is None for the mode."""
        raise NotImplementedError

    def record(self, xp: Any, action: Any, spec: ActionSpec) -> Outputs:
        """The outputs that `sample` would have returned for an action that the head did not choose."""
        return {"action": action}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        """The log-probability [...] of the outputs of `sample` or `record`; None if the head defines none."""
        return None

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        """The entropy [...] in nats; None if the head defines none."""
        return None


def check_head(head: Any) -> None:
    """Raise TypeError unless `head` is a head or None."""
    if head is not None and (isinstance(head, type) or not hasattr(head, "log_prob")):
        what = f"head is {shown(head)}, expected one of funcollect.heads: categorical, greedy, normal, tanh_normal"
        raise TypeError(f"{what}, epsilon_greedy(0.1), boltzmann(1.0), clipped_normal(0.1) or from_distribution(...)")


def from_distribution(distribution: Callable[..., Any], *names: str) -> FromDistribution:
    """A head that samples from a distribution of Torch, or one with the interface of distrax.

    The network returns the parameters `names`, one array or a tuple of them, each with leading dimensions [P]; or a
    dict that holds them. Log-probabilities and entropies of independent components are added up.

    Samples of Torch's distributions come from Torch's global generator, which runs from the policy's own state, so they
    depend on how lanes are grouped. The policy's module is not fused with an environment written in JAX.

    Args:
        distribution: called with the parameters by name. It returns a `torch.distributions.Distribution`, or for
            `jax_policy` an object with ``sample(seed=key)``, ``mode()``, ``log_prob(action)`` and ``entropy()``.
        names: its parameters; by default those that have no default value.

    Raises:
        TypeError: if `distribution` cannot be called, or names are neither given nor found.

    >>> import torch, funcollect as fc
    >>> head = fc.heads.from_distribution(torch.distributions.Beta, "concentration1", "concentration0")
    >>> policy = fc.torch_policy(lambda x: (1 + x[:, :1].abs(), 1 + x[:, 1:2].abs()), head=head)
    """
    if not callable(distribution):
        raise TypeError(
            f"distribution is {shown(distribution)}, expected a function returning one: pass torch.distributions.Beta"
        )
    found: Sequence[Any] = names
    if not names:  # the parameters without a default value
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(distribution).parameters.values()
            found = [one.name for one in parameters if one.default is one.empty and one.kind in _NAMED]
    if not found or not all(isinstance(name, str) for name in found):
        what = f"names is {shown(found)}, expected the parameters of {shown(distribution)} that the network returns"
        raise TypeError(f"{what}: pass for example from_distribution(torch.distributions.Categorical, 'logits')")
    return FromDistribution(f"from_distribution({name_of(distribution)})", tuple(found), distribution)


@dataclass(frozen=True)
class FromDistribution(Head):
    """See `from_distribution`. The network returns the distribution's parameters, in the order of `names`."""

    distribution: Callable[..., Any]
    chooses: ClassVar[bool] = False

    def noise(self, spec: ActionSpec) -> Noise | None:
        return Noise(kind="keys")  # Torch draws its own numbers instead

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        parts = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
        if len(parts) != len(self.names) or not all(hasattr(part, "shape") for part in parts):
            what = f"the policy returned {shown(answer)}, {self.name} wants {list(self.names)}, an array each"
            raise PolicyError(f"{what}: return them")
        return tuple(in_32_bits(xp, part) for part in parts)

    def _build(self, parameters: Parameters) -> Any:
        return self.distribution(**dict(zip(self.names, parameters, strict=True)))

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        if xp is TORCH:
            built = self._build(parameters)
            if not isinstance(built, distributions.Distribution):
                what = f"the head {self.name} made {shown(built)}, expected a torch.distributions.Distribution"
                raise PolicyError(f"{what}: return one, or use the head with funcollect.jax_policy")
            action = built.sample() if noise is not None else _mode(built, self.name)
            return {"action": action if spec.dtype.is_floating_point else action.to(spec.dtype)}  # Bernoulli has floats
        if noise is None:
            return {"action": self._build(parameters).mode()}
        draw = import_jax().vmap(lambda key, *row: self._build(row).sample(seed=key))
        with own_generator():
            return {"action": draw(noise, *parameters)}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        value = action = outputs["action"]
        if xp is TORCH and not action.is_floating_point():
            # Torch's Bernoulli takes floats. Those of 16 bits cannot hold every index.
            value = action.to(torch.promote_types(parameters[0].dtype, torch.float32))
        return summed(self._build(parameters).log_prob(value), action.ndim - len(spec.shape))

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        built = self._build(parameters)
        try:
            entropy = built.entropy()
        except NotImplementedError:  # Torch defines none for some distributions
            return None
        shape = built.batch_shape + built.event_shape if hasattr(built, "batch_shape") else built.mode().shape
        return summed(entropy, len(shape) - len(spec.shape))


def _mode(distribution: distributions.Distribution, name: str) -> torch.Tensor:
    """The mode, or the mean of a distribution that has none; PolicyError if it has neither."""
    for statistic in ("mode", "mean"):
        with contextlib.suppress(NotImplementedError):  # Torch defines none for some distributions
            found: torch.Tensor = getattr(distribution, statistic)
            return torch.where(found.isnan(), distribution.mean, found) if found.is_floating_point() else found
    what = f"the head {name} made {shown(distribution)}, which has neither a mode nor a mean"
    mend = "act with ExplorationType.RANDOM, or use a distribution that has one"
    raise PolicyError(f"{what}, expected one to act deterministically: {mend}")


def summed(score: Any, dims: int) -> Any:
    """A score [...] summed over the dimensions after the first `dims`, which are independent components."""
    return score.sum(tuple(range(dims, score.ndim))) if score.ndim > dims else score

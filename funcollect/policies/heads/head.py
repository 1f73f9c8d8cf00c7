"""What a head is: the protocol, and what heads share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from funcollect.keys import Noise
from funcollect.messages import shown
from funcollect.specs import ActionSpec

__all__ = ["Head"]

Parameters = tuple[Any, ...]  # of the distribution, each [..., n]
Outputs = Mapping[str, Any]  # by their keys in a batch


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

    @property
    def values(self) -> Mapping[str, Any]:
        """The numbers that may change during a run, by name."""

    def at(self, values: Mapping[str, Any]) -> Head:
        """The head with other `values`: numbers, or arrays that broadcast against a batch [...]."""

    def check(self, spec: ActionSpec) -> None:
        """Raise ValueError if the action space does not suit."""

    def noise(self, spec: ActionSpec) -> Noise | None:
        """The random numbers to draw ahead for one step of one lane, or None."""

    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        """The distribution's parameters, of checked shapes, from the network's answer."""

    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        """The ``action`` and the entries recorded with it; `noise` is None for the mode."""

    def record(self, xp: Any, action: Any, spec: ActionSpec) -> Outputs:
        """What `sample` would have returned with an action that was chosen otherwise."""

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        """The log-probability [...] of what `sample` or `record` returned; None if the head defines none."""

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        """The entropy [...] in nats; None if the head defines none."""


@dataclass(frozen=True)
class HeadBase:
    """Base class of heads, by default without noise and scores. The fields in `varying` may change during a run."""

    name: str
    names: tuple[str, ...]
    chooses: ClassVar[bool] = True  # whether a discrete action is one of the space's in any case
    varying: ClassVar[tuple[str, ...]] = ()

    @property
    def values(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.varying}

    def at(self, values: Mapping[str, Any]) -> Any:
        return replace(self, **values)

    def noise(self, spec: ActionSpec) -> Noise | None:
        return None

    def record(self, xp: Any, action: Any, spec: ActionSpec) -> Outputs:
        return {"action": action}

    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        return None

    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        return None


def chooses(head: Any) -> bool:
    """Whether a discrete action is one of its space's because of the head; else it has to be checked."""
    return isinstance(head, HeadBase) and head.chooses


def check_head(head: Any) -> None:
    """Raise TypeError unless `head` is a head or None."""
    if head is not None and (isinstance(head, type) or not hasattr(head, "log_prob")):
        raise TypeError(
            f"head is {shown(head)}, expected one of funcollect.heads: categorical, greedy, normal, tanh_normal, "
            "epsilon_greedy(0.1), boltzmann(1.0) or from_distribution(...)"
        )

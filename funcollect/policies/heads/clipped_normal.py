"""The behaviour of deterministic policies: an action, noise of a fixed scale, and the bounds of the space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from funcollect.arguments import check_number
from funcollect.errors import PolicyError
from funcollect.messages import form, shown
from funcollect.policies.heads.built_in import Normal, bounds_of, check_bounds, tail_of
from funcollect.policies.heads.head import Head, Outputs, Parameters
from funcollect.policies.numerics import in_32_bits
from funcollect.specs import ActionSpec

__all__ = ["clipped_normal"]


def clipped_normal(scale: Any) -> Head:
    """A head that adds normal noise to the network's action, and clips the sum to the bounds of a floating Box.

    This is the behaviour policy of DDPG and TD3 (Fujimoto et al., 2018, https://arxiv.org/abs/1802.09477).

    The network returns the action, [P, *action] float; in a dict: ``loc``. The batch holds the clipped action, the one
    that was executed. Its mode is the clipped output of the network. There is no log-probability and no entropy: an
    action at a bound has a probability, one inside has a density.

    Args:
        scale: the standard deviation of the noise, in units of the action: a number, or an array [*action] with one for
            each component. Rollouts may be given another number, ``exploration={"scale": 0.05}``, but not in place of
            an array.

    Raises:
        TypeError, ValueError: if `scale` is not finite and at least 0; by `funcollect.init` for a space without bounds.

    >>> import funcollect as fc, torch
    >>> policy = fc.torch_policy(torch.nn.Linear(3, 1), head=fc.heads.clipped_normal(scale=0.1))
    """
    if np.ndim(scale) == 0:
        number = scale.item() if hasattr(scale, "item") else scale
        check_number("scale", number, example=0.1)  # which may be no number
        return ClippedNormal(scale=float(number))
    try:
        numbers = np.asarray(scale, np.float32)
    except (TypeError, ValueError) as error:
        raise TypeError(f"scale is {shown(scale)}, expected a number or an array [*action]: pass scale=0.1") from error
    for number in numbers.ravel().tolist():
        check_number("scale", number, example=0.1)
    return ClippedNormal(scale=_nested(numbers.tolist()))


def _nested(numbers: Any) -> Any:
    """Lists as tuples, which heads can be compared and hashed with."""
    return tuple(map(_nested, numbers)) if isinstance(numbers, list) else numbers


@dataclass(frozen=True)
class ClippedNormal(Normal):
    """See `clipped_normal`."""

    name: str = "clipped_normal"
    names: tuple[str, ...] = ("loc",)
    scale: Any = 0.0  # a number, values that broadcast against a batch [...], or nested tuples [*action]

    def __post_init__(self) -> None:
        if isinstance(self.scale, float):
            check_number("scale", self.scale, example=0.1)

    @property
    @override
    def values(self) -> Mapping[str, Any]:
        return {} if isinstance(self.scale, tuple) else {"scale": self.scale}

    @override
    def check(self, spec: ActionSpec) -> None:
        super().check(spec)
        check_bounds(self.name, spec)
        if isinstance(self.scale, tuple) and (shape := np.shape(self.scale)) != spec.shape:
            raise ValueError(
                f"scale has shape {list(shape)}, expected a number or {list(spec.shape)}, as an action in {spec.space} "
                "has: pass one number per component"
            )

    @override
    def parse(self, xp: Any, answer: Any, spec: ActionSpec) -> Parameters:
        if tail_of(answer, len(spec.shape), rows=True) != spec.shape:
            raise PolicyError(
                f"the policy returned {form(answer)}, the head {self.name} wants {['P', *spec.shape]}: return the action"
            )
        return (in_32_bits(xp, answer),)

    @override
    def sample(self, xp: Any, parameters: Parameters, noise: Any, spec: ActionSpec) -> Outputs:
        action, scale = parameters[0], self.scale
        if noise is not None:
            if isinstance(scale, tuple):
                scale = xp.constant(np.asarray(scale, np.float32), action)
            elif not isinstance(scale, float):
                scale = scale.reshape((*scale.shape, *[1] * len(spec.shape)))
            action = action + scale * noise
        return {"action": xp.clip(action, *bounds_of(xp, spec, action))}

    @override
    def log_prob(self, xp: Any, parameters: Parameters, outputs: Outputs, spec: ActionSpec) -> Any:
        return None

    @override
    def entropy(self, xp: Any, parameters: Parameters, spec: ActionSpec) -> Any:
        return None

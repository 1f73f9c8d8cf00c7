"""The behaviour of deterministic policies: an action and noise of a fixed scale, clipped to the bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from funcollect.arguments import check_number
from funcollect.errors import PolicyError
from funcollect.messages import form
from funcollect.policies.heads.built_in import Bounded, tail_of
from funcollect.policies.heads.head import Head, Outputs, Parameters
from funcollect.policies.numerics import in_32_bits
from funcollect.specs import ActionSpec

__all__ = ["clipped_normal"]


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
    given = np.asarray(scale)
    for number in given.ravel().tolist():
        check_number("scale", number, example=0.1)
    return ClippedNormal(scale=given.astype(float).tolist())


@dataclass(frozen=True)
class ClippedNormal(Bounded):
    """See `clipped_normal`."""

    name: str = "clipped_normal"
    names: tuple[str, ...] = ("loc",)
    scale: Any = 0.0  # a number, arrays that broadcast against a batch [...], or nested lists [*action]

    log_prob, entropy = Head.log_prob, Head.entropy

    def __post_init__(self) -> None:
        if isinstance(self.scale, float):
            check_number("scale", self.scale, example=0.1)

    @property
    def values(self) -> Mapping[str, Any]:
        return {} if isinstance(self.scale, list) else {"scale": self.scale}

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

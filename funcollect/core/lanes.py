"""Lanes in traced code: their keys, and choices between them.

Each key follows from the run's key, its purpose, the lane, and the episode or step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Purpose
from funcollect.policies.numerics import jax_numerics
from funcollect.threefry import Pair, hashed_in_jax

_PURPOSES = (Purpose.NOISE, Purpose.RANDOM_ACTION, Purpose.DYNAMICS, Purpose.RESET)


class RunKeys(NamedTuple):
    """The lanes' keys, which do not change during a run: the words of each purpose and lane, uint32 [4, P]."""

    first: Any
    second: Any

    def of(self, purpose: Purpose) -> Pair:
        """The lanes' keys [P] for a purpose."""
        at = _PURPOSES.index(purpose)
        return self.first[at], self.second[at]

    def at(self, purpose: Purpose, high: Any, low: Any) -> Any:
        """The lanes' keys [P, 2] for the step, or the episodes, with the number of these words."""
        return import_jax().numpy.stack(hashed_in_jax(self.of(purpose), high, low), -1)


def run_keys(key: Any, lane: Any) -> RunKeys:
    """Return the keys of a run from its key [2] and its lanes [P]: all with two hashes, since XLA compiles each."""
    by_purpose = hashed_in_jax((key[0], key[1]), np.uint32(0), np.array(_PURPOSES, np.uint32)[:, None])
    return RunKeys(*hashed_in_jax(by_purpose, np.uint32(0), lane.astype(np.uint32)))


def where_lanes(mask: Any, chosen: Any, other: Any) -> Any:
    """Return a pytree with the lanes of `mask` [P] taken from `chosen` and the others from `other`."""
    return jax_numerics().select(mask, chosen, other)


def varying(lane: Any, tree: Any) -> Any:
    """Return the pytree with leaves that depend on `lane`: in a `shard_map`, a loop rejects constants.

    XLA removes the choice between equals. JAX's own function for this has a different name in each version.
    """
    return where_lanes(lane == lane, tree, tree)

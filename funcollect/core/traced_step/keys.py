"""Randomness in traced code: every key follows from the run's, by what it is for, the lane, and the episode or step.

A hash is a loop of its own, which XLA does not move out of a loop around it: what is fixed for a run is worked out
before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Purpose


class RunKeys(NamedTuple):
    """What does not change in a run; each [2] uint32."""

    noise: Any  # of the lanes from the first one's id on: shards of one run draw different noise
    random_action: Any  # the same
    dynamics: Any
    starts: Any


def run_keys(key: Any, lane: Any) -> RunKeys:
    """The keys of a run with the key [2] in the lanes [P]."""
    return RunKeys(
        noise=folded(key, Purpose.NOISE, lane[0]),
        random_action=folded(key, Purpose.RANDOM_ACTION, lane[0]),
        dynamics=folded(key, Purpose.DYNAMICS, 0),
        starts=folded(key, Purpose.RESET, 0),
    )


def step_key(key: Any, steps: Any) -> Any:
    """One of the run's keys at the step with this number, high word last [2]."""
    return folded(key, steps[1], steps[0])


def dynamics_keys(keys: RunKeys, lane: Any, steps: Any) -> Any:
    """The keys [P, 2] with which the lanes [P] advance at a step."""
    return import_jax().vmap(folded, (None, None, 0))(step_key(keys.dynamics, steps), 0, lane)


def start_keys(keys: RunKeys, lane: Any, episode: Any) -> Any:
    """The keys [P, 2] with which the lanes [P] begin their episodes [P]."""
    return import_jax().vmap(folded, (None, 0, 0))(keys.starts, lane, episode)


def folded(key: Any, one: Any, two: Any) -> Any:
    """The key [2] that follows from a key and two words: one hash, where folding them in singly would take two."""
    from jax.extend.random import threefry_2x32

    jnp = import_jax().numpy
    return threefry_2x32((key[0], key[1]), jnp.stack([jnp.asarray(word).astype(jnp.uint32) for word in (one, two)]))

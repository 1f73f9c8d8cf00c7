"""Randomness in traced code: each key follows from the run's key, its purpose, the lane, and the episode or step.

A hash is a loop, which XLA does not move out of an enclosing loop, so keys that are fixed for a run are computed first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Purpose


class RunKeys(NamedTuple):
    """The keys that do not change during a run; each [2] uint32."""

    noise: Any  # depends on the first lane's id, so that the shards of one run draw different noise
    random_action: Any  # likewise
    dynamics: Any
    starts: Any


def run_keys(key: Any, lane: Any) -> RunKeys:
    """Return the keys of a run from its key [2] and its lanes [P]."""
    return RunKeys(
        noise=folded(key, Purpose.NOISE, lane[0]),
        random_action=folded(key, Purpose.RANDOM_ACTION, lane[0]),
        dynamics=folded(key, Purpose.DYNAMICS, 0),
        starts=folded(key, Purpose.RESET, 0),
    )


def step_key(key: Any, steps: Any) -> Any:
    """Return one of the run's keys for the step with the number `steps` [2], low word first."""
    return folded(key, steps[1], steps[0])


def dynamics_keys(keys: RunKeys, lane: Any, steps: Any) -> Any:
    """Return the keys [P, 2] for a step of the lanes [P]."""
    return import_jax().vmap(folded, (None, None, 0))(step_key(keys.dynamics, steps), 0, lane)


def start_keys(keys: RunKeys, lane: Any, episode: Any) -> Any:
    """Return the keys [P, 2] for the starts of the lanes' [P] episodes [P]."""
    return import_jax().vmap(folded, (None, 0, 0))(keys.starts, lane, episode)


def folded(key: Any, one: Any, two: Any) -> Any:
    """Return the key [2] that follows from a key and two words, with one hash; folding them in one by one takes two."""
    from jax.extend.random import threefry_2x32

    jnp = import_jax().numpy
    return threefry_2x32((key[0], key[1]), jnp.stack([jnp.asarray(word).astype(jnp.uint32) for word in (one, two)]))

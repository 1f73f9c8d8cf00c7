"""The noise of policies in traced code: the numbers that `funcollect.keys.draw_ahead` draws on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Noise
from funcollect.threefry import Pair, hashed_in_jax

Draw = Callable[[int], Any]  # draws as many words for each lane: uint32 [P, width]


def drawing(keys: Pair, steps: Any) -> Draw:
    """Draws with the lanes' keys [P] at the step with the number `steps` [2], low word first."""
    return partial(_words, keys, steps)


def _words(keys: Pair, steps: Any, width: int) -> Any:
    """One hash for each word, in one dimension: XLA uses a processor's vectors only then, which is faster by far."""
    jnp = import_jax().numpy
    number = jnp.tile(jnp.arange(width, dtype=jnp.uint32), len(keys[0]))
    by_word = jnp.repeat(keys[0], width), jnp.repeat(keys[1], width)
    first, second = hashed_in_jax(by_word, (1 + number // 2) | steps[1] << np.uint32(16), steps[0])
    return jnp.where(number % 2 == 0, first, second).reshape(-1, width)


def draw_noise(noise: Noise, draw: Draw) -> Any:
    """The noise of one step: [P, *shape] float32, or uint32 keys [P, 2] or [2]."""
    jax = import_jax()
    words = draw(noise.words)
    if noise.kind in ("key", "keys"):
        return words[0] if noise.kind == "key" else words
    centred = (words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)
    drawn = (centred * np.float32(2.0**-23)).reshape(-1, *noise.shape)
    if noise.kind == "gumbel":
        return -jax.numpy.log(-jax.numpy.log(drawn))
    return jax.scipy.special.ndtri(drawn) if noise.kind == "normal" else drawn


def split_key(words: Any, num_envs: int) -> tuple[Any, Draw]:
    """Another key like `words`, [2] or [P, 2], for a function's own use, and independent draws for P lanes."""
    jnp = import_jax().numpy
    pair, none = (words[..., 0], words[..., 1]), np.uint32(0)
    lanes = np.arange(1, 1 + num_envs, dtype=np.uint32) if words.ndim == 1 else np.uint32(1)
    own = jnp.stack(hashed_in_jax(pair, none, none), -1)
    return own, drawing(hashed_in_jax(pair, none, lanes), np.zeros(2, np.uint32))

"""The noise of policies in traced code: the numbers that `funcollect.keys.draw_ahead` draws on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Noise
from funcollect.threefry import Pair, hashed_in_jax

Draw = Callable[[int], Any]  # draws as many words for each lane: uint32 [width, P]


def drawing(keys: Pair, steps: Any) -> Draw:
    """Draws with the lanes' keys [P] at the step with the number `steps` [2], low word first."""
    return partial(_words, keys, steps)


def _words(keys: Pair, steps: Any, width: int) -> Any:
    """One hash for each word, over lanes in the last dimension: XLA then uses the processor's vectors."""
    jnp = import_jax().numpy
    number = jnp.arange(width, dtype=jnp.uint32)[:, None]
    first, second = hashed_in_jax(keys, (1 + number // 2) | steps[1] << np.uint32(16), steps[0])
    return jnp.where(number % 2 == 0, first, second)


def draw_noise(noise: Noise, draw: Draw) -> Any:
    """The noise of one step: [P, *shape] float32, or uint32 keys [P, 2] or [2]."""
    jax = import_jax()
    words = draw(noise.words)
    if noise.kind in ("key", "keys"):
        return words[:, 0] if noise.kind == "key" else words.T
    centred = (words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)
    drawn = centred * np.float32(2.0**-23)
    if noise.kind == "gumbel":
        drawn = -jax.numpy.log(-jax.numpy.log(drawn))
    elif noise.kind == "normal":
        drawn = jax.scipy.special.ndtri(drawn)
    return drawn.T.reshape(-1, *noise.shape)


def split_key(words: Any, num_envs: int) -> tuple[Any, Draw]:
    """Another key like `words`, [2] or [P, 2], for a function's own use, and independent draws for P lanes."""
    jnp = import_jax().numpy
    pair, none = (words[..., 0], words[..., 1]), np.uint32(0)
    lanes = np.arange(1, 1 + num_envs, dtype=np.uint32) if words.ndim == 1 else np.uint32(1)
    own = jnp.stack(hashed_in_jax(pair, none, none), -1)
    return own, drawing(hashed_in_jax(pair, none, lanes), np.zeros(2, np.uint32))

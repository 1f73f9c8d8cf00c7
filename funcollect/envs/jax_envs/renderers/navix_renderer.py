"""Draw states of navix's environments with the sprites of its pixel observations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.envs.extras import import_extra
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import Renderer

_FPS = 10  # MiniGrid's
_SIZE = 256  # pixels that the shorter side has at least, up to rounding: navix draws 8 for a cell


@contextmanager
def navix_renderer() -> Iterator[Renderer]:
    """Draw the whole grid of a state, whatever the environment's own observations are."""
    jitted = import_jax().jit(import_extra("navix.observations", "navix", "jax-envs").rgb)

    def draw(timestep: Any, _: Any) -> Any:
        return _enlarged(np.asarray(jitted(timestep.state)))

    yield Renderer(_FPS, draw)


def _enlarged(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The picture with each pixel repeated."""
    times = max(1, _SIZE // min(picture.shape[:2]))
    return picture.repeat(times, 0).repeat(times, 1)

"""Replay buffers: packed rows, the ring over them, storages, samplers, `ReplayBuffer`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]  # by name, as in a dump

"""Import optional packages on first use."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def import_extra(module: str, package: str, extra: str) -> Any:
    """Import `module`, or raise ImportError with the command that installs `package`."""
    try:
        with _global_generators_kept():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(
            f"{package} is not installed: pip install 'funcollect[{extra}]', or only it: pip install {package}"
        ) from error


@contextmanager
def _global_generators_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and Torch's global generators: EnvPool's import draws from NumPy's."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

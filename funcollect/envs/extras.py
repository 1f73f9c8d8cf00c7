"""Import optional packages on first use."""

from __future__ import annotations

import importlib
import random
from typing import Any

import numpy as np
import torch


def import_extra(module: str, package: str, extra: str) -> Any:
    """Import `module`, or raise ImportError with the command that installs `package`.

    The state of the global generators is kept, since an import may draw from them: EnvPool's draws from NumPy's.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(
            f"{package} is not installed: pip install 'funcollect[{extra}]', or only it: pip install {package}"
        ) from error
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)

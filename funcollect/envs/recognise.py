"""Recognise the environments of other libraries without importing these."""

from __future__ import annotations

import sys
from typing import Any


def is_torchrl(env: Any) -> bool:
    """Whether `env` is one of TorchRL's environments; does not import TorchRL."""
    envs = sys.modules.get("torchrl.envs")
    return envs is not None and isinstance(env, envs.EnvBase)


def is_envpool(env: Any) -> bool:
    """Whether `env` is a pool that EnvPool has built, through whichever interface."""
    return any(base.__module__.partition(".")[0] == "envpool" for base in type(env).__mro__)

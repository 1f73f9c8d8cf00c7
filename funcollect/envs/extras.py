"""Packages that come with an extra of ours, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, package: str, extra: str) -> Any:
    """`module`, or ImportError with the command that installs `package`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"{package} is not installed: pip install 'funcollect[{extra}]' brings it") from error

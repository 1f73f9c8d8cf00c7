"""Branches on data that only skip work, taken whatever the data is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LIBRARY = f"{Path(torch.__file__).parent}/"
_SKIPPING = "torchrl/modules/tensordict_module/rnn.py"  # sets masked states to 0, if the mask has any


class NoShortcuts(TorchFunctionMode):
    """TorchRL's recurrent modules ask whether any lane begins an episode, and else leave out a masked reset."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Yes to that question; everything else as it is."""
        if func is torch.Tensor.__bool__ and _asker().endswith(_SKIPPING):
            return True
        return func(*args, **(kwargs or {}))


def _asker() -> str:
    """The file of the innermost frame outside Torch and this one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_LIBRARY, __file__)):
        frame = frame.f_back
    return frame.f_code.co_filename

"""Devices, checked when a caller names them."""

from __future__ import annotations

import torch

from funcollect.messages import clipped


def checked_device(device: torch.device | str | None, name: str = "device") -> torch.device | None:
    """Return the device that a caller named, with its index, or None for None; `name` is the argument's name.

    Raises:
        ValueError: if Torch cannot allocate memory on it.
    """
    if device is None:
        return None
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:  # depends on the device
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name} is {str(device)!r}, expected a device that Torch has here ({clipped(reason, 200)}): choose "
            "another, such as 'cpu' or 'cuda:0'"
        ) from error

"""Devices, shown to exist where they are named."""

from __future__ import annotations

import torch

from funcollect.messages import clipped


def checked_device(device: torch.device | str | None, name: str = "device") -> torch.device | None:
    """The device, with its index; None for None.

    Args:
        device: what a caller gave.
        name: the argument's name, for the message.

    Raises:
        ValueError: where Torch cannot allocate on it.
    """
    if device is None:
        return None
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:  # one or another, by the device
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name} is {str(device)!r}, expected a device that Torch has here ({clipped(reason, 200)}): choose "
            "another, such as 'cpu' or 'cuda:0'"
        ) from error

"""Numbers that decide whether to raise: read at once, or together where each read waits for a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_Doubt = tuple[Tensor, Callable[[Any], bool], Callable[[], None]]  # as `complain_if` takes it
_LATER: ContextVar[list[_Doubt] | None] = ContextVar("later", default=None)


def complain_if(number: Tensor, is_wrong: Callable[[Any], bool], complain: Callable[[], None]) -> None:
    """Call `complain`, which raises, if a tensor [] holds a wrong number: now, or at the end of `reads_together`."""
    doubts = _LATER.get()
    if doubts is not None:
        doubts.append((number, is_wrong, complain))
    elif is_wrong(number.item()):
        complain()


@contextlib.contextmanager
def reads_together() -> Iterator[None]:
    """Read the numbers of all `complain_if` within the block at its end, by one copy if they are on one device."""
    doubts: list[_Doubt] = []
    token = _LATER.set(doubts)
    try:
        yield
    finally:
        _LATER.reset(token)
    if doubts:
        place = next((number.device for number, *_ in doubts if number.device.type != "cpu"), None)
        numbers = torch.stack([number.to(place, torch.float32) for number, *_ in doubts]).tolist()
        for (_, is_wrong, complain), number in zip(doubts, numbers, strict=True):
            if is_wrong(number):
                complain()

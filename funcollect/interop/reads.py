"""Numbers that decide whether to raise: read at once, or together where each read waits for a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Doubt(NamedTuple):
    number: Tensor  # []
    is_wrong: Callable[[Any], bool]
    complain: Callable[[], None]


_LATER: ContextVar[list[_Doubt] | None] = ContextVar("later", default=None)


def complain_if(number: Tensor, is_wrong: Callable[[Any], bool], complain: Callable[[], None]) -> None:
    """Call `complain`, which raises, if a tensor [] holds a wrong number: now, or at the end of `reads_together`."""
    doubts = _LATER.get()
    if doubts is not None:
        doubts.append(_Doubt(number, is_wrong, complain))
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
        place = next((doubt.number.device for doubt in doubts if doubt.number.device.type != "cpu"), None)
        numbers = torch.stack([doubt.number.to(place, torch.float32) for doubt in doubts]).tolist()
        for doubt, number in zip(doubts, numbers, strict=True):
            if doubt.is_wrong(number):
                doubt.complain()

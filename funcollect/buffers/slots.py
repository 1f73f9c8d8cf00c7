"""Slots that a caller was given, and whether the frames that were in them are still there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import is_tensor_collection

from funcollect.buffers import Bools, Ints
from funcollect.buffers.indices import BufferView
from funcollect.messages import shown


def numbers_of(name: str, values: Any, kinds: str) -> npt.NDArray[Any]:
    """The values as an array ``[N]``; TypeError unless its dtype is of one of these kinds."""
    wanted = "integers: slots" if kinds == "iu" else "numbers: one for each frame, or one for all"
    try:
        array = torch.as_tensor(values).detach().cpu()
        numbers = (array.float() if array.dtype == torch.bfloat16 else array).numpy().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {shown(values)}, expected {wanted}") from error
    if numbers.dtype.kind not in kinds and (numbers.size or is_tensor_collection(values)):
        raise TypeError(f"{name} is {numbers.dtype if numbers.size else type(values).__name__}, expected {wanted}")
    return numbers


def later(written: Any, now: int, count: int) -> Any:
    """How many frames were written after these numbers of frames, one or [N]; ValueError for impossible ones."""
    least = most = written
    if type(written) is not int:
        written = numbers_of("written", written, "iu").astype(np.int64)
        if len(written) not in (1, count):
            raise ValueError(f"written has {len(written)} numbers for {count} frames: give one for each, or for all")
        least, most = written.min(initial=now), written.max(initial=0)
    if not 0 <= least <= most <= now:
        raise ValueError(f"written is {shown(written)}, expected 0 to {now}, the frames so far: pass written_at(index)")
    return now - written


def present_in(memory: BufferView, slots: Ints, written: Any, before: int) -> Bools | None:
    """Whether the frames that were in `slots` [N] are still there; None if all are. Those of -1 are not.

    They were there when a buffer had been given `written` frames, one number or [N], or None if they are there now. The
    ring began after `before` of them. ValueError for slots that have no frame, and for an impossible `written`.
    """
    after = 0 if written is None else later(written, before + memory.written, len(slots))
    late = bool(np.any(after > 0)) if isinstance(after, np.ndarray) else after > 0
    if not len(slots) or (not late and slots.view(np.uint64).max() < len(memory)):  # a negative one is huge there
        return None
    present: Bools = slots != -1
    if late:  # the frame that a slot held then is still there
        present &= ((memory.written - 1 - slots) % memory.capacity >= after) & (after < memory.written)
    rest = slots[present]
    if len(rest) and rest.view(np.uint64).max() >= len(memory):
        what = f"index holds slots from {rest.min()} to {rest.max()}"
        where = f"the buffer has frames in 0 … {len(memory) - 1}"
        raise ValueError(f'{what}, {where}: give slots that extend returned, or those in info["index"]')
    return present

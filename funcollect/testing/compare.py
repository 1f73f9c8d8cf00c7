"""Compare runs, and find the first row at which they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.messages import clipped
from funcollect.testing.report import fail
from funcollect.tree import Path, flatten


def to_tensor(leaf: Any) -> Tensor:
    """A copy of a tensor or of an array of JAX or NumPy, as a tensor that needs no gradient."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))


def bits_differ(one: Tensor, two: Tensor) -> Tensor:
    """Whether the rows of two tensors [P, T, ...] have different bits: [P, T] bool."""
    ours, theirs = (
        leaf.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).reshape(*leaf.shape[:2], -1)
        for leaf in (one, two)
    )
    return (ours != theirs).any(-1)


def numbers_differ(one: Tensor, two: Tensor) -> Tensor:
    """Whether the rows of two tensors [P, T, ...] differ by more than rounding errors: [P, T] bool."""
    ours, theirs = (leaf.detach().cpu().double() for leaf in (one, two))
    close = torch.isclose(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
    return ~close.reshape(*one.shape[:2], -1).all(-1)


def expect_equal(
    got: TensorDictBase,
    wanted: TensorDictBase,
    *,
    what: str,
    source: str,
    mend: str,
    differs: Callable[[Tensor, Tensor], Tensor] = bits_differ,
) -> None:
    """Fail unless two batches [P, T] are equal; in the message, `what` names `got`, and `source` names `wanted`."""
    ours, theirs = flatten(got), flatten(wanted)
    kinds = [{path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()} for leaves in (ours, theirs)]
    if kinds[0] != kinds[1]:
        path = min(path for path in ours.keys() | theirs.keys() if kinds[0].get(path) != kinds[1].get(path))
        expected = f"{kinds[1].get(path)} as in {source}"
        raise fail(f"{what}, {'.'.join(path)}", expected=expected, got=kinds[0].get(path), mend=mend)
    places = {path: first_row(differs(leaf, theirs[path])) for path, leaf in ours.items()}
    if found := [(*place[::-1], path) for path, place in places.items() if place]:
        step, lane, path = min(found)
        expected, row = f"{shown(theirs[path][lane, step])} as in {source}", shown(ours[path][lane, step])
        raise fail(f"{what}, {spot(lane, step, path)}", expected=expected, got=row, mend=mend)


def expect_bits(got: Tensor, wanted: Tensor, what: str, mend: str) -> None:
    """Fail unless a tensor still has the bits of an earlier copy; `what` names it in the message, `mend` is the fix."""
    one, two = (each.detach().reshape(1, 1, -1) for each in (got, wanted))
    if one.shape != two.shape or bool(bits_differ(one, two).any()):
        raise fail(what, expected=f"unchanged, {shown(wanted)}", got=shown(got), mend=mend)


def first_row(wrong: Tensor) -> tuple[int, int] | None:
    """The lane and step of the earliest row of a mask [P, T, ...] that is True anywhere; None if there is none."""
    found = [(step, lane) for lane, step in wrong.reshape(*wrong.shape[:2], -1).any(-1).nonzero().tolist()]
    return min(found)[::-1] if found else None


def spot(lane: int, step: int, path: Path) -> str:
    """The name of a row of a run, for a message: ``"lane 0, step 3, next.reward"``."""
    return f"lane {lane}, step {step}, {'.'.join(path)}"


def shown(value: Tensor) -> str:
    """The numbers in a tensor as text for a message, shortened if there are many."""
    return clipped(str(value.tolist()))

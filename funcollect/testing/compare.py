"""Runs compared bit for bit, and the first place at which they differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.messages import clipped
from funcollect.testing.report import fail
from funcollect.tree import Path, flatten

Differs = Callable[[Tensor, Tensor], Tensor]  # [P, T, ...] twice -> [P, T] bool


def bits_differ(one: Tensor, two: Tensor) -> Tensor:
    """[P, T] bool: the rows that are not equal bit for bit."""
    shape = (*one.shape[:2], -1)
    return (_bytes(one).reshape(shape) != _bytes(two).reshape(shape)).any(-1)


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8)


def numbers_differ(one: Tensor, two: Tensor) -> Tensor:
    """[P, T] bool: the rows that differ by more than rounding explains."""
    close = torch.isclose(
        one.detach().cpu().double(), two.detach().cpu().double(), rtol=1e-3, atol=1e-4, equal_nan=True
    )
    return ~close.reshape(*one.shape[:2], -1).all(-1)


def expect_equal(
    got: TensorDictBase, wanted: TensorDictBase, *, what: str, source: str, mend: str, differs: Differs = bits_differ
) -> None:
    """Fail unless two batches [P, T] hold the same.

    Args:
        got: the batch in question.
        wanted: the one that it should equal.
        what: what `got` is, in words.
        source: what `wanted` is, in words.
        mend: what an author can do.
        differs: how two leaves are compared.
    """
    ours, theirs = flatten(got), flatten(wanted)
    kinds = [{path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()} for leaves in (ours, theirs)]
    if kinds[0] != kinds[1]:
        path = min(path for path in ours.keys() | theirs.keys() if kinds[0].get(path) != kinds[1].get(path))
        raise fail(
            f"{what}, {'.'.join(path)}",
            expected=f"{kinds[1].get(path)} as in {source}",
            got=kinds[0].get(path),
            mend=mend,
        )
    first = _first({path: differs(leaf, theirs[path]) for path, leaf in ours.items()})
    if first is not None:
        path, lane, step = first
        raise fail(
            f"{what}, {spot(lane, step, path)}",
            expected=f"{shown(theirs[path][lane, step])} as in {source}",
            got=shown(ours[path][lane, step]),
            mend=mend,
        )


def _first(wrong: dict[Path, Tensor]) -> tuple[Path, int, int] | None:
    """The earliest row that is wrong under any key, each [P, T] bool."""
    found = [(step, lane, path) for path, rows in wrong.items() for lane, step in rows.nonzero().tolist()]
    if not found:
        return None
    step, lane, path = min(found)
    return path, lane, step


def first_row(wrong: Tensor) -> tuple[int, int] | None:
    """The lane and step of the earliest row of ``[P, T, ...]`` bool that is True."""
    found = _first({(): wrong.reshape(*wrong.shape[:2], -1).any(-1)})
    return None if found is None else found[1:]


def spot(lane: int, step: int, path: Path) -> str:
    """A place in a run, in words."""
    return f"lane {lane}, step {step}, {'.'.join(path)}"


def shown(value: Tensor) -> str:
    """A row's value, cut short."""
    return f"{clipped(str(value.tolist()))}"

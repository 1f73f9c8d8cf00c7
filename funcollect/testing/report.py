"""Runs checks in order, compares runs, and reports the first row at which they differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.errors import CheckError
from funcollect.messages import clipped
from funcollect.tree import Path, flatten

Subject = TypeVar("Subject")
# The report shows a check's name, the first line of its docstring, and the remark that it may return.
Check = Callable[[Subject], str | None]
_MENDS: dict[Any, str] = {}


def mended_by(mend: str) -> Callable[[Check[Subject]], Check[Subject]]:
    """Register the fix that the messages of a check name, unless it names another one."""

    def registered(check: Check[Subject]) -> Check[Subject]:
        _MENDS[check] = mend
        return check

    return registered


class NotApplicableError(Exception):
    """A check does not apply to this subject; the message is the reason."""


class FailedError(Exception):
    """A check found a fault; the arguments are the fault, and its fix if it is not that of the check."""


def fail(where: str, expected: object, got: object, mend: str = "") -> FailedError:
    """The error of a failed check, which the caller raises."""
    return FailedError(f"{where}: expected {expected}, got {got}", mend)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check that did not fail; `str` gives one line."""

    name: str  # of the check
    claim: str  # what the check has confirmed, in one line
    applies: bool
    note: str  # why the check does not apply, or a remark on one that passed; may be empty

    @override
    def __str__(self) -> str:
        texts = (self.claim if self.applies else "", self.note)
        return f"{'passed' if self.applies else 'n/a':<6}  {self.name:<18}  {' -- '.join(filter(None, texts))}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The checks that passed, or do not apply; `str` gives one line for each.

    >>> import funcollect as fc
    >>> report = fc.testing.check_env(fc.make_env("torch/CartPole-v1", num_envs=2))
    >>> report.subject, report.passed[0]
    ('CartPole(num_envs=2)', 'describes')
    """

    subject: str  # the name of the environment, or of the policy and the environment
    results: tuple[Result, ...]  # one for each check, in order

    @property
    def passed(self) -> tuple[str, ...]:
        """The names of the checks that apply."""
        return tuple(result.name for result in self.results if result.applies)

    @override
    def __str__(self) -> str:
        return "\n".join((self.subject, *(f"  {result}" for result in self.results)))


def run_checks(label: str, checks: Sequence[Check[Subject]], subject: Subject) -> Report:
    """Call each check with the subject, in order, and return a report of those that passed or do not apply.

    Raises:
        CheckError: at the first check that fails, or that raises any other error.
    """
    results: list[Result] = []
    for check in checks:
        name, claim = check.__name__, (inspect.getdoc(check) or "").partition("\n")[0].rstrip(".")
        try:
            note, applies = check(subject) or "", True
        except NotApplicableError as reason:
            note, applies = str(reason), False
        except Exception as error:
            if failed := isinstance(error, FailedError):
                what = f"{error.args[0]}: {error.args[1] or _MENDS[check]}"
            else:
                notes = (note for note in getattr(error, "__notes__", ()) if not note.startswith("---"))  # as JAX's
                what = "; ".join([f"{type(error).__name__}: {error}", *notes])
            message, before = f"{label} fails {name!r} ({claim}): {what}", Report(subject=label, results=(*results,))
            raise CheckError(message, name, before) from (error.__cause__ if failed else error)
        results.append(Result(name=name, claim=claim, applies=applies, note=note))
    return Report(subject=label, results=tuple(results))


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
    what: str,
    source: str,
    mend: str = "",
    differs: Callable[[Tensor, Tensor], Tensor] = bits_differ,
) -> None:
    """Fail unless two batches [P, T] are equal; in the message, `what` names `got`, and `source` names `wanted`."""
    ours, theirs = flatten(got), flatten(wanted)
    kinds = [{path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()} for leaves in (ours, theirs)]
    if kinds[0] != kinds[1]:
        path = min(path for path in ours.keys() | theirs.keys() if kinds[0].get(path) != kinds[1].get(path))
        raise fail(f"{what}, {'.'.join(path)}", f"{kinds[1].get(path)} as in {source}", kinds[0].get(path), mend)
    places = {path: first_row(differs(leaf, theirs[path])) for path, leaf in ours.items()}
    if found := [(*place[::-1], path) for path, place in places.items() if place]:
        step, lane, path = min(found)
        row, expected = (digits(leaves[path][lane, step]) for leaves in (ours, theirs))
        raise fail(f"{what}, {spot(lane, step, path)}", f"{expected} as in {source}", row, mend)


def expect_rows(
    wrong: Tensor,
    path: Path,
    got: Tensor | str,
    expected: Tensor | str,
    mend: str = "",
    *,
    note: str = "",
    first: int = 0,
) -> None:
    """Fail at the earliest row of the mask `wrong` [P, T, ...] that is True.

    The message names the row by its lane, its step (those of the mask begin with `first`) and `path`. It shows that row
    of `got` and `expected` [P, T, ...], or these themselves if they are texts; `note` follows on `expected`.
    """
    if place := first_row(wrong):
        wanted, found = (each if isinstance(each, str) else digits(each[place]) for each in (expected, got))
        raise fail(spot(place[0], first + place[1], path), f"{wanted}{note}", found, mend)


def first_row(wrong: Tensor) -> tuple[int, int] | None:
    """The lane and step of the earliest row of a mask [P, T, ...] that is True anywhere; None if there is none."""
    found = [(step, lane) for lane, step in wrong.reshape(*wrong.shape[:2], -1).any(-1).nonzero().tolist()]
    return min(found)[::-1] if found else None


def spot(lane: int, step: int, path: Path) -> str:
    """The name of a row of a run, for a message: ``"lane 0, step 3, next.reward"``."""
    return f"lane {lane}, step {step}, {'.'.join(path)}"


def digits(value: Tensor) -> str:
    """The numbers in a tensor as text for a message, shortened if there are many."""
    return clipped(str(value.tolist()))

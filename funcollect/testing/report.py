"""Checks run one after the other, and the report of what they found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from funcollect.errors import CheckError

Subject = TypeVar("Subject")
Check = Callable[[Subject], str | None]  # its name and the first line of its docstring say what it claims


class NotApplicableError(Exception):
    """A check has nothing to say about this subject; the message says why."""


class FailedError(Exception):
    """A check found a fault; `run_checks` puts its name in front."""


def fail(where: str, *, expected: object, got: object, mend: str) -> FailedError:
    """The fault at `where`, in the form that every message has."""
    return FailedError(f"{where}: expected {expected}, got {got}: {mend}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one check found.

    Attributes:
        name: the check's.
        claim: what it looked at, in one line.
        applies: False where it had nothing to look at.
        note: why it does not apply, or what should be known of a check that passed; may be empty.
    """

    name: str
    claim: str
    applies: bool
    note: str

    def __str__(self) -> str:
        what = self.claim if self.applies else ""
        return f"{'passed' if self.applies else 'n/a':<6}  {self.name:<18}  " + " -- ".join(
            filter(None, (what, self.note))
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The checks that passed, or did not apply; `str` gives one line for each.

    Attributes:
        subject: what was checked.
        results: one for each check, in order.
    """

    subject: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> tuple[str, ...]:
        """The names of the checks that had something to look at."""
        return tuple(result.name for result in self.results if result.applies)

    def __str__(self) -> str:
        return "\n".join((self.subject, *(f"  {result}" for result in self.results)))


def run_checks(label: str, checks: Sequence[Check[Subject]], subject: Subject) -> Report:
    """Run `checks` in order.

    Raises:
        CheckError: at the first one that fails, or in which anything else raises.
    """
    results: list[Result] = []
    for check in checks:
        claim = (inspect.getdoc(check) or "").partition("\n")[0].rstrip(".")
        try:
            note, applies = check(subject) or "", True
        except NotApplicableError as reason:
            note, applies = str(reason), False
        except Exception as error:
            what = str(error) if isinstance(error, FailedError) else f"{type(error).__name__}: {error}"
            done = Report(subject=label, results=tuple(results))
            cause = error.__cause__ if isinstance(error, FailedError) else error
            raise CheckError(f"{label} fails {check.__name__!r} ({claim}): {what}", check.__name__, done) from cause
        results.append(Result(name=check.__name__, claim=claim, applies=applies, note=note))
    return Report(subject=label, results=tuple(results))

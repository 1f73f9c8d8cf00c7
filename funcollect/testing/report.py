"""Runs checks in order, and reports their findings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import override

from funcollect.errors import CheckError

Subject = TypeVar("Subject")
Check = Callable[[Subject], str | None]  # the report shows its name, the first line of its docstring, and its result


class NotApplicableError(Exception):
    """A check does not apply to this subject; the message is the reason."""


class FailedError(Exception):
    """A check found a fault; `run_checks` adds the name of the check to the message."""


def fail(where: str, *, expected: object, got: object, mend: str) -> FailedError:
    """The error of a failed check: the place, the expectation, the value and the fix `mend`. The caller raises it."""
    return FailedError(f"{where}: expected {expected}, got {got}: {mend}")


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
        claim = (inspect.getdoc(check) or "").partition("\n")[0].rstrip(".")
        try:
            note, applies = check(subject) or "", True
        except NotApplicableError as reason:
            note, applies = str(reason), False
        except Exception as error:
            failed = isinstance(error, FailedError)
            notes = (note for note in getattr(error, "__notes__", ()) if not note.startswith("---"))  # as JAX's does
            what = str(error) if failed else "; ".join([f"{type(error).__name__}: {error}", *notes])
            before = Report(subject=label, results=tuple(results))
            message = f"{label} fails {check.__name__!r} ({claim}): {what}"
            raise CheckError(message, check.__name__, before) from (error.__cause__ if failed else error)
        results.append(Result(name=check.__name__, claim=claim, applies=applies, note=note))
    return Report(subject=label, results=tuple(results))

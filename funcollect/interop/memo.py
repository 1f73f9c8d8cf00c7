"""Keeps values on a user's object, such as its compiled programs, and finds variables that were set since their use."""

from __future__ import annotations

import dis
import threading
import weakref
from collections.abc import Hashable, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

_LOCK = threading.Lock()
_PLAIN = (bool, int, float, str)

# A name and its holder: a closure cell, a function (for a global variable of its module), or an object.
Variable = tuple[str, Any]


class _Memo(dict[Hashable, Any]):
    """The values kept on one object. A pickled or deeply copied memo is empty and belongs to no object."""

    owner: weakref.ref[Any] | None = None

    def __reduce__(self) -> Any:
        return _Memo, ()


def memo_of(owner: Any) -> dict[Hashable, Any]:
    """Return the dict kept on `owner`, empty for a new object and for a copy; TypeError if it cannot keep one."""
    try:
        attributes, reference = vars(owner), weakref.ref(owner)  # an object always returns the same reference
        memo: _Memo | None = attributes.get("_memo")
        if memo is not None and memo.owner is reference:
            return memo
    except TypeError as error:
        what = f"{type(owner).__name__} has no __dict__ or no __weakref__ (__slots__, or a NamedTuple), expected both"
        mend = "remove __slots__ from all its classes, or make it a dataclass"
        raise TypeError(f"{what}, since compiled programs are kept there: {mend}") from error
    with _LOCK:
        memo = attributes.get("_memo")
        if memo is None or memo.owner is not reference:
            memo = attributes["_memo"] = _Memo()  # written directly, since environments and policies may be frozen
            memo.owner = reference
    return memo


def variables_of(function: Any) -> list[Variable]:
    """The closure variables, and the global numbers, strings and arrays, that `function` reads and does not set."""
    function = getattr(function, "__func__", function)  # of a method
    if not isinstance(function, FunctionType):
        return []
    code, module_variables = function.__code__, function.__globals__
    steps = [(inner, step) for inner in codes_of(code) for step in dis.get_instructions(inner)]
    assigned = {step.argval for _, step in steps if step.opname == "STORE_GLOBAL"}
    assigned |= {s.argval for inner, s in steps if s.opname == "STORE_DEREF" and s.argval in inner.co_freevars}
    names = dict.fromkeys(step.argval for _, step in steps if step.opname == "LOAD_GLOBAL")
    variables = [
        *zip(code.co_freevars, function.__closure__ or (), strict=True),
        *((name, function) for name in names if _is_value(module_variables.get(name))),
    ]
    return [(name, holder) for name, holder in variables if name not in assigned]


def codes_of(code: CodeType) -> list[CodeType]:
    """The code of a function, and that of the functions inside it."""
    return [code, *(inner for one in code.co_consts if isinstance(one, CodeType) for inner in codes_of(one))]


def set_since_use(user: Any, variables: Sequence[Variable]) -> list[str]:
    """The names of the variables that have been set to another value since the first call for this user."""
    now = [_content(name, holder) for name, holder in variables]
    before = memo_of(user).setdefault("variables", now)
    pairs = ((name, one, two) for (name, _), one, two in zip(variables, now, before, strict=True) if one is not two)
    return [name for name, one, two in pairs if type(one) is not type(two) or not isinstance(one, _PLAIN) or one != two]


def _content(name: str, holder: Any) -> Any:
    if isinstance(holder, FunctionType):
        return holder.__globals__.get(name)
    return content_of(holder) if isinstance(holder, CellType) else getattr(holder, name, None)


def content_of(cell: CellType) -> Any:
    """The object in a closure cell; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_value(content: Any) -> bool:
    return isinstance(content, _PLAIN) or (hasattr(content, "dtype") and hasattr(content, "shape"))

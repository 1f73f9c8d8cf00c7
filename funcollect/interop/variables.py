"""Finds the variables that a compiled function reads, and those that have been set since."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from types import CellType, FunctionType
from typing import Any

from funcollect.interop.memo import memo_of

# A name, and what holds it: a cell of an outer function, a function for a name of its module, or an object.
Variable = tuple[str, Any]


def variables_of(function: Any) -> list[Variable]:
    """The variables that `function` reads and does not set itself.

    They belong to outer functions, or to the function's module; of these, numbers, strings and arrays.
    """
    function = getattr(function, "__func__", function)  # of a method
    if not isinstance(function, FunctionType):
        return []
    code, space = function.__code__, function.__globals__
    steps = list(dis.get_instructions(code))
    own = {each.argval for each in steps if each.opname in ("STORE_DEREF", "STORE_GLOBAL")}
    names = dict.fromkeys(each.argval for each in steps if each.opname == "LOAD_GLOBAL")
    found = [
        *zip(code.co_freevars, function.__closure__ or (), strict=True),
        *((name, function) for name in names if _is_value(space.get(name))),
    ]
    return [(name, owner) for name, owner in found if name not in own]


def set_since_use(user: Any, variables: Sequence[Variable]) -> list[str]:
    """The names of the variables that have been set since the first call for this user."""
    now = [_content(name, owner) for name, owner in variables]
    before = memo_of(user).setdefault("variables", now)
    return [name for (name, _), one, other in zip(variables, now, before, strict=True) if not _is_same(one, other)]


def _content(name: str, owner: Any) -> Any:
    if isinstance(owner, FunctionType):
        return owner.__globals__.get(name)
    if not isinstance(owner, CellType):
        return getattr(owner, name, None)
    try:
        return owner.cell_contents
    except ValueError:  # it is empty
        return None


def _is_value(content: Any) -> bool:
    """Whether this is a number, a string or an array."""
    return isinstance(content, (bool, int, float, str)) or (hasattr(content, "dtype") and hasattr(content, "shape"))


def _is_same(one: Any, two: Any) -> bool:
    """Whether two values of a variable are the same object, or equal numbers or strings."""
    return one is two or (type(one) is type(two) and isinstance(one, (bool, int, float, str)) and one == two)

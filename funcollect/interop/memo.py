"""Keep values on a user's object: the number of an environment, the compiled programs of an environment or policy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

_LOCK = threading.Lock()


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
        raise TypeError(
            f"{type(owner).__name__} has no __dict__ or no __weakref__ (__slots__, or a NamedTuple), expected both, "
            "since compiled programs are kept there: remove __slots__ from all its classes, or make it a dataclass"
        ) from error
    with _LOCK:
        memo = attributes.get("_memo")
        if memo is None or memo.owner is not reference:
            memo = attributes["_memo"] = _Memo()  # written directly, since environments and policies may be frozen
            memo.owner = reference
    return memo

"""Keep values on a user's object: the number of an environment, the compiled programs of an environment or policy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

_LOCK = threading.Lock()


class _Memo(dict[Hashable, Any]):
    """The values kept on one object. A pickled or deeply copied memo is empty and belongs to nobody."""

    def __init__(self, owner: Any = None) -> None:
        super().__init__()
        self.owner: Callable[[], Any]
        try:
            self.owner = weakref.ref(owner)
        except TypeError:  # None, and instances of subclasses of tuple
            self.owner = lambda: owner

    def __reduce__(self) -> Any:
        return _Memo, ()


def memo_of(owner: Any) -> dict[Hashable, Any]:
    """Return the dict that the library keeps on `owner`: empty at first, and in a copy of an object that has one.

    Raises:
        TypeError: for an object without a ``__dict__``.
    """
    try:
        attributes = vars(owner)  # written directly, since environments and policies may be frozen
    except TypeError as error:
        raise TypeError(
            f"{type(owner).__name__} has no __dict__ (__slots__, or a NamedTuple), expected one, in which compiled "
            "programs are kept: remove __slots__ from the class and its bases, or make it a dataclass"
        ) from error
    with _LOCK:
        memo = attributes.get("_memo")
        if memo is None or memo.owner() is not owner:
            memo = attributes["_memo"] = _Memo(owner)
    values: dict[Hashable, Any] = memo
    return values

"""Keeps new processes from running the caller's script again, and sends them its functions and classes by value."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep processes that are spawned inside this context from importing the file of ``__main__``.

    Otherwise a script without a main guard would start itself again in each process. What a process needs from
    ``__main__`` has to be sent by value, as cloudpickle does.
    """
    send_main_by_value()
    main: dict[str, Any] = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(kept)


def send_main_by_value() -> None:
    """Have cloudpickle send a script's functions and classes by value from a spawned process, too.

    `multiprocessing` calls the script ``__mp_main__`` there, a name by which no other process could find them.
    """
    if main := sys.modules.get("__mp_main__"):
        cloudpickle.register_pickle_by_value(main)

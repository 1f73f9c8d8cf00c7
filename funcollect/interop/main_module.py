"""How functions and classes of the caller's script are sent to other processes."""

from __future__ import annotations

import sys

import cloudpickle


def send_main_by_value() -> None:
    """Have cloudpickle send a script's functions and classes by value, also from a spawned process.

    `multiprocessing` calls the script ``__mp_main__`` there, a name by which no other process could find them.
    """
    if main := sys.modules.get("__mp_main__"):
        cloudpickle.register_pickle_by_value(main)

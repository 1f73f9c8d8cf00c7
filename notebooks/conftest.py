"""What a notebook runs under: one that hangs says where, in Python and below it."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

PATIENCE = 200.0  # seconds; the slowest has taken ninety, on a machine that had other work


def say_where() -> None:
    """Write the stacks of every process that this one has started, to be shown if the notebook fails."""
    py_spy = Path(sys.executable).with_name("py-spy")
    for child in psutil.Process().children(recursive=True):
        shown = subprocess.run([py_spy, "dump", "--native", "--pid", str(child.pid)], capture_output=True, text=True)
        print(shown.stdout or shown.stderr, file=sys.stderr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    watch = threading.Timer(PATIENCE, say_where)
    watch.start()
    try:
        return (yield)
    finally:
        watch.cancel()

"""Exit codes of the command ``funcollect``.

The commands themselves are imported after the arguments are parsed, so that help does not wait for Torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from funcollect.cli.arguments import parse
from funcollect.errors import CheckError, FuncollectError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code: 0; 1 if a check failed; 2 for an error that the user can correct; 130 after Ctrl-C.

    Raises:
        SystemExit: with 2 if the arguments cannot be parsed, with 0 for ``--help`` and ``--version``.
    """
    arguments = parse(argv)
    try:
        commands = importlib.import_module("funcollect.cli.commands")
        getattr(commands, arguments.command)(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except MemoryError as error:
        return _fail(f"error: out of memory {error}", 2)
    except CheckError as error:
        return _fail(f"check failed: {error}", 1)
    except (FuncollectError, ValueError, TypeError, OSError, ImportError) as error:
        return _fail(f"error: {error}", 2)
    return 0


def _fail(message: str, code: int) -> int:
    """Print a message as one line on standard error, and return the exit code."""
    print("funcollect:", *message.split(), file=sys.stderr)
    return code

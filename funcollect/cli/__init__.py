"""The commands ``funcollect demo`` and ``funcollect collect``: arguments and exit codes.

What the commands do is imported with the first of them, so that help and mistyped arguments don't wait for Torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from funcollect.errors import FuncollectError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, those of the process unless given.

    Returns:
        The exit code: 0; 2 for what the user can mend, said in one line; 130 after Ctrl-C.

    Raises:
        SystemExit: for arguments that cannot be parsed, with 2, and for ``--help``, with 0.
    """
    arguments = _parser().parse_args(argv)
    try:
        commands = importlib.import_module("funcollect.cli.commands")
        getattr(commands, arguments.command)(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except MemoryError as error:
        return _fail(f"error: out of memory {error}", 2)
    except (FuncollectError, ValueError, TypeError, OSError) as error:
        return _fail(f"error: {error}", 2)
    return 0


def _fail(message: str, code: int) -> int:
    print("funcollect:", *message.split(), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="funcollect", description="Collect experience: a policy in an environment.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="show a Torch MLP collecting on CartPole-v1")
    add = demo.add_argument
    add("--frames", type=_count, default=100_000, metavar="N", help="rounded up to whole batches; default: 100000")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")

    collect = commands.add_parser("collect", help="collect experience and save it")
    add = collect.add_argument
    add("env", metavar="ENV", help="a Gymnasium id, or one with a namespace such as torch/CartPole-v1")
    add("--policy", choices=["mlp", "random"], required=True, help="mlp: an untrained Torch network, 2x64 tanh")
    add("--num-envs", type=_count, default=1, metavar="N", help="P, environments in one batch; default: 1")
    add("--frames", type=_count, required=True, metavar="N", help="rounded up to whole batches")
    add("--frames-per-batch", type=_count, metavar="N", help="default: 128 per environment, but 2000 at least")
    add("--seed", type=int, metavar="S", help="default: a fresh one, noted in stats.json")
    add("--out", type=Path, required=True, metavar="DIR", help="gets batch/, stats.json and returns.png")
    add("--overwrite", action="store_true", help="replace what an earlier run left in DIR")
    return parser


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


_count.__name__ = "count"  # how argparse names it to the user

"""Arguments and exit codes of ``funcollect demo``, ``collect``, ``check``, ``explain``, ``profile`` and ``policies``.

The commands themselves are imported after the arguments are parsed, so that help does not wait for Torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcollect.errors import CheckError, FuncollectError

__all__ = ["main"]

_POLICY = "random, mlp (an untrained Torch network, 2x64 tanh), or another that `funcollect policies` lists"
_WORDS = {"True": True, "False": False, "None": None}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code: 0; 1 if a check failed; 2 for an error that the user can correct; 130 after Ctrl-C.

    Raises:
        SystemExit: with 2 if the arguments cannot be parsed, with 0 for ``--help``.
    """
    arguments = _parser().parse_args(argv)
    try:
        commands = importlib.import_module("funcollect.cli.commands")
        getattr(commands, arguments.command)(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except MemoryError as error:
        return _fail(f"error: out of memory {error}", 2)
    except CheckError as error:
        return _fail(f"check failed: {error}", 1)
    except (FuncollectError, ValueError, TypeError, OSError) as error:
        return _fail(f"error: {error}", 2)
    return 0


def _fail(message: str, code: int) -> int:
    """Print a message as one line on standard error, and return the exit code."""
    print("funcollect:", *message.split(), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands and their arguments."""
    parser = argparse.ArgumentParser(prog="funcollect", description="Collect experience: a policy in an environment.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="show a Torch MLP collecting on CartPole-v1")
    add = demo.add_argument
    add("--frames", type=_count, default=100_000, metavar="N", help="rounded up to whole batches; default: 100000")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")

    collect = commands.add_parser("collect", help="collect experience and save it")
    _add_env(collect, num_envs=1)
    _add_policy(collect)
    add = collect.add_argument
    add("--frames", type=_count, required=True, metavar="N", help="rounded up to whole batches")
    add("--frames-per-batch", type=_count, metavar="N", help="default: 128 per environment, but at least 2000")
    add("--seed", type=int, metavar="S", help="default: a fresh one, recorded in stats.json")
    add("--out", type=Path, required=True, metavar="DIR", help="gets batch/, stats.json and returns.png")
    add("--overwrite", action="store_true", help="replace the results of an earlier run in DIR")

    check = commands.add_parser("check", help="check that an environment, or a policy, keeps its contract")
    _add_env(check, num_envs=3)
    _add_policy(check, required=False, what="check this policy in ENV, rather than ENV by itself")
    add = check.add_argument
    add("--steps", type=_count, default=100, metavar="N", help="length of a run, in which episodes end; default: 100")
    add("--max-episode-steps", type=_count, metavar="N", help="truncate episodes after N steps; default: ENV's own")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")

    explain = commands.add_parser("explain", help="show how an environment and a policy would run together")
    _add_env(explain, num_envs=1)
    _add_policy(explain)

    profile = commands.add_parser("profile", help="measure where the time of a frame goes")
    _add_env(profile, num_envs=8)
    _add_policy(profile, default="random")
    add = profile.add_argument
    add("--frames", type=_count, default=10_000, metavar="N", help="frames to time, in whole batches; default: 10000")
    add("--out", type=Path, metavar="FILE", help="also draw the parts in this picture, such as profile.png")

    policies = commands.add_parser("policies", help="list the policies that packages offer by name")
    policies.add_argument("env", nargs="?", metavar="ENV", help="also make each of them for this environment")
    return parser


def _add_env(parser: argparse.ArgumentParser, num_envs: int) -> None:
    """Add the arguments that name an environment; `num_envs` is the default of ``--num-envs``."""
    add = parser.add_argument
    add("env", metavar="ENV", help="a Gymnasium id, or one with a namespace such as torch/CartPole-v1")
    what = f"P, environments in one batch; default: {num_envs}"
    add("--num-envs", type=_count, default=num_envs, metavar="N", help=what)


def _add_policy(
    parser: argparse.ArgumentParser, *, required: bool = True, what: str = _POLICY, default: str | None = None
) -> None:
    """Add the arguments that name a policy and the options of its factory; `what` is the help of ``--policy``."""
    add = parser.add_argument
    if default is not None:
        required, what = False, f"{what}; default: {default}"
    add("--policy", required=required, default=default, metavar="NAME", help=what)
    options = "argument of its factory (its seed is the run's by default); VALUE is JSON or text; repeat for more"
    add("--option", "-o", type=_option, action="append", default=[], metavar="NAME=VALUE", help=options)


def _count(text: str) -> int:
    """Parse an argument that is a positive int."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


_count.__name__ = "count"  # argparse shows this name to the user


def _option(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``; the value is JSON, True, False or None, and otherwise text."""
    name, given, value = text.partition("=")
    if not given or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    if value in _WORDS:
        return name, _WORDS[value]
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

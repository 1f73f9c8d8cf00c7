"""The command ``funcollect``: its arguments, its help and its exit codes.

The commands themselves are imported after the arguments are parsed, so that help does not wait for Torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from funcollect import __version__
from funcollect.errors import CheckError, FuncollectError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of the process by default, and return its exit code.

    The code is 0, or 1 if a check failed, 2 for an error that the user can correct, 130 after Ctrl-C. Raises SystemExit
    for arguments that cannot be parsed (2), and for ``--help`` and ``--version`` (0).
    """
    arguments = _parse(argv)
    try:
        importlib.import_module("funcollect.cli.commands").run(arguments)
        return 0
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except CheckError as error:
        message, code = f"check failed: {error}", 1
    except (FuncollectError, ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        message, code = f"error: {str(error) or type(error).__name__}", 2
    print("funcollect:", *message.split(), file=sys.stderr)  # in one line
    return code


def _count(text: str) -> int:
    """Parse a positive int, which may be written as ``1e5``."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not an integer")
    if not 1 <= number <= 2**53:
        raise argparse.ArgumentTypeError(f"{text} is {'not positive' if number < 1 else 'too large'}")
    return int(number)


def _named_value(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``; the value is JSON, True, False or None, and otherwise text."""
    name, given, value = text.partition("=")
    if not given or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, {"True": True, "False": False, "None": None}.get(value, value)


def _option(kind: Any, metavar: str, default: Any, what: str = "") -> dict[str, Any]:
    """The keywords of argparse's `add_argument`, with the default in the help."""
    text = "; ".join(filter(None, (what, "" if default is None else f"default: {default}")))
    return {"type": kind, "default": default, "metavar": metavar, "help": text}


_number, _path = partial(_option, _count, "N"), partial(_option, Path, "FILE")
_DATASETS = "in place of the batch: minari, lerobot or hf"
_SEED = {"--seed": _option(int, "S", 0)}
_LIMITED = {"--max-episode-steps": _number(None, "truncate episodes after N steps")}


def _pair(lanes: int | None = None, policy: str | None = "random", named: str = "") -> dict[str, Any]:
    """The options for an environment and a policy; `lanes` is the default of ``--num-envs``, None to leave it out."""
    env, value = "an id (torch/CartPole-v1), or module:factory", "for the policy's factory, as JSON or text"
    return {
        "env": {"nargs": "?", "metavar": "ENV", "help": env},
        "--env": {"dest": "env_option", "metavar": "ENV", "help": "the same as ENV"},
        **({} if lanes is None else {"--num-envs": _number(lanes, "environments in one batch")}),
        "--policy": {"default": policy, "metavar": "NAME", "help": named or "mlp, random (default), or module:factory"},
        "--weights": _path(None, "its state_dict: .safetensors, .pt or .pth"),
        "--option -o": {**_option(_named_value, "NAME=VALUE", None, value), "action": "append", "default": []},
    }


def _add_commands(commands: Any) -> None:
    add = partial(_command, commands)
    options = {"--frames": _number(100_000, "rounded up to whole batches"), **_SEED}
    options |= {"--out": _path(Path("runs", "demo.png"), "a picture")}
    add("demo", "show a Torch MLP collecting on CartPole-v1", "--frames 1e5", options, subject="")
    options = {
        **_pair(lanes=1),
        "--frames": _number(10_000, "in whole batches"),
        "--frames-per-batch": _number(None, "default: 128 per environment, at least 2000"),
        **_LIMITED,
        "--seed": _option(int, "S", None, "default: a new one, kept in stats.json"),
        "--out": _option(Path, "DIR", None, "for the batch, stats.json and returns.png"),
        "--dataset": {**_option(str, "FORMAT", None, _DATASETS), "choices": ("minari", "lerobot", "hf")},
        "--overwrite": {"action": "store_true", "help": "replace an earlier run in DIR"},
    }
    add("collect", "collect experience and save it", "CartPole-v1 --policy mlp --frames 1e5", options)
    options, example = {**_pair(8), "--episodes": _number(16)}, "CartPole-v1 --policy mlp --weights weights.pt"
    add("evaluate", "run whole episodes and print their returns", example, {**options, **_LIMITED, **_SEED})
    options = {**_pair(), "--episodes": _number(1), **_LIMITED, **_SEED}
    options |= {"--out": _path(Path("film.mp4"), ".mp4 or .gif")}
    add("record", "film whole episodes", "CartPole-v1 --policy mlp --out film.gif", options)
    pair, number = _pair(3, None, "check this policy in ENV instead"), _number(100, "of a run, in which episodes end")
    what = "check that an environment, or a policy, keeps its contract"
    add("check", what, "my_module:MyEnvironment", {**pair, "--steps": number, **_LIMITED, **_SEED})
    example = "gymnax/CartPole-v1 --policy mlp --num-envs 64"
    add("explain", "show how an environment and a policy would run together", example, _pair(1))
    options = {**_pair(8), "--frames": _number(10_000, "to time, in whole batches")}
    options |= {"--out": _path(None, "also draw the parts in this picture")}
    add("profile", "measure where the time of a frame goes", "HalfCheetah-v5 --policy mlp --out profile.png", options)
    also = {"env": {"nargs": "?", "metavar": "ENV", "help": "also make each of them for this environment"}}
    add("policies", "list the policies that packages offer by name", "CartPole-v1", also, subject="[ENV]")


def _command(commands: Any, name: str, what: str, example: str, options: dict[str, Any], subject: str = "ENV") -> None:
    """Add a command, whose help fits on a screen and ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"funcollect {name} {subject} [options]".replace("  ", " "),
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example: funcollect {name} {example}",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
    )
    for names, keywords in options.items():
        parser.add_argument(*names.split(), **keywords)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of a command; SystemExit if they cannot be parsed, and for ``--help`` and ``--version``."""
    about, example = "Collect experience: a policy in an environment.", "example: funcollect collect CartPole-v1"
    parser = argparse.ArgumentParser(prog="funcollect", description=about, epilog=example)
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(max_episode_steps=None)  # of commands without whole episodes
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_commands(commands)
    arguments = parser.parse_args(argv)
    if "env_option" in arguments:
        named = [name for name in (arguments.env, arguments.env_option) if name is not None]
        if len(named) != 1:
            found = f"{len(named)} environments are given, expected one: ENV, or --env ENV"
            commands.choices[arguments.command].error(found)
        arguments.env = named[0]
    return arguments

"""The arguments of ``funcollect``, and its help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from funcollect import __version__

_WORDS = {"True": True, "False": False, "None": None}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of a command; SystemExit if they cannot be parsed, and for ``--help`` and ``--version``."""
    parser = argparse.ArgumentParser(
        prog="funcollect",
        description="Collect experience: a policy in an environment.",
        epilog="example: funcollect collect CartPole-v1",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(max_episode_steps=None)  # of commands without whole episodes
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_demo, _collect, _evaluate, _record, _check, _explain, _profile, _policies):
        add(commands)
    arguments = parser.parse_args(argv)
    if "env_option" in arguments:
        _choose_env(commands.choices[arguments.command], arguments)
    return arguments


def _choose_env(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Let the environment be given with ``--env`` as well."""
    named = [each for each in (arguments.env, arguments.env_option) if each is not None]
    if len(named) != 1:
        parser.error(f"{len(named)} environments are given, expected one: ENV, or --env ENV")
    arguments.env = named[0]


def _command(commands: Any, name: str, what: str, example: str, subject: str = "ENV") -> argparse.ArgumentParser:
    """Add a command; its help fits on a screen, and ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"funcollect {name} {subject} [options]".replace("  ", " "),
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example: funcollect {name} {example}".rstrip(),
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
    )
    return parser


def _demo(commands: Any) -> None:
    parser = _command(commands, "demo", "show a Torch MLP collecting on CartPole-v1", "--frames 1e5", "")
    add = parser.add_argument
    add("--frames", type=_count, default=100_000, metavar="N", help="rounded up to whole batches; default: 100000")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--out", type=Path, default=Path("runs", "demo.png"), metavar="FILE", help="a picture; default: runs/demo.png")


def _collect(commands: Any) -> None:
    parser = _command(commands, "collect", "collect experience and save it", "CartPole-v1 --policy mlp --frames 1e5")
    _add_env(parser, num_envs=1)
    _add_policy(parser)
    add = parser.add_argument
    add("--frames", type=_count, default=10_000, metavar="N", help="in whole batches; default: 10000")
    add("--frames-per-batch", type=_count, metavar="N", help="default: 128 per environment, at least 2000")
    add("--max-episode-steps", type=_count, metavar="N", help="truncate episodes after N steps")
    add("--seed", type=int, metavar="S", help="default: a new one, kept in stats.json")
    add("--out", type=Path, metavar="DIR", help="for the batch, stats.json and returns.png")
    add("--overwrite", action="store_true", help="replace an earlier run in DIR")


def _evaluate(commands: Any) -> None:
    example = "CartPole-v1 --policy mlp --weights weights.pt"
    parser = _command(commands, "evaluate", "run whole episodes and print their returns", example)
    _add_env(parser, num_envs=8)
    _add_policy(parser)
    add = parser.add_argument
    add("--episodes", type=_count, default=16, metavar="N", help="default: 16")
    add("--max-episode-steps", type=_count, metavar="N", help="truncate episodes after N steps")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")


def _record(commands: Any) -> None:
    parser = _command(commands, "record", "film whole episodes", "CartPole-v1 --policy mlp --out film.gif")
    _add_env(parser, num_envs=None)
    _add_policy(parser)
    add = parser.add_argument
    add("--episodes", type=_count, default=1, metavar="N", help="default: 1")
    add("--max-episode-steps", type=_count, metavar="N", help="truncate episodes after N steps")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--out", type=Path, default=Path("film.mp4"), metavar="FILE", help=".mp4 or .gif; default: film.mp4")


def _check(commands: Any) -> None:
    what = "check that an environment, or a policy, keeps its contract"
    parser = _command(commands, "check", what, "my_module:MyEnvironment")
    _add_env(parser, num_envs=3)
    _add_policy(parser, default=None, what="check this policy in ENV instead")
    add = parser.add_argument
    add("--steps", type=_count, default=100, metavar="N", help="of a run, in which episodes end; default: 100")
    add("--max-episode-steps", type=_count, metavar="N", help="truncate episodes after N steps")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")


def _explain(commands: Any) -> None:
    what = "show how an environment and a policy would run together"
    parser = _command(commands, "explain", what, "gymnax/CartPole-v1 --policy mlp --num-envs 64")
    _add_env(parser, num_envs=1)
    _add_policy(parser)


def _profile(commands: Any) -> None:
    example = "HalfCheetah-v5 --policy mlp --out profile.png"
    parser = _command(commands, "profile", "measure where the time of a frame goes", example)
    _add_env(parser, num_envs=8)
    _add_policy(parser)
    add = parser.add_argument
    add("--frames", type=_count, default=10_000, metavar="N", help="to time, in whole batches; default: 10000")
    add("--out", type=Path, metavar="FILE", help="also draw the parts in this picture")


def _policies(commands: Any) -> None:
    parser = _command(commands, "policies", "list the policies that packages offer by name", "CartPole-v1", "[ENV]")
    parser.add_argument("env", nargs="?", metavar="ENV", help="also make each of them for this environment")


def _add_env(parser: argparse.ArgumentParser, num_envs: int | None) -> None:
    """Add the arguments that name an environment; `num_envs` is the default of ``--num-envs``, None for no batch."""
    add = parser.add_argument
    add("env", nargs="?", metavar="ENV", help="an id (torch/CartPole-v1), or module:factory")
    add("--env", dest="env_option", metavar="ENV", help="the same as ENV")
    if num_envs is not None:
        what = f"environments in one batch; default: {num_envs}"
        add("--num-envs", type=_count, default=num_envs, metavar="N", help=what)


def _add_policy(
    parser: argparse.ArgumentParser,
    *,
    default: str | None = "random",
    what: str = "mlp, random (default), or module:factory",
) -> None:
    """Add the arguments that name a policy and the options of its factory; `what` is the help of ``--policy``."""
    add = parser.add_argument
    add("--policy", default=default, metavar="NAME", help=what)
    add("--weights", type=Path, metavar="FILE", help="the policy's state_dict: .safetensors, .pt or .pth")
    what = "for the policy's factory, as JSON or text"
    add("--option", "-o", type=_option, action="append", default=[], metavar="NAME=VALUE", help=what)


def _count(text: str) -> int:
    """Parse an argument that is a positive int; ``1e5`` is one, too."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not an integer")
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    if number > 2**53:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return int(number)


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

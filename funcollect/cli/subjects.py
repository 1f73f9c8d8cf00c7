"""Makes the environment and the policy that a command is about."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import funcollect as fc
from funcollect.envs.registry import limited
from funcollect.policies.as_policy import PolicyPlugin, find_policy
from funcollect.protocols import is_env

_IN_A_MODULE = re.compile(r"[\w.]+:[A-Za-z_]\w*")  # Gymnasium's module:Id-v0 has a version


def make_env(arguments: argparse.Namespace, num_envs: int | None, **kwargs: Any) -> fc.Env:
    """Make the environment that the arguments name by an id or ``module:factory``; None lanes mean a single one.

    Any error of the environment's own code becomes a ValueError, which the command prints as one line.
    """
    name, limit = arguments.env, arguments.max_episode_steps
    lanes = {} if num_envs is None else {"num_envs": num_envs}
    if limit is not None:
        kwargs["max_episode_steps"] = limit
    try:
        _check_address(name)
        if not _IN_A_MODULE.fullmatch(name):
            return fc.make_env(name, **lanes, **kwargs)
        return _made(_member(name), lanes | kwargs)
    except (ValueError, TypeError):
        raise
    except Exception as error:  # the environment's own code may raise anything
        raise ValueError(f"cannot make {name!r}: {error or type(error).__name__}") from error


def make_filmed_env(arguments: argparse.Namespace) -> fc.Env:
    """Make a single environment that can be filmed: Gymnasium's, and factories that can, are asked to render."""
    name = arguments.env
    if _IN_A_MODULE.fullmatch(name):
        asked = "render_mode" in _parameters(_member(name))
    else:
        asked = "/" not in name or name.startswith("ale/")
    return make_env(arguments, None, **{"render_mode": "rgb_array"} if asked else {})


def _made(factory: Any, keywords: dict[str, Any]) -> fc.Env:
    """Return the environment of a factory that takes the number of lanes, or one for each lane."""
    if callable(factory) and "num_envs" in _parameters(factory):
        made = limited(factory, keywords)
        return made if is_env(made) else fc.make_env(made)
    return fc.make_env(factory, **keywords)


def _parameters(factory: Any) -> set[str]:
    """The names of a factory's parameters; empty for one that has no signature."""
    try:
        return {*inspect.signature(factory).parameters}
    except (TypeError, ValueError):
        return set()


def _find_modules_here() -> None:
    """Let modules in the working directory be imported, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _check_address(address: str) -> None:
    """Raise ValueError for ``file.py:name``, and for a module in the working directory without a name."""
    file, _, name = address.partition(":")
    if not name and Path(f"{address}.py").exists():
        raise ValueError(f"{address!r} is a module here, expected a function of it: say for example {address}:make")
    if file.endswith(".py"):
        raise ValueError(
            f"{address!r} names a file, expected a module: say {Path(file).stem}:{name}, in the folder of the file"
        )


def _member(address: str) -> Any:
    """Return the member ``module:name``."""
    module, _, name = address.partition(":")
    _find_modules_here()
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{address!r} names the module {module!r}, which cannot be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(
            f"{address!r} names {name!r}, which the module {module!r} lacks: check the spelling"
        ) from error


def policy_named(name: str) -> PolicyPlugin:
    """Find the policy that a package offers by name, or in ``module:factory``, where the factory is not called yet."""
    _check_address(name)
    try:
        return find_policy(name)
    except ValueError:
        if not _IN_A_MODULE.fullmatch(name):
            raise
    _find_modules_here()
    return PolicyPlugin(name, source=name, package=name.partition(":")[0], version="module")


def make_policy(arguments: argparse.Namespace, env: fc.Env, seed: int) -> fc.Policy:
    """Make the policy that the arguments name, with its weights, and with the run's seed if its factory takes one."""
    plugin = policy_named(arguments.policy)
    seeded = {"seed": seed} if plugin.takes("seed") else {}
    policy = plugin.make(env, **(seeded | dict(arguments.option)))
    if arguments.weights is not None:
        if not hasattr(policy, "load"):
            raise TypeError(
                f"{type(policy).__name__} has no method load, expected one for --weights: derive it from PolicyBase"
            )
        if arguments.policy == "random":
            raise ValueError("random actions have no weights: name the policy of --weights with --policy")
        weights = read_weights(arguments.weights)
        try:
            policy.load(weights)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{arguments.weights} does not fit the policy {arguments.policy}: {error}") from error
    return policy


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a file, whose code, if it has some, is not run; ValueError for another file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the path")
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError(f"{path} needs safetensors, which is not installed: pip install safetensors") from error
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no file of safetensors: {error}") from error
    if path.suffix not in (".pt", ".pth"):
        raise ValueError(
            f"{path} has the suffix {path.suffix!r}, expected .safetensors, .pt or .pth: save it as one of these"
        )
    try:
        with warnings.catch_warnings():  # a pickle of another program's is no file of weights, whatever its protocol
            warnings.simplefilter("ignore")
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever the file makes unpickling raise
        raise ValueError(f"{path} has no tensors by name: save a state_dict with torch.save") from error
    if not isinstance(weights, dict) or not all(isinstance(leaf, Tensor) for leaf in weights.values()):
        raise ValueError(f"{path} has {type(weights).__name__}, expected tensors by name: save policy.state_dict()")
    return weights

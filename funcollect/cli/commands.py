"""Runs the commands, each over the environment and the policy that its arguments name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import secrets
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import funcollect as fc
from funcollect import plots
from funcollect.cli.output import RunSummary, episode_table, layout, output_folder, save
from funcollect.core.whole_episodes import is_limited
from funcollect.envs.registry import limited
from funcollect.plots.figures import check_figure
from funcollect.policies.as_policy import PolicyPlugin, find_policy, offered_policies
from funcollect.policies.mlp import mlp
from funcollect.protocols import is_env

_IN_A_MODULE = re.compile(r"[\w.]+:[A-Za-z_]\w*")  # Gymnasium's module:Id-v0 has a version


def run(arguments: argparse.Namespace) -> None:
    """Run the command with one Torch thread: more do not help a small network, and slow it down on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        globals()[arguments.command](arguments)
    finally:
        torch.set_num_threads(before)


def demo(arguments: argparse.Namespace) -> None:
    """Collect on CartPole-v1 with a Torch MLP, and print the result."""
    frames, seed = arguments.frames, arguments.seed
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    drawable = _is_drawable(arguments.out)
    env = fc.make_env("CartPole-v1", num_envs=8)
    policy = mlp(env, seed=seed)
    print(fc.explain(env, policy), end="\n\n", flush=True)
    summary, size = RunSummary(), min(2048, frames)
    with fc.SyncDataCollector(env, policy, frames_per_batch=size, total_frames=frames, seed=seed) as collector:
        for batch in summary.follow(collector):
            last = batch
    print(summary.table(), layout(last), sep="\n\n")
    if drawable:
        plots.returns(summary.episodes, title="CartPole-v1, an untrained policy", path=arguments.out)
        print(f"\npicture: {arguments.out}")


def collect(arguments: argparse.Namespace) -> None:
    """Collect, and save the batch as a memory-mapped TensorDict, the statistics as JSON, and a plot of the returns."""
    num_envs, frames = arguments.num_envs, arguments.frames
    name = re.sub(r"[^\w.-]+", "-", arguments.env)
    out = arguments.out or Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    size = arguments.frames_per_batch or min(frames, max(2000, 128 * num_envs))
    with output_folder(out, arguments.overwrite) as folder:
        env = make_env(arguments, num_envs)
        policy = make_policy(arguments, env, seed)
        summary = RunSummary()
        with fc.SyncDataCollector(env, policy, frames_per_batch=size, total_frames=frames, seed=seed) as collector:
            save(summary.follow(collector), folder / "batch", frames)
        about = {
            "funcollect": fc.__version__,
            "env": arguments.env,
            "policy": arguments.policy,
            "policy_origin": policy_named(arguments.policy).origin,
            "policy_options": dict(arguments.option),
            "weights": None if arguments.weights is None else str(arguments.weights),
            "num_envs": num_envs,
            "frames_per_batch": size,
            "seed": seed,
        }
        (folder / "stats.json").write_text(json.dumps(about | summary.statistics(), indent=2) + "\n")
        if drawable := _is_drawable(folder / "returns.png"):
            plots.returns(summary.episodes, title=arguments.env, path=folder / "returns.png")
    print(summary.table(), f"saved in {out}", *([f"picture: {out / 'returns.png'}"] if drawable else []), sep="\n\n")


def _is_drawable(path: Path) -> bool:
    """Whether a picture can have this path; False, with the reason on standard error, if Matplotlib is missing."""
    try:
        check_figure(path)
    except ImportError as error:
        print(f"no {path.name}: {error}", file=sys.stderr)
        return False
    return True


def evaluate(arguments: argparse.Namespace) -> None:
    """Run whole episodes, and print the spread of their returns and lengths."""
    env = make_env(arguments, arguments.num_envs)
    policy = make_policy(arguments, env, arguments.seed)
    _warn_of_no_end(env)
    print(episode_table(fc.evaluate(env, policy, episodes=arguments.episodes, seed=arguments.seed)))


def _warn_of_no_end(env: fc.Env) -> None:
    """Say on standard error that episodes may have no end, if that is so."""
    if not is_limited(env, None):
        mend = "pass --max-episode-steps N, or write truncates = True in the class of one that limits them itself"
        print(f"episodes may have no end: {mend}", file=sys.stderr)


def record(arguments: argparse.Namespace) -> None:
    """Film whole episodes."""
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # films have no sound; pygame looks for a sound card
    env = make_filmed_env(arguments)
    _warn_of_no_end(env)
    policy = make_policy(arguments, env, arguments.seed)
    stats = fc.record(env, policy, arguments.out, episodes=arguments.episodes, seed=arguments.seed)
    print(episode_table(stats), f"film: {arguments.out}", sep="\n\n")


def check(arguments: argparse.Namespace) -> None:
    """Check an environment, or a policy in it, and print the report up to the first failure."""
    for name in ("option", "weights"):
        if getattr(arguments, name) and arguments.policy is None:
            raise ValueError(f"--{name} is given without --policy, expected both: leave it out, or name the policy")
    env = make_env(arguments, arguments.num_envs)
    options = {"steps": arguments.steps, "seed": arguments.seed}
    try:
        if arguments.policy is None:
            print(fc.testing.check_env(env, single=make_env(arguments, 1), **options))
        else:
            print(fc.testing.check_policy(make_policy(arguments, env, arguments.seed), env, **options))
    except fc.CheckError as error:
        print(error.report)
        raise


def explain(arguments: argparse.Namespace) -> None:
    """Print how the environment and the policy would run together."""
    env = make_env(arguments, arguments.num_envs)
    print(fc.explain(env, make_policy(arguments, env, seed=0)))


def profile(arguments: argparse.Namespace) -> None:
    """Print where the time of a frame goes, and draw it if a file is named."""
    drawable = arguments.out is not None and _is_drawable(arguments.out)
    env = make_env(arguments, arguments.num_envs)
    measured = fc.profile(env, make_policy(arguments, env, seed=0), frames=arguments.frames)
    print(measured)
    if drawable:
        plots.profile(measured, title=arguments.env, path=arguments.out)


def policies(arguments: argparse.Namespace) -> None:
    """Print each policy that packages offer by name: whether it works, the package, and where its factory is."""
    env = None if arguments.env is None else make_env(arguments, 1)
    offers = offered_policies()
    wide, origins = (max(map(len, each)) for each in (offers, [plugin.origin for plugin in offers.values()]))
    for name, plugin in offers.items():
        reason = _fault(plugin, env)
        verdict = "broken" if reason else "ok"
        print(f"{verdict:<6}  {name:<{wide}}  {plugin.origin:<{origins}}  {plugin.source}  {reason}".rstrip())


def _fault(plugin: PolicyPlugin, env: fc.Env | None) -> str:
    """Why the policy cannot be loaded, or made for the environment; empty if it can."""
    try:
        plugin.load() if env is None else plugin.make(env)
    except (fc.PluginError, TypeError) as error:
        return " ".join(str(getattr(error, "reason", error)).split())
    return ""


def make_env(arguments: argparse.Namespace, num_envs: int | None, **kwargs: Any) -> fc.Env:
    """Make the environment that the arguments name by an id or ``module:factory``; None lanes mean a single one.

    Any error of the environment's own code becomes a ValueError, which the command prints as one line.
    """
    name = arguments.env
    given = {"num_envs": num_envs, "max_episode_steps": arguments.max_episode_steps}
    kwargs |= {key: value for key, value in given.items() if value is not None}
    try:
        if not _is_in_a_module(name):
            return fc.make_env(name, **kwargs)
        factory = _member(name)
        if not callable(factory) or "num_envs" not in _parameters(factory):  # it makes one lane
            return fc.make_env(factory, **kwargs)
        made = limited(factory, kwargs)
        return made if is_env(made) else fc.make_env(made)
    except (ValueError, TypeError):
        raise
    except Exception as error:  # the environment's own code may raise anything
        raise ValueError(f"cannot make {name!r}: {error or type(error).__name__}") from error


def make_filmed_env(arguments: argparse.Namespace) -> fc.Env:
    """Make a single environment that can be filmed: Gymnasium's, and factories that can, are asked to render."""
    name = arguments.env
    if _is_in_a_module(name):
        asked = "render_mode" in _parameters(_member(name))
    else:
        asked = "/" not in name or name.startswith("ale/")
    return make_env(arguments, None, **{"render_mode": "rgb_array"} if asked else {})


def _parameters(factory: Any) -> set[str]:
    """The names of a factory's parameters; empty for one that has no signature."""
    try:
        return {*inspect.signature(factory).parameters}
    except (TypeError, ValueError):
        return set()


def _is_in_a_module(address: str) -> bool:
    """Whether it is ``module:name``, of which modules in the working directory can be imported as in `python -m`.

    ValueError for ``file.py:name``, and for a module in the working directory without a name.
    """
    file, _, name = address.partition(":")
    if not name and Path(f"{address}.py").exists():
        raise ValueError(f"{address!r} is a module here, expected a function of it: say for example {address}:make")
    if file.endswith(".py"):
        raise ValueError(
            f"{address!r} names a file, expected a module: say {Path(file).stem}:{name}, in the folder of the file"
        )
    if found := _IN_A_MODULE.fullmatch(address) is not None:
        sys.path[:0] = {os.getcwd()} - {*sys.path}
    return found


def _member(address: str) -> Any:
    """Return the member ``module:name``."""
    module, _, name = address.partition(":")
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
    in_a_module = _is_in_a_module(name)
    try:
        return find_policy(name)
    except ValueError:
        if not in_a_module:
            raise
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
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(
            f"{path} has the suffix {path.suffix!r}, expected .safetensors, .pt or .pth: save it as one of these"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with warnings.catch_warnings():  # a pickle of another program's is no file of weights, whatever its protocol
            warnings.simplefilter("ignore")
            weights = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(weights, dict) or not all(isinstance(leaf, Tensor) for leaf in weights.values()):
            raise TypeError(f"it holds {type(weights).__name__}")
    except ImportError as error:
        raise ImportError(f"{path} needs safetensors, which is not installed: pip install safetensors") from error
    except OSError:
        raise
    except Exception as error:  # whatever the file makes unpickling raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        mend = "save policy.state_dict() with torch.save or safetensors"
        raise ValueError(f"{path} has no tensors by name ({reason}), expected tensors by name: {mend}") from error
    return weights

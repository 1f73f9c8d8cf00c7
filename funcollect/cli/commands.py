"""The commands: each makes the environment and the policy that its arguments name, and prints or saves results."""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import math
import os
import re
import secrets
import shutil
import sys
import time
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import funcollect as fc
from funcollect import plots
from funcollect.core.whole_episodes import is_limited
from funcollect.envs.registry import limited
from funcollect.files import allocate
from funcollect.messages import table
from funcollect.plots.figures import check_figure
from funcollect.policies.as_policy import PolicyPlugin, find_policy, offered_policies
from funcollect.policies.mlp import mlp
from funcollect.progress import EpisodeWindow
from funcollect.tree import flatten


def run(arguments: Namespace) -> None:
    """Run the command with one Torch thread: more do not help a small network, and slow it down on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        globals()[arguments.command](arguments)
    finally:
        torch.set_num_threads(before)


def demo(arguments: Namespace) -> None:
    """Collect on CartPole-v1 with a Torch MLP, and print the result."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    drawable, last = _is_drawable(arguments.out), deque[TensorDict](maxlen=1)
    env = fc.make_env("CartPole-v1", num_envs=8)
    policy, size = mlp(env, seed=arguments.seed), min(2048, arguments.frames)
    print(fc.explain(env, policy), end="\n\n", flush=True)
    episodes, statistics = collected(env, policy, size, arguments.frames, arguments.seed, last.extend)
    rows = [(".".join(path), str(list(leaf.shape)), str(leaf.dtype)) for path, leaf in flatten(last[0]).items()]
    print(tables(statistics), table([("key", "shape", "dtype"), *sorted(rows)]), sep="\n\n")
    if drawable:
        plots.returns(episodes, title="CartPole-v1, an untrained policy", path=arguments.out)
        print(f"\npicture: {arguments.out}")


def collect(arguments: Namespace) -> None:
    """Collect, and save the batch, memory-mapped or as a dataset, the statistics as JSON, and a plot of the returns."""
    num_envs, frames = arguments.num_envs, arguments.frames
    name = re.sub(r"[^\w.-]+", "-", arguments.env)
    out = arguments.out or Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    size = arguments.frames_per_batch or min(frames, max(2000, 128 * num_envs))
    with output_folder(out, arguments.overwrite, whole=arguments.dataset is None) as folder:
        env = make_env(arguments, num_envs)
        policy = make_policy(arguments, env, seed)
        write = {
            None: lambda batches: save(folder / "batch", frames, batches),
            "minari": lambda batches: fc.datasets.write_minari(folder / "dataset", batches, env=env, seed=seed),
            "lerobot": lambda batches: fc.datasets.write_lerobot(folder / "dataset", batches, env=env, seed=seed),
            "hf": lambda batches: fc.datasets.to_hf(batches, folder / "dataset"),
        }[arguments.dataset]
        episodes, statistics = collected(env, policy, size, frames, seed, write)
        weights = None if arguments.weights is None else str(arguments.weights)
        about = {"funcollect": fc.__version__, "env": arguments.env, "num_envs": num_envs, "frames_per_batch": size}
        about |= {"seed": seed, "policy": arguments.policy, "policy_origin": policy_named(arguments.policy).origin}
        about |= {"dataset": arguments.dataset, "policy_options": dict(arguments.option), "weights": weights}
        (folder / "stats.json").write_text(json.dumps(about | statistics, indent=2) + "\n")
        if drawable := _is_drawable(folder / "returns.png"):
            plots.returns(episodes, title=arguments.env, path=folder / "returns.png")
    print(tables(statistics), f"saved in {out}", *([f"picture: {out / 'returns.png'}"] if drawable else []), sep="\n\n")


def _is_drawable(path: Path) -> bool:
    """Check the path of a picture; if Matplotlib is missing, print that to standard error, and return False."""
    try:
        check_figure(path)
    except ImportError as error:
        print(f"no {path.name}: {error}", file=sys.stderr)
        return False
    return True


def evaluate(arguments: Namespace) -> None:
    """Run whole episodes, and print the spread of their returns and lengths."""
    env = make_env(arguments, arguments.num_envs)
    policy = make_policy(arguments, env, arguments.seed)
    _warn_of_no_end(env)
    print(tables(statistics_of(fc.evaluate(env, policy, episodes=arguments.episodes, seed=arguments.seed))))


def _warn_of_no_end(env: fc.Env) -> None:
    """Print a warning to standard error if episodes may have no end."""
    if not is_limited(env, None):
        mend = "pass --max-episode-steps N, or write truncates = True in the class of one that limits them itself"
        print(f"episodes may have no end: {mend}", file=sys.stderr)


def record(arguments: Namespace) -> None:
    """Film whole episodes; Gymnasium's environments, and factories that can, are asked to render."""
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # films have no sound; pygame looks for a sound card
    name, renders = arguments.env, {"render_mode": "rgb_array"}
    takes_mode = "render_mode" in _parameters(factory) if (factory := _member(name)) else re.match(r"ale/|[^/]*$", name)
    env = make_env(arguments, None, **(renders if takes_mode else {}))
    _warn_of_no_end(env)
    policy = make_policy(arguments, env, arguments.seed)
    stats = fc.record(env, policy, arguments.out, episodes=arguments.episodes, seed=arguments.seed)
    print(tables(statistics_of(stats)), f"film: {arguments.out}", sep="\n\n")


def check(arguments: Namespace) -> None:
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


def explain(arguments: Namespace) -> None:
    """Print how the environment and the policy would run together."""
    env = make_env(arguments, arguments.num_envs)
    print(fc.explain(env, make_policy(arguments, env, seed=0)))


def profile(arguments: Namespace) -> None:
    """Print where the time of a frame goes, and draw it if a file is named."""
    drawable = arguments.out is not None and _is_drawable(arguments.out)
    env = make_env(arguments, arguments.num_envs)
    measured = fc.profile(env, make_policy(arguments, env, seed=0), frames=arguments.frames)
    print(measured)
    if drawable:
        plots.profile(measured, title=arguments.env, path=arguments.out)


def policies(arguments: Namespace) -> None:
    """Print each policy that packages offer by name: whether it works, the package, and where its factory is."""
    env = None if arguments.env is None else make_env(arguments, 1)
    offers = offered_policies()
    width, origin_width = (max(map(len, column)) for column in (offers, [plugin.origin for plugin in offers.values()]))
    for name, plugin in offers.items():
        verdict, reason = "ok", ""
        try:
            plugin.load() if env is None else plugin.make(env)
        except (fc.PluginError, TypeError) as error:
            verdict, reason = "broken", " ".join(str(getattr(error, "reason", error)).split())
        print(f"{verdict:<6}  {name:<{width}}  {plugin.origin:<{origin_width}}  {plugin.source}  {reason}".rstrip())


def make_env(arguments: Namespace, num_envs: int | None, **kwargs: Any) -> fc.Env:
    """Make the environment that the arguments name; other exceptions of its own code become a ValueError."""
    name = arguments.env
    given = {"num_envs": num_envs, "max_episode_steps": arguments.max_episode_steps}
    kwargs |= {key: value for key, value in given.items() if value is not None}
    try:
        factory = _member(name) or name
        if "num_envs" in _parameters(factory):  # otherwise it makes one lane
            return fc.make_env(limited(factory, kwargs, name, "leave it out"))
        return fc.make_env(factory, **kwargs)
    except (ValueError, TypeError):
        raise
    except Exception as error:  # the environment's own code may raise anything
        raise ValueError(f"cannot make {name!r}: {str(error) or type(error).__name__}") from error


def _parameters(factory: Any) -> set[str]:
    """The names of a factory's parameters; empty for an id, or without a signature."""
    try:
        return {*inspect.signature(factory).parameters}
    except (TypeError, ValueError):
        return set()


def _is_in_a_module(address: str) -> bool:
    """Whether the address is ``module:name``, here or installed; ValueError for a file, or a bare module here."""
    file, _, name = address.partition(":")
    if not name and Path(f"{address}.py").exists():
        raise ValueError(f"{address!r} is a module here, expected a function of it: say for example {address}:make")
    if file.endswith(".py"):
        own = f"{Path(file).stem}:{name}"
        raise ValueError(f"{address!r} names a file, expected a module: say {own}, in the folder of the file")
    if found := re.fullmatch(r"[\w.]+:[A-Za-z_]\w*", address) is not None:  # Gymnasium's module:Id-v0 has a version
        sys.path[:0] = {os.getcwd()} - {*sys.path}
    return found


def _member(address: str) -> Any:
    """Import ``module:name``; None for other addresses, such as ids."""
    if not _is_in_a_module(address):
        return None
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{address!r} names the module {module!r}, which cannot be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{address!r} names {name!r}, which the module {module!r} lacks: check the name") from error


def policy_named(name: str) -> PolicyPlugin:
    """Find the policy that a package offers by name, or that ``module:factory`` makes; calls no factory."""
    in_a_module = _is_in_a_module(name)
    try:
        return find_policy(name)
    except ValueError:
        if not in_a_module:
            raise
    return PolicyPlugin(name, source=name, package=name.partition(":")[0], version="module")


def make_policy(arguments: Namespace, env: fc.Env, seed: int) -> fc.Policy:
    """Make the policy that the arguments name, with its weights, and with the run's seed if its factory takes one."""
    plugin, path = policy_named(arguments.policy), arguments.weights
    seeded = {"seed": seed} if plugin.takes("seed") else {}
    policy = plugin.make(env, **(seeded | dict(arguments.option)))
    if path is not None and arguments.policy == "random":
        raise ValueError("random actions have no weights: name the policy of --weights with --policy")
    if path is not None:
        weights = read_weights(path)
        try:
            policy.load(weights)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} does not fit the policy {arguments.policy}: {error}") from error
    return policy


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a file without running code in it; ValueError for another kind of file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the path")
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"{path} has the suffix {path.suffix!r}, expected .safetensors, .pt or .pth: save it so")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with warnings.catch_warnings():  # about the protocols of pickles that are no weights
            warnings.simplefilter("ignore")
            weights = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(weights, dict) or not all(isinstance(leaf, Tensor) for leaf in weights.values()):
            raise TypeError(f"it holds {type(weights).__name__}")
    except (OSError, ImportError):
        raise
    except Exception as error:  # unpickling may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        mend = "save policy.state_dict() with torch.save or safetensors"
        raise ValueError(f"{path} has no tensors by name ({reason}), expected tensors by name: {mend}") from error
    return weights


@contextmanager
def output_folder(out: Path, overwrite: bool, *, whole: bool = True) -> Iterator[Path]:
    """Yield a folder that replaces `out` after the block; ValueError unless `out` is empty or may be overwritten.

    If the folder need not appear as a `whole`, it is `out` itself, where each part can be read once it is written. What
    was there before comes back if the block raises before it has written anything.
    """
    out = _replaceable(out.resolve(), overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        if whole:
            yield new
        try:
            if out.exists():
                out.rename(old)
            new.rename(out)
            if not whole:
                yield out
        except BaseException:
            if not whole and old.exists() and out.exists() and not any(out.iterdir()):
                out.rmdir()
            if old.exists() and not out.exists():
                old.rename(out)
            raise


def _replaceable(out: Path, overwrite: bool) -> Path:
    """The folder `out`; ValueError unless it is empty, or an earlier run that may be overwritten."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder for --out: choose another name")
    if out.exists() and (out.is_mount() or Path.cwd().is_relative_to(out)):
        raise ValueError(f"{out} is in use and cannot be replaced as a whole: name a folder inside it")
    present = {path.name for path in out.iterdir()} if out.exists() else set()
    if present and not overwrite:
        raise ValueError(f"{out} is not empty: choose another folder, or replace an earlier run with --overwrite")
    if foreign := sorted(present - {"batch", "dataset", "stats.json", "returns.png"}):
        raise ValueError(f"{out} holds {foreign}, which no run of funcollect has written: choose another folder")
    return out


def save(path: Path, frames: int, batches: Iterable[TensorDict]) -> None:
    """Write consecutive batches [P, T], which have at least so many frames, as one memory-mapped TensorDict."""
    store: TensorDict | None = None
    filled = 0
    for batch in batches:
        length = batch.shape[-1]
        if store is None:
            like = batch[..., :1].expand(*batch.shape[:-1], math.ceil(frames / batch.numel()) * length)
            store = _reserved(path, like)
        store[..., filled : filled + length].update_(batch)
        filled += length


def _reserved(path: Path, like: TensorDict) -> TensorDict:
    """A memory-mapped TensorDict like another; OSError without room, where a write to a sparse file may kill us."""
    wanted = sum(leaf.numel() * leaf.element_size() for leaf in flatten(like).values())
    try:
        if wanted > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        store = like.memmap_like(path)
        for file in path.rglob("*.memmap"):
            if size := file.stat().st_size:
                with file.open("r+b") as opened:
                    allocate(opened.fileno(), size)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"no room for {wanted / 1e6:,.1f} MB in {path.parents[2]}: {reason}") from error
    return store


def collected(
    env: fc.Env, policy: fc.Policy, size: int, frames: int, seed: int, take: Callable[[Iterable[TensorDict]], Any]
) -> tuple[fc.EpisodeStats, dict[str, Any]]:
    """Collect with a progress bar, and pass the batches to `take`; return the episodes, and statistics for JSON."""
    window, began = EpisodeWindow(), time.perf_counter()
    parts: list[fc.EpisodeStats] = []

    def batches(collector: fc.SyncDataCollector) -> Iterator[TensorDict]:
        for batch in fc.track(collector, window=window):
            assert window.last is not None
            parts[-1:] = [replace(part, open_returns={}) for part in parts[-1:]]  # only the last part has them
            parts.append(window.last)
            yield batch

    with fc.SyncDataCollector(env, policy, frames_per_batch=size, total_frames=frames, seed=seed) as collector:
        take(batches(collector))
    seconds, episodes = time.perf_counter() - began, fc.EpisodeStats.concatenate(parts)
    counts = {"frames": window.frames, "seconds": seconds, "frames_per_second": window.frames / seconds}
    return episodes, counts | statistics_of(episodes)


def statistics_of(episodes: fc.EpisodeStats) -> dict[str, Any]:
    """The counts of episodes, and the spread of their returns and lengths, as values for JSON."""
    terminated, returns = int(episodes.terminated.sum()), episodes.returns
    players = {"": returns} if returns.ndim == 1 else {f"_{n}": column for n, column in enumerate(returns.mT)}
    counts = {"episodes": len(episodes), "terminated": terminated, "truncated": len(episodes) - terminated}
    spreads = {f"return{player}": _spread(column) for player, column in players.items()}
    return {**counts, **spreads, "length": _spread(episodes.lengths.double())}


def tables(statistics: dict[str, Any]) -> str:
    """The counts and the spreads of `statistics_of` as two tables."""
    spreads = [(name, *map(_number, value.values())) for name, value in statistics.items() if isinstance(value, dict)]
    counts = [(key.replace("_per_", "/"), _number(n)) for key, n in statistics.items() if not isinstance(n, dict)]
    return f"{table(counts)}\n\n{table([('per episode', 'mean', 'std', 'min', 'max'), *spreads])}"


def _spread(values: Tensor) -> dict[str, float | None]:
    """The mean, standard deviation, minimum and maximum; None in place of each that is missing or not finite."""
    if not len(values):
        return dict.fromkeys(("mean", "std", "min", "max"))
    numbers = {"mean": values.mean(), "std": values.std(correction=0), "min": values.min(), "max": values.max()}
    return {name: float(number) if number.isfinite() else None for name, number in numbers.items()}


def _number(value: float | None) -> str:
    """A number as text: commas in thousands, two decimals if it is a float; "-" for None."""
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"

"""Runs the commands."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import funcollect as fc
from funcollect import plots
from funcollect.cli.output import RunSummary, episode_table, layout, output_folder, save
from funcollect.cli.subjects import make_env, make_filmed_env, make_policy, policy_named
from funcollect.core.rollout_trajectories import is_limited
from funcollect.plots.figures import check_figure
from funcollect.policies.as_policy import PolicyPlugin, offered_policies
from funcollect.policies.mlp import mlp


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run Torch with one thread: more do not help a small network, and on a busy machine they slow it down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def demo(arguments: argparse.Namespace) -> None:
    """Collect on CartPole-v1 with a Torch MLP, and print the result."""
    frames, seed = arguments.frames, arguments.seed
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    drawable = _is_drawable(arguments.out)
    env = fc.make_env("CartPole-v1", num_envs=8)
    policy = mlp(env, seed=seed)
    print(fc.explain(env, policy), end="\n\n", flush=True)
    run, size = RunSummary(), min(2048, frames)
    with fc.SyncDataCollector(env, policy, frames_per_batch=size, total_frames=frames, seed=seed) as collector:
        for batch in run.follow(collector):
            last = batch
    print(run.table(), layout(last), sep="\n\n")
    if drawable:
        plots.returns(run.episodes, title="CartPole-v1, an untrained policy", path=arguments.out)
        print(f"\npicture: {arguments.out}")


@_one_thread()
def collect(arguments: argparse.Namespace) -> None:
    """Collect, and save the batch as a memory-mapped TensorDict, the statistics as JSON, and a plot of the returns."""
    num_envs, frames = arguments.num_envs, arguments.frames
    out = arguments.out or _new_folder(arguments.env)
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    size = arguments.frames_per_batch or min(frames, max(2000, 128 * num_envs))
    with output_folder(out, arguments.overwrite) as folder:
        env = make_env(arguments, num_envs)
        policy = make_policy(arguments, env, seed)
        run = RunSummary()
        with fc.SyncDataCollector(env, policy, frames_per_batch=size, total_frames=frames, seed=seed) as collector:
            save(run.follow(collector), folder / "batch", frames)
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
        (folder / "stats.json").write_text(json.dumps(about | run.statistics(), indent=2) + "\n")
        if drawable := _is_drawable(folder / "returns.png"):
            plots.returns(run.episodes, title=arguments.env, path=folder / "returns.png")
    print(run.table(), f"saved in {out}", *([f"picture: {out / 'returns.png'}"] if drawable else []), sep="\n\n")


def _new_folder(env: str) -> Path:
    """A folder for a run without a name, after the environment and the time."""
    name = re.sub(r"[^\w.-]+", "-", env)
    return Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _is_drawable(path: Path) -> bool:
    """Whether a picture can have this path; False, with the reason on standard error, if Matplotlib is missing."""
    try:
        check_figure(path)
    except ImportError as error:
        print(f"no {path.name}: {error}", file=sys.stderr)
        return False
    return True


@_one_thread()
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


@_one_thread()
def record(arguments: argparse.Namespace) -> None:
    """Film whole episodes."""
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # films have no sound; pygame looks for a sound card
    env = make_filmed_env(arguments)
    _warn_of_no_end(env)
    policy = make_policy(arguments, env, arguments.seed)
    stats = fc.record(env, policy, arguments.out, episodes=arguments.episodes, seed=arguments.seed)
    print(episode_table(stats), f"film: {arguments.out}", sep="\n\n")


@_one_thread()
def check(arguments: argparse.Namespace) -> None:
    """Check an environment, or a policy in it, and print the report up to the first failure."""
    for name in ("option", "weights"):
        if getattr(arguments, name) and arguments.policy is None:
            raise ValueError(f"--{name} is given without --policy, expected both: leave it out, or name the policy")
    env = make_env(arguments, arguments.num_envs)
    run = {"steps": arguments.steps, "seed": arguments.seed}
    try:
        if arguments.policy is None:
            print(fc.testing.check_env(env, single=make_env(arguments, 1), **run))
        else:
            print(fc.testing.check_policy(make_policy(arguments, env, arguments.seed), env, **run))
    except fc.CheckError as error:
        print(error.report)
        raise


def explain(arguments: argparse.Namespace) -> None:
    """Print how the environment and the policy would run together."""
    env = make_env(arguments, arguments.num_envs)
    print(fc.explain(env, make_policy(arguments, env, seed=0)))


@_one_thread()
def profile(arguments: argparse.Namespace) -> None:
    """Print where the time of a frame goes, and draw it if a file is named."""
    out = arguments.out
    drawable = out is not None and _is_drawable(out)
    env = make_env(arguments, arguments.num_envs)
    measured = fc.profile(env, make_policy(arguments, env, seed=0), frames=arguments.frames)
    print(measured)
    if drawable:
        plots.profile(measured, title=arguments.env, path=out)


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
        if env is None:
            plugin.load()
        else:
            plugin.make(env)
    except (fc.PluginError, TypeError) as error:
        return " ".join(str(getattr(error, "reason", error)).split())
    return ""

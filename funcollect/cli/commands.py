"""What each command does."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import funcollect as fc
from funcollect import plots
from funcollect.cli.network import mlp
from funcollect.cli.output import output_folder, save
from funcollect.cli.report import Run, layout

__all__ = ["check", "collect", "demo", "explain"]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch with one thread: a small network gains nothing from more, and on a busy machine loses most of its speed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def demo(arguments: argparse.Namespace) -> None:
    """Collect on CartPole-v1 with a Torch MLP, and show what came of it."""
    frames, seed = arguments.frames, arguments.seed
    env = fc.make_env("CartPole-v1", num_envs=8)
    policy = mlp(env, seed)
    print(fc.explain(env, policy), end="\n\n", flush=True)
    run = Run()
    with fc.SyncDataCollector(
        env, policy, frames_per_batch=min(2048, frames), total_frames=frames, seed=seed
    ) as collector:
        for batch in run.follow(collector):
            last = batch
    print(run.table(), layout(last), sep="\n\n")


@_one_thread()
def collect(arguments: argparse.Namespace) -> None:
    """Collect and save: the batch as a memory-mapped TensorDict, the statistics as JSON, the returns as a picture."""
    num_envs, frames = arguments.num_envs, arguments.frames
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    frames_per_batch = arguments.frames_per_batch or min(frames, max(2000, 128 * num_envs))
    with output_folder(arguments.out, arguments.overwrite) as folder:
        env = _make_env(arguments.env, num_envs)
        policy = _make_policy(arguments.policy, env, seed)
        run = Run()
        with fc.SyncDataCollector(
            env, policy, frames_per_batch=frames_per_batch, total_frames=frames, seed=seed
        ) as collector:
            save(run.follow(collector), folder / "batch", frames)
        about = {
            "funcollect": fc.__version__,
            "env": arguments.env,
            "policy": arguments.policy,
            "num_envs": num_envs,
            "frames_per_batch": frames_per_batch,
            "seed": seed,
        }
        (folder / "stats.json").write_text(json.dumps(about | run.statistics(), indent=2) + "\n")
        _plot(run, folder / "returns.png")
    print(run.table(), f"saved in {arguments.out}", sep="\n\n")


@_one_thread()
def check(arguments: argparse.Namespace) -> None:
    """Print what `funcollect.testing.check_env` finds, up to the first check that fails."""
    limit = arguments.max_episode_steps
    given = {} if limit is None else {"max_episode_steps": limit}
    env, single = (_make_env(arguments.env, count, **given) for count in (arguments.num_envs, 1))
    try:
        print(fc.testing.check_env(env, steps=arguments.steps, seed=arguments.seed, single=single))
    except fc.CheckError as error:
        print(error.report)
        raise


def explain(arguments: argparse.Namespace) -> None:
    """Print how the environment and the policy would run together."""
    env = _make_env(arguments.env, arguments.num_envs)
    print(fc.explain(env, _make_policy(arguments.policy, env, seed=0)))


def _make_policy(name: str, env: fc.Env, seed: int) -> fc.Policy:
    return mlp(env, seed) if name == "mlp" else fc.random_policy(env)


def _make_env(name: str, num_envs: int, **kwargs: int) -> fc.Env:
    try:
        return fc.make_env(name, num_envs=num_envs, **kwargs)
    except (ValueError, TypeError):
        raise
    except Exception as error:  # the environment's own code may raise anything
        raise ValueError(f"cannot make {name!r}: {error or type(error).__name__}") from error


def _plot(run: Run, path: Path) -> None:
    try:
        plots.returns(run.episodes, path=path)
    except ImportError as error:
        print(f"no {path.name}: {error}", file=sys.stderr)

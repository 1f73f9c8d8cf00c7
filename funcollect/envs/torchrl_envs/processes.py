"""TorchRL's environments closed, and the processes of a `ParallelEnv` ended whatever state they are in."""

from __future__ import annotations

import contextlib
from multiprocessing.process import BaseProcess
from typing import Any

import torch


def workers_of(env: Any) -> list[BaseProcess]:
    """The processes of the `ParallelEnv` that `env` is, or that stands under its transforms; none for any other."""
    # not by getattr, which a ParallelEnv passes on to its processes
    return [process for module in env.modules() for process in vars(module).get("_workers", ())]


def end_workers(env: Any) -> None:
    """Kill the processes, which may be busy, hung or gone already; the next call of `env` starts them anew."""
    for module in env.modules():
        if "_workers" not in vars(module):
            continue
        for process in module._workers:
            with contextlib.suppress(ValueError):  # TorchRL has reaped it
                process.kill()
                process.join()
        for channel in module.parent_channels:
            channel.close()
        module.is_closed = True


def _is_alive(process: BaseProcess) -> bool:
    try:
        return process.is_alive()
    except ValueError:  # TorchRL has reaped it
        return False


def close_env(env: Any, *, broken_off: bool, threads: int) -> None:
    """Close `env`, and leave Torch with `threads` threads, which closing a `ParallelEnv` changes.

    Args:
        env: the environment, closed already or not.
        broken_off: whether a call of it did not end, after which its processes take no further one.
        threads: Torch's thread count from then on.
    """
    try:
        if env.is_closed:
            return
        if workers_of(env) and (broken_off or not all(map(_is_alive, workers_of(env)))):
            end_workers(env)
            env.close(raise_if_closed=False)  # its transforms
        else:
            env.close()
    finally:
        torch.set_num_threads(threads)

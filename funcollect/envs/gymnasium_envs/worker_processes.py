"""Gymnasium's `AsyncVectorEnv` started safely, and ended whatever state it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from funcollect.interop.hidden_main import hidden_main

_TO_DIE = 1.0  # seconds that a process may take to be gone, once its pipe is closed


def open_processes(factories: Sequence[Callable[[], Any]]) -> AsyncVectorEnv:
    """One process per factory, observations in shared memory.

    The processes are spawned: a fork after Torch or JAX have started threads hangs.
    """
    with hidden_main():
        return AsyncVectorEnv(factories, copy=False, context="spawn", autoreset_mode=AutoresetMode.DISABLED)


def end_processes(env: AsyncVectorEnv) -> None:
    """Kill the processes, which may be busy, hung or gone already."""
    for process in env.processes:
        process.kill()
    env._state = AsyncState.DEFAULT  # else it would wait for answers that do not come
    env.close(terminate=True)


def close_processes(env: AsyncVectorEnv) -> None:
    """Let every process close its environment and end; where one is gone, the others are killed."""
    try:
        env.close()
    except (EOFError, OSError):
        end_processes(env)


def death_of(env: VectorEnv[Any, Any, Any], error: Exception) -> str | None:
    """Which process is gone, where that explains why a call raised `error`."""
    if not isinstance(env, AsyncVectorEnv) or not isinstance(error, (EOFError, OSError)):
        return None
    ended = wait([process.sentinel for process in env.processes], _TO_DIE)
    for lane, process in enumerate(env.processes):
        if process.sentinel in ended:
            process.join()  # its pipes close a little before it can be asked how it ended
            return f"lane {lane}: its process is gone (exit code {process.exitcode})"
    return None

"""How many threads Torch and XLA have in a process that belongs to one worker."""

from __future__ import annotations

import os
import sys

import torch


def limit_threads(num_threads: int, *, accelerators: bool) -> None:
    """Limit this process's threads, and hide accelerators from JAX unless wanted. Call it before JAX makes a client."""
    os.environ["OMP_NUM_THREADS"] = os.environ["NPROC"] = str(num_threads)  # XLA's CPU client reads the latter
    torch.set_num_threads(num_threads)
    if num_threads == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if not accelerators:
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_platforms", "cpu")

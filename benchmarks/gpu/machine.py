"""The requested platform, its devices and versions, and the memory that each framework holds."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
import torch

from benchmarks.harness.runner import Result

PROGRAMS = Path(__file__).parents[2] / ".cache" / "gpu-programs"  # compiled ones, which `run.sh` deletes


def choose(platform: str) -> None:
    """Make JAX use `platform` ("cpu" or "cuda") before its first computation, as both frameworks share the memory.

    Programs for a GPU are kept in files, so that no part of the benchmark, nor another process, compiles one again.

    Raises:
        RuntimeError: if JAX or Torch does not have it.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # read when JAX makes its client
    jax.config.update("jax_platforms", "cpu" if platform == "cpu" else "cuda,cpu")
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS) if platform == "cuda" else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    wanted = "cpu" if platform == "cpu" else "gpu"
    if (found := jax.default_backend()) != wanted:
        raise RuntimeError(f"JAX runs on {found}, expected {wanted}: install it for that, or pass another --platform")
    if platform == "cuda":
        torch.cuda.init()


def result(platform: str) -> Result:
    """Return devices, drivers and the versions of all installed packages."""
    data = {
        "platform": platform,
        "devices": {"jax": [str(each) for each in jax.devices()], "torch": _torch_device(platform)},
        "cuda": {"torch": torch.version.cuda, "jax": jax.devices()[0].client.platform_version},
        "nvidia_smi": _nvidia_smi(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_", "CUDA_VISIBLE"))
        },
        "packages": dict(sorted({each.name: each.version for each in distributions()}.items())),
    }
    lines = [f"jax on {', '.join(data['devices']['jax'])}; torch on {data['devices']['torch']}", data["nvidia_smi"]]
    return Result(name="machine", table="\n".join(lines), data=data)


def memory() -> dict[str, Any]:
    """Return the bytes that Torch and JAX hold on the device, now and at peak; None if they do not count them."""
    stats = jax.devices()[0].memory_stats()
    names = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "peak_pool_bytes", "bytes_limit")
    held = None if not stats else {name: stats[name] for name in names if name in stats}
    if not torch.cuda.is_initialized():
        return {"torch": None, "jax": held}
    torch_held = {
        "allocated": torch.cuda.memory_allocated(),
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
    }
    return {"torch": torch_held, "jax": held}


def _torch_device(platform: str) -> str:
    return torch.cuda.get_device_name() if platform == "cuda" else "cpu"


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60, check=False).stdout

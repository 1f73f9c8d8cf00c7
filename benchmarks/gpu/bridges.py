"""Whether JAX and Torch read the same memory: the pointers on both sides of every crossing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import torch
import torch.utils.dlpack
from torch import Tensor

from benchmarks.gpu.built import Builder
from benchmarks.gpu.pairs import GYMNAX_CARTPOLE, TORCH_CARTPOLE, Ours, routes
from benchmarks.harness.report import table
from benchmarks.harness.runner import Options, Result

DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32", "complex64")
TO_TORCH, TO_JAX = "jax -> torch", "torch -> jax"
LANES, LENGTH = 64, 16


class Crossing(NamedTuple):
    """One array that crossed by DLPack."""

    way: str
    dtype: str
    shared: bool  # whether both sides have the same address
    address: int  # where the result is


@contextlib.contextmanager
def crossings() -> Iterator[list[Crossing]]:
    """Record every crossing between JAX and Torch within the context, whoever causes it."""
    seen: list[Crossing] = []

    def watched(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def cross(source: Any, *args: Any, **options: Any) -> Any:
            result = function(source, *args, **options)
            address = pointer(result)
            seen.append(Crossing(way, str(result.dtype).removeprefix("torch."), pointer(source) == address, address))
            return result

        return cross

    into_torch = mock.patch.object(torch.utils.dlpack, "from_dlpack", watched(TO_TORCH, torch.utils.dlpack.from_dlpack))
    into_jax = mock.patch.object(jax.dlpack, "from_dlpack", watched(TO_JAX, jax.dlpack.from_dlpack))
    with into_torch, into_jax:
        yield seen


def pointer(array: Any) -> int:
    """The address at which an array of JAX or of Torch begins."""
    return array.data_ptr() if isinstance(array, Tensor) else array.unsafe_buffer_pointer()


def dtypes(device: str, names: Sequence[str] = DTYPES) -> dict[str, dict[str, bool]]:
    """Whether `funcollect.interop` shares the memory of each dtype, both ways; arrays are on JAX's default device."""
    import funcollect as fc

    shared: dict[str, dict[str, bool]] = {}
    for name in names:
        array = jnp.arange(64).astype(name)
        tensor = torch.empty(64, dtype=getattr(torch, name), device=device)
        shared[name] = {
            TO_TORCH: pointer(fc.interop.to_torch(array)) == pointer(array),
            TO_JAX: pointer(fc.interop.to_jax(tensor)) == pointer(tensor),
        }
    return shared


def route(ours: Ours) -> dict[str, Any]:
    """The crossings of one rollout, and which leaves of its batch are on memory that crossed."""
    ours.batch()  # compiles, and imports the modules that look up the recorded functions
    with crossings() as seen:
        batch = ours.batch()
    delivered = {crossing.address for crossing in seen if crossing.way == TO_TORCH}
    leaves = {_dotted(path): leaf for path, leaf in batch.items(include_nested=True, leaves_only=True)}
    counts = Counter((each.way, each.dtype, each.shared) for each in seen)
    return {
        "crossings": [
            {"way": way, "dtype": dtype, "shared": shared, "count": count}
            for (way, dtype, shared), count in sorted(counts.items())
        ],
        "leaves_on_memory_of_jax": {
            name: leaf.untyped_storage().data_ptr() in delivered for name, leaf in leaves.items()
        },
        "devices_of_leaves": sorted({str(leaf.device) for leaf in leaves.values()}),
    }


def _dotted(path: str | tuple[str, ...]) -> str:
    return path if isinstance(path, str) else ".".join(path)


def result(builder: Builder, options: Options, deadline: float) -> Iterator[Result]:
    """Both tables: each dtype through the public functions, and each route's own crossings; it takes seconds."""
    device = options.platform
    by_dtype = dtypes(device)
    by_route = {
        f"{env_id}: {name}": route(Ours(make, env_id, LANES, LENGTH, device))
        for env_id in (GYMNAX_CARTPOLE, TORCH_CARTPOLE)
        for name, make in routes(env_id, device).items()
    }
    crossed = [each for one in by_route.values() for each in one["crossings"]]
    equal = all(all(ways.values()) for ways in by_dtype.values()) and all(each["shared"] for each in crossed)
    rows = [(name, *(str(ways[way]) for way in (TO_TORCH, TO_JAX))) for name, ways in by_dtype.items()]
    lines = [table(("same pointer", TO_TORCH, TO_JAX), rows), "", *map(_line, by_route.items())]
    data = {"equal_everywhere": equal, "dtypes": by_dtype, "routes": by_route}
    yield Result(name="bridges", table="\n".join(lines), data=data)


def _line(item: tuple[str, dict[str, Any]]) -> str:
    name, facts = item
    total = sum(each["count"] for each in facts["crossings"])
    shared = sum(each["count"] for each in facts["crossings"] if each["shared"])
    leaves = facts["leaves_on_memory_of_jax"]
    return (
        f"{name}: {shared} of {total} crossings share memory, {sum(leaves.values())} of {len(leaves)} leaves are JAX's"
    )

"""TorchRL's keywords of buffers, ignored if a call means the same without them; and checks of a buffer's parts."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from funcollect.arguments import Foreign, unset_or_false, without_foreign
from funcollect.messages import kind_of

Init = TypeVar("Init", bound=Callable[..., None])


def _on_cpu(value: Any, call: Mapping[str, Any]) -> bool:
    return value is None or str(value) == "cpu"


OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()  # by storage and sampler
_PARTS = {  # the method by which each is known, and an example
    "storage": ("admit", "funcollect.LazyTensorStorage(100_000)"),
    "sampler": ("draw", "funcollect.SliceSampler(slice_len=8)"),
}
_COMPILED = Foreign("nothing needs to be compiled")
FOREIGN: Mapping[str, Mapping[str, Foreign]] = {
    "buffer": {
        "compilable": _COMPILED,
        "delayed_init": Foreign("storages take their memory at the first extend"),
        "pin_memory": Foreign("a storage's device='cuda' returns samples there, through pinned memory"),
        "dim_extend": Foreign(
            "the last batch dimension is time: transpose the data",
            lambda value, call: value is None or value == getattr(call.get("storage"), "ndim", 1) - 1,
        ),
        "dtype": Foreign("priorities are float64"),
        "sampler_device": Foreign("priorities are where the storage keeps its frames", _on_cpu),
        "sync": Foreign("one process writes, others read with a funcollect.ReplayReader", lambda value, call: value),
        "consume_after_n_samples": Foreign("a RecentSampler(once=True) draws each frame once", unset_or_false),
        "sample_unit": Foreign("a SliceSampler samples slices", unset_or_false),
        "transform_factory": Foreign("pass transform=", unset_or_false),
    },
    "storage": {
        "compilable": _COMPILED,
        "consolidated": Foreign("frames are in one file"),
        "auto_cleanup": Foreign(
            "without scratch_dir the file goes with the storage, with one it stays",
            lambda value, call: not value or call.get("scratch_dir") is None,
        ),
        "shared_init": Foreign("one process writes, others read with a funcollect.ReplayReader", unset_or_false),
        "device": Foreign("a ListStorage keeps items where they are: move the sample", _on_cpu),
    },
    "sampler": {
        "compile": _COMPILED,
        "use_gpu": Foreign("trajectories are found on the host, as frames are written"),
        "cache_values": Foreign("trajectories are always known"),
        "dtype": Foreign("priorities are float64"),
        "device": Foreign("priorities are where the storage keeps its frames", _on_cpu),
        "fragmented": Foreign("trajectories are followed by ids, in the order of writing", unset_or_false),
        "step_key": Foreign("the step is ('collector', 'step')", unset_or_false),
        "ends": Foreign("trajectories are found in the frames: name keys with end_keys=", unset_or_false),
        "trajectories": Foreign("trajectories are found in the frames: name the ids with traj_key=", unset_or_false),
    },
}  # fmt: skip


def takes_foreign(kind: str) -> Callable[[Init], Init]:
    """Let a constructor accept TorchRL's keywords for this kind of object, if the call means the same without them."""

    def decorate(init: Init) -> Init:
        foreign = {name: it for name, it in FOREIGN[kind].items() if name not in inspect.signature(init).parameters}

        @wraps(init)
        def outer(self: Any, *args: Any, **given: Any) -> None:
            init(self, *args, **without_foreign(type(self).__name__, foreign, given))

        return outer  # type: ignore[return-value]

    return decorate


def part_of(name: str, part: Any) -> Any:
    """A storage or sampler of no buffer yet, or what a function or class makes; TypeError or ValueError for others."""
    method, example = _PARTS[name]
    if isinstance(part, type):
        with contextlib.suppress(TypeError):  # which needs arguments
            part = part()
    elif callable(part) and not hasattr(part, method):
        part = part()
    if isinstance(part, type) or not hasattr(part, method):
        raise TypeError(f"{name} is {kind_of(part)}, expected a {name} of funcollect: pass for example {example}")
    if OWNERS.get(part, lambda: None)() is not None:
        raise ValueError(f"{name} {part} belongs to another buffer, expected one of its own: make another")
    return part

"""Captures functions of tensors as CUDA graphs: one launch runs the same kernels over the same memory at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import optree
import torch
from torch import Tensor

from funcollect.tree import NAMESPACE

Output = TypeVar("Output")


def can_capture(device: torch.device) -> bool:
    """Whether work on this device can be captured."""
    return device.type == "cuda"


class CaptureError(RuntimeError):
    """A call cannot be captured: it reads values of tensors, or copies from the host."""


class CudaGraph(Generic[Output]):
    """A function of a pytree, captured with an example, its leaves and treedef; CaptureError if that is impossible.

    A call copies tensors to the memory that the graph reads, unless they lie there. Everything else is fixed in the
    graph: other leaves, all that the function refers to, and the branches that Python took. The next call overwrites
    the result.
    """

    def __init__(
        self, function: Callable[[Any], Output], leaves: list[Any], treedef: Any, device: torch.device
    ) -> None:
        self._function, self._treedef = function, treedef  # the graph reads the tensors that the function refers to
        with torch.inference_mode(mode=False), torch.no_grad():  # so that calls outside of that mode may write them
            self._leaves = [
                leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            tree = treedef.unflatten(self._leaves)
            self._replay, self._result = capture(lambda: function(tree), device)

    def fits(self, leaves: list[Any], treedef: Any) -> bool:
        """Whether a call may take these: tensors like the captured ones, and equal other leaves."""
        return treedef == self._treedef and all(map(_matches, self._leaves, leaves))

    def __call__(self, leaves: list[Any]) -> Output:
        """The result for leaves that fit."""
        pairs = zip(self._leaves, leaves, strict=True)
        _copy([(place, leaf) for place, leaf in pairs if place is not leaf and isinstance(place, Tensor)])
        self._replay()
        return self._result


def written(memory: Any, values: Any) -> Any:
    """The pytree `values`, its tensors copied into those of the pytree `memory` that have the same shape and dtype."""
    places, treedef = optree.tree_flatten(memory, namespace=NAMESPACE)
    leaves, found = optree.tree_flatten(values, namespace=NAMESPACE)
    if found != treedef:
        return values
    moved: list[tuple[Tensor, Tensor]] = []
    used = {place.untyped_storage().data_ptr() for place in places if isinstance(place, Tensor)}
    for at, (place, leaf) in enumerate(zip(places, leaves, strict=True)):
        if isinstance(place, Tensor) and place is not leaf and _matches(place, leaf):
            moved.append((place, leaf.clone() if leaf.untyped_storage().data_ptr() in used else leaf))
            leaves[at] = place
    _copy(moved)
    return treedef.unflatten(leaves)


def _copy(moved: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, by one launch for all pairs of a dtype."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in moved:
        by_dtype.setdefault(pair[0].dtype, []).append(pair)
    with torch.no_grad():
        for pairs in by_dtype.values():
            places, values = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(places, values)


def capture(function: Callable[[], Output], device: torch.device) -> tuple[Callable[[], None], Output]:
    """Capture a call; return a function that replays it, and the result, which lies in the graph's memory.

    The function is called once before, on another stream, since libraries set themselves up at their first call.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = function()
        except BaseException as error:
            torch.cuda.set_stream(current)  # after an error Torch leaves the stream of the capture current
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise CaptureError(str(error)) from error
            raise
    return graph.replay, result


def _matches(captured: Any, leaf: Any) -> bool:
    if not isinstance(captured, Tensor):
        return captured is leaf or (type(captured) is type(leaf) and bool(captured == leaf))
    return isinstance(leaf, Tensor) and (captured.shape, captured.dtype) == (leaf.shape, leaf.dtype)

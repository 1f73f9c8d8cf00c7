"""TensorDicts as optree nodes, and nested dicts by path.

tensordict registers its own node in optree's namespace ``"torch"``, with keys in insertion order and without the lock.
Our node in `NAMESPACE` sorts the keys, keeps the lock and the names of dimensions, and stores only the number of batch
dimensions, so that a function mapped over the leaves may change their sizes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch
from tensordict import TensorDict, TensorDictBase

NAMESPACE = "funcollect"

Path = tuple[str, ...]


def _flatten(batch: TensorDictBase) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
    keys = tuple(sorted(batch.keys()))
    empty = None if keys else batch.batch_size  # the leaves of a batch without keys cannot show its size
    names = (*batch.names,) if batch._has_names() else None
    return tuple(batch.get(key) for key in keys), (keys, batch.batch_dims, names, batch.is_locked, empty), keys


def _unflatten(metadata: tuple[tuple[str, ...], int, Any, bool, Any], children: Iterable[Any]) -> TensorDict:
    keys, batch_dims, names, locked, empty = metadata
    values = dict(zip(keys, children, strict=True))
    shapes = (value.shape[:batch_dims] for value in values.values() if hasattr(value, "shape"))
    batch = TensorDict(values, batch_size=next(shapes, empty or torch.Size([])), names=names)
    return batch.lock_() if locked else batch


optree.register_pytree_node(TensorDict, _flatten, _unflatten, namespace=NAMESPACE)  # type: ignore[arg-type]


def nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """A nested dict from a dict by paths: ``{"b": {"c": 2}}`` from ``{("b", "c"): 2}``."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        node = nested
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return nested


def flatten(nested: Mapping[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    """A dict by paths from a nested one; the inverse of `nest`."""
    flat: dict[Path, Any] = {}
    for name, value in nested.items():
        path = (*prefix, str(name))
        flat.update(flatten(value, path) if isinstance(value, (Mapping, TensorDictBase)) else {path: value})
    return flat


def key_of(path: Path) -> str | Path:
    """A path as TensorDict writes keys: a string if it has one part, else the tuple."""
    return path if path[1:] else path[0]


def as_path(key: str | Path) -> Path:
    """A key as the tuple of its parts."""
    return (key,) if isinstance(key, str) else key


def to_tensordict(flat: Mapping[Path, torch.Tensor], batch_size: tuple[int, ...]) -> TensorDict:
    """A TensorDict of leaves by path, each [*batch_size, ...], which are neither checked nor copied."""
    return _build(nest(flat), torch.Size(batch_size))


def to_batch(
    flat: Mapping[Path, torch.Tensor], batch_size: tuple[int, ...], *, with_time: bool = True, locked: bool = False
) -> TensorDict:
    """Do what `to_tensordict` does; `with_time`, the last batch dimension has the name ``"time"``, as in TorchRL.

    The nodes are copies of those that tensordict made for the same paths, which takes a tenth of the time.
    """
    return form_of(tuple(flat), torch.Size(batch_size), with_time, locked).filled((*flat.values(),))


class Form(NamedTuple):
    """One node of a batch as tensordict makes it."""

    attributes: dict[str, Any]  # all but the entries, the names, and references to other nodes
    names: list[Any] | None  # of its dimensions
    entries: list[tuple[str, Any]]  # in order: a key, and the number of a leaf or the form of a node

    def filled(self, leaves: Sequence[torch.Tensor], parents: Sequence[weakref.ref[TensorDict]] = ()) -> TensorDict:
        """A node with these leaves, inside of the nodes `parents`."""
        node: TensorDict = object.__new__(TensorDict)
        attributes, refs = vars(node), [*parents, weakref.ref(node)]
        attributes |= self.attributes
        attributes["_td_dim_names"] = self.names and [*self.names]
        if parents and attributes.get("_is_locked"):
            attributes["__lock_parents_weakrefs"] = parents
        attributes["_tensordict"] = {
            key: leaves[at] if at.__class__ is int else at.filled(leaves, refs) for key, at in self.entries
        }
        return node


@lru_cache(maxsize=256)
def form_of(paths: tuple[Path, ...], size: torch.Size, with_time: bool, locked: bool = True) -> Form:
    """The form of a batch with leaves by these paths; `with_time`, its last dimension has the name ``"time"``."""
    numbers = nest(dict(zip(paths, range(len(paths)), strict=True)))
    empty = nest({path: torch.empty(size) for path in paths})
    batch = _build(empty, size, time_last(len(size)) if with_time else None)
    return _form_of(batch.lock_() if locked else batch, numbers)


def _form_of(node: TensorDict, numbers: dict[str, Any]) -> Form:
    per_node = ("_tensordict", "_td_dim_names", "_last_op", "__lock_parents_weakrefs")
    attributes = {name: value for name, value in vars(node).items() if name not in per_node}
    entries = [(key, _form_of(node.get(key), at) if isinstance(at, dict) else at) for key, at in numbers.items()]
    return Form(attributes, node._td_dim_names, entries)


def time_last(dims: int) -> list[Any]:
    """The names of a batch's dimensions: ``"time"`` for the last one, and none for the others."""
    return [*[None] * (dims - 1), "time"]


def _build(nested: Mapping[str, Any], size: torch.Size, names: Any = None) -> TensorDict:
    leaves = {name: _build(each, size, names) if isinstance(each, dict) else each for name, each in nested.items()}
    return TensorDict._new_unsafe(leaves, batch_size=size, names=names)


def version_of(value: Any) -> int:
    """How often a tensor was written; 0 if that is not counted, as for tensors made in inference mode."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def moved(tree: Any, device: torch.device) -> Any:
    """A pytree with its tensors on `device`."""
    return optree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree, namespace=NAMESPACE
    )


def ranked(array: Any, like: Any) -> Any:
    """The array with the rank of `like` (a scalar stays one), for JAX under ``jax_numpy_rank_promotion="raise"``."""
    missing = like.ndim - array.ndim
    return array[(None,) * missing] if array.ndim and missing > 0 else array


def select(mask: torch.Tensor, chosen: Any, other: Any) -> Any:
    """A pytree of leaves [P, ...]: the lanes of `mask` [P] are taken from `chosen`, the rest from `other`."""

    def pick(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return torch.where(mask.reshape(-1, *[1] * (one.ndim - 1)), one, two)

    return optree.tree_map(pick, chosen, other, namespace=NAMESPACE)


def there(observation: Any, mask: Any) -> Any:
    """Observations [..., n, ...], with zeros for the agents that a mask [..., n] lacks."""

    def kept(leaf: Any) -> Any:
        xp: Any = torch if isinstance(leaf, torch.Tensor) else leaf.__array_namespace__()
        return xp.where(mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim)), leaf, xp.zeros_like(leaf))

    return optree.tree_map(kept, observation, namespace=NAMESPACE)

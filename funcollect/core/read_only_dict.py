"""A dict that cannot be changed: the observation of a state."""

from __future__ import annotations

from typing import Any, NoReturn

import optree

from funcollect.interop.jax_setup import with_jax
from funcollect.tree import NAMESPACE, Path


class ReadOnlyDict(dict[Path, Any]):
    """A dict by path that refuses every change. Like a dict, it is a node in JAX and in optree's `NAMESPACE`."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "the observation of a state cannot be changed: make another state with "
            "state.replace(observation={**state.observation, ...})"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return ReadOnlyDict, (dict(self),)


def _flatten(node: ReadOnlyDict) -> tuple[list[Any], tuple[Path, ...], tuple[Path, ...]]:
    paths = tuple(sorted(node))
    return [node[path] for path in paths], paths, paths


def _unflatten(paths: tuple[Path, ...], children: Any) -> ReadOnlyDict:
    return ReadOnlyDict(zip(paths, children, strict=True))


optree.register_pytree_node(ReadOnlyDict, _flatten, _unflatten, namespace=NAMESPACE)  # type: ignore[arg-type]


def _register(jax: Any) -> None:
    def with_keys(node: ReadOnlyDict) -> Any:
        children, paths, _ = _flatten(node)
        return [(jax.tree_util.DictKey(path), child) for path, child in zip(paths, children, strict=True)], paths

    jax.tree_util.register_pytree_with_keys(ReadOnlyDict, with_keys, _unflatten, lambda node: _flatten(node)[:2])


with_jax(_register)

"""Inputs and outputs as flat lists of arrays, with TensorDicts on Torch's side where JAX's has dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from tensordict import TensorDictBase

from funcollect.tree import NAMESPACE


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The leaves, and the treespec that builds a tree of such leaves (`unflatten`)."""
    leaves, treespec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return leaves, treespec


def paths_of(tree: Any) -> list[str]:
    """The path of each leaf, as text; equal for a TensorDict and for a dict with the same keys."""
    return [".".join(map(str, path)) or "the input" for path in optree.tree_paths(tree, namespace=NAMESPACE)]


def unlocked(tree: Any) -> Any:
    """The tree with shallow copies of its TensorDicts, into which a module may write its outputs."""
    return _map_nodes(lambda node: node.clone(False).unlock_() if _is_tensordict(node) else node, _is_tensordict, tree)


def plain(tree: Any) -> Any:
    """The tree with dicts for TensorDicts, and tuples for the structs that Torch's `max`, `topk` and others return."""

    def apply(node: Any) -> Any:
        if _is_tensordict(node):
            return node.to_dict()
        return tuple(node) if optree.is_structseq(node) else node

    return _map_nodes(apply, lambda node: _is_tensordict(node) or optree.is_structseq(node), tree)


def _is_tensordict(node: Any) -> bool:
    return isinstance(node, TensorDictBase)


def _map_nodes(function: Callable[[Any], Any], is_node: Callable[[Any], bool], tree: Any) -> Any:
    return optree.tree_map(function, tree, is_leaf=is_node, namespace=NAMESPACE)

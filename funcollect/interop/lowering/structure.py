"""Inputs and outputs as flat lists of arrays, with TensorDicts on Torch's side where JAX's has dicts."""

from __future__ import annotations

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

    def copied(node: Any) -> Any:
        return node.clone(False).unlock_() if isinstance(node, TensorDictBase) else node

    return optree.tree_map(copied, tree, is_leaf=lambda node: isinstance(node, TensorDictBase), namespace=NAMESPACE)


def plain(tree: Any) -> Any:
    """The tree with dicts for TensorDicts, and tuples for the structs that Torch's `max`, `topk` and others return."""

    def apply(node: Any) -> Any:
        if isinstance(node, TensorDictBase):
            return node.to_dict()
        return tuple(node) if optree.is_structseq(node) else node

    def is_node(node: Any) -> bool:
        return isinstance(node, TensorDictBase) or optree.is_structseq(node)

    return optree.tree_map(apply, tree, is_leaf=is_node, namespace=NAMESPACE)

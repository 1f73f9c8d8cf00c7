"""Inputs and outputs as flat lists of arrays, with one structure on either side.

Torch's side may hold TensorDicts where JAX's has dicts.
"""

from __future__ import annotations

from typing import Any

import optree
from tensordict import TensorDictBase

from funcollect.tree import NAMESPACE


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The leaves, and what builds the tree from such leaves again."""
    leaves, treespec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return leaves, treespec


def paths_of(tree: Any) -> list[str]:
    """Where each leaf stands, in words; equal for a TensorDict and for a dict of its keys."""
    return [".".join(map(str, path)) or "the input" for path in optree.tree_paths(tree, namespace=NAMESPACE)]


def build(treespec: Any, leaves: Any) -> Any:
    """The tree of these leaves."""
    return optree.tree_unflatten(treespec, leaves)


def unlocked(tree: Any) -> Any:
    """With TensorDicts that a module may write its outputs into."""
    return _map_tensordicts(lambda tensordict: tensordict.clone(False).unlock_(), tree)


def plain(tree: Any) -> Any:
    """With dicts for TensorDicts."""
    return _map_tensordicts(lambda tensordict: tensordict.to_dict(), tree)


def _map_tensordicts(function: Any, tree: Any) -> Any:
    def apply(node: Any) -> Any:
        return function(node) if isinstance(node, TensorDictBase) else node

    return optree.tree_map(apply, tree, is_leaf=lambda node: isinstance(node, TensorDictBase), namespace=NAMESPACE)

"""Inputs and outputs as flat lists of arrays, with dicts in JAX for Torch's TensorDicts, and their dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDictBase

from funcollect.errors import LoweringError
from funcollect.interop.jax_setup import import_jax
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
    return _map_nodes(lambda node: node.clone(False).unlock_(), lambda node: isinstance(node, TensorDictBase), tree)


def plain(tree: Any) -> Any:
    """The tree with dicts for TensorDicts, and tuples for the structs that Torch's `max`, `topk` and others return."""
    tree = _map_nodes(lambda node: node.to_dict(), lambda node: isinstance(node, TensorDictBase), tree)
    return _map_nodes(tuple, optree.is_structseq, tree)


def _map_nodes(function: Callable[[Any], Any], is_node: Callable[[Any], bool], tree: Any) -> Any:
    """The tree with its outermost nodes for which `is_node` is True replaced by what `function` makes of them."""
    leaves, treespec = optree.tree_flatten(tree, is_leaf=is_node, namespace=NAMESPACE)
    return treespec.unflatten(function(leaf) if is_node(leaf) else leaf for leaf in leaves)


_WIDE = (torch.float64, torch.complex128)


def jax_dtype(dtype: torch.dtype) -> Any:
    """JAX's dtype for one of Torch: the same, or under 32-bit JAX the 32-bit dtype for 64-bit integers.

    LoweringError for float64 and complex128 under 32-bit JAX, which would round them.
    """
    jax = import_jax()
    named = jax.numpy.dtype(str(dtype).removeprefix("torch."))
    held = jax.dtypes.canonicalize_dtype(named)
    if dtype in _WIDE and held != named:
        raise LoweringError(
            f"it computes in {named}, and JAX has 32 bits here and would round: cast the module to float32 with "
            ".float(), or turn 64 bits on with jax.config.update('jax_enable_x64', True)"
        )
    return np.dtype(held)

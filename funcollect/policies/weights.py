"""A policy's parameters by name: any pytree of arrays as tensors, for workers and for saving, and back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor, nn

from funcollect.interop.bridge import to_jax
from funcollect.interop.jax_setup import import_jax, strong
from funcollect.protocols import is_policy
from funcollect.tree import NAMESPACE

Shapes = dict[str, tuple[int, ...]]
_MOST_NAMES = 3  # in a message


def state_dict_of(params: Any, backend: str) -> dict[str, Tensor]:
    """A copy of each leaf of `params` as a tensor, by its path in Python's notation, such as ``['layers'][0]``."""
    leaves = _by_name(jax_arrays(params) if backend == "jax" else params, backend)
    return {name: _tensor(name, leaf) for name, leaf in leaves.items()}


def _tensor(name: str, leaf: Any) -> Tensor:
    """A copy of a number or an array of Torch, JAX or NumPy as a tensor; `name` is for messages."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    array = np.array(leaf)
    if array.dtype.name == "bfloat16":  # a dtype that JAX adds to NumPy
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    if array.dtype.kind not in "biufc":
        mend = "keep only these in params, or override state_dict and load"
        raise TypeError(f"the parameter{name} is {type(leaf).__name__}, expected an array or a number: {mend}")
    return torch.from_numpy(array)


def matched(own: Any, given: Any, backend: str) -> Any:
    """`given`, a pytree like a policy's `own` parameters or a `state_dict_of` them, as a pytree; else ValueError."""
    expected, leaves = _by_name(own, backend), _by_name(given, backend)
    by_path = isinstance(given, Mapping) and all(str(name)[:1] in ("", "[", ".") for name in given)
    if saved := by_path and leaves.keys() != expected.keys():
        leaves = dict(given)
    check_shapes(_shapes(expected), _shapes(leaves))
    ordered = [leaves[name] for name in expected]
    if backend == "torch":
        return optree.tree_unflatten(optree.tree_structure(own, namespace=NAMESPACE), ordered)
    tools = import_jax().tree
    return jax_arrays(tools.unflatten(tools.structure(own), ordered)) if saved else given


def shapes_of(params: Any, backend: str) -> Shapes:
    """The shape of each leaf of `params` by its path."""
    return _shapes(_by_name(params, backend))


def check_shapes(expected: Shapes, got: Mapping[str, Any]) -> None:
    """Raise ValueError unless parameters have the paths and shapes of the policy's own."""
    if expected == got:
        return
    wrong = sorted(name for name in expected if expected[name] != got.get(name))
    pairs = itertools.zip_longest(wrong, sorted(got.keys() - expected.keys()))
    names = [name for pair in pairs for name in pair if name is not None]
    found = [
        f"{name} is {got.get(name, 'absent')}, expected {expected.get(name, 'absent')}" for name in names[:_MOST_NAMES]
    ]
    others = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    mend = "pass arrays of the same structure and shapes, as policy.params has them, or build the policy as it was"
    raise ValueError(f"params differ from the policy's own: {'; '.join(found)}{others}: {mend}")


def check_dtypes(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a saved parameter has another dtype than the policy's own of that name."""
    for name in sorted(own.keys() & saved.keys()):
        if own[name].dtype != saved[name].dtype:
            mend = "build the policy so"
            raise ValueError(f"the parameter {name} is {own[name].dtype}, the saved one {saved[name].dtype}: {mend}")


def copied(own: Any, given: Any, backend: str) -> Any:
    """A copy of `matched` parameters; tensors have the device, the class and the `requires_grad` of those in `own`."""
    tree = matched(own, given, backend)
    if backend == "jax":
        return jax_arrays(tree)

    def copy(leaf: Any, before: Any) -> Tensor:
        like = torch.as_tensor(before)
        tensor = _tensor("", leaf).to(like.device).requires_grad_(like.requires_grad)
        return nn.Parameter(tensor, like.requires_grad) if isinstance(like, nn.Parameter) else tensor

    return optree.tree_map(copy, tree, own, namespace=NAMESPACE)


def jax_arrays(tree: Any) -> Any:
    """The pytree with JAX arrays without weak types; TypeError unless all are arrays, ValueError for deleted ones."""
    jax = import_jax()

    def array_of(path: Any, leaf: Any) -> Any:
        name = f"the parameter{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array):
            try:
                return strong(jax.numpy.array(np.asarray(to_jax(leaf)) if isinstance(leaf, Tensor) else leaf))
            except TypeError as error:
                what = f"{name} is {type(leaf).__name__}, expected an array or a number: give the arrays alone"
                mend = "and all else to the function (equinox.partition separates them)"
                raise TypeError(f"{what} as params, {mend}") from error
        if leaf.is_deleted():
            mend = "set policy.params, or pass params= again"
            raise ValueError(f"{name} was donated or deleted, expected a live array: {mend}")
        return strong(leaf)

    return jax.tree_util.tree_map_with_path(array_of, tree)


def weights_of(subject: Any) -> list[Tensor]:
    """The parameters and buffers of a module, or the parameters of a policy; empty for anything else."""
    if isinstance(subject, nn.Module):
        return [*subject.parameters(), *subject.buffers()]
    leaves = optree.tree_leaves(subject.params, namespace=NAMESPACE) if is_policy(subject) else []
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _shapes(leaves: Mapping[str, Any]) -> Shapes:
    return {f"params{name}": tuple(np.shape(leaf)) for name, leaf in leaves.items()}


def _by_name(params: Any, backend: str) -> dict[str, Any]:
    if backend == "jax":
        tools = import_jax().tree_util
        return {tools.keystr(path): leaf for path, leaf in tools.tree_leaves_with_path(params)}
    paths, leaves, _ = optree.tree_flatten_with_path(params, namespace=NAMESPACE)
    return {"".join(f"[{part!r}]" for part in path): leaf for path, leaf in zip(paths, leaves, strict=True)}

"""A policy's own weights, and others like them."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import Policy
from funcollect.tree import NAMESPACE, flatten, nest


def own_weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of the policy's own parameters and buffers, by name."""
    params = policy.params
    if params is None:
        return {}
    if isinstance(params, TensorDictBase):
        return {".".join(path): leaf.detach().clone() for path, leaf in flatten(params).items()}
    if policy.backend == "jax":
        tree = import_jax().tree_util
        return {tree.keystr(path): to_tensor(leaf) for path, leaf in tree.tree_leaves_with_path(params)}
    paths, leaves, _ = optree.tree_flatten_with_path(params, namespace=NAMESPACE)
    return {".".join(map(str, path)): to_tensor(leaf) for path, leaf in zip(paths, leaves, strict=True)}


def to_tensor(leaf: Any) -> Tensor:
    """A copy of a tensor, or of an array of JAX or NumPy, as a tensor."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))


def other_weights(policy: Policy, scale: float) -> Any:
    """Parameters like the policy's own, each number moved by about `scale`; buffers as they are."""
    generator = np.random.default_rng(0)

    def moved(leaf: Any) -> Any:
        array = to_tensor(leaf).cpu().numpy()
        if array.dtype.kind != "f":
            return leaf
        drawn = (array + scale * generator.standard_normal(array.shape)).astype(array.dtype)
        return torch.from_numpy(drawn).to(leaf.device) if isinstance(leaf, Tensor) else drawn

    if isinstance(policy.params, TensorDictBase):
        buffers = {name for name, _ in _module(policy).named_buffers()}
        given = flatten(policy.params).items()
        return nest({path: leaf if ".".join(path) in buffers else moved(leaf) for path, leaf in given})
    if policy.backend == "jax":
        return import_jax().tree.map(moved, policy.params)
    return optree.tree_map(moved, policy.params, namespace=NAMESPACE)


def _module(policy: Any) -> nn.Module:
    module = getattr(policy, "module", None)
    return module if isinstance(module, nn.Module) else nn.Module()

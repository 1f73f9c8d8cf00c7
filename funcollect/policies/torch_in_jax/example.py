"""An observation to try a policy with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcollect.specs import Leaf, Space, assemble, disassemble

_MOST_ROWS = 3


def example(space: Space, leaves: Sequence[Leaf], num_envs: int) -> Any:
    """Some rows of observations as a policy takes them: integers out of the space, floating numbers normal.

    One row for one environment, else a few: sizes other than 1 are alike.

    >>> from gymnasium import spaces
    >>> from funcollect.specs import observation_leaves
    >>> space = spaces.Box(0, 1, (4,))
    >>> example(space, observation_leaves(space), 64).shape
    torch.Size([3, 4])
    """
    space = copy.deepcopy(space)
    space.seed(0)
    drawn = np.random.default_rng(0)
    rows = [disassemble(space, space.sample()) for _ in range(min(num_envs, _MOST_ROWS))]
    columns = zip(leaves, map(np.stack, zip(*rows, strict=True)), strict=True)
    return assemble(space, {leaf.path: _tensor(leaf, column, drawn) for leaf, column in columns})


def _tensor(leaf: Leaf, column: Any, drawn: np.random.Generator) -> Tensor:
    values = drawn.standard_normal(column.shape) if leaf.dtype.kind == "f" else column
    return torch.from_numpy(values.astype(leaf.dtype))

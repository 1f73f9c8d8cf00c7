"""An untrained network for the spaces of any environment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from funcollect.policies import heads
from funcollect.policies.torch_modules.torch_policy import TorchPolicy, torch_policy
from funcollect.protocols import Env
from funcollect.specs import Space, disassemble

__all__ = ["Flatten", "mlp"]


def mlp(env: Env, *, seed: int = 0) -> TorchPolicy:
    """An untrained network of two tanh layers with 64 units, suited to the spaces of an environment.

    Raises ValueError for an action space without a suitable head, such as MultiBinary.

    >>> import funcollect as fc
    >>> mlp(fc.make_env("CartPole-v1"), seed=1).head.name
    'categorical'
    """
    head, answer = _head(env)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = nn.Sequential(
            Flatten(env.observation_space),
            nn.Linear(spaces.flatdim(env.observation_space), 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, math.prod(answer)),
            nn.Unflatten(-1, answer),
        )
    return torch_policy(module, head=head)


def _head(env: Env) -> tuple[heads.Head, tuple[int, ...]]:
    """The head for the action space, and the shape of the parameters that it reads for one environment."""
    space, spec = env.action_space, env.action_spec
    if spec.categories:
        return heads.categorical, (sum(spec.categories),)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.shape:
        head = heads.tanh_normal if space.is_bounded() else heads.normal
        return head, (*space.shape[:-1], 2 * space.shape[-1])
    mend = "use the policy random"
    raise ValueError(f"mlp needs a Discrete, MultiDiscrete or floating Box of actions, {env} has {space}: {mend}")


class Flatten(nn.Module):
    """Observations of any space as float32 rows [P, n]: discrete ones one-hot, uint8 ones in [0, 1]."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space

    def forward(self, observation: Any) -> Tensor:
        """One row for each environment."""
        pairs = zip(disassemble(self.space, self.space), disassemble(self.space, observation), strict=True)
        return torch.cat([column for space, leaf in pairs for column in _columns(space, leaf)], -1)


def _columns(space: Space, leaf: Tensor) -> Iterator[Tensor]:
    """Yield a leaf [P, ...] of an observation as float32 rows [P, n]."""
    if isinstance(space, spaces.Discrete):
        yield nn.functional.one_hot((leaf - int(space.start)).long(), int(space.n)).float()
    elif isinstance(space, spaces.MultiDiscrete):
        indices = (leaf - torch.as_tensor(space.start)).flatten(1)
        for index, count in zip(indices.unbind(-1), space.nvec.ravel().tolist(), strict=True):
            yield nn.functional.one_hot(index.long(), count).float()
    else:
        row = leaf.reshape(len(leaf), -1).float()
        yield row / 255 if space.dtype == np.uint8 else row

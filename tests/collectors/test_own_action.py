"""Random first frames of a policy that may carry its own action: a warning, since that action was not executed.

All other warnings are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

import funcollect as fc

HIDDEN = {"hidden": torch.zeros(2)}


class Chooses(nn.Module):
    """Returns its action, which is also its next hidden state."""

    def forward(self, observation: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        action = (observation[..., 2] + hidden[..., 0] > 0).long()
        return action, torch.stack([action.float(), hidden[..., 1]], -1)


class Scores(nn.Module):
    """Returns logits and a hidden state that follows from the observation."""

    def forward(self, observation: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return observation[..., :2], 0.5 * hidden + observation[..., :2]


def on_tensordict(module: nn.Module, *outputs: str) -> Any:
    return TensorDictModule(module, ["observation", "hidden"], [*outputs, ("next", "hidden")])


def best() -> Any:
    return TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])


CARRIES: dict[str, Callable[[], Any]] = {
    "torch": lambda: fc.torch_policy(Chooses(), initial_state=torch.zeros(2)),
    "jax": lambda: fc.jax_policy(
        lambda params, x, h: (jnp.int32(x[:, 2] + h > 0), x[:, 0]), None, initial_state=jnp.zeros(())
    ),
    "tensordict": lambda: fc.tensordict_policy(on_tensordict(Chooses(), "action"), initial_state=HIDDEN),
    "through a part": lambda: fc.tensordict_policy(
        TensorDictSequential(
            TensorDictModule(lambda x, hidden: x[..., :2] + hidden, ["observation", "hidden"], ["logits"]),
            best(),
            TensorDictModule(lambda action: torch.stack([action.float()] * 2, -1), ["action"], ["embedded"]),
            TensorDictModule(lambda embedded: 2 * embedded, ["embedded"], [("next", "hidden")]),
        ),
        initial_state=HIDDEN,
    ),
}
DOES_NOT: dict[str, Callable[[], Any]] = {
    "head": lambda: fc.torch_policy(Scores(), head=fc.heads.categorical, initial_state=torch.zeros(2)),
    "no state": lambda: fc.torch_policy(lambda x: (x[..., 2] > 0).long()),
    "parts": lambda: fc.tensordict_policy(
        TensorDictSequential(on_tensordict(Scores(), "logits"), best()), initial_state=HIDDEN
    ),
}


def collect(policy: Any, frames: int | None, workers: bool = False) -> None:
    keywords: dict[str, Any] = {"frames_per_batch": 8, "init_random_frames": frames, "seed": 0}
    kind: Any = fc.MultiSyncDataCollector if workers else fc.SyncDataCollector
    with kind("CartPole-v1", policy, **keywords, **({"num_workers": 1, "in_process": True} if workers else {})) as run:
        assert next(run).numel() == 8


@pytest.mark.parametrize(("name", "workers"), [*((name, False) for name in CARRIES), ("torch", True)])
def test_a_policy_that_may_carry_its_action_is_warned_of(name: str, workers: bool) -> None:
    says = "init_random_frames is 4 with a recurrent policy that chooses its act"
    with pytest.warns(UserWarning, match=says) as seen:
        collect(CARRIES[name](), 4, workers)
    assert seen[0].filename == __file__
    collect(CARRIES[name](), None, workers)


@pytest.mark.parametrize("name", DOES_NOT)
def test_other_policies_are_not(name: str) -> None:
    collect(DOES_NOT[name](), 4)

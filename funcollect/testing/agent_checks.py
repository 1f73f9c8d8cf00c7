"""What `check_env` checks of environments with groups of agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcollect.envs.agents import REWARD
from funcollect.specs import PRESENT, Group, Leaf
from funcollect.testing.trials import NotApplicableError, Trial, expect_rows, mended_by
from funcollect.tree import there


def _groups_of(trial: Trial) -> Mapping[str, Group]:
    return getattr(trial.env.action_spec, "groups", {})


@mended_by("flag an agent from its end until it is back, leave it out meanwhile, and pay only those who are there")
def groups(trial: Trial) -> None:
    """Agents that have ended are not there and get no reward, rewards add up, and a lane without agents has ended."""
    found, batch = _groups_of(trial), trial.batch
    if not found:
        raise NotApplicableError("it has no groups of agents")
    total: Any = 0
    left = torch.ones_like(trial.done)
    for name, group in found.items():
        if not {"done", REWARD} <= {*batch["next", name].keys()}:
            raise NotApplicableError(f"the agents of {name!r} share their rewards or flags")
        reward = batch["next", name, REWARD]
        total = total + reward.sum(-2)
        for node, what in ((batch, name), (batch["next"], f"next.{name}")):
            gone = node[name, "done"][..., 0]
            present = node[name, PRESENT] if group.comes_and_goes else ~gone
            expect_rows(gone & present, f"{what}.{PRESENT}", present, "False for agents that are done")
        left = left & ~present.any(-1)
        absent = ~batch[name, PRESENT] if group.comes_and_goes else torch.zeros_like(gone)
        expect_rows(absent[..., None] & (reward != 0), f"next.{name}.{REWARD}", reward, "0 for absent agents")
    wrong = ~torch.isclose(total, batch["next", "reward"], rtol=1e-4, atol=1e-4)
    expect_rows(wrong, "next.reward", batch["next", "reward"], total, note=", the sum over agents")
    expect_rows(left & ~trial.done, "next.done", trial.done, "True where no agent is left")


def shown_after(trial: Trial, leaf: Leaf, produced: Tensor) -> Tensor:
    """Next observations [P, T - 1, ...] as the following rows show them, with zeros for absent agents."""
    name, *rest = leaf.path
    group = _groups_of(trial).get(name)
    if group is None or not group.comes_and_goes or rest[0] != "observation":
        return produced
    shown: Tensor = there(produced, trial.batch[name, PRESENT][:, 1:])
    return shown


def joint_action(trial: Trial, batch: Any) -> Tensor:
    """The actions [P, T, ...] of a batch in the form that an environment takes, the groups' joined in one array."""
    actions = [batch[name, "action"].flatten(2) for name in _groups_of(trial)]
    action: Tensor = torch.cat(actions, -1) if actions else batch["action"]
    return action

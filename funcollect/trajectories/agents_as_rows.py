"""The agents of a group as lanes of their own, for everything that knows one agent."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.messages import shown
from funcollect.tree import Path, flatten, to_batch


def agents_as_rows(batch: TensorDictBase, group: str) -> TensorDict:
    """Return the agents of a group as lanes: a batch ``[*B, n, T]`` of one agent each, from ``[*B, T]``.

    Its keys are those of an environment with one agent: ``observation``, ``action`` ``[*B, n, T, ...]``, and so on,
    with the group's own rewards and flags. So `gae`, `MultiStep`, `split_trajectories`, `episode_stats`, buffers and
    `evaluate_actions` with the policy of the group take it. An agent that has left stays finished: ``done`` is True at
    the root from then on, and such frames count for nothing. One that is there when the episode of its lane ends is
    truncated. Trajectory ids and lanes are told apart by agent; what all share, such as ``state``, is repeated.

    Leaves are views but for these. Raises ValueError for a batch without that group.

    >>> import funcollect as fc
    >>> env = fc.make_env("pettingzoo/mpe/simple_tag_v3", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> rows = agents_as_rows(batch, "adversary")
    >>> rows.batch_size, rows["observation"].shape
    (torch.Size([2, 3, 8]), torch.Size([2, 3, 8, 16]))
    """
    check_kind("batch", batch, TensorDictBase, "pass the batch of a rollout")
    if group not in (keys := [*batch.keys()]):
        raise ValueError(f"group is {shown(group)}, expected a key of the batch, {keys}: name one of env.groups")
    time, n = batch.ndim - 1, batch["next", group, "reward"].shape[batch.ndim]

    def shared(leaf: Tensor) -> Tensor:  # [*B, T, ...] to [*B, n, T, ...]
        return leaf.unsqueeze(time).expand(*leaf.shape[:time], n, *leaf.shape[time:])

    leaves: dict[Path, Tensor] = {}
    for lead, node in (((), batch), (("next",), batch["next"])):
        own = {path: leaf.transpose(time, time + 1) for path, leaf in flatten(node[group]).items()}
        rest = {(key,): shared(leaf) for key, leaf in node.items() if isinstance(leaf, Tensor) and key != "reward"}
        leaves |= {(*lead, *path): leaf for path, leaf in (rest | own).items()}
    agent = torch.arange(n, device=batch.device).view(n, 1)
    for path, leaf in flatten(batch["collector"], ("collector",)).items():
        leaves[path] = shared(leaf) * n + agent if path[1:] in (("traj_ids",), ("lane",)) else shared(leaf)
    cut = shared(batch["next", "done"]) & ~leaves["next", "done"]
    for name in ("truncated", "done"):
        leaves["next", name] = leaves["next", name] | cut
    size = (*batch.batch_size[:time], n, batch.batch_size[time])
    return to_batch(leaves, size, locked=batch.is_locked)

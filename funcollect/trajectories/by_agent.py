"""Shows agents of a group as lanes, and the moves of each player of a turn-based game as trajectories."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.messages import shown
from funcollect.specs import PLAYER, PRESENT
from funcollect.trajectories import split
from funcollect.trajectories.next_observations import next_observations
from funcollect.tree import Path, flatten, to_batch


def agents_as_rows(batch: TensorDictBase, group: str) -> TensorDict:
    """Return the agents of a group as lanes: a batch ``[*B, n, T]`` of one agent each, from ``[*B, T]``.

    Its keys are those of an environment with one agent: ``observation``, ``action`` ``[*B, n, T, ...]``, and so on,
    with the group's own rewards and flags. So `gae`, `MultiStep`, `split_trajectories`, `episode_stats`, buffers and
    `evaluate_actions` with the policy of the group take it. An agent that has left stays finished: ``done`` is True at
    the root from then on, and such frames are ignored. An agent that is there when its lane's episode ends is
    truncated. Each agent has trajectory ids and a lane of its own; shared leaves, such as ``state``, are repeated.
    Frames without the agent count as those of one that has left. An agent that comes back keeps its trajectory id, and
    its steps count from the beginning of the lane's episode; to `gae`, `split_trajectories` and `episode_stats`, each
    stay is an episode.

    Leaves are views, except for ids, lanes and flags. Raises ValueError for a batch without that group, and for
    sums of rewards.

    >>> import funcollect as fc
    >>> env = fc.make_env("pettingzoo/mpe/simple_tag_v3", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> rows = agents_as_rows(batch, "adversary")
    >>> rows.batch_size, rows["observation"].shape
    (torch.Size([2, 3, 8]), torch.Size([2, 3, 8, 16]))
    """
    check_kind("batch", batch, TensorDictBase, "pass the batch of a rollout")
    check_kind("group", group, str, "name one group, and call this for each of several")
    split.check_single_steps(batch)
    batch = next_observations(batch)
    rewards = flatten(batch.get("next", {}))
    if (group, "reward") not in rewards:
        keys = [path[0] for path in rewards if path[1:] == ("reward",)]
        wanted = f"one of {keys}: name one of env.groups" if keys else "a batch of groups of agents: pass one"
        raise ValueError(f"group is {shown(group)}, expected {wanted}")
    time, n = batch.ndim - 1, batch["next", group, "reward"].shape[batch.ndim]

    def shared(leaf: Tensor) -> Tensor:  # [*B, T, ...] to [*B, n, T, ...]
        return leaf.unsqueeze(time).expand(*leaf.shape[:time], n, *leaf.shape[time:])

    leaves: dict[Path, Tensor] = {}
    for lead, node in (((), batch), (("next",), batch["next"])):
        of_group = {
            # Agents that act together have one log-probability.
            path: leaf.transpose(time, time + 1) if leaf.shape[batch.ndim : batch.ndim + 1] == (n,) else shared(leaf)
            for path, leaf in flatten(node[group]).items()
        }
        rest = {(key,): shared(leaf) for key, leaf in node.items() if isinstance(leaf, Tensor) and key != "reward"}
        leaves |= {(*lead, *path): leaf for path, leaf in (rest | of_group).items()}
    agent = torch.arange(n, device=batch.device).view(n, 1)
    for path, leaf in flatten(batch["collector"], ("collector",)).items():
        path = (*path[:-1], path[-1].removeprefix(f"{group}."))  # of the group's exploration values
        leaves[path] = shared(leaf) * n + agent if path[1:] in (("traj_ids",), ("lane",)) else shared(leaf)
    if (PRESENT,) in leaves:  # an agent that is not there counts as finished
        absent = ~leaves[PRESENT,][..., None]
        leaves["truncated",], leaves["done",] = (leaves[name,] | absent for name in ("truncated", "done"))
    cut = shared(batch["next", "done"]) & ~leaves["next", "done"]
    if split.CUT in leaves:  # of agents that would go on
        leaves[split.CUT] = leaves[split.CUT] & cut[..., 0]
    for name in ("truncated", "done"):
        leaves["next", name] = leaves["next", name] | cut
    size = (*batch.batch_size[:time], n, batch.batch_size[time])
    return to_batch(leaves, size, locked=batch.is_locked)


def player_trajectories(batch: TensorDictBase, previous: TensorDictBase | None = None) -> TensorDict:
    """Return the moves of each player, one trajectory after the other: ``[F]``, from turns ``[*B, T]``.

    A frame is a move of a player: its ``next`` is that of the frame before the player's next move, so that
    ``next.observation`` is what the player observes then, and ``next.reward`` ``[F, 1]`` is the sum of its own rewards
    from the move until then, or until the end of the game. So `gae`, `MultiStep`, `split_trajectories`, buffers and
    `evaluate_actions` with the policy of the player take it. With n players, ``collector.traj_ids`` and ``.lane`` are
    ``n * own + player``, and ``collector.step`` counts the player's moves; those of a game before its first frame here
    are counted as if the players had taken equal turns.

    A move whose outcome lies after the batch is left out; pass the batch before as `previous` to get those of its moves
    that end in this one. Rewards before a player's first move belong to none. Where a game is truncated, the next
    observation is that of ``("next", "current_player")``.

    Args:
        batch: ``[*B, T]`` with ``current_player`` ``[*B, T]`` and ``next.reward`` ``[*B, T, n]``, also split.
        previous: the batch before, of the same lanes.

    Raises TypeError or ValueError for another kind of batch, missing keys, wrong shapes or order of frames.

    >>> import funcollect as fc
    >>> env = fc.make_env("pettingzoo/classic/tictactoe_v3", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    >>> moves = player_trajectories(batch)
    >>> moves["next", "reward"][moves["next", "done"]].abs().sum() > 0
    tensor(True)
    """
    check_kind("previous", previous, (TensorDictBase, type(None)), "pass the batch before, or leave it out")
    split.check_batch(batch)
    split.check_single_steps(batch)
    whole, first = next_observations(batch), 0
    if previous is not None:
        whole, first = torch.cat([next_observations(previous), whole], batch.ndim - 1), previous.batch_size[-1]
    split.check_order(whole)
    leaves, turns = flatten(whole), _Turns(whole, first)
    parts = [turns.moves_of(player, leaves) for player in range(turns.players)]
    joined = {path: torch.cat([part[path] for part in parts]) for path in parts[0]}
    return to_batch(joined, (len(joined["next", "reward"]),), locked=batch.is_locked)


class _Turns:
    """The turns of a batch [*B, T], and the trajectories to which they belong."""

    def __init__(self, batch: TensorDictBase, first: int) -> None:
        """Moves count if they end at the frame `first` or later."""
        self.first, self.mover = first, split.require(batch, PLAYER, tail=())
        self.next_mover = split.require(batch, ("next", PLAYER), tail=())
        self.reward = split.require(batch, ("next", "reward"), tail=None)
        self.players = self.reward.shape[-1]
        if self.players < 2 or bool((self.mover >= self.players).any()):
            what = f"next.reward has shape {list(self.reward.shape)}, and {PLAYER} is up to {int(self.mover.max())}"
            mend = "expected a reward for each player, [*B, T, players]: let the environment return them"
            raise ValueError(f"{what}, {mend}")
        ids, step = (split.require(batch, key, tail=()) for key in (split.TRAJECTORY_IDS, split.STEP))
        self.done = split.ends_of(batch)
        self.last = self.done.clone()  # whether a frame is the last of its trajectory here
        self.last[..., :-1] |= (ids[..., 1:] != ids[..., :-1]) | split.breaks(batch)
        self.last[..., -1] = True
        self.time = torch.arange(ids.shape[-1], device=ids.device)
        begins = torch.ones_like(self.last)
        begins[..., 1:] = self.last[..., :-1]
        self.begin = torch.where(begins, self.time, 0).cummax(-1).values
        self.step = step.gather(-1, self.begin)
        self.counts = torch.ones_like(self.last)
        for key, wanted in (("done", False), (split.MASK, True)):
            if (leaf := split.optional(batch, key, tail=() if wanted else (1,))) is not None:
                self.counts &= leaf.view_as(self.last) == wanted
        self.last[..., :-1] |= ~self.counts[..., 1:]

    def moves_of(self, player: int, leaves: dict[Path, Tensor]) -> dict[Path, Tensor]:
        """The leaves [F, ...] of this player's moves."""
        moves = self.counts & (self.mover == player)
        closes = self.done | (self.next_mover == player)
        nearest = torch.where(closes | self.last, self.time, len(self.time))
        end = nearest.flip(-1).cummin(-1).values.flip(-1)  # the frame in which the outcome of a move is known
        at = (moves & closes.gather(-1, end) & (end >= self.first)).nonzero(as_tuple=True)
        until = (*at[:-1], end[at])
        count = moves.cumsum(-1)
        following = torch.where(moves, self.time, len(self.time)).flip(-1).cummin(-1).values.flip(-1)  # the next move
        wait = (following.gather(-1, self.begin) - self.begin).clamp(max=self.players - 1)
        earlier = (self.step + wait) // self.players  # moves of a game that began before, if players take equal turns
        number = earlier + count - 1 - (count - moves.long()).gather(-1, self.begin)
        reward = self.reward[..., player]
        total = reward.double().cumsum(-1)
        result = {path: leaf[until if path[0] == "next" else at] for path, leaf in leaves.items()}
        result["next", "reward"] = (total[until] - total[at] + reward[at]).to(reward.dtype)[:, None]
        result[split.STEP] = number[at]
        for path in (split.TRAJECTORY_IDS, split.LANE):
            if path in result:
                result[path] = result[path] * self.players + player
        return result

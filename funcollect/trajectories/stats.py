"""Returns and lengths of the episodes that end in a batch, including those that began in earlier ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_kind
from funcollect.specs import PRESENT
from funcollect.trajectories import split
from funcollect.tree import Path

_PER_EPISODE = ("returns", "lengths", "traj_ids", "lanes", "terminated")


class OpenReturn(NamedTuple):
    """The part of an unfinished trajectory up to the end of a batch."""

    lane: int
    length: int  # frames so far
    value: Tensor  # [] float64 ([players] for several players): the return so far
    start: int = 0  # the step of its first frame, or the next one while an agent is away


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EpisodeStats:
    """E finished episodes, ordered by their ends.

    >>> import torch
    >>> ended = dict(traj_ids=torch.tensor([0, 1]), lanes=torch.tensor([0, 1]), terminated=torch.tensor([True, False]))
    >>> EpisodeStats(returns=torch.tensor([3.0, 4.0]), lengths=torch.tensor([3, 4]), **ended)
    EpisodeStats(2 episodes, mean return 3.5, mean length 3.5, 1 terminated, 0 open)
    """

    returns: Tensor  # [E] float64 ([E, players] for several players): undiscounted
    lengths: Tensor  # [E] int64: frames
    traj_ids: Tensor  # [E] int64
    lanes: Tensor  # [E] int64
    terminated: Tensor  # [E] bool: True if terminated, False if truncated
    open_returns: Mapping[int, OpenReturn] = field(default_factory=dict)  # by the id of the unfinished trajectory

    def __len__(self) -> int:
        """E, the number of episodes."""
        return len(self.lengths)

    @property
    def mean_return(self) -> float:
        """The mean of `returns`; nan if there are no episodes, ValueError if there are several players."""
        if self.returns.ndim > 1:
            players = self.returns.shape[1]
            raise ValueError(f"the mean return is one player's, these episodes have {players}: take returns.mean(0)")
        return float(self.returns.mean())

    @property
    def mean_length(self) -> float:
        """The mean of `lengths` in frames; nan if there are no episodes."""
        return float(self.lengths.double().mean())

    @classmethod
    def concatenate(cls, parts: Sequence[EpisodeStats]) -> EpisodeStats:
        """The episodes of all parts, with the open trajectories of the last part; ValueError without any part."""
        if not parts:
            raise ValueError("parts is empty, expected one EpisodeStats or more: pass those of a run")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_EPISODE}
        return cls(**joined, open_returns=parts[-1].open_returns)

    def select(self, index: Tensor) -> EpisodeStats:
        """The episodes at `index`, an int64 or bool tensor, without open trajectories."""
        return EpisodeStats(**{name: getattr(self, name)[index] for name in _PER_EPISODE})

    @override
    def __repr__(self) -> str:
        mean = f"mean return {self.mean_return:.6g}" if self.returns.ndim == 1 else f"{self.returns.shape[1]} players"
        ended = f"{int(self.terminated.sum())} terminated, {len(self.open_returns)} open"
        return f"EpisodeStats({len(self)} episodes, {mean}, mean length {self.mean_length:.6g}, {ended})"


def episode_stats(batch: TensorDictBase, previous: EpisodeStats | None = None) -> EpisodeStats:
    """Returns and lengths of the episodes that end in a batch, including their frames in earlier batches.

    Rewards are summed in order, in float64, beginning with the sums in `previous`. So the results do not depend on how
    a run is cut into batches, to the bit. Episodes with missing frames are omitted, with a warning if `previous` is
    None: the others are the short ones. So are trajectories truncated by `set_truncated`. Repeated frames of finished
    lanes and padding do not count. Of the rows of `agents_as_rows`, each stay of an agent is an episode. Several runs,
    such as those of a `vmap` over seeds, have to be passed one at a time.

    Args:
        batch: ``[*B, T]``, also split, with ``next.reward`` ``[*B, T, 1]`` (or players), ``next.done`` and
            ``next.terminated`` ``[*B, T, 1]``, and ``collector.traj_ids``, ``.step`` and ``.lane`` ``[*B, T]``.
        previous: the result for the batch before.

    Returns the episodes, ordered by the time of their end in the batch, then by row; on the CPU. `open_returns` has the
    trajectories that continue after this batch, including those of lanes that are not in it. Raises TypeError or
    ValueError for another kind of batch, missing keys, wrong shapes, another number of players than before, and several
    runs.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> ids, step, lane = torch.tensor([[0, 0, 1], [0, 1, 0], [0, 0, 0]])
    >>> done = torch.tensor([[False], [True], [False]])
    >>> next_ = {"reward": torch.ones(3, 1), "done": done, "terminated": done}
    >>> batch = TensorDict({"next": next_, "collector": {"traj_ids": ids, "step": step, "lane": lane}}, [3])
    >>> stats = episode_stats(batch)
    >>> stats.returns, stats.open_returns[1].value
    (tensor([2.], dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    stats, missing = stats_and_missing(batch, previous)
    if missing and previous is None:
        what = f"{missing} episodes of the batch began before it and are left out, so the others are the short ones"
        warnings.warn(f"{what}: pass previous=, the result for the batch before (checkpoints save it)", stacklevel=2)
    return stats


def stats_and_missing(batch: TensorDictBase, previous: EpisodeStats | None) -> tuple[EpisodeStats, int]:
    """The result of `episode_stats`, and the number of episodes of the batch that lack frames."""
    frames, lanes, away = counted_frames(batch)
    _check_one_run(batch, frames)
    check_kind("previous", previous, (EpisodeStats, type(None)), "pass the result of the last call")
    opened = {} if previous is None else previous.open_returns
    trajectories, of_frame = _trajectories(frames, opened)
    present = set(lanes.tolist())
    elsewhere = {traj_id: so_far for traj_id, so_far in opened.items() if so_far.lane not in present}
    ends = (frames.done & trajectories.whole[of_frame]).nonzero()[:, 0]
    ends = ends[frames.order[ends].argsort()]
    # Of absent agents it is known at which step they may come.
    zeros = torch.zeros_like(away.lanes), torch.zeros_like(away.rewards)
    coming = _opened(away.traj_ids, away.lanes, *zeros, away.steps + 1)
    stats = EpisodeStats(
        returns=_by_player(trajectories.returns[of_frame[ends]]),
        lengths=trajectories.lengths[of_frame[ends]],
        traj_ids=frames.traj_ids[ends],
        lanes=frames.lanes[ends],
        terminated=frames.terminated[ends],
        open_returns=elsewhere | coming | _unfinished(trajectories),
    )
    return stats, int((~trajectories.whole).sum())


class CountedFrames(NamedTuple):
    """The F frames of a batch that count, ordered by row, on the CPU."""

    rewards: Tensor  # [F, players] float64
    done: Tensor  # [F] bool
    terminated: Tensor  # [F] bool
    traj_ids: Tensor  # [F] int64
    steps: Tensor  # [F] int64
    lanes: Tensor  # [F] int64
    order: Tensor  # [F] int64: by time, then row
    comes: Tensor  # [F] bool: the first frame of an agent that was not there in the frame before

    def at(self, index: Tensor) -> CountedFrames:
        """The frames at an index, or in a mask."""
        return CountedFrames(*(column[index] for column in self))


class _Trajectories(NamedTuple):
    """The G trajectories of a batch, sorted by id, then by stays of an agent, with their sums up to its end."""

    traj_ids: Tensor  # [G] int64
    lanes: Tensor  # [G] int64
    lengths: Tensor  # [G] int64
    returns: Tensor  # [G, players] float64
    starts: Tensor  # [G] int64: the step of the first frame
    whole: Tensor  # [G] bool: no frame so far is missing
    ended: Tensor  # [G] bool


def counted_frames(batch: TensorDictBase) -> tuple[CountedFrames, Tensor, CountedFrames]:
    """The frames that count; the lanes in the batch, int64, ascending, each once; the last frames of absent agents."""
    split.check_batch(batch)
    time, rows = batch.batch_size[-1], batch.batch_size[:-1].numel()
    several = batch.get(split.STEPS_AHEAD, None) is not None
    rewards = split.require(batch, split.ORIGINAL_REWARD if several else ("next", "reward"), tail=None).detach().cpu()
    columns = CountedFrames(
        rewards=rewards.reshape(rows * time, rewards.shape[-1]).double(),
        done=split.ends_of(batch).detach().cpu().reshape(-1) & ~_column(batch, split.CUT, (), default=False).bool(),
        terminated=_column(batch, ("next", "terminated"), (1,)).bool(),
        traj_ids=_column(batch, split.TRAJECTORY_IDS, ()).long(),
        steps=_column(batch, split.STEP, ()).long(),
        lanes=_column(batch, split.LANE, ()).long(),
        order=torch.arange(rows * time).reshape(time, rows).T.reshape(-1),
        comes=torch.zeros(rows * time, dtype=torch.bool),
    )
    real, finished = _column(batch, split.MASK, (), default=True).bool(), _column(batch, ("done",), (1,), default=False)
    if not real.all():
        columns, finished = columns.at(real), finished[real]
    lanes, none = torch.unique(columns.lanes), torch.zeros(0, dtype=torch.int64)
    if not (finished := finished.bool()).any():
        return columns, lanes, columns.at(none)
    columns = columns._replace(comes=_coming(columns, finished))
    last = _last_of_lanes(columns) if _has_agents(batch) else none
    return columns.at(~finished), lanes, columns.at(last[finished[last]])


def _has_agents(batch: TensorDictBase) -> bool:
    present = batch.get(PRESENT, None)
    return isinstance(present, Tensor) and (present.shape, present.dtype) == (batch.batch_size, torch.bool)


def _coming(frames: CountedFrames, finished: Tensor) -> Tensor:
    """Whether a frame follows the step before it, in which its trajectory was finished: [F] bool."""
    ids, steps, comes = frames.traj_ids, frames.steps, ~finished
    comes[:1] = False
    comes[1:] &= finished[:-1] & (ids[1:] == ids[:-1]) & (steps[1:] == steps[:-1] + 1)
    return comes


def _last_of_lanes(frames: CountedFrames) -> Tensor:
    """The index of each lane's last frame: [lanes] int64."""
    index = frames.lanes.argsort(stable=True)
    return index[_changes(frames.lanes[index]).roll(-1)]


def _changes(values: Tensor) -> Tensor:
    """Whether each number differs from the one before; True for the first one."""
    changes = torch.ones_like(values, dtype=torch.bool)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _check_one_run(batch: TensorDictBase, frames: CountedFrames) -> None:  # each lane's ids and steps increase
    order = frames.lanes.argsort(stable=True)
    lanes, ids, steps = frames.lanes[order], frames.traj_ids[order], frames.steps[order]
    back = (ids[1:] < ids[:-1]) | ((ids[1:] == ids[:-1]) & (steps[1:] <= steps[:-1]))
    back &= lanes[1:] == lanes[:-1]
    if back.any():
        lane, mend = int(lanes[1:][back][0]), "take them one at a time, [episode_stats(run) for run in batch.unbind(0)]"
        what = f"the batch {list(batch.batch_size)} holds several runs, since lane {lane} is in it twice or unordered"
        raise ValueError(f"{what}: {mend}")


def _column(batch: TensorDictBase, key: Path, tail: tuple[int, ...], *, default: bool | None = None) -> Tensor:
    """The leaf under a key, or the default if there is none: a number per frame, ordered by row, [rows * T]."""
    if default is not None and batch.get(key, None) is None:
        return torch.full((batch.batch_size.numel(),), default)
    return split.require(batch, key, tail=tail).detach().cpu().reshape(-1)


def _trajectories(frames: CountedFrames, opened: Mapping[int, OpenReturn]) -> tuple[_Trajectories, Tensor]:
    """The trajectories of the frames, continued from `opened`, and the index of each frame's own: [F] int64."""
    # A run consists of consecutive frames of one trajectory, in a stay of its agent.
    begins = _changes(frames.traj_ids) | frames.comes
    run, first = begins.cumsum(0) - 1, begins.nonzero()[:, 0]
    final = torch.cat([first[1:] - 1, torch.full_like(first[:1], len(run) - 1)])
    order = frames.traj_ids[first].argsort(stable=True)
    fresh = _changes(frames.traj_ids[first][order]) | frames.comes[first][order]
    of_run = torch.empty_like(order).index_copy_(0, order, fresh.cumsum(0) - 1)
    traj_ids, comes = frames.traj_ids[first][order][fresh], frames.comes[first][order][fresh]
    of_frame, sizes, players = of_run[run], final - first + 1, frames.rewards.shape[1]
    lengths, returns, starts = _before(opened, traj_ids, players)
    starts = torch.where(comes, frames.steps[first][order][fresh], starts)
    lengths.index_add_(0, of_run, sizes)
    place = of_frame[:, None] * players + torch.arange(players)
    returns.view(-1).index_add_(0, place.reshape(-1), frames.rewards.reshape(-1))  # in order, over one dimension
    last = torch.zeros_like(traj_ids).scatter_reduce_(0, of_run, frames.steps[final], "amax", include_self=False)
    return _Trajectories(
        traj_ids=traj_ids,
        lanes=torch.zeros_like(traj_ids).scatter_(0, of_run, frames.lanes[final]),
        lengths=lengths,
        returns=returns,
        starts=starts,
        whole=lengths == last + 1 - starts,
        ended=torch.zeros_like(traj_ids, dtype=torch.bool).index_fill_(0, of_frame[frames.done], True),
    ), of_frame


def _before(opened: Mapping[int, OpenReturn], traj_ids: Tensor, players: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths ``[G]`` int64, returns ``[G, players]`` float64 and starts before the batch; 0 for new trajectories."""
    lengths, starts = torch.zeros_like(traj_ids), torch.zeros_like(traj_ids)
    returns = torch.zeros((len(traj_ids), players), dtype=torch.float64)
    if not opened:
        return lengths, returns, starts
    values = torch.stack([so_far.value.reshape(-1) for so_far in opened.values()])
    if values.shape[1] != players:
        raise ValueError(f"the batch has rewards of {players} players, `previous` of {values.shape[1]}: give one run's")
    known = torch.tensor(list(opened))
    here = torch.isin(known, traj_ids)
    place = torch.searchsorted(traj_ids, known[here])
    lengths[place] = torch.tensor([so_far.length for so_far in opened.values()])[here]
    starts[place] = torch.tensor([so_far.start for so_far in opened.values()])[here]
    returns[place] = values[here]
    return lengths, returns, starts


def _unfinished(trajectories: _Trajectories) -> dict[int, OpenReturn]:
    """The open trajectory of each lane, by id: the newest one, unless it has ended or lacks frames."""
    lanes, of_trajectory = torch.unique(trajectories.lanes, return_inverse=True)
    number = torch.arange(len(of_trajectory))
    newest = torch.full_like(lanes, -1).scatter_reduce_(0, of_trajectory, number, "amax")
    goes_on = trajectories.whole & ~trajectories.ended & (number == newest[of_trajectory])
    return _opened(*(column[goes_on] for column in trajectories[:5]))


def _opened(ids: Tensor, lanes: Tensor, lengths: Tensor, returns: Tensor, starts: Tensor) -> dict[int, OpenReturn]:
    """Unfinished trajectories by id, from their numbers, each [G], and returns, [G, players]."""
    columns = (lanes.tolist(), lengths.tolist(), _by_player(returns).unbind(), starts.tolist())
    return dict(zip(ids.tolist(), map(OpenReturn, *columns), strict=True))


def _by_player(returns: Tensor) -> Tensor:
    """The returns ``[E, players]`` as users see them: ``[E]`` if there is one player."""
    return returns[:, 0] if returns.shape[1] == 1 else returns

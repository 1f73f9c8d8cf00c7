"""Makes the batch of a rollout: counts its steps, names its columns, checks the rewards, and puts time last.

Counters are computed for all steps at once, and those of one kind share one array, because one call into Torch costs as
much as a step of a small environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.request import Request
from funcollect.core.state import CollectorState, trajectory_ids
from funcollect.envs.host.host_env import check_rewards
from funcollect.interop.memory import complain_if
from funcollect.policies.checks import check_apart
from funcollect.protocols import Columns, Env
from funcollect.specs import RESERVED
from funcollect.tree import Form, Path, form_of, select, to_batch

ROOT_FLAGS: list[Path] = [("terminated",), ("truncated",), ("done",)]
NEXT_FLAGS: list[Path] = [("next", *path) for path in ROOT_FLAGS]
_FLAGS = [*ROOT_FLAGS, *NEXT_FLAGS]
REWARD: Path = ("next", "reward")
_COUNTERS = ("lane", "episode", "step", "returns", "terminated", "truncated")  # the counters [P] of a state
_NUMBERS: list[Path] = [("collector", name) for name in ("traj_ids", "step", "lane", "policy_version")]


class Page(NamedTuple):
    """The memory of one rollout: the arrays that its steps are recorded in, and the leaves of its batch over them."""

    columns: Sequence[Any]  # [T, P, ...]: tensors, or arrays of NumPy; the rewards come last
    numbers: Any  # [4, P, T] int64, in the order of `_NUMBERS`; arrays of NumPy on the CPU, like the flags
    flags: Any  # [6, P, T] bool, in the order of `_FLAGS`; False at first
    leaves: Sequence[Tensor]  # of the batch: views of the three above


class Book:
    """What the rollouts of one request have in common; makes a `Page` for each.

    Pages share no memory. On the host NumPy owns it, so that what moves one leaf elsewhere, as `Tensor.share_memory_`
    does, shows in no other batch.
    """

    def __init__(
        self, rows: Columns, *, single: bool, request: Request, in_numpy: bool = False, on_host: bool | None = None
    ) -> None:
        """Record rows like these [P, ...] by the batch's keys, rewards last, and two flags [T, P] of all pages."""
        like = rows[REWARD]
        ends = torch.zeros(2, request.length, len(like), dtype=torch.bool, device=like.device).unbind()
        self.on_host, self._in_numpy, self._device = like.is_cpu if on_host is None else on_host, in_numpy, like.device
        self._counted = len(like), request.length
        self._size = torch.Size((*[len(like)] * (not single), *[request.length] * request.with_time))
        self._single, self._with_time = single, request.with_time
        self._layout: Any = {"single": single, "with_time": request.with_time}
        self._lanes, self._steps = 0 if single else slice(None), slice(None) if request.with_time else 0
        dtypes = [row.detach().numpy().dtype if self.on_host else row.dtype for row in rows.values()]
        shapes = [(request.length, *row.shape) for row in rows.values()]
        self._columns = [*zip(rows, shapes, dtypes, strict=True)]
        self.paths = (*rows, *_NUMBERS, *_FLAGS)
        self._forms: dict[tuple[Path, ...], Form] = {}  # by the paths of the further columns of a batch
        self.terminated, self.truncated = (_in_numpy(flag) if in_numpy else flag for flag in ends)  # False at first
        self.episode, self.ids = None, None  # `_count_steps` caches the trajectory ids [P, 1] of these episodes [P]
        self.never = torch.zeros(len(like), dtype=torch.bool, device=like.device)
        steps = torch.arange(request.length, device=like.device)
        self.time: Any = steps.numpy() if self.on_host else steps

    def page(self, given: Columns) -> Page:
        """Return a page over new memory, and over those of the `given` columns [T, P, ...] that fit."""
        numbers, flags = ((len(names), *self._counted) for names in (_NUMBERS, _FLAGS))
        if self.on_host:
            counted: Any = np.empty(numbers, np.int64), np.zeros(flags, np.bool_)
        else:
            ids = torch.empty(numbers, dtype=torch.int64, device=self._device)
            counted = ids, torch.zeros(flags, dtype=torch.bool, device=self._device)
        columns = [self._memory(given.get(path), shape, dtype) for path, shape, dtype in self._columns]
        tensor: Any = torch.from_numpy if self.on_host else torch.Tensor.detach
        shown = [column[self._steps, self._lanes, ...] for column in (*columns[:-1], columns[-1][..., None])]
        if self._with_time and not self._single:
            shown = [column.swapaxes(0, 1) for column in shown]
        rows = [memory[:, self._lanes, self._steps] for memory in counted]
        leaves = [*map(tensor, shown), *tensor(rows[0]).unbind(), *tensor(rows[1][..., None]).unbind()]
        recorded = columns if self._in_numpy or not self.on_host else [*map(torch.from_numpy, columns)]
        return Page(recorded, counted[0], counted[1], leaves)

    def _memory(self, given: Tensor | None, shape: tuple[int, ...], dtype: Any) -> Any:
        if given is not None and given.device == self._device:
            column: Any = given.numpy() if self.on_host else given
            if (column.shape, column.dtype) == (shape, dtype):
                return column
        return np.empty(shape, dtype) if self.on_host else torch.empty(shape, dtype=dtype, device=self._device)

    def batch(self, page: Page, beside: Columns) -> TensorDict:
        """Return the locked batch of a page and of the further columns `beside` [T, P, ...]."""
        names = (*beside,)
        if (form := self._forms.get(names)) is None:
            check_apart(names, [path for path in self.paths if path[0] not in RESERVED])
            form = self._forms[names] = form_of((*self.paths, *names), self._size, self._with_time)
        return form.filled([*page.leaves, *[shown(column, 0, **self._layout) for column in beside.values()]])


def deliver(
    state: CollectorState, request: Request, book: Book, page: Page, beside: Columns, *, ended: bool = True
) -> tuple[dict[str, Tensor], TensorDict]:
    """Return the counters [P] of the state after a rollout that began with `state`, and the rollout's batch.

    `beside` are the columns [T, P, ...] that are not on the page. `ended` is False only if, on the host, no episode
    ended. Within `reads_together` this does not wait for a device.
    """
    if request.reset_when_done and book.on_host and (not ended or request.length == 1):
        after = _count_steps(state, book, page, ended=ended)
    else:
        after = _count(state, request, book, page)
    if book.on_host:
        check_rewards(_in_numpy(page.columns[-1]))
    else:
        check_reward(page.columns[-1].detach())
    return after, book.batch(page, beside)


def _in_numpy(memory: Any) -> Any:
    return memory.numpy() if isinstance(memory, Tensor) else memory


def _count_steps(state: CollectorState, book: Book, page: Page, *, ended: bool) -> dict[str, Tensor]:
    """Do what `_count` does, by additions alone, if on the host only the last step may have `ended` episodes."""
    reward, (ids, steps, lanes, versions) = _in_numpy(page.columns[-1]), page.numbers
    lane, episode, step = state.lane.numpy(), state.episode.numpy(), state.step.numpy()
    if state.episode is not book.episode:
        book.episode, book.ids = state.episode, trajectory_ids(lane, episode, state.total_lanes)[:, None]
    ids[...] = book.ids
    np.add(step[:, None], book.time, out=steps)
    lanes[...], versions[...] = lane[:, None], state.policy_version
    returns = state.returns.numpy() + reward[0]
    if len(reward) > 1:
        rows = reward.astype(np.float64)
        rows[0] = returns
        returns = rows.cumsum(0)[-1]
    step_after = step + len(reward)
    after = {"terminated": book.never, "truncated": book.never}
    if ended:
        flags = page.flags[..., -1]
        flags[3], flags[4] = _in_numpy(book.terminated[-1]), _in_numpy(book.truncated[-1])
        flags[5] = done = flags[3] | flags[4]
        step_after[done], returns[done] = 0, 0.0
        after["episode"] = torch.from_numpy(episode + done)
        book.terminated[-1] = book.truncated[-1] = False
    return {**after, "step": torch.from_numpy(step_after), "returns": torch.from_numpy(returns)}


def _count(state: CollectorState, request: Request, book: Book, page: Page) -> dict[str, Tensor]:
    """Write the counters and flags of a rollout, on the host or on a device; return the counters after it."""
    xp, view = (np, _in_numpy) if book.on_host else (torch, Tensor.detach)
    before = SimpleNamespace(**{name: view(getattr(state, name)) for name in _COUNTERS})
    count = _count_episodes if request.reset_when_done else _count_until_finished
    recorded = map(view, (page.flags, page.columns[-1], book.terminated, book.truncated))
    number, step, after = count(xp, before, book.time, *recorded)
    ids = trajectory_ids(before.lane[:, None], number, state.total_lanes)
    for row, value in zip(page.numbers, (ids, step, before.lane[:, None], state.policy_version), strict=True):
        row[...] = value
    book.terminated[...] = book.truncated[...] = False
    return {name: torch.from_numpy(value) if book.on_host else value for name, value in after.items()}


def _count_episodes(
    xp: Any, before: Any, time: Any, flags: Any, reward: Any, terminated: Any, truncated: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Return each step's episode and its index in that episode, both [P, T], and the counters after the last step.

    A lane begins another episode where one ends. `time` is 0 … T - 1; the `flags` [6, P, T], all False, are written.
    """
    flags[3], flags[4] = terminated.T, truncated.T
    flags[5] = done = flags[3] | flags[4]
    begins = xp.zeros_like(done)
    begins[:, 1:] = done[:, :-1]
    number = before.episode[:, None] + begins.cumsum(-1)
    origin = xp.where(begins, time, -before.step[:, None])  # where an episode begins, the row of its first step
    step = time - (np.maximum.accumulate(origin, -1) if xp is np else origin.cummax(-1).values)
    step_after = xp.where(done[:, -1], 0, step[:, -1] + 1)
    after = {
        "episode": number[:, -1] + done[:, -1],
        "step": step_after,
        "returns": _open_returns(xp, before, time, reward, len(reward) - step_after),
        "terminated": xp.zeros_like(before.terminated),
        "truncated": xp.zeros_like(before.truncated),
    }
    return number, step, after


def _count_until_finished(
    xp: Any, before: Any, time: Any, flags: Any, reward: Any, terminated: Any, truncated: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Do what `_count_episodes` does, for lanes that stay finished: whatever was recorded for these is overwritten."""
    flags[2, :, 0] = finished = before.terminated | before.truncated
    flags[5] = done = ((terminated | truncated).T.cumsum(-1) > 0) | finished[:, None]  # at or before a step's end
    flags[2, :, 1:] = done[:, :-1]
    live = ~flags[2]
    reward[...] = xp.where(live.T, reward, 0.0)
    after = {"episode": before.episode, "step": before.step + live.sum(-1)}
    after["returns"] = _open_returns(xp, before, time, reward, xp.zeros_like(before.step))
    for root, (name, column) in enumerate({"terminated": terminated, "truncated": truncated}.items()):
        was, now = getattr(before, name), column.T & live
        flags[root + 3] = ever = (now.cumsum(-1) > 0) | was[:, None]
        flags[root, :, 0], flags[root, :, 1:] = was, ever[:, :-1]
        after[name] = was | now.any(-1)
    steps = before.step[:, None] + live.cumsum(-1)
    return before.episode[:, None], xp.where(live, steps - 1, steps), after


def _open_returns(xp: Any, before: Any, time: Any, reward: Any, start: Any) -> Any:
    """Sum each lane's rewards [T, P] from row `start` [P] on, in order: so the sum does not depend on a run's cuts."""
    first = min(max(int(start.min()), 0), len(reward) - 1) if xp is np else 0  # finding it would wait for a device
    rows = xp.where(time[first:, None] < start, 0.0, xp.asarray(reward[first:], dtype=xp.float64))
    rows[0] += xp.where(start <= 0, before.returns, 0.0)
    return rows.cumsum(0)[-1]


def restarted(state: CollectorState, lanes: Tensor, episode: Tensor, **changes: Any) -> CollectorState:
    """Return the state after `changes`, whose `lanes` [P] (a mask) have begun the episodes numbered `episode` [P]."""
    counters = {name: getattr(state, name) for name in ("step", "returns", "terminated", "truncated")}
    cleared = {name: select(lanes, torch.zeros_like(counter), counter) for name, counter in counters.items()}
    return state.replace(episode=episode, **cleared, **changes)


def checked_batch(env: Env, columns: dict[Path, Tensor], *, with_time: bool = True) -> TensorDict:
    """Return the batch of columns [T, P, ...] that include the counters; missing root flags are False."""
    check_reward(columns[REWARD].detach())
    if ROOT_FLAGS[0] not in columns:
        shape = len(ROOT_FLAGS), *columns[NEXT_FLAGS[0]].shape
        columns |= zip(ROOT_FLAGS, columns[NEXT_FLAGS[0]].new_zeros(shape).unbind(), strict=True)
    return as_batch(columns, single=env.num_envs is None, with_time=with_time)


def check_reward(reward: Tensor) -> None:
    """Raise EnvError for the first NaN among rewards [T, P] or [T, P, players]; without NaN only one number is read."""
    # inf - inf is NaN, too: `check_rewards` looks for NaN
    complain_if(reward.sum(), math.isnan, lambda: check_rewards(reward[..., None].flatten(2).sum(-1).cpu().numpy()))


def as_batch(columns: Mapping[Path, Tensor], *, single: bool, time: int = 0, with_time: bool = True) -> TensorDict:
    """Return a locked batch [*B, P, T], without P for a `single` environment, and without T unless `with_time`.

    The `columns` are [*B, T, P, ...], with `time` dimensions in ``*B``; flags and rewards of one player may lack their
    last dimension, of size 1.
    """
    *lead, length, num_lanes = columns[REWARD].shape[: time + 2]
    leaves = dict(columns)
    for path in (REWARD, *_FLAGS):
        if path in leaves and leaves[path].ndim == time + 2:  # rewards of several players have their own
            leaves[path] = leaves[path].unsqueeze(-1)
    leaves = {path: shown(leaf, time, single=single, with_time=with_time) for path, leaf in leaves.items()}
    shape = (*lead, *[num_lanes] * (not single), *[length] * with_time)
    return to_batch(leaves, shape, with_time=with_time, locked=True)


def shown(leaf: Tensor, time: int, *, single: bool, with_time: bool) -> Tensor:
    """Return a column [*B, T, P, ...], with `time` dimensions in ``*B``, in the layout of a batch."""
    if single:
        leaf = leaf.select(time + 1, 0)
    elif with_time:
        leaf = leaf.transpose(time, time + 1)
    return leaf if with_time else leaf.select(time, 0)

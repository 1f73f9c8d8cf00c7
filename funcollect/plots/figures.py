"""Figures of episode statistics over a run, of the parts of a frame's time, and of single episodes in a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind, check_positive
from funcollect.envs.base import import_extra
from funcollect.profiling import PARTS, Profile
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import MASK, STEP, TRAJECTORY_IDS, check_batch, ends_of, require
from funcollect.trajectories.stats import EpisodeStats
from funcollect.tree import Path, flatten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

File = str | PathLike[str] | None
Stats = EpisodeStats | Sequence[EpisodeStats]

_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": "small", "frameon": False}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; its width and height are in inches."""
    kind: type[Figure] = import_extra("matplotlib.figure", "Matplotlib", "viz").Figure
    return kind(figsize=(width, height), dpi=150, layout="constrained")


def _axes(ax: Any, title: Any, label: Any, width: float, height: float) -> Axes:
    """Check the arguments of a plot, and return the user's axes, or those of a new figure for None."""
    check_kind("title", title, str, "pass for example 'CartPole-v1'")
    check_kind("label", label, str, "pass for example 'seed 0'")
    axes: Axes = new_figure(width, height).add_subplot() if ax is None else ax
    from matplotlib.axes import Axes

    check_kind("ax", axes, Axes, "pass for example matplotlib.pyplot.subplots()[1]")
    return axes


def saved(drawn: Figure | Axes, path: File) -> Figure:
    """Save a figure, or the figure of axes, in the format of the path's suffix, unless `path` is None; return it."""
    figure = drawn.get_figure(root=True)
    assert figure is not None
    if path is not None:
        figure.savefig(path)
    return figure


def check_figure(path: FilePath) -> None:
    """Raise ValueError for an unknown suffix, OSError for a missing folder, ImportError without Matplotlib."""
    if path.suffix.lower()[1:] not in new_figure(1, 1).canvas.get_supported_filetypes():
        raise ValueError(f"{path} has the suffix {path.suffix!r}, expected that of a picture, such as .png: change it")
    if not path.parent.is_dir():
        raise OSError(f"{path.parent} is no folder, expected one for {path.name}: make it")


def returns(
    stats: Stats, *, window: int = 100, title: str = "", label: str = "", ax: Axes | None = None, path: File = None
) -> Figure:
    """Plot episode returns over the frames of a run, with the rolling mean of the last `window` episodes.

    `stats` are a run's episodes, or a list of those of its batches in order; with several players each has a curve. An
    episode is drawn where it ended: at the number of frames of its lane at that time, times the number of lanes. The
    number of episodes follows the `title`, such as the environment's id, unless the run has a `label`, its name in the
    legend, or `ax` has other runs: Matplotlib's axes to draw several runs in one figure, None for a new one. `path` is
    the file to save it in; its suffix names the format.

    Raises ImportError if Matplotlib is not installed, TypeError for `stats` of another type, such as a batch, and
    ValueError for a `window` below 1 or an empty list.

    >>> import torch
    >>> from funcollect import EpisodeStats
    >>> ended = dict(traj_ids=torch.arange(3), lanes=torch.zeros(3).long(), terminated=torch.ones(3).bool())
    >>> stats = EpisodeStats(returns=torch.tensor([1.0, 3.0, 8.0]), lengths=torch.tensor([10, 10, 30]), **ended)
    >>> figure = returns(stats, window=2, label="seed 0")
    >>> figure.axes[0].lines[-1].get_xydata().tolist()
    [[10.0, 1.0], [20.0, 2.0], [50.0, 5.5]]
    >>> figure is returns(stats, window=2, label="seed 1", ax=figure.axes[0])
    True
    """
    return _curves("returns", "episode return", stats, window, title, label, ax, path)


def lengths(
    stats: Stats, *, window: int = 100, title: str = "", label: str = "", ax: Axes | None = None, path: File = None
) -> Figure:
    """Plot episode lengths over the frames of a run, with a rolling mean. See `returns` for the arguments and errors.

    >>> import torch
    >>> from funcollect import EpisodeStats
    >>> ended = dict(traj_ids=torch.arange(2), lanes=torch.zeros(2).long(), terminated=torch.ones(2).bool())
    >>> stats = EpisodeStats(returns=torch.tensor([1.0, 3.0]), lengths=torch.tensor([10, 30]), **ended)
    >>> lengths(stats).axes[0].lines[-1].get_xydata().tolist()
    [[10.0, 10.0], [40.0, 20.0]]
    """
    return _curves("lengths", "episode length in frames", stats, window, title, label, ax, path)


def _curves(
    name: str, quantity: str, stats: Stats, window: int, title: str, label: str, ax: Axes | None, path: File
) -> Figure:
    """Draw the field `name` of `stats`, [E] or [E, players], as points over frames, and its rolling mean as a line."""
    check_positive("window", window, 100)
    for part in (parts := stats if isinstance(stats, Sequence) else [stats]):
        if not isinstance(part, EpisodeStats):
            raise TypeError(
                f"stats holds a {type(part).__name__}, expected EpisodeStats or a list: pass fc.episode_stats(batch)"
            )
    axes, episodes = _axes(ax, title, label, 8, 4.5), EpisodeStats.concatenate(parts)
    if not (label or axes.lines):  # the number of one run's episodes would mislead beside others
        title = f"{title}{': ' if title else ''}{len(episodes):,} episode{'' if len(episodes) == 1 else 's'}"
    if title:
        axes.set_title(title)
    axes.set(xlabel="frames", ylabel=quantity)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    frames, count = _frames(episodes), len(episodes)
    last = np.append(frames[1:] != frames[:-1], True)[:count]  # [E]: the last one of episodes that ended together
    values = getattr(episodes, name).double().numpy().reshape(count, -1 if count else 1)
    for player, value in enumerate(values.T):
        names = [*([label] if label else []), *([f"player {player}"] if values.shape[1] > 1 else [])]
        # A running sum would stay infinite after an infinite return.
        sums = np.convolve(value, np.ones(min(window, count)))[:count] if count else value
        mean = sums / np.minimum(np.arange(1, count + 1), window)
        (points,) = axes.plot(frames, value, ".", markersize=5, alpha=0.5, markeredgewidth=0)
        entry = ", ".join([*names, f"mean of the last {window:,}"])
        axes.plot(frames[last], mean[last], color=points.get_color(), label=entry)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best")
    return saved(axes, path)


def _frames(stats: EpisodeStats) -> npt.NDArray[Any]:
    """The number of frames of the whole run at the end of each episode: [E]."""
    by_lane: Counter[int] = Counter()
    frames = []
    for lane, length in zip(stats.lanes.tolist(), stats.lengths.tolist(), strict=True):
        by_lane[lane] += length
        frames.append(by_lane[lane])
    return np.array(frames) * len({*by_lane, *(unfinished.lane for unfinished in stats.open_returns.values())})


_COLORS = dict(zip(PARTS, ("C0", "C1", "C0", "C2", "C4", "C5", "C3", "C8", "0.85"), strict=True))
_BAR: dict[str, Any] = {"height": 0.6, "edgecolor": "white", "linewidth": 0.5}


def profile(profile: Profile, *, title: str = "", ax: Axes | None = None, path: File = None) -> Figure:
    """Draw the parts of a frame's time as a bar, one for each timeline.

    A dashed line shows the time with the bare environment and the bare policy and nothing else. `profile` is the result
    of `funcollect.profile`, `title` is followed by the speed; `ax`, `path` and the errors are those of `returns`.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> figure = profile(fc.profile(env, frames=1_000))
    >>> figure.axes[0].get_xlabel()
    'microseconds per frame'
    """
    check_kind("profile", profile, Profile, "pass the result of funcollect.profile")
    bars, whole = len(profile.timelines), profile.microseconds
    axes = _axes(ax, title, "", 9, 1.6 + 0.8 * bars)
    for row, timeline in enumerate(profile.timelines):
        left = 0.0
        for part, value in timeline.parts.items():
            known = {handle.get_label() for handle in axes.containers}
            bar = axes.barh(row, value, left=left, label="" if part in known else part, color=_COLORS[part], **_BAR)
            if value > 0.06 * whole:  # wide enough for a number
                axes.bar_label(bar, [f"{value / whole:.0%}"], label_type="center", fontsize="small")
            left += value
    limit = profile.limits[-1]
    place, note = 1e6 / limit.frames_per_second, f"{limit.what}: {limit.frames_per_second:,.0f} frames/s"
    axes.axvline(place, color="black", linestyle="--", linewidth=1, zorder=0)
    text: dict[str, Any] = {"textcoords": "offset points", "va": "top", "fontsize": "small"}
    side, points = ("right", -4) if place > whole / 2 else ("left", 4)
    axes.annotate(note, (place, 1.0), (points, -4), ("data", "axes fraction"), ha=side, **text)
    axes.set_yticks(range(bars), [timeline.where.replace(", ", ",\n") for timeline in profile.timelines])
    axes.set(ylim=(bars - 0.4, -0.9), xlim=(0, 1.02 * whole), xlabel="microseconds per frame")
    speed = f"{profile.frames_per_second:,.0f} frames/s"
    axes.set_title(f"{title}: {speed}" if title else speed)
    axes.legend(**_BESIDE)
    return saved(axes, path)


def episode(batch: TensorDictBase, traj_id: int | None = None, *, path: File = None) -> Figure:
    """Plot the observations, actions and rewards of one episode over its steps, one panel each.

    Observations include the terminal one. Each component is a line; more than ten components are the rows of a color
    map. Actions, rewards and integers are drawn as steps. Pixel observations (at least two axes per frame) are omitted:
    use `frames`.

    `batch` is a TensorDict ``[*B, T]`` with ``collector.traj_ids``, or the result of `split_trajectories`. `traj_id`
    names the trajectory; None stands for the longest whole one, or the longest of all if none is whole. `path` is that
    of `returns`. Raises ImportError if Matplotlib is not installed, TypeError for another type of batch, and ValueError
    if it lacks the id, a key, or any frames.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, seed=0) as collector:
    ...     figure = episode(next(collector))
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['observation', 'action', 'reward']
    """
    name, frames, observations, first = pick(batch, traj_id)
    for key in ("action", ("next", "reward")):
        if frames.get(key, None) is None:
            raise ValueError(f"the batch has no {key}, expected actions and rewards by the data contract")
    leaves = {".".join(path): leaf for path, leaf in observations.items() if leaf.ndim <= 2}  # [T + 1, ...]
    leaves |= {"action": frames["action"], "reward": frames["next", "reward"]}  # [T, ...]
    figure = new_figure(8, 1.2 + 1.7 * len(leaves))
    panels = figure.subplots(len(leaves), sharex=True, squeeze=False)[:, 0]
    for axes, (label, leaf) in zip(panels, leaves.items(), strict=True):
        values = leaf.detach().double().reshape(len(leaf), -1).numpy()
        steps = label in ("action", "reward") or not leaf.is_floating_point()
        axes.set_ylabel(label)
        _draw(figure, axes, values, first, steps=steps)
    after = frames["next"]
    ended = " and ".join(flag for flag in ("terminated", "truncated") if flag in after and after[flag][-1].any())
    total = "/".join(f"{value:.4g}" for value in after["reward"].double().sum(0).tolist())
    panels[0].set_title(f"trajectory {name}: {len(frames)} frames, return {total}, {ended or 'goes on'}")
    panels[-1].set(xlabel="step", xlim=(first, first + len(frames)))
    panels[-1].locator_params(axis="x", integer=True)
    figure.align_ylabels(panels)
    return saved(figure, path)


def _draw(figure: Figure, axes: Any, values: npt.NDArray[Any], first: int, *, steps: bool) -> None:
    """Draw the values [N, components] from step `first` on; as steps, a value holds until the next one."""
    count, components = values.shape
    edges = np.arange(first, first + count + 1)
    if components > 10:
        bound = float(np.quantile(np.abs(values), 0.99)) or 1.0  # beside an outlier, the rest would be pale
        rows = np.arange(components + 1) - 0.5
        image = axes.pcolormesh(edges, rows, values.T, cmap="RdBu_r", vmin=-bound, vmax=bound, rasterized=True)
        figure.colorbar(image, ax=axes, pad=0.01, extend="both")
        return
    for component, line in enumerate(values.T):
        style = {"label": str(component), "color": f"C{component}", "linewidth": 1.2}
        if steps:
            axes.stairs(line, edges, baseline=None, **style)
        else:
            axes.plot(edges[:-1], line, **style)
    if components > 1:
        axes.legend(**_BESIDE)
    if (values == np.round(values)).all():
        axes.locator_params(axis="y", integer=True, nbins=5)
    axes.margins(y=0.1)
    if (middle := float(values.min())) == values.max():  # a constant needs a scale of its own magnitude
        axes.set_ylim(middle - max(1.0, abs(middle)), middle + max(1.0, abs(middle)))
    axes.grid(alpha=0.3)


class Trajectory(NamedTuple):
    """The frames of one trajectory in a batch, in order, on the CPU."""

    traj_id: int
    frames: TensorDictBase  # [T]
    observations: dict[Path, Tensor]  # each [T + 1, ...], with the observation after the last frame
    first_step: int  # the index of the first frame in its trajectory; 0 if the batch has no step counter


def pick(batch: TensorDictBase, traj_id: int | None) -> Trajectory:
    """Select a trajectory of a batch, split or not; `episode` documents the arguments and errors."""
    check_batch(batch)
    batch = next_observations(batch)
    ids, step = require(batch, TRAJECTORY_IDS, tail=()), batch.get(STEP, None)
    mask, finished = batch.get(MASK, None), batch.get("done", None)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    real = real if finished is None else real & ~finished[..., 0]  # neither padding nor a finished lane
    if not real.any():
        raise ValueError(f"the batch {list(batch.batch_size)} has no frames, expected one trajectory or more")
    present, place, counts = torch.unique(ids[real], return_inverse=True, return_counts=True)
    if traj_id is None:
        whole = torch.zeros_like(counts)
        if step is not None and batch.get(("next", "done"), None) is not None:
            marks = (step == 0)[real], ends_of(batch)[real]
            begins, ends = (place[mark].bincount(minlength=len(present)).bool() for mark in marks)
            whole = begins & ends
        traj_id = int(present[(counts + whole * ids.numel()).argmax()])
    chosen = (ids == traj_id) & real
    if not chosen.any():
        some = present[:10].tolist()
        raise ValueError(f"the batch has no trajectory {traj_id}, expected one of {some} ({len(present)} in all)")
    frames = batch[chosen.nonzero(as_tuple=True)].cpu()
    if step is not None:
        frames = frames[frames[STEP].argsort(stable=True)]
    after, roots = flatten(frames["next"]), flatten(frames.exclude("next"))
    for path in [*after]:
        if path not in roots or path[0] in ("reward", "done", "terminated", "truncated", "info"):
            del after[path]
    observations = {path: torch.cat([roots[path], last[-1:]]) for path, last in after.items()}
    return Trajectory(int(traj_id), frames, observations, 0 if step is None else int(frames[STEP][0]))

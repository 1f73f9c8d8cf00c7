"""One episode over time: what was seen, what was done, what it gave."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.plots.figures import new_figure, saved
from funcollect.plots.selection import Trajectory, pick

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 10  # of a panel; more components are drawn as a map


class _Panel(NamedTuple):
    """One row of the figure."""

    label: str
    values: npt.NDArray[Any]  # [N, components]; N is T + 1 for observations and T for the rest
    steps: bool  # drawn as steps that hold until the next frame


def episode(batch: TensorDictBase, traj_id: int | None = None, *, path: str | PathLike[str] | None = None) -> Figure:
    """One episode's observations, actions and rewards over its steps, one panel each.

    Observations end with the terminal one. Each component is a line, or of more than ten components a row of a map;
    actions, rewards and integers hold for a step. Pictures (leaves with two axes per frame or more) are left to
    `frames`.

    Args:
        batch: ``[*B, T]`` with ``collector.traj_ids``; split trajectories are taken as well.
        traj_id: which trajectory; None for the longest whole one, or the longest one where none is whole.
        path: where to save the picture, in the format that its suffix names.

    Returns:
        The figure, which no pyplot state knows of.

    Raises:
        ImportError: without Matplotlib.
        TypeError: for something other than a TensorDict.
        ValueError: for an id that is not in the batch, missing keys, and a batch without frames.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, seed=0) as collector:
    ...     figure = episode(next(collector))
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['observation', 'action', 'reward']
    """
    trajectory = pick(batch, traj_id)
    panels = _panels(trajectory)
    figure = new_figure(8, 1.2 + 1.7 * len(panels))
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(every, panels, strict=True):
        _draw(figure, axes, panel, trajectory.first_step)
    length = len(trajectory.frames)
    every[0].set_title(f"trajectory {trajectory.traj_id}: {_amounts(trajectory)}, {trajectory.ending}")
    every[-1].set_xlabel("step")
    every[-1].locator_params(axis="x", integer=True)
    every[-1].set_xlim(trajectory.first_step, trajectory.first_step + length)
    figure.align_ylabels(every)
    return saved(figure, path)


def _amounts(trajectory: Trajectory) -> str:
    returns = trajectory.frames["next", "reward"].double().sum(0)
    amounts = "/".join(f"{value:.4g}" for value in returns.tolist())
    return f"{len(trajectory.frames)} frames, return {amounts}"


def _panels(trajectory: Trajectory) -> list[_Panel]:
    for key in ("action", ("next", "reward")):
        if trajectory.frames.get(key, None) is None:
            raise ValueError(f"the batch has no {key}, expected actions and rewards by the data contract")
    leaves = {".".join(path): leaf for path, leaf in trajectory.observations.items() if leaf.ndim <= 2}
    panels = [_panel(label, leaf, steps=not leaf.is_floating_point()) for label, leaf in leaves.items()]
    panels.append(_panel("action", trajectory.frames["action"], steps=True))
    panels.append(_panel("reward", trajectory.frames["next", "reward"], steps=True))
    return panels


def _panel(label: str, leaf: Tensor, *, steps: bool) -> _Panel:
    return _Panel(label, leaf.detach().double().reshape(len(leaf), -1).numpy(), steps)


def _draw(figure: Figure, axes: Any, panel: _Panel, first: int) -> None:
    count, components = panel.values.shape
    edges = np.arange(first, first + count + 1)
    axes.set_ylabel(panel.label)
    if components > _MOST_LINES:
        bound = float(np.quantile(np.abs(panel.values), 0.99)) or 1.0  # a few outliers would leave the rest pale
        rows = np.arange(components + 1) - 0.5
        image = axes.pcolormesh(edges, rows, panel.values.T, cmap="RdBu_r", vmin=-bound, vmax=bound, rasterized=True)
        figure.colorbar(image, ax=axes, pad=0.01, extend="both")
        return
    for component, values in enumerate(panel.values.T):
        style = {"label": str(component), "color": f"C{component}", "linewidth": 1.2}
        if panel.steps:
            axes.stairs(values, edges, baseline=None, **style)
        else:
            axes.plot(edges[:-1], values, **style)
    _scale(axes, panel.values)
    if components > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def _scale(axes: Any, values: npt.NDArray[Any]) -> None:
    """Whole numbers are marked at whole numbers, and what never changes has a scale of its own size."""
    if (values == np.round(values)).all():
        axes.locator_params(axis="y", integer=True, nbins=5)
    axes.margins(y=0.1)
    if values.min() == values.max():
        middle = float(values.min())
        axes.set_ylim(middle - max(1.0, abs(middle)), middle + max(1.0, abs(middle)))
    axes.grid(alpha=0.3)

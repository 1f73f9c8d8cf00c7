"""Plots one episode over time: its observations, actions and rewards."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.plots.figures import new_figure, saved
from funcollect.plots.selection import Trajectory, pick

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 10  # of a panel; more components are drawn as a color map


def episode(batch: TensorDictBase, traj_id: int | None = None, *, path: str | PathLike[str] | None = None) -> Figure:
    """Plot the observations, actions and rewards of one episode over its steps, one panel each.

    Observations include the terminal one. Each component is a line; more than ten components are the rows of a color
    map. Actions, rewards and integers are drawn as steps. Pixel observations (at least two axes per frame) are omitted:
    use `frames`.

    Args:
        batch: ``[*B, T]`` with ``collector.traj_ids``, or the result of `split_trajectories`.
        traj_id: the trajectory; None for the longest whole one, or the longest of all if none is whole.
        path: the file to save the figure in; its suffix names the format.

    Returns:
        The figure.

    Raises:
        ImportError: if Matplotlib is not installed.
        TypeError: if `batch` is not a TensorDict.
        ValueError: if the batch lacks the id, a key, or any frames.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, seed=0) as collector:
    ...     figure = episode(next(collector))
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['observation', 'action', 'reward']
    """
    trajectory = pick(batch, traj_id)
    leaves = _panels(trajectory)
    figure = new_figure(8, 1.2 + 1.7 * len(leaves))
    every = figure.subplots(len(leaves), sharex=True, squeeze=False)[:, 0]
    for axes, (label, leaf) in zip(every, leaves.items(), strict=True):
        values = leaf.detach().double().reshape(len(leaf), -1).numpy()
        steps = label in ("action", "reward") or not leaf.is_floating_point()
        axes.set_ylabel(label)
        _draw(figure, axes, values, trajectory.first_step, steps=steps)
    length = len(trajectory.frames)
    returns = "/".join(f"{value:.4g}" for value in trajectory.frames["next", "reward"].double().sum(0).tolist())
    what = f"{length} frames, return {returns}, {trajectory.ending}"
    every[0].set_title(f"trajectory {trajectory.traj_id}: {what}")
    every[-1].set_xlabel("step")
    every[-1].locator_params(axis="x", integer=True)
    every[-1].set_xlim(trajectory.first_step, trajectory.first_step + length)
    figure.align_ylabels(every)
    return saved(figure, path)


def _panels(trajectory: Trajectory) -> dict[str, Tensor]:
    """The leaves to draw by label: observations [T + 1, ...], then actions and rewards [T, ...]."""
    for key in ("action", ("next", "reward")):
        if trajectory.frames.get(key, None) is None:
            raise ValueError(f"the batch has no {key}, expected actions and rewards by the data contract")
    leaves = {".".join(path): leaf for path, leaf in trajectory.observations.items() if leaf.ndim <= 2}
    return {**leaves, "action": trajectory.frames["action"], "reward": trajectory.frames["next", "reward"]}


def _draw(figure: Figure, axes: Any, values: npt.NDArray[Any], first: int, *, steps: bool) -> None:
    """Draw the values [N, components] from step `first` on; as steps, a value holds until the next one."""
    count, components = values.shape
    edges = np.arange(first, first + count + 1)
    if components > _MOST_LINES:
        bound = float(np.quantile(np.abs(values), 0.99)) or 1.0  # with the maximum, outliers would leave the rest pale
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
    _set_scale(axes, values)
    if components > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def _set_scale(axes: Any, values: npt.NDArray[Any]) -> None:
    """Put ticks for integers at integers, and give constant values a scale of their magnitude."""
    if (values == np.round(values)).all():
        axes.locator_params(axis="y", integer=True, nbins=5)
    axes.margins(y=0.1)
    if values.min() == values.max():
        middle = float(values.min())
        axes.set_ylim(middle - max(1.0, abs(middle)), middle + max(1.0, abs(middle)))
    axes.grid(alpha=0.3)

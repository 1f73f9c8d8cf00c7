"""Shows one episode: its observations, actions and rewards over time, and pixels as a strip or a film."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_positive
from funcollect.plots.figures import film, new_figure, saved
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import MASK, TRAJECTORY_IDS, check_batch, ends_of, require
from funcollect.tree import Path, flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIELDS = frozenset({"reward", "done", "terminated", "truncated", "info"})  # the keys under "next" beside observations
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
    for key in ("action", ("next", "reward")):
        if trajectory.frames.get(key, None) is None:
            raise ValueError(f"the batch has no {key}, expected actions and rewards by the data contract")
    leaves = {".".join(path): leaf for path, leaf in trajectory.observations.items() if leaf.ndim <= 2}  # [T + 1, ...]
    leaves |= {"action": trajectory.frames["action"], "reward": trajectory.frames["next", "reward"]}  # [T, ...]
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
    if components > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    if (values == np.round(values)).all():
        axes.locator_params(axis="y", integer=True, nbins=5)
    axes.margins(y=0.1)
    if values.min() == values.max():  # a scale of its magnitude
        middle = float(values.min())
        axes.set_ylim(middle - max(1.0, abs(middle)), middle + max(1.0, abs(middle)))
    axes.grid(alpha=0.3)


class Trajectory(NamedTuple):
    """The frames of one trajectory in a batch, in order, on the CPU."""

    traj_id: int
    frames: TensorDictBase  # [T]

    @property
    def observations(self) -> dict[Path, Tensor]:
        """Each observation leaf, [T + 1, ...], the last observation of the trajectory included."""
        after = flatten(self.frames["next"])
        roots = flatten(self.frames.exclude("next"))
        paths = [path for path in after if path[0] not in _FIELDS and path in roots]
        return {path: torch.cat([roots[path], after[path][-1:]]) for path in paths}

    @property
    def first_step(self) -> int:
        """The index of the first frame in its trajectory; 0 if the batch has no step counter."""
        step = self.frames.get(("collector", "step"), None)
        return 0 if step is None else int(step[0])

    @property
    def ending(self) -> str:
        """How the trajectory ended, in words."""
        flags = {name: self.frames.get(("next", name), None) for name in ("terminated", "truncated")}
        ended = [name for name, flag in flags.items() if flag is not None and bool(flag[-1].any())]
        return " and ".join(ended) or "goes on"


def pick(batch: TensorDictBase, traj_id: int | None) -> Trajectory:
    """Select one trajectory of a batch, which may be split; `episode` documents the arguments and errors."""
    check_batch(batch)
    batch = next_observations(batch)
    ids = require(batch, TRAJECTORY_IDS, tail=())
    mask, stays = batch.get(MASK, None), batch.get("done", None)
    real = torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device) if mask is None else mask
    real = real if stays is None else real & ~stays[..., 0]  # neither padding nor a lane that stays finished
    if not real.any():
        raise ValueError(f"the batch {list(batch.batch_size)} has no frames, expected one trajectory or more")
    if traj_id is None:
        traj_id = _longest(batch, ids, real)
    chosen = (ids == traj_id) & real
    if not chosen.any():
        present = torch.unique(ids[real]).tolist()
        raise ValueError(
            f"the batch has no trajectory {traj_id}, expected one of {present[:10]} ({len(present)} in all)"
        )
    frames = batch[chosen.nonzero(as_tuple=True)].cpu()
    step = frames.get(("collector", "step"), None)
    return Trajectory(int(traj_id), frames if step is None else frames[step.argsort(stable=True)])


def _longest(batch: TensorDictBase, ids: Tensor, real: Tensor) -> int:
    """The id of the longest trajectory, among the whole ones (from step 0 to done) if there are any."""
    present, place, counts = torch.unique(ids[real], return_inverse=True, return_counts=True)
    begins, ends = torch.zeros_like(present), torch.zeros_like(present)
    if (step := batch.get(("collector", "step"), None)) is not None:
        begins.index_add_(0, place, (step[real] == 0).to(present.dtype))
    if batch.get(("next", "done"), None) is not None:
        ends.index_add_(0, place, ends_of(batch)[real].to(present.dtype))
    whole = (begins > 0) & (ends > 0)
    return int(present[(counts + whole * ids.numel()).argmax()])


_COLOURS = (1, 3, 4)  # grey, RGB, RGBA


def frames(
    batch: TensorDictBase,
    traj_id: int | None = None,
    *,
    count: int = 8,
    key: str | Path | None = None,
    path: str | PathLike[str] | None = None,
) -> Figure:
    """Show evenly spaced frames of an episode side by side, from its first observation to its last.

    A frame is ``[H, W]``, ``[H, W, C]`` with 1, 3 or 4 colors, or ``[3, H, W]``. Of a stack of frames,
    ``[stack, H, W]`` or ``[stack, H, W, C]``, the last one is shown. The dtype is uint8, or floating with values in
    [0, 1].

    Args:
        batch: as for `episode`.
        traj_id: as for `episode`.
        count: the largest number of frames to show.
        key: the observation to show; None if only one consists of pictures.
        path: as for `episode`.

    Returns:
        The figure.

    Raises:
        ImportError: if Matplotlib is not installed.
        TypeError: if `batch` is not a TensorDict, or the pictures have another dtype.
        ValueError: if the id or the key is not in the batch, or an observation does not consist of pictures.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> pixels = {"observation": torch.zeros(5, 8, 8, 3, dtype=torch.uint8)}
    >>> batch = TensorDict({**pixels, "next": pixels, "collector": {"traj_ids": torch.zeros(5).long()}}, [5])
    >>> [axes.get_title() for axes in frames(batch, count=3).axes]
    ['step 0', '2', '5']
    """
    check_positive("count", count, 8)
    trajectory = pick(batch, traj_id)
    leaf = _pictorial(trajectory, key)
    shown = np.unique(np.linspace(0, len(leaf) - 1, min(count, len(leaf))).round().astype(int))
    pictures = _rgb(leaf[torch.from_numpy(shown)])
    height, width = pictures.shape[1:3]
    inches = min(2.0, 12 / len(shown))
    figure = new_figure(inches * len(shown), inches * height / width + 0.3)
    every = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, picture, index in zip(every, pictures, shown, strict=True):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(f"{'' if index else 'step '}{trajectory.first_step + index}", fontsize="small")
        axes.set_axis_off()
    return saved(figure, path)


def video(
    batch: TensorDictBase,
    path: str | PathLike[str],
    traj_id: int | None = None,
    *,
    fps: float = 30,
    key: str | Path | None = None,
) -> int:
    """Save an episode's pixel observations as a film.

    Args:
        batch: as for `frames`.
        path: the file, a GIF or an MP4 by its suffix. It is written only if all goes well.
        traj_id: as for `frames`.
        fps: frames per second.
        key: as for `frames`.

    Returns:
        The number of frames in the film: the steps of the episode, plus one for the terminal observation.

    Raises:
        ImportError: if imageio is not installed.
        TypeError, ValueError: as for `frames`. ValueError also if the suffix is unknown, or `fps` is not positive.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> pixels = {"observation": torch.zeros(5, 32, 32, 3, dtype=torch.uint8)}
    >>> batch = TensorDict({**pixels, "next": pixels, "collector": {"traj_ids": torch.zeros(5).long()}}, [5])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     video(batch, f"{folder}/episode.gif")
    6
    """
    leaf = _pictorial(pick(batch, traj_id), key)
    with film(path, fps) as add:
        for picture in leaf[:, None]:
            add(_rgb(picture)[0])
    return len(leaf)


def _pictorial(trajectory: Trajectory, key: str | Path | None) -> Tensor:
    """The observation leaf that consists of pictures, [T + 1, ...]."""
    leaves = trajectory.observations
    shapes = {".".join(path): list(leaf.shape[1:]) for path, leaf in leaves.items()}
    if key is not None:
        wanted = (key,) if isinstance(key, str) else tuple(key)
        if wanted not in leaves:
            raise ValueError(f"there is no observation {'.'.join(wanted)}, expected one of {shapes}")
        return leaves[wanted]
    pictorial = [leaf for leaf in leaves.values() if leaf.ndim >= 3]
    if len(pictorial) != 1:
        raise ValueError(
            f"{len(pictorial)} of the observations are pictures, expected one: name it with key=; there are "
            f"{shapes} (plots.episode draws the others)"
        )
    return pictorial[0]


def _rgb(leaf: Tensor) -> npt.NDArray[np.uint8]:
    """Pictures as [T, H, W, 3] uint8; floats must be in [0, 1], and are scaled to 255."""
    pictures = _channels_last(leaf)
    if pictures.is_floating_point():
        low, high = (float(bound) for bound in pictures.aminmax())
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"the pictures hold values from {low:.4g} to {high:.4g}, expected [0, 1], or uint8: scale them"
            )
        pictures = (pictures * 255).round().to(torch.uint8)
    if pictures.dtype != torch.uint8:
        raise TypeError(f"the pictures are {pictures.dtype}, expected uint8, or floats within [0, 1]: convert them")
    return pictures.expand(*pictures.shape[:-1], 3).numpy() if pictures.shape[-1] == 1 else pictures[..., :3].numpy()


def _channels_last(leaf: Tensor) -> Tensor:
    """Pictures of any layout as [T, H, W, C]."""
    match leaf.shape[1:]:
        case (_, _):
            return leaf[..., None]
        case (_, _, colours) if colours in _COLOURS:
            return leaf
        case (3, _, _):
            return leaf.movedim(1, -1)
        case (_, _, _):
            return leaf[:, -1, :, :, None]
        case (_, _, _, colours) if colours in _COLOURS:
            return leaf[:, -1]
        case shape:
            raise ValueError(
                f"a frame has shape {list(shape)}, expected [H, W], [H, W, C] with 1, 3 or 4 colours, [3, H, W], "
                "[stack, H, W] or [stack, H, W, C]: choose another key"
            )

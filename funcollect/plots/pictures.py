"""Pixel observations: as a strip, and as a film."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.plots.figures import new_figure, saved
from funcollect.plots.films import film
from funcollect.plots.selection import Trajectory, pick
from funcollect.tree import Path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pictures = npt.NDArray[np.uint8]

_COLOURS = (1, 3, 4)  # grey, RGB, RGBA


def frames(
    batch: TensorDictBase,
    traj_id: int | None = None,
    *,
    count: int = 8,
    key: str | Path | None = None,
    path: str | PathLike[str] | None = None,
) -> Figure:
    """A strip of an episode's frames, from its first observation to its last at even distances.

    A frame is ``[H, W]``, ``[H, W, C]`` with 1, 3 or 4 colours, ``[3, H, W]``, or a stack, ``[stack, H, W]`` or
    ``[stack, H, W, C]``, of which the newest (the last) is shown; uint8, or floating within [0, 1].

    Args:
        batch: ``[*B, T]`` with ``collector.traj_ids``; split trajectories are taken as well.
        traj_id: which trajectory; None for the longest whole one, or the longest one where none is whole.
        count: how many frames to show at most.
        key: the observation to show; None where only one has pictures.
        path: where to save the picture, in the format that its suffix names.

    Returns:
        The figure, which no pyplot state knows of.

    Raises:
        ImportError: without Matplotlib.
        TypeError: for something other than a TensorDict, and pictures of another dtype.
        ValueError: for an id or key that is not there, and observations that are no pictures.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> screen = torch.zeros(5, 8, 8, 3, dtype=torch.uint8)
    >>> next_ = {"observation": screen, "done": torch.zeros(5, 1, dtype=torch.bool)}
    >>> collector = {"traj_ids": torch.zeros(5).long(), "step": torch.arange(5)}
    >>> batch = TensorDict({"observation": screen, "next": next_, "collector": collector}, [5])
    >>> [axes.get_title() for axes in frames(batch, count=3).axes]
    ['step 0', '2', '5']
    """
    if count < 1:
        raise ValueError(f"count is {count}, expected a positive number of frames")
    trajectory = pick(batch, traj_id)
    leaf = _pictorial(trajectory, key)
    shown = np.unique(np.linspace(0, len(leaf) - 1, min(count, len(leaf))).round().astype(int))
    pictures = _colours(leaf[torch.from_numpy(shown)])
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
    """Save an episode's pixel observations as a film: GIF or MP4, as the suffix of `path` says.

    Args:
        batch: as for `frames`.
        path: where; the file is there whole or not at all.
        traj_id: as for `frames`.
        fps: frames per second.
        key: as for `frames`.

    Returns:
        The number of frames in the film: the episode's steps and one, for the terminal observation.

    Raises:
        ImportError: without imageio.
        TypeError, ValueError: as for `frames`; ValueError also for another suffix, and an `fps` that is not positive.
    """
    leaf = _pictorial(pick(batch, traj_id), key)
    with film(path, fps) as add:
        for picture in leaf[:, None]:
            add(_colours(picture)[0])
    return len(leaf)


def _pictorial(trajectory: Trajectory, key: str | Path | None) -> Tensor:
    """The observation leaf with pictures, [T + 1, ...]."""
    leaves = trajectory.observations
    if key is not None:
        wanted = (key,) if isinstance(key, str) else tuple(key)
        if wanted not in leaves:
            raise ValueError(f"there is no observation {_name(wanted)}, expected one of {_shapes(leaves)}")
        return leaves[wanted]
    pictorial = [leaf for leaf in leaves.values() if leaf.ndim >= 3]
    if len(pictorial) != 1:
        raise ValueError(
            f"{len(pictorial)} of the observations are pictures, expected one: name it with key=; there are "
            f"{_shapes(leaves)} (plots.episode draws what is not a picture)"
        )
    return pictorial[0]


def _name(path: Path) -> str:
    return ".".join(path)


def _shapes(leaves: dict[Path, Tensor]) -> dict[str, list[int]]:
    return {_name(path): list(leaf.shape[1:]) for path, leaf in leaves.items()}


def _colours(leaf: Tensor) -> Pictures:
    """Pictures as [T, H, W, 3] uint8."""
    pictures = _bytes(_channels_last(leaf))
    return pictures.expand(*pictures.shape[:-1], 3).numpy() if pictures.shape[-1] == 1 else pictures[..., :3].numpy()


def _channels_last(leaf: Tensor) -> Tensor:
    """[T, H, W, C] of any layout."""
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


def _bytes(pictures: Tensor) -> Tensor:
    if pictures.dtype == torch.uint8:
        return pictures
    if not pictures.is_floating_point():
        raise TypeError(f"the pictures are {pictures.dtype}, expected uint8, or floats within [0, 1]: convert them")
    low, high = (float(bound) for bound in pictures.aminmax())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"the pictures hold values from {low:.4g} to {high:.4g}, expected [0, 1], or uint8: scale them"
        )
    return (pictures * 255).round().to(torch.uint8)

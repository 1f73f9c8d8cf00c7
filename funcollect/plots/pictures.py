"""Shows pixel observations as a strip or as a film."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_positive
from funcollect.plots.figures import film, new_figure, saved
from funcollect.plots.selection import Trajectory, pick
from funcollect.tree import Path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    >>> screen = torch.zeros(5, 8, 8, 3, dtype=torch.uint8)
    >>> next_ = {"observation": screen, "done": torch.zeros(5, 1, dtype=torch.bool)}
    >>> collector = {"traj_ids": torch.zeros(5).long(), "step": torch.arange(5)}
    >>> batch = TensorDict({"observation": screen, "next": next_, "collector": collector}, [5])
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
    >>> screen = torch.zeros(5, 32, 32, 3, dtype=torch.uint8)
    >>> next_ = {"observation": screen, "done": torch.zeros(5, 1, dtype=torch.bool)}
    >>> collector = {"traj_ids": torch.zeros(5).long(), "step": torch.arange(5)}
    >>> batch = TensorDict({"observation": screen, "next": next_, "collector": collector}, [5])
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
    """Pictures as [T, H, W, 3] uint8."""
    pictures = _bytes(_channels_last(leaf))
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


def _bytes(pictures: Tensor) -> Tensor:
    """Pictures as uint8; floats must be in [0, 1], and are scaled to 255."""
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

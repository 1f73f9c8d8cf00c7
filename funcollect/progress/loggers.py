"""Loggers: what `track` calls with the numbers of a run. The one for TensorBoard is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath, makedirs
from typing import Any

from torch import Tensor

from funcollect.arguments import check_kind
from funcollect.messages import shown

# Called with the frames so far, and numbers by name. If it has methods `begin(frames)` and `close()`, they are called
# when a loop over the batches begins and when it ends.
Logger = Callable[[int, Mapping[str, float]], Any]


class TensorBoard:
    """A logger that writes TensorBoard's event files.

    Args:
        log_dir: the folder for the files, which is created at once.

    Raises:
        ImportError: if TensorBoard is not installed.
        TypeError: if `log_dir` is no path.
        OSError: if the folder cannot be created.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        self._make = _summary_writer()
        if not isinstance(log_dir, (str, PathLike)):
            raise TypeError(f"log_dir is {log_dir!r}, expected a path: pass for example log_dir='runs/first'")
        self._folder = fspath(log_dir)
        self._writer: Any = None
        if "://" in self._folder:  # for example a bucket, which TensorBoard writes to itself
            return
        try:
            makedirs(log_dir, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"log_dir is {self._folder!r}, which cannot be made ({error}): name another folder"
            ) from error

    def begin(self, frames: int) -> None:
        """Open another file, after so many frames of the run; TensorBoard hides what was written for later ones."""
        self._writer = self._make(self._folder, purge_step=frames + 1 if frames else None)

    def __call__(self, frames: int, values: Mapping[str, float]) -> None:
        """Write numbers by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, frames)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _summary_writer() -> Any:
    """TensorBoard's `SummaryWriter`; ImportError with advice if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("log_dir needs TensorBoard, which is not installed: pip install 'funcollect[viz]'") from error
    return SummaryWriter


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values as floats; TypeError for anything but numbers by name, ValueError for one that is not a single one."""
    check_kind("values", values, Mapping, 'pass numbers by name, such as {"loss": 0.1}')
    found = {}
    for name, value in values.items():
        try:
            found[name] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} is {shown(value)}, expected one number: give its mean, say") from error
    return found

"""Progress of a run: a progress bar, and loggers of its numbers."""

from funcollect.progress.bar import Tracked, track
from funcollect.progress.loggers import Logger, TensorBoard
from funcollect.progress.window import EpisodeWindow

__all__ = ["EpisodeWindow", "Logger", "TensorBoard", "Tracked", "track"]

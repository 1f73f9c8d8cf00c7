"""What a person watches while a collector runs: a progress bar, and scalars for TensorBoard."""

from funcollect.progress.bar import TrackableCollector, Tracked, track
from funcollect.progress.window import EpisodeWindow

__all__ = ["EpisodeWindow", "TrackableCollector", "Tracked", "track"]

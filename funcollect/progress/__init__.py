"""Progress of a running collector: a progress bar, and scalars for TensorBoard."""

from funcollect.progress.bar import TrackableCollector, Tracked, track
from funcollect.progress.window import EpisodeWindow

__all__ = ["EpisodeWindow", "TrackableCollector", "Tracked", "track"]

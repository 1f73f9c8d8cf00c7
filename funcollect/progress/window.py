"""Means over the last episodes of a stream of batches."""

from __future__ import annotations

from collections import deque

from tensordict import TensorDict, TensorDictBase

from funcollect.arguments import check_kind, check_positive
from funcollect.trajectories.split import MASK
from funcollect.trajectories.stats import EpisodeStats, stats_and_missing


class EpisodeWindow:
    """The last episodes of a stream of batches, and counts since its start.

    Args:
        size: the number of last episodes in the means.

    Attributes:
        frames: the number of frames so far, without the padding of split trajectories.
        episodes: the number of finished episodes so far.
        last: the statistics of the last batch; None if it lacks the keys for them, for example after a `postproc`.

    Raises:
        ValueError: if `size` is below 1.
    """

    def __init__(self, size: int = 100) -> None:
        check_positive("window", size, 100)
        self.frames = 0
        self.episodes = 0
        self.last: EpisodeStats | None = None
        self._returns: deque[list[float]] = deque(maxlen=size)  # [players] each
        self._lengths: deque[int] = deque(maxlen=size)

    def add(self, batch: TensorDict) -> int:
        """Add a batch and return the number of its frames; TypeError unless it is a TensorDict."""
        mend = "track batches of a collector or of rollout, and funcollect.deliver(batch, env) of funcollect.traced's"
        check_kind("batch", batch, TensorDictBase, mend)
        mask = batch.get(MASK, None)
        frames = batch.numel() if mask is None else int(mask.sum())
        self.frames += frames
        try:
            self.last, _ = stats_and_missing(batch, self.last)
        except ValueError:  # a postproc may leave any keys and shapes
            self.last = None
        else:
            self.episodes += len(self.last)
            returns = self.last.returns
            self._returns.extend((returns[:, None] if returns.ndim == 1 else returns).tolist())
            self._lengths.extend(self.last.lengths.tolist())
        return frames

    @property
    def mean_returns(self) -> list[float]:
        """The mean return of the last episodes, [players]; empty before the first episode."""
        return [sum(one) / len(one) for one in zip(*self._returns, strict=True)]

    @property
    def mean_length(self) -> float:
        """The mean length of the last episodes in frames; nan before the first."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else float("nan")

    def summary(self) -> dict[str, str]:
        """The entries of a progress bar; empty before the first episode."""
        if not self.episodes:
            return {}
        returns = "/".join(f"{value:.4g}" for value in self.mean_returns)
        return {"episodes": str(self.episodes), "return": returns, "length": f"{self.mean_length:.4g}"}

"""Collectors that each break one rule."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import funcollect as fc
from funcollect.trajectories.split import split_trajectories

Good = fc.SyncDataCollector


class Locks(Good):
    def __next__(self) -> Any:
        return super().__next__().lock_()


class DropsAKey(Good):
    def __next__(self) -> Any:
        batch = super().__next__()
        del batch["collector", "policy_version"]
        return batch


class ShrinksItsBatches(Good):
    def __next__(self) -> Any:
        batch = super().__next__()
        return batch if self.frames <= 40 else batch[..., 1:].clone()


class CountsSteps(Good):
    """Frames over lanes, as some count."""

    def rollout(self) -> Any:
        batch = super().rollout()
        self.frames -= batch.numel() // 2
        return batch


class RoundsDown(Good):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frames_per_batch += 2


class DropsARollout(Good):
    """As a collector does whose reader is slow: nothing tells of the hole but the steps."""

    def __next__(self) -> Any:
        batch = super().__next__()
        if self.frames == 80:
            dropped = super().__next__()
            self.frames -= dropped.numel()
        return batch


class NumbersEachBatch(Good):
    """Trajectories from 0 in every batch."""

    def __next__(self) -> Any:
        batch = super().__next__()
        ids = batch["collector", "traj_ids"]
        ids -= ids.min()
        return batch


class CutsTheLastBatch(Good):
    def __next__(self) -> Any:
        batch = super().__next__()
        total = self.options.total_frames
        return batch if total < 0 or self.frames <= total else batch[..., : total % batch.numel()]


class EndsByItself(Good):
    def __next__(self) -> Any:
        if self.frames >= 120 or (self.options.total_frames == -1 and self.frames >= 80):
            raise StopIteration
        return super().__next__()


class HasALength(Good):
    def __len__(self) -> int:
        return super().__len__() if self.options.total_frames > 0 else 10**9


class BeginsAgain(Good):
    """Each loop over it resets it."""

    def __iter__(self) -> Any:
        self.reset()
        return self


class IgnoresItsSeed(Good):
    def __init__(self, *args: Any, seed: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, seed=3, **kwargs)


class DrawsASeed(Good):
    def __init__(self, *args: Any, seed: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, seed=None, **kwargs)


class KeepsItsSeed(Good):
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        return seed + 1


class ReturnsNoSeed(Good):
    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        super().set_seed(seed)


class ReusesItsMemory(Good):
    """One slot for all batches."""

    slot: Any = None

    def __next__(self) -> Any:
        batch = super().__next__()
        self.slot = batch if self.slot is None else self.slot.update_(batch)
        return self.slot


class ReadsItsLastBatch(Good):
    """Begins again where the batch that it delivered last shows no reward."""

    last: Any = None

    def __next__(self) -> Any:
        if self.last is not None and not self.last["next", "reward"].any():
            self.reset()
        self.last = super().__next__()
        return self.last


class ForgetsWeights(Good):
    def update_policy_weights_(self, params: Any = None) -> None:
        super().update_policy_weights_(None)


class CountsNoVersion(Good):
    def update_policy_weights_(self, params: Any = None) -> None:
        self.params = params


class SavesAFunction(Good):
    def state_dict(self) -> Any:
        return super().state_dict() | {"policy": Good.reset}


class ForgetsFrames(Good):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.frames = 0


class ForgetsItsVersion(Good):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "policy_version": 0})


class ForgetsItsEpisodes(Good):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "episode": torch.full_like(state_dict["episode"], -1)})


class ForgetsItsKey(Good):
    fresh = itertools.count()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "key": torch.tensor([9, next(self.fresh)])})


class Swallows(Good):
    def rollout(self) -> Any:
        try:
            return super().rollout()
        except fc.EnvError:
            return super().rollout()


class StaysBroken(Good):
    def rollout(self) -> Any:
        try:
            return super().rollout()
        finally:
            self._interrupted = False


class SplitsLast(Good):
    def __next__(self) -> Any:
        if not self.options.split_trajs:
            return super().__next__()
        batch = self.options.postproc(self.rollout())  # type: ignore[misc]
        return split_trajectories(batch.exclude("_hidden"))


class ShowsHiddenKeys(Good):
    def __next__(self) -> Any:
        if self.options.postproc is None:
            return super().__next__()
        return self.options.postproc(split_trajectories(self.rollout()))


class StaysOpen(Good):
    def __exit__(self, *_: object) -> None:
        pass


class EntersAnother(Good):
    def __enter__(self) -> Any:
        return self.env


class ShutsDownOnce(Good):
    def shutdown(self) -> None:
        self._check_open()
        super().shutdown()


class JustStops(Good):
    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        return super().__next__()

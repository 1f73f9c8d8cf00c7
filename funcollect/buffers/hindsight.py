"""Goals in hindsight: replaces desired goals in samples of a buffer by goals that were achieved later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_choice, check_function, check_kind, check_positive
from funcollect.buffers import Ints
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices, trajectory_index_of
from funcollect.buffers.replay import ReplayBuffer
from funcollect.buffers.samplers import SliceSampler
from funcollect.messages import kind_of, shown
from funcollect.trajectories.split import assign, check_single_steps, readable
from funcollect.tree import key_of

__all__ = ["hindsight"]

_ACHIEVED, _GOAL = "achieved_goal", "desired_goal"  # the names in Gymnasium's environments with goals
Reward = Callable[[Tensor, Tensor, TensorDictBase], Any]


def hindsight(
    buffer: ReplayBuffer, *, k: int = 4, strategy: Literal["future", "final", "episode"] = "future", reward: Reward
) -> ReplayBuffer:
    """Let samples of a buffer have goals that were achieved later (Andrychowicz et al., 2017); returns the buffer.

    Of the frames in a sample, ``k / (k + 1)`` get a goal drawn from the ``("next", "achieved_goal")`` that the buffer
    has of their trajectory. It replaces ``desired_goal`` and ``("next", "desired_goal")``, and ``("next", "reward")``
    is computed again. The flags, and what is stored, stay as they are. A second call replaces the first.

    Args:
        buffer: of single frames with these keys, filled or not; it follows trajectories by their ids from then on.
        k: the number of frames with new goals for each one with its own.
        strategy: draw from the frame itself and those after it (``"future"``), from all frames of its trajectory
            (``"episode"``), or take the last one (``"final"``); of a trajectory that goes on, the newest so far.
        reward: a function of achieved goals ``[M, *G]``, new goals ``[M, *G]`` and the frames ``[M]`` with these, which
            returns M rewards, such as ``env.unwrapped.compute_reward``.

    Raises TypeError or ValueError for bad arguments, samplers of slices and n-step returns, and frames without ids.

    >>> import funcollect as fc, torch
    >>> from tensordict import TensorDict
    >>> goal, achieved = torch.full((6, 1), 9.0), torch.arange(6.0)[:, None]
    >>> frames = TensorDict({"episode": torch.zeros(6), "achieved_goal": achieved, "desired_goal": goal}, [6])
    >>> frames["next"] = TensorDict({"achieved_goal": achieved + 1, "desired_goal": goal, "reward": goal * 0}, [6])
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), batch_size=32)
    >>> buffer = hindsight(buffer, strategy="final", reward=lambda achieved, desired, frames: achieved == desired)
    >>> indices = buffer.extend(frames)
    >>> buffer.sample()["desired_goal"].unique()
    tensor([6., 9.])
    """
    check_kind("buffer", buffer, ReplayBuffer, "pass the ReplayBuffer that collectors fill")
    check_positive("k", k, 4)
    check_choice("strategy", strategy, ("future", "final", "episode"))
    check_function("reward", reward, "a function of achieved goals, new goals and frames", 3)
    if isinstance(buffer.sampler, SliceSampler) or getattr(buffer.sampler, "returns", None) is not None:
        what = f"buffer has the sampler {buffer.sampler}, expected one of single frames with their own rewards"
        raise ValueError(f"{what}: build it with a RandomSampler or a PrioritizedSampler, without n_steps")

    def relabel(memory: BufferView, drawn: SampleIndices, random_source: RandomSource) -> SampleIndices:
        index, own = trajectory_index_of(memory), torch.as_tensor(drawn.slots).numpy(force=True)
        rows = np.flatnonzero(random_source.uniform(len(own)) * (k + 1) < k)
        trajectory, position = index.places(own[rows])
        first, stop = index.first.take(trajectory), index.stop.take(trajectory)
        begin = {"future": position, "final": stop - 1, "episode": first}[strategy]
        goal = begin + (random_source.uniform(len(rows)) * (stop - begin)).astype(np.int64)
        slots, taken = np.concatenate([own, index.get(trajectory, goal)]), own if drawn.taken is None else drawn.taken
        made = partial(_with_goals, drawn, rows, reward)
        return SampleIndices(slots=slots, taken=taken, written=drawn.written, info=drawn.info, of=drawn, made=made)

    buffer.relabel_by(relabel)
    return buffer


def _with_goals(drawn: SampleIndices, which: Ints, reward: Reward, batch: Any) -> Any:
    """A sample of the `batch` of its frames, then M others, whose achieved goals become those of its rows `which`."""
    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"the frames are {kind_of(batch)}, which have no goals: store TensorDicts")
    check_single_steps(batch)
    held, needed = batch.keys(True, True), [(_GOAL,), ("next", _GOAL), ("next", _ACHIEVED), ("next", "reward")]
    if missing := [readable(path) for path in needed if key_of(path) not in held]:
        what = f"the frames have no {missing}, they have {sorted(map(str, held))}"
        raise ValueError(f"{what}: collect from an environment whose observations are dicts with goals")
    rows, count = torch.from_numpy(which).to(batch.device), len(drawn.slots)
    frames, goals = drawn.finish(batch[:count]), batch["next", _ACHIEVED][count:]
    for goal in (frames[_GOAL], frames["next", _GOAL]):
        assign(goal, rows, goals.to(goal.dtype))
    changed, rewards = frames[rows], frames["next", "reward"]
    answer = reward(changed["next", _ACHIEVED], changed[_GOAL], changed)
    try:
        new = torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"reward returned {shown(answer)}, expected {len(rows)} numbers"
        raise TypeError(f"{what}: return an array") from error
    if new.numel() != len(rows) * rewards[:1].numel():
        raise ValueError(f"reward returned shape {list(new.shape)} for {len(rows)} frames: return one for each")
    if new.isnan().any():
        raise ValueError(f"reward returned NaN for {int(new.isnan().sum())} of {len(rows)} frames: return numbers")
    rewards[rows] = new.to(rewards).reshape(len(rows), *rewards.shape[1:])
    return frames

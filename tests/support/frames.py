"""Batches of frames without an environment: streams of many lanes, a ring by brute force, and stacks."""

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict

import funcollect as fc
from tests.support.compare import assert_same

LENGTH = 5  # of every episode; the reward at step i is i


def make_batch(start, length, lanes=2, players=1):
    """[lanes, length]: the frames from `start` on of lanes whose episodes all have LENGTH steps."""
    frame = torch.arange(start, start + length).expand(lanes, length)
    step = frame % LENGTH
    lane = torch.arange(lanes)[:, None].expand(lanes, length)
    done = (step == LENGTH - 1)[..., None]
    reward = torch.stack([step.float() * (-1) ** player for player in range(players)], -1)
    return TensorDict(
        {
            "done": torch.zeros_like(done),
            "next": {"reward": reward, "done": done, "terminated": done, "truncated": torch.zeros_like(done)},
            "collector": {"traj_ids": frame // LENGTH * lanes + lane, "step": step, "lane": lane},
        },
        [lanes, length],
    )


@dataclass
class FakeCollector:
    batches: list[TensorDict]
    total_frames: int = -1
    closed: int = field(default=0)

    def __iter__(self):
        try:
            yield from self.batches
        finally:
            self.closed += 1


def seven_frames_each(count):
    return [make_batch(7 * index, 7) for index in range(count)]


def frames_of(lane, lengths, open_ended=False, cut=()):
    """The frames of one lane: trajectories of these lengths; those in `cut` end without a flag, and so may the last."""
    rows = []
    for trajectory, length in enumerate(lengths):
        for step in range(length):
            last = step == length - 1
            flagged = last and trajectory not in cut and not (open_ended and trajectory == len(lengths) - 1)
            rows.append((lane, trajectory, step, flagged))
    return rows


def batch_of(lanes):
    """``[P, T]`` of P lists of T frames."""
    table = torch.tensor(lanes, dtype=torch.int64)  # [P, T, 4]
    lane, trajectory, step, ended = table.unbind(-1)
    following = torch.stack([lane, trajectory, step + 1], -1).float()
    done = ended.bool()[..., None]
    return TensorDict(
        {
            "observation": table[..., :3].float(),
            "action": step.to(torch.int32),
            "next": {"observation": following, "done": done, "truncated": torch.zeros_like(done)},
            "collector": {"traj_ids": (lane << 40) + trajectory, "step": step, "lane": lane},
        },
        batch_size=table.shape[:2],
    )


@st.composite
def streams(draw, most_lanes=4):
    """Batches ``[P, T]`` from several workers of P lanes each, in any order; each lane's own frames stay in order."""
    workers = draw(st.integers(1, most_lanes))
    lanes_each = draw(st.integers(1, 3))
    queues = []
    for worker in range(workers):
        lanes = []
        for place in range(lanes_each):
            lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
            cut = draw(st.sets(st.integers(0, 7), max_size=2))
            lanes.append(frames_of(worker * lanes_each + place, lengths, draw(st.booleans()), cut))
        shortest = min(map(len, lanes))
        queues.append([lane[:shortest] for lane in lanes])
    batches = []
    while any(queue[0] for queue in queues):
        worker = draw(st.sampled_from([index for index, queue in enumerate(queues) if queue[0]]))
        size = draw(st.integers(1, 9))
        batches.append([lane[:size] for lane in queues[worker]])
        queues[worker] = [lane[size:] for lane in queues[worker]]
    return batches


class Oracle:
    """The newest frames of a list of batches, and their trajectories, by brute force."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.frames = []

    def extend(self, lanes):
        steps = zip(*lanes, strict=True)
        self.frames = [*self.frames, *(frame for step in steps for frame in step)][-self.capacity :]

    def trajectories(self):
        """The steps held of each (lane, trajectory)."""
        held = {}
        for lane, trajectory, step, _ in self.frames:
            held.setdefault((lane, trajectory), []).append(step)
        assert all(steps == list(range(steps[0], steps[0] + len(steps))) for steps in held.values())
        return held


STACK = 3
CAPACITY = 50
PATHS = [("camera", "pixels"), ("next", "camera", "pixels"), ("far",), ("next", "far"), ("next", "sensors")]
SAMPLERS = {
    "random": fc.RandomSampler,
    "without replacement": fc.SamplerWithoutReplacement,
    "slices": lambda: fc.SliceSampler(slice_len=4, strict_length=False),
    "each trajectory once": lambda: fc.SliceSampler(slice_len=3, replacement=False),
    "windows": lambda: fc.SliceSampler(num_slices=4, over="windows", strict_length=False, pad_output=True),
    "priorities": lambda: fc.PrioritizedSampler(CAPACITY, 0.8, 0.6),
    "slices by priority": lambda: fc.PrioritizedSliceSampler(CAPACITY, 0.8, 0.6, slice_len=3),
    "n steps": lambda: fc.MultiStepSampler(gamma=0.9, n_steps=3),
}


def screens(lane, trajectory, step):
    """Distinct screens [..., 5, 7] uint8 of these frames; one before the first is like the first."""
    number = lane * 100 + trajectory * 10 + step.clip(min=0)
    return (number[..., None, None] * 7 + torch.arange(35).reshape(5, 7)).to(torch.uint8)


def stacked(lanes, generator, odd=0.1):
    """A batch whose observations are stacks, nested and not, a few of which share no screens with the others."""
    batch = batch_of(lanes)
    lane, trajectory, step = batch["observation"].long().unbind(-1)
    back = torch.arange(1 - STACK, 1)
    for path, ahead in ((), 0), (("next",), 1):
        pixels = screens(lane[..., None], trajectory[..., None], step[..., None] + ahead + back)
        pixels[torch.rand(batch.shape, generator=generator) < odd, 1] ^= 1
        batch[(*path, "camera", "pixels")] = pixels
        batch[(*path, "sensors")] = pixels[..., 0, :2].float() / 3 - 1
        batch[(*path, "far")] = pixels.clone()
    batch["next", "reward"] = step[..., None].float()
    return batch


def batches(count=8, odd=0.1):
    lanes = [frames_of(lane, [5, 3, 7, 4, 6, 9] * 3, cut={1}) for lane in range(3)]
    generator = torch.Generator().manual_seed(0)
    return [stacked([lane[6 * n : 6 * n + 6] for lane in lanes], generator, odd) for n in range(count)]


def noisy(batch, generator):
    noise = {path: torch.rand(batch[path].shape, generator=generator) for path in PATHS}
    return batch.clone().update({path: (leaf * 256).to(batch[path].dtype) for path, leaf in noise.items()})


def made(stack, sampler="random", kind=fc.LazyTensorStorage, compact_obs=False, prefetch=None, **options):
    return fc.ReplayBuffer(
        storage=kind(CAPACITY, ndim=2, compact_obs=compact_obs, frame_stack=stack, **options), batch_size=12,
        sampler=SAMPLERS[sampler](), prefetch=prefetch, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def both(*args, **kwargs):
    """A buffer with whole stacks, and one that stores frames once, which draw the same samples."""
    return made(None, *args, **kwargs), made(STACK, *args, **kwargs)


def extend(buffers, batch):
    for buffer in buffers:
        buffer.extend(batch)


def check_uses(storage):
    """Whether the planes in use are those of the rows; each number is in use, free, or was never used."""
    if storage._held is None:
        return
    rows, shared = storage._held
    expected = {pool: np.zeros(len(pool._uses), np.int64) for pool in shared.pools}
    for pool, numbers in shared.numbers(rows.tensor):
        np.add.at(expected[pool], numbers.reshape(-1), 1)
    for pool, used in expected.items():
        assert (used[1:] == pool._uses[1:]).all()
        assert not pool.memory.rows[0].any()
        known = [0, *np.flatnonzero(used[1:]) + 1, *pool._free, *range(pool._end, len(pool._uses))]
        assert sorted(known) == list(range(len(pool._uses)))


def check_alike(plain, shared):
    assert_same(shared[:].clone(), plain[:].clone())
    assert_same(shared.sample().clone(), plain.sample().clone())
    check_uses(shared.storage)

"""Frames of many lanes, cut into batches in many ways, and a ring by brute force.

The observation of a frame is (lane, trajectory, step), that of its ``next`` is (lane, trajectory, step + 1).
"""

import torch
from hypothesis import strategies as st
from tensordict import TensorDict


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

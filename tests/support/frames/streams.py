"""Batches as a collector would deliver them, without an environment."""

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

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

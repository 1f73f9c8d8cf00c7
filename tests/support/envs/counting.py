"""An environment that counts, so that every batch can be written down by hand.

The observation is (lane, episode, step). A lane of a batch is written as one word per row: ``0.2`` is episode 0,
step 2; ``0.2t`` ends it by termination, ``0.2c`` by truncation, ``0.2b`` by both at once; ``0.3=t`` is a row of a lane
that stays finished.
"""

import functools

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.envs import TorchEnvBase, Transition
from tests.support.compare import leaves

OBSERVATIONS = spaces.Box(0, 1e6, (3,), np.float32)
ACTIONS = spaces.Discrete(3)


class Counting(gymnasium.Env):
    """Episode ``e`` lasts ``lengths[e % len(lengths)]`` steps; those in `truncated` end by truncation."""

    observation_space = OBSERVATIONS
    action_space = ACTIONS

    def __init__(self, lane=0, lengths=(3, 2), truncated=()):
        self.lane = lane
        self.lengths = lengths
        self.truncated = truncated
        self.episode = -1
        self.count = 0

    def _observation(self):
        return np.array([self.lane, self.episode, self.count], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        return self._observation(), {}

    def step(self, action):
        assert self.count < self.lengths[self.episode % len(self.lengths)], "stepped after its end"
        reward = 10 * self.episode + self.count + action / 4
        self.count += 1
        ended = self.count >= self.lengths[self.episode % len(self.lengths)]
        cut = self.episode in self.truncated
        return self._observation(), reward, ended and not cut, ended and cut, {"left": self.count * 2}


class TorchCounting(TorchEnvBase):
    """The same in Torch: `lanes` are the keyword arguments of one `Counting` each."""

    observation_space = OBSERVATIONS
    action_space = ACTIONS

    def __init__(self, lanes, num_envs=None):
        super().__init__(num_envs)
        self.lanes = [Counting(lane, **lane_kwargs) for lane, lane_kwargs in enumerate(lanes)]

    def reset(self, key, params):
        place = torch.stack([key.lanes, key.numbers, torch.zeros_like(key.lanes)], -1)
        return place, place.float()

    def step(self, key, place, action, params):
        lane, episode, count = place.unbind(-1)
        lengths = [self.lanes[i].lengths[e % len(self.lanes[i].lengths)] for i, e in zip(lane, episode, strict=True)]
        ended = count + 1 >= torch.tensor(lengths)
        cut = torch.tensor([int(e) in self.lanes[i].truncated for i, e in zip(lane, episode, strict=True)])
        moved = torch.stack([lane, episode, count + 1], -1)
        reward = (10 * episode + count + action / 4).float()
        return Transition(moved, moved.float(), reward, ended & ~cut, ended & cut)


def make_counting(backend, *lanes, batched=True, **kwargs):
    """One environment per dict in `lanes`: separate ones, a SyncVectorEnv, or one in Torch."""
    if backend == "torch":
        return TorchCounting(lanes, len(lanes) if batched else None)
    factories = [functools.partial(Counting, lane, **lane_kwargs) for lane, lane_kwargs in enumerate(lanes)]
    if not batched:
        return fc.make_env(factories[0], **kwargs)
    if backend == "vector":
        return fc.make_env(SyncVectorEnv(factories, autoreset_mode=AutoresetMode.DISABLED), **kwargs)
    return fc.make_env(factories, **kwargs)


def always(action):
    return fc.torch_policy(lambda observation: torch.full((len(observation),), action))


def expected(*lanes, actions, batched=True, total=None):
    """Every leaf but ``action`` and ``policy_version``, from the lanes' words; `actions` is the batch's."""
    actions = actions.reshape(len(lanes), -1)
    rows = [[_row(i, word, int(actions[i, t]), total or len(lanes)) for t, word in enumerate(lane.split())]
            for i, lane in enumerate(lanes)]  # fmt: skip
    columns = {path: torch.stack([torch.stack([row[path] for row in lane]) for lane in rows]) for path in rows[0][0]}
    return columns if batched else {path: column[0] for path, column in columns.items()}


def _row(lane, word, action, total):
    stays, end = "=" in word, word[-1] if word[-1] in "tcb" else ""
    episode, step = map(int, word.rstrip("tcb").rstrip("=").split("."))
    flags = {"terminated": end in ("t", "b"), "truncated": end in ("c", "b"), "done": end != ""}
    after = step if stays else step + 1
    row = {("observation",): [lane, episode, step], ("next", "observation"): [lane, episode, after]}
    row = {path: torch.tensor(value, dtype=torch.float32) for path, value in row.items()}
    row["next", "reward"] = torch.tensor([0.0 if stays else 10 * episode + step + action / 4])
    row |= {("next", name): torch.tensor([flag]) for name, flag in flags.items()}
    row |= {(name,): torch.tensor([flag and stays]) for name, flag in flags.items()}
    counters = {"traj_ids": episode * total + lane, "step": step, "lane": lane}
    return row | {("collector", name): torch.tensor(value) for name, value in counters.items()}


def check(batch, *lanes, batched=True, ignored=()):
    """The batch is what the lanes' words say, to the bit, and nothing else."""
    got = leaves(batch)
    wanted = expected(*lanes, actions=batch["action"], batched=batched)
    assert batch.batch_size == wanted["next", "done"].shape[:-1]
    assert got.keys() - {(name,) for name in ignored} == wanted.keys() | {("action",), ("collector", "policy_version")}
    for path, leaf in wanted.items():
        assert got[path].dtype == leaf.dtype, path
        assert torch.equal(got[path], leaf), f"{path}: {got[path].tolist()} is not {leaf.tolist()}"

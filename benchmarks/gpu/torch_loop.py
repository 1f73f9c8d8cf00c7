"""The limit for Torch environments: a Torch loop over the same CartPole and network, with preallocated columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Columns = dict[str, Tensor]  # each [T, P, ...]


class TorchLoop:
    """`length` steps of all lanes per run, with the columns of a batch.

    Args:
        env: a `funcollect.envs` CartPole in Torch, whose dynamics are called directly.
        module: from observations [P, 4] to logits [P, 2].
        length: T.
    """

    def __init__(self, env: Any, module: nn.Module, length: int) -> None:
        self._env, self._module, self._length = env, module, length
        zeros = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._lane = torch.arange(env.num_envs, device=env.device)
        self._elapsed, self._episode = zeros, zeros.clone()
        self._physics = self._start()
        self._columns: Columns = {}

    def run(self) -> int:
        with torch.no_grad():
            for t in range(self._length):
                row = self._step()
                columns = self._columns or self._allocate(row)
                for name, value in row.items():
                    columns[name][t] = value
        if self._env.device.type == "cuda":
            torch.cuda.synchronize()
        return self._length * int(self._env.num_envs)

    def close(self) -> None:
        self._columns.clear()

    def _allocate(self, row: Columns) -> Columns:
        self._columns = {name: value.new_empty(self._length, *value.shape) for name, value in row.items()}
        return self._columns

    def _start(self) -> Tensor:
        shape = (self._env.num_envs, self._env.draws)
        physics: Tensor = self._env.start(torch.rand(shape, dtype=torch.float64, device=self._env.device))
        return physics

    def _step(self) -> Columns:
        """One step of all lanes, with a fresh start at hand for each, as in `scans.body`."""
        env, lanes, elapsed, episode = self._env, self._env.num_envs, self._elapsed, self._episode
        observation = env.observe(self._physics)
        action, log_prob = _act(self._module, observation)
        moved, reward, terminated = env.advance(self._physics, action)
        truncated = elapsed + 1 >= env.max_episode_steps
        done = terminated | truncated
        self._physics = torch.where(done[:, None], self._start(), moved)
        self._elapsed = torch.where(done, 0, elapsed + 1)
        self._episode = episode + done
        return {
            "observation": observation,
            "action": action,
            "action_log_prob": log_prob,
            "next": env.observe(moved),
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
            "traj_ids": episode * lanes + self._lane,
            "step": elapsed,
        }


def _act(module: nn.Module, observation: Tensor) -> tuple[Tensor, Tensor]:
    """Actions [P] sampled by the Gumbel trick, which unlike `multinomial` waits for nothing, and log-probabilities."""
    logits = module(observation)
    action = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
    return action, torch.log_softmax(logits, -1).gather(-1, action[:, None])[:, 0]

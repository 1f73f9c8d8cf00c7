"""The limit for Torch environments: a Torch loop over the same dynamics and network, with preallocated columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Columns = dict[str, Tensor]  # each [T, P, ...]


class Draws:
    """Uniform numbers from Torch's own generator, in place of the library's keys."""

    def __init__(self, lane: Tensor) -> None:
        self._lane = lane

    def uniform(self, count: int) -> Tensor:
        return torch.rand((len(self._lane), count), dtype=torch.float64, device=self._lane.device)


class TorchLoop:
    """`length` steps of all lanes per run, with the columns of a batch.

    Args:
        env: a `funcollect.envs` environment in Torch, whose dynamics are called directly.
        module: from observations [P, n] to logits [P, actions], or to a pair (loc, scale) [P, actions].
        length: T.
    """

    def __init__(self, env: Any, module: nn.Module, length: int) -> None:
        self._env, self._module, self._length = env, module, length
        zeros = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._lane = torch.arange(env.num_envs, device=env.device)
        self._elapsed, self._episode = zeros, zeros.clone()
        self._env_state, self._observation = self._start()
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

    def _start(self) -> tuple[Tensor, Tensor]:
        started: tuple[Tensor, Tensor] = self._env.reset(Draws(self._lane), None)
        return started

    def _step(self) -> Columns:
        """One step of all lanes, with a fresh start at hand for each, as in `scans.body`."""
        env, lanes, elapsed, episode = self._env, self._env.num_envs, self._elapsed, self._episode
        observation = self._observation
        action, log_prob = _act(self._module, observation)
        moved, following, reward, terminated, *_ = env.step(None, self._env_state, action, None)
        truncated = elapsed + 1 >= env.max_episode_steps
        done = terminated | truncated
        env_state, root = self._start()
        self._env_state = torch.where(done[:, None], env_state, moved)
        self._observation = torch.where(done[:, None], root, following)
        self._elapsed = torch.where(done, 0, elapsed + 1)
        self._episode = episode + done
        return {
            "observation": observation,
            "action": action,
            "action_log_prob": log_prob,
            "next": following,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
            "traj_ids": episode * lanes + self._lane,
            "step": elapsed,
        }


class CapturedLoop(TorchLoop):
    """The same, all steps of a batch captured as one CUDA graph. Its columns are overwritten by the next run."""

    _graph: torch.cuda.CUDAGraph | None = None
    _begun: tuple[Tensor, ...] = ()  # where the graph reads its first state, and writes its last one

    def run(self) -> int:
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        torch.cuda.synchronize()
        return self._length * int(self._env.num_envs)

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            super().run()  # libraries set themselves up, and the columns are allocated
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        names = ("_env_state", "_observation", "_elapsed", "_episode")
        self._begun = tuple(getattr(self, name) for name in names)
        with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads, too
            for t in range(self._length):
                for name, value in self._step().items():
                    self._columns[name][t] = value
            for name, first in zip(names, self._begun, strict=True):
                first.copy_(getattr(self, name))
        return graph


def _act(module: nn.Module, observation: Tensor) -> tuple[Tensor, Tensor]:
    """Sample actions [P, ...]; choices by the Gumbel trick, which does not wait for the GPU as `multinomial` does."""
    logits = module(observation)
    if isinstance(logits, tuple):
        loc, scale = logits
        noise = torch.randn_like(loc)
        return loc + scale * noise, (-0.5 * noise**2 - scale.log() - 0.9189385).sum(-1)
    action = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
    return action, torch.log_softmax(logits, -1).gather(-1, action[:, None])[:, 0]

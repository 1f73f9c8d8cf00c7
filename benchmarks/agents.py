"""Frames per second over environments with several agents: ours, TorchRL's collector, and a loop by hand as the limit.

All run the 2x64 tanh network for all agents of `mpe/simple_spread_v3`, three of them, whose choices are sampled. `loop`
records for each agent what a batch of ours has: both observations, action, log-probability, reward and flags. A frame
is a step of one environment, with all its agents. TorchRL's collector has one environment, since it steps several over
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.contestants.networks import tanh_mlp
from benchmarks.contestants.peers import Batches
from benchmarks.harness.runner import Cell

OURS, TORCHRL = "funcollect", "torchrl"
NAME, AGENTS, WIDTH, CHOICES = "mpe/simple_spread_v3", 3, 18, 5
LANES, LENGTH = (1, 8), 100


def cells() -> Iterator[Cell]:
    for num_envs in LANES:
        contestants: dict[str, Any] = {OURS: partial(ours, num_envs), "loop": partial(AgentsLoop, num_envs)}
        if num_envs == 1:
            contestants[TORCHRL] = torchrl
        note = f"{LENGTH} steps of each environment per batch"
        yield Cell(name=f"pettingzoo/{NAME} {num_envs}", note=note, contestants=contestants)


def network() -> nn.Module:
    return tanh_mlp(WIDTH, CHOICES)


def parallel_env() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


def ours(num_envs: int) -> Batches:
    import funcollect as fc

    env = fc.make_env(f"pettingzoo/{NAME}", num_envs=num_envs)
    policy = fc.by_group({name: fc.torch_policy(network(), head=fc.heads.categorical) for name in env.groups})
    return Batches(fc.SyncDataCollector(env, policy, frames_per_batch=LENGTH * num_envs, total_frames=-1, seed=0))


def torchrl() -> Batches:
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torch.distributions import Categorical
    from torchrl.collectors import Collector
    from torchrl.envs import PettingZooWrapper

    logits = TensorDictModule(network(), [("agent", "observation")], [("agent", "logits")])
    head = ProbabilisticTensorDictModule(
        {"logits": ("agent", "logits")},
        [("agent", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=("agent", "action_log_prob"),
        default_interaction_type="random",
    )
    env = PettingZooWrapper(parallel_env(), categorical_actions=True)
    policy = ProbabilisticTensorDictSequential(logits, head)
    return Batches(Collector(env, policy, frames_per_batch=LENGTH, total_frames=-1))


class AgentsLoop:
    """`LENGTH` steps of P environments per run."""

    def __init__(self, num_envs: int) -> None:
        self._envs = [parallel_env() for _ in range(num_envs)]
        self._names, self._module = self._envs[0].possible_agents, network()
        self._seen = np.zeros((num_envs, AGENTS, WIDTH), np.float32)
        for lane in range(num_envs):
            self._begin(lane, seed=lane)

    def _begin(self, lane: int, seed: int | None = None) -> None:
        rows, _ = self._envs[lane].reset(seed=seed)
        self._seen[lane] = [rows[name] for name in self._names]

    def run(self) -> int:
        lead = LENGTH, len(self._envs), AGENTS
        observation, following = torch.empty(2, *lead, WIDTH)
        action, scores = torch.empty(lead, dtype=torch.int64), torch.empty(lead)
        rewards, ends = np.zeros(lead, np.float32), np.zeros((*lead, 2), bool)
        with torch.inference_mode():
            for t in range(LENGTH):
                rows = torch.from_numpy(self._seen)
                observation[t] = rows
                logs = torch.log_softmax(self._module(rows.flatten(0, 1)), -1)
                chosen = torch.multinomial(logs.exp(), 1)
                scores[t], action[t] = logs.gather(-1, chosen).view(lead[1:]), chosen.view(lead[1:])
                self._step(action[t].numpy(), rewards[t], ends[t])
                following[t] = rows
                for lane, env in enumerate(self._envs):
                    if not env.agents:
                        self._begin(lane)
        return LENGTH * len(self._envs)

    def _step(self, action: Any, rewards: Any, ends: Any) -> None:
        for lane, env in enumerate(self._envs):
            shown, reward, terminated, truncated, _ = env.step(dict(zip(self._names, action[lane], strict=True)))
            for place, name in enumerate(self._names):
                self._seen[lane, place], rewards[lane, place] = shown[name], reward[name]
                ends[lane, place] = terminated[name], truncated[name]

    def close(self) -> None:
        for env in self._envs:
            env.close()

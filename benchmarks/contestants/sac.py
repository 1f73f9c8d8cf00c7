"""Soft actor-critic at one frame per update, with CleanRL's networks and numbers: one program by hand, one with ours.

Both have the same learner; they differ in who steps the environment and keeps the frames. By hand that is a loop over
Gymnasium's environment and Stable-Baselines3's buffer, as in CleanRL's `sac_continuous_action.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

ENV = "Hopper-v5"
HIDDEN, BATCH, CAPACITY = 256, 256, 100_000
GAMMA, TAU = 0.99, 0.005
FRAMES = 20  # per run
BEFORE = 1_000  # frames collected before the first update
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # observation, action, next observation, reward, terminated
# From an actor, an environment and a seed: a function that makes and keeps a frame, and returns one that samples.
Collector = Callable[["Actor", str, int], Callable[[], Callable[[], Batch]]]


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


class Actor(nn.Module):
    """From observations to the mean and the scale of the action before it is squashed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = network(inputs, 2 * outputs)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self.net(observation.float()).chunk(2, -1)
        return loc, (-5 + 3.5 * (torch.tanh(scale) + 1)).exp()

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in (-1, 1), and their log-probabilities [P, 1]."""
        loc, scale = self(observation)
        noise = torch.randn_like(loc)
        raw = loc + scale * noise
        density = -0.5 * noise * noise - scale.log() - 0.9189385
        slope = 2 * (0.6931472 - raw - softplus(-2 * raw))
        return raw.tanh(), (density - slope).sum(-1, keepdim=True)


class Learner:
    """The networks and one update of each."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.actor = Actor(inputs, outputs)
        self._critics = nn.ModuleList([network(inputs + outputs, 1) for _ in range(2)])
        self._targets = nn.ModuleList([network(inputs + outputs, 1) for _ in range(2)])
        self._targets.load_state_dict(self._critics.state_dict())
        self._log_temperature = torch.zeros(1, requires_grad=True)
        self._entropy = -float(outputs)
        self._of_critics = torch.optim.Adam(self._critics.parameters(), 1e-3)
        self._of_actor = torch.optim.Adam(self.actor.parameters(), 3e-4)
        self._of_temperature = torch.optim.Adam([self._log_temperature], 1e-3)

    @staticmethod
    def _values(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> list[Tensor]:
        both = torch.cat((observation, action), -1)
        return [critic(both) for critic in critics]

    def update(self, batch: Batch) -> None:
        observation, action, following, reward, terminated = batch
        temperature = self._log_temperature.exp().detach()
        with torch.no_grad():
            chosen, log_prob = self.actor.sample(following)
            value = torch.minimum(*self._values(self._targets, following, chosen)) - temperature * log_prob
            target = reward + (1 - terminated) * GAMMA * value
        loss = sum(mse_loss(value, target) for value in self._values(self._critics, observation, action))
        descend(self._of_critics, loss)
        chosen, log_prob = self.actor.sample(observation)
        value = torch.minimum(*self._values(self._critics, observation, chosen))
        descend(self._of_actor, (temperature * log_prob - value).mean())
        descend(self._of_temperature, (-self._log_temperature.exp() * (log_prob.detach() + self._entropy)).mean())
        for own, other in zip(self._targets.parameters(), self._critics.parameters(), strict=True):
            own.data.lerp_(other.data, TAU)


def descend(optimizer: torch.optim.Optimizer, loss: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Program:
    """`FRAMES` frames per run, each followed by an update unless this is the time before learning."""

    def __init__(self, collector: Collector, *, learns: bool, env_id: str = ENV, seed: int = 0) -> None:
        env = gymnasium.make(env_id)
        self._learner = Learner(env.observation_space.shape[0], env.action_space.shape[0], seed)
        self.actor = self._learner.actor
        self._collect, self._learns = collector(self.actor, env_id, seed), learns
        for _ in range(BEFORE):
            self._collect()

    def run(self) -> int:
        for _ in range(FRAMES):
            sample = self._collect()
            if self._learns:
                self._learner.update(sample())
        return FRAMES

    def close(self) -> None:
        pass


def by_hand(actor: Actor, env_id: str, seed: int) -> Callable[[], Callable[[], Batch]]:
    """A function that makes and keeps one frame, and returns one that samples."""
    from stable_baselines3.common.buffers import ReplayBuffer

    env = gymnasium.make(env_id, disable_env_checker=True)
    options: dict[str, Any] = {"device": "cpu", "handle_timeout_termination": False}
    buffer = ReplayBuffer(CAPACITY, env.observation_space, env.action_space, **options)
    observation = env.reset(seed=seed)[0]

    def sample() -> Batch:
        data = buffer.sample(BATCH)
        return data.observations.float(), data.actions, data.next_observations.float(), data.rewards, data.dones

    def collect() -> Callable[[], Batch]:
        nonlocal observation
        with torch.no_grad():
            action = actor.sample(torch.from_numpy(observation[None]))[0][0].numpy()
        following, reward, terminated, truncated, info = env.step(action)
        buffer.add(observation, following, action, np.float32(reward), np.float32(terminated), [info])  # type: ignore[arg-type]
        observation = env.reset()[0] if terminated or truncated else following
        return sample

    return collect


def ours(actor: Actor, env_id: str, seed: int) -> Callable[[], Callable[[], Batch]]:
    """The same with `funcollect.step` and our buffer."""
    import funcollect as fc

    env = fc.make_env(env_id, num_envs=1)
    policy = fc.torch_policy(actor, head=fc.heads.tanh_normal)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(CAPACITY), batch_size=BATCH)
    state = fc.init(env, policy, seed=seed)

    def sample() -> Batch:
        data = buffer.sample()
        after = data["next"]
        observation, following = data["observation"].float(), after["observation"].float()
        return observation, data["action"], following, after["reward"], after["terminated"].float()

    def collect() -> Callable[[], Batch]:
        nonlocal state
        state, batch = fc.step(env, policy, state)
        buffer.extend(batch)
        return sample

    return collect

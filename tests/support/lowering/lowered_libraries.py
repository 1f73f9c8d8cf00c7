"""Modules of TorchRL and Stable-Baselines3 to lower, as `lowered_modules.POLICIES`."""

import gymnasium
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn
from torchrl.modules import DuelingCnnDQNet, GRUModule, LSTMModule, NoisyLinear

from tests.support.lowering.lowered_modules import tensordict, vectors


class Deterministic(nn.Module):
    """An SB3 policy's forward without sampling: (actions, values, log-probabilities)."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, observation):
        return self.policy(observation, deterministic=True)


def actor_critic(action_space):
    space = gymnasium.spaces.Box(-1.0, 1.0, (5,))
    return Deterministic(ActorCriticPolicy(space, action_space, lambda _: 1e-3))


def dueling():
    """Call a lazy module of TorchRL once, which creates its parameters."""
    network = DuelingCnnDQNet(4, cnn_kwargs={"num_cells": [8, 8, 8]}, mlp_kwargs={"num_cells": 16, "depth": 1})
    network(torch.zeros(1, 4, 84, 84))
    return network


def flags(n):
    return torch.arange(n)[:, None] % 3 == 0


LIBRARIES = {
    "torchrl DuelingCnnDQNet": (dueling, vectors(4, 84, 84)),
    "torchrl LSTMModule": (
        lambda: LSTMModule(5, 6, in_key="observation", out_key="features"),
        tensordict(
            observation=vectors(5), recurrent_state_h=vectors(1, 6), recurrent_state_c=vectors(1, 6), is_init=flags
        ),
    ),
    "torchrl GRUModule": (
        lambda: GRUModule(5, 6, in_key="observation", out_key="features"),
        tensordict(observation=vectors(5), recurrent_state=vectors(1, 6), is_init=flags),
    ),
    "torchrl NoisyLinear": (lambda: nn.Sequential(NoisyLinear(5, 16), nn.ReLU(), NoisyLinear(16, 3)), vectors(5)),
    "sb3 ActorCriticPolicy, discrete": (lambda: actor_critic(gymnasium.spaces.Discrete(3)), vectors(5)),
    "sb3 ActorCriticPolicy, box": (lambda: actor_critic(gymnasium.spaces.Box(-1.0, 1.0, (2,))), vectors(5)),
}

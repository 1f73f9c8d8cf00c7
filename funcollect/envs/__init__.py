"""Environments: adapters over what people use, and batched ones written in Torch."""

from funcollect.envs.ale import from_ale
from funcollect.envs.classic_control import CartPole, Pendulum
from funcollect.envs.envpool_env import from_envpool
from funcollect.envs.gymnasium_env import from_gymnasium
from funcollect.envs.tensor_env import TorchEnv
from funcollect.envs.torchrl_env import from_torchrl

__all__ = [
    "CartPole",
    "Pendulum",
    "TorchEnv",
    "from_ale",
    "from_envpool",
    "from_gymnasium",
    "from_torchrl",
]

"""Environments: adapters over what people use, and batched ones written in Torch."""

from funcollect.envs.classic_control import CartPole, Pendulum
from funcollect.envs.gymnasium_env import from_gymnasium
from funcollect.envs.tensor_env import TorchEnv
from funcollect.envs.torchrl_env import from_torchrl

__all__ = ["CartPole", "Pendulum", "TorchEnv", "from_gymnasium", "from_torchrl"]

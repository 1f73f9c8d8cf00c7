"""Environments: adapters over what people use, and batched ones written in Torch or JAX."""

from funcollect.envs.ale import from_ale
from funcollect.envs.brax_env import from_brax
from funcollect.envs.classic_control import CartPole, Pendulum
from funcollect.envs.envpool_env import from_envpool
from funcollect.envs.functional_env import from_functional
from funcollect.envs.functions_env import from_functions
from funcollect.envs.gymnasium_env import from_gymnasium
from funcollect.envs.gymnax_env import from_gymnax
from funcollect.envs.jax_env import Transition
from funcollect.envs.jumanji_env import from_jumanji
from funcollect.envs.navix_env import from_navix
from funcollect.envs.pgx_env import from_pgx
from funcollect.envs.playground_env import from_playground
from funcollect.envs.tensor_env import TorchEnv
from funcollect.envs.torchrl_env import from_torchrl

__all__ = [
    "CartPole",
    "Pendulum",
    "TorchEnv",
    "Transition",
    "from_ale",
    "from_brax",
    "from_envpool",
    "from_functional",
    "from_functions",
    "from_gymnasium",
    "from_gymnax",
    "from_jumanji",
    "from_navix",
    "from_pgx",
    "from_playground",
    "from_torchrl",
]

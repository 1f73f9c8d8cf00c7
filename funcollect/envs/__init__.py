"""Environments: adapters for other libraries, and base classes for your own, in Python, Torch or JAX."""

from funcollect.envs.envpool_env import from_envpool
from funcollect.envs.gymnasium_envs.adapter import from_gymnasium
from funcollect.envs.gymnasium_envs.ale import from_ale
from funcollect.envs.host.host_env import HostEnvBase, SimulatorsBase, observation_rows
from funcollect.envs.jax_envs.instances import from_brax, from_jumanji, from_playground
from funcollect.envs.jax_envs.jax_env import JaxEnvBase, from_functions
from funcollect.envs.jax_envs.like_gymnax import from_craftax, from_gymnax, from_jaxmarl
from funcollect.envs.jax_envs.suites import from_functional, from_navix, from_pgx, from_xminigrid
from funcollect.envs.pettingzoo_env import from_pettingzoo
from funcollect.envs.torch_env import CartPole, Pendulum, TorchEnvBase
from funcollect.envs.torch_vector_env import from_torch_vector_env
from funcollect.envs.torchrl_env import from_torchrl
from funcollect.envs.vmas_env import from_vmas
from funcollect.keys import LaneKeys
from funcollect.protocols import (
    DeviceEnv,
    HostEnv,
    JaxEnv,
    Outcome,
    Renderer,
    SavableSnapshots,
    Simulators,
    SnapshotSimulators,
    TorchEnv,
    Transition,
)
from funcollect.specs import ActionSpec, Group, observation_leaves

__all__ = [
    "ActionSpec", "CartPole", "DeviceEnv", "Group", "HostEnv", "HostEnvBase", "JaxEnv", "JaxEnvBase", "LaneKeys",
    "Outcome", "Pendulum", "Renderer", "SavableSnapshots", "Simulators", "SimulatorsBase", "SnapshotSimulators",
    "TorchEnv", "TorchEnvBase", "Transition", "from_ale", "from_brax", "from_craftax", "from_envpool",
    "from_functional", "from_functions", "from_gymnasium", "from_gymnax", "from_jaxmarl", "from_jumanji",
    "from_navix", "from_pettingzoo", "from_pgx", "from_playground", "from_torch_vector_env", "from_torchrl",
    "from_vmas", "from_xminigrid", "observation_leaves", "observation_rows",
]  # fmt: skip

"""The protocols of environments and policies: the loops accept any class with these members."""

from funcollect.protocols.environments import (
    Backend,
    Column,
    Env,
    Forking,
    HostEnv,
    JaxEnv,
    Outcome,
    Seeding,
    Simulators,
    SnapshotSimulators,
    Starts,
    TorchEnv,
    Transition,
    is_env,
)
from funcollect.protocols.policies import Actor, ActorInputs, Columns, Exploration, Policy, is_policy

__all__ = [
    "Actor",
    "ActorInputs",
    "Backend",
    "Column",
    "Columns",
    "Env",
    "Exploration",
    "Forking",
    "HostEnv",
    "JaxEnv",
    "Outcome",
    "Policy",
    "Seeding",
    "Simulators",
    "SnapshotSimulators",
    "Starts",
    "TorchEnv",
    "Transition",
    "is_env",
    "is_policy",
]

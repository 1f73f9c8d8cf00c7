"""Functional rollouts for reinforcement learning.

Pure functions (`init`, `reset`, `step`, `rollout`) thread an explicit collector state; collectors, trajectories and
environments stand on top of them. Names are resolved on first use, and JAX is imported only where it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcollect import envs, errors, interop, plots, testing
    from funcollect.collectors.sync import SyncDataCollector
    from funcollect.core import traced
    from funcollect.core.api import close, fork, init, reset, rollout, step
    from funcollect.core.differentiable import differentiable_rollout
    from funcollect.core.evaluate import evaluate
    from funcollect.core.plan import Plan, explain
    from funcollect.core.routes import lower_policy
    from funcollect.core.state import CollectorState
    from funcollect.core.traced_batch import deliver
    from funcollect.envs.registry import make_env
    from funcollect.errors import (
        BridgeError,
        CheckError,
        ClosedError,
        EnvError,
        EvaluationError,
        FuncollectError,
        LoweringError,
        PluginError,
        PolicyError,
        ReplayError,
        StaleStateError,
    )
    from funcollect.interop.lowering import lower
    from funcollect.plots.recording import record
    from funcollect.policies import heads
    from funcollect.policies.jax_policy import jax_policy
    from funcollect.policies.opaque import tensordict_policy
    from funcollect.policies.plugins import make_policy
    from funcollect.policies.random_policy import random_policy
    from funcollect.policies.torch_policy import torch_policy
    from funcollect.progress import track
    from funcollect.specs import Env, ExplorationType, Policy
    from funcollect.trajectories.advantages import gae
    from funcollect.trajectories.split import split_trajectories
    from funcollect.trajectories.stats import EpisodeStats, episode_stats

_HOMES = {
    "funcollect.collectors.sync": ["SyncDataCollector"],
    "funcollect.envs.registry": ["make_env"],
    "funcollect.errors": [
        "BridgeError",
        "CheckError",
        "ClosedError",
        "EnvError",
        "EvaluationError",
        "FuncollectError",
        "LoweringError",
        "PluginError",
        "PolicyError",
        "ReplayError",
        "StaleStateError",
    ],
    "funcollect.interop.lowering": ["lower"],
    "funcollect.plots.recording": ["record"],
    "funcollect.policies.jax_policy": ["jax_policy"],
    "funcollect.policies.opaque": ["tensordict_policy"],
    "funcollect.policies.plugins": ["make_policy"],
    "funcollect.policies.random_policy": ["random_policy"],
    "funcollect.policies.torch_policy": ["torch_policy"],
    "funcollect.progress": ["track"],
    "funcollect.core.api": ["close", "fork", "init", "reset", "rollout", "step"],
    "funcollect.core.differentiable": ["differentiable_rollout"],
    "funcollect.core.evaluate": ["evaluate"],
    "funcollect.core.plan": ["Plan", "explain"],
    "funcollect.core.routes": ["lower_policy"],
    "funcollect.core.state": ["CollectorState"],
    "funcollect.core.traced_batch": ["deliver"],
    "funcollect.specs": ["Env", "ExplorationType", "Policy"],
    "funcollect.trajectories.advantages": ["gae"],
    "funcollect.trajectories.split": ["split_trajectories"],
    "funcollect.trajectories.stats": ["EpisodeStats", "episode_stats"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {
    "envs": "funcollect.envs",
    "errors": "funcollect.errors",
    "heads": "funcollect.policies.heads",
    "interop": "funcollect.interop",
    "plots": "funcollect.plots",
    "testing": "funcollect.testing",
    "traced": "funcollect.core.traced",
}

__version__ = "0.1.0"
__all__ = [
    "BridgeError",
    "CheckError",
    "ClosedError",
    "CollectorState",
    "Env",
    "EnvError",
    "EpisodeStats",
    "EvaluationError",
    "ExplorationType",
    "FuncollectError",
    "LoweringError",
    "Plan",
    "PluginError",
    "Policy",
    "PolicyError",
    "ReplayError",
    "StaleStateError",
    "SyncDataCollector",
    "close",
    "deliver",
    "differentiable_rollout",
    "envs",
    "episode_stats",
    "errors",
    "evaluate",
    "explain",
    "fork",
    "gae",
    "heads",
    "init",
    "interop",
    "jax_policy",
    "lower",
    "lower_policy",
    "make_env",
    "make_policy",
    "plots",
    "random_policy",
    "record",
    "reset",
    "rollout",
    "split_trajectories",
    "step",
    "tensordict_policy",
    "testing",
    "torch_policy",
    "traced",
    "track",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'funcollect' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

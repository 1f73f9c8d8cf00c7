"""Functional rollouts for reinforcement learning.

Pure functions (`init`, `reset`, `step`, `rollout`) thread an explicit collector state; collectors, trajectories and
environments stand on top of them. Names are resolved on first use, and JAX is imported only where it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from funcollect.faulty_fusions import avoid_faulty_fusions as _avoid_faulty_fusions

if TYPE_CHECKING:
    from funcollect import envs, errors, interop, plots, testing
    from funcollect.buffers import jax_ring, ring, samplers, storages
    from funcollect.buffers.reader import ReplayReader
    from funcollect.buffers.replay import ReplayBuffer
    from funcollect.buffers.samplers import (
        MultiStepSampler,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        SamplerWithoutReplacement,
        SliceSampler,
    )
    from funcollect.buffers.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage
    from funcollect.collectors.multi import (
        MultiAsyncCollector,
        MultiaSyncDataCollector,
        MultiSyncCollector,
        MultiSyncDataCollector,
    )
    from funcollect.collectors.ray_collector import RayCollector
    from funcollect.collectors.sync import Collector, SyncDataCollector
    from funcollect.core import traced
    from funcollect.core.api import close, fork, init, recover, reset, rollout, step
    from funcollect.core.differentiable import differentiable_rollout
    from funcollect.core.evaluate import evaluate
    from funcollect.core.explain import Plan, explain
    from funcollect.core.routes import lower_policy
    from funcollect.core.state import CollectorState
    from funcollect.core.traced_step.batch import deliver
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
        WorkerError,
    )
    from funcollect.interop.lowering import lower
    from funcollect.keys import Noise
    from funcollect.plots.recording import record
    from funcollect.policies import heads
    from funcollect.policies.base import PolicyBase
    from funcollect.policies.jax_functions.jax_policy import jax_policy
    from funcollect.policies.plugins import make_policy
    from funcollect.policies.random_policy import random_policy
    from funcollect.policies.tensordict_modules.tensordict_policy import tensordict_policy
    from funcollect.policies.torch_modules.torch_policy import torch_policy
    from funcollect.progress import track
    from funcollect.protocols import Env, Exploration, Policy
    from funcollect.specs import ExplorationType
    from funcollect.trajectories.advantages import gae
    from funcollect.trajectories.multi_step import MultiStep
    from funcollect.trajectories.split import split_trajectories
    from funcollect.trajectories.stats import EpisodeStats, episode_stats
    from funcollect.tree import NAMESPACE

_HOMES = {
    "funcollect.collectors.multi": [
        "MultiAsyncCollector",
        "MultiSyncCollector",
        "MultiSyncDataCollector",
        "MultiaSyncDataCollector",
    ],
    "funcollect.collectors.ray_collector": ["RayCollector"],
    "funcollect.buffers.reader": ["ReplayReader"],
    "funcollect.buffers.replay": ["ReplayBuffer"],
    "funcollect.buffers.samplers": [
        "MultiStepSampler",
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "RandomSampler",
        "SamplerWithoutReplacement",
        "SliceSampler",
    ],
    "funcollect.buffers.storages": ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage"],
    "funcollect.collectors.sync": ["Collector", "SyncDataCollector"],
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
        "WorkerError",
    ],
    "funcollect.interop.lowering": ["lower"],
    "funcollect.plots.recording": ["record"],
    "funcollect.policies.jax_functions.jax_policy": ["jax_policy"],
    "funcollect.policies.tensordict_modules.tensordict_policy": ["tensordict_policy"],
    "funcollect.policies.base": ["PolicyBase"],
    "funcollect.policies.plugins": ["make_policy"],
    "funcollect.policies.random_policy": ["random_policy"],
    "funcollect.policies.torch_modules.torch_policy": ["torch_policy"],
    "funcollect.progress": ["track"],
    "funcollect.core.api": ["close", "fork", "init", "recover", "reset", "rollout", "step"],
    "funcollect.core.differentiable": ["differentiable_rollout"],
    "funcollect.core.evaluate": ["evaluate"],
    "funcollect.core.explain": ["Plan", "explain"],
    "funcollect.core.routes": ["lower_policy"],
    "funcollect.core.state": ["CollectorState"],
    "funcollect.core.traced_step.batch": ["deliver"],
    "funcollect.keys": ["Noise"],
    "funcollect.protocols": ["Env", "Exploration", "Policy"],
    "funcollect.specs": ["ExplorationType"],
    "funcollect.trajectories.advantages": ["gae"],
    "funcollect.trajectories.multi_step": ["MultiStep"],
    "funcollect.trajectories.split": ["split_trajectories"],
    "funcollect.trajectories.stats": ["EpisodeStats", "episode_stats"],
    "funcollect.tree": ["NAMESPACE"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {
    "envs": "funcollect.envs",
    "errors": "funcollect.errors",
    "heads": "funcollect.policies.heads",
    "interop": "funcollect.interop",
    "jax_ring": "funcollect.buffers.jax_ring",
    "plots": "funcollect.plots",
    "ring": "funcollect.buffers.ring",
    "samplers": "funcollect.buffers.samplers",
    "storages": "funcollect.buffers.storages",
    "testing": "funcollect.testing",
    "traced": "funcollect.core.traced",
}

_avoid_faulty_fusions()  # before the first computation, which may be the user's own

__version__ = "0.1.0"
__all__ = [
    "NAMESPACE",
    "BridgeError",
    "CheckError",
    "ClosedError",
    "Collector",
    "CollectorState",
    "Env",
    "EnvError",
    "EpisodeStats",
    "EvaluationError",
    "Exploration",
    "ExplorationType",
    "FuncollectError",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "LoweringError",
    "MultiAsyncCollector",
    "MultiStep",
    "MultiStepSampler",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "Noise",
    "Plan",
    "PluginError",
    "Policy",
    "PolicyBase",
    "PolicyError",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "RayCollector",
    "ReplayBuffer",
    "ReplayError",
    "ReplayReader",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "StaleStateError",
    "SyncDataCollector",
    "WorkerError",
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
    "jax_ring",
    "lower",
    "lower_policy",
    "make_env",
    "make_policy",
    "plots",
    "random_policy",
    "record",
    "recover",
    "reset",
    "ring",
    "rollout",
    "samplers",
    "split_trajectories",
    "step",
    "storages",
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

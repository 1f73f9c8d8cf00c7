"""Functional rollouts for reinforcement learning.

Pure functions (`init`, `reset`, `step`, `rollout`) take an explicit collector state and return the next one. Collectors
and replay buffers are built on top. A public name is imported on its first use, and JAX only where it is needed.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from funcollect.faulty_fusions import avoid_faulty_fusions as _avoid_faulty_fusions

if TYPE_CHECKING:  # `__getattr__` reads these lines, and runs the import of a name on its first use
    from funcollect import datasets as datasets
    from funcollect import envs as envs
    from funcollect import errors as errors
    from funcollect import interop as interop
    from funcollect import plots as plots
    from funcollect import running_statistics as running_statistics
    from funcollect import testing as testing
    from funcollect.buffers import jax_ring as jax_ring
    from funcollect.buffers import ring as ring
    from funcollect.buffers import samplers as samplers
    from funcollect.buffers import storages as storages
    from funcollect.buffers.hindsight import hindsight as hindsight
    from funcollect.buffers.keyed_replay import TensorDictPrioritizedReplayBuffer as TensorDictPrioritizedReplayBuffer
    from funcollect.buffers.keyed_replay import TensorDictReplayBuffer as TensorDictReplayBuffer
    from funcollect.buffers.mixed import mix as mix
    from funcollect.buffers.reader import ReplayReader as ReplayReader
    from funcollect.buffers.replay import ReplayBuffer as ReplayBuffer
    from funcollect.buffers.samplers import MultiStepSampler as MultiStepSampler
    from funcollect.buffers.samplers import PrioritizedSampler as PrioritizedSampler
    from funcollect.buffers.samplers import PrioritizedSliceSampler as PrioritizedSliceSampler
    from funcollect.buffers.samplers import RandomSampler as RandomSampler
    from funcollect.buffers.samplers import RecentSampler as RecentSampler
    from funcollect.buffers.samplers import SamplerWithoutReplacement as SamplerWithoutReplacement
    from funcollect.buffers.samplers import SliceSampler as SliceSampler
    from funcollect.buffers.samplers import SliceSamplerWithoutReplacement as SliceSamplerWithoutReplacement
    from funcollect.buffers.storages import LazyMemmapStorage as LazyMemmapStorage
    from funcollect.buffers.storages import LazyTensorStorage as LazyTensorStorage
    from funcollect.buffers.storages import ListStorage as ListStorage
    from funcollect.checkpoint import Checkpoint as Checkpoint
    from funcollect.collectors.front_door import AsyncCollector as AsyncCollector
    from funcollect.collectors.front_door import Collector as Collector
    from funcollect.collectors.front_door import MultiCollector as MultiCollector
    from funcollect.collectors.multi import MultiAsyncCollector as MultiAsyncCollector
    from funcollect.collectors.multi import MultiaSyncDataCollector as MultiaSyncDataCollector
    from funcollect.collectors.multi import MultiSyncCollector as MultiSyncCollector
    from funcollect.collectors.multi import MultiSyncDataCollector as MultiSyncDataCollector
    from funcollect.collectors.options import Shard as Shard
    from funcollect.collectors.ray_collector import RayCollector as RayCollector
    from funcollect.collectors.sync import SyncDataCollector as SyncDataCollector
    from funcollect.core import traced as traced
    from funcollect.core.api import apply as apply
    from funcollect.core.api import close as close
    from funcollect.core.api import fork as fork
    from funcollect.core.api import init as init
    from funcollect.core.api import recover as recover
    from funcollect.core.api import reset as reset
    from funcollect.core.api import rollout as rollout
    from funcollect.core.api import step as step
    from funcollect.core.differentiable import differentiable_rollout as differentiable_rollout
    from funcollect.core.env_params import set_env_params as set_env_params
    from funcollect.core.evaluate_actions import evaluate_actions as evaluate_actions
    from funcollect.core.lowered import lower_policy as lower_policy
    from funcollect.core.next_values import next_values as next_values
    from funcollect.core.routes import Plan as Plan
    from funcollect.core.routes import explain as explain
    from funcollect.core.saving import load as load
    from funcollect.core.saving import save as save
    from funcollect.core.state import CollectorState as CollectorState
    from funcollect.core.traced_step.columns import deliver as deliver
    from funcollect.core.whole_episodes import evaluate as evaluate
    from funcollect.core.whole_episodes import rollout_trajectories as rollout_trajectories
    from funcollect.envs.registry import make_env as make_env
    from funcollect.errors import BridgeError as BridgeError
    from funcollect.errors import CheckError as CheckError
    from funcollect.errors import ClosedError as ClosedError
    from funcollect.errors import EnvError as EnvError
    from funcollect.errors import EvaluationError as EvaluationError
    from funcollect.errors import FuncollectError as FuncollectError
    from funcollect.errors import LoweringError as LoweringError
    from funcollect.errors import PluginError as PluginError
    from funcollect.errors import PolicyError as PolicyError
    from funcollect.errors import ReplayError as ReplayError
    from funcollect.errors import StaleStateError as StaleStateError
    from funcollect.errors import WorkerError as WorkerError
    from funcollect.evaluation import Evaluation as Evaluation
    from funcollect.evaluation import Evaluator as Evaluator
    from funcollect.interop.lowering import lower as lower
    from funcollect.keys import Noise as Noise
    from funcollect.plots.recording import record as record
    from funcollect.policies import heads as heads
    from funcollect.policies.as_policy import make_policy as make_policy
    from funcollect.policies.base import PolicyBase as PolicyBase
    from funcollect.policies.by_group import by_group as by_group
    from funcollect.policies.by_player import by_player as by_player
    from funcollect.policies.jax_functions.jax_policy import jax_policy as jax_policy
    from funcollect.policies.normalized import normalized as normalized
    from funcollect.policies.population import population as population
    from funcollect.policies.random_policy import random_policy as random_policy
    from funcollect.policies.tensordict_modules.tensordict_policy import tensordict_policy as tensordict_policy
    from funcollect.policies.torch_modules.torch_policy import torch_policy as torch_policy
    from funcollect.profiling import Profile as Profile
    from funcollect.profiling import profile as profile
    from funcollect.progress import track as track
    from funcollect.protocols import Env as Env
    from funcollect.protocols import Exploration as Exploration
    from funcollect.protocols import Policy as Policy
    from funcollect.specs import ExplorationType as ExplorationType
    from funcollect.trajectories.by_agent import agents_as_rows as agents_as_rows
    from funcollect.trajectories.by_agent import player_trajectories as player_trajectories
    from funcollect.trajectories.next_observations import next_observations as next_observations
    from funcollect.trajectories.returns import MultiStep as MultiStep
    from funcollect.trajectories.returns import gae as gae
    from funcollect.trajectories.returns import scale_rewards as scale_rewards
    from funcollect.trajectories.split import split_trajectories as split_trajectories
    from funcollect.trajectories.stats import EpisodeStats as EpisodeStats
    from funcollect.trajectories.stats import episode_stats as episode_stats
    from funcollect.trajectories.whole_trajectories import PendingTrajectories as PendingTrajectories
    from funcollect.tree import NAMESPACE as NAMESPACE

_avoid_faulty_fusions()  # before the first computation, which may be the user's own

__version__ = "0.2.0"


@cache
def _homes() -> dict[str, str]:
    """The module of each public name, read from the imports above, so that each name is stated only once."""
    import re  # here, because `funcollect --help` needs neither module
    from importlib.resources import files

    source = files(__name__).joinpath("__init__.py").read_text("utf-8")
    return {name: home for home, name in re.findall(r"^    from (\S+) import (\w+) as", source, re.MULTILINE)}


def __getattr__(name: str) -> Any:
    if name == "__all__":  # not a variable: type checkers cannot evaluate it, and would see no names in `import *`
        return sorted(_homes())
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'funcollect' has no attribute {name!r}")
    home = _homes()[name]
    members = vars(importlib.import_module(home))
    value = members[name] if name in members else importlib.import_module(f"{home}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_homes(), "__version__"])

"""A live collection taken elsewhere: to another seed, or to where a saved one stood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch

from funcollect.core.api import recover
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState, policy_start
from funcollect.envs.jax_envs.jax_env import JaxEnvState
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.words import from_number
from funcollect.keys import key_from_seed
from funcollect.policies.torch_backed import TorchPolicyState
from funcollect.protocols import Env, Policy
from funcollect.tree import NAMESPACE

_LARGEST_SEED = 2**32 - 1


def next_seed(seed: int, lanes: int) -> int:
    """The seed that follows after `lanes` environments, as TorchRL's `set_seed` returns it."""
    for _ in range(lanes):
        seed = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _LARGEST_SEED
    return seed


def reseed(env: Env, policy: Policy, state: CollectorState, seed: int) -> CollectorState:
    """New episodes under another key. Before the first step all counts begin again, so it is as if `init` had it."""
    key = key_from_seed(seed)
    episode = state.episode if state.steps_made else _minus_one(state.episode)
    policy_state = policy_start(policy, key, state.num_lanes, state.first_lane)
    return _restarted(env, state.replace(key=key, episode=episode, policy_state=policy_state))


def _minus_one(episode: Any) -> Any:
    return torch.full_like(episode, -1) if isinstance(episode, torch.Tensor) else np.full(episode.shape, -1, np.int32)


def resume(env: Env, state: CollectorState, saved: Mapping[str, Any]) -> CollectorState:
    """New episodes under the key and after the counts that were saved.

    Raises:
        ValueError: for counts of another number of lanes.
    """
    if len(saved["episode"]) != state.num_lanes:
        raise ValueError(
            f"the saved state has {len(saved['episode'])} lanes, this one {state.num_lanes}: "
            "build the collector with the same number of environments"
        )
    counts: dict[str, Any] = {name: saved[name] for name in ("episode", "steps", "policy_version")}
    if isinstance(state.env_state, JaxEnvState):
        counts["episode"] = counts["episode"].numpy().astype(np.int32)
        counts["steps"] = from_number(counts["steps"])
        counts["policy_version"] = np.int32(counts["policy_version"])
    else:
        counts["episode"] = counts["episode"].to(state.episode.device)
    policy_state = _restored(state.policy_state, saved["policy_state"])
    key = saved["key"].numpy().astype(np.uint32)
    return _restarted(env, state.replace(key=key, policy_state=policy_state, **counts))


def go_on(env: Env, policy: Policy, state: CollectorState, *, steps: int, episode: int) -> CollectorState:
    """New episodes as if so many steps had been made and, in every lane, the episodes up to this one."""
    counts = saved_counts(state)
    counts["steps"], counts["episode"] = steps, torch.full_like(counts["episode"], episode)
    policy_state = policy_start(policy, state.key, state.num_lanes, state.first_lane, steps)
    return resume(env, state, {**counts, "policy_state": saved_leaves(policy_state)})


def saved_counts(state: CollectorState) -> dict[str, Any]:
    """The key and the counts of a state, copied, as `resume` takes them: tensors and numbers."""
    return {
        "key": torch.from_numpy(np.asarray(state.key).astype(np.int64)),
        "episode": torch.as_tensor(_readable(state.episode)).to("cpu", torch.int64, copy=True),
        "steps": state.steps_made,
        "policy_version": int(state.policy_version),
    }


def _readable(counts: Any) -> Any:
    return counts if isinstance(counts, torch.Tensor) else np.array(counts)


def saved_leaves(tree: Any) -> list[torch.Tensor]:
    """The leaves of a policy's state, copied, as tensors; without what it carries, which new episodes do not have."""
    leaves = optree.tree_leaves(_uncarried(tree), namespace=NAMESPACE)
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf)) for leaf in leaves]


def _uncarried(tree: Any) -> Any:
    return tree._replace(carried=None) if isinstance(tree, TorchPolicyState) else tree


def _restored(like: Any, leaves: list[torch.Tensor]) -> Any:
    """A policy's state of the structure, devices and kinds of `like` from what `saved_leaves` gave."""
    own, treedef = optree.tree_flatten(_uncarried(like), namespace=NAMESPACE)
    if [tuple(leaf.shape) for leaf in own] != [tuple(leaf.shape) for leaf in leaves]:
        raise ValueError("the saved policy state is of another policy: build the collector with the same one")
    kinds = [
        one.to(old.device) if isinstance(old, torch.Tensor) else _jax_array(one)
        for old, one in zip(own, leaves, strict=True)
    ]
    return optree.tree_unflatten(treedef, kinds)


def _jax_array(leaf: torch.Tensor) -> Any:
    return import_jax().numpy.array(leaf.numpy())


def _restarted(env: Env, state: CollectorState) -> CollectorState:
    if isinstance(state.env_state, SimulatorHandle):
        state.env_state.simulation.rekey(state.key, state.episode.tolist(), state.steps_made)
    if isinstance(state.env_state, JaxEnvState):  # the starts that it holds follow from another key
        state = state.replace(env_state=state.env_state._replace(next_start_used=np.ones(state.num_lanes, bool)))
    return recover(env, state)

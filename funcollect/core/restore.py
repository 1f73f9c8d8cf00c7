"""A live collection restarted elsewhere: under another seed, or after the counts of a saved one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

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
    """Return the seed that follows after `lanes` environments, as TorchRL's `set_seed` does."""
    for _ in range(lanes):
        seed = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _LARGEST_SEED
    return seed


def reseed(env: Env, policy: Policy, state: CollectorState, seed: int) -> CollectorState:
    """Begin new episodes under another seed. Before the first step, the result is that of `init` with this seed."""
    key = key_from_seed(seed)
    policy_state = policy_start(policy, key, state.num_lanes, state.first_lane)
    state = state.replace(key=key, policy_state=policy_state)
    if not state.steps_made:
        state = state.replace(episode=_counts_like(state, torch.full((state.num_lanes,), -1)))
    return _restarted(env, state)


def resume(env: Env, state: CollectorState, saved: Mapping[str, Any]) -> CollectorState:
    """Begin new episodes under the saved key and after the saved counts, which have to be of as many lanes."""
    if len(saved["episode"]) != state.num_lanes:
        raise ValueError(
            f"the saved state has {len(saved['episode'])} lanes, this one {state.num_lanes}: "
            "build the collector with the same number of environments"
        )
    steps, policy_version = saved["steps"], saved["policy_version"]
    over_jax = isinstance(state.env_state, JaxEnvState)
    state = state.replace(
        key=saved["key"].numpy().astype(np.uint32),
        policy_state=_restored(state.policy_state, saved["policy_state"]),
        episode=_counts_like(state, saved["episode"]),
        steps=from_number(steps) if over_jax else steps,
        policy_version=np.int32(policy_version) if over_jax else policy_version,
    )
    return _restarted(env, state)


def _counts_like(state: CollectorState, counts: Tensor) -> Any:
    """Return counts [P] int64 as the state holds them: in JAX as int32."""
    if isinstance(state.env_state, JaxEnvState):
        return counts.numpy().astype(np.int32)
    return counts.to(state.episode.device)


def go_on(env: Env, policy: Policy, state: CollectorState, *, steps: int, episode: int) -> CollectorState:
    """Begin new episodes as if all lanes had made so many steps and had begun the episodes up to this number."""
    policy_state = saved_leaves(policy_start(policy, state.key, state.num_lanes, state.first_lane, steps))
    episodes = torch.full((state.num_lanes,), episode)
    counts = {"steps": steps, "episode": episodes, "policy_state": policy_state}
    return resume(env, state, {**saved_counts(state), **counts})


def saved_counts(state: CollectorState) -> dict[str, Any]:
    """Return copies of a state's key and counts, as tensors and numbers, for `resume`."""
    return {
        "key": torch.from_numpy(np.asarray(state.key).astype(np.int64)),
        "episode": _copied(state.episode).to("cpu", torch.int64),
        "steps": state.steps_made,
        "policy_version": int(state.policy_version),
    }


def saved_leaves(tree: Any) -> list[Tensor]:
    """Return copies of the leaves of a policy's state, as tensors, without the hidden state of current episodes."""
    return [_copied(leaf) for leaf in optree.tree_leaves(_uncarried(tree), namespace=NAMESPACE)]


def _copied(leaf: Any) -> Tensor:
    return leaf.clone() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))


def _uncarried(tree: Any) -> Any:
    return tree._replace(carried=None) if isinstance(tree, TorchPolicyState) else tree


def _restored(like: Any, leaves: list[Tensor]) -> Any:
    """Return a policy's state from `saved_leaves`, with the structure, devices and kinds of array of `like`."""
    own, treedef = optree.tree_flatten(_uncarried(like), namespace=NAMESPACE)
    if [tuple(leaf.shape) for leaf in own] != [tuple(leaf.shape) for leaf in leaves]:
        raise ValueError("the saved policy state is of another policy: build the collector with the same one")
    restored = [
        saved.to(leaf.device) if isinstance(leaf, Tensor) else import_jax().numpy.array(saved.numpy())
        for leaf, saved in zip(own, leaves, strict=True)
    ]
    return optree.tree_unflatten(treedef, restored)


def _restarted(env: Env, state: CollectorState) -> CollectorState:
    if isinstance(state.env_state, SimulatorHandle):
        state.env_state.simulation.rekey(state.key, state.episode.tolist(), state.steps_made)
    if isinstance(state.env_state, JaxEnvState):  # its next starts follow from another key
        state = state.replace(env_state=state.env_state._replace(next_start_used=np.ones(state.num_lanes, bool)))
    return recover(env, state)

"""A live collection restarted elsewhere: under another seed, or after the counts of a saved one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcollect.core.api import recover
from funcollect.core.env_params import described, like_described
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState, flatten_part, policy_start
from funcollect.envs.jax_envs.jax_env import JaxEnvState
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.words import from_number
from funcollect.keys import key_from_seed
from funcollect.messages import shown
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import Env, Policy

SAVED = ("key", "episode", "steps", "policy_version", "policy_state")  # the keys without which `resume` cannot work
_LARGEST_SEED = 2**32 - 1
_PARTS = ("policy_state", "env_params")  # the saved parts of a state


def next_seed(seed: int, lanes: int) -> int:
    """Return the seed that follows after `lanes` environments, as TorchRL's `set_seed` does."""
    for _ in range(lanes):
        seed = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _LARGEST_SEED
    return seed


def reseed(env: Env, policy: Policy, state: CollectorState, seed: int) -> CollectorState:
    """Begin new episodes under another seed. Before the first step, the result equals `init` with this seed."""
    key = key_from_seed(seed)
    counts = {**counts_of(state), "key": torch.from_numpy(key.astype(np.int64))}
    if not state.steps_made:
        counts["episode"] = torch.full((state.num_lanes,), -1)
    policy_state = policy_start(policy, key, state.num_lanes, int(state.lane_ids[0]))
    return _restarted(env, state.replace(policy_state=policy_state), counts)


def go_on(env: Env, policy: Policy, state: CollectorState, *, steps: int, episode: int) -> CollectorState:
    """Begin new episodes as if all lanes had made so many steps and had begun the episodes up to this number."""
    policy_state = policy_start(policy, state.key, state.num_lanes, int(state.lane_ids[0]), steps)
    counts = {**counts_of(state), "steps": steps, "episode": torch.full((state.num_lanes,), episode)}
    return _restarted(env, state.replace(policy_state=policy_state), counts)


def saved_state(state: CollectorState) -> dict[str, Any]:
    """Return copies of a state's key, counts, policy state and `env_params`, as tensors and numbers, for `resume`."""
    parts = {name: [*map(_copied, _flattened(getattr(state, name))[0])] for name in _PARTS}
    return counts_of(state) | parts | {"varying_params": described(state.env_params)}


def resume(env: Env, state: CollectorState, saved: Mapping[str, Any]) -> CollectorState:
    """Begin new episodes under the saved key, after the saved counts, with the parts of the state that are saved."""
    if len(saved["episode"]) != state.num_lanes:
        raise ValueError(
            f"the saved state has {len(saved['episode'])} lanes, this one {state.num_lanes}: "
            "build the collector with the same number of environments"
        )
    if "varying_params" in saved:
        state = like_described(env, state, saved["varying_params"])
    parts = {name: restored(name, getattr(state, name), saved[name]) for name in _PARTS if name in saved}
    return _restarted(env, state.replace(**parts), saved)


def counts_of(state: CollectorState) -> dict[str, Any]:
    """Return a state's key and counts, as tensors on the CPU and numbers."""
    return {
        "key": torch.from_numpy(np.asarray(state.key).astype(np.int64)),
        "episode": _copied(state.episode).to("cpu", torch.int64),
        "steps": state.steps_made,
        "policy_version": int(state.policy_version),
    }


def _restarted(env: Env, state: CollectorState, counts: Mapping[str, Any]) -> CollectorState:
    """Begin new episodes after `counts`, which are converted to the form that this kind of state has."""
    key = counts["key"].numpy().astype(np.uint32)
    episode, steps, version = counts["episode"], counts["steps"], counts["policy_version"]
    match state.env_state:
        case SimulatorHandle(simulation=simulation):
            simulation.rekey(key, episode.tolist(), steps)
            episode = episode.to(state.episode.device)
        case JaxEnvState() as lanes:  # the next starts follow from the key
            state = state.changed(env_state=lanes._replace(next_start_used=np.ones(state.num_lanes, bool)))
            episode, steps, version = episode.numpy().astype(np.int32), from_number(steps), np.int32(version)
        case _:
            episode = episode.to(state.episode.device)
    return recover(env, state.replace(key=key, episode=episode, steps=steps, policy_version=version))


def _flattened(part: Any) -> tuple[list[Any], Any]:
    """Return what `flatten_part` does, without the hidden state of current episodes."""
    return flatten_part(part._replace(carried=None) if isinstance(part, TorchPolicyState) else part)


def _copied(leaf: Any) -> Tensor:
    """Return a copy of a tensor, an array of another library, or a number."""
    return leaf.clone() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))


def restored(name: str, like: Any, leaves: Sequence[Any], *, in_place: bool = False) -> Any:
    """Return the part `name` of a state from its saved leaves, with the structure and kinds of leaf of `like`.

    With `in_place`, tensors of `like` that require gradients are written and returned: optimizers refer to them.

    Raises:
        ValueError: for leaves of other shapes or dtypes, which another environment or policy has.
    """
    own, treedef = _flattened(like)
    owner = "policy" if name == "policy_state" else "environment"
    if (found := _shapes(leaves)) != (wanted := _shapes(own)):
        raise ValueError(
            f"the saved {name} has leaves of the shapes {shown(found)}, here they have {shown(wanted)}: "
            f"build it with the same {owner}"
        )
    for leaf, saved in zip(own, leaves, strict=True):
        if (was := _dtype(saved)) != (now := _dtype(leaf)) and was and now:
            raise ValueError(
                f"a leaf of the saved {name} is {was}, here it is {now}: build it with the same {owner}, and with "
                "jax_enable_x64 as it was"
            )
    return treedef.unflatten(
        _written(leaf, saved) if in_place and isinstance(leaf, Tensor) and leaf.requires_grad else _like(leaf, saved)
        for leaf, saved in zip(own, leaves, strict=True)
    )


def _shapes(leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(np.shape(leaf)) for leaf in leaves]


def _dtype(leaf: Any) -> str:
    """The name of an array's dtype; empty for a number."""
    return str(leaf.dtype).removeprefix("torch.") if np.ndim(leaf) and hasattr(leaf, "dtype") else ""


def _written(leaf: Tensor, saved: Any) -> Tensor:
    """Write a saved leaf into a tensor, and return that."""
    with torch.no_grad():
        return leaf.copy_(torch.as_tensor(saved))


def _like(leaf: Any, saved: Any) -> Any:
    """Return a saved leaf as the kind of tensor, array or number that `leaf` is, where that is."""
    if isinstance(leaf, Tensor):
        return torch.as_tensor(saved).to(leaf.device)
    if isinstance(leaf, (bool, int, float, np.generic)):
        return type(leaf)(np.asarray(saved).item())
    if isinstance(leaf, np.ndarray):
        return np.array(saved)
    jax = import_jax()
    array = jax.numpy.array(saved.numpy() if isinstance(saved, Tensor) else saved)
    return jax.device_put(array, leaf.sharding) if leaf.committed else array

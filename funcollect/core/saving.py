"""States in files: `save` writes one, `load` continues from it in another process as if nothing had come between."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from funcollect.arguments import check_choice, check_kind
from funcollect.core.api import check_pair, close, init_lanes
from funcollect.core.env_params import described, like_described
from funcollect.core.restore import restored, resume
from funcollect.core.simulators.forking import rebuild, record_of
from funcollect.core.simulators.record import SimulationRecord
from funcollect.core.simulators.simulation import Simulation, SimulatorHandle
from funcollect.core.state import LEAVES, CollectorState, first_state, flatten_part
from funcollect.errors import ReplayError
from funcollect.files import read_data, write_data
from funcollect.interop.plain_data import to_data
from funcollect.interop.words import number
from funcollect.keys import key_from_seed, seed_of
from funcollect.messages import shown
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import Env, HostEnv, Policy, SavableSnapshots
from funcollect.specs import torch_dtype

Episodes = Literal["continue", "restart"]

_KIND = "a collector state"
_FIELDS = tuple(name for name in LEAVES if name != "env_state")
_ADVICE = "save with episodes='restart', which begins new episodes after loading"


def save(path: str | os.PathLike[str], state: CollectorState, *, episodes: Episodes = "continue") -> None:
    """Write a state to a file, from which `load` continues exactly, in any process. The state can still be used.

    Episodes in flight are saved as values over JAX and Torch environments. Of simulators, a snapshot is saved if they
    give one (ALE), otherwise the seed and the actions of each lane's episode, which `load` replays.

    Args:
        path: the file. An earlier one is replaced once this one is complete.
        state: the current state of a run.
        episodes: ``"restart"`` saves no episodes: all lanes begin others after loading, under new trajectory ids.

    Raises:
        ReplayError: if the simulators can neither be replayed nor give a snapshot (EnvPool, TorchRL's environments,
            wrappers with running statistics, ``replayable=False``, an episode with more than 128 MiB of actions of all
            lanes), unless ``episodes="restart"``.
        StaleStateError: if the state has been superseded by a later one.
        TypeError: for a state that holds other objects than arrays and numbers.
        ValueError: for the state of several runs, which `jax.vmap` has made.
        OSError: if the file cannot be written; an earlier one is unchanged.

    >>> import funcollect as fc, os, tempfile, torch
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 50)
    >>> path = os.path.join(tempfile.mkdtemp(), "state")
    >>> fc.save(path, state)
    >>> loaded = fc.load(path, env, policy)
    >>> _, one = fc.rollout(env, policy, state, 50)
    >>> _, two = fc.rollout(env, policy, loaded, 50)
    >>> torch.equal(one["observation"], two["observation"])
    True
    """
    check_kind("path", path, (str, os.PathLike), "pass the name of a file, before the state")
    check_kind("state", state, CollectorState, "pass the state that init or rollout returned")
    write_data(Path(path), _KIND, state_data(state, episodes))


def load(
    path: str | os.PathLike[str], env: Env, policy: Policy, *, episodes: Episodes = "continue"
) -> CollectorState[Any]:
    """Read a state that `save` has written: the next rollout is bit for bit the one that would have come.

    Args:
        path: the file.
        env: an environment like the one that the state was made with.
        policy: a policy like the one that the state was made with. Its parameters are not in the file.
        episodes: ``"restart"`` begins new episodes in all lanes, under new trajectory ids.

    Raises:
        FileNotFoundError: if there is no such file.
        ReplayError: if replaying the episodes gives other observations than the saved ones.
        EnvError: if an environment raises, as in `fork`.
        ValueError: for a file that is damaged or of another version, or a state of another environment or policy.

    >>> import funcollect as fc, os, tempfile
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> path = os.path.join(tempfile.mkdtemp(), "state")
    >>> fc.save(path, fc.init(env, policy, seed=0))
    >>> fc.load(path, env, policy).seed
    0
    """
    check_kind("path", path, (str, os.PathLike), "pass the name of a file, before env and policy")
    check_pair(env, policy)
    return state_from(read_data(Path(path), _KIND), env, policy, episodes=episodes)


def check_episodes(episodes: Any) -> None:
    """Raise ValueError unless `episodes` is ``"continue"`` (the current ones) or ``"restart"`` (begin new ones)."""
    check_choice("episodes", episodes, get_args(Episodes))


def state_data(state: CollectorState, episodes: Episodes = "continue") -> dict[str, Any]:
    """A state as plain data; raises as `save` does."""
    check_episodes(episodes)
    if (dims := np.ndim(state.key)) > 1:
        raise ValueError(
            f"the state is of {[*np.shape(state.key)[: dims - 1]]} runs, expected one: save each of them, which is "
            "jax.tree.map(lambda leaf: leaf[i], state)"
        )
    handle, policy_state = state.env_state, state.policy_state
    if isinstance(handle, SimulatorHandle):
        handle.check()
    env_state = None
    if episodes == "continue":
        simulated = isinstance(handle, SimulatorHandle)
        env_state = _record_data(handle.simulation, state) if simulated else flatten_part(handle)[0]
    return {
        "description": _description(state),
        "lanes": state.lane_ids.tolist(),
        "total_lanes": state.total_lanes,
        "fields": {name: _leaves(getattr(state, name)) for name in _FIELDS},
        "varying_params": described(state.env_params),
        "carried": policy_state.carried if isinstance(policy_state, TorchPolicyState) else None,
        "env_state": env_state,
    }


def state_from(
    data: Mapping[str, Any],
    env: Env,
    policy: Policy,
    *,
    episodes: Episodes = "continue",
    over: CollectorState | None = None,
) -> CollectorState:
    """The state from `state_data`, for a checked pair; raises as `load` does.

    It has the simulators of the state `over`, if that is given.
    """
    check_episodes(episodes)
    if len(lanes := data["lanes"]) != (env.num_envs or 1):
        raise ValueError(
            f"the saved state has {len(lanes)} lanes, {env!r} has {env.num_envs or 1}: build it with as many"
        )
    fields, goes_on = data["fields"], episodes == "continue" and data["env_state"] is not None
    seed = seed_of(np.asarray(fields["key"][0]))
    if env.backend == "host" and goes_on:
        lane = torch.tensor(lanes)
        rows = {
            leaf.path: torch.zeros(len(lane), *leaf.shape, dtype=torch_dtype(leaf.dtype))
            for leaf in env.observation_leaves
        }
        state = first_state(
            env, policy, key_from_seed(seed), lane, data["total_lanes"], env_state=None, observation=rows
        )
    elif over is None:
        state = init_lanes(env, policy, seed=seed, first_lane=lanes[0], total_lanes=data["total_lanes"])
    else:
        state = over
    try:
        _check_description(data["description"], _description(state, env), env)
        state = like_described(env, state, data["varying_params"])
        if not goes_on:
            return resume(env, state, counts_in(data))
        whole = _with_fields(state, data)
        if env.backend != "host":
            return whole.changed(env_state=restored("env_state", state.env_state, data["env_state"]))
        record = SimulationRecord(**data["env_state"])
        if over is not None and over.env_state.simulation.calls:
            raise ReplayError(
                f"{env} cannot go back to the saved state: functions were applied to its environments since, which "
                "nothing undoes: restore into a new collector, with a new instance"
            )
        simulators = None if over is None else over.env_state.simulation.hand_over()
        return whole.changed(env_state=rebuild(env, record, whole, saved=True, simulators=simulators))
    except BaseException:
        close(state)
        raise


_KINDS = {"host": "simulators", "torch": "Torch", "jax": "JAX", "device": "simulators on a device"}


def _description(state: CollectorState, env: Env | None = None) -> dict[str, Any]:
    """What a state and its environment have in common with those that can load it."""
    if isinstance(state.env_state, SimulatorHandle):
        env = state.env_state.simulation.env
    backend = env.backend if env else "torch" if isinstance(state.lane, Tensor) else "jax"
    rows = {path: [[*row.shape[1:]], str(row.dtype).removeprefix("torch.")] for path, row in state.observation.items()}
    return {
        "kind": _KINDS[backend],
        "forking": env.forking if isinstance(env, HostEnv) else None,
        "observation": dict(sorted(rows.items())),
    }


def _check_description(saved: Mapping[str, Any], own: Mapping[str, Any], env: Env) -> None:
    """Raise ValueError if a state was saved over an environment of another kind, or with other observations."""
    for name, value in own.items():
        if saved[name] != value:
            raise ValueError(
                f"the {name} of the saved state's environment is {shown(saved[name])}, of {env!r} {shown(value)}: pass "
                "an environment like the one that the state was made with"
            )


def _leaves(part: Any) -> list[Any]:
    """The leaves of a part of a state, but the keys that a TensorDict policy carries: a new state has none."""
    return flatten_part(part._replace(carried=None) if isinstance(part, TorchPolicyState) else part)[0]


def counts_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `state_data` that `resume` needs, in the form of `saved_state`."""
    fields = data["fields"]
    (key,), (episode,), (steps,), (version,) = (fields[each] for each in ("key", "episode", "steps", "policy_version"))
    return {
        "key": torch.from_numpy(np.asarray(key).astype(np.int64)),
        "episode": torch.from_numpy(np.asarray(episode).astype(np.int64)),
        "steps": steps if isinstance(steps, int) else number(steps),
        "policy_version": int(version),
        "policy_state": fields["policy_state"],
        "env_params": fields["env_params"],
        "varying_params": data["varying_params"],
    }


def _record_data(simulation: Simulation, state: CollectorState) -> dict[str, Any]:
    """The record of simulators as plain data."""
    record = record_of(simulation, "saved in mid-episode", _ADVICE)
    if record.calls:
        raise ReplayError(
            f"{simulation.env} cannot be saved in mid-episode: functions were applied to its environments, which are "
            f"not saved: {_ADVICE}, and apply them again after loading"
        )
    data = {name: value for name, value in vars(record).items() if name != "calls"}
    try:
        if simulation.env.forking == "snapshot" and isinstance(simulation.simulators, SavableSnapshots):
            data["snapshot"] = simulation.simulators.snapshot_data(record.snapshot)
        to_data(data["snapshot"])
    except TypeError as error:
        raise ReplayError(
            f"{simulation.env} cannot be saved in mid-episode: in its snapshot, {error}: {_ADVICE}; or give the "
            "simulators snapshot_data and snapshot_from (funcollect.envs.SavableSnapshots)"
        ) from error
    if not bool((state.terminated | state.truncated).any()):
        data["last_outcome"] = ((), (), (), ())  # only finished lanes repeat it
    return data


def _with_fields(state: CollectorState, data: Mapping[str, Any]) -> CollectorState:
    """A state whose leaves are replaced by the saved ones."""
    parts = {name: restored(name, getattr(state, name), leaves) for name, leaves in data["fields"].items()}
    if data["carried"] is not None:
        policy_state: TorchPolicyState = parts["policy_state"]
        device = next((leaf.device for leaf in flatten_part(policy_state.recurrent)[0]), torch.device("cpu"))
        carried = {path: leaf.to(device) for path, leaf in data["carried"].items()}
        parts["policy_state"] = policy_state._replace(carried=carried)
    return state.replace(**parts)

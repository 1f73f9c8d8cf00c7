"""States as plain data: `snapshot` returns it, `restore` continues from it, `resume` begins new episodes after it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from funcollect.arguments import check_choice, check_kind
from funcollect.core.api import close, init_lanes, recover
from funcollect.core.env_params import described, like_described
from funcollect.core.routes import check_pair
from funcollect.core.simulators import Simulation, SimulationRecord, SimulatorHandle, rebuild, record_of
from funcollect.core.state import LEAVES, CollectorState, first_state, flatten_part, policy_start
from funcollect.envs.jax_envs.jax_env import JaxEnvState
from funcollect.errors import ReplayError
from funcollect.files import read_data, to_data, write_data
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.words import from_number, number
from funcollect.keys import key_from_seed, seed_of
from funcollect.messages import shown
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import Env, HostEnv, Policy, SavableSnapshots
from funcollect.specs import torch_dtype

Episodes = Literal["continue", "restart"]
COUNTS = ("key", "episode", "steps", "policy_version")
_PARTS = ("policy_state", "env_params")  # parts of a state that `resume` restores beside the counts
_FIELDS = tuple(name for name in LEAVES if name != "env_state")
_KINDS = {"host": "simulators", "torch": "Torch", "jax": "JAX", "device": "simulators on a device"}
_KIND = "a collector state"
_ADVICE = "save with episodes='restart', which begins new episodes after loading"


def save(path: str | os.PathLike[str], state: CollectorState, *, episodes: Episodes = "continue") -> None:
    """Write a state to a file, from which `load` continues exactly, in any process. The state can still be used.

    Over simulators, the file holds their snapshot if they offer one (ALE), otherwise the seed and the actions of each
    lane's episode, which `load` replays. With ``episodes="restart"`` it holds no episodes: after loading, all lanes
    begin others, under new trajectory ids. An earlier file is replaced once the new one is complete.

    Raises:
        ReplayError: for simulators that can neither be replayed nor give a snapshot (see `fork`), unless
            ``episodes="restart"``.
        StaleStateError: if the state has been superseded by a later one.
        TypeError: for a state that holds other objects than arrays and numbers.
        ValueError: for the states of several runs, as `jax.vmap` makes them.
        OSError: if the file cannot be written; an earlier one is unchanged.

    >>> import funcollect as fc, os, tempfile
    >>> env = fc.make_env("CartPole-v1")
    >>> fc.save(os.path.join(tempfile.mkdtemp(), "state"), fc.init(env, fc.random_policy(env), seed=0))
    """
    file = checked_path(path, episodes, "pass the name of a file, before the state")
    check_kind("state", state, CollectorState, "pass the state that init or rollout returned")
    write_data(file, _KIND, snapshot(state, episodes))


def load(path: str | os.PathLike[str], env: Env, policy: Policy, *, episodes: Episodes = "continue") -> CollectorState:
    """Read a state that `save` wrote. The next rollout is bit for bit the one that the saved state would have made.

    `env` and `policy` must be like those that made the state; the policy's parameters are not in the file. `episodes`
    is as in `save`.

    Raises:
        FileNotFoundError: if there is no such file.
        ReplayError: if replaying the episodes gives other observations than the saved ones.
        EnvError: if an environment raises, as in `fork`.
        ValueError: for a file that is damaged or of another version, or a state of another environment or policy.

    >>> import funcollect as fc, os, tempfile, torch
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy, path = fc.random_policy(env), os.path.join(tempfile.mkdtemp(), "state")
    >>> state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 50)
    >>> fc.save(path, state)
    >>> one, two = (fc.rollout(env, policy, each, 50)[1] for each in (state, fc.load(path, env, policy)))
    >>> torch.equal(one["observation"], two["observation"])
    True
    """
    file = checked_path(path, episodes, "pass the name of a file, before env and policy")
    check_pair(env, policy)
    return restore(read_data(file, _KIND), env, policy, episodes=episodes)


def checked_path(path: Any, episodes: Any, mend: str = "pass the name of a file") -> Path:
    """The path as a `Path`; TypeError if it is none, ValueError for a wrong `episodes`."""
    check_kind("path", path, (str, os.PathLike), mend)
    check_episodes(episodes)
    return Path(path)


def check_episodes(episodes: Any) -> None:
    """Raise ValueError unless `episodes` is ``"continue"`` (the current ones) or ``"restart"`` (begin new ones)."""
    check_choice("episodes", episodes, get_args(Episodes))


def snapshot(state: CollectorState, episodes: Episodes | None = "continue") -> dict[str, Any]:
    """A state as plain data; raises as `save` does. For None it serves `counts_in`, and the state may be stale."""
    if runs := [*np.shape(state.key)[:-1]]:
        mend = "save each of them, which is jax.tree.map(lambda leaf: leaf[i], state)"
        raise ValueError(f"the state is of {runs} runs, expected one: {mend}")
    held, policy_state, env_state = state.env_state, state.policy_state, None
    live = isinstance(held, SimulatorHandle)
    if live and episodes is not None:
        held.check()
    if episodes == "continue":
        env_state = _record_data(held.simulation, state) if live else flatten_part(held)[0]
    return {
        "description": _description(state),
        "lanes": state.lane_ids.tolist(),
        "total_lanes": state.total_lanes,
        "fields": {name: _flattened(getattr(state, name))[0] for name in _FIELDS},
        "varying_params": described(state.env_params),
        "carried": policy_state.carried if isinstance(policy_state, TorchPolicyState) else None,
        "env_state": env_state,
    }


def _record_data(simulation: Simulation, state: CollectorState) -> dict[str, Any]:
    record, what = record_of(simulation, "saved in mid-episode", _ADVICE), ""
    if record.calls:
        what = "functions were applied to its environments"
    if any(episode == record.episodes[lane] for lane, (episode, _) in record.options.items()):
        what = "lanes were reset with options"
    if what:
        raise ReplayError(f"{simulation.env} cannot be saved in mid-episode: {what}, which are not saved: {_ADVICE}")
    data = {name: value for name, value in vars(record).items() if name not in ("calls", "options")}
    try:
        if simulation.env.forking == "snapshot" and isinstance(simulation.simulators, SavableSnapshots):
            data["snapshot"] = simulation.simulators.snapshot_data(record.snapshot)
        to_data(data["snapshot"])
    except TypeError as error:
        mend = f"{_ADVICE}; or give the simulators snapshot_data and snapshot_from (funcollect.envs.SavableSnapshots)"
        what = f"{simulation.env} cannot be saved in mid-episode: in its snapshot, {error}"
        raise ReplayError(f"{what}: {mend}") from error
    if not bool((state.terminated | state.truncated).any()):
        data["last_outcome"] = ((), (), (), ())  # only finished lanes repeat it
    return data


def restore(
    data: Mapping[str, Any], env: Env, policy: Policy, *, episodes: Episodes = "continue", over: Any = None
) -> CollectorState:
    """The state of a `snapshot`, for a checked pair; raises as `load` does. It takes over the simulators of `over`."""
    if len(lanes := data["lanes"]) != (env.num_envs or 1):
        raise ValueError(f"the saved state has {len(lanes)} lanes, {env!r} {env.num_envs or 1}: build it with as many")
    goes_on, total = episodes == "continue" and data["env_state"] is not None, data["total_lanes"]
    key = np.asarray(data["fields"]["key"][0])
    if env.backend == "host" and goes_on:
        count, leaves = len(lanes), env.observation_leaves
        rows = {leaf.path: torch.zeros(count, *leaf.shape, dtype=torch_dtype(leaf.dtype)) for leaf in leaves}
        state = first_state(env, policy, key, torch.tensor(lanes), total, env_state=None, observation=rows)
    else:
        state = over or init_lanes(env, policy, seed=seed_of(key), first_lane=lanes[0], total_lanes=total)
    try:
        _check_description(data["description"], state, env)
        state = like_described(env, state, data["varying_params"])
        if not goes_on:
            return resume(env, state, counts_in(data))
        whole = _with_fields(state, data)
        if env.backend != "host":
            return whole.changed(env_state=put_back("env_state", state.env_state, data["env_state"]))
        simulation = over and over.env_state.simulation
        if simulation and simulation.calls:
            what = f"{env} cannot go back to the saved state: functions were applied to its environments since"
            raise ReplayError(f"{what}, which nothing undoes: restore into a new collector, with a new instance")
        record = SimulationRecord(**data["env_state"])
        _check_actions(record.actions, env)
        return whole.changed(env_state=rebuild(env, record, whole, saved=True, over=simulation))
    except BaseException:
        close(state)
        raise


def _check_description(saved: Mapping[str, Any], state: CollectorState, env: Env) -> None:
    for name, value in _description(state, env).items():
        if saved[name] != value:
            what = f"the {name} of the saved state's environment is {shown(saved[name])}, of {env!r} {shown(value)}"
            raise ValueError(f"{what}: pass an environment like the one that the state was made with")


def _check_actions(actions: Tensor | None, env: Env) -> None:
    """Raise ValueError for saved actions [steps, P, ...] of another shape than those of `env`."""
    wanted = [*env.action_spec.shape]
    if actions is not None and len(actions) and (saved := [*actions.shape[2:]]) != wanted:
        what = f"a saved action has the shape {saved}, one of {env!r} {wanted}"
        raise ValueError(f"{what}: pass an environment like the one that the state was made with (one_hot)")


def _with_fields(state: CollectorState, data: Mapping[str, Any]) -> CollectorState:
    parts = {name: put_back(name, getattr(state, name), leaves) for name, leaves in data["fields"].items()}
    if data["carried"] is not None:
        device = next((leaf.device for leaf in flatten_part(parts["policy_state"].recurrent)[0]), "cpu")
        carried = {path: leaf.to(device) for path, leaf in data["carried"].items()}
        parts["policy_state"] = parts["policy_state"]._replace(carried=carried)
    return state.changed(**parts)


def _description(state: CollectorState, env: Env | None = None) -> dict[str, Any]:
    """The properties in which a saved state must agree with the environment and the state it is restored into."""
    if isinstance(state.env_state, SimulatorHandle):
        env = state.env_state.simulation.env
    backend = env.backend if env else "torch" if isinstance(state.lane, Tensor) else "jax"
    rows = {path: [[*row.shape[1:]], str(row.dtype).removeprefix("torch.")] for path, row in state.observation.items()}
    forking = env.forking if isinstance(env, HostEnv) else None
    return {"kind": _KINDS[backend], "forking": forking, "observation": dict(sorted(rows.items()))}


def counts_in(data: Mapping[str, Any], *, copies: bool = False) -> dict[str, Any]:
    """The fields of a `snapshot` that `resume` needs: CPU tensors and numbers; with `copies`, its parts are copied."""
    fields = data["fields"]
    key, episode, steps, version = (fields[name][0] for name in COUNTS)
    return {
        "key": torch.from_numpy(np.asarray(key).astype(np.int64)),
        "episode": _copied(episode).to("cpu", torch.int64),
        "steps": steps if isinstance(steps, int) else number(steps),
        "policy_version": int(version),
        **{name: [*map(_copied, fields[name])] if copies else fields[name] for name in _PARTS},
        "varying_params": data["varying_params"],
    }


def resume(env: Env, state: CollectorState, saved: Mapping[str, Any]) -> CollectorState:
    """Begin new episodes after the saved counts, with the parts of the state in `saved`, a result of `counts_in`."""
    if (lanes := len(saved["episode"])) != state.num_lanes:
        mend = "build the collector with the same number of environments"
        raise ValueError(f"the saved state has {lanes} lanes, this one {state.num_lanes}: {mend}")
    if "varying_params" in saved:
        state = like_described(env, state, saved["varying_params"])
    parts = {name: put_back(name, getattr(state, name), saved[name]) for name in _PARTS if name in saved}
    key, held = saved["key"].numpy().astype(np.uint32), state.env_state
    episode, steps, version = saved["episode"], saved["steps"], saved["policy_version"]
    if isinstance(held, SimulatorHandle):
        held.simulation.rekey(key, episode.tolist(), steps)
    if isinstance(held, JaxEnvState):  # the next starts follow from the key
        parts["env_state"] = held._replace(next_start_used=np.ones(state.num_lanes, bool))
        episode, steps, version = episode.numpy().astype(np.int32), from_number(steps), np.int32(version)
    else:
        episode = episode.to(state.episode.device)
    return recover(env, state.changed(**parts, key=key, episode=episode, steps=steps, policy_version=version))


def reseed(env: Env, policy: Policy, state: CollectorState, seed: int) -> CollectorState:
    """Begin new episodes under another seed. Before the first step, the result equals that of `init` with this seed."""
    return go_on(env, policy, state.changed(key=key_from_seed(seed)), episode=None if state.steps_made else -1)


def go_on(
    env: Env, policy: Policy, state: CollectorState, *, steps: int | None = None, episode: int | None
) -> CollectorState:
    """Begin new episodes as if every lane had made `steps` and begun episodes up to `episode`; None: as it has."""
    policy_state = policy_start(policy, state.key, state.num_lanes, int(state.lane_ids[0]), steps or 0)
    given = {"steps": steps, "episode": None if episode is None else torch.full((state.num_lanes,), episode)}
    counts = {name: value for name, value in counts_in(snapshot(state, None)).items() if name in COUNTS}
    counts |= {name: value for name, value in given.items() if value is not None}
    return resume(env, state.replace(policy_state=policy_state), counts)


def _flattened(part: Any) -> tuple[list[Any], Any]:
    # without the keys that a TensorDict policy carries, which a new state does not have
    return flatten_part(part._replace(carried=None) if isinstance(part, TorchPolicyState) else part)


def _copied(leaf: Any) -> Tensor:
    return leaf.clone() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))


def put_back(name: str, like: Any, leaves: Sequence[Any], *, in_place: bool = False) -> Any:
    """The part `name` of a state from its saved leaves, in the form of `like`; ValueError for other shapes or dtypes.

    With `in_place`, tensors of `like` that require gradients are overwritten, since optimizers refer to them.
    """
    current, treedef = _flattened(like)
    owner = "policy" if name == "policy_state" else "environment"
    found, wanted = ([tuple(np.shape(leaf)) for leaf in part] for part in (leaves, current))
    if found != wanted:
        what = f"the saved {name} has leaves of the shapes {shown(found)}, here they have {shown(wanted)}"
        raise ValueError(f"{what}: build it with the same {owner}")
    for leaf, saved in zip(current, leaves, strict=True):
        if (was := _dtype(saved)) != (now := _dtype(leaf)) and was and now:
            mend = f"build it with the same {owner}, and with jax_enable_x64 as it was"
            raise ValueError(f"a leaf of the saved {name} is {was}, here it is {now}: {mend}")
    return treedef.unflatten(_like(*pair, in_place) for pair in zip(current, leaves, strict=True))


def _dtype(leaf: Any) -> str:
    """Return the name of an array's dtype; empty for a number."""
    return str(leaf.dtype).removeprefix("torch.") if np.ndim(leaf) and hasattr(leaf, "dtype") else ""


def _like(leaf: Any, saved: Any, in_place: bool) -> Any:
    """A saved leaf as a tensor, array or number like `leaf`, on its device; with `in_place`, written into `leaf`."""
    if isinstance(leaf, Tensor):
        if not (in_place and leaf.requires_grad):
            return torch.as_tensor(saved).to(leaf.device)
        with torch.no_grad():
            return leaf.copy_(torch.as_tensor(saved))
    if isinstance(leaf, (bool, int, float, np.generic)):
        return type(leaf)(np.asarray(saved).item())
    if isinstance(leaf, np.ndarray):
        return np.array(saved)
    jax = import_jax()
    array = jax.numpy.array(saved.numpy() if isinstance(saved, Tensor) else saved)
    return jax.device_put(array, leaf.sharding) if leaf.committed else array

"""The oracle: a plain loop over one Gymnasium environment, given the run's seed and the actions that were taken."""

import numpy as np
import torch

from funcollect.keys import Purpose, fold, key_from_seed
from tests.support.compare import bits, leaves


def plain_loop(env, *, seed, actions, lane=0, lanes=1, info_keys=(), dtype=np.float32, reseed=True):
    """One lane's rows: {path: [T, ...]}, the observation's leaves in `dtype` where they are floating.

    `reseed`: whether later episodes have seeds, too, or follow from the first one's.
    """
    key = key_from_seed(seed)
    episode = step = 0
    observation, _ = env.reset(seed=fold(key, Purpose.RESET, lane, 0)[0])
    rows = []
    for action in actions:
        before = named(observation, dtype)
        observation, *outcome, info = env.step(action)
        infos = {name: narrow(info[name]) for name in info_keys}
        rows.append(row_of(before, named(observation, dtype), *outcome, episode, step, lane, lanes, infos))
        step += 1
        if any(outcome[1:]):
            episode, step = episode + 1, 0
            observation, _ = env.reset(seed=fold(key, Purpose.RESET, lane, episode)[0] if reseed else None)
    env.close()
    return stacked(rows)


def row_of(before, after, reward, terminated, truncated, episode, step, lane, lanes, infos):
    """One row of a batch by path; the observations are leaves by path already."""
    flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
    return {
        **before,
        **{("next", *path): leaf for path, leaf in after.items()},
        **{("next", "info", name): np.asarray(value) for name, value in infos.items()},
        ("next", "reward"): np.array(reward, np.float32).reshape(-1),
        **{("next", name): [flag] for name, flag in flags.items()},
        **{(name,): [False] for name in flags},
        **{("collector", "traj_ids"): episode * lanes + lane, ("collector", "step"): step, ("collector", "lane"): lane},
    }


def stacked(rows):
    return {path: torch.from_numpy(np.array([row[path] for row in rows])) for path in rows[0]}


def named(observation, dtype, path=()):
    """The leaves of an observation by their key in a batch, copied."""
    if isinstance(observation, dict):
        parts = observation.items()
    elif isinstance(observation, tuple):
        path, parts = path or ("observation",), enumerate(observation)
    else:
        array = np.array(observation)
        return {path or ("observation",): array.astype(dtype) if array.dtype.kind == "f" else array}
    return {key: leaf for name, part in parts for key, leaf in named(part, dtype, (*path, str(name))).items()}


def narrow(value):
    """An info value as it is recorded."""
    array = np.array(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


EXTRAS = {(name,) for name in ("action_log_prob", "action_unsquashed", "loc", "scale")}  # a head's


def as_given(action):
    """An action as Gymnasium takes it: an int for a Discrete space, else an array of its own."""
    return action.item() if action.ndim == 0 else action.copy()


def check_lanes(batch, make, seed, decode=as_given, **kwargs):
    """Each lane of a batch [T] or [P, T] is what a plain loop over `make()` sees. `decode` makes an action of a row."""
    lanes = [batch] if batch.batch_dims == 1 else list(batch)
    for lane, rows in enumerate(lanes):
        actions = [decode(action) for action in rows["action"].numpy()]
        wanted = plain_loop(make(), seed=seed, actions=actions, lane=lane, lanes=len(lanes), **kwargs)
        check_lane(rows, wanted, leaves(batch).keys() & EXTRAS)


def check_lane(batch, wanted, ignored):
    """A lane's batch [T] is what the plain loop saw, to the bit, and holds nothing else."""
    got = leaves(batch)
    assert got.keys() == wanted.keys() | ignored | {("action",), ("collector", "policy_version")}
    for path, leaf in wanted.items():
        assert (got[path].dtype, got[path].shape) == (leaf.dtype, leaf.shape), path
        assert bits(got[path]) == bits(leaf), f"{path}: {got[path]} is not {leaf}"

"""States in files: continued in another process, and refused if that is impossible."""

import contextlib
import os
import pickle
import resource

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import NormalizeObservation

import funcollect as fc
from funcollect import files
from funcollect.interop.words import from_number
from tests.support.cases import make_env, pair
from tests.support.compare import assert_same, by_file, fresh
from tests.support.envs.counting import Counting
from tests.support.misuse import refused

NAMES = ("CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1")


def test_a_state_that_crosses_or_is_fused_may_be_loaded_for_the_other():
    env, fused = pair("gymnax/CartPole-v1", "torch_mlp", 3)
    crossing = fc.torch_policy(fused.module, head=fc.heads.categorical, compile="eager")
    state, _ = fc.rollout(env, fused, fc.init(env, fused, seed=4), 13)
    copy = by_file(env, crossing, state)
    assert_same(fc.rollout(env, crossing, state, 30)[1], fc.rollout(env, crossing, copy, 30)[1])


def test_counts_beyond_32_bits_are_kept(tmp_path):
    steps = 7 * 2**32 + 5
    for name in NAMES:
        env, policy, state = fresh(*pair(name, "random", 3))
        state = state.replace(steps=from_number(steps) if name.startswith("gymnax") else steps)
        for episodes in ("continue", "restart"):
            fc.save(tmp_path / "state", state, episodes=episodes)
            assert fc.load(tmp_path / "state", env, policy).steps_made == steps


@pytest.mark.parametrize("name", NAMES)
def test_new_episodes_begin_under_new_ids(name, tmp_path):
    env, policy, state = fresh(*pair(name, "random", 3), seed=1, steps=26)
    fc.save(tmp_path / "whole", state)
    fc.save(tmp_path / "counts", state, episodes="restart")
    afresh = fc.reset(env, fc.load(tmp_path / "whole", env, policy))
    wanted = fc.rollout(env, policy, afresh, 13)[1]
    for path, episodes in (("whole", "restart"), ("counts", "continue")):
        loaded = fc.load(tmp_path / path, env, policy, episodes=episodes)
        assert_same(fc.rollout(env, policy, loaded, 13)[1], wanted)
    fc.rollout(env, policy, state, 13)  # it can still be used after saving
    if name == "CartPole-v1":
        with pytest.raises(fc.StaleStateError):
            fc.save(tmp_path / "whole", state)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: fc.envs.from_envpool("CartPole-v1", num_envs=2), ("seeded by run", "cannot be saved in mid-episode")),
    (lambda: fc.make_env(lambda: NormalizeObservation(gymnasium.make("CartPole-v1"))), ("cannot be saved",)),
])  # fmt: skip
def test_what_cannot_be_rebuilt_is_refused_and_may_begin_again(make, words, tmp_path):
    env, policy, state = fresh(make(), seed=1, steps=12)
    with refused(fc.ReplayError, words):
        fc.save(tmp_path / "state", state)
    fc.save(tmp_path / "state", state, episodes="restart")
    loaded = fc.load(tmp_path / "state", env, policy)
    assert loaded.steps == 12
    assert (loaded.traj_ids > state.traj_ids).all()
    fc.rollout(env, policy, loaded, 3)
    fc.rollout(env, policy, state, 3)


def test_a_replay_that_differs_is_refused(tmp_path):
    env = fc.make_env([Counting, Counting])  # counts its resets
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    fc.save(tmp_path / "state", state)
    with refused(fc.ReplayError, ("lane 0", "gave another observation", "load with episodes='restart'")):
        fc.load(tmp_path / "state", env, policy)
    fc.load(tmp_path / "state", env, policy, episodes="restart")


def test_a_state_of_several_runs_is_refused_and_each_of_them_can_be_saved(tmp_path):
    env, policy = pair("gymnax/CartPole-v1", "random", 3)
    keys = jax.random.split(jax.random.key(0), 2)
    states = jax.jit(jax.vmap(lambda key: fc.traced.init(env, policy, None, key=key)))(keys)
    with refused(ValueError, ("[2] runs", "expected one", "leaf[i]")):
        fc.save(tmp_path / "state", states)
    state = jax.tree.map(lambda leaf: leaf[1], states)
    fc.save(tmp_path / "state", state)
    loaded = fc.load(tmp_path / "state", env, policy)
    one, two = (fc.rollout(env, policy, each, 13)[1] for each in (state, loaded))
    assert_same(one, two)


def remembering(dtype):
    return fc.torch_policy(lambda x, state: (x[:, 0].long() * 0, state), initial_state=torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(("env", "policy", "words"), [
    ("CartPole-v1", remembering(torch.float64), ()),
    ("CartPole-v1", remembering(torch.float32), ("policy_state is float64", "here it is float32", "same policy")),
    ("CartPole-v1", fc.torch_policy(torch.nn.Linear(4, 2)), ("policy_state", "build it with the same policy")),
    ("HalfCheetah-v5", remembering(torch.float64), ("the observation of the saved state's", "[17]")),
    ("torch/CartPole-v1", remembering(torch.float64), ("the kind of the saved", "'Torch'")),
])  # fmt: skip
def test_another_environment_or_policy_is_refused(env, policy, words, tmp_path):
    own, saved = make_env("CartPole-v1", 3), remembering(torch.float64)
    state, _ = fc.rollout(own, saved, fc.init(own, saved, seed=0), 5)
    fc.save(tmp_path / "state", state)
    with refused(ValueError, words) if words else contextlib.nullcontext():
        fc.load(tmp_path / "state", make_env(env, 3), policy)
    with refused(ValueError, ("3 lanes", "2: build it with as many")):
        fc.load(tmp_path / "state", make_env(env, 2), policy)


def test_actions_in_another_encoding_are_refused(tmp_path):
    _, _, state = fresh("CartPole-v1", num_envs=2, one_hot=True, steps=5)
    fc.save(tmp_path / "state", state)
    own = fc.make_env("CartPole-v1", num_envs=2)
    with refused(ValueError, ("a saved action has the shape [2]", "one of", "[]: pass an environment like")):
        fc.load(tmp_path / "state", own, fc.random_policy(own))


def test_damaged_and_foreign_files_are_refused(tmp_path, monkeypatch):
    env, policy = pair("CartPole-v1", "torch_mlp", 3)
    state, path = fc.init(env, policy, seed=0), tmp_path / "state"
    fc.save(path, state)
    whole = path.read_bytes()
    middle = len(whole) // 3
    entry = whole.index(b"PK\1\2")  # in the zip file's directory; flags and the compression follow
    flags, compression = (whole[:byte] + b"\x41" + whole[byte + 1 :] for byte in (entry + 8, entry + 10))
    overwritten = whole[:middle] + b"\0\1\2\3" + whole[middle + 4 :]
    for damaged in (whole[:-9], whole[: len(whole) // 2], b"", overwritten, flags, compression):
        path.write_bytes(damaged)
        with refused(ValueError, ("cannot be read", "damaged")):
            fc.load(path, env, policy)
    (tmp_path / "trap").write_bytes(pickle.dumps(_Trap()))
    np.savez(tmp_path / "trap.npz", header=np.array([_Trap()], object), allow_pickle=True)
    for name in ("trap", "trap.npz"):
        with refused(ValueError, ("cannot be read",)):
            fc.load(tmp_path / name, env, policy)
    files.write_data(path, "a recipe", {"eggs": 2})
    with refused(ValueError, ("holds a recipe, expected a collector state",)):
        fc.load(path, env, policy)
    with pytest.raises(FileNotFoundError):
        fc.load(tmp_path / "nothing", env, policy)
    with pytest.raises(IsADirectoryError):  # as any error of opening the file
        fc.load(tmp_path, env, policy)
    with monkeypatch.context() as changed, refused(ValueError, ("MemoryError", "too large for the memory here")):
        changed.setattr(np, "load", full)
        fc.load(path, env, policy)
    with monkeypatch.context() as changed:
        changed.setattr(files, "_FORMAT", 99)
        fc.save(path, state)
    with refused(ValueError, ("has format 99", "reads format 1", "the version that saved it")):
        fc.load(path, env, policy)


def full(*_, **__):
    raise MemoryError


class _Trap:
    """Runs code if it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a file was unpickled",)


def test_a_full_disk_leaves_the_earlier_file(tmp_path):
    env, policy, state = fresh(*pair("torch/CartPole-v1", "torch_mlp", 3), seed=5, steps=9)
    fc.save(tmp_path / "state", state)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)  # beyond it, writing fails as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fc.save(tmp_path / "state", fc.init(env, policy, seed=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    loaded = fc.load(tmp_path / "state", env, policy)
    assert_same(fc.rollout(env, policy, state, 9)[1], fc.rollout(env, policy, loaded, 9)[1])


def test_a_link_stays_and_a_pipe_is_refused(tmp_path):
    env, _, state = fresh("CartPole-v1", num_envs=2)
    link, file, pipe = tmp_path / "latest", tmp_path / "runs" / "first", tmp_path / "pipe"
    link.symlink_to(file)
    for _ in range(2):
        fc.save(link, state)
        assert link.is_symlink()
        assert file.is_file()
    fc.load(link, env, fc.random_policy(env))
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="pipe is a device or a pipe, expected a file: pass another name"):
        fc.save(pipe, state)
    assert pipe.is_fifo()


def test_params_in_bfloat16_and_typed_keys_are_kept():
    def begin(key, params):
        return {"key": params["key"], "place": params["start"]}, params["start"].astype(jnp.float32)

    def move(key, state, action, params):
        place = state["place"] + 1
        return {**state, "place": place}, place.astype(jnp.float32), place[0].astype(jnp.float32), place[0] > 9, False

    spaces = {"observation_space": Box(-99, 99, (1,)), "action_space": Discrete(2)}
    params = {"key": jax.random.key(3), "start": jnp.zeros(1, jnp.bfloat16)}
    env, policy, state = fresh(fc.envs.from_functions(begin, move, **spaces, params=params, num_envs=2), steps=4)
    copy = by_file(env, policy, state)
    assert copy.env_params["start"].dtype == jnp.bfloat16
    assert_same(fc.rollout(env, policy, state, 20)[1], fc.rollout(env, policy, copy, 20)[1])


class Earlier(gymnasium.Wrapper):
    """Adds the number of earlier episodes to every reward."""

    episodes = -1

    def reset(self, **keywords):
        self.episodes += 1
        return super().reset(**keywords)

    def step(self, action):
        observation, reward, *others = super().step(action)
        return observation, reward + self.episodes, *others


def test_rewards_that_depend_on_earlier_episodes_are_found(tmp_path):
    env, policy, state = fresh(lambda: Earlier(gymnasium.make("CartPole-v1")), num_envs=2)
    state, batch = fc.rollout(env, policy, state, 120)
    assert batch["next", "done"].any()
    fc.save(tmp_path / "state", state)
    for copied in (lambda: fc.fork(env, state), lambda: fc.load(tmp_path / "state", env, policy)):
        with pytest.raises(fc.ReplayError, match=r"gave the return .*, expected .*funcollect.scale_rewards"):
            copied()

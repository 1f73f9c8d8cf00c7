"""The same seed gives the same bits: again, in another process, and however the run is cut into batches."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import funcollect as fc
from tests.support.cases import ENVS, KINDS, POLICIES, digests, make_env, pair
from tests.support.compare import assert_same, bits, collect
from tests.support.running import ROOT, SCALE, in_soak, once, scaled

TOTAL = 200 if SCALE == 1 else 400


def cut(length, total):
    return [length] * (total // length) + [total % length] * (total % length > 0)


@pytest.mark.parametrize(("name", "kind", "num_envs"), once(ENVS, POLICIES, [None, 3, *in_soak([1, 8])]))
def test_a_run_gives_the_same_data_again_and_however_it_is_cut(name, kind, num_envs):
    """Whatever ran before in this process, and whatever the global generators hold."""
    env, policy = pair(name, kind, num_envs)
    whole = collect(env, policy, *cut(TOTAL, TOTAL), seed=0)
    torch.rand(7), np.random.rand(3), random.random()
    if name == "torch/CartPole-v1" or SCALE > 1:
        env = make_env(name, num_envs)
        policy = POLICIES[kind](env)
    for length, total in ((64, 130), (7, 35), (1, 10)):
        total = min(TOTAL, scaled(total))
        assert_same(whole[..., :total], collect(env, policy, *cut(length, total), seed=0))
    assert whole["next", "done"].sum() >= 6 * (env.num_envs or 1)  # episodes did end on the way
    other = collect(env, policy, 30, seed=1)
    for key in ("observation", "action"):
        assert not torch.equal(whole[..., :30][key], other[key])


@pytest.mark.parametrize(("name", "kind"), once(ENVS, ["torch_mlp", "torch_recurrent", "jax_mlp", "random"]))
def test_a_batch_of_one_equals_a_single_environment(name, kind):
    assert_same(collect(*pair(name, kind, None), 90), collect(*pair(name, kind, 1), 90)[0])


@pytest.mark.evening  # `make test` has the bits of runs in other processes in tests/test_frozen.py
def test_another_process_gives_the_same_bits():
    """One whose hashes differ, and whose JAX dispatches as it does unless told otherwise."""
    environment = os.environ | {"PYTHONHASHSEED": "17", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "true"}
    kinds = KINDS if SCALE > 1 else ("torch_recurrent", "jax_mlp", "tensordict_actor", "random")
    command = [sys.executable, "-m", "tests.support.cases", "3", "40,1,9", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    theirs = dict(line.split(": ") for line in done.stdout.splitlines())
    ours = digests(3, [50], kinds)
    assert theirs == ours
    assert len(set(ours.values())) == len(ours) >= 4


def generators():
    name, words, *rest = np.random.get_state()
    return bits(torch.get_rng_state()), name, words.tobytes(), rest, random.getstate()


@pytest.fixture
def unchanged():
    torch.manual_seed(123)
    np.random.seed(5)
    random.seed(9)

    def call(function, *args, **kwargs):
        before = generators()
        answer = function(*args, **kwargs)
        assert generators() == before, function
        return answer

    return call


@pytest.mark.parametrize(("kind", "name", "num_envs"), once(POLICIES, ENVS, (3, None)))
def test_global_generators_are_left_alone(name, kind, num_envs, unchanged):
    env, policy = pair(name, kind, num_envs)
    state = unchanged(fc.init, env, policy, seed=0)
    state, _ = unchanged(fc.rollout, env, policy, state, 12)
    state, _ = unchanged(fc.step, env, policy, state)
    other = unchanged(fc.fork, env, state)
    state = unchanged(fc.reset, env, state)
    unchanged(fc.rollout, env, policy, other, 3, exploration_type=fc.ExplorationType.DETERMINISTIC)
    unchanged(fc.evaluate, env, policy, episodes=2, seed=0)
    unchanged(fc.explain, env, policy)
    unchanged(fc.close, state)
    collector = unchanged(fc.SyncDataCollector, env, policy, frames_per_batch=20, init_random_frames=9)
    for call in (next, fc.SyncDataCollector.reset, next, fc.SyncDataCollector.state_dict):
        unchanged(call, collector)
    unchanged(collector.set_seed, 4)
    unchanged(collector.shutdown)


@pytest.mark.parametrize("name", ["torch/CartPole-v1", "CartPole-v1"])
def test_generators_are_put_back_after_an_exception(name, unchanged):
    def failing(observation):
        raise KeyError(torch.rand(3))

    env, policy = make_env(name, 2), fc.torch_policy(failing)
    state = unchanged(fc.init, env, policy, seed=0)
    unchanged(pytest.raises, KeyError, fc.rollout, env, policy, state, 10)

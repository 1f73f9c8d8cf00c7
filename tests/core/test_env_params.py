"""`set_env_params`: changed parameters of JAX environments, by lane, at once or from the next episode on."""

import functools
import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.core.loops import over_jax
from tests.support.cases import jax_mlp, torch_mlp
from tests.support.compare import assert_same, compilations, fresh, rollouts
from tests.support.running import FORKS_OF_RAY, LOSES_WORKERS, in_soak, once
from tests.support.workers import TRANSPORTS, multi, ray_collector

LENGTH = 4


def reset(key, params):
    """Has episodes of four steps, and observes its parameters."""
    return jnp.zeros((), jnp.int32), seen(jnp.zeros((), jnp.int32), params)


def step(key, time, action, params):
    return time + 1, seen(time + 1, params), params["gain"] * 1.0, time + 1 >= LENGTH, False


def seen(time, params):
    return jnp.stack([time.astype(jnp.float32), params["gain"], params["wind"][0], params["wind"][1]])


PARAMS = {"gain": np.float32(1.0), "wind": np.array([0.0, 0.5], np.float32)}
OBSERVED = spaces.Box(-100, 100, (4,))


def make(num_envs=3):
    return fc.envs.from_functions(
        reset, step, observation_space=OBSERVED, action_space=spaces.Discrete(2), num_envs=num_envs, params=PARAMS,
        param_keys=["gain"], name="blow",
    )  # fmt: skip


@functools.cache
def pair(kind):
    """An environment and a policy, shared by all tests, so that JAX compiles each program once."""
    env = make()
    return env, {"random": fc.random_policy, "jax": jax_mlp, "torch": torch_mlp}[kind](env)


def begun(kind="random"):
    return fresh(*pair(kind))


def gains(batch):
    """The gain that lanes see: at the root of each frame, and after it."""
    return batch["observation"][..., 1], batch["next", "observation"][..., 1]


@pytest.mark.parametrize("kind", ["jax", *in_soak(["torch", "random"])])
def test_at_once_it_acts_in_the_current_episode_and_in_the_next_start(kind):
    env, policy, state = begun(kind)
    state, _ = fc.rollout(env, policy, state, 2)
    state = fc.set_env_params(env, state, PARAMS | {"gain": 3.0}, at_once=True)
    state, batch = fc.rollout(env, policy, state, 6)
    roots, after = gains(batch)
    assert roots[:, 0].eq(1).all()  # the observation from before the change
    assert roots[:, 1:].eq(3).all()
    assert after.eq(3).all()
    assert batch["next", "reward"].eq(3).all()
    assert batch["env_params", "gain"].eq(3).all()
    each = torch.tensor([[5.0], [6.0], [7.0]])
    state = fc.set_env_params(env, state, PARAMS | {"gain": jnp.array(each[:, 0].numpy())}, at_once=True)
    _, batch = fc.rollout(env, policy, state, 6)
    assert batch["next", "reward"][..., 0].eq(each).all()
    assert gains(batch)[0][:, 1:].eq(each).all()


@pytest.mark.parametrize(("kind", "new"), once(["jax", *in_soak(["torch"])], [3.0, [3.0, 4.0, 5.0]]))
def test_from_the_next_episode_on(kind, new):
    env, policy, state = begun(kind)
    state, _ = fc.rollout(env, policy, state, 2)
    state = fc.reset(env, state, torch.tensor([False, True, False]))
    state = fc.set_env_params(env, state, PARAMS | {"gain": jnp.array(new)})
    for _ in range(3):
        state, batch = fc.rollout(env, policy, state, 2)
        later = batch["collector", "traj_ids"] > torch.tensor([[0], [4], [2]])
        want = torch.where(later, torch.tensor(new).reshape(-1, 1), 1.0)
        assert torch.equal(batch["next", "reward"][..., 0], want)
        assert torch.equal(batch["env_params", "gain"], want)
        assert torch.equal(gains(batch)[0], want)


def test_later_changes_of_the_same_leaves_compile_nothing():
    env, policy, state = begun("jax")
    for at_once in (False, True):
        for gain in (1.5, jnp.array([1.0, 2.0, 3.0])):
            state = fc.set_env_params(env, state, PARAMS | {"gain": gain}, at_once=at_once)
            state, _ = fc.rollout(env, policy, state, 3)
    with compilations() as seen_now:
        for gain in (9.0, jnp.array([4.0, 5.0, 6.0]), np.float64(7)):
            for at_once in (False, True):
                state = fc.set_env_params(env, state, PARAMS | {"gain": gain}, at_once=at_once)
                state, batch = fc.rollout(env, policy, state, 3)
    loops = [each for each in seen_now if "broadcast" not in str(each)]
    assert len(loops) <= 1, loops
    assert batch["next", "reward"].eq(7).all()
    for loops in (1, 0):  # another leaf by lane compiles once
        with compilations() as seen_now:
            state = fc.set_env_params(env, state, PARAMS | {"wind": jnp.full((3, 2), loops * 1.0)}, at_once=True)
            state, _ = fc.rollout(env, policy, state, 3)
        assert sum("_loop" in str(each) for each in seen_now) == loops


def test_runs_are_the_same_however_they_are_cut_and_old_states_stay():
    env, policy, state = begun("jax")
    state = fc.set_env_params(env, state, PARAMS | {"wind": jnp.arange(6.0).reshape(3, 2)})
    _, whole = fc.rollout(env, policy, state, 12)
    after, cut = rollouts(env, policy, state, (2, 10))
    assert_same(cut, whole.clone())
    forked = fc.recover(env, fc.fork(env, after))
    _, batch = fc.rollout(env, policy, forked, 2)
    assert torch.equal(batch["observation"][:, 0, 2:], torch.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize(("change", "episodes"), once(["never", "shared", "by lane"], ["restart", "continue"]))
def test_states_are_saved_with_them(change, episodes, tmp_path):
    env, policy, state = begun("jax")
    if change != "never":
        gain = 3.0 if change == "shared" else jnp.array([2.0, 3.0, 4.0])
        state = fc.set_env_params(env, state, PARAMS | {"gain": gain}, at_once=change == "shared")
    state, _ = fc.rollout(env, policy, state, 2)
    fc.save(tmp_path / "state", state)
    loaded = fc.load(tmp_path / "state", make(), policy, episodes=episodes)
    _, one = fc.rollout(env, policy, state, 9)
    _, two = fc.rollout(env, policy, loaded.replace(origin=state.origin), 9)
    if episodes == "continue":
        assert_same(one, two)
    else:
        assert torch.equal(two["next", "reward"][:, -1], one["next", "reward"][:, -1])


def test_collectors_pass_them_on_and_save_them(tmp_path):
    env, policy = pair("jax")
    keywords = {"frames_per_batch": 15, "seed": 0}
    with fc.SyncDataCollector(env, policy, **keywords) as collector:
        next(collector)
        collector.set_env_params(PARAMS | {"gain": jnp.array([2.0, 3.0, 4.0])}, at_once=True)
        batch = next(collector)
        assert batch["next", "reward"][..., 0].eq(torch.tensor([[2.0], [3.0], [4.0]])).all()
        collector.save(tmp_path / "run")
        saved = collector.state_dict()
        wanted = next(collector)
    with fc.SyncDataCollector.load(tmp_path / "run", make(), policy) as collector:
        assert_same(next(collector), wanted)
    with fc.SyncDataCollector(env, policy, **keywords) as collector:
        collector.load_state_dict(saved)
        assert next(collector)["next", "reward"][:, -1, 0].tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_get_those_of_their_lanes(transport):
    with multi(transport=transport, create_env_fn=[make] * 2, policy=None, frames_per_batch=30) as collector:
        next(collector)
        collector.set_env_params(PARAMS | {"gain": jnp.arange(6.0)}, at_once=True)
        batch = next(collector)
        assert batch["next", "reward"][..., 0].flatten(0, 1).eq(torch.arange(6.0)[:, None]).all()
        collector.set_env_params(PARAMS | {"gain": 9.0}, at_once=True)
        assert next(collector)["next", "reward"].eq(9).all()
        with pytest.raises(ValueError, match=r"params\['gain'\] has the shape \[4\], expected \[\], or \[6\] for one"):
            collector.set_env_params(PARAMS | {"gain": jnp.arange(4.0)})
        next(collector)


@pytest.mark.parametrize("loaded", ["run", *in_soak(["state_dict"])])
@LOSES_WORKERS
def test_a_replaced_worker_gets_them_again(loaded, tmp_path):
    """The parameters that were set, and those of a run that was loaded later."""
    keywords = {"create_env_fn": [make] * 2, "policy": None, "frames_per_batch": 30, "on_failure": "restart"}
    with multi(transport="serial", **keywords) as before:
        before.set_env_params(PARAMS | {"gain": jnp.arange(6.0)}, at_once=True)
        next(before)
        before.save(tmp_path / "run")
        saved = before.state_dict()
    with multi(**keywords) as collector:
        collector.set_env_params(PARAMS | {"gain": jnp.arange(6.0) + 9}, at_once=True)
        next(collector)
        for restarts, wanted in ((1, torch.arange(6.0) + 9), (2, torch.arange(6.0))):
            if restarts == 2:
                collector.restore(tmp_path / "run") if loaded == "run" else collector.load_state_dict(saved)
            os.kill(collector.run.records[1].handle.pid, signal.SIGKILL)
            for batch in itertools.islice(collector, 3):
                last = batch["next", "reward"][..., 0].flatten(0, 1).clone()
            assert collector.stats()["restarts"] == restarts
            assert last.eq(wanted[:, None]).all()


@pytest.mark.evening
@pytest.mark.usefixtures("ray_cluster")
@FORKS_OF_RAY
@pytest.mark.parametrize("workers", [1, *in_soak([2])])
def test_ray(workers):
    kind = fc.MultiSyncDataCollector if workers > 1 else fc.SyncDataCollector
    own = {"num_collectors": 2, "collector_class": kind, "num_workers_per_collector": workers, "sync": True}
    with ray_collector(make, frames_per_batch=60, **own) as collector:
        next(collector)
        lanes = 6 * workers
        collector.set_env_params(PARAMS | {"gain": jnp.arange(lanes * 1.0)}, at_once=True)
        batch = next(collector)
        assert batch["next", "reward"][..., 0].reshape(lanes, -1).eq(torch.arange(lanes * 1.0)[:, None]).all()


@pytest.mark.parametrize("in_blocks", [False, True])
def test_parameters_of_another_dtype(in_blocks, monkeypatch):
    monkeypatch.setattr(over_jax, "waits_for_host", lambda place: in_blocks)  # in blocks, as on a GPU
    env, policy, state = begun()
    for gain in (np.float32(1.5), np.int32(3), np.float32(2.5)):
        state, batch = fc.rollout(env, policy, state.replace(env_params=PARAMS | {"gain": gain}), 4)
        assert batch["env_params", "gain"].eq(float(gain)).all()


def test_the_time_limit_is_a_parameter_too_and_a_float_for_an_integer_is_not_cut_off():
    env, policy, state = fresh("gymnax/Pendulum-v1", num_envs=2)
    short = env.default_params.replace(max_steps_in_episode=5)
    state = fc.set_env_params(env, state, short, at_once=True)
    state, batch = fc.rollout(env, policy, state, 10)
    assert batch["next", "truncated"][..., 0].nonzero()[:, 1].tolist() == [4, 9, 4, 9]
    with pytest.raises(ValueError, match=r"params\.max_steps_in_episode is 5\.9, expected an integer"):
        fc.set_env_params(env, state, env.default_params.replace(max_steps_in_episode=5.9))


@pytest.mark.evening
@pytest.mark.parametrize(
    ("name", "key"), [("brax/inverted_pendulum", "link.inertia.mass"), ("playground/CartpoleBalance", "body_mass")]
)
def test_masses_drawn_for_each_lane_as_a_suite_has_them(name, key):
    """Domain randomisation as in brax and MuJoCo Playground: masses with a first dimension of lanes."""
    env, policy, state = fresh(name, num_envs=3, param_keys=[key])
    masses = functools.reduce(getattr, key.split("."), env.default_params)
    factors = jax.random.uniform(jax.random.key(0), (3,), minval=0.5, maxval=2.0)
    masses = masses * factors.reshape(3, *[1] * masses.ndim)
    state = fc.reset(env, fc.set_env_params(env, state, env.default_params.tree_replace({key: masses})))
    _, batch = fc.rollout(env, policy, state, 5)
    assert torch.equal(batch["env_params", *key.split(".")][:, 0], torch.tensor(np.array(masses)))
    other = fc.make_env(name, num_envs=3)
    _, plain = fc.rollout(other, policy, fc.reset(other, fc.init(other, policy, seed=0)), 5)
    assert torch.equal(batch["observation"][:, 0], plain["observation"][:, 0])  # equal starts
    assert (batch["observation"][:, -1] != plain["observation"][:, -1]).any(-1).all()  # other physics


def test_partitions_split_what_lanes_have_of_their_own():
    env, _, state = begun()
    state = fc.set_env_params(env, state, PARAMS | {"gain": jnp.arange(3.0)})
    parts = fc.traced.partition(state, "devices")
    spec = jax.sharding.PartitionSpec
    assert parts.env_params["wind"] == spec()
    assert parts.env_params["gain"].current == parts.env_params["gain"].coming == spec("devices")


@pytest.mark.parametrize(("params", "message"), [
    ({"gain": 1.0}, "params is .*, expected .*: change leaves of env.default_params"),
    ((PARAMS, {"gain": 0, "wind": None}), "params is a pair, expected a pytree like env.default_params: pass the fir"),
    (PARAMS | {"gain": jnp.ones(2)}, r"params\['gain'\] has the shape \[2\], expected \[\], or \[3\] for one in each"),
    (PARAMS | {"wind": jnp.ones((2, 2))}, r"params\['wind'\] has the shape \[2, 2\], expected \[2\], or \[3, 2\]"),
])  # fmt: skip
def test_params_that_do_not_fit(params, message):
    env, _, state = begun()
    with pytest.raises(ValueError, match=message):
        fc.set_env_params(env, state, params)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "pgx/tic_tac_toe"])
def test_environments_without_parameters(name):
    env, _, state = fresh(name, num_envs=2)
    with pytest.raises(TypeError, match="has no parameters that can be set here"):
        fc.set_env_params(env, state, None)
    with (
        fc.MultiSyncDataCollector([name], frames_per_batch=4, in_process=True) as collector,
        pytest.raises(TypeError, match="has no parameters that can be set"),
    ):
        collector.set_env_params(None)
    with pytest.raises(ValueError, match=r"param_keys has 'gravitas', which EnvParams.* lacks: correct"):
        fc.make_env("gymnax/CartPole-v1", param_keys=["gravitas"])

"""Running statistics against those of the data, in Torch and in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import funcollect as fc
from funcollect import running_statistics as rs
from tests.support.misuse import refused

BOX = spaces.Box(-np.inf, np.inf, (3,))


KINDS = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}


def data(rows=2000, seed=0):
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(rows, 3)) * [0.1, 3.0, 40.0] + [5.0, -2.0, 100.0]).astype(np.float32)


def updated(backend, parts):
    stats = rs.init(BOX, backend=backend)
    for part in parts:
        stats = rs.update(stats, KINDS[backend](part))
    return stats


def leaf(value):
    return np.asarray(value["observation"], np.float64)


both = pytest.mark.parametrize("backend", ["torch", "jax"])


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 500, 1999]])
def test_moments_equal_those_of_the_data(cuts):
    rows = data()
    parts = [part for part in np.split(rows, cuts) if len(part)]
    ours = updated("torch", parts)
    assert int(ours.count) == 2000
    np.testing.assert_allclose(leaf(ours.mean), rows.astype(np.float64).mean(0), rtol=1e-10)
    np.testing.assert_allclose(leaf(ours.variance), rows.astype(np.float64).var(0), rtol=1e-10)
    in_jax = updated("jax", parts)
    assert in_jax.count.tolist() == [2000, 0]
    np.testing.assert_allclose(leaf(in_jax.mean), leaf(ours.mean), rtol=2e-7)
    np.testing.assert_allclose(leaf(in_jax.variance), leaf(ours.variance), rtol=2e-6)


def test_means_of_many_rows_in_jax_are_rounded_once():
    draw = np.random.default_rng(0)
    rows = (100.3 + 0.1 * draw.normal(size=(300_000, 1))).astype(np.float32)
    space = spaces.Box(-np.inf, np.inf, (1,))
    ours, in_jax = rs.update(rs.init(space), rows), rs.update(rs.init(space, backend="jax"), rows)
    assert abs(leaf(in_jax.mean) - leaf(ours.mean)) <= np.spacing(np.float32(100)) / 2
    np.testing.assert_allclose(leaf(in_jax.variance), leaf(ours.variance), rtol=1e-6)
    constant = rs.update(rs.init(space, backend="jax"), np.full((1001, 1), 1e9 + 64, np.float32))
    assert 0 <= leaf(constant.variance)[0] < 1


def test_a_batch_of_traced_code_counts_as_the_delivered_one_does():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    state = fc.traced.init(env, policy, None, key=jax.random.key(0))
    _, arrays = fc.traced.rollout(env, policy, None, state, 40, reset_when_done=False)
    ours = rs.update(rs.init(env.observation_space), fc.deliver(arrays, env))
    in_jax = rs.update(rs.init(env.observation_space, backend="jax"), arrays)
    assert int(in_jax.count[0]) == int(ours.count) < 120
    np.testing.assert_allclose(leaf(in_jax.mean), leaf(ours.mean), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("backend", "tolerance"), [("torch", 1e-12), ("jax", 1e-6)])
def test_merged_statistics_are_those_of_all_data(backend, tolerance):
    rows = data()
    parts = [updated(backend, [part]) for part in np.split(rows, [3, 1000])]
    whole, merged = updated(backend, [rows]), rs.merge(rs.merge(parts[0], parts[1]), parts[2])
    for one, two in ((whole.mean, merged.mean), (whole.variance, merged.variance)):
        np.testing.assert_allclose(leaf(one), leaf(two), rtol=tolerance)
    same = rs.merge(rs.init(BOX, backend=backend), whole)
    np.testing.assert_allclose(leaf(same.variance), leaf(whole.variance), rtol=1e-6)


def test_statistics_of_dicts_are_merged_by_name():
    space = spaces.Dict(velocity=BOX, agent=BOX)
    stats = rs.update(rs.init(space), {"velocity": torch.ones(2, 3), "agent": torch.zeros(2, 3)})
    assert [*stats.mean] == ["agent", "velocity"]  # as pytrees of JAX have them, but any order will do
    other = stats._replace(**{part: dict(reversed(getattr(stats, part).items())) for part in ("mean", "variance")})
    assert torch.equal(rs.merge(stats, other).mean["velocity"], torch.ones(3).double())


def test_counts_beyond_32_bits_are_exact():
    rows = data(3)
    ours, in_jax = updated("torch", [rows]), updated("jax", [rows])
    many = 2**33 + 1
    ours = rs.update(ours._replace(count=torch.tensor(many)), torch.from_numpy(rows))
    in_jax = rs.update(in_jax._replace(count=jnp.array([2**32 - 2, 7], jnp.uint32)), jnp.asarray(rows))
    assert int(ours.count) == many + 3
    assert in_jax.count.tolist() == [1, 8]
    assert rs.merge(in_jax, in_jax).count.tolist() == [2, 16]


@both
def test_nothing_is_normalised_before_the_first_observation_and_nothing_counts_if_all_are_left_out(backend):
    rows, stats = data(4), rs.init(BOX, backend=backend)
    np.testing.assert_allclose(rs.normalize(stats, KINDS[backend](rows)), rows, rtol=1e-6)
    some = rs.update(stats, KINDS[backend](rows))
    none = rs.update(some, KINDS[backend](rows * 9), weights=KINDS[backend](np.zeros(4)))
    np.testing.assert_allclose(leaf(none.variance), leaf(some.variance))
    assert (np.asarray(none.count) == np.asarray(some.count)).all()


def test_padding_and_frames_of_finished_lanes_do_not_count():
    env = fc.make_env("CartPole-v1", num_envs=3)
    with fc.SyncDataCollector(env, frames_per_batch=180, reset_when_done=False, seed=0) as collector:
        batch = next(collector)
    live = ~batch["done"][..., 0]
    assert not live.all()
    stats = rs.update(rs.init(env.observation_space), batch)
    assert int(stats.count) == int(live.sum())
    np.testing.assert_allclose(leaf(stats.mean), batch["observation"][live].double().mean(0))
    with fc.SyncDataCollector(env, frames_per_batch=180, split_trajs=True, seed=0) as collector:
        padded = next(collector)
    assert int(rs.update(rs.init(env.observation_space), padded).count) == 180
    for each in (padded, fc.interop.to_jax(padded)):
        assert int(rs.update(rs.init(env.observation_space, backend="jax"), each).count[0]) == 180


@pytest.mark.parametrize(("backend", "wrong"), [("torch", np.nan), ("torch", -np.inf), ("jax", np.inf)])
def test_observations_that_are_not_finite_are_refused(backend, wrong):
    stats = rs.init(BOX, backend=backend)
    rows = np.ones((4, 3), np.float32)
    rows[1, 1] = wrong
    with pytest.raises(ValueError, match=r"'observation' has NaN or infinite numbers.*weights="):
        rs.update(stats, KINDS[backend](rows))
    for weights in (torch.tensor([1, 0, 1, 1]), np.array([True, False, True, True]), [1, 0, 1, 1]):  # flags
        weighted = rs.update(stats, KINDS[backend](rows), weights=weights)
        assert leaf(weighted.mean).tolist() == [1, 1, 1]
        assert np.ravel(weighted.count)[0] == 3


def test_dicts_have_statistics_for_floats_alone():
    space = spaces.Dict({"a": BOX, "deep": spaces.Dict({"b": spaces.Box(-1, 1, (2,))}), "n": spaces.Discrete(3)})
    observation = {"a": torch.randn(5, 3), "deep": {"b": torch.randn(5, 2)}, "n": torch.arange(5)}
    stats = rs.update(rs.init(space), observation)
    assert {*stats.mean} == {"a", "deep.b"}
    scaled = rs.normalize(stats, observation)
    assert torch.equal(scaled["n"], observation["n"])
    assert scaled["deep"]["b"].mean(0).abs().max() < 1e-6
    batch = rs.normalize(stats, TensorDict({**observation, "next": {**observation, "reward": torch.ones(5)}}, [5]))
    for part in (batch, batch["next"]):  # the observations after each step, too
        assert torch.equal(part["deep", "b"], scaled["deep"]["b"])
        assert torch.equal(part["n"], observation["n"])
    assert torch.equal(batch["next", "reward"], torch.ones(5))
    nested = rs.normalize(stats, {**observation, "next": {**observation, "reward": torch.ones(5)}})
    assert torch.equal(nested["next"]["deep"]["b"], scaled["deep"]["b"])
    in_jax = rs.init(space, backend="jax")
    in_jax = rs.update(in_jax, jax.tree.map(lambda leaf: jnp.asarray(leaf.numpy()), observation))
    np.testing.assert_allclose(in_jax.mean["a"], stats.mean["a"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@both
def test_normalised_observations_stay_in_their_framework(backend, kind):
    rows = data(50)
    stats, array = updated(backend, [rows]), KINDS[kind](rows)
    for scaled in (rs.normalize(stats, array, clip=3.0), rs.normalize(stats, {"observation": array}, clip=3.0)):
        scaled = scaled["observation"] if isinstance(scaled, dict) else scaled
        assert isinstance(scaled, type(array))
        assert scaled.dtype == array.dtype
        np.testing.assert_allclose(scaled, rs.normalize(updated("torch", [rows]), rows, clip=3.0), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(rs.denormalize(stats, rs.normalize(stats, array)), rows, rtol=1e-4, atol=1e-4)
    if kind == "torch":
        batch = rs.normalize(stats, TensorDict({"observation": array}, [50]), clip=3.0)
        assert torch.equal(batch["observation"], scaled)


def test_updates_run_inside_jit_and_vmap():
    rows = jnp.asarray(data(600)).reshape(2, 3, 100, 3)
    jitted = jax.jit(jax.vmap(lambda stats, batch: jax.lax.scan(lambda s, b: (rs.update(s, b), None), stats, batch)[0]))
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), rs.init(BOX, backend="jax"))
    stats = jitted(many, rows)
    assert stats.count.tolist() == [[300, 0]] * 2
    for run in range(2):
        wanted = np.asarray(rows[run], np.float64).reshape(-1, 3)
        np.testing.assert_allclose(stats.mean["observation"][run], wanted.mean(0), rtol=1e-6)
        np.testing.assert_allclose(stats.variance["observation"][run], wanted.var(0), rtol=1e-5)


def test_bad_arguments_are_refused():
    box = spaces.Box(-1, 1, (2,))
    stats, rows, half = rs.init(box), torch.zeros(2, 2), torch.tensor([0.5, 1.0])
    of_a, both = rs.init(spaces.Dict({"a": box})), rs.init(spaces.Dict({"a": box, "b": box}))
    for error, words, call in (
        (TypeError, ("space is Discrete(3)", "expected a Box of floats"), lambda: rs.init(spaces.Discrete(3))),
        (ValueError, ("holds a dot",), lambda: rs.init(spaces.Dict({"a.b": box}))),
        (ValueError, ("but is 'numpy'",), lambda: rs.init(box, backend="numpy")),
        (ValueError, ("weights is [4]", "expected [2]"), lambda: rs.update(stats, rows, weights=torch.ones(4))),
        (ValueError, ("expected bools, or zeros and ones",), lambda: rs.update(stats, rows, weights=half)),
        (ValueError, ("'observation' is [3, 1]", "expected [3, 2]"), lambda: rs.update(stats, torch.ones(3, 1))),
        (ValueError, ("shapes {'observation': (2,)} and {'a': (2,)}",), lambda: rs.merge(stats, of_a)),
        (TypeError, ("Torch and of JAX", "init(space, b"), lambda: rs.merge(stats, rs.init(box, backend="jax"))),
        (ValueError, ("pass a dict of these",), lambda: rs.normalize(both, torch.ones(3, 2))),
        (KeyError, ("lacks ['b']",), lambda: rs.normalize(both, {"a": torch.ones(3, 2)})),
        (KeyError, ("the batch lacks ['observation'], expected the observations",), lambda: rs.update(stats, {})),
    ):
        with refused(error, words):
            call()


def test_integers_and_half_precision():
    box = spaces.Box(-1, 1, (2,))
    stats = rs.update(rs.init(box), torch.tensor([[0.0, 0.0], [4.0, 8.0]]))
    for given in (torch.tensor([[4, 8]]), np.array([[4, 8]]), [[4, 8]]):
        assert np.asarray(rs.normalize(stats, given)) == pytest.approx(np.ones((1, 2)))
    rows = jnp.full((4000, 2), 50.0, jnp.float16)  # whose sum float16 does not have
    in_jax = rs.update(rs.init(box, backend="jax"), rows)
    assert np.asarray(in_jax.mean["observation"]) == pytest.approx([50, 50])
    with pytest.raises(ValueError, match=r"weights is .*, expected bools"):
        rs.update(in_jax, rows, weights=jnp.full(4000, 0.5))


def test_a_batch_without_next_observations_is_refused_and_statistics_that_do_not_fit_the_policy():
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.SyncDataCollector(env, None, frames_per_batch=40, compact_obs=True) as collector:
        batch = next(collector)
    stats = rs.init(env.observation_space)
    with pytest.raises(ValueError, match="next_observations"):
        rs.normalize(stats, batch)
    policy = fc.normalized(fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical), stats)
    other = fc.make_env("Pendulum-v1")
    with pytest.raises(ValueError, match=r"statistics of 'observation' have the shape \[4\].*\[3\].*init\(env"):
        fc.init(other, fc.normalized(fc.torch_policy(torch.nn.Linear(3, 2), head=fc.heads.normal), stats), seed=0)
    for wrong in (rs.init(spaces.Box(-1, 1, (3,))), rs.init(env.observation_space, backend="jax"), 3):
        with pytest.raises((TypeError, ValueError), match="expected"):
            policy.statistics = wrong

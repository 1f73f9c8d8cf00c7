"""Episodes in traced code against `episode_stats` and `evaluate` on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.errors import EvaluationError
from tests.support.envs.jax_counting import counting, counting_policy
from tests.support.running import in_soak

ENV, POLICY = counting(3), counting_policy()
SEED, KEY = 7, jnp.array([0, 7], jnp.uint32)


def run(lengths, key=KEY, env=ENV, policy=POLICY, **options):
    """The batches of these lengths, and the statistics of each."""
    state, stats, parts = fc.traced.init(env, policy, policy.params, key=key), None, []
    for length in lengths:
        state, batch = fc.traced.rollout(env, policy, policy.params, state, length, **options)
        stats = fc.traced.episode_stats(batch, stats)
        parts.append((batch, stats))
    return tuple(zip(*parts, strict=True))


def ended(stats):
    """Returns and lengths of the episodes that ended, by time and lane."""
    mask = np.asarray(stats.ended)
    return [*zip(np.asarray(stats.returns)[mask].tolist(), np.asarray(stats.lengths)[mask].tolist(), strict=True)]


def on_the_host(batches, env=ENV):
    found, stats = [], None
    for batch in batches:
        stats = fc.episode_stats(fc.deliver(batch, env), stats)
        found += [*zip(stats.returns.tolist(), stats.lengths.tolist(), strict=True)]
    return found


@pytest.mark.parametrize("options", [{}, {"reset_when_done": False}, *in_soak([{"max_frames_per_traj": 4}])])
def test_they_are_those_of_the_host_however_a_run_is_cut(options):
    batches, parts = jax.jit(lambda: run([40, 1, 1, 18], **options))()
    cut = [episode for stats in parts for episode in ended(stats)]
    assert cut == on_the_host(batches)
    assert cut == ended(jax.jit(lambda: run([60], **options)[1][0])())
    assert sum(int(each.count) for each in parts) == len(cut) >= 3


def test_episodes_with_missing_frames_are_omitted():
    (first, second, third), (stats, *_) = jax.jit(lambda: run([5, 3, 40]))()
    with pytest.warns(UserWarning, match="episodes of the batch began before it"):
        on_host = on_the_host([second])
    assert ended(fc.traced.episode_stats(second)) == on_host
    assert ended(fc.traced.episode_stats(third, stats)) == on_the_host([first, third])[int(stats.count) :]


def test_a_reset_begins_other_episodes():
    @jax.jit
    def batches():
        state, batch = fc.traced.rollout(ENV, POLICY, POLICY.params, fc.traced.init(ENV, POLICY, None, key=KEY), 3)
        state = fc.traced.reset(ENV, state, jnp.array([True, False, True]))
        return batch, fc.traced.rollout(ENV, POLICY, POLICY.params, state, 30)[1]

    batch, later = batches()
    stats = fc.traced.episode_stats(batch)
    assert ended(stats) + ended(fc.traced.episode_stats(later, stats)) == on_the_host([batch, later])


def test_seeds_under_vmap_agree_with_each_alone():
    keys = jax.random.split(KEY, 3)
    of_seed = jax.jit(lambda key: run([30, 30], key)[1][1])
    together = jax.jit(jax.vmap(of_seed))(keys)
    for index, key in enumerate(keys):
        own = jax.tree.map(lambda leaf, index=index: leaf[index], together)
        jax.tree.map(np.testing.assert_array_equal, own, of_seed(key))
    assert together.count == together.ended.sum()


def test_several_players_have_returns_of_their_own():
    env = fc.make_env("pgx/tic_tac_toe", num_envs=4)
    policy = fc.random_policy(env)
    state = fc.traced.init(env, policy, None, key=KEY)
    _, batch = jax.jit(lambda state: fc.traced.rollout(env, policy, None, state, 20))(state)
    stats = fc.traced.episode_stats(batch)
    assert stats.returns.shape == (20, 4, 2)
    assert ended(stats) == on_the_host([batch], env)
    assert stats.mean_return.shape == (2,)


def test_means_are_nan_where_nothing_ended():
    stats = run([1])[1][0]
    assert stats.count == 0
    assert jnp.isnan(stats.mean_return)
    assert jnp.isnan(stats.mean_length)


@pytest.mark.parametrize("episodes", [10, *in_soak([1, 3])])
def test_an_evaluation_is_that_of_the_host(episodes):
    def evaluated(key):
        return fc.traced.evaluate(ENV, POLICY, POLICY.params, key, episodes)

    stats, wanted = jax.jit(evaluated)(KEY), fc.evaluate(ENV, POLICY, episodes=episodes, seed=SEED)
    assert stats.ended.all()
    assert stats.returns.tolist() == wanted.returns.tolist()
    assert stats.lengths.tolist() == wanted.lengths.tolist()
    keys = jnp.stack([KEY, KEY + 1])
    both = jax.jit(jax.vmap(evaluated))(keys)
    assert both.returns[0].tolist() == wanted.returns.tolist()
    assert both.returns[1].tolist() == jax.jit(evaluated)(keys[1]).returns.tolist()


def test_an_evaluation_that_gives_up_says_which_episodes_it_lacks():
    stats = fc.traced.evaluate(ENV, POLICY, POLICY.params, KEY, 300, max_frames=90)
    _, all_of_it = run([30], exploration_type=fc.ExplorationType.DETERMINISTIC)
    assert stats.count == all_of_it[0].count < 300
    with pytest.raises(EvaluationError):
        fc.evaluate(ENV, POLICY, episodes=300, seed=SEED, max_frames=90)


def test_wrong_arguments_are_named():
    (batch,), (stats,) = run([4])
    first, narrow = (jax.tree.map(lambda leaf, at=at: leaf[at], batch) for at in (0, np.s_[:, :2]))
    for given, error, message in (
        ((3,), TypeError, "batch is 3, expected Mapping"),
        (({"next": {}},), ValueError, "the batch lacks 'collector'"),
        ((first,), ValueError, r"next.done has shape \[3\], expected \[T, P\]"),
        ((batch, torch.zeros(())), TypeError, r"previous is .*expected TracedEpisodeStats"),
        ((batch, stats._replace(open=None)), TypeError, r"previous\.open is None"),
        ((narrow, stats), ValueError, r"had rewards \[3\], this one has \[2\]"),
    ):
        with pytest.raises(error, match=message):
            fc.traced.episode_stats(*given)


def test_a_scan_begins_with_no_stats():
    def update(carry, _):
        state, batch = fc.traced.rollout(ENV, POLICY, POLICY.params, carry[0], 20)
        stats = fc.traced.episode_stats(batch, carry[1])
        return (state, stats), stats

    @jax.jit
    def train():
        state = fc.traced.init(ENV, POLICY, POLICY.params, key=KEY)
        return jax.lax.scan(update, (state, fc.traced.no_stats(state, 20)), None, 3)[1]

    parts = jax.jit(lambda: run([20] * 3)[1])()
    assert jax.tree.all(jax.tree.map(lambda all_, *each: jnp.array_equal(all_, jnp.stack(each)), train(), *parts))

"""Episodes in traced code against `episode_stats` and `evaluate` on the host."""

from functools import partial

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
BEGIN = jax.jit(partial(fc.traced.init, ENV, POLICY, None))
ROLLOUT = jax.jit(
    partial(fc.traced.rollout, ENV, POLICY), static_argnames=("length", "reset_when_done", "max_frames_per_traj")
)
STATS = jax.jit(fc.traced.episode_stats)


def run(lengths, key=KEY, **options):
    """The batches of these lengths, and the statistics of each."""
    state, stats, parts = BEGIN(key=key), None, []
    for length in lengths:
        state, batch = ROLLOUT(POLICY.params, state, length=length, **options)
        stats = STATS(batch, stats)
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
    batches, parts = run([20, 3, 20], **options)
    cut = [episode for stats in parts for episode in ended(stats)]
    assert cut == on_the_host(batches)
    assert cut == ended(run([43], **options)[1][0])
    assert sum(int(each.count) for each in parts) == len(cut) >= 3


def test_episodes_with_missing_frames_are_omitted():
    (first, second, third), (stats, *_) = run([20, 3, 20])
    with pytest.warns(UserWarning, match="episodes of the batch began before it"):
        on_host = on_the_host([second])
    assert ended(STATS(second)) == on_host
    assert ended(STATS(third, stats)) == on_the_host([first, third])[int(stats.count) :]


def test_a_reset_begins_other_episodes():
    state, batch = ROLLOUT(POLICY.params, BEGIN(key=KEY), length=3)
    state = jax.jit(partial(fc.traced.reset, ENV))(state, jnp.array([True, False, True]))
    _, later = ROLLOUT(POLICY.params, state, length=20)
    stats = STATS(batch)
    assert ended(stats) + ended(STATS(later, stats)) == on_the_host([batch, later])


def test_seeds_under_vmap_agree_with_each_alone():
    keys = jax.random.split(KEY, 3)
    together = jax.vmap(lambda key: run([20, 20], key)[1][1])(keys)
    for index, key in enumerate(keys):
        own = jax.tree.map(lambda leaf, index=index: leaf[index], together)
        jax.tree.map(np.testing.assert_array_equal, own, run([20, 20], key)[1][1])
    assert together.count == together.ended.sum()


def test_several_players_have_returns_of_their_own():
    env = fc.make_env("pgx/tic_tac_toe", num_envs=4)
    policy = fc.random_policy(env)

    @jax.jit
    def rolled(key):
        return fc.traced.rollout(env, policy, None, fc.traced.init(env, policy, None, key=key), 20)[1]

    stats = STATS(batch := rolled(KEY))
    assert stats.returns.shape == (20, 4, 2)
    assert ended(stats) == on_the_host([batch], env)
    assert stats.mean_return.shape == (2,)


def test_means_are_nan_where_nothing_ended():
    stats = fc.traced.no_stats(BEGIN(key=KEY), 20)
    assert stats.count == 0
    assert jnp.isnan(stats.mean_return)
    assert jnp.isnan(stats.mean_length)


@pytest.mark.parametrize("episodes", [10, *in_soak([1, 3])])
def test_an_evaluation_is_that_of_the_host(episodes):
    evaluated = jax.jit(lambda key: fc.traced.evaluate(ENV, POLICY, POLICY.params, key, episodes))
    stats, wanted = evaluated(KEY), fc.evaluate(ENV, POLICY, episodes=episodes, seed=SEED)
    assert stats.ended.all()
    assert stats.returns.tolist() == wanted.returns.tolist()
    assert stats.lengths.tolist() == wanted.lengths.tolist()
    keys = jnp.stack([KEY, KEY + 1])
    both = jax.vmap(evaluated)(keys)
    assert both.returns[0].tolist() == wanted.returns.tolist()
    assert both.returns[1].tolist() == evaluated(keys[1]).returns.tolist()


def test_an_evaluation_that_gives_up_says_which_episodes_it_lacks():
    stats = jax.jit(lambda key: fc.traced.evaluate(ENV, POLICY, POLICY.params, key, 300, max_frames=60))(KEY)
    assert stats.count == run([20])[1][0].count < 300
    with pytest.raises(EvaluationError):
        fc.evaluate(ENV, POLICY, episodes=300, seed=SEED, max_frames=60)


def test_wrong_arguments_are_named():
    (batch,), (stats,) = run([3])
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
        state, batch = ROLLOUT(POLICY.params, carry[0], length=20)
        stats = STATS(batch, carry[1])
        return (state, stats), stats

    @jax.jit
    def train():
        state = BEGIN(key=KEY)
        return jax.lax.scan(update, (state, fc.traced.no_stats(state, 20)), None, 3)[1]

    parts = run([20] * 3)[1]
    assert jax.tree.all(jax.tree.map(lambda all_, *each: jnp.array_equal(all_, jnp.stack(each)), train(), *parts))

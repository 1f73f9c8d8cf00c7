from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from funcollect.keys import (
    LaneKeys,
    Noise,
    Purpose,
    draw_ahead,
    fold,
    fold_in,
    key_from_seed,
    normals,
    random_words,
    seed_of,
    uniforms,
)

KEY = key_from_seed(12345)
SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63, 2**64 - 1]


def ks_distance(sample: np.ndarray, cdf: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The Kolmogorov-Smirnov distance, times the root of the sample's size: beyond 2.2 in one case of 10,000."""
    ordered = cdf(torch.from_numpy(np.sort(sample.ravel())).double()).numpy()
    size = len(ordered)
    steps = np.arange(size + 1) / size
    return math.sqrt(size) * max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform": lambda x: x,
    "gumbel": lambda x: torch.exp(-torch.exp(-x)),
    "normal": torch.special.ndtr,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_key_holds_its_seed(seed: int) -> None:
    key = key_from_seed(seed)
    assert key.dtype == np.uint32
    assert key.shape == (2,)
    assert seed_of(key) == seed


def test_a_key_has_the_layout_of_a_legacy_jax_key() -> None:
    assert key_from_seed((3 << 32) + 5).tolist() == [3, 5]


def test_an_integer_of_numpy_is_a_seed() -> None:
    assert seed_of(key_from_seed(np.int64(9))) == 9


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=r"expected 0 <= seed < 2\*\*64"):
        key_from_seed(seed)


@pytest.mark.parametrize("seed", [1.0, "1", True])
def test_a_seed_of_another_type_is_refused(seed: object) -> None:
    with pytest.raises(TypeError, match="expected an int or None"):
        key_from_seed(seed)


def test_none_draws_fresh_entropy_that_no_global_generator_decides() -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    drawn = set()
    for _ in range(20):
        np.random.seed(0)
        drawn.add(seed_of(key_from_seed(None)))
    assert len(drawn) > 15


def test_fold_depends_on_the_key_and_on_every_word_and_their_order() -> None:
    words = {fold(key_from_seed(seed), *path) for seed in (0, 1, 2**32) for path in [(), (0,), (1,), (0, 1), (1, 0)]}
    assert len(words) == 15
    assert fold(KEY, 3, 5) == fold(key_from_seed(fold(KEY, 3)), 5)
    assert all(0 <= word < 2**64 for word in words)


def test_fold_is_splitmix64() -> None:
    """The generator's published first outputs for the seed 1234567 (each step adds the golden gamma once)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [fold(key_from_seed(1234567), index) for index in range(3)] == published


def test_lane_uniforms_are_made_of_the_words_that_fold_gives() -> None:
    lanes, episodes = torch.tensor([0, 1, 5, 2**40 + 3]), torch.tensor([0, 7, 2, 10**6])
    drawn = LaneKeys(KEY, Purpose.RESET, lanes, episodes).uniform(3)
    for row, lane, episode in zip(drawn.tolist(), lanes.tolist(), episodes.tolist(), strict=True):
        words = [fold(KEY, Purpose.RESET, lane, episode, draw) for draw in range(3)]
        assert row == [((word >> 11) + 0.5) * 2.0**-53 for word in words]


def test_lane_uniforms_of_a_step_are_those_of_its_number() -> None:
    lanes = torch.arange(3)
    for number in (0, 5, 2**40 + 1, 2**62):
        one = LaneKeys(KEY, Purpose.DYNAMICS, lanes, number).uniform(2)
        assert torch.equal(one, LaneKeys(KEY, Purpose.DYNAMICS, lanes, torch.full((3,), number)).uniform(2))
        assert not torch.equal(one, LaneKeys(KEY, Purpose.RESET, lanes, number).uniform(2))


def test_words_can_be_folded_in_one_by_one() -> None:
    for lane, episode in [(0, 0), (0, 1), (3, 0), (2**40, 12)]:
        assert fold_in(fold(KEY, Purpose.RESET, lane), episode) == fold(KEY, Purpose.RESET, lane, episode)


def test_episode_seeds_fit_gymnasium_and_differ() -> None:
    seeds = [fold(KEY, Purpose.RESET, lane, episode) >> 32 for lane in range(40) for episode in range(50)]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) >= len(seeds) - 2  # two equal ones: one case in 2,000


def test_lane_uniforms_are_uniform_over_lanes_and_over_episodes() -> None:
    many = torch.arange(20_000)
    over_lanes = LaneKeys(KEY, Purpose.RESET, many, torch.zeros_like(many)).uniform(2).numpy()
    over_episodes = LaneKeys(KEY, Purpose.RESET, torch.zeros_like(many), many).uniform(2).numpy()
    assert ks_distance(over_lanes, DISTRIBUTIONS["uniform"]) < 2.2
    assert ks_distance(over_episodes, DISTRIBUTIONS["uniform"]) < 2.2
    assert abs(np.corrcoef(over_lanes.T)[0, 1]) < 4 / math.sqrt(20_000)


@pytest.mark.parametrize("width", [1, 8, 9, 40])
def test_words_do_not_depend_on_how_a_run_is_cut(width: int) -> None:
    whole = random_words(KEY, Purpose.NOISE, 0, 0, 50, width)
    assert whole.shape == (50, width)
    for start, length in [(0, 1), (1, 7), (8, 30), (49, 1)]:
        part = random_words(KEY, Purpose.NOISE, 0, start, length, width)
        assert (part == whole[start : start + length]).all()


def test_words_far_into_a_run_are_words_of_their_own() -> None:
    far = random_words(KEY, Purpose.NOISE, 0, 2**40, 3, 16)
    assert len({*far.ravel().tolist(), *random_words(KEY, Purpose.NOISE, 0, 0, 3, 16).ravel().tolist()}) >= 95


def test_words_differ_between_keys_purposes_lanes_and_steps() -> None:
    streams = [
        random_words(key_from_seed(seed), purpose, lane, start, 100, 8).ravel()
        for seed in (0, 1, 2**32)
        for purpose in Purpose
        for lane in (0, 1, 2**39)
        for start in (0, 100)
    ]
    distinct = len(np.unique(np.concatenate(streams)))
    assert distinct > 0.999 * sum(map(len, streams))


def test_uniforms_exclude_both_ends_for_every_word() -> None:
    extreme = uniforms(np.array([0, 1, 511, 512, 2**31, 2**32 - 512, 2**32 - 1], np.uint32))
    assert extreme.dtype == np.float32
    assert (extreme > 0).all()
    assert (extreme < 1).all()
    assert (np.diff(extreme) >= 0).all()
    assert np.isfinite(normals(extreme)).all()
    assert np.isfinite(-np.log(-np.log(extreme))).all()


@pytest.mark.parametrize("kind", ["uniform", "gumbel", "normal"])
def test_noise_has_its_distribution(kind: str) -> None:
    drawn = draw_ahead(Noise(kind=kind, shape=(4,)), KEY, 0, 5, 0, 2000).numpy()
    mean, variance = {"uniform": (0.5, 1 / 12), "gumbel": (0.57722, math.pi**2 / 6), "normal": (0, 1)}[kind]
    assert drawn.mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / drawn.size))
    assert drawn.var() == pytest.approx(variance, rel=0.05)
    assert ks_distance(drawn, DISTRIBUTIONS[kind]) < 2.2


def test_the_check_of_distributions_can_fail() -> None:
    drawn = draw_ahead(Noise(kind="normal"), KEY, 0, 5, 0, 8000).numpy()
    assert ks_distance(drawn * 1.05, DISTRIBUTIONS["normal"]) > 2.2
    assert ks_distance(drawn + 0.05, DISTRIBUTIONS["normal"]) > 2.2


def test_noise_is_independent_between_lanes_steps_and_components() -> None:
    drawn = draw_ahead(Noise(kind="normal", shape=(2,)), KEY, 0, 3, 0, 20_000).numpy()
    columns = np.concatenate([drawn[:-1].reshape(19_999, 6), drawn[1:].reshape(19_999, 6)], 1)
    correlation = np.corrcoef(columns.T) - np.eye(12)
    assert abs(correlation).max() < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("kind", ["uniform", "gumbel", "normal"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_noise_is_one_float32_array_per_lane_and_step(kind: str, shape: tuple[int, ...]) -> None:
    noise = Noise(kind=kind, shape=shape)
    whole = draw_ahead(noise, KEY, 4, 5, 0, 20)
    assert whole.shape == (20, 5, *shape)
    assert whole.dtype == torch.float32
    assert torch.equal(draw_ahead(noise, KEY, 4, 5, 6, 9), whole[6:15])


def test_noise_of_kind_key_is_one_key_per_step_for_all_lanes() -> None:
    drawn = draw_ahead(Noise(kind="key"), KEY, 0, 5, 0, 100)
    assert drawn.shape == (100, 2)
    assert drawn.dtype == torch.uint32
    assert len({tuple(row) for row in drawn.tolist()}) == 100
    assert torch.equal(draw_ahead(Noise(kind="key"), KEY, 0, 5, 40, 10), drawn[40:50])


def test_noise_leaves_every_global_generator_as_it_was() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw_ahead(Noise(kind="normal"), KEY, 0, 5, 0, 10)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()

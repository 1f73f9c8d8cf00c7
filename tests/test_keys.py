import math

import jax
import numpy as np
import pytest
import torch

from funcollect import keys as keys_module
from funcollect.keys import (
    LaneKeys,
    Noise,
    Purpose,
    draw_ahead,
    fold,
    generator_state,
    key_from_seed,
    lane_keys,
    random_words,
    seed_of,
    torch_generator,
)
from funcollect.policies.jax_functions.program import drawing
from funcollect.threefry import hashed, hashed_in_jax, hashed_in_numpy, is_on_gpu
from tests.support.compare import ks_distance
from tests.support.devices import each_device

KEY = key_from_seed(12345)


DISTRIBUTIONS = {
    "uniform": lambda x: x,
    "gumbel": lambda x: torch.exp(-torch.exp(-x)),
    "normal": torch.special.ndtr,
}


def test_a_key_holds_its_seed_in_the_layout_of_a_legacy_jax_key():
    for seed in (0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63, 2**64 - 1, np.int64(9)):
        key = key_from_seed(seed)
        assert (key.dtype, key.tolist()) == (np.uint32, [int(seed) >> 32, int(seed) % 2**32])
        assert seed_of(key) == seed


def test_fold_depends_on_the_key_and_on_every_word_and_their_order():
    keys = {fold(key_from_seed(seed), *path) for seed in (0, 1, 2**32) for path in [(), (0,), (1,), (0, 1), (1, 0)]}
    assert len(keys) == 15
    assert fold(KEY, 3, 5) == fold(fold(KEY, 3), 5)
    assert all(0 <= word < 2**32 for key in keys for word in key)
    for data in (0, 1, 2**31, 2**32 - 1):
        assert tuple(jax.random.fold_in(jax.random.PRNGKey(12345), data).tolist()) == fold(KEY, data)


# The known answers of Salmon et al. (Random123, kat_vectors): counter, key, and words.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_every_form_of_the_hash_gives_the_known_answers(counter, key, words):
    assert hashed(key, *counter) == words
    for count in (1, 100):
        pair = tuple(np.full(count, word, np.uint32) for word in key)
        rows = [np.full(count, word, np.uint32) for word in counter]
        assert {*zip(*(each.tolist() for each in hashed_in_numpy(pair, *rows)), strict=True)} == {words}
        tensors = [torch.from_numpy(each.astype(np.int64)) for each in (*pair, *rows)]
        assert {*zip(*(each.tolist() for each in hashed(tensors[:2], *tensors[2:])), strict=True)} == {words}
        in_jax = jax.jit(hashed_in_jax)(pair, *rows)
        assert {*zip(*(each.tolist() for each in in_jax), strict=True)} == {words}


@each_device
def test_lane_uniforms_have_the_words_of_random_words(device):
    lanes = torch.tensor([0, 1, 5, 2**31], device=device)
    for number in (0, 7, 2**32 + 5, 2**47):
        words = words_of(KEY, Purpose.RESET, lanes.tolist(), number, 1, 6)[0].astype(np.uint64)
        wanted = ((words[:, ::2] << np.uint64(20) | words[:, 1::2] >> np.uint64(12)) + 0.5) * 2.0**-52
        for numbers in (number, *(torch.full((count,), number, device=device) for count in (4, 1))):
            drawn = LaneKeys.of(KEY, Purpose.RESET, lanes, numbers)
            assert drawn.uniform(3).tolist() == wanted.tolist()
        if device == "cpu":
            keys = tuple(torch.from_numpy(each.astype(np.int64)) for each in drawn.keys)
            assert LaneKeys(lanes, keys, numbers).uniform(3).tolist() == wanted.tolist()
        assert not torch.equal(drawn.uniform(3), LaneKeys.of(KEY, Purpose.DYNAMICS, lanes, number).uniform(3))


@each_device
@pytest.mark.parametrize("kind", ["uniform", "gumbel", "normal", "keys", "key"])
def test_noise_that_tensors_draw_is_that_of_numpy(kind, device, monkeypatch):
    monkeypatch.setattr("funcollect.keys._HASHES_ON_DEVICE", 20)  # so that rows come in several parts
    lanes = np.array([0, 3, 2**31])
    assert is_on_gpu(torch.from_numpy(lanes).to(device)) == (device == "cuda")
    for shape in ((), (3,), (2, 2)):
        noise = Noise(kind=kind, shape=() if "key" in kind else shape)
        for start in (0, 2**32 - 2):
            drawn = draw_ahead(noise, KEY, lanes, start, 5)
            on_device = draw_ahead(noise, KEY, torch.from_numpy(lanes).to(device), start, 5).cpu()
            assert on_device.dtype == drawn.dtype
            torch.testing.assert_close(on_device, drawn, rtol=2e-6, atol=1e-6 * (kind == "gumbel" or device == "cuda"))


def words_of(key, purpose, lanes, start, length, width):
    return random_words(lane_keys(key, purpose, np.array(lanes)), np.arange(start, start + length)[:, None], width)


@pytest.mark.parametrize("width", [1, 8, 9, 40])
def test_words_depend_neither_on_how_a_run_is_cut_nor_on_how_lanes_are_grouped(width):
    whole = words_of(KEY, Purpose.NOISE, range(3, 8), 0, 2000, width)
    assert whole.shape == (2000, 5, width)
    for start, length in [(0, 1), (1, 7), (8, 30), (49, 1), (100, 1900)]:
        part = words_of(KEY, Purpose.NOISE, [3, 4, 5, 6, 7], start, length, width)
        assert (part == whole[start : start + length]).all()
    assert (words_of(KEY, Purpose.NOISE, [6, 4], 2, 9, width) == whole[2:11, [3, 1]]).all()
    assert (words_of(KEY, Purpose.NOISE, [3], 2, 1, 4 * width)[..., :width] == whole[2:3, :1]).all()


@pytest.mark.parametrize("step", [3, 2**32 - 1, 2**32 + 5, 2**47 + 2**33])
def test_compiled_code_draws_the_words_of_numpy_at_every_step(step):
    lanes = [0, 5, 70_000, 2**31 - 1]
    for width in (1, 7, 301):
        one, two = lane_keys(KEY, Purpose.NOISE, np.array(lanes))
        steps = np.array([step % 2**32, step >> 32], np.uint32)
        drawn = jax.jit(lambda keys, steps, width=width: drawing(keys, steps)(width))((one, two), steps)
        assert (words_of(KEY, Purpose.NOISE, lanes, step, 1, width)[0] == np.asarray(drawn).T).all()


def test_no_number_is_zero_or_one(monkeypatch):
    words = np.array([[[0, 1, 511, 512, 2**31, 2**32 - 512, 2**32 - 1]]], np.uint32)
    extreme, *others = (
        draw_ahead(Noise(kind=kind, shape=(7,)), KEY, np.arange(1), 0, 1, draw=lambda *_: words)
        for kind in DISTRIBUTIONS
    )
    assert extreme.dtype == torch.float32
    assert bool(((extreme > 0) & (extreme < 1)).all() & (extreme.diff() >= 0).all())
    assert all(bool(each.isfinite().all()) for each in others)
    for word in (0, 2**32 - 1):
        monkeypatch.setattr("funcollect.keys.random_words", lambda *_, word=word: np.full((1, 1, 2), word, np.uint32))
        assert 0 < float(LaneKeys.of(KEY, Purpose.RESET, torch.tensor([0]), 0).uniform(1)) < 1


def test_words_differ_between_keys_purposes_lanes_and_steps():
    streams = [
        words_of(key_from_seed(seed), purpose, [lane], start, 100, 8).ravel()
        for seed in (0, 1, 2**32)
        for purpose in Purpose
        for lane in (0, 1, 2**31)
        for start in (0, 100, 2**32, 2**40)
    ]
    distinct = len(np.unique(np.concatenate(streams)))
    assert distinct > 0.999 * sum(map(len, streams))


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_noise_has_its_distribution(kind):
    drawn = draw_ahead(Noise(kind=kind, shape=(4,)), KEY, np.arange(5), 0, 2000).numpy()
    mean, variance = {"uniform": (0.5, 1 / 12), "gumbel": (0.57722, math.pi**2 / 6), "normal": (0, 1)}[kind]
    assert drawn.mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / drawn.size))
    assert drawn.var() == pytest.approx(variance, rel=0.05)
    assert ks_distance(drawn, DISTRIBUTIONS[kind]) < 2.2
    if kind == "normal":  # the check can fail
        assert min(ks_distance(drawn * 1.05, torch.special.ndtr), ks_distance(drawn + 0.05, torch.special.ndtr)) > 2.2


def test_noise_is_independent_between_lanes_steps_and_components():
    drawn = draw_ahead(Noise(kind="normal", shape=(2,)), KEY, np.arange(3), 0, 20_000).numpy()
    columns = np.concatenate([drawn[:-1].reshape(19_999, 6), drawn[1:].reshape(19_999, 6)], 1)
    correlation = np.corrcoef(columns.T) - np.eye(12)
    assert abs(correlation).max() < 5 / math.sqrt(20_000)


@pytest.mark.parametrize(
    ("kind", "shape"), [("uniform", (2, 3)), ("gumbel", ()), ("normal", (3,)), ("keys", ()), ("key", ())]
)
def test_noise_is_one_array_per_lane_and_step(kind, shape):
    noise = Noise(kind=kind, shape=shape)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    whole = draw_ahead(noise, KEY, np.arange(4, 9), 0, 100)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    lead, own = ((100,), (2,)) if kind == "key" else ((100, 5), (2,) if kind == "keys" else shape)
    assert whole.shape == (*lead, *own)
    assert whole.dtype == (torch.uint32 if "key" in kind else torch.float32)
    assert len({*map(tuple, whole.reshape(len(whole), -1).tolist())}) == 100
    assert torch.equal(draw_ahead(noise, KEY, np.arange(4, 9), 6, 9), whole[6:15])
    if kind == "keys":  # a key for all lanes is the first one's
        assert torch.equal(whole[:, 0], draw_ahead(Noise(kind="key"), KEY, np.arange(4, 9), 0, 100))


def test_the_generator_of_a_device_follows_from_the_state_and_is_restored(monkeypatch):
    on_device, cuda = torch.Generator(), torch.device("cuda", 0)  # in the place of a GPU's
    monkeypatch.setattr(keys_module, "_device_generator", lambda device: on_device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    state, before = generator_state(3), on_device.get_state()

    def drawn(state, error=None):
        with torch_generator(state, cuda):
            numbers = torch.rand(4, generator=on_device)
            if error:
                raise error
        return numbers

    copy = state.clone()
    one, two, again = drawn(state), drawn(state), drawn(copy)
    assert torch.equal(on_device.get_state(), before)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    with pytest.raises(RuntimeError, match="of the module"):
        drawn(state, RuntimeError("of the module"))
    assert torch.equal(on_device.get_state(), before)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.delattr(keys_module, "_device_generator")  # which a capture leaves alone
    with torch_generator(generator_state(3), cuda):
        pass

"""The core functions over an environment that counts, so that every batch can be written down by hand."""

import random

import pytest
import torch

import funcollect as fc
from tests.support.compare import fresh
from tests.support.envs.counting import always, check, make_counting
from tests.support.running import scaled

ONE = {"lengths": (3, 2), "truncated": (1,)}
THREE = ({"lengths": (3, 2)}, {"lengths": (2,), "truncated": (1,)}, {"lengths": (4, 1)})
SINGLE = ("host", "torch")
MANY = ("host", "vector", "torch")


@pytest.mark.parametrize("backend", SINGLE)
def test_a_single_environment_goes_on(backend):
    env, policy, state = fresh(make_counting(backend, ONE, batched=False), seed=5)
    for words in ("0.0 0.1", "0.2t", "1.0 1.1c 2.0 2.1 2.2t", "3.0"):
        state, batch = fc.rollout(env, policy, state, len(words.split()))
        check(batch, words, batched=False)
    assert (state.frames, state.steps, state.seed) == (9, 9, 5)
    assert (state.episode.tolist(), state.step.tolist(), state.traj_ids.tolist()) == ([3], [1], [3])
    assert state.returns.tolist() == [30 + int(batch["action"]) / 4]


@pytest.mark.parametrize("backend", MANY)
def test_reset_of_some_lanes_and_of_all_and_batches_that_are_locked(backend):
    env = make_counting(backend, *THREE)
    state, batch = fc.rollout(env, always(0), fc.init(env, always(0), seed=0), 2)
    check(batch, "0.0 0.1", "0.0 0.1t", "0.0 0.1")
    state = fc.reset(env, state, torch.tensor([True, False, True]))
    assert state.returns.tolist() == [0, 0, 0]
    state, batch = fc.rollout(env, always(0), state, 1)
    check(batch, "1.0", "1.0", "1.0t")
    state = fc.reset(env, state)
    assert [state.episode.tolist(), state.step.tolist(), state.returns.tolist()] == [[2, 2, 3], [0, 0, 0], [0, 0, 0]]
    _, batch = fc.rollout(env, always(0), state, 2)
    check(batch, "2.0 2.1", "2.0 2.1t", "3.0t 4.0")
    assert batch["next"].is_locked
    with pytest.raises(RuntimeError, match="lock"):
        batch["mine"] = torch.zeros(3, 2)
    own = batch.clone(False)
    own["mine"] = torch.zeros(3, 2)
    assert "mine" not in batch


@pytest.mark.parametrize("seed", range(scaled(8)))
@pytest.mark.parametrize("backend", MANY)
def test_any_run_against_a_count(backend, seed):
    """Rollouts of any length with limits and resets between, against lanes counted one by one."""
    choose = random.Random(seed)
    lanes = [
        {"lengths": [choose.randint(1, 6) for _ in range(3)], "truncated": choose.sample(range(20), 5)}
        for _ in range(choose.randint(1, 4))
    ]
    env, policy, state = fresh(make_counting(backend, *lanes), seed=seed)
    at = [(0, 0) for _ in lanes]
    for _ in range(6):
        if choose.random() < 0.5:
            mask = [choose.random() < 0.5 for _ in lanes]
            state = fc.reset(env, state, torch.tensor(mask))
            at = [(one[0] + 1, 0) if begun else one for begun, one in zip(mask, at, strict=True)]
        limit, length = choose.choice([None, 2, 4, 2**70]), choose.randint(1, 9)  # one beyond 64 bits is none
        state, batch = fc.rollout(env, policy, state, length, max_frames_per_traj=limit)
        counted = [count(**lane, at=one, length=length, limit=limit) for lane, one in zip(lanes, at, strict=True)]
        words, at = zip(*counted, strict=True)
        check(batch, *words)
        assert (*zip(state.episode.tolist(), state.step.tolist(), strict=True),) == at
        assert state.traj_ids.tolist() == [one[0] * len(lanes) + lane for lane, one in enumerate(at)]
        assert state.frames == len(lanes) * state.steps


def count(lengths, truncated, at, length, limit):
    """A lane's words, and where it stands after them."""
    (episode, step), words = at, []
    for _ in range(length):
        over, cut = step + 1 >= lengths[episode % len(lengths)], limit is not None and step + 1 >= limit
        ended, cut = over and episode not in truncated, cut or (over and episode in truncated)
        words.append(f"{episode}.{step}{'b' if ended and cut else 't' if ended else 'c' if cut else ''}")
        episode, step = (episode + 1, 0) if ended or cut else (episode, step + 1)
    return " ".join(words), (episode, step)

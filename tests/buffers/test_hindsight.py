"""Goals in hindsight, against Stable-Baselines3's buffer on the same frames, and by hand."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from tests.buffers.conftest import filled
from tests.support.compare import assert_same, implausible
from tests.support.running import once, scaled

LENGTHS = (3, 6, 2, 5)
COUNT = sum(LENGTHS)
STRATEGIES = ("future", "final", "episode")
BOX = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


def reward(achieved, desired, info):
    return -1.0 * (abs(achieved - desired) > 1.5).reshape(-1)


class Goals(gym.Env):
    """An environment with goals, of which only the spaces and the rewards are used."""

    observation_space = gym.spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))
    action_space = BOX

    def compute_reward(self, achieved, desired, info):
        return reward(achieved, desired, info)


def frames():
    """Episodes of LENGTHS; the achieved goal after frame n is n, before it n - 1, and every desired goal is -5."""
    number = torch.arange(COUNT)[:, None].float()
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    done, goal = (torch.arange(COUNT) + 1).view(-1, 1) == torch.tensor(LENGTHS).cumsum(0), torch.full((COUNT, 1), -5.0)
    done = done.any(1, keepdim=True)
    old = TensorDict({"observation": number, "achieved_goal": number - 1, "desired_goal": goal}, [COUNT])
    new = {"observation": number + 1, "achieved_goal": number, "desired_goal": goal.clone(), "done": done}
    old["next"] = TensorDict({**new, "truncated": done, "reward": torch.full((COUNT, 1), -1.0)}, [COUNT])
    old["action"], old["collector", "traj_ids"] = number * 0, ids
    return old


def theirs(strategy):
    from stable_baselines3 import HerReplayBuffer
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([Goals])
    options = {"n_sampled_goal": 4, "goal_selection_strategy": strategy, "device": "cpu"}
    buffer = HerReplayBuffer(100, env.observation_space, env.action_space, env, **options)
    batch, keys = frames(), ("observation", "achieved_goal", "desired_goal")
    for row in batch:
        one, two = ({key: node[key].numpy()[None] for key in keys} for node in (row, row["next"]))
        done = row["next", "done"].numpy()
        infos = [{"TimeLimit.truncated": bool(done[0])}]
        buffer.add(one, two, row["action"].numpy()[None], row["next", "reward"].numpy(), done, infos)
    return buffer


def table(frame, goal):
    """How often each frame had each goal, [frame, goal]; -5, its own, is the last one."""
    counts = np.zeros((COUNT, COUNT + 1), np.int64)
    np.add.at(counts, (np.asarray(frame, int), np.where(np.asarray(goal) < 0, COUNT, goal).astype(int)), 1)
    return counts


def chances(strategy):
    """Those of each frame and goal, of 5 frames of which 4 get new goals."""
    wanted = np.zeros((COUNT, COUNT + 1))
    wanted[:, COUNT] = 0.2
    for begin, length in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        for frame in range(begin, begin + length):
            first = {"future": frame, "final": begin + length - 1, "episode": begin}[strategy]
            wanted[frame, first : begin + length] = 0.8 / (begin + length - first)
    return wanted / COUNT


@pytest.mark.parametrize(("strategy", "prefetch"), once(STRATEGIES, (None, 2)))
def test_goals_and_rewards_are_those_of_sb3(strategy, prefetch):
    count = scaled(20_000)
    generator = torch.Generator().manual_seed(0)
    buffer = fc.ReplayBuffer(
        storage=fc.LazyTensorStorage(100), batch_size=count, prefetch=prefetch, generator=generator
    )
    fc.hindsight(buffer, strategy=strategy, reward=reward)
    buffer.extend(frames()[:7])
    buffer.extend(frames()[7:])
    sample, info = buffer.sample(return_info=True)
    np.random.seed(0)
    their = theirs(strategy).sample(count)
    wanted, both = chances(strategy), []
    for frame, old, new, achieved, rewards in (
        (info["index"], sample, sample["next"], sample["next", "achieved_goal"], sample["next", "reward"]),
        (their.observations["observation"][:, 0], their.observations, their.next_observations,
         their.next_observations["achieved_goal"], their.rewards),
    ):  # fmt: skip
        goal = old["desired_goal"][:, 0]
        counts = table(frame, goal)
        assert not counts[wanted == 0].any()
        assert not implausible(counts[wanted > 0], count * wanted[wanted > 0])
        assert torch.equal(new["desired_goal"], old["desired_goal"])
        assert torch.equal(rewards[:, 0], torch.where(goal < 0, -1.0, reward(achieved, goal[:, None], None)))
        both.append(rewards.mean())
    assert abs(both[0] - both[1]) < 0.05
    fields = ["observation", "achieved_goal", "action", ("next", "done"), ("next", "observation")]
    assert_same(sample.select(*fields), frames()[info["index"]].select(*fields))
    assert_same(buffer[:], frames())


@pytest.mark.parametrize(("storage", "sampler"), [
    (lambda: fc.LazyTensorStorage(12), None),
    (lambda: fc.LazyMemmapStorage(12), lambda: fc.PrioritizedSampler(12, 1.0, 1.0)),
    (lambda: fc.LazyTensorStorage(12, compact_obs=True), lambda: fc.SamplerWithoutReplacement()),
])  # fmt: skip
def test_goals_are_those_that_the_buffer_still_has(storage, sampler, tmp_path):
    """Also of frames that were stored before, of trajectories that go on, and after a dump."""

    def new_reward(achieved, goal, rows):
        assert torch.equal(goal, rows["desired_goal"])
        return torch.full((len(rows),), 2.0)

    batch, made = frames(), fc.TensorDictReplayBuffer
    for key in ("achieved_goal", "desired_goal"):  # large enough to be stored once
        batch[key], batch["next", key] = batch[key].expand(-1, 20).clone(), batch["next", key].expand(-1, 20).clone()
    batch["next", "done"][2] = False
    buffer = made(storage=storage(), sampler=sampler, batch_size=12)
    buffer.extend(batch[:10])
    fc.hindsight(buffer, k=10**6, strategy="episode", reward=new_reward)
    buffer.extend(batch[10:])
    seen = set()
    for _ in range(40):
        sample = buffer.sample()
        rows = sample["observation"][:, 0].long()
        assert (sample["desired_goal"] == sample["desired_goal"][:, :1]).all()
        goal = sample["desired_goal"][:, 0].long()
        assert (batch["collector", "traj_ids"][goal] == batch["collector", "traj_ids"][rows]).all()
        assert goal.min() >= COUNT - 12
        assert (sample["next", "reward"] == 2).all()
        assert (sample["index"] == rows % 12).all()
        seen |= {*goal.tolist()}
    assert seen == {*range(COUNT - 12, COUNT)}
    buffer.dumps(tmp_path)
    other = fc.hindsight(made(storage=storage(), sampler=sampler, batch_size=12), reward=new_reward)
    other.loads(tmp_path)
    assert (other.sample()["next", "reward"] == 2).any()


def test_a_second_call_replaces_the_first_and_readers_draw_no_goals(tmp_path):
    buffer = filled(frames(), fc.LazyMemmapStorage(30, scratch_dir=tmp_path), batch_size=200)
    assert fc.hindsight(buffer, strategy="episode", reward=reward) is buffer
    fc.hindsight(buffer, k=10**6, strategy="final", reward=reward)
    assert {*buffer.sample()["desired_goal"][:, 0].tolist()} == {2.0, 8.0, 10.0, 15.0}
    with pytest.raises(ValueError, match="readers draw no goals in hindsight"):
        buffer.share()
    buffer.empty()
    buffer.extend(frames())
    assert {*buffer.sample()["desired_goal"][:, 0].tolist()} == {2.0, 8.0, 10.0, 15.0}


@pytest.mark.parametrize("before", [True, False])
def test_lanes_with_equal_ids_are_told_apart(before):
    lanes = torch.stack([frames(), frames()])
    lanes["next", "achieved_goal"][1] += 100
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(40, ndim=2), batch_size=300)
    for step in (lambda: fc.hindsight(buffer, reward=reward), lambda: buffer.extend(lanes))[:: 1 if before else -1]:
        step()
    sample = buffer.sample()
    new = sample["desired_goal"] != -5
    assert new.any()
    assert (((sample["desired_goal"] >= 100) == (sample["next", "achieved_goal"] >= 100)) | ~new).all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64])
def test_goals_and_n_step_frames_of_wide_unsigned_integers(dtype):
    batch = frames()
    wide = batch.clone()
    for key in ("achieved_goal", "desired_goal"):
        wide[key], wide["next", key] = (leaf.abs().to(dtype) for leaf in (batch[key], batch["next", key]))
    assert drawn(wide, reward=lambda achieved, goal, rows: torch.zeros(len(goal)))["desired_goal"].dtype == dtype
    one, two = (fc.MultiStep(0.9, 3)(each)["next", "achieved_goal"].float() for each in (batch, wide))
    assert torch.equal(one, two)


def drawn(batch=None, sampler=None, reward=reward, **options):
    buffer = filled(frames() if batch is None else batch, 30, sampler, batch_size=9, **options)
    return fc.hindsight(buffer, reward=reward).sample()


BAD = {
    "expected one of single frames with their own rewards": lambda: drawn(sampler=fc.SliceSampler(slice_len=3)),
    "single frames with their own": lambda: drawn(sampler=fc.MultiStepSampler(n_steps=2, gamma=0.9)),
    "frames have no .*desired_goal.*, they have": lambda: drawn(frames().exclude("desired_goal")),
    "take the batch before MultiStep": lambda: drawn(fc.MultiStep(gamma=1.0, n_steps=2)(frames())),
    r"reward returned shape \[\] for": lambda: drawn(reward=lambda achieved, goal, rows: 1.0),
    "reward returned NaN for": lambda: drawn(reward=lambda achieved, goal, rows: achieved[:, 0] * np.nan),
    "has no collector.traj_ids or episode": lambda: drawn(frames().exclude("collector", ("next", "done"))),
    "the frames are dict, which have no goals": lambda: drawn({"episode": torch.zeros(9)}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD[message]()

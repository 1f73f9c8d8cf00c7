"""Whole trajectories: which ones, in which order, and that no frame is lost or repeated."""

import itertools
import re

import pytest
import torch
from gymnasium.wrappers import TimeLimit

import funcollect as fc
from funcollect.trajectories.whole_trajectories import PendingTrajectories
from tests.support.cases import pair, torch_mlp
from tests.support.compare import assert_same, fresh, leaves
from tests.support.envs.counting import always, make_counting
from tests.support.envs.light_envs import Nested
from tests.support.running import FORKS_OF_RAY, in_soak
from tests.support.workers import TRANSPORTS, multi, ray_collector

LANES = {"lengths": (3, 1, 2)}, {"lengths": (2,), "truncated": (1,)}, {"lengths": (9,)}
ORDER = [0, 1, 2, 4, 3, 6, 7, 9, 10, 13, 12, 5]  # by the step and the lane in which they begin
RANDOM = {"frames_per_batch": 24, "trajs_per_batch": 3, "max_frames_per_traj": 12, "seed": 0}


def ids_of(batch):
    """The ids of the trajectories in a batch of whole ones, in order; each has all its frames."""
    ids, step = batch["collector", "traj_ids"], batch["collector", "step"]
    ends = batch["next", "done"][:, 0].nonzero()[:, 0].tolist()
    assert ends[-1] == len(ids) - 1
    rows = [range(first + 1, last + 1) for first, last in itertools.pairwise([-1, *ends])]
    for row in rows:
        assert len(ids[row.start : row.stop].unique()) == 1
        assert step[row.start : row.stop].tolist() == [*range(len(row))]
    return [int(ids[row.start]) for row in rows]


def collected(env, policy, counts, **keywords):
    state, pending, batches = fc.init(env, policy, seed=0), None, []
    for count in counts:
        state, batch, pending = fc.rollout_trajectories(
            env, policy, state, count, pending, **{"max_frames_per_traj": 20, **keywords}
        )
        batches.append(batch)
    fc.close(state)
    return batches


@pytest.mark.parametrize(("backend", "length"), [("host", 1), ("vector", 4), ("torch", 50)])
def test_the_order_is_that_of_the_beginnings(backend, length):
    env = make_counting(backend, *LANES)
    if backend == "torch":
        env.truncates = True  # as an environment of one's own may say
    limit = None if backend == "torch" else 20
    batches = collected(env, always(0), (2, 5, 1, 4), length=length, max_frames_per_traj=limit)
    assert [ids_of(batch) for batch in batches] == [ORDER[:2], ORDER[2:7], ORDER[7:8], ORDER[8:]]
    assert all(batch.is_locked for batch in batches)
    batches = collected(make_counting("host", LANES[0], batched=False), always(0), (2, 3), length=5)
    assert [ids_of(batch) for batch in batches] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(("name", "kind"), [
    ("CartPole-v1", "torch_recurrent"), ("torch/Pendulum-v1", "torch_mlp"), ("gymnax/CartPole-v1", "jax_mlp"),
])  # fmt: skip
def test_calls_may_be_divided(name, kind):
    env, policy = pair(name, kind, 3)
    whole = torch.cat(collected(env, policy, (8,)))
    for counts, length in (((4, 4), 64), ((1, 2, 5), 7)):
        assert_same(torch.cat(collected(env, policy, counts, length=length)), whole)


def test_no_frame_is_lost_or_repeated():
    env, policy = pair("CartPole-v1", "torch_mlp", 3)
    state, pending, batches = fc.init(env, policy, seed=0), None, []
    for _ in range(10):
        state, batch, pending = fc.rollout_trajectories(env, policy, state, 4, pending, max_frames_per_traj=30)
        batches.append(batch)
    delivered = torch.cat(batches)
    assert delivered.numel() + len(pending) == 3 * state.steps_made
    assert re.fullmatch(rf"PendingTrajectories\(\d+ trajectories, {len(pending)} frames\)", repr(pending))
    _, run = fc.rollout(env, policy, fc.init(env, policy, seed=0), state.steps_made, max_frames_per_traj=30)

    def names(frames):
        return [*zip(*(frames["collector", name].tolist() for name in ("traj_ids", "step")), strict=True)]

    run = run.reshape(-1)
    places = {name: place for place, name in enumerate(names(run))}
    again = [places[name] for name in names(delivered)]
    assert len({*again}) == delivered.numel()
    assert_same(run[again], delivered)


def test_an_earlier_value_gives_the_same_again_and_nothing_else_may_be_pending():
    env, policy = pair("torch/CartPole-v1", "torch_mlp", 3)
    state, _, pending = fc.rollout_trajectories(env, policy, fc.init(env, policy, seed=0), 2)
    assert_same(*(fc.rollout_trajectories(env, policy, state, 5, pending)[1] for _ in range(2)))
    with pytest.raises(TypeError, match=r"pending is .*, expected PendingTrajectories"):
        fc.rollout_trajectories(env, policy, state, 2, [])


def test_padded():
    env = make_counting("host", *LANES)
    flat, padded = (collected(env, always(0), (5,), traj_format=form)[0] for form in ("cat", "padded"))
    assert padded.batch_size == (5, 9)
    assert_same(padded, fc.split_trajectories(flat).lock_())
    assert padded["collector", "mask"].sum(1).tolist() == [3, 2, 9, 2, 1]


def test_trajectories_that_had_begun_or_were_interrupted_are_left_out():
    env = make_counting("host", *LANES)
    policy, limit = always(0), {"max_frames_per_traj": 20}
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 1)
    state, batch, pending = fc.rollout_trajectories(env, policy, state, 2, length=3, **limit)
    assert ids_of(batch) == [4, 3]  # not 0, 1 and 2
    state = fc.reset(env, state)
    _, batch, pending = fc.rollout_trajectories(env, policy, state, 6, pending, **limit)
    assert ids_of(batch) == [9, 10, 5, 13, 12, 15]  # 6 and 7 were interrupted


CARTPOLES = [f"{prefix}CartPole-v1" for prefix in ("", "torch/", "gymnax/", "envpool/")]
OTHERS = ["brax/inverted_pendulum", "jumanji/Snake-v1", "navix/Navix-Empty-5x5-v0", "ale/Pong"]


@pytest.mark.parametrize("name", [*CARTPOLES, "pgx/tic_tac_toe", Nested, *in_soak(OTHERS)])
def test_a_limit_is_needed_unless_the_environment_truncates(name):
    env = fc.make_env(name, num_envs=2)
    truncating = name in (*CARTPOLES, *OTHERS)
    assert bool(env.truncates or getattr(env, "max_episode_steps", None)) is truncating
    if truncating:
        return
    policy, given = fc.random_policy(env), {"frames_per_batch": 10, "trajs_per_batch": 2}
    for call in (
        lambda: fc.rollout_trajectories(env, policy, fc.init(env, policy, seed=0), 2),
        lambda: fc.SyncDataCollector(env, **given),
        lambda: fc.MultiSyncDataCollector([name], in_process=True, **given),
    ):
        with pytest.raises(ValueError, match=r"not known to truncate episodes, .*: pass max_frames_per_traj"):
            call()


def limited():
    return TimeLimit(Nested(), 7)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_lane_of_a_list_has_to_truncate_and_only_environments_of_gymnasium_get_a_limit(workers):
    with pytest.raises(TypeError, match=r"max_episode_steps was given .* made str, expected a gymnasium.Env"):
        fc.make_env(lambda: "CartPole-v1", max_episode_steps=3)
    for other, truncates in ((limited, True), (lambda: limited(), not workers), (Nested, False)):
        # With workers, another factory is called in a worker only.
        assert fc.make_env([limited, other], num_workers=workers).truncates == truncates


class Declared(Nested):
    truncates = True


@pytest.mark.parametrize(
    ("env", "limit"), [(Declared, {}), (Nested, {"max_episode_steps": 9}), ([Nested] * 2, {"max_episode_steps": 9})]
)
def test_environments_of_gymnasium_declare_it_or_get_a_limit(env, limit):
    env, policy, state = fresh(env, num_envs=2, **limit)
    _, batch, _ = fc.rollout_trajectories(env, policy, state, 4)
    lengths = batch["collector", "step"][batch["next", "done"][:, 0]] + 1
    assert len(lengths) == 4
    assert lengths.max() <= limit.get("max_episode_steps", 100)


@pytest.mark.parametrize("form", ["cat", "padded"])
@pytest.mark.parametrize("frames", [6, 100])
def test_collectors_deliver_what_the_function_does(form, frames):
    env, policy = pair("CartPole-v1", "torch_mlp", 3)
    wanted = collected(env, policy, (3, 3, 3, 3), traj_format=form)
    keywords = RANDOM | {"max_frames_per_traj": 20, "frames_per_batch": frames, "traj_format": form}
    with fc.SyncDataCollector(env, policy, **keywords) as collector:
        for batch, one in zip(collector, wanted, strict=False):
            assert_same(batch, one)
            assert not batch.is_locked
        with pytest.raises(TypeError, match="no length"):
            len(collector)


def test_the_run_ends_with_its_frames():
    with fc.SyncDataCollector("CartPole-v1", **RANDOM, total_frames=240) as collector:
        batches = [*collector]
        assert collector.frames == 240
    assert 6 <= len(batches) <= 7  # of 20 trajectories or a few more
    assert all(len(ids_of(batch)) == 3 for batch in batches)


TWO = {"create_env_fn": ["CartPole-v1"] * 2, "policy": None, "create_env_kwargs": {"num_envs": 2}} | RANDOM


def assert_as_in_one_process(batches, count=2, **keywords):
    with fc.SyncDataCollector("CartPole-v1", create_env_kwargs={"num_envs": count}, **RANDOM, **keywords) as alone:
        for batch, one in zip(batches, alone, strict=False):
            assert_same(batch, one)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_in_step_make_one_run(transport):
    for join in ("stack", -1):
        with multi(transport=transport, cat_results=join, **TWO) as collector:
            assert_as_in_one_process(itertools.islice(collector, 4), count=4)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_asynchronous_workers_have_their_own_order(transport):
    own = {worker: [] for worker in range(2)}
    with multi(fc.MultiaSyncDataCollector, transport, **TWO) as collector:
        for batch in itertools.islice(collector, 10):
            (worker,) = (batch["collector", "lane"] // 2).unique().tolist()
            own[worker].append(batch.clone())
    assert all(own.values())
    for worker, batches in own.items():
        assert_as_in_one_process(batches, shard=fc.Shard(worker, 2))


def test_lanes_may_leave_and_join():
    """A lane that has left holds nothing up; one that joins begins where the others are."""
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    state, pending = fc.init(env, policy, seed=0), PendingTrajectories()

    def taken():
        nonlocal pending
        lanes = set()
        while (frames := pending.take(1)) is not None:
            lanes |= {*frames[0]["collector", "lane"].tolist()}
            pending = frames[1]
        return lanes

    for lanes in (slice(2), slice(2), slice(1), slice(0, 3, 2)):
        state, batch = fc.rollout(env, policy, state, 40)
        pending = pending.add(batch[lanes])
        assert lanes != slice(1) or taken() == {0}
    state, batch = fc.rollout(env, policy, fc.reset(env, state), 40)
    pending = pending.add(batch[0::2])
    assert taken() == {0, 2}


UNLIMITED = {"create_env_kwargs": None, "max_frames_per_traj": None}
LIMITED, ENDLESS = (lambda: fc.make_env(limited, num_envs=2)), (lambda: fc.make_env(Nested, num_envs=2))


@pytest.mark.parametrize(("keywords", "says"), [
    ({"frames_per_batch": [24, 48], "cat_results": -1}, r"make \[12, 24\] steps for a batch, .* same frames_per_batch"),
    ({"create_env_fn": [LIMITED, ENDLESS], **UNLIMITED}, "max_frames_per_traj"),
    ({"create_env_fn": [ENDLESS, LIMITED], **UNLIMITED}, "max_frames_per_traj"),
])  # fmt: skip
def test_workers_advance_together_and_each_has_to_end_its_trajectories(keywords, says):
    with pytest.raises(ValueError, match=says):
        multi(transport="serial", **(TWO | keywords))


ONE, SYNC, ASYNC = fc.SyncDataCollector, fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector


@pytest.mark.evening
@pytest.mark.usefixtures("ray_cluster")
@FORKS_OF_RAY
@pytest.mark.parametrize(
    ("sync", "kind"), [(False, ONE), *in_soak([(True, ONE), (True, SYNC), (False, SYNC), (True, ASYNC)])]
)
def test_ray(sync, kind):
    workers, frames = 1 if kind is ONE else 2, 0
    own = {"num_collectors": 2, "collector_class": kind, "num_workers_per_collector": workers, "sync": sync}
    with ray_collector("CartPole-v1", **own, **RANDOM, compact_obs=kind is ASYNC) as collector:
        for batch in itertools.islice(collector, 8):
            frames += batch.numel()
            assert len(ids_of(batch)) == 3
            assert (sync and kind is not ASYNC) or len(batch["collector", "lane"].unique()) <= workers
        assert frames + sum(map(len, collector._pending.values())) == collector.frames


@pytest.mark.parametrize(
    ("kind", "env", "more"), [(ONE, "CartPole-v1", {}), (SYNC, ["CartPole-v1"] * 2, {"in_process": True})]
)
def test_a_saved_run_goes_on(kind, env, more, tmp_path):
    with kind(env, **RANDOM, **more, compact_obs=True) as collector:
        next(collector)
        collector.save(tmp_path / "run")
        wanted = [next(collector) for _ in range(4)]
    with kind.load(tmp_path / "run", env, **more) as collector:
        assert collector.trajs_per_batch == 3
        for batch in wanted:
            assert_same(fc.next_observations(next(collector)), fc.next_observations(batch))


@pytest.mark.parametrize("form", ["cat", "padded"])
def test_with_compact_observations(form):
    made = []
    for compact in (False, True):
        keywords = RANDOM | {"frames_per_batch": 14, "traj_format": form, "compact_obs": compact}
        with fc.SyncDataCollector(Nested, create_env_kwargs={"num_envs": 2}, **keywords) as collector:
            made.append([next(collector) for _ in range(5)])
    for whole, compact in zip(*made, strict=True):
        assert ("next", "pixels") not in leaves(compact)
        assert_same(fc.next_observations(compact), whole)


@pytest.mark.parametrize("form", ["cat", "padded"])
def test_statistics_are_those_of_the_frames_delivered(form):
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.normalized(torch_mlp(env), fc.running_statistics.init(env.observation_space))
    with fc.SyncDataCollector(env, policy, **RANDOM, traj_format=form, update_statistics=True) as collector:
        first = next(collector)
        next(collector)
    frames = first.numel() if form == "cat" else int(first["collector", "mask"].sum())
    assert float(policy.statistics.count) == frames


@pytest.mark.parametrize(("keywords", "message"), [
    ({"reset_at_each_iter": True}, "reset_at_each_iter is True, .* a reset would interrupt them"),
    ({"split_trajs": True}, "split_trajs is True, .* split already"),
    ({"set_truncated": True}, "set_truncated is True, .* it would cut them"),
    ({"reset_when_done": False, "max_frames_per_traj": None}, "reset_when_done is False, .* have to go on"),
    ({"trajs_per_batch": None, "traj_format": "padded"}, "but trajs_per_batch is None"),
])  # fmt: skip
def test_keywords_that_do_not_go_together(keywords, message):
    with pytest.raises(ValueError, match=message):
        fc.SyncDataCollector("CartPole-v1", **(RANDOM | keywords))


def test_frames_per_batch_may_be_left_out():
    own = {key: value for key, value in RANDOM.items() if key != "frames_per_batch"}
    for kind, given in (
        (fc.SyncDataCollector, {}),
        (fc.MultiSyncDataCollector, {"num_workers": 2, "in_process": True}),
    ):
        with (
            kind("CartPole-v1", **own, **given) as collector,
            kind("CartPole-v1", **{**RANDOM, **given, "frames_per_batch": 1000}) as other,
        ):
            assert_same(next(collector), next(other))
        with pytest.raises(TypeError, match="frames_per_batch is not given, expected the frames in a batch"):
            kind("CartPole-v1", **given)

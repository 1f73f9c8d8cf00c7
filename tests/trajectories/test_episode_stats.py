"""Returns and lengths across the borders of batches, against a run simulated frame by frame."""

import contextlib
import copy
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import funcollect as fc
from funcollect.trajectories.split import split_trajectories
from funcollect.trajectories.stats import EpisodeStats, episode_stats
from tests.support.cases import pair
from tests.support.compare import collect
from tests.support.running import scaled

GOES_ON, TERMINATED, TRUNCATED, BOTH, CUT = range(5)


@dataclass
class Run:
    """A whole run of L lanes, `[L, T]`, and the episodes that a loop counts in it."""

    batch: TensorDict
    episodes: list = field(default_factory=list)  # (begin, end, lane, id, length, return, terminated)
    open: list = field(default_factory=list)  # (begin, lane, id, length, return)


def simulate(events, rewards, *, freeze=False):
    """`events[lane][time]` says what happens after a frame; with `freeze` a finished lane stays finished."""
    lanes, times, players = rewards.shape
    columns = {name: torch.zeros(lanes, times, dtype=torch.int64) for name in ("traj_ids", "step", "lane")}
    flags = {name: torch.zeros(lanes, times, 1, dtype=torch.bool) for name in ("root", "terminated", "truncated")}
    run = Run(TensorDict({}, [lanes, times]))
    for lane in range(lanes):
        episode, step, value, frozen = 0, 0, [0.0] * players, False
        for time in range(times):
            event = GOES_ON if frozen else events[lane][time]
            if event == CUT and time == times - 1:
                event = GOES_ON  # no frame after it tells the two apart
            traj_id = episode * lanes + lane
            columns["traj_ids"][lane, time], columns["step"][lane, time] = traj_id, step
            columns["lane"][lane, time] = lane
            flags["root"][lane, time] = frozen
            flags["terminated"][lane, time] = frozen or event in (TERMINATED, BOTH)
            flags["truncated"][lane, time] = event in (TRUNCATED, BOTH)
            if frozen:
                continue
            value = [old + new for old, new in zip(value, rewards[lane, time].double().tolist(), strict=True)]
            if event in (TERMINATED, TRUNCATED, BOTH):
                terminated = event != TRUNCATED
                run.episodes.append((time - step, time, lane, traj_id, step + 1, value, terminated))
                frozen = freeze
            if event == GOES_ON:
                step += 1
            elif not frozen:
                episode, step, value = episode + 1, 0, [0.0] * players
        if step and not frozen:
            run.open.append((times - step, lane, episode * lanes + lane, step, value))
    run.batch["done"] = flags["root"]
    done = flags["terminated"] | flags["truncated"]
    next_ = {"reward": rewards, "done": done, "terminated": flags["terminated"], "truncated": flags["truncated"]}
    run.batch["next"] = TensorDict(next_, [lanes, times])
    run.batch["collector"] = TensorDict(columns, [lanes, times])
    run.episodes.sort(key=lambda episode: (episode[1], episode[2]))
    return run


@st.composite
def runs(draw, players=(1, 2), freeze=(False, True)):
    lanes, times, players = draw(st.integers(1, 4)), draw(st.integers(1, 14)), draw(st.sampled_from(players))
    event = st.sampled_from([GOES_ON] * 5 + [TERMINATED, TRUNCATED, BOTH, CUT])
    events = draw(st.lists(st.lists(event, min_size=times, max_size=times), min_size=lanes, max_size=lanes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rewards = torch.randn(times, lanes, players, generator=generator).transpose(0, 1) * 1e3
    return simulate(events, rewards, freeze=draw(st.sampled_from(freeze)))


@st.composite
def cuts(draw, run):
    times = run.batch.shape[-1]
    borders = sorted(draw(st.sets(st.integers(1, times - 1)))) if times > 1 else []
    return [run.batch[:, a:b] for a, b in zip([0, *borders], [*borders, times], strict=True)]


def rows(stats):
    returns = stats.returns if stats.returns.ndim > 1 else stats.returns[:, None]
    columns = (stats.lanes, stats.traj_ids, stats.lengths, returns, stats.terminated)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def opened(stats):
    return {traj_id: (*head[:2], head.value.reshape(-1).tolist()) for traj_id, head in stats.open_returns.items()}


def chain(batches):
    parts, previous = [], None
    for batch in batches:
        previous = episode_stats(batch, previous)
        parts.append(previous)
    return EpisodeStats.concatenate(parts)


def check(stats, run, order=list):
    assert order(rows(stats)) == order(episode[2:] for episode in run.episodes)
    assert opened(stats) == {traj_id: (lane, length, value) for _, lane, traj_id, length, value in run.open}


@given(data=st.data())
@settings(max_examples=scaled(40), deadline=None)
def test_a_run_whole_or_cut_anywhere_is_counted_to_the_bit(data):
    run = data.draw(runs())
    stats, cut = episode_stats(run.batch), chain(data.draw(cuts(run)))
    check(stats, run)
    check(cut, run)
    integers = (stats.lengths, stats.traj_ids, stats.lanes)
    assert [column.dtype for column in (stats.returns, *integers)] == [torch.float64, *[torch.int64] * 3]
    assert stats.terminated.dtype == torch.bool


@given(data=st.data())
@settings(max_examples=scaled(25), deadline=None)
def test_episodes_that_began_before_the_first_batch_are_left_out(data):
    run = data.draw(runs())
    first = data.draw(st.integers(0, run.batch.shape[-1] - 1))
    counted = ~run.batch["done"][:, first:, 0]
    ids, steps = (run.batch["collector", name][:, first:][counted].tolist() for name in ("traj_ids", "step"))
    missing = len({*ids} - {traj_id for traj_id, step in zip(ids, steps, strict=True) if step == 0})
    text = f"^{missing} episodes of the batch began before it .* left out.*pass previous="
    with pytest.warns(UserWarning, match=text) if missing else contextlib.nullcontext():
        stats = episode_stats(run.batch[:, first:])
    assert rows(stats) == [episode[2:] for episode in run.episodes if episode[0] >= first]
    assert opened(stats).keys() == {traj_id for begin, _, traj_id, *_ in run.open if begin >= first}


@pytest.mark.filterwarnings("ignore:.*of the batch began before it:UserWarning")  # if the first part is skipped
@given(data=st.data())
@settings(max_examples=scaled(25), deadline=None)
def test_a_skipped_batch_leaves_out_the_episodes_that_it_had_a_part_in(data):
    run = data.draw(runs())
    times = run.batch.shape[-1]
    a = data.draw(st.integers(0, times - 1))
    b = data.draw(st.integers(a + 1, times))
    parts = [batch for batch in (run.batch[:, :a], run.batch[:, b:]) if batch.numel() and batch.shape[-1]]
    seen = [row for row in run.episodes if row[1] < a or row[0] >= b]
    if parts:
        assert rows(chain(parts)) == [episode[2:] for episode in seen]


@given(data=st.data())
@settings(max_examples=scaled(15), deadline=None)
def test_asynchronous_workers_keep_what_they_have_open(data):
    """Each lane is a worker; they deliver in any order and as often as they like."""
    run = data.draw(runs())
    lanes, times = run.batch.shape
    at, previous, parts = [0] * lanes, None, []
    while min(at) < times:
        lane = data.draw(st.sampled_from([lane for lane in range(lanes) if at[lane] < times]))
        stop = data.draw(st.integers(at[lane] + 1, times))
        previous = episode_stats(run.batch[lane, at[lane] : stop], previous)
        parts.append(previous)
        at[lane] = stop
    check(EpisodeStats.concatenate(parts), run, sorted)


@pytest.mark.parametrize(("events", "freeze", "stop", "left"), [
    ([GOES_ON, CUT, GOES_ON, GOES_ON], False, 2, {1: (0, 2, [2.0])}),  # its lane has gone on
    ([GOES_ON, TERMINATED, GOES_ON], True, 1, {}),  # its lane is found finished
])  # fmt: skip
def test_an_open_trajectory_is_dropped(events, freeze, stop, left):
    run = simulate([events], torch.ones(1, len(events), 1), freeze=freeze)
    first = episode_stats(run.batch[:, :stop])
    assert opened(first) == {0: (0, stop, [float(stop)])}
    assert opened(episode_stats(run.batch[:, 2:], first)) == left


@given(data=st.data())
@settings(max_examples=scaled(15), deadline=None)
def test_layouts_of_the_same_frames(data):
    run = data.draw(runs())
    lanes, times = run.batch.shape
    check(episode_stats(run.batch.reshape(1, lanes, times)), run)
    check(episode_stats(run.batch.reshape(lanes, 1, times)), run)
    check(episode_stats(run.batch.reshape(-1)), run, sorted)
    check(episode_stats(torch.cat([run.batch[lane : lane + 1] for lane in range(lanes)], -1)), run, sorted)
    check(chain([split_trajectories(batch) for batch in data.draw(cuts(run))]), run, sorted)


def test_one_player_has_a_row_of_returns_and_several_a_table():
    for players, shape in ((1, (1,)), (3, (1, 3))):
        stats = episode_stats(simulate([[GOES_ON, TERMINATED, GOES_ON]], torch.ones(1, 3, players)).batch)
        assert stats.returns.shape == shape
        assert stats.open_returns[1].value.shape == shape[1:]
    with pytest.raises(ValueError, match="these episodes have 3"):
        _ = stats.mean_return
    assert repr(stats) == "EpisodeStats(1 episodes, 3 players, mean length 2, 1 terminated, 1 open)"


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_a_batch_without_frames_carries_everything_over(shape):
    batch = simulate([[GOES_ON] * 3], torch.ones(1, 3, 1)).batch
    first = episode_stats(batch)
    stats = episode_stats(batch[: shape[0], : shape[1]], first)
    assert len(stats) == 0
    assert opened(stats) == opened(first)


def test_root_flags_may_be_absent_and_arguments_are_left_as_they_were():
    run = simulate([[GOES_ON, TERMINATED, GOES_ON, GOES_ON]], torch.ones(1, 4, 1).double())
    check(episode_stats(run.batch.exclude("done")), run)
    first, batch = episode_stats(run.batch[:, :3]), run.batch.clone()
    before = rows(first), copy.deepcopy(opened(first))
    episode_stats(run.batch[:, 3:].lock_(), first)
    assert (run.batch == batch).all()
    run.batch.zero_()  # results share no memory with it
    assert (rows(first), opened(first)) == before
    copied = pickle.loads(pickle.dumps(first))
    assert (rows(copied), opened(copied)) == before


def test_means_and_concatenation():
    run = simulate([[GOES_ON, TERMINATED, TRUNCATED, GOES_ON]], torch.tensor([[[1.0], [2.0], [5.0], [7.0]]]))
    stats = chain([run.batch[:, :2], run.batch[:, 2:]])
    assert (len(stats), stats.mean_return, stats.mean_length) == (2, 4.0, 1.5)
    assert repr(stats) == "EpisodeStats(2 episodes, mean return 4, mean length 1.5, 1 terminated, 1 open)"
    with pytest.raises(ValueError, match="parts is empty"):
        EpisodeStats.concatenate([])
    none = episode_stats(simulate([[GOES_ON] * 3], torch.ones(1, 3, 1)).batch)
    assert (len(none), none.returns.shape) == (0, (0,))
    assert repr(none) == "EpisodeStats(0 episodes, mean return nan, mean length nan, 0 terminated, 1 open)"


@pytest.mark.gpu
def test_on_a_gpu():
    run = simulate([[GOES_ON, TERMINATED, GOES_ON]], torch.ones(1, 3, 1))
    check(episode_stats(run.batch.to("cuda")), run)


REWARD, DONE = ("next", "reward"), ("next", "done")


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda batch: TensorDict({}), ValueError, "no batch dimensions"),
    (lambda batch: batch.exclude(REWARD), ValueError, "no tensor next.reward"),
    (lambda batch: batch.exclude("collector"), ValueError, "no tensor collector.traj_ids"),
    (lambda batch: batch.set(REWARD, torch.zeros(1, 3)), ValueError, r"shape \[1, 3\], the batch wants \[1, 3, n\]"),
    (lambda batch: batch.set(DONE, torch.zeros(1, 3, 2) > 0), ValueError, r"next.done .*, the batch wants \[1, 3, 1\]"),
    (lambda batch: batch.set(REWARD, torch.zeros(1, 3, 2)), ValueError, "rewards of 2 players, `previous` of 1"),
])  # fmt: skip
def test_bad_input(change, error, message):
    batch = simulate([[GOES_ON] * 3], torch.ones(1, 3, 1)).batch
    previous = episode_stats(batch)
    with pytest.raises(error, match=message):
        episode_stats(change(batch), previous)


def test_several_runs_are_taken_one_at_a_time_and_batches_that_were_stacked_in_time_are_one_run():
    env, policy = pair("CartPole-v1", "random", 3)
    batch = torch.stack([collect(env, policy, 80, seed=seed) for seed in range(3)])
    ends = batch["next", "done"].sum((1, 2, 3)).tolist()
    with pytest.raises(ValueError, match=r"\[3, 3, 80\] holds several runs.*lane 0.*batch\.unbind\(0\)"):
        fc.episode_stats(batch)
    assert [len(fc.episode_stats(run)) for run in batch.unbind(0)] == ends
    assert len(fc.episode_stats(torch.stack(batch[0].split(40, -1)))) == ends[0]

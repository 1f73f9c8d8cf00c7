"""`check_collector`: does this collect as the library's collectors do? And what holds for the rows of every batch."""

import contextlib
import io
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from funcollect.errors import ClosedError
from funcollect.testing.check_policy import other_weights, own_weights
from funcollect.testing.trials import FailedError, expect_equal, run_checks
from funcollect.trajectories.split import STEP, TRAJECTORY_IDS
from funcollect.tree import flatten, time_last

FLAGS = ("terminated", "truncated", "done")
COUNTERS = ("traj_ids", "step", "lane", "policy_version")
SEED = 0
SCALE = 20.0  # by how much weights are moved: an argmax has to follow
LONGEST_LAG = 10  # batches in flight when weights are updated


def expect_layout(batch):
    """A batch [*B] has the keys, shapes and dtypes that every batch has."""
    leaves, size = flatten(batch), tuple(batch.batch_size)
    wanted = {
        **{(*prefix, name): ((*size, 1), torch.bool) for prefix in ((), ("next",)) for name in FLAGS},
        **{("collector", name): (size, torch.int64) for name in COUNTERS},
        ("next", "reward"): ((*size, leaves["next", "reward"].shape[-1]), torch.float32),
        **{("next", *path): (tuple(leaf.shape), leaf.dtype) for path, leaf in roots(leaves).items()},
    }
    got = {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves.items() if path in wanted}
    assert got == wanted, f"{got}, expected {wanted}"
    assert batch.names == time_last(len(size))
    assert any(path[-1] == "action" for path in leaves)
    assert all(leaf.shape[: len(size)] == size for leaf in leaves.values())


def expect_flags(batch):
    """``done`` is terminated or truncated, and is False before every step of a batch [P, T]."""
    for prefix in ((), ("next",)):
        terminated, truncated, done = (batch[(*prefix, name)] for name in FLAGS)
        assert torch.equal(done, terminated | truncated), f"done of {prefix}"
    assert not batch["done"].any(), "a done lane is reset"


def expect_counters(rows):
    """In consecutive rows [P, T], steps count from 0 in each trajectory and no id comes back."""
    ids, step, over = rows[TRAJECTORY_IDS], rows[STEP], rows["next", "done"][:, :-1, 0]
    assert torch.equal(step[:, 1:], torch.where(over, 0, step[:, :-1] + 1)), f"steps {step.tolist()}"
    assert torch.equal(ids[:, 1:] != ids[:, :-1], over), f"trajectories {ids.tolist()}"
    expect_used_once([segment for lane in ids for segment in lane.unique_consecutive().tolist()])


def roots(leaves):
    """The observations before the step: the leaves of a batch with a key that is also under `next`."""
    own = {("reward",), *((name,) for name in FLAGS)}
    return {path: leaf for path, leaf in leaves.items() if ("next", *path) in leaves and path not in own}


def expect_chained(rows):
    """Each observation in consecutive rows [P, T] is the next one of the row before in its trajectory."""
    within = rows[TRAJECTORY_IDS][:, 1:] == rows[TRAJECTORY_IDS][:, :-1]
    for path, root in roots(leaves := flatten(rows)).items():
        assert torch.equal(root[:, 1:][within], leaves["next", *path][:, :-1][within]), path


def expect_used_once(ids):
    """No id is in the list twice, which has one id for each trajectory."""
    assert not (again := [each for each, count in Counter(ids).items() if count > 1]), f"{again} are used again"


@dataclass(frozen=True, kw_only=True)
class CollectorTrial:
    """A collector's class with its keywords, and how long a run is: so many batches at least, which show all lanes."""

    make: Callable[..., Any]
    kwargs: dict[str, Any]
    batches: int
    lanes: int

    @contextlib.contextmanager
    def built(self, **changes):
        """A collector, shut down afterwards."""
        collector = self.make(**({"seed": SEED} | self.kwargs | changes))
        try:
            yield collector
        finally:
            with contextlib.suppress(Exception):
                collector.shutdown()

    def enough(self, collector, begun=()):
        """A collector's next batches, until those of the run, with the ones that it has `begun` with, are enough."""
        count, seen = len(begun), set(lanes_of(begun)) if begun else set()
        for batch in collector:
            count, seen = count + 1, seen | set(batch["collector", "lane"].flatten().tolist())
            yield batch
            if count >= self.batches and len(seen) >= self.lanes:
                return

    def take(self, collector, begun=()):
        return [batch.clone() for batch in self.enough(collector, begun)]

    def run(self, **changes):
        with self.built(**changes) as collector:
            return self.take(collector)

    @cached_property
    def delivered(self):
        return self.run()

    @cached_property
    def frames(self):
        return int(self.delivered[0].numel())


def take(collector, count):
    return [batch.clone() for batch in itertools.islice(collector, count)]


def lanes_of(batches):
    """The rows of each lane in the order of time, [1, N]: however batches arrange their workers."""
    whole = torch.cat([batch.reshape(-1) for batch in batches])
    lanes = whole["collector", "lane"]
    return {lane: whole[lanes == lane].unsqueeze(0) for lane in lanes.unique().tolist()}


def ids_of(batches):
    return [each for rows in lanes_of(batches).values() for each in sorted(set(rows[TRAJECTORY_IDS][0].tolist()))]


def expect_same_lanes(got, wanted, what):
    """Each lane shows the same, as far as both runs go: batches of asynchronous workers may come anyhow."""
    ours, theirs = lanes_of(got), lanes_of(wanted)
    assert ours.keys() & theirs.keys(), f"{what} has the lanes {sorted(ours)}, expected {sorted(theirs)}"
    for lane in sorted(ours.keys() & theirs.keys()):
        length = min(ours[lane].shape[1], theirs[lane].shape[1])
        one, two = ours[lane][:, :length], theirs[lane][:, :length]
        expect_equal(one, two, f"{what}, lane {lane} (below: lane 0)", "the run before", "keep them equal")


def layout(trial):
    """Every batch has the keys, shapes and dtypes of the contract, and is the caller's own."""
    for batch in trial.delivered:
        expect_layout(batch)
        assert batch.shape == trial.delivered[0].shape
    with trial.built() as collector:
        assert not next(iter(collector)).is_locked


def counted(trial):
    """Frames are counted, at least `frames_per_batch` in each batch, rounded up to whole steps."""
    with trial.built() as collector:
        total = sum(batch.numel() for batch in take(collector, trial.batches))
        assert collector.frames == collector.stats()["frames"] == total
        asked, lanes = collector.frames_per_batch, len(lanes_of(trial.delivered))
    assert asked <= trial.frames < asked + lanes


def trajectories(trial):
    """Over all batches and lanes, steps count from 0, ids are used once, flags agree and rows follow each other."""
    for rows in lanes_of(trial.delivered).values():
        expect_flags(rows)
        expect_counters(rows)
        expect_chained(rows)
    expect_used_once(ids_of(trial.delivered))


def total_frames(trial):
    """`total_frames` ends the run, with a whole last batch; -1 does not."""
    with trial.built(total_frames=trial.frames + 1) as collector:
        assert [batch.numel() for batch in collector] == [trial.frames] * 2
        assert len(collector) == 2
    with trial.built(total_frames=-1) as collector:
        assert len(take(collector, trial.batches)) == trial.batches
        with pytest.raises(TypeError):
            len(collector)


def broken_off(trial):
    """A loop that is broken off can be taken up again where it stood; nothing is lost."""
    with trial.built() as collector:
        batches = take(collector, 1)
        batches += trial.take(collector, batches)
    for rows in lanes_of(batches).values():
        expect_counters(rows)
        expect_chained(rows)
    expect_same_lanes(batches, trial.delivered, "a run broken off")


def seeds(trial):
    """The same seed gives the same data, another others; `set_seed` at the start is as building with it."""
    another = trial.run(seed=SEED + 1)
    expect_same_lanes(trial.run(), trial.delivered, "a second run")
    with pytest.raises(FailedError):
        expect_same_lanes(another, trial.delivered, "a run with another seed")
    with trial.built() as collector:
        assert isinstance(collector.set_seed(SEED + 1), int)
        expect_same_lanes(trial.take(collector), another, "a run after set_seed")


def batch_memory(trial):
    """Whatever is written into a batch, later ones are the same; and later ones write into none."""
    with trial.built() as collector:
        pairs = [(batch, batch.clone()) for batch in trial.enough(collector)]
        for batch, kept in pairs:
            what, source = "a batch after later ones were collected", "the batch when it came"
            expect_equal(batch.reshape(1, -1), kept.reshape(1, -1), what, source, "reuse no memory that is viewed")
    with trial.built() as collector:
        scribbled = []
        for batch in trial.enough(collector):
            scribbled.append(batch.clone())
            for leaf in flatten(batch).values():
                leaf.zero_()
    expect_same_lanes(scribbled, [kept for _, kept in pairs], "the run whose batches were zeroed")


def weights(trial):
    """New weights show in later batches, and each update counts as a version."""
    with trial.built() as collector:
        policy = getattr(collector, "policy", None)  # workers have theirs
        given = policy is not None and bool(own_weights(policy))
        batches = take(collector, 1)
        collector.update_policy_weights_(other_weights(policy, SCALE) if given else None)
        while _versions(batches[-1]) != [1] and len(batches) <= LONGEST_LAG:
            batches += take(collector, 1)
    assert (_versions(batches[0]), _versions(batches[-1])) == ([0], [1])
    if given:
        with trial.built() as collector:
            before, after = (flatten(each[-1]) for each in (take(collector, len(batches)), batches))
        assert not all(torch.equal(leaf, after[path]) for path, leaf in before.items() if path[-1] != "policy_version")


def _versions(batch):
    return sorted(set(batch["collector", "policy_version"].flatten().tolist()))


def checkpoint(trial):
    """`load_state_dict` goes on with the weights and counts of `state_dict`, under ids not used before."""
    file = io.BytesIO()
    with trial.built() as collector:
        collector.update_policy_weights_()
        before = trial.take(collector)
        torch.save(collector.state_dict(), file)
        frames = collector.frames
    runs = []
    for _ in range(2):
        with trial.built() as collector:
            file.seek(0)
            collector.load_state_dict(torch.load(file, weights_only=True))
            assert collector.frames == frames
            runs.append(trial.take(collector))
    assert _versions(runs[0][0]) == _versions(before[-1])
    expect_used_once(ids_of(before) + ids_of(runs[0]))
    expect_same_lanes(runs[1], runs[0], "a second run from one state_dict")


def postproc(trial):
    """A batch is first split, then post-processed, then rid of keys that begin with an underscore."""
    masked = []

    def process(batch):
        masked.append(("collector", "mask") in batch.keys(True))
        more = torch.ones(batch.shape)
        return batch.update({"shown": more, "_hidden": more, "next": {"_deep": more}})

    with trial.built(postproc=process, split_trajs=True) as collector:
        (batch,) = take(collector, 1)
    assert masked
    assert all(masked)
    names = {name for path in flatten(batch) for name in path}
    assert "shown" in names
    assert not [name for name in names if name.startswith("_")]


def ends(trial):
    """It is a context manager, which shuts it down; it can be shut down twice, and says so when asked for more."""
    with trial.built() as collector:
        with collector as entered:
            assert entered is collector
            take(collector, 1)
        for _ in range(2):
            with pytest.raises(ClosedError):
                next(collector)
            collector.shutdown()


COLLECTOR_CHECKS = (
    *(layout, counted, trajectories, total_frames, broken_off, seeds, batch_memory),
    *(weights, checkpoint, postproc, ends),
)


def check_collector(make_collector, *, batches=3, lanes=0, **kwargs):
    """Run every check that a collector has to pass, and return the report.

    The checks build many of the class from **kwargs, without `reset_when_done` and `split_trajs`. A run has at least
    so many `batches`, two or more, and shows all `lanes`.
    """
    trial = CollectorTrial(make=make_collector, kwargs=kwargs, batches=max(2, batches), lanes=lanes)
    return run_checks(make_collector.__name__, COLLECTOR_CHECKS, trial)

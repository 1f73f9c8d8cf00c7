"""Compact batches: what a collector leaves out comes back bit for bit, wherever the lanes live."""

import itertools
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.envs.counting import always, make_counting
from tests.support.envs.light_envs import Nested, Sampling
from tests.support.running import FORKS_OF_RAY, in_soak
from tests.support.workers import multi, ray_collector

KEY = ("collector", "final_observations")
NAMES = ("observation", "pixels", "mode", "full", "empty")
LANES = {"lengths": (3, 1, 2)}, {"lengths": (2,), "truncated": (1,)}, {"lengths": (9,)}

WIDE = partial(Sampling, spaces.Box(0, 60_000, (2,), np.uint16))  # Torch cannot assign to this dtype by index
PARTLY = partial(Sampling, spaces.Dict({"full": spaces.Box(0, 1, (2,)), "empty": spaces.Box(0, 1, (0,))}))
ENVS = {
    "one": lambda: fc.make_env("CartPole-v1"),
    "several": lambda: fc.make_env("CartPole-v1", num_envs=3),
    "dict": lambda: fc.make_env(Nested, num_envs=2),
    "wide": lambda: fc.make_env(WIDE, num_envs=2),
    "torch": lambda: fc.make_env("torch/CartPole-v1", num_envs=3),
    "jax": lambda: fc.make_env("gymnax/CartPole-v1", num_envs=3),
    "counting": lambda: make_counting("host", *LANES),
}


def both(env, batches=3, **keywords):
    """The batches of two collectors of the same run, the second one compact."""
    made = []
    for compact in (False, True):
        policy = always(0) if env is ENVS["counting"] else None
        given = {"frames_per_batch": 30, "seed": 0, "compact_obs": compact, **keywords}
        with fc.SyncDataCollector(env(), policy, **given) as collector:
            made.append([next(collector) for _ in range(batches)])
    return zip(*made, strict=True)


def check(whole, compact):
    """That a compact batch lacks next observations, and gets them back."""
    lacking = {path for path in whole.keys(True, True) if path not in compact.keys(True, True)}
    assert lacking
    assert all(path[0] == "next" and path[1:] in {(name,) for name in NAMES} for path in lacking)
    assert_same(fc.next_observations(compact), whole)


KEYWORDS = ["", "max_frames_per_traj", "set_truncated", "reset_when_done", "reset_at_each_iter"]
PAIRS = {*zip(ENVS, itertools.cycle(KEYWORDS), strict=False), *(("several", name) for name in KEYWORDS)}


@pytest.mark.parametrize(("name", "keyword"), sorted(PAIRS) + in_soak(itertools.product(ENVS, KEYWORDS)))
def test_next_observations_come_back(name, keyword):
    values = {"max_frames_per_traj": 4, "set_truncated": True, "reset_when_done": False, "reset_at_each_iter": True}
    for whole, compact in both(ENVS[name], **({keyword: values[keyword]} if keyword else {})):
        check(whole, compact)


def test_only_ends_are_stored():
    for whole, compact in both(ENVS["counting"]):
        ends = int(whole["next", "done"].sum()) + int((~whole["next", "done"][:, -1]).sum())
        assert len(compact[KEY].step) == ends
        assert repr(compact[KEY]) == f"FinalObservations of {ends} frames"


def test_batches_may_be_taken_apart_and_joined():
    pairs = [*both(ENVS["several"])]
    whole, compact = pairs[0]
    for change in (lambda batch: batch[1:], lambda batch: batch[1], lambda batch: batch.reshape(-1)):
        assert_same(fc.next_observations(change(compact)), change(whole))
    assert_same(fc.next_observations(compact.clone().lock_()), whole)
    assert_same(fc.next_observations(pickle.loads(pickle.dumps(compact))), whole)
    for join, dim in ((torch.cat, 0), (torch.cat, 1), (torch.stack, 0)):
        one, two = (join([each[which] for each in pairs], dim) for which in (0, 1))
        assert_same(fc.next_observations(two), one)
    for there in (whole, fc.next_observations(compact)):  # which is returned as it is
        assert fc.next_observations(there) is there
    assert ("next", "observation") not in compact.keys(True)


def test_split_trajectories_keep_them():
    for whole, compact in both(ENVS["dict"], max_frames_per_traj=5):
        assert_same(fc.next_observations(fc.split_trajectories(compact)), fc.split_trajectories(whole))
    for whole, compact in both(ENVS["several"], split_trajs=True):
        check(whole, compact)


def test_rewards_of_several_steps_and_plots_use_them():
    sums = fc.MultiStep(gamma=0.9, n_steps=3)
    whole, compact = next(both(ENVS["several"]))
    assert_same(sums(compact), sums(whole))
    assert_same(*next(both(ENVS["several"], postproc=sums)))
    figures = [fc.plots.episode(each) for each in (whole, compact)]
    one, two = ([axes.get_ylabel() for axes in figure.axes] for figure in figures)
    assert one == two


def test_runs_with_equal_ids_and_frames_that_were_cut_or_shuffled_are_refused():
    runs = [next(both(ENVS["several"], seed=seed))[1] for seed in (0, 1)]
    _, compact = next(both(ENVS["counting"]))
    for given, message in (
        (torch.stack(runs), r"the batch joins several runs .* call next_observations for each run before"),
        (compact[:, :8], r"lacks the frame after step 1 of trajectory 9, .* call next_observations"),
        (compact.reshape(-1)[torch.arange(29, -1, -1)], "before frames are shuffled or cut"),
    ):
        with pytest.raises(ValueError, match=message):
            fc.next_observations(given)


@pytest.mark.parametrize("compact_storage", [False, True])
def test_buffers_take_compact_batches(compact_storage):
    stored = []
    for batches in zip(*both(ENVS["several"]), strict=True):
        buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(200, ndim=2, compact_obs=compact_storage))
        for batch in batches:
            buffer.extend(batch)
        stored.append(buffer[torch.arange(90)])
    assert_same(*stored)


SYNC, ASYNC = fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector


@pytest.mark.parametrize(("kind", "transport", "join", "env"), [
    *((kind, "serial", "stack", Nested) for kind in (SYNC, ASYNC)),
    (ASYNC, "processes", "stack", Nested),
    *((SYNC, "serial", join, "CartPole-v1") for join in (0, -1)),
    *((SYNC, "processes", join, PARTLY) for join in ("stack", *in_soak([0, -1]))),
])  # fmt: skip
def test_workers(kind, transport, join, env):
    made = []
    for compact in (False, True):
        keywords = {"create_env_fn": [env] * 2, "frames_per_batch": 24, "create_env_kwargs": {"num_envs": 2}}
        joined = {"cat_results": join} if kind is SYNC else {}
        with multi(kind, transport, policy=None, seed=0, compact_obs=compact, **keywords, **joined) as collector:
            made.append([batch.clone() for batch in itertools.islice(collector, 6)])
    for lane in (0,) if kind is SYNC else (0, 2):  # each worker's first batches, whatever order they came in
        own = [[each for each in batches if int(each["collector", "lane"].min()) == lane] for batches in made]
        assert len(own[0]) == 6 or kind is ASYNC
        for whole, compact in zip(*own, strict=kind is SYNC):
            check(whole, compact)


@pytest.mark.evening
@pytest.mark.usefixtures("ray_cluster")
@FORKS_OF_RAY
@pytest.mark.parametrize("workers", [1, *in_soak([2])])
def test_ray(workers):
    kind = SYNC if workers > 1 else fc.SyncDataCollector
    own = {"num_collectors": 2, "collector_class": kind, "num_workers_per_collector": workers, "sync": True}
    keywords = {"frames_per_batch": 48, "seed": 0}
    with ray_collector("CartPole-v1", compact_obs=True, **own, **keywords) as collector:
        made = [next(collector).clone() for _ in range(2)]
    with multi(transport="serial", create_env_fn=["CartPole-v1"] * 2 * workers, **keywords) as collector:
        for batch in made:
            check(next(collector), batch.flatten(0, 1) if workers > 1 else batch)

"""Datasets: what is read equals what was collected, by this library and by the format's own; parts survive a kill."""

import itertools
import json
import subprocess
import sys
from functools import partial

import datasets as hugging_face
import gymnasium
import h5py
import minari
import numpy as np
import optree
import pyarrow.parquet
import pytest
import torch
from gymnasium import spaces
from tensordict import NonTensorData

import funcollect as fc
from funcollect.datasets import from_arrays, from_hf, read_lerobot, read_minari, to_hf, write_lerobot, write_minari
from funcollect.datasets.episodes import DONE, INFO
from tests.support.cases import torch_mlp
from tests.support.compare import assert_same, bits, leaves
from tests.support.envs.light_envs import Sampling
from tests.support.running import ROOT, SCALE, in_soak, once

PIXELS = spaces.Box(0, 255, (6, 5, 3), np.uint8)
DICT = spaces.Dict({
    "camera": PIXELS,
    "arm": spaces.Dict({"angle": spaces.Box(-1, 1, (1,), np.float64), "grip": spaces.Discrete(4, start=2)}),
    "grid": spaces.Box(0, 9, (2, 3), np.int32),
})  # fmt: skip
BOX = spaces.Box(-1, 1, (3,), np.float64)
SPACES = {
    "box": (BOX, spaces.Box(-1, 1, (1,), np.float32), {}),
    "pixels": (PIXELS, spaces.Discrete(3, start=5), {}),
    "dict": (DICT, spaces.Box(-2, 2, (2,), np.float64), {}),
    "tuple, one-hot": (spaces.Tuple((BOX, spaces.Discrete(3))), spaces.Discrete(4), {"one_hot": True}),
}
INFOS = ["half", "pair", "flag"]


def make(kind, lanes=3):
    observation, action, options = SPACES[kind]
    factory = partial(Sampling, observation, action)
    return fc.make_env([factory] * lanes, info_keys=INFOS, **options)


def collected(env, cuts, **options):
    size = {"frames_per_batch": cuts * (env.num_envs or 1), "total_frames": 60 * (env.num_envs or 1)}
    with fc.SyncDataCollector(env, **size, seed=3, **options) as collector:
        yield from collector


def episodes(batches):
    """The episodes of batches that are whole ones, or of a rollout [P, T], in an order of their contents."""
    found = []
    for batch in batches:
        for row in batch.reshape(-1, batch.shape[-1]):
            begin = 0
            for end in (row[DONE][:, 0].nonzero()[:, 0] + 1).tolist():
                found.append(row[begin:end])
                begin = end
    return sorted(found, key=lambda episode: [*map(bits, leaves(episode["next"]).values())])


WRITERS = {
    "minari": (write_minari, read_minari),
    "lerobot": (write_lerobot, read_lerobot),
    "film": (partial(write_lerobot, video=True), read_lerobot),
}
LEFT_OUT = [("film", "box"), ("film", "tuple, one-hot")]  # which are written like other datasets of LeRobot's
LEFT_OUT += [("film", "pixels"), ("lerobot", "pixels")] * (SCALE == 1)  # as the camera of the dict is
LOST = ("action_log_prob", "action_unsquashed", "collector")


@pytest.mark.filterwarnings("ignore:unclosed file <_io.Buffered:ResourceWarning")  # the pipes of imageio's reader
@pytest.mark.parametrize(
    ("form", "kind"), [each for each in itertools.product(WRITERS, SPACES) if each not in LEFT_OUT]
)
def test_what_is_read_is_what_was_collected(form, kind, tmp_path):
    """However the run is cut into batches, the dataset into parts, and the result into batches."""
    write, read = WRITERS[form]
    env = make(kind)
    wanted = episodes(collected(env, 60))
    if env.action_spec.one_hot:
        for each in wanted:
            each.unlock_()["action"] = each["action"].argmax(-1)
    frames = sum(map(len, wanted))
    for compact in (True, *([False] if kind == "box" else in_soak([False]))):
        folder = tmp_path / f"{form} {compact}"
        assert write(folder, collected(env, 6, compact_obs=compact), env=env, seed=3, frames_per_part=50) == frames
        batches = [*read(folder, frames_per_batch=40)]
        assert [len(batch) >= 40 for batch in batches[:-1]] == [True] * (len(batches) - 1)
        assert sum(map(len, batches)) == frames
        joined = torch.cat(batches)
        assert joined["collector", "traj_ids"].unique_consecutive().tolist() == [*range(len(wanted))]
        got = episodes(batches)
        assert_same([each.exclude("collector") for each in got], [each.exclude(*LOST) for each in wanted])
        assert all(each["collector", "step"].tolist() == [*range(len(each))] for each in got)
        with pytest.raises(FileExistsError, match="choose another folder"):
            write(folder, [], env=env)


KEYS = [
    spaces.Dict(observation=BOX, state=BOX), spaces.Dict(state=BOX), spaces.Dict(image=PIXELS),
    spaces.Dict(images=spaces.Dict(a=BOX)),
]  # fmt: skip


@pytest.mark.parametrize("space", KEYS, ids=[str([*each.spaces]) for each in KEYS])
def test_observations_of_any_keys_come_back_from_lerobots_format(space, tmp_path):
    env = fc.make_env([partial(Sampling, space, spaces.Discrete(2))] * 2)
    write_lerobot(tmp_path, collected(env, 20), env=env)
    keys = {path for path in leaves(next(read_lerobot(tmp_path))) if path[0] not in ("next", "collector")}
    assert keys >= {leaf.path for leaf in env.observation_leaves}
    taken = spaces.Dict(images=spaces.Dict(a=BOX), a=PIXELS)
    env = fc.make_env([partial(Sampling, taken, spaces.Discrete(2))] * 2)
    with pytest.raises(ValueError, match=r"features have one name: rename them"):
        write_lerobot(tmp_path / "x", collected(env, 20), env=env)


class Inner(gymnasium.Wrapper):
    """Infos in a dict of infos."""

    def step(self, action):
        *answer, info = self.env.step(action)
        return *answer, {"of": {"half": info["half"]}}


def test_minaris_folders_may_be_relative_and_infos_nested_and_ids_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = fc.make_env([lambda: Inner(Sampling(BOX, spaces.Discrete(2)))] * 2, info_keys=["of.half"])
    write_minari("here/data", collected(env, 20), env=env, frames_per_part=20)
    assert (*INFO, "of", "half") in leaves(next(read_minari("here/data")))
    storage = minari.MinariDataset(tmp_path / "here" / "data").storage
    ids = [each["id"] for each in storage.get_episode_metadata(range(storage.total_episodes))]
    assert ids == [*range(storage.total_episodes)]
    sizes = [part.stat().st_size for part in (tmp_path / "here" / "data").glob("part-*/*.hdf5")]
    assert storage.metadata["dataset_size"] == pytest.approx(sum(sizes) / 1e6, abs=0.2 * len(sizes))


@pytest.mark.parametrize("write", [write_minari, write_lerobot])
def test_what_cannot_be_written_is_named(write, tmp_path):
    env, endless = make("box"), fc.make_env(gymnasium.make("Pendulum-v1", max_episode_steps=-1))
    with pytest.raises(ValueError, match=r"no whole episode, .*or limit episodes"):
        write(tmp_path / "e", collected(endless, 20), env=endless)
    with pytest.raises(ValueError, match=r"batches have the observations .*\[3\].*\[4\].*pass their own env"):
        write(tmp_path / "o", collected(env, 20), env=fc.make_env("CartPole-v1"))
    slashed = fc.make_env([partial(Sampling, spaces.Dict({"a/b": BOX}), spaces.Discrete(2))] * 2)
    if write is write_minari:
        with pytest.raises(ValueError, match=r"\['a/b'\], expected keys without slashes"):
            write(tmp_path / "s", collected(slashed, 20), env=slashed)


OTHERS = {  # what a run has, and what the env of other ones says
    "actions of another kind": ((BOX, spaces.Box(-1, 1, (2,))), (BOX, spaces.Discrete(3))),
    "floats as integers": ((BOX, spaces.Box(-1, 1, (2,))), (BOX, spaces.MultiDiscrete([3, 4]))),
    "further choices": ((BOX, spaces.Discrete(9, start=3)), (BOX, spaces.Discrete(3, start=3))),
    "observations in [0, 1] as bytes": ((PIXELS, spaces.Discrete(2)), (PIXELS, spaces.Discrete(2))),
    "other keys": ((spaces.Dict(a=BOX), spaces.Discrete(2)), (BOX, spaces.Discrete(2))),
}


@pytest.mark.parametrize("write", [write_minari, write_lerobot])
@pytest.mark.parametrize("name", OTHERS)
def test_an_env_whose_values_are_others_is_refused_before_anything_is_written(name, write, tmp_path):
    own, other = (fc.make_env([partial(Sampling, *each)] * 2) for each in OTHERS[name])
    batches = [batch.clone().unlock_() for batch in collected(own, 60)]
    if "bytes" in name:
        for batch in batches:
            for node in (batch, batch["next"]):
                node["observation"] = node["observation"] / 255
    with pytest.raises(ValueError, match="expected the same: pass their own env"):
        write(tmp_path / "d", batches, env=other)
    for path in (("action",), ("next", "reward"), ("next", "terminated")):
        with pytest.raises(ValueError, match=rf"batches lack \['{path[-1] if len(path) == 1 else '.'.join(path)}'"):
            write(tmp_path / "d", [batch.exclude(path) for batch in batches], env=own)
    assert not [*tmp_path.iterdir()]


def test_seeds_and_entries_that_would_be_wrong_are_refused(tmp_path):
    env = make("box")
    with (
        fc.SyncDataCollector(env, frames_per_batch=60, total_frames=120, seed=3) as collector,
        pytest.raises(ValueError, match="seed is 4, and the collector's 3, expected the same: leave it out"),
    ):
        write_minari(tmp_path / "d", collector, env=env, seed=4)
    for metadata, error, words in (
        ({"observation_space": "x", "author": "me"}, ValueError, r"\['observation_space'\], which the dataset determ"),
        ({"x": np.float32(1)}, TypeError, "expected what JSON holds"),
    ):
        with pytest.raises(error, match=words):
            write_minari(tmp_path / "d", collected(env, 60), env=env, metadata=metadata)
    assert not [*tmp_path.iterdir()]


def test_observations_that_are_called_info_are_no_infos(tmp_path):
    for number, info in enumerate((BOX, spaces.Dict(speed=BOX))):
        env = fc.make_env([partial(Sampling, spaces.Dict(info=info, x=BOX), spaces.Discrete(2))] * 2)
        for form in ("minari", "lerobot"):
            write, read = WRITERS[form]
            write(folder := tmp_path / f"{form} {number}", collected(env, 20), env=env)
            assert {leaf.path for leaf in env.observation_leaves} <= {*leaves(next(read(folder)))}
        dataset = minari.MinariDataset(tmp_path / f"minari {number}")
        assert not dataset[0].infos


def test_actions_of_parts_are_written_as_the_environment_takes_them(tmp_path):
    choices = spaces.Dict(z=spaces.Discrete(2, start=1), k=spaces.MultiDiscrete([3, 4]))
    boxes = spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Dict(a=spaces.Box(-1, 1, (1, 2), np.float64))))
    for number, acting in enumerate((choices, boxes)):
        env = fc.make_env([partial(Sampling, BOX, acting)] * 2)
        wanted = episodes(collected(env, 60))
        write_minari(tmp_path / f"{number}", collected(env, 20), env=env)
        dataset = minari.MinariDataset(tmp_path / f"{number}")
        assert dataset.action_space == acting
        first = dataset[0].actions
        assert acting.contains(optree.tree_map(lambda each: each[0], first))
        got = episodes(read_minari(tmp_path / f"{number}"))
        assert_same([each.exclude("collector") for each in got], [each.exclude(*LOST) for each in wanted])


@pytest.mark.parametrize("form", ["minari", "lerobot", "table"])
def test_episodes_that_ended_before_an_exception_are_written(form, tmp_path):
    env = make("box")

    def breaks_off():
        yield from itertools.islice(collected(env, 20), 2)
        raise ArithmeticError("the simulator is gone")

    write, read = (to_hf, from_hf) if form == "table" else WRITERS[form]
    options = {"folder": tmp_path / "d"} if form == "table" else {"env": env}
    with pytest.raises(ArithmeticError, match="is gone"):
        write(breaks_off(), **options) if form == "table" else write(tmp_path / "d", breaks_off(), **options)
    wanted = episodes([torch.cat([batch.clone() for batch in itertools.islice(collected(env, 20), 2)], -1)])
    assert sum(map(len, read(tmp_path / "d"))) == sum(map(len, wanted)) > 0


def test_leaves_that_no_table_holds_are_named():
    batch = next(collected(make("box"), 60)).unlock_()
    lead = batch.batch_size
    others = {"empty": torch.zeros(*lead, 0), "words": NonTensorData("x", batch_size=lead)}
    for name, leaf in (others | {"complex": torch.zeros(*lead, dtype=torch.complex64)}).items():
        with pytest.raises(TypeError, match=f"'{name}': .* expected numbers with dtypes of NumPy: leave them out"):
            to_hf([batch.clone().set(name, leaf)])
    twice = batch.clone().set("a.b", batch["action"]).set(("a", "b"), batch["action"])
    with pytest.raises(ValueError, match=r"several keys whose names, joined by dots, are \['a.b'\]"):
        to_hf([twice])


def test_a_table_of_hugging_face_has_every_leaf(tmp_path):
    env, policy = fc.make_env("CartPole-v1", num_envs=3), torch_mlp(fc.make_env("CartPole-v1", num_envs=3))
    wanted = episodes(collected(env, 60, policy=policy))
    places = None, tmp_path / "t"
    in_memory, saved = (to_hf(collected(env, 6, policy=policy), to, frames_per_part=50) for to in places)
    assert isinstance(saved, hugging_face.Dataset)
    assert in_memory[5] == saved[5]
    assert {"observation", "next.reward", "collector.traj_ids", "action_log_prob"} < {*saved.column_names}
    for dataset in (in_memory, saved, tmp_path / "t"):
        batches = [*from_hf(dataset, frames_per_batch=40)]
        assert {len(batch) for batch in batches[:-1]} == {40}
        assert_same(episodes([torch.cat(batches)]), wanted)
    with pytest.raises(ValueError, match="expected one or more: collect more frames"):
        to_hf([])
    with pytest.raises(ValueError, match=r"lacks the columns \['next.done'\].*: rename them"):
        from_hf(saved.remove_columns("next.done"))


@pytest.mark.parametrize(("options", "compact"), once([{"set_truncated": True}, {"split_trajs": True}], [False, True]))
def test_marks_that_a_collector_adds_change_no_episode(options, compact, tmp_path):
    env = make("box")
    wanted, got = (from_hf(to_hf(collected(env, 7, **each))) for each in ({}, options | {"compact_obs": compact}))
    drop = "action_log_prob", "collector"
    assert_same(*(episodes([torch.cat([*each]).exclude(*drop)]) for each in (wanted, got)))
    with pytest.raises(ValueError, match="take the batch before MultiStep"):
        write_minari(tmp_path, collected(env, 7, postproc=fc.MultiStep(gamma=1.0, n_steps=2)), env=env)


def test_bfloat16_of_a_policy_is_left_out_or_named(tmp_path):
    env = make("box")
    batches = [batch.clone().set("hidden", torch.zeros(3, 20, 2).bfloat16()) for batch in collected(env, 20)]
    assert write_minari(tmp_path, batches, env=env)
    with pytest.raises(TypeError, match=r"'hidden': 'torch.bfloat16.*: leave them out"):
        to_hf(batches)


@pytest.mark.parametrize("kind", [fc.SyncDataCollector, fc.MultiSyncDataCollector])
def test_minari_reads_spaces_infos_and_seeds_that_give_the_episodes_again(kind, tmp_path):
    env = fc.make_env("Pendulum-v1", num_envs=2, max_episode_steps=9)
    part = {} if kind is fc.SyncDataCollector else {"shard": fc.Shard(1, 2), "num_workers": 1, "in_process": True}
    with kind(env, frames_per_batch=10, total_frames=80, seed=1, **part) as collector:
        write_minari(tmp_path / "dataset", collector, env=env, metadata={"author": "nobody"}, frames_per_part=30)
    dataset = minari.MinariDataset(tmp_path / "dataset")
    assert dataset.storage.metadata["author"] == {"nobody"}
    assert (dataset.total_episodes, dataset.total_steps) == (8, 72)
    assert dataset.env_spec.max_episode_steps == 9
    made = dataset.recover_environment()
    assert dataset.action_space == made.action_space
    seeds = {each["seed"] for each in dataset.storage.get_episode_metadata(range(8))}
    assert len(seeds) == 8
    for episode, about in zip(dataset, dataset.storage.get_episode_metadata(range(8)), strict=True):
        assert dataset.observation_space.contains(episode.observations[-1])
        seen = [made.reset(seed=int(about["seed"]))[0]]
        for action, reward in zip(episode.actions, episode.rewards, strict=True):
            observation, again, *_ = made.step(action)
            seen.append(observation)
            assert reward == np.float32(again)
        np.testing.assert_array_equal(episode.observations, seen)


@pytest.mark.filterwarnings("ignore:.* is set to None:UserWarning", "ignore:Implicitly cleaning up:ResourceWarning")
def test_batches_of_a_dataset_that_minari_has_collected_go_anywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make("CartPole-v1"), record_infos=True)
    for seed in range(20):
        env.reset(seed=seed)
        while not any(env.step(env.action_space.sample())[2:4]):
            pass
    about = {"algorithm_name": "random", "author": "x", "author_email": "x", "code_permalink": "x", "description": "x"}
    theirs = env.create_dataset("cartpole/theirs-v0", **about)
    env.close()
    batches = [*read_minari("cartpole/theirs-v0", frames_per_batch=100)]
    lengths = [len(each.rewards) for each in theirs]
    stats, ended = None, []
    for batch in batches:
        stats = fc.episode_stats(batch, stats)
        ended += stats.lengths.tolist()
        values = torch.zeros(len(batch), 1)
        _, target = fc.gae(batch, values, values, gamma=1.0, lmbda=1.0)
        starts = batch["collector", "step"] == 0
        assert target[starts, 0].tolist() == stats.returns.tolist() == stats.lengths.tolist()
    assert ended == lengths
    whole = torch.cat(batches)
    following = np.concatenate([each.observations[1:] for each in theirs])
    np.testing.assert_array_equal(whole["next", "observation"], following)
    assert fc.split_trajectories(whole).shape == (20, max(lengths))
    for size in (50, 10_000):
        sampler = fc.SliceSampler(num_slices=4, traj_key=("collector", "traj_ids"), strict_length=False)
        empty = fc.ReplayBuffer(storage=fc.LazyTensorStorage(size), sampler=sampler, batch_size=16)
        buffer = read_minari("cartpole/theirs-v0", buffer=empty)
        assert buffer is empty
        assert len(buffer) == min(size, len(whole))
        slices = buffer.sample()
        assert {*map(float, slices["next", "reward"])} == {1.0}
        buffer.dumps(tmp_path / f"dump{size}")
    assert write_minari("cartpole/again-v0", [whole], env=fc.make_env("CartPole-v1")) == len(whole)
    again = minari.load_dataset("cartpole/again-v0")
    np.testing.assert_array_equal(again[3].observations, theirs[3].observations)
    assert {"cartpole/again-v0", "cartpole/theirs-v0"} <= {*minari.list_local_datasets()}


def test_texts_are_dropped_actions_of_parts_joined_and_broken_episodes_truncated(tmp_path):
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    space = spaces.Dict({"mission": spaces.Text(8), "place": spaces.Box(0, 9, (2,), np.int64)})
    acting = spaces.Dict({"go": spaces.Discrete(3), "turn": spaces.Discrete(2)})
    storage = MinariStorage.new(tmp_path / "d", space, acting, data_format="hdf5")
    places = np.arange(6).reshape(3, 2)
    actions = {"go": np.array([2, 1]), "turn": np.array([0, 1])}
    flags = {"terminations": np.zeros(2, bool), "truncations": np.zeros(2, bool)}
    given = {"mission": ["a", "b", "c"], "place": places}
    storage.update_episodes([EpisodeBuffer(observations=given, actions=actions, rewards=np.ones(2), **flags)])
    about = json.loads((tmp_path / "d" / "metadata.json").read_text())
    about |= {"dataset_id": "d-v0", "minari_version": minari.__version__}
    (tmp_path / "d" / "metadata.json").write_text(json.dumps(about))
    (batch,) = read_minari(tmp_path / "d", drop=["mission"])
    assert batch["action"].tolist() == [[2, 0], [1, 1]]
    assert batch["next", "place"].tolist() == places[1:].tolist()
    assert batch["next", "truncated"][:, 0].tolist() == [False, True]
    with pytest.raises(TypeError, match="mission is Text"):
        read_minari(tmp_path / "d")


def test_lerobots_files_are_as_its_specification_has_them(tmp_path):
    env = make("dict")
    frames = write_lerobot(tmp_path, collected(env, 20), env=env, fps=10, task="wave", frames_per_part=60)
    info = json.loads((tmp_path / "meta" / "info.json").read_text())
    assert (info["codebase_version"], info["total_frames"], info["fps"]) == ("v3.0", frames, 10)
    features = info["features"]
    names = ["height", "width", "channels"]
    assert features["observation.images.camera"] == {"dtype": "image", "shape": [6, 5, 3], "names": names}
    assert features["observation.arm.angle"]["shape"] == features["observation.arm.grip"]["shape"] == [1]
    assert features["observation.grid"] == {"dtype": "int32", "shape": [2, 3], "names": None}
    table = pyarrow.parquet.read_table(tmp_path / "data")
    assert {*features} == {*table.column_names}
    about = pyarrow.parquet.read_table(tmp_path / "meta" / "episodes").to_pandas().sort_values("episode_index")
    rows = table.to_pandas().sort_values("index")
    assert rows["index"].tolist() == [*range(frames)]
    assert (rows["timestamp"] == (rows["frame_index"] / 10).astype(np.float32)).all()
    for row in about.itertuples(index=False):
        own = rows.iloc[row.dataset_from_index : row.dataset_to_index]
        assert own["frame_index"].tolist() == [*range(row.length)]
        assert own["next.done"].tolist() == [False] * (row.length - 1) + [True]
        assert [*row.tasks] == ["wave"]
    stats = json.loads((tmp_path / "meta" / "stats.json").read_text())
    rewards = rows["next.reward"].to_numpy(np.float64)
    for name in ("mean", "std", "min", "max"):
        value = getattr(rewards, name)()
        np.testing.assert_allclose(stats["next.reward"][name], [value], rtol=1e-6, atol=1e-9)
    assert np.shape(stats["observation.images.camera"]["mean"]) == (3, 1, 1)
    # Its reader casts the columns to these features.
    kinds = {name: hugging_face.Value("float32") for name in ("timestamp", "next.reward")}
    kinds["observation.grid"] = hugging_face.Array2D((2, 3), "int32")
    kinds["observation.images.camera"] = hugging_face.Image()
    files = [str(path) for path in sorted((tmp_path / "data").glob("*/*.parquet"))]
    options = {"cache_dir": str(tmp_path / "cache"), "columns": [*kinds], "features": hugging_face.Features(kinds)}
    cast = hugging_face.Dataset.from_parquet(files, **options)
    assert np.array(cast[0]["observation.grid"]).shape == (2, 3)
    assert cast[0]["observation.images.camera"].size == (5, 6)


def test_datasets_of_lerobots_users_may_lack_rewards_and_flags(tmp_path):
    env = make("box")
    write_lerobot(tmp_path, collected(env, 20), env=env, task="wave")
    info = json.loads((tmp_path / "meta" / "info.json").read_text())
    keep = [name for name in info["features"] if not name.startswith("next.")]
    (file,) = (tmp_path / "data").glob("*/*.parquet")
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).select(keep), file)
    (file,) = (tmp_path / "meta" / "episodes").glob("*/*.parquet")
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.drop([name for name in table.column_names if "terminal" in name]), file)
    info["features"] = {name: info["features"][name] for name in keep}
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    (batch,) = read_lerobot(tmp_path)
    last = batch["next", "truncated"][:, 0]
    assert int(last.sum()) == info["total_episodes"]
    assert not batch["next", "reward"].any()
    assert torch.equal(batch["next", "observation"][last], batch["observation"][last])
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info | {"codebase_version": "v2.1"}))
    with pytest.raises(ValueError, match=r"'v2.1' of the format, expected v3.0: convert it"):
        read_lerobot(tmp_path)


RUN = """
import sys
from functools import partial
import funcollect as fc

def told(batches):
    for batch in batches:
        yield batch
        print(flush=True)

form, folder = sys.argv[1:]
env = fc.make_env("CartPole-v1", num_envs=2)
write = {"minari": partial(fc.datasets.write_minari, env=env), "lerobot": partial(fc.datasets.write_lerobot, env=env)}
write["hf"] = lambda folder, batches, **options: fc.datasets.to_hf(batches, folder, **options)
with fc.SyncDataCollector(env, frames_per_batch=100, total_frames=-1, seed=0) as collector:
    write[form](folder, told(collector), frames_per_part=100)
"""


@pytest.mark.parametrize(("form", "read"), [
    ("minari", read_minari),
    pytest.param("lerobot", read_lerobot, marks=pytest.mark.evening),
    pytest.param("hf", from_hf, marks=pytest.mark.evening),
])  # fmt: skip
def test_all_closed_parts_are_read_while_a_run_goes_on_and_after_it_was_killed(form, read, tmp_path):
    folder = tmp_path / "dataset"
    command = [sys.executable, "-c", RUN, form, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            for _ in range(8):  # batches, after which their parts are written
                assert process.stdout.readline()
            during = torch.cat([*read(folder)])
        finally:
            process.kill()
    after = torch.cat([*read(folder)])
    assert len(after) >= len(during) >= 300
    assert_same(after[: len(during)], during)
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.SyncDataCollector(env, frames_per_batch=100, total_frames=2 * len(after) + 2_000, seed=0) as collector:
        wanted = episodes([torch.cat([*collector], -1)])
    wanted = {bits(each["observation"]): each for each in wanted}
    for each in episodes([after]):
        same = wanted[bits(each["observation"])]
        assert_same(each["next"], same["next"])
        assert torch.equal(each["action"], same["action"])


class Pairs(fc.SyncDataCollector):
    """Delivers lanes in pairs that change, as a `RayCollector` of asynchronous collectors does."""

    pairs = ()

    def __next__(self):
        if not self.pairs:
            rows = super().__next__()
            self.pairs = [rows[[0, 2]], rows[[1, 3]]] if self._batches % 2 else [rows[[0, 3]], rows[[1, 2]]]
        return self.pairs.pop()

    def _split_by_order(self, batch):
        return batch.unbind(0)


def test_parts_are_written_while_batches_come_and_workers_episodes_are_joined(tmp_path):
    env = make("box", lanes=2)
    seen = []

    def watched():
        for batch in collected(env, 20):
            yield batch
            parts = [*(tmp_path / "d").glob("part-*")]
            seen.append(sum(map(len, read_minari(tmp_path / "d"))) if parts else 0)

    frames = write_minari(tmp_path / "d", watched(), env=env, frames_per_part=1)
    assert 0 < seen[0] < seen[1] < seen[2] == frames
    makers = [partial(make, "box", lanes=2)] * 2
    keywords = {"frames_per_batch": 14, "total_frames": 280, "seed": 0, "in_process": True}
    with fc.MultiaSyncDataCollector(makers, **keywords) as collector:
        frames = write_minari(tmp_path / "w", collector, env=env)
    assert 200 < frames <= 280
    seeds = [each["seed"] for each in minari.MinariDataset(tmp_path / "w").storage.get_episode_metadata(range(20))]
    assert len({*seeds}) == 20
    batches = [*collected(make("box", lanes=4), 60)]
    pairs = Pairs(make("box", lanes=4), frames_per_batch=20, total_frames=240, seed=3)
    assert write_minari(tmp_path / "p", pairs, env=env) == sum(map(len, episodes(batches)))
    with pytest.raises(ValueError, match="batches have lanes up to 3, but seed is of a run with 2: pass the collector"):
        write_minari(tmp_path / "x", batches, env=env, seed=0)


N = 7
ONES = np.ones(N)
ROWS = {
    "observations": np.arange(2.0 * N).reshape(N, 2),
    "actions": np.arange(N),
    "rewards": np.arange(N, dtype=np.float64),
    "terminals": np.arange(N) == 2,
    "timeouts": np.arange(N) == 4,
}


def test_arrays_with_d4rls_names(tmp_path):
    batch = from_arrays(ROWS)  # frames 4 and 6 have no next observation, and end truncated episodes
    assert batch["next", "reward"][:, 0].tolist() == [0, 1, 2, 3, 5]
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 2]
    assert batch["next", "terminated"][:, 0].tolist() == [False, False, True, False, False]
    assert batch["next", "truncated"][:, 0].tolist() == [False, False, False, True, True]
    assert batch["next", "observation"][:, 0].tolist() == [2, 4, 6, 8, 12]
    assert (batch["observation"].dtype, batch["action"].dtype) == (torch.float32, torch.int64)
    more = {"next_observations": ROWS["observations"] + 1, "infos/qpos": np.ones((N, 3)), "infos": {"goal": np.ones(N)}}
    more |= {"metadata/algorithm": np.array(b"sac"), "infos/name": np.full(N, b"x")}
    whole = from_arrays(ROWS | more)
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        for name, each in (ROWS | more).items():
            for path, array in each.items() if isinstance(each, dict) else [("", each)]:
                file[f"{name}/{path}".rstrip("/")] = array
        assert_same(from_arrays(file), whole)
    assert_same(from_arrays(tmp_path / "d4rl.hdf5"), whole)
    assert len(whole) == N
    assert whole[(*INFO, "qpos")].shape == (N, 3)
    assert torch.equal(whole["next", "observation"], whole["observation"] + 1)
    assert fc.episode_stats(whole).lengths.tolist() == [3, 2, 2]
    assert_same(from_arrays(ROWS | {"rewards": torch.arange(N, dtype=torch.float64, requires_grad=True)}), batch)
    several = ROWS | {"observations": {"a": ROWS["observations"], "b": np.zeros(N, np.uint8)}}
    assert from_arrays(several)["next", "b"].dtype == torch.uint8


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"rewards": np.ones(3)}, ValueError, "'next.reward': 3.*expected one length, of at least 1: cut them"),
    ({"rewards": None}, ValueError, "expected observations, actions, rewards and terminations"),
    ({"rewards": np.ones((N, 2))}, ValueError, r"'next.reward': \(7, 2\).*expected one number for each frame"),
    ({"observations": {"action": ONES, "x": ONES}}, ValueError, "key 'action' collides"),
    ({"next_observations": {"reward": np.ones(N)}}, ValueError, "key 'reward' collides"),
    ({"dones": np.arange(N) == 3}, ValueError, "'dones' beside another name of the same array: leave one out"),
    ({"terminals": np.zeros(N), "timeouts": np.ones(N)}, ValueError, "only frames that end.*: add next_observations"),
    ({"observations": {"a": ONES, "b": ONES}, "next_observations": {"a": ONES}}, ValueError, r"lack \['b'\]"),
])  # fmt: skip
def test_arrays_that_do_not_fit(change, error, words):
    with pytest.raises(error, match=words):
        from_arrays({name: each for name, each in (ROWS | change).items() if each is not None})
    with pytest.raises(FileNotFoundError, match="check the path"):
        from_arrays("nowhere.hdf5")


def test_several_players_and_agents_are_refused_but_in_tables(tmp_path):
    env = fc.make_env("pettingzoo/mpe/simple_tag_v3", num_envs=2)
    wanted, got = episodes(collected(env, 60)), episodes([torch.cat([*from_hf(to_hf(collected(env, 20)))])])
    assert len(got) == 4
    assert "observation" in got[0]["adversary"]
    assert_same(got, wanted)
    with pytest.raises(ValueError, match="groups of agents, expected one agent: to_hf writes any batch"):
        write_minari(tmp_path / "d", [], env=env)
    env = make("box")
    batch = next(collected(env, 60)).unlock_()
    batch["next", "reward"] = batch["next", "reward"].expand(-1, -1, 2).clone()
    for write in (write_minari, write_lerobot):
        with pytest.raises(ValueError, match=r"shape \[\d+, 2\], expected one player's: use to_hf"):
            write(tmp_path / write.__name__, [batch], env=env)
    assert next(from_hf(to_hf([batch])))["next", "reward"].shape[1] == 2

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from funcollect.cli import main
from funcollect.policies.mlp import mlp
from funcollect.progress import EpisodeWindow
from tests.support.misuse import Rigged, raises

CARTPOLE = ("collect", "CartPole-v1", "--policy", "mlp", "--num-envs", "3", "--frames", "600", "--seed", "7")


def run(out, *arguments):
    return main([*CARTPOLE, "--frames-per-batch", "150", "--out", str(out), *arguments])


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def error_of(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("funcollect: error: ")
    return line


@pytest.fixture
def rigged():
    gymnasium.register("Broken-v0", lambda: Rigged(raises(ArithmeticError("the arm broke off")), at=20))
    yield
    del gymnasium.registry["Broken-v0"]


def test_collect_saves_batches_statistics_and_a_plot_and_prints_a_table(tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert run(out) == 0
    assert os.listdir(tmp_path / "new") == ["out"]
    assert sorted(os.listdir(out)) == ["batch", "returns.png", "stats.json"]
    env = fc.make_env("CartPole-v1", num_envs=3)
    with fc.SyncDataCollector(env, mlp(env, seed=7), frames_per_batch=150, total_frames=600, seed=7) as collector:
        batches = list(collector)
    saved, wanted = TensorDict.load_memmap(out / "batch"), torch.cat(batches, -1)
    assert saved.shape == (3, 200)
    assert set(saved.keys(True, True)) == set(wanted.keys(True, True))
    for key in wanted.keys(True, True):
        assert saved[key].dtype == wanted[key].dtype
        assert torch.equal(saved[key], wanted[key]), key
    window = EpisodeWindow(10_000)
    for batch in batches:
        window.add(batch)
    statistics = json.loads((out / "stats.json").read_text())
    assert (statistics["env"], statistics["seed"], statistics["frames"]) == ("CartPole-v1", 7, 600)
    assert statistics["episodes"] == statistics["terminated"] + statistics["truncated"] == window.episodes > 10
    assert statistics["return"]["mean"] == pytest.approx(window.mean_returns[0])
    assert statistics["length"]["mean"] == pytest.approx(window.mean_length)
    assert statistics["return"]["min"] <= statistics["return"]["mean"] <= statistics["return"]["max"]
    assert statistics["frames_per_second"] == pytest.approx(600 / statistics["seconds"])
    assert (out / "returns.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    for line in (r"frames +600", r"truncated +0", r"per episode +mean +std +min +max", r"return( +\d+\.\d\d){4}"):
        assert re.search(f"^{line}$", said, re.M), line
    assert str(out) in said


def test_a_fresh_seed_is_noted_and_gives_the_run_again_and_the_last_batch_is_whole(tmp_path):
    arguments = ["collect", "CartPole-v1", "--num-envs", "2", "--frames", "100", "--frames-per-batch", "70"]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    seed = json.loads((tmp_path / "a" / "stats.json").read_text())["seed"]
    assert main([*arguments, "--out", str(tmp_path / "b"), "--seed", str(seed)]) == 0
    assert snapshot(tmp_path / "a" / "batch") == snapshot(tmp_path / "b" / "batch")
    saved = TensorDict.load_memmap(tmp_path / "a" / "batch")
    assert saved.shape == (2, 70)
    assert saved["observation"].abs().sum(-1).gt(0).all()


@pytest.mark.usefixtures("rigged")
def test_no_episode_ends_and_whole_ones_can_be_limited(tmp_path, capsys):
    assert main(["collect", "Pendulum-v1", "--frames", "4", "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "stats.json").read_text())["return"]["mean"] is None
    assert re.search(r"^return( +-){4}$", capsys.readouterr().out, re.M)
    limit = ("--max-episode-steps", "5")
    assert main(["evaluate", "Pendulum-v1", *limit, "--episodes", "3"]) == 0
    assert main(["record", "CartPole-v1", *limit, "--out", str(tmp_path / "film.gif")]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"truncated +(\d+)", out) == ["3", "1"]
    assert not err
    assert main(["evaluate", "Broken-v0"]) == 2
    mend = "pass --max-episode-steps N, or write truncates = True in the class of one that limits them itself"
    assert f"episodes may have no end: {mend}\n" in capsys.readouterr().err


def test_what_is_no_folder_for_a_run_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("no copy")
    for overwrite, words in (([], "--overwrite"), (["--overwrite"], "thesis.tex")):
        assert run(tmp_path / "out", *overwrite) == 2
        assert words in error_of(capsys)
    assert snapshot(tmp_path) == {"out/thesis.tex": b"no copy"}
    assert run(tmp_path / "out" / "thesis.tex") == 2
    assert "is a file" in error_of(capsys)
    monkeypatch.chdir(tmp_path / "out")
    assert run(Path()) == 2
    assert "name a folder inside it" in error_of(capsys)


def test_overwrite_replaces_an_earlier_run_and_one_that_fails_leaves_it(tmp_path, rigged, monkeypatch, capsys):
    (tmp_path / "out").mkdir()  # an empty folder is taken
    assert run(tmp_path / "out") == 0
    before = snapshot(tmp_path / "out" / "batch")
    assert run(tmp_path / "out", "--overwrite", "--seed", "8") == 0
    after = snapshot(tmp_path / "out" / "batch")
    assert before.keys() == after.keys()
    assert before["observation.memmap"] != after["observation.memmap"]
    arguments = ["--policy", "random", "--frames", "100", "--out", str(tmp_path / "out"), "--overwrite"]
    capsys.readouterr()
    assert main(["collect", "Broken-v0", *arguments]) == 2
    assert "the arm broke off" in error_of(capsys)
    rename = Path.rename

    def interrupted(self, target):
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)  # while the folders change places
    assert run(tmp_path / "out", "--overwrite", "--seed", "9") == 130
    assert snapshot(tmp_path / "out" / "batch") == after
    assert os.listdir(tmp_path) == ["out"]


READERS = {"minari": fc.datasets.read_minari, "lerobot": fc.datasets.read_lerobot, "hf": fc.datasets.from_hf}


@pytest.mark.parametrize("form", READERS)
def test_a_dataset_has_the_whole_episodes_of_the_run(form, tmp_path, capsys):
    assert run(tmp_path / "out", "--dataset", form) == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["dataset", "returns.png", "stats.json"]
    statistics = json.loads((tmp_path / "out" / "stats.json").read_text())
    stats = fc.episode_stats(torch.cat([*READERS[form](tmp_path / "out" / "dataset")]))
    assert len(stats) == statistics["episodes"] > 10
    assert stats.mean_return == pytest.approx(statistics["return"]["mean"])
    capsys.readouterr()
    assert run(tmp_path / "out") == 2
    assert "--overwrite" in error_of(capsys)


@pytest.mark.usefixtures("rigged")
def test_a_run_that_fails_leaves_the_dataset_that_was_written(tmp_path, capsys):
    assert run(tmp_path / "old", "--dataset", "minari") == 0
    before, old = snapshot(tmp_path / "old"), ["--out", str(tmp_path / "old"), "--dataset", "minari", "--overwrite"]
    assert main(["collect", "Nope-v9", *old]) == 2
    assert snapshot(tmp_path / "old") == before
    assert run(tmp_path / "old", "--dataset", "hf", "--overwrite") == 0
    assert snapshot(tmp_path / "old") != before
    assert main(["collect", "Broken-v0", "--out", str(tmp_path / "out"), "--dataset", "minari"]) == 2
    assert "the arm broke off" in capsys.readouterr().err
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "required: COMMAND"),
    (["fly"], "invalid choice: 'fly'"),
    (["collect"], "0 environments are given, expected one: ENV, or --env ENV"),
    (["collect", "A", "--env", "B"], "2 environments are given"),
    (["collect", "CartPole-v1", "-o", "seed"], "'seed' is not NAME=VALUE"),
    (["collect", "CartPole-v1", "--frames", "0"], "0 is not positive"),
    (["collect", "CartPole-v1", "--frames", "1e30"], "1e30 is too large"),
    (["collect", "CartPole-v1", "--frames", "1.5"], "1.5 is not an integer"),
    (["collect", "CartPole-v1", "--frames", "1e400"], "1e400 is not an integer"),
    (["collect", "CartPole-v1", "--frames", "ten"], "argument --frames: 'ten' is not an integer"),
])  # fmt: skip
def test_bad_arguments_end_with_two(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage: funcollect" in said
    assert words in said


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_disk_without_room_is_one_line(when, tmp_path, monkeypatch, capsys):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
    assert run(tmp_path / "out") == 2
    assert re.search(r"no room for 0\.1 MB in .*: No space left on device", error_of(capsys))
    assert os.listdir(tmp_path) == []


INTERRUPTIBLE = """
import signal
import sys
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from funcollect.cli import main

class Telling(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 50:
            print("saving has begun", flush=True)
        return super().step(action)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
gymnasium.register("Telling-v0", Telling)
sys.exit(main())
"""


def test_ctrl_c_from_outside(tmp_path):
    arguments = ["--frames", "3000000", "--frames-per-batch", "10", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", INTERRUPTIBLE, "collect", "Telling-v0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving has begun\n"
        assert list(tmp_path.rglob("*.memmap"))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert said == "funcollect: interrupted\n"
    assert os.listdir(tmp_path) == []

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file
from tensordict import TensorDict

import funcollect as fc
from funcollect.cli import main
from funcollect.policies.mlp import mlp
from funcollect.progress import EpisodeWindow

CARTPOLE = ("collect", "CartPole-v1", "--policy", "mlp", "--num-envs", "3", "--frames", "600", "--seed", "7")


def run(out: Path, *arguments: str) -> int:
    return main([*CARTPOLE, "--frames-per-batch", "150", "--out", str(out), *arguments])


def the_same_by_hand() -> list[TensorDict]:
    env = fc.make_env("CartPole-v1", num_envs=3)
    with fc.SyncDataCollector(env, mlp(env, seed=7), frames_per_batch=150, total_frames=600, seed=7) as collector:
        return list(collector)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("funcollect: error: ")
    return line


class Rigged(gymnasium.Env[Any, Any]):
    """Does `deed` at its twentieth step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, deed: type[BaseException]) -> None:
        self.deed = deed
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        if self.count == 20:
            raise self.deed("the arm broke off")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def unmade() -> gymnasium.Env[Any, Any]:
    raise RuntimeError("no licence:\n  ask at the desk")


@pytest.fixture
def rigged() -> Iterator[None]:
    gymnasium.register("Interrupted-v0", lambda: Rigged(KeyboardInterrupt))
    gymnasium.register("Broken-v0", lambda: Rigged(ArithmeticError))
    gymnasium.register("Unmade-v0", unmade)
    yield
    for name in ("Interrupted-v0", "Broken-v0", "Unmade-v0"):
        del gymnasium.registry[name]


# --- collect ----------------------------------------------------------------------------------------------------------


def test_collect_saves_what_the_collector_delivers(tmp_path: Path) -> None:
    assert run(tmp_path / "out") == 0
    saved = TensorDict.load_memmap(tmp_path / "out" / "batch")
    wanted = torch.cat(the_same_by_hand(), -1)
    assert saved.shape == (3, 200)
    assert set(saved.keys(True, True)) == set(wanted.keys(True, True))
    for key in wanted.keys(True, True):
        assert saved[key].dtype == wanted[key].dtype
        assert torch.equal(saved[key], wanted[key]), key


def test_collect_writes_statistics_and_plot(tmp_path: Path) -> None:
    assert run(tmp_path / "out") == 0
    window = EpisodeWindow(10_000)
    for batch in the_same_by_hand():
        window.add(batch)
    statistics = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert statistics["env"] == "CartPole-v1"
    assert statistics["seed"] == 7
    assert statistics["frames"] == 600
    assert statistics["episodes"] == statistics["terminated"] + statistics["truncated"] == window.episodes > 10
    assert statistics["return"]["mean"] == pytest.approx(window.mean_returns[0])
    assert statistics["length"]["mean"] == pytest.approx(window.mean_length)
    assert statistics["return"]["min"] <= statistics["return"]["mean"] <= statistics["return"]["max"]
    assert statistics["frames_per_second"] == pytest.approx(600 / statistics["seconds"])
    assert (tmp_path / "out" / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_collect_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert re.search(r"^frames +600$", said, re.M)
    assert re.search(r"^episodes +\d+$", said, re.M)
    assert re.search(r"^truncated +0$", said, re.M)
    assert re.search(r"^per episode +mean +std +min +max$", said, re.M)
    assert re.search(r"^return( +\d+\.\d\d){4}$", said, re.M)
    assert str(tmp_path / "out") in said


def test_nothing_else_is_left_beside_the_folder(tmp_path: Path) -> None:
    assert run(tmp_path / "new" / "out") == 0
    assert os.listdir(tmp_path / "new") == ["out"]
    assert sorted(os.listdir(tmp_path / "new" / "out")) == ["batch", "returns.png", "stats.json"]


def test_the_last_batch_is_whole(tmp_path: Path) -> None:
    arguments = ["--policy", "random", "--num-envs", "2", "--frames", "100", "--frames-per-batch", "70"]
    assert main(["collect", "CartPole-v1", *arguments, "--out", str(tmp_path / "out")]) == 0
    saved = TensorDict.load_memmap(tmp_path / "out" / "batch")
    assert saved.shape == (2, 70)
    assert saved["collector", "step"][:, 0].tolist() == [0, 0]
    assert saved["observation"].abs().sum(-1).gt(0).all()


def test_a_fresh_seed_is_noted_and_gives_the_run_again(tmp_path: Path) -> None:
    arguments = ["collect", "CartPole-v1", "--policy", "mlp", "--frames", "50"]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    seed = json.loads((tmp_path / "a" / "stats.json").read_text())["seed"]
    assert main([*arguments, "--out", str(tmp_path / "b"), "--seed", str(seed)]) == 0
    assert snapshot(tmp_path / "a" / "batch") == snapshot(tmp_path / "b" / "batch")


def test_no_episode_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "random", "--frames", "4", "--out", str(tmp_path / "out")]
    assert main(["collect", "Pendulum-v1", *arguments]) == 0
    assert json.loads((tmp_path / "out" / "stats.json").read_text())["return"]["mean"] is None
    assert re.search(r"^return( +-){4}$", capsys.readouterr().out, re.M)


def test_whole_episodes_can_be_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = ("--max-episode-steps", "5")
    assert main(["evaluate", "Pendulum-v1", *limit, "--episodes", "3"]) == 0
    assert main(["record", "CartPole-v1", *limit, "--out", str(tmp_path / "film.gif")]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"truncated +(\d+)", out) == ["3", "1"]
    assert not err


@pytest.mark.usefixtures("rigged")
def test_an_evaluation_that_may_have_no_end_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "Broken-v0"]) == 2
    mend = "pass --max-episode-steps N, or write truncates = True in the class of one that limits them itself"
    said = f"episodes may have no end: {mend}\n"
    assert said in capsys.readouterr().err


def test_without_matplotlib_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["batch", "stats.json"]
    assert "pip install 'funcollect[viz]'" in capsys.readouterr().err


# --- the folder -------------------------------------------------------------------------------------------------------


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run(tmp_path / "out") == 0
    assert (tmp_path / "out" / "stats.json").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("no copy")
    assert run(tmp_path / "out") == 2
    assert "--overwrite" in error_of(capsys)
    assert run(tmp_path / "out", "--overwrite") == 2
    assert "thesis.tex" in error_of(capsys)
    assert snapshot(tmp_path) == {"out/thesis.tex": b"no copy"}


def test_overwrite_replaces_an_earlier_run(tmp_path: Path) -> None:
    assert run(tmp_path / "out") == 0
    before = snapshot(tmp_path / "out" / "batch")
    assert run(tmp_path / "out", "--overwrite", "--seed", "8") == 0
    after = snapshot(tmp_path / "out" / "batch")
    assert before.keys() == after.keys()
    assert before["observation.memmap"] != after["observation.memmap"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_failed_run_leaves_the_earlier_one(tmp_path: Path, rigged: None) -> None:
    assert run(tmp_path / "out") == 0
    before = snapshot(tmp_path)
    arguments = ["--policy", "random", "--frames", "100", "--out", str(tmp_path / "out"), "--overwrite"]
    assert main(["collect", "Broken-v0", *arguments]) == 2
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == ["out"]


def test_ctrl_c_while_changing_places_keeps_the_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "out") == 0
    before = snapshot(tmp_path)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    assert run(tmp_path / "out", "--overwrite", "--seed", "8") == 130
    assert snapshot(tmp_path) == before


def test_a_file_and_the_working_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("")
    assert run(tmp_path / "out") == 2
    assert "is a file" in error_of(capsys)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(Path()) == 2
    assert "name a folder inside it" in error_of(capsys)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "policy", "message"),
    [
        ("NoSuchEnv-v0", "mlp", "NoSuchEnv"),
        ("no_such_package:Env-v0", "random", "no_such_package"),
        ("torch/NoSuchEnv", "random", "expected one of"),
        ("Unmade-v0", "random", "Unmade-v0.*no licence: ask at the desk"),
        ("Broken-v0", "random", "the arm broke off"),
        ("CartPole-v1", "dqn", r"no policy 'dqn', expected one of \['mlp', 'random'"),
    ],
)
def test_a_bad_env_is_one_line_and_two(
    env: str, policy: str, message: str, tmp_path: Path, rigged: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--policy", policy, "--frames", "100", "--out", str(tmp_path / "out")]
    assert main(["collect", env, *arguments]) == 2
    assert re.search(message, error_of(capsys))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["collect"],
        ["collect", "CartPole-v1", "--env", "CartPole-v1"],
        ["collect", "CartPole-v1", "-o", "seed"],
        ["collect", "CartPole-v1", "--frames", "0"],
        ["collect", "CartPole-v1", "--frames", "1e30"],
        ["collect", "CartPole-v1", "--frames", "1.5"],
        ["collect", "CartPole-v1", "--frames", "1e400"],
        ["collect", "CartPole-v1", "--frames", "ten"],
    ],
)
def test_bad_arguments_end_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: funcollect" in capsys.readouterr().err


def test_a_count_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["collect", "CartPole-v1", "--frames", "ten"])
    assert capsys.readouterr().err.endswith("argument --frames: 'ten' is not an integer\n")


def test_a_disk_without_room_is_seen_before_collecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert run(tmp_path / "out") == 2
    assert re.search(r"no room for 0\.1 MB in .*: No space left on device", error_of(capsys))
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert run(tmp_path / "out") == 2
    assert "No space left on device" in error_of(capsys)
    assert os.listdir(tmp_path) == []


@pytest.mark.evening
def test_files_beyond_the_allowed_size(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "from funcollect.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *CARTPOLE, "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("funcollect: error: ")
    assert os.listdir(tmp_path) == []


def test_ctrl_c_inside_a_run(tmp_path: Path, rigged: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "random", "--frames", "100", "--frames-per-batch", "10", "--out", str(tmp_path / "out")]
    assert main(["collect", "Interrupted-v0", *arguments]) == 130
    assert capsys.readouterr().err == "funcollect: interrupted\n"
    assert os.listdir(tmp_path) == []


INTERRUPTIBLE = """
import signal
import sys
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from funcollect.cli import main
from funcollect.policies.mlp import mlp

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


def test_ctrl_c_from_outside(tmp_path: Path) -> None:
    arguments = [
        "--policy",
        "random",
        "--frames",
        "3000000",
        "--frames-per-batch",
        "10",
        "--out",
        str(tmp_path / "out"),
    ]
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


# --- defaults, modules, weights ---------------------------------------------------------------------------------------

MODULE = """
import gymnasium
import torch
import funcollect as fc

def bare():
    pass

def cart():
    return gymnasium.make("CartPole-v1", render_mode="rgb_array")

def rendered(render_mode=None):
    return gymnasium.make("CartPole-v1", render_mode=render_mode)

class Mine(fc.envs.CartPole):
    pass

def net(env, width=4, seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, width), torch.nn.Linear(width, 2)]
    return fc.torch_policy(torch.nn.Sequential(*layers), head=fc.heads.categorical)

def unready():
    raise OSError("no licence")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module of a user's own."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


def test_every_argument_has_a_default(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", "CartPole-v1"]) == 0
    picture = re.search(r"^picture: (runs/CartPole-v1-[\d-]+/returns\.png)$", capsys.readouterr().out, re.M)
    assert picture
    assert (here / picture[1]).exists()
    assert json.loads((here / picture[1]).with_name("stats.json").read_text())["frames"] == 10_000


@pytest.mark.parametrize("env", [["mine:cart"], ["--env", "mine:Mine"]])
def test_environments_and_policies_of_a_module(env: list[str], here: Path) -> None:
    policy = ["--policy", "mine:net", "-o", "width=3"]
    assert main(["collect", *env, *policy, "--num-envs", "2", "--frames", "4e2", "--out", "out"]) == 0
    assert json.loads((here / "out" / "stats.json").read_text())["policy_origin"] == "mine module"
    assert main(["check", *env, "--steps", "20"]) == 0


def test_films_of_a_module_and_of_an_id(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert main(["record", "mine:cart", "--out", "one.gif"]) == 0
    assert main(["record", "CartPole-v1", "--out", "two.gif"]) == 0
    assert main(["record", "mine:rendered", "--out", "three.gif"]) == 0
    films = {(here / f"{name}.gif").read_bytes() for name in ("one", "two", "three")}
    assert len(films) == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_weights_act(suffix: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = mlp(fc.make_env("CartPole-v1"), seed=5).state_dict()
    path = f"weights{suffix}"
    save_file(other, path) if suffix == ".safetensors" else torch.save(other, path)
    arguments = ["evaluate", "CartPole-v1", "--policy", "mlp", "--episodes", "8"]
    assert main([*arguments, "--seed", "1", "--weights", path]) == 0
    loaded = capsys.readouterr().out
    env = fc.make_env("CartPole-v1", num_envs=8)
    wanted = fc.evaluate(env, mlp(env, seed=5), episodes=8, seed=1)
    assert f"{wanted.returns.mean():.2f}" in loaded
    assert main([*arguments, "--seed", "1"]) == 0
    assert capsys.readouterr().out != loaded


class Unpickled:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_bad_weights_are_one_line_and_nothing_is_executed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil.pt").write_bytes(pickle.dumps(Unpickled()))
    torch.save([1.0], "list.pt")
    torch.save({"0.weight": torch.zeros(2, 2)}, "shape.pt")
    for name in ("text.safetensors", "weights.bin"):
        Path(name).write_text("text")
    faults = {
        "evil.pt": "no tensors by name",
        "list.pt": "expected tensors by name",
        "shape.pt": "shape.pt does not fit the policy mlp: params differ",
        "text.safetensors": "is no file of safetensors",
        "weights.bin": "expected .safetensors, .pt or .pth",
        "none.pt": "none.pt does not exist",
    }
    for path, message in faults.items():
        assert main(["evaluate", "CartPole-v1", "--policy", "mlp", "--weights", path]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert not Path("executed").exists()
    assert main(["evaluate", "CartPole-v1", "--weights", "shape.pt"]) == 2
    assert "name the policy of --weights with --policy" in error_of(capsys)
    assert main(["check", "CartPole-v1", "--weights", "shape.pt"]) == 2
    assert "--weights is given without --policy" in error_of(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine:nothing"], "names 'nothing', which the module 'mine' lacks"),
        (["./mine.py:cart"], "names a file, expected a module: say mine:cart"),
        (["mine"], "'mine' is a module here, expected a function of it: say for example mine:make"),
        (["CartPole-v1", "--policy", "mine:bare"], "takes (), expected a function of the environment"),
        (["CartPole-v1", "--policy", "mine.py:policy"], "names a file, expected a module: say mine:policy"),
        (["no_module:thing"], "'no_module', which cannot be imported"),
        (["mine:unready"], "cannot make 'mine:unready': no licence"),
        (["CartPole-v1", "--policy", "mine:nothing"], "cannot be imported"),
        (["CartPole-v1", "--policy", "mine:cart"], "expected a function"),
    ],
)
def test_bad_modules_are_one_line(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", *arguments]) == 2
    assert message in error_of(capsys)


# --- demo, help -------------------------------------------------------------------------------------------------------


def test_demo(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--frames", "4000"]) == 0
    said = capsys.readouterr().out
    env = fc.make_env("CartPole-v1", num_envs=8)
    assert said.startswith(str(fc.explain(env, mlp(env, seed=0))))
    assert re.search(r"^episodes +\d+$", said, re.M)
    assert re.search(r"^frames/second +[\d,.]+$", said, re.M)
    assert re.search(r"^next\.observation +\[8, 256, 4\] +torch\.float32$", said, re.M)
    assert said.endswith("picture: runs/demo.png\n")
    assert (here / "runs" / "demo.png").exists()


COMMANDS = ("demo", "collect", "evaluate", "record", "check", "explain", "profile", "policies")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_on_a_screen_and_ends_with_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert lines[-1].startswith(f"example: funcollect {command}")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{fc.__version__}\n"


def test_torch_has_as_many_threads_as_before(here: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(["demo", "--frames", "100"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from funcollect.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "collect" in said
    assert said.endswith("False\n")

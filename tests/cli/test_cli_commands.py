"""The commands but ``collect``: environments and policies of modules, weights, help."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from safetensors.torch import save_file

import funcollect as fc
from funcollect.cli import main
from funcollect.policies.mlp import mlp
from tests.cli.test_cli import error_of
from tests.support.faulty.faulty_envs import LeavesItsSpace, Walk

PROFILE = ["profile", "CartPole-v1", "--num-envs", "2", "--frames", "500"]


def unmade():
    raise RuntimeError("no licence:\n  ask at the desk")


@pytest.fixture(autouse=True)
def registered():
    kinds = {"Walk-v0": Walk, "LeavesItsSpace-v0": LeavesItsSpace, "Unmade-v0": unmade}
    for name, kind in kinds.items():
        gymnasium.register(name, kind)
    yield
    for name in kinds:
        del gymnasium.registry[name]


def test_check_and_explain_print_what_the_functions_return(capsys):
    assert main(["check", "Walk-v0", "--steps", "40", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{fc.testing.check_env('Walk-v0', num_envs=3, steps=40, seed=3)}\n"
    assert not err
    assert main(["explain", "CartPole-v1", "--policy", "mlp", "--num-envs", "4"]) == 0
    env = fc.make_env("CartPole-v1", num_envs=4)
    assert capsys.readouterr().out == f"{fc.explain(env, mlp(env, seed=0))}\n"


@pytest.mark.parametrize(("arguments", "line"), [
    (["--num-envs", "1"], "n/a     reset_mask          there is one lane"),
    ([], "n/a     terminal"),
    (["--max-episode-steps", "6"], "passed  terminal"),
])  # fmt: skip
def test_check_takes_the_number_of_environments_and_a_limit(arguments, line, capsys):
    assert main(["check", "MountainCar-v0", "--steps", "20", *arguments]) == 0
    assert line in capsys.readouterr().out


def test_a_check_that_fails_is_said_in_words(capsys):
    assert main(["check", "LeavesItsSpace-v0", "--steps", "40"]) == 1
    out, err = capsys.readouterr()
    head = "funcollect: check failed: HostEnv('LeavesItsSpace-v0', num_envs=3) fails 'observations'"
    assert err.startswith(head)
    assert "expected a value in Box(-4.0, 4.0, (2,), float32)" in err
    assert len(err.splitlines()) == 1
    assert "passed  runs" in out
    assert "passed  observations" not in out


def test_profile_prints_the_table_and_draws_the_parts(tmp_path, monkeypatch, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main([*PROFILE, "--policy", "mlp", "--out", str(tmp_path / "profile.png")]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    out, err = capsys.readouterr()
    assert out.startswith("HostEnv('CartPole-v1', num_envs=2) with TorchPolicy, loop host\n512 frames in ")
    assert re.search(r"^environment +\d+\.\d\d +\d+%$", out, re.M)
    assert re.search(r"^a frame +\d+\.\d\d +100%$", out, re.M)
    assert not err
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*PROFILE, "--out", str(tmp_path / "profile.png")]) == 0
    out, err = capsys.readouterr()
    assert "with RandomPolicy" in out
    assert "\nbare environment " in out
    assert "pip install 'funcollect[viz]'" in err


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

def silent():
    raise OSError
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


def test_every_argument_has_a_default(here, capsys):
    assert main(["collect", "CartPole-v1"]) == 0
    picture = re.search(r"^picture: (runs/CartPole-v1-[\d-]+/returns\.png)$", capsys.readouterr().out, re.M)
    assert json.loads((here / picture[1]).with_name("stats.json").read_text())["frames"] == 10_000


@pytest.mark.parametrize("env", ["mine:cart", "mine:Mine"])
def test_environments_and_policies_of_a_module(env, here):
    policy = ["--policy", "mine:net", "-o", "width=3"]
    assert main(["collect", env, *policy, "--num-envs", "2", "--frames", "4e2", "--out", "out"]) == 0
    assert json.loads((here / "out" / "stats.json").read_text())["policy_origin"] == "mine module"
    assert main(["check", env, "--steps", "20"]) == 0


def test_films_of_a_module_and_of_an_id(here, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    films = set()
    for name in ("mine:cart", "CartPole-v1", "mine:rendered"):
        assert main(["record", name, "--out", "film.gif"]) == 0
        films.add((here / "film.gif").read_bytes())
    assert len(films) == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_weights_act(suffix, here, capsys):
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
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_bad_weights_are_one_line_and_nothing_is_executed(here, capsys):
    Path("evil.pt").write_bytes(pickle.dumps(Unpickled()))
    torch.save([1.0], "list.pt")
    torch.save({"0.weight": torch.zeros(2, 2)}, "shape.pt")
    for name in ("text.safetensors", "weights.bin"):
        Path(name).write_text("text")
    faults = {
        "evil.pt": "no tensors by name",
        "list.pt": "expected tensors by name",
        "shape.pt": "shape.pt does not fit the policy mlp: params differ",
        "text.safetensors": "text.safetensors has no tensors by name",
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


OUT = ["--out", "out"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["check", "Nowhere-v0"], "Gymnasium cannot make 'Nowhere-v0'"),
    ([*PROFILE, "--out", "profile.txt"], "expected that of a picture, such as .png"),
    ([*PROFILE, "--out", "nowhere/profile.png"], "nowhere is no folder"),
    ([*PROFILE, "-o", "x=1"], "x"),
    (["collect", "torch/NoSuchEnv", *OUT], "expected one of"),
    (["collect", "Unmade-v0", *OUT], "no licence: ask at the desk"),
    (["collect", "CartPole-v1", "--policy", "dqn", *OUT], "no policy 'dqn', expected one of ['mlp', 'random'"),
    (["collect", "mine:nothing"], "names 'nothing', which the module 'mine' lacks"),
    (["collect", "./mine.py:cart"], "names a file, expected a module: say mine:cart"),
    (["collect", "mine"], "'mine' is a module here, expected a function of it: say for example mine:make"),
    (["collect", "CartPole-v1", "--policy", "mine:bare"], "takes (), expected a function of the environment"),
    (["collect", "CartPole-v1", "--policy", "mine.py:policy"], "names a file, expected a module: say mine:policy"),
    (["collect", "no_module:thing"], "'no_module', which cannot be imported"),
    (["collect", "mine:unready"], "cannot make 'mine:unready': no licence"),
    (["collect", "mine:silent"], "cannot make 'mine:silent': OSError"),
    (["collect", "CartPole-v1", "--policy", "mine:nothing"], "cannot be imported"),
], ids=str)  # fmt: skip
def test_what_is_wrong_is_one_line(arguments, message, here, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("funcollect: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (here / "out").exists()


def test_demo(here, capsys):
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
def test_help_fits_on_a_screen_and_ends_with_an_example(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert lines[-1].startswith(f"example: funcollect {command}")


def test_help_does_not_wait_for_torch_and_the_version(capsys):
    code = "import sys; from funcollect.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "collect" in said
    assert said.endswith("False\n")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{fc.__version__}\n"

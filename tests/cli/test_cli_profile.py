"""``funcollect profile``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from funcollect.cli import main

COMMAND = ["profile", "CartPole-v1", "--num-envs", "2", "--frames", "500"]


def test_it_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert main([*COMMAND, "--policy", "mlp"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("HostEnv('CartPole-v1', num_envs=2) with TorchPolicy, loop host\n512 frames in ")
    assert re.search(r"^environment +\d+\.\d\d +\d+%$", out, re.M)
    assert re.search(r"^a frame +\d+\.\d\d +100%$", out, re.M)
    assert not err
    assert torch.get_num_threads() == before


def test_it_draws_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--out", str(tmp_path / "profile.png")]) == 0
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert "with RandomPolicy" in capsys.readouterr().out


def test_without_matplotlib_the_table_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*COMMAND, "--out", str(tmp_path / "profile.png")]) == 0
    out, err = capsys.readouterr()
    assert "\nbare environment " in out
    assert "pip install 'funcollect[viz]'" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "profile.txt"], "expected that of a picture, such as .png"),
        (["--out", "nowhere/profile.png"], "nowhere is no folder"),
        (["--policy", "nobody"], "nobody"),
        (["-o", "x=1"], "x"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("funcollect: error: ")
    assert err.count("\n") == 1
    assert words in err

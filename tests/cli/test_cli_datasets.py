"""``collect --dataset``: the dataset has the run's whole episodes, and is there if the run fails."""

import json

import gymnasium
import pytest
import torch

import funcollect as fc
from funcollect.cli import main
from tests.cli.test_cli import CARTPOLE
from tests.support.misuse import Rigged, raises

READERS = {"minari": fc.datasets.read_minari, "lerobot": fc.datasets.read_lerobot, "hf": fc.datasets.from_hf}


@pytest.mark.parametrize("form", READERS)
def test_collect_writes_a_dataset(form, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*CARTPOLE, "--out", str(out), "--dataset", form]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["dataset", "returns.png", "stats.json"]
    statistics = json.loads((out / "stats.json").read_text())
    stats = fc.episode_stats(torch.cat([*READERS[form](out / "dataset")]))
    assert len(stats) == statistics["episodes"] > 10
    assert stats.mean_return == pytest.approx(statistics["return"]["mean"])
    assert main([*CARTPOLE, "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_a_run_that_fails_leaves_what_was_written(tmp_path, capsys):
    gymnasium.register("Broken-v0", lambda: Rigged(raises(ArithmeticError("the arm broke off")), at=20))
    try:
        assert main(["collect", "Broken-v0", "--out", str(tmp_path / "out"), "--dataset", "minari"]) == 2
    finally:
        del gymnasium.registry["Broken-v0"]
    assert "the arm broke off" in capsys.readouterr().err
    assert (tmp_path / "out").exists()

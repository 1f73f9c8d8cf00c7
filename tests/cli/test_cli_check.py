"""``funcollect check`` and ``funcollect explain``."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import pytest

import funcollect as fc
from funcollect.cli import main
from funcollect.policies.mlp import mlp
from tests.support.faulty.faulty_envs import LeavesItsSpace, SeedsItself, Walk


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    kinds = {"Walk-v0": Walk, "LeavesItsSpace-v0": LeavesItsSpace, "SeedsItself-v0": SeedsItself}
    for name, kind in kinds.items():
        gymnasium.register(name, kind)
    yield
    for name in kinds:
        del gymnasium.registry[name]


def test_check_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "Walk-v0", "--steps", "40", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{fc.testing.check_env('Walk-v0', num_envs=3, steps=40, seed=3)}\n"
    assert "passed  lanes_alone" in out
    assert not err


def test_check_takes_the_number_of_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "torch/CartPole-v1", "--num-envs", "1", "--steps", "20"]) == 0
    assert "n/a     reset_mask          there is one lane" in capsys.readouterr().out


def test_check_takes_a_limit_on_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "MountainCar-v0", "--steps", "20"]
    assert main(command) == 0
    unseen = capsys.readouterr().out
    assert main([*command, "--max-episode-steps", "6"]) == 0
    seen = capsys.readouterr().out
    assert "n/a     terminal" in unseen
    assert "passed  terminal" in seen


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("LeavesItsSpace-v0", "observations", "expected a value in Box(-4.0, 4.0, (2,), float32)"),
        ("SeedsItself-v0", "same_seed", "draw from what is seeded"),
    ],
)
def test_a_check_that_fails_is_said_in_words(
    name: str, check: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", name, "--steps", "40"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"funcollect: check failed: HostEnv('{name}', num_envs=3) fails '{check}'")
    assert words in err
    assert len(err.splitlines()) == 1
    assert "passed  runs" in out
    assert f"passed  {check}" not in out


@pytest.mark.parametrize("command", [["check"], ["explain", "--policy", "mlp"]])
def test_an_unknown_environment_is_a_wrong_argument(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "Nowhere-v0"]) == 2
    assert "Gymnasium cannot make 'Nowhere-v0'" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["mlp", "random"])
def test_explain_prints_the_plan(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "CartPole-v1", "--policy", policy, "--num-envs", "4"]) == 0
    env = fc.make_env("CartPole-v1", num_envs=4)
    plan = fc.explain(env, mlp(env, seed=0) if policy == "mlp" else fc.random_policy(env))
    assert capsys.readouterr().out == f"{plan}\n"

"""`python -m benchmarks compare`: its statistics, its verdicts, and whole runs over a small repository."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import benchmarks
from benchmarks import compare
from benchmarks.compare.comparison import AFTER, BEFORE, Comparison, Ratio, speed_ratio, verdict
from benchmarks.compare.revisions import trees
from benchmarks.compare.served import Block
from benchmarks.compare.side import FailedError, Side
from benchmarks.fused import _our_compile
from benchmarks.harness import processes
from benchmarks.harness.runner import module_of
from tests.support.running import ROOT

STUB = '''
"""Cells whose contestants keep time with a clock of their own: the package's COST, without noise."""
import funcollect
from benchmarks.harness.runner import AbsentError, Cell

class Clocked:
    def run(self): return 1
    def timed(self): return 2, 2 * funcollect.COST
    def close(self): pass

def new(): return funcollect.Newer and Clocked()
def absent(): raise AbsentError("lacks a part")
def exits(): raise SystemExit(3)

def cells():
    yield Cell(name="plain", note="as many frames", contestants={"funcollect": Clocked})
    yield Cell(name="fails", note="", contestants={"new": new, "absent": absent, "exits": exits},
               ours=("new", "absent", "exits"))
    yield Cell(name="peers", note="", contestants={"peer": Clocked}, ours=())
'''
FRAMEWORKS = {  # in place of the real ones, which take seconds to import in each process
    "torch": "def set_num_threads(count): pass",
    "jax": "class config: update = lambda name, value: None",
    "mujoco": "def set_mju_user_warning(function): pass",
}


def git(folder, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(repository, text):
    (repository / "funcollect" / "__init__.py").write_text(text)


@pytest.fixture(autouse=True)
def frameworks(tmp_path, monkeypatch):
    folder = tmp_path / "frameworks"
    folder.mkdir()
    for name, text in FRAMEWORKS.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


@pytest.fixture
def repository(tmp_path):
    """Commits with the tags `plain` (COST 1 us), `slow` (2 us) and `newer` (1 us, and one more name)."""
    folder = tmp_path / "repository"
    (folder / "funcollect").mkdir(parents=True)
    git(tmp_path, "init", "--quiet", folder)
    for tag, text in {"plain": "COST = 1e-6", "slow": "COST = 2e-6", "newer": "COST = 1e-6; Newer = True"}.items():
        write(folder, text)
        git(folder, "add", "funcollect")
        git(folder, "commit", "--quiet", "--message", tag)
        git(folder, "tag", tag)
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=shutil.ignore_patterns("results"))
    (folder / "benchmarks" / "stub.py").write_text(STUB)
    return folder


def compared(repository, out, only):
    options = {"rounds": 1, "scale": 0.01, "only": only, "before": "plain", "after": "newer", "names": ("stub",)}
    found = compare.run(compare.CompareOptions(**options), repository, out)
    assert git(repository, "worktree", "list").count("\n") == 0  # its own one alone is left
    return {name.contestant: comparison for name, comparison in found.items()}


def test_the_import_leaves_the_settings_of_a_process_that_has_the_frameworks(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "kept")
    before = dict(os.environ)
    importlib.reload(benchmarks)
    assert dict(os.environ) == before


def test_the_limits_are_walsh_averages():
    before = [2.0**power for power in (1, 2, 3, 4, 5, 6, 7, 8, 9)]  # the ratio of round i is 2**i
    ratio = speed_ratio(before, [1.0] * 9)
    # Walsh averages of 1 .. 9 in order: 1, 1.5, 2, 2, 2.5, 2.5, ...; their median is 5, the sixth ones are the limits.
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((2**2.5, 2**5, 2**7.5))
    few = speed_ratio([2.0] * 5, [1.0] * 5)  # six rounds are the fewest with an interval
    assert (few.low, few.estimate, few.high) == (0, pytest.approx(2), float("inf"))


VERDICTS = {"no slower": [(0.9, 1.0, 9), (1.0, 1.1, 9)], "slower": [(0.9, 0.99, 9)], "faster": [(1.01, 1.1, 9)]}
VERDICTS["unclear"] = [(0.9, 0.99, 8)]  # there are too few rounds


def test_verdicts_are_by_wall_time_per_frame():
    for expected, cases in VERDICTS.items():
        for low, high, rounds in cases:
            assert verdict(Ratio(estimate=(low + high) / 2, low=low, high=high), rounds) == expected
    blocks = {BEFORE: [Block(frames=10, wall=10.0, cpu=40.0)] * 9, AFTER: [Block(frames=5, wall=10.0, cpu=5.0)] * 9}
    comparison = Comparison(blocks=blocks)
    assert (comparison.ratio("wall").estimate, comparison.ratio("cpu").estimate) == pytest.approx((0.5, 4))
    assert comparison.verdict == "slower"
    assert Comparison(errors={AFTER: FailedError("raises")}).verdict == "broken"


@pytest.fixture
def status(repository, tmp_path, monkeypatch):
    """The exit status of the command over `repository`; its JSON goes to `tmp_path`."""
    monkeypatch.setattr(compare, "REPOSITORY", repository)
    monkeypatch.setattr(compare, "COMPARED", ["stub"])
    options = ["--before", "plain", "--scale", "0.01", "--only", "plain", "stub"]
    return lambda *others: compare.main([*options, *others], tmp_path)


def test_a_slower_revision_is_shown_and_saved_and_ends_with_one(repository, status, tmp_path, capsys):
    assert status("--after", "slow") == 1
    printed = capsys.readouterr().out
    assert "1 compared: 1 slower" in printed
    assert "stub, plain, funcollect" in printed
    saved = json.loads((tmp_path / "compare-plain.json").read_text())
    for side, tag in (("before", "plain"), ("after", "slow")):
        assert saved[side] == {"commit": git(repository, "rev-parse", tag), "uncommitted": False}
    contestant = saved["results"]["stub"]["plain"]["contestants"]["funcollect"]
    assert contestant["speed_ratio"]["wall"] == pytest.approx({"estimate": 0.5, "low": 0.5, "high": 0.5})
    assert contestant["seconds_per_frame"]["wall"]["after"] == pytest.approx([2e-6] * 9)


@pytest.mark.evening
def test_the_working_tree_is_measured_with_what_is_not_committed(repository, status, tmp_path):
    write(repository, "COST = 0.25e-6")
    assert status() == 0
    saved = json.loads((tmp_path / "compare-plain.json").read_text())
    contestant = saved["results"]["stub"]["plain"]["contestants"]["funcollect"]
    assert (contestant["verdict"], contestant["speed_ratio"]["wall"]["estimate"]) == ("faster", pytest.approx(4))
    assert saved["after"] == {"commit": git(repository, "rev-parse", "HEAD"), "uncommitted": True}


def test_what_does_not_run_is_named_and_the_others_go_on(repository, tmp_path, capsys):
    found = compared(repository, tmp_path, "fails")
    assert {name: each.verdict for name, each in found.items()} == {"new": "new", "absent": "absent", "exits": "broken"}
    printed = capsys.readouterr().out
    assert "new, before: AttributeError: module 'funcollect' has no attribute 'Newer'" in printed
    assert "absent, after: lacks a part" in printed
    assert "exits, after: its process has ended" in printed
    with pytest.raises(SystemExit, match="no cell of stub holds 'peers' in its name"):
        compared(repository, tmp_path, "peers")


def test_worktrees_are_removed_after_an_interrupt_and_an_unknown_revision_is_named(repository):
    def fail():
        with trees(repository, "plain", "slow") as pair:
            paths.extend(tree.path for tree in pair)
            assert git(repository, "worktree", "list").count("\n") == 2
            assert all((path / "benchmarks" / "stub.py").exists() for path in paths)
            raise KeyboardInterrupt

    paths = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert git(repository, "worktree", "list").count("\n") == 0
    assert not any(path.exists() for path in paths)
    with pytest.raises(ValueError, match="'nowhere' is no revision"), trees(repository, "nowhere", None):
        pass


def test_a_side_refuses_a_package_from_elsewhere(repository):
    shutil.rmtree(repository / "funcollect")  # then the next one on the path is found
    with Side(repository) as side, pytest.raises(FailedError, match=r"funcollect comes from .*, expected a file in"):
        side.ask("cells", "stub", "")


WORKER = "import os; os.setsid(); print(flush=True); sum(range(10**5)); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKER!r}])"


def test_a_family_has_workers_with_sessions_of_their_own():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True, **pipes) as parent:
        parent.stdout.readline()
        root, worker = processes.family(parent.pid)
        assert root == parent.pid
        assert os.getsid(worker) == worker
        earlier = processes.cpu_times([root])
        later = processes.cpu_times([root, worker])
        assert processes.cpu_seconds(earlier, later) >= later[worker] > 0
        processes.signal_family(root, signal.SIGKILL)
    assert processes.cpu_times([root]) == {}


def test_every_benchmark_names_contestants_that_it_has():
    for name in compare.COMPARED:
        cells = list(module_of(name).cells())
        assert any(cell.ours for cell in cells)
        for cell in cells:
            assert set(cell.ours) | set(cell.stale) <= set(cell.contestants), cell.name


def test_a_summary_counts_what_is_too_noisy():
    def over(wall):
        blocks = [Block(frames=1, wall=wall(each), cpu=1.0) for each in range(9)]
        return Comparison(blocks={BEFORE: blocks, AFTER: [Block(frames=1, wall=1.0, cpu=1.0)] * 9})

    text = compare.summary({"noisy": over(lambda each: 2.0 ** (each % 3)), "steady": over(lambda each: 1.0)})
    assert text.splitlines()[1].startswith("1 of them are too noisy")


def test_the_loop_of_the_fused_benchmark_is_compiled_alone():
    assert _our_compile("gymnax/CartPole-v1", 2, 4) > 0

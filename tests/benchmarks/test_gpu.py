"""`python -m benchmarks gpu`: what is built once, saved at every moment, and left out where there is no time."""

import json
import subprocess
import time
from functools import partial
from types import SimpleNamespace

import pytest

import benchmarks.gpu
from benchmarks.gpu import GROUPS, PARTS, Part, arms, goals, is_chosen, machine, picture
from benchmarks.gpu.built import NO_TIME, Builder
from benchmarks.gpu.cells import CELLS, PROFILED
from benchmarks.gpu.measures import memory, profiles, timing
from benchmarks.gpu.pairs import BY_HAND, contestants
from benchmarks.harness.report import file_name, save
from benchmarks.harness.runner import AbsentError, Options, Result

NEVER = float("inf")


class Work:
    """A contestant that counts its runs; `fails` in the run of that number."""

    def __init__(self, fails=0):
        self.runs, self.fails, self.closed = 0, fails, False

    def run(self):
        self.runs += 1
        if self.runs == self.fails:
            raise ValueError("broken")
        return 10

    def close(self):
        self.closed = True


def measured(builds, deadline=NEVER, rounds=2):
    return list(timing.measure(builds, rounds=rounds, block_seconds=0.0, deadline=deadline))[-1]


def test_a_contestant_is_built_once_and_closed_when_no_part_needs_it():
    builder, made = Builder(), []

    def make():
        made.append(Work())
        return made[-1]

    one, two = (builder.build("a", make) for _ in range(2))
    assert one is two
    assert (len(made), made[0].runs) == (1, 2)
    builder.build("b", make)
    builder.close(kept=lambda key: key == "b")
    assert [each.closed for each in made] == [True, False]
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            builder.build("c", partial(Work, 1))


def test_each_contestant_has_a_rate_before_the_next_one_is_built():
    builder = Builder()
    builds = {name: partial(builder.build, name, Work) for name in (BY_HAND, "ours")}
    seen = [
        {name: len(rates) for name, rates in timings.rates.items()}
        for timings in timing.measure(builds, rounds=2, block_seconds=0.0, deadline=NEVER)
    ]
    assert seen == [{BY_HAND: 1}, *[{BY_HAND: n, "ours": n} for n in (1, 1, 2)]]
    result = timing.result("cell", "two contestants", measured(builds))
    assert result.data["ratio_to_by_hand"].keys() == {BY_HAND, "ours"}
    assert not result.data["errors"]


def test_what_fails_is_an_error_and_what_is_missing_is_not():
    def absent():
        raise AbsentError("is not here")

    builder = Builder()
    builds = {
        "good": partial(builder.build, "good", Work),
        "later": partial(builder.build, "later", partial(Work, 4)),
        "broken": partial(builder.build, "broken", partial(Work, 1)),
        "absent": partial(builder.build, "absent", absent),
    }
    timings = measured(builds)
    assert set(timings.notes.errors) == {"later", "broken"}
    assert timings.notes.gaps == {"absent": "is not here"}
    assert len(timings.rates["good"]) == 2
    timings = measured({"good": builds["good"]}, deadline=time.monotonic() - 1)
    assert (timings.notes.gaps, timings.notes.errors, timings.rates) == ({"good": NO_TIME}, {}, {})


def test_only_names_groups_and_parts():
    def chosen(only):
        return [name for name in PARTS if is_chosen(name, only)]

    assert chosen("") == list(PARTS)
    assert chosen("goals") + chosen("rest") == list(PARTS)
    assert chosen("arms,memory") == ["memory", "arms few", "arms many"]
    assert set(PROFILED) | set(arms.SAME_SIZE.values()) <= CELLS.keys() <= PARTS.keys()
    assert {part.group for part in PARTS.values()} == set(GROUPS)


def test_parts_run_after_a_failure_and_those_without_time_are_listed(monkeypatch):
    def grows(builder, options, deadline):
        yield Result(name="one", table="half", data={"x": 1})
        yield Result(name="one", table="whole", data={"x": 2, "gaps": {"c": NO_TIME}})

    def fails(builder, options, deadline):
        yield Result(name="two", table="half", data={"x": 1})
        raise ValueError("broken")

    def run(parts, seconds):
        monkeypatch.setattr(benchmarks.gpu, "PARTS", parts)
        options = Options(rounds=1, scale=1.0, only="", platform="cpu", seconds=seconds)
        try:
            seen.extend(benchmarks.gpu.results(options))
        except SystemExit as error:
            return str(error)
        return ""

    monkeypatch.setattr(machine, "choose", lambda platform: None)
    monkeypatch.setattr(machine, "result", lambda platform: Result(name="machine", table="here", data={}))
    seen, parts = [], {"one": Part("goals", 1, grows), "two": Part("goals", 1, fails), "three": Part("rest", 1, grows)}
    assert "failed, at least in part: two" in run(parts, 60)
    tables = [result.table.partition("\n")[0] for result in seen if result.table]
    assert tables == ["here", "whole", "half", "whole", "not measured:"]
    assert "ValueError: broken" in next(result.data["error"] for result in seen if "error" in result.data)
    assert run({"one": parts["one"]}, -1) == ""
    assert seen[-1].data == {"one": [NO_TIME]}


def test_the_script_finds_the_file_that_the_benchmark_writes(tmp_path):
    script = machine.PROGRAMS.parents[1] / "benchmarks" / "gpu" / "run.sh"
    rule = next(line for line in script.read_text().splitlines() if line.startswith("part="))
    for only in ("", "rest", "cartpole few,arms", "cartpole 2^10"):
        shell = ["bash", "-c", f'part=${{1:+-$1}}; {rule}; echo "gpu$part.json"', "bash", only]
        name = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.strip()
        assert name == file_name("gpu", only)
        save(tmp_path, "gpu", {"options": {"only": only}}, {})
        assert json.loads((tmp_path / name).read_text())["results"] == {}


def test_memory_held_together_is_compared_with_the_needs_of_each():
    def held(used, pool, allocated, reserved):
        torch = {"max_allocated": allocated, "max_reserved": reserved}
        return {"jax": {"peak_bytes_in_use": used, "peak_pool_bytes": pool}, "torch": torch}

    measured = {"jax alone": held(100, 128, 0, 0), "torch alone": held(0, 0, 50, 64), "both": held(110, 128, 50, 67)}
    found = memory.report(measured)
    assert found["data"]["ratio"] == pytest.approx(195 / 150)
    assert "1.30" in found["table"]
    found = memory.report(measured | {"settings": held(100, 0, 50, 67) | {"device": 165}})
    assert found["table"].endswith("'cuda_async'} 1.10")
    nothing = memory.report({who: {"jax": None, "torch": None} for who in measured})
    assert "ratio" not in nothing["data"]


@pytest.mark.evening
def test_both_torch_routes_take_images():
    factories = contestants("gymnax/Breakout-MinAtar", 2, 3, "cpu")
    for name in ("Torch policy, lowered", "Torch policy, crossing"):
        assert factories[name]().run() == 6


def test_kernels_of_both_frameworks_are_counted_and_idle_time_lies_between_them():
    def event(name, start, duration):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    streams = [[event("fusion", 0, 10), event("MemcpyD2D", 30, 10)], [event("gemm", 5, 10), event("add", 32, 2)]]
    lines = [SimpleNamespace(name=f"Stream #{number}", events=events) for number, events in enumerate(streams)]
    lines.append(SimpleNamespace(name="XLA Ops", events=[event("fusion", 0, 10)]))
    planes = [SimpleNamespace(name="/host:CPU", lines=lines), SimpleNamespace(name="/device:GPU:0", lines=lines)]
    assert profiles.work_of(planes) == profiles.Work(kernels=3, copies=1, span=40e-9, busy=25e-9)


def profile(**kwargs):
    return {"length": 10, "warned": {"a.py:1": 2, "b.py:2": 1}, "guarded": "", "work": None} | kwargs


def test_results_become_tables_and_a_picture(tmp_path, capsys):
    cell = {"note": "gymnax/CartPole-v1: 1,024 lanes, 64 steps per batch", "median": {BY_HAND: 2e6, goals.FUSED: 1e6}}
    rates = {"frames_per_second": {name: [rate] for name, rate in cell["median"].items()}}
    first = {"machine": {}, "cartpole few": cell | rates | {"ratio_to_by_hand": {BY_HAND: 1.0, goals.FUSED: 0.5}}}
    work = profiles.Work(kernels=30, copies=10, span=3e-5, busy=2e-5)._asdict()
    measured = {"fused": profile(waited={"cuStreamSynchronize": 4}, copied={}, work=work), "without CUPTI": profile()}
    second = {"profiles": {"profiles": measured}, "memory": {"ratio": 1.1}}
    paths = [tmp_path / "gpu.json", tmp_path / "gpu-rest.json"]
    for path, results in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps({"results": results}))
    picture.main(paths)
    lines = capsys.readouterr().out.splitlines()
    note = "gymnax/CartPole-v1: 1,024 lanes, 64 steps per batch"
    assert f"| {note} | {goals.FUSED} | 1,000,000 | 0.50 |" in lines
    assert "| fused | 3 (0.30) | 4 (0.40) | 0 (0.00) | 3.0 | 1.0 | 2.0 us | 1.0 us |" in lines
    assert "| without CUPTI | 3 (0.30) |  |  |  |  |  |  |" in lines
    assert f"| cartpole few: {goals.FUSED}, frames/s | at least 5e+07 | 1,000,000 | no |" in lines
    assert "| memory of both / needs of each alone | at most 1.2 | 1.10 | yes |" in lines
    assert f"| ant: {goals.FUSED} / by hand | at least 0.98 | - | - |" in lines
    assert (tmp_path / "gpu.png").stat().st_size > 1000

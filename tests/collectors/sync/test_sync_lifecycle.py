"""Interrupting and closing a collector; and what importing the library brings in."""

import gc
import subprocess
import sys

import pytest

import funcollect as fc
from tests.support.misuse import Rigged, raises


def make():
    """A collector whose trajectories have eight steps, and its simulators."""
    made = []

    def build():
        made.append(Rigged())
        return made[-1]

    return fc.SyncDataCollector([build, build], frames_per_batch=10, max_frames_per_traj=8, seed=0), made


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("in the simulator")], ids=repr)
@pytest.mark.parametrize("at", [7, 0], ids=["step", "reset"])
def test_after_an_exception_the_next_batch_begins_new_episodes(error, at):
    collector, simulators = make()
    first = next(collector)
    simulators[-1].spoil, simulators[-1].at = raises(error), at
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else fc.EnvError, match=r"lane 1|^$"):
        next(collector)
    batch = next(collector)
    assert batch["collector", "step"].tolist() == [[0, 1, 2, 3, 4]] * 2
    ids = [set(part["collector", "traj_ids"].flatten().tolist()) for part in (first, batch)]
    assert not ids[0] & ids[1]
    assert collector.frames == 20
    assert next(collector)["collector", "step"][0].tolist() == [5, 6, 7, 0, 1]


def test_simulators_are_closed_by_with_and_with_a_collector_that_is_dropped():
    collector, used = make()
    with collector:
        next(collector)
    collector.shutdown()
    assert collector.stats()["frames"] == 10
    failing, failed = make()
    failed[-1].spoil = raises(ZeroDivisionError())
    with pytest.raises(fc.EnvError), failing:
        next(failing)
    dropped, left = make()
    batch = next(dropped)
    del dropped
    gc.collect()
    assert [simulator.closed for simulator in (*used, *failed, *left)] == [1] * 6
    assert batch["observation"].shape == (2, 5, 2)


IMPORTS = """
import sys, funcollect
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "ray", "torchrl", "matplotlib", "tqdm"}))
collector = funcollect.SyncDataCollector("CartPole-v1", frames_per_batch=10)
next(collector)
print("jax" in sys.modules)
missing = [name for name in funcollect.__all__ if not hasattr(funcollect, name)]
print(missing, "jax_policy" in dir(funcollect), "jax" in sys.modules)
"""


def test_importing_the_library_imports_neither_jax_nor_ray():
    answer = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["[]", "False", "[] True False"]


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'rolout'"):
        _ = fc.rolout

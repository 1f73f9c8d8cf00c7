"""Import time in fresh interpreters: the required packages, and what `import funcollect` adds to them.

`names` resolves every public name besides, which `import funcollect` puts off until first use.

`first batch` is the time of a program of its own that collects 32 steps of 8 environments with a Torch policy. `reset`
only imports Torch and Gymnasium and resets one CartPole; `reset, tensordict` imports TensorDict as well, which every
batch needs. `gymnax` compiles its loop, `gymnax, cached` finds it in JAX's compilation cache; `scan` is a loop written
by hand in JAX, with the same packages, environment and steps, and weights in JAX.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.harness.report import quartiles, table
from benchmarks.harness.runner import Cell, Options, Result

_CHILD = """
import json, sys, time
start = time.perf_counter()
import torch, tensordict, gymnasium, optree
base = time.perf_counter()
{statement}
end = time.perf_counter()
heavy = [name for name in ("jax", "ray") if name in sys.modules]
print(json.dumps(dict(base=base - start, added=end - base, total=end - start, heavy=heavy)))
"""
STATEMENTS = {
    "base": "pass",
    "funcollect": "import funcollect",
    "names": "import funcollect; [getattr(funcollect, name) for name in funcollect.__all__]",
}
_RESET = """
import time
start = time.perf_counter()
import torch, gymnasium
gymnasium.make("CartPole-v1").reset(seed=0)
print(time.perf_counter() - start)
"""
_BATCH = """
import time
start = time.perf_counter()
import torch, funcollect as fc
env = fc.make_env("{env}", num_envs=8)
policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
fc.rollout(env, policy, fc.init(env, policy, seed=0), 32)
print(time.perf_counter() - start)
"""
_SCAN = """
import time
start = time.perf_counter()
import torch, tensordict, gymnasium, optree, jax, gymnax
env, params = gymnax.make("CartPole-v1")
weights = jax.numpy.ones((4, 2))

def step(carry, key):
    observation, state = carry
    action = jax.random.categorical(key, observation @ weights)
    keys = jax.random.split(key, 8)
    observation, state, reward, *ends = jax.vmap(env.step, (0, 0, 0, None))(keys, state, action, params)
    return (observation, state), (observation, action, reward, *ends[:-1])

@jax.jit
def rollout(key):
    begun = jax.vmap(env.reset, (0, None))(jax.random.split(key, 8), params)
    return jax.lax.scan(step, begun, jax.random.split(key, 32))

jax.block_until_ready(rollout(jax.random.PRNGKey(0)))
print(time.perf_counter() - start)
"""
FIRST_BATCH = {
    "reset": _RESET,
    "reset, tensordict": _RESET.replace("import torch", "import tensordict, torch"),
    "CartPole": _BATCH.format(env="CartPole-v1"),
    "scan": _SCAN,
    "scan, cached": _SCAN,
    "gymnax": _BATCH.format(env="gymnax/CartPole-v1"),
    "gymnax, cached": _BATCH.format(env="gymnax/CartPole-v1"),
}


class Program:
    """A program in an interpreter of its own, which prints the seconds that it has measured."""

    def __init__(self, code: str, cached: bool = False) -> None:
        self._code = code
        self._cache = tempfile.TemporaryDirectory() if cached else None

    def output(self) -> Any:
        own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        own |= {"JAX_COMPILATION_CACHE_DIR": self._cache.name} if self._cache else {}
        done = subprocess.run([sys.executable, "-c", self._code], check=True, capture_output=True, text=True, env=own)
        return json.loads(done.stdout)

    def run(self) -> int:
        self.output()
        return 1

    def timed(self) -> tuple[int, float]:
        """One run, and its seconds: those that the import adds, or those to the first batch."""
        found = self.output()
        return 1, found["added"] if isinstance(found, dict) else found

    def close(self) -> None:
        if self._cache:
            self._cache.cleanup()


def cells() -> Iterator[Cell]:
    statements = {name: partial(Program, _CHILD.format(statement=each)) for name, each in STATEMENTS.items()}
    yield Cell(
        name="imports",
        note="what an import adds, without the CPU time of the programs",
        contestants=statements,
        ours=("funcollect", "names"),
    )
    programs = {name: partial(Program, each, "cached" in name) for name, each in FIRST_BATCH.items()}
    ours = ("CartPole", "gymnax", "gymnax, cached")
    yield Cell(
        name="first batch",
        note="32 steps of 8 environments, without the CPU time of the programs",
        contestants=programs,
        ours=ours,
    )


def results(options: Options) -> Iterator[Result]:
    for cell in cells():
        if options.only in cell.name:
            yield (_imports if cell.name == "imports" else _first_batch)(_rounds(cell, options))


def _rounds(cell: Cell, options: Options) -> dict[str, list[Any]]:
    """What each program prints, round by round, in a new order each round."""
    programs: dict[str, Any] = {name: make() for name, make in cell.contestants.items()}
    for program in programs.values():
        program.run()  # compiles and reads files once, before anything is measured
    measured: dict[str, list[Any]] = {name: [] for name in programs}
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(list(programs), len(programs)):
            measured[name].append(programs[name].output())
    for program in programs.values():
        program.close()
    return measured


def _first_batch(measured: dict[str, list[float]]) -> Result:
    """The seconds of each program, and how many times as long as the reset they take."""
    rows = []
    for name, seconds in measured.items():
        low, middle, high = quartiles(seconds)
        ratio = quartiles([one / base for one, base in zip(seconds, measured["reset"], strict=True)])[1]
        rows.append((name, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{ratio:.2f}"))
    columns = ("", "seconds", "quartiles", "/ reset")
    rounds = {name: [{"seconds": each} for each in seconds] for name, seconds in measured.items()}
    return Result(name="first batch", table=table(columns, rows), data={"rounds": rounds})


def _imports(measured: dict[str, list[dict[str, Any]]]) -> Result:
    rows = [_row(name, rounds, measured["base"]) for name, rounds in measured.items()]
    columns = (
        "imports",
        "total ms",
        "quartiles",
        "total / base",
        "added ms",
        "added / its own base",
        "jax, ray loaded",
    )
    heavy = sorted({module for one in measured["funcollect"] for module in one["heavy"]})
    return Result(name="imports", table=table(columns, rows), data={"seconds": measured, "loaded": heavy})


def _row(name: str, rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> tuple[str, ...]:
    low, middle, high = quartiles([one["total"] * 1e3 for one in rounds])
    ratio = quartiles([one["total"] / other["total"] for one, other in zip(rounds, base, strict=True)])[1]
    added = quartiles([one["added"] * 1e3 for one in rounds])[1]
    share = quartiles([one["added"] / one["base"] for one in rounds])[1]
    loaded = ", ".join(sorted({module for one in rounds for module in one["heavy"]})) or "none"
    return name, f"{middle:.0f}", f"{low:.0f}-{high:.0f}", f"{ratio:.3f}", f"{added:.1f}", f"{share:.2%}", loaded

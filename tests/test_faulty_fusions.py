import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from funcollect import faulty_fusions

FLAG = "--xla_cpu_experimental_ynn_fusion_type"

# The programs of jax#39103 and jax#39257. An eight-dimensional product with a sum kills a process with a faulty jaxlib.
PROGRAMS = """
import funcollect
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)

def wrong_squares(dtype, lanes):
    rows = jnp.zeros((lanes, 3), dtype).at[:, 0].set(jnp.arange(lanes, dtype=dtype))
    squares = jax.jit(lambda x: jax.vmap(lambda row: jnp.sum((jnp.eye(3, dtype=dtype) @ row) ** 2))(x))
    return int((squares(rows) != jnp.arange(lanes, dtype=dtype) ** 2).sum())

assert wrong_squares(jnp.float32, 32_769) == 0
assert wrong_squares(jnp.float64, 16_385) == 0

product = jax.jit(lambda x, y: jnp.log(jnp.maximum(jnp.sum(x[(..., *[None] * 5)] * y, axis=2), 1e-16)))
x, y = jnp.ones((10, 4, 6), jnp.float32), jnp.ones((10, 4, 6, *[9] * 5), jnp.float32)
assert jnp.allclose(product(x, y), jnp.log(6.0))
"""

# The version is another's, and JAX "has computed", so that no flag is set, which the installed version may not know.
WARNED = """
import warnings
from funcollect import faulty_fusions

faulty_fusions._jaxlib_version = lambda: "0.10.2"
faulty_fusions._has_client = lambda: True
faulty_fusions.avoid_faulty_fusions.cache_clear()

import funcollect as fc

env = fc.make_env("CartPole-v1", num_envs=2)
policy = fc.jax_policy(lambda p, x: x @ p, 0.0, head=fc.heads.categorical)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        plan = fc.explain(env, policy)
assert ["jaxlib 0.10.2" in str(each.message) for each in caught] == [True], caught
assert "jaxlib 0.10.2" in str(plan)
assert "jaxlib" not in str(fc.explain(env, fc.random_policy(env)))
"""


def test_numbers_are_right_and_there_is_one_warning():
    """In a new process, without XLA's flags and on the CPU."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAMS + WARNED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FAULTY = ("0.10.2", "0.11.0", "0.11.0rc1", "0.10.2.dev20260101")
OTHERS = (None, "0.10.1", "0.10.20", "0.11.1", "0.11.2", "0.12.0.1")
# Of jaxlib and of JAX: the version, whether it has computed, the flags; then what is said, and the flags afterwards.
CASES = [(version, False, "--a=b", f"jaxlib {version}", f"--a=b {FLAG}=") for version in FAULTY]
CASES += [(version, False, "", None, "") for version in OTHERS]
CASES += [
    ("0.10.2", False, f"{FLAG}=1", None, f"{FLAG}=1"),
    ("0.10.2", False, "/etc/flags", f"write {FLAG}= into /etc/flags", "/etc/flags"),
    ("0.10.2", True, "", f"set XLA_FLAGS={FLAG}=", ""),
]


@pytest.mark.parametrize(("version", "has_client", "flags", "said", "after"), CASES)
def test_the_fusions_of_a_faulty_jaxlib_are_turned_off_and_nothing_else_is(
    version, has_client, flags, said, after, monkeypatch
):
    monkeypatch.setattr(faulty_fusions, "_jaxlib_version", lambda: version)
    monkeypatch.setattr(faulty_fusions, "_has_client", lambda: has_client)
    monkeypatch.setenv("XLA_FLAGS", flags)
    answer = faulty_fusions.avoid_faulty_fusions.__wrapped__()
    assert answer == "" if said is None else said in answer
    assert os.environ["XLA_FLAGS"] == after


def test_no_faulty_version_is_installed_with_the_library():
    project = tomllib.loads((Path(faulty_fusions.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    needed = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    for version in ("0.10.2", "0.11.0"):
        assert version not in needed["jax"]
        assert version not in needed["jaxlib"]

"""The example package, installed from its own pyproject.toml and found through its entry point."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from tensordict import TensorDict

import funcollect as fc
from funcollect.cli import main
from tests.support.compare import assert_same
from tests.support.running import ROOT

NAME = "nnx_actor_critic"
SOURCE = ROOT / "examples" / NAME


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    source, target = (tmp_path_factory.mktemp("example") / name for name in ("source", "site"))
    shutil.copytree(SOURCE, source)  # building leaves files beside what it builds
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


@pytest.fixture(autouse=True)
def found(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def env():
    return fc.make_env("CartPole-v1", num_envs=3)


def test_spaces_that_do_not_suit_it():
    with pytest.raises(fc.PluginError, match=r"ValueError: it needs a Box observation space.*flatten it"):
        fc.make_policy(NAME, fc.make_env("FrozenLake-v1", num_envs=2))


def test_it_collects_from_the_command_line(tmp_path):
    arguments = ["CartPole-v1", "--policy", NAME, "-o", "widths=[8]", "--frames", "90", "--num-envs", "3"]
    assert main(["collect", *arguments, "--seed", "4", "--out", str(tmp_path / "out")]) == 0
    saved = TensorDict.load_memmap(tmp_path / "out" / "batch")
    by_hand = fc.make_policy(NAME, env(), widths=[8], seed=4)
    with fc.SyncDataCollector(env(), by_hand, frames_per_batch=90, total_frames=90, seed=4) as collector:
        (batch,) = collector
    assert_same(saved, batch)
    about = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert (about["policy"], about["policy_origin"]) == (NAME, "nnx-actor-critic 1.0.0")
    assert about["policy_options"] == {"widths": [8]}


def test_its_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (SOURCE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["advantage"].shape == (8, 64, 1)
    saved, loaded = (namespace[name].state_dict() for name in ("policy", "again"))
    assert all((loaded[name] == leaf).all() for name, leaf in saved.items())


FRESH = f"""
import sys
import funcollect as fc
from funcollect.policies.as_policy import offered_policies
env = fc.make_env("CartPole-v1")
assert "{NAME}" in offered_policies()
assert not {{"{NAME}", "jax", "flax"}} & set(sys.modules)
print(fc.explain(env, fc.make_policy("{NAME}", env)).why)
"""


@pytest.mark.evening
def test_it_is_imported_on_use_after_jax_is_set_up(site):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{FRESH}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.endswith("; synchronous CPU dispatch\n")

"""Policies by name: packages written here into a folder of `sys.path`, with their faults, and the example package."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial

import pytest
from tensordict import TensorDict

import funcollect as fc
from funcollect.cli import main
from funcollect.policies.as_policy import offered_policies
from funcollect.policies.mlp import mlp
from tests.support.compare import assert_same, collect
from tests.support.running import ROOT

GOOD = """
import funcollect as fc

def make(env, *, bias=0.0, seed=5):
    policy = fc.jax_policy(lambda params, x: x[:, :2] * params, bias, head=fc.heads.categorical)
    policy.given = {"bias": bias, "seed": seed}
    return policy
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, code, offers, version="1.0"):
        module = name.replace("-", "_").lower()
        (tmp_path / f"{module}.py").write_text(code)
        about = tmp_path / f"{module}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "entry_points.txt").write_text(f"[funcollect.policies]\n{offers}\n")

    yield install
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


env = partial(fc.make_env, "CartPole-v1", num_envs=2)


def test_built_in_policies():
    made = fc.make_policy("mlp", env(), seed=3)
    assert (made.params == mlp(env(), seed=3).params).all()
    assert type(fc.make_policy("random", env())) is type(fc.random_policy(env()))


def test_a_package_is_imported_when_its_policy_is_made(package):
    package("Walkers", GOOD, "walker = walkers:make", version="2.1")
    plugin = offered_policies()["walker"]
    assert (plugin.origin, plugin.source) == ("Walkers 2.1", "walkers:make")
    assert "walkers" not in sys.modules
    policy = fc.make_policy("walker", env(), bias=2.5)
    assert "walkers" in sys.modules
    assert policy.given == {"bias": 2.5, "seed": 5}
    batch = collect(env(), policy, 3)
    assert batch["action_log_prob"].shape == (2, 3)


def test_a_name_that_two_packages_offer(package):
    package("Left-Package", GOOD, "walker = left_package:make")
    package("right", GOOD.replace("seed=5", "seed=6"), "walker = right:make", version="3")
    with pytest.raises(ValueError, match=r"Left-Package 1.0 and right 3 each offer a policy 'walker'.*'right:walker'"):
        fc.make_policy("walker", env())
    assert {"Left-Package:walker", "right:walker"} < set(offered_policies())
    seeds = {"Left-Package:walker": 5, "left_package:walker": 5, "right:walker": 6}
    assert {name: fc.make_policy(name, env()).given["seed"] for name in seeds} == seeds


def test_a_name_may_be_given_in_full_and_a_built_in_one_is_never_taken(package):
    package("walkers", GOOD, "walker = walkers:make")
    package("greedy", GOOD, "mlp = greedy:make")
    given = {"walkers:walker": "jax", "mlp": "torch", "greedy:mlp": "jax"}
    assert {name: fc.make_policy(name, env()).backend for name in given} == given
    with pytest.raises(ValueError, match="no policy 'runners:walker'"):
        fc.make_policy("runners:walker", env())


@pytest.mark.parametrize(("name", "options", "error", "says"), [
    ("walkr", {}, ValueError, r"no policy 'walkr', expected one of \['mlp', 'random', 'walker', 'wanting'\]"),
    ("wanting", {}, TypeError, r"options \[\]: missing a required (keyword-only )?argument: 'bias'"),
    ("walker", {"bais": 1}, TypeError, r"\(walkers 1.0\).*'bais'.*it takes \['bias', 'seed'\]"),
])  # fmt: skip
def test_wrong_arguments(name, options, error, says, package):
    package("walkers", GOOD, "walker = walkers:make")
    package("wanting", GOOD.replace("bias=0.0", "bias"), "wanting = wanting:make")
    with pytest.raises(error, match=says):
        fc.make_policy(name, env(), **options)


A_CLASS = "from funcollect.policies.jax_functions.jax_policy import JaxPolicy\ndef make(env): return JaxPolicy"
BROKEN = [  # its code, and words of the error
    ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    ("raise SystemExit", "cannot be imported: SystemExit"),
    ("make_it = 3", "AttributeError: module 'broken' has no attribute 'make'"),
    ("make = 3", r"is 3, expected a function of the environment: \(env, \*\*options\) -> Policy"),
    ("def make(): ...", r"takes \(\), expected a function of the environment: \(env"),
    ("def make(env):\n raise ArithmeticError('too small')", "HostEnv.*: ArithmeticError: too small"),
    ("import torch\ndef make(env): return torch.nn.Linear(4, 2)", "is Linear as .* expected a Policy"),
    (A_CLASS, "the class J"),
    ("def make(env): ...", "is NoneType as its factory returns it"),
]


@pytest.mark.parametrize(("code", "says"), BROKEN)
def test_a_broken_package_is_named_and_breaks_no_other(code, says, package):
    package("broken", code, "fallen = broken:make", version="0.3")
    package("walkers", GOOD, "walker = walkers:make")
    with pytest.raises(fc.PluginError, match=rf"the policy 'fallen' \(broken 0.3\) .*{says}"):
        fc.make_policy("fallen", env())
    assert fc.make_policy("walker", env()).backend == "jax"


def test_references_and_metadata_that_cannot_be_read(package, capsys):
    package("fallen", "", "fallen = no module at all")
    with pytest.raises(fc.PluginError, match=r"'fallen' \(fallen 1.0\) cannot be imported"):
        fc.make_policy("fallen", env())
    package("broken", "", "no equals sign")
    package("walkers", GOOD, "walker = walkers:make")
    assert fc.make_policy("walker", env()).backend == "jax"
    assert main(["policies"]) == 0
    assert _lines(capsys)["?"].startswith("broken broken 1.0 entry_points.txt cannot be read from its entry_points.txt")


def test_of_two_versions_the_first_on_the_path_counts(package, tmp_path, monkeypatch):
    package("walkers", GOOD, "walker = walkers:make")
    (tmp_path / "old").mkdir()
    for old in ("walkers.py", "walkers-1.0.dist-info"):
        (tmp_path / old).rename(tmp_path / "old" / old)
    package("Walkers", GOOD.replace("seed=5", "seed=6"), "walker = walkers:make", version="2.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "old")])
    assert offered_policies()["walker"].origin == "Walkers 2.0"
    assert fc.make_policy("walker", env()).given["seed"] == 6


def test_policies_lists_what_works_and_what_does_not(package, capsys):
    package("broken", "import no_such_library", "fallen = broken:make")
    package("unmade", "def make(env):\n raise ArithmeticError('too\\n small')", "unmade = unmade:make", version="2")
    package("walkers", GOOD, "walker = walkers:make")
    assert main(["policies"]) == 0
    listed = _lines(capsys)
    assert listed["mlp"] == "ok built in funcollect.policies.mlp:mlp"
    assert listed["walker"] == "ok walkers 1.0 walkers:make"
    assert listed["unmade"] == "ok unmade 2 unmade:make"
    reason = "cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
    assert listed["fallen"] == f"broken broken 1.0 broken:make {reason}"
    assert main(["policies", "CartPole-v1"]) == 0
    made = _lines(capsys)
    assert re.match(r"broken unmade 2 .*cannot be made for .*ArithmeticError: too small$", made.pop("unmade"))
    assert made == {name: line for name, line in listed.items() if name != "unmade"}


def _lines(capsys):
    rows = (line.split() for line in capsys.readouterr().out.splitlines())
    return {name: " ".join([state, *rest]) for state, name, *rest in rows}


OPTIONS = {"3": 3, "1e-3": 1e-3, "[64, 2]": [64, 2], "tanh": "tanh", "False": False, "false": False, "a=b": "a=b"}


@pytest.mark.parametrize(("text", "value"), OPTIONS.items())
def test_options_on_the_command_line(text, value, package, capsys):
    package("walkers", "def make(env, *, bias, seed=1):\n raise ValueError([bias, seed])", "walker = walkers:make")
    command = ["explain", "CartPole-v1", "--policy", "walker", "-o", f"bias={text}"]
    for more, seed in (([], 0), (["--option", "seed=8"], 8)):
        assert main([*command, *more]) == 2
        assert f"ValueError: {[value, seed]}" in capsys.readouterr().err


# The example package, installed from its own pyproject.toml and found through its entry point.
NAME = "nnx_actor_critic"
SOURCE = ROOT / "examples" / NAME


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    source, target = (tmp_path_factory.mktemp("example") / name for name in ("source", "site"))
    shutil.copytree(SOURCE, source)  # building leaves files beside what it builds
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


@pytest.fixture
def found(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_the_example_refuses_spaces_that_do_not_suit_it(found):
    with pytest.raises(fc.PluginError, match=r"ValueError: it needs a Box observation space.*flatten it"):
        fc.make_policy(NAME, fc.make_env("FrozenLake-v1", num_envs=2))


def test_the_example_collects_from_the_command_line(tmp_path, found):
    arguments = ["CartPole-v1", "--policy", NAME, "-o", "widths=[8]", "--frames", "90", "--num-envs", "3"]
    assert main(["collect", *arguments, "--seed", "4", "--out", str(tmp_path / "out")]) == 0
    saved = TensorDict.load_memmap(tmp_path / "out" / "batch")
    three = fc.make_env("CartPole-v1", num_envs=3)
    by_hand = fc.make_policy(NAME, three, widths=[8], seed=4)
    with fc.SyncDataCollector(three, by_hand, frames_per_batch=90, total_frames=90, seed=4) as collector:
        (batch,) = collector
    assert_same(saved, batch)
    about = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert (about["policy"], about["policy_origin"]) == (NAME, "nnx-actor-critic 1.0.0")
    assert about["policy_options"] == {"widths": [8]}


def test_the_readme_of_the_example_runs(tmp_path, monkeypatch, found):
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
def test_the_example_is_imported_on_use_after_jax_is_set_up(site):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{FRESH}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.endswith("; synchronous CPU dispatch\n")

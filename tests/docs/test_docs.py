"""Every Python block of the documents runs: those of the root each by itself, a page of docs/ as one program.

Notebooks are kept as they ran, with their pictures; `make test` runs them again (``pytest --nbmake notebooks``).
"""

import ast
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

import funcollect as fc
from tests.support.running import FORKS_OF_RAY, LOSES_WORKERS, ROOT

MADE = ("_build", "benchmarks")  # by `make docs`, which may run meanwhile
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.relative_to(ROOT).parts[1] not in MADE)
NEEDS = {"from_purejaxrl": "gymnax>=1", "from_sb3": "torchrl", "from_torchrl": "torchrl"}
NEEDS |= {"randomness": "gymnax>=1 brax", "evaluation": "gymnax>=1", "search": "pgx"}
# Pages that learn, that compile for long, or that start a cluster; but one, they are no guides.
EVENING = ("from_brax", "from_purejaxrl", "from_sb3", "randomness", "changing_environments", "one_gpu", "ray")
EVENING += ("many_simulators", "from_torchrl", "lowering", "state", "from_a_hand_written_loop")
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
NO_PROGRAMS = ("index.md", "install.md", "changelog.md")
PROGRAMS = [page for page in PAGES if page not in REFERENCE and page.name not in NO_PROGRAMS]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
A_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def blocks(page):
    """Every block: its code, compiled so that a traceback names the page and its line, and the output that follows."""
    text = page.read_text()
    return [
        (compile("\n" * text.count("\n", 0, match.start(1)) + match[1], str(page), "exec"), match[2])
        for match in A_BLOCK.finditer(text)
    ]


def run(block, namespace, capsys):
    code, printed = block
    capsys.readouterr()
    exec(code, namespace)
    assert printed is None or capsys.readouterr().out.strip() == printed.strip()


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in [*sorted(ROOT.glob("*.md")), ROOT / "docs" / "index.md"]
    for number, block in enumerate(blocks(page))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block, capsys):
    run(block, {"__name__": "__main__"}, capsys)


def marks_of(page):
    needs = pytest.mark.needs(*NEEDS.get(page.stem, "").split())
    return [needs, *[pytest.mark.evening] * (page.stem in EVENING)]


@FORKS_OF_RAY
@LOSES_WORKERS
@pytest.mark.filterwarnings(  # what TorchRL 0.14 says of its own classes, and of its next version
    "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning",
    "ignore:The env passed to Collector is missing transforms:FutureWarning",
)
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem, marks=marks_of(page)) for page in PROGRAMS])
def test_a_page_runs_from_top_to_bottom(page, capsys):
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        run(block, namespace, capsys)


def test_every_page_is_a_program():
    assert len(BLOCKS) >= 3
    assert {*EVENING} < {page.stem for page in PROGRAMS}
    for page in PROGRAMS:
        assert len(blocks(page)) >= 3, page.name
    assert not [page.name for page in DOCUMENTS if re.search(r"@[A-Z]+@", page.read_text())]


# What a page says if its programs match: an extra, or a package of its own.
USES = {
    "`envs`": r"\bale/|ALE/|(HalfCheetah|Ant|Hopper)-v|envpool|LunarLander",
    "`jax-envs`": r"\b(gymnax|brax|jumanji|navix|pgx|playground|xminigrid)\b",
    "`viz`": r"fc\.(plots|record)\b|log_dir",
    "`torchrl`": r"^(from|import) torchrl",
    "`data`": r"fc\.datasets\.(?!from_arrays)",
    '".[ray]"': r"^import ray",
    "stable-baselines3": r"stable_baselines3",
    "flax": r"^(from|import) flax",
    "equinox": r"^import equinox",
    "dm-haiku": r"^import haiku",
    "orbax-checkpoint": r"^import orbax",
    "pytest": r"^import pytest",
}


def test_a_page_names_the_extras_and_packages_that_it_needs():
    for page in PROGRAMS:
        text = page.read_text()
        programs = "\n".join(match[1] for match in A_BLOCK.finditer(text))
        beside = A_BLOCK.sub("", text).replace("jax-envs]", "`jax-envs`")
        for named, pattern in USES.items():
            assert named in beside or not re.search(pattern, programs, re.MULTILINE), (page.name, named)


def public_values():
    """Every public name, those of modules after a dot, with its value."""
    for name in fc.__all__:
        value = getattr(fc, name)
        if isinstance(value, ModuleType):
            yield from ((f"{name}.{member}", getattr(value, member)) for member in getattr(value, "__all__", []))
        else:
            yield name, value


def test_every_public_name_has_an_entry():
    pages = "\n".join(page.read_text() for page in REFERENCE)
    entries = set(re.findall(r"^\.\. (?:auto\w+|py:data):: funcollect\.([\w.]+)", pages, re.MULTILINE))
    members = {entry.rpartition(".")[2] for entry in entries if entry.startswith(("samplers.", "storages."))}
    for name, _ in public_values():
        assert {name, name.rpartition(".")[2]} & (entries | members), name


# Tensordict's, a type alias, and a base class whose example is that of `envs.HostEnvBase`.
SHOWN_ELSEWHERE = ("ExplorationType", "envs.Outcome", "envs.SimulatorsBase")
# They raise nothing but TypeError for something else than their argument, or have no arguments.
RAISE_NOTHING = ("PolicyBase", "RandomSampler", "close", "jax_ring.held", "ring.snapshot", "traced.partition")
RAISE_NOTHING += ("samplers.RandomSampler",)


def test_every_public_function_and_class_has_an_example_and_says_what_it_raises():
    for name, value in public_values():
        if not callable(value) or getattr(value, "_is_protocol", False) or name in SHOWN_ELSEWHERE:
            continue
        kind = value if isinstance(value, type) else object
        assert ">>>" in (value.__doc__ or "") or issubclass(kind, Exception), name
        if not (issubclass(kind, (Exception, tuple, Enum)) or is_dataclass(kind)):
            says = re.search(r"Raises|\berrors\b", inspect.getdoc(value) or "")
            assert bool(says) != (name in RAISE_NOTHING), name


def test_links_lead_somewhere_and_documents_name_only_what_there_is():
    for page in DOCUMENTS:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert [target for target in targets if not (page.parent / target).exists()] == [], page
    named = {name for page in DOCUMENTS for name in re.findall(r"\bfc\.([a-z_]+)", page.read_text(), re.IGNORECASE)}
    assert len(named) > 50
    assert [name for name in named if not hasattr(fc, name)] == []


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PYPROJECT["project"]["urls"]["Repository"]


def test_the_version_is_the_same_everywhere_and_links_are_whole_on_pypi():
    assert fc.__version__ == PYPROJECT["project"]["version"]
    assert f"\nversion: {fc.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "CHANGELOG.md").read_text().startswith(f"# Changelog\n\n## {fc.__version__}")
    text = (ROOT / "README.md").read_text()
    for each in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        assert each["replacement"].startswith(f"]({REPOSITORY}/")
        text = re.sub(each["pattern"], each["replacement"], text)
    assert not re.search(r"\]\((?!https:)", text)  # there, relative links lead nowhere


def test_the_address_stands_in_three_files_and_is_set_by_one_command(tmp_path):
    files = ["Makefile", "pyproject.toml", "CITATION.cff", "docs/start/install.md"]
    for each in files:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / each, tmp_path / each)
    without = subprocess.run(["make", "--silent", "address"], cwd=tmp_path, capture_output=True, check=False)
    assert without.returncode
    assert all((tmp_path / each).read_text() == (ROOT / each).read_text() for each in files)
    subprocess.run(["make", "--silent", "address", "URL=https://example.org/a/b"], cwd=tmp_path, check=True)
    for each in files[1:]:
        assert (tmp_path / each).read_text() == (ROOT / each).read_text().replace(REPOSITORY, "https://example.org/a/b")
    places = ["*.md", "*.toml", "*.cff", "docs/*/*.md", "docs/*.*", "notebooks/*.ipynb"]
    places += ["funcollect/**/*.py", ".github/**/*.yml"]
    texts = {path for place in places for path in ROOT.glob(place) if path.is_file()}
    assert {str(path.relative_to(ROOT)) for path in texts if REPOSITORY in path.read_text()} == {*files[1:]}


CARTPOLES = [f"CartPole-v1 torch {lanes}" for lanes in (1, 8, 64)]
GAMES = [[f"{env} {lanes}" for lanes in (64, 1_024, 4_096)] for env in ("gymnax/CartPole-v1", "pgx/tic_tac_toe")]
WORKERS = [f"{env} 2" for env in ("CartPole-v1", "HalfCheetah-v5", "ale/Pong")]
# A row of the README's table of speed by its first words: a benchmark, its cells, and the peer.
SPEED = {
    "TorchRL's collector": ("collect", CARTPOLES, "torchrl"),
    "Stable-Baselines3": ("collect", CARTPOLES, "sb3"),
    "a hand-written loop that records": ("collect", CARTPOLES, "loop-record"),
    "a hand-written loop that stores": ("collect", CARTPOLES, "loop"),
    "a hand-written `lax.scan`": ("fused", GAMES[0], "scan"),
    "the same, pgx": ("fused", GAMES[1], "scan"),
    "TorchRL's `MultiSyncCollector`": ("workers", WORKERS, "torchrl sync"),
    "TorchRL's replay buffer": ("replay", [f"sample cartpole {10**digits}" for digits in (4, 5, 6)], "torchrl"),
    "flashbax": ("replay", [f"prioritized cartpole {10**digits}" for digits in (4, 5, 6)], "flashbax"),
    "a hand-written loop that keeps": ("step", CARTPOLES, "by hand"),
    "TorchRL's collector, one step": ("step", CARTPOLES, "torchrl"),
    "soft actor-critic": ("step", ["sac learning"], "by hand"),
    "Stable-Baselines3's replay buffer": ("step", ["replay 1", "replay 8"], "sb3"),
    "collection written by hand": ("daily", ["PPO, continuous", "DQN", "IMPALA", "evolution", "Dreamer"], "by hand"),
}


def test_the_table_of_speed_is_what_was_measured():
    table = (ROOT / "README.md").read_text().split("\n## Speed\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]
    assert len(rows) == len(SPEED)
    for row, (name, (benchmark, cells, peer)) in zip(rows, SPEED.items(), strict=True):
        assert row[0].startswith(name)
        rates = json.loads((ROOT / "benchmarks" / "results" / f"{benchmark}.json").read_text())["results"]
        found = {cell: next(each for each in rates if each.startswith(cell)) for cell in cells if cell not in rates}
        measured = [rates[found.get(cell, cell)]["ratio"][peer] for cell in cells]
        for shown, ratio in zip(row[1].split(" / "), measured, strict=True):
            assert shown == f"{ratio:.{len(shown.partition('.')[2])}f}", row


def test_every_top_level_name_is_stated_once_and_resolves():
    source = Path(fc.__file__).read_text()
    stated = re.findall(r"^    from (\S+) import (\w+) as (\w+)$", source, re.MULTILINE)
    assert fc.__all__ == sorted(name for _, name, _ in stated) == sorted({name for _, name, _ in stated})
    assert fc.__dir__() == sorted([*fc.__all__, "__version__"])
    for home, name, alias in stated:
        assert name == alias
        if home == "funcollect":
            assert getattr(fc, name) is importlib.import_module(f"funcollect.{name}")
        else:
            assert getattr(fc, name) is getattr(importlib.import_module(home), name)
    scope = {}
    exec("from funcollect import *", scope)
    assert {*fc.__all__} <= {*scope}


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
A_PATH = re.compile(r"site-packages|(?<![\w.<])/(home|root|tmp|usr|work|Users|mnt|opt|var)\b")


def test_notebooks_are_all_there():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 9)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_ran(path):
    """From top to bottom, with pictures and without warnings; run again, one that does not learn fails at its end."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    said = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    assert len("".join(said)) > 100
    assert not [line for line in [*said, str(notebook.metadata)] if A_PATH.search(line) or "Warning" in line]
    assert not [output for output in outputs if "\r" in output.get("text", "").strip()]  # a progress bar as it ended
    assert code[-1].source.startswith("assert ")


# The package is laid out as ARCHITECTURE.md says.

PACKAGE = Path(fc.__file__).parent
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
NODES = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]


def test_no_two_classes_share_a_name():
    classes = Counter(node.name for _, node in NODES if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
    aliases = {node.targets[0].id for tree in TREES.values() for node in tree.body if _is_alias(node)}
    assert aliases.isdisjoint(classes)


def _is_alias(node):
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[0].isupper()


def test_docstrings_document_arguments_that_exist():
    for _, node in NODES:
        functions = [node] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):  # whose __init__ has them; others inherit their arguments
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        for function in functions:
            assert function.args.kwarg or _documented(node) <= _parameters(function), node.name


def _documented(node):
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", ast.get_docstring(node) or "", re.M)
    names = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1], re.M) if section else []
    return {name.strip(" *") for each in names for name in each.split(",")}


def _parameters(function):
    every = function.args
    some = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    return {each.arg for each in some if each is not None}


def test_no_module_bears_the_name_of_a_package_that_it_imports():
    for path, node in NODES:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not path.name.startswith("__"):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert path.stem not in [name.partition(".")[0] for name in imported], path


# Environments and policies of the documents are short, and accepted by type checkers, as are all public names.

CLASSES = {  # between two commas stand the classes that share 15 lines
    "your_own_environment": "Reach, JaxWalk, Line, TorchWalk, HostWalk Walkers, SnapshotWalk, Snapshot SnapshotWalkers",
    "your_own_policy": "ActorCritic, Lean, Linear",
}
CHECKERS = {"mypy": ["mypy", "--strict"], "pyright": ["pyright", "--pythonpath", sys.executable]}


def program(page):
    return "\n\n".join(match[1] for match in A_BLOCK.finditer((ROOT / "docs" / "guides" / f"{page}.md").read_text()))


@pytest.mark.parametrize("page", CLASSES)
def test_each_takes_at_most_15_lines(page):
    source = program(page)
    lines = {
        node.name: [line for line in ast.get_source_segment(source, node).splitlines() if line.strip()]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    for names in CLASSES[page].split(", "):
        assert sum(len(lines.pop(name)) for name in names.split()) <= 15, names
    assert not lines


def accepted(checker):
    """What a type checker prints of these classes, and of a program that shows every public name; it accepts them."""
    names = [name for name in fc.__all__ if name != "ExplorationType"]  # tensordict's, which has no types for mypy
    shown = ["import funcollect as fc", "from funcollect import *"]
    shown += [f"reveal_type({prefix}{name})" for name in names for prefix in ("fc.", "")]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{page}.py" for page in (*CLASSES, "names")]
        for file, text in zip(files, [*map(program, CLASSES), "\n".join([*shown, ""])], strict=True):
            file.write_text(text)
        command = [sys.executable, "-m", *CHECKERS[checker], *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "Revealed type is" in line or "Type of" in line]


@pytest.mark.parametrize("checker", CHECKERS)
def test_mypy_in_strict_mode_and_pyright_accept_them_and_see_every_public_name(checker):
    seen = accepted(checker)
    assert len(seen) == 2 * (len(fc.__all__) - 1)
    assert not [line for line in seen if re.search(r"is \"(Any|Unknown)\"$", line)]


# The reasons why tests of TorchRL fail here, in `benchmarks/torchrl_suite`, stand on the page for its users.
SUITE = ROOT / "benchmarks" / "torchrl_suite"


def _module(name):
    spec = importlib.util.spec_from_file_location(f"torchrl_suite_{name}", SUITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("part", ["collectors", "buffers"])
def test_documented_differences_stand_on_the_page(part):
    classify = _module("classify")
    page = classify.plain(classify.PAGE.read_text())
    judged = _module(part).JUDGED
    assert {kind for kind, _ in judged.values()} <= {"X", "I"}
    different = [classify.plain(sentence) for kind, sentence in judged.values() if kind == "X"]
    assert [sentence for sentence in different if sentence not in page] == []
    assert classify.left_out(classify.PAGE.read_text()).count("collector.apply") == 1

"""Environments and policies of the documents: short, and accepted by type checkers."""

import ast
import subprocess
import sys

import pytest

from tests.support.running import ROOT

CLASSES = {  # between two commas stand the classes that share 15 lines
    "your_own_environment": "Reach, JaxWalk, Line, TorchWalk, HostWalk Walkers, SnapshotWalk, Snapshot SnapshotWalkers",
    "your_own_policy": "ActorCritic, Lean, Linear",
}
CHECKERS = {"mypy": ["mypy", "--strict"], "pyright": ["pyright", "--pythonpath", sys.executable]}


def program(page):
    blocks = (ROOT / "docs" / "guides" / f"{page}.md").read_text().split("```python\n")[1:]
    return "\n\n".join(block.split("```")[0] for block in blocks)


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


def accepted(checker, *files):
    """What a type checker prints of files that it accepts."""
    command = [sys.executable, "-m", *CHECKERS[checker], *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("checker", CHECKERS)
def test_mypy_in_strict_mode_and_pyright_accept_them(checker, tmp_path):
    files = [tmp_path / f"{page}.py" for page in CLASSES]
    for page, file in zip(CLASSES, files, strict=True):
        file.write_text(program(page))
    accepted(checker, *files)

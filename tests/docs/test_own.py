"""Environments and policies of the documents: short, and accepted by type checkers, as are all public names."""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import funcollect as fc
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

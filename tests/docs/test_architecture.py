"""The package is laid out as ARCHITECTURE.md says."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import funcollect
from tests.support.running import ROOT

PACKAGE = Path(funcollect.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))
MAP = (ROOT / "ARCHITECTURE.md").read_text()
FOLDERS = sorted(
    {str(path.parent.relative_to(PACKAGE)) for path in MODULES if "lowering" not in path.parts} - {"."}
)  # the files of `interop/lowering` are its operators


def modules_of(folder):
    return {path.stem for path in MODULES if path.parent == PACKAGE / folder}


def test_no_two_classes_share_a_name():
    homes = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(PACKAGE))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def rows():
    """The modules that the map names, by folder."""
    cells = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", MAP, re.M)
    return {folder: set(re.findall(r"`(\w+)`", text)) for folder, text in cells}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_is_on_the_map(folder):
    assert modules_of(folder) <= rows().get(folder, set())


def test_the_map_names_no_folder_that_is_not_there():
    assert set(rows()) - {"tests"} == {*FOLDERS, "interop/lowering"}


def test_no_module_bears_the_name_of_a_package_that_it_imports():
    for path in MODULES:
        imported = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        }
        assert path.stem not in imported, path

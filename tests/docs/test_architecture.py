"""The package is laid out as ARCHITECTURE.md says."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import funcollect

PACKAGE = Path(funcollect.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))


def test_no_two_classes_share_a_name():
    classes, aliases = defaultdict(list), set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(path.relative_to(PACKAGE))
        aliases |= {node.targets[0].id for node in tree.body if _is_alias(node)}
    assert {name: where for name, where in classes.items() if len(where) > 1} == {}
    assert aliases.isdisjoint(classes)


def _is_alias(node):
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[0].isupper()


def test_docstrings_document_arguments_that_exist():
    for node in (node for path in MODULES for node in ast.walk(ast.parse(path.read_text()))):
        functions = [node] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):  # whose __init__ has them; others inherit their arguments
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        for function in functions:
            assert function.args.kwarg or _documented(node) <= _parameters(function), node.name


def _documented(node):
    """The arguments that a docstring's section ``Args`` names."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", ast.get_docstring(node) or "", re.M)
    names = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1], re.M) if section else []
    return {name.strip(" *") for each in names for name in each.split(",")}


def _parameters(function):
    every = function.args
    some = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    return {each.arg for each in some if each is not None}


def test_no_module_bears_the_name_of_a_package_that_it_imports():
    for path in MODULES:
        imported = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        }
        assert path.stem not in imported, path

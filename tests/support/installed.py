"""Leaves out the tests of packages that are not installed, if FUNCOLLECT_INSTALLED_ONLY=1 (as `make test-newest` sets).

A file is left out if it imports such a package at its top level, itself or through a module of the tests; a doctest,
if one of its examples does; any other test, if it is marked `needs("package>=1")`. Without the variable a missing
package is an error.
"""

import ast
import functools
import importlib.util
import os
from collections import Counter
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ACTIVE = os.environ.get("FUNCOLLECT_INSTALLED_ONLY") == "1"
TESTS = Path(__file__).parents[1]
_LEFT_OUT = Counter()  # what was left out, by the missing package


@functools.cache
def is_installed(package):
    """Whether a package could be imported."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def missing_for(path):
    """The packages that a file needs at its top level and that are not installed, sorted."""
    missing = set()
    for name in _imported(_outside_functions(ast.parse(path.read_text()))):
        helper = _module_of_tests(name, path.parent)
        missing.update(missing_for(helper) if helper else _missing(name))
    return sorted(missing)


def _missing(name):
    package = name.partition(".")[0]
    return [] if not package or package == TESTS.name or is_installed(package) else [package]


def _imported(nodes):
    """The dotted names that these statements import; of ``from a import b``, both ``a`` and ``a.b``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside_functions(node):
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _outside_functions(child)


def _module_of_tests(name, folder):
    """The file of a module of the tests; None for any other module."""
    file = Path(*name.split(".")).with_suffix(".py")
    return next((home / file for home in (folder, TESTS, TESTS.parent) if _is_ours(home / file)), None)


def _is_ours(file):
    return file.is_relative_to(TESTS) and file.is_file()


def _missing_for_item(item):
    asked = {each for marker in item.iter_markers("needs") for each in marker.args}
    missing = {each for each in asked if not _is_met(Requirement(each))}
    if doctest := getattr(item, "dtest", None):
        source = "".join(example.source for example in doctest.examples)
        missing.update(*map(_missing, _imported(ast.walk(ast.parse(source)))))
    return sorted(missing)


def _is_met(requirement):
    """Whether a package is installed, in a version that is asked for."""
    if not is_installed(requirement.name):
        return False
    return not requirement.specifier or metadata.version(requirement.name) in requirement.specifier


def pytest_ignore_collect(collection_path):
    """Leave out a file that cannot be imported; None leaves the decision to pytest."""
    if not ACTIVE or collection_path.suffix != ".py" or not (missing := missing_for(collection_path)):
        return None
    _LEFT_OUT[f"files that need {', '.join(missing)}"] += 1
    return True


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that need a package which is not installed."""
    if not ACTIVE:
        return
    missing = {item: names for item in items if (names := _missing_for_item(item))}
    _LEFT_OUT.update(f"tests that need {', '.join(names)}" for names in missing.values())
    items[:] = [item for item in items if item not in missing]
    config.hook.pytest_deselected(items=list(missing))


def pytest_report_collectionfinish():
    """One line that says what was left out."""
    return "left out: " + "; ".join(f"{count} {what}" for what, count in _LEFT_OUT.items()) if _LEFT_OUT else []

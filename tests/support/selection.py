"""Which tests run: those of an evening only if FUNCOLLECT_SCALE is above 1, and those over Ray last.

If FUNCOLLECT_INSTALLED_ONLY=1 (as `make test-newest` sets), the tests of packages that are not installed are left out:
a file if it imports such a package at its top level, itself or through a module of the tests; a doctest, if one of its
examples does; any other test, if it is marked `needs("package>=1")`. Otherwise a missing package is an error.
"""

import ast
import functools
import importlib.util
import os
from collections import Counter
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.running import SCALE

INSTALLED_ONLY = os.environ.get("FUNCOLLECT_INSTALLED_ONLY") == "1"
TESTS = Path(__file__).parents[1]
_LEFT_OUT = Counter()  # what was left out, by the reason


@functools.cache
def is_installed(package):
    return importlib.util.find_spec(package) is not None


@functools.cache
def missing_for(path):
    """The packages that a file needs at its top level and that are not installed, sorted."""
    missing = set()
    for name in _imported(_outside_functions(ast.parse(path.read_text()))):
        files = (home.joinpath(*name.split(".")).with_suffix(".py") for home in (path.parent, TESTS, TESTS.parent))
        helper = next((file for file in files if file.is_relative_to(TESTS) and file.is_file()), None)
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


def _reason(item):
    """Why a test is left out; empty if it runs."""
    if item.get_closest_marker("evening") and SCALE == 1:
        return "tests for an evening"
    missing = _missing_for_item(item) if INSTALLED_ONLY else []
    return f"tests that need {', '.join(missing)}" if missing else ""


def pytest_ignore_collect(collection_path):
    """Leave out a file that cannot be imported; None leaves the decision to pytest."""
    if not INSTALLED_ONLY or collection_path.suffix != ".py" or not (missing := missing_for(collection_path)):
        return None
    _LEFT_OUT[f"files that need {', '.join(missing)}"] += 1
    return True


def pytest_collection_modifyitems(config, items):
    """Deselect what does not run. Tests over Ray come last, so that no other test finds their cluster."""
    reasons = {item: reason for item in items if (reason := _reason(item))}
    _LEFT_OUT.update(reasons.values())
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")
    kept = [item for item in items if item not in reasons]
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("ray") is not None)
    config.hook.pytest_deselected(items=list(reasons))


def pytest_report_collectionfinish():
    """One line that says what was left out."""
    return "left out: " + "; ".join(f"{count} {what}" for what, count in _LEFT_OUT.items()) if _LEFT_OUT else []

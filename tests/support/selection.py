"""Which tests run: those of an evening only if FUNCOLLECT_SCALE is above 1, and those over Ray last.

If FUNCOLLECT_INSTALLED_ONLY=1 (as `make test-newest` sets), the tests of packages that are not installed are left out:
a file whose import lacks such a package; a doctest, if one of its examples imports one; any other test, if it is marked
`needs("package>=1")`. Otherwise a missing package is an error.
"""

import functools
import importlib.util
import os
import re
from collections import defaultdict
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.support.running import SCALE

INSTALLED_ONLY = os.environ.get("FUNCOLLECT_INSTALLED_ONLY") == "1"
_LEFT_OUT = defaultdict(set)  # what was left out, by the reason


@functools.cache
def is_installed(package):
    return importlib.util.find_spec(package) is not None


def _is_met(requirement):
    """Whether a package is installed, in a version that is asked for."""
    if not is_installed(requirement.name):
        return False
    return not requirement.specifier or metadata.version(requirement.name) in requirement.specifier


def _missing_for(item):
    asked = {each for marker in item.iter_markers("needs") for each in marker.args}
    if doctest := getattr(item, "dtest", None):
        source = "".join(example.source for example in doctest.examples)
        asked.update(re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE))
    return sorted(each for each in asked if not _is_met(Requirement(each)))


def _reason(item):
    if item.get_closest_marker("evening") and SCALE == 1:
        return "tests for an evening"
    missing = _missing_for(item) if INSTALLED_ONLY else []
    return f"tests that need {', '.join(missing)}" if missing else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Leave out a file that cannot be imported, since a package is not installed."""
    report = yield
    error = report.call.excinfo.value.__cause__ if INSTALLED_ONLY and report.failed else None
    if isinstance(error, ModuleNotFoundError) and not is_installed(package := error.name.partition(".")[0]):
        _LEFT_OUT[f"files that need {package}"].add(collector.path)
        report.outcome, report.result = "passed", []
    return report


def pytest_collection_modifyitems(config, items):
    """Deselect what does not run. Tests over Ray come last, so that no other test finds their cluster."""
    reasons = {item: reason for item in items if (reason := _reason(item))}
    for item, reason in reasons.items():
        _LEFT_OUT[reason].add(item.nodeid)
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")
    kept = [item for item in items if item not in reasons]
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("ray") is not None)
    config.hook.pytest_deselected(items=list(reasons))


def pytest_report_collectionfinish():
    shown = "; ".join(f"{len(each)} {reason}" for reason, each in _LEFT_OUT.items())
    return f"left out: {shown}" if shown else []

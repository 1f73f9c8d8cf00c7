"""pytest plugin that runs TorchRL's tests against TorchRL or this library: SUITE_MODE is base, strict or adapted.

SUITE_MAX: parametrizations of each test function, evenly spaced over those collected; 0 for all.
SUITE_OUT: a file of JSON lines. Tests that it records are not run again, so a run that crashed can be continued.
SUITE_ONLY: a file of node ids, to run these alone, with worker processes.
"""

import collections
import json
import os
import time
from pathlib import Path

import pytest
import torch.multiprocessing

MODE, MOST = os.environ.get("SUITE_MODE", "base"), int(os.environ.get("SUITE_MAX", "3"))
OUT = Path(os.environ["SUITE_OUT"]) if "SUITE_OUT" in os.environ else None
ONLY = Path(os.environ["SUITE_ONLY"]).read_text().split("\n") if "SUITE_ONLY" in os.environ else None
torch.multiprocessing.set_start_method(os.environ.get("SUITE_START", "fork"), force=True)  # TorchRL's spawn is slow
if MODE == "base":
    import pytrees

    pytrees.install()
else:
    import shims

    shims.install(adapted=MODE == "adapted")


def _record(**entry):
    if OUT is not None:
        with OUT.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _recorded():
    """The node ids in the file. A test that was started and has no end has crashed the process."""
    lines = [] if OUT is None or not OUT.exists() else map(json.loads, OUT.read_text().splitlines())
    events = collections.defaultdict(set)
    for entry in lines:
        events[entry["event"]].add(entry["id"])
    for name in events["start"] - events["end"]:
        _record(event="end", id=name, outcome="crash", text="the process ended in this test")
    return events["start"] | events["end"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    groups, recorded = collections.defaultdict(list), _recorded()
    for item in items:
        groups[item.nodeid.split("[")[0]].append(item)
    kept = []
    for group in groups.values():
        if ONLY is not None:
            group = [item for item in group if item.nodeid in ONLY]
        elif MOST and len(group) > MOST:
            group = [group[round(index * (len(group) - 1) / max(MOST - 1, 1))] for index in range(MOST)]
        kept += [item for item in group if item.nodeid not in recorded]
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


_reports = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid, location):
    _reports[nodeid] = []
    if MODE != "base":
        shims.begin(nodeid.split("[")[0].split("::")[-1], in_processes=ONLY is not None)
    _record(event="start", id=nodeid, time=time.time())


def pytest_runtest_logreport(report):
    _reports.setdefault(report.nodeid, []).append(report)


def pytest_runtest_logfinish(nodeid, location):
    outcome, text = "passed", ""
    for report in _reports.pop(nodeid, []):
        if report.outcome == "failed":
            outcome = "failed" if report.when == "call" else f"error in {report.when}"
            text = str(report.longrepr)[-6000:]
            break
        if report.outcome == "skipped":
            outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            text = str(report.longrepr)[-300:]
            break
    used = {} if MODE == "base" else {"used": sorted(shims.USED)}
    _record(event="end", id=nodeid, outcome=outcome, text=text, **used)

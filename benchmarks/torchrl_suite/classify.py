"""Prints how many of TorchRL's test functions pass, and the class of each that fails.

python classify.py [collectors|buffers] [--list]

A function counts if it passes on TorchRL and calls this library, unless it tests what the page leaves out. Those that
fail are X, a documented difference, or I, a test of TorchRL's internals, by the tables JUDGED; else D, a defect.
"""

import collections
import importlib
import json
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/coming_from/from_torchrl.md"
RESULTS = Path(os.environ.get("SUITE", ".")) / "results"
FILES = {
    "collectors": ["test_collectors", "test_distributed"],
    "buffers": [
        "test_postprocs",
        *(f"rb_test_{name}" for name in ("samplers", "rb_core", "prioritized", "storages", "writers", "rb_transforms")),
        *(f"rb_test_{name}" for name in ("composable", "query", "her", "ensemble", "rb_distributed")),
    ],
}
FINE = ("passed", "skipped", "xfailed")


def plain(text):
    """A text without white space and markup, in which a sentence of the page is found."""
    return re.sub(r"[\s`*]|^- |\n- ", "", text)


def left_out(page):
    """The items below each "Left out:" of the page, without white space and markup."""
    return plain("\n".join(re.findall(r"^Left out:\n\n((?:[- ] .*\n)+)", page, re.M)))


def functions(mode, name):
    """The results of a file of tests, by function: its class and name, without parameters."""
    found = collections.defaultdict(list)
    path = RESULTS / f"{mode}.{name}.jsonl"
    for entry in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        if entry["event"] == "end":
            found[entry["id"].split("[")[0].split("::", 1)[1]].append(entry)
    return found


def classes(mode, part, judged, omitted):
    """The class of each function that calls this library and passes on TorchRL."""
    found = {}
    for name in FILES[part]:
        base, own = functions("base", name), functions(mode, name)
        for function, entries in own.items():
            passed = {entry["id"] for entry in base[function] if entry["outcome"] == "passed"}
            alike = {entry["id"] for entry in base[function]}
            compared = [each for each in entries if passed and (each["id"] in passed or each["id"] not in alike)]
            if not any(entry.get("used") for entry in compared):
                continue
            kind, reason = judged.get(function, ("D", ""))
            if kind == "X" and plain(reason) in omitted:
                found[function] = "left out"
            else:
                found[function] = "pass" if all(entry["outcome"] in FINE for entry in compared) else kind
    return found


def main():
    outcomes = [each["outcome"] for entries in functions("processes", "test_collectors").values() for each in entries]
    print(f"with worker processes: {sum(each in FINE for each in outcomes)} of {len(outcomes)} tests pass")
    parts = [part for part in FILES if part in sys.argv[1:]] or [*FILES]
    omitted = left_out(PAGE.read_text())
    for part in parts:
        judged = importlib.import_module(part).JUDGED if (HERE / f"{part}.py").exists() else {}
        for mode in ("strict", "adapted"):
            found = classes(mode, part, judged, omitted)
            counts = collections.Counter(found.values())
            counted = len(found) - counts["left out"]
            share = f"{counts['pass'] / counted:.1%}" if counted else "none"
            print(f"{part}, {mode}: {counts['pass']} of {counted} functions pass ({share}); all counts: {dict(counts)}")
            if mode == "adapted":
                for function, kind in sorted(found.items(), key=lambda item: (item[1], item[0])):
                    if kind == "D" or (kind != "pass" and "--list" in sys.argv):
                        print(f"  {kind}: {function}: {judged.get(function, ('', 'not judged'))[1]}")
                if idle := sorted(function for function in judged if found.get(function) == "pass"):
                    print("  judged, but pass:", *idle)


if __name__ == "__main__":
    main()

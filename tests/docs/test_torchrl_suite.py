"""The reasons why tests of TorchRL fail here, in `benchmarks/torchrl_suite`, stand on the page for its users."""

import importlib.util
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "benchmarks" / "torchrl_suite"


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
    assert {
        sentence for kind, sentence in judged.values() if kind == "X" and classify.plain(sentence) not in page
    } == set()
    assert classify.left_out(classify.PAGE.read_text()).count("collector.apply") == 1

"""Every Python block of the documents runs, each in a fresh namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in sorted(ROOT.glob("*.md"))
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block, capsys):
    exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})


def test_there_are_blocks():
    assert len(BLOCKS) >= 3


def test_documents_name_only_what_there_is():
    """Every ``fc.name`` of the documents stands at the top level."""
    import funcollect as fc

    named = {
        name for page in ROOT.glob("*.md") for name in re.findall(r"\bfc\.([a-z_]+)", page.read_text(), re.IGNORECASE)
    }
    assert named
    assert all(hasattr(fc, name) for name in named), sorted(name for name in named if not hasattr(fc, name))

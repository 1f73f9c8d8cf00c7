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


def test_there_are_blocks_and_no_gaps():
    assert len(BLOCKS) >= 3
    assert not [page.name for page in ROOT.glob("*.md") if re.search(r"@[A-Z]+@", page.read_text())]


def test_the_top_level_names_agree():
    """The names stand three times: for type checkers, for their homes, and for ``import *``."""
    import ast

    import funcollect as fc

    tree = ast.parse(Path(fc.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname or alias.name for node in block.body for alias in node.names}
    assert typed == set(fc.__all__) == {*fc._HOME_OF, *fc._MODULES}
    assert fc.__dir__() == sorted([*fc.__all__, "__version__"])


def test_documents_name_only_what_there_is():
    """Every ``fc.name`` of the documents stands at the top level."""
    import funcollect as fc

    named = {
        name for page in ROOT.glob("*.md") for name in re.findall(r"\bfc\.([a-z_]+)", page.read_text(), re.IGNORECASE)
    }
    assert named
    assert all(hasattr(fc, name) for name in named), sorted(name for name in named if not hasattr(fc, name))

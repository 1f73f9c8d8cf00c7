"""The table of simulators in docs/guides/simulators.md is what its script finds."""

import pytest

from benchmarks.studies import simulators
from tests.support.running import SCALE

CELLS = simulators.cells()
HERE = [row for row in simulators.ROWS if simulators.installed(row) and (row.quick or SCALE > 1)]


def test_the_page_has_a_row_for_every_line_and_no_other():
    assert simulators.table(CELLS) in simulators.PAGE.read_text()
    assert [*CELLS] == [*simulators.COLUMNS[:1], "---", *(row.suite for row in simulators.ROWS)]
    assert len(CELLS) >= 30 + 2
    for row in simulators.ROWS:
        assert bool(row.why_not) == CELLS[row.suite]["resets"].startswith("not run here"), row.suite


@pytest.mark.filterwarnings("default")  # packages of others warn as they please
@pytest.mark.parametrize("row", HERE, ids=[row.suite for row in HERE])
def test_a_line_does_what_its_row_says(row):
    found, shown = simulators.facts(row), CELLS[row.suite]
    if "with OpenGL" in (found["film"], shown["film"]):  # which this machine may have
        found["film"] = shown["film"]
    assert found == shown

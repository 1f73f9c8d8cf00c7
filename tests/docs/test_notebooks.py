"""Notebooks are kept as they ran, with their pictures; `make test` runs them again (``pytest --nbmake notebooks``)."""

import re

import nbformat
import pytest

from tests.support.running import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
A_PATH = re.compile(r"site-packages|(?<![\w.<])/(home|root|tmp|usr|work|Users|mnt|opt|var)\b")


def test_they_are_all_there():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 8)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_as_it_ran(path):
    """From top to bottom, with pictures and without warnings; run again, one that does not learn fails at its end."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    said = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    assert len("".join(said)) > 100
    assert not [line for line in [*said, str(notebook.metadata)] if A_PATH.search(line) or "Warning" in line]
    assert not [output for output in outputs if "\r" in output.get("text", "").strip()]  # a progress bar as it ended
    assert code[-1].source.startswith("assert ")

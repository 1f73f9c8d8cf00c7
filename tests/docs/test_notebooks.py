"""Notebooks are kept as they ran, with their pictures; `make test` runs them again (``pytest --nbmake notebooks``)."""

import re

import nbformat
import pytest

from tests.support.running import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
A_PATH = re.compile(r"site-packages|(?<![\w.<])/(home|root|tmp|usr|work|Users|mnt|opt|var)\b")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code(notebook) for output in cell.outputs]


def test_they_are_all_there():
    assert [path.name for path in NOTEBOOKS] == [
        "01_getting_started.ipynb",
        "02_jax.ipynb",
        "03_torch_policy_in_xla.ipynb",
        "04_workers.ipynb",
        "05_replay.ipynb",
        "06_ray.ipynb",
        "07_continuous_ppo.ipynb",
    ]


def test_it_is_valid_and_ran_from_top_to_bottom(notebook):
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert {output.output_type for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}


def test_its_pictures_are_kept(notebook):
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) >= 3


def test_it_names_no_path_of_the_machine_and_warns_of_nothing(notebook):
    said = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs(notebook)]
    assert len("".join(said)) > 100
    assert not [line for line in [*said, str(notebook.metadata)] if A_PATH.search(line) or "Warning" in line]


def test_progress_bars_are_kept_as_they_end(notebook):
    assert not [output for output in outputs(notebook) if "\r" in output.get("text", "").strip()]


def test_the_goal_is_checked_at_the_end(notebook):
    """Run again, a notebook that does not learn fails in its last cell."""
    assert code(notebook)[-1].source.startswith("assert ")

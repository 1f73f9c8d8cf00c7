"""The data of some runs do not change while the library is rebuilt, with the versions that constraints.txt pins."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.frozen import RUNS, exact

PINNED: dict[str, str] = {}
_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def _pinned(name: str) -> str:
    """The version of a package in constraints.txt, for Python 3.11."""
    lines = re.findall(rf"^{name}==(\S+?)(?:; (.*))?$", _CONSTRAINTS.read_text(), re.M)
    return next(number for number, marker in lines if ">=" not in marker)


if sys.version_info[:2] == (3, 11) and all(
    version(name).partition("+")[0] == _pinned(name)
    for name in ("torch", "jax", "gymnasium", "gymnax", "brax", "pgx", "ale-py", "mujoco")
):

    @pytest.mark.filterwarnings("ignore:Brax System:UserWarning")
    @pytest.mark.parametrize("name", [name for name in RUNS if name != "ray"])
    def test_the_same_keys_integers_and_flags(name: str) -> None:
        assert exact(RUNS[name]()) == PINNED[name]

    def test_the_same_over_ray(ray_cluster: object) -> None:
        assert exact(RUNS["ray"]()) == PINNED["ray"]

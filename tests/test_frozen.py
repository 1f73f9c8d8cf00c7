"""The data of some runs do not change while the library is rebuilt, with the versions that constraints.txt pins."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.frozen import RUNS, exact

PINNED = {
    "gymnasium, torch": "93e8d0fbbed49c10",
    "gymnasium, tensordict": "5658ef07cf7b2a91",
    "gymnasium, jax": "c95ad7847737f882",
    "mujoco, normal": "bc6fa93be79b1898",
    "atari, torch": "7d59123646fda3b8",
    "torch, recurrent": "31f622cd38ced73c",
    "torch, jax": "719b7d294ea0f2e9",
    "gymnax, lowered": "6d495f1dbe691595",
    "gymnax, crossing": "6d495f1dbe691595",
    "gymnax, population": "255e6c79f0dbf2dc",
    "brax, normalised": "a1357c92ad5a7f1a",
    "pgx, masked": "1c87748a63cb9539",
    "workers": "af78fdacaa46aff9",
    "resumed": "04cfd9f77f35ce01",
    "samples": "279fb3b5e443d0e1",
    "prioritized": "b578d29a15b3578c",
    "slices": "c1b181225f2ceef2",
    "ray": "af78fdacaa46aff9",
}
_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def _pinned(name):
    """The version of a package in constraints.txt, for Python 3.11."""
    lines = re.findall(rf"^{name}==(\S+?)(?:; (.*))?$", _CONSTRAINTS.read_text(), re.M)
    return next(number for number, marker in lines if ">=" not in marker)


if sys.version_info[:2] == (3, 11) and all(
    version(name).partition("+")[0] == _pinned(name)
    for name in ("torch", "jax", "gymnasium", "gymnax", "brax", "pgx", "ale-py", "mujoco")
):

    @pytest.mark.filterwarnings("ignore:Brax System:UserWarning")
    @pytest.mark.parametrize("name", [name for name in RUNS if name != "ray"])
    def test_the_same_keys_integers_and_flags(name):
        assert exact(RUNS[name]()) == PINNED[name]

    def test_the_same_over_ray(ray_cluster):
        assert exact(RUNS["ray"]()) == PINNED["ray"]

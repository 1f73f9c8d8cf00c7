"""Prints the lower bounds of `pyproject.toml` as constraints for pip, for `make test-oldest`."""

import re
import tomllib
from pathlib import Path

BOUND = re.compile(r"(?P<name>[\w-]+)(\[[\w,-]+\])?>=(?P<version>[\d.]+)")


def lower_bounds() -> list[str]:
    """One ``name==version`` for each requirement with a lower bound, sorted."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(each for group in project["optional-dependencies"].values() for each in group),
    ]
    return sorted({f"{found['name']}=={found['version']}" for each in requirements if (found := BOUND.match(each))})


if __name__ == "__main__":
    print(*lower_bounds(), sep="\n")

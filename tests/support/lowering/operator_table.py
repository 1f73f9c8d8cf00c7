"""Writes the table of covered operators in ``docs/concepts/lowering.md`` from the rules.

Run ``python -m tests.support.lowering.operator_table`` in a checkout of the repository.
"""

from collections import defaultdict
from pathlib import Path

from funcollect.interop.lowering.operators import FAMILIES, rules

_TITLES = {
    "elementwise": "Arithmetic, functions of one or two arrays, comparisons, logic, choice, bits, complex numbers, "
    "Fourier transforms, activations, softmax",
    "linear": "Products of matrices and vectors, distances, attention, factorisations, determinants, matrix functions, "
    "inverses, ranks, linear systems",
    "layers": "Convolutions and pooling, recurrent cells and layers, images sampled at the points of a grid",
    "reduction": "Reductions, scans, sorting, medians, running extremes, modes, norms, normalisation",
    "shape": "Shapes, joining, padding, constants, casts, indexing, gathering, scattering",
}  # by the module of `operators`
PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "lowering.md"
_BEGIN, _END = "<!-- operators: begin -->\n", "<!-- operators: end -->\n"


def table():
    """The operators by family, in Markdown, without their overloads."""
    names = defaultdict(set)
    for name, rule in rules().items():
        names[rule.family].add(name.split(".")[1])
    rows = [f"| {_TITLES[key]} | {', '.join(f'`{name}`' for name in sorted(names[key]))} |" for key in FAMILIES]
    return "\n".join(["| | |", "|---|---|", *rows, ""])


def page(text):
    """The text of the page, with a new table."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table()}{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

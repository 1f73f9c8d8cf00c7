"""Describes values and arrays in short texts, for error messages and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import optree


def shown(value: Any, length: int = 80) -> str:
    """The repr of a value in one line, cut between two words if it is longer than `length`."""
    return clipped(repr(value), length)


def clipped(text: str, length: int = 80) -> str:
    """A text in one line, cut between two words if it is longer than `length`.

    >>> clipped("the shape [128, 64]", length=17)
    'the shape [128, …'
    """
    if len(text := " ".join(text.split())) <= length:
        return text
    whole = re.match(r".*[\s,;:()\[\]{}](?=.)", text[: length + 1])  # up to the last boundary between two words
    return f"{(whole[0] if whole else text[:length]).rstrip()} …"


def dtypes_and_shapes(value: Any) -> str:
    """The dtypes and shapes of the arrays in nested mappings and sequences: ``{position: float32 [8, 2]}``."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {dtypes_and_shapes(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(dtypes_and_shapes, value))})"
    return "None" if value is None else type(value).__name__


def form(answer: Any) -> str:
    """What a user's function returned: the shapes of arrays, the keys of a dict, the type of anything else."""
    if hasattr(answer, "shape"):
        return f"an array of shape {tuple(answer.shape)}"
    if isinstance(answer, (tuple, list)):
        return f"a {type(answer).__name__} of {[form(part) for part in answer]}"
    if isinstance(answer, Mapping):
        return f"a dict with the keys {sorted(map(str, answer))}"
    return type(answer).__name__


def kind_of(value: Any) -> str:
    """The name of a value's class; for a class, ``"the class X"``."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def name_of(function: Any) -> str:
    """The name of a function or a class; for any other callable, the name of its class."""
    return getattr(function, "__name__", type(function).__name__)


def note_arguments(error: Exception, function: str, arguments: tuple[Any, ...], recurrent: Any = None) -> None:
    """Add notes to an exception of a user's function: its arguments, and likely mistakes, such as in `recurrent`."""
    error.add_note(f"{function} was called with {clipped(dtypes_and_shapes(arguments), 300)}")
    if isinstance(error, TypeError) and "positional argument" in str(error):
        error.add_note("a recurrent policy is made with initial_state=, and takes its state as the last argument")
    if "shapes cannot be multiplied" in str(error):
        error.add_note("the network is built for another width: compare its layers with env.observation_space")
    if "same dtype" in str(error):
        error.add_note("weights and observations have one dtype: call module.float(), or pass make_env(dtype=)")
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in optree.tree_leaves(recurrent)]
    if any(len(shape) > 2 and shape[0] == shape[1] for shape in shapes):
        own = "initial_state is that of one environment, without a dimension of lanes"
        error.add_note(f"its state has the number of lanes twice: {own}")


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines of text: the first column is aligned on the left, the others on the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ("  ".join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip() for name, *cells in rows)
    return "\n".join(lines)

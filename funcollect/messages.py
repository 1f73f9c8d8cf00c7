"""Values and texts, shortened for error messages."""

from __future__ import annotations

import re
from typing import Any


def shown(value: Any, length: int = 80) -> str:
    """The repr of a value in one line, cut between two words if it is longer than `length`.

    >>> shown([1.25, 2.5, 3.125], length=12)
    '[1.25, 2.5, …'
    """
    return clipped(repr(value), length)


def clipped(text: str, length: int = 80) -> str:
    """A text in one line, cut between two words if it is longer than `length`.

    >>> clipped("the shape [128, 64]", length=17)
    'the shape [128, …'
    """
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    whole = re.match(r".*[\s,;:()\[\]{}](?=.)", text[: length + 1])  # up to the last boundary that leaves no word cut
    return f"{(whole[0] if whole else text[:length]).rstrip()} …"

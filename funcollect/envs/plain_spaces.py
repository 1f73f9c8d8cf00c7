"""Reduce an environment's spaces to plain arrays: drop keys, encode texts, and join Tuple and Dict actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_keys, check_positive
from funcollect.envs.base import box
from funcollect.specs import Space, disassemble

STRUCTURED = (spaces.Tuple, spaces.Dict)
_EXACT = 2**24  # float32 holds all integers up to it
_CHOICES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class AgentsActions(spaces.Dict):
    """The actions of groups of agents, of which some may be discrete, and others boxes."""


class TextBox(spaces.Box):
    """The space of a text, [length] uint8: its bytes in UTF-8, padded with zeros."""

    def __init__(self, length: int) -> None:
        super().__init__(0, 255, (length,), np.uint8)


def plain_observations(space: Space, drop: Sequence[str], text: int | None) -> Space:
    """The space without the keys `drop`, and with a `TextBox` of `text` bytes for each Text; ValueError without any."""
    check_keys("drop", drop, "mission")
    for key in drop:
        space = _without(space, key)
    if text is None:
        return space
    check_positive("text", text, 256)
    encoded = map_parts(lambda part: TextBox(text) if isinstance(part, spaces.Text) else part, space)
    if encoded == space:
        raise ValueError(f"text={text} was given, but the observation space {space} has no Text: leave it out")
    return encoded


def _without(space: Space, key: str) -> Space:
    """The space without a key; dots lead into Dicts, unless the whole key exists."""
    parts, (outer, _, inner) = dict(space.spaces) if isinstance(space, spaces.Dict) else {}, key.partition(".")
    if key in parts:
        del parts[key]
    elif inner and outer in parts:
        parts[outer] = _without(parts[outer], inner)
    else:
        has = f"the keys of the observation, which are {[*parts]}" if parts else f"a Dict observation, not {space}"
        raise ValueError(f"drop names {[key]}, expected {has}: correct the names")
    return spaces.Dict(parts)


def map_parts(change: Callable[[Space], Space], space: Space) -> Space:
    """Apply `change` to every space in a Dict or a Tuple, nested ones too, or else to the space itself."""
    match space:
        case spaces.Dict():
            return spaces.Dict({name: map_parts(change, child) for name, child in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Tuple([map_parts(change, child) for child in space.spaces])
    return change(space)


def to_gymnasium(given: Any, delivered: Any = None) -> Space:
    """Gymnasium's space for one of gymnax, JaxMARL, VMAS or mjlab; a Box gets the dtype of the `delivered` array."""
    children = getattr(given, "spaces", None)
    if isinstance(children, Mapping):
        return spaces.Dict({name: to_gymnasium(each, delivered and delivered[name]) for name, each in children.items()})
    if children is not None:
        return spaces.Tuple([to_gymnasium(each, delivered and delivered[i]) for i, each in enumerate(children)])
    counts = getattr(given, "nvec", getattr(given, "num_categories", None))
    if counts is not None:
        return spaces.MultiDiscrete(np.asarray(counts))
    if hasattr(given, "n"):
        return spaces.Discrete(int(given.n))
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        dtype = (given if delivered is None else delivered).dtype  # some declare another
        return box(tuple(given.shape), dtype, getattr(given, "low", None), getattr(given, "high", None))
    raise TypeError(f"the space {given!r} has no counterpart in Gymnasium: expected Discrete, Box, Dict, Tuple")


def plain_actions(space: Space) -> Space:
    """The space of the array that replaces a Tuple or Dict action (see `from_gymnasium`); other spaces unchanged."""
    if not isinstance(space, STRUCTURED):
        return space
    if not (parts := disassemble(space, space)):
        raise ValueError(
            f"the action space {space} has no parts, expected one or more: declare what the policy chooses"
        )
    if all(isinstance(part, _CHOICES) for part in parts):

        def joined(values: list[Any]) -> Any:
            return np.concatenate([np.broadcast_to(v, p.shape).ravel() for v, p in zip(values, parts, strict=True)])

        choices = [getattr(part, "nvec", 2 if part.shape else part.n) for part in parts]  # a MultiBinary has two each
        return spaces.MultiDiscrete(joined(choices), start=joined([getattr(part, "start", 0) for part in parts]))
    if all(isinstance(part, spaces.Box) for part in parts) and len({p.dtype.kind == "f" for p in parts}) == 1:
        dtype: Any = np.result_type(*[part.dtype for part in parts]).type
        low, high = (np.concatenate([getattr(part, name).ravel() for part in parts]) for name in ("low", "high"))
        return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
    if isinstance(space, AgentsActions) and (numbers := _numbers(parts)) is not None:
        return numbers
    known = "a Tuple or Dict of Discrete, MultiDiscrete and MultiBinary, or of boxes with one kind of number"
    mend = "wrap the environment in a gymnasium.ActionWrapper with such a space, whose action(array) makes its own"
    raise TypeError(f"the action space {space} mixes kinds, expected {known}: {mend}")


def _numbers(parts: Sequence[Any]) -> Space | None:
    """A floating Box of the numbers in all parts; None if it would not hold all integers exactly."""
    lows, highs = [], []
    for part in parts:
        start = np.asarray(getattr(part, "start", 0))
        last = np.asarray(getattr(part, "nvec", getattr(part, "n", 2) if part.shape == () else 2)) - 1
        pair = (part.low, part.high) if isinstance(part, spaces.Box) else (start, start + last)
        low, high = (np.broadcast_to(bound, part.shape).ravel() for bound in pair)
        if part.dtype.kind != "f" and len(low) and max(abs(low).max(), abs(high).max()) > _EXACT:
            return None
        lows.append(low)
        highs.append(high)
    dtype: Any = np.result_type(np.float32, *(part.dtype for part in parts if part.dtype.kind == "f")).type
    return spaces.Box(np.concatenate(lows).astype(dtype), np.concatenate(highs).astype(dtype), dtype=dtype)


def in_structure(space: Space, parts: Iterator[Any]) -> Any:
    """Assemble an action with the structure of its space, a Tuple or a Dict, from its parts in order."""
    match space:
        case spaces.Dict():
            return {name: in_structure(child, parts) for name, child in space.spaces.items()}
        case spaces.Tuple():
            return tuple(in_structure(child, parts) for child in space.spaces)
    return next(parts)


def _into_parts(space: Space, decode: Callable[[Any], Any], cast: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A function that decodes actions of `plain_actions` [k, n], and splits them into the parts, each [k, *shape]."""
    parts = disassemble(space, space)
    ends = np.cumsum([int(np.prod(part.shape, dtype=int)) for part in parts]).tolist()
    columns = [*zip(parts, [0, *ends], ends, strict=False)]  # each part, its first column, and the end

    def split(action: Any) -> list[Any]:
        flat = decode(action)
        return [cast(flat[:, i:j].reshape((len(flat), *part.shape)), part.dtype) for part, i, j in columns]

    return split


def batch_structure(
    space: Space, decode: Callable[[Any], Any], cast: Callable[[Any, Any], Any] = np.ndarray.astype
) -> Callable[[Any], Any]:
    """A function from flat actions [k, n] to the space's structure of [k, *shape], as vector environments take them."""
    split = _into_parts(space, decode, cast)
    return lambda action: in_structure(space, iter(split(action)))


def lane_structures(space: Space, decode: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """A function from flat actions [k, n] to k actions in the structure of their space."""
    split = _into_parts(space, decode, np.ndarray.astype)

    def by_lane(action: Any) -> list[Any]:
        columns = ([*map(np.asarray, part)] if part.dtype.kind == "f" else part for part in split(action))
        return [in_structure(space, iter(row)) for row in zip(*columns, strict=True)]  # numbers of a Box are arrays

    return by_lane

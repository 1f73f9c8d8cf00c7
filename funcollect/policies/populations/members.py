"""Members of a population: which of them act for which lanes, and one call for the rows of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from funcollect.errors import PolicyError

LaneIds = Sequence[int] | npt.NDArray[np.int64]  # neighbouring ids


@dataclass(frozen=True)
class MemberLanes:
    """Members in their order: the number of the first one, and for each the lanes for which it acts."""

    first: int
    lanes: tuple[int, ...]

    @classmethod
    def of_lanes(cls, size: int, lanes: LaneIds, total: int) -> Self:
        """The members of a population that act for these lanes out of `total`."""
        if total % size:
            raise PolicyError(
                f"a population of {size} acts in {total} lanes, expected a multiple of {size}: change num_envs, or the "
                "number of workers"
            )
        members = np.asarray(lanes) * size // total
        if members[-1] >= size:
            raise PolicyError(
                f"a population of {size} acts in the {total} lanes that its run began with, not in lanes added later: "
                "begin with all collectors"
            )
        return cls(int(members[0]), tuple(np.bincount(members - members[0]).tolist()))

    def rows(self, count: int) -> tuple[int, ...]:
        """How many rows each member has, out of `count`: of these lanes, or more for each of as many members."""
        members = len(self.lanes)
        if count == sum(self.lanes):
            return self.lanes
        if len(set(self.lanes)) > 1 or count % members:
            raise PolicyError(
                f"{members} members of a population were given {count} rows, expected as many for each: pass a multiple"
            )
        return (count // members,) * members


@dataclass(frozen=True)
class Tools:
    """The framework's functions that `answers` uses to call members."""

    leaves: Callable[[Any], list[Any]]
    map: Callable[..., Any]  # over the leaves of pytrees
    join: Callable[[Sequence[Any]], Any]  # along the first axis
    vmap: Callable[..., Any] | None  # None for a call for each member


def answers(tools: Tools, group: MemberLanes, call: Callable[..., Any], params: Any, inputs: Any) -> Any:
    """Return the answers [P, ...] of ``call(params, inputs)``, each member called for its own rows of `inputs`."""
    rows = group.rows(len(tools.leaves(inputs)[0]))
    members = range(group.first, group.first + len(rows))
    if tools.vmap and len(set(rows)) == 1:
        own = tools.map(lambda leaf: leaf[members.start : members.stop], params)
        folded = tools.map(lambda leaf: leaf.reshape(len(rows), rows[0], *leaf.shape[1:]), inputs)
        stacked = tools.vmap(call)(own, folded)
        return tools.map(lambda leaf: leaf.reshape(sum(rows), *leaf.shape[2:]), stacked)
    ends = np.cumsum((0, *rows)).tolist()
    parts = [
        call(tools.map(itemgetter(member), params), tools.map(itemgetter(slice(start, end)), inputs))
        for member, (start, end) in zip(members, pairwise(ends), strict=True)
    ]
    return tools.map(lambda *leaves: tools.join(leaves), *parts)


def size_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """N, the first axis of all parameters."""
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        raise ValueError(
            f"params have the first axes {sorted(sizes, key=str)}, expected the same one, the number of members: stack "
            "the parameters of the members, as torch.func.stack_module_state or jax.tree.map(jnp.stack, …) do"
        )
    (size,) = sizes
    assert size is not None
    return size

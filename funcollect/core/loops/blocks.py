"""The fused loop on a GPU or TPU: programs of a fixed number of steps, none of which waits for the host.

There, a loop to a traced length copies its condition to the host and waits at every step, and so does every branch. So
one program makes K steps; those beyond the rollout's length change nothing. It is called ``ceil(T / K)`` times
on memory that it may use again, and compiled once for all lengths; only what copies a block's rows into the columns is
compiled for each capacity.

Instead of a branch that makes starts where they are needed, each block begins with spare starts for every lane. A lane
that needs more than these sets a flag, which is read after the last block: the rollout then runs again, from its first
state, in the program with branches. Where a start costs about as little as a step it is made at each step instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from funcollect.core.state import CollectorState
from funcollect.core.traced_step.batch import recorded_step
from funcollect.core.traced_step.columns import bucket, constant_columns, empty_columns, recorded_row, write_row
from funcollect.core.traced_step.keys import run_keys
from funcollect.core.traced_step.starts import SPARES, SpareStarts, Traced, after_block, spare_starts, starts_are_cheap
from funcollect.core.traced_step.step import Row, StepConfig
from funcollect.envs.jax_envs.jax_env import JaxEnvState
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.protocols import BoundParams

_LONGEST_PAUSE = 64  # rollouts

Moved = tuple[Any, dict[Any, Any]]  # the environment's state and the observation: what a block is given to use again


@dataclass(frozen=True)
class BlockOptions:
    """How blocks are built. `benchmarks gpu` compares the values.

    Attributes:
        steps: the number of steps in a block, K.
        unroll: steps in each iteration of a block's loop.
        made_each_step: whether starts are made at each step; None decides by the operations of a reset.
        compiler_options: XLA's, by name.
    """

    steps: int = 32
    unroll: int = 1
    made_each_step: bool | None = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """What distinguishes the programs."""
        return self.steps, self.unroll, self.made_each_step, tuple(sorted(self.compiler_options.items()))


OPTIONS = BlockOptions()


class BlockLoop:
    """The programs of a rollout in blocks, for the static part of a request.

    Attributes:
        block: the program of K steps; the first two of its arguments are donated.
        has_spares: whether blocks begin with spare starts, which may not suffice.
    """

    def __init__(
        self,
        config: StepConfig,
        state: CollectorState,
        which: Hashable,
        *,
        place: Any = None,
        options: BlockOptions = OPTIONS,
    ) -> None:
        env, each = config.env, options.made_each_step
        each = starts_are_cheap(env, state.env_params) if each is None else each
        self.has_spares = env.starts == "fresh" and config.reset_when_done and not each
        self._steps = options.steps
        self._compiled = partial(compiled, config.policy, place=place)
        self._which = (which, options.key)
        more = {"compiler_options": dict(options.compiler_options)} if options.compiler_options else {}
        block = partial(_block, config, options, each)
        self.block = self._compiled(("block", self._which), block, donate_argnums=(0, 1), **more)
        self._empty = self._compiled(("rows", self._which), partial(_empty, config, options.steps))
        self._copy = self._compiled(("copy", self._which), _copy)
        self._pause = self._paused = 0  # rollouts that had better run in the program with branches

    def arguments(self, bound: BoundParams, state: CollectorState, length: int) -> tuple[Any, ...]:
        """The arguments of the first call of `block`; the donated ones are copies."""
        moved, rest = _apart(state)
        return self._copy(moved), self._empty(bound, state), rest, bound, np.int32(length), np.bool_(False)

    def __call__(
        self, bound: BoundParams, state: CollectorState, length: int, *, owned: bool = False
    ) -> tuple[CollectorState, Row] | None:
        """Return the next state and the columns, or None if lanes lack starts; an `owned` state is used again."""
        if self._paused:
            self._paused -= 1
            return None
        moved, rest = _apart(state)
        if self.has_spares or not owned:
            moved = self._copy(moved)
        rows = self._empty(bound, state)
        blocks = -(-length // self._steps)
        capacity = self._steps * (1 if blocks == 1 else bucket(blocks))
        constants, columns = self._compiled(("columns", self._which, capacity), partial(_columns, capacity))(rows, rest)
        left, short = np.int32(length), np.bool_(False)
        for first in range(0, length, self._steps):
            moved, rows, rest, left, short = self.block(moved, rows, rest, bound, left, short)
            if columns:
                write = self._compiled(("write", self._which, capacity), _write, donate_argnums=0)
                columns = write(columns, rows, np.int32(first))
        if self.has_spares and self._lacked(bool(short)):
            return None
        return rest.replace(env_state=moved[0], observation=moved[1]), (columns or rows) | constants

    def _lacked(self, short: bool) -> bool:
        """Note whether lanes lacked starts. Each time in a row doubles the rollouts until blocks are tried again."""
        self._pause = min(max(2 * self._pause, 1), _LONGEST_PAUSE) if short else 0
        self._paused = self._pause
        return short


def _apart(state: Traced) -> tuple[Moved, Traced]:
    """Return the large parts of a state, and the state without them."""
    return (state.env_state, dict(state.observation)), state.replace(env_state=None, observation={})


def _block(
    config: StepConfig,
    options: BlockOptions,
    made_each_step: bool,
    moved: Moved,
    rows: Row,
    rest: Traced,
    bound: BoundParams,
    left: Any,
    short: Any,
) -> tuple[Moved, Row, Traced, Any, Any]:
    """Trace K steps; the first `left` of them change the state."""
    jax = import_jax()
    before: JaxEnvState = moved[0]
    state = rest.replace(env_state=before.current, observation=moved[1])
    keys = run_keys(state.key, state.lane)
    since = state.episode
    spares = () if made_each_step else spare_starts(config.env, state, keys)

    def body(t: Any, carry: tuple[Traced, Row]) -> tuple[Traced, Row]:
        state, rows = carry
        lanes = SpareStarts(state.env_state, spares, since)  # `spares` and `since` stay outside of the carry
        after, row = recorded_step(config, bound, state.replace(env_state=lanes), keys)
        after = after.replace(env_state=after.env_state.current)
        kept = jax.tree.map(partial(jax.numpy.where, t < left), after, state)
        return kept, write_row(rows, row, t)

    state, rows = jax.lax.fori_loop(0, options.steps, body, (state, rows), unroll=options.unroll)
    begun = state.episode - since
    if spares and config.env.starts == "fresh":
        short = short | (begun > SPARES).any()
    lanes = after_block(config.env, before, state.env_state, begun > 0)
    moved, rest = _apart(state.replace(env_state=lanes))
    return moved, rows, rest, left - options.steps, short


def _copy(moved: Moved) -> Moved:
    copied: Moved = import_jax().tree.map(import_jax().numpy.copy, moved)
    return copied


def _empty(config: StepConfig, steps: int, bound: BoundParams, state: Traced) -> Row:
    """Trace rows of zeros, for what each of `steps` steps records."""
    return empty_columns(recorded_row(config, bound, state), steps)


def _columns(capacity: int, rows: Row, state: Traced) -> tuple[Row, Row]:
    """Trace the columns that are the same at each step, and empty ones for all others unless one block's rows do."""
    constants = constant_columns(state, capacity)
    steps = len(next(iter(rows.values())))
    return constants, {} if capacity == steps else empty_columns({path: row[0] for path, row in rows.items()}, capacity)


def _write(columns: Row, rows: Row, first: Any) -> Row:
    """Trace the columns with a block's rows written from row `first` on."""
    write = import_jax().lax.dynamic_update_slice_in_dim
    return {path: write(column, rows[path], first, 0) for path, column in columns.items()}

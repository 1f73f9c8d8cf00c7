"""The fused loop on a GPU or TPU: programs of a fixed number of steps, none of which waits for the host.

There, a loop to a traced length copies its condition to the host and waits at every step, and every branch waits, too.
So one program makes K steps; those beyond the rollout's length change nothing. A call costs the host as much as some
steps of many lanes, so K is the length itself, up to 256. A longer rollout is cut into equal blocks, by ``ceil(T / K)``
calls that reuse the same memory. Lengths within an eighth share a program.

A kernel takes a microsecond, however little it does. So a step writes its row by two kernels, into memory that all
leaves of a batch share (`PackedRows`), and the counter of steps is not carried. Instead of a branch that makes starts
where they are needed, each block begins with spare starts for every lane. A lane that needs more sets a flag, which is
read after the last block; the rollout then runs again in the program with branches. Cheap starts are made at each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from funcollect.core.state import CollectorState
from funcollect.core.traced_step.columns import PackedRows, bucket, constant_columns, recorded_step, row_form, write_row
from funcollect.core.traced_step.step import SPARES, SpareStarts, StepConfig, Traced, begin, run_keys, starts_are_cheap
from funcollect.envs.jax_envs.jax_env import JaxEnvState
from funcollect.interop import words
from funcollect.interop.bridge import opened, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.protocols import BoundParams
from funcollect.tree import Path

MOST_STEPS = 256  # of a block
_UNROLL = 4  # an iteration costs the device some microseconds, beside its steps
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # rollouts without blocks after one whose lanes lacked starts

Packed = dict[str, Any]  # as `PackedRows` packs a row, or columns
Moved = tuple[Any, dict[Any, Any]]  # the environment's state and the observation: donated to each block


class BlockOptions(NamedTuple):
    """How blocks are built. `benchmarks gpu` compares the values."""

    steps: int | None = None  # in a block, K; None decides by the rollout's length
    # steps in each iteration of a block's loop; None for 4 if starts are made at each step, since steps are short
    # then, and K is 8, 12, 16, …; else 1
    unroll: int | None = None
    made_each_step: bool | None = None  # whether starts are; None decides by the operations of a reset
    compiler_options: Mapping[str, Any] = MappingProxyType({})  # XLA's, by name


OPTIONS = BlockOptions()


def steps_per_block(length: int) -> int:
    """K for a rollout of `length` steps.

    >>> [steps_per_block(length) for length in (1, 5, 100, 250, 256, 257, 1000)]
    [2, 5, 104, 256, 256, 144, 256]
    """
    return bucket(-(-length // -(-length // MOST_STEPS)))


class BlockLoop:
    """The programs of a rollout in blocks, for the static part of a request."""

    def __init__(
        self, config: StepConfig, bound: BoundParams, state: Traced, which: Hashable, place: Any, options: BlockOptions
    ) -> None:
        env, each = config.env, options.made_each_step
        self._made_each_step = starts_are_cheap(env, state.env_params) if each is None else each
        # whether blocks begin with spare starts, which may not suffice
        self.has_spares = env.starts == "fresh" and config.options.reset_when_done and not self._made_each_step
        self._config, self._options, self._place = config, options, place
        self._layout = PackedRows(row_form(config, bound, state))
        self._which = which
        self._counters: dict[int, tuple[Any, Any, Any]] = {}  # by length
        self._pause = self._paused = 0  # rollouts to run in the program with branches: the last pause, and what is left

    def block(self, steps: int) -> Any:
        """The program of K steps of a longer rollout; its first two arguments are donated."""
        return self._program("block", self._block, steps, donate_argnums=(0, 1))

    def one_block(self, steps: int, *, owned: bool) -> Any:
        """The program of a rollout of one block; it takes the arguments of a `block`, without memory for rows."""
        donated = (0,) if owned and not self.has_spares else ()
        return self._program(("one block", donated), self._one_block, steps, donate_argnums=donated)

    def __call__(
        self, bound: BoundParams, state: CollectorState, length: int, *, owned: bool = False
    ) -> tuple[CollectorState, dict[Path, Tensor]] | None:
        """Return the next state and the columns, or None if lanes lack starts; an `owned` state's memory is reused."""
        if self._paused:
            self._paused -= 1
            return None
        steps = self._options.steps or steps_per_block(length)
        moved, rest = _apart(state)
        left, short, first = self._begun(length)
        if length <= steps:  # by one program: a call costs the host as much as some steps
            run = self.one_block(steps, owned=owned)
            moved, rest, short, constants, columns = run(moved, rest, bound, left, short)
        else:  # by several over the same memory
            blocks = -(-length // steps)
            keep = self.has_spares or not owned
            moved, (constants, rows, columns) = self._begin(steps, blocks, keep=keep)(moved, rest)
            block = self.block(steps)
            write = self._compiled(("write", steps, bucket(blocks)), _write, donate_argnums=0)
            for _ in range(blocks):
                moved, rows, rest, left, short = block(moved, rows, rest, bound, left, short)
                columns, first = write(columns, rows, first)
        if self.has_spares:  # each time in a row that lanes lack starts, more rollouts pass until the next attempt
            self._pause = min(max(4 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE) if bool(short) else 0
            self._paused = self._pause
            if self._paused:
                return None
        leaves = self._layout.unpack({name: torch_view(column) for name, column in columns.items()})
        leaves |= {path: torch_view(column) for path, column in constants.items()}
        return rest.changed(env_state=moved[0], observation=moved[1]), leaves

    def _program(self, which: Hashable, function: Any, steps: int, **options: Any) -> Any:
        whole = steps % _UNROLL == 0 and steps > _UNROLL  # else steps beside the loop might be rounded otherwise
        unroll = self._options.unroll or (_UNROLL if self._made_each_step and whole else 1)
        if self._options.compiler_options:
            options["compiler_options"] = dict(self._options.compiler_options)
        return self._compiled((which, steps), partial(function, steps, unroll), **options)

    def _compiled(self, which: Hashable, function: Any, **options: Any) -> Any:
        return compiled(self._config.policy, (which, self._which), function, place=self._place, **options)

    def _begin(self, steps: int, blocks: int, *, keep: bool) -> Any:
        """The program that makes memory for rows and columns, and copies what blocks use up if they must `keep` it."""
        zeros, capacity, jax = self._layout.zeros, steps * bucket(blocks), import_jax()

        def begin(rest: Traced) -> tuple[dict[Path, Any], Packed, Packed]:
            return constant_columns(rest, capacity), zeros(steps), zeros(capacity)

        if keep:
            which = ("begin", steps, bucket(blocks))
            return self._compiled(which, lambda moved, rest: (jax.tree.map(jax.numpy.copy, moved), begin(rest)))
        make = self._compiled(("memory", steps, bucket(blocks)), begin)
        return lambda moved, rest: (moved, make(rest))

    def _begun(self, length: int) -> tuple[Any, Any, Any]:
        """The counters before the first block: steps left, whether lanes lack starts, and the first row to write."""
        if length not in self._counters:
            numbers = np.int32(length), np.bool_(False), np.int32(0)
            self._counters[length] = import_jax().device_put(numbers, self._place)
        return self._counters[length]

    def _block(
        self, steps: int, unroll: int, moved: Moved, rows: Packed, rest: Traced, bound: Any, left: Any, short: Any
    ) -> tuple[Moved, Packed, Traced, Any, Any]:
        """Trace K steps; only the first `left` of them change the state."""
        jax, config, layout = import_jax(), self._config, self._layout
        before: JaxEnvState = moved[0]
        state = rest.changed(env_state=before.current, observation=moved[1])
        bound, keys = opened(bound), run_keys(state.key, state.lane)
        env, since, begun_at = config.env, state.episode, state.steps
        count = SPARES if env.starts == "fresh" else 1  # 1 if all episodes of a lane start alike
        count = 0 if self._made_each_step else count
        spares = tuple(begin(env, keys, state.lane, since + 1 + i, state.env_params) for i in range(count))

        def body(t: Any, carry: tuple[Traced, Packed]) -> tuple[Traced, Packed]:
            state, rows = carry
            lanes = SpareStarts(state.env_state, spares, since)  # `spares` and `since` stay outside of the carry
            current = state.changed(env_state=lanes, steps=words.add(begun_at, t))
            after, row = recorded_step(config, bound, current, keys)
            after = after.changed(env_state=after.env_state.current, steps=begun_at)
            kept = jax.tree.map(partial(jax.numpy.where, t < left), after, state)
            return kept, write_row(rows, layout.pack(row), t)

        state, rows = jax.lax.fori_loop(0, steps, body, (state, rows), unroll=unroll)
        begun = state.episode - since
        if spares and env.starts == "fresh":
            short = short | (begun > SPARES).any()
        used = before.next_start_used | ((begun > 0) & (env.starts == "fresh"))
        lanes = before._replace(current=state.env_state, next_start_used=used)
        made = words.add(begun_at, jax.numpy.clip(left, 0, steps))
        moved, rest = _apart(state.changed(env_state=lanes, steps=made))
        return moved, rows, rest, left - steps, short

    def _one_block(
        self, steps: int, unroll: int, moved: Moved, rest: Traced, bound: BoundParams, left: Any, short: Any
    ) -> tuple[Moved, Traced, Any, dict[Path, Any], Packed]:
        constants, rows = constant_columns(rest, steps), self._layout.zeros(steps)
        moved, rows, rest, _, short = self._block(steps, unroll, moved, rows, rest, bound, left, short)
        return moved, rest, short, constants, rows


def _apart(state: Traced) -> tuple[Moved, Traced]:
    """Return the large parts of a state, and the state without them."""
    return (state.env_state, dict(state.observation)), state.changed(env_state=None, observation={})


def _write(columns: Packed, rows: Packed, first: Any) -> tuple[Packed, Any]:
    """Trace the columns with a block's rows written from row `first` on, and the row after them."""
    write = import_jax().lax.dynamic_update_slice_in_dim
    steps = len(next(iter(rows.values())))
    return {name: write(columns[name], rows[name], first, 0) for name in columns}, first + steps

"""Recurrent cells, and layers by `lax.scan` over time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Rule, Table
from funcollect.interop.lowering.operators.linear import linear

jax = import_jax()
jnp, lax, nn = jax.numpy, jax.lax, jax.nn

Cell = Callable[[Any, Any, Any], Any]  # the input's gates, the hidden state's gates, the state -> the next state


def _gru(from_input: Any, from_hidden: Any, hidden: Any) -> Any:
    reset_in, update_in, new_in = jnp.split(from_input, 3, -1)
    reset_hid, update_hid, new_hid = jnp.split(from_hidden, 3, -1)
    update = nn.sigmoid(update_in + update_hid)
    new = jnp.tanh(new_in + nn.sigmoid(reset_in + reset_hid) * new_hid)
    return new + update * (hidden - new)


def _lstm(from_input: Any, from_hidden: Any, state: Any) -> Any:
    entry, forget, new, output = jnp.split(from_input + from_hidden, 4, -1)
    cell = nn.sigmoid(forget) * state[1] + nn.sigmoid(entry) * jnp.tanh(new)
    return nn.sigmoid(output) * jnp.tanh(cell), cell


def _elman(activation: Callable[[Any], Any]) -> Cell:
    return lambda from_input, from_hidden, hidden: activation(from_input + from_hidden)


def _hidden(state: Any) -> Any:
    return state[0] if isinstance(state, tuple) else state


def _step(cell: Cell, x: Any, state: Any, w_in: Any, w_hid: Any, b_in: Any = None, b_hid: Any = None) -> Any:
    """The state after one step of a cell, from an input [B, in] and a state [B, hidden], or two of an LSTM."""
    state = tuple(state) if isinstance(state, list) else state  # of an LSTM
    return cell(linear(x, w_in, b_in), linear(_hidden(state), w_hid, b_hid), state)


def _run(cell: Cell, x: Any, state: Any, weights: list[Any], reverse: bool) -> tuple[Any, Any]:
    """One layer in one direction [T, B, in] -> [T, B, hidden], and the last state."""
    w_in, w_hid, b_in, b_hid = weights[:4]
    from_input = linear(x, w_in, b_in)  # one product for all steps

    def step(state: Any, gates: Any) -> tuple[Any, Any]:
        state = cell(gates, linear(_hidden(state), w_hid, b_hid), state)
        if len(weights) > 4:  # an LSTM with a projection
            state = (linear(state[0], weights[4]), *state[1:])
        return state, _hidden(state)

    if from_input.shape[0] == 1:
        state, output = step(state, from_input[0])
        return output[None], state
    state, outputs = lax.scan(step, state, from_input, reverse=reverse)
    return outputs, state


def _layers(
    cell: Cell,
    x: Any,
    states: Any,
    params: list[Any],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """Layers over time: the outputs, and the last states, stacked over layers and directions."""
    if train and dropout and layers > 1:
        raise ValueError("it drops activations between its layers in training mode: call module.eval() first")
    swapped = batch_first and x.ndim == 3
    states = tuple(states) if isinstance(states, list) else states  # of an LSTM
    x = jnp.swapaxes(x, 0, 1) if swapped else x
    directions = 1 + both_ways
    size = len(params) // (layers * directions)
    last = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            run = layer * directions + direction
            given = params[run * size : (run + 1) * size]
            weights = given if biased else [*given[:2], None, None, *given[2:]]
            state = jax.tree.map(lambda each, run=run: each[run], states)
            output, state = _run(cell, x, state, weights, reverse=bool(direction))
            outputs.append(output)
            last.append(state)
        x = jnp.concatenate(outputs, -1)
    x = jnp.swapaxes(x, 0, 1) if swapped else x
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *last)
    return (x, *stacked) if isinstance(stacked, tuple) else (x, stacked)


_CELLS = {"gru": _gru, "lstm": _lstm, "rnn_tanh": _elman(jnp.tanh), "rnn_relu": _elman(nn.relu)}
TABLE: Table = {
    **{f"{name}.input": Rule(partial(_layers, cell), weights=(2,)) for name, cell in _CELLS.items()},
    **{f"{name}_cell": Rule(partial(_step, cell), weights=(2, 3)) for name, cell in _CELLS.items()},
}

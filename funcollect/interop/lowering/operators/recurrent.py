"""Recurrent cells, and layers by `lax.scan` over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

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


def _tanh(from_input: Any, from_hidden: Any, hidden: Any) -> Any:
    return jnp.tanh(from_input + from_hidden)


def _relu(from_input: Any, from_hidden: Any, hidden: Any) -> Any:
    return nn.relu(from_input + from_hidden)


def _hidden(state: Any) -> Any:
    return state[0] if isinstance(state, tuple) else state


def _gates(x: Any, weight: Any, bias: Any) -> Any:
    product = jnp.matmul(x, weight.T)
    return product if bias is None else product + bias


def _step(cell: Cell) -> Callable[..., Any]:
    def step(x: Any, state: Any, w_in: Any, w_hid: Any, b_in: Any = None, b_hid: Any = None) -> Any:
        """One step [B, in], [B, hidden] -> [B, hidden]."""
        state = tuple(state) if isinstance(state, (list, tuple)) else state
        return cell(_gates(x, w_in, b_in), _gates(_hidden(state), w_hid, b_hid), state)

    return step


def _run(cell: Cell, x: Any, state: Any, weights: list[Any], reverse: bool) -> tuple[Any, Any]:
    """One layer in one direction [T, B, in] -> [T, B, hidden]; the last state. The inputs' gates are one product."""
    w_in, w_hid, b_in, b_hid = weights[:4]
    from_input = _gates(x, w_in, b_in)

    def step(state: Any, gates: Any) -> tuple[Any, Any]:
        state = cell(gates, _gates(_hidden(state), w_hid, b_hid), state)
        if len(weights) > 4:  # an LSTM with a projection
            state = (jnp.matmul(state[0], weights[4].T), *state[1:])
        return state, _hidden(state)

    if from_input.shape[0] == 1:
        state, output = step(state, from_input[0])
        return output[None], state
    state, outputs = lax.scan(step, state, from_input, reverse=reverse)
    return outputs, state


def _layers(
    cell: Cell, x: Any, states: Any, params: list[Any], biased: bool, layers: int, both: bool, batch_first: bool
) -> tuple[Any, Any]:
    """Every layer; states and last states stacked over layers and directions."""
    x = jnp.swapaxes(x, 0, 1) if batch_first and x.ndim == 3 else x
    runs = layers * (1 + both)
    size = len(params) // runs
    last = []
    for layer in range(layers):
        outputs = []
        for direction in range(1 + both):
            run = layer * (1 + both) + direction
            given = params[run * size : (run + 1) * size]
            weights = given if biased else [*given[:2], None, None, *given[2:]]
            state = jax.tree.map(lambda each, run=run: each[run], states)
            output, state = _run(cell, x, state, weights, reverse=bool(direction))
            outputs.append(output)
            last.append(state)
        x = jnp.concatenate(outputs, -1)
    x = jnp.swapaxes(x, 0, 1) if batch_first and x.ndim == 3 else x
    return x, jax.tree.map(lambda *each: jnp.stack(each), *last)


def _module(cell: Cell) -> Callable[..., Any]:
    def module(
        x: Any, state: Any, params: Any, biased: bool, layers: int, p: float, train: bool, both: bool, first: bool
    ) -> Any:
        """Layers over time: the outputs and the last states."""
        if train and p and layers > 1:
            raise ValueError("it drops activations between its layers in training mode: call module.eval() first")
        states = tuple(state) if isinstance(state, (list, tuple)) else state
        outputs, last = _layers(cell, x, states, params, biased, layers, both, first)
        return (outputs, *last) if isinstance(last, tuple) else (outputs, last)

    return module


def _register() -> None:
    for name, cell in {"gru": _gru, "lstm": _lstm, "rnn_tanh": _tanh, "rnn_relu": _relu}.items():
        operator(f"{name}.input", weights=(2,))(_module(cell))
        operator(f"{name}_cell.default", weights=(2, 3))(_step(cell))


_register()

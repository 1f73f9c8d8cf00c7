"""A JAX policy's step as one jitted call: few arguments in, one array out, since each costs a microsecond or more.

Also the noise of policies in traced code: the numbers that `funcollect.keys.draw_ahead` draws on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from funcollect.errors import PolicyError
from funcollect.interop.bridge import jax_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memory import aligned
from funcollect.keys import Noise
from funcollect.policies.checks import check_action, check_rows
from funcollect.policies.numerics import of_kind
from funcollect.protocols import ActorInputs, Columns
from funcollect.threefry import Pair, hashed_in_jax

Words = npt.NDArray[np.int32]
# (bound parameters, state, observation, noise or a function that draws it) -> (next state, outputs)
TracedCall = Callable[[Any, Any, Any, Any], tuple[Any, dict[str, Any]]]
Draw = Callable[[int], Any]  # draws so many words for each lane: width -> uint32 [width, P]

PROBE = "what the head reads"  # an output [P] that is NaN if a head's inputs are, for heads without a log-probability

_LARGEST_VECTOR = 1 << 16  # floats


class StepProgram:
    """The jitted step of a policy for one action space and number of lanes; small parameters are passed as one vector.

    It is ``step(params, buffer, policy_state, others)`` and returns the next state and the packed outputs; for a
    `plain` policy without a state and `others`, ``step(params, buffer)``, which returns the outputs alone.
    """

    def __init__(self, answer: TracedCall, actor_inputs: ActorInputs) -> None:
        jax = import_jax()
        noise = None if actor_inputs.noise is None else actor_inputs.noise[0].numpy()
        arguments = (actor_inputs.bound, actor_inputs.policy_state, actor_inputs.observation, noise)
        shapes = jax.eval_shape(answer, *arguments)[1]
        check_action(shapes["action"], actor_inputs.spec, actor_inputs.num_envs)
        self.outputs = PackedOutputs(shapes, actor_inputs.num_envs)
        self._ravel, unravel = _as_vector(actor_inputs.bound)
        self._raveled: tuple[Any, Any, Any] | None = None
        inputs = PackedInputs(actor_inputs)

        def step(params: Any, buffer: Any, policy_state: Any, others: list[Any]) -> tuple[Any, Any]:
            observation, drawn = inputs.unpack(buffer, others)
            policy_state, outputs = answer(unravel(params), policy_state, observation, drawn)
            return policy_state, self.outputs.pack(outputs)

        self.plain = actor_inputs.policy_state is None and not inputs.others
        self.step = jax.jit(lambda params, buffer: step(params, buffer, None, [])[1]) if self.plain else jax.jit(step)

    def params(self, actor_inputs: ActorInputs) -> Any:
        """The bound parameters as `step` takes them, laid out once per version."""
        params, values, last = actor_inputs.params, actor_inputs.exploration.values, self._raveled
        if last is None or last[0] is not params or per_lane(actor_inputs) or last[1] != values:
            last = self._raveled = (params, values, self._ravel(actor_inputs.bound))
        return last[2]  # another thread may have laid out others meanwhile


def per_lane(actor_inputs: ActorInputs) -> tuple[str, ...]:
    """The names of the exploration values that are arrays [P] instead of numbers."""
    return tuple([name for name, value in actor_inputs.exploration.values.items() if not isinstance(value, float)])


def _as_vector(params: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Functions from a few small float32 parameters to one vector and back; others stay a pytree of JAX arrays."""
    jax = import_jax()
    from jax.flatten_util import ravel_pytree

    leaves = jax.tree.leaves(params)
    small = len(leaves) > 1 and sum(math.prod(np.shape(leaf)) for leaf in leaves) <= _LARGEST_VECTOR
    if not small or any(getattr(leaf, "dtype", None) != np.float32 for leaf in leaves):
        return partial(jax.tree.map, jax.numpy.asarray), (lambda tree: tree)  # exploration values are NumPy scalars
    return jax.jit(lambda tree: ravel_pytree(tree)[0]), ravel_pytree(params)[1]


def _carrier(dtype: np.dtype[Any]) -> Any:
    """The 32- or 64-bit dtype in which values of `dtype` travel without loss; bfloat16 is of kind V."""
    if dtype.itemsize == 8 or dtype == np.uint32:
        return dtype
    return np.float32 if dtype.kind in "fV" else np.int32


class PackedOutputs:
    """A lane's outputs as a row of words, the action first, so that one read-back brings all of them to the host."""

    def __init__(self, outputs: Mapping[str, Any], num_envs: int) -> None:
        check_rows(outputs, num_envs)
        names = sorted(outputs, key=lambda name: (name != "action", name))
        self.dtypes = {name: np.dtype(outputs[name].dtype) for name in names}
        if wrong := [name for name, dtype in self.dtypes.items() if dtype.kind == "c"]:
            raise PolicyError(f"the policy's outputs {wrong} are complex, expected real numbers: return two for each")
        self.row = np.dtype([(name, _carrier(dtype), outputs[name].shape[1:]) for name, dtype in self.dtypes.items()])

    def pack(self, outputs: Mapping[str, Any]) -> Any:
        """The outputs as int32 words [P, width]; traced."""
        jax = import_jax()
        parts = []
        for name in self.dtypes:
            value = outputs[name].astype(self.row[name].base)
            words = value if value.dtype == np.int32 else jax.lax.bitcast_convert_type(value, np.int32)
            parts.append(words.reshape(value.shape[0], -1))
        return jax.numpy.concatenate(parts, -1)

    def unpack(self, words: Words, name: str) -> npt.NDArray[Any]:
        """One output [..., *shape] from words [..., width], in new memory; bfloat16, which NumPy lacks, as float32."""
        dtype = self.dtypes[name]
        return words.view(self.row)[..., 0][name].astype(np.float32 if dtype.kind == "V" else dtype)

    def columns(self, words: Words) -> Columns:
        """All outputs as tensors, of the dtypes in which the policy returned them."""
        tensors = {name: torch.from_numpy(self.unpack(words, name)) for name in self.dtypes}
        halves = {name: column.bfloat16() for name, column in tensors.items() if self.dtypes[name].name == "bfloat16"}
        return {(name,): column for name, column in (tensors | halves).items()}


class PackedInputs:
    """The observation and the noise of a step as a jitted call reads them: 32-bit words in one buffer, and `others`.

    One transfer is cheaper than several.
    """

    def __init__(self, inputs: ActorInputs) -> None:
        leaves, self._treedef = import_jax().tree.flatten(inputs.observation)
        self._are_words = [bool(np.dtype(leaf.dtype).itemsize == 4) for leaf in leaves]
        self.others = [leaf for leaf, is_word in zip(leaves, self._are_words, strict=True) if not is_word]
        sources = list(itertools.compress(leaves, self._are_words))
        arrays = sources if inputs.noise is None else [*sources, inputs.noise[0].numpy()]
        ends = list(itertools.accumulate((array.size for array in arrays), initial=0))
        self.buffer = aligned((ends[-1],), np.dtype(np.int32))
        places = itertools.starmap(slice, itertools.pairwise(ends))
        self._layout = [(where, array.shape, array.dtype) for where, array in zip(places, arrays, strict=True)]
        views = [self.buffer[where].view(dtype).reshape(shape) for where, shape, dtype in self._layout]
        self._copies = list(zip(views, sources, strict=False))
        self._noise = views[len(sources) :]

    def fill(self, noise: npt.NDArray[Any] | None) -> None:
        """Copy the current contents of the sources, and this step's noise, into the buffer."""
        for view, source in self._copies:
            view[...] = source
        for view in self._noise:
            view[...] = noise

    def argument(self, params: Any) -> Any:
        """The buffer as an argument beside `params`; if they are on JAX's CPU, as a JAX array over it, for speed."""
        jax = import_jax()
        cpu = set(jax.local_devices(backend="cpu")[:1])
        on_cpu = jax.default_backend() == "cpu" and all(leaf.devices() == cpu for leaf in jax.tree.leaves(params))
        return jax_view(torch.from_numpy(self.buffer)) if on_cpu else self.buffer

    def unpack(self, buffer: Any, others: Sequence[Any]) -> tuple[Any, Any]:
        """The observation, and the noise or None; traced."""
        bitcast = import_jax().lax.bitcast_convert_type
        words = (bitcast(buffer[where], dtype).reshape(shape) for where, shape, dtype in self._layout)
        rest = iter(others)
        leaves = [next(words) if is_word else next(rest) for is_word in self._are_words]
        return import_jax().tree.unflatten(self._treedef, leaves), next(words, None)


def drawing(keys: Pair, steps: Any) -> Draw:
    """A function that draws with the lanes' keys [P] at the step with the number `steps` [2], low word first."""

    def words(width: int) -> Any:  # lanes are the last dimension: XLA then uses the processor's vectors
        jnp = import_jax().numpy
        number = jnp.arange(width, dtype=jnp.uint32)[:, None]
        first, second = hashed_in_jax(keys, (1 + number // 2) | steps[1] << np.uint32(16), steps[0])
        return jnp.where(number % 2 == 0, first, second)

    return words


def draw_noise(noise: Noise, draw: Draw) -> Any:
    """The noise of one step: [P, *shape] float32, or uint32 keys [P, 2] or [2]."""
    words = draw(noise.words)
    if noise.kind in ("key", "keys"):
        return words[:, 0] if noise.kind == "key" else words.T
    centred = (words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)
    return of_kind(noise, centred * np.float32(2.0**-23)).T.reshape(-1, *noise.shape)


def split_key(words: Any, num_envs: int) -> tuple[Any, Draw]:
    """Another key like `words`, [2] or [P, 2], for a function's own use, and independent draws for P lanes."""
    jnp = import_jax().numpy
    pair, zero = (words[..., 0], words[..., 1]), np.uint32(0)
    lanes = np.arange(1, 1 + num_envs, dtype=np.uint32) if words.ndim == 1 else np.uint32(1)
    key = jnp.stack(hashed_in_jax(pair, zero, zero), -1)
    return key, drawing(hashed_in_jax(pair, zero, lanes), np.zeros(2, np.uint32))

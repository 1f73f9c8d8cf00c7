"""Passes arrays between JAX and Torch by DLPack: without a copy where that is safe, never with a changed value."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils.dlpack
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.arguments import check_flags
from funcollect.errors import BridgeError
from funcollect.interop.jax_setup import compiled, import_jax, with_jax
from funcollect.messages import clipped, shown
from funcollect.tree import flatten, nest

_NARROW = {torch.int64: (torch.int32, -(2**31), 2**31 - 1), torch.uint64: (torch.uint32, 0, 2**32 - 1)}


def torch_view(array: Any) -> Tensor:
    """A tensor over the memory of a JAX array, which it keeps alive; nothing is checked."""
    return torch.utils.dlpack.from_dlpack(array)


def jax_view(tensor: Tensor) -> Any:
    """A JAX array over the memory of a tensor, which it keeps alive; nothing is checked.

    On an accelerator JAX waits for the work in Torch's current stream of that device.
    """
    with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
        return import_jax().dlpack.from_dlpack(tensor)


def follow_torch(device: Any) -> None:
    """Make JAX's programs on a device wait for Torch's work there, which may still read memory that it has freed."""
    stream = _stream_of_torch(device)
    if stream and not stream.query():  # else there is nothing to wait for
        wait = compiled(follow_torch, "wait", lambda signal: signal + 1)
        wait(jax_view(torch.zeros(1, device=stream.device)))


@contextlib.contextmanager
def torch_followed(device: Any) -> Iterator[None]:
    """Call `follow_torch` at the end of a block in which Torch copies tensors that JAX's programs read.

    If Torch had nothing else to do, the host waits for the copy, which is cheaper than making JAX's stream wait.
    """
    stream = _stream_of_torch(device)
    idle = stream is not None and stream.query()
    try:
        yield
    finally:
        if stream and idle:
            stream.synchronize()
        else:
            follow_torch(device)


def _stream_of_torch(device: Any) -> torch.cuda.Stream | None:
    """Torch's current stream on a device of JAX; None unless it is a GPU that Torch uses."""
    if device.platform != "gpu" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_stream(torch.device("cuda", device.local_hardware_id))


def argument(tensor: Tensor) -> Any:
    """A tensor as an argument of a compiled call, over its memory if possible; BridgeError if a value would change.

    Wait for the end of the call, since the tensor may be written afterwards. On the CPU the argument is a NumPy array,
    which is cheaper than an array of JAX and not committed to a device.
    """
    tensor = tensor.detach()
    if tensor.is_cuda and import_jax().default_backend() == "gpu":
        return to_jax(tensor)
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:  # a dtype that JAX adds to NumPy
        return tensor.view(torch.int16).numpy().view(import_jax().numpy.bfloat16)
    return (_narrowed("the tensor", tensor).resolve_conj() if is_wide(tensor) else tensor).numpy()


def is_wide(tensor: Tensor) -> bool:
    """Whether the tensor's numbers have 64 bits, which JAX lacks by default."""
    return tensor.element_size() == 8 * (1 + tensor.is_complex())


def to_torch(tree: Any, *, batch_size: tuple[int, ...] = (), copy: bool = False) -> Any:
    """JAX arrays as Torch tensors on the same device.

    The tensors share the arrays' memory, and JAX takes arrays to be constant: do not write the tensors, and do not
    donate the arrays. Pass ``copy=True`` for tensors to write. The memory lives as long as either side refers to it.

    Args:
        tree: an array, or a nested dict of arrays, which becomes a TensorDict: bool, (u)int8 to (u)int64, float16,
            bfloat16, float32, float64, complex64, complex128, of any shape.
        batch_size: the batch size of the TensorDict: the first dimensions of each array.
        copy: whether to copy every array.

    Raises:
        TypeError: for a leaf that is no array, a typed PRNG key, or a value inside a traced function.
        BridgeError: for an array that was donated or deleted, lies on several devices, or has a dtype that Torch lacks.

    >>> import jax.numpy as jnp
    >>> to_torch({"a": jnp.zeros((2, 3)), "b": {"c": jnp.ones(2, bool)}}, batch_size=(2,))["b", "c"]
    tensor([True, True])
    """
    check_flags(copy=copy)
    if not isinstance(batch_size, tuple) or not all(isinstance(size, int) for size in batch_size):
        raise TypeError(f"batch_size is {shown(batch_size)}, expected a tuple of ints: pass for example (8, 128)")
    if not isinstance(tree, Mapping):
        return _to_torch("the array", tree, copy)
    leaves = {path: _to_torch(f"leaf {'.'.join(path)!r}", leaf, copy) for path, leaf in flatten(tree).items()}
    return TensorDict(nest(leaves), batch_size=batch_size)


def to_jax(tree: Any, *, copy: bool = False) -> Any:
    """Torch tensors as JAX arrays on the same device.

    The arrays share the tensors' memory where possible, and JAX takes arrays to be constant: do not write the tensors
    afterwards. Pass ``copy=True`` for tensors that will be written, such as parameters in training. Some tensors are
    always copied: those that are not contiguous; on the CPU, those whose memory does not begin at a multiple of 64
    bytes; and, where JAX has 32 bits (its default), 64-bit integers, which become 32-bit ones. Those of any size pass
    as pairs of 32-bit words, without a copy: `funcollect.interop.words.as_words`. Tensors are detached.

    The arrays are committed to their device, in JAX's terms. A jitted function is compiled once for committed arguments
    and once for others: commit its other arguments as well, by ``jax.device_put(x, device)``.

    Args:
        tree: a tensor, or a TensorDict or nested dict of tensors, which becomes a nested dict.
        copy: whether to copy every tensor.

    Raises:
        TypeError: for a leaf that is no dense tensor, such as the data that a TensorDict keeps as `NonTensorData`.
        BridgeError: for a value that would change (an integer that does not fit into 32 bits, float64 or complex128
            under 32-bit JAX), or for a dtype that JAX lacks.

    >>> import torch
    >>> to_jax({"a": torch.arange(3)})["a"].dtype
    dtype('int32')
    """
    check_flags(copy=copy)
    if not isinstance(tree, (Mapping, TensorDictBase)):
        return _to_jax("the tensor", tree, copy)
    return nest({path: _to_jax(f"leaf {'.'.join(path)!r}", leaf, copy) for path, leaf in flatten(tree).items()})


def _to_torch(name: str, array: Any, copy: bool) -> Tensor:
    """One JAX array as a tensor over its memory, or a copy; `name` is for messages, and `to_torch` lists the errors."""
    jax = import_jax()
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected an array: call to_torch outside of jit, vmap and grad")
    if not isinstance(array, jax.Array):
        raise TypeError(f"{name} is {type(array).__name__}, expected a jax.Array: make one with jax.numpy.asarray")
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} is a typed PRNG key, expected an array of numbers: pass jax.random.key_data(key)")
    if array.is_deleted():
        raise BridgeError(f"{name} was donated or deleted, expected a live array: export it before, or don't donate it")
    if len(array.devices()) > 1:
        raise BridgeError(f"{name} lies on {len(array.devices())} devices, expected one: gather it with jax.device_put")
    tensor: Tensor = _crossed(torch_view, array, name, array.dtype, "Torch")
    return tensor.clone() if copy else tensor


def _to_jax(name: str, tensor: Any, copy: bool) -> Any:
    """One tensor as a JAX array, over its memory if possible; `name` is for messages, and `to_jax` lists the errors."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} is {_kind(tensor)}, expected a torch.Tensor, or a dict or TensorDict of them: convert it with "
            "torch.as_tensor, or make a dict of a tuple or list"
        )
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"{name} is no dense tensor ({tensor.layout}, {tensor.device}): make one, e.g. by to_dense()")
    dense = _narrowed(name, tensor.detach()).resolve_conj().resolve_neg().contiguous()
    if copy and dense.data_ptr() == tensor.data_ptr():
        dense = dense.clone()
    return _crossed(jax_view, dense, name, tensor.dtype, "JAX")


def _crossed(view: Callable[[Any], Any], array: Any, name: str, dtype: Any, to: str) -> Any:
    """The array in the framework `to`; BridgeError if DLPack refuses it."""
    try:
        return view(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = clipped(str(error).splitlines()[0], 200)
        raise BridgeError(f"{name} is {dtype}, which did not cross to {to} ({reason}): cast it") from error


def _kind(leaf: Any) -> str:
    """The type of a leaf, as text; a TensorDict silently wraps whatever is no tensor, such as JAX arrays."""
    data = getattr(leaf, "data", None) if type(leaf).__name__ == "NonTensorData" else None
    kind = type(leaf if data is None else data)
    wrapped = "" if data is None else "NonTensorData that holds "
    return f"{wrapped}{kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def _narrowed(name: str, tensor: Tensor) -> Tensor:
    """Cast a tensor to the dtype that JAX has for it; BridgeError if that does not hold every value."""
    if tensor.dtype in (torch.float64, torch.complex128) and not _has_64_bits():
        half = "float()" if tensor.dtype == torch.float64 else "to(torch.complex64)"
        raise BridgeError(
            f"{name} is {tensor.dtype}, JAX has 32 bits here and would round it: cast it with .{half}, or turn 64 bits "
            "on with jax.config.update('jax_enable_x64', True)"
        )
    if tensor.dtype not in _NARROW or _has_64_bits():
        return tensor
    dtype, low, high = _NARROW[tensor.dtype]
    signed = tensor.view(torch.int64)
    if wrong := signed[beyond_32_bits(tensor)].flatten()[:1].tolist():
        value = wrong[0] % 2**64 if tensor.dtype == torch.uint64 else wrong[0]
        raise BridgeError(
            f"{name} holds {value}, expected numbers in [{low}, {high}], as JAX has 32 bits here: cross as two words "
            "with funcollect.interop.words.as_words, or turn 64 bits on with jax.config.update('jax_enable_x64', True)"
        )
    return signed.to(dtype)


def beyond_32_bits(tensor: Tensor) -> Tensor:
    """Whether each integer would change in JAX: [...] bool. None does unless JAX has 32 bits, its default."""
    if tensor.dtype not in _NARROW or _has_64_bits():
        return torch.zeros_like(tensor, dtype=torch.bool)
    _, low, high = _NARROW[tensor.dtype]
    signed = tensor.view(torch.int64)  # a uint64 past 2**63 shows as negative
    return (signed < low) | (signed > high)


def _has_64_bits() -> bool:
    return bool(import_jax().dtypes.canonicalize_dtype(np.int64) == np.int64)


@dataclass(frozen=True, eq=False)
class Joined:
    """GPU tensors joined to one array [n] for each dtype, a pytree for compiled calls; `opened` splits them again."""

    arrays: dict[str, Any]  # by dtype
    layout: tuple[tuple[str, str, int, tuple[int, ...]], ...]  # each tensor's name, dtype, first element, and shape
    finish: Callable[[dict[str, Any]], dict[str, Any]]  # is applied to the tensors by name, in traced code


def joining(
    tensors: Mapping[str, Tensor], finish: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[Mapping[str, Tensor]], Joined]:
    """Allocate memory for tensors like these, on one device and of dtypes that JAX has; return a function to join them.

    Passing an array to JAX costs the host a tenth of a millisecond, whatever its size; copying all tensors costs a
    quarter of that. The function overwrites the arrays that it returned before. Programs that read them have to wait
    for Torch: see `torch_followed`.
    """
    device = next(iter(tensors.values())).device
    sizes: dict[torch.dtype, int] = {}
    places = []
    for name, tensor in tensors.items():
        first = sizes.get(tensor.dtype, 0)
        places.append((name, str(tensor.dtype), first, tuple(tensor.shape)))
        sizes[tensor.dtype] = first + tensor.numel()
    with torch.inference_mode(mode=False):  # memory made in that mode could not be written outside of it
        memory = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    views = [
        memory[tensor.dtype][first : first + tensor.numel()].view(shape)
        for (_, _, first, shape), tensor in zip(places, tensors.values(), strict=True)
    ]
    arrays, layout = {str(dtype): jax_view(joined) for dtype, joined in memory.items()}, tuple(places)

    def join(tensors: Mapping[str, Tensor]) -> Joined:
        with torch.no_grad():
            torch._foreach_copy_(views, list(tensors.values()))
        return Joined(arrays, layout, finish)

    return join


def opened(tree: Any) -> Any:
    """The pytree with each `Joined` replaced by its finished tensors, in traced code. Call it outside of loops."""
    cut = import_jax().lax.slice_in_dim

    def open_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Joined):
            return leaf
        tensors = {}
        for name, dtype, first, shape in leaf.layout:
            tensors[name] = cut(leaf.arrays[dtype], first, first + math.prod(shape)).reshape(shape)
        return leaf.finish(tensors)

    return import_jax().tree.map(open_leaf, tree, is_leaf=lambda leaf: isinstance(leaf, Joined))


def _register_with_jax(jax: Any) -> None:
    """Register `Joined` as a pytree, and make JAX raise BridgeError for a TensorDict instead of calling it an array."""
    jax.tree_util.register_pytree_node(
        Joined,
        lambda joined: ((joined.arrays,), (joined.layout, joined.finish)),  # programs depend on the latter two
        lambda static, arrays: Joined(*arrays, *static),
    )

    def refuse(batch: Any) -> NoReturn:
        raise BridgeError(f"JAX got a {type(batch).__name__}, expected arrays: pass funcollect.interop.to_jax(batch)")

    with contextlib.suppress(ImportError, AttributeError):  # a private module, which other versions may lack
        from jax._src.core import pytype_aval_mappings

        pytype_aval_mappings.setdefault(TensorDict, refuse)


with_jax(_register_with_jax)

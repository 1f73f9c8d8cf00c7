"""Exports a Torch module as a graph of operators by `torch.export`, and refuses those that are not pure functions."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from funcollect.errors import LoweringError
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import rules
from funcollect.messages import clipped
from funcollect.tree import NAMESPACE

_ONE_AT_A_TIME = threading.RLock()  # `torch.export` fails if two threads call it
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal_functional", "poisson", "exponential", "geometric")
_OF_DATA = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")  # bounds that depend on data
_RESIZING = ("upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d")
_IMAGE = 3  # channels, height, width: sizes that a network is built for
_SKIPPING = "torchrl/modules/tensordict_module/rnn.py"  # whose modules branch on whether the mask is True anywhere
# Checks of data, which raise an error or do nothing, and return nothing; Torch may order them by tokens, as effects.
_CHECKS = ("aten._linalg_check_errors.default", "aten._assert_async.default", "aten._assert_async.msg")
_TORCH = f"{Path(torch.__file__).parent}/"  # Torch's folder
_OURS = str(Path(__file__).parent)
_MASKS = {
    nn.Transformer: "src_is_causal= and tgt_is_causal=",
    nn.TransformerDecoder: "tgt_is_causal=",
    nn.TransformerEncoder: "is_causal=",
}  # by module, the arguments that declare a mask causal; without them Torch compares it with the causal one
_FRAME = re.compile(r'File "(.+?)", line (\d+), in .+\n\s*(.*)')
_WIDE = (torch.float64, torch.complex128)


leaves_of: Any = partial(optree.tree_flatten, namespace=NAMESPACE)  # the leaves of a tree, and its treespec


def plain(tree: Any) -> Any:
    """The tree with dicts for TensorDicts, and tuples for the structs that Torch's `max`, `topk` and others return."""
    return _with_nodes(tuple, optree.is_structseq, _with_nodes(lambda node: node.to_dict(), _is_batch, tree))


def _is_batch(node: Any) -> bool:
    return isinstance(node, TensorDictBase)


def _with_nodes(function: Callable[[Any], Any], is_node: Callable[[Any], bool], tree: Any) -> Any:
    """The tree with `function` applied to the outermost nodes for which `is_node` is True."""
    leaves, treespec = optree.tree_flatten(tree, is_leaf=is_node, namespace=NAMESPACE)
    return treespec.unflatten(function(leaf) if is_node(leaf) else leaf for leaf in leaves)


def jax_dtype(dtype: torch.dtype) -> Any:
    """JAX's dtype for one of Torch. Under 32-bit JAX integers have 32 bits, and float64 raises LoweringError."""
    jax = import_jax()
    named = jax.numpy.dtype(str(dtype).removeprefix("torch."))
    held = jax.dtypes.canonicalize_dtype(named)
    if dtype in _WIDE and held != named:
        raise LoweringError(
            f"it computes in {named}, and JAX has 32 bits here and would round: cast the module to float32 with "
            ".float(), or turn 64 bits on with jax.config.update('jax_enable_x64', True)"
        )
    return np.dtype(held)


class FlatModule(nn.Module):
    """A module as a function from leaves to leaves; calls `note` with the treespec of its output.

    An attribute could not keep the treespec, because `torch.export` restores the attributes of a module.
    """

    def __init__(self, module: nn.Module, treespec: Any, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.module, self._treespec, self._note = module, treespec, note

    def forward(self, *leaves: Tensor) -> tuple[Any, ...]:
        """The leaves of the module's output. It may write its outputs into shallow copies of TensorDicts."""
        inputs = _with_nodes(lambda node: node.clone(False).unlock_(), _is_batch, self._treespec.unflatten(leaves))
        answer = self.module(*inputs)
        if isinstance(self.module, TensorDictModuleBase):
            answer = answer.select(*self.module.out_keys)
        found, treespec = leaves_of(plain(answer))
        self._note(treespec)
        return tuple(found)


def export(flat: FlatModule, leaves: list[Tensor]) -> ExportedProgram:
    """The program for inputs like these, of covered operators, with open sizes; LoweringError if that is impossible."""
    operators = len(torch._C._dispatch_get_all_op_names())  # imported libraries may add some
    table, name = _decompositions(operators), type(flat.module).__name__
    sizes = {"leaves": tuple(map(_open_sizes, leaves))}
    try:
        with _ONE_AT_A_TIME, _quietly(), _lstm_states(), torch.enable_grad(), _NoShortcuts():
            program = torch.export.export(flat, tuple(leaves), dynamic_shapes=sizes, strict=False)
            if not all(map(_is_covered, program.graph.nodes)):  # otherwise it would change nothing, and double the time
                _detach_without_grad(program)
                program = program.run_decompositions(table)
    except Exception as error:
        raise LoweringError(f"{name} cannot be lowered: {_reason(error)}") from error
    if faults := dict.fromkeys(_faults(program)):
        raise LoweringError(f"{name} cannot be lowered: " + "; ".join(faults))
    return program


def _open_sizes(leaf: Tensor) -> dict[int, Any]:
    """Leave every dimension open except those of images, and those of size 1, which Torch fixes."""
    last = leaf.ndim if leaf.ndim <= _IMAGE else leaf.ndim - _IMAGE
    return {i: Dim.AUTO for i in range(last) if leaf.shape[i] > 1}


@lru_cache(maxsize=1)
def _decompositions(operators: int) -> dict[Any, Callable[..., Any]]:
    """Torch's decompositions of operators without a rule. That is slow, and cached for a number of operators."""
    table = torch.export.default_decompositions()
    table.update(get_decompositions([getattr(torch.ops.aten, name) for name in _RESIZING]))  # type: ignore[no-untyped-call]
    return {target: function for target, function in table.items() if str(target) not in rules()}  # type: ignore[no-untyped-call]


class _NoShortcuts(TorchFunctionMode):
    """Has TorchRL's recurrent modules always reset masked states, which they skip if no lane begins an episode.

    The branch depends on data, but both ways have the same result.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__:
            frame = sys._getframe(1)  # below, the innermost one outside of Torch
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
                frame = frame.f_back
            if frame.f_code.co_filename.endswith(_SKIPPING):
                return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _lstm_states() -> Iterator[None]:
    """Correct the shapes of an LSTM's final states: Torch 2.11 exports them with a leading dimension of size 1."""
    if torch.__version__ >= "2.13":  # a TorchVersion, which compares as versions do
        yield
        return
    decompositions: Any = torch._decomp.decompositions
    original = decompositions.one_layer_lstm

    def one_layer(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, states = original(*args, **kwargs)
        return output, tuple(state.squeeze(0) if state.ndim == output.ndim else state for state in states)

    decompositions.one_layer_lstm = one_layer
    try:
        yield
    finally:
        decompositions.one_layer_lstm = original


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence Torch's remarks on its tracing, leave out checks of data, and export attention as separate operators."""
    logger, mha, kind = logging.getLogger("torch"), torch.backends.mha, torch.distributions.Distribution
    with contextlib.ExitStack() as undo, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)  # an error that it logs is also raised
        undo.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        undo.callback(kind.set_default_validate_args, kind._validate_args)
        kind.set_default_validate_args(False)
        yield


def _detach_without_grad(exported: ExportedProgram) -> None:
    """Mark the outputs of ``no_grad`` blocks by `detach`, because the decomposition inlines the blocks."""
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
            continue
        for output in list(node.users):
            with graph.inserting_after(output):
                detached = graph.call_function(torch.ops.aten.detach.default, (output,))
            detached.meta = dict(output.meta)
            output.replace_all_uses_with(detached, delete_user_cb=lambda user, mark=detached: user is not mark)
    exported.graph_module.recompile()


def _is_covered(node: Any) -> bool:
    """Whether decompositions would leave a node of an export as it is: its operator has a rule, and writes nothing."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target) in rules() and not node.target._schema.is_mutable
    return not isinstance(node.target, torch._ops.HigherOrderOperator)


def is_check(node: Any) -> bool:
    """Whether a node is a check of data, which is omitted; it may be wrapped with a token that orders it."""
    ordered = node.target is torch.ops.higher_order.with_effects  # called with (token, operator, ...)
    return str(node.args[1] if ordered else node.target) in _CHECKS


def _faults(program: ExportedProgram) -> Iterator[str]:
    for spec in program.graph_signature.output_specs:
        if spec.kind.name not in ("USER_OUTPUT", "LOSS_OUTPUT", "TOKEN"):  # effects, which have tokens, follow below
            what = spec.kind.name.removesuffix("_MUTATION").replace("_", " ").lower()
            yield (
                f"its forward writes the {what} {(spec.target or '').removeprefix('module.')!r}, and a function of "
                "parameters cannot: call module.eval() first if that is a training statistic, or return the new value "
                "as a state"
            )
            return
    for node in (node for node in program.graph.nodes if not is_check(node)):
        fault = None  # the reason and the fix
        if isinstance(node.target, torch._ops.OpOverload):
            fault = _refusal(str(node.target), node) or _dtype_fault(str(node.target), node)
        elif node.target is torch.ops.higher_order.with_effects:
            fault = f"{node.args[1]} has a side effect", ": do that outside of the module"
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            fault = f"there is no rule for {node.target}", ": call it outside of the module, or write it as arrays"
        if fault is not None:
            yield f"{fault[0]}, at {place_of(node)}{fault[1]}"


def _refusal(name: str, node: Any) -> tuple[str, str] | None:
    """Why an ATen operator is refused (shapes that depend on data, random numbers, no rule) and the fix, or None."""
    kind = name.split(".")[1]
    if kind in _OF_DATA:
        return None  # the operator that gives the size or the number is refused instead
    value, fixed = node.meta.get("val"), ": use operations of a fixed shape, such as torch.where"
    if kind == "_local_scalar_dense":
        return f"{name} reads a number out of a tensor", fixed
    if isinstance(value, Tensor) and any(str(size).startswith("u") for size in value.shape):  # as Torch names them
        return f"{name} has an output whose shape depends on data", fixed
    if any(part in kind for part in _RANDOM):
        mend = ": call module.eval() first if that is dropout or noise of training, or take the noise as an input"
        return f"{name} draws random numbers", mend
    if name not in rules():
        return f"there is no rule for {name}", ": docs/concepts/lowering.md lists what is covered"
    return None


def _dtype_fault(name: str, node: Any) -> tuple[str, str] | None:
    """Why an ATen operator's dtypes are refused (32-bit JAX would round or misread them) and the fix, or None."""
    try:
        for value in leaves_of(node.meta.get("val"))[0]:
            if isinstance(value, Tensor):
                jax_dtype(value.dtype)
    except LoweringError as error:
        return str(error), ""
    for dtype in (node.args[0].meta["val"].dtype, node.args[1]) if name == "aten.view.dtype" else ():
        if jax_dtype(dtype).itemsize != dtype.itemsize:
            return f"{name} reads bits of {dtype}, and JAX has 32 bits here", ": cast with .to() instead"
    return None


def _reason(error: Exception) -> str:
    """Why `torch.export` raised this error, the place in the user's module, and the fix if it is known."""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    what, mend = "torch.export raised an error", clipped(first, 300)
    if keywords := _unknown_mask(error):
        what, mend = "it compares a mask to the causal one, which depends on data", f"pass {keywords} as True or False"
    elif "DynamicOutputShape" in type(error).__name__:
        what, mend = f"{first} has an output whose shape depends on data", "use operations of a fixed shape"
    elif "DataDependent" in type(error).__name__ or "data-dependent" in first:
        what, mend = "its control flow depends on data", "choose between values with torch.where instead of branching"
    frames = [(step.filename, str(step.lineno), step.line or "") for step in traceback.extract_tb(error.__traceback__)]
    place = _line([frame for frame in frames if "tensordict/nn/" not in frame[0]]) or "an unknown place"
    return f"{what}, at {place}: {mend}"


def place_of(node: Any) -> str:
    """The submodule and the source line of a node, as text."""
    module, stack = "", list((node.meta.get("nn_module_stack") or {}).values())
    if stack:
        path, kind = stack[-1]
        path = path.removeprefix("module").removeprefix(".")  # the wrapper that is exported calls the user's module so
        name = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
        module = f"{path!r} ({name})" if path else name
    line = _line(_FRAME.findall(node.meta.get("stack_trace") or ""))
    return ", ".join(filter(None, (module, line))) or "an unknown place"


def _line(frames: list[tuple[str, str, str]]) -> str:
    """``file:line: code`` of the innermost frame outside Torch and this folder, or of all if there is no other."""
    theirs = [frame for frame in frames if not frame[0].startswith((_TORCH, _OURS))] or frames
    if not theirs:
        return ""
    path, line, code = theirs[-1]
    return f"{path}:{line}: {code.strip()}".removesuffix(": ")  # generated code has no source


def _unknown_mask(error: BaseException) -> str | None:
    """The arguments that a transformer lacks, if Torch raised the error while it compared a mask to the causal one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(frame.f_code.co_name == "_detect_is_causal_mask" for frame in frames):
        return None
    modules = (frame.f_locals.get("self") for frame in frames)
    return next((words for module in modules for kind, words in _MASKS.items() if isinstance(module, kind)), None)

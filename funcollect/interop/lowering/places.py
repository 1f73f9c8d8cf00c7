"""Finds the place in the user's module that a node of the graph, or an error, came from."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARY = f"{Path(torch.__file__).parent}/"  # Torch's folder
_OURS = str(Path(__file__).parent)
_MASKS = {
    nn.Transformer: "src_is_causal= and tgt_is_causal=",
    nn.TransformerDecoder: "tgt_is_causal=",
    nn.TransformerEncoder: "is_causal=",
}  # these arguments say whether a mask is causal; without them Torch compares it with the causal one
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (.+)\n\s*(.*)')


def place_of(node: Any) -> str:
    """The submodule and the source line of a node, as text.

    The line is the innermost one outside Torch, or the innermost of all if no other file is involved.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return ", ".join(part for part in (_module(stack), _line(frames)) if part) or "an unknown place"


def _module(stack: list[tuple[str, Any]]) -> str:
    """The innermost submodule of a node's stack, as its path and class; empty for an empty stack."""
    if not stack:
        return ""
    path, kind = stack[-1]
    path = path.removeprefix("module").removeprefix(".")  # the wrapper that is exported calls the user's module so
    name = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
    return f"{path!r} ({name})" if path else name


def _line(frames: list[tuple[str, str, str, str]]) -> str:
    """``file:line: code`` of the innermost frame (file, line, function, code) outside Torch and this folder."""
    theirs = [frame for frame in frames if not frame[0].startswith((LIBRARY, _OURS))] or frames
    if not theirs:
        return ""
    path, line, _, code = theirs[-1]
    return f"{path}:{line}: {code.strip()}".removesuffix(": ")  # generated code has no source


def place_of_error(error: BaseException) -> str:
    """The innermost line outside Torch and this folder that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [(frame.filename, str(frame.lineno), frame.name, frame.line or "") for frame in frames]
    return _line([frame for frame in found if "tensordict/nn/" not in frame[0]]) or "an unknown place"


def unknown_mask(error: BaseException) -> str | None:
    """The arguments that a transformer lacks, if the error was raised while Torch looked whether a mask is causal."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(frame.f_code.co_name == "_detect_is_causal_mask" for frame in frames):
        return None
    modules = [frame.f_locals.get("self") for frame in frames]
    named = (words for module in modules for kind, words in _MASKS.items() if isinstance(module, kind))
    return next(named, None)

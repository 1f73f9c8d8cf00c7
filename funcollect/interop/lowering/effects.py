"""Removes checks of data, which Torch keeps in order by tokens, from an exported program."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

CHECKS = (  # they return nothing: they raise an error, or let the program go on
    "aten._linalg_check_errors.default",
    "aten._assert_async.default",
    "aten._assert_async.msg",
)


def without_checks(program: ExportedProgram) -> None:
    """Remove the checks, and the tokens if no other effect needs them."""
    graph, signature = program.graph, program.graph_signature
    for node in list(graph.nodes):
        if is_effect(node) and str(node.args[1]) in CHECKS:
            for following in list(node.users):  # they take the token that the check would have passed on
                following.replace_all_uses_with(node.args[0])
                graph.erase_node(following)
            graph.erase_node(node)
        elif str(node.target) in CHECKS:
            graph.erase_node(node)
    if any(map(is_effect, graph.nodes)):
        return
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    kept = [spec.kind.name != "TOKEN" for spec in signature.output_specs]
    output.args = (tuple(value for value, keep in zip(output.args[0], kept, strict=True) if keep),)
    signature.output_specs[:] = [spec for spec, keep in zip(signature.output_specs, kept, strict=True) if keep]
    for node, spec in zip(placeholders, list(signature.input_specs), strict=True):
        if spec.kind.name == "TOKEN":
            graph.erase_node(node)
            signature.input_specs.remove(spec)
    program.graph_module.recompile()


def is_effect(node: Any) -> bool:
    """Whether a node calls an operator, its second argument, with a token, its first."""
    return node.target is torch.ops.higher_order.with_effects

"""How a module is called on a TensorDict, and what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.errors import PolicyError
from funcollect.policies.tensordict_modules.hidden_states import paths
from funcollect.tree import Path, flatten, nest, to_tensordict


def run_module(
    module: Callable[..., Any], inputs: Mapping[Path, Tensor], device: torch.device | None, *, single: bool = False
) -> TensorDictBase:
    """What the module returns for a TensorDict of its own.

    Args:
        module: called with a TensorDict [P], or [] for a `single` environment, which has no batch dimension.
        inputs: the leaves, each [P, ...].
        device: where the TensorDict lies; None for where the leaves are.
        single: whether to take away the batch dimension; the answer has none either.
    """
    own = {path: (leaf[0] if single else leaf).clone() for path, leaf in inputs.items()}
    batch_size = () if single else tuple(next(iter(inputs.values())).shape[:1])
    given = TensorDict(nest(own), batch_size, device=device) if device else to_tensordict(own, batch_size)
    try:
        answer = module(given)
    except KeyError as error:
        wanted = paths(getattr(module, "in_keys", ()))
        if all(path in inputs for path in wanted):
            raise
        raise PolicyError(
            f"the policy reads the in_keys {names_of(wanted)}, the environment gives {names_of(inputs)}: name these"
        ) from error
    if not isinstance(answer, TensorDictBase):
        raise PolicyError(
            f"the policy returned {type(answer).__name__}, expected the TensorDict with its outputs: return it"
        )
    return answer


def outputs_of(answer: TensorDictBase, read: Container[Path], *, single: bool = False) -> dict[Path, Any]:
    """What stands in a policy's answer beside what it `read`, each [P, ...]."""
    outputs = {path: leaf for path, leaf in flatten(answer).items() if path not in read}
    return {path: batched(leaf) for path, leaf in outputs.items()} if single else outputs


def batched(leaf: Any) -> Any:
    """An output of a single environment as [1, ...]."""
    return leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf


def may_be_read(path: Path) -> bool:
    """Whether a policy finds at its next step what it wrote there, if no hidden state is: all but the action."""
    return path[0] != "next" and path != ("action",)


def check_hidden(outputs: Mapping[Path, Any], hidden: Mapping[Path, Tensor], written: Mapping[Path, Path]) -> None:
    """Raise PolicyError unless each hidden state stands in `outputs` where it is written, in the shape that was read.

    Args:
        outputs: by path.
        hidden: the hidden states that were read.
        written: by the path of each, that of its next value.
    """
    for path, leaf in hidden.items():
        got = getattr(outputs.get(written[path]), "shape", None)
        if got != leaf.shape:
            raise PolicyError(
                f"the policy's hidden state {'.'.join(written[path])!r} is {got and tuple(got)}, expected "
                f"{tuple(leaf.shape)}: write it as it is read, or correct its initial state"
            )


def names_of(paths: Iterable[Path]) -> list[str]:
    """The dotted names of keys, sorted, for messages."""
    return sorted(map(".".join, paths))


def by_path(observation: Any) -> dict[Path, Any]:
    """The leaves of an observation, in a space's structure, by their keys in a batch."""
    return flatten(_as_mapping(observation))


def _as_mapping(observation: Any) -> dict[str, Any]:
    if isinstance(observation, dict):
        return {name: _open(value) for name, value in observation.items()}
    return {"observation": _open(observation)}


def _open(value: Any) -> Any:
    if isinstance(value, tuple):
        return {str(index): _open(part) for index, part in enumerate(value)}
    return _as_mapping(value) if isinstance(value, dict) else value

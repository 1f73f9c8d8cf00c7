"""Checks of a policy's outputs: shapes and dtypes at its first step, numbers once per batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode
from typing_extensions import override

from funcollect.errors import PolicyError
from funcollect.interop.bridge import beyond_32_bits
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memory import complain_if
from funcollect.messages import clipped
from funcollect.protocols import Columns
from funcollect.specs import ActionSpec, Leaf
from funcollect.tree import Path

_LOOK = "look at the policy's parameters, and at the observation of that step"
_RULES = {  # by a head's parameter; a log-probability is NaN if its rule is broken
    "logits": "logits have to be finite, or minus infinity for choices that are ruled out",
    "scale": "a scale has to be positive",
}


def check_action(action: Any, spec: ActionSpec, num_envs: int, kind: type = object) -> None:
    """Raise PolicyError unless `action` is [P, *spec.shape], of a dtype that the space takes, and of class `kind`."""
    wanted = (num_envs, *spec.shape)
    if not hasattr(action, "shape"):
        what = f"the policy's action is {type(action).__name__}"
        raise PolicyError(f"{what}, expected an array of shape {wanted}: return one")
    if tuple(action.shape) != wanted:
        what = f"action has shape {tuple(action.shape)}, the space {spec.space} wants {wanted}"
        mend = f"return one action of shape {spec.shape} per environment{_encoding(action, spec, num_envs)}"
        raise PolicyError(f"{what} for {num_envs} environment{'s' if num_envs > 1 else ''}: {mend}")
    if not _takes(spec, action.dtype):
        raise PolicyError(f"action has dtype {action.dtype}, the space {spec.space} wants {spec.dtype}: cast it")
    if not isinstance(action, kind):
        what = f"the policy's action is a {type(action).__module__}.{type(action).__name__}, expected a torch.Tensor"
        raise PolicyError(f"{what}: return a tensor, or wrap a JAX function with funcollect.jax_policy")


def _takes(spec: ActionSpec, dtype: Any) -> bool:
    kind = next((kind for kind in ("float", "complex") if kind in str(dtype)), "int")
    return kind == ("float" if spec.dtype.is_floating_point else "int")


def _encoding(action: Any, spec: ActionSpec, num_envs: int) -> str:
    """Advice for an action with the wrong encoding, or one that may be logits; empty otherwise."""
    other = tuple(spec.space.shape or ()) if spec.one_hot else (spec.choices,)
    if not spec.categories or tuple(action.shape) != (num_envs, *other):
        return ""
    if spec.one_hot:
        return ", in one-hot rows; or make the environment without one_hot=True, for integers"
    if "float" in str(action.dtype):
        return "; if these are logits, pass head=funcollect.heads.categorical; for one-hot rows, make_env(one_hot=True)"
    return "; or make the environment with one_hot=True (funcollect.make_env), for one-hot rows"


def checked_lead(action: Any, spec: ActionSpec, shapes: Mapping[Leaf, Sequence[int]]) -> tuple[int, ...]:
    """The dimensions [...] of actions [..., *spec.shape]; ValueError unless observations of `shapes` have them too."""
    for leaf, shape in shapes.items():
        lead = shape[: len(shape) - len(leaf.shape)]
        if tuple(action.shape) != (*lead, *spec.shape):
            what = f"action has shape {list(action.shape)} beside {leaf.name!r} of {list(lead)} frames"
            why = f"since one in {spec.space} has {list(spec.shape)}"
            raise ValueError(f"{what}, expected {[*lead, *spec.shape]}, {why}: pass actions as collected")
    if not _takes(spec, action.dtype):
        raise ValueError(f"the batch's action is {action.dtype}, the space {spec.space} wants {spec.dtype}: cast it")
    dims = action.ndim - len(spec.shape)
    if spec.categories and not isinstance(action, (Tensor, import_jax().core.Tracer)):  # JAX would score another choice
        for at in _outside(torch.from_numpy(np.array(action)), spec).nonzero()[:, :dims].tolist():
            mend = "pass actions as collected"
            raise ValueError(f"action {at} is {action[tuple(at)].tolist()}, expected one of {spec.space}: {mend}")
    return tuple(action.shape[:dims])


def check_rows(outputs: Mapping[str, Any], num_envs: int, kind: type = object) -> None:
    """Raise PolicyError unless each output is an array (of class `kind`) with a row per environment."""
    for name, output in outputs.items():
        shape = tuple(output.shape) if isinstance(output, kind) and hasattr(output, "shape") else None
        if shape is None or shape[:1] != (num_envs,):
            got = type(output).__name__ if shape is None else f"of shape {shape}"
            wanted = "a tensor" if kind is Tensor else "an array"
            what = f"the policy's output {name!r} is {got}"
            raise PolicyError(f"{what}, expected {wanted} of shape [{num_envs}, ...]: return one row per environment")


def overlap(one: Path, two: Path) -> bool:
    """Whether one path is the other, or lies inside it."""
    return one[: len(two)] == two[: len(one)]


def check_apart(outputs: Iterable[Path], observation: Iterable[Path]) -> None:
    """Raise PolicyError if an output of the policy has the key of an observation."""
    for path, other in itertools.product(outputs, observation):
        if overlap(path, other):
            what = f"the policy's output {'.'.join(path)!r} collides with the observation {'.'.join(other)!r}"
            raise PolicyError(f"{what}, which the batch keeps under that key: rename the output")


def check_recurrent(answer: Any, before: Any) -> None:
    """Raise PolicyError unless a recurrent policy returned a pair (answer, state), the state shaped like `before`."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        what = f"the policy has an initial_state and returned {type(answer).__name__}"
        raise PolicyError(f"{what}, expected the pair (answer, next_state): return both, or leave initial_state out")
    after, mend = answer[1], "return (answer, next_state), with the batch dimension"
    if isinstance(after, Mapping) != isinstance(before, Mapping):
        what = f"the policy's next state is {type(after).__name__}, expected {type(before).__name__}"
        raise PolicyError(f"{what} as initial_state: {mend}")
    leaves = map(optree.tree_leaves, (after, before))
    got, wanted = ([list(getattr(leaf, "shape", ())) for leaf in each] for each in leaves)
    if got != wanted:
        raise PolicyError(f"the policy's next state has the shapes {got}, expected {wanted}: {mend}")


def check_32_bits(observation: Columns) -> None:
    """Raise PolicyError for the first integer [T, P, ...] that a policy in JAX got changed, since it has 32 bits."""
    for path, column in observation.items():
        if column.dtype in (torch.int64, torch.uint64) and bool((wrong := beyond_32_bits(column)).any()):
            what = f"the observation {'.'.join(path)!r} does not fit into the 32 bits that JAX has here"
            mend = "turn 64 bits on with jax.config.update('jax_enable_x64', True), or let the environment scale it"
            _raise_at(wrong, what, column, mend)


def _outside(action: Tensor, spec: ActionSpec) -> Tensor:
    """Whether discrete actions [..., *shape] are outside the space: [..., *shape] bool, one-hot [..., components]."""
    low, high = spec.bounds
    action = action.long()  # Torch compares no unsigned integers of more than 8 bits
    wrong = (action < low.to(action.device)) | (action > high.to(action.device))
    if spec.one_hot:
        hot = [part.sum(-1) != 1 for part in torch.split(action, list(spec.categories), -1)]
        wrong = torch.stack(hot, -1) | wrong.any(-1, True)
    return wrong


def finish_columns(
    columns: Columns, spec: ActionSpec, *, parameters: Columns | None = None, chosen: bool = False, ties: bool = False
) -> Columns:
    """A policy's output `columns`, checked, the action in the dtype of its space.

    `parameters` are the inputs of a head. They are only checked if the head gives no log-probability, which would be
    NaN if they are. `chosen` is True if a head chose the action. With `ties`, only the first of several ones in a
    one-hot row counts, as for environments: TorchRL's value policies return several.
    """
    if ties and spec.one_hot:
        parts = torch.split(columns["action",], list(spec.categories), -1)
        first = torch.cat([part * (part.cumsum(-1) == 1) for part in parts], -1)
        columns = columns | {("action",): first}
    if parameters and ("action_log_prob",) not in columns:
        _check_numbers(parameters, {})
    action = columns["action",]
    _check_numbers({("action",): action}, parameters or {})
    if not (chosen and spec.categories):  # a floating action may lie outside its Box: many environments clip it
        if action.is_floating_point():
            what = "the action is infinite, expected finite numbers"
            complain_if(
                action.sum(),
                lambda total: not math.isfinite(total),  # the sum of both infinities is NaN
                lambda: _raise_at(torch.isinf(action), what, action, _LOOK),
            )
        else:
            wrong = _outside(action, spec)
            what = f"the action is outside its space, expected {'one-hot rows for ' * spec.one_hot}{spec.space}"
            complain_if(wrong.any(), bool, partial(_raise_at, wrong, what, action, "return one of these"))
    _check_numbers({path: column for path, column in columns.items() if column is not action}, parameters or {})
    return columns | {("action",): action.to(spec.dtype)}


def _check_numbers(columns: Columns, causes: Columns) -> None:
    """Raise PolicyError for the first row with a NaN. It names those of `causes` that are NaN there as well."""
    for path, column in columns.items():
        if column.is_floating_point():
            complain_if(column.sum(), math.isnan, partial(_raise_nan, path, column, causes))


def _raise_nan(path: Path, column: Tensor, causes: Columns) -> None:
    wrong = [torch.isnan(leaf).to(column.device) for leaf in (*causes.values(), column)]
    rows = torch.stack([mask.reshape(*mask.shape[:2], -1).any(-1) for mask in wrong]).any(0)
    for step, lane in rows.nonzero()[:1].tolist():  # none if only the sum is NaN
        if found := {cause: leaf for cause, leaf in causes.items() if bool(leaf[step, lane].isnan().any())}:
            (_, first), *others = found.items()
            what = f"{' and '.join(map('.'.join, found))} {'are' if others else 'is'} NaN, expected numbers"
            _raise_at(rows, what, first, _LOOK, dict(others))
        known = causes or [(name,) for name in _RULES]
        rules = [rule for name, rule in _RULES.items() if path == ("action_log_prob",) and (name,) in known]
        _raise_at(rows, f"{'.'.join(path)} is NaN, expected numbers", column, "; ".join([_LOOK, *rules]), causes)


def _raise_at(wrong: Tensor, what: str, column: Tensor, mend: str, causes: Columns | None = None) -> None:
    """Raise PolicyError with the first step and lane, if any, where `wrong` [T, P, ...] is True, and the values."""
    rows = wrong.reshape(*wrong.shape[:2], -1).any(-1)
    for step, lane in rows.nonzero()[:1].tolist():  # none if finite numbers have an infinite sum
        known = {"it": column, **{".".join(path): cause for path, cause in (causes or {}).items()}}
        values = ", ".join(f"{name} is {clipped(str(leaf[step, lane].tolist()))}" for name, leaf in known.items())
        raise PolicyError(f"lane {lane}, step {step} of this batch: {what} ({values}): {mend}")


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which this thread must not draw from Torch's generator, else PolicyError; other threads may draw."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            what = f"the policy draws from Torch's generator ({func})"
            why = "so that its data would depend on which lanes answer first"
            mend = "leave a head to sample, or make the environment with wait='all'"
            raise PolicyError(f"{what}, {why}, expected noise of its head: {mend}")
        return func(*args, **(kwargs or {}))


def close_blocks(grad_enabled: bool) -> None:
    """Leave what an interrupt left open that came as a block was entered or left: no gradients, or `NoDraws`."""
    torch._C._set_grad_enabled(grad_enabled)
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, NoDraws) and mode.old_dispatch_mode_flags:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif isinstance(mode, NoDraws):  # the interrupt came as it was left
            _pop_mode()

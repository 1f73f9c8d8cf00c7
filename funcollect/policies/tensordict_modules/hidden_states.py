"""Hidden states that a policy on a TensorDict carries as keys.

It reads `key` and writes ``("next", key)``, or it reads and writes `key` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from funcollect.arguments import check_arrays
from funcollect.keys import generator_state, torch_generator
from funcollect.tree import Path, flatten

_KEEP_STATES = ("OrnsteinUhlenbeckProcessModule", "MultiStepActorWrapper")  # of TorchRL, beside their in_keys
_KNOWN = ("tensordict", "torchrl")

INIT: Path = ("is_init",)  # True at the first step of a trajectory, as TorchRL's InitTracker has it


def paths(keys: Iterable[Any] | None) -> list[Path]:
    """Keys as paths."""
    return [key if isinstance(key, tuple) else (key,) for key in keys or ()]


def written_by(module: Any, path: Path) -> Path:
    """Where `module` writes the next value of the hidden state that it reads as `path`."""
    writes = paths(getattr(module, "out_keys", None))
    return path if path in writes and ("next", *path) not in writes else ("next", *path)


def reads_what_it_wrote(module: Any) -> bool:
    """Whether a policy may read, unannounced, what it wrote at the step before.

    Modules of tensordict and TorchRL read their in_keys, but for those that keep a state of their own; functions of a
    TensorDict, and modules of others, read what they like.
    """
    if not isinstance(module, nn.Module):
        return True
    parts = [part for part in module.modules() if isinstance(part, TensorDictModuleBase)]
    return not isinstance(module, TensorDictModuleBase) or any(map(_keeps_state, parts))


def _keeps_state(part: TensorDictModuleBase) -> bool:
    kind = type(part)
    return kind.forward.__module__.partition(".")[0] not in _KNOWN or any(
        base.__name__ in _KEEP_STATES for base in kind.__mro__
    )


def initial_hidden_states(
    module: Any, given: Mapping[Any, Any] | None, defaults: Mapping[Path, Tensor] | None = None
) -> dict[Path, Tensor]:
    """What each hidden state of `module` is at the start of an episode, in one environment.

    Those under ``next`` have to be known. One that the module reads and writes under the same key is among them where
    its start is known; else it may be an observation that the module replaces.

    Args:
        module: the policy, which may say so itself by parts with `make_tensordict_primer`, as TorchRL's LSTMModule.
        given: what the caller says, nested or by key.
        defaults: what else is known, for states of which neither says anything.

    Raises:
        ValueError: for a state of which nothing is known, or a given one that the policy does not carry.
    """
    given_states = {} if given is None else _flat(given)
    reads, writes = paths(getattr(module, "in_keys", None)), paths(getattr(module, "out_keys", None))
    hidden = (
        sorted(path[1:] for path in writes if path[0] == "next" and path[1:] in reads)
        if writes
        else sorted(given_states)
    )
    same_key = {path for path in writes if path in reads} - set(hidden)
    if unknown := sorted(set(given_states) - set(hidden) - same_key):
        raise ValueError(
            f"initial_state holds {unknown}, the policy carries {sorted({*hidden, *same_key})}: name keys that it "
            "reads and writes, under 'next' or as they are"
        )
    known = {**(defaults or {}), **_primed(module), **given_states}
    if missing := [path for path in hidden if path not in known]:
        name = missing[0][0] if len(missing[0]) == 1 else missing[0]
        raise ValueError(
            f"the policy reads {name!r} and writes it under 'next', so it carries it from step to step, and nothing "
            "says what an episode begins with: use funcollect.tensordict_policy(policy, initial_state={"
            f"{name!r}: torch.zeros(...)}}), without a batch dimension, or give the module a make_tensordict_primer"
        )
    return {path: known[path] for path in [*hidden, *sorted(same_key & known.keys())]}


def _flat(given: Mapping[Any, Any]) -> dict[Path, Tensor]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"initial_state is {type(given).__name__}, expected a dict of tensors by key: pass for example "
            "{'hidden': torch.zeros(8)}"
        )
    by_path = {key: value for key, value in given.items() if isinstance(key, tuple)}
    nested = {key: value for key, value in given.items() if not isinstance(key, tuple)}
    states = {**flatten(nested), **by_path}
    check_arrays("initial_state", [*states.values()])
    return {path: torch.as_tensor(value) for path, value in states.items()}


def _primed(module: Any) -> dict[Path, Tensor]:
    """What the primers of the module's parts fill in."""
    values: dict[Path, Tensor] = {}
    for part in module.modules() if isinstance(module, nn.Module) else ():
        make = getattr(part, "make_tensordict_primer", None)
        if make is None:
            continue
        generator = generator_state(0)
        with torch_generator(generator):
            filled = make()(TensorDict({}, batch_size=[]))
        if not torch.equal(generator, generator_state(0)):
            raise ValueError(
                f"{type(part).__name__} draws at random what an episode begins with, expected a fixed state: pass "
                "funcollect.tensordict_policy(policy, initial_state={...}), or leave that part out"
            )
        values |= flatten(filled)
    return values

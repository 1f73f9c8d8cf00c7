"""The parts of a `TensorDictSequential` called one after another on a plain dict: the same answers, in half the time.

A TensorDict costs more than a small network at each step. So for a sequence of plain `TensorDictModule`s and
`ProbabilisticTensorDictModule`s, the first step of a rollout runs the policy as it is and records the calls. If the
parts, called directly, give the same bits from the same random draws, the other steps call them directly.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn

from funcollect.keys import device_states, set_device_states
from funcollect.tree import Path, key_of

Values = dict[str | Path, Any]

_SEQUENCES = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)
# What samples, and whether it draws jointly.
_DRAWS = {"ProbabilisticTensorDictModule.forward": False, "SafeProbabilisticModule.forward": True}


class _NotPlainError(Exception):
    """A module that has to be called on a TensorDict."""


class Part(NamedTuple):
    """A module without its TensorDict."""

    run: Callable[..., None]  # writes its answers into `Values`; a second argument is called in place of the network
    network: nn.Module | None = None  # that it calls, if it is no draw


def _calling(part: TensorDictModule) -> Part:
    """A `TensorDictModule` around a module of positional arguments."""
    network, reads, writes = part.module, list(map(_key, part.in_keys)), list(map(_key, part.out_keys))

    def run(values: Values, call: Callable[..., Any] | None = None) -> None:
        arguments = tuple([values[key] for key in reads])
        answer = network(*arguments) if call is None else call(network, arguments)
        if len(writes) == 1 and isinstance(answer, Tensor):
            values[writes[0]] = answer
        else:
            values.update(zip(writes, answer, strict=True))

    return Part(run, network)


def _drawing(part: ProbabilisticTensorDictModule, jointly: bool) -> Part:
    """A part that samples one action, `jointly` with its log-probability or before it."""
    (sample,), distribution_of = map(_key, part.dist_sample_keys), part.get_dist
    log_prob = _key(part.log_prob_key) if part.return_log_prob else None

    def run(values: Values, _: Any = None) -> None:
        distribution = distribution_of(values)
        method = "rsample" if distribution.has_rsample else "sample"
        both = getattr(distribution, f"{method}_and_log_prob", None) if jointly else None
        if log_prob is not None and both is not None:
            values[sample], values[log_prob] = both()
            return
        values[sample] = drawn = getattr(distribution, method)()
        if log_prob is not None:
            values[log_prob] = distribution.log_prob(drawn)

    return Part(run)


def plain_parts(module: Any) -> list[Part] | None:
    """The parts of `module` in their order; None unless all of them are plain."""
    try:
        return _parts(module)
    except _NotPlainError:
        return None


def _parts(module: Any) -> list[Part]:
    if not isinstance(module, nn.Module) or module._forward_hooks or module._forward_pre_hooks:
        raise _NotPlainError
    forward = type(module).forward
    if forward in _SEQUENCES:
        inner: Any = module.module
        each = inner.values() if isinstance(inner, nn.ModuleDict) else inner
        return [part for module in each for part in _parts(module)]
    if forward is TensorDictModule.forward and isinstance(module.module, nn.Module):
        return [_calling(module)]
    own = type(module).__module__.partition(".")[0] in ("tensordict", "torchrl")
    jointly = _DRAWS.get(forward.__qualname__) if own else None
    if jointly is not None and isinstance(module, ProbabilisticTensorDictModule) and len(module.dist_sample_keys) == 1:
        return [_drawing(module, jointly)]
    raise _NotPlainError


def _key(key: Any) -> str | Path:
    if isinstance(key, str) or (isinstance(key, tuple) and len(key) > 1):
        return key
    raise _NotPlainError


def compared(
    parts: list[Part], inputs: Values, device: torch.device, run: Callable[[], Mapping[Path, Any]]
) -> tuple[Mapping[Path, Any], bool]:
    """Call `run`, one call of the policy that draws on `device`.

    Return its outputs, and whether the parts, given the answers of its networks, write the same bits from `inputs`.
    """
    calls: dict[Any, deque[tuple[Any, ...]]] = defaultdict(deque)

    def note(module: nn.Module, arguments: Any, named: Any, answer: Any) -> None:
        calls[module].append((arguments, named, answer))

    def recall(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        noted, named, answer = calls[module].popleft()
        if named or len(noted) != len(arguments) or not all(map(torch.equal, noted, arguments)):
            raise _NotPlainError
        return answer

    def repeats() -> bool:
        values = dict(inputs)
        for part in parts:
            part.run(values, recall)
        pairs = [(leaf, values[key_of(path)]) for path, leaf in outputs.items()]
        return not any(calls.values()) and all(
            one is two or (one.dtype == two.dtype and torch.equal(one, two)) for one, two in pairs
        )

    before = _generators(device)
    networks = dict.fromkeys(part.network for part in parts if part.network is not None)
    handles = [each.register_forward_hook(note, with_kwargs=True) for each in networks]
    try:
        outputs = run()
    finally:
        for handle in handles:
            handle.remove()
    after = _generators(device)
    _set_generators(device, before)
    try:
        same = repeats() and all(map(torch.equal, _generators(device), after))
    except Exception:  # a part that fails without a TensorDict is called on one
        same = False
    _set_generators(device, after)
    return outputs, same


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the global generators that the parts may draw from."""
    return [torch.get_rng_state(), *device_states(device)]


def _set_generators(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    set_device_states(device, states[1:])

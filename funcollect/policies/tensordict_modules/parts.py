"""The parts of a `TensorDictSequential` called one after another on a plain dict: the same answers, in half the time.

A TensorDict costs more than a small network at each step. So for a sequence of plain `TensorDictModule`s and
`ProbabilisticTensorDictModule`s, the first step of a rollout runs the policy as it is and records the calls. If the
parts, called directly, give the same bits from the same random draws, the other steps call them directly.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
ModuleCall = Callable[[nn.Module, tuple[Any, ...]], Any]

_SEQUENCES = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)
# What samples, and whether it draws jointly.
_DRAWS = {"ProbabilisticTensorDictModule.forward": False, "SafeProbabilisticModule.forward": True}


class _NotPlainError(Exception):
    """A module that has to be called on a TensorDict."""


class _Network:
    """A `TensorDictModule` around a module of positional arguments."""

    def __init__(self, part: TensorDictModule) -> None:
        self.module = part.module
        self._reads = [_key(key) for key in part.in_keys]
        self._writes = [_key(key) for key in part.out_keys]
        self._alone = self._writes[0] if len(self._writes) == 1 else None

    def run(self, values: Values, call: ModuleCall | None = None) -> None:
        """Write the module's answers into `values`. `call` is used in place of calling the module."""
        arguments = tuple([values[key] for key in self._reads])
        answer = self.module(*arguments) if call is None else call(self.module, arguments)
        if self._alone is not None and isinstance(answer, Tensor):
            values[self._alone] = answer
        else:
            values.update(zip(self._writes, answer, strict=True))


class _Draw:
    """A `ProbabilisticTensorDictModule` that samples one action, `jointly` with its log-probability or before it."""

    def __init__(self, part: ProbabilisticTensorDictModule, jointly: bool) -> None:
        self._jointly = jointly
        self._distribution = part.get_dist
        (self._sample,) = map(_key, part.dist_sample_keys)
        self._log_prob = _key(part.log_prob_key) if part.return_log_prob else None

    def run(self, values: Values, call: ModuleCall | None = None) -> None:
        """Write a sample, and its log-probability if the module returns that."""
        distribution = self._distribution(values)
        method = "rsample" if distribution.has_rsample else "sample"
        both = getattr(distribution, f"{method}_and_log_prob", None) if self._jointly else None
        if self._log_prob is None or both is None:
            values[self._sample] = sample = getattr(distribution, method)()
            if self._log_prob is not None:
                values[self._log_prob] = distribution.log_prob(sample)
        else:
            values[self._sample], values[self._log_prob] = both()


Part = _Network | _Draw


def plain_parts(module: Any) -> list[Part] | None:
    """The parts of `module`; None unless all of them are plain."""
    try:
        return list(_parts(module))
    except _NotPlainError:
        return None


def _parts(module: Any) -> Iterable[Part]:
    """The parts of a module in their order; _NotPlainError unless all of them are plain."""
    if not isinstance(module, nn.Module) or module._forward_hooks or module._forward_pre_hooks:
        raise _NotPlainError
    forward = type(module).forward
    if forward in _SEQUENCES:
        inner: Any = module.module
        return [
            part for each in (inner.values() if isinstance(inner, nn.ModuleDict) else inner) for part in _parts(each)
        ]
    if forward is TensorDictModule.forward and isinstance(module.module, nn.Module):
        return [_Network(module)]
    own = type(module).__module__.partition(".")[0] in ("tensordict", "torchrl")
    jointly = _DRAWS.get(forward.__qualname__) if own else None
    if jointly is not None and isinstance(module, ProbabilisticTensorDictModule) and len(module.dist_sample_keys) == 1:
        return [_Draw(module, jointly)]
    raise _NotPlainError


def _key(key: Any) -> str | Path:
    if isinstance(key, str) or (isinstance(key, tuple) and len(key) > 1):
        return key
    raise _NotPlainError


class EquivalenceCheck:
    """Records one call of a policy, and checks whether its `plain_parts` alone return the same from `inputs`."""

    def __init__(self, parts: list[Part], inputs: Mapping[str | Path, Tensor], device: torch.device) -> None:
        self._parts = parts
        self._inputs = inputs
        self._device = device  # where the parts draw
        self._calls: dict[int, deque[tuple[Any, ...]]] = defaultdict(deque)

    def compare(self, run: Callable[[], Mapping[Path, Any]]) -> tuple[Mapping[Path, Any], bool]:
        """Call `run`, one call of the policy. Return its outputs, and whether the parts return the same."""
        before = self._generators()
        networks = {id(part.module): part.module for part in self._parts if isinstance(part, _Network)}
        handles = [each.register_forward_hook(self._note, with_kwargs=True) for each in networks.values()]
        try:
            outputs = run()
        finally:
            for handle in handles:
                handle.remove()
        after = self._generators()
        self._set_generators(before)
        try:
            same = self._repeats(outputs) and all(map(torch.equal, self._generators(), after))
        except Exception:  # a part that fails without a TensorDict is called on one
            same = False
        self._set_generators(after)
        return outputs, same

    def _generators(self) -> list[Tensor]:
        """The states of the global generators that the parts may draw from."""
        return [torch.get_rng_state(), *device_states(self._device)]

    def _set_generators(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        set_device_states(self._device, states[1:])

    def _note(self, module: nn.Module, arguments: Any, named: Any, answer: Any) -> None:
        self._calls[id(module)].append((arguments, named, answer))

    def _repeats(self, outputs: Mapping[Path, Any]) -> bool:
        """Whether the parts, given the recorded answers of the networks, write the same outputs bit for bit."""
        values: Values = dict(self._inputs)
        for part in self._parts:
            part.run(values, self._recall)
        return not any(self._calls.values()) and all(
            leaf is own or (leaf.dtype == own.dtype and torch.equal(leaf, own))
            for path, leaf in outputs.items()
            for own in [values[key_of(path)]]
        )

    def _recall(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        """The answer that `module` returned, if these were its arguments."""
        noted, named, answer = self._calls[id(module)].popleft()
        if named or len(noted) != len(arguments) or not all(map(torch.equal, noted, arguments)):
            raise _NotPlainError
        return answer

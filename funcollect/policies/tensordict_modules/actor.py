"""A policy on a TensorDict at work in a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_interaction_type
from torch import Tensor

from funcollect.errors import PolicyError
from funcollect.keys import torch_generator
from funcollect.policies.actors.actor import Columns, Drive, Recorder, lane_mask
from funcollect.policies.actors.checks import check_action, check_tensor, finished
from funcollect.policies.tensordict_modules.hidden_states import INIT, paths
from funcollect.policies.tensordict_modules.parts import Part, Values, Witness, straight_parts
from funcollect.policies.torch_modules.torch_policy import TorchPolicyState
from funcollect.specs import RESERVED
from funcollect.tree import Path, flatten, key_of, nest, select, to_tensordict

if TYPE_CHECKING:
    from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy

_WORTH_WATCHING = 16  # steps of a rollout, below which the parts of a policy are not looked at


class TensorDictActor:
    """One TensorDict per step, as the module wants it, or none where its parts alone do as well."""

    def __init__(self, policy: TensorDictPolicy, drive: Drive) -> None:
        self._drive = drive
        self._module = policy.bound(drive.params)
        self._device = policy.device
        self._generator = drive.policy_state.generator.clone()
        self._inputs = by_path(drive.observation)
        self._hidden: dict[Path, Tensor] = dict(drive.policy_state.recurrent or {})
        self._never = torch.zeros(drive.num_envs, 1, dtype=torch.bool)
        self._first = self._never if policy.reads_init and INIT not in self._inputs else None
        self._names: list[Path] = []
        self._stateful = bool(self._given())
        self._recorder = Recorder(drive.observation, drive.length, always_copy=self._stateful)
        self._parts = self._plain_parts()
        self._values: Values = {}

    def _given(self) -> dict[Path, Tensor]:
        """What the module reads besides the observation; recorded, as what it writes."""
        return self._hidden if self._first is None else {**self._hidden, INIT: self._first}

    def _plain_parts(self) -> list[Part] | None:
        """The parts that may be called without a TensorDict: of a policy without hidden states that samples."""
        drive = self._drive
        if self._device is not None or self._stateful or not drive.stochastic or drive.length < _WORTH_WATCHING:
            return None
        return straight_parts(self._module)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """No gradients, the asked interaction type, and the global generator running from the policy's state."""
        with torch.no_grad(), set_interaction_type(self._drive.exploration_type), torch_generator(self._generator):
            yield

    def act(self, t: int) -> Any:
        """The action [P, ...] of step `t`."""
        if t == 0:
            written = self._begin()
        elif self._parts is not None:
            written = self._straight(self._parts)
        else:
            written = self._written(t)
        action = written[self._action_at]
        if t == 0 or action.shape[1:] != self._drive.spec.shape:
            check_action(action, self._drive.spec, self._drive.num_envs)
            check_tensor(action)
        if self._stateful:
            self._recorder.append((*written, *self._given().values()))
            self._carry(written)
        else:
            self._recorder.append(written)
        return action

    def _begin(self) -> tuple[Tensor, ...]:
        """The first step, which fixes what is recorded."""
        inputs = {**self._inputs, **self._given()}

        def run() -> dict[Path, Any]:
            return outputs_of(run_module(self._module, inputs, self._device), inputs)

        if self._parts is None:
            outputs: Mapping[Path, Any] = run()
        else:
            self._values = {key_of(path): leaf for path, leaf in inputs.items()}
            outputs, as_good = Witness(self._parts, self._values).watch(run)
            self._parts = self._parts if as_good else None
        self._check(outputs)
        self._names = sorted(path for path, leaf in outputs.items() if isinstance(leaf, Tensor))
        self._keys = list(map(key_of, self._names))
        self._action_at = self._names.index(("action",))
        return tuple(outputs[name] for name in self._names)

    def _straight(self, parts: list[Part]) -> tuple[Tensor, ...]:
        values = self._values.copy()
        for part in parts:
            part.run(values)
        return tuple([values[key] for key in self._keys])

    def _written(self, t: int) -> tuple[Tensor, ...]:
        inputs = {**self._inputs, **self._given()}
        answer = run_module(self._module, inputs, self._device)
        written = tuple([answer.get(key, None) for key in self._keys])
        if any(leaf is None for leaf in written):
            raise PolicyError(
                f"step {t} of this batch: the policy wrote {_names(outputs_of(answer, inputs))} after "
                f"{_names(self._names)}: write the same keys at every step"
            )
        return written

    def _carry(self, written: Sequence[Tensor]) -> None:
        if self._hidden:
            by_name = dict(zip(self._names, written, strict=True))
            self._hidden = {path: by_name["next", *path] for path in self._hidden}
        if self._first is not None:
            self._first = self._never

    def _check(self, outputs: Mapping[Path, Any]) -> None:
        if ("action",) not in outputs:
            raise PolicyError(
                f"the policy wrote {_names(outputs)}, expected 'action' among them: add it to the out_keys"
            )
        own = {path for path in outputs if path[0] != "next" or path[1:] not in self._hidden}
        if taken := sorted({path[0] for path in own} & (RESERVED - {"action", "action_log_prob"})):
            raise PolicyError(f"the policy wrote {taken}, keys that a batch uses itself: rename these out_keys")
        check_hidden(outputs, self._hidden)

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Give these lanes their initial hidden states, and say so in ``is_init``."""
        if not self._stateful:
            return
        mask = lane_mask(lanes, self._drive.num_envs)
        if self._first is not None:
            self._first = self._first | mask[:, None]
        for path, leaf in self._hidden.items():
            initial = self._drive.initial_state.recurrent[path].to(leaf.device)
            self._hidden[path] = select(mask.to(leaf.device), initial, leaf)

    def finish(self) -> tuple[TorchPolicyState, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        names = [*self._names, *self._given()]
        columns = dict(zip(names, self._recorder.columns(), strict=True))
        if self._first is not None:
            columns["next", *INIT] = torch.zeros_like(columns[INIT])
        hidden = {path: leaf.clone() for path, leaf in self._hidden.items()}
        return TorchPolicyState(hidden or None, self._generator), finished(columns, self._drive.spec, ties=True)


def run_module(
    module: Callable[..., Any], inputs: Mapping[Path, Tensor], device: torch.device | None
) -> TensorDictBase:
    """What the module returns for a TensorDict of its own that holds `inputs`, each [P, ...]."""
    own = {path: leaf.clone() for path, leaf in inputs.items()}
    batch_size = tuple(next(iter(inputs.values())).shape[:1])
    given = TensorDict(nest(own), batch_size, device=device) if device else to_tensordict(own, batch_size)
    try:
        answer = module(given)
    except KeyError as error:
        wanted = paths(getattr(module, "in_keys", ()))
        if all(path in inputs for path in wanted):
            raise
        raise PolicyError(
            f"the policy reads the in_keys {_names(wanted)}, the environment gives {_names(inputs)}: name these"
        ) from error
    if not isinstance(answer, TensorDictBase):
        raise PolicyError(
            f"the policy returned {type(answer).__name__}, expected the TensorDict with its outputs: return it"
        )
    return answer


def outputs_of(answer: TensorDictBase, inputs: Mapping[Path, Tensor]) -> dict[Path, Any]:
    """What stands in a policy's answer beside `inputs`."""
    return {path: leaf for path, leaf in flatten(answer).items() if path not in inputs}


def check_hidden(outputs: Mapping[Path, Any], hidden: Mapping[Path, Tensor]) -> None:
    """Raise PolicyError unless each hidden state stands in `outputs` under ``next``, in the shape that was read."""
    for path, leaf in hidden.items():
        got = getattr(outputs.get(("next", *path)), "shape", None)
        if got != leaf.shape:
            raise PolicyError(
                f"the policy's hidden state {'.'.join(('next', *path))!r} is {got and tuple(got)}, expected "
                f"{tuple(leaf.shape)}: write it as it is read, or correct its initial state"
            )


def _names(paths: Iterable[Path]) -> list[str]:
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

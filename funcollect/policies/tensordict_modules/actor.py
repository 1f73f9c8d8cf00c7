"""A policy on a TensorDict at work in a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import set_interaction_type
from torch import Tensor

from funcollect.errors import PolicyError
from funcollect.keys import torch_generator
from funcollect.policies.actors.actor import Recorder, lane_mask
from funcollect.policies.actors.checks import check_action, check_tensor, finish_columns
from funcollect.policies.tensordict_modules.calling import (
    batched,
    by_path,
    check_hidden,
    may_be_read,
    names_of,
    outputs_of,
    run_module,
)
from funcollect.policies.tensordict_modules.hidden_states import INIT
from funcollect.policies.tensordict_modules.parts import EquivalenceCheck, Part, Values, plain_parts
from funcollect.policies.torch_backed import TorchPolicyState
from funcollect.protocols import ActorInputs, Columns
from funcollect.specs import RESERVED
from funcollect.tree import Path, key_of, select

_WORTH_WATCHING = 16  # steps of a rollout, below which the parts of a policy are not looked at


class TensorDictActor:
    """One TensorDict per step, as the module wants it, or none where its parts alone do as well.

    Args:
        actor_inputs: what the loop gives every actor.
        module: the user's, bound to the rollout's parameters.
        device: where it runs; None for where it is.
        reads_init: whether it reads ``is_init``.
        written: by the path of each hidden state, that of its next value.
        carries: whether it may read what it wrote at the step before.
    """

    def __init__(
        self,
        actor_inputs: ActorInputs,
        module: Callable[..., Any],
        device: torch.device | None,
        *,
        reads_init: bool,
        written: Mapping[Path, Path],
        carries: bool,
    ) -> None:
        self._actor_inputs, self._module, self._device = actor_inputs, module, device
        self._generator = actor_inputs.policy_state.generator.clone()
        self._inputs = by_path(actor_inputs.observation)
        self._hidden: dict[Path, Tensor] = dict(actor_inputs.policy_state.recurrent or {})
        self._carried: dict[Path, Tensor] = dict(actor_inputs.policy_state.carried or {})
        self._written_to, self._carries = written, carries
        self._single = actor_inputs.single
        self._never = torch.zeros(actor_inputs.num_envs, 1, dtype=torch.bool)
        self._first = self._never if reads_init and INIT not in self._inputs else None
        self._names: list[Path] = []
        self._stateful = carries or bool(self._hidden) or self._first is not None
        self._recorder = Recorder(actor_inputs.observation, actor_inputs.length, always_copy=self._stateful)
        self._parts = self._plain_parts()
        self._values: Values = {}

    def _given(self) -> dict[Path, Tensor]:
        """What the module reads besides the observation and does not write; recorded, as what it writes."""
        hidden = {path: leaf for path, leaf in self._hidden.items() if self._written_to[path] != path}
        return hidden if self._first is None else {**hidden, INIT: self._first}

    def _read(self) -> dict[Path, Tensor]:
        """All that the module finds in its TensorDict."""
        return {**self._inputs, **self._carried, **self._hidden, **self._given()}

    def _plain_parts(self) -> list[Part] | None:
        """The parts that may be called without a TensorDict: of a policy without hidden states that samples."""
        actor_inputs = self._actor_inputs
        if (
            self._device is not None
            or self._stateful
            or not actor_inputs.stochastic
            or actor_inputs.length < _WORTH_WATCHING
        ):
            return None
        return plain_parts(self._module)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """No gradients, the asked interaction type, and the global generator running from the policy's state."""
        with (
            torch.no_grad(),
            set_interaction_type(self._actor_inputs.exploration.type),
            torch_generator(self._generator),
        ):
            yield

    def act(self, t: int) -> Any:
        """The action [P, ...] of step `t`."""
        if t == 0:
            written = self._begin()
        elif self._parts is not None:
            written = self._call_parts(self._parts)
        else:
            written = self._written(t)
        action = batched(written[self._action_at]) if self._single else written[self._action_at]
        if t == 0 or action.shape[1:] != self._actor_inputs.spec.shape:
            check_action(action, self._actor_inputs.spec, self._actor_inputs.num_envs)
            check_tensor(action)
        if self._stateful:
            given = self._given().values()
            self._recorder.append((*written, *([leaf[0] for leaf in given] if self._single else given)))
            self._carry(tuple(map(batched, written)) if self._single else written)
        else:
            self._recorder.append(written)
        return action

    def _begin(self) -> tuple[Tensor, ...]:
        """The first step, which fixes what is recorded: outputs as the module gives them, [P, ...] or [...] of one."""
        inputs = self._read()

        def run() -> dict[Path, Any]:
            answer = run_module(self._module, inputs, self._device, single=self._single)
            return outputs_of(answer, {*self._inputs, *self._given()})

        if self._parts is None:
            outputs: Mapping[Path, Any] = run()
        else:
            self._values = {key_of(path): leaf[0] if self._single else leaf for path, leaf in inputs.items()}
            outputs, as_good = EquivalenceCheck(self._parts, self._values).compare(run)
            self._parts = self._parts if as_good else None
        self._check({path: batched(leaf) for path, leaf in outputs.items()} if self._single else outputs)
        self._names = sorted(path for path, leaf in outputs.items() if isinstance(leaf, Tensor))
        self._keys = list(map(key_of, self._names))
        self._action_at = self._names.index(("action",))
        return tuple(outputs[name] for name in self._names)

    def _call_parts(self, parts: list[Part]) -> tuple[Tensor, ...]:
        values = self._values.copy()
        for part in parts:
            part.run(values)
        return tuple([values[key] for key in self._keys])

    def _written(self, t: int) -> tuple[Tensor, ...]:
        answer = run_module(self._module, self._read(), self._device, single=self._single)
        written = tuple([answer.get(key, None) for key in self._keys])
        if any(leaf is None for leaf in written):
            outputs = outputs_of(answer, {*self._inputs, *self._given()})
            raise PolicyError(
                f"step {t} of this batch: the policy wrote {names_of(outputs)} after "
                f"{names_of(self._names)}: write the same keys at every step"
            )
        return written

    def _carry(self, written: Sequence[Tensor]) -> None:
        if self._hidden or self._carries:
            by_name = dict(zip(self._names, written, strict=True))
            self._hidden = {path: by_name[self._written_to[path]] for path in self._hidden}
        if self._carries:
            self._carried = {path: leaf for path, leaf in by_name.items() if may_be_read(path)}
        if self._first is not None:
            self._first = self._never

    def _check(self, outputs: Mapping[Path, Any]) -> None:
        if ("action",) not in outputs:
            raise PolicyError(
                f"the policy wrote {names_of(outputs)}, expected 'action' among them: add it to the out_keys"
            )
        own = outputs.keys() - self._written_to.values()
        if taken := sorted({path[0] for path in own} & (RESERVED - {"action", "action_log_prob"})):
            raise PolicyError(f"the policy wrote {taken}, keys that a batch uses itself: rename these out_keys")
        check_hidden(outputs, self._hidden, self._written_to)

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Give these lanes their initial hidden states, zeros for what is carried, and say so in ``is_init``."""
        if not self._stateful:
            return
        mask = lane_mask(lanes, self._actor_inputs.num_envs)
        if self._first is not None:
            self._first = self._first | mask[:, None]
        for path, leaf in self._hidden.items():
            initial = self._actor_inputs.initial_state.recurrent[path].to(leaf.device)
            self._hidden[path] = select(mask.to(leaf.device), initial, leaf)
        for path, leaf in self._carried.items():
            self._carried[path] = select(mask.to(leaf.device), torch.zeros_like(leaf), leaf)

    def finish(self) -> tuple[TorchPolicyState, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        names = [*self._names, *self._given()]
        recorded = self._recorder.columns()
        columns = dict(
            zip(names, [column.unsqueeze(1) for column in recorded] if self._single else recorded, strict=True)
        )
        if self._first is not None:
            columns["next", *INIT] = torch.zeros_like(columns[INIT])
        hidden, carried = (
            {path: leaf.clone() for path, leaf in each.items()} for each in (self._hidden, self._carried)
        )
        state = TorchPolicyState(hidden or None, self._generator, carried or None)
        return state, finish_columns(columns, self._actor_inputs.spec, ties=True)

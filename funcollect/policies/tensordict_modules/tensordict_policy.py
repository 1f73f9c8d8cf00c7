"""Policies that are called on a TensorDict: `TensorDictModule`, TorchRL's actors, functions of a ``tensordict``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, set_interaction_type
from torch import Tensor, nn
from typing_extensions import override

from funcollect.arguments import check_call, checked_device
from funcollect.errors import PolicyError
from funcollect.keys import torch_generator
from funcollect.messages import name_of
from funcollect.policies.base import Recorder, device_of, lane_mask
from funcollect.policies.checks import check_action, finish_columns
from funcollect.policies.tensordict_modules import calling
from funcollect.policies.tensordict_modules.calling import INIT, batched, by_path, names_of, paths_of
from funcollect.policies.torch_modules.torch_backed import Compiler, TorchBacked, TorchPolicyState, check_module
from funcollect.protocols import Actor, ActorInputs, Columns
from funcollect.specs import RESERVED, ExplorationType
from funcollect.tree import Path, as_path, key_of, nest, select

_WORTH_WATCHING = 16  # the fewest steps of a rollout for which a policy is called by its parts


def tensordict_policy(
    module: Callable[..., Any],
    *,
    initial_state: Mapping[Any, Any] | None = None,
    compile: Literal["xla", "eager"] | None = None,  # noqa: A002  (as `torch_policy` has it)
    device: torch.device | str | None = None,
) -> TensorDictPolicy:
    """A policy from a module or function of a TensorDict [P]; collectors make one of such a module by themselves.

    The module writes ``action`` and whatever else is to be recorded, each [P, ...]. Over an environment without a batch
    dimension the TensorDict's batch size is [], as in TorchRL. A key that the module reads, and writes under "next" as
    well, is a hidden state: it is carried from step to step, starts again with each trajectory, and is in the batch
    under both keys. So is a key that it reads and writes under the same name, if its initial value is known. A module
    that reads ``is_init`` [P, 1] gets True at the first step of a trajectory.

    Functions, and modules other than those of tensordict and TorchRL, find everything that they wrote at the step
    before, except the action: nothing at the very first step, and zeros in a lane that has begun another trajectory.

    ``exploration_type`` sets tensordict's interaction type. Torch's global generator runs from the policy's own state.

    Args:
        module: a `TensorDictModule` or `TensorDictSequential`, one of TorchRL's actors, or a function of a TensorDict.
        initial_state: the hidden states at the start of an episode, by key, without a batch dimension; by default
            those of the module's primers (`make_tensordict_primer`).
        compile: demands one way of running, as for `torch_policy`. A module that draws random numbers is not lowered.
        device: where the policy runs; by default where its parameters are.

    Raises:
        TypeError: for a module that cannot be called, or a network in it that takes other arguments than its in_keys.
        ValueError: for a hidden state whose initial value is not known.

    >>> import torch, funcollect as fc
    >>> from tensordict.nn import TensorDictModule
    >>> policy = tensordict_policy(TensorDictModule(lambda x: (x[:, 2] > 0).long(), ["observation"], ["action"]))
    """
    check_module(module, "a TensorDictModule or a function of a TensorDict", 1, compile, ("xla", "eager"))
    hidden = calling.initial_hidden_states(module, initial_state)
    return TensorDictPolicy(module, checked_device(device), hidden, compile)


class TensorDictPolicy(TorchBacked):
    """See `tensordict_policy`. Its `hidden_states` are those of one environment at the start of an episode."""

    def __init__(
        self, module: Any, device: torch.device | None, hidden: Mapping[Path, Tensor], compiler: Compiler | None = None
    ) -> None:
        _check_networks(module)
        super().__init__(module, device, hidden or None, compiler)
        self.hidden_states = dict(hidden)
        writes = set(paths_of(module, "out_keys"))
        same = {path for path in writes if ("next", *path) not in writes}
        # By the path of each hidden state, the path of its next value.
        self.written = {path: path if path in same else ("next", *path) for path in self.hidden_states}

    @property
    def reads_init(self) -> bool:
        """Whether the module reads ``is_init``."""
        return INIT in paths_of(self.module, "in_keys")

    @property
    def log_prob_paths(self) -> list[Path]:
        """Where the module writes the log-probability of its action, under names of its own."""
        parts = self.module.modules() if isinstance(self.module, nn.Module) else ()
        drawing = [part for part in parts if isinstance(part, ProbabilisticTensorDictModule) and part.return_log_prob]
        pairs = [[*map(as_path, part.out_keys)] for part in drawing if len(part.out_keys) == 2]
        return [log_prob for action, log_prob in pairs if action[-1] == "action"]

    @override
    def remembers(self, policy_state: Any, /) -> bool:
        return bool(self.hidden_states) or self.reads_init or self.rereads()

    def rereads(self, observation: Any = None) -> bool:
        """Whether the module may read its outputs of the step before, other than hidden states and `observation`."""
        seen = {} if observation is None else by_path(observation)
        return calling.reads_what_it_wrote(self.module, {*seen, *self.hidden_states})

    def moves_to(self, observation: Any) -> torch.device | None:
        """The device to which the module's inputs are moved; None if they stay where the `observation` is."""
        return self.device or (self.run_device if self.run_device != device_of(observation) else None)

    def inputs_of(
        self, observation: Any, recurrent: Any, *, single: bool
    ) -> tuple[dict[Path, Any], tuple[int, ...], set[Path]]:
        """The module's inputs by path, their batch size, and the paths that are not outputs even if it writes them."""
        seen, hidden = by_path(observation), recurrent or {}
        inputs = {path: leaf[0] if single else leaf for path, leaf in (seen | hidden).items()}
        size = () if single else tuple(next(iter(inputs.values())).shape[:1])
        return inputs, size, {*seen, *(path for path in hidden if self.written.get(path) != path)}

    @override
    def __call__(self, *arguments: Any) -> tuple[TorchPolicyState, Mapping[str, Any]]:
        """One step by itself, which is not the first of a trajectory. The outputs hold no hidden states."""
        policy_state, outputs = super().__call__(*arguments)
        hidden = {".".join(path) for path in (INIT, *self.hidden_states)}
        return policy_state, {name: leaf for name, leaf in outputs.items() if name.removeprefix("next.") not in hidden}

    def arguments(self, observation: Any, recurrent: Any) -> tuple[Any, ...]:
        """The arguments of the module, with a dict in the place of the TensorDict."""
        return (nest(by_path(observation) | (recurrent or {})),)

    @override
    def initial_carry(self, observation: Any) -> dict[Path, Tensor] | None:
        """The hidden states, and ``is_init`` if the module reads it and the example `observation` does not hold it."""
        added = self.reads_init and INIT not in by_path(observation)
        return self.hidden_states | ({INIT: torch.ones(1, dtype=torch.bool)} if added else {}) or None

    def call_module(
        self, module: Any, observation: Any, recurrent: Any, exploration_type: ExplorationType, *, single: bool = False
    ) -> dict[str, Any]:
        """The nested outputs [P, ...] of `module`, which is this policy's module bound to parameters."""
        inputs, size, read = self.inputs_of(observation, recurrent, single=single)
        with set_interaction_type(exploration_type):
            outputs = calling.run_module(module, inputs, self.moves_to(observation), size, read)
        calling.check_hidden(outputs, {path: inputs[path] for path in self.hidden_states}, self.written)
        return nest({path: batched(leaf) for path, leaf in outputs.items()} if single else outputs)

    def recorded(self, outputs: Mapping[Path, Any], recurrent: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
        """The `outputs` of one call for the batch, and the next value of each `recurrent` state, of Torch or JAX."""
        read, written = recurrent or {}, self.written
        outputs = {**outputs, **{path: leaf for path, leaf in read.items() if written.get(path) != path}}
        if INIT in read:
            outputs["next", *INIT] = read[INIT] != read[INIT]  # False
        return outputs, {path: outputs[written.get(path, ("next", *path))] for path in read}

    @override
    def actor(self, inputs: ActorInputs, /) -> TensorDictActor:
        return TensorDictActor(self, inputs)


def _check_networks(module: Any) -> None:
    """Raise TypeError for a `TensorDictModule` whose network cannot take its in_keys as arguments."""
    for part in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, TensorDictModule) and type(part).forward is TensorDictModule.forward:
            network, names = part.module, part._kwargs or ()
            called = getattr(network, part.method) if part.method else network
            wanted = f"an argument for each of the in_keys {part.in_keys} of its {type(part).__name__}"
            count = 0 if names else len(part.in_keys)
            check_call(name_of(network), called, wanted, count, *names, *part.method_kwargs)


class TensorDictActor(Actor):
    """Calls the module on one TensorDict per step, or its parts without a TensorDict if they return the same.

    Over a single environment, inputs, memory and outputs have no batch dimension.
    """

    def __init__(self, policy: TensorDictPolicy, inputs: ActorInputs) -> None:
        self._policy, self._single = policy, inputs.single
        self._device, place = policy.moves_to(inputs.observation), device_of(inputs.observation)
        self._run_device = policy.run_device or place
        before, initial = (state.on(self._run_device) for state in (inputs.policy_state, inputs.initial_state))
        hidden = {path: before.recurrent[path] for path in policy.written}
        self._initial: dict[Path, Tensor] = dict(initial.recurrent or {})
        if policy.reads_init and INIT not in by_path(inputs.observation):
            hidden[INIT] = torch.zeros(inputs.num_envs, 1, dtype=torch.bool, device=place)
            self._initial[INIT] = torch.ones_like(hidden[INIT])
        self._inputs, self._size, self._read = policy.inputs_of(inputs.observation, hidden, single=self._single)
        carried = {path: leaf[0] if self._single else leaf for path, leaf in (before.carried or {}).items()}
        # The module's inputs besides the observation.
        self._memory = carried | {path: self._inputs.pop(path) for path in hidden}
        self._carries = policy.rereads(inputs.observation)
        self._stateful = stateful = self._carries or bool(self._initial)
        self._begin(inputs)
        # Calling parts requires a policy that samples and has no hidden states, and pays only in a long rollout.
        short = inputs.length < _WORTH_WATCHING
        as_a_whole = self._device is not None or stateful or not inputs.stochastic or short
        self._parts = None if as_a_whole else calling.plain_parts(self._module)
        self._values: calling.Values = {}
        self._seen: Any = None  # the keys of the module's outputs, once they were checked

    @override
    def again(self, inputs: ActorInputs, /) -> bool:
        self._begin(inputs)
        alike = not self._stateful and self._parts is None
        return alike and self._policy.bound_device in (None, self._run_device)

    def _begin(self, inputs: ActorInputs) -> None:
        self._rollout, self._module = inputs, self._policy.bound(inputs.params)
        self._generator = inputs.policy_state.generator.clone()
        self._recorder = Recorder(inputs.observation, inputs.length, always_copy=self._stateful)

    @override
    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        generator = torch_generator(self._generator, self._run_device)
        with set_interaction_type(self._rollout.exploration.type), generator:
            yield

    @override
    def act(self, t: int) -> Any:
        if self._parts is not None and t > 0:
            values = self._values.copy()
            for part in self._parts:
                part.run(values)
            written = tuple([values[key] for key in self._keys])
        else:
            written = self._step(t)
        action = batched(written[self._action_at]) if self._single else written[self._action_at]
        if t == 0 or action.shape[1:] != self._rollout.spec.shape:
            check_action(action, self._rollout.spec, self._rollout.num_envs, Tensor)
        self._recorder.append(written)
        return action

    def _step(self, t: int) -> tuple[Tensor, ...]:
        """Call the module, and set `_memory` for the next step. Returns the entries to record, ordered as `_names`."""
        # Copies, since a module may write the next state into the memory of this one.
        before = {path: self._memory[path].clone() for path in self._initial}
        outputs = self._called() if t else self._first()
        if t and not outputs.keys() >= self._wrote:
            what = f"it wrote {names_of(outputs)} after {names_of(self._wrote)}"
            raise PolicyError(f"step {t} of this batch: {what}: write equal keys")
        recorded, after = self._policy.recorded(outputs, before)
        if t == 0 and self._seen != outputs.keys():
            self._seen = {*outputs}
            self._names = sorted(path for path, leaf in recorded.items() if isinstance(leaf, Tensor))
            self._keys, self._action_at = list(map(key_of, self._names)), self._names.index(("action",))
        tensors = {path: recorded[path] for path in self._names}
        self._memory = (calling.found_again(tensors) if self._carries else {}) | after
        return tuple(tensors.values())

    def _called(self) -> Mapping[Path, Any]:
        inputs = self._inputs | self._memory
        return calling.run_module(self._module, inputs, self._device, self._size, self._read)

    def _first(self) -> Mapping[Path, Any]:
        """The outputs of the first step, checked. It also decides whether the parts are called at later steps."""
        if self._parts is None:
            outputs = self._called()
        else:
            self._values = {key_of(path): leaf for path, leaf in self._inputs.items()}
            outputs, same = calling.compared(self._parts, self._values, self._run_device, self._called)
            self._parts = self._parts if same else None
        if outputs.keys() == self._seen:
            return outputs
        action = outputs.get(("action",))
        self._actions = [path for path, leaf in outputs.items() if leaf is action]  # with a nested one
        if ("action",) not in outputs:
            mend = "name it in out_keys"
            raise PolicyError(f"the policy wrote {names_of(outputs)}, expected 'action' among them: {mend}")
        hidden = self._policy.written
        roots = {path[0] for path in outputs.keys() - hidden.values()}
        if taken := sorted(roots & (RESERVED - {"action", "action_log_prob"})):
            raise PolicyError(f"the policy wrote {taken}, keys that a batch uses itself: rename these out_keys")
        calling.check_hidden(outputs, {path: self._memory[path] for path in hidden}, hidden)
        self._wrote = {path for path, leaf in outputs.items() if isinstance(leaf, Tensor)}
        return outputs

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Set the memory of these lanes to its initial values, or to zero where there are none."""
        mask = lane_mask(lanes, self._rollout.num_envs) if self._memory else torch.empty(0)
        for path, leaf in self._memory.items():
            rows = batched(leaf) if self._single else leaf
            start = self._initial[path].to(leaf.device) if path in self._initial else torch.zeros_like(rows)
            rows = select(mask.to(leaf.device), start, rows)
            self._memory[path] = rows[0] if self._single else rows

    @override
    def finish(self) -> tuple[TorchPolicyState, Columns]:
        columns = dict(zip(self._names, self._recorder.columns(), strict=True))
        memory = {path: leaf.clone() for path, leaf in self._memory.items()}
        if self._single:
            columns = {path: column.unsqueeze(1) for path, column in columns.items()}
            memory = {path: batched(leaf) for path, leaf in memory.items()}
        hidden = {path: memory[path] for path in self._policy.written}
        carried = {path: leaf for path, leaf in memory.items() if path not in self._initial}
        state = TorchPolicyState(hidden or None, self._generator, carried or None)
        finished = finish_columns(columns, self._rollout.spec, ties=True)
        return state, finished | dict.fromkeys(self._actions, finished["action",])

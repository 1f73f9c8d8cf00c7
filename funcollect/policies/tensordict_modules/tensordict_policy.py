"""Policies that are called on a TensorDict: `TensorDictModule`, TorchRL's actors, functions of a ``tensordict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from tensordict.nn import set_interaction_type
from torch import Tensor
from typing_extensions import override

from funcollect.devices import checked_device
from funcollect.keys import Key, Purpose, fold, generator_state, torch_generator
from funcollect.policies.tensordict_modules.actor import TensorDictActor
from funcollect.policies.tensordict_modules.calling import by_path, check_hidden, may_be_read, outputs_of, run_module
from funcollect.policies.tensordict_modules.hidden_states import (
    INIT,
    initial_hidden_states,
    paths,
    reads_what_it_wrote,
    written_by,
)
from funcollect.policies.torch_backed import Compiler, TorchBacked, TorchPolicyState, check_callable, check_compiler
from funcollect.protocols import ActorInputs, Exploration
from funcollect.specs import ActionSpec, ExplorationType
from funcollect.tree import Path, nest


def tensordict_policy(
    module: Callable[..., Any],
    *,
    initial_state: Mapping[Any, Any] | None = None,
    compile: Literal["xla", "callback", "eager"] | None = None,  # noqa: A002  (as `torch_policy` has it)
    device: torch.device | str | None = None,
) -> TensorDictPolicy:
    """A policy from what is called on a TensorDict [P]; a collector makes it by itself.

    The module reads its in_keys, and writes ``action`` and whatever else is to be recorded, each [P, ...]. Over an
    environment without a batch dimension the TensorDict has none, as in TorchRL: its batch size is []. A key that
    it reads and also writes as ``("next", key)`` is a hidden state: it is carried from step to step, begins anew with
    each trajectory, and stands in the batch under both keys. So is one that it reads and writes under the same key, if
    its start is known. ``is_init`` [P, 1], True at a trajectory's first step, is there for a module that reads it.

    Functions, and modules other than those of tensordict and TorchRL, find all that they wrote at the step before,
    except the action. It is absent at the very first step, and zero in a lane that has begun another trajectory.

    ``exploration_type`` sets tensordict's interaction type. What is drawn from Torch's global generator comes from a
    state of its own.

    Args:
        module: a `TensorDictModule` or `TensorDictSequential`, one of TorchRL's actors, or a function of a TensorDict.
        initial_state: the hidden states at the start of an episode, by key, without a batch dimension; unless given,
            those of the module's primers (`make_tensordict_primer`).
        compile: demands one way of running, as for `torch_policy`, hidden states or not; what draws random numbers is
            not lowered.
        device: where the policy runs; unless given, where its parameters are.

    Raises:
        TypeError: for a module that cannot be called.
        ValueError: for a hidden state of which nothing says how it begins.

    >>> import torch, funcollect as fc
    >>> from tensordict.nn import TensorDictModule
    >>> policy = tensordict_policy(TensorDictModule(lambda x: (x[:, 2] > 0).long(), ["observation"], ["action"]))
    >>> env = fc.make_env("CartPole-v1", num_envs=3)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    >>> batch["action"].shape
    torch.Size([3, 5])
    """
    check_callable(module, "a TensorDictModule or a function")
    check_compiler(compile, without="inductor")
    return TensorDictPolicy(module, checked_device(device), initial_hidden_states(module, initial_state), compile)


class TensorDictPolicy(TorchBacked):
    """See `tensordict_policy`.

    Args:
        module: the user's.
        device: where it is to run; None for where it is.
        hidden_states: those at the start of an episode, in one environment.
        compiler: the way of running that is demanded.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        device: torch.device | None = None,
        hidden_states: Mapping[Path, Tensor] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(module, device)
        self.compiler = compiler
        self.head = None
        self.initial_state = None
        self.hidden_states = dict(hidden_states or {})
        self.written = {path: written_by(module, path) for path in self.hidden_states}

    @property
    def reads_init(self) -> bool:
        """Whether the module reads ``is_init``."""
        return INIT in paths(getattr(self.module, "in_keys", None))

    @override
    def remembers(self, policy_state: Any, /) -> bool:
        return bool(self.hidden_states) or self.reads_init or reads_what_it_wrote(self.module)

    def inputs_of(self, observation: Any, recurrent: Any) -> tuple[dict[Path, Any], set[Path]]:
        """What the module reads, by path, and which of it is no output where it writes that."""
        seen, hidden = by_path(observation), recurrent or {}
        return seen | hidden, {*seen, *(path for path in hidden if self.written.get(path) != path)}

    @override
    def init(self, key: Key, num_envs: int, /) -> TorchPolicyState:
        """The hidden states of each lane, and a generator seeded from the key."""
        hidden = {path: leaf.expand(num_envs, *leaf.shape).clone() for path, leaf in self.hidden_states.items()}
        return TorchPolicyState(hidden or None, generator_state(fold(key, Purpose.GENERATOR)))

    @override
    def __call__(
        self,
        params: Any,
        policy_state: TorchPolicyState,
        observation: Any,
        noise: Any,
        spec: ActionSpec,
        exploration: Exploration,
        /,
    ) -> tuple[TorchPolicyState, Mapping[str, Any]]:
        """One step by itself, no trajectory's first: see `funcollect.Policy`."""
        generator = policy_state.generator.clone()
        inputs, read = self.inputs_of(observation, policy_state.recurrent)
        if self.reads_init and INIT not in inputs:
            inputs[INIT] = torch.zeros(next(iter(inputs.values())).shape[0], 1, dtype=torch.bool)
        inputs |= policy_state.carried or {}
        with torch.no_grad(), set_interaction_type(exploration.type), torch_generator(generator):
            outputs = outputs_of(run_module(self.bound(params), inputs, self.device), {*read, INIT})
        hidden = {path: outputs[after] for path, after in self.written.items()}
        carried = (
            {path: leaf for path, leaf in outputs.items() if may_be_read(path)}
            if reads_what_it_wrote(self.module)
            else None
        )
        named = {".".join(path): leaf for path, leaf in outputs.items() if path not in self.written.values()}
        return TorchPolicyState(hidden or None, generator, carried or None), named

    def arguments(self, observation: Any, recurrent: Any) -> tuple[Any, ...]:
        """What the module is called with, a dict for a TensorDict."""
        return (nest(by_path(observation) | (recurrent or {})),)

    def initial_carry(self, observation: Any) -> dict[Path, Tensor] | None:
        """What a loop of JAX carries, in one environment at the start of an episode: ``is_init``, too, if it is read.

        `observation` is an example; it may deliver ``is_init`` by itself.
        """
        tells = self.reads_init and INIT not in by_path(observation)
        return self.hidden_states | ({INIT: torch.ones(1, dtype=torch.bool)} if tells else {}) or None

    def call_module(
        self,
        module: Callable[..., Any],
        observation: Any,
        recurrent: Any,
        exploration_type: ExplorationType,
        *,
        single: bool = False,
    ) -> dict[str, Any]:
        """What `module`, this policy's own bound to parameters, writes, nested, hidden states under ``next``.

        All leaves are [P, ...]; for a `single` environment the module is called without a batch dimension.
        """
        inputs, read = self.inputs_of(observation, recurrent)
        with set_interaction_type(exploration_type):
            outputs = outputs_of(run_module(module, inputs, self.device, single=single), read, single=single)
        check_hidden(outputs, {path: inputs[path] for path in self.hidden_states}, self.written)
        return nest(outputs)

    @override
    def actor(self, inputs: ActorInputs, /) -> TensorDictActor:
        return TensorDictActor(
            inputs,
            self.bound(inputs.params),
            self.device,
            reads_init=self.reads_init,
            written=self.written,
            carries=reads_what_it_wrote(self.module),
        )

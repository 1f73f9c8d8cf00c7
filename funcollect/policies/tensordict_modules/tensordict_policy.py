"""Policies that are called on a TensorDict: `TensorDictModule`, TorchRL's actors, functions of a ``tensordict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from tensordict.nn import TensorDictModule, set_interaction_type
from torch import Tensor, nn
from typing_extensions import override

from funcollect.arguments import check_call, checked_device
from funcollect.messages import name_of
from funcollect.policies.actors.actor import device_of
from funcollect.policies.tensordict_modules.actor import TensorDictActor
from funcollect.policies.tensordict_modules.calling import (
    INIT,
    by_path,
    check_hidden,
    initial_hidden_states,
    outputs_of,
    paths_of,
    reads_what_it_wrote,
    run_module,
    written_by,
)
from funcollect.policies.torch_backed import Compiler, TorchBacked, TorchPolicyState, check_callable, check_compiler
from funcollect.protocols import ActorInputs
from funcollect.specs import ExplorationType
from funcollect.tree import Path, flatten, nest


def tensordict_policy(
    module: Callable[..., Any],
    *,
    initial_state: Mapping[Any, Any] | None = None,
    compile: Literal["xla", "eager"] | None = None,  # noqa: A002  (as `torch_policy` has it)
    device: torch.device | str | None = None,
) -> TensorDictPolicy:
    """A policy from a module or function of a TensorDict [P]; a collector makes it by itself.

    The module reads its in_keys. It writes ``action`` and whatever else is to be recorded, each [P, ...]. Over an
    environment without a batch dimension the TensorDict's batch size is [], as in TorchRL. A key that the module reads
    and also writes as ``("next", key)`` is a hidden state: it is carried from step to step, starts again with each
    trajectory, and is in the batch under both keys. So is a key that it reads and writes under the same name, if its
    initial value is known. A module that reads ``is_init`` [P, 1] gets True at the first step of a trajectory.

    Functions, and modules other than those of tensordict and TorchRL, find everything that they wrote at the step
    before, except the action. These keys are absent at the very first step, and zero in a lane that has begun another
    trajectory.

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
    >>> env = fc.make_env("CartPole-v1", num_envs=3)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    >>> batch["action"].shape
    torch.Size([3, 5])
    """
    check_callable(module, "a TensorDictModule or a function of a TensorDict", 1)
    check_compiler(compile, without=("inductor", "cudagraph"))
    return TensorDictPolicy(module, checked_device(device), initial_hidden_states(module, initial_state), compile)


class TensorDictPolicy(TorchBacked):
    """See `tensordict_policy`. `hidden_states` are those at the start of an episode, in one environment."""

    def __init__(
        self,
        module: Callable[..., Any],
        device: torch.device | None = None,
        hidden_states: Mapping[Path, Tensor] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        _check_networks(module)
        super().__init__(module, device, hidden_states or None, compiler)
        self.hidden_states = dict(hidden_states or {})
        # By the path of each hidden state, the path of its next value.
        self.written = {path: written_by(module, path) for path in self.hidden_states}

    @property
    def reads_init(self) -> bool:
        """Whether the module reads ``is_init``."""
        return INIT in paths_of(self.module, "in_keys")

    @override
    def remembers(self, policy_state: Any, /) -> bool:
        return bool(self.hidden_states) or self.reads_init or reads_what_it_wrote(self.module)

    def moves_to(self, observation: Any) -> torch.device | None:
        """The device to which the module's inputs are moved; None if they stay where the `observation` is."""
        return self.device or (self.run_device if self.run_device != device_of(observation) else None)

    def inputs_of(self, observation: Any, recurrent: Any) -> tuple[dict[Path, Any], set[Path]]:
        """The module's inputs by path, and the paths that are not outputs even if the module writes them."""
        seen, hidden = by_path(observation), recurrent or {}
        return seen | hidden, {*seen, *(path for path in hidden if self.written.get(path) != path)}

    @override
    def __call__(self, *arguments: Any) -> tuple[TorchPolicyState, Mapping[str, Any]]:
        """One step by itself, which is no trajectory's first. The outputs hold no hidden states."""
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
        inputs, read = self.inputs_of(observation, recurrent)
        with set_interaction_type(exploration_type):
            answer = run_module(module, inputs, self.moves_to(observation), single=single)
            outputs = outputs_of(answer, read, single=single)
        check_hidden(outputs, {path: inputs[path] for path in self.hidden_states}, self.written)
        return nest(outputs)

    def recorded(self, answer: Any, recurrent: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
        """The outputs of one call for the batch, and the next value of each state in `recurrent`, of Torch or JAX."""
        read, written = recurrent or {}, self.written
        outputs = {**flatten(answer), **{path: leaf for path, leaf in read.items() if written.get(path) != path}}
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
            count = 0 if names else len(part.in_keys)
            wanted = f"an argument for each of the in_keys {part.in_keys} of its {type(part).__name__}"
            check_call(name_of(network), called, wanted, count, *names, *part.method_kwargs)

"""Base class of policies, and the actor that calls a policy at every step."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import optree
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.interop.bridge import jax_view
from funcollect.interop.jax_setup import own_generator
from funcollect.keys import Key, Noise
from funcollect.messages import kind_of
from funcollect.policies.actors.actor import (
    Recorder,
    array_over,
    device_of,
    lane_mask,
    select_program,
    split_call,
    tensor_over,
)
from funcollect.policies.actors.checks import check_action, finish_columns
from funcollect.policies.heads.head import Head
from funcollect.policies.weights import copied, matched, state_dict_of
from funcollect.protocols import Actor, ActorInputs, Columns, Exploration, Policy, is_env, is_policy
from funcollect.specs import ActionSpec
from funcollect.tree import NAMESPACE, Path, moved, select


class PolicyBase(ABC):
    """Subclass this with `backend` (``"torch"`` or ``"jax"``), `params` and `__call__`, a pure function.

    The other members of `funcollect.Policy` have defaults: no parameters to prepare, no noise, no state.

    >>> import torch, funcollect as fc
    >>> class Lean(fc.PolicyBase):
    ...     backend, params = "torch", None
    ...     def __call__(self, params, policy_state, observation, noise, spec, exploration):
    ...         return policy_state, {"action": (observation[:, 2] > 0).long()}
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> state, batch = fc.rollout(env, Lean(), fc.init(env, Lean(), seed=0), 8)
    >>> batch["action"].shape
    torch.Size([2, 8])
    """

    backend: Any  # "torch" or "jax"; over a narrower type, pyright refuses the literal that a subclass declares
    params: Any
    exploration: Mapping[str, float] = MappingProxyType({})
    nested: Sequence[Path] = ()

    def check(self, spec: ActionSpec, /) -> None:  # noqa: B027  (every space suits)
        """Raise ValueError for an action space that does not suit."""

    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """The random numbers to draw ahead for each lane and step, or None."""
        return None

    def init(self, key: Key, num_envs: int, /) -> Any:
        """The policy's initial state; its leaves are [P, ...], and tensors are brought to the observation's device."""
        return None

    def prepare(self, params: Any, /) -> Any:
        """Parameters in the form that the call takes: the policy's own for None, or others of the same structure."""
        return self.params if params is None else matched(self.params, params, self.backend)

    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        """A copy of `params`, or of the policy's own, as tensors by path, for workers and for saving."""
        given = self.params if params is None else matched(self.params, params, self.backend)
        return state_dict_of(given, self.backend)

    def load(self, params: Any) -> None:
        """Set `params` to a copy of a pytree like them, or of the result of `state_dict`.

        An optimizer over the previous tensors has to be made again. ValueError for other paths or shapes.
        """
        copy = copied(self.params, params, self.backend)
        try:
            self.params = copy
        except AttributeError as error:
            raise TypeError(
                f"params of {type(self).__name__} cannot be set, expected an attribute: give it a setter, or override "
                "load"
            ) from error

    def remembers(self, policy_state: Any, /) -> bool:
        """Whether a step may depend on those before it."""
        return bool(optree.tree_leaves(policy_state, namespace=NAMESPACE))

    def actor(self, inputs: ActorInputs, /) -> Actor:
        """The policy bound to one rollout."""
        return ProtocolActor(self, inputs)

    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        """The outputs of a rollout, checked, with the dtypes that a batch has."""
        return finish_columns(columns, spec)

    @abstractmethod
    def __call__(
        self,
        params: Any,
        policy_state: Any,
        observation: Any,
        noise: Any,
        spec: ActionSpec,
        exploration: Exploration,
        /,
    ) -> tuple[Any, Mapping[str, Any]]:
        """One action for each of P environments: the next policy state and the outputs (see `funcollect.Policy`)."""


class HeadedPolicy(PolicyBase):
    """Base class of policies over a module or a function, whose answers may be read by a head."""

    head: Head | None = None
    initial_state: Any = None  # the recurrent state of one environment at the start of an episode

    @property
    @override
    def exploration(self) -> Mapping[str, float]:  # type: ignore[override]
        return self.head.values if self.head else {}

    @override
    def check(self, spec: ActionSpec, /) -> None:
        if self.head is not None:
            self.head.check(spec)

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return self.head.noise(spec) if self.head else None


class ProtocolActor(Actor):
    """Calls a policy at every step. The leaves of the policy's state are [P, ...].

    A policy in Torch gets its state and its noise on the device of the observation. For one in JAX, observations that
    are tensors cross by DLPack, each way. That orders a reader after the writer: the call waits for the observation,
    and Torch waits for the call when it reads the action. So the environment's next step may write the observation's
    memory. `call` replaces the policy's: from its state, an observation and the step to its next state and outputs.
    """

    def __init__(self, policy: Policy, inputs: ActorInputs, call: Callable[..., Any] | None = None) -> None:
        self._policy, self._inputs, self._call = policy, inputs, call
        in_jax = policy.backend == "jax"
        self._device = device_of(inputs.observation)
        given: Any = (inputs.policy_state, inputs.initial_state, inputs.noise)
        stays = in_jax or self._device.type == "cpu"
        self._state, self._initial, noise = given if stays else moved(given, self._device)
        if in_jax and noise is not None:
            noise = noise.numpy()
        self._noise = [None] * inputs.length if noise is None else noise
        self._generator = own_generator if in_jax else contextlib.nullcontext
        tensors = optree.tree_leaves(inputs.observation, namespace=NAMESPACE)
        self._crosses = in_jax and any(isinstance(leaf, Tensor) for leaf in tensors)
        self._as_tensor: Callable[[Any], Tensor] = tensor_over if self._crosses else torch.as_tensor
        self._held: Any = None
        self._wanted = (inputs.num_envs, *inputs.spec.shape)
        self._recorder = Recorder(inputs.observation, inputs.length)

    @override
    def running(self) -> contextlib.AbstractContextManager[Any]:
        return torch.no_grad()

    def _called(self, state: Any, observation: Any, t: int) -> tuple[Any, Mapping[str, Any]]:
        inputs = self._inputs
        with self._generator():
            answer = self._policy(inputs.params, state, observation, self._noise[t], inputs.spec, inputs.exploration)
        return split_call(answer)

    @override
    def act(self, t: int) -> Any:
        observation = self._inputs.observation
        if self._crosses:
            observation = optree.tree_map(array_over, observation)
        self._state, outputs = (self._call or self._called)(self._state, observation, t)
        action = outputs["action"]
        if t == 0 or getattr(action, "shape", None) != self._wanted:
            check_action(action, self._inputs.spec, self._inputs.num_envs)
        extras = self._recorder.ordered(t, {name: each for name, each in outputs.items() if name != "action"})
        recorded = tuple(map(self._as_tensor, (action, *extras)))
        self._recorder.append(recorded)
        if not self._crosses:
            return action
        self._held = (observation, outputs)  # until the next call is under way
        return recorded[0]

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        if self._state is not None:
            mask = lane_mask(lanes, self._inputs.num_envs).to(self._device)
            if self._policy.backend == "jax":
                crossed = jax_view(mask) if self._crosses else mask.numpy()
                self._state = select_program()(crossed, self._initial, self._state)
            else:
                self._state = select(mask, self._initial, self._state)

    @override
    def finish(self) -> tuple[Any, Columns]:
        paths = [(name,) for name in ("action", *(self._recorder.names or ()))]
        columns: Columns = dict(zip(paths, self._recorder.columns(), strict=True))
        return self._state, self._policy.finish(columns, self._inputs.spec)


def check_policy(policy: Any) -> None:
    """Raise TypeError unless `policy` is a policy."""
    if is_policy(policy):
        return
    if is_env(policy):
        raise TypeError(f"policy is the environment {type(policy).__name__}, expected a Policy: env comes first")
    mend = "wrap a module with funcollect.torch_policy, a JAX function with funcollect.jax_policy"
    if not isinstance(policy, type) and (hasattr(policy, "prepare") or hasattr(policy, "backend")):
        missing = [name for name in vars(Policy) if not name.startswith("_") and not hasattr(policy, name)]
        mend = f"it lacks {missing}: derive from funcollect.PolicyBase, which has all but backend, params and the call"
    raise TypeError(f"policy is {kind_of(policy)}, expected a Policy: {mend}")

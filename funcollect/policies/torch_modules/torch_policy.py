"""Torch modules as policies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from typing_extensions import override

from funcollect.arguments import check_arrays
from funcollect.devices import checked_device
from funcollect.errors import PolicyError
from funcollect.keys import Key, Noise, Purpose, fold, generator_state, torch_generator
from funcollect.policies.actors.actor import NoiseRow, Recorder, lane_mask, memory_of, split_answer
from funcollect.policies.actors.checks import check_action, check_recurrent, check_tensor, finish_columns
from funcollect.policies.heads import Head, check_head, chosen_by
from funcollect.policies.numerics import TORCH
from funcollect.policies.torch_backed import Compiler, TorchBacked, TorchPolicyState, check_callable, check_compiler
from funcollect.policies.torch_modules.compiled import CompiledCall
from funcollect.protocols import ActorInputs, Columns, Exploration
from funcollect.specs import ActionSpec, ExplorationType
from funcollect.tree import select


def torch_policy(
    module: nn.Module | Callable[..., Any],
    *,
    head: Head | None = None,
    initial_state: Any = None,
    compile: Compiler | None = None,  # noqa: A002  (TorchRL's collectors and torch itself call it so)
    device: torch.device | str | None = None,
) -> TorchPolicy:
    """A policy from a Torch module.

    Args:
        module: called as ``module(observation)`` with the batch dimension; `observation` is a tensor [P, ...], a dict
            of them for a Dict space, a tuple for a Tuple space. With a head it answers with the distribution's
            parameters, without one with the action; or with a flat dict that holds these and whatever else is to
            be recorded, each [P, ...].
        head: one of `funcollect.heads`.
        initial_state: makes the policy recurrent: the state of one environment at the start of an episode, a pytree of
            tensors without a batch dimension. The module is then called as ``module(observation, state)`` and answers
            ``(answer, next_state)``, with the batch dimension.
        compile: demands one way of running, and makes another an error; None takes the first of these that there is.
            ``"xla"``: the module lowered to JAX (see `funcollect.lower`): fused with an environment written in JAX, or
            one call of XLA per step, head and all, for the others, where None stands for ``"eager"``.
            ``"callback"``: Torch's own forward, called from inside the loop over a JAX environment.
            ``"eager"``: Torch's own forward, called by Python at each step.
            ``"inductor"``: likewise, by `torch.compile`, equal to the module itself within rounding. It takes seconds,
            a C++ compiler, and about 15 microseconds per call, so on a CPU it does not pay for a small MLP.
            On all, weights and buffers that change reach the next rollout without compiling again; training and
            evaluation mode are the module's own at each rollout, and compiled one by one. So do other changes of the
            module: submodules, hooks, patched methods, attributes. What a lowered module does not notice, nor workers:
            attributes and methods set on a class, hooks for all modules, globals, ``__slots__``, and tensors that are
            neither parameters nor buffers written through ``.data``. Make another policy after such a change.
        device: where the policy runs; unless given, where its parameters are.

    Raises:
        TypeError: for a module that cannot be called, or a head that is none.
        ValueError: for a device or a compiler that is not there.

    A module that cannot be lowered, where ``"xla"`` demands it, is a `LoweringError` from `funcollect.init`.

    >>> import torch, funcollect as fc
    >>> policy = torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> env = fc.make_env("CartPole-v1", num_envs=3)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    >>> batch["action"].shape
    torch.Size([3, 5])
    """
    check_callable(module, "a torch.nn.Module or a function")
    check_head(head)
    check_compiler(compile)
    check_arrays("initial_state", optree.tree_leaves(initial_state))
    return TorchPolicy(module, head, initial_state, checked_device(device), compile)


class TorchPolicy(TorchBacked):
    """See `torch_policy`."""

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        head: Head | None,
        initial_state: Any,
        device: torch.device | None,
        compiler: Compiler | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        super().__init__(module, device)
        self.keys = tuple(keys)  # of a Dict space, each of which is an argument of its own; none: all are one
        self.compiler = compiler
        self._compiled = CompiledCall(compiler) if compiler == "inductor" else None
        self.head = head
        self.initial_state = initial_state

    def bound(self, prepared: dict[str, Tensor] | None) -> Callable[..., Any]:
        """The callable over these parameters, compiled where that was asked for."""
        module = super().bound(prepared)
        return module if self._compiled is None else self._compiled(module, self.run_device or torch.device("cpu"))

    def calling(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the module is called."""
        return contextlib.nullcontext() if self._compiled is None else self._compiled.watching_hooks()

    @override
    def check(self, spec: ActionSpec, /) -> None:
        if self.head is not None:
            self.head.check(spec)

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """What the head samples with."""
        return self.head.noise(spec) if self.head else None

    @override
    def init(self, key: Key, num_envs: int, /) -> TorchPolicyState:
        """The initial recurrent state for each lane, and a generator seeded from the key."""
        recurrent = lanes_of(self.initial_state, num_envs, self.device)
        return TorchPolicyState(recurrent, generator_state(fold(key, Purpose.GENERATOR)))

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
        generator = policy_state.generator.clone()
        with torch.no_grad(), torch_generator(generator):
            answer = self.call_module(
                self.bound(params), observation, _copied(policy_state.recurrent), exploration.type
            )
            answer, recurrent = (answer, None) if policy_state.recurrent is None else answer
            inner, extras = split_answer(answer, self.head)
            noise = noise if exploration.type is ExplorationType.RANDOM else None
            chosen = {"action": inner} if self.head is None else chosen_by(self.head, TORCH, inner, noise, spec)
        return TorchPolicyState(recurrent, generator), {**chosen, **extras}

    def initial_carry(self, observation: Any) -> Any:
        """The recurrent state of one environment at the start of an episode; None if there is none."""
        return self.initial_state

    def arguments(self, observation: Any, recurrent: Any) -> tuple[Any, ...]:
        """What the module is called with."""
        observations = tuple([observation[key] for key in self.keys]) if self.keys else (observation,)
        return observations if recurrent is None else (*observations, recurrent)

    def call_module(
        self,
        module: Callable[..., Any],
        observation: Any,
        recurrent: Any,
        exploration_type: ExplorationType,
        *,
        single: bool = False,
    ) -> Any:
        """What `module`, this policy's own bound to parameters, answers."""
        return module(*self.arguments(observation, recurrent))

    @override
    def actor(self, inputs: ActorInputs, /) -> TorchActor:
        return TorchActor(self, inputs)


def lanes_of(initial: Any, num_lanes: int, device: torch.device | None) -> Any:
    """The recurrent state of one environment for each lane, [P, ...], in memory of its own; None for None."""

    def expand(leaf: Any) -> Tensor:
        tensor = torch.as_tensor(leaf, device=device)
        return tensor.expand(num_lanes, *tensor.shape).clone()

    return optree.tree_map(expand, initial)


class TorchActor:
    """One forward pass per step; log-probabilities and checks once at the end."""

    def __init__(self, policy: TorchPolicy, actor_inputs: ActorInputs) -> None:
        self._actor_inputs = actor_inputs
        self._policy = policy
        self._head = policy.head
        module = policy.bound(actor_inputs.params)
        self._module = partial(_with_keys, module, policy.keys) if policy.keys else module
        run_device = policy.run_device
        self._move = _mover(run_device, actor_inputs.observation)
        self._run_device = run_device or torch.device("cpu")
        self._noise = NoiseRow(actor_inputs.noise if actor_inputs.stochastic else None, self._run_device)
        self._observation = actor_inputs.observation
        self._spec = actor_inputs.spec
        self._recurrent = _copied(actor_inputs.policy_state.recurrent)
        self._read = {memory_of(leaf) for leaf in optree.tree_leaves(actor_inputs.observation)}
        self._generator = actor_inputs.policy_state.generator.clone()
        self._wanted = torch.Size((actor_inputs.num_envs, *actor_inputs.spec.shape))
        self._names: tuple[str, ...] | None = None
        self._recorder = Recorder(
            actor_inputs.observation, actor_inputs.length, always_copy=self._recurrent is not None
        )
        self._record = self._recorder.append

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """No gradients, and Torch's global generator running from the policy's state."""
        with torch.no_grad(), torch_generator(self._generator), self._policy.calling():
            yield

    def act(self, t: int) -> Tensor:
        """The action [P, ...] of step `t`."""
        observation = self._observation if self._move is None else self._move(self._observation)
        if self._recurrent is None:
            answer = self._module(observation)
        else:
            answer = self._module(observation, self._recurrent)
            if t == 0:
                check_recurrent(answer, self._recurrent)
            answer, self._recurrent = answer[0], self._apart(answer[1])
        extras: tuple[Tensor, ...] = ()
        if type(answer) is not Tensor and isinstance(answer, Mapping):
            answer, extras = self._open(answer)
        if self._head is None:
            action, parameters = answer, ()
        else:
            parameters = self._head.parse(TORCH, answer, self._spec)
            action = self._head.sample(TORCH, parameters, self._noise.at(t), self._spec)
        if t == 0 or action.shape != self._wanted:
            check_action(action, self._spec, self._actor_inputs.num_envs)
            check_tensor(action)
        self._record((action, *parameters, *extras))
        return action  # type: ignore[no-any-return]

    def _apart(self, recurrent: Any) -> Any:
        """The next recurrent state outside the observation's memory, which the next step overwrites."""
        shared = any(memory_of(leaf) in self._read for leaf in optree.tree_leaves(recurrent))
        return _copied(recurrent) if shared else recurrent

    def _open(self, answer: Mapping[str, Any]) -> tuple[Any, tuple[Tensor, ...]]:
        """A dict's part for the head, or its action, and the extras; their names are fixed by the first step."""
        inner, extras = split_answer(answer, self._head)
        names = tuple(sorted(extras))
        if self._names is None:
            self._names = names
            check_extras(extras, self._actor_inputs.num_envs)
        elif names != self._names:
            raise PolicyError(
                f"the policy answered with the extra keys {list(names)} after {list(self._names)}: keep them the same "
                "at every step"
            )
        return inner, tuple(extras[name] for name in names)

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """Give these lanes their initial recurrent state."""
        if self._recurrent is not None:
            mask = lane_mask(lanes, self._actor_inputs.num_envs).to(self._run_device)
            self._recurrent = select(mask, self._actor_inputs.initial_state.recurrent, self._recurrent)

    def finish(self) -> tuple[TorchPolicyState, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        spec = self._actor_inputs.spec
        columns = self._recorder.columns()
        names = self._names or ()
        action, parameters, extras = (
            columns[0],
            columns[1 : len(columns) - len(names)],
            columns[len(columns) - len(names) :],
        )
        outputs: Columns = {(name,): extra for name, extra in zip(names, extras, strict=True)}
        if self._head is not None:
            outputs |= self._scored(action, tuple(parameters))
            read: Columns = {(name,): each for name, each in zip(self._head.names, parameters, strict=True)}
            outputs = finish_columns({("action",): action, **outputs}, spec, parameters=read, chosen=True)
        else:
            outputs = finish_columns({("action",): action, **outputs}, spec)
        return TorchPolicyState(_copied(self._recurrent), self._generator), outputs

    def _scored(self, action: Tensor, parameters: tuple[Tensor, ...]) -> Columns:
        assert self._head is not None
        noise = self._actor_inputs.noise if self._actor_inputs.stochastic else None
        noise = None if noise is None else noise.to(self._run_device)
        log_prob = self._head.log_prob(TORCH, parameters, action, noise, self._actor_inputs.spec)
        return {} if log_prob is None else {("action_log_prob",): log_prob}


def _with_keys(module: Callable[..., Any], keys: Sequence[str], observation: Mapping[str, Any], *others: Any) -> Any:
    """What the module answers to each of these keys as an argument of its own."""
    return module(*[observation[key] for key in keys], *others)


def _copied(recurrent: Any) -> Any:
    """Recurrent state in memory of its own: a module may write its state in place, or keep what it returned."""
    return None if recurrent is None else optree.tree_map(torch.clone, recurrent)


def _mover(run_device: torch.device | None, observation: Any) -> Callable[[Any], Any] | None:
    """What brings an observation to the policy's device; None where it is there already."""
    if run_device is None or all(leaf.device == run_device for leaf in optree.tree_leaves(observation)):
        return None
    return lambda tree: optree.tree_map(lambda leaf: leaf.to(run_device), tree)


def check_extras(extras: Mapping[str, Any], num_envs: int) -> None:
    """Raise PolicyError for an extra output that has no row per environment."""
    for name, value in extras.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (num_envs,):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise PolicyError(
                f"the policy's extra output {name!r} is {got}, expected a tensor of shape [{num_envs}, ...]: return "
                "one row per environment"
            )

"""JAX functions as policies: one jitted call per step, or a part of a traced loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import optree
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_arrays, check_call, check_flags
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import compiled, import_jax, tracing
from funcollect.interop.memo import memo_of, set_since_use, variables_of
from funcollect.keys import Key, Noise
from funcollect.messages import name_of, note_arguments, shown
from funcollect.policies import base
from funcollect.policies.checks import check_action, check_rows, finish_columns
from funcollect.policies.heads.head import Head, check_head
from funcollect.policies.jax_functions import program
from funcollect.policies.numerics import jax_numerics
from funcollect.policies.random_policy import RandomPolicy, action_mask, draw_actions, in_shares, random_noise
from funcollect.policies.weights import jax_arrays, matched
from funcollect.protocols import Actor, ActorInputs, BoundParams, Columns, Exploration, Policy, is_policy
from funcollect.specs import ActionSpec, ExplorationType


def jax_policy(
    apply: Callable[..., Any],
    params: Any,
    *,
    head: Head | None = None,
    initial_state: Any = None,
    record_state: bool = False,
    reads_env_state: bool = False,
) -> JaxPolicy:
    """A policy from a JAX function.

    Args:
        apply: called under `jit` as ``apply(params, observation)`` with the batch dimension; `observation` is an array
            [P, ...], a dict of them for a Dict space, a tuple for a Tuple space. If it has a parameter `keys`, it also
            gets fresh keys, ``uint32[P, 2]``, each a function of its lane and step. By the name `key` it gets the first
            lane's, ``uint32[2]``. It returns what a Torch module does (see `torch_policy`).
        params: a pytree of arrays.
        head: one of `funcollect.heads`.
        initial_state: makes the policy recurrent: the state of one environment at the start of an episode, a pytree
            without a batch dimension. The call is then ``apply(params, observation, state) -> (answer, next_state)``.
        record_state: as for `torch_policy`.
        reads_env_state: `apply` also gets the environment's own state, a pytree [P, ...], after the observation, to
            search with `env.step`; the batch does not record it. Such a policy acts in JAX environments only.

    `apply` is compiled. Whatever else it reads (attributes, global variables, a closure) keeps the value that it had
    then, so pass what changes in `params`. A rollout raises PolicyError if a variable that `apply` reads has been set
    since: any variable of its closure, and numbers, strings and arrays of its module. A change within a variable's
    object is not noticed.

    Raises:
        TypeError: if `apply` cannot be called, or takes other arguments; or if `head` is not a head.

    >>> import jax.numpy as jnp, funcollect as fc
    >>> policy = jax_policy(lambda params, x: x @ params, jnp.ones((4, 2)), head=fc.heads.categorical)
    """
    if isinstance(apply, (type, torch.nn.Module)) or not callable(apply) or base.is_flax(apply):
        what = f"apply is {shown(apply)}, expected a function (params, observation) -> answer"
        mend = "pass one, such as a Flax module's apply, or wrap a Torch module with funcollect.torch_policy"
        raise TypeError(f"{what}: {mend}")
    recurrent = initial_state is not None
    named = random_parameter(apply)
    check_flags(record_state=record_state, reads_env_state=reads_env_state)
    taken = ", env_state" * reads_env_state + ", state" * recurrent
    inputs = f"(params, observation{taken}{f', {named}' if named else ''})"
    mend = "" if recurrent else " (a recurrent one: initial_state=)"
    count = 2 + reads_env_state + recurrent
    check_call("apply", apply, f"a function {inputs} -> answer{mend}", count, *([named] if named else []))
    check_head(head)
    if initial_state is not None:
        check_arrays("initial_state", import_jax().tree.leaves(initial_state))
    policy = JaxPolicy(apply, params, head, initial_state, record_state=record_state)
    policy.reads_env_state = reads_env_state
    return policy


def random_parameter(apply: Callable[..., Any]) -> Literal["key", "keys"] | None:
    """The name of the parameter for a function's own randomness; None if it has none."""
    names = inspect.signature(apply).parameters
    return "key" if "key" in names else "keys" if "keys" in names else None


_COMPILED = ("apply", "head", "initial_state", "record_state")  # attributes of a policy that its programs contain


def reads_env_state(policy: Policy) -> bool:
    """Whether a policy takes the pair (observation, environment's own state), pytrees [P, ...], as an observation."""
    return isinstance(policy, FunctionPolicy) and policy.reads_env_state


def check_sees_all(policy: Policy, where: str, expected: str = "an environment written in JAX") -> None:
    """Raise TypeError for a policy that reads the environment's state where it does not get one in JAX."""
    if reads_env_state(policy):
        what = f"the policy reads the environment's state (reads_env_state=True), but acts in {where}"
        raise TypeError(f"{what}, expected {expected}: pass that, or leave reads_env_state out")


class FunctionPolicy(base.HeadedPolicy):
    """Base class of policies over a traced function, with the arguments of `jax_policy`; subclasses have `params`."""

    backend: Literal["jax"] = "jax"
    reads_env_state = False
    ties = False  # whether only the first of several ones in a one-hot action counts

    def __init__(
        self, apply: Callable[..., Any], head: Head | None, initial_state: Any, *, record_state: bool = False
    ) -> None:
        self.apply = apply
        self.record_state = record_state and initial_state is not None
        self.head = head
        self.initial_state = initial_state
        self.takes_key: Any = random_parameter(apply)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.apply)})"

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return Noise(kind=self.takes_key) if self.takes_key else super().noise(spec)

    @override
    def init(self, key: Key, num_envs: int, /) -> Any:
        jax = import_jax()
        return jax.tree.map(
            lambda leaf: jax.numpy.tile(jax.numpy.asarray(leaf), (num_envs, *[1] * np.ndim(leaf))), self.initial_state
        )

    @override
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: ActionSpec, exploration: Exploration, /
    ) -> tuple[Any, Mapping[str, Any]]:
        stochastic = exploration.type is ExplorationType.RANDOM
        state, outputs = self.answer(spec, stochastic, (params, exploration.values), state, observation, noise)
        outputs.pop(program.PROBE, None)
        return state, outputs

    def answer(
        self, spec: ActionSpec, stochastic: bool, bound: BoundParams, policy_state: Any, observation: Any, noise: Any
    ) -> tuple[Any, dict[str, Any]]:
        """One traced step: the next policy state, and the outputs, with `PROBE` if a head gives no log-probability."""
        (params, values), keys = bound, {}
        num_envs = len(import_jax().tree.leaves(observation)[0])
        if self.takes_key:
            keys[self.takes_key], draw = program.split_key(noise, num_envs)
        before = import_jax().tree.leaves(policy_state) if self.record_state else []
        answer, policy_state = self.called(params, observation, policy_state, **keys)
        recorded = dict(zip(base.recurrent_names(before), before, strict=True))
        if self.head is None:
            action, extras = base.split_answer(answer, None)
            return policy_state, {"action": action, **extras, **recorded}
        xp, head = jax_numerics(), self.head.at(values)
        parameters, extras = base.read_answer(xp, head, answer, spec, num_envs)
        if self.takes_key:
            wanted = head.noise(spec)
            noise = None if wanted is None else program.draw_noise(wanted, draw)
        outputs = {**extras, **recorded, **head.sample(xp, parameters, noise if stochastic else None, spec)}
        log_prob = head.log_prob(xp, parameters, outputs, spec)
        if log_prob is None:
            flat = (array.reshape(num_envs, -1) for array in parameters)
            outputs[program.PROBE] = sum(xp.where(array == array, 0.0, array).sum(-1) for array in flat)
        else:
            outputs["action_log_prob"] = log_prob
        return policy_state, outputs

    def called(self, params: Any, observation: Any, recurrent: Any, **keys: Any) -> tuple[Any, Any]:
        """The function's answer, and the next recurrent state, or None if it has none."""
        inputs = tuple(observation) if self.reads_env_state else (observation,)
        inputs += () if recurrent is None else (recurrent,)
        try:
            with tracing("the policy's function"):
                answer = self.apply(params, *inputs, **keys)
        except Exception as error:
            note_arguments(error, "the policy's function", (params, *inputs, *keys.values()), recurrent)
            raise
        return base.split_recurrent(answer, recurrent)

    @override
    def actor(self, inputs: ActorInputs, /) -> Actor:
        check_sees_all(self, "a loop or a check without one", "a rollout in an environment written in JAX")
        if isinstance(import_jax().tree.leaves(inputs.observation)[0], Tensor):
            return base.ProtocolActor(self, inputs, self._over_tensors(inputs))
        return JaxActor(self, inputs)

    def _over_tensors(self, inputs: ActorInputs) -> Callable[..., Any]:
        """A jitted step for `ProtocolActor`, on arrays over an accelerator's tensors; on the CPU `JaxActor` is used."""
        spec, stochastic, bound = inputs.spec, inputs.stochastic, inputs.bound

        def step(bound: BoundParams, policy_state: Any, observation: Any, noise: Any, t: Any) -> Any:
            drawn = None if noise is None else noise[t]
            return self.answer(spec, stochastic, bound, policy_state, observation, drawn)

        call = compiled(self, ("device step", id(spec), stochastic), step)
        device = next(iter(base.array_over(optree.tree_leaves(inputs.observation)[0]).devices()))
        noise = None if inputs.noise is None else import_jax().device_put(inputs.noise.numpy(), device)
        return lambda state, observation, t: call(bound, state, observation, noise, t)

    @override
    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        columns = finish_columns(columns, spec, chosen=getattr(self.head, "chooses", False), ties=self.ties)
        columns.pop((program.PROBE,), None)
        return columns


class JaxPolicy(FunctionPolicy):
    """See `jax_policy`. `params` may be set: the next rollout reads it."""

    def __init__(
        self, apply: Callable[..., Any], params: Any, head: Head | None, initial_state: Any, *, record_state: bool
    ) -> None:
        super().__init__(apply, head, initial_state, record_state=record_state)
        self.params = params
        self._variables = variables_of(apply)

    @override
    def prepare(self, params: Any, /) -> Any:
        """Parameters on the device, once per version; None stands for the policy's own, read at each rollout."""
        jax = import_jax()
        if changed := set_since_use(self, [*self._variables, *((name, self) for name in _COMPILED)]):
            what = f"the policy or its function reads {', '.join(changed)}, set since it was compiled"
            mend = "pass changing values in params, or make another policy with funcollect.jax_policy"
            raise PolicyError(f"{what}, which has no effect: {mend}")
        source = self.params if params is None else params
        (leaves, structure), memo = jax.tree.flatten(source), memo_of(self)
        same, last = (lambda one, two: one is two and not one.is_deleted()), memo.get("prepared")
        if last and structure == last[1] and all(map(same, leaves, last[0])):
            return last[2]
        prepared = jax_arrays(source if params is None else matched(self.params, source, self.backend))
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            memo["prepared"] = (leaves, structure, prepared)
        return prepared


def as_given(policy: Any, saved: Mapping[str, Any] | None) -> Any:
    """The result of a policy's `state_dict` in the form of its `params`: for a JAX policy a pytree like them."""
    return matched(policy.params, saved, policy.backend) if saved and isinstance(policy, JaxPolicy) else saved


class JaxActor(Actor):
    """Calls the policy on NumPy rows on the host: one jitted call per step, and one array that is read back."""

    reads_late = True

    def __init__(self, policy: FunctionPolicy, inputs: ActorInputs) -> None:
        memo: dict[Hashable, program.StepProgram] = memo_of(policy)
        self._per_lane = program.per_lane(inputs)
        name = ("host step", id(inputs.spec), inputs.stochastic, inputs.num_envs, self._per_lane)
        if name not in memo:  # the program holds the spec, so that no other one takes its id
            memo[name] = program.StepProgram(partial(policy.answer, inputs.spec, inputs.stochastic), inputs)
        self._program = memo[name]
        self._step, self._plain, self._outputs = self._program.step, self._program.plain, self._program.outputs
        self._inputs, self._params, self._finish = program.PackedInputs(inputs), None, policy.finish
        self._scalar = self._outputs.row["action"] == self._outputs.dtypes["action"] == np.int32
        self.again(inputs)

    @override
    def again(self, inputs: ActorInputs, /) -> bool:
        if program.per_lane(inputs) != self._per_lane:
            return False
        self._rollout, self._recurrent = inputs, inputs.policy_state
        if (params := self._program.params(inputs)) is not self._params:
            # A JAX array as buffer would commit a returned state to its device, and JAX would compile again for that.
            self._buffer = self._inputs.argument(params) if self._plain else self._inputs.buffer
            self._params = params
        self._noise: Any = [None] * inputs.length if inputs.noise is None else inputs.noise.numpy()
        self._words = np.empty((inputs.length, inputs.num_envs, self._outputs.row.itemsize // 4), np.int32)
        return True

    @override
    def act(self, t: int) -> Any:
        self._inputs.fill(self._noise[t])
        if self._plain:
            packed = self._step(self._params, self._buffer)
        else:
            self._recurrent, packed = self._step(self._params, self._buffer, self._recurrent, self._inputs.others)
        self._words[t] = words = np.asarray(packed)
        return words[:, 0] if self._scalar else self._outputs.unpack(words, "action")

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        if self._recurrent is not None:
            mask = base.lane_mask(lanes, self._rollout.num_envs).numpy()
            self._recurrent = base.select_program()(mask, self._rollout.initial_state, self._recurrent)

    @override
    def finish(self) -> tuple[Any, Columns]:
        return self._recurrent, self._finish(self._outputs.columns(self._words), self._rollout.spec)


def is_traceable(policy: Policy) -> bool:
    """Whether `traced_policy` takes this policy."""
    return isinstance(policy, RandomPolicy) or policy.backend == "jax"


def check_traceable(policy: Any) -> None:
    """Raise TypeError for a policy that is neither random nor one that JAX can trace."""
    if not is_policy(policy) or not is_traceable(policy):
        kind = f"a {policy.backend} policy" if is_policy(policy) else "no policy"
        mend = "pass funcollect.lower_policy(policy, env), or use funcollect.jax_policy or funcollect.random_policy"
        raise TypeError(f"{type(policy).__name__} is {kind}, expected one that JAX can trace: {mend}")


def traced_policy(
    policy: Policy, spec: ActionSpec, num_envs: int, exploration_type: ExplorationType
) -> program.TracedCall:
    """The policy's step as a traced function that draws its own noise; TypeError if JAX cannot trace it."""
    check_traceable(policy)
    jax, noise = import_jax(), policy.noise(spec)
    stochastic = exploration_type is ExplorationType.RANDOM

    def answer(bound: BoundParams, policy_state: Any, observation: Any, draw: program.Draw) -> Any:
        if isinstance(policy, RandomPolicy):
            return policy_state, {"action": traced_random(spec, draw, observation)[0]}
        drawn = None if noise is None else program.draw_noise(noise, draw)
        if isinstance(policy, FunctionPolicy):
            policy_state, outputs = policy.answer(spec, stochastic, bound, policy_state, observation, drawn)
        else:
            exploration = Exploration(exploration_type, bound[1])
            with tracing("the call of the policy"):
                result = base.split_call(policy(bound[0], policy_state, observation, drawn, spec, exploration))
            policy_state, outputs = result[0], dict(result[1])
        check_action(outputs["action"], spec, num_envs)
        check_rows(outputs, num_envs)
        for name, output in outputs.items():
            if jax.numpy.issubdtype(output.dtype, jax.dtypes.prng_key):
                mend = "return jax.random.key_data"
                raise PolicyError(f"the policy's output {name!r} is typed PRNG keys, expected numbers: {mend}")
        return policy_state, outputs

    return answer


def traced_random(spec: ActionSpec, draw: program.Draw, observation: Any) -> tuple[Any, Any]:
    """The random actions [P, ...] that `RandomPolicy` draws from the same words, with log-probabilities [P, ...]."""
    uniform = program.draw_noise(random_noise(spec), draw)
    return draw_actions(jax_numerics(), spec, uniform, action_mask(observation, spec))


def like_own(value: Any, own: Any, *, is_log_prob: bool) -> Any:
    """An output of random actions in the dtype of a policy's own; log-probabilities in its shape, in equal shares."""
    shared = import_jax().numpy.broadcast_to(in_shares(value, own.shape), own.shape) if is_log_prob else value
    return shared.astype(own.dtype)

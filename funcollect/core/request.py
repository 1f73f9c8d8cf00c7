"""Checks the arguments of a rollout: its request, the values of its exploration, and the state that it begins with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect import arguments
from funcollect.arguments import check_kind
from funcollect.core.state import CollectorState, ReadOnlyDict, check_origin
from funcollect.envs.base import first_inputs, observer_of
from funcollect.envs.jax_envs.jax_env import JaxEnvState
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import kind_of, shown
from funcollect.policies.base import HeadedPolicy, policies_of
from funcollect.policies.by_group import GroupPolicy
from funcollect.policies.heads.head import Head, summed
from funcollect.policies.tensordict_modules.calling import carries_action, read_and_written
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.protocols import DeviceEnv, Env, JaxEnv, Policy, TorchEnv, is_env
from funcollect.specs import ActionSpec, ExplorationType, GroupedSpec
from funcollect.tree import Path

ANOTHER_POLICY = (  # what to do about its state
    "pass the policy that the state was made with, or continue with "
    "state.replace(policy_state=policy.init(state.key, state.num_lanes))"
)
EXPLORATION: Path = ("collector", "exploration")  # the batch's key for these values
NO_VALUES: Mapping[str, Any] = MappingProxyType({})
PerLane = Tensor | Sequence[float]  # [L] float, a number for each lane of the whole run
Value = float | PerLane | Callable[[int], float | PerLane]  # the function takes the frames of the whole run so far
OwnColumns = Mapping[Path, Tensor]
NOWHERE: OwnColumns = MappingProxyType({})
Rollout = tuple[CollectorState, TensorDict]  # the result of a rollout: the next state, and the batch


class StepOptions(NamedTuple):
    """What a compiled step depends on, beside the environment, the policy and the number of lanes."""

    exploration_type: ExplorationType
    limit: int | None  # steps after which an episode is truncated
    random_steps: int
    reset_when_done: bool


@dataclass(frozen=True)
class Request:
    """The arguments of one rollout, checked here and nowhere else; those of `rollout` come first, in its order."""

    length: int  # the number of steps, T
    params: Any = field(default=None, compare=False)
    exploration_type: ExplorationType = ExplorationType.RANDOM  # how heads act
    # `api.run` fills in all values: numbers, or arrays [P] for the state's lanes
    exploration: Mapping[str, Any] = field(default_factory=lambda: NO_VALUES, compare=False)
    max_frames_per_traj: int | None = None  # steps after which a trajectory is truncated
    _: KW_ONLY
    random_steps: int = 0  # the first steps of the run, in which lanes act randomly
    reset_when_done: bool = True  # False keeps a finished lane finished
    # memory [T, P, ...] by path, into which observations of that shape and dtype are recorded
    columns: OwnColumns = field(default_factory=lambda: NOWHERE, compare=False)
    owned: bool = False  # whether the state's memory may be reused, because no one else holds the state
    compact_obs: bool = False  # whether to leave out next observations that are the root of a following frame
    with_time: bool = True  # False for the batch of one step, without a time dimension

    def __post_init__(self) -> None:
        arguments.check_positive("length", self.length)
        if self.length >= 2**31:
            raise ValueError(f"length is {self.length}, expected less than 2**31 steps: collect in several rollouts")
        arguments.check_optional_positive("max_frames_per_traj", self.max_frames_per_traj)
        check_exploration(self.exploration_type)
        check_values(self.exploration)
        arguments.check_count("random_steps", self.random_steps)
        arguments.check_flags(reset_when_done=self.reset_when_done)
        check_ends(self.max_frames_per_traj, self.reset_when_done)
        for name in ("length", "max_frames_per_traj", "random_steps"):  # NumPy's integers overflow, and lack methods
            vars(self)[name] = None if getattr(self, name) is None else int(getattr(self, name))

    def like(self, other: Request) -> bool:
        """Whether another request differs in nothing but its parameters and its exploration's values."""
        return other is self or (other == self and other.columns is self.columns)

    def given(self, params: Any) -> Request:
        """The request with these parameters."""
        if params is self.params:
            return self
        changed = object.__new__(Request)  # `replace` would check everything again
        vars(changed).update(vars(self), params=params)
        return changed

    def step_options(self, env: TorchEnv | JaxEnv) -> StepOptions:
        """Return the options of a step."""
        early = min(self.random_steps, 2**32 - 1)
        return StepOptions(self.exploration_type, step_limit(env, self), early, self.reset_when_done)


class OpenFor:
    """Base class of opened loops: a pair of environment and policy, ready for rollouts of one request."""

    # The policy and a copy of its own exploration, the user's request and a copy of its exploration, all of them
    # numbers, and the request that runs for these from any state.
    remembered: tuple[Policy, Mapping[str, float], Request, Mapping[str, Any], Request] | None = None

    def repeated(self, policy: Any, asked: Request) -> Request | None:
        """Return the request that runs for the user's request `asked`; None if either differs from the last one."""
        if self.remembered is None:
            return None
        acts, own, before, numbers, request = self.remembered
        if acts is not policy or acts.exploration != own or not before.like(asked):
            return None
        values = asked.exploration
        if values is not numbers and not (are_numbers(values) and values == numbers):
            return None
        return request.given(asked.params)

    def remember(self, policy: Policy, asked: Request, request: Request | None) -> None:
        """Let `request` run whenever the user asks the same, unless it is None or values are more than numbers."""
        values, own = asked.exploration, dict(policy.exploration)
        fits = request and are_numbers(values) and are_numbers(own)
        self.remembered = (policy, own, asked, values and dict(values), request) if request and fits else None


def check_ends(max_frames_per_traj: int | None, reset_when_done: bool) -> None:
    """Raise ValueError if trajectories are limited and lanes stay finished."""
    if not reset_when_done and max_frames_per_traj is not None and max_frames_per_traj > 0:
        why = "max_frames_per_traj cuts a trajectory so that the lane begins another"
        raise ValueError(f"{why}, reset_when_done=False keeps it finished: give one of them")


def step_limit(env: TorchEnv | JaxEnv | DeviceEnv, request: Request) -> int | None:
    """Return the steps after which an episode is truncated: the lower of the environment's and the request's limit."""
    own = None if env.backend == "device" else env.max_episode_steps
    return min(filter(None, (own, request.max_frames_per_traj)), default=None)


def check_exploration(value: Any) -> None:
    """Raise TypeError unless `value` is an exploration type."""
    names = ", ".join(ExplorationType.__members__)
    check_kind("exploration_type", value, ExplorationType, f"pass funcollect.ExplorationType's {names}")


def check_values(exploration: Any) -> None:
    """Raise TypeError unless `exploration` is a dict from names to values."""
    if not isinstance(exploration, Mapping) or not all(isinstance(name, str) for name in exploration):
        mend = 'pass for example {"epsilon": 0.1}, or {"epsilon": lambda frames: max(0.05, 1 - frames / 1e5)}'
        raise TypeError(f"exploration is {shown(exploration)}, expected a dict from names to numbers: {mend}")


def are_numbers(exploration: Mapping[str, Any]) -> bool:
    """Whether all values are numbers, which cannot change between rollouts."""
    return all(isinstance(value, (float, int, np.number)) for value in exploration.values())


def check_given(policy: Policy, given: Mapping[str, Any], lanes: int | None = None) -> None:
    """Raise as `exploration_values` does for `lanes` (L), without calling the functions among the values."""
    constants = dict(given)
    for name, value in given.items():
        if callable(value):
            arguments.check_function(f"exploration[{name!r}]", value, "a function of the number of frames", 1)
            constants[name] = policy.exploration.get(name, 0.0)
    _checked_values(policy, constants, lanes, np)


def exploration_values(
    policy: Policy, given: Mapping[str, Any], state: CollectorState, *, traced: bool = False
) -> Mapping[str, Any]:
    """Return the values of `Policy.exploration`: the `given` ones, and the policy's own for all other names.

    Numbers are rounded to float32. Values per lane [L] are reduced to the state's lanes [P], as an array, or a tensor
    for a policy in Torch. Functions are called with the frames so far, which may wait for a device.
    """
    functions = [name for name, value in given.items() if callable(value)]
    if traced and functions:
        raise TypeError(f"exploration has functions for {functions}, expected numbers in traced code: call them first")
    if functions:
        given = {**given, **{name: given[name](state.steps_made * state.total_lanes) for name in functions}}
    values = _checked_values(policy, given, state.total_lanes, import_jax().numpy if traced else np)
    for name, value in values.items():
        if np.ndim(value):
            if not traced and state.lane_ids[-1] >= len(value):
                what = f"exploration[{name!r}] has values for the {len(value)} lanes that the run began with"
                raise ValueError(f"{what}, not for lanes added later: pass a number")
            values[name] = value[state.lane if traced else state.lane_ids]
            if policy.backend == "torch":
                place = state.lane.device if isinstance(state.lane, Tensor) else "cpu"
                values[name] = torch.from_numpy(values[name]).to(place)
    return values or NO_VALUES


def _checked_values(policy: Policy, given: Mapping[str, Any], lanes: int | None, xp: Any) -> dict[str, Any]:
    """All values: numbers or float32 arrays [L] of `xp`, checked by the policy's head for their ranges."""
    own = policy.exploration
    if unknown := sorted(given.keys() - own.keys()):
        wanted = f"names out of {sorted(own)}, the numbers that the policy's head has"
        raise ValueError(f"exploration has {unknown}, expected {wanted}: check the spelling, or leave them out")
    values = {name: _value(name, value, lanes, xp) for name, value in {**own, **given}.items()}
    if values and (head := head_of(policy)):
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        for bound in (np.min, np.max) if arrays else (np.min,):
            head.at(values | {name: float(bound(array)) for name, array in arrays.items()})
    return values


def _value(name: str, value: Any, lanes: int | None, xp: Any) -> Any:
    """A number, rounded to float32 if `xp` is NumPy, or a float32 array [L]; `lanes` is L, or None if not known."""
    try:
        array = xp.array(value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value, np.float32)
    except (TypeError, ValueError) as error:
        wanted = f"a number: pass for example {{{name!r}: 0.1}}"
        raise TypeError(f"exploration[{name!r}] is {shown(value)}, expected {wanted}") from error
    if array.ndim > 1 or (array.ndim and lanes not in (None, len(array))):
        wanted = f"a number or [{lanes or 'L'}], one for each lane of the whole run: pass these"
        raise ValueError(f"exploration[{name!r}] has shape {list(array.shape)}, expected {wanted}")
    return array if array.ndim else float(array) if xp is np else value


def with_values(batch: TensorDict, values: Mapping[str, Any]) -> TensorDict:
    """Return the batch with these values, each [P, T]: views of one number, or of one for each lane [P].

    A batch that holds them already stays as it is: some of its rows may be from earlier rollouts (`own_pace`).
    """
    if not values or EXPLORATION in batch.keys(include_nested=True):
        return batch
    batch.unlock_()
    for name, value in values.items():
        leaf = torch.as_tensor(value, device=batch["next", "done"].device)
        leaf = leaf.reshape((-1, *[1] * (batch.ndim - 1))[: batch.ndim])
        batch[(*EXPLORATION, name)] = leaf.expand(batch.batch_size)
    return batch.lock_()


def head_of(policy: Policy) -> Head | None:
    """Return the head of a policy over a module or a function, if it has one."""
    return policy.head if isinstance(policy, HeadedPolicy) else None


def outputs_of_random(xp: Any, policy: Policy, spec: ActionSpec, action: Any, log_prob: Any) -> dict[Path, Any]:
    """The outputs, by path, that belong to random actions as `draw_actions` returns them; a policy may lack some."""
    if isinstance(spec, GroupedSpec) and isinstance(policy, GroupPolicy):
        outputs: dict[Path, Any] = {("action",): action}
        for name, member in policy.policies.items():
            own_action, own_log_prob = spec.of_group(name, action), spec.rows_of(name, log_prob)
            own = outputs_of_random(xp, member, policy.spec_of(name, spec), own_action, own_log_prob)
            outputs |= {(name, *path): value for path, value in own.items()}
        return outputs
    joint = summed(log_prob, action.ndim - len(spec.shape))
    entries: dict[Path, Any] = {("action_log_prob",): joint}
    for member in policies_of(policy):
        if isinstance(member, TensorDictPolicy):
            entries |= dict.fromkeys(member.log_prob_paths, joint)
        elif (head := head_of(member)) is not None:
            entries |= {(name,): value for name, value in head.record(xp, action, spec).items()}
    return {**entries, ("action",): action}


def own_action_warning(policy: Policy, random_frames: int | None) -> str:
    """Return a warning if a policy that may carry its own action is to begin with random frames; else an empty text."""
    if not random_frames or random_frames < 0 or not any(map(_may_carry_action, policies_of(policy))):
        return ""
    what = f"init_random_frames is {random_frames} with a recurrent policy that chooses its action itself"
    why = "an action that it carries from step to step was not executed in the random frames"
    mend = "read the action as an observation (make_env(…, inputs=['prev_action'])), or leave init_random_frames out"
    return f"{what}: {why}: give the policy a head (funcollect.heads), {mend}"


def _may_carry_action(policy: Policy) -> bool:
    source = policy.source if isinstance(policy, LoweredPolicy) else policy
    if isinstance(source, TensorDictPolicy):
        return carries_action(source.module, [*source.written.values(), *read_and_written(source.module)])
    return isinstance(source, HeadedPolicy) and source.initial_state is not None and source.head is None


def check_state_kind(policy_state: Any, wanted: type) -> None:
    """Raise ValueError for the state of another kind of policy."""
    if type(policy_state) is not wanted:
        what = f"the state holds the policy state {type(policy_state).__name__}, this policy wants {wanted.__name__}"
        raise ValueError(f"{what}: {ANOTHER_POLICY}")


def check_state(env: Env, state: CollectorState, function: str, values: Any = None, *, live: bool = True) -> None:
    """Raise unless `state` belongs to `env`, was not donated (if `live`), and neither it nor `values` are traced."""
    check_kind("state", state, CollectorState, "pass the state that init or rollout returned (after env and policy)")
    if not is_env(env):
        raise TypeError(f"env is {kind_of(env)}, expected an Env: pass the env that the state was made with")
    check_eager(function, (state.lane, values))
    _check_one_run(state)
    if live and isinstance(state.env_state, JaxEnvState) and not is_live(state):
        mend = "continue with the state that was returned; of a collector's, used up on a GPU, take a funcollect.fork"
        raise ValueError(f"the state was donated or deleted, expected a live one: {mend} before the next batch")
    if state.num_lanes != (env.num_envs or 1):
        raise ValueError(f"the state has {state.num_lanes} lanes, {env!r} has {env.num_envs or 1}: pass its own env")
    check_origin(env, state)


def given_starts(env: Any, held: tuple[Any, Any], to: Any, call: Any, differing: Any, by_path: Any) -> tuple[Any, Any]:
    """The environment states in the `to` of a reset, and their observations by path, both checked to be like `held`.

    ``call(observe, states)`` returns the observations of states alone; `differing` describes how two pytrees differ.
    """
    bare: Any = lambda each: each.current if isinstance(each, JaxEnvState) else each  # noqa: E731
    if not differing(held[0], bare(to)):
        if (observe := observer_of(env)) is None:
            what = f"to is environment states alone, from which {env!r} computes no observation, expected a pair"
            mend = "pass (env_states, observations), or give it a function observation_of(env_state, params)"
            raise TypeError(f"{what}: {mend}")
        to = to, call(observe, bare(to))
    env_states, seen = to if type(to) is tuple and len(to) == 2 else (to, None)
    _check_like(env, "environment states", differing(held[0], bare(env_states)))
    root = dict(seen) if isinstance(seen, ReadOnlyDict) else by_path(env, seen)
    _check_like(env, "observations", differing(held[1], root))
    return bare(env_states), first_inputs(env, root)


def _check_like(env: Any, what: str, difference: str) -> None:
    if difference:
        mend = "pass states like state.env_state, or a pair of them and observations like state.observation, [P, ...]"
        raise ValueError(f"to has other {what} than {env!r}, expected its own (first its own): {difference}: {mend}")


def check_traced_state(env: Any, state: Any) -> None:
    """Raise unless `env` is written in JAX and `state` is the state of one run of it."""
    check_jax(env)
    check_kind("state", state, CollectorState, "pass the state that init or rollout returned, after policy and params")
    _check_one_run(state)
    check_origin(env, state)


def check_jax(env: Any) -> None:
    """Raise TypeError unless `env` is an environment written in JAX."""
    mend = "make one with for example funcollect.make_env('gymnax/CartPole-v1'), or use funcollect.rollout for this one"
    check_kind("env", env, JaxEnv, mend)


def check_eager(function: str, values: Any = ()) -> None:
    """Raise TypeError inside a JAX transformation, also if none of these values is traced."""
    if "jax" not in sys.modules:
        return
    jax = import_jax()
    outside = getattr(jax._src.core, "trace_state_clean", lambda: True)  # private; traced values are noticed without
    if not outside() or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        mend = f"inside of jit, vmap, grad or scan call funcollect.traced.{function} over a JAX environment"
        raise TypeError(f"funcollect.{function} got values that JAX traces, expected arrays: {mend}")


def _check_one_run(state: CollectorState) -> None:
    """Raise TypeError for a state with a key of another kind, ValueError for the states of several runs (`vmap`)."""
    key: Any = state.key
    if getattr(key, "dtype", None) != np.uint32 or key.shape[-1:] != (2,):
        mend = "pass funcollect.keys.key_from_seed(0) to state.replace, or jax.random.key_data of a typed key"
        raise TypeError(f"the state's key is {shown(key)}, expected uint32 [2]: {mend}")
    if key.ndim > 1:
        mend = "call funcollect.traced.rollout inside the jax.vmap over the runs"
        raise ValueError(f"the state is of {list(key.shape[:-1])} runs, expected one: {mend}")


def is_live(state: CollectorState) -> bool:
    """Whether the state's memory has not been donated to a compiled function."""
    leaves = import_jax().tree.leaves((state.env_state, dict(state.observation)))  # only these are ever donated
    return not any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, import_jax().Array))

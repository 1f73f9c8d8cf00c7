"""The loops over a JAX environment: one compiled call per rollout, or one per step if the policy runs in Torch.

With one call per step, the environment's state and the columns are donated to each step, so DLPack exports them only
after the last one. Each step returns the observation as a separate array, which is copied to the fixed memory that the
policy reads. On an accelerator nothing waits for the device, since DLPack orders a reader after the writer, unless the
step has a branch for costly starts. A step's observation and action are kept alive until the next step has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.core import traced
from funcollect.core.batch import ROOT_FLAGS, checked_batch
from funcollect.core.loops import eager
from funcollect.core.loops.blocks import OPTIONS, BlockLoop, BlockOptions
from funcollect.core.request import OpenFor, Request, Rollout, StepOptions, check_state_kind, is_live
from funcollect.core.state import CollectorState, origin_of, policy_start
from funcollect.core.traced_step.columns import BatchOfBytes, bucket, memory, packed, recorded_step, typed, write_row
from funcollect.core.traced_step.step import Row, SpareStarts, StepConfig, run_keys, starts_are_cheap
from funcollect.envs.jax_envs.jax_env import check_unchanged
from funcollect.interop.bridge import follow_torch, jax_view, opened, torch_followed, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.memo import memo_of
from funcollect.interop.memory import fixed, reads_together
from funcollect.keys import Key, random_words
from funcollect.policies.checks import check_apart
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import BoundParams, Columns, JaxEnv, Policy, traced_values
from funcollect.specs import ActionSpec, ExplorationType, assemble, torch_dtype
from funcollect.threefry import hashed_in_jax
from funcollect.tree import Path

_MANY = 1024  # hashes from which on a call of a program costs less than NumPy


def init(env: JaxEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`. The policy's state is made outside the program, since it may hold tensors."""
    check_unchanged(env)
    state = _first_state(env, key, first_lane, total_lanes, env.params)
    return state.replace(policy_state=policy_start(policy, key, state.num_lanes, first_lane))


def _first_state(env: JaxEnv, key: Any, first_lane: int, total_lanes: int, env_params: Any) -> CollectorState:
    first = partial(traced.init, env, RandomPolicy(env.action_spec), None, total_lanes=total_lanes)
    begin: Callable[..., CollectorState] = compiled(env, ("init", total_lanes), first)
    follow_torch(import_jax().local_devices()[0])
    return begin(key=key, first_lane=first_lane, env_params=env_params)


def reset(env: JaxEnv, state: CollectorState, lanes: Tensor, *, stale: bool = False, to: Any = None) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]; with `stale`, `funcollect.recover`."""
    if stale and not is_live(state):  # an interrupted collector has used up its memory
        first = _first_state(env, state.key, int(state.lane_ids[0]), state.total_lanes, state.env_params)
        state = state.changed(env_state=first.env_state.with_used_starts(), observation=first.observation)
    place = place_of(state)
    restart = compiled(env, "reset", lambda state, mask, to: traced.reset(env, state, mask, to=to), place=place)
    follow_torch(*place.device_set)
    after: CollectorState = restart(state.replace(policy_state=None), lanes.numpy(), to)
    return after.replace(policy_state=state.policy_state)


def fork(env: JaxEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: return the state, a value, or a copy where a collector would use its memory up."""
    place = place_of(state)
    if not waits_for_host(place):
        return state
    follow_torch(*place.device_set)
    env_state, observation = import_jax().tree.map(import_jax().numpy.copy, (state.env_state, dict(state.observation)))
    return state.changed(env_state=env_state, observation=observation)  # only these are ever used up


def run(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout` for a policy that can be traced."""
    result: Rollout | None = state.opened and state.opened.rollout(env, policy, state, request)
    if result:
        return result
    if isinstance(state.policy_state, TorchPolicyState):  # of another policy; JAX cannot take it as an argument
        check_state_kind(state.policy_state, type(policy.init(state.key, state.num_lanes)))
    place = place_of(state)
    if not waits_for_host(place):
        return _Opened(env, policy, state, request).run(state, request)
    check_unchanged(env)
    with torch_followed(*place.device_set):
        bound = bound_params(policy, request)
        blocks = block_loop(env, policy, state, request, bound=bound)
    in_blocks = blocks(bound, state, request.length, owned=request.owned)
    with reads_together():
        if in_blocks is None:  # lanes lacked starts
            return _Opened(env, policy, state, request).call(bound, state)
        after, leaves = in_blocks
        return after, batch_of(env, policy, state, leaves, request)


class _Opened(OpenFor):
    """The compiled loop, open for rollouts of one request from states whose arrays are of one kind."""

    def __init__(self, env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> None:
        self._env, self._policy, self._request, place = env, policy, request, place_of(state)
        self._program = program(env, policy, state, request)
        self._length = import_jax().device_put(np.int32(request.length), place)
        self._kind = _kind_of(state)
        self._shown: tuple[Any, Any] = (None, None)  # the places of columns, by the dtypes; a `BatchOfBytes` of them

    def rollout(self, env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout | None:
        """Make a rollout from a state; None if another loop has to be opened for it, such as for another pair."""
        same_pair = env is self._env and policy is self._policy and not isinstance(state.policy_state, TorchPolicyState)
        if not same_pair or not self._request.like(request) or _kind_of(state) != self._kind:
            return None
        try:
            return self.run(state, request)
        except RuntimeError:
            if is_live(state):
                raise
            return None  # so that `check_state` refuses it

    def run(self, state: CollectorState, request: Request) -> Rollout:
        """Make a rollout; the next state keeps this loop for its own rollout."""
        check_unchanged(self._env)
        after, batch = self.call(bound_params(self._policy, request), state)
        vars(after)["opened"] = self
        return after, batch

    def call(self, bound: BoundParams, state: CollectorState) -> Rollout:
        """Run the program; return the next state and the batch."""
        env, policy, request = self._env, self._policy, self._request
        after, columns, places = self._program(bound, state, self._length)
        if places is None:
            leaves = {path: torch_view(column) for path, column in columns.items()}
            return after, batch_of(env, policy, state, leaves, request)
        if self._shown[0] is not places:  # the first call, or parameters of another dtype
            outputs = outputs_in((path for path, *_ in places.of), state)
            self._shown = places, BatchOfBytes(places, env, outputs, request)
        return after, self._shown[1].of(torch_view(columns), lambda outputs: policy.finish(outputs, env.action_spec))


def _kind_of(state: CollectorState) -> tuple[Any, ...]:
    """Which environment a state is of, of one run or several, and where its arrays lie."""
    return state.origin, getattr(state.key, "aval", None), state.lane.aval, state.lane.sharding


def bound_params(policy: Policy, request: Request) -> BoundParams:
    """Return the parameters as a program reads them; lent memory is read before the rollout ends."""
    prepare = policy.lend if isinstance(policy, LoweredPolicy) else policy.prepare
    return prepare(request.params), traced_values(request.exploration)


def waits_for_host(place: Any) -> bool:
    """Whether branches, and loops to a traced length, wait for the host on the devices of this sharding."""
    return any(device.platform != "cpu" for device in place.device_set)


def program(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> Callable[..., Any]:
    """Return the compiled loop, with branches, for the static part of a request."""
    capacity, options = bucket(request.length), request.step_options(env)
    cache_key = ("rollout", origin_of(env), state.num_lanes, options, capacity)
    return compiled(policy, cache_key, partial(_loop, env, policy, options, capacity), place=place_of(state))


def block_loop(
    env: JaxEnv,
    policy: Policy,
    state: CollectorState,
    request: Request,
    options: BlockOptions = OPTIONS,
    *,
    bound: BoundParams | None = None,
) -> BlockLoop:
    """Return the loop in blocks for the static part of a request, cached for the policy and the parameters' dtypes."""
    step_options, place = request.step_options(env), place_of(state)
    bound = bound or bound_params(policy, request)
    dtypes = tuple(getattr(leaf, "dtype", type(leaf)) for leaf in import_jax().tree.leaves((bound, state.env_params)))
    built = *options[:-1], *sorted(options.compiler_options.items())
    cache_key = (origin_of(env), state.num_lanes, step_options, built, dtypes)
    known: dict[Hashable, BlockLoop] = memo_of(policy).setdefault("blocks", {})
    if (cache_key, place) not in known:
        config = StepConfig.of(env, policy, state.num_lanes, step_options, branches=False)
        known[cache_key, place] = BlockLoop(config, bound, state, cache_key, place, options)
    return known[cache_key, place]


def place_of(state: CollectorState) -> Any:
    """Return the sharding of a state; ValueError if it lies on several devices, where Torch cannot read it."""
    place = state.lane.sharding
    if len(place.device_set) > 1:
        mend = "call funcollect.traced.rollout in a shard_map, and funcollect.deliver, or gather it by jax.device_put"
        raise ValueError(f"the state lies on {len(place.device_set)} devices, expected one: {mend}")
    return place


def _loop(env: JaxEnv, policy: Policy, options: StepOptions, capacity: int, bound: Any, state: Any, length: Any) -> Any:
    """Trace the loop. The trip count is traced, since XLA would round a loop of one step differently."""
    config = StepConfig.of(env, policy, state.num_lanes, options)
    bound, keys = opened(bound), run_keys(state.key, state.lane)

    def body(t: Any, carry: tuple[CollectorState, Row]) -> tuple[CollectorState, Row]:
        state, row = recorded_step(config, bound, carry[0], keys)
        return state, write_row(carry[1], row, t)

    columns, constants = memory(config, bound, state, capacity)
    after, columns = import_jax().lax.fori_loop(0, length, body, (state, columns))
    never = import_jax().numpy.zeros((capacity, state.num_lanes), bool)
    flags = dict.fromkeys(ROOT_FLAGS, never) if options.reset_when_done else {}
    return after, *packed(columns | constants | flags)


def outputs_in(paths: Iterable[Path], state: CollectorState) -> list[Path]:
    """The keys of the policy's outputs, out of the keys of all columns."""
    return [path for path in paths if len(path) == 1 and path not in ROOT_FLAGS and path not in state.observation]


def batch_of(env: JaxEnv, policy: Policy, state: CollectorState, columns: Columns, request: Request) -> TensorDict:
    """Return the checked batch of columns [T or more, P, ...]."""
    leaves = typed({path: column[: request.length] for path, column in columns.items()}, env)
    outputs = policy.finish({path: leaves.pop(path) for path in outputs_in(leaves, state)}, env.action_spec)
    return checked_batch(env, leaves | outputs, with_time=request.with_time)


def run_crossing(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout` for a policy that runs in Torch."""
    check_unchanged(env)
    return eager.run(_CrossingStepper, env, policy, state, request, partial(_draw_words, env))


def _draw_words(env: JaxEnv, keys: Any, numbers: Any, width: int) -> Any:
    """Do what `random_words` does; XLA hashes many words several times faster than NumPy."""
    draws, length, cpu = -(-width // 2), len(numbers), import_jax().local_devices(backend="cpu")[0]
    if length * len(keys[0]) * draws < _MANY:
        return random_words(keys, numbers, width)
    hashes = compiled(env, ("hashes", draws), partial(_hashes, draws))
    steps = np.zeros((bucket(length), 1), np.uint64)
    steps[:length] = numbers
    with import_jax().default_device(cpu):
        words = hashes(keys, (steps & 0xFFFFFFFF).astype(np.uint32), (steps >> 32).astype(np.uint32))
    return np.asarray(words).reshape(len(steps), len(keys[0]), -1)[:length, :, :width]


def _hashes(draws: int, keys: Any, low: Any, high: Any) -> Any:
    """Return the hashes [T, P, draws, 2] of the steps [T, 1] whose low and high words are given."""
    jnp = import_jax().numpy
    one = jnp.arange(1, 1 + draws, dtype=jnp.uint32) | high[..., None] << np.uint32(16)
    pair = keys[0][:, None], keys[1][:, None]
    return jnp.stack(hashed_in_jax(pair, one, low[..., None]), -1)


class _CrossingStepper(eager.Stepper):
    """Steps a JAX environment, whose state and columns stay in JAX; the policy reads its observation in Torch."""

    def __init__(self, env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> None:
        # The actor reads a NumPy key and tensors.
        read = {name: torch_view(getattr(state, name)).cpu() for name in ("lane", "step")}
        super().__init__(env, policy, state.changed(key=np.asarray(state.key), steps=state.steps_made, **read), request)
        self._before, place = state, place_of(state)
        # The actor explores and makes the random steps, so the program does not.
        options = request.step_options(env)._replace(exploration_type=ExplorationType.RANDOM, random_steps=0)
        branches = not (waits_for_host(place) and starts_are_cheap(env, state.env_params))
        stateless = RandomPolicy(env.action_spec)  # any policy without a state: Torch has chosen the action
        config = StepConfig(env, stateless, lambda action, held, *_: (held, {"action": action}), options, branches)
        cache_key, self._config = (state.num_lanes, options, branches), config
        capacity = bucket(request.length)
        begin = compiled(env, ("crossing", capacity, *cache_key), partial(_begin, config, capacity), place=place)
        follow_torch(*place.device_set)
        self._advance = compiled(env, ("crossing", *cache_key), partial(_advance, config), donate_argnums=(0, 1))
        self._now, self.columns, self._constants, self._keys = begin(state.replace(policy_state=None))
        dtypes = {leaf.path: torch_dtype(leaf.dtype) for leaf in env.observation_leaves}
        self._root = {path: fixed(torch_view(state.observation[path]).to(dtype)) for path, dtype in dtypes.items()}
        self.observation = assemble(env.observation_space, self._root)
        self.waits = any(root.device.type != "cpu" for root in self._root.values())
        self._into_jax = _crosser(env.action_spec, state.lane.device)
        self._restarts_matter = policy.remembers(state.policy_state)
        self._alive: Any = None  # arrays that the last step may still read or write

    @override
    def step(self, t: int, action: Any) -> Tensor | None:
        """See `Stepper`; observations are recorded by the step itself, from memory that no policy writes."""
        crossed = self._into_jax(action)
        self._now, self.columns, root, fresh = self._advance(self._now, self.columns, self._keys, np.int32(t), crossed)
        for path, value in root.items():
            if self.waits:
                self._root[path].copy_(torch_view(value))
            else:
                self._root[path].numpy()[...] = np.asarray(value)
        self._alive = (root, crossed)
        if not self._restarts_matter:
            return None
        begun = torch_view(fresh)
        return begun if self.waits or bool(begun.any()) else None

    @override
    def deliver(self, outputs: Columns) -> tuple[dict[str, Tensor], TensorDict]:
        check_apart(outputs, self.state.observation)
        recorded = {**self.columns, **self._constants}
        columns = {path: torch_view(column)[: self.request.length] for path, column in recorded.items()}
        return {}, checked_batch(self.env, typed(columns, self.env) | outputs, with_time=self.request.with_time)

    @override
    def after(self, policy_state: Any, counters: dict[str, Tensor]) -> CollectorState:
        after: CollectorState = self._now
        if not self._config.branches:
            lanes, used = self._before.env_state, (after.episode != self._before.episode) & (self.env.starts == "fresh")
            lanes = lanes._replace(current=after.env_state.current, next_start_used=lanes.next_start_used | used)
            after = after.changed(env_state=lanes)
        return after.replace(policy_state=policy_state)


def _begin(config: StepConfig, capacity: int, state: CollectorState) -> tuple[CollectorState, Row, Row, Any]:
    """Return a copy of the state, which can be donated; empty columns, constant columns, and the keys of the run."""
    jax = import_jax()
    spec = config.env.action_spec
    action = jax.ShapeDtypeStruct((state.num_lanes, *spec.shape), _jax_dtype(spec))
    columns, constants = memory(config, action, state, capacity)
    del columns["action",]  # the actor records it, with the policy's other outputs
    copied: CollectorState = jax.tree.map(jax.numpy.copy, state)
    if not config.branches:  # starts are made at each step
        copied = copied.changed(env_state=SpareStarts(copied.env_state.current, (), jax.numpy.copy(state.episode)))
    return copied, columns, constants, run_keys(state.key, state.lane)


def _advance(config: StepConfig, state: CollectorState, columns: Row, keys: Any, t: Any, action: Any) -> Any:
    """Return the next state, the columns with row `t`, the next observation, and which lanes begin an episode."""
    after, row = recorded_step(config, action.astype(_jax_dtype(config.env.action_spec)), state, keys)
    fresh = row["next", "done"] if config.options.reset_when_done else import_jax().numpy.zeros_like(after.terminated)
    return after, write_row(columns, row, t), after.observation, fresh


def _jax_dtype(spec: ActionSpec) -> Any:
    return import_jax().dtypes.canonicalize_dtype(spec.space.dtype if not spec.one_hot else np.int64)


def _crosser(spec: ActionSpec, device: Any) -> Callable[[Any], Any]:
    """Return a function that brings an action [P, ...] to the environment's device."""
    if device.platform == "cpu":  # a NumPy view is cheapest; the call has read it before its observation is available
        return lambda action: torch.as_tensor(action).detach().cpu().to(spec.dtype).numpy()
    narrow = torch.int32 if spec.dtype == torch.int64 else spec.dtype
    place = torch_view(import_jax().numpy.zeros((), device=device)).device
    return lambda action: jax_view(torch.as_tensor(action).detach().to(place, narrow).contiguous())

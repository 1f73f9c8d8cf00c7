"""The loop over a JAX environment with a policy that runs in Torch: one compiled call per step, DLPack between.

The environment's state and the columns stay in JAX and are updated in place: they are donated at each step, so they are
exported only after the last one. Each step returns the observation as a separate array, which is copied to the fixed
memory that the policy reads.

On an accelerator nothing here waits for the device, unless starts are too costly to be made at each step, so that the
step has a branch. DLPack orders a reader after the writer. A step's observation and action are kept alive until the
next step has been started, which is ordered after their last use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.core.batch import checked_batch
from funcollect.core.lanes import RunKeys, run_keys
from funcollect.core.loops import eager
from funcollect.core.loops.eager import Stepper
from funcollect.core.loops.fused import fork, init, place_of, recover, reset, waits_for_host
from funcollect.core.request import Request, step_options
from funcollect.core.state import CollectorState
from funcollect.core.traced_step.columns import bucket, constant_columns, empty_columns, recorded_step, typed, write_row
from funcollect.core.traced_step.starts import SpareStarts, after_block, starts_are_cheap
from funcollect.core.traced_step.step import Row, StepConfig
from funcollect.envs.jax_envs.jax_env import check_unchanged
from funcollect.interop.bridge import follow_torch, jax_view, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.memory import fixed
from funcollect.keys import random_words
from funcollect.policies.checks import check_apart
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Columns, JaxEnv, Policy
from funcollect.specs import ActionSpec, ExplorationType, assemble, torch_dtype
from funcollect.threefry import hashed_in_jax

_MANY = 1024  # hashes, from which on a call of a program costs less than NumPy

__all__ = ["fork", "init", "recover", "reset", "run"]  # the state is that of the fused loop


def run(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    check_unchanged(env)
    return eager.run(_CrossingStepper(env, policy, state, request), partial(_draw_words, env))


def _draw_words(env: JaxEnv, keys: Any, numbers: Any, width: int) -> Any:
    """Return what `random_words` does. Many words are hashed by XLA, which is several times faster than NumPy."""
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
    """Hash the steps [T, 1], given as their low and high words: [T, P, draws, 2]."""
    jnp = import_jax().numpy
    one = jnp.arange(1, 1 + draws, dtype=jnp.uint32) | high[..., None] << np.uint32(16)
    pair = keys[0][:, None], keys[1][:, None]
    return jnp.stack(hashed_in_jax(pair, one, low[..., None]), -1)


class _CrossingStepper(Stepper):
    """The state and the columns in JAX, donated at each step, and the observation in Torch that the policy reads."""

    def __init__(self, env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> None:
        # The actor reads a NumPy key and tensors.
        read = {name: torch_view(getattr(state, name)).cpu() for name in ("lane", "step")}
        super().__init__(env, policy, state.replace(key=np.asarray(state.key), steps=state.steps_made, **read), request)
        self._before, place = state, place_of(state)
        # The actor explores and makes the random steps.
        options = step_options(env, request)._replace(exploration_type=ExplorationType.RANDOM, random_steps=0)
        self._config = config = StepConfig(
            env=env,
            policy=RandomPolicy(env.action_spec),  # any policy without a state
            answer=_given_action,
            options=options,
            branches=not (waits_for_host(place) and starts_are_cheap(env, state.env_params)),
        )
        which = (state.num_lanes, options, config.branches)
        capacity = bucket(request.length)
        begin = compiled(env, ("crossing", capacity, *which), partial(_begin, config, capacity), place=place)
        follow_torch(*place.device_set)
        self._advance = compiled(env, ("crossing", *which), partial(_advance, config), donate_argnums=(0, 1))
        self._now, self.columns, self._constants, self._keys = begin(state.replace(policy_state=None))
        dtypes = {leaf.path: torch_dtype(leaf.dtype) for leaf in env.observation_leaves}
        self._root = {path: fixed(torch_view(state.observation[path]).to(dtype)) for path, dtype in dtypes.items()}
        self.observation = assemble(env.observation_space, self._root)
        self.waits = any(root.device.type != "cpu" for root in self._root.values())
        self._into_jax = _crosser(env.action_spec, state.lane.device)
        self._restarts_matter = policy.remembers(state.policy_state)
        self._held: Any = None

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
        self._held = (root, crossed)
        if not self._restarts_matter:
            return None
        begun = torch_view(fresh)
        return begun if self.waits or bool(begun.any()) else None

    @override
    def deliver(self, outputs: Columns) -> tuple[dict[str, Tensor], TensorDict]:
        check_apart(outputs, self.state.observation)
        recorded = {**self.columns, **self._constants}
        columns = {path: torch_view(column)[: self.request.length] for path, column in recorded.items()}
        return {}, checked_batch(self.env, typed(columns, self.env) | outputs)

    @override
    def after(self, policy_state: Any, counters: dict[str, Tensor]) -> CollectorState:
        after: CollectorState = self._now
        if not self._config.branches:
            begun, current = after.episode != self._before.episode, after.env_state.current
            after = after.changed(env_state=after_block(self.env, self._before.env_state, current, begun))
        return after.replace(policy_state=policy_state)


def _given_action(action: Any, policy_state: Any, observation: Any, key: Any) -> tuple[Any, dict[str, Any]]:
    """Act as the policy of the traced step: its parameters are the action that Torch chose."""
    return policy_state, {"action": action}


def _begin(config: StepConfig, capacity: int, state: CollectorState) -> tuple[CollectorState, Row, Row, RunKeys]:
    """Return a copy of the state, which may be donated, empty and constant columns, and the keys of the run."""
    jax = import_jax()
    spec = config.env.action_spec
    action = jax.ShapeDtypeStruct((state.num_lanes, *spec.shape), _jax_dtype(spec))
    columns = empty_columns(config, action, state, capacity)
    del columns["action",]  # the actor records the policy's outputs
    copied: CollectorState = jax.tree.map(jax.numpy.copy, state)
    if not config.branches:  # starts are made at each step
        copied = copied.changed(env_state=SpareStarts(copied.env_state.current, (), jax.numpy.copy(state.episode)))
    return copied, columns, constant_columns(state, capacity), run_keys(state.key, state.lane)


def _advance(config: StepConfig, state: CollectorState, columns: Row, keys: RunKeys, t: Any, action: Any) -> Any:
    """Return the next state, the columns with row `t`, the next observation, and which lanes begin an episode."""
    after, row = recorded_step(config, action.astype(_jax_dtype(config.env.action_spec)), state, keys)
    fresh = row["next", "done"] if config.options.reset_when_done else import_jax().numpy.zeros_like(after.terminated)
    return after, write_row(columns, row, t), after.observation, fresh


def _jax_dtype(spec: ActionSpec) -> Any:
    return import_jax().dtypes.canonicalize_dtype(spec.space.dtype if not spec.one_hot else np.int64)


def _crosser(spec: ActionSpec, device: Any) -> Callable[[Any], Any]:
    """Return a function that brings an action [P, ...] to the environment's device.

    On the CPU, passing a NumPy view to the compiled call is cheapest. The call has read it before its observation is
    available.
    """
    if device.platform == "cpu":
        return lambda action: torch.as_tensor(action).detach().cpu().to(spec.dtype).numpy()
    narrow = torch.int32 if spec.dtype == torch.int64 else spec.dtype
    place = torch_view(import_jax().numpy.zeros((), device=device)).device
    return lambda action: jax_view(torch.as_tensor(action).detach().to(place, narrow).contiguous())

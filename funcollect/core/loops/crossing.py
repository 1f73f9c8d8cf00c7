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
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import checked_batch
from funcollect.core.lanes import RunKeys, run_keys
from funcollect.core.loops.eager import step_all
from funcollect.core.loops.fused import fork, init, place_of, recover, reset, waits_for_host
from funcollect.core.request import Request, open_actor, step_options
from funcollect.core.state import CollectorState
from funcollect.core.traced_step.columns import (
    bucket,
    cast,
    constant_columns,
    dtypes_of,
    empty_columns,
    recorded_row,
    recorded_step,
    write_row,
)
from funcollect.core.traced_step.starts import SpareStarts, after_block, starts_are_cheap
from funcollect.core.traced_step.step import Row, StepConfig
from funcollect.envs.jax_envs.checks import check_unchanged
from funcollect.interop.bridge import follow_torch, jax_view, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.memory import fixed
from funcollect.interop.reads import reads_together
from funcollect.keys import random_words
from funcollect.policies.checks import check_apart
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import JaxEnv, Policy
from funcollect.specs import ActionSpec, ExplorationType, assemble
from funcollect.threefry import hashed_in_jax

_MANY = 1024  # hashes, from which on a call of a program costs less than NumPy

__all__ = ["fork", "init", "recover", "reset", "run"]  # the state is that of the fused loop


def run(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    check_unchanged(env)
    loop = _CrossingLoop(env, state, request)
    actor = open_actor(env, policy, _on_host(state), request, loop.observation, partial(_draw_words, env))
    loop.tells_restarts = policy.remembers(state.policy_state)
    with nullcontext() if loop.on_cpu else reads_together():
        with actor.running():
            step_all(loop, actor, request.length)
            policy_state, outputs = actor.finish()
        after = loop.after().replace(policy_state=policy_state)
        check_apart(outputs, state.observation)
        recorded = loop.columns | loop.constants
        columns = {path: torch_view(column)[: request.length] for path, column in recorded.items()}
        return after, checked_batch(env, cast(columns, dtypes_of(env)) | outputs)


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


def _on_host(state: CollectorState) -> CollectorState:
    """Return the state as a Torch policy's actor reads it: with an integer count, a NumPy key and tensors."""
    return state.replace(
        key=np.asarray(state.key),
        lane=torch_view(state.lane).cpu(),
        step=torch_view(state.step).cpu(),
        steps=state.steps_made,
    )


class _CrossingLoop:
    """The state and the columns in JAX, and the observation that the policy reads.

    Attributes:
        state: the state without its policy's; donated at each step, as the columns are.
        columns: each [T, P, ...], or longer.
        constants: columns that are the same at every step.
        observation: tensors [P, ...] in the structure of the space, in the same memory throughout.
        on_cpu: whether this memory is the host's.
        tells_restarts: whether the policy remembers something that a new episode resets.
    """

    def __init__(self, env: JaxEnv, state: CollectorState, request: Request) -> None:
        place = place_of(state)
        # The actor explores and makes the random steps.
        options = step_options(env, request)._replace(exploration_type=ExplorationType.RANDOM, random_steps=0)
        config = StepConfig(
            env=env,
            policy=RandomPolicy(env.action_spec),  # any policy without a state
            answer=_given_action,
            options=options,
            branches=not (waits_for_host(place) and starts_are_cheap(env, state.env_params)),
        )
        self._config, self._before = config, state
        which = (state.num_lanes, options, config.branches)
        capacity = bucket(request.length)
        begin = compiled(env, ("crossing", capacity, *which), partial(_begin, config, capacity), place=place)
        follow_torch(*place.device_set)
        self._advance = compiled(env, ("crossing", *which), partial(_advance, config), donate_argnums=(0, 1))
        self.state: CollectorState
        self.state, self.columns, self.constants, self._keys = begin(state.replace(policy_state=None))
        dtypes = dtypes_of(env)
        self._root = {path: fixed(torch_view(value).to(dtypes[path])) for path, value in state.observation.items()}
        self.observation = assemble(env.observation_space, self._root)
        self.on_cpu = all(root.device.type == "cpu" for root in self._root.values())
        self._into_jax = _crosser(env.action_spec, state.lane.device)
        self._held: Any = None
        self.tells_restarts = False

    def record(self, t: int) -> None:
        """See `Stepper`: the step itself records observations, from memory that no policy writes."""

    def step(self, t: int, action: Any) -> Tensor | None:
        """See `Stepper`; the lanes that began another episode are a mask [P]."""
        crossed = self._into_jax(action)
        self.state, self.columns, root, fresh = self._advance(
            self.state, self.columns, self._keys, np.int32(t), crossed
        )
        for path, value in root.items():
            if self.on_cpu:
                self._root[path].numpy()[...] = np.asarray(value)
            else:
                self._root[path].copy_(torch_view(value))
        self._held = (root, crossed)
        if not self.tells_restarts:
            return None
        begun = torch_view(fresh)
        return begun if not self.on_cpu or bool(begun.any()) else None

    def after(self) -> CollectorState:
        """Return the state after the last step."""
        if self._config.branches:
            return self.state
        begun, current = self.state.episode != self._before.episode, self.state.env_state.current
        return self.state.changed(env_state=after_block(self._config.env, self._before.env_state, current, begun))


def _given_action(action: Any, policy_state: Any, observation: Any, key: Any) -> tuple[Any, dict[str, Any]]:
    """Act as the policy of the traced step: its parameters are the action that Torch chose."""
    return policy_state, {"action": action}


def _begin(config: StepConfig, capacity: int, state: CollectorState) -> tuple[CollectorState, Row, Row, RunKeys]:
    """Return a copy of the state, which may be donated, empty and constant columns, and the keys of the run."""
    jax = import_jax()
    spec = config.env.action_spec
    action = jax.ShapeDtypeStruct((state.num_lanes, *spec.shape), _jax_dtype(spec))
    row = recorded_row(config, action, state)
    del row["action",]  # the actor records the policy's outputs
    copied: CollectorState = jax.tree.map(jax.numpy.copy, state)
    if not config.branches:  # starts are made at each step
        copied = copied.changed(env_state=SpareStarts(copied.env_state.current, (), jax.numpy.copy(state.episode)))
    return copied, empty_columns(row, capacity), constant_columns(state, capacity), run_keys(state.key, state.lane)


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

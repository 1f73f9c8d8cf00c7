"""The functional core on JAX arrays, for use inside the user's own `jit`, `vmap`, `grad` and `shard_map`.

Environments are written in JAX; policies are too, or are `random_policy`. These, `length` and all keywords are fixed
when the user's function is compiled. `params` is an argument, since a closure would bake its value in. Batches are
nested dicts, time-major ``[T, P, ...]``: rewards and flags lack a last dimension of size 1, 64-bit integers are int32,
and ``collector.episode`` and ``.lane`` (both int32) stand instead of ``.traj_ids``. `funcollect.deliver` turns a batch
into a TensorDict.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from funcollect.arguments import check_kind, check_optional_positive, check_positive
from funcollect.core.env_params import LaneRows, has_rows, map_rows, of_one_lane
from funcollect.core.env_params import traced_set_env_params as set_env_params
from funcollect.core.evaluate_actions import remember_spaces
from funcollect.core.request import EXPLORATION, NO_VALUES, Request, check_jax, check_traced_state, exploration_values
from funcollect.core.state import LEAVES, CollectorState, origin_of
from funcollect.core.traced_step.episode_stats import TracedEpisodeStats, after_frame, episode_stats, frame_of, no_stats
from funcollect.core.traced_step.step import StepConfig, begin, by_path, continue_from, restart, run_keys, varying
from funcollect.core.traced_step.step import step as fused_step
from funcollect.envs import agents
from funcollect.envs.jax_envs.jax_env import JaxEnvState, check_functions
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax, without_weak_types
from funcollect.messages import dtypes_and_shapes, shown
from funcollect.policies.jax_functions.jax_policy import check_traceable
from funcollect.policies.jax_functions.program import PROBE
from funcollect.policies.population import Population
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.protocols import BoundParams, JaxEnv, Policy, traced_values
from funcollect.specs import ExplorationType, GroupedSpec
from funcollect.tree import Path, nest

__all__ = ["TracedEpisodeStats", "episode_stats", "evaluate", "init", "no_stats", "partition", "reset", "rollout"]
__all__ += ["set_env_params", "step"]

Batch = dict[str, Any]  # nested, of JAX arrays


def init(
    env: JaxEnv,
    policy: Policy,
    params: Any,
    *,
    key: Any,
    first_lane: Any = 0,
    total_lanes: int | None = None,
    env_params: Any = None,
) -> CollectorState:
    """Return the first state of the lanes ``first_lane … first_lane + P - 1`` of `total_lanes`, P by default.

    Call it inside `jit`: outside, a reset runs operation by operation, which for brax takes seconds.

    All randomness follows from `key`, uint32[2] or a typed key. `first_lane`, an int or an array [], differs between
    the parts of a run. `params` are not read here. `env_params` are as for `set_env_params`, and may be traced; by
    default they are the environment's own `params`.

    Raises:
        TypeError: if `env` is no JAX environment, `policy` cannot be traced, or `key` is no key.
        EnvError: for an environment whose functions disagree with each other or with its spaces.

    >>> import jax, funcollect as fc
    >>> env = fc.envs.from_gymnax("CartPole-v1", num_envs=4)
    >>> policy = fc.random_policy(env)
    >>> keys = jax.random.split(jax.random.PRNGKey(0), 3)
    >>> jax.vmap(lambda key: init(env, policy, None, key=key))(keys).episode.shape
    (3, 4)
    """
    jax, jnp = import_jax(), import_jax().numpy
    check_jax(env)
    check_traceable(policy)
    policy.check(env.action_spec)
    remember_spaces(policy, env.observation_space, env.observation_leaves, env.action_spec)
    check_optional_positive("total_lanes", total_lanes)
    check_optional_positive(f"max_episode_steps of {env}", env.max_episode_steps)
    given = env.params if env_params is None else env_params
    if env_params is not None and has_rows(env, given):
        begun = partial(init, env, policy, params, key=key, first_lane=first_lane, total_lanes=total_lanes)
        return begun(env_params=set_env_params(env, begun(), given, at_once=True).env_params)
    env_params = without_weak_types(jax.tree.map(jnp.asarray, given))
    env_params = map_rows(lambda rows: rows._replace(current=rows.coming), env_params)
    players = check_functions(env, of_one_lane(env_params))
    key, count = _key_data(key), env.num_envs or 1
    if np.shape(first_lane) or not np.issubdtype(getattr(first_lane, "dtype", type(first_lane)), np.integer):
        raise TypeError(f"first_lane is {shown(first_lane)}, expected an int or an integer array []: give a lane")
    if not isinstance(first_lane, jax.core.Tracer) and first_lane < 0:
        raise ValueError(f"first_lane is {first_lane}, expected at least 0: give a lane's number")
    lane = jnp.arange(count, dtype=jnp.int32) + first_lane
    zero, no = lane * 0, lane != lane  # these vary over a mesh, as constants would not
    current, observation = begin(env, run_keys(key, lane), lane, zero, env_params)
    state = CollectorState(
        env_state=JaxEnvState(current, (current, observation), ~no if env.starts == "fresh" else no),
        env_params=env_params,
        observation=by_path(env, observation),
        policy_state=varying(lane, without_weak_types(policy.init(key, count))),
        key=key,
        lane=lane,
        episode=zero,
        step=zero,
        returns=varying(lane, jnp.zeros((count, *players), jnp.float32)),
        terminated=no,
        truncated=no,
        total_lanes=total_lanes or count,
        origin=origin_of(env),
        steps=jnp.zeros(2, jnp.uint32),
        policy_version=jnp.zeros((), jnp.int32),
    )
    copied: CollectorState = jax.tree.map(jnp.copy, state)  # outside `jit`, leaves that share memory cannot be donated
    return copied


def reset(env: JaxEnv, state: CollectorState, mask: Any = None, *, to: Any = None) -> CollectorState:
    """Begin new episodes in all lanes, or in those of `mask`, under new trajectory ids.

    `to` is as for `funcollect.reset`. Raises ValueError unless the mask is bool [P].

    >>> import jax, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    >>> state = fc.traced.init(env, fc.random_policy(env), None, key=jax.random.PRNGKey(0))
    >>> fc.traced.reset(env, state).traj_ids.tolist()
    [2, 3]
    """
    check_traced_state(env, state)
    lanes = state.lane == state.lane if mask is None else import_jax().numpy.asarray(mask)
    if (lanes.shape, lanes.dtype) != (state.lane.shape, bool):
        wanted = f"bool {list(state.lane.shape)}: pass one flag per lane"
        raise ValueError(f"mask is {lanes.dtype} {list(lanes.shape)}, expected {wanted}")
    after: CollectorState = restart(env, state, run_keys(state.key, state.lane), lanes)
    return after if to is None else continue_from(env, after, lanes, to)


def step(
    env: JaxEnv,
    policy: Policy,
    params: Any,
    state: CollectorState,
    *,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    exploration: Mapping[str, Any] = NO_VALUES,
    max_frames_per_traj: int | None = None,
    random_steps: int = 0,
    reset_when_done: bool = True,
) -> tuple[CollectorState, Batch]:
    """Return the next state and the transition [P, ...] of one step. Arguments and errors are those of `rollout`.

    >>> import jax, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state = fc.traced.init(env, policy, None, key=jax.random.PRNGKey(0))
    >>> jax.jit(lambda state: fc.traced.step(env, policy, None, state))(state)[1]["observation"].shape
    (2, 4)
    """
    options: dict[str, Any] = {"random_steps": random_steps, "reset_when_done": reset_when_done}
    request = Request(1, params, exploration_type, exploration, max_frames_per_traj, **options)
    config, bound = _config(env, policy, state, request)
    return _step(config, bound, state, run_keys(state.key, state.lane))


def rollout(
    env: JaxEnv,
    policy: Policy,
    params: Any,
    state: CollectorState,
    length: int,
    *,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    exploration: Mapping[str, Any] = NO_VALUES,
    max_frames_per_traj: int | None = None,
    random_steps: int = 0,
    reset_when_done: bool = True,
) -> tuple[CollectorState, Batch]:
    """Run `length` steps of every lane, and return the next state and the batch [T, P, ...].

    Keys, resets and counters are the same as in `funcollect.rollout`; floats may differ in their last bits. `jax.grad`
    passes through the steps, unless the environment itself stops gradients, as most of gymnax's do.

    `exploration` has no functions, but its values may be traced. In the first `random_steps` steps of the run, lanes
    act randomly. ``reset_when_done=False`` keeps a finished lane finished until `reset`. The other arguments and the
    errors are those of `funcollect.rollout`.

    >>> import jax, jax.numpy as jnp, funcollect as fc
    >>> env = fc.envs.from_gymnax("CartPole-v1", num_envs=4)
    >>> policy = fc.jax_policy(lambda params, x: x @ params, jnp.ones((4, 2)), head=fc.heads.categorical)
    >>> @jax.jit
    ... def mean_reward(params, key):
    ...     state = init(env, policy, params, key=key)
    ...     state, batch = rollout(env, policy, params, state, 16)
    ...     return batch["next"]["reward"].mean()
    >>> mean_reward(policy.params, jax.random.PRNGKey(0))
    Array(1., dtype=float32)
    """
    options: dict[str, Any] = {"random_steps": random_steps, "reset_when_done": reset_when_done}
    request = Request(length, params, exploration_type, exploration, max_frames_per_traj, **options)
    config, bound = _config(env, policy, state, request)
    keys = run_keys(state.key, state.lane)
    after: tuple[CollectorState, Batch] = import_jax().lax.scan(
        lambda carry, _: _step(config, bound, carry, keys), state, None, length=length
    )
    return after


def evaluate(
    env: JaxEnv,
    policy: Policy,
    params: Any,
    key: Any,
    episodes: int,
    *,
    env_params: Any = None,
    max_frames: int = 10_000_000,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
) -> TracedEpisodeStats:
    """Return the returns and lengths ``[episodes]`` of whole episodes, in a separate run.

    `funcollect.evaluate` runs the same episodes for the same key, ordered by lane, and takes the same arguments; `key`,
    `env_params` and the errors are those of `init`. The evaluation ends after `max_frames` frames over all lanes;
    `ended` is False for the episodes that it lacks then.

    >>> import jax, funcollect as fc
    >>> env = fc.envs.from_gymnax("CartPole-v1", num_envs=4)
    >>> policy = fc.random_policy(env)
    >>> keys = jax.random.split(jax.random.PRNGKey(0), 3)
    >>> stats = jax.jit(jax.vmap(lambda key: evaluate(env, policy, None, key, 10)))(keys)
    >>> stats.returns.shape, bool(stats.ended.all())
    ((3, 10), True)
    """
    check_positive("episodes", episodes)
    check_positive("max_frames", max_frames)
    jax, jnp = import_jax(), import_jax().numpy
    first = init(env, policy, params, key=key, env_params=env_params)
    config, bound = _config(env, policy, first, Request(1, params, exploration_type))
    keys, count = run_keys(first.key, first.lane), first.num_lanes
    quota = episodes // count + (jnp.arange(count) < episodes % count).astype(jnp.int32)
    first_index = jnp.cumsum(quota) - quota  # of each lane's episodes in the result
    most = min(-(-max_frames // count), 2**31 - 1)

    def unfinished(carry: Any) -> Any:
        state, _, finished, _ = carry
        return (finished < quota).any() & (state.steps[0] < most) & (state.steps[1] == 0)

    def advance(carry: Any) -> Any:
        state, open_, finished, whole = carry
        state, row = _step(config, bound, state, keys)
        open_, (returns, lengths, ended) = after_frame(open_, frame_of(row))
        at = jnp.where(ended & (finished < quota), first_index + finished, episodes)  # beyond the last: dropped
        found = TracedEpisodeStats(returns, lengths, ended)
        whole = jax.tree.map(lambda all_, some: all_.at[at].set(some, mode="drop"), whole, found)
        return state, open_, finished + ended.astype(finished.dtype), whole

    returns = jnp.zeros((episodes, *first.returns.shape[1:]), first.returns.dtype)
    whole = TracedEpisodeStats(returns, jnp.zeros(episodes, jnp.int32), jnp.zeros(episodes, bool))
    start = first, no_stats(first, 1).open, quota * 0, whole
    ended: TracedEpisodeStats = jax.lax.while_loop(unfinished, advance, start)[-1]
    return ended


def partition(state: CollectorState, axis: str) -> CollectorState:
    """Return the `PartitionSpec` of each leaf for `shard_map`: lanes split over the mesh's `axis`, the rest replicated.

    >>> import jax, funcollect as fc
    >>> env = fc.envs.from_gymnax("CartPole-v1", num_envs=4)
    >>> parts = partition(init(env, fc.random_policy(env), None, key=jax.random.PRNGKey(0)), "devices")
    >>> parts.step == jax.sharding.PartitionSpec("devices"), parts.key == jax.sharding.PartitionSpec()
    (True, True)
    """
    check_kind("state", state, CollectorState, "pass the state that init or rollout returned")
    check_kind("axis", axis, str, "pass the name of the mesh's axis")
    spec = import_jax().sharding.PartitionSpec
    shared = ("env_params", "key", "steps", "policy_version")
    parts = {name: spec() if name in shared else spec(axis) for name in LEAVES}
    parts["env_params"] = map_rows(lambda _: LaneRows(spec(axis), spec(axis)), state.env_params, lambda _: spec())
    return state.replace(**parts)


def _step(config: StepConfig, bound: BoundParams, state: CollectorState, keys: Any) -> tuple[CollectorState, Batch]:
    """Return the next state, and the row of a step as a nested dict, without the probe for NaN."""
    after, row = fused_step(config, bound, state, keys)
    for name, value in bound[1].items():
        row[*EXPLORATION, name] = import_jax().numpy.broadcast_to(value, state.lane.shape)
    places: dict[Path, Path] = {(".".join(path),): path for path in config.policy.nested}
    if isinstance(spec := config.env.action_spec, GroupedSpec):
        row = agents.by_groups(row, spec)
        row = agents.without_absent(row, [name for name, group in spec.groups.items() if group.comes_and_goes])
    return after, nest({places.get(path, path): value for path, value in row.items() if path[-1] != PROBE})


def _config(env: JaxEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[StepConfig, BoundParams]:
    check_traced_state(env, state)
    source = policy.source if isinstance(policy, LoweredPolicy) else policy
    if isinstance(source, Population) and state.num_lanes != state.total_lanes:
        what = f"a population acts in {state.num_lanes} of {state.total_lanes} lanes, expected all in traced code"
        raise PolicyError(f"{what}: use funcollect.rollout for a part of them, or no shard_map")
    config = StepConfig.of(env, policy, state.num_lanes, request.step_options(env))
    if request.params is None and import_jax().tree.leaves(policy.params):
        mend = "pass policy.params as an argument of the function that you compile, which would bake in other values"
        raise TypeError(f"params is None, expected the policy's parameters: {mend}")
    return config, (request.params, traced_values(exploration_values(policy, request.exploration, state, traced=True)))


def _key_data(key: Any) -> Any:
    jax = import_jax()
    if jax.numpy.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if getattr(key, "shape", None) != (2,) or key.dtype != jax.numpy.uint32:
        got = dtypes_and_shapes(key) if hasattr(key, "dtype") else shown(key)
        mend = "pass for example jax.random.key(0, impl='threefry2x32')"
        raise TypeError(f"key is {got}, expected uint32 [2] or a typed key: {mend}")
    return jax.numpy.asarray(key)

"""The checked arguments of one rollout, and the policy bound to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import optree
from torch import Tensor

from funcollect.arguments import check_count, check_flags, check_optional_positive, check_positive
from funcollect.core.exploration import NO_VALUES, check_values, head_of
from funcollect.core.state import CollectorState
from funcollect.keys import draw_ahead, random_words
from funcollect.policies.random_policy import RandomStart
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import Actor, ActorInputs, Env, Exploration, JaxEnv, Policy, TorchEnv
from funcollect.specs import ExplorationType
from funcollect.threefry import Words
from funcollect.tree import Path

ANOTHER_POLICY = (  # what to do about its state
    "pass the policy that the state was made with, or continue with "
    "state.replace(policy_state=policy.init(state.key, state.num_lanes))"
)

OwnColumns = Mapping[Path, Tensor]
NOWHERE: OwnColumns = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rollout's arguments, checked."""

    length: int  # the number of steps, T
    params: Any = None
    exploration_type: ExplorationType = ExplorationType.RANDOM  # how heads act
    # The argument of `rollout`; `run` sets all values in `Policy.exploration`, as numbers.
    exploration: Mapping[str, Any] = field(default_factory=lambda: NO_VALUES)
    max_frames_per_traj: int | None = None  # steps after which a trajectory is truncated
    random_steps: int = 0  # steps, from the beginning of the run, in which lanes act randomly
    reset_when_done: bool = True  # False keeps a finished lane finished
    # Memory [T, P, ...] by path, into which observations of that shape and dtype are recorded. All other leaves of a
    # batch get new memory.
    columns: OwnColumns = field(default_factory=lambda: NOWHERE)
    owned: bool = False  # whether the state's memory may be used again: no one else holds the state
    compact_obs: bool = False  # whether next observations may be left out that following frames have

    def __post_init__(self) -> None:
        """Check every field, here and nowhere else."""
        check_positive("length", self.length)
        if self.length >= 2**31:
            raise ValueError(f"length is {self.length}, expected less than 2**31 steps: collect in several rollouts")
        check_optional_positive("max_frames_per_traj", self.max_frames_per_traj)
        check_exploration(self.exploration_type)
        check_values(self.exploration)
        check_count("random_steps", self.random_steps)
        check_flags(reset_when_done=self.reset_when_done)
        check_ends(self.max_frames_per_traj, self.reset_when_done)

    def column(self, path: Path, row: Tensor) -> Tensor:
        """Return memory [T, P, ...] for rows like `row` [P, ...]."""
        shape, given = (self.length, *row.shape), self.columns.get(path)
        fits = given is not None and (given.shape, given.dtype, given.device) == (shape, row.dtype, row.device)
        return given if given is not None and fits else row.new_empty(shape)


def check_ends(max_frames_per_traj: int | None, reset_when_done: bool) -> None:
    """Raise ValueError for a limit on trajectories together with lanes that stay finished."""
    if not reset_when_done and max_frames_per_traj is not None and max_frames_per_traj > 0:
        raise ValueError(
            "max_frames_per_traj cuts a trajectory so that the lane begins another, reset_when_done=False keeps it "
            "finished: give one of them"
        )


def step_limit(env: TorchEnv | JaxEnv, request: Request) -> int | None:
    """Return the steps after which an episode is truncated: the lower of the environment's and the request's limit."""
    return min(filter(None, (env.max_episode_steps, request.max_frames_per_traj)), default=None)


class StepOptions(NamedTuple):
    """What a traced step is compiled for, beside the environment, the policy and the number of lanes."""

    exploration_type: ExplorationType
    limit: int | None  # steps after which an episode is truncated
    random_steps: int
    reset_when_done: bool


def step_options(env: JaxEnv, request: Request) -> StepOptions:
    """Return the options of a request."""
    early = min(request.random_steps, 2**32 - 1)
    return StepOptions(request.exploration_type, step_limit(env, request), early, request.reset_when_done)


def check_exploration(value: Any) -> None:
    """Raise TypeError unless `value` is an exploration type."""
    if not isinstance(value, ExplorationType):
        members = ", ".join(ExplorationType.__members__)
        raise TypeError(
            f"exploration_type is {value!r}, expected a member of funcollect.ExplorationType ({members}): pass for "
            "example funcollect.ExplorationType.DETERMINISTIC"
        )


def check_state_kind(policy_state: Any, wanted: type) -> None:
    """Raise ValueError for a policy state that is of another kind of policy."""
    if type(policy_state) is not wanted:
        raise ValueError(
            f"the state holds the policy state {type(policy_state).__name__}, this policy wants {wanted.__name__}: "
            f"{ANOTHER_POLICY}"
        )


def _check_recurrent(held: Any, wanted: Any) -> None:
    own, other = ([list(leaf.shape) for leaf in optree.tree_leaves(each)] for each in (wanted, held))
    if own != other or optree.tree_structure(held) != optree.tree_structure(wanted):
        raise ValueError(
            f"the state holds the policy state of another policy, with recurrent states of the shapes {other}, this "
            f"policy wants {own}: {ANOTHER_POLICY}"
        )


def inputs_of(
    env: Env, policy: Policy, state: CollectorState, request: Request, observation: Any, noise: Tensor | None
) -> ActorInputs:
    """Return a policy's inputs for this rollout."""
    initial_state = policy.init(state.key, state.num_lanes)
    check_state_kind(state.policy_state, type(initial_state))
    if isinstance(initial_state, TorchPolicyState):
        _check_recurrent(state.policy_state.recurrent, initial_state.recurrent)
    return ActorInputs(
        observation=observation,
        params=policy.prepare(request.params),
        policy_state=state.policy_state,
        initial_state=initial_state,
        noise=noise,
        exploration=Exploration(request.exploration_type, request.exploration),
        spec=env.action_spec,
        num_envs=state.num_lanes,
        length=request.length,
        single=env.num_envs is None,
    )


def open_actor(
    env: Env,
    policy: Policy,
    state: CollectorState,
    request: Request,
    observation: Any,
    draw: Callable[..., Words] = random_words,
) -> Actor:
    """Return the policy bound to this rollout; it reads the same `observation` at each step.

    Its noise is drawn ahead, from words that `draw` draws.
    """
    steps, noise = state.steps_made, policy.noise(env.action_spec)
    on_device = isinstance(state.lane, Tensor) and state.lane.device.type != "cpu" and policy.backend == "torch"
    lanes = state.lane if on_device else state.lane_ids
    drawn = None if noise is None else draw_ahead(noise, state.key, lanes, steps, request.length, draw=draw)
    inputs = inputs_of(env, policy, state, request, observation, drawn)
    actor = policy.actor(inputs)
    random_left = min(request.random_steps - steps, request.length)
    if random_left > 0:
        actor = RandomStart(actor, inputs, state.key, state.lane_ids, steps, random_left, head_of(policy))
    fresh = state.step == 0
    if fresh.device.type != "cpu":
        actor.restart(fresh)  # which is not read, since that would wait for the device
    elif bool(fresh.any()):
        actor.restart(fresh.nonzero()[:, 0].tolist())
    return actor

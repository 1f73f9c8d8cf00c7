"""What `check_env` finds by runs with a twist: lanes alone, memory written over, forks, old states."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core import api
from funcollect.core.explain import explain
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import seeding_of
from funcollect.errors import ReplayError, StaleStateError
from funcollect.protocols import Env
from funcollect.testing.compare import bits_differ, expect_equal, first_row, numbers_differ, shown, spot
from funcollect.testing.envs.stub_policies import OverwritingPolicy, Replay
from funcollect.testing.report import NotApplicableError, fail
from funcollect.testing.trial import Trial, by_lane, release

_FEW = 20  # steps over which rounding stays small


def lanes_alone(trial: Trial) -> None:
    """Each lane of a batch is the same as by itself, without neighbours."""
    if trial.lanes < 2 or seeding_of(trial.env) != "episode":
        raise NotApplicableError("there is one lane" if trial.lanes < 2 else f"seeding is {seeding_of(trial.env)!r}")
    if trial.single is None:
        raise NotApplicableError("pass an id, or single=: the same environment with num_envs=1")
    _expect_torch_drives(trial)
    host = trial.env.backend == "host"
    length = trial.steps if host else min(trial.steps, _FEW)
    for lane in range(trial.lanes):
        actions = trial.batch["action"][lane, :length].unsqueeze(1)
        wanted = _alone(trial, trial.single, lane, actions)
        expect_equal(
            trial.batch[lane : lane + 1, :length],
            wanted,
            what=f"lane {lane} of the batch (below: lane 0)",
            source="the same lane by itself",
            mend="let a lane's step and reset depend on that lane only",
            differs=bits_differ if host else numbers_differ,
        )


def _expect_torch_drives(trial: Trial) -> None:
    if trial.env.backend == "jax":
        raise NotApplicableError("its loop is traced, so the policies of this check cannot look into it")


def _alone(trial: Trial, single: Env, lane: int, actions: Tensor) -> TensorDict:
    """The run of one lane under given actions [T, 1, ...]: [1, T]."""
    policy = Replay(actions)
    state = api.init_lanes(single, policy, seed=trial.seed, first_lane=lane, total_lanes=trial.lanes)
    try:
        return by_lane(single, api.rollout(single, policy, state, len(actions))[1])
    finally:
        release(state)


def fork(trial: Trial) -> None:
    """A fork goes on as its source does, and neither touches the other."""
    third = trial.third
    with trial.started() as state:
        state, _ = trial.go_on(state, third)
        try:
            twin = api.fork(trial.env, state)
        except ReplayError as error:
            if seeding_of(trial.env) != "episode" and trial.env.backend == "host":
                raise NotApplicableError(explain(trial.env, trial.policy).forking) from error
            raise
        try:
            _, other = trial.go_on(twin, third)
        finally:
            if trial.env.backend == "host":
                release(twin)
        _, own = trial.go_on(state, third)
    for batch, what in ((other, "the fork"), (own, "its source, after the fork had run")):
        expect_equal(
            batch,
            trial.batch[:, third : 2 * third],
            what=what,
            source="the run without a fork",
            mend="let a step be a function of the episode's seed and actions; share nothing between environments",
        )


def action_memory(trial: Trial) -> None:
    """The environment leaves the action that it is given as it is."""
    _expect_torch_drives(trial)
    policy = OverwritingPolicy(trial.env.action_spec)
    batch = trial.run(trial.steps, policy=policy)
    given = torch.stack(policy.actions, 1)
    if place := first_row(bits_differ(batch["action"], given)):
        raise fail(
            spot(*place, ("action",)),
            expected=f"{shown(given[place])}, as the policy answered",
            got=f"{shown(batch['action'][place])} when the run was over",
            mend="copy the action before writing into it",
        )


def observation_memory(trial: Trial) -> None:
    """What a policy writes over its observation does not reach the environment."""
    _expect_torch_drives(trial)
    expect_equal(
        trial.run(trial.steps, policy=OverwritingPolicy(trial.env.action_spec)),
        trial.batch,
        what="the run of a policy that writes zeros over each observation",
        source="the run of a policy that leaves them alone",
        mend="copy into the rows: what the policy reads must not be the simulator's own memory",
    )


def old_states(trial: Trial) -> None:
    """An old state gives the same answer again where states are values, and an error where they are not."""
    length = trial.third
    with trial.started() as state:
        _, first = trial.go_on(state, length)
        if trial.env.backend == "host":
            return _expect_stale(trial, state)
        _, again = trial.go_on(state, length)
    expect_equal(
        again,
        first,
        what="the second rollout from one state",
        source="the first one",
        mend="write nothing in place, and keep nothing in self: a step's result follows from its arguments",
    )
    return None


def _expect_stale(trial: Trial, state: CollectorState) -> None:
    try:
        trial.go_on(state, 1)
    except StaleStateError:
        return
    raise fail("a state used twice", expected="StaleStateError", got="another batch", mend="keep states linear")


def close(trial: Trial) -> None:
    """A state can be closed, and closed again."""
    state = api.init(trial.env, trial.policy, seed=trial.seed)
    api.close(state)
    api.close(state)

"""Checks of `check_env` that need separate runs: lanes alone, overwritten memory, copies, old states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import optree
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.core import api
from funcollect.envs.host.host_env import seeding_of
from funcollect.errors import StaleStateError
from funcollect.keys import Noise
from funcollect.policies.base import PolicyBase
from funcollect.policies.random_policy import RandomPolicy
from funcollect.specs import ActionSpec
from funcollect.testing.compare import bits_differ, expect_equal, first_row, numbers_differ, shown, spot
from funcollect.testing.report import NotApplicableError, fail
from funcollect.testing.trial import Trial, by_lane, freed
from funcollect.tree import NAMESPACE

_FEW = 20  # steps that are compared outside simulators; after more, rounding errors may have grown


class OverwritingPolicy(PolicyBase):
    """Acts at random, keeps a copy of each action in `actions`, and overwrites each observation with zeros."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, spec: ActionSpec) -> None:
        self._random = RandomPolicy(spec)
        self.actions: list[Tensor] = []  # each [P, ...]

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return self._random.noise(spec)

    @override
    def __call__(self, *inputs: Any) -> tuple[None, Mapping[str, Any]]:
        _, outputs = self._random(*inputs)
        self.actions.append(outputs["action"].clone())
        _, _, observation, *_ = inputs
        for leaf in optree.tree_leaves(observation, namespace=NAMESPACE):
            leaf.zero_()
        return None, outputs


def lanes_alone(trial: Trial) -> None:
    """Each lane of a batch gives the same data as the same lane alone."""
    if trial.lanes < 2 or seeding_of(trial.env) != "episode":
        raise NotApplicableError("there is one lane" if trial.lanes < 2 else f"seeding is {seeding_of(trial.env)!r}")
    if trial.single is None:
        raise NotApplicableError("pass an id, or single=: the same environment with num_envs=1")
    host, policy = trial.env.backend == "host", RandomPolicy(trial.single.action_spec)
    length = trial.steps if host else min(trial.steps, _FEW)
    for lane in range(trial.lanes):
        first = api.init_lanes(trial.single, policy, seed=trial.seed, first_lane=lane, total_lanes=trial.lanes)
        with freed(first) as state:
            alone = by_lane(trial.single, api.rollout(trial.single, policy, state, length)[1])
        got, differs = trial.batch[lane : lane + 1, :length], bits_differ if host else numbers_differ
        what, source = f"lane {lane} of the batch (here called lane 0)", "the same lane by itself"
        mend = "let a lane's step and reset depend on that lane only"
        expect_equal(got, alone, what=what, source=source, mend=mend, differs=differs)


def _require_eager_loop(trial: Trial) -> None:
    """Raise NotApplicableError for a JAX environment, whose loop cannot call the Python policies of this module."""
    if trial.env.backend == "jax":
        raise NotApplicableError("its loop is traced, so the policies of this check cannot look into it")


def action_memory(trial: Trial) -> None:
    """The environment does not modify the action that it is given."""
    _require_eager_loop(trial)
    policy = OverwritingPolicy(trial.env.action_spec)
    batch = trial.run(trial.steps, policy=policy)
    given = torch.stack(policy.actions, 1)
    if place := first_row(bits_differ(batch["action"], given)):
        expected = f"{shown(given[place])}, as the policy returned it"
        got = f"{shown(batch['action'][place])} at the end of the run"
        mend = "copy the action before writing into it"
        raise fail(spot(*place, ("action",)), expected=expected, got=got, mend=mend)


def observation_memory(trial: Trial) -> None:
    """A policy that overwrites its observation does not affect the environment."""
    _require_eager_loop(trial)
    got = trial.run(trial.steps, policy=OverwritingPolicy(trial.env.action_spec))
    what, source = "the run of a policy that writes zeros over each observation", "the run of one that does not"
    mend = "copy into the rows: what the policy reads must not be the simulator's own memory"
    expect_equal(got, trial.batch, what=what, source=source, mend=mend)


def old_states(trial: Trial) -> None:
    """An old state gives the same batch again, or StaleStateError over simulators."""
    length = trial.third
    with trial.started() as state:
        _, first = trial.go_on(state, length)
        try:
            _, again = trial.go_on(state, length)
        except StaleStateError:
            if trial.env.backend == "host":
                return
            raise
    if trial.env.backend == "host":
        raise fail("a state used twice", expected="StaleStateError", got="another batch", mend="keep states linear")
    mend = "write nothing in place, and keep nothing in self: a step's result follows from its arguments"
    expect_equal(again, first, what="the second rollout from one state", source="the first one", mend=mend)


def close(trial: Trial) -> None:
    """A state can be closed, and closed again."""
    state = api.init(trial.env, trial.policy, seed=trial.seed)
    api.close(state)
    api.close(state)

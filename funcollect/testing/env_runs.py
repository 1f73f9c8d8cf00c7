"""Checks of `check_env` that need runs of their own: how episodes begin and end, lanes, memory, old states."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import optree
import torch
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence
from typing_extensions import override

from funcollect.core import api
from funcollect.core.saving import go_on
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import seeding_of
from funcollect.errors import StaleStateError
from funcollect.keys import Noise
from funcollect.policies.base import PolicyBase
from funcollect.policies.random_policy import RandomPolicy
from funcollect.specs import ActionSpec
from funcollect.testing.pairs import Trial, by_lane, freed
from funcollect.testing.report import (
    NotApplicableError,
    bits_differ,
    expect_equal,
    expect_rows,
    fail,
    mended_by,
    numbers_differ,
    to_tensor,
)
from funcollect.tree import NAMESPACE, Path

_CHANCE = 1e-3  # the probability of a false alarm that `terminal` accepts
_AS_FIRST = 0.8  # the share of ends that look like first observations, of the share of those themselves
_FEW = 20  # steps that are compared outside simulators; after more, rounding errors may have grown
_NOTICED = "_funcollect_noticed"  # the attribute of an environment whose `step` has called `reset`
_RESETS = 16  # the number of episodes per lane whose first observations are compared


def _root_of(state: CollectorState) -> dict[Path, Tensor]:
    """A copy of a state's current observation: by key, tensors [P, ...] on the CPU."""
    return {path: to_tensor(leaf).cpu() for path, leaf in state.observation.items()}


def _first_observations(trial: Trial, seed: int) -> dict[Path, Tensor]:
    """The observations that begin the first episodes of each lane, without running them: [P, _RESETS, ...] by key."""
    with trial.started(seed) as state:
        seen = [_root_of(state)]
        while len(seen) < _RESETS:
            state = api.reset(trial.env, state)
            seen.append(_root_of(state))
    return {path: torch.stack([each[path] for each in seen], 1) for path in seen[0]}


@mended_by("use the seed that reset is called with: super().reset(seed=seed), then self.np_random")
def another_seed(trial: Trial) -> None:
    """Another seed gives other episodes, if episodes differ at all."""
    one = _first_observations(trial, trial.seed)
    if all(not bits_differ(leaf, leaf[:1, :1].expand_as(leaf)).any() for leaf in one.values()):
        raise NotApplicableError("every episode begins with the same observation, which may be meant")
    two = _first_observations(trial, trial.seed + 1)
    if all(not bits_differ(leaf, two[path]).any() for path, leaf in one.items()):
        expected = f"other observations with seed={trial.seed + 1} than with seed={trial.seed}"
        got = "the same ones, though they differ from episode to episode"
        raise fail(f"the first {_RESETS} episodes of each lane", expected, got)


@mended_by(
    "let reset(seed=...) alone decide how an episode begins, or say seeding='lane' or 'run'; if a wrapper "
    "normalises by running statistics, do that in the network"
)
def resets(trial: Trial) -> str | None:
    """After a done row, the observation is the first one of the next episode."""
    limit = None if trial.done[:, :-1].any() else max(1, trial.steps // 4)  # of the frames in an episode
    batch = trial.batch if limit is None else trial.run(trial.steps, max_frames_per_traj=limit)
    _expect_left_terminal(trial, batch)
    if seeding_of(trial.env) == "episode":
        _expect_seeded(trial, batch)
    return f"no episode ended within {trial.steps} steps, so they were cut after {limit}" if limit else None


def _expect_left_terminal(trial: Trial, batch: Any) -> None:
    """Fail if the terminal observation is still there in every row after an end, in a batch [P, T].

    An environment whose observations do not change within episodes either passes.
    """
    ended = batch["next", "done"][:, :-1, 0]
    still, moves = ended, torch.zeros_like(ended)
    for leaf in trial.env.observation_leaves:
        still = still & ~bits_differ(batch[leaf.path][:, 1:], batch["next", *leaf.path][:, :-1])
        moves = moves | bits_differ(batch[leaf.path], batch["next", *leaf.path])[:, :-1]
    if ended.any() and moves[~ended].any() and bool(still.eq(ended).all()):
        expected, got = "the first observation of another episode", "the terminal one still, at every end"
        mend = "reset the lanes that reset is called with, and write their observations"
        expect_rows(ended, ("the root after an end",), got, expected, mend, first=1)


def _expect_seeded(trial: Trial, batch: Any) -> None:
    """Fail if the first observation of an episode in the batch [P, T] depends on anything but the episode's seed."""
    host, begins = trial.env.backend == "host", batch["collector", "step"] == 0
    number = begins.cumsum(1) - 1
    with trial.started() as state:
        for episode in range(min(int(number.max()) + 1, _RESETS)):
            if host:  # without the frames of the episodes before
                state = go_on(trial.env, trial.policy, state, steps=0, episode=episode - 1)
            elif episode:
                state = api.reset(trial.env, state)
            for path, first in _root_of(state).items():
                wanted = first.to(batch[path].dtype).unsqueeze(1).expand_as(batch[path])  # JAX may lack 64 bits
                wrong = bits_differ(batch[path], wanted) & begins & (number == episode)
                where = (*path[:-1], f"{path[-1]}, where episode {episode} begins")
                expect_rows(wrong, where, batch[path], wanted, note=", as its seed gives when it is begun directly")


@mended_by("return terminated or truncated as True instead; max_episode_steps sets a time limit")
def own_resets(trial: Trial) -> None:
    """`step` calls no `reset` within an episode: the batch has the end of each."""
    with trial.started() as state:
        try:
            state, watched = api.apply(trial.env, state, _watch_resets)
        except TypeError:  # no objects
            watched = [False]
        if not all(watched):
            raise NotApplicableError("only for environments of Gymnasium's classes")
        for step in range(trial.steps):
            state, row = trial.go_on(state, 1)
            state, found = api.apply(trial.env, state, _has_reset_itself)
            wrong = torch.tensor(found)[:, None] & ~row["next", "done"][..., 0]
            expect_rows(wrong, ("reset",), "a call", "no call of reset by step within an episode", first=step)


def _watch_resets(env: Any) -> bool:
    """Notice calls of `reset` that come from `step`, its own or that of a wrapper; False unless it is Gymnasium's."""
    if not isinstance(env, gymnasium.Env):
        return False
    raw, layers = env.unwrapped, [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    inner = raw.reset

    def reset(*args: Any, **kwargs: Any) -> Any:
        for frame, _ in traceback.walk_stack(inspect.currentframe()):
            code = frame.f_code
            caller = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "step" and code.co_argcount else None
            if any(caller is each for each in layers):
                vars(raw)[_NOTICED] = True
        return inner(*args, **kwargs)

    vars(raw)["reset"] = reset
    return True


def _has_reset_itself(env: Any) -> bool:
    """Whether there was such a call since this was asked last."""
    return bool(vars(env.unwrapped).pop(_NOTICED, False))


@mended_by("wrap the raw environment, without its own autoreset: the library resets")
def terminal(trial: Trial) -> None:
    """At an end, `next` holds the terminal observation, not the first one of the next episode."""
    if not trial.done.any():
        raise NotApplicableError(f"no episode ended within {trial.steps} steps: raise steps, or set max_episode_steps")
    begins, seen = trial.batch["collector", "step"] == 0, _first_observations(trial, trial.seed + 2)
    first = _share(_like_any(seen, trial.batch)[begins])
    fresh = _like_any(seen, trial.batch["next"])
    other = _share(fresh[~begins & ~trial.done])  # rows that may look like first ones without being any
    applies = False
    for name in ("terminated", "truncated"):
        ends = trial.batch["next", name][..., 0] & ~begins  # after one step a row may well look like the first one
        if not _tells(first, other, count := int(ends.sum())):
            continue
        applies = True
        if (share := _share(fresh[ends])) >= _AS_FIRST * first and _tells(share, other, count):
            got = f"at {int(fresh[ends].sum())} of {count} such ends one like those that episodes begin with"
            expect_rows(ends & fresh, (f"next where an episode is {name}",), got, "the terminal observation")
    if not applies:
        few = _tells(first, other, 10 * int(trial.done.sum()))
        raise NotApplicableError(
            "too few ends: raise steps" if few else "first observations look like any other, so ends cannot be told"
        )


def _like_any(seen: dict[Path, Tensor], rows: Any) -> Tensor:
    """Whether all numbers of a row of `rows` [P, T] lie in the ranges of `seen`, with a margin of a tenth: [P, T]."""
    inside = torch.ones(rows.shape[:2], dtype=torch.bool)
    for path, values in seen.items():
        low, high = values.flatten(0, 1).double().aminmax(dim=0)
        margin, leaf = (high - low) / 10, rows[path].cpu()
        inside &= ((leaf >= low - margin) & (leaf <= high + margin)).reshape(*leaf.shape[:2], -1).all(-1)
    return inside


def _share(looks: Tensor) -> float:
    """The mean of a bool tensor; 1.0 if it is empty."""
    return float(looks.double().mean()) if len(looks) else 1.0


def _tells(share: float, other: float, count: int) -> bool:
    """Whether `share` of `count` rows is more than chance gives, if each looks fresh with the probability `other`.

    Chernoff's bound: the chance is at most exp(-count * KL(share, other)).
    """
    apart = kl_divergence(*(Bernoulli(torch.tensor(chance, dtype=torch.float64)) for chance in (share, other)))
    return share > other and count * float(apart) >= -math.log(_CHANCE)


@mended_by("let reset change only the lanes that it is called with, and let no lane's step depend on other lanes")
def reset_mask(trial: Trial) -> None:
    """`reset` with a mask begins new episodes in these lanes, and does not affect the others."""
    if trial.lanes < 2:
        raise NotApplicableError("there is one lane: pass num_envs=3")
    third, mask = trial.third, torch.arange(trial.lanes) % 2 == 0
    after = f"after a reset of lanes {mask.nonzero()[:, 0].tolist()}"
    with trial.started() as state:
        state, _ = trial.go_on(state, third)
        fresh = api.reset(trial.env, state, mask)
        before = _root_of(state)
        for path, leaf in _root_of(fresh).items():
            got, wanted, where = leaf[:, None], before[path][:, None], (*path[:-1], f"{path[-1]} {after}")
            expect_rows(bits_differ(got, wanted) & ~mask[:, None], where, got, wanted, note=" as before", first=third)
        step = to_tensor(fresh.step)[:, None]
        expect_rows((step != 0) & mask[:, None], (f"step {after}",), step, "0", first=third)
        _, batch = trial.go_on(fresh, third)
    if seeding_of(trial.env) != "run":  # lanes may share one generator
        wanted = trial.batch[:, third : 2 * third]
        batch[mask] = wanted[mask]
        expect_equal(batch, wanted, after, "the run without that reset")


@mended_by("let a lane's step and reset depend on that lane only")
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
        what = f"lane {lane} of the batch (here called lane 0)"
        expect_equal(got, alone, what, "the same lane by itself", differs=differs)


class OverwritingPolicy(PolicyBase):
    """Acts at random, keeps a copy of each action [P, ...] in `actions`, and overwrites each observation with zeros."""

    backend: Literal["torch"] = "torch"
    params = None

    def __init__(self, spec: ActionSpec) -> None:
        self._random = RandomPolicy(spec)
        self.actions: list[Tensor] = []

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        return self._random.noise(spec)

    @override
    def __call__(self, *inputs: Any) -> tuple[None, Mapping[str, Any]]:
        _, outputs = self._random(*inputs)
        self.actions.append(outputs["action"].clone())
        for leaf in optree.tree_leaves(inputs[2], namespace=NAMESPACE):  # the observation
            leaf.zero_()
        return None, outputs


@mended_by("copy the action before writing into it")
def policy_memory(trial: Trial) -> None:
    """The environment does not modify the action, and a policy that overwrites its observation does not affect it."""
    if trial.env.backend == "jax":
        raise NotApplicableError("its loop is traced, so the policy of this check cannot look into it")
    policy = OverwritingPolicy(trial.env.action_spec)
    got, what = trial.run(trial.steps, policy=policy), "the run of a policy that writes zeros over each observation"
    action, given = got["action"], torch.stack(policy.actions, 1)
    expect_rows(bits_differ(action, given), ("action",), action, given, note=", as the policy returned it")
    mend = "copy into the rows: what the policy reads must not be the simulator's own memory"
    expect_equal(got, trial.batch, what, "the run of one that does not", mend)


@mended_by("write nothing in place, and keep nothing in self: a step's result follows from its arguments")
def old_states(trial: Trial) -> None:
    """An old state gives the same batch again, or StaleStateError over simulators."""
    host, length = trial.env.backend == "host", trial.third
    with trial.started() as state:
        _, first = trial.go_on(state, length)
        try:
            _, again = trial.go_on(state, length)
        except StaleStateError:
            if not host:
                raise
            return
    if host:
        raise fail("a state used twice", "StaleStateError", "another batch", "keep states linear")
    expect_equal(again, first, "the second rollout from one state", "the first one")


def close(trial: Trial) -> None:
    """A state can be closed, and closed again."""
    state = api.init(trial.env, trial.policy, seed=trial.seed)
    api.close(state)
    api.close(state)

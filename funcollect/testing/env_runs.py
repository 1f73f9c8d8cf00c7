"""Checks of `check_env` that need runs of their own: how episodes begin and end, lanes, memory, old states."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import optree
import torch
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence
from typing_extensions import override

from funcollect.core import api
from funcollect.core.apply import apply
from funcollect.core.saving import go_on
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import seeding_of
from funcollect.errors import StaleStateError
from funcollect.keys import Noise
from funcollect.policies.base import PolicyBase
from funcollect.policies.random_policy import RandomPolicy
from funcollect.specs import ActionSpec
from funcollect.testing.report import (
    NotApplicableError,
    bits_differ,
    digits,
    expect_equal,
    expect_rows,
    fail,
    first_row,
    numbers_differ,
    to_tensor,
)
from funcollect.testing.trial import Trial, by_lane, freed, root_of
from funcollect.tree import NAMESPACE, Path

_CHANCE = 1e-3  # the probability of a false alarm that `terminal` accepts
_AS_FIRST = 0.8  # the share of ends that look like first observations, of the share of those themselves
_FEW = 20  # steps that are compared outside simulators; after more, rounding errors may have grown
_NOTICED = "_funcollect_noticed"  # the attribute of an environment whose `step` has called `reset`
_RESETS = 16  # the number of episodes per lane whose first observations are compared


def _first_observations(trial: Trial, seed: int) -> dict[Path, Tensor]:
    """The observations that begin the first episodes of each lane, without running them: [P, _RESETS, ...] by key."""
    with trial.started(seed) as state:
        seen = [root_of(state)]
        for _ in range(_RESETS - 1):
            state = api.reset(trial.env, state)
            seen.append(root_of(state))
    return {path: torch.stack([each[path] for each in seen], 1) for path in seen[0]}


def another_seed(trial: Trial) -> None:
    """Another seed gives other episodes, if episodes differ at all."""
    one = _first_observations(trial, trial.seed)
    if all(not bits_differ(leaf, leaf[:1, :1].expand_as(leaf)).any() for leaf in one.values()):
        raise NotApplicableError("every episode begins with the same observation, which may be meant")
    two = _first_observations(trial, trial.seed + 1)
    if all(not bits_differ(leaf, two[path]).any() for path, leaf in one.items()):
        expected = f"other observations with seed={trial.seed + 1} than with seed={trial.seed}"
        got = "the same ones, though they differ from episode to episode"
        mend = "use the seed that reset is called with: super().reset(seed=seed), then self.np_random"
        raise fail(f"the first {_RESETS} episodes of each lane", expected=expected, got=got, mend=mend)


def _begin(trial: Trial, state: CollectorState, episode: int) -> CollectorState:
    """A state in which every lane begins its episode number `episode`, without the frames of the episodes before.

    `state` begins the episode before this one, or is the first state if `episode` is 0.
    """
    if trial.env.backend != "host":
        return api.reset(trial.env, state) if episode else state
    return go_on(trial.env, trial.policy, state, steps=0, episode=episode - 1)


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
    number = (batch["collector", "step"] == 0).cumsum(1) - 1
    mend = (
        "let reset(seed=...) alone decide how an episode begins, or say seeding='lane' or 'run'; if a wrapper "
        "normalises by running statistics, do that in the network"
    )
    with trial.started() as state:
        for episode in range(min(int(number.max()) + 1, _RESETS)):
            state = _begin(trial, state, episode)
            starts = (number == episode) & (batch["collector", "step"] == 0)
            for path, first in root_of(state).items():
                wanted = first.to(batch[path].dtype).unsqueeze(1).expand_as(batch[path])  # JAX may lack 64 bits
                wrong = bits_differ(batch[path], wanted) & starts
                where = (*path[:-1], f"{path[-1]}, where episode {episode} begins")
                note = ", as its seed gives when it is begun directly"
                expect_rows(wrong, where, batch[path], wanted, mend, note=note)


def own_resets(trial: Trial) -> None:
    """`step` calls no `reset` within an episode: the batch has the end of each."""
    with trial.started() as state:
        try:
            state, watched = apply(trial.env, state, _watch_resets)
        except TypeError:  # no objects
            watched = [False]
        if not all(watched):
            raise NotApplicableError("only for environments of Gymnasium's classes")
        for step in range(trial.steps):
            state, row = trial.go_on(state, 1)
            state, found = apply(trial.env, state, _has_reset_itself)
            wrong = torch.tensor(found)[:, None] & ~row["next", "done"][..., 0]
            expected = "no call of reset by step within an episode"
            mend = "return terminated or truncated as True instead; max_episode_steps sets a time limit"
            expect_rows(wrong, ("reset",), "a call", expected, mend, first=step)


def _watch_resets(env: Any) -> bool:
    """Notice calls of `reset` that come from `step`, its own or that of a wrapper; False unless it is Gymnasium's."""
    if not isinstance(env, gymnasium.Env):
        return False
    raw, wrappers = env.unwrapped, [env]
    while isinstance(wrappers[-1], gymnasium.Wrapper):
        wrappers.append(wrappers[-1].env)
    inner = raw.reset

    def reset(*args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            caller = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "step" and code.co_argcount else None
            if any(caller is each for each in wrappers):
                raw.__dict__[_NOTICED] = True
                break
            frame = frame.f_back
        return inner(*args, **kwargs)

    raw.__dict__["reset"] = reset
    return True


def _has_reset_itself(env: Any) -> bool:
    """Whether there was such a call since this was asked last."""
    return bool(env.unwrapped.__dict__.pop(_NOTICED, False))


def terminal(trial: Trial) -> None:
    """At an end, `next` holds the terminal observation, not the first one of the next episode."""
    if not trial.done.any():
        raise NotApplicableError(f"no episode ended within {trial.steps} steps: raise steps, or set max_episode_steps")
    begins = trial.batch["collector", "step"] == 0
    ranges = _ranges_of_first(trial)
    first = _share(_within(ranges, trial.batch)[begins])
    fresh = _within(ranges, trial.batch["next"])
    other = _share(fresh[~begins & ~trial.done])  # rows that may look like first ones without being any
    applies = False
    for name in ("terminated", "truncated"):
        ends = trial.batch["next", name][..., 0] & ~begins  # after one step a row may well look like the first one
        count = int(ends.sum())
        if not _tells(first, other, count):
            continue
        applies = True
        if (share := _share(fresh[ends])) >= _AS_FIRST * first and _tells(share, other, count):
            got = f"at {int(fresh[ends].sum())} of {count} such ends one like those that episodes begin with"
            mend = "wrap the raw environment, without its own autoreset: the library resets"
            where = (f"next where an episode is {name}",)
            expect_rows(ends & fresh, where, got, "the terminal observation", mend)
    if not applies:
        few = _tells(first, other, 10 * int(trial.done.sum()))
        raise NotApplicableError(
            "too few ends: raise steps" if few else "first observations look like any other, so ends cannot be told"
        )


def _ranges_of_first(trial: Trial) -> dict[Path, tuple[Tensor, Tensor]]:
    """The least and greatest values of first observations, by key, each [...], with a margin of a tenth either way."""
    ranges = {}
    for path, leaf in _first_observations(trial, trial.seed + 2).items():
        low, high = leaf.flatten(0, 1).double().aminmax(dim=0)
        margin = (high - low) / 10
        ranges[path] = (low - margin, high + margin)
    return ranges


def _within(ranges: dict[Path, tuple[Tensor, Tensor]], rows: Any) -> Tensor:
    """Whether all numbers of a row of `rows` [P, T] lie in the ranges of their keys: [P, T] bool."""
    inside = torch.ones(rows.shape[:2], dtype=torch.bool)
    for path, (low, high) in ranges.items():
        leaf = rows[path].cpu()
        inside &= ((leaf >= low) & (leaf <= high)).reshape(*leaf.shape[:2], -1).all(-1)
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


def reset_mask(trial: Trial) -> None:
    """`reset` with a mask begins new episodes in these lanes, and does not affect the others."""
    if trial.lanes < 2:
        raise NotApplicableError("there is one lane: pass num_envs=3")
    third = trial.third
    mask = torch.arange(trial.lanes) % 2 == 0
    with trial.started() as state:
        state, _ = trial.go_on(state, third)
        after = api.reset(trial.env, state, mask)
        _expect_masked(state, after, mask)
        _, batch = trial.go_on(after, third)
    if seeding_of(trial.env) == "run":
        return  # lanes may share one generator
    wanted = trial.batch[:, third : 2 * third]
    batch[mask] = wanted[mask]
    what, source = f"after a reset of lanes {mask.nonzero()[:, 0].tolist()}", "the run without that reset"
    mend = "let reset change only the lanes that it is called with, and let no lane's step depend on other lanes"
    expect_equal(batch, wanted, what=what, source=source, mend=mend)


def _expect_masked(before: CollectorState, after: CollectorState, mask: Tensor) -> None:
    """Fail unless a reset of the lanes in `mask` [P] set their steps to 0, and changed no other lane's observation."""
    shown_before = root_of(before)
    for path, leaf in root_of(after).items():
        touched = bits_differ(leaf.unsqueeze(1), shown_before[path].unsqueeze(1))[:, 0]
        if place := first_row((touched & ~mask).unsqueeze(1)):
            where = f"lane {place[0]}, {'.'.join(path)} after a reset of lanes {mask.nonzero()[:, 0].tolist()}"
            expected, got = f"{digits(shown_before[path][place[0]])} as before", digits(leaf[place[0]])
            mend = "reset the lanes that reset is called with, and write only their observations"
            raise fail(where, expected=expected, got=got, mend=mend)
    step = to_tensor(after.step)
    if place := first_row(((step != 0) & mask).unsqueeze(1)):
        raise fail(f"lane {place[0]}, step after its reset", expected=0, got=int(step[place[0]]), mend="set it to 0")


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
    given, mend = torch.stack(policy.actions, 1), "copy the action before writing into it"
    wrong = bits_differ(batch["action"], given)
    expect_rows(wrong, ("action",), batch["action"], given, mend, note=", as the policy returned it")


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

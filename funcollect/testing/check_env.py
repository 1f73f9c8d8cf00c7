"""`check_env` and its checks: an environment's description, its rows, its episodes, lanes, memory and old states."""

from __future__ import annotations

import copy
import inspect
import math
import traceback
from dataclasses import replace
from typing import Any, get_args

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

from funcollect.arguments import check_kind, check_num_envs
from funcollect.core import api
from funcollect.core.saving import go_on
from funcollect.core.state import CollectorState
from funcollect.envs.base import EnvBase
from funcollect.envs.host.host_env import seeding_of
from funcollect.envs.registry import WORKER_ARGUMENTS, make_env
from funcollect.errors import NoResetError, StaleStateError
from funcollect.messages import shown
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Backend, Env, Forking, Seeding, Starts
from funcollect.specs import PLAYER, PRESENT, ActionSpec, disassemble, observation_leaves
from funcollect.testing import trials
from funcollect.testing.trials import FailedError, NotApplicableError, Trial, bits_differ, expect_rows, mended_by
from funcollect.trajectories.split import STEP, TRAJECTORY_IDS
from funcollect.tree import Path, there

_DIVISION = "look at the division, root or logarithm behind it"
_NOTICED = "_funcollect_noticed"  # the attribute of an environment whose `step` has called `reset`
_RESETS = 16  # the number of episodes per lane whose first observations are compared


def describes(trial: Trial) -> None:
    """The description is complete: backend, seeding, number of lanes, spaces and their leaves."""
    env = trial.env
    for name, kind in (("backend", Backend), ("seeding", Seeding), ("forking", Forking), ("starts", Starts)):
        if (value := getattr(env, name, None)) not in (None, *get_args(kind)):  # the backend decides which ones exist
            raise FailedError(name, f"one of {get_args(kind)}", repr(value), "set it to one of these")
    check_num_envs(env.num_envs)
    leaves = env.observation_leaves, observation_leaves(env.observation_space)
    got, wanted = ([(leaf.path, leaf.shape) for leaf in side] for side in leaves)
    if got != wanted:
        raise FailedError("observation_leaves", wanted, got, "make them with specs.observation_leaves")
    if not isinstance(env.action_spec, ActionSpec) or env.action_spec.space != env.action_space:
        raise FailedError("action_spec", f"ActionSpec({env.action_space})", env.action_spec, "make it so")


def runs(trial: Trial) -> str | None:
    """It resets and steps: observations, rewards and flags have the right structure, shape and dtype."""
    trial.run(*[1] * 8, trial.third)  # the loops check the first step of each rollout most thoroughly
    counts = (trial.batch[STEP][trial.batch["next", "terminated"][..., 0]] + 1).bincount()  # of terminations, by length
    if len(counts) <= 2 or counts[-1] < max(4, 2 * int(counts[:-1].max()) + 1):  # fewer may be chance
        return None
    how_many, longest = f"{int(counts[-1])} of {int(counts.sum())} terminations", len(counts) - 1
    return f"{how_many} come after {longest} steps, none later: if that is a limit, return truncated"


@mended_by("widen the space, or clip the observation")
def observations(trial: Trial) -> None:
    """Every observation lies in its space, before and after a step."""
    space = trial.env.observation_space
    parts = disassemble(space, space)  # a Dict or Tuple space is indexed like its observations
    for leaf, part in zip(trial.env.observation_leaves, parts, strict=True):
        if isinstance(part, spaces.Box):  # round its bounds as observations are rounded
            low, high = (torch.as_tensor(bound.astype(leaf.dtype)) for bound in (part.low, part.high))
        else:
            low, high = ActionSpec(part).bounds
        for path in (("next", *leaf.path), leaf.path):
            numbers, what, wanted = trial.batch[path].cpu(), ".".join(path), f"a value in {part}"
            expect_rows(numbers.isnan(), what, numbers, wanted, _DIVISION)
            expect_rows(~((numbers >= low) & (numbers <= high)), what, numbers, wanted)


@mended_by(_DIVISION)
def rewards(trial: Trial) -> str | None:
    """Rewards are finite float32 numbers, one for each player; whoever moves in turn has a legal action."""
    reward, movers = trial.batch["next", "reward"], trial.batch.get(PLAYER, None)
    expect_rows(~reward.isfinite(), "next.reward", reward, "a finite number")
    players = reward.shape[-1]
    if movers is not None:
        wanted, mend = f"less than {players}, the number of rewards", "let `step` return a reward for each player"
        expect_rows(movers >= players, PLAYER, movers, wanted, mend)
        legal = trial.batch.get("action_mask", movers[..., None] >= 0)
        expect_rows(~legal.bool().any(-1), "action_mask", legal, "a legal action", "let the mask allow one")
    return None if players == 1 else f"{players} in each step, one for each player: if there is one player, sum them"


@mended_by("flag an agent from its end until it is back, leave it out meanwhile, and pay only those who are there")
def groups(trial: Trial) -> None:
    """Agents that have ended are not there and get no reward, rewards add up, and a lane without agents has ended."""
    found, batch = getattr(trial.env.action_spec, "groups", {}), trial.batch
    if not found:
        raise NotApplicableError("it has no groups of agents")
    total: Any = 0
    left = torch.ones_like(trial.done)
    for name, group in found.items():
        if not {"done", "reward"} <= {*batch["next", name].keys()}:
            raise NotApplicableError(f"the agents of {name!r} share their rewards or flags")
        reward = batch["next", name, "reward"]
        total = total + reward.sum(-2)
        for node, what in ((batch, name), (batch["next"], f"next.{name}")):
            gone = node[name, "done"][..., 0]
            present = node[name, PRESENT] if group.comes_and_goes else ~gone
            expect_rows(gone & present, f"{what}.{PRESENT}", present, "False for agents that are done")
        left = left & ~present.any(-1)
        ends_alone = gone & ~trial.done[..., None] & (not group.comes_and_goes)
        expect_rows(ends_alone, f"next.{name}.done", gone, "False before the lane's end, as comes_and_goes is False")
        absent = ~batch[name, PRESENT] if group.comes_and_goes else torch.zeros_like(gone)
        expect_rows(absent[..., None] & (reward != 0), f"next.{name}.reward", reward, "0 for absent agents")
    wrong = ~torch.isclose(total, batch["next", "reward"], rtol=1e-4, atol=1e-4)
    expect_rows(wrong, "next.reward", batch["next", "reward"], total, note=", the sum over agents")
    expect_rows(left & ~trial.done, "next.done", trial.done, "True where no agent is left")


@mended_by("write observations in reset and step only, and only for the lanes that these are called with")
def chained(trial: Trial) -> None:
    """Within an episode, each observation is the one that the step before returned."""
    within, found = trial.batch[TRAJECTORY_IDS].diff(dim=1) == 0, getattr(trial.env.action_spec, "groups", {})
    for leaf in trial.env.observation_leaves:
        root, produced = trial.batch[leaf.path][:, 1:], trial.batch["next", *leaf.path][:, :-1]
        name, *rest = leaf.path
        if name in found and found[name].comes_and_goes and rest[0] == "observation":
            produced = there(produced, trial.batch[name, PRESENT][:, 1:])  # zeros for absent agents
        wrong, note = bits_differ(root, produced) & within, ", the next observation of the row before"
        expect_rows(wrong, ".".join(leaf.path), root, produced, note=note, first=1)


def _root_of(state: CollectorState) -> dict[Path, Tensor]:
    return {path: trials.to_tensor(leaf).cpu() for path, leaf in state.observation.items()}


def _first_observations(trial: Trial, later: int = 0) -> dict[Path, Tensor]:
    """The first observations of each lane's episodes, [P, 16, ...] by key, by resets alone; `later` shifts the seed."""
    with replace(trial, seed=trial.seed + later).started() as state:
        firsts = [_root_of(state)]
        while len(firsts) < _RESETS:
            state = api.reset(trial.env, state)
            firsts.append(_root_of(state))
    return {path: torch.stack([first[path] for first in firsts], 1) for path in firsts[0]}


@mended_by("use the seed that reset is called with: super().reset(seed=seed), then self.np_random")
def another_seed(trial: Trial) -> None:
    """Another seed gives other episodes, if episodes differ at all."""
    one, two = _first_observations(trial), _first_observations(trial, 1)
    if all(not bits_differ(leaf, leaf[:1, :1].expand_as(leaf)).any() for leaf in one.values()):
        raise NotApplicableError("every episode begins with the same observation, which may be meant")
    if all(not bits_differ(leaf, two[path]).any() for path, leaf in one.items()):
        expected = f"other observations with seed={trial.seed + 1} than with seed={trial.seed}"
        got = "the same ones, though they differ from episode to episode"
        raise FailedError(f"the first {_RESETS} episodes of each lane", expected, got)


@mended_by(
    "let reset(seed=...) alone decide how an episode begins, or say seeding='lane' or 'run'; if a wrapper "
    "normalises by running statistics, do that in the network"
)
def resets(trial: Trial) -> str | None:
    """After a done row, the observation is the first one of the next episode."""
    limit = None if trial.done[:, :-1].any() else max(1, trial.steps // 4)  # of the frames in an episode
    batch = trial.batch if limit is None else trial.run(trial.steps, max_frames_per_traj=limit)
    ended = batch["next", "done"][:, :-1, 0]
    still, moves = ended, torch.zeros_like(ended)  # an environment may have observations that never change
    for leaf in trial.env.observation_leaves:
        still = still & ~bits_differ(batch[leaf.path][:, 1:], batch["next", *leaf.path][:, :-1])
        moves = moves | bits_differ(batch[leaf.path], batch["next", *leaf.path])[:, :-1]
    if ended.any() and moves[~ended].any() and bool(still.eq(ended).all()):
        expected, got = "the first observation of another episode", "the terminal one still, at every end"
        mend = "reset the lanes that reset is called with, and write their observations"
        expect_rows(ended, "the root after an end", got, expected, mend, first=1)
    if seeding_of(trial.env) == "episode":
        _expect_seeded(trial, batch)
    return f"no episode ended within {trial.steps} steps, so they were cut after {limit}" if limit else None


def _expect_seeded(trial: Trial, batch: Any) -> None:
    """Fail if the first observation of an episode in the batch [P, T] depends on anything but the episode's seed."""
    begins = batch[STEP] == 0
    number = begins.cumsum(1) - 1
    with trial.started() as state:
        for episode in range(min(int(number.max()) + 1, _RESETS)):
            if trial.env.backend == "host":  # without the frames of the episodes before
                state = go_on(trial.env, trial.policy, state, steps=0, episode=episode - 1)
            elif episode:
                state = api.reset(trial.env, state)
            for path, first in _root_of(state).items():
                wanted = first.to(batch[path].dtype).unsqueeze(1).expand_as(batch[path])  # JAX may lack 64 bits
                wrong = bits_differ(batch[path], wanted) & begins & (number == episode)
                what = f"{'.'.join(path)}, where episode {episode} begins"
                expect_rows(wrong, what, batch[path], wanted, note=", as its seed gives when it is begun directly")


@mended_by("return terminated or truncated as True instead; max_episode_steps sets a time limit")
def own_resets(trial: Trial) -> None:
    """`step` calls no `reset` within an episode: the batch has the end of each."""
    with trial.started() as state:
        try:
            state, watched = api.apply(trial.env, state, _watch_resets)
        except TypeError:  # the simulators have no object for each lane
            watched = [False]
        if not all(watched):
            raise NotApplicableError("only for environments of Gymnasium's classes")
        for step in range(trial.steps):
            state, row = trial.go_on(state, 1)
            state, found = api.apply(trial.env, state, lambda env: bool(vars(env.unwrapped).pop(_NOTICED, False)))
            wrong = torch.tensor(found)[:, None] & ~row["next", "done"][..., 0]
            expect_rows(wrong, "reset", "a call", "no call of reset by step within an episode", first=step)


def _watch_resets(env: Any) -> bool:
    """Notice calls of `reset` by `step`, the environment's or a wrapper's; False unless its class is Gymnasium's."""
    if not isinstance(env, gymnasium.Env):
        return False
    raw, inner = env.unwrapped, env.unwrapped.reset

    def reset(*args: Any, **kwargs: Any) -> Any:
        for frame, _ in traceback.walk_stack(inspect.currentframe()):
            code = frame.f_code
            caller = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "step" and code.co_argcount else None
            if isinstance(caller, gymnasium.Env) and caller.unwrapped is raw:
                vars(raw)[_NOTICED] = True
        return inner(*args, **kwargs)

    vars(raw)["reset"] = reset
    return True


@mended_by("wrap the raw environment, without its own autoreset: the library resets")
def terminal(trial: Trial) -> None:
    """At an end, `next` holds the terminal observation, not the first one of the next episode."""
    if not trial.done.any():
        raise NotApplicableError(f"no episode ended within {trial.steps} steps: raise steps, or set max_episode_steps")
    begins, samples = trial.batch[STEP] == 0, _first_observations(trial, 2)
    first = _share(_like_samples(samples, trial.batch)[begins])
    fresh = _like_samples(samples, trial.batch["next"])
    other = _share(fresh[~begins & ~trial.done])  # the share by chance, in rows that begin and end no episode
    applies = False
    for name in ("terminated", "truncated"):
        ends = trial.batch["next", name][..., 0] & ~begins  # after one step a row may well look like the first one
        share, count = _share(fresh[ends]), int(ends.sum())
        applies |= (distinct := _exceeds_chance(first, other, count))
        if distinct and share >= 0.8 * first and _exceeds_chance(share, other, count):
            got = f"at {int(fresh[ends].sum())} of {count} such ends one like those that episodes begin with"
            expect_rows(ends & fresh, f"next where an episode is {name}", got, "the terminal observation")
    if not applies:
        few = _exceeds_chance(first, other, 10 * int(trial.done.sum()))
        unclear = "first observations look like any other, so ends cannot be told"
        raise NotApplicableError("too few ends: raise steps" if few else unclear)


def _like_samples(samples: dict[Path, Tensor], rows: Any) -> Tensor:
    """Whether all numbers of a row of `rows` [P, T] lie in the ranges of `samples` or a tenth beyond: [P, T] bool."""
    inside = torch.ones(rows.shape[:2], dtype=torch.bool)
    for path, values in samples.items():
        low, high = values.flatten(0, 1).double().aminmax(dim=0)
        margin, leaf = (high - low) / 10, rows[path].cpu()
        inside &= ((leaf >= low - margin) & (leaf <= high + margin)).reshape(*leaf.shape[:2], -1).all(-1)
    return inside


def _share(mask: Tensor) -> float:
    return float(mask.double().mean()) if len(mask) else 1.0


def _exceeds_chance(share: float, other: float, count: int) -> bool:
    """Whether `share` of `count` rows is more than chance gives, if each looks fresh with the probability `other`."""
    # Chernoff's bound: the probability is at most exp(-count * KL(share, other)), and may be a thousandth.
    divergence = kl_divergence(*(Bernoulli(torch.tensor(chance, dtype=torch.float64)) for chance in (share, other)))
    return share > other and count * float(divergence) >= -math.log(1e-3)


@mended_by("let reset change only the lanes that it is called with, and no lane's step depend on other lanes")
def reset_mask(trial: Trial) -> None:
    """`reset` with a mask begins new episodes in these lanes, and does not affect the others."""
    if trial.lanes < 2:
        raise NotApplicableError("there is one lane: pass num_envs=3")
    third, mask = trial.third, torch.arange(trial.lanes) % 2 == 0
    after = f"after a reset of lanes {mask.nonzero()[:, 0].tolist()}"
    with trial.started() as state:
        state, _ = trial.go_on(state, third)
        try:
            fresh = api.reset(trial.env, state, mask)
        except NoResetError as reason:
            raise NotApplicableError(str(reason)) from reason
        before = _root_of(state)
        for path, leaf in _root_of(fresh).items():
            got, wanted, what = leaf[:, None], before[path][:, None], f"{'.'.join(path)} {after}"
            expect_rows(bits_differ(got, wanted) & ~mask[:, None], what, got, wanted, note=" as before", first=third)
        step = trials.to_tensor(fresh.step)[:, None]
        expect_rows((step != 0) & mask[:, None], f"step {after}", step, "0", first=third)
        _, batch = trial.go_on(fresh, third)
    if seeding_of(trial.env) != "run":  # lanes may share one generator
        wanted = trial.batch[:, third : 2 * third]
        batch[mask] = wanted[mask]
        trials.expect_equal(batch, wanted, after, "the run without that reset")


@mended_by("let a lane's step and reset depend on that lane only")
def lanes_alone(trial: Trial) -> None:
    """Each lane of a batch gives the same data as the same lane alone."""
    if trial.lanes < 2 or seeding_of(trial.env) != "episode":
        raise NotApplicableError("there is one lane" if trial.lanes < 2 else f"seeding is {seeding_of(trial.env)!r}")
    if trial.single is None:
        raise NotApplicableError("pass an id, or single=: the same environment with num_envs=1")
    host, single = trial.env.backend == "host", replace(trial, env=trial.single)
    length = trial.steps if host else min(trial.steps, 20)  # after more, rounding errors may have grown
    differs = bits_differ if host else trials.numbers_differ
    for lane in range(trial.lanes):
        first = api.init_lanes(single.env, trial.policy, seed=trial.seed, first_lane=lane, total_lanes=trial.lanes)
        with trials.freed(first) as state:
            _, alone = single.rollout(state, length)
        got, what = trial.batch[lane : lane + 1, :length], f"lane {lane} of the batch (here called lane 0)"
        trials.expect_equal(got, alone, what, "the same lane by itself", differs=differs)


@mended_by("copy the action before writing into it")
def policy_memory(trial: Trial) -> None:
    """The environment does not modify the action, and a policy that overwrites its observation does not affect it."""
    if trial.env.backend == "jax":
        raise NotApplicableError("its loop is traced, so the policy of this check cannot look into it")
    policy = trials.OverwritingPolicy(trial.env.action_spec)
    got = replace(trial, policy=policy).run(trial.steps)
    found = getattr(trial.env.action_spec, "groups", {})  # whose actions an environment takes in one array
    action = torch.cat([got[name, "action"].flatten(2) for name in found], -1) if found else got["action"]
    given = torch.stack(policy.actions, 1)
    if action.shape == given.shape:  # otherwise lanes make their steps at their own pace
        expect_rows(bits_differ(action, given), "action", action, given, note=", as the policy returned it")
    mend = "copy into the rows: what the policy reads must not be the simulator's own memory"
    what = "the run of a policy that writes zeros over each observation"
    trials.expect_equal(got, trial.batch, what, "the run of one that does not", mend)


@mended_by("write nothing in place, and keep nothing in self: a step's result follows from its arguments")
def old_states(trial: Trial) -> None:
    """An old state gives the same batch again, or StaleStateError over simulators."""
    simulators = trial.env.backend in ("host", "device")
    with trial.started() as state:
        _, first = trial.go_on(state, trial.third)
        try:
            _, again = trial.go_on(state, trial.third)
        except StaleStateError:
            if not simulators:
                raise
            return
    if simulators:
        raise FailedError("a state used twice", "StaleStateError", "another batch", "keep states linear")
    trials.expect_equal(again, first, "the second rollout from one state", "the first one")


def close(trial: Trial) -> None:
    """A state can be closed, and closed again."""
    state = api.init(trial.env, trial.policy, seed=trial.seed)
    api.close(state)
    api.close(state)


CHECKS: tuple[trials.Check[Trial], ...] = (
    *(describes, runs, observations, rewards, groups, chained, trials.generators, trials.same_seed, another_seed),
    *(trials.cuts, resets, own_resets, terminal, reset_mask, lanes_alone, policy_memory, trials.batch_memory),
    *(old_states, trials.fork, trials.save, close),
)


def check_env(env: Any, *, steps: int = 100, seed: int = 0, single: Env | None = None, **kwargs: Any) -> trials.Report:
    """Check that an environment keeps the contract, under random actions; `print` the report to see what was checked.

    `env` is an `Env`, or anything that `make_env` accepts, with its arguments, such as ``num_envs=3``: some checks need
    two lanes. An instance needs a spec, from which copies are made. Runs begin with `seed` and have `steps` steps; ends
    of episodes are checked only if some episodes end within them. `single` is the same environment with
    ``num_envs=1``, which the lanes of a batch are compared with; by default it is made, if `env` is an id, a factory or
    an instance of one of the base classes.

    Raises CheckError at the first check that fails, with the place, the expectation, the value and the fix; TypeError
    or ValueError if no environment can be made of the arguments.

    >>> report = check_env("CartPole-v1", num_envs=3, steps=40)
    >>> "same_seed" in report.passed
    True
    """
    check_kind("single", single, (*get_args(Env), type(None)), "make it with funcollect.make_env(…, num_envs=1)")
    if isinstance(env, gymnasium.Env) and env.spec is None:
        mend = f"pass its class or a factory, check_env({type(env).__name__}, num_envs=3)"
        raise TypeError(f"env is {shown(env)}, an instance without a spec, which cannot be copied: {mend}")
    made = make_env(env, **kwargs)
    if single is None and isinstance(made, EnvBase):
        alone = single = copy.copy(made)
        alone.num_envs = 1
    elif single is None and (isinstance(env, (str, EnvSpec)) or (callable(env) and "num_envs" in kwargs)):
        options = {name: value for name, value in kwargs.items() if name not in WORKER_ARGUMENTS}
        single = make_env(env, **options | {"num_envs": 1})
    trial = Trial(env=made, policy=RandomPolicy(made.action_spec), steps=steps, seed=seed, single=single)
    return trials.run_checks(repr(made), CHECKS, trial)

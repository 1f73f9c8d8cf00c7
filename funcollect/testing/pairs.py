"""Runs an environment and a policy together, and checks what holds for any such pair: determinism, copies, memory."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.arguments import check_count, check_positive
from funcollect.core import api, saving
from funcollect.core.state import CollectorState
from funcollect.errors import ReplayError
from funcollect.interop.memory import fixed
from funcollect.keys import Key, draw_ahead, key_from_seed
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import ActorInputs, Env, Exploration, Policy
from funcollect.specs import ExplorationType, assemble
from funcollect.testing.report import NotApplicableError, expect_equal, fail, mended_by
from funcollect.tree import Path, flatten, to_tensordict

ObservationRows = dict[Path, Tensor]  # an observation by key, each [N, ...]

_ROWS = 4  # N, if the environment has fewer than two lanes
_FEWEST = 6  # the smallest number of steps of a run: checks cut it into thirds and single steps
_OWN_RANDOMNESS = (
    "draw from what is seeded: an environment from self.np_random, which reset(seed=...) seeds, a policy from its "
    "head's noise or its key"
)
_COPIES = (
    "let a step be a function of the episode's seed and actions (reset sets back all that a step changes), and a "
    "policy's call one of its state, which holds arrays; share nothing between environments"
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An environment and a policy, which a check runs together."""

    env: Env
    policy: Policy
    steps: int  # T, the number of steps of a run
    seed: int  # of the first run; others use the seeds after it
    single: Env | None = None  # the same environment with one lane, or None if it cannot be made

    @property
    def lanes(self) -> int:
        """P, the number of environments in one batch."""
        return self.env.num_envs or 1

    @property
    def third(self) -> int:
        """A third of a run's steps. The checks use few lengths, since a traced loop is compiled for each."""
        return max(1, self.steps // 3)

    @cached_property
    def batch(self) -> TensorDict:
        """The batch [P, T] of the first run, for comparison with other runs."""
        return self.run(self.steps)

    @cached_property
    def done(self) -> Tensor:
        """Whether an episode of the first run ends with this row: [P, T] bool."""
        return self.batch["next", "done"][..., 0]  # type: ignore[no-any-return]

    def run(self, *lengths: int, seed: int | None = None, policy: Policy | None = None, **options: Any) -> TensorDict:
        """Start a run with `seed`; return its rollouts of `lengths` steps, joined into one batch [P, total steps]."""
        with self.started(seed, policy) as state:
            return self.go_on(state, *lengths, policy=policy, **options)[1]

    def go_on(
        self, state: CollectorState, *lengths: int, policy: Policy | None = None, **options: Any
    ) -> tuple[CollectorState, TensorDict]:
        """Continue from a state with rollouts of `lengths` steps; return the last state, and one batch of all steps."""
        batches = []
        for length in lengths:
            state, batch = api.rollout(self.env, policy or self.policy, state, length, **options)
            batches.append(by_lane(self.env, batch).clone())
        return state, torch.cat(batches, 1)

    def started(self, seed: int | None = None, policy: Policy | None = None) -> AbstractContextManager[CollectorState]:
        """A context with the first state of a run, whose simulators are freed at its end."""
        return freed(api.init(self.env, policy or self.policy, seed=self.seed if seed is None else seed))


class PolicyOutput(NamedTuple):
    """The result of calling a policy several times (steps) on the same N rows."""

    columns: TensorDict  # its outputs, [N, steps]
    recurrent: Any  # its recurrent state after the last step, each [N, ...], or None
    rows: ObservationRows  # the observation after the last step


@dataclass(frozen=True, kw_only=True)
class PolicyTrial(Trial):
    """A policy and its environment, for checks; `query` calls the policy on chosen rows, without the environment."""

    @cached_property
    def count(self) -> int:
        """N, the number of rows of a query: the number of lanes if possible, so that a jitted policy compiles once."""
        return self.lanes if self.lanes > 1 else _ROWS

    @cached_property
    def seen(self) -> tuple[ObservationRows, ObservationRows]:
        """Two sets of N rows from a run of random actions."""
        batch = self.run(max(self.steps, 2 * self.count), policy=RandomPolicy(self.env.action_spec))
        picked = torch.linspace(0, batch.numel() - 1, 2 * self.count).long().chunk(2)
        flat = {leaf.path: batch[leaf.path].flatten(0, 1) for leaf in self.env.observation_leaves}
        first, second = ({path: rows[chosen] for path, rows in flat.items()} for chosen in picked)
        return first, second

    @cached_property
    def key(self) -> Key:
        """The key of the first run."""
        return key_from_seed(self.seed)

    def query(
        self,
        rows: ObservationRows | None = None,
        *,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        steps: int = 1,
        restart: Sequence[int] = (),  # the lanes that begin an episode before the last step
        order: Tensor | None = None,  # a permutation of the lanes of the noise
        policy_state: Any = None,  # by default that of a new run
        key: Key | None = None,  # for the policy's state, and for the keys of a function that takes them
        noise_key: Key | None = None,  # for the noise of a head; by default `key`
    ) -> PolicyOutput:
        """Call the policy on the same rows (by default the first set in `seen`), with the same noise at each step."""
        key = self.key if key is None else key
        memory = {path: fixed(leaf.cpu()) for path, leaf in (self.seen[0] if rows is None else rows).items()}
        leaves = memory if self.policy.backend == "torch" else {path: leaf.numpy() for path, leaf in memory.items()}
        initial = self.policy.init(key, self.count)
        inputs = ActorInputs(
            observation=assemble(self.env.observation_space, leaves),
            params=self.policy.prepare(None),
            policy_state=initial if policy_state is None else policy_state,
            initial_state=initial,
            noise=self._noise(key, key if noise_key is None else noise_key, order, steps),
            exploration=Exploration(exploration_type),
            spec=self.env.action_spec,
            num_envs=self.count,
            length=steps,
        )
        actor = self.policy.actor(inputs)
        with actor.running():
            for t in range(steps):
                if t == steps - 1:
                    actor.restart(restart)
                actor.act(t)
            after, columns = actor.finish()
        outputs = {path: column.transpose(0, 1) if column.ndim > 1 else column for path, column in columns.items()}
        recurrent = after.recurrent if isinstance(after, TorchPolicyState) else after
        return PolicyOutput(to_tensordict(outputs, (self.count, steps)), recurrent, memory)

    def _noise(self, key: Key, noise_key: Key, order: Tensor | None, steps: int) -> Tensor | None:
        """The noise that the policy asks for, the same at each step: [steps, N, ...], or None."""
        wanted = self.policy.noise(self.env.action_spec)
        if wanted is None:
            return None
        drawn = draw_ahead(wanted, key if wanted.kind == "key" else noise_key, np.arange(self.count), 0, 1)
        drawn = drawn if order is None or wanted.kind == "key" else drawn[:, order]
        return drawn.expand(steps, *drawn.shape[1:]).clone()


def check_run(steps: Any, seed: Any) -> None:
    """Raise ValueError or TypeError unless `seed` is an int of at least 0, and `steps` one of at least `_FEWEST`."""
    check_positive("steps", steps)
    if steps < _FEWEST:
        raise ValueError(f"steps is {steps}, expected at least {_FEWEST}: pass for example steps=100")
    check_count("seed", seed)


@contextmanager
def freed(state: CollectorState) -> Iterator[CollectorState]:
    """A context with `state`, whose simulators are freed at its end; the check `close` reports errors of that."""
    try:
        yield state
    finally:
        with suppress(Exception):
            api.close(state)


def by_lane(env: Env, batch: TensorDictBase) -> Any:
    """The batch as [P, T], also if the environment has no batch dimension."""
    return batch.unsqueeze(0) if env.num_envs is None else batch


@mended_by(_OWN_RANDOMNESS)
def generators(trial: Trial) -> None:
    """No call changes the global generators of Torch, NumPy and Python."""
    before = _generators()

    def expect_unmoved(call: str) -> None:
        for name, state in _generators().items():
            if state != before[name]:
                raise fail(f"{name}'s global generator", "unmoved", f"moved by {call}")

    with trial.started() as state:
        expect_unmoved("init")
        state, _ = api.rollout(trial.env, trial.policy, state, trial.steps)
        expect_unmoved("rollout")
        api.reset(trial.env, state)
        expect_unmoved("reset")


def _generators() -> dict[str, Any]:
    """The states of the global generators, in a form that can be compared."""
    name, words, *rest = np.random.get_state()
    numpy = (name, np.asarray(words).tobytes(), *rest)
    return {"Torch": torch.get_rng_state().numpy().tobytes(), "NumPy": numpy, "Python": random.getstate()}


@mended_by(f"{_OWN_RANDOMNESS}, and keep nothing from before a reset")
def same_seed(trial: Trial) -> None:
    """The same seed gives the same bits twice."""
    expect_equal(trial.run(trial.steps), trial.batch, "the second run", f"the first run with seed={trial.seed}")


@mended_by(
    "keep what outlives a call in the state: simulators in rows that stay the same arrays, a policy in its "
    "recurrent state (buffers that it writes are reset with each batch); in JAX draw from the key, since NumPy's "
    "random numbers are drawn once, while JAX traces"
)
def cuts(trial: Trial) -> None:
    """How a run is cut into batches does not change its data."""
    got = trial.run(*(lengths := [1, trial.third, 1, trial.third]))
    expect_equal(got, trial.batch[:, : got.shape[1]], f"the run cut into {lengths}", "the run in one piece")


@mended_by("copy what is kept: a batch belongs to the caller")
def batch_memory(trial: Trial) -> None:
    """Writing into a batch does not change later batches, and collecting does not change earlier ones."""
    with trial.started() as state:
        state, first = api.rollout(trial.env, trial.policy, state, trial.third)
        kept = by_lane(trial.env, first).clone()
        state, second = api.rollout(trial.env, trial.policy, state, trial.third)
        batches = [kept, by_lane(trial.env, second).clone()]
        what, source = "the first batch after the second was collected", "the same batch when it was returned"
        expect_equal(by_lane(trial.env, first), kept, what, source, "copy what goes into a batch")
        for leaf in (*flatten(first).values(), *flatten(second).values()):
            leaf.zero_()
        batches.append(trial.go_on(state, trial.third)[1])
    got, source = torch.cat(batches, 1), "the run whose batches were left alone"
    expect_equal(got, trial.batch[:, : got.shape[1]], "the run whose batches were zeroed", source)


@mended_by(_COPIES)
def fork(trial: Trial) -> None:
    """A fork continues exactly as its source does, and neither affects the other."""
    _continue_as_source(trial, partial(api.fork, trial.env), "the fork")


@mended_by(_COPIES)
def save(trial: Trial) -> None:
    """A state that is saved and loaded continues exactly as it would have, and saving does not affect it."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "state")

        def through_a_file(state: CollectorState) -> CollectorState:
            saving.save(path, state)
            return saving.load(path, trial.env, trial.policy)

        _continue_as_source(trial, through_a_file, "the state that was saved and loaded")


def _continue_as_source(trial: Trial, copied: Callable[[CollectorState], CollectorState], what: str) -> None:
    """Compare a copy of a state, and the state itself, with the run without a copy.

    If possible, the copy is made when a lane is past an end: it begins its episode in new simulators, and shows what
    the source has kept of an earlier one.
    """
    third, ends = trial.third, trial.done.any(0).nonzero()[:, 0].tolist()
    before = max(third, ends[0] + 2) if ends else third
    before = before if before + third <= trial.steps else third
    with trial.started() as state:
        state, _ = trial.go_on(state, before)
        try:
            twin = copied(state)
        except ReplayError as error:
            env = trial.env
            if env.backend != "host" or env.forking == "snapshot":
                raise
            if (env.forking, env.seeding) == ("replay", "episode"):
                raise
            raise NotApplicableError(f"forking is {env.forking!r}, seeding is {env.seeding!r}") from error
        with freed(twin):
            _, other = trial.go_on(twin, third)
        _, own = trial.go_on(state, third)
    wanted = trial.batch[:, before : before + third]
    for batch, which in ((other, what), (own, f"the source of {what}, which ran first")):
        expect_equal(batch, wanted, which, "the run without a copy")

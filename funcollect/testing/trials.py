"""Runs a pair of environment and policy, compares runs row by row, has the checks for any pair, and makes reports."""

from __future__ import annotations

import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import optree
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_count, check_positive
from funcollect.core import api, saving
from funcollect.core.state import CollectorState
from funcollect.errors import CheckError, ReplayError
from funcollect.messages import clipped
from funcollect.policies.base import PolicyBase
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Env, Policy
from funcollect.specs import ActionSpec
from funcollect.tree import NAMESPACE, flatten

Subject = TypeVar("Subject")
Check = Callable[[Subject], str | None]  # a report shows its name, its docstring, and the remark that it may return
_MENDS: dict[Any, str] = {}
Differs = Callable[[Tensor, Tensor], Tensor]  # whether the rows of two tensors [P, T, ...] differ: [P, T] bool
Shown = Tensor | str  # [P, T, ...], or a text for all rows
_OWN_RANDOMNESS = (
    "draw from what is seeded: an environment from self.np_random, which reset(seed=...) seeds, a policy from its "
    "head's noise or its key"
)
_COPIES = (
    "let a step be a function of the episode's seed and actions (reset sets back all that a step changes), and a "
    "policy's call one of its state, which holds arrays; share nothing between environments"
)


def mended_by(mend: str) -> Callable[[Check[Subject]], Check[Subject]]:
    """Register the fix for a check's messages, unless the check names another one."""

    def registered(check: Check[Subject]) -> Check[Subject]:
        _MENDS[check] = mend
        return check

    return registered


class NotApplicableError(Exception):
    """A check does not apply to this subject; the message is the reason."""


class FailedError(Exception):
    """A check failed. Arguments: the place, the expected value, the value, and the fix if it is not the check's own."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check that did not fail; `str` gives one line."""

    name: str  # of the check
    claim: str  # what the check has confirmed, in one line
    applies: bool
    note: str  # why the check does not apply, or a remark on one that passed; may be empty

    def __str__(self) -> str:
        texts = (self.claim if self.applies else "", self.note)
        return f"{'passed' if self.applies else 'n/a':<6}  {self.name:<18}  {' -- '.join(filter(None, texts))}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The checks that passed, or do not apply; `str` gives one line for each.

    >>> import funcollect as fc
    >>> report = fc.testing.check_env(fc.make_env("torch/CartPole-v1", num_envs=2))
    >>> report.subject, report.passed[0]
    ('CartPole(num_envs=2)', 'describes')
    """

    subject: str  # the name of the environment, or of the policy and the environment
    results: tuple[Result, ...]  # one for each check, in order

    @property
    def passed(self) -> tuple[str, ...]:
        """The names of the checks that apply."""
        return tuple(result.name for result in self.results if result.applies)

    def __str__(self) -> str:
        return "\n".join((self.subject, *(f"  {result}" for result in self.results)))


def run_checks(label: str, checks: Sequence[Check[Subject]], subject: Subject) -> Report:
    """Call each check with the subject; CheckError at the first one that fails, or that raises any other error."""
    results: list[Result] = []
    for check in checks:
        name, claim = check.__name__, (check.__doc__ or "").partition("\n")[0].rstrip(".")
        try:
            note, applies = check(subject) or "", True
        except NotApplicableError as reason:
            note, applies = str(reason), False
        except Exception as error:
            if failed := isinstance(error, FailedError):
                where, expected, got, mend = (*error.args, "")[:4]
                what = f"{where}: expected {expected}, got {got}: {mend or _MENDS[check]}"
            else:
                notes = (note for note in getattr(error, "__notes__", ()) if not note.startswith("---"))  # JAX's own
                what = "; ".join([f"{type(error).__name__}: {error}", *notes])
            message, before = f"{label} fails {name!r} ({claim}): {what}", Report(subject=label, results=(*results,))
            raise CheckError(message, name, before) from (error.__cause__ if failed else error)
        results.append(Result(name=name, claim=claim, applies=applies, note=note))
    return Report(subject=label, results=tuple(results))


def to_tensor(leaf: Any) -> Tensor:
    """A copy of a tensor or of an array of JAX or NumPy, as a tensor that needs no gradient."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))


def bits_differ(one: Tensor, two: Tensor) -> Tensor:
    """Whether the rows of two tensors [P, T, ...] have different bits: [P, T] bool."""
    ours, theirs = (leaf.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8) for leaf in (one, two))
    return (ours != theirs).reshape(*one.shape[:2], -1).any(-1)


def numbers_differ(one: Tensor, two: Tensor) -> Tensor:
    """Whether the rows of two tensors [P, T, ...] differ by more than rounding errors: [P, T] bool."""
    ours, theirs = (leaf.detach().cpu().double() for leaf in (one, two))
    close = torch.isclose(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
    return ~close.reshape(*one.shape[:2], -1).all(-1)


def expect_equal(
    got: TensorDictBase, wanted: TensorDictBase, what: str, source: str, mend: str = "", differs: Differs = bits_differ
) -> None:
    """Fail unless two batches [P, T] are equal; in the message, `what` names `got`, and `source` names `wanted`."""
    ours, theirs = flatten(got), flatten(wanted)
    kinds = [{path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()} for leaves in (ours, theirs)]
    if kinds[0] != kinds[1]:
        path = min(path for path in ours.keys() | theirs.keys() if kinds[0].get(path) != kinds[1].get(path))
        got_kind, wanted_kind = (by_path.get(path) for by_path in kinds)
        raise FailedError(f"{what}, {'.'.join(path)}", f"{wanted_kind} as in {source}", got_kind, mend)
    places = {path: first_row(differs(leaf, theirs[path])) for path, leaf in ours.items()}
    if earliest := [(*place, path) for path, place in places.items() if place]:
        step, lane, path = min(earliest)
        row, expected = (digits(leaves[path][lane, step]) for leaves in (ours, theirs))
        where = f"{what}, lane {lane}, step {step}, {'.'.join(path)}"
        raise FailedError(where, f"{expected} as in {source}", row, mend)


def expect_rows(
    wrong: Tensor, what: str, got: Shown, expected: Shown, mend: str = "", *, note: str = "", first: int = 0
) -> None:
    """Fail at the earliest row where `wrong` [P, T, ...], a mask of `what`, is True; its steps begin with `first`."""
    if place := first_row(wrong):
        step, lane = place
        wanted, found = (value if isinstance(value, str) else digits(value[lane, step]) for value in (expected, got))
        raise FailedError(f"lane {lane}, step {first + step}, {what}", f"{wanted}{note}", found, mend)


def first_row(wrong: Tensor) -> tuple[int, int] | None:
    """The step and lane of the earliest row of a mask [P, T, ...] that is True anywhere; None if there is none."""
    found = wrong.reshape(*wrong.shape[:2], -1).any(-1).T.nonzero().tolist()
    return (found[0][0], found[0][1]) if found else None


def digits(value: Tensor) -> str:
    """The numbers in a tensor as text for a message, shortened if there are many."""
    return clipped(str(value.tolist()))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An environment and a policy, which a check runs together."""

    env: Env
    policy: Policy
    steps: int  # T, the number of steps of a run
    seed: int  # of the first run; others use the seeds after it
    single: Env | None = None  # the same environment with one lane, or None if it cannot be made

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError unless `seed` is an int of at least 0, and `steps` one of at least 6."""
        check_positive("steps", self.steps, 100, least=6)  # checks cut a run into thirds and single steps
        check_count("seed", self.seed)

    @property
    def lanes(self) -> int:
        """P, the number of environments in one batch."""
        return self.env.num_envs or 1

    @property
    def third(self) -> int:
        """A third of a run's steps: checks use few lengths, since a traced loop is compiled for each."""
        return self.steps // 3

    @cached_property
    def batch(self) -> TensorDict:
        """The batch [P, T] of the first run, for comparison with other runs."""
        return self.run(self.steps)

    @cached_property
    def done(self) -> Tensor:
        """Whether an episode of the first run ends with this row: [P, T] bool."""
        return self.batch["next", "done"][..., 0]  # type: ignore[no-any-return]

    def run(self, *lengths: int, **options: Any) -> TensorDict:
        """Start a run; return its rollouts of `lengths` steps, joined into one batch [P, total steps]."""
        with self.started() as state:
            return self.go_on(state, *lengths, **options)[1]

    def go_on(self, state: CollectorState, *lengths: int, **options: Any) -> tuple[CollectorState, TensorDict]:
        """Continue from a state with rollouts of `lengths` steps; return the last state, and one batch of all steps."""
        batches = []
        for length in lengths:
            state, batch = self.rollout(state, length, **options)
            batches.append(batch.clone())
        return state, torch.cat(batches, 1)

    def rollout(self, state: CollectorState, length: int, **options: Any) -> tuple[CollectorState, TensorDict]:
        """Call `rollout`; the batch is [P, T], also if the environment has no batch dimension."""
        state, batch = api.rollout(self.env, self.policy, state, length, **options)
        return state, batch.unsqueeze(0) if self.env.num_envs is None else batch

    def started(self) -> AbstractContextManager[CollectorState]:
        """A context with the first state of a run, whose simulators are freed at its end."""
        return freed(api.init(self.env, self.policy, seed=self.seed))


class OverwritingPolicy(RandomPolicy):
    """Acts at random, keeps a copy of each action [P, ...] in `actions`, and overwrites each observation with zeros."""

    actor = PolicyBase.actor  # type: ignore[assignment]  # which calls it at each step

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__(spec)
        self.actions = list[Tensor]()

    @override
    def __call__(self, *inputs: Any) -> tuple[None, Any]:
        _, outputs = super().__call__(*inputs)
        self.actions.append(outputs["action"].clone())
        for leaf in optree.tree_leaves(inputs[2], namespace=NAMESPACE):  # the observation
            leaf.zero_()
        return None, outputs


@contextmanager
def freed(state: CollectorState) -> Iterator[CollectorState]:
    """A context with `state`, whose simulators are freed at its end. Only the check `close` reports errors of that."""
    try:
        yield state
    finally:
        with suppress(Exception):
            api.close(state)


@mended_by(_OWN_RANDOMNESS)
def generators(trial: Trial) -> None:
    """No call changes the global generators of Torch, NumPy and Python."""
    before = _generators()

    def expect_unmoved(call: str) -> None:
        for name, state in _generators().items():
            if state != before[name]:
                raise FailedError(f"{name}'s global generator", "unmoved", f"moved by {call}")

    with trial.started() as state:
        expect_unmoved("init")
        state, _ = trial.rollout(state, trial.steps)
        expect_unmoved("rollout")
        api.reset(trial.env, state)
        expect_unmoved("reset")


def _generators() -> dict[str, bytes]:
    states = {"Torch": torch.get_rng_state().tolist(), "NumPy": np.random.get_state(), "Python": random.getstate()}
    return {name: pickle.dumps(state) for name, state in states.items()}


@mended_by(
    f"{_OWN_RANDOMNESS}, and keep nothing from before a reset; a simulator that is no function of its seed and "
    "actions, if it is not yours, collects all the same, but fork and save cannot replay it: pass replayable=False"
)
def same_seed(trial: Trial) -> None:
    """The same seed gives the same bits twice: the environment is a function of its seed and the actions."""
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
        state, first = trial.rollout(state, trial.third)
        kept = first.clone()
        state, second = trial.rollout(state, trial.third)
        what, source = "the first batch after the second was collected", "the same batch when it was returned"
        expect_equal(first, kept, what, source, "copy what goes into a batch")
        batches = [kept, second.clone()]
        first.zero_()
        second.zero_()
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
    """Compare a copy of a state, and the state itself, with the run without a copy."""
    env, third, ends = trial.env, trial.third, trial.done.any(0).nonzero()[:, 0].tolist()
    before = max(third, ends[0] + 2) if ends else third  # past an end, where leftovers of an episode would show
    before = before if before + third <= trial.steps else third
    with trial.started() as state:
        state, _ = trial.go_on(state, before)
        try:
            twin = copied(state)
        except ReplayError as error:
            if env.backend not in ("host", "device") or env.forking == "snapshot":
                raise
            if (env.forking, env.seeding) == ("replay", "episode"):
                raise
            raise NotApplicableError(f"forking is {env.forking!r}, seeding is {env.seeding!r}") from error
        with freed(twin):
            _, other = trial.go_on(twin, third)
        _, source = trial.go_on(state, third)
    wanted = trial.batch[:, before : before + third]
    for batch, name in ((other, what), (source, f"the source of {what}, which ran first")):
        expect_equal(batch, wanted, name, "the run without a copy")

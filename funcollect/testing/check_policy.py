"""`check_policy`, the checks that are for policies only, and calls of a policy without its environment."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

from funcollect.core.api import check_pair
from funcollect.core.evaluate_actions import evaluate_actions
from funcollect.envs.registry import make_env
from funcollect.interop.bridge import to_jax
from funcollect.interop.memory import fixed
from funcollect.keys import draw_ahead, key_from_seed
from funcollect.policies.as_policy import as_policy
from funcollect.policies.checks import check_action
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_modules.torch_backed import TorchBacked, TorchPolicyState
from funcollect.policies.weights import state_dict_of
from funcollect.protocols import ActorInputs, Exploration, Policy
from funcollect.specs import ExplorationType, assemble
from funcollect.testing import trials
from funcollect.testing.trials import FailedError, NotApplicableError, expect_equal, mended_by, numbers_differ
from funcollect.tree import Path, flatten, to_tensordict

DETERMINISTIC, RANDOM = ExplorationType.DETERMINISTIC, ExplorationType.RANDOM
_DRAWS = "it draws by itself, whatever the exploration type"
_SCALES = (0.5, 3.0, 20.0)  # tried in turn, since a small change of the weights may not change an argmax
_CLOSE = 1e-3  # tolerance of log-probabilities

ObservationRows = dict[Path, Tensor]  # an observation by key, each [N, ...]


class PolicyOutput(NamedTuple):
    """The result of calling a policy several times (steps) on the same N rows."""

    columns: TensorDict  # its outputs, [N, steps]
    recurrent: Any  # its recurrent state after the last step, each [N, ...], or None
    rows: ObservationRows  # the observation after the last step


@dataclass(frozen=True, kw_only=True)
class PolicyTrial(trials.Trial):
    """A policy and its environment, for checks; `query` calls the policy on chosen rows, without the environment."""

    @property
    def count(self) -> int:
        """N, the number of rows of a query: the number of lanes if possible, so that a jitted policy compiles once."""
        return self.lanes if self.lanes > 1 else 4

    @cached_property
    def seen(self) -> list[ObservationRows]:
        """Two sets of N rows from a run of random actions."""
        batch = replace(self, policy=RandomPolicy(self.env.action_spec)).run(max(self.steps, 2 * self.count))
        picked = torch.linspace(0, batch.numel() - 1, 2 * self.count).long().chunk(2)
        flat = {leaf.path: batch[leaf.path].flatten(0, 1) for leaf in self.env.observation_leaves}
        return [{path: rows[chosen] for path, rows in flat.items()} for chosen in picked]

    def query(
        self,
        rows: ObservationRows | None = None,
        *,
        exploration_type: ExplorationType = DETERMINISTIC,
        steps: int = 1,
        restart: Sequence[int] = (),  # the lanes that begin an episode before the last step
        lanes: Any = None,  # the lane ids from which the noise of each row follows, [N] int64
        policy_state: Any = None,  # by default that of a new run
        seed: int | None = None,  # of the policy's state, and of the keys of a function that takes them
        noise_seed: int | None = None,  # of the noise of a head; by default `seed`
    ) -> PolicyOutput:
        """Call the policy on the same rows (by default the first set in `seen`), with the same noise at each step."""
        key, spec = key_from_seed(self.seed if seed is None else seed), self.env.action_spec
        memory = {path: fixed(leaf.cpu()) for path, leaf in (self.seen[0] if rows is None else rows).items()}
        leaves = memory if self.policy.backend == "torch" else {path: leaf.numpy() for path, leaf in memory.items()}
        initial, noise = self.policy.init(key, self.count), self.policy.noise(spec)
        if noise is not None:
            words = key if noise_seed is None or noise.kind == "key" else key_from_seed(noise_seed)
            drawn = draw_ahead(noise, words, np.arange(self.count) if lanes is None else lanes, 0, 1)
        inputs = ActorInputs(
            observation=assemble(self.env.observation_space, leaves),
            params=self.policy.prepare(None),
            policy_state=initial if policy_state is None else policy_state,
            initial_state=initial,
            noise=None if noise is None else drawn.expand(steps, *drawn.shape[1:]).clone(),
            exploration=Exploration(exploration_type),
            spec=spec,
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


@mended_by("keep keys, shapes and dtypes the same")
def answers(trial: PolicyTrial) -> None:
    """It suits the spaces: actions have their shape and dtype, outputs a row per lane, and always the same keys."""
    check_pair(trial.env, trial.policy)
    wanted = None
    for rows, way in itertools.product(trial.seen, (RANDOM, DETERMINISTIC)):
        columns = flatten(trial.query(rows, steps=2, exploration_type=way).columns)
        check_action(columns[("action",)][:, 0], trial.env.action_spec, trial.count)
        for path, column in columns.items():
            if column.shape[:2] != (trial.count, 2):
                got = list(column.shape[:1] + column.shape[2:]) if column.ndim > 1 else []
                expected = f"[{trial.count}, ...], a row for each environment"
                raise FailedError(f"the output {'.'.join(path)}", expected, got, "return [P, ...] for P environments")
        kinds = {".".join(path): (list(each.shape[2:]), each.dtype) for path, each in columns.items()}
        if wanted not in (None, kinds):
            raise FailedError(f"the outputs with exploration_type={way.name}", wanted, kinds)
        wanted = kinds


def acts(trial: PolicyTrial) -> str | None:
    """It acts in the environment without NaN; discrete actions lie in the space."""
    trial.run(*[1] * 4, trial.steps, exploration_type=DETERMINISTIC)
    space, action = trial.env.action_space, trial.batch["action"]
    if not isinstance(space, spaces.Box):
        return None  # every rollout checks discrete actions
    numbers = action.cpu().numpy()
    outside = ((numbers < space.low) | (numbers > space.high)).reshape(*numbers.shape[:2], -1).any(-1)
    how_many = f"{np.sum(outside)} of {outside.size} actions"
    return f"{how_many} are outside the Box: the environment has to clip them" if outside.any() else None


@mended_by("keep nothing in self: what a policy remembers is its recurrent state, and its randomness is given")
def pure(trial: PolicyTrial) -> None:
    """It modifies neither its observation nor its own parameters and buffers, and remembers nothing by itself."""
    before, weights = trial.seen[0], own_weights(trial.policy)
    with torch.no_grad():
        start = trial.policy.init(key_from_seed(trial.seed), trial.count)
    first = trial.query(exploration_type=RANDOM, policy_state=copy.deepcopy(start))
    what = "the observation {} after the policy was called"
    _expect_unchanged(first.rows, before, what, "copy it before writing")
    trial.query(trial.seen[1], exploration_type=RANDOM, steps=2)
    trial.run(trial.steps)
    expect_weights_unchanged(trial.policy, weights)
    again = trial.query(exploration_type=RANDOM, policy_state=copy.deepcopy(start))
    what, source = "the second of two equal calls", "the first, with the same observation, state and noise"
    expect_equal(again.columns, first.columns, what, source)


def _expect_unchanged(got: Mapping[Any, Tensor], before: Mapping[Any, Tensor], what: str, mend: str) -> None:
    """Fail unless tensors still have the bits of an earlier copy; `what` names them, with {} for the key."""
    for key, wanted in before.items():
        one, two = (each.detach().reshape(1, 1, -1) for each in (got[key], wanted))
        if one.shape != two.shape or bool(trials.bits_differ(one, two).any()):
            name = what.format(key if isinstance(key, str) else ".".join(key))
            raise FailedError(name, f"unchanged, {trials.digits(wanted)}", trials.digits(got[key]), mend)


def expect_weights_unchanged(policy: Policy, before: Mapping[str, Tensor]) -> None:
    """Fail if the policy's own parameters or buffers no longer have the bits of an earlier copy."""
    mend = "let a rollout write to no weight or buffer, and load restore all of them"
    _expect_unchanged(own_weights(policy), before, "the policy's own {}", mend)


@mended_by("take the mode if exploration_type says so; call module.eval() if there is dropout")
def deterministic(trial: PolicyTrial) -> None:
    """In deterministic mode, its outputs do not depend on the seed."""
    if place := _seed_changes(trial, noise=True):
        if not _knows_exploration(trial.policy):
            raise NotApplicableError(_DRAWS)
        where = f"{place}, with exploration_type=DETERMINISTIC"
        raise FailedError(where, "the same for every seed", "another for another seed")


def _seed_changes(trial: PolicyTrial, *, noise: bool) -> str:
    """The first row and key, as text, that change with the policy's seed (with `noise`, also its head's), or empty."""
    one = flatten(trial.query().columns)
    for other in range(trial.seed + 1, trial.seed + 9):  # with few choices and rows, two seeds may draw the same
        two = flatten(trial.query(seed=other, noise_seed=other if noise else trial.seed).columns)
        for path, column in one.items():
            if place := trials.first_row(numbers_differ(column, two[path])):
                return f"row {place[1]}, {'.'.join(path)}"
    return ""


def _knows_exploration(policy: Policy) -> bool:
    """Whether the policy can read the exploration type where it draws, and so take the mode instead."""
    if isinstance(policy, FunctionPolicy):
        return policy.head is not None and not policy.takes_key
    if not isinstance(policy, TorchBacked) or policy.head is not None:
        return not isinstance(policy, RandomPolicy)
    parts = policy.module.modules() if isinstance(policy.module, nn.Module) else ()
    return any(isinstance(part, ProbabilisticTensorDictModule) for part in parts)


@mended_by("let no operation mix the batch dimension; batch norm in training mode does: call module.eval()")
def rows_apart(trial: PolicyTrial) -> None:
    """Its outputs for a row depend on that row only, not on the other rows or on its position."""
    if _seed_changes(trial, noise=False):
        raise NotApplicableError(_DRAWS)
    rows, others = trial.seen
    wanted, source = trial.query().columns, "the output for the same row (here called a lane) before"
    beside = trial.query({path: torch.cat((rows[path][:1], others[path][1:])) for path in rows}).columns
    expect_equal(beside[:1], wanted[:1], "the output beside other rows", source, differs=numbers_differ)
    order = torch.arange(trial.count).flip(0)
    reverse = trial.query({path: leaf[order] for path, leaf in rows.items()}, lanes=order.numpy()).columns[order]
    expect_equal(reverse, wanted, "the outputs for the rows in reverse order", source, differs=numbers_differ)


@mended_by("let restart(lanes) give the initial state to these lanes, with the batch dimension first")
def recurrent(trial: PolicyTrial) -> None:
    """The recurrent state is reset in a lane that begins an episode, and only there."""

    def leaves(**options: Any) -> list[Tensor]:
        return [*state_dict_of(trial.query(**options).recurrent, trial.policy.backend).values()]

    if not (once := leaves()):
        raise NotApplicableError("it has no recurrent state")
    if _seed_changes(trial, noise=False):
        raise NotApplicableError(_DRAWS)
    twice, restarted = leaves(steps=2), leaves(steps=2, restart=[0])
    for number, (one, two, got) in enumerate(zip(once, twice, restarted, strict=True)):
        wanted = torch.cat((one[:1], two[1:]))
        if place := trials.first_row(numbers_differ(got.unsqueeze(1), wanted.unsqueeze(1))):
            lane = place[1]
            where = f"lane {lane}, leaf {number} of the recurrent state after a restart of lane 0"
            how = "going on, as in its episode" if lane else "restarted, as after the episode's first step"
            raise FailedError(where, f"{how}, {trials.digits(wanted[lane])}", trials.digits(got[lane]))


@mended_by(
    "score the recorded action under the weights and the observation that chose it (call module.eval() if there is "
    "dropout or batch norm), let log_prob of the head depend on its arguments only, and let record return the keys "
    "that sample returns"
)
def log_probs(trial: PolicyTrial) -> None:
    """Log-probabilities are those of `evaluate_actions`; over all discrete actions, probabilities add up to one."""
    wanted, spec = _scores(trial, trial.batch), trial.env.action_spec
    got = trial.batch["action_log_prob"].double().cpu().reshape(wanted.shape)
    wrong = ~torch.isclose(got, wanted, rtol=_CLOSE, atol=_CLOSE)
    trials.expect_rows(wrong, "action_log_prob", got, wanted, note=", by evaluate_actions")
    if not 1 <= math.prod(spec.categories or (0,)) <= 64:  # more take long
        return
    first = trial.batch[:, :1].clone()
    total = torch.zeros(first.shape, dtype=torch.float64)
    for chosen in itertools.product(*map(range, spec.categories)):
        if spec.one_hot:
            action = torch.cat([torch.eye(size)[one] for size, one in zip(spec.categories, chosen, strict=True)])
        else:
            action = torch.as_tensor(np.reshape(chosen, spec.start.shape) + spec.start)
        first["action"] = action.to(first["action"]).expand_as(first["action"])
        total += _scores(trial, first).exp()
    mend = "let log_prob of the head return the log of a probability, normalised over all actions"
    trials.expect_rows((total - 1).abs() > _CLOSE, "the sum of all actions' probabilities", total, "1.0", mend)


def _scores(trial: PolicyTrial, batch: TensorDict) -> Tensor:
    """The log-probabilities of the actions of a batch [P, T], from the run's first step on: [P, T] float64."""
    policy = trial.policy
    if "action_log_prob" not in batch:
        raise NotApplicableError("it records no action_log_prob")
    data = to_jax(batch) if isinstance(policy, FunctionPolicy) else batch
    try:
        with torch.no_grad():
            start = policy.init(key_from_seed(trial.seed), trial.lanes)
            scores = evaluate_actions(policy, None, data, env=trial.env, policy_state=start)
    except TypeError as error:
        raise NotApplicableError(str(error)) from error
    return trials.to_tensor(scores["action_log_prob"]).double().cpu().reshape(batch.shape)


def own_weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of the policy's own parameters and buffers, by name, from `params`, not from its `state_dict`."""
    return {f"params{name}": leaf for name, leaf in state_dict_of(policy.params, policy.backend).items()}


def other_weights(policy: Policy, scale: float) -> dict[str, Tensor]:
    """The policy's `state_dict` with noise of standard deviation `scale`; its buffers are unchanged."""
    module = policy.module if isinstance(policy, TorchBacked) else None
    kept = {name for name, _ in module.named_buffers()} if isinstance(module, nn.Module) else set()
    generator, weights = torch.Generator().manual_seed(0), {**policy.state_dict()}
    for name, leaf in weights.items():
        if leaf.is_floating_point() and name not in kept:
            weights[name] = leaf + scale * torch.randn(leaf.shape, generator=generator).to(leaf)
    return weights


@mended_by("use the params that the call is given, not those of the constructor")
def params_argument(trial: PolicyTrial) -> None:
    """`params=` replaces the policy's own parameters in a rollout, and leaves those unchanged."""
    weights = _trainable_weights(trial)
    got = trial.run(trial.steps, params=trial.policy.params)
    what, source = "the run with params=policy.params", "the run with params=None"
    expect_equal(got, trial.batch, what, source, "let prepare(None) stand for the policy's own")
    if not any(_changes_outputs(trial, params=other_weights(trial.policy, scale)) for scale in _SCALES):
        raise FailedError("the run with other params", "other outputs", "the same")
    expect_weights_unchanged(trial.policy, weights)


def _trainable_weights(trial: PolicyTrial) -> dict[str, Tensor]:
    """The policy's `own_weights`; NotApplicableError if none of them is floating."""
    weights = own_weights(trial.policy)
    if not any(value.is_floating_point() for value in weights.values()):
        raise NotApplicableError("it has no parameters")
    return weights


def _changes_outputs(trial: PolicyTrial, **options: Any) -> bool:
    """Whether a run with these options of `rollout`, and with the present weights, differs from `trial.batch`."""
    ours = flatten(trial.run(trial.steps, **options))
    return any(bool(trials.bits_differ(leaf, ours[path]).any()) for path, leaf in flatten(trial.batch).items())


@mended_by("let state_dict hold a copy of everything that load needs, and load use its argument")
def state_dict(trial: PolicyTrial) -> None:
    """After `load` of an earlier `state_dict`, the policy acts as it did then."""
    policy, weights = trial.policy, _trainable_weights(trial)
    saved, before = policy.state_dict(), trial.batch

    def changed(scale: float) -> bool:
        policy.load(other_weights(policy, scale))
        return _changes_outputs(trial)

    try:
        if not any(map(changed, _SCALES)):
            raise FailedError("the run after load", "other outputs", "the same")
    finally:
        policy.load(saved)
    expect_weights_unchanged(trial.policy, weights)
    expect_equal(trial.run(trial.steps), before, "the run after load(state_dict())", "the run before")


CHECKS: tuple[trials.Check[PolicyTrial], ...] = (
    *(answers, acts, trials.generators, pure, trials.same_seed, trials.cuts, trials.batch_memory, trials.save),
    *(deterministic, rows_apart, recurrent, log_probs, params_argument, state_dict),
)


def check_policy(policy: Any, env: Any, *, steps: int = 40, seed: int = 0, **kwargs: Any) -> trials.Report:
    """Check that a policy keeps the contract, in an environment that passes `check_env`; returns a report likewise.

    `policy` is a `Policy`, or anything that a collector accepts as one. Its weights are changed, and then restored.
    `env`, its arguments, `seed`, `steps` and the errors are those of `check_env`.

    >>> import torch, funcollect as fc
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> "log_probs" in check_policy(policy, "CartPole-v1", num_envs=2).passed
    True
    """
    made = make_env(env, **kwargs)
    trial = PolicyTrial(env=made, policy=as_policy(policy, made), steps=steps, seed=seed)
    return trials.run_checks(f"{type(trial.policy).__name__} in {made!r}", CHECKS, trial)

"""`check_env`: is this an environment as the library needs it?"""

from __future__ import annotations

import copy
from typing import Any, get_args

from gymnasium.envs.registration import EnvSpec

from funcollect.arguments import check_count, check_kind
from funcollect.envs.base import EnvBase
from funcollect.envs.registry import make_env
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Env
from funcollect.testing import pair_checks
from funcollect.testing.envs import env_checks, env_resets, env_runs
from funcollect.testing.report import Check, Report, run_checks
from funcollect.testing.trial import Trial, check_steps

CHECKS: tuple[Check[Trial], ...] = (
    env_checks.describes,
    env_checks.runs,
    env_checks.layout,
    env_checks.observations,
    env_checks.rewards,
    env_checks.flags,
    env_checks.counters,
    env_checks.chained,
    pair_checks.generators,
    pair_checks.same_seed,
    env_resets.another_seed,
    pair_checks.cuts,
    env_resets.resets,
    env_resets.terminal,
    env_resets.reset_mask,
    env_runs.lanes_alone,
    env_runs.action_memory,
    env_runs.observation_memory,
    pair_checks.batch_memory,
    env_runs.old_states,
    env_runs.fork,
    env_runs.close,
)


def check_env(env: Any, *, steps: int = 100, seed: int = 0, single: Env | None = None, **kwargs: Any) -> Report:
    """Run every check that an environment has to pass, under random actions.

    Args:
        env: an `Env`, or whatever `make_env` takes. A live instance needs a spec, from which others like it are made.
        steps: T of a run; episodes should end within it, or what happens at ends is not seen.
        seed: of the runs.
        single: the same environment with ``num_envs=1``, with which the lanes of a batch are compared; made where `env`
            is an id, a factory, or an instance of one of the base classes.
        **kwargs: for `make_env`, such as ``num_envs=3``: some checks need two lanes.

    Returns:
        What was checked; `print` gives one line for each check.

    Raises:
        CheckError: at the first check that fails, with the place, what was expected, what was got, and the mend.
        TypeError, ValueError: for something of which no environment can be made.

    >>> report = check_env("CartPole-v1", num_envs=3, steps=40)
    >>> "same_seed" in report.passed
    True
    """
    check_steps(steps)
    check_count("seed", seed)
    check_kind("single", single, (*get_args(Env), type(None)), "make it with funcollect.make_env(…, num_envs=1)")
    made = make_env(env, **kwargs)
    trial = Trial(
        env=made,
        policy=RandomPolicy(made.action_spec),
        steps=steps,
        seed=seed,
        single=_single(env, made, kwargs) if single is None else single,
    )
    return run_checks(repr(made), CHECKS, trial)


def _single(env: Any, made: Env, kwargs: dict[str, Any]) -> Env | None:
    """The environment with one lane, where it is known how to make it."""
    if isinstance(made, EnvBase):
        alone = copy.copy(made)
        for name in vars(made).keys() & {"_compiled", "_origin"}:  # what belongs to this very environment
            delattr(alone, name)
        alone.num_envs = 1
        return alone
    if isinstance(env, (str, EnvSpec)) or (callable(env) and "num_envs" in kwargs):
        return make_env(env, **{**kwargs, "num_envs": 1})
    return None

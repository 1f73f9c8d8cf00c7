"""`check_env`: checks that an environment keeps the contract."""

from __future__ import annotations

import copy
from typing import Any, get_args

import gymnasium
from gymnasium.envs.registration import EnvSpec

from funcollect.arguments import check_kind
from funcollect.envs.base import EnvBase
from funcollect.envs.registry import WORKER_ARGUMENTS, make_env
from funcollect.messages import shown
from funcollect.policies.random_policy import RandomPolicy
from funcollect.protocols import Env
from funcollect.testing import pair_checks
from funcollect.testing.envs import env_checks, env_resets, env_runs
from funcollect.testing.report import Check, Report, run_checks
from funcollect.testing.trial import Trial, check_run

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
    env_resets.own_resets,
    env_resets.terminal,
    env_resets.reset_mask,
    env_runs.lanes_alone,
    env_runs.action_memory,
    env_runs.observation_memory,
    pair_checks.batch_memory,
    env_runs.old_states,
    pair_checks.fork,
    pair_checks.save,
    env_runs.close,
)


def check_env(env: Any, *, steps: int = 100, seed: int = 0, single: Env | None = None, **kwargs: Any) -> Report:
    """Check that an environment keeps the contract, under random actions.

    Args:
        env: an `Env`, or anything that `make_env` accepts. An instance needs a spec, from which copies are made.
        steps: T, the number of steps of a run; ends of episodes are checked only if some episodes end within it.
        seed: the seed of the runs.
        single: the same environment with ``num_envs=1``, which the lanes of a batch are compared with. By default it is
            made, if `env` is an id, a factory or an instance of one of the base classes.
        **kwargs: arguments of `make_env`, such as ``num_envs=3``: some checks need two lanes.

    Returns:
        The report; `print` shows one line for each check.

    Raises:
        CheckError: at the first check that fails, with the place, the expectation, the value and the fix.
        TypeError, ValueError: if no environment can be made of the arguments.

    >>> report = check_env("CartPole-v1", num_envs=3, steps=40)
    >>> "same_seed" in report.passed
    True
    """
    check_run(steps, seed)
    check_kind("single", single, (*get_args(Env), type(None)), "make it with funcollect.make_env(…, num_envs=1)")
    if isinstance(env, gymnasium.Env) and env.spec is None:
        raise TypeError(
            f"env is {shown(env)}, an instance without a spec, which cannot be copied: pass its class or a "
            f"factory, check_env({type(env).__name__}, num_envs=3)"
        )
    made = make_env(env, **kwargs)
    if single is None:
        single = _single(env, made, kwargs)
    trial = Trial(env=made, policy=RandomPolicy(made.action_spec), steps=steps, seed=seed, single=single)
    return run_checks(repr(made), CHECKS, trial)


def _single(env: Any, made: Env, kwargs: dict[str, Any]) -> Env | None:
    """The environment with one lane, or None if it cannot be made from the arguments."""
    if isinstance(made, EnvBase):
        alone = copy.copy(made)
        alone.num_envs = 1
        return alone
    if isinstance(env, (str, EnvSpec)) or (callable(env) and "num_envs" in kwargs):
        of_one_lane = {name: value for name, value in kwargs.items() if name not in WORKER_ARGUMENTS}
        return make_env(env, **of_one_lane | {"num_envs": 1})
    return None

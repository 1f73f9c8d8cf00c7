"""`check_policy`: checks that a policy keeps the contract."""

from __future__ import annotations

from typing import Any

from funcollect.envs.registry import make_env
from funcollect.policies.as_policy import as_policy
from funcollect.testing import pair_checks
from funcollect.testing.policies import densities, policy_checks, policy_weights
from funcollect.testing.policies.policy_trial import PolicyTrial
from funcollect.testing.report import Check, Report, run_checks
from funcollect.testing.trial import check_run

CHECKS: tuple[Check[PolicyTrial], ...] = (
    policy_checks.suits,
    policy_checks.answers,
    policy_checks.acts,
    pair_checks.generators,
    policy_checks.pure,
    pair_checks.same_seed,
    pair_checks.cuts,
    pair_checks.batch_memory,
    pair_checks.save,
    policy_checks.deterministic,
    policy_checks.rows_apart,
    policy_checks.recurrent,
    densities.log_probs,
    densities.evaluation,
    policy_weights.params_argument,
    policy_weights.state_dict,
)


def check_policy(policy: Any, env: Any, *, steps: int = 40, seed: int = 0, **kwargs: Any) -> Report:
    """Check that a policy keeps the contract, in an environment that passes `check_env`.

    Args:
        policy: a `Policy`, or anything that a collector accepts as one. Its weights are changed, and then restored.
        env: an `Env`, or anything that `make_env` accepts.
        steps: T, the number of steps of a run; some episodes should end within it.
        seed: the seed of the runs.
        **kwargs: arguments of `make_env`, such as ``num_envs=3``.

    Returns:
        The report; `print` shows one line for each check.

    Raises:
        CheckError: at the first check that fails, with the place, the expectation, the value and the fix.
        TypeError, ValueError: if no policy or environment can be made of the arguments.

    >>> import torch, funcollect as fc
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> "log_probs" in check_policy(policy, "CartPole-v1", num_envs=2).passed
    True
    """
    check_run(steps, seed)
    made = make_env(env, **kwargs)
    trial = PolicyTrial(env=made, policy=as_policy(policy, made), steps=steps, seed=seed)
    return run_checks(f"{type(trial.policy).__name__} in {made!r}", CHECKS, trial)

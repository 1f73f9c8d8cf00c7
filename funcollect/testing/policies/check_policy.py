"""`check_policy`: is this a policy as the library needs it?"""

from __future__ import annotations

from typing import Any

from funcollect.arguments import check_count
from funcollect.envs.registry import make_env
from funcollect.policies.as_policy import as_policy
from funcollect.testing import pair_checks
from funcollect.testing.policies import densities, policy_checks, policy_weights
from funcollect.testing.policies.queries import PolicyTrial
from funcollect.testing.report import Check, Report, run_checks
from funcollect.testing.trial import check_steps

CHECKS: tuple[Check[PolicyTrial], ...] = (
    policy_checks.suits,
    policy_checks.answers,
    policy_checks.acts,
    pair_checks.generators,
    policy_checks.pure,
    pair_checks.same_seed,
    pair_checks.cuts,
    pair_checks.batch_memory,
    policy_checks.deterministic,
    policy_checks.rows_apart,
    policy_checks.recurrent,
    densities.log_probs,
    policy_weights.params_argument,
    policy_weights.state_dict,
)


def check_policy(policy: Any, env: Any, *, steps: int = 40, seed: int = 0, **kwargs: Any) -> Report:
    """Run every check that a policy has to pass, in an environment that passes `check_env`.

    Args:
        policy: a `Policy`, or whatever a collector takes as one. Its weights are changed on the way, and put back.
        env: an `Env`, or whatever `make_env` takes.
        steps: T of a run; episodes should end within it.
        seed: of the runs.
        **kwargs: for `make_env`, such as ``num_envs=3``.

    Returns:
        What was checked; `print` gives one line for each check.

    Raises:
        CheckError: at the first check that fails, with the place, what was expected, what was got, and the mend.
        TypeError, ValueError: for something of which no policy or environment can be made.

    >>> import torch, funcollect as fc
    >>> policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    >>> "log_probs" in check_policy(policy, "CartPole-v1", num_envs=2).passed
    True
    """
    check_steps(steps)
    check_count("seed", seed)
    made = make_env(env, **kwargs)
    trial = PolicyTrial(env=made, policy=as_policy(policy, made), steps=steps, seed=seed)
    return run_checks(f"{type(trial.policy).__name__} in {made!r}", CHECKS, trial)

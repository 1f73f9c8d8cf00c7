"""Policies inside a traced loop."""

from __future__ import annotations

from typing import Any

from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax, tracing
from funcollect.policies.actors.actor import split_call
from funcollect.policies.actors.checks import check_action, check_rows
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.jax_functions.program import Draw, TracedCall, draw_noise
from funcollect.policies.numerics import jax_numerics
from funcollect.policies.random_policy import RandomPolicy, action_mask, draw_actions, in_shares, random_noise
from funcollect.protocols import BoundParams, Exploration, Policy, is_policy
from funcollect.specs import ActionSpec, ExplorationType


def is_traceable(policy: Policy) -> bool:
    """Whether `traced_policy` takes this policy."""
    return isinstance(policy, RandomPolicy) or policy.backend == "jax"


def check_traceable(policy: Any) -> None:
    """Raise TypeError for a policy that is neither random nor one that JAX can trace."""
    if not is_policy(policy) or not is_traceable(policy):
        kind = f"a {policy.backend} policy" if is_policy(policy) else "no policy"
        raise TypeError(
            f"{type(policy).__name__} is {kind}, expected one that JAX can trace: pass "
            "funcollect.lower_policy(policy, env), or use funcollect.jax_policy or funcollect.random_policy"
        )


def traced_policy(policy: Policy, spec: ActionSpec, num_envs: int, exploration_type: ExplorationType) -> TracedCall:
    """The policy's step as a traced function that draws its own noise; TypeError if JAX cannot trace it."""
    check_traceable(policy)
    jax, noise = import_jax(), policy.noise(spec)
    stochastic = exploration_type is ExplorationType.RANDOM

    def answer(bound: BoundParams, policy_state: Any, observation: Any, draw: Draw) -> tuple[Any, dict[str, Any]]:
        if isinstance(policy, RandomPolicy):
            return policy_state, {"action": traced_random(spec, draw, observation)[0]}
        drawn = None if noise is None else draw_noise(noise, draw)
        if isinstance(policy, FunctionPolicy):
            policy_state, outputs = policy.answer(spec, stochastic, bound, policy_state, observation, drawn)
        else:
            exploration = Exploration(exploration_type, bound[1])
            with tracing("the call of the policy"):
                given = split_call(policy(bound[0], policy_state, observation, drawn, spec, exploration))
            policy_state, outputs = given[0], dict(given[1])
        check_action(outputs["action"], spec, num_envs)
        check_rows(outputs, num_envs)
        for name, output in outputs.items():
            if jax.numpy.issubdtype(output.dtype, jax.dtypes.prng_key):
                raise PolicyError(
                    f"the policy's output {name!r} is typed PRNG keys, expected numbers: return jax.random.key_data of "
                    "them"
                )
        return policy_state, outputs

    return answer


def traced_random(spec: ActionSpec, draw: Draw, observation: Any) -> tuple[Any, Any]:
    """The random actions [P, ...] that `RandomPolicy` draws from the same words, and their log-probabilities [P]."""
    uniform = draw_noise(random_noise(spec), draw)
    return draw_actions(jax_numerics(), spec, uniform, action_mask(observation, spec))


def match_log_prob(log_prob: Any, like: Any) -> Any:
    """Log-probabilities [P] in the shape of a policy's own: [P], or [P, n] in shares that add up to them."""
    return import_jax().numpy.broadcast_to(in_shares(log_prob, like.shape), like.shape).astype(like.dtype)

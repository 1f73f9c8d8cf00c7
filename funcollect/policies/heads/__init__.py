"""Heads turn a network's outputs into an action and its log-probability.

A head is pure and serves Torch and JAX alike; the noise for sampling is an argument. `categorical`, `greedy`, `normal`
and `tanh_normal` are heads; `epsilon_greedy`, `boltzmann`, `clipped_normal` and `from_distribution` make one. A head's
`values` are numbers that may change during a run: `rollout` and collectors take them as
``exploration={"epsilon": 0.1}``, and batches hold them.

A network returns the distribution's parameters for P environments. It may also return them in a dict, under the names
that each head's docstring lists, together with further outputs to record. Actions have the dtype of the space.
"""

# ruff: noqa: F403, F405
from funcollect.policies.heads.built_in import *
from funcollect.policies.heads.head import Head, from_distribution

__all__ = [
    "Head", "boltzmann", "categorical", "clipped_normal", "epsilon_greedy", "from_distribution", "greedy", "normal",
    "tanh_normal",
]  # fmt: skip

"""The description of a collector's environment and policy, from which they are built where they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcollect.arguments import check_function, checked_device
from funcollect.collectors.options import Options
from funcollect.envs.registry import make_env
from funcollect.interop.jax_setup import default_device_type
from funcollect.messages import shown
from funcollect.policies.as_policy import as_policy
from funcollect.protocols import Env, Policy


@dataclass(kw_only=True, eq=False, repr=False)
class SourceOptions:
    """The keywords of one environment and one policy besides themselves."""

    create_env_kwargs: Mapping[str, Any] | None = None
    """keyword arguments for `make_env` or for the callable."""
    policy_factory: Callable[[], Any] | None = None
    """makes the policy, in place of `policy`."""


@dataclass(kw_only=True, eq=False)
class RunnerSpec(SourceOptions):
    """An environment and a policy before they are built."""

    create_env_fn: Any
    policy: Any = None

    def __post_init__(self) -> None:
        """Check what can be checked before anything is built."""
        if not isinstance(self.create_env_kwargs, (Mapping, type(None))):
            raise TypeError(
                f"create_env_kwargs is {shown(self.create_env_kwargs)}, expected a dict of keyword arguments for "
                "make_env: pass one"
            )
        factory = self.policy_factory
        if factory is None:
            return
        if self.policy is not None:
            raise ValueError("policy and policy_factory are both given, expected one: leave the other out")
        if isinstance(factory, nn.Module):
            raise TypeError(
                f"policy_factory is {type(factory).__name__}, expected a function that returns a policy: pass one, or "
                "pass the policy as policy"
            )
        check_function("policy_factory", factory, "a function without arguments that returns a policy", 0)

    def build(self, options: Options) -> tuple[Env, Policy]:
        """Build both, on the devices that `options` name."""
        policy = self._policy()
        env = make_env(self.create_env_fn, **(self.create_env_kwargs or {}))
        # `device` may name an accelerator for the policy while simulators stay on the host; `env_device` may not.
        given = options.env_device if env.backend != "host" or options.env_device_given else None
        if env.backend in ("torch", "device"):
            own = str(checked_device(env.device))
        else:
            own = default_device_type() if env.backend == "jax" else "cpu"
        if given is not None and own not in (str(given), torch.device(given).type):
            raise ValueError(
                f"env_device is {given}, but {env!r} runs on {own}: build the environment there, or leave env_device "
                "out"
            )
        return env, as_policy(policy, env, options.policy_device)

    def _policy(self) -> Any:
        if self.policy_factory is None:
            return self.policy
        if (made := self.policy_factory()) is None:
            raise TypeError("policy_factory returned None, expected a policy: return it")
        return made

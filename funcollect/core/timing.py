"""Times the parts of rollouts: each loop runs as it always does, under a clock that its calls are timed by."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial

import torch

from funcollect.core.api import LOOPS, RunLoop
from funcollect.core.loops.eager import CLOCK, Clock
from funcollect.core.request import Request, Rollout
from funcollect.core.state import CollectorState
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.protocols import Env, Policy

COMPILED = ("fused", "captured")  # loops in which nothing can be timed, since one program does it all


class TimedLoops(dict[str, RunLoop]):
    """The loops by name, for `funcollect.core.api.run`; they add up the time of their rollouts."""

    def __init__(self) -> None:
        super().__init__({name: partial(self._run, name, loop) for name, loop in LOOPS.items()})
        self.loop = ""  # the name of the loop that ran last
        self.cpu = 0.0  # seconds of this process's CPU time in rollouts
        self.seconds: dict[str, float] = defaultdict(float)  # by part: "rollout" alone in a loop that is one program

    def _run(
        self, name: str, run_loop: RunLoop, env: Env, policy: Policy, state: CollectorState, request: Request
    ) -> Rollout:
        clock = Clock(torch.cuda.synchronize if _on_accelerator(env, policy) else None)
        token = CLOCK.set(None if name in COMPILED else clock)
        cpu, began = time.process_time(), time.perf_counter()
        try:
            result = run_loop(env, policy, state, request)
        finally:
            CLOCK.reset(token)
        seconds = time.perf_counter() - began
        parts = {"rollout": seconds} if name in COMPILED else _parts(seconds, clock.seconds, name == "crossing")
        for part, spent in parts.items():
            self.seconds[part] += spent
        self.loop, self.cpu = name, self.cpu + time.process_time() - cpu
        return result


def _parts(whole: float, spent: dict[str, float], compiled_env: bool) -> dict[str, float]:
    """The seconds of a rollout by part, from those of its calls.

    Recording is the time of the steps outside of the calls; over a compiled environment it is a part of that.
    """
    recording = max(spent["steps"] - spent["environment"] - spent["policy"], 0.0)
    return {
        "environment": spent["environment"] + recording * compiled_env,
        "policy": spent["policy"] + spent["finish"],
        **({} if compiled_env else {"recording": recording}),
        "preparation": max(whole - spent["steps"] - spent["finish"] - spent["delivery"], 0.0),
        "delivery": spent["delivery"],
    }


def _on_accelerator(env: Env, policy: Policy) -> bool:
    """Whether calls of the environment or of the policy may return before their work is done."""
    if not torch.cuda.is_available():
        return False
    own = policy.run_device if isinstance(policy, TorchBacked) else None
    places = [env.device] if env.backend in ("torch", "device") else []
    if any(str(place).startswith("cuda") for place in (own, *places)):
        return True
    return "jax" in (env.backend, policy.backend) and import_jax().default_backend() == "gpu"

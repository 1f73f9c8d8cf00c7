"""The loops, timed: each runs as it always does, with an environment and a policy whose calls are timed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from typing_extensions import override

from funcollect.core.api import LOOPS
from funcollect.core.loops import RunsRollouts
from funcollect.core.request import Request
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.core.timing.stopwatch import Delegate, Stopwatch, overhead
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.population import Population
from funcollect.policies.torch_backed import TorchBacked
from funcollect.policies.torch_in_jax.embedded_policy import EmbeddedPolicy
from funcollect.protocols import ActorInputs, Env, Policy

COMPILED = ("fused", "captured")  # loops in which nothing can be timed, since one program does it all

_now = time.perf_counter


class TimedLoops(Mapping[str, RunsRollouts]):
    """The loops by name, for `funcollect.core.api.run`; they add up the time of their rollouts.

    Attributes:
        loop: the name of the loop that ran last.
        cpu: seconds of this process's CPU time in rollouts.
        waits: whether each call of the environment and the policy waited for an accelerator.
    """

    def __init__(self) -> None:
        self.loop = ""
        self.cpu = 0.0
        self.waits = False
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    @override
    def __getitem__(self, name: str) -> RunsRollouts:
        return _TimedLoop(self, name, LOOPS[name])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(LOOPS)

    @override
    def __len__(self) -> int:
        return len(LOOPS)

    def add(self, loop: str, seconds: Mapping[str, float], calls: Mapping[str, int], cpu: float) -> None:
        """Count a rollout: its seconds and its timed calls by part, and its CPU time."""
        self.loop = loop
        self._seconds |= {part: self._seconds.get(part, 0.0) + spent for part, spent in seconds.items()}
        self._calls |= {part: self._calls.get(part, 0) + number for part, number in calls.items()}
        self.cpu += cpu

    def parts(self) -> tuple[dict[str, float], float]:
        """Return the seconds of all rollouts by part, without those that timing cost, and the latter."""
        each, seconds = overhead(), dict(self._seconds)
        around = "recording" if "recording" in seconds else "environment"
        costs = {part: number * each.counted for part, number in self._calls.items()}
        costs[around] = costs.get(around, 0.0) + sum(self._calls.values()) * (each.whole - each.counted)
        costs = {part: min(cost, seconds.get(part, 0.0)) for part, cost in costs.items()}
        return {part: spent - costs.get(part, 0.0) for part, spent in seconds.items()}, sum(costs.values())


class _TimedLoop:
    """One of the loops."""

    def __init__(self, loops: TimedLoops, name: str, loop: RunsRollouts) -> None:
        self._loops, self._name, self._loop = loops, name, loop

    def run(
        self, env: Any, policy: Policy, state: CollectorState, request: Request
    ) -> tuple[CollectorState, TensorDict]:
        """Run a rollout, and count its time."""
        calls: Mapping[str, int] = {}
        cpu, began = time.process_time(), _now()
        if self._name in COMPILED:
            result = self._loop.run(env, policy, state, request)
            seconds = {"rollout": _now() - began}
        else:
            _check_can_be_timed(env, policy)
            wait = torch.cuda.synchronize if _on_accelerator(env, policy) else None
            self._loops.waits = wait is not None
            rollout = _TimedRollout(wait)
            with rollout.simulators(state):
                result = self._loop.run(rollout.env(env), rollout.policy(policy), state, request)
            seconds, calls = rollout.parts(began, _now(), compiled_env=self._name == "crossing")
        self._loops.add(self._name, seconds, calls, time.process_time() - cpu)
        return result


class _TimedRollout:
    """What one rollout is given instead of its environment, policy and simulators."""

    def __init__(self, wait: Any) -> None:
        self._stopwatch = Stopwatch(wait)
        self._stepping: float | None = None  # when the first step began
        self._finishing: float | None = None  # when the last step had ended

    def env(self, env: Any) -> Any:
        """Return the environment, its functions timed; environments that are opened have none."""
        return Delegate(env, **self._timed("environment", env, "reset", "step")) if env.backend == "torch" else env

    @contextlib.contextmanager
    def simulators(self, state: CollectorState) -> Iterator[None]:
        """Let the state's simulators, if it has some, be timed in the block."""
        if not isinstance(state.env_state, SimulatorHandle):
            yield
            return
        simulation: Any = state.env_state.simulation
        own = simulation.simulators
        timed = self._timed("environment", own, "reset", "send", "receive", "step")
        simulation.simulators = Delegate(own, **timed)
        try:
            yield
        finally:
            simulation.simulators = own

    def policy(self, policy: Policy) -> Any:
        """Return the policy, its actors timed."""
        members: dict[str, Any] = {"actor": lambda inputs: self._actor(policy, inputs)}
        if isinstance(policy, Population):
            members["of_lanes"] = lambda lanes, total: self.policy(policy.of_lanes(lanes, total))
        return Delegate(policy, **members)

    def _actor(self, policy: Policy, inputs: ActorInputs) -> Any:
        actor = policy.actor(inputs)
        finish = self._stopwatch.timed("finish", actor.finish)

        @contextlib.contextmanager
        def running() -> Iterator[Any]:
            with actor.running() as context:
                self._stepping = _now()
                yield context

        def finish_now() -> Any:
            self._finishing = self._finishing or _now()
            return finish()

        timed = self._timed("policy", actor, "act", "restart")
        return Delegate(actor, running=running, finish=finish_now, **timed)

    def _timed(self, part: str, owner: Any, *names: str) -> dict[str, Any]:
        """The methods of `owner` with these names that it has, timed."""
        return {name: self._stopwatch.timed(part, getattr(owner, name)) for name in names if hasattr(owner, name)}

    def parts(self, began: float, ended: float, *, compiled_env: bool) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds of the rollout by part, and the number of calls that were timed.

        Recording is the time of the steps outside of the calls; over a compiled environment it is a part of that.
        """
        assert self._stepping is not None
        assert self._finishing is not None
        spent, calls = Counter(self._stopwatch.seconds), Counter(self._stopwatch.calls)
        rest = max(self._finishing - self._stepping - spent["environment"] - spent["policy"], 0.0)
        seconds = {
            "environment": spent["environment"] + rest * compiled_env,
            "policy": spent["policy"] + spent["finish"],
            **({} if compiled_env else {"recording": rest}),
            "preparation": self._stepping - began,
            "delivery": max(ended - self._finishing - spent["finish"], 0.0),
        }
        return seconds, {"environment": calls["environment"], "policy": calls["policy"] + calls["finish"]}


def _check_can_be_timed(env: Env, policy: Policy) -> None:
    """Raise PolicyError for a lowered population over halves of lanes, whose members the loop itself lowers."""
    lowered = isinstance(policy, EmbeddedPolicy) and isinstance(policy.source, Population)
    if lowered and isinstance(env, SimulatedEnv) and env.workers is not None and env.workers.overlap > 1:
        raise PolicyError(
            "a population with compile='xla' acts for one half of the lanes at a time (overlap=2), which is not timed: "
            "profile it with overlap=1, or with compile='eager'"
        )


def _on_accelerator(env: Env, policy: Policy) -> bool:
    """Whether calls of the environment or of the policy may return before their work is done."""
    if not torch.cuda.is_available():
        return False
    own = policy.run_device if isinstance(policy, TorchBacked) else None
    places = [env.device] if env.backend in ("torch", "device") else []
    if any(str(place).startswith("cuda") for place in (own, *places)):
        return True
    return "jax" in (env.backend, policy.backend) and import_jax().default_backend() == "gpu"

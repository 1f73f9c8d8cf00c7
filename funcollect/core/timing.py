"""Times the parts of rollouts: each loop runs as it always does, with an environment and a policy that are timed."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict

from funcollect.core.api import LOOPS
from funcollect.core.loops import RunsRollouts
from funcollect.core.request import Request
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.population import Population
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.protocols import ActorInputs, Env, Policy

COMPILED = ("fused", "captured")  # loops in which nothing can be timed, since one program does it all

_now = time.perf_counter


class TimedLoops(dict[str, RunsRollouts]):
    """The loops by name, for `funcollect.core.api.run`; they add up the time of their rollouts.

    Attributes:
        loop: the name of the loop that ran last.
        seconds: of all rollouts, by part: ``"rollout"`` alone in a loop that is one program.
        cpu: seconds of this process's CPU time in rollouts.
    """

    def __init__(self) -> None:
        super().__init__({name: _TimedLoop(self, name, loop) for name, loop in LOOPS.items()})
        self.loop, self.cpu = "", 0.0
        self.seconds: dict[str, float] = defaultdict(float)


class _TimedLoop:
    """One of the loops."""

    def __init__(self, loops: TimedLoops, name: str, loop: RunsRollouts) -> None:
        self._loops, self._name, self._loop = loops, name, loop

    def run(
        self, env: Any, policy: Policy, state: CollectorState, request: Request
    ) -> tuple[CollectorState, TensorDict]:
        """Run a rollout, and count its time."""
        loops, loop = self._loops, self._loop
        cpu, began = time.process_time(), _now()
        if self._name in COMPILED:
            result = loop.run(env, policy, state, request)
            seconds = {"rollout": _now() - began}
        else:
            rollout = _TimedRollout(torch.cuda.synchronize if _on_accelerator(env, policy) else None)
            with rollout.simulators(state):
                result = loop.run(rollout.env(env), rollout.policy(policy), state, request)
            seconds = rollout.parts(began, _now(), compiled_env=self._name == "crossing")
        loops.loop = self._name
        for part, spent in seconds.items():
            loops.seconds[part] += spent
        loops.cpu += time.process_time() - cpu
        return result


class _TimedRollout:
    """What one rollout is given instead of its environment, policy and simulators."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        self._wait = wait  # for an accelerator
        self._seconds: dict[str, float] = defaultdict(float)  # of the calls, by part
        self._stepping = self._finishing = 0.0  # when the first step began, and the last one had ended

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
        simulation.simulators = Delegate(own, **self._timed("environment", own, "reset", "send", "receive", "step"))
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
        finish = self._timed("finish", actor, "finish")["finish"]

        @contextlib.contextmanager
        def running() -> Iterator[Any]:
            with actor.running() as context:
                self._stepping = _now()
                yield context

        def finish_now() -> Any:
            self._finishing = self._finishing or _now()
            return finish()

        return Delegate(actor, running=running, finish=finish_now, **self._timed("policy", actor, "act", "restart"))

    def _timed(self, part: str, owner: Any, *names: str) -> dict[str, Any]:
        """The methods of `owner` with these names that it has; each adds its seconds to those of `part`."""
        present = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
        return {name: timed(function, part, self._seconds, self._wait) for name, function in present.items()}

    def parts(self, began: float, ended: float, *, compiled_env: bool) -> dict[str, float]:
        """Return the seconds of the rollout by part.

        Recording is the time of the steps outside of the calls; over a compiled environment it is a part of that.
        """
        spent = self._seconds
        rest = max(self._finishing - self._stepping - spent["environment"] - spent["policy"], 0.0)
        return {
            "environment": spent["environment"] + rest * compiled_env,
            "policy": spent["policy"] + spent["finish"],
            **({} if compiled_env else {"recording": rest}),
            "preparation": self._stepping - began,
            "delivery": max(ended - self._finishing - spent["finish"], 0.0),
        }


def timed(
    function: Callable[..., Any], part: str, seconds: dict[str, float], wait: Callable[[], None] | None = None
) -> Callable[..., Any]:
    """Return a function that does what `function` does, and adds its time to ``seconds[part]``.

    `wait` blocks until an accelerator has done all its work; it is called before and after each call.
    """

    def call(*args: Any) -> Any:
        if wait is not None:
            wait()
        began = _now()
        try:
            return function(*args)
        finally:
            if wait is not None:
                wait()
            seconds[part] += _now() - began

    return call


class Delegate:
    """Stands for another object, also to `isinstance`. Members that are given by name take the place of its own."""

    def __init__(self, inner: Any, **members: Any) -> None:
        self._inner = inner
        vars(self).update(members)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _on_accelerator(env: Env, policy: Policy) -> bool:
    """Whether calls of the environment or of the policy may return before their work is done."""
    if not torch.cuda.is_available():
        return False
    own = policy.run_device if isinstance(policy, TorchBacked) else None
    places = [env.device] if env.backend in ("torch", "device") else []
    if any(str(place).startswith("cuda") for place in (own, *places)):
        return True
    return "jax" in (env.backend, policy.backend) and import_jax().default_backend() == "gpu"

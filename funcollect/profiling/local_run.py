"""What was measured of a run in this process, as parts of a frame's time and limits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

from funcollect.collectors.runner_timer import RolloutTimes
from funcollect.collectors.sync import SyncDataCollector
from funcollect.core.explain import policy_seconds, random_actions
from funcollect.core.routes import route_of
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.host.lane_workers.advice import LaneCosts, cores_here, lane_costs
from funcollect.profiling.alone import environment_alone
from funcollect.profiling.reading import Reading
from funcollect.profiling.report import Limit
from funcollect.protocols import HostEnv


class LocalRun:
    """Times of a run in microseconds per frame, and what else is measured for the advice.

    Attributes:
        total: the time of a frame.
        parts: of it.
    """

    def __init__(self, collector: SyncDataCollector, times: RolloutTimes, done: Reading) -> None:
        self.collector, self.times, self._done = collector, times, done
        self.env, self.policy = collector.env, collector.policy
        self.lanes = collector.env.num_envs or 1
        self.route = route_of(self.env, self.policy, collector.exploration_type)
        self.cores = cores_here()
        self.total = self._per_frame(times.seconds)
        self.parts = self._parts()

    def _per_frame(self, seconds: float) -> float:
        return 1e6 * seconds / self.times.frames

    def _parts(self) -> dict[str, float]:
        """The parts; what lies between rollouts, besides the reader's work, delivers batches."""
        times = self.times
        parts = {part: self._per_frame(seconds) for part, seconds in times.parts.items()}
        reader = min(self._done.reader, times.between)
        parts["delivery"] = parts.get("delivery", 0.0) + self._per_frame(times.between - reader)
        parts |= {"reader": self._per_frame(reader)} if reader else {}
        for part, value in self._compiled(parts.pop("rollout", 0.0)).items():
            parts[part] = parts.get(part, 0.0) + value  # also of rollouts that another loop ran
        if self.costs is not None:
            environment = parts["environment"]
            parts["environment"] = min(environment, 1e6 * self.costs.steps / self.lanes)
            parts["hand-over"] = environment - parts["environment"]
        return parts

    def _compiled(self, rollout: float) -> dict[str, float]:
        """The parts of a rollout that is one program."""
        if not rollout:
            return {}
        if self.env.backend != "jax":
            return {"environment and policy": rollout}
        length, most = self.collector.length, self.collector.max_frames_per_traj
        seconds = environment_alone(self.env, length, self.collector.lanes, most if most and most > 0 else None)
        alone = min(1e6 * seconds / (length * self.lanes), rollout)
        return {"environment": alone, "policy": rollout - alone}

    @cached_property
    def costs(self) -> LaneCosts | None:
        """The costs of the environment's lanes, if they live in workers."""
        env = self.env
        if not isinstance(env, SimulatedEnv) or env.workers is None:
            return None
        return lane_costs(env, partial(self.policy_seconds, env), partial(random_actions, env))

    def policy_seconds(self, env: HostEnv, lanes: int) -> float:
        """The seconds of a call of the policy for so many lanes, with the observations of the last step."""
        return policy_seconds(env, self.route, lanes, self.collector.state.observation)

    def limits(self) -> Iterator[Limit]:
        """What this machine can do."""
        environment, policy = (self.parts.get(part, 0.0) for part in ("environment", "policy"))
        if self.times.loop == "fused":
            yield Limit.of(environment, "the environment alone, with random actions")
            return
        if self.costs is not None:
            used = 1e6 * self.costs.step * self.costs.busy + policy
            what = "processor time of one lane's step and of the policy"
            yield Limit.of(used, f"{what}, on {self.cores} processors that never wait", self.cores)
            return
        both = environment + policy + self.parts.get("environment and policy", 0.0)
        yield Limit.of(both, "environment and policy without anything else, in one process")
        if self.env.backend == "host" and self.cores > 1:
            yield Limit.of(both, f"the same in {self.cores} processes, one for each processor", self.cores)

    def notes(self) -> Iterator[str]:
        """How parts were measured, where that is not plain."""
        if self.times.loop == "fused":
            yield (
                "Environment and policy are one compiled program, in which nothing can be timed: the part of the "
                "environment was measured with random actions in a loop of the same kind, with its recording and "
                "delivery, and the part of the policy is the rest."
            )
        if self.times.loop == "crossing":
            yield "Recording is included in the environment, whose compiled step writes the columns."
        if self.costs is not None:
            yield (
                "The environment's part is that of the slowest worker's lanes, from the time of one lane's step; what "
                "this process waits beyond that is hand-over."
            )
        if self.times.waits:
            yield "Each call of the environment and the policy waited for the accelerator, which a run does not do."

"""What could be changed in a run in this process, and how much of a frame's time that would save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from funcollect.core.timing.timed_loops import COMPILED
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.host.lane_workers.advice import (
    WITHOUT_OVERLAP,
    WITHOUT_WORKERS,
    LaneCosts,
    estimated_costs,
    with_policy,
)
from funcollect.envs.host.lane_workers.options import LaneWorkers
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.profiling.advice import FEW_STEPS, Finding, nothing_to_gain
from funcollect.profiling.local_run import LocalRun
from funcollect.protocols import HostEnv, Policy

_IN_WORKERS = ("environment", "policy", "recording")
_MORE = 4  # times as many lanes, for which a call of the policy is timed


def findings(run: LocalRun) -> Iterator[Finding]:
    """What could be changed."""
    yield from _about_batches(run)
    yield from _about_workers(run)
    yield from _about_calls(run)


def _about_batches(run: LocalRun) -> Iterator[Finding]:
    reader = run.parts.get("reader", 0.0)
    if reader and run.cores > 1:
        yield Finding(
            min(reader, run.total - reader),
            f"the reader takes {reader / run.total:.0%} of the time, in which nothing is collected: "
            "MultiSyncDataCollector(prefetch=True) and MultiaSyncDataCollector collect meanwhile",
        )
    batch = run.parts.get("preparation", 0.0) + run.parts.get("delivery", 0.0)
    if run.collector.length < FEW_STEPS and run.times.loop not in COMPILED:
        yield Finding(
            batch * (1 - run.collector.length / FEW_STEPS),
            f"preparing and delivering batches of {run.collector.length} steps takes {batch / run.total:.0%} of "
            "the time: take longer ones (frames_per_batch of a collector, length of a rollout)",
        )
    recording = run.parts.get("recording", 0.0)
    if run.times.loop == "host" and not run.collector.compact_obs:
        yield Finding(
            0.4 * recording,
            f"recording takes {recording / run.total:.0%} of the time: a collector with compact_obs=True records "
            "each observation once",
        )


def _about_workers(run: LocalRun) -> Iterator[Finding]:
    """More processes, or fewer."""
    if run.costs is not None:
        yield from _about_lane_workers(run, run.costs)
    elif run.env.backend == "host" and run.cores > 1:
        yield from _about_more_processes(run)


def _about_more_processes(run: LocalRun) -> Iterator[Finding]:
    """Workers for lanes, or for collectors where the policy may run in each."""
    environment, number = run.parts["environment"], min(run.cores, run.lanes)
    costs = estimated_costs(run.lanes, LaneWorkers(num_workers=number), 1e-6 * environment, run.times.load)
    spread = isinstance(run.env, SimulatedEnv) and run.env.seeding != "run" and number > 1 and costs.pays
    lanes = f"make_env(…, num_workers={number}) steps the lanes in as many processes"
    part = max(("environment", "policy"), key=lambda name: run.parts[name])
    share = (
        f"the {part} takes {run.parts[part] / run.total:.0%} of the time, and one of {run.cores} processors collects"
    )
    if _on_cpu(run.policy):
        both = f"MultiSyncDataCollector(…, num_workers={run.cores}) runs environment and policy in as many"
        saved = sum(run.parts.get(name, 0.0) for name in _IN_WORKERS) * (1 - 1 / run.cores)
        yield Finding(saved, f"{share}: {f'{lanes}, and ' if spread else ''}{both}{'' if spread else ' processes'}")
    elif spread:
        yield Finding(1e6 * (costs.alone - costs.apart) / run.lanes, f"{share}: {lanes}")


def _on_cpu(policy: Policy) -> bool:
    """Whether a policy runs on the CPU, as far as that is known."""
    place = policy.run_device if isinstance(policy, TorchBacked) else None
    return place is None or place.type == "cpu"


def _about_lane_workers(run: LocalRun, costs: LaneCosts) -> Iterator[Finding]:
    lanes, spent = costs.lanes, run.parts["environment"] + run.parts["hand-over"]
    if not costs.pays or spent > 1e6 * costs.step:
        yield Finding(
            max(spent - 1e6 * costs.step, 0.0),
            f"one process would be about as fast, or faster: {WITHOUT_WORKERS} (a step of all lanes took "
            f"{spent * lanes:,.0f} µs in {costs.workers}, and would take about {1e6 * costs.alone:,.0f} µs in one)",
        )
    if not costs.pays:
        return
    if costs.workers.overlap > 1 and costs.saved <= 0:
        text = f"overlap=2 saves nothing here, since the policy is called twice in each step: {WITHOUT_OVERLAP}"
        yield Finding(-1e6 * costs.saved / lanes, text)
    elif costs.workers.overlap == 1 and lanes > 1:
        env = run.env
        assert isinstance(env, SimulatedEnv)
        call = partial(run.policy_seconds, env)
        halves = with_policy(replace(costs, workers=replace(costs.workers, overlap=2)), call)
        yield Finding(
            1e6 * halves.saved / lanes,
            "make_env(…, overlap=2) steps one half of the lanes while the policy acts for the other: it would save "
            f"about {1e6 * halves.saved:,.0f} µs of a step",
        )


def _about_calls(run: LocalRun) -> Iterator[Finding]:
    """Calls of a Torch policy at every step, on the CPU."""
    policy, route = run.policy, run.route
    if route.loop == "crossing":
        reason = "fc.explain names what keeps it" if route.refusals else "compile='eager' or 'inductor' keeps it"
        yield Finding(
            0.8 * run.parts["policy"] + run.parts["preparation"] / 2,
            f"the policy is called in Torch at each step, {run.parts['policy'] / run.total:.0%} of the time: "
            f"{reason} out of the compiled loop",
        )
    if isinstance(policy, TorchBacked) and _on_cpu(policy) and route.policy is policy and run.env.backend == "host":
        yield from _about_torch_calls(run, run.env)


def _about_torch_calls(run: LocalRun, env: HostEnv) -> Iterator[Finding]:
    now, in_run = run.policy_seconds(env, run.lanes), run.parts["policy"] * run.lanes
    if (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        try:
            one = 1e6 * run.policy_seconds(env, run.lanes)
        finally:
            torch.set_num_threads(threads)
        yield Finding(
            (in_run - one) / run.lanes,
            f"Torch divides each product of the policy over {threads} threads: with torch.set_num_threads(1) a "
            f"call takes {one:,.0f} µs, and in this run it took {in_run:,.0f} µs",
        )
    more = run.policy_seconds(env, _MORE * run.lanes)
    yield Finding(
        run.parts["policy"] * (1 - more / (_MORE * now)),
        f"a call of the policy takes {1e6 * now:,.0f} µs for {run.lanes} environments and {1e6 * more:,.0f} µs "
        f"for {_MORE * run.lanes}: step more of them at once (num_envs)",
    )


def otherwise(run: LocalRun) -> str:
    """The advice if nothing can be avoided."""
    if run.times.loop in COMPILED:
        remedy = "only more environments at once (num_envs), or an accelerator, make one compiled program faster"
    else:
        remedy = "only more processors, or another environment or policy, make this faster"
    return nothing_to_gain(run.parts, run.total, remedy)

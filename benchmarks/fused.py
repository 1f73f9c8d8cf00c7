"""JAX environments, frames per second: ours, a `lax.scan` written by hand as the limit, and peers.

The hand-written scan resets in every step, emits the same columns (64-bit integers as two words) and leaves them in
JAX; ours delivers a TensorDict of Torch tensors. `crossing` is our loop with the policy in Torch, step by step;
`torchrl` TorchRL's collector over its own wrapper, which for brax throws away all compiled programs of its process
every 20 steps and so has a process of its own; `torchrl-kept` is the same told not to. Policies are 2x64 tanh networks
that record the log-probability. `compile` is the CPU time of lowering and compiling the loop, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import nn

from benchmarks.contestants import agent_scans, scans
from benchmarks.contestants.peers import Batches, Rollouts
from benchmarks.harness.isolated import Isolated
from benchmarks.harness.report import compare
from benchmarks.harness.runner import Cell, Factory, Options, Result, measure

OURS = "funcollect"
FRAMES = 131_072  # at least, per batch
FRAMES_OF_PHYSICS = 32_768  # the same for environments with expensive steps
STEPS = 32  # at least, per environment
AGENTS = "jaxmarl/"
SIZES = {  # how many environments at once
    "gymnax/CartPole-v1": (1, 64, 1024, 4096),
    "gymnax/Breakout-MinAtar": (64, 1024, 4096),
    "brax/inverted_pendulum": (64, 1024),
    "brax/ant": (64,),
    "jumanji/Snake-v1": (64, 1024),
    "pgx/tic_tac_toe": (64, 1024, 4096),
    "xminigrid/XLand-MiniGrid-R1-9x9": (256,),
    "jaxmarl/MPE_simple_spread_v3": (1024,),
}


def results(options: Options) -> Iterator[Result]:
    for env_id, num_envs in _sizes():
        cell = _cell(env_id, num_envs)
        if options.only in cell.name:
            result = compare(cell, measure(cell, options), OURS)
            yield _with_compile_times(result, env_id, num_envs)


def cells() -> Iterator[Cell]:
    for env_id, num_envs in _sizes():
        yield _cell(env_id, num_envs)


def _sizes() -> Iterator[tuple[str, int]]:
    for env_id, sizes in SIZES.items():
        for num_envs in sizes:
            yield env_id, num_envs


def _cell(env_id: str, num_envs: int) -> Cell:
    length = batch_length(env_id, num_envs)
    contestants: dict[str, Factory] = {OURS: partial(ours, our_pair, env_id, num_envs, length)}
    contestants["scan"] = partial(by_hand, env_id, num_envs, length)
    if num_envs > 1 and not env_id.startswith(AGENTS):  # a batch of so many single steps takes minutes
        contestants["crossing"] = partial(ours, torch_pair, env_id, num_envs, length)
    if (suite := env_id.partition("/")[0]) in ("brax", "jumanji") and num_envs == 64:
        contestants |= torchrl_contestants(suite, env_id.partition("/")[2], num_envs)
    note = f"frames_per_batch {num_envs * length:,} ({length:,} per environment)"
    names = [name for name in (OURS, "crossing") if name in contestants]
    return Cell(name=f"{env_id} {num_envs}", note=note, contestants=contestants, block=1.0, ours=names)


def ours(pair: Callable[[str, int], tuple[Any, Any]], env_id: str, num_envs: int, length: int) -> Rollouts:
    return Rollouts(*pair(env_id, num_envs), length)


def by_hand(env_id: str, num_envs: int, length: int) -> Any:
    """The hand-written scan."""
    if env_id.startswith(AGENTS):
        return agent_scans.AgentScan(env_id.removeprefix(AGENTS), num_envs, length)
    return scans.Scan(env_id, num_envs, length)


def batch_length(env_id: str, num_envs: int) -> int:
    frames = FRAMES_OF_PHYSICS if env_id.startswith("brax") else FRAMES
    return max(STEPS, -(-frames // num_envs))


def our_pair(env_id: str, num_envs: int) -> tuple[Any, Any]:
    import funcollect as fc

    env = scans.make_env(env_id, num_envs)
    if env_id.startswith(AGENTS):
        group = env.groups["agent"]
        params, apply = agent_scans.network(*group.observation_space.shape, group.action_space.n)
        return env, fc.by_group({"agent": fc.jax_policy(apply, params, head=fc.heads.categorical)})
    params, apply = scans.network(env)
    head = fc.heads.categorical if scans.discrete(env) else fc.heads.normal
    return env, fc.jax_policy(apply, params, head=head)


def torch_pair(env_id: str, num_envs: int) -> tuple[Any, Any]:
    import funcollect as fc

    env = scans.make_env(env_id, num_envs)
    head = fc.heads.categorical if scans.discrete(env) else fc.heads.normal
    module = Network(*scans.sizes(env), gaussian=not scans.discrete(env))
    return env, fc.torch_policy(module, head=head, compile="eager")


class Network(nn.Module):
    """The network of `scans.network` in Torch."""

    def __init__(self, inputs: int, outputs: int, *, gaussian: bool) -> None:
        super().__init__()
        hidden = [nn.Linear(inputs, scans.HIDDEN), nn.Tanh(), nn.Linear(scans.HIDDEN, scans.HIDDEN), nn.Tanh()]
        self.net = nn.Sequential(*hidden, nn.Linear(scans.HIDDEN, outputs))
        self._gaussian = gaussian

    def forward(self, observation: Any) -> Any:
        if isinstance(observation, dict):
            observation = observation.get("observation", observation)
        leaves = [leaf.reshape(len(leaf), -1).float() for leaf in optree.tree_leaves(observation)]
        answer = self.net(torch.cat(leaves, -1) if len(leaves) > 1 else leaves[0])
        return (answer, torch.full_like(answer, 0.5)) if self._gaussian else answer


def _with_compile_times(result: Result, env_id: str, num_envs: int) -> Result:
    length = batch_length(env_id, num_envs)
    scan = compile_seconds(by_hand(env_id, num_envs, length).lower)
    seconds = {OURS: _our_compile(env_id, num_envs, length), "scan": scan}
    lines = result.table.splitlines()
    width = max(len(line) for line in lines[:-1]) + 2
    for i, line in enumerate(lines[:-1]):
        name = line.split()[0]
        text = "compile" if i == 0 else f"{seconds[name]:.2f} s" if name in seconds else ""
        lines[i] = f"{line:<{width}}{text:>9}"
    return replace(result, table="\n".join(lines), data={**result.data, "compile_seconds": seconds})


def _our_compile(env_id: str, num_envs: int, length: int) -> float:
    """Compile the loop alone: in both, `init` is a separate program."""
    import funcollect as fc
    from funcollect.core.loops import over_jax
    from funcollect.core.request import Request

    env, policy = our_pair(env_id, num_envs)
    state = fc.init(env, policy, seed=0)
    request = Request(length=length)
    program: Any = over_jax.program(env, policy, state, request)
    return compile_seconds(partial(program.lower, over_jax.bound_params(policy, request), state, length))


def compile_seconds(lower: Any) -> float:
    """Return the CPU seconds that lowering and compiling take."""
    start = time.process_time()
    lower().compile()
    return time.process_time() - start


def torchrl_contestants(suite: str, name: str, num_envs: int) -> dict[str, Factory]:
    """TorchRL's collector; where it matters, a second one that does not clear JAX's caches."""
    collector = partial(torchrl_collector, suite, name, num_envs)
    if suite != "brax":
        return {"torchrl": collector}
    return {
        "torchrl": partial(Isolated, collector, patience=600.0),
        "torchrl-kept": partial(collector, cache_clear_frequency=False),
    }


def torchrl_collector(suite: str, name: str, num_envs: int, **options: Any) -> Batches:
    """TorchRL's collector over its own wrapper; short batches, since it is slow. Snake's actions are random."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import BraxEnv, JumanjiEnv

    made = {"brax": BraxEnv, "jumanji": JumanjiEnv}[suite](name, batch_size=[num_envs], device="cpu", **options)
    policy = None
    if suite == "brax":
        inputs, outputs = made.observation_spec["observation"].shape[-1], made.action_spec.shape[-1]
        net = nn.Sequential(Network(inputs, outputs, gaussian=False), nn.Tanh())
        policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    made.set_seed(0)
    collector = Collector(
        made, policy, frames_per_batch=num_envs * 8, total_frames=-1, auto_register_policy_transforms=False
    )
    return Batches(collector)

"""One step at a time, frames per second: `funcollect.step`, short rollouts and collectors, and loops by hand.

`by hand` steps Gymnasium's environments and keeps the columns of a batch for each step, in new memory. `step` is
`funcollect.step`; `collector` our collector with one step of all lanes per batch, as `torchrl` is TorchRL's and `sb3`
Stable-Baselines3's `collect_rollouts(1)`; `pufferlib` its `Serial` vector below the loop by hand (as
`benchmarks.vector` installs it); `rollout 4` makes four steps per call. Every network is 2x64 tanh and records
the log-probability. In the cells of gymnax, `by hand` is one jitted call of the policy and the step, with its reset.
In those of `sac`, the whole program runs: see `benchmarks.contestants.sac`. In those of `replay`, one frame of each
lane goes into a buffer, and 256 frames come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.collect import our_policy
from benchmarks.contestants import sac, scans, steps, uses
from benchmarks.contestants.peers import Batches, dummy_loop, torchrl_actor, torchrl_collector
from benchmarks.contestants.steps import CALLS
from benchmarks.harness.report import compared
from benchmarks.harness.runner import Cell, Factory, Options, Result, quiet_mujoco

OURS = "step"
SIZES = (1, 8, 64)
SHORT = (4, 16, 64)  # steps of the rollouts beside
HELD, SAMPLE = 10_000, 256  # frames in a buffer, and in a sample
_HAND: Mapping[str, Callable[..., Any]] = {
    "torch": steps.torch_act,
    "jax": steps.jax_act,
    "tensordict": steps.tensordict_act,
}


def results(options: Options) -> Iterator[Result]:
    yield from compared(cells(), options, OURS)


def cells() -> Iterator[Cell]:
    quiet_mujoco()
    for env_id, policy in (
        ("CartPole-v1", "torch"),
        ("HalfCheetah-v5", "torch"),
        ("CartPole-v1", "jax"),
        ("CartPole-v1", "tensordict"),
    ):
        for num_envs in SIZES:
            yield _host_cell(env_id, policy, num_envs)
    yield _cell("Torch CartPole 1", {"by hand": partial(steps.TensorSteps, 1)}, _torch_pair, 1)
    for num_envs in SIZES:
        hand: dict[str, Factory] = {"by hand": partial(JittedSteps, num_envs)}
        yield _cell(f"gymnax/CartPole-v1 {num_envs}", hand, partial(_jax_pair, num_envs), num_envs)
    for name, learns in (("learning", True), ("before learning", False)):
        programs = {OURS: partial(sac.Program, sac.ours, learns=learns)}
        programs["by hand"] = partial(sac.Program, sac.by_hand, learns=learns)
        yield Cell(name=f"sac {name}", note=f"{sac.ENV}, one frame at a time", contestants=programs, ours=(OURS,))
    for num_envs in (1, 8):
        yield _replay_cell(num_envs)
    for use in (uses.evaluate, uses.film, uses.evaluator, uses.search):
        yield Cell(name=f"{use.__name__}", note=str(use.__doc__), contestants={OURS: use}, ours=(OURS,))


def _host_cell(env_id: str, policy: str, num_envs: int) -> Cell:
    peers: dict[str, Factory] = {"by hand": partial(steps.HandSteps, env_id, num_envs, _HAND[policy])}
    if policy == "torch":
        peers["torchrl"] = partial(torchrl_collector, env_id, num_envs, 1, random=False)
        if env_id == "CartPole-v1":
            peers["pufferlib"] = partial(steps.PufferSteps, env_id, num_envs, steps.torch_act)
        if num_envs > 1:  # its PPO refuses a batch of one frame
            peers["sb3"] = partial(dummy_loop, env_id, num_envs, 1)
    return _cell(f"{env_id} {policy} {num_envs}", peers, partial(_host_pair, env_id, policy, num_envs), num_envs)


def _cell(name: str, peers: Mapping[str, Factory], pair: Callable[[], tuple[Any, Any]], num_envs: int) -> Cell:
    own: dict[str, Factory] = {OURS: partial(Steps, pair), "collector": partial(_collector, pair, num_envs)}
    own |= {f"rollout {length}": partial(Steps, pair, length) for length in SHORT}
    note = "one step of all lanes per call, or as many as a rollout's name says"
    return Cell(name=name, note=note, contestants={**own, **peers}, ours=tuple(own), block=0.3)


class Steps:
    """Our steps, state in and state out: `CALLS` calls per run of `step`, or of `rollout` with a length."""

    def __init__(self, pair: Callable[[], tuple[Any, Any]], length: int = 0) -> None:
        import funcollect as fc

        env, policy = pair()
        self._state, self._close = fc.init(env, policy, seed=0), fc.close
        call: Any = partial(fc.rollout, length=length) if length else fc.step
        self._call = partial(call, env, policy)
        self._frames = CALLS * (length or 1) * (env.num_envs or 1)

    def run(self) -> int:
        call, state = self._call, self._state
        for _ in range(CALLS):
            state, _ = call(state)
        self._state = state
        return self._frames

    def close(self) -> None:
        self._close(self._state)


def _collector(pair: Callable[[], tuple[Any, Any]], num_envs: int) -> Batches:
    import funcollect as fc

    return Batches(fc.SyncDataCollector(*pair(), frames_per_batch=num_envs, total_frames=-1, seed=0))


def _host_pair(env_id: str, policy: str, num_envs: int) -> tuple[Any, Any]:
    import funcollect as fc

    env = fc.make_env(env_id, num_envs=num_envs)
    if policy == "tensordict":
        return env, fc.tensordict_policy(torchrl_actor(env_id))
    return env, our_policy(gymnasium.make(env_id), policy)


def _torch_pair() -> tuple[Any, Any]:
    import funcollect as fc

    return fc.envs.CartPole(num_envs=1), our_policy(gymnasium.make("CartPole-v1"), "torch")


def _jax_pair(num_envs: int) -> tuple[Any, Any]:
    import funcollect as fc

    env = scans.make_env("gymnax/CartPole-v1", num_envs)
    params, apply = scans.network(env)
    return env, fc.jax_policy(apply, params, head=fc.heads.categorical)


class JittedSteps(scans.Scan):
    """`CALLS` calls of one jitted step of policy and environment."""

    def __init__(self, num_envs: int) -> None:
        env = scans.make_env("gymnax/CartPole-v1", num_envs)
        made = scans.network(env)
        super().__init__(env, num_envs, 1, made)
        body = partial(scans.body, env, made[1], num_envs)
        self._call = jax.jit(lambda params, carry: body(params, carry, None))

    def run(self) -> int:
        for _ in range(CALLS):
            self._carry, row = self._call(self._params, self._carry)
            jax.block_until_ready(row)
        return CALLS * self._frames


def _replay_cell(num_envs: int) -> Cell:
    makers = {OURS: partial(_ring, "funcollect"), "torchrl": partial(_ring, "torchrl.data"), "sb3": _sb3_buffer}
    contestants: dict[str, Factory] = {name: partial(Turns, make, num_envs) for name, make in makers.items()}
    note = f"a frame of each lane in, {SAMPLE} frames out; {HELD:,} held; a frame is one call"
    return Cell(name=f"replay {num_envs}", note=note, contestants=contestants, ours=(OURS,), block=0.2)


class Turns:
    """`CALLS` times a frame of each lane into a buffer, and a sample out."""

    def __init__(self, make: Callable[[int], Callable[[], Any]], num_envs: int) -> None:
        self._turn = make(num_envs)
        for _ in range(HELD // num_envs):
            self._turn()

    def run(self) -> int:
        for _ in range(CALLS):
            self._turn()
        return CALLS

    def close(self) -> None:
        del self._turn


def _ring(library: str, num_envs: int) -> Callable[[], Any]:
    """Ours or TorchRL's, with the columns that Stable-Baselines3's has."""
    import importlib

    data = importlib.import_module(library)
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(HELD), batch_size=SAMPLE)
    rows, one = torch.randn(num_envs, 4), torch.ones(num_envs, 1)
    after = {"observation": rows, "reward": one, "terminated": one.bool()}
    batch = TensorDict({"observation": rows, "action": torch.zeros(num_envs).long(), "next": after}, [num_envs])

    def turn() -> Any:
        buffer.extend(batch)
        return buffer.sample()

    return turn


def _sb3_buffer(num_envs: int) -> Callable[[], Any]:
    from stable_baselines3.common.buffers import ReplayBuffer

    spaces = (gymnasium.spaces.Box(-9, 9, (4,), np.float32), gymnasium.spaces.Discrete(2))
    options: dict[str, Any] = {"device": "cpu", "n_envs": num_envs, "handle_timeout_termination": False}
    buffer = ReplayBuffer(HELD, *spaces, **options)
    rows, zeros = np.random.default_rng(0).standard_normal((num_envs, 4), np.float32), np.zeros(num_envs)
    infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def turn() -> Any:
        buffer.add(rows, rows, zeros, zeros, zeros, infos)
        return buffer.sample(SAMPLE)

    return turn

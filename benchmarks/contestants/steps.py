"""Loops written by hand that go one step at a time, and keep what a batch of one step holds.

Each step has new memory for its columns, since whoever asks for one step keeps it: roots, actions, log-probabilities,
next observations, rewards, flags, trajectory ids and counters, as tensors in a dict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.contestants.loops import AHEAD, packed
from benchmarks.contestants.networks import discrete, torch_module

CALLS = 50  # steps per run
Columns = dict[str, Any]  # tensors [P, ...] by name, nested as in a batch
Chosen = tuple[Sequence[Any], Tensor, Tensor]  # what the environments take; the action and its log-probability [P, ...]


class Counters:
    """Trajectory ids, steps and flags of P lanes."""

    def __init__(self, num_envs: int) -> None:
        self._lane = torch.arange(num_envs)
        self._version = torch.zeros(num_envs, dtype=torch.int64)
        self._episode, self._step = torch.zeros(num_envs, dtype=torch.int64), torch.zeros(num_envs, dtype=torch.int64)
        self._never = torch.zeros(num_envs, 1, dtype=torch.bool)
        self._count = num_envs

    def columns(self, terminated: Tensor, truncated: Tensor) -> tuple[Columns, Columns, Columns]:
        """The root's flags, those of the next step, and the counters of this one; then count it."""
        done, never = terminated | truncated, self._never
        ids, step = self._episode * self._count + self._lane, self._step.clone()
        over = done[:, 0]
        self._episode = self._episode + over
        self._step = torch.where(over, 0, step + 1)
        return (
            {"terminated": never, "truncated": never, "done": never},
            {"terminated": terminated, "truncated": truncated, "done": done},
            {"traj_ids": ids, "step": step, "lane": self._lane, "policy_version": self._version},
        )


class HandSteps:
    """`CALLS` steps of P Gymnasium environments per run, each with its columns."""

    def __init__(self, env_id: str, num_envs: int, make_act: Callable[[Any, Tensor], Callable[[], Chosen]]) -> None:
        self._envs = [gymnasium.make(env_id, disable_env_checker=True) for _ in range(num_envs)]
        self._steps = [env.step for env in self._envs]
        self._seeds = itertools.count()
        shape = self._envs[0].observation_space.shape
        self._observation = np.zeros((num_envs, *shape), np.float32)
        for lane, env in enumerate(self._envs):
            self._observation[lane], _ = env.reset(seed=next(self._seeds))
        self._act = make_act(self._envs[0], torch.from_numpy(self._observation))
        self._counters = Counters(num_envs)

    def step(self) -> Columns:
        """One step of all lanes."""
        observation = self._observation
        root, following = observation.copy(), np.empty_like(observation)
        reward = np.empty((len(observation), 1), np.float32)
        terminated, truncated = np.zeros((2, len(observation), 1), np.bool_)
        with torch.no_grad():
            chosen, action, log_prob = self._act()
        for lane, (step, each) in enumerate(zip(self._steps, chosen, strict=True)):
            row, reward[lane], terminated[lane], truncated[lane], _ = step(each)
            following[lane] = row
            if terminated[lane] or truncated[lane]:
                row, _ = self._envs[lane].reset(seed=next(self._seeds))
            observation[lane] = row
        flags, after, counters = self._counters.columns(torch.from_numpy(terminated), torch.from_numpy(truncated))
        return {
            "observation": torch.from_numpy(root),
            "action": action,
            "action_log_prob": log_prob,
            **flags,
            "next": {"observation": torch.from_numpy(following), "reward": torch.from_numpy(reward), **after},
            "collector": counters,
        }

    def run(self) -> int:
        for _ in range(CALLS):
            self.step()
        return CALLS * len(self._envs)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class PufferSteps(HandSteps):
    """The same, with the environments in PufferLib's `Serial`, which restarts those that are done itself."""

    def __init__(self, env_id: str, num_envs: int, make_act: Callable[[Any, Tensor], Callable[[], Chosen]]) -> None:
        import pufferlib.emulation
        import pufferlib.vector

        super().__init__(env_id, num_envs, make_act)
        made = partial(gymnasium.make, env_id, disable_env_checker=True)
        each = partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=made)
        self._vector = pufferlib.vector.make(each, num_envs=num_envs, backend=pufferlib.vector.Serial)
        self._observation[:], _ = self._vector.reset(seed=0)

    @override
    def step(self) -> Columns:
        root = self._observation.copy()
        with torch.no_grad():
            _, action, log_prob = self._act()
        following, reward, *ends, _ = self._vector.step(action.numpy())
        terminated, truncated = (torch.from_numpy(end.astype(bool)[:, None]) for end in ends)
        self._observation[:] = following
        flags, after, counters = self._counters.columns(terminated, truncated)
        beside = {"reward": torch.from_numpy(reward.astype(np.float32)[:, None]), **after}
        return {
            "observation": torch.from_numpy(root),
            "action": action,
            "action_log_prob": log_prob,
            **flags,
            "next": {"observation": torch.from_numpy(following.copy()), **beside},
            "collector": counters,
        }

    @override
    def close(self) -> None:
        self._vector.close()
        super().close()


def torch_act(env: Any, rows: Tensor) -> Callable[[], Chosen]:
    """Call the Torch network and sample with Torch's own functions."""
    module = torch_module(env)

    def categorical() -> Chosen:
        logits = module(rows)
        action = torch.multinomial(torch.softmax(logits, -1), 1)
        log_prob = torch.log_softmax(logits, -1).gather(-1, action)
        action = action.squeeze(-1)
        return action.tolist(), action, log_prob.squeeze(-1)

    def normal() -> Chosen:
        loc, scale = module(rows)
        noise = torch.randn_like(loc)
        action = loc + scale * noise
        log_prob = (-0.5 * noise * noise - scale.log() - 0.9189385).sum(-1)
        return action.numpy(), action, log_prob

    return categorical if discrete(env) else normal


def jax_act(env: Any, rows: Tensor) -> Callable[[], Chosen]:
    """Call the JAX network in one jitted call, with noise that NumPy draws for many steps."""
    params, call = packed(env, lambda noise, draw, shape: noise)
    drawn, observation = _noise(env, len(rows)), rows.numpy()

    def categorical() -> Chosen:
        action, bits = np.array(call(params, observation, next(drawn)))
        return action.tolist(), torch.from_numpy(action.astype(np.int64)), torch.from_numpy(bits.view(np.float32))

    def normal() -> Chosen:
        both = np.asarray(call(params, observation, next(drawn)))
        action = both[:, :-1].copy()
        return action, torch.from_numpy(action), torch.from_numpy(both[:, -1].copy())

    return categorical if discrete(env) else normal


def _noise(env: Any, num_envs: int) -> Any:
    rng = np.random.default_rng(0)
    draw, width = (
        (rng.gumbel, int(env.action_space.n)) if discrete(env) else (rng.standard_normal, env.action_space.shape[0])
    )
    while True:
        yield from draw(size=(AHEAD, num_envs, width)).astype(np.float32)


def tensordict_act(env: Any, rows: Tensor) -> Callable[[], Chosen]:
    """Call TorchRL's actor on a TensorDict of the observation."""
    from tensordict import TensorDict
    from tensordict.nn import InteractionType, set_interaction_type

    from benchmarks.contestants.peers import probabilistic_actor

    actor, choices = probabilistic_actor(torch_module(env), choices=discrete(env)), discrete(env)

    def act() -> Chosen:
        with set_interaction_type(InteractionType.RANDOM):
            answer = actor(TensorDict({"observation": rows}, [len(rows)]))
        action = answer["action"]
        return (action.tolist() if choices else action.numpy()), action, answer["action_log_prob"]

    return act


class TensorSteps:
    """`CALLS` steps of our Torch CartPole per run, by its own functions of all lanes."""

    def __init__(self, num_envs: int) -> None:
        import funcollect as fc

        self._env: Any = fc.envs.CartPole(num_envs=num_envs)
        self._key = _Uniform(num_envs)
        self._env_state, self._observation = self._env.reset(self._key, None)
        self._module = torch_module(gymnasium.make("CartPole-v1"))
        self._counters, self._steps = Counters(num_envs), torch.zeros(num_envs, dtype=torch.int64)

    def step(self) -> Columns:
        """One step of all lanes, and a reset of those that are done."""
        root = self._observation
        logits = self._module(root)
        action = torch.multinomial(torch.softmax(logits, -1), 1)
        log_prob = torch.log_softmax(logits, -1).gather(-1, action).squeeze(-1)
        action = action.squeeze(-1)
        moved = self._env.step(self._key, self._env_state, action, None)
        self._steps += 1
        terminated, truncated = moved.terminated[:, None], (self._steps >= 500)[:, None]
        flags, after, counters = self._counters.columns(terminated, truncated)
        self._env_state, self._observation = moved.env_state, moved.observation
        if (done := after["done"][:, 0]).any():
            fresh, start = self._env.reset(self._key, None)
            self._env_state = torch.where(done[:, None], fresh, moved.env_state)
            self._observation = torch.where(done[:, None], start, moved.observation)
            self._steps[done] = 0
        following = {"observation": moved.observation, "reward": moved.reward[:, None], **after}
        beside = {"action": action, "action_log_prob": log_prob, **flags}
        return {"observation": root, **beside, "next": following, "collector": counters}

    def run(self) -> int:
        with torch.no_grad():
            for _ in range(CALLS):
                self.step()
        return CALLS * len(self._steps)

    def close(self) -> None:
        pass


class _Uniform:
    """Uniform numbers [P, n] for the functions of an environment in Torch."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs

    def uniform(self, count: int) -> Tensor:
        return torch.rand(self._num_envs, count, dtype=torch.float64)

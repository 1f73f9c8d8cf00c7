"""The collection of algorithms over simulators on the host: as a script by hand has it, and with ours.

Each class makes its frames in `run`. Those by hand follow public single-file scripts: a loop over Gymnasium's
environments, lists or arrays of their own for the columns, Stable-Baselines3's buffer where frames are replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import funcollect as fc
from benchmarks.contestants.networks import Gaussian, tanh_mlp
from benchmarks.contestants.sac import Batch, descend
from benchmarks.contestants.sac import network as relu_mlp

Turn = Callable[[], int]  # makes frames, and returns their number
PPO, STEPS = "HalfCheetah-v5", 512  # PPO's environment, and the steps of a batch
TD3, BEFORE, CAPACITY, BATCH = "Hopper-v5", 1_000, 100_000, 256
PONG, EPSILON = "ale/Pong", 0.1
LANES, LENGTH, HIDDEN = 4, 16, 32  # of the world model


class Turns:
    """A contestant of a function that makes frames."""

    actor: Any = None  # of those that learn it

    def __init__(self, turn: Turn, close: Callable[[], object] = lambda: None) -> None:
        self.run, self.close = turn, close


class ActorCritic(nn.Module):
    """Two networks, as PPO has them: of the action and of the value."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.actor, self.critic = Gaussian(tanh_mlp(inputs, outputs)), tanh_mlp(inputs, 1)

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        loc, scale = self.actor(observation.float())
        return {"loc": loc, "scale": scale, "state_value": self.critic(observation.float())}


def _actor_critic() -> ActorCritic:
    env = gymnasium.make(PPO)
    return ActorCritic(env.observation_space.shape[0], env.action_space.shape[0])


def ppo_by_hand() -> Turns:
    """One environment; values and log-probabilities of each step, and the value after the last."""
    env, net = gymnasium.make(PPO, disable_env_checker=True), _actor_critic()
    size, actions = env.observation_space.shape[0], env.action_space.shape[0]
    current = [torch.from_numpy(env.reset(seed=0)[0]).float()[None], torch.zeros(1)]

    @torch.no_grad()
    def turn() -> int:
        observations, chosen = torch.zeros(STEPS, 1, size), torch.zeros(STEPS, 1, actions)
        log_probs, rewards, dones, values = torch.zeros(4, STEPS, 1)
        observation, done = current
        for t in range(STEPS):
            observations[t], dones[t] = observation, done
            loc, scale = net.actor(observation)
            spread = torch.distributions.Normal(loc, scale)
            action = spread.sample()
            values[t], log_probs[t], chosen[t] = net.critic(observation)[:, 0], spread.log_prob(action).sum(1), action
            following, rewards[t], terminated, truncated, _ = env.step(action[0].numpy())
            if terminated or truncated:
                following, _ = env.reset()
            observation = torch.from_numpy(following).float()[None]
            done = torch.tensor([float(terminated or truncated)])
        current[:] = observation, done
        net.critic(observation)
        return STEPS

    return Turns(turn, env.close)


def ppo() -> Turns:
    policy = fc.torch_policy(_actor_critic(), head=fc.heads.normal)
    collector = fc.SyncDataCollector(fc.make_env(PPO, num_envs=1), policy, frames_per_batch=STEPS, seed=0)

    def turn() -> int:
        batch = next(collector)
        fc.next_values(policy, None, batch)
        return int(batch.numel())

    return Turns(turn, collector.shutdown)


class _Deterministic(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = relu_mlp(inputs, outputs)

    def forward(self, observation: Tensor) -> Tensor:
        return torch.tanh(self.net(observation.float()))


class _Td3:
    """The networks, and one update: of the critics each time, of the actor every second time."""

    def __init__(self, env_id: str, seed: int) -> None:
        torch.manual_seed(seed)
        env = gymnasium.make(env_id)
        inputs, outputs = env.observation_space.shape[0], env.action_space.shape[0]
        self.actor = _Deterministic(inputs, outputs)
        self._critics = nn.ModuleList([relu_mlp(inputs + outputs, 1) for _ in range(2)])
        self._targets = copy.deepcopy(nn.ModuleList([self.actor, self._critics]))
        self._of_actor, self._of_critics = (torch.optim.Adam(each.parameters()) for each in (self.actor, self._critics))
        self._count = 0

    def update(self, batch: Batch) -> None:
        observation, action, following, reward, terminated = batch
        with torch.no_grad():
            actor, critics = self._targets
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            both = torch.cat([following, (actor(following) + noise).clamp(-1, 1)], -1)
            target = reward + 0.99 * (1 - terminated) * torch.minimum(*(each(both) for each in critics))
        both = torch.cat([observation, action], -1)
        descend(self._of_critics, sum(mse_loss(each(both), target) for each in self._critics))
        self._count += 1
        if self._count % 2 == 0:
            descend(self._of_actor, -self._critics[0](torch.cat([observation, self.actor(observation)], -1)).mean())
            for own, other in zip(self._targets.parameters(), self._own.parameters(), strict=True):
                own.data.lerp_(other.data, 0.005)

    @property
    def _own(self) -> nn.ModuleList:
        return nn.ModuleList([self.actor, self._critics])


def td3_by_hand(env_id: str = TD3, seed: int = 0) -> Turns:
    """One frame with noise, clipped, into the buffer, and a sample out, for each update."""
    from stable_baselines3.common.buffers import ReplayBuffer

    env, learner = gymnasium.make(env_id, disable_env_checker=True), _Td3(env_id, seed)
    low, high = env.action_space.low, env.action_space.high
    options: dict[str, Any] = {"device": "cpu", "handle_timeout_termination": False}
    buffer = ReplayBuffer(CAPACITY, env.observation_space, env.action_space, **options)
    current = [env.reset(seed=seed)[0]]

    def step() -> None:
        (observation,) = current
        with torch.no_grad():
            action = learner.actor(torch.from_numpy(observation[None]))
            action = (action + 0.1 * torch.randn_like(action)).numpy().clip(low, high)
        following, reward, terminated, truncated, info = env.step(action[0])
        buffer.add(observation, following, action[0], np.float32(reward), np.float32(terminated), [info])  # type: ignore[arg-type]
        current[0] = env.reset()[0] if terminated or truncated else following

    def update() -> None:
        data = buffer.sample(BATCH)
        after = data.next_observations.float(), data.rewards, data.dones
        learner.update((data.observations.float(), data.actions, *after))

    return _one_frame_at_a_time(step, update, env.close, learner.actor)


def td3(env_id: str = TD3, seed: int = 0) -> Turns:
    env = fc.make_env(env_id, num_envs=1)
    learner = _Td3(env_id, seed)
    policy = fc.torch_policy(learner.actor, head=fc.heads.clipped_normal(scale=0.1))
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(CAPACITY), batch_size=BATCH)
    states = [fc.init(env, policy, seed=seed)]

    def step() -> None:
        states[0], batch = fc.step(env, policy, states[0])
        buffer.extend(batch)

    def update() -> None:
        data = buffer.sample()
        after = data["next", "observation"].float(), data["next", "reward"], data["next", "terminated"].float()
        learner.update((data["observation"].float(), data["action"], *after))

    return _one_frame_at_a_time(step, update, lambda: fc.close(states[0]), learner.actor)


def _one_frame_at_a_time(
    step: Callable[[], None], update: Callable[[], None], close: Callable[[], object], actor: nn.Module
) -> Turns:
    for _ in range(BEFORE):
        step()

    def turn() -> int:
        for _ in range(20):
            step()
            update()
        return 20

    turns = Turns(turn, close)
    turns.actor = actor
    return turns


def dqn_by_hand() -> Turns:
    """Atari's screens, four per observation and step, epsilon-greedy, into the buffer, and a sample for four frames."""
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
    from stable_baselines3.common.buffers import ReplayBuffer

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(
        f"{PONG.replace('ale', 'ALE')}-v5", frameskip=1, repeat_action_probability=0.0, disable_env_checker=True
    )
    env = FrameStackObservation(AtariPreprocessing(game), 4)
    options: dict[str, Any] = {"device": "cpu", "optimize_memory_usage": True, "handle_timeout_termination": False}
    buffer = ReplayBuffer(10_000, env.observation_space, env.action_space, **options)
    rng, actions = np.random.default_rng(0), int(env.action_space.n)  # type: ignore[attr-defined]
    net = _of_stacks(actions)
    current = [env.reset(seed=0)[0]]

    def step() -> None:
        (observation,) = current
        if rng.random() < EPSILON:
            action = int(rng.integers(actions))
        else:
            with torch.no_grad():
                action = int(net(torch.from_numpy(observation[None])).argmax(1))
        following, reward, terminated, truncated, info = env.step(action)
        buffer.add(observation, following, np.array([action]), np.float32(reward), np.float32(terminated), [info])  # type: ignore[arg-type]
        current[0] = env.reset()[0] if terminated or truncated else following

    update = _dqn(net)

    def learn() -> None:
        data = buffer.sample(32)
        update(data.observations, data.actions, data.next_observations, data.rewards, data.dones)

    return _four_frames_per_update(step, learn, env.close)


def _of_stacks(actions: int) -> nn.Module:
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    return _Scaled(nn.Sequential(*layers, nn.Flatten(), nn.Linear(3_136, 512), nn.ReLU(), nn.Linear(512, actions)))


class _Scaled(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> Tensor:
        values: Tensor = self.net(observation / 255)
        return values


def dqn() -> Turns:
    env = fc.make_env(PONG, num_envs=1)
    net = _of_stacks(int(env.action_space.n))
    policy, update = fc.torch_policy(net, head=fc.heads.epsilon_greedy(EPSILON)), _dqn(net)
    storage = fc.LazyTensorStorage(10_000, ndim=2, frame_stack=4)
    buffer = fc.ReplayBuffer(storage=storage, batch_size=32)
    states = [fc.init(env, policy, seed=0)]

    def step() -> None:
        states[0], batch = fc.rollout(env, policy, states[0], 4)
        buffer.extend(batch)

    def learn() -> None:
        data = buffer.sample()
        after = data["next"]
        update(data["observation"], data["action"][:, None], after["observation"], after["reward"], after["terminated"])

    return _four_frames_per_update(step, learn, lambda: fc.close(states[0]), steps=1)


def _dqn(net: nn.Module) -> Callable[..., None]:
    """A function that updates the network from frames."""
    target, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters(), 1e-4)

    def update(observation: Tensor, action: Tensor, following: Tensor, reward: Tensor, terminated: Tensor) -> None:
        with torch.no_grad():
            wanted = reward + 0.99 * (1 - terminated.float()) * target(following).amax(1, keepdim=True)
        descend(optimizer, mse_loss(net(observation).gather(1, action.long()), wanted))

    return update


def _four_frames_per_update(
    step: Callable[[], None], update: Callable[[], None], close: Callable[[], object], steps: int = 4
) -> Turns:
    for _ in range(100 * steps):
        step()

    def turn() -> int:
        for _ in range(8):
            for _ in range(steps):
                step()
            update()
        return 32

    return Turns(turn, close)


class Recurrent(nn.Module):
    """A GRU over the observation and the previous action, then the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.actor = nn.GRUCell(6, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, inputs: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        before = nn.functional.one_hot(inputs["prev_action"].long(), 2).float()
        hidden = self.cell(torch.cat([inputs["observation"], before], -1), hidden)
        return self.actor(hidden), hidden


def dreamer_by_hand() -> Turns:
    """A recurrent policy that reads its last action, four environments, 16 steps for each sequence."""
    envs, net = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(LANES)], Recurrent()
    current = [
        torch.from_numpy(np.stack([env.reset(seed=lane)[0] for lane, env in enumerate(envs)])),
        torch.zeros(LANES, dtype=torch.int64),
        torch.ones(LANES, dtype=torch.bool),
        torch.zeros(LANES, HIDDEN),
    ]

    @torch.no_grad()
    def turn() -> int:
        rows: list[Any] = []
        observation, before, first, hidden = current
        for _ in range(LENGTH):
            logits, hidden = net({"observation": observation, "prev_action": before}, hidden)
            action = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]
            following, last = np.empty((LANES, 4), np.float32), np.empty((LANES, 4), np.float32)
            reward, (terminated, truncated) = np.empty(LANES, np.float32), np.zeros((2, LANES), bool)
            for lane, (env, each) in enumerate(zip(envs, action.tolist(), strict=True)):
                last[lane], reward[lane], terminated[lane], truncated[lane], _ = env.step(each)
                ended = terminated[lane] or truncated[lane]
                following[lane] = env.reset()[0] if ended else last[lane]
            outcome = map(torch.from_numpy, (last, reward, terminated, truncated))
            rows.append([observation, before, first, action, *outcome])
            first = rows[-1][-1] | rows[-1][-2]
            observation, before = torch.from_numpy(following), torch.where(first, 0, action)
            hidden = torch.where(first[:, None], 0.0, hidden)
        current[:] = observation, before, first, hidden
        [torch.stack(column, 1) for column in zip(*rows, strict=True)]
        return LANES * LENGTH

    return Turns(turn)


def dreamer() -> Turns:
    env = fc.make_env("CartPole-v1", num_envs=LANES, inputs=["prev_action", "is_first"])
    policy = fc.torch_policy(Recurrent(), head=fc.heads.categorical, initial_state=torch.zeros(HIDDEN))
    collector = fc.SyncDataCollector(env, policy, frames_per_batch=LANES * LENGTH, seed=0)
    return Turns(lambda: int(next(collector).numel()), collector.shutdown)


IMPALA_WORKERS, IMPALA_LANES, IMPALA_LENGTH = 2, 4, 32


def _act_for_ever(queue: Any, free: Any, slots: Any, weights: nn.Module, seed: int) -> None:
    """A process by hand: environments in a row, columns into slots of shared memory."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    envs = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(IMPALA_LANES)]
    observation = np.stack([env.reset(seed=seed + lane)[0] for lane, env in enumerate(envs)])
    while True:
        slot = free.get()
        if slot is None:
            return
        roots, nexts, actions, log_probs, rewards, ends = slots[slot]
        for t in range(IMPALA_LENGTH):
            with torch.no_grad():
                logits = weights(torch.from_numpy(observation))
            action = torch.multinomial(torch.softmax(logits, -1), 1)
            roots[t], actions[t] = torch.from_numpy(observation), action[:, 0]
            log_probs[t] = torch.log_softmax(logits, -1).gather(1, action)[:, 0]
            for lane, (env, each) in enumerate(zip(envs, action[:, 0].tolist(), strict=True)):
                row, rewards[t, lane], terminated, truncated, _ = env.step(each)
                nexts[t, lane], ends[t, lane] = torch.from_numpy(row), terminated or truncated
                observation[lane] = env.reset()[0] if terminated or truncated else row
        queue.put(slot)


def impala_by_hand() -> Turns:
    """Two processes, which write into slots of shared memory and queue those that are full."""
    context = torch.multiprocessing.get_context("spawn")
    queue, free = context.SimpleQueue(), context.SimpleQueue()
    shape, net = (IMPALA_LENGTH, IMPALA_LANES), tanh_mlp(4, 2).share_memory()
    kinds = [((4,), torch.float32)] * 2 + [((), torch.int64)] + [((), torch.float32)] * 2 + [((), torch.bool)]
    slots = [[torch.zeros(*shape, *tail, dtype=kind).share_memory_() for tail, kind in kinds] for _ in range(6)]
    arguments = [(queue, free, slots, net, seed) for seed in range(IMPALA_WORKERS)]
    actors = [context.Process(target=_act_for_ever, args=each, daemon=True) for each in arguments]
    for actor in actors:
        actor.start()
    for slot in range(6):
        free.put(slot)

    def turn() -> int:
        slot = queue.get()
        [column.clone() for column in slots[slot]]
        free.put(slot)
        return IMPALA_LENGTH * IMPALA_LANES

    def close() -> None:
        for actor in actors:
            actor.kill()

    return Turns(turn, close)


def impala() -> Turns:
    policy = fc.torch_policy(tanh_mlp(4, 2), head=fc.heads.categorical)
    made: Any = ["CartPole-v1"] * IMPALA_WORKERS
    keywords: dict[str, Any] = {"frames_per_batch": IMPALA_LENGTH * IMPALA_LANES, "seed": 0}
    keywords["create_env_kwargs"] = {"num_envs": IMPALA_LANES}
    collector = fc.MultiaSyncDataCollector(made, policy, **keywords)
    return Turns(lambda: int(next(collector).numel()), collector.shutdown)

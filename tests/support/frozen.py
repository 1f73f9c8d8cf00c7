"""Runs whose data must not change while the library is rebuilt. They use public names only.

`tests/test_frozen.py` pins what is exact on every machine: keys, shapes, dtypes, integers and flags. Floating numbers
depend on the processor, so `python -m benchmarks.house.frozen --before REVISION` compares them with another revision's.
"""

import hashlib
import tempfile
from pathlib import Path

import jax.numpy as jnp
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Module
from torch import nn

import funcollect as fc

STEPS = 60


def filled(module):
    """The module with fixed weights, so that no generator decides them."""
    with torch.no_grad():
        for index, weights in enumerate(module.parameters()):
            numbers = torch.arange(weights.numel(), dtype=torch.float64)
            weights.copy_((0.7 * torch.sin(numbers * 1.3 + index)).reshape(weights.shape))
    return module


def network(inputs, outputs):
    return filled(nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)))


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 6), nn.Linear(6, 2)
        filled(self)

    def forward(self, observation, hidden):
        hidden = self.cell(observation, hidden)
        return self.out(hidden), hidden


class Screens(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = filled(nn.Linear(4, 4))

    def forward(self, observation):
        return self.out(observation.float().mean((2, 3)) / 255)


def categorical(net, **options):
    return fc.torch_policy(net, head=fc.heads.categorical, **options)


def in_jax(inputs, outputs, head):
    weights = 0.7 * jnp.sin(1.3 * jnp.arange(inputs * outputs)).reshape(inputs, outputs)
    return fc.jax_policy(lambda params, x: x.reshape(len(x), -1) @ params, weights, head=head)


def actor():
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )
    return ProbabilisticTensorDictSequential(Module(network(4, 2), ["observation"], ["logits"]), draw)


def normalized(policy, env):
    """Over the statistics of some made-up observations."""
    rows = torch.sin(torch.arange(40.0)).reshape(2, 5, 4)
    stats = fc.running_statistics.init(env.observation_space)
    return fc.normalized(policy, fc.running_statistics.update(stats, TensorDict({"observation": rows}, [2, 5])))


def member(policy):
    return fc.population(policy, jnp.stack([policy.params, -policy.params]))


def by_jax(env):
    return in_jax(4, 2, fc.heads.categorical)


def by_torch(env):
    return categorical(network(4, 2))


def balanced(env):
    return normalized(fc.torch_policy(network(4, 2), head=fc.heads.normal), env)


MEMORY, HEAD = {"initial_state": torch.zeros(6), "record_state": True}, {"head": fc.heads.tanh_normal}
# The environment's name, its keywords, and its policy.
PAIRS = {
    "gymnasium, torch": ("CartPole-v1", {"num_envs": 3}, by_torch),
    "gymnasium, tensordict": ("CartPole-v1", {}, lambda _: fc.tensordict_policy(actor())),
    "gymnasium, jax": ("CartPole-v1", {"num_envs": 2}, by_jax),
    "mujoco, normal": (
        "HalfCheetah-v5", {"num_envs": 2, "max_episode_steps": 25}, lambda _: fc.torch_policy(network(17, 12), **HEAD),
    ),
    "atari, torch": ("ale/Breakout", {"num_envs": 2, "terminal_on_life_loss": True}, lambda _: categorical(Screens())),
    "torch, recurrent": ("torch/CartPole-v1", {"num_envs": 3}, lambda _: categorical(Memory(), **MEMORY)),
    "torch, jax": ("torch/CartPole-v1", {"num_envs": 3}, by_jax),
    "gymnax, lowered": ("gymnax/CartPole-v1", {"num_envs": 3}, by_torch),
    "gymnax, crossing": (
        "gymnax/CartPole-v1", {"num_envs": 3}, lambda _: categorical(network(4, 2), compile="eager"),
    ),
    "gymnax, population": ("gymnax/CartPole-v1", {"num_envs": 4}, lambda env: member(by_jax(env))),
    "brax, normalised": ("brax/inverted_pendulum", {"num_envs": 2}, balanced),
    "pgx, masked": ("pgx/tic_tac_toe", {"num_envs": 3}, fc.random_policy),
}  # fmt: skip


def pair(name):
    made, keywords, choose = PAIRS[name]
    env = fc.make_env(made, **keywords)
    policy = choose(env)
    state = fc.init(env, policy, seed=7)
    state, first = fc.rollout(env, policy, state, STEPS, max_frames_per_traj=40)
    state, second = fc.rollout(env, policy, state, STEPS, max_frames_per_traj=40)
    fc.close(state)
    return torch.cat([first, second], -1)


def _collected(build, source, **options):
    policy = categorical(network(4, 2))
    with build(source, policy, frames_per_batch=48, total_frames=144, seed=7, **options) as collector:
        return torch.cat([batch.clone() for batch in collector], -1)


def workers():
    return _collected(fc.MultiSyncDataCollector, [fc.make_env("CartPole-v1", num_envs=2)] * 2)


def ray():
    return _collected(fc.RayCollector, [fc.make_env("CartPole-v1", num_envs=2)] * 2, sync=True)


def resumed():
    env, policy = fc.make_env("CartPole-v1", num_envs=3), categorical(network(4, 2))
    state, first = fc.rollout(env, policy, fc.init(env, policy, seed=7), STEPS)
    with tempfile.TemporaryDirectory() as folder:
        fc.save(Path(folder) / "state", state)
        fc.close(state)
        state = fc.load(Path(folder) / "state", env, policy)
    state, second = fc.rollout(env, policy, state, STEPS)
    fc.close(state)
    return torch.cat([first, second], -1)


def _sampled(sampler, **storage):
    generator = torch.Generator().manual_seed(7)
    storage = fc.LazyTensorStorage(200, ndim=2, **storage)
    buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=24, generator=generator)
    env, policy = fc.make_env("CartPole-v1", num_envs=3), categorical(network(4, 2))
    state = fc.init(env, policy, seed=7)
    for _ in range(3):
        state, batch = fc.rollout(env, policy, state, 40)
        buffer.extend(batch)
    fc.close(state)
    return torch.cat([buffer.sample(), buffer.sample()])


RUNS = {
    **{name: lambda name=name: pair(name) for name in PAIRS},
    "workers": workers,
    "ray": ray,
    "resumed": resumed,
    "samples": lambda: _sampled(fc.RandomSampler()),
    "prioritized": lambda: _sampled(fc.PrioritizedSampler(200, alpha=0.6, beta=0.4)),
    "slices": lambda: _sampled(fc.SliceSampler(slice_len=4), compact_obs=True),
}


def leaves(batch):
    """The leaves of a batch by dotted key, sorted."""
    flat = batch.flatten_keys(".")
    return {key: flat[key] for key in sorted(flat.keys())}


def exact(batch):
    """A digest of keys, shapes and dtypes, and of the values of integers and flags."""
    found = hashlib.sha256(str(list(batch.batch_size)).encode())
    for key, leaf in leaves(batch).items():
        found.update(f"{key} {leaf.dtype} {list(leaf.shape)}".encode())
        if not leaf.is_floating_point():
            found.update(leaf.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]

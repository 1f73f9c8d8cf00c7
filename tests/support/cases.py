"""The environments and policies over which determinism is tested; as a script, prints a digest for every pair."""

import functools
import sys

import gymnasium
import jax
import jax.numpy as jnp
import torch
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Module
from torch import nn

import funcollect as fc
from funcollect.policies.as_policy import as_policy
from tests.support.compare import collect, digest
from tests.support.running import once

HIDDEN = 5


def make_env(name, num_envs):
    """One of the environments, cut short so that every run sees its episodes end."""
    if name == "HalfCheetah-v5":
        return fc.make_env(name, num_envs=num_envs, max_episode_steps=30)
    env = fc.make_env(name, num_envs=num_envs)
    if name.startswith("torch/"):
        env.max_episode_steps = 30
    return env


ENVS = ("CartPole-v1", "HalfCheetah-v5", "torch/CartPole-v1", "torch/Pendulum-v1")


def sizes(env):
    (inputs,) = env.observation_space.shape
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    return inputs, int(env.action_space.n) if discrete else 2 * env.action_space.shape[0]


def head_of(env):
    """A head that suits: the last of the Box ones has bounds, log-determinant and all."""
    return fc.heads.categorical if isinstance(env.action_space, gymnasium.spaces.Discrete) else fc.heads.tanh_normal


def mlp(inputs, outputs, seed=0):
    """A small network with weights of its own, the global generator left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


class Recurrent(nn.Module):
    def __init__(self, inputs, outputs, seed=0, size=HIDDEN):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.cell = nn.GRUCell(inputs, size)
            self.out = nn.Linear(size, outputs)

    def forward(self, observation, hidden):
        hidden = self.cell(observation, hidden)
        return self.out(hidden), hidden


def torch_mlp(env):
    return fc.torch_policy(mlp(*sizes(env)), head=head_of(env))


def torch_normal(env):
    head = fc.heads.normal if head_of(env) is fc.heads.tanh_normal else fc.heads.epsilon_greedy(0.3)
    return fc.torch_policy(mlp(*sizes(env)), head=head)


def torch_recurrent(env):
    return fc.torch_policy(Recurrent(*sizes(env)), head=head_of(env), initial_state=torch.zeros(HIDDEN))


def jax_weights(rows, columns, seed):
    return jax.random.normal(jax.random.PRNGKey(seed), (rows, columns)) * 0.3


def jax_mlp(env):
    inputs, outputs = sizes(env)
    params = {"in": jax_weights(inputs, 16, 0), "out": jax_weights(16, outputs, 1)}
    return fc.jax_policy(lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"], params, head=head_of(env))


def jax_keyed(env):
    inputs, outputs = sizes(env)

    def apply(params, x, key):
        return x @ params + jax.random.normal(key, (x.shape[0], outputs))

    return fc.jax_policy(apply, jax_weights(inputs, outputs, 0), head=head_of(env))


def jax_recurrent(env):
    inputs, outputs = sizes(env)
    params = [jax_weights(inputs, HIDDEN, 0), jax_weights(HIDDEN, HIDDEN, 1), jax_weights(HIDDEN, outputs, 2)]

    def apply(params, x, hidden):
        hidden = jnp.tanh(x @ params[0] + hidden @ params[1])
        return hidden @ params[2], hidden

    return fc.jax_policy(apply, params, head=head_of(env), initial_state=jnp.zeros(HIDDEN))


class Drawing(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, observation):
        answer = self.net(observation)
        return answer + torch.randn_like(answer)


class Choosing(Drawing):
    def forward(self, observation):
        return torch.multinomial(self.net(observation).softmax(-1), 1)[..., 0]


def tensordict_module(env):
    inputs, outputs = sizes(env)
    discrete = head_of(env) is fc.heads.categorical
    module = Choosing(mlp(inputs, outputs)) if discrete else Drawing(mlp(inputs, outputs // 2))
    return as_policy(Module(module, ["observation"], ["action"]), env)


def tensordict_actor(env):
    """What TorchRL's ProbabilisticActor is: a network and a distribution, which draws from the global generator."""
    inputs, outputs = sizes(env)
    discrete = head_of(env) is fc.heads.categorical
    split = nn.Sequential(mlp(inputs, outputs), nn.Identity() if discrete else LocScale())
    keys = ["logits"] if discrete else ["loc", "scale"]
    actor = ProbabilisticTensorDictSequential(
        Module(split, ["observation"], keys),
        ProbabilisticTensorDictModule(
            keys,
            ["action"],
            distribution_class=torch.distributions.Categorical if discrete else torch.distributions.Normal,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )
    return as_policy(actor, env)


class LocScale(nn.Module):
    def forward(self, answer):
        loc, scale = answer.chunk(2, -1)
        return loc, nn.functional.softplus(scale)


OF_TORCH = (torch_mlp, torch_normal, torch_recurrent)
OF_JAX = (jax_mlp, jax_keyed, jax_recurrent)
POLICIES = {make.__name__: make for make in (*OF_TORCH, *OF_JAX, tensordict_module, tensordict_actor)}
POLICIES["random"] = fc.random_policy

KINDS = [kind for kind in POLICIES if kind not in ("torch_normal", "jax_keyed", "tensordict_module")]


@functools.cache
def pair(name, kind, num_envs):
    """An environment and a policy, the same ones for all tests, so that JAX compiles each once."""
    env = make_env(name, num_envs)
    return env, POLICIES[kind](env)


def digests(num_envs, lengths, kinds):
    runs = {f"{name} {kind}": pair(name, kind, num_envs) for name, kind in once(ENVS, kinds)}
    return {case: digest(collect(env, policy, *lengths, seed=0)) for case, (env, policy) in runs.items()}


if __name__ == "__main__":
    batch_size, cuts, *chosen = sys.argv[1:]
    found = digests(int(batch_size), [*map(int, cuts.split(","))], chosen)
    print(*(f"{case}: {value}" for case, value in found.items()), sep="\n")

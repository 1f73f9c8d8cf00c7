"""Three training runs that save checkpoints, and continue from the latest one: `tests.test_checkpoint` kills them.

As a script, with a kind, a directory and a number of batches, it appends a digest of each batch to a log.
"""

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn

import funcollect as fc

EVERY = 3  # batches between two checkpoints


def digest(*tensors):
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def of_batch(batch):
    return digest(*[batch[key] for key in ("observation", "action", ("next", "reward"), ("collector", "traj_ids"))])


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def logged(directory, line):
    with open(directory / "log", "a") as file:
        file.write(f"{line}\n")


class Run:
    def __init__(self, directory, **parts):
        self.directory, self.parts = directory, parts
        self.checkpoint = fc.Checkpoint(directory / "checkpoints", keep=2)
        self.saved = {} if self.checkpoint.latest() is None else self.checkpoint.restore(**parts)
        self.start = self.saved.get("step", 0)

    def after(self, number, batch, **values):
        """Log the batch with this number, and save a checkpoint after every few."""
        logged(self.directory, f"{number} {of_batch(batch)}")
        if (number + 1) % EVERY == 0:
            self.checkpoint.save(number + 1, **self.parts | values)


def learn(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def policy_gradient(directory, batches):
    """On policy, with two workers; its minibatches are drawn from a generator of its own."""
    net, generator = network(2), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    policy = fc.torch_policy(net, head=fc.heads.categorical)
    keywords = {"frames_per_batch": 64, "seed": 0, "max_frames_per_traj": 90}
    with fc.MultiSyncDataCollector(["CartPole-v1"] * 2, policy, **keywords) as collector:
        run = Run(directory, collector=collector, policy=net, optimizer=optimizer)
        if run.saved:
            generator.set_state(run.saved["generator"])
        for number in range(run.start, batches):
            batch = next(collector)
            rows = batch.reshape(-1)
            for chosen in torch.randperm(len(rows), generator=generator).split(32):
                some = rows[chosen]
                logp = net(some["observation"]).log_softmax(-1).gather(-1, some["action"][:, None])
                learn(optimizer, (logp * some["next", "observation"][:, 2:3].abs()).mean())
            collector.update_policy_weights_()
            run.after(number, batch, generator=generator.get_state())
    return net


def dqn(directory, batches):
    net = network(2)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    policy = fc.torch_policy(net, head=fc.heads.epsilon_greedy(0.2))
    sampler, generator = fc.PrioritizedSampler(max_capacity=200, alpha=0.7, beta=0.5), torch.Generator().manual_seed(2)
    buffer = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(200), sampler=sampler, batch_size=32, generator=generator)
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.SyncDataCollector(env, policy, frames_per_batch=32, seed=4) as collector:
        run = Run(directory, collector=collector, buffer=buffer, policy=net, optimizer=optimizer)
        for number in range(run.start, batches):
            batch = next(collector)
            buffer.extend(batch.reshape(-1))
            some, info = buffer.sample(return_info=True)
            with torch.no_grad():
                after = net(some["next", "observation"]).amax(-1, keepdim=True)
                target = some["next", "reward"] + 0.9 * after * ~some["next", "terminated"]
            error = target - net(some["observation"]).gather(-1, some["action"][:, None])
            learn(optimizer, error.square().mean())
            buffer.update_priority(info["index"], error.detach()[:, 0].abs())
            run.after(number, batch)
    return net


def jax_gradient(directory, batches):
    """Rewards times log-probabilities in JAX on a fused loop, with the moments of an optimizer."""
    import jax
    import jax.numpy as jnp
    import optax

    params = {"in": 0.3 * jax.random.normal(jax.random.key(0), (4, 16)), "out": jnp.zeros((16, 2))}
    optimizer = optax.adam(3e-3)
    moments = optimizer.init(params)

    def apply(params, observation):
        return jnp.tanh(observation @ params["in"]) @ params["out"]

    def loss(params, observation, action, gain):
        logp = jnp.take_along_axis(jax.nn.log_softmax(apply(params, observation)), action[:, None], -1)
        return -(logp * gain).mean()

    @jax.jit
    def update(params, moments, *rows):
        change, moments = optimizer.update(jax.grad(loss)(params, *rows), moments)
        return optax.apply_updates(params, change), moments

    policy = fc.jax_policy(apply, params, head=fc.heads.categorical)
    env = fc.make_env("gymnax/CartPole-v1", num_envs=4)
    with fc.SyncDataCollector(env, policy, frames_per_batch=64, seed=6) as collector:
        run = Run(directory, collector=collector, policy=params, optimizer=moments)
        if run.saved:
            params, moments = run.saved["policy"], run.saved["optimizer"]
        for number in range(run.start, batches):
            batch = next(collector)
            gain = batch["next", "reward"] - batch["next", "observation"][..., 2:3].abs()
            rows = (jnp.asarray(each.flatten(0, 1).numpy()) for each in (batch["observation"], batch["action"], gain))
            params, moments = update(params, moments, *rows)
            collector.update_policy_weights_(params)
            run.after(number, batch, policy=params, optimizer=moments)
    return nn.ParameterDict({name: torch.tensor(jax.device_get(value)) for name, value in params.items()})


RUNS = {"workers": policy_gradient, "dqn": dqn, "jax": jax_gradient}


def main(kind, directory, batches):
    torch.set_num_threads(1)
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    weights = RUNS[kind](directory, int(batches))
    logged(directory, f"end {digest(*weights.state_dict().values())}")


if __name__ == "__main__":
    main(*sys.argv[1:])

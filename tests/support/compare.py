"""Runs, copies of states, batches compared bit for bit or within rounding, and samples with distributions."""

import contextlib
import hashlib
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch

import funcollect as fc
from funcollect.core.api import run
from funcollect.core.request import Request


def leaves(batch):
    """Every leaf by its path, in a fixed order."""
    named = batch.items(include_nested=True, leaves_only=True)
    paths = {(path,) if isinstance(path, str) else tuple(path): leaf for path, leaf in named}
    return dict(sorted(paths.items()))


def bits(leaf):
    plain = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one, two):
    """The same keys, shapes, dtypes and bits: of two batches, or of those in two sequences."""
    if isinstance(one, (list, tuple)):
        for pair in zip(one, two, strict=True):
            assert_same(*pair)
        return
    for path, leaf, other in _pairs(one, two):
        assert bits(leaf) == bits(other), f"{path} differs: {differing(leaf, other)}"


def assert_close(one, two):
    """The same keys, shapes, dtypes and, within rounding, numbers."""
    for path, leaf, other in _pairs(one, two):
        torch.testing.assert_close(leaf, other, atol=1e-5, rtol=1e-5, msg=lambda text, path=path: f"{path} {text}")


def _pairs(one, two):
    ones, twos = leaves(one), leaves(two)
    assert ones.keys() == twos.keys()
    assert one.batch_size == two.batch_size
    for path, leaf in ones.items():
        assert (leaf.dtype, leaf.shape) == (twos[path].dtype, twos[path].shape), path
        yield path, leaf, twos[path]


def differing(one, two):
    where = (one != two).nonzero()[:3].tolist()
    return f"{int((one != two).sum())} of {one.numel()}, first at {where}"


def digest(batch):
    """A hash of every leaf's path, shape, dtype and bits."""
    total = hashlib.sha256(str(tuple(batch.batch_size)).encode())
    for path, leaf in leaves(batch).items():
        total.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
        total.update(bits(leaf))
    return total.hexdigest()


def fresh(env, policy=None, *, seed=0, steps=0, **options):
    """An environment, or what `make_env` takes, a random policy unless one is given, and a state after some steps."""
    env = fc.make_env(env, **options)
    policy = fc.random_policy(env) if policy is None else policy
    state = fc.init(env, policy, seed=seed)
    return env, policy, fc.rollout(env, policy, state, steps)[0] if steps else state


def rollouts(env, policy, state, lengths, **options):
    """The state after rollouts of these lengths, with options of `rollout` or of collectors, and one batch of all."""
    batches = []
    for length in lengths:
        state, batch = run(env, policy, state, Request(length, **options))
        batches.append(batch)
    return state, joined(batches)


def collect(env, policy, *lengths, seed=1, **options):
    """The batch of a run in rollouts of these lengths."""
    state, batch = rollouts(env, policy, fc.init(env, policy, seed=seed), lengths, **options)
    fc.close(state)
    return batch


@contextlib.contextmanager
def compilations():
    """The programs that XLA compiles meanwhile, one entry each."""
    seen = []

    def listen(name, seconds, **details):
        seen.extend([details] if "backend_compile" in name else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def joined(batches):
    """Consecutive batches as one: time is the last batch dimension."""
    return torch.cat([batch.clone() for batch in batches], dim=batches[0].batch_dims - 1)


def by_fork(env, policy, state):
    return fc.fork(env, state)


def by_file(env, policy, state, **options):
    """Saved and loaded: what the next process would continue from."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "state"
        fc.save(path, state)
        return fc.load(path, env, policy, **options)


COPIES = {"fork": by_fork, "file": by_file}


def implausible(counts, expected):
    """Whether these counts are further from the expected ones than in 1 of 10**6 samples (Wilson and Hilferty)."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    free = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    normal = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5
    return normal > 4.75


def ks_distance(sample, cdf):
    """The Kolmogorov-Smirnov distance, times the root of the sample's size: beyond 2.2 in one case of 10,000."""
    ordered = cdf(torch.as_tensor(sample).double().flatten().sort().values).numpy()
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return len(ordered) ** 0.5 * max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())

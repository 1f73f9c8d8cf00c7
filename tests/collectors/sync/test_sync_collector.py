"""Keywords, weights and saved states of a collector, interrupting and closing it; and TorchRL's methods and names.

And what importing the library brings in.
"""

import gc
import subprocess
import sys

import gymnasium
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from funcollect.policies.as_policy import as_policy
from funcollect.policies.random_policy import RandomPolicy
from tests.support.compare import assert_same
from tests.support.misuse import Rigged, raises
from tests.support.policies import Lean, linear


def make(policy=None, *, name="CartPole-v1", frames_per_batch=20, num_envs=2, **options):
    env = fc.make_env(name, num_envs=num_envs)
    return fc.SyncDataCollector(env, policy, frames_per_batch=frames_per_batch, **{"seed": 0, **options})


def greedy(bias):
    return fc.torch_policy(linear(bias), head=fc.heads.greedy)


def jax_greedy(bias):
    params = {"w": jnp.zeros((4, 2)), "b": jnp.array([0.0, bias])}
    return fc.jax_policy(lambda p, x: x @ p["w"] + p["b"], params, head=fc.heads.greedy)


def actions(batch):
    return batch["action"].unique().tolist()


def versions(batch):
    return batch["collector", "policy_version"].unique().tolist()


SOURCES = {
    "id": ("CartPole-v1", {}),
    "namespaced id": ("torch/CartPole-v1", {}),
    "id and keywords": ("CartPole-v1", {"num_envs": 2, "max_episode_steps": 5}),
    "env": (fc.make_env("CartPole-v1", num_envs=2), {}),
    "instance": (gymnasium.make("CartPole-v1"), {}),
    "factory": (lambda: gymnasium.make("CartPole-v1"), {}),
    "factory with keywords": (lambda name: gymnasium.make(name), {"name": "CartPole-v1", "num_envs": 2}),
    "factory of an env": (lambda count: fc.make_env("torch/CartPole-v1", num_envs=count), {"count": 2}),
    "list": ([lambda: gymnasium.make("CartPole-v1"), "CartPole-v1"], {}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_create_env_fn_and_create_env_kwargs(source):
    env, kwargs = SOURCES[source]
    collector = fc.SyncDataCollector(env, frames_per_batch=20, create_env_kwargs=kwargs, seed=0)
    lanes = 2 if "keywords" in source or source in ("env", "factory of an env", "list") else None
    assert collector.env.num_envs == lanes
    batch = next(collector)
    assert batch.batch_size == ((2, 10) if lanes else (20,))
    assert batch["collector", "step"].max() < (5 if "max_episode_steps" in kwargs else 20)
    collector.shutdown()


def test_keywords_can_be_read_back_as_given():
    given = {"frames_per_batch": 7, "total_frames": 50, "max_frames_per_traj": 9, "init_random_frames": 3, "seed": 5}
    given |= dict.fromkeys(("reset_at_each_iter", "split_trajs", "update_at_each_batch", "reset_when_done"), True)
    given |= {"postproc": torch.clone, "exploration_type": fc.ExplorationType.MODE}
    collector = make(**given)
    assert {name: getattr(collector, name) for name in given} == given


def test_device_fills_those_that_are_unset():
    collector = make(device="cpu", storing_device="meta")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert (collector.env_device, collector.policy_device, collector.storing_device) == (cpu, cpu, meta)
    batch = next(collector)
    assert {leaf.device for leaf in batch.values(True, True)} == {meta}
    assert make().storing_device is None
    assert next(make(storing_device="cpu"))["action"].device == cpu


def test_policy_and_policy_factory_are_copied_only_if_they_are_elsewhere():
    policy = greedy(1.0)
    assert make(policy, policy_device="cpu").policy is policy
    assert make(policy).policy is policy
    elsewhere = fc.torch_policy(nn.Linear(4, 2, device="meta"), head=fc.heads.greedy)
    assert make(policy_factory=lambda: elsewhere, policy_device="meta").policy is elsewhere
    assert actions(next(make(policy_factory=lambda: greedy(1.0)))) == [1]
    assert isinstance(make().policy, RandomPolicy)


MODULE = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"])


@pytest.mark.parametrize("policy", [fc.torch_policy(torch.neg), fc.tensordict_policy(MODULE)])
def test_policies_that_cannot_be_placed_are_refused(policy):
    env = fc.make_env("CartPole-v1")
    assert str(as_policy(policy, env, "meta").run_device) == "meta" != str(policy.run_device)
    for other, says in ((jax_greedy(1.0), "JAX_PLATFORMS"), (fc.by_group({"a": greedy(1.0)}), "torch_policy")):
        assert as_policy(other, env, "cpu") is other
        with pytest.raises(ValueError, match=rf"policy_device is meta, but a .* runs on cpu.* {says}"):
            as_policy(other, env, "meta")
    there = fc.by_group({"a": fc.torch_policy(nn.Linear(4, 2), head=fc.heads.greedy, device="meta")})
    for placed in (there, Lean()):  # a user's own places itself
        assert as_policy(placed, env, "meta") is placed


def test_a_function_that_is_where_it_shall_be_stays_itself():
    policy = fc.torch_policy(lambda x: (x[..., 2] > 0).long())
    assert as_policy(policy, fc.make_env("CartPole-v1"), "cpu") is policy


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "in_process": True}])
def test_update_at_each_batch_counts_and_keeps_what_acts(workers):
    kind = fc.MultiSyncDataCollector if workers else fc.SyncDataCollector
    collector = kind("CartPole-v1", greedy(-1.0), frames_per_batch=20, update_at_each_batch=True, **workers)
    seen = [next(collector), next(collector)]
    collector.update_policy_weights_(greedy(1.0).params)
    seen += [next(collector), next(collector)]
    assert [versions(batch) for batch in seen] == [[0], [1], [3], [4]]
    assert [actions(batch) for batch in seen] == [[0], [0], [1], [1]]


@pytest.mark.parametrize("form", ["own", "tensordict", "dict"])
def test_a_state_dict_is_a_snapshot(form):
    policy, live = greedy(1.0), linear(1.0)
    collector = make(policy)
    if form != "own":
        params = TensorDict.from_module(live) if form == "tensordict" else dict(live.named_parameters())
        collector.update_policy_weights_(params)
    saved = collector.state_dict()
    with torch.no_grad():
        (policy.module if form == "own" else live).bias[1] = -1.0
    assert saved["policy_state_dict"]["bias"].tolist() == [0, 1]


@pytest.mark.needs("torchrl")
def test_set_seed_returns_the_next_seed_as_torchrl_does():
    from torchrl._utils import seed_generator

    collector = make(num_envs=3)
    seed = 11
    for _ in range(3):
        seed = seed_generator(seed)
    assert collector.set_seed(11) == seed
    assert collector.set_seed(11, static_seed=True) == 11
    assert collector.seed == 11
    assert_same(next(collector), next(make(num_envs=3, seed=11)))


def test_a_seed_that_was_drawn_can_be_read_and_used_again():
    drawn = make(seed=None)
    assert_same(next(drawn), next(make(seed=drawn.seed)))
    assert drawn.seed != make(seed=None).seed


def test_stats_count_frames_batches_and_time():
    collector = make()
    names = ("frames", "batches", "seconds", "frames_per_second", "policy_version")
    assert collector.stats() == {**dict.fromkeys(names, 0), "requested_frames_per_batch": 20}
    next(collector)
    collector.rollout()
    stats = collector.stats()
    assert (stats["frames"], stats["batches"]) == (40, 2)
    assert stats["frames_per_second"] == pytest.approx(40 / stats["seconds"])
    assert "frames_per_batch=20, frames=40" in repr(collector)


def of(kind, policy=None, workers=2, **kwargs):
    kwargs = {"frames_per_batch": 20, "total_frames": 60} | kwargs
    if kind == "one process":
        return fc.SyncDataCollector("CartPole-v1", policy, **kwargs)
    made = fc.MultiSyncDataCollector if kind == "sync" else fc.MultiaSyncDataCollector
    return made(["CartPole-v1"] * workers, policy, in_process=True, **kwargs)


KINDS = ["one process", "sync", "async"]
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_a_run_by_their_methods(kind):
    collector = of(kind)
    assert collector.is_running()
    assert collector.get_policy_version() == 0
    assert collector.next().numel() == 20
    collector.update_policy_weights_()
    assert collector.get_policy_version() == 1
    assert [batch.numel() for batch in collector.iterator()] == [20, 20]
    assert collector.next() is None
    assert collector.rollout().numel() == 20  # also after the end
    assert not collector.is_running()
    collector.shutdown(timeout=10.0)
    other = of(kind)
    other.async_shutdown(timeout=1.0)
    assert not other.is_running()


@each_kind
def test_the_last_frame_of_each_lane_is_truncated_and_the_episodes_go_on(kind):
    lanes = {"create_env_kwargs": {"num_envs": 2}, "workers": 1 if kind == "async" else 2}
    runs, lengths = [], [[], []]
    for set_truncated in (False, True):
        with of(kind, set_truncated=set_truncated, total_frames=400, seed=0, **lanes) as collector:
            runs.append([batch.clone() for batch in collector])
        stats = None
        for batch in runs[-1]:
            stats = fc.episode_stats(batch, stats)
            lengths[set_truncated] += stats.lengths.tolist()
    assert lengths[0] == lengths[1]
    assert max(lengths[0]) > 10
    for plain, cut in zip(*runs, strict=True):
        assert cut["next", "truncated"][..., -1, 0].all()
        assert cut["next", "done"][..., -1, 0].all()
        assert torch.equal(plain["observation"], cut["observation"])
        assert torch.equal(plain["next", "terminated"], cut["next", "terminated"])


@each_kind
@pytest.mark.parametrize("named", [False, True])
def test_weights_of_a_module(kind, named):
    module, other = linear(-1.0), linear(1.0)
    policy = fc.torch_policy(module, head=fc.heads.greedy)
    with of(kind, policy, total_frames=-1) as collector:
        for given, action in ((other, 1), (module, 0)):
            collector.update_policy_weights_(**({"policy_or_weights": given} if named else {"params": given}))
            version = collector.get_policy_version()
            while (batch := next(collector))["collector", "policy_version"].min() < version:
                pass
            assert (batch["action"] == action).all()


def test_devices_in_a_list_fill_storing_device():
    cpu = torch.device("cpu")
    for device in ("cpu", ["cpu", "cpu"]):
        with of("sync", device=device) as collector:
            assert collector.storing_device == cpu
    with pytest.raises(TypeError, match=r"storing_device is \['cpu', 'cpu'\], expected one device"):
        of("sync", storing_device=["cpu", "cpu"])


def rigged():
    """A collector whose trajectories have eight steps, and its simulators."""
    made = []

    def build():
        made.append(Rigged())
        return made[-1]

    return fc.SyncDataCollector([build, build], frames_per_batch=10, max_frames_per_traj=8, seed=0), made


def test_simulators_are_closed_by_with_and_with_a_collector_that_is_dropped():
    collector, used = rigged()
    with collector:
        next(collector)
    collector.shutdown()
    assert collector.stats()["frames"] == 10
    failing, failed = rigged()
    failed[-1].spoil = raises(ZeroDivisionError())
    with pytest.raises(fc.EnvError), failing:
        next(failing)
    refused = []
    made = {"create_env_fn": lambda: refused.append(Rigged()) or refused[-1], "frames_per_batch": 10}
    with pytest.raises(TypeError, match="has no statistics") as raised:
        fc.SyncDataCollector(**made, update_statistics=True)
    dropped, left = rigged()
    batch = next(dropped)
    del dropped
    gc.collect()
    assert [simulator.closed for simulator in (*used, *failed, *refused, *left)] == [1] * 7
    assert raised.tb is not None  # which holds the collector
    assert batch["observation"].shape == (2, 5, 2)


IMPORTS = """
import sys, funcollect
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "ray", "torchrl", "matplotlib", "tqdm"}))
collector = funcollect.SyncDataCollector("CartPole-v1", frames_per_batch=10)
next(collector)
print("jax" in sys.modules)
missing = [name for name in funcollect.__all__ if not hasattr(funcollect, name)]
print(missing, "jax_policy" in dir(funcollect), "jax" in sys.modules)
import jax  # from now on a state is a tree for it, although the library has not imported it
env = funcollect.make_env("CartPole-v1")
state = funcollect.init(env, funcollect.random_policy(env), seed=0)
print(len(jax.tree.leaves(state)) > 5)
funcollect.close(state)
"""


def test_importing_the_library_imports_neither_jax_nor_ray():
    answer = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["[]", "False", "[] True False", "True"]


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'rolout'"):
        _ = fc.rolout

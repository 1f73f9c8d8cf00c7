"""Collectors saved in mid-run and continued by others, bit for bit; other classes, keywords and networks refused."""

import gymnasium
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.collectors.worker_collector import WorkerCollector
from tests.support.cases import mlp
from tests.support.compare import assert_same
from tests.support.misuse import refused
from tests.support.running import in_soak

SYNCHRONOUS = {
    "one": (fc.SyncDataCollector, lambda: lanes(3), {}),
    "workers": (fc.MultiSyncDataCollector, lambda: [lanes(2), lanes(2)], {}),
    "prefetch": (fc.MultiSyncDataCollector, lambda: [lanes(2), lanes(2)], {"prefetch": True}),
    "in process": (fc.MultiSyncDataCollector, lambda: [lanes(2), lanes(2)], {"in_process": True, "cat_results": 0}),
}


def lanes(count, name="CartPole-v1"):
    def make():
        return fc.make_env(name, num_envs=count)

    return make


def actor(seed=0):
    return fc.torch_policy(mlp(4, 2, seed), head=fc.heads.categorical)


def perturbed(policy, number):
    """As an optimizer does, by a function of the batch's number."""
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.01 * (number + 1))


def build(kind, policy, **others):
    collector, make, keywords = SYNCHRONOUS[kind]
    return collector(make(), policy, **{"frames_per_batch": 60, "seed": 3, **keywords, **others})


def trained(collector, policy, numbers):
    """Batches, with new weights after each."""
    batches = []
    for number in numbers:
        batches.append(next(collector).clone())
        perturbed(policy, number)
        collector.update_policy_weights_()
    return batches


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_a_loaded_collector_delivers_the_batches_that_would_have_come(kind, tmp_path):
    policy, again = actor(), actor(1)
    with build(kind, policy, max_frames_per_traj=25) as collector:
        for count in (0, 1, 3):
            trained(collector, policy, range(count))
            collector.save(tmp_path / "run")
            wanted = trained(collector, policy, range(7, 10))
            kind_of, make, keywords = SYNCHRONOUS[kind]
            local = {"in_process": True} if keywords.get("in_process") else {}
            with kind_of.load(tmp_path / "run", make(), again, **local) as other:
                assert (other.seed, other.options.max_frames_per_traj) == (3, 25)
                got = trained(other, again, range(7, 10))
                for one, two in zip(wanted, got, strict=True):
                    assert_same(one, two)
                assert other.frames == collector.frames
                assert other.stats()["batches"] == collector.stats()["batches"]
                assert other.get_policy_version() == collector.get_policy_version()


@pytest.mark.parametrize("kind", ["one", "prefetch"])
def test_a_collector_is_restored_in_place_more_than_once(kind, tmp_path):
    policy = actor()
    with build(kind, policy) as collector:
        trained(collector, policy, range(2))
        collector.save(tmp_path / "run")
        wanted = trained(collector, policy, range(4))
        for _ in range(2):
            collector.restore(tmp_path / "run")
            for one, two in zip(wanted, trained(collector, policy, range(4)), strict=True):
                assert_same(one, two)


class Walk(gymnasium.Env):
    """A random walk, of which no other instance can be made: it has no spec."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = np.zeros(2, np.float32), 0
        return self.place, {}

    def step(self, action):
        self.steps += 1
        self.place = (self.place + 0.1 * (action + self.np_random.normal(size=2))).clip(-9, 9).astype(np.float32)
        return self.place, 1.0, self.steps == 13, False, {}


class Tired(Walk):
    """Raises at each step while there is a certain file."""

    def __init__(self, file):
        self.file = file

    def step(self, action):
        if self.file.exists():
            raise RuntimeError("too tired")
        return super().step(action)


@pytest.mark.parametrize("in_process", [True, False])
def test_workers_go_on_after_a_replay_in_which_an_environment_raised(in_process, tmp_path):
    file, run = tmp_path / "tired", tmp_path / "run"
    make = [lambda: Tired(file)] * 2
    with fc.MultiSyncDataCollector(make, frames_per_batch=20, seed=0, in_process=in_process) as collector:
        next(collector)
        collector.save(run)
        wanted = next(collector).clone()
        file.touch()
        with pytest.raises(fc.EnvError, match="too tired"):
            collector.restore(run)
        file.unlink()
        next(collector)
        collector.restore(run)
        assert_same(next(collector), wanted)


@pytest.mark.parametrize("episodes", ["continue", "restart"])
def test_an_instance_goes_on_itself(episodes, tmp_path):
    with fc.SyncDataCollector(Walk(), None, frames_per_batch=20, seed=0) as collector:
        next(collector)
        collector.save(tmp_path / "run", episodes=episodes)
        wanted = next(collector).clone()
    with fc.SyncDataCollector.load(tmp_path / "run", Walk(), None, episodes=episodes) as collector:
        batch = next(collector).clone()
        collector.restore(tmp_path / "run", episodes=episodes)
        assert_same(next(collector), batch)
    if episodes == "continue":
        assert_same(batch, wanted)
    else:
        assert batch["collector", "traj_ids"].min() > wanted["collector", "traj_ids"].min()


def test_an_instance_that_functions_have_changed_does_not_go_back(tmp_path):
    with fc.SyncDataCollector(Walk(), None, frames_per_batch=20, seed=0) as collector:
        next(collector)
        collector.save(tmp_path / "run")
        collector.apply(lambda lane: setattr(lane.unwrapped, "wind", 1.0))
        with pytest.raises(fc.ReplayError, match="functions were applied"):
            collector.restore(tmp_path / "run")
        assert next(collector).numel() == 20


@pytest.mark.needs("torchrl")
def test_an_instance_of_torchrls_begins_new_episodes(tmp_path):
    from torchrl.envs import GymEnv

    with fc.SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=20, seed=0) as collector:
        ids = next(collector)["collector", "traj_ids"].max()
        collector.save(tmp_path / "run", episodes="restart")
    instance = GymEnv("CartPole-v1")
    with fc.SyncDataCollector.load(tmp_path / "run", instance, None, episodes="restart") as collector:
        assert next(collector)["collector", "traj_ids"].min() > ids


@pytest.mark.parametrize("local", [True, *in_soak([False])])
def test_given_params_are_saved_as_such(local, tmp_path):
    policy, params = actor(), {name: value + 1 for name, value in mlp(4, 2).state_dict().items()}
    with build("workers", policy, in_process=local) as collector:
        collector.update_policy_weights_(params)
        next(collector)
        collector.save(tmp_path / "run")
        wanted = next(collector).clone()
        collector.update_policy_weights_()
        own = next(collector).clone()
        with fc.MultiSyncDataCollector.load(tmp_path / "run", [lanes(2)] * 2, actor(), in_process=local) as other:
            assert_same(next(other), wanted)
            other.update_policy_weights_()
            assert_same(next(other), own)


@pytest.mark.parametrize("kind", ["one", "in process"])
def test_given_params_of_jax_keep_their_structure(kind, tmp_path):
    policy = fc.jax_policy(
        lambda params, x: x @ params["layers"][0], {"layers": [jnp.zeros((4, 2))]}, head=fc.heads.categorical
    )
    with build(kind, policy) as collector:
        collector.update_policy_weights_({"layers": [jnp.ones((4, 2))]})
        next(collector)
        collector.save(tmp_path / "run")
        wanted = next(collector).clone()
        collector.restore(tmp_path / "run")
        assert optree.tree_structure(collector.params) == optree.tree_structure(policy.params)
        assert jnp.array_equal(collector.params["layers"][0], jnp.ones((4, 2)))
        assert_same(next(collector), wanted)


def by_lane(batches):
    """The observations and ids of each worker's rollouts, in their order."""
    lanes = {}
    for batch in batches:
        lanes.setdefault(int(batch["collector", "lane"].reshape(-1)[0]), []).append(batch)
    return {lane: torch.cat(parts, -1) for lane, parts in lanes.items()}


@pytest.mark.parametrize("local", [True, False])
def test_an_asynchronous_run_loses_and_repeats_no_frame(local, tmp_path):
    policy = actor()
    sources = [lanes(2), lanes(2)]
    keywords = {"frames_per_batch": 20, "seed": 5, "in_process": local}
    with fc.MultiaSyncDataCollector(sources, policy, **keywords) as collector:
        first = [next(collector).clone() for _ in range(4)]
        held = next(collector)
        first.append(held.clone())
        collector.save(tmp_path / "run")
        assert collector.stats()["copies"] == 0  # it holds ready batches, and the reader one
        rest = [next(collector).clone() for _ in range(12)]
        with fc.MultiaSyncDataCollector.load(tmp_path / "run", sources, actor(), in_process=local) as other:
            assert other.frames == 5 * 20
            again = [next(other).clone() for _ in range(12)]
    whole, resumed = by_lane(first + rest), by_lane(first + again)
    for lane in whole.keys() | resumed.keys():
        length = min(whole[lane].shape[-1], resumed[lane].shape[-1])
        assert length > 20
        assert_same(whole[lane][..., :length], resumed[lane][..., :length])
        steps = resumed[lane]["collector", "step"]
        ids = resumed[lane]["collector", "traj_ids"]
        onward = ids[:, 1:] == ids[:, :-1]
        assert (steps[:, 1:][onward] == steps[:, :-1][onward] + 1).all()
        assert (steps[:, 1:][~onward] == 0).all()


def test_new_episodes_begin_if_asked_for(tmp_path):
    policy = actor()
    with build("workers", policy, in_process=True) as collector:
        last = next(collector).clone()
        collector.save(tmp_path / "run", episodes="restart")
        with fc.MultiSyncDataCollector.load(tmp_path / "run", [lanes(2)] * 2, policy, in_process=True) as other:
            batch = next(other)
            assert (batch["collector", "step"][..., 0] == 0).all()
            assert batch["collector", "traj_ids"].min() > last["collector", "traj_ids"].min()
            assert not set(batch["collector", "traj_ids"].unique().tolist()) & set(
                last["collector", "traj_ids"].unique().tolist()
            )


def test_a_run_that_was_interrupted_is_saved_as_it_would_go_on(tmp_path):
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.SyncDataCollector(env, frames_per_batch=40, seed=1) as collector:
        next(collector)
        collector._interrupted = True
        collector.save(tmp_path / "run")
        with fc.SyncDataCollector.load(tmp_path / "run", lambda: fc.make_env("CartPole-v1", num_envs=2)) as other:
            assert_same(next(other), next(collector))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda path: fc.MultiaSyncDataCollector.load(path, [lanes(2)] * 2, actor()), ("that of a MultiSync", "use")),
        (lambda path: fc.MultiSyncDataCollector.load(path, [lanes(2)] * 3, actor()), ("3 entries", "expected 2")),
        (lambda path: load(path, frames_per_batch=8), ("frames_per_batch is 8, but 40 in the saved run",)),
        (lambda path: load(path, seed=8), ("seed is 8, but 3 in the saved run",)),
        (lambda path: load(path, max_frames_per_traj=8), ("max_frames_per_traj is 8, but None",)),
        (lambda path: load(path, exploration_type=fc.ExplorationType.DETERMINISTIC), ("exploration_type", "RANDOM")),
        (lambda path: load(path, environments=[lanes(3)] * 2), ("[2, 2] lanes in a batch, these have [3, 3]",)),
        (lambda path: load(path, environments=[lanes(2, "Acrobot-v1")] * 2), ("shape",)),
        (lambda path: load(path, network=nn.Linear(4, 2)), ("the policy",)),
        (lambda path: load(path, episodes="again"), ("episodes is 'again', expected one of ['continue', 'restart']",)),
    ],
)
def test_another_run_is_refused(load, words, tmp_path):
    with build("in process", actor(), frames_per_batch=40) as collector:
        collector.save(tmp_path / "run")
    if words[0] == "shape" or words[0] == "the policy":
        with pytest.raises((ValueError, fc.WorkerError)):
            load(tmp_path / "run")
        return
    with refused(ValueError, words):
        load(tmp_path / "run")


@pytest.mark.parametrize("head", [fc.heads.categorical, fc.heads.epsilon_greedy(0.9)], ids=lambda head: head.name)
def test_a_run_with_another_head_is_refused(head, tmp_path):
    def collector(head):
        policy = fc.torch_policy(nn.Linear(4, 2), head=head)
        return fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=5, seed=0)

    with collector(fc.heads.epsilon_greedy(0.1)) as saved, collector(head) as other:
        saved.save(tmp_path / "run")
        with refused(ValueError, (f"the policy's head is {head.name}", "but epsilon_greedy(epsilon=0.1) in the saved")):
            other.restore(tmp_path / "run")


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_a_run_with_another_clip_is_refused(kind, tmp_path):
    def collector(clip):
        policy = (
            fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)
            if kind == "torch"
            else fc.jax_policy(lambda params, x: x @ params, jnp.zeros((4, 2)), head=fc.heads.categorical)
        )
        stats = fc.running_statistics.init(fc.make_env("CartPole-v1").observation_space, backend=kind)
        return fc.SyncDataCollector("CartPole-v1", fc.normalized(policy, stats, clip=clip), frames_per_batch=5, seed=0)

    with collector(10.0) as saved, collector(10.0) as alike, collector(5.0) as other:
        saved.save(tmp_path / "run")
        alike.restore(tmp_path / "run")
        with refused(ValueError, ("the policy's clip is 5.0, but 10.0 in the saved run",)):
            other.restore(tmp_path / "run")


def load(path, environments=None, network=None, **keywords):
    environments = [lanes(2)] * 2 if environments is None else environments
    policy = actor() if network is None else fc.torch_policy(network, head=fc.heads.categorical)
    return fc.MultiSyncDataCollector.load(path, environments, policy, in_process=True, **keywords)


class Of(nn.Module):
    """A linear network of another dtype than the observations."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(4, 2).to(dtype)

    def forward(self, observation):
        return self.layer(observation.to(self.layer.weight.dtype))


@pytest.mark.parametrize("kind", ["one", "in process"])
def test_weights_of_another_dtype_are_refused(kind, tmp_path):
    collector, make, _ = SYNCHRONOUS[kind]
    with build(kind, fc.torch_policy(Of(torch.float32), head=fc.heads.categorical)) as running:
        next(running)
        running.save(tmp_path / "run")
    with refused(ValueError, ("parameter layer.bias is torch.float64, the saved one torch.float32", "build")):
        collector.load(tmp_path / "run", make(), fc.torch_policy(Of(torch.float64), head=fc.heads.categorical))


def test_what_cannot_be_saved_is_refused_and_the_run_goes_on(tmp_path):
    def make():
        return fc.envs.from_envpool("CartPole-v1", num_envs=2)

    with fc.MultiSyncDataCollector([make, make], None, frames_per_batch=40, in_process=True) as collector:
        next(collector)
        with refused(fc.ReplayError, ("cannot be saved in mid-episode", "episodes='restart'")):
            collector.save(tmp_path / "run")
        assert not list(tmp_path.iterdir())
        next(collector)
        collector.save(tmp_path / "run", episodes="restart")
        next(collector)


def test_weights_are_in_the_file_once(tmp_path):
    policy = fc.torch_policy(mlp(4, 2), head=fc.heads.categorical)
    policy.module.register_buffer("large", torch.zeros(100_000))
    with build("in process", policy) as collector:
        assert isinstance(collector, WorkerCollector)
        next(collector)
        collector.save(tmp_path / "run")
    assert (tmp_path / "run").stat().st_size < 600_000


@pytest.mark.parametrize("kind", ["sync", "multi"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_statistics_beside_parameters_that_are_passed_go_on(backend, kind, tmp_path):
    """As in a functional loop: the pair of other parameters and the policy's statistics is passed after each batch."""
    rs, weight = fc.running_statistics, torch.linspace(-1, 1, 8).reshape(4, 2)

    def policy():
        stats = rs.init(fc.make_env("CartPole-v1").observation_space, backend=backend)
        if backend == "jax":
            base = fc.jax_policy(lambda params, x: x @ params, jnp.asarray(weight.numpy()), head=fc.heads.categorical)
        else:
            linear = nn.Linear(4, 2, bias=False)
            linear.load_state_dict({"weight": weight.T})
            base = fc.torch_policy(linear, head=fc.heads.categorical)
        return fc.normalized(base, stats)

    def times(params, factor):
        return params * factor if backend == "jax" else {"weight": params["weight"] * factor}

    workers = {} if kind == "sync" else {"num_workers": 2, "in_process": True}
    make = fc.SyncDataCollector if kind == "sync" else fc.MultiSyncDataCollector
    one = policy()
    with make("CartPole-v1", one, frames_per_batch=40, seed=0, update_statistics=True, **workers) as run:
        for factor in (2.0, 3.0):
            next(run)
            run.update_policy_weights_((times(one.params[0], factor), one.statistics))
        run.save(tmp_path / "run")
        wanted = next(run).clone()
    other = policy()
    with make.load(tmp_path / "run", "CartPole-v1", other, **workers) as run:
        assert_same(next(run), wanted)
    assert_same_leaves(one.statistics, other.statistics)


def assert_same_leaves(one, two):
    for each, other in zip(optree.tree_leaves(one), optree.tree_leaves(two), strict=True):
        assert np.array_equal(each, other)


def test_exploration_is_saved_and_compared_and_a_schedule_has_to_be_passed_again(tmp_path):
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.torch_policy(nn.Linear(4, 2), head=fc.heads.epsilon_greedy(0.05))
    common = {"frames_per_batch": 20, "seed": 0}

    def epsilon(run):
        with run:
            return float(next(run)["collector", "exploration", "epsilon"][0, 0])

    with fc.SyncDataCollector(env, policy, exploration={"epsilon": 0.9}, **common) as run:
        run.save(tmp_path / "constant")
    assert epsilon(fc.SyncDataCollector.load(tmp_path / "constant", env, policy)) == pytest.approx(0.9)
    with (
        fc.SyncDataCollector(env, policy, exploration={"epsilon": 0.3}, **common) as run,
        pytest.raises(ValueError, match=r"exploration is \{'epsilon': 0.3\}, but \{'epsilon': 0.9\}"),
    ):
        run.restore(tmp_path / "constant")
    schedule = {"epsilon": lambda frames: 0.5}
    with fc.SyncDataCollector(env, policy, exploration=schedule, **common) as run:
        run.save(tmp_path / "schedule")
    with pytest.raises(ValueError, match="functions are not saved: pass exploration="):
        fc.SyncDataCollector.load(tmp_path / "schedule", env, policy)
    assert epsilon(fc.SyncDataCollector.load(tmp_path / "schedule", env, policy, exploration=schedule)) == 0.5


@pytest.mark.parametrize("kind", ["one", "in process"])
@pytest.mark.parametrize("half", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), jnp.float32(0.5)], ids=type)
def test_keywords_of_numpy_torch_and_jax_are_saved_as_plain_numbers(half, kind, tmp_path):
    policy = fc.torch_policy(nn.Linear(4, 2), head=fc.heads.epsilon_greedy(0.05))
    frames = np.int64(20) if kind == "one" else (np.int64(20), 20)
    given = {"frames_per_batch": frames, "max_frames_per_traj": np.int64(9), "reset_at_each_iter": np.bool_(True)}
    with build(kind, policy, exploration={"epsilon": half}, **given) as run:
        run.save(tmp_path / "run")
    collector, make, others = SYNCHRONOUS[kind]
    others = {name: value for name, value in others.items() if name == "in_process"}
    for keywords in ({}, given | {"exploration": {"epsilon": 0.5}}, {"exploration": {"epsilon": half}}):
        with collector.load(tmp_path / "run", make(), policy, **others, **keywords) as other:
            assert (other.max_frames_per_traj, other.reset_at_each_iter) == (9, True)
            assert next(other)["collector", "exploration", "epsilon"].unique().tolist() == [0.5]


def test_a_loaded_run_meets_failures_as_the_saved_one_did(tmp_path):
    with build("in process", actor(), on_failure="restart", timeout=7, start_timeout=90.0) as collector:
        collector.save(tmp_path / "run")
    for given, wanted in (({}, ("restart", 7, 90)), ({"on_failure": "raise", "timeout": 8}, ("raise", 8, 90))):
        with load(tmp_path / "run", **given) as other:
            assert (other.on_failure, other.timeout, other.start_timeout) == wanted
            other.restore(tmp_path / "run")
            assert (other.on_failure, other.timeout, other.start_timeout) == wanted


@pytest.mark.parametrize("kind", ["sync", "multi"])
def test_a_loaded_state_does_not_count_the_batch_of_the_run_before(kind):
    stats = fc.running_statistics.init(fc.make_env("CartPole-v1").observation_space)
    policy = fc.normalized(fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical), stats)
    workers = {} if kind == "sync" else {"num_workers": 2, "in_process": True}
    make = fc.SyncDataCollector if kind == "sync" else fc.MultiSyncDataCollector
    with make("CartPole-v1", policy, frames_per_batch=40, seed=0, update_statistics=True, **workers) as run:
        begun = run.state_dict()
        next(run)
        run.load_state_dict(begun)
        next(run)
        assert int(policy.statistics.count) == 0


def test_parameters_given_to_one_worker_leave_the_policy_its_own_weights(tmp_path):
    policy, again = actor(), actor(1)
    with build("workers", policy) as collector:
        trained(collector, policy, range(2))
        other = {name: weight + 0.5 for name, weight in policy.module.state_dict().items()}
        collector.update_policy_weights_(other, worker_ids=[1])
        collector.save(tmp_path / "run")
        wanted = trained(collector, policy, range(3))
    kind_of, make, _ = SYNCHRONOUS["workers"]
    with kind_of.load(tmp_path / "run", make(), again) as collector:
        assert collector.params is None
        for one, two in zip(wanted, trained(collector, again, range(3)), strict=True):
            assert_same(one, two)

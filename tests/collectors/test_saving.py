"""Collectors saved in mid-run and continued by others, bit for bit; other classes, keywords and networks refused."""

import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from torch import nn

import funcollect as fc
from tests.collectors.conftest import over
from tests.support.cases import mlp
from tests.support.compare import assert_same
from tests.support.envs.light_envs import Nested
from tests.support.misuse import refused
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, in_soak
from tests.support.workers import TRANSPORTS, by_lane, check_trajectories

rs = fc.running_statistics
LOCAL = {"in_process": True}
KINDS = {"one": {}, "workers": {}, "prefetch": {"prefetch": True}, "in process": LOCAL}
KINDS["columns"] = {**LOCAL, "cat_results": 0}
HERE = pytest.mark.parametrize("kind", ["one", "in process"])


def lanes(count, name="CartPole-v1"):
    return lambda: fc.make_env(name, num_envs=count)


def actor(seed=0):
    return fc.torch_policy(mlp(4, 2, seed), head=fc.heads.categorical)


def build(kind, policy, **others):
    one = kind == "one"
    collector, env = (fc.SyncDataCollector, lanes(3)) if one else (fc.MultiSyncDataCollector, [lanes(2), lanes(2)])
    return collector(env, policy, **{"frames_per_batch": 60, "seed": 3, **KINDS[kind], **others})


def loaded(kind, path, policy, **others):
    if kind == "one":
        return fc.SyncDataCollector.load(path, lanes(3), policy, **others)
    return load(path, policy=policy, in_process="in_process" in KINDS[kind], **others)


def trained(collector, policy, numbers):
    """Batches, with new weights after each, which are a function of the batch's number."""
    batches = []
    for number in numbers:
        batches.append(next(collector).clone())
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.add_(0.01 * (number + 1))
        collector.update_policy_weights_()
    return batches


def assert_all_same(one, two):
    for each, other in zip(one, two, strict=True):
        assert_same(each, other)


@pytest.mark.parametrize("kind", ["one", "prefetch", "columns", *in_soak(["workers"])])
def test_a_loaded_collector_delivers_the_batches_that_would_have_come(kind, tmp_path):
    policy, again = actor(), actor(1)
    with build(kind, policy, max_frames_per_traj=25) as collector:
        for count in (0, 1, 3):
            trained(collector, policy, range(count))
            collector.save(tmp_path / "run")
            wanted = trained(collector, policy, range(7, 10))
            with loaded(kind, tmp_path / "run", again) as other:
                assert (other.seed, other.options.max_frames_per_traj) == (3, 25)
                assert_all_same(wanted, trained(other, again, range(7, 10)))
                for name in ("frames", "batches", "policy_version"):
                    assert other.stats()[name] == collector.stats()[name]
            collector.restore(tmp_path / "run")  # in place
            assert_all_same(wanted, trained(collector, policy, range(7, 10)))


class Walk(Nested):
    """Has no spec, so no other instance can be made. It raises while there is a certain file."""

    def __init__(self, tired=None):
        self.tired = tired

    def step(self, action):
        if self.tired is not None and self.tired.exists():
            raise RuntimeError("too tired")
        return super().step(action)


@pytest.mark.parametrize("in_process", [True, False])
def test_workers_go_on_after_a_replay_in_which_an_environment_raised(in_process, tmp_path):
    file, run = tmp_path / "tired", tmp_path / "run"
    make = [lambda: Walk(file)] * 2
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
        collector.save(tmp_path / "run")
        collector.apply(lambda lane: setattr(lane.unwrapped, "wind", 1.0))
        with pytest.raises(fc.ReplayError, match="functions were applied"):
            collector.restore(tmp_path / "run")
        assert next(collector).numel() == 20
    if episodes == "continue":
        assert_same(batch, wanted)
    else:
        assert batch["collector", "traj_ids"].min() > wanted["collector", "traj_ids"].min()


@pytest.mark.needs("torchrl")
def test_an_instance_of_torchrls_begins_new_episodes(tmp_path):
    from torchrl.envs import GymEnv

    with fc.SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=20, seed=0) as collector:
        ids = next(collector)["collector", "traj_ids"].max()
        collector.save(tmp_path / "run", episodes="restart")
    with fc.SyncDataCollector.load(tmp_path / "run", GymEnv("CartPole-v1"), None, episodes="restart") as collector:
        assert next(collector)["collector", "traj_ids"].min() > ids


def linear_in_jax(weight):
    return fc.jax_policy(lambda params, x: x @ params["layers"][0], {"layers": [weight]}, head=fc.heads.categorical)


@pytest.mark.parametrize("kind", ["one", "in process", *in_soak(["workers"])])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_given_params_are_saved_as_such_and_keep_their_structure(backend, kind, tmp_path):
    one, two = (actor(), actor()) if backend == "torch" else map(linear_in_jax, [jnp.zeros((4, 2))] * 2)
    given = {name: value + 1 for name, value in one.state_dict().items()}
    with build(kind, one) as collector, build(kind, two) as other:
        collector.update_policy_weights_(given if backend == "torch" else {"layers": [jnp.ones((4, 2))]})
        next(collector)
        collector.save(tmp_path / "run")
        wanted = next(collector).clone()
        collector.update_policy_weights_()
        own = next(collector).clone()
        other.restore(tmp_path / "run")
        if backend == "jax":
            assert optree.tree_structure(other.params) == optree.tree_structure(one.params)
        assert_same(next(other), wanted)
        other.update_policy_weights_()
        assert_same(next(other), own)


def test_parameters_given_to_one_worker_leave_the_policy_its_own_weights(tmp_path):
    policy, again = actor(), actor(1)
    with build("workers", policy) as collector:
        trained(collector, policy, range(2))
        other = {name: weight + 0.5 for name, weight in policy.module.state_dict().items()}
        collector.update_policy_weights_(other, worker_ids=[1])
        collector.save(tmp_path / "run")
        wanted = trained(collector, policy, range(3))
    with loaded("workers", tmp_path / "run", again) as collector:
        assert collector.params is None
        assert_all_same(wanted, trained(collector, again, range(3)))


@pytest.mark.parametrize("transport", [*TRANSPORTS, pytest.param("ray", marks=(*AN_EVENING_OVER_RAY, FORKS_OF_RAY))])
@pytest.mark.usefixtures("ray_cluster_if_marked")
def test_an_asynchronous_run_loses_and_repeats_no_frame(transport, tmp_path):
    sources, local = [lanes(2), lanes(2)], {} if transport == "ray" else {"in_process": transport == "serial"}
    keywords = {"create_env_fn": sources, "policy": actor(), "frames_per_batch": 20, "seed": 5}
    with over(transport, fc.MultiaSyncDataCollector, **keywords) as collector:
        first = [next(collector).clone() for _ in range(4)]
        held = next(collector)
        first.append(held.clone())
        collector.save(tmp_path / "run")
        assert collector.stats()["copies"] == 0  # it holds ready batches, and the reader one
        rest = [next(collector).clone() for _ in range(12)]
        with type(collector).load(tmp_path / "run", sources, actor(), **local) as other:
            assert other.frames == 5 * 20
            again = [next(other).clone() for _ in range(12)]
    whole, resumed = by_lane(first + rest), by_lane(first + again)
    for lane in whole.keys() | resumed.keys():
        length = min(len(whole[lane]), len(resumed[lane]))
        assert length > 20
        assert_same(whole[lane][:length], resumed[lane][:length])
    check_trajectories(first + again)


def test_new_episodes_begin_if_asked_for(tmp_path):
    with build("in process", actor()) as collector:
        last = next(collector).clone()
        collector.save(tmp_path / "run", episodes="restart")
        with loaded("in process", tmp_path / "run", actor()) as other:
            batch = next(other)
    assert (batch["collector", "step"][..., 0] == 0).all()
    one, two = ({*each["collector", "traj_ids"].unique().tolist()} for each in (last, batch))
    assert not one & two


def test_a_run_that_was_interrupted_is_saved_as_it_would_go_on(tmp_path):
    with build("one", actor()) as collector:
        next(collector)
        collector._interrupted = True
        collector.save(tmp_path / "run")
        with loaded("one", tmp_path / "run", actor()) as other:
            assert_same(next(other), next(collector))


def load(path, kind=fc.MultiSyncDataCollector, env=(2,), workers=2, policy=None, in_process=True, **keywords):
    return kind.load(path, [lanes(*env)] * workers, policy or actor(), in_process=in_process, **keywords)


@pytest.mark.parametrize(("other", "words"), [
    ({"kind": fc.MultiaSyncDataCollector}, ("that of a MultiSync", "use")),
    ({"workers": 3}, ("3 entries", "expected 2")),
    ({"frames_per_batch": 8}, ("frames_per_batch is 8, but 60 in the saved run",)),
    ({"seed": 8}, ("seed is 8, but 3 in the saved run",)),
    ({"max_frames_per_traj": 8}, ("max_frames_per_traj is 8, but None",)),
    ({"exploration_type": fc.ExplorationType.DETERMINISTIC}, ("exploration_type", "RANDOM")),
    ({"env": (3,)}, ("[2, 2] lanes in a batch, these have [3, 3]",)),
    ({"env": (2, "Acrobot-v1")}, None),
    ({"policy": fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)}, None),
    ({"episodes": "again"}, ("episodes must be one of ['continue', 'restart'], but is 'again'",)),
])  # fmt: skip
def test_another_run_is_refused(other, words, tmp_path):
    with build("in process", actor()) as collector:
        collector.save(tmp_path / "run")
    with pytest.raises((ValueError, fc.WorkerError)) if words is None else refused(ValueError, words):
        load(tmp_path / "run", **other)


def normalized(policy, backend="torch", **keywords):
    return fc.normalized(policy, rs.init(fc.make_env("CartPole-v1").observation_space, backend=backend), **keywords)


def with_head(head):
    return fc.torch_policy(nn.Linear(4, 2), head=head)


def with_clip(clip, backend="torch"):
    return normalized(linear_in_jax(jnp.zeros((4, 2))) if backend == "jax" else actor(), backend, clip=clip)


def of_dtype(dtype):
    """A linear network of another dtype than the observations."""

    class Of(nn.Linear):
        def forward(self, observation):
            return super().forward(observation.to(dtype))

    return fc.torch_policy(Of(4, 2, dtype=dtype), head=fc.heads.categorical)


EPSILON = "but epsilon_greedy(epsilon=0.1) in the saved"
CLIP = ("the policy's clip is 5.0, but 10.0 in the saved run",)
DTYPE = ("parameter bias is torch.float64, the saved one torch.float32", "build")


@HERE
@pytest.mark.parametrize(("make", "saved", "other", "words"), [
    (with_head, fc.heads.epsilon_greedy(0.1), fc.heads.categorical, ("head is categorical", EPSILON)),
    (with_head, fc.heads.epsilon_greedy(0.1), fc.heads.epsilon_greedy(0.9), ("head is epsilon_greedy", EPSILON)),
    (with_clip, 10.0, 5.0, CLIP),
    (lambda clip: with_clip(clip, "jax"), 10.0, 5.0, CLIP),
    (of_dtype, torch.float32, torch.float64, DTYPE),
])  # fmt: skip
def test_a_run_with_another_policy_is_refused(make, saved, other, words, kind, tmp_path):
    with build(kind, make(saved)) as running, build(kind, make(other)) as different:
        next(running)
        running.save(tmp_path / "run")
        running.restore(tmp_path / "run")
        with refused(ValueError, words):
            different.restore(tmp_path / "run")


def test_what_cannot_be_saved_is_refused_and_the_run_goes_on(tmp_path):
    make = [lambda: fc.envs.from_envpool("CartPole-v1", num_envs=2)] * 2
    with fc.MultiSyncDataCollector(make, None, frames_per_batch=40, in_process=True) as collector:
        next(collector)
        with refused(fc.ReplayError, ("cannot be saved in mid-episode", "episodes='restart'")):
            collector.save(tmp_path / "run")
        assert not list(tmp_path.iterdir())
        next(collector)
        collector.save(tmp_path / "run", episodes="restart")
        next(collector)


def test_weights_are_in_the_file_once(tmp_path):
    policy = actor()
    policy.module.register_buffer("large", torch.zeros(100_000))
    with build("in process", policy) as collector:
        next(collector)
        collector.save(tmp_path / "run")
    assert (tmp_path / "run").stat().st_size < 600_000


@HERE
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_statistics_beside_parameters_that_are_passed_go_on(backend, kind, tmp_path):
    """As in a functional loop: the pair of other parameters and the policy's statistics is passed after each batch."""
    weight = torch.linspace(-1, 1, 8).reshape(4, 2)

    def policy():
        if backend == "jax":
            return normalized(linear_in_jax(jnp.asarray(weight.numpy())), backend)
        linear = nn.Linear(4, 2, bias=False)
        linear.load_state_dict({"weight": weight.T})
        return normalized(fc.torch_policy(linear, head=fc.heads.categorical), backend)

    one, other = policy(), policy()
    with build(kind, one, update_statistics=True) as run:
        for factor in (2.0, 3.0):
            next(run)
            larger = optree.tree_map(lambda leaf, factor=factor: leaf * factor, one.params[0])
            run.update_policy_weights_((larger, one.statistics))
        run.save(tmp_path / "run")
        wanted = next(run).clone()
    with loaded(kind, tmp_path / "run", other) as run:
        assert_same(next(run), wanted)
    for each, again in zip(optree.tree_leaves(one.statistics), optree.tree_leaves(other.statistics), strict=True):
        assert np.array_equal(each, again)


@HERE
def test_a_loaded_state_does_not_count_the_batch_of_the_run_before(kind):
    policy = normalized(actor())
    with build(kind, policy, update_statistics=True) as run:
        begun = run.state_dict()
        next(run)
        run.load_state_dict(begun)
        next(run)
        assert int(policy.statistics.count) == 0


def test_exploration_is_saved_and_compared_and_a_schedule_has_to_be_passed_again(tmp_path):
    policy = with_head(fc.heads.epsilon_greedy(0.05))

    def epsilon(run):
        with run:
            return float(next(run)["collector", "exploration", "epsilon"][0, 0])

    build("one", policy, exploration={"epsilon": 0.9}).save(tmp_path / "constant")
    assert epsilon(loaded("one", tmp_path / "constant", policy)) == pytest.approx(0.9)
    says = r"exploration is \{'epsilon': 0.3\}, but \{'epsilon': 0.9\}"
    with build("one", policy, exploration={"epsilon": 0.3}) as run, pytest.raises(ValueError, match=says):
        run.restore(tmp_path / "constant")
    schedule = {"epsilon": lambda frames: 0.5}
    build("one", policy, exploration=schedule).save(tmp_path / "schedule")
    with pytest.raises(ValueError, match="functions are not saved: pass exploration="):
        loaded("one", tmp_path / "schedule", policy)
    assert epsilon(loaded("one", tmp_path / "schedule", policy, exploration=schedule)) == 0.5


@HERE
@pytest.mark.parametrize("half", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), jnp.float32(0.5)], ids=type)
def test_keywords_of_numpy_torch_and_jax_are_saved_as_plain_numbers(half, kind, tmp_path):
    policy = with_head(fc.heads.epsilon_greedy(0.05))
    frames = np.int64(20) if kind == "one" else (np.int64(20), 20)
    given = {"frames_per_batch": frames, "max_frames_per_traj": np.int64(9), "reset_at_each_iter": np.bool_(True)}
    with build(kind, policy, exploration={"epsilon": half}, **given) as run:
        run.save(tmp_path / "run")
    for keywords in ({}, given | {"exploration": {"epsilon": 0.5}}, {"exploration": {"epsilon": half}}):
        with loaded(kind, tmp_path / "run", policy, **keywords) as other:
            assert (other.max_frames_per_traj, other.reset_at_each_iter) == (9, True)
            assert next(other)["collector", "exploration", "epsilon"].unique().tolist() == [0.5]


def test_a_loaded_run_meets_failures_as_the_saved_one_did(tmp_path):
    with build("in process", actor(), on_failure="restart", timeout=7, start_timeout=90.0) as collector:
        collector.save(tmp_path / "run")
    for given, wanted in (({}, ("restart", 7, 90)), ({"on_failure": "raise", "timeout": 8}, ("raise", 8, 90))):
        with load(tmp_path / "run", **given) as other:
            other.restore(tmp_path / "run")
            assert (other.on_failure, other.timeout, other.start_timeout) == wanted

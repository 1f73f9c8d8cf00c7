"""TorchRL's environments against TorchRL's own loop, given the seed and the actions that were taken."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_tag_v3
from tensordict import TensorDict
from torchrl import data, envs
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from torchrl.envs import Compose, GymEnv, PendulumEnv, RenameTransform, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.libs.pettingzoo import PettingZooWrapper
from torchrl.modules import QValueActor

import funcollect as fc
from funcollect.envs import from_torchrl
from funcollect.envs.torchrl_specs import action_spec, observation_space
from funcollect.keys import Purpose, fold, key_from_seed
from funcollect.specs import ActionSpec
from funcollect.testing import ENV_CHECKS, check_env
from tests.support.cases import mlp
from tests.support.compare import assert_same, bits, collect, fresh, leaves
from tests.support.running import in_soak

LENGTH = 90


def cartpole(**kwargs):
    return GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs)


def one_hot():
    return GymEnv("CartPole-v1")


def transforms():
    return Compose(
        StepCounter(max_steps=15),
        envs.RewardSum(),
        envs.InitTracker(),
        envs.DoubleToFloat(),
        envs.ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]),
        envs.CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["frames"]),
    )


def transformed():
    return TransformedEnv(cartpole(), transforms())


ENVS = {
    "single": cartpole,
    "one_hot": one_hot,
    "pendulum": lambda: TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(20)),
    "serial": lambda: SerialEnv(3, cartpole),
    "transformed": transformed,
    "serial of transformed": lambda: SerialEnv(3, transformed),
    "transformed serial": lambda: TransformedEnv(SerialEnv(3, cartpole), transforms()),
    "renamed": lambda: TransformedEnv(cartpole(), RenameTransform(["observation"], [("a", "b")], create_copy=False)),
    "noop": lambda: TransformedEnv(cartpole(), envs.NoopResetEnv(noops=4, random=True)),
    "drawing as it is built": lambda: TransformedEnv(PendulumEnv(), StepCounter(20)),
}

FEW = ["one_hot", "drawing as it is built", "pendulum", "serial", "transformed", "transformed serial", "noop"]


def own_loop(env, seed, actions):
    """TorchRL's loop with actions by key: every step's TensorDict, stacked over time, the last batch dimension."""
    first, lanes = fold(key_from_seed(seed), Purpose.RESET, 0, 0)[0], len(env.batch_size)
    with torch.random.fork_rng():
        torch.manual_seed(first)
        env.set_seed(first)
        root, rows = env.reset(), []
        for at in range(min(action.shape[lanes] for action in actions.values())):
            for key, action in actions.items():
                root.set(key, action.select(lanes, at))
            row, root = env.step_and_maybe_reset(root)
            rows.append(row.clone())
    env.close(raise_if_closed=False)
    return torch.stack(rows, lanes)


def check_keys(batch, own, *more):
    """A batch has the keys of TorchRL's own, bit for bit, but for a lane's action, and some of its own beside."""
    wanted, got = leaves(own.exclude("action")), leaves(batch.exclude("collector", "action"))
    assert got.keys() - wanted.keys() <= {*more}
    for path, leaf in wanted.items():
        assert (got[path].dtype, got[path].shape) == (leaf.dtype, leaf.shape), path
        assert bits(got[path]) == bits(leaf), path


AGGREGATED = ("next", "reward"), ("truncated",), ("next", "truncated")  # of groups


@pytest.mark.parametrize("name", [*FEW, *in_soak(name for name in ENVS if name not in FEW)])
def test_every_key_is_that_of_torchrls_own_loop(name):
    env = fc.make_env(ENVS[name])
    batch = collect(env, fc.random_policy(env), LENGTH, seed=3)
    check_keys(batch, own_loop(ENVS[name](), 3, {"action": batch["action"]}))
    assert batch["next", "done"].sum() > 1  # episodes ended, and their last observations were compared
    if "step_count" in batch:  # of a transform
        assert torch.equal(batch["step_count"][..., 0], batch["collector", "step"])


@pytest.mark.evening
def test_a_parallel_env_is_driven_loses_a_process_starts_anew_and_is_closed():
    parallel = envs.ParallelEnv(2, cartpole, mp_start_method="spawn")
    env, serial = fc.make_env(parallel), fc.make_env(lambda: SerialEnv(2, cartpole))
    policy = fc.random_policy(env)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=3), LENGTH)
    assert_same(batch, collect(serial, policy, LENGTH, seed=3))
    lose(parallel._workers[1])
    with pytest.raises(fc.EnvError, match=r"(worker 1 |At least one process failed|still running).*funcollect\.rec"):
        fc.rollout(env, policy, state, 1)
    state, batch = fc.rollout(env, policy, fc.recover(env, state), 2)
    assert batch["collector", "step"].tolist() == [[0, 1], [0, 1]]
    lose(parallel._workers[0])
    fc.close(state)
    assert parallel.is_closed
    assert not any(process.is_alive() for process in parallel._workers)
    assert torch.get_num_threads() == 1


def lose(process):
    process.kill()
    process.join()


def test_lanes_are_reset_from_outside_in_the_middle_of_an_episode():
    env, policy, state = fresh(ENVS["transformed serial"], steps=4)
    state = fc.reset(env, state, torch.tensor([True, False, True]))
    state, batch = fc.rollout(env, policy, state, 3, max_frames_per_traj=6)
    assert batch["step_count"][..., 0].tolist() == [[0, 1, 2], [4, 5, 0], [0, 1, 2]]
    assert batch["collector", "step"].tolist() == [[0, 1, 2], [4, 5, 0], [0, 1, 2]]
    assert batch["frames"][0, 0].unfold(-1, 4, 4).unique(dim=0).shape[0] == 1  # the first frame, three times
    assert fc.reset(env, state).observation["step_count",].sum() == 0


@pytest.mark.parametrize("name", ["single", "serial", "transformed"])
def test_a_finished_lane_stays_finished_where_that_was_asked_for(name):
    with fc.SyncDataCollector(ENVS[name], frames_per_batch=180, reset_when_done=False, seed=0) as collector:
        batch = next(collector)
    done = batch["done"][..., 0]
    assert done.any()
    assert torch.equal(done.int().cummax(-1).values, done.int())
    assert (batch["next", "reward"][done] == 0).all()
    assert torch.equal(batch["observation"][done], batch["next", "observation"][done])


def test_the_global_generator_is_left_as_it_was():
    batches = []
    for seed in (0, 99):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        env = fc.make_env(ENVS["noop"])
        batches.append(collect(env, fc.random_policy(env), 20))
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(*batches)


class Team(envs.EnvBase):
    """Natively batched; a nested action of two choices, a nested float64 observation, a reward under another key."""

    def __init__(self, device="cpu"):
        super().__init__(device=device, batch_size=[2])
        place = Composite(place=Unbounded((2, 3), dtype=torch.float64), shape=(2,))
        self.observation_spec = Composite(agent=place, shape=(2,))
        self.action_spec = Composite(agent=Composite(move=MultiOneHot([2, 3], shape=(2, 5)), shape=(2,)), shape=(2,))
        self.reward_spec = Composite(gain=Unbounded((2, 1)), shape=(2,))
        self.done_spec = Categorical(2, dtype=torch.bool, shape=(2, 1))

    def _reset(self, tensordict):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            self.place = torch.zeros(2, 3, dtype=torch.float64)
        else:
            self.place = torch.where(mask, 0, self.place)
        return TensorDict({"agent": {"place": self.place.clone()}}, [2])

    def _step(self, tensordict):
        move = tensordict["agent", "move"]
        assert (move.dtype, tensordict.device) == (torch.bool, self.device)
        self.place = self.place + torch.stack([move[:, 0], move[:, 2], move[:, 3]], -1)
        over = self.place[:, :1] >= 3
        gain = self.place.sum(-1, keepdim=True).float()
        return TensorDict({"agent": {"place": self.place.clone()}, "gain": gain, "done": over}, [2])

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def test_nested_keys_and_other_encodings():
    env = from_torchrl(Team, dtype="float64")
    assert (env.num_envs, env.action_spec.shape, env.seeding) == (2, (5,), "run")
    batch = collect(env, fc.random_policy(env), 40)
    assert batch["agent", "place"].dtype == torch.float64
    assert batch["action"].shape == (2, 40, 5)
    torch.testing.assert_close(batch["next", "reward"], batch["next", "agent", "place"].sum(-1, keepdim=True).float())
    assert torch.equal(batch["next", "terminated"], batch["next", "done"])
    assert torch.equal(batch["next", "done"][..., 0], batch["next", "agent", "place"][..., 0] == 3)
    assert not batch["next", "truncated"].any()
    assert collect(from_torchrl(Team), fc.random_policy(env), 3)["agent", "place"].dtype == torch.float32


def test_a_collector_takes_a_factory_and_its_keywords():
    kwargs = {"frame_skip": 2, "dtype": "float64"}
    with fc.SyncDataCollector(cartpole, frames_per_batch=20, create_env_kwargs=kwargs) as collector:
        batch = next(collector)
    assert batch["observation"].dtype == torch.float64
    assert batch["next", "reward"].max() == 2


def test_an_instance_backs_one_state():
    env, policy, state = fresh(cartpole())
    with pytest.raises(ValueError, match="pass a factory"):
        fc.init(env, policy, seed=0)
    with pytest.raises(fc.ReplayError, match="seeded by run"):
        fc.fork(env, state)
    fc.close(state)
    with pytest.raises(ValueError, match="or did until that was closed"):
        fc.init(env, policy, seed=0)


def test_a_list_is_pointed_to_a_serial_env():
    for lanes in ([cartpole, cartpole], [cartpole(), cartpole()]):
        with pytest.raises(TypeError, match=r"TorchRL's GymEnv.*SerialEnv\(num_envs, factory\)"):
            fc.SyncDataCollector(lanes, frames_per_batch=9)


@pytest.mark.parametrize("hot", [True, False])
def test_an_action_in_the_other_encoding_names_one_hot(hot):
    env = fc.make_env("CartPole-v1", num_envs=3, one_hot=not hot)
    space = "one_hot" if hot else "categorical"
    actor = QValueActor(torch.nn.Linear(4, 2), in_keys=["observation"], action_space=space)
    says = "environment with one_hot=True" if hot else "environment without one_hot=True"
    with fc.SyncDataCollector(env, actor, frames_per_batch=9) as collector, pytest.raises(fc.PolicyError, match=says):
        next(collector)


class Failing(Team):
    def _step(self, tensordict):
        raise RuntimeError("out of order")


class Rewards(Team):
    def __init__(self):
        super().__init__()
        self.reward_spec = Composite(gain=Unbounded((2, 2)), shape=(2,))


@pytest.mark.parametrize(("make", "kwargs", "error", "message"), [
    (3, {}, TypeError, "int, expected a torchrl.envs.EnvBase or a factory"),
    (lambda: 3, {}, TypeError, "the factory returned int"),
    (cartpole, {"info_keys": ["x"]}, TypeError, "info_keys cannot be given.*build it that way"),
    (cartpole(), {"frame_skip": 2}, TypeError, "frame_skip cannot be given with an environment that is built"),
    (Rewards, {}, ValueError, r"'gain' has shape \[2\], expected one number"),
    (lambda: TransformedEnv(cartpole(), RenameTransform(["observation"], ["a.b"])), {}, ValueError, "holds a dot"),
    (lambda: SerialEnv(2, lambda: SerialEnv(2, cartpole)), {}, ValueError, r"\[2, 2\], expected \[\] or \[P\]"),
])  # fmt: skip
def test_what_cannot_be_driven_is_said(make, kwargs, error, message):
    with pytest.raises(error, match=message):
        from_torchrl(make, **kwargs)


def test_what_an_environment_raises_names_it_and_a_reset_goes_on():
    env, policy, state = fresh(Failing)
    with pytest.raises(fc.EnvError, match=r"Failing: step raised RuntimeError\('out of order'\)"):
        fc.rollout(env, policy, state, 3)
    assert fc.recover(env, state).observation["agent", "place"].sum() == 0


class Wider(GymEnv):
    def _step(self, tensordict):
        return super()._step(tensordict).set("observation", torch.zeros(7))


def test_a_lane_is_named_once():
    env, policy, state = fresh(Wider, env_name="CartPole-v1", num_envs=2)
    with pytest.raises(fc.EnvError, match=r"^lane 0: observation"):
        fc.rollout(env, policy, state, 3)


CHECKED = ["one_hot", "drawing as it is built", "serial"]


@pytest.mark.parametrize("name", [*CHECKED, *in_soak(name for name in ENVS if name not in CHECKED)])
def test_every_check_of_an_environment_passes(name):
    report = check_env(ENVS[name], steps=100)
    idle = {"fork", "save", "lanes_alone", "own_resets", "groups"} | (set() if "serial" in name else {"reset_mask"})
    assert {*report.passed} == {check.__name__ for check in ENV_CHECKS} - idle, str(report)


def endless():
    return cartpole(max_episode_steps=-1)


@pytest.mark.parametrize(("make", "truncates"), [
    (cartpole, True), (endless, False), (PendulumEnv, False), (ENVS["pendulum"], True),
    (lambda: TransformedEnv(endless(), Compose(envs.RewardSum(), StepCounter())), False),
    (lambda: SerialEnv(2, cartpole), True), (lambda: SerialEnv(2, [cartpole, endless]), False),
    (lambda: TransformedEnv(SerialEnv(2, endless), StepCounter(9)), True),
])  # fmt: skip
def test_it_is_known_to_truncate_where_something_counts_its_steps(make, truncates):
    assert from_torchrl(make).truncates == truncates


def test_functions_of_a_single_environment():
    for make in (cartpole, ENVS["transformed"], lambda: SerialEnv(1, cartpole)):
        env, policy, state = fresh(make, steps=3)
        if env.num_envs is None:
            state, names = fc.apply(env, state, lambda lane: type(lane).__name__)
            assert names == [type(make()).__name__]
        else:
            with pytest.raises(TypeError, match="has no object for each lane"):
                fc.apply(env, state, repr)
        fc.rollout(env, policy, state, 3)


@pytest.mark.parametrize(("spec", "wanted"), [
    (Unbounded((3,)), spaces.Box(-np.inf, np.inf, (3,))),
    (Bounded(-1, [1.0, 2.0], (2,), dtype=torch.float64), spaces.Box(-1, np.array([1.0, 2.0]), dtype=np.float64)),
    (Bounded(0, 255, (3, 8, 8), dtype=torch.uint8), spaces.Box(0, 255, (3, 8, 8), np.uint8)),
    (Unbounded((1,), dtype=torch.int32), spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32)),
    (Categorical(4), spaces.Discrete(4)),
    (Categorical(4, shape=(2,)), spaces.Box(0, 3, (2,), np.int64)),
    (Categorical(2, shape=(1,), dtype=torch.bool), spaces.Box(0, 1, (1,), bool)),
    (MultiCategorical([2, 5]), spaces.Box(0, np.array([1, 4]), dtype=np.int64)),
    (OneHot(4, dtype=torch.int64), spaces.Box(0, 1, (4,), np.int64)),
    (Binary(3), spaces.Box(0, 1, (3,), np.int8)),
    (Composite(a=Composite(b=Categorical(4))), spaces.Dict(a=spaces.Dict(b=spaces.Discrete(4)))),
])  # fmt: skip
def test_spaces_of_observations(spec, wanted):
    assert observation_space(spec) == wanted


@pytest.mark.parametrize(("spec", "space", "hot"), [
    (Categorical(4), spaces.Discrete(4), False),
    (Categorical(4, shape=(2,)), spaces.MultiDiscrete([4, 4]), False),
    (MultiCategorical([2, 5]), spaces.MultiDiscrete([2, 5]), False),
    (OneHot(4), spaces.Discrete(4), True),
    (MultiOneHot([2, 5]), spaces.MultiDiscrete([2, 5]), True),
    (Binary(3), spaces.MultiBinary((3,)), False),
    (Bounded(-2, 2, (1,)), spaces.Box(-2, 2, (1,)), False),
    (Unbounded((2,)), spaces.Box(-np.inf, np.inf, (2,)), False),
])  # fmt: skip
def test_actions_keep_their_encoding(spec, space, hot):
    assert action_spec(spec) == ActionSpec(space, one_hot=hot)
    assert action_spec(spec).shape == tuple(spec.shape)


@pytest.mark.parametrize(("convert", "spec", "message"), [
    (observation_space, Composite(text=data.NonTensor(())), "'text' is NonTensor"),
    (observation_space, Unbounded((2,), dtype=torch.bfloat16), "a dtype that NumPy has"),
    (observation_space, Unbounded((-1,)), "its shape varies"),
    (action_spec, OneHot(4, shape=(2, 4)), r"one-hot action has shape \[2, 4\], expected \[4\]"),
    (action_spec, Composite(a=Binary(2)), "the action spec is Composite"),
])  # fmt: skip
def test_what_has_no_space_is_said(convert, spec, message):
    with pytest.raises(TypeError, match=message):
        convert(spec)


def tag(max_cycles=8, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the version of PettingZoo
        return PettingZooWrapper(simple_tag_v3.parallel_env(max_cycles=max_cycles), **kwargs)


@pytest.mark.filterwarnings("ignore")  # about the version of PettingZoo
def test_random_actions_follow_the_masks_of_groups():
    """Which TorchRL has beside the observation; a move that is not allowed raises."""
    from pettingzoo.classic import tictactoe_v3

    env = fc.make_env(lambda: PettingZooWrapper(tictactoe_v3.raw_env(), use_mask=True, categorical_actions=True))
    assert collect(env, fc.random_policy(env), 60)["next", "done"].sum() > 5


GROUPED = {
    "pettingzoo": tag,
    "serial of pettingzoo": lambda: SerialEnv(2, tag),
    "masks": lambda: TransformedEnv(tag(use_mask=True, done_on_any=False), StepCounter()),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_have_the_keys_and_values_of_torchrls_own_loop(name):
    env = fc.make_env(GROUPED[name])
    batch = collect(env, fc.random_policy(env), 20, seed=3)
    actions = {(group, "action"): batch[group, "action"] for group in env.groups}
    check_keys(batch, own_loop(GROUPED[name](), 3, actions), *AGGREGATED)
    assert batch["next", "done"].any()
    sums = sum(batch["next", group, "reward"].sum((-1, -2)) for group in env.groups)
    torch.testing.assert_close(batch["next", "reward"][..., 0], sums)


def test_a_policy_for_each_group_of_lanes_of_torchrls():
    nets = {"adversary": 16, "agent": 14}
    own = {name: fc.torch_policy(mlp(size, 5), head=fc.heads.categorical) for name, size in nets.items()}
    batches = [
        collect(fc.make_env(tag, num_envs=2, **spread), fc.by_group(own), 20) for spread in ({}, {"num_workers": 2})
    ]
    assert_same(*batches)
    rows = fc.agents_as_rows(batches[0], "adversary")
    assert rows["next", "reward"].shape == (2, 3, 20, 1)

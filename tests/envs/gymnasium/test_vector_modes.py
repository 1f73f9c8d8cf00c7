"""Vector environments that reset their lanes in any of Gymnasium's ways: no last observation and no step is lost."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

import funcollect as fc
from funcollect.core.api import run
from funcollect.core.request import Request
from funcollect.keys import Purpose, fold, key_from_seed
from tests.envs.conftest import VECTORS
from tests.support.cases import POLICIES
from tests.support.compare import assert_same, collect, fresh
from tests.support.plain import check_lanes
from tests.support.running import FORKS_OF_RAY, once

pytestmark = FORKS_OF_RAY  # and those of `AsyncVectorEnv`
DISABLED, NEXT_STEP, SAME_STEP = AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
P = 3


def cartpole():
    return gymnasium.make("CartPole-v1", max_episode_steps=15)


class Informed(gymnasium.Env):
    """Counts to an end that differs between episodes; its observation is a dict."""

    observation_space = spaces.Dict(count=spaces.Box(0, 99, (1,)), end=spaces.Discrete(9))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.end = 0, int(self.np_random.integers(3, 9))
        return self.seen(), {"left": self.end}

    def seen(self):
        return {"count": np.full(1, self.count, np.float32), "end": self.end}

    def step(self, action):
        self.count += 1
        left = self.end - self.count
        return self.seen(), float(action), left == 0, False, {"left": left}


def data(vector, steps=(1, 25, 14), *, policy=fc.random_policy, limit=None, **kwargs):
    env = fc.make_env(vector, **kwargs)
    return collect(env, policy(env), *steps, seed=0, max_frames_per_traj=limit)


@pytest.mark.parametrize(("kind", "limit"), once(VECTORS, [None, 6]))
def test_a_mask_comes_before_the_next_step(kind, limit):
    """So the data of NEXT_STEP are those of DISABLED, also where a limit cuts, and can be forked."""
    modes = DISABLED, NEXT_STEP
    assert_same(*(data(VECTORS[kind]([cartpole] * P, autoreset_mode=mode), limit=limit) for mode in modes))
    build = partial(VECTORS[kind], [cartpole] * P, autoreset_mode=NEXT_STEP)
    env, policy, state = fresh(build() if kind == "here" else build, steps=9, seed=1)  # a second instance would spawn
    other = fc.fork(env, state)
    assert_same(fc.rollout(env, policy, state, 9)[1], fc.rollout(env, policy, other, 9)[1])


@pytest.mark.parametrize(("kind", "limit"), once(VECTORS, [2, None]))
def test_what_begins_in_the_same_step(kind, limit):
    batch = data(VECTORS[kind]([Informed] * P, autoreset_mode=SAME_STEP), info_keys=["left"], limit=limit)
    check_lanes(batch, lambda: TimeLimit(Informed(), limit or 99), 0, info_keys=["left"], reseed=False)
    assert batch["next", "done"].sum() > P


def test_a_second_state_of_an_instance_resets_by_the_same_mode():
    vector = SyncVectorEnv([Informed] * P, autoreset_mode=SAME_STEP)
    assert_same(data(vector), data(vector))


def test_resets_of_what_resets_itself():
    """By a mask that it takes, or of all lanes."""
    env, policy, state = fresh(lambda: SyncVectorEnv([Informed] * P, autoreset_mode=SAME_STEP), steps=2)
    assert (env.seeding, env.forking) == ("lane", "none")
    state = fc.reset(env, state, torch.tensor([False, True, False]))
    _, batch = fc.rollout(env, policy, state, 1)
    assert batch["count"][:, 0, 0].tolist() == [2, 0, 2]
    assert fc.evaluate(env, policy, episodes=4, seed=0).lengths.min() >= 3
    fc.testing.check_env(env, steps=30)


def test_a_reset_that_is_refused_leaves_the_state_as_it_is():
    for make, options in ((late, {}), (Plain, {"autoreset_mode": "SAME_STEP"})):
        env, policy, state = fresh(make(), steps=2, **options)
        other, its_policy, wanted = fresh(make(), steps=2, **options)
        with pytest.raises(fc.EnvError, match="a reset within an episode"):
            fc.reset(env, state, torch.arange(env.num_envs) == 1)
        assert_same(fc.rollout(env, policy, state, 20)[1], fc.rollout(other, its_policy, wanted, 20)[1])


def test_lanes_that_stayed_finished_begin_with_their_own_observation():
    vector = SyncVectorEnv([Informed] * P, autoreset_mode=SAME_STEP)
    env, policy, state = fresh(vector)
    state, _ = run(env, policy, state, Request(20, reset_when_done=False))
    state, batch = fc.rollout(env, policy, fc.reset(env, state), 2)
    assert batch["count"][..., 0].tolist() == [[0, 1]] * P
    assert torch.equal(batch["end"][:, 0], batch["end"][:, 1])


class Reticent(Informed):
    """The last step of an episode has no infos."""

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, {} if answer[2] else info


def test_lanes_that_recover_begin_other_episodes_from_their_seeds():
    env, policy, state = fresh(SyncVectorEnv([Reticent] * P, autoreset_mode=SAME_STEP), info_keys=["left"])
    with pytest.raises(fc.EnvError, match="returned no info key 'left'"):
        fc.rollout(env, policy, state, 20)
    state = fc.recover(env, state)
    _, batch = fc.rollout(env, policy, state, 2)
    assert batch["count"][..., 0].tolist() == [[0, 1]] * P
    seeds = [fold(key_from_seed(0), Purpose.RESET, lane, 1)[0] for lane in range(P)]
    assert batch["end"][:, 0].tolist() == [np.random.default_rng(seed).integers(3, 9) for seed in seeds]


class Plain(VectorEnv):
    """Lanes without a mask, which count to four; it does not say how it resets."""

    num_envs, spec = P, None
    single_observation_space, single_action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        assert options is None
        assert seed is None or isinstance(seed, int)
        self.count = np.arange(P)
        return self.seen(), {}

    def seen(self):
        return self.count[:, None].astype(np.float32)

    def step(self, actions):
        self.count = self.count + 1
        over, final = self.count >= 4, self.seen()
        self.count = np.where(over, 0, self.count)
        return self.seen(), np.ones(P), over, over & False, {"final_obs": final}


class Together(Plain):
    """All lanes end at once, and the step that resets them has no infos; the others write them into the same array."""

    at = np.zeros((P, 1))

    def step(self, actions):
        self.count = np.where(self.count == 4, 0, self.count[0] + 1)
        self.at[:, 0] = self.count
        infos = {"at": self.at} if self.count.any() else {}
        return self.seen(), np.ones(P), self.count == 4, self.count < 0, infos


def test_infos_where_one_step_resets_all_lanes():
    batch = data(Together(), info_keys=["at"], autoreset_mode="NEXT_STEP")
    assert batch["next", "info", "at"][0, 4:12, 0].tolist() == [1, 2, 3, 4] * 2


class Some(Plain):
    """Reports the last observations of some lanes, and says of which."""

    def step(self, actions):
        *answer, info = super().step(actions)
        return *answer, info | {"_final_obs": answer[2] & (np.arange(P) > 0)}


def test_processes_that_reset_again_after_a_mask_do_so_without_one():
    """Those of Gymnasium without shared memory."""
    build = partial(AsyncVectorEnv, [Informed] * P, autoreset_mode=NEXT_STEP, shared_memory=False)
    batch = data(build, steps=(30, 9))
    count, ends = batch["next", "count"][..., 0], batch["next", "terminated"][..., 0]
    assert torch.equal(batch["count"][..., 0], count - 1)
    assert torch.equal(ends, count == batch["end"])
    assert ends.sum() > P


LATE = 5


def late(max_episode_steps=15):
    """Takes no mask, and resets a lane in the next step, with one generator for all lanes."""
    return CartPoleVectorEnv(num_envs=LATE, max_episode_steps=max_episode_steps)


def compact(vector):
    with fc.SyncDataCollector(fc.make_env(vector), None, frames_per_batch=50, compact_obs=True) as collector:
        next(collector)


@pytest.mark.parametrize("kind", ["random", "torch_recurrent", "jax_mlp"])
def test_lanes_that_make_their_next_step_later(kind):
    """The transitions are those of the raw vector, without the steps that reset; rows beyond open the next batch."""
    env = fc.make_env(late)
    policy, lengths, most = POLICIES[kind](env), (1, 25, 14, 2, 60), 0
    state, batches = fc.init(env, policy, seed=0), []
    seed = fold(key_from_seed(0), Purpose.RESET, 0, 0)[0]
    for length in lengths:
        state, batch = fc.rollout(env, policy, state.replace(policy_version=len(batches)), length)
        batches.append(batch)
        most = max(most, state.env_state.simulation.carried.ahead.max())
    batch = torch.cat(batches, 1)
    raw, made, resets = late(), np.zeros(LATE, int), np.zeros(LATE, bool)
    seen, _ = raw.reset(seed=seed)
    action = batch["action"].numpy()
    while made.min() < sum(lengths):
        before, sent = seen, np.array([action[lane, min(each, len(action[0]) - 1)] for lane, each in enumerate(made)])
        seen, reward, terminated, truncated, _ = raw.step(sent)
        for lane in np.flatnonzero(~resets & (made < sum(lengths))):
            frame = batch[lane, made[lane]]
            assert np.array_equal(frame["observation"], before[lane])
            assert np.array_equal(frame["next", "observation"], seen[lane])
            assert frame["next", "reward"] == reward[lane]
            assert frame["next", "terminated"] == terminated[lane]
            assert frame["next", "truncated"] == truncated[lane]
        made += ~resets
        resets = (terminated | truncated) & ~resets
        if (made >= sum(lengths)).any():
            break  # the actions of rows beyond are not in the batch
    assert most >= 1
    whole = data(late, (sum(lengths),), policy=POLICIES[kind])
    assert_same(*(each.exclude(("collector", "policy_version")) for each in (batch, whole)))
    versions = batch["collector", "policy_version"]
    assert (versions.diff(dim=1) >= 0).all()
    borders = torch.tensor(lengths).cumsum(0)[:-1]
    assert (versions[:, borders] < torch.arange(1, 5)).any()


def test_a_reset_drops_the_rows_of_lanes_that_ran_ahead():
    env, policy, state = fresh(lambda: late(500), steps=20)
    assert state.env_state.simulation.carried.ahead.any()
    state = fc.reset(env, state)
    _, batch = fc.rollout(env, policy, state, 5)
    assert torch.equal(batch["observation"][:, 0], state.observation["observation",])


class Lengths(VectorEnv):
    """Takes no mask; the n-th episode of a lane has as many steps as this says, and observations say both numbers."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs, lengths = 2, ((1, 9, 9), (3, 9, 9))
    single_observation_space, single_action_space = spaces.Box(0, 99, (2,), np.float32), spaces.Discrete(2)
    observation_space, action_space = spaces.Box(0, 99, (2, 2), np.float32), spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed=None, options=None):
        self.seen, self.over = np.zeros((2, 2), np.float32), np.zeros(2, bool)
        return self.seen.copy(), {}

    def step(self, actions):
        again = self.over
        self.seen[again] = self.seen[again] * [1, 0] + [1, 0]
        self.seen[~again, 1] += 1
        ended = [step >= self.lengths[lane][int(episode)] for lane, (episode, step) in enumerate(self.seen)]
        self.over = ~again & np.array(ended)
        return self.seen.copy(), np.ones(2), self.over, np.zeros(2, bool), {}


def test_the_end_of_a_row_that_a_reset_drops_ends_nothing():
    env, policy, state = fresh(Lengths, steps=2)
    state = fc.reset(env, state, torch.tensor([False, True]))  # the lane is one row ahead, with which its episode ended
    _, batch = fc.rollout(env, policy, state, 3)
    assert batch["observation"][1].tolist() == [[1, 0], [1, 1], [1, 2]]
    assert not batch["next", "done"][1].any()
    assert batch["collector", "step"][1].tolist() == [0, 1, 2]


def test_the_exploration_is_that_of_the_rollout_that_made_a_row():
    env, policy = fc.make_env(late), linear(fc.heads.epsilon_greedy(0.5))
    state, rates, carried = fc.init(env, policy, seed=0), torch.linspace(0, 1, LATE), 0
    for number in range(5):
        given = {"epsilon": rates.roll(number) if number % 2 else number / 8}
        state, batch = fc.rollout(env, policy, state.replace(policy_version=number), 30, exploration=given)
        versions, epsilon = batch["collector", "policy_version"], batch["collector", "exploration", "epsilon"]
        wanted = torch.where(versions % 2 == 1, 0.0, versions / 8)
        for odd in (1, 3):
            wanted = torch.where(versions == odd, rates.roll(odd)[:, None], wanted)
        assert torch.equal(epsilon, wanted)
        carried += int((versions < number).sum())
    assert carried >= 3


def test_random_first_frames_of_lanes_that_run_ahead():
    env = fc.make_env(late)
    never = fc.torch_policy(lambda seen: seen[:, :2] * 0 + torch.tensor([50.0, 0.0]), head=fc.heads.categorical)
    options = {"frames_per_batch": 20 * LATE, "total_frames": 80 * LATE, "init_random_frames": 40 * LATE, "seed": 0}
    with fc.SyncDataCollector(env, never, **options) as collector:
        batch = torch.cat([each.clone() for each in collector], 1)
    assert batch["action"][:, :40].float().mean() > 0.3
    assert (batch["action"][:, 40:] == 0).all()


def linear(head):
    return fc.torch_policy(lambda seen: seen[:, :2], head=head)


@pytest.mark.parametrize(("first", "then", "says"), [
    (linear(fc.heads.categorical), fc.random_policy, r"the outputs \['action', 'action_log_prob'\], .*\['action'\]"),
    (linear(fc.heads.epsilon_greedy(0.5)), linear(fc.heads.categorical), r"the exploration \['epsilon'\], .*\[\]"),
])  # fmt: skip
def test_rows_that_another_policy_made_are_refused(first, then, says):
    env = fc.make_env(late)
    state, _ = fc.rollout(env, first, fc.init(env, first, seed=0), 30)
    other = then if isinstance(then, fc.Policy) else then(env)
    state = state.replace(policy_state=other.init(state.key, state.num_lanes))
    with pytest.raises(fc.PolicyError, match=says):
        fc.rollout(env, other, state, 9)
    _, batch = fc.rollout(env, other, fc.recover(env, state), 9)
    assert (batch["collector", "step"][:, 0] == 0).all()


@pytest.mark.parametrize(("do", "error", "says"), [
    (lambda: fc.make_env(Plain()), ValueError, r"Plain does not say how it resets.*: pass it as autoreset_mode="),
    (lambda: data(late(), limit=14), fc.EnvError, "a reset within an episode"),
    (lambda: data(late(), max_carry=0), ValueError, "max_carry is 0"),
    (lambda: data(late(), max_carry=1, steps=(300,)), fc.EnvError, "lane [0-4] is 1 steps ahead.*to make_env"),
    (lambda: fc.make_env("CartPole-v1", max_carry=9), ValueError, "max_carry=9 is for a VectorEnv.*leave it out"),
    (lambda: data(Plain(), autoreset_mode="SAME_STEP", max_carry=9), ValueError, "never run ahead: leave it out"),
    (lambda: compact(late()), fc.EnvError, "moves all lanes together.*leave compact_obs out"),
    (lambda: fc.make_env(Plain(), autoreset_mode="same"), ValueError, "autoreset_mode must be one of|is 'same'"),
    (lambda: fc.make_env("CartPole-v1", autoreset_mode="DISABLED"), ValueError, "is for a VectorEnv.*leave it out"),
    (lambda: data(Plain(), autoreset_mode="SAME_STEP", limit=3), fc.EnvError, "a reset within an episode"),
    (lambda: data(Some(), autoreset_mode=SAME_STEP), fc.EnvError, r"lanes \[0\]: .*does not report the last"),
    (lambda: data(Plain(), autoreset_mode="SAME_STEP", info_keys=["x"]), fc.EnvError, "no info key 'x'"),
    (lambda: games(batch_size=1), ValueError, "batch_size is 1, .* all lanes, 2: leave it out, or take EnvPool's"),
])  # fmt: skip
def test_errors(do, error, says):
    with pytest.raises(error, match=says):
        do()


def games(**kwargs):
    from ale_py.vector_env import AtariVectorEnv

    return fc.make_env(AtariVectorEnv("pong", num_envs=2, **kwargs))


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_atari_in_threads_is_the_raw_vector(mode):
    from ale_py.vector_env import AtariVectorEnv

    def build():
        return AtariVectorEnv("pong", num_envs=2, autoreset_mode=mode, max_num_frames_per_episode=60, noop_max=0)

    batch = data(build, steps=(40,))
    raw, screens, flags = build(), [], []
    seeds = np.array([fold(key_from_seed(0), Purpose.RESET, lane, 0)[0] % 2**31 for lane in range(2)])
    screen, _ = raw.reset(seed=seeds)
    for t in range(40):
        seen, _, _, truncated, info = raw.step(batch["action"][:, t].numpy())
        last = info["final_obs"] if mode is SAME_STEP and truncated.any() else seen
        assert np.array_equal(batch["observation"][:, t].numpy(), screen)
        assert np.array_equal(batch["next", "observation"][:, t].numpy(), last)
        screen = seen
        if mode is NEXT_STEP and truncated.any():
            screen, _ = raw.reset(options={"reset_mask": truncated})
        screens.append(seen)
        flags.append(truncated)
    assert np.array_equal(batch["next", "truncated"][..., 0].numpy().T, np.array(flags))
    assert np.array(flags).sum() >= 4


class Moded(VectorEnv):
    """Walks that begin near the origin and end far out; resets by a mode that it does not declare."""

    num_envs, spec = P, None
    single_observation_space, single_action_space = spaces.Box(-np.inf, np.inf, (6,)), spaces.Discrete(2)

    def __init__(self, mode, reports=True):
        self.mode, self.reports = mode, reports and mode == SAME_STEP

    def begin(self, lanes):
        for lane in np.flatnonzero(lanes):
            self.place[lane] = self.generators[lane].normal(0, 0.1, 6)
        self.age[lanes], self.over[lanes] = 0, False

    def reset(self, *, seed=None, options=None):
        lanes = np.ones(P, bool)
        if options is not None and self.mode == DISABLED:
            lanes = options["reset_mask"]
            assert lanes.any()
        elif seed is not None or not hasattr(self, "place"):
            self.place, self.age = np.zeros((P, 6)), np.zeros(P)
            self.over, self.generators = np.zeros(P, bool), [None] * P
        seeds = [None if seed is None else seed + lane for lane in range(P)] if np.ndim(seed) == 0 else seed
        for lane in np.flatnonzero(lanes):
            if self.generators[lane] is None or seeds[lane] is not None:
                self.generators[lane] = np.random.default_rng(seeds[lane])
        self.begin(lanes)
        return self.seen(), {}

    def seen(self):
        return self.place.astype(np.float32)

    def step(self, actions):
        late = self.over if self.mode == NEXT_STEP else np.zeros(P, bool)
        drawn = np.stack([each.normal(0.4, 0.2, 6) for each in self.generators])
        self.place, self.age, infos = self.place + drawn, self.age + 1, {}
        self.begin(late)
        self.over = (self.place.mean(1) > 1.5) & ~late
        answer = self.seen(), np.where(late, 0.0, 1.0), self.over, np.zeros(P, bool)
        if self.mode == SAME_STEP and self.over.any():
            infos = {"final_obs": answer[0]} if self.reports else {}
            ends = self.over.copy()
            self.begin(ends)
            answer = self.seen(), answer[1], ends, answer[3]
        return (*answer, infos)


class Repeats(Moded):
    """Also tells last observations as SAME_STEP does, though they are those of the step."""

    def step(self, actions):
        *answer, _ = super().step(actions)
        return *answer, {"final_obs": answer[0].copy(), "_final_obs": self.over}


@pytest.mark.parametrize("mode", [DISABLED, NEXT_STEP])
def test_last_observations_that_are_told_twice(mode):
    assert_same(*(data(partial(kind, mode), autoreset_mode=mode) for kind in (Repeats, Moded)))


def test_the_mode_of_a_class_that_all_vectors_share_is_no_ones(monkeypatch):
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", SAME_STEP)  # as ale-py's vector does
    assert fc.make_env(Moded(DISABLED), autoreset_mode="DISABLED").seeding == "episode"


@pytest.mark.parametrize("passed", [True, False])
def test_a_mode_that_is_passed_or_declared_by_its_value(passed):
    vector = Plain()
    vector.metadata = {} if passed else {"autoreset_mode": "SameStep"}
    batch = data(vector, steps=(1, 7), **({"autoreset_mode": "SAME_STEP"} if passed else {}))
    assert batch["next", "observation"][0, :, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert batch["observation"][1, :, 0].tolist() == [1, 2, 3, 0, 1, 2, 3, 0]
    vector.metadata = {"autoreset_mode": "sometimes"}
    with pytest.raises(ValueError, match="does not say how it resets"):
        fc.make_env(vector)


@pytest.mark.parametrize("mode", [DISABLED, NEXT_STEP, SAME_STEP])
def test_a_right_mode_passes_every_check(mode):
    report = fc.testing.check_env(fc.make_env(lambda: Moded(mode), autoreset_mode=mode.name), steps=60)
    assert {"resets", "terminal", "cuts", "policy_memory"} <= {*report.passed}


OTHERS = "begins other episodes in the step of an end, .*expected that of SAME_STEP"


@pytest.mark.parametrize(("does", "given", "check", "says"), [
    (Moded(SAME_STEP), "NEXT_STEP", "runs", OTHERS),
    (Moded(SAME_STEP), "DISABLED", "runs", OTHERS),
    (Moded(SAME_STEP, reports=False), "NEXT_STEP", "terminal", "one like those that episodes begin with"),
    (Moded(SAME_STEP, reports=False), "DISABLED", "same_seed", "the second run"),
    (Moded(SAME_STEP, reports=False), "SAME_STEP", "runs", "does not report the last observations"),
    (Moded(NEXT_STEP), "SAME_STEP", "runs", "does not report .*or pass another autoreset_mode"),
    (Moded(NEXT_STEP), "DISABLED", "same_seed", "the second run"),
    (Moded(DISABLED), "SAME_STEP", "runs", "does not report .*or pass another autoreset_mode"),
    (Moded(DISABLED), "NEXT_STEP", "runs", "the step after an end ends again, .*correct autoreset_mode"),
])  # fmt: skip
def test_check_env_finds_a_wrong_mode(does, given, check, says):
    make = lambda: Moded(does.mode, does.reports)  # noqa: E731
    with pytest.raises(fc.CheckError, match=says) as caught:
        fc.testing.check_env(fc.make_env(make, autoreset_mode=given), steps=60)
    assert caught.value.check == check, str(caught.value)

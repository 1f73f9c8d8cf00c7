"""Simulators that hold all lanes as tensors and reset them themselves, behind interfaces such as ManiSkill's."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.errors import EnvError, ReplayError
from tests.support.compare import bits, collect, fresh

P = 4


class Walks:
    """Random walks of P lanes: lost beyond 3, stopped after 9 steps. The generator goes on from episode to episode."""

    device = torch.device("cpu")
    single_action_space = spaces.Discrete(3)

    def __init__(self, device=None):
        self.device = device or self.device
        self.generator = torch.Generator(self.device or "cpu")
        self.place = torch.zeros(P, 2, device=self.device)
        self.age = torch.zeros(P, dtype=torch.long, device=self.device)
        self.closed = False

    def start(self, lanes):
        fresh = torch.rand(P, 2, generator=self.generator, device=self.device) - 0.5
        self.place = torch.where(lanes[:, None], fresh, self.place)
        self.age = torch.where(lanes, 0, self.age)

    def start_some(self, lanes):
        mask = torch.zeros(P, dtype=torch.bool, device=self.device)
        mask[lanes] = True
        self.start(mask)

    def look(self):
        return self.place

    def begin(self, seed):
        if seed is not None:
            self.generator.manual_seed(seed)
        self.start(torch.ones(P, dtype=torch.bool, device=self.device))

    def move(self, action):
        noise = torch.randn(P, 2, generator=self.generator, device=self.device)
        self.place = self.place + (action - 1)[:, None] + noise
        self.age = self.age + 1
        return -self.place.abs().sum(-1), (self.place.abs() > 3).any(-1), self.age >= 9

    def close(self):
        self.closed = True


class LikeManiSkill(Walks):
    """`ManiSkillVectorEnv`: a vector environment; last observations in the infos of steps in which lanes ended."""

    num_envs = P
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    walks = property(lambda self: self)

    def reset(self, *, seed=None, options=None):
        self.begin(seed)
        return self.place, {}

    def step(self, action):
        reward, terminated, truncated = self.move(action)
        infos = {"elapsed_steps": self.age, "success": terminated}
        done = terminated | truncated
        if done.any():  # those of the reset, which lack most keys
            infos = {"final_info": infos, "final_observation": self.place.clone(), "_final_observation": done}
        self.start(done)
        return self.place, reward, terminated, truncated, infos


class InParts(LikeManiSkill):
    """Takes a Dict of actions, and has infos within infos."""

    single_action_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "y": spaces.Box(-1, 3, (1, 1))})

    def step(self, action):
        assert {name: (part.shape, part.dtype) for name, part in action.items()} == self.WANTED
        *answer, infos = super().step(torch.ones(P))
        return *answer, {"sums": {"y": action["y"].sum((1, 2)), "x": action["x"].sum(1)}} | infos

    WANTED: ClassVar = {"x": ((P, 2), torch.float32), "y": ((P, 1, 1), torch.float32)}


def test_actions_in_parts_and_infos_within_infos():
    env = fc.envs.from_torch_vector_env(InParts, info_keys=["sums.y"])
    assert env.action_space == spaces.Box(np.float32([-1, -1, -1]), np.float32([1, 1, 3]))
    batch = collect(env, fc.random_policy(env), 20, seed=0)
    assert torch.equal(batch["next", "info", "sums.y"], batch["action"][..., 2])


class Noisy(Walks):
    """Each look at it draws noise of its own for all lanes, as Isaac Lab's do."""

    def look(self):
        return self.place + torch.randn(P, 2, generator=self.generator, device=self.device)


BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class IsaacLab(gymnasium.Env):
    """`ManagerBasedRLEnv`: no vector environment; `extras` is one dict; a lane that is over waits for a reset."""

    single_observation_space, single_action_space = spaces.Dict(policy=BOX), Walks.single_action_space

    def __init__(self, mode=None, device=None, reports=True):
        self.metadata = {} if mode is None else {"autoreset_mode": AutoresetMode[mode]}
        self.walks = Walks(device or "cpu") if mode is None else Noisy(device)
        self.num_envs, self.extras, self.same_step, self.reports = P, {}, mode != "DISABLED", reports
        self.device, self.idle = str(self.walks.device), torch.zeros(P, dtype=torch.bool, device=device)

    def reset(self, seed=None, env_ids=None, options=None):
        if seed is not None:
            self.walks.generator.manual_seed(seed)
        ids = torch.arange(P, device=self.device) if env_ids is None else env_ids
        assert len(ids)
        self.walks.start_some(ids)
        self.idle[ids] = False
        return {"policy": self.walks.look()}, self.extras

    def step(self, action):
        before = self.walks.place, self.walks.age
        reward, terminated, truncated = self.walks.move(action)
        over, idle = terminated | truncated, self.idle
        if self.same_step:
            if not self.metadata or over.any():
                self.extras |= {"final_obs": {"policy": self.walks.look()}} if self.reports else {}
                self.walks.start(over)
        else:
            self.walks.place = torch.where(idle[:, None], before[0], self.walks.place)
            self.walks.age = torch.where(idle, before[1], self.walks.age)
            self.idle = idle | over
        seen = {"policy": self.walks.look()}
        self.extras["success"] = terminated
        return seen, torch.where(idle, 0.0, reward), terminated & ~idle, truncated & ~idle, self.extras


class ReportsSome(LikeManiSkill):
    """Reports the last observations of truncated episodes only."""

    def step(self, action):
        *answer, truncated, infos = super().step(action)
        return *answer, truncated, {**infos, "_final_observation": truncated}


def test_it_works_in_collectors_and_evaluations():
    env = fc.envs.from_torch_vector_env(LikeManiSkill)
    policy = fc.jax_policy(lambda params, x: x @ params, np.ones((2, 3), np.float32), head=fc.heads.categorical)
    with fc.SyncDataCollector(env, policy, frames_per_batch=80, total_frames=240, seed=0) as collector:
        batches = list(collector)
        assert [batch.batch_size for batch in batches] == [(P, 20)] * 3
        saved = collector.state_dict()
        ids = batches[-1]["collector", "traj_ids"]
    stats = fc.evaluate(env, policy, episodes=6, seed=0)
    assert len(stats) == 6
    with fc.SyncDataCollector(env, policy, frames_per_batch=80, seed=0) as collector:
        collector.load_state_dict(saved)
        assert (next(collector)["collector", "traj_ids"][:, 0] > ids[:, -1]).all()
    kept = fc.SyncDataCollector(env, policy, frames_per_batch=80, total_frames=80, seed=0, reset_when_done=False)
    (batch,) = kept
    with pytest.raises(ValueError, match="lanes of the state are finished"):
        fc.rollout(env, policy, kept.state, 10)
    kept.reset()
    assert (fc.rollout(env, policy, kept.state, 10)[1]["collector", "step"][:, 0] == 0).all()
    kept.shutdown()
    done = batch["next", "done"][..., 0]
    assert torch.equal(done, done.cummax(1).values)
    for leaf in (batch["observation"], batch["next", "observation"]):
        frozen = done[:, 10:, None].expand_as(leaf[:, 10:])
        assert bits(leaf[:, 10:][frozen]) == bits(leaf[:, -1:].expand_as(leaf[:, 10:])[frozen])
    assert "tensors on one device" in fc.explain(env, policy).why
    assert fc.explain(env, policy).seeding.startswith("run")


def test_one_hot_actions():
    envs = [fc.envs.from_torch_vector_env(LikeManiSkill, one_hot=one_hot) for one_hot in (False, True)]
    wanted, batch = (collect(env, fc.random_policy(env), 12, seed=0) for env in envs)
    assert torch.equal(batch["action"].argmax(-1), wanted["action"])
    assert torch.equal(batch["next", "observation"], wanted["next", "observation"])


def test_what_cannot_be_done_is_said(tmp_path):
    env, policy, state = fresh(fc.envs.from_torch_vector_env(LikeManiSkill))
    with pytest.raises(ReplayError, match="cannot be forked"):
        fc.fork(env, state)
    with pytest.raises(ReplayError, match="cannot be saved in mid-episode"):
        fc.save(tmp_path / "state", state)
    with pytest.raises(EnvError, match="resets its lanes itself, and otherwise all at once"):
        fc.reset(env, state, torch.tensor([True, False, True, True]))
    state = fc.reset(env, fc.recover(env, state))
    with pytest.raises(ValueError, match=r"max_frames_per_traj is 5, but .* resets its lanes itself"):
        fc.rollout(env, policy, state, 4, max_frames_per_traj=5)
    fc.save(tmp_path / "state", state, episodes="restart")
    again = fc.load(tmp_path / "state", env, policy)
    assert (again.episode == state.episode + 1).all()
    fc.rollout(env, policy, state, 4)
    with pytest.raises(fc.StaleStateError):
        fc.rollout(env, policy, state, 4)
    one = LikeManiSkill()
    env, policy, state = fresh(fc.envs.from_torch_vector_env(one))
    with pytest.raises(EnvError, match="in use by another state: pass a function"):
        fc.init(env, policy, seed=0)
    fc.close(state)
    assert one.closed
    for kind in (partial(IsaacLab, reports=False), ReportsSome):
        silent, policy, state = fresh(fc.envs.from_torch_vector_env(kind))
        with pytest.raises(EnvError, match=r"does not report the last observations of their episodes.*'final_obs'"):
            fc.rollout(silent, policy, state, 20)
        fc.rollout(silent, policy, fc.recover(silent, state), 1)
    with pytest.raises(ValueError, match="max_frames_per_traj is 5"):
        fc.SyncDataCollector(env, None, frames_per_batch=20, max_frames_per_traj=5)
    fast, policy, state = fresh(fc.envs.from_torch_vector_env(LikeManiSkill, info_keys=["speed"]))
    with pytest.raises(EnvError, match=r"expected \['speed'\] among them"):
        fc.rollout(fast, policy, state, 20)


class Wrong(LikeManiSkill):
    """Returns something else than a tensor, from the third step on."""

    def __init__(self, change):
        super().__init__()
        self.change, self.steps = change, 0

    def step(self, action):
        self.steps += 1
        answer = super().step(action)
        return answer if self.steps < 3 else self.change(*answer)


@pytest.mark.parametrize(("change", "says"), [
    (lambda x, r, end, cut, info: (x, r, end.numpy(), cut, info), r"terminated .* is bool \[4\] of numpy"),
    (lambda x, r, end, cut, info: (x, r, end, cut[:, None], info), r"truncated .* is torch.bool \[4, 1\]"),
    (lambda x, *answer: (x, *answer[:-1], {"final_obs": x[:1]}), r"final observation .* is torch.float32 \[1, 2\]"),
    (lambda x, *answer: (x[:, :1], *answer), r"observation 'observation' .* is torch.float32 \[4, 1\]"),
    (lambda x, *answer: (x.int(), *answer), r"observation .* is torch.int32 .*, expected a tensor torch.float32"),
    (lambda x, reward, *answer: (x, reward.tolist(), *answer), r"reward .* is list of builtins"),
    (lambda *answer: (*answer[:-1], [0]), r"the info .* is list, expected a dict"),
    (lambda *answer: (*answer[:-1], None), r"the infos .* are \[\], expected \['success'\]"),
    (lambda *answer: (*answer[:-1], {"success": answer[1]}), r"info 'success' .* is torch.float32 \[4\], expected"),
    (lambda *answer: (*answer[:-1], {"final_info": answer[0]}), r"the final_info .* is Tensor, expected a dict"),
])  # fmt: skip
def test_wrong_answers_are_named(change, says):
    env, policy, state = fresh(fc.envs.from_torch_vector_env(lambda: Wrong(change), info_keys=["success"]))
    with pytest.raises(EnvError, match=says):
        fc.rollout(env, policy, state, 9)


class Groups(IsaacLab):
    """Observations of several groups and dtypes, one of them not in the space."""

    def __init__(self):
        super().__init__()
        self.single_observation_space = spaces.Dict(policy=BOX, age=spaces.Box(0, 2**40, (), np.int64))

    def reset(self, seed=None, env_ids=None, options=None):
        return self.observed(super().reset(seed)[0]), {}

    def step(self, action):
        observation, *rest, extras = super().step(action)
        final = {"final_obs": self.observed(extras["final_obs"])} if "final_obs" in extras else {}
        return self.observed(observation), *rest, final

    def observed(self, observation):
        return {"policy": observation["policy"].half(), "age": self.walks.age, "more": torch.zeros(7)}


def test_observations_of_other_dtypes_and_groups():
    env = fc.envs.from_torch_vector_env(Groups)
    batch = collect(env, fc.random_policy(env), 30)
    assert (batch["policy"].dtype, batch["age"].dtype) == (torch.float32, torch.int64)
    assert torch.equal(batch["policy"].half().float(), batch["policy"])
    assert "more" not in batch


def test_simulators_that_are_refused_or_not_used_are_closed():
    made = []

    def build(kind):
        made.append(kind())
        return made[-1]

    with pytest.raises(ValueError, match="resets lanes by NEXT_STEP"):
        fc.envs.from_torch_vector_env(lambda: build(NextStep))
    assert made.pop().closed
    env, _, state = fresh(fc.envs.from_torch_vector_env(lambda: build(LikeManiSkill)))
    del env
    assert not made[0].closed
    fc.close(state)
    assert made.pop().closed
    env = fc.envs.from_torch_vector_env(lambda: build(LikeManiSkill))
    other = replace(env)
    del env
    assert made.pop().closed
    _state = fc.init(other, fc.random_policy(other), seed=0)
    assert not made[0].closed


def test_a_recovery_from_an_old_state_uses_no_id_again():
    env, policy, old = fresh(fc.envs.from_torch_vector_env(LikeManiSkill))
    _, before = fc.rollout(env, policy, old, 60)
    state = fc.recover(env, old)
    assert state.steps_made == 60
    state, after = fc.rollout(env, policy, state, 60)
    old_ids, ids = ({*each["collector", "traj_ids"].unique().tolist()} for each in (before, after))
    assert not old_ids & ids
    assert not torch.equal(before["action"], after["action"])


def test_vector_environments_of_gymnasium_change_the_mode_of_no_other_one():
    class Plain(gymnasium.Env):  # its metadata are those of `gymnasium.Env`
        observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    both = [SyncVectorEnv([Plain], autoreset_mode=mode) for mode in (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP)]
    try:
        assert fc.envs.from_torch_vector_env(IsaacLab).num_envs == P
        for vector, mode in zip(both, ("DISABLED", "NEXT_STEP"), strict=True):
            both[0].metadata["autoreset_mode"] = AutoresetMode.SAME_STEP
            with pytest.raises(ValueError, match=f"and SyncVectorEnv declares {mode}"):
                fc.make_env(vector, autoreset_mode="SAME_STEP")
    finally:
        gymnasium.Env.metadata.pop("autoreset_mode", None)  # not set by Gymnasium 1.4


class NextStep(LikeManiSkill):
    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}


class Nowhere(LikeManiSkill):
    device = None


@pytest.mark.parametrize(("env", "error", "says"), [
    (3, TypeError, "env is int, expected a vector environment, or a function"),
    (lambda: gymnasium.make("CartPole-v1"), TypeError, r"lacks \['num_envs'.*Gymnasium's vector interface"),
    (NextStep, ValueError, "resets lanes by NEXT_STEP, in a step of all others, .*or pass partial_reset="),
    (Nowhere, TypeError, "has no device, expected where its tensors are: pass device="),
])  # fmt: skip
def test_an_environment_given_wrongly(env, error, says):
    with pytest.raises(error, match=says):
        fc.envs.from_torch_vector_env(env)
    assert fc.envs.from_torch_vector_env(Nowhere, device="cpu").num_envs == P

"""Simulators over tensors that reset some lanes when asked, behind the interfaces of real ones."""

from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import OrderEnforcing

import funcollect as fc
from funcollect.errors import EnvError
from tests.envs.test_torch_vector_env import BOX, IsaacLab, LikeManiSkill, Noisy, P, Walks
from tests.support.compare import assert_same, collect, fresh, leaves, rollouts
from tests.support.devices import each_device


def isaac_lab(mode="DISABLED", device=None):
    return OrderEnforcing(IsaacLab(mode, device))


class MjlabSpace(SimpleNamespace):
    """One of mjlab's own: a dict of `spaces`, or a box."""

    __module__ = "mjlab.utils.spaces"


def mjlab_box(size, low=-np.inf, high=np.inf):
    return MjlabSpace(shape=(size,), dtype="float32", low=low, high=high)


class Mjlab:
    """`ManagerBasedRlEnv`: spaces of its own, a mode in its configuration alone, flags in buffers that it rewrites."""

    critic = MjlabSpace(spaces={"age": mjlab_box(1)})
    single_observation_space = MjlabSpace(spaces={"actor": mjlab_box(2), "critic": critic})
    single_action_space = mjlab_box(1, low=-1.0, high=(1.0,))

    def __init__(self, auto_reset=False, capture=False, device=None):
        self.walks, self.num_envs, self.cfg = Noisy(device), P, SimpleNamespace(auto_reset=auto_reset)
        self.capture = capture  # as `capture_terminal_observations` in the configuration
        self.device, self.obs_buf = str(self.walks.device), torch.zeros(P, 2, device=device)
        self.pending, self.terminated, self.truncated = torch.zeros(3, P, dtype=torch.bool, device=device)

    @property
    def unwrapped(self):
        return self

    def observe(self):
        self.obs_buf.copy_(self.walks.look())
        return {"actor": self.obs_buf, "critic": {"age": self.walks.age[:, None].float()}}

    def reset(self, *, seed=None, env_ids=None, options=None):
        env_ids = torch.arange(P, device=self.device) if env_ids is None else env_ids
        if seed is not None:
            self.walks.generator.manual_seed(seed)
        self.walks.start_some(env_ids)
        self.pending[env_ids] = False
        return self.observe(), {"log": {}}

    def step(self, action):
        if self.pending.any():
            raise RuntimeError("reset them first")
        reward, self.terminated[:], self.truncated[:] = self.walks.move(action[:, 0])
        over, infos = self.terminated | self.truncated, {"log": {}}
        if not self.cfg.auto_reset:
            self.pending |= over
        elif over.any():
            if self.capture:
                seen = {"actor": self.walks.look()[over], "critic": {"age": self.walks.age[over, None].float()}}
                infos["terminal"] = {"env_ids": over.nonzero()[:, 0], "observations": seen}
            self.walks.start(over)
        return self.observe(), reward, self.terminated, self.truncated, infos


class ManiSkill:
    """`ManiSkillVectorEnv`: says SAME_STEP, whether it resets or not; its `reset` returns new tensors of all lanes."""

    single_observation_space, single_action_space = BOX, Walks.single_action_space
    num_envs = P

    def __init__(self, auto_reset=True, device=None):
        self.walks, self.auto_reset, self.device = Noisy(device), auto_reset, torch.device(device or "cpu")
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.walks.generator.manual_seed(seed)
        self.walks.start_some((options or {}).get("env_idx", torch.arange(P, device=self.device)))
        return self.walks.look(), {"reconfigure": False}

    def step(self, action):
        reward, terminated, truncated = self.walks.move(action)
        seen, infos, over = self.walks.look(), {"success": terminated}, terminated | truncated
        if over.any() and self.auto_reset:
            final, last = seen.clone(), infos
            seen, infos = self.reset(options={"env_idx": over.nonzero()[:, 0]})
            infos |= {"final_observation": final, "_final_observation": over, "final_info": last, "_final_info": over}
        return seen, reward, terminated, truncated, infos


ManiSkill.__module__ = "mani_skill.vector.wrappers.gymnasium"


class Masked:
    """Takes Gymnasium's mask, and begins an episode in the step after an end, as it says, unless it is `silent`."""

    single_observation_space, single_action_space = BOX, Walks.single_action_space
    num_envs = P

    def __init__(self, silent=False, device=None):
        self.walks, self.device = Noisy(device), torch.device(device or "cpu")
        self.metadata = {} if silent else {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.over = torch.zeros(P, dtype=torch.bool, device=device)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", torch.ones_like(self.over))
        assert mask.device != torch.device("cpu") or mask.any()
        if seed is not None:
            self.walks.generator.manual_seed(seed)
        self.walks.start(mask)
        self.over = self.over & ~mask
        return self.walks.look(), {}

    def step(self, action):
        late, (reward, terminated, truncated) = self.over, self.walks.move(action)
        self.walks.start(late)
        self.over = (terminated | truncated) & ~late
        return self.walks.look(), torch.where(late, 0.0, reward), terminated & ~late, truncated & ~late, {}


# What makes the simulators from the device, keywords, and what resets the lanes of a mask.
def by_ids(env, mask):
    return env.unwrapped.reset(env_ids=mask.nonzero()[:, 0])[0]


def by_index(env, mask):
    return env.reset(options={"env_idx": mask.nonzero()[:, 0]})[0]


def by_mask(env, mask):
    return env.reset(options={"reset_mask": mask})[0]


SUCCESS = {"info_keys": ["success"]}
KINDS = {
    "ManiSkill that resets all": (LikeManiSkill, SUCCESS, None),
    "Isaac Lab that resets itself": (lambda device: gymnasium.Wrapper(IsaacLab(device=device)), SUCCESS, by_ids),
    "Isaac Lab": (isaac_lab, {}, by_ids),
    "Isaac Lab, same step": (partial(isaac_lab, "SAME_STEP"), {}, by_ids),
    "mjlab": (Mjlab, {}, by_ids),
    "mjlab that resets itself": (partial(Mjlab, True, True), {}, by_ids),
    "ManiSkill": (ManiSkill, {}, by_index),
    "ManiSkill without resets": (partial(ManiSkill, False), SUCCESS, by_index),
    "next step": (Masked, {"partial_reset": "reset_mask"}, by_mask),
    "a mask": (partial(Masked, True), {"autoreset_mode": "DISABLED"}, by_mask),
}
RESET = [kind for kind, (*_, reset) in KINDS.items() if reset]


def made(kind, device="cpu"):
    build, kwargs, _ = KINDS[kind]
    return fc.envs.from_torch_vector_env(partial(build, device=device), **kwargs)


def flat(observation):
    """The positions [P, 2] that are seen, copied."""
    rows = observation
    if not isinstance(observation, torch.Tensor):
        rows = observation["actor"] if "actor" in observation else observation["policy"]
    return rows.clone()


def by_hand(env, reset, seed, actions, limit):
    """The columns [T, P, ...] of a plain loop over the simulators, with the `actions` of a batch."""
    seen, rows = flat(env.reset(seed=seed)[0]), []
    age = torch.zeros(P, dtype=torch.long, device=seen.device)
    for action in actions:
        answer, reward, terminated, truncated, infos = env.step(action)
        after, ends = flat(answer), terminated | truncated
        final = infos.get("final_obs", infos.get("final_observation")) if ends.any() else None
        if "terminal" in infos:
            final = after.index_copy(0, infos["terminal"]["env_ids"], infos["terminal"]["observations"]["actor"])
        last = after if final is None else torch.where(ends[:, None], flat(final), after)
        row = [seen, last, reward.clone(), terminated.clone(), truncated.clone()]
        if final is None and ends.any():
            after = torch.where(ends[:, None], flat(reset(env, ends)), after)
        age = age + 1
        cut = (age >= limit) & ~ends if limit else ends & False
        if cut.any():
            after = torch.where(cut[:, None], flat(reset(env, cut)), after)
        row[4] |= age >= limit if limit else cut
        age, seen = torch.where(ends | cut, 0, age), after
        rows.append(row)
    return [torch.stack(each) for each in zip(*rows, strict=True)]


@each_device
@pytest.mark.parametrize(("kind", "limit"), [*((kind, None) for kind in KINDS), *((kind, 4) for kind in RESET)])
def test_data_are_those_of_a_plain_loop(kind, limit, device):
    """Which is seeded once."""
    env, policy, state = fresh(made(kind, device), seed=2)
    simulators = state.env_state.simulation.simulators._simulators
    seed = getattr(simulators, "unwrapped", simulators).walks.generator.initial_seed()
    _, batch = rollouts(env, policy, state, (1, 17, 22), max_frames_per_traj=limit)
    assert {leaf.device.type for leaf in leaves(batch).values()} == {device}
    build, _, reset = KINDS[kind]
    wanted = by_hand(build(device=device), reset, seed, batch["action"].unbind(1), limit)
    names = ("reward", "terminated", "truncated")
    got = [flat(each.get("observation", each)) for each in (batch, batch["next"])]
    got += [batch["next", name][..., 0] for name in names]
    for own, raw in zip(got, wanted, strict=True):
        assert torch.equal(own.swapaxes(0, 1), raw)
    done = batch["next", "done"][..., 0]
    assert batch["next", "terminated"].any()
    assert (done & ~batch["next", "terminated"][..., 0]).any() or not limit
    if env.info_keys:
        assert torch.equal(batch["next", "info", "success"], batch["next", "terminated"][..., 0])
    ids, steps = batch["collector", "traj_ids"], batch["collector", "step"]
    assert torch.equal(ids[:, 1:], ids[:, :1] + P * done[:, :-1].long().cumsum(1))
    assert steps.max() < (limit or 99)
    assert torch.equal(steps[:, 1:] == 0, done[:, :-1])


@pytest.mark.parametrize("kind", RESET)
def test_masks_and_lanes_that_stay_finished(kind):
    env, policy, state = fresh(made(kind), steps=3)
    before, mask = state.step, torch.tensor([True, False, False, True])
    seen = {path: value.clone() for path, value in state.observation.items()}
    state = fc.reset(env, state, mask)
    assert torch.equal(state.step, torch.where(mask, 0, before))
    for path, value in state.observation.items():
        assert torch.equal(value[~mask], seen[path][~mask])
        assert not torch.equal(value[mask], seen[path][mask])
    state, batch = fc.rollout(env, policy, state, 4)
    assert (batch["collector", "step"][mask, 0] == 0).all()
    stats = fc.evaluate(env, policy, episodes=6, seed=0)
    assert len(stats) == 6
    assert stats.lengths.max() <= 9
    kept = fc.SyncDataCollector(env, policy, frames_per_batch=80, total_frames=80, seed=0, reset_when_done=False)
    next(kept)
    with pytest.raises(ValueError, match="lanes of the state are finished"):
        fc.rollout(env, policy, kept.state, 10)
    finished = (kept.state.terminated | kept.state.truncated).clone()
    state = fc.reset(env, kept.state, finished)
    assert (fc.rollout(env, policy, state, 10)[1]["collector", "step"][finished, 0] == 0).all()
    kept.shutdown()


@pytest.mark.parametrize("kind", ["Isaac Lab", "ManiSkill"])
def test_limits_of_collectors_and_the_last_step_as_an_input(kind):
    env = fc.make_env(made(kind), inputs=["is_first", "prev_reward"])
    with fc.SyncDataCollector(env, None, frames_per_batch=80, total_frames=160, max_frames_per_traj=5) as collector:
        batch = torch.cat([each.clone() for each in collector], 1)
    steps, done = batch["collector", "step"], batch["next", "done"][:, :-1]
    assert steps.max() == 4
    assert torch.equal(batch["is_first"][..., 0], steps == 0)
    assert torch.equal(batch["prev_reward"][:, 1:], torch.where(done, 0.0, batch["next", "reward"][:, :-1]))


def test_spaces_of_mjlab():
    env = made("mjlab")
    assert env.action_space == spaces.Box(-1, 1, (1,), np.float32)
    assert [leaf.path for leaf in env.observation_leaves] == [("actor",), ("critic", "age")]
    assert env.observation_space["critic"]["age"].shape == (1,)


def test_next_step_and_disabled_are_the_same():
    one, two = (collect(made(kind), fc.random_policy(made(kind)), 1, 40, seed=3) for kind in ("next step", "a mask"))
    assert_same(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_every_check(kind):
    wanted = {"resets", "another_seed", "old_states", "cuts"} | ({"reset_mask"} if kind in RESET else set())
    assert wanted <= {*fc.testing.check_env(made(kind), steps=30).passed}


OTHERS = "begins other episodes in the step of an end, .*SAME_STEP"


class Patient(IsaacLab):
    """Resets nothing, and does not say so."""

    def __init__(self):
        super().__init__("DISABLED")
        self.metadata = {}


@pytest.mark.parametrize(("does", "given", "check", "says"), [
    (LikeManiSkill, {"autoreset_mode": "DISABLED"}, "runs", OTHERS),
    (LikeManiSkill, {"autoreset_mode": "NEXT_STEP", "partial_reset": "reset_mask"}, "runs", OTHERS),
    (partial(IsaacLab, reports=False), {"autoreset_mode": "DISABLED"}, "terminal", "begin with"),
    (partial(Masked, True), {}, "runs", "does not report the last observations .*autoreset_mode='DISABLED'"),
    (Patient, {"autoreset_mode": "SAME_STEP"}, "runs", "does not report the last observations"),
])  # fmt: skip
def test_check_env_finds_a_wrong_mode_over_tensors(does, given, check, says):
    with pytest.raises(fc.CheckError, match=says) as caught:
        fc.testing.check_env(fc.envs.from_torch_vector_env(does, **given), steps=60)
    assert caught.value.check == check, str(caught.value)


@pytest.mark.parametrize(("build", "given", "says"), [
    (isaac_lab, {"autoreset_mode": "SAME_STEP"}, "is 'SAME_STEP', and OrderEnforcing declares DISABLED"),
    (Mjlab, {"autoreset_mode": "SAME_STEP"}, "is 'SAME_STEP', and Mjlab declares DISABLED: leave it out"),
    (partial(ManiSkill, False), {"autoreset_mode": "SAME_STEP"}, "ManiSkill declares DISABLED"),
    (Masked, {}, "resets lanes by NEXT_STEP.*or pass partial_reset="),
    (Masked, {"partial_reset": "env_ids"}, "reset of Masked does not take"),
    (Masked, {"partial_reset": "mask"}, "partial_reset must be one of"),
    (partial(Masked, True), {"autoreset_mode": "next"}, "autoreset_mode must be one of"),
])  # fmt: skip
def test_resets_that_do_not_fit(build, given, says):
    with pytest.raises(ValueError, match=says):
        fc.envs.from_torch_vector_env(build, **given)


def test_mjlab_that_resets_itself_is_told_how_not_to():
    env, policy, state = fresh(fc.envs.from_torch_vector_env(partial(Mjlab, True)))
    with pytest.raises(EnvError, match=r"does not report .*auto_reset=False"):
        fc.rollout(env, policy, state, 40)

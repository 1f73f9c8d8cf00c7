import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.keys import draw_ahead, key_from_seed
from funcollect.policies.numerics import TORCH, jax_numerics
from funcollect.policies.random_policy import RandomPolicy, draw_actions
from funcollect.specs import ActionSpec
from tests.support.compare import ks_distance
from tests.support.running import once


class Endless(gymnasium.Env):
    """Checks that it is given actions of its space, and shows the mask of step mod 3."""

    def __init__(self, action_space, masks=None, strict=True):
        self.strict, self.action_space, self.masks = strict, action_space, masks
        self.observation_space = box = spaces.Box(-1, 1, (1,))
        if masks is not None:
            self.observation_space = spaces.Dict(action_mask=spaces.MultiBinary(masks.shape[1]), x=box)

    def _observe(self):
        x = np.zeros(1, np.float32)
        return x if self.masks is None else {"action_mask": self.masks[self.t % len(self.masks)], "x": x}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        assert not self.strict or self.action_space.contains(action)
        self.t += 1
        return self._observe(), 0.0, False, self.t == 100, {}


def draw(space, *, steps=2500, masks=None, **options):
    env = fc.make_env([lambda: Endless(space, masks)] * 4, **options)
    policy = fc.random_policy(env)
    return fc.rollout(env, policy, fc.init(env, policy, seed=7), steps)[1].reshape(-1)


def assert_fair(chosen, count):
    found = torch.bincount(chosen, minlength=count).double() / len(chosen)
    assert len(found) == count
    assert ((found - 1 / count).abs() < 4.5 * math.sqrt(1 / count / len(chosen))).all()


@pytest.mark.parametrize(("space", "low", "counts"), [
    (spaces.Discrete(5), 0, [5]),
    (spaces.Discrete(5, start=-3), -3, [5]),
    (spaces.Discrete(1), 0, [1]),
    (spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 5], [-1, 0]]), [[0, 5], [-1, 0]], [2, 3, 4, 2]),
    (spaces.MultiBinary(3), 0, [2, 2, 2]),
    (spaces.Box(2, 8, (1,), np.uint8), 2, [7]),
    (spaces.Box(2, 8, (1,), np.int64), 2, [7]),
    (spaces.Box(0, 2, (), np.int64), 0, [3]),
], ids=str)  # fmt: skip
def test_choices_are_uniform_and_independent(space, low, counts):
    action = draw(space)["action"].numpy()
    assert action.dtype == space.dtype
    parts = (action.astype(np.int64) - low).reshape(len(action), -1).T
    assert_fair(torch.from_numpy(np.ravel_multi_index(tuple(parts), counts)), math.prod(counts))


def test_box_actions_follow_gymnasiums_sample():
    """Uniform between two bounds; beyond one bound an exponential, without bounds a normal."""
    low, high = np.array([-2, 3, -np.inf, -np.inf]), np.array([1, np.inf, -5, np.inf])
    batch = draw(spaces.Box(low.astype(np.float32), high.astype(np.float32)))
    cdfs = [lambda x: (x + 2) / 3, lambda x: 1 - torch.exp(-(x - 3)), lambda x: torch.exp(x + 5), torch.special.ndtr]
    for values, cdf in zip(batch["action"].unbind(-1), cdfs, strict=True):
        assert ks_distance(values, cdf) < 2.2
    assert ks_distance(batch["action"][:, 0] * 1.1, cdfs[0]) > 2.2
    assert np.abs(np.corrcoef(batch["action"].T) - np.eye(4)).max() < 0.05


BOUNDS = [(-(2**31), 2**31 - 1), (-(2**31), 0), (-1, 2**31 - 1), (0, 2**31 - 1), (2**31 - 3, 2**31 - 1), (-5, 7)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_integers_of_32_bits_are_the_same_in_torch_and_jax(low, high):
    spec = ActionSpec(spaces.Box(low, high, (1,), np.int32))
    words = np.random.default_rng(0).integers(0, 2**23, (20_000, 1))
    words[:2, 0] = 0, 2**23 - 1
    uniform = ((words + 0.5) * 2.0**-23).astype(np.float32)
    actions, log_prob = draw_actions(TORCH, spec, torch.from_numpy(uniform), None)
    in_jax, _ = draw_actions(jax_numerics(), spec, uniform, None)
    assert np.array_equal(actions, in_jax)
    assert (actions >= low).all()
    assert (actions <= high).all()
    middle, width = (low + high) / 2, high - low
    assert abs(actions.double().mean() - middle) < 5 * width / math.sqrt(12 * 20_000)
    assert actions.max() - actions.min() >= (1 - 2**-20) * width
    assert float(log_prob[0]) == pytest.approx(-math.log(width + 1), rel=1e-6)


SPACES = [spaces.Discrete(3, start=4), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3), spaces.Box(-1, 2, (2,))]
SPACES += [spaces.Box(np.float32([0, -np.inf]), np.float32([np.inf, 1])), spaces.Box(-np.inf, np.inf, (2,))]


@pytest.mark.parametrize(("space", "one_hot"), [*((space, False) for space in SPACES), (SPACES[0], True)])
def test_torch_and_jax_draw_the_same_actions(space, one_hot):
    spec = ActionSpec(space, one_hot)
    noise = draw_ahead(RandomPolicy(spec).noise(spec), key_from_seed(0), np.arange(500), 0, 1)[0]
    actions = draw_actions(TORCH, spec, noise, None)[0]
    in_jax = draw_actions(jax_numerics(), spec, noise.numpy(), None)[0]
    np.testing.assert_allclose(actions, in_jax, rtol=1e-4, atol=1e-5)


def test_integers_of_64_bits_have_both_signs():
    action = draw(spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64))["action"]
    assert abs((action > 0).double().mean() - 0.5) < 0.03
    action = draw(spaces.Box(5, 2**64 - 1, (1,), np.uint64), steps=50)["action"].numpy()
    assert len(np.unique(action)) > 100
    assert 5 <= action.min() < action.max() <= 2**62


def test_a_component_that_is_constant_has_the_log_density_0():
    space = ActionSpec(spaces.Box(np.float32([2, -1]), np.float32([2, 1])))
    scores = draw_actions(TORCH, space, torch.rand(20, 2), None)[1]
    torch.testing.assert_close(scores.reshape(20, -1).sum(-1), torch.full((20,), -math.log(2)))


MASKS = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 1, 0], [1, 1, 1, 1, 1]], np.int8)


@pytest.mark.parametrize(("one_hot", "start"), once([False, True], [0, 4]))
def test_an_action_mask_is_honoured(one_hot, start):
    batch = draw(spaces.Discrete(5, start=start), masks=MASKS, one_hot=one_hot)
    chosen = batch["action"].argmax(-1) if one_hot else batch["action"] - start
    assert (batch["action_mask"].gather(-1, chosen[:, None]) == 1).all()
    for kind, allowed in enumerate(([0, 2, 4], [3], [0, 1, 2, 3, 4])):
        here = chosen[batch["collector", "step"] % 3 == kind]
        assert_fair(torch.tensor([allowed.index(i) for i in here.tolist()]), len(allowed))


@pytest.mark.parametrize("xp", [TORCH, jax_numerics()])
def test_where_a_mask_allows_nothing_the_action_is_the_first_one(xp):
    uniform = torch.rand(9, 1) if xp is TORCH else np.random.default_rng(0).random((9, 1), np.float32)
    action, log_prob = draw_actions(xp, ActionSpec(spaces.Discrete(5)), uniform, [xp.full((9, 5), 0, uniform)])
    assert not action.any()
    assert (log_prob == 0).all()


def test_a_mask_of_another_size_is_an_observation_like_any_other():
    batch = draw(spaces.Discrete(3), masks=MASKS, steps=200)
    assert_fair(batch["action"], 3)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_random_frames_replace_only_the_action_and_its_log_prob_and_limits_beyond_32_bits_are_none(name):
    def prefers_one(x):
        return {"logits": torch.tensor([0.0, 50.0]).expand(len(x), 2), "value": x.sum(-1)}

    policy = fc.torch_policy(prefers_one, head=fc.heads.categorical)
    keywords = {"init_random_frames": 10**15, "max_frames_per_traj": 10**12, "frames_per_batch": 60, "seed": 0}
    with fc.SyncDataCollector(fc.make_env(name, num_envs=3), policy, **keywords) as collector:
        batch = next(collector)
    scores = batch["action_log_prob"]
    torch.testing.assert_close(scores, torch.full_like(scores, -math.log(2)))
    assert torch.equal(batch["value"], batch["observation"].sum(-1))
    assert torch.equal(batch["logits"], torch.tensor([0.0, 50.0]).expand(3, 20, 2))
    assert 0.2 < batch["action"].double().mean() < 0.8


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_random_frames_honour_a_mask_and_score_it(backend):
    """The policy itself always answers 0, which most masks forbid."""
    factories = [lambda: Endless(spaces.Discrete(5), MASKS[:2])] * 2
    head = fc.heads.categorical
    policy = fc.torch_policy(lambda x: x["x"] * 0 + torch.tensor([99.0, 0, 0, 0, 0]), head=head)
    if backend == "jax":
        policy = fc.jax_policy(lambda _, x: x["x"] * 0 + np.float32([99, 0, 0, 0, 0]), {}, head=head)
    with fc.SyncDataCollector(factories, policy, frames_per_batch=200, init_random_frames=120, seed=0) as collector:
        batch, later = next(collector), next(collector)
    allowed = batch["action_mask"].gather(-1, batch["action"][..., None])[..., 0]
    assert (allowed == 1).all()
    torch.testing.assert_close(batch["action_log_prob"], -batch["action_mask"].sum(-1).log())
    assert (later["action"] == 0).all()


@pytest.mark.parametrize("low", [-1.0, -np.inf])
def test_random_frames_of_a_box_are_scored_by_their_density(low):
    space = spaces.Box(np.float32([low, 0]), np.float32([1, 4]))
    policy = fc.torch_policy(lambda x: {"loc": x.expand(-1, 2), "scale": torch.ones(1, 2)}, head=fc.heads.normal)
    keywords = {"frames_per_batch": 40, "init_random_frames": 20, "seed": 0}
    with fc.SyncDataCollector(lambda: Endless(space, strict=False), policy, **keywords) as collector:
        batch = next(collector)
    first = batch["action"][:, 0] - 1 if math.isinf(low) else torch.full((40,), -math.log(2))
    torch.testing.assert_close(batch["action_log_prob"], first - math.log(4))


def ones(observation):
    return torch.ones(len(observation), dtype=torch.int64)


@pytest.mark.parametrize("kind", [fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector])
def test_random_frames_of_workers_are_rounded_up_to_whole_batches(kind):
    """60 frames in batches of 50 are two batches, as in TorchRL's collectors."""
    kwargs = {"policy": fc.torch_policy(ones), "frames_per_batch": 50, "init_random_frames": 60}
    mixed = {0: [], 1: []}  # by lane: whether each batch has random actions
    with kind(["CartPole-v1"] * 2, **kwargs) as collector:
        while min(map(len, mixed.values())) < 3:  # the asynchronous collector's workers take turns as they like
            batch = next(collector)
            for lane in {*batch["collector", "lane"].flatten().tolist()}:
                mixed[lane].append(bool((batch["action"] == 0).any()))
    # Asynchronous workers have one of two batches each.
    first = [True, kind is fc.MultiSyncDataCollector, False]
    assert all(of_lane[:3] == first and not any(of_lane[3:]) for of_lane in mixed.values())


class Spread(torch.nn.Linear):
    def forward(self, x):
        return {"loc": super().forward(x), "scale": torch.ones(len(x), 5)}


@pytest.mark.parametrize("workers", [{"num_workers": 2, "wait": "any", "min_ready": 1}, {}])
@pytest.mark.parametrize("continuous", [False, True])
def test_random_frames_of_groups_have_the_outputs_of_the_executed_actions(continuous, workers):
    options = {"env_kwargs": {"continuous_actions": continuous}, "num_envs": 2, **workers}
    nets, head, together = {"adversary": Spread(16, 5), "agent": Spread(14, 5)}, fc.heads.tanh_normal, []
    if not continuous:
        flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 15))
        nets, head, together = {"adversary": flat, "agent": torch.nn.Linear(14, 5)}, fc.heads.categorical, ["adversary"]
    policy = fc.by_group({name: fc.torch_policy(net, head=head) for name, net in nets.items()}, together=together)
    env = fc.make_env("pettingzoo/mpe/simple_tag_v3", **options)
    with fc.SyncDataCollector(env, policy, frames_per_batch=6, init_random_frames=6, seed=0) as collector:
        batch = torch.cat([next(collector).clone(), next(collector)], 1)
    for name in nets:
        own, scores = batch[name], batch[name, "action_log_prob"]
        wanted = 0.0 if continuous else -math.log(5) * (3 if name in together else 1)
        torch.testing.assert_close(scores[:, :3], torch.full_like(scores[:, :3], wanted))
        assert not torch.isclose(scores[:, 3:], torch.tensor(wanted)).any()
        if continuous:
            torch.testing.assert_close((own["action_unsquashed"].tanh() + 1) / 2, own["action"], atol=1e-5, rtol=0)

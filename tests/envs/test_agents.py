"""Several agents: PettingZoo's environments beside a raw loop, and one policy for each group."""

from functools import partial
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from torch import nn

import funcollect as fc
from funcollect.policies.jax_functions.jax_policy import JaxActor
from tests.envs.test_turns import Net
from tests.support.agents import check_parallel
from tests.support.cases import Recurrent, jax_weights, mlp
from tests.support.compare import assert_same, collect


class Leaving(ParallelEnv):
    """Agents leave at times of their own, by a flag of their own; a lane ends with its last one."""

    metadata = {"name": "leaving"}  # noqa: RUF012

    def __init__(self, names=("ant_0", "ant_1", "bee_0"), sizes=(2, 2, 3)):
        self.possible_agents, self.sizes = list(names), dict(zip(names, sizes, strict=True))
        self.render_mode = None

    def observation_space(self, agent):
        return spaces.Box(-9, 99, (self.sizes[agent],), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.ends = {name: int(self.random.integers(2, 9)) for name in self.agents}
        return self.seen(self.agents), {name: {} for name in self.agents}

    def seen(self, names):
        return {name: np.full(self.sizes[name], self.time + self.ends[name] / 10, np.float32) for name in names}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.time += 1
        names, over = self.agents, {name: self.time >= self.ends[name] for name in self.agents}
        by_time = {name: over[name] and self.ends[name] % 2 == 0 for name in names}
        self.agents = [name for name in names if not over[name]]
        reward = {name: float(actions[name]) + self.ends[name] for name in names}
        terminated = {name: over[name] and not by_time[name] for name in names}
        return self.seen(names), reward, terminated, by_time, {name: {"time": self.time} for name in names}

    def state(self):
        return np.array([self.time], np.float32)

    state_space = spaces.Box(0, 99, (1,), np.float32)


def head(outputs, **kwargs):
    return {"ant": fc.torch_policy(mlp(2, 3), head=fc.heads.categorical), "bee": outputs, **kwargs}


def jax_policy(inputs):
    return fc.jax_policy(lambda params, x: jnp.tanh(x) @ params, jax_weights(inputs, 3, 0), head=fc.heads.categorical)


def recurrent(inputs):
    return fc.torch_policy(Recurrent(inputs, 3), head=fc.heads.categorical, initial_state=torch.zeros(5))


POLICIES = {
    "random": lambda env: fc.random_policy(env),
    "torch": lambda env: fc.by_group(head(fc.torch_policy(mlp(3, 3), head=fc.heads.epsilon_greedy(0.3)))),
    "jax": lambda env: fc.by_group({"ant": jax_policy(2), "bee": jax_policy(3)}),
    "mixed": lambda env: fc.by_group(head(jax_policy(3))),
    "recurrent": lambda env: fc.by_group({"ant": recurrent(2), "bee": recurrent(3)}),
    "together": lambda env: fc.by_group(
        {
            "ant": fc.torch_policy(nn.Sequential(nn.Flatten(), mlp(4, 6)), head=fc.heads.categorical),
            "bee": fc.torch_policy(mlp(3, 3), head=fc.heads.categorical),
        },
        together=["ant"],
    ),
}
LENGTHS = (7, 1, 20)


def made(**kwargs):
    return fc.envs.from_pettingzoo(Leaving, num_envs=3, info_keys=["time"], state=True, **kwargs)


@pytest.mark.parametrize("kind", POLICIES)
def test_the_rows_are_those_of_a_raw_loop(kind):
    env = made()
    batch = collect(env, POLICIES[kind](env), *LENGTHS, seed=1)
    check_parallel(env, batch, Leaving, info_keys=["time"], state=True)
    if kind in ("torch", "recurrent"):
        pace = {"wait": "any", "min_ready": 1} if kind == "recurrent" else {}
        assert_same(batch, collect(made(num_workers=2, **pace), POLICIES[kind](made()), *LENGTHS, seed=1))


def test_log_probabilities_of_agents_that_act_together():
    """Those of an agent by itself are in `test_agents_as_lanes_of_their_own`."""
    env = made()
    policy = POLICIES["together"](env)
    batch = collect(env, policy, 12, seed=2)
    logits = policy.policies["ant"].module(batch["ant", "observation"].flatten(0, 1)).view(3, 12, 2, 3)
    wanted = torch.distributions.Categorical(logits=logits).log_prob(batch["ant", "action"]).sum(-1)
    present = batch["ant", "mask"].any(-1)
    torch.testing.assert_close(batch["ant", "action_log_prob"][present], wanted[present])
    assert not batch["ant", "mask"][present].all()
    scored = fc.evaluate_actions(policy.policies["ant"], None, batch["ant"])["action_log_prob"]
    torch.testing.assert_close(scored, batch["ant", "action_log_prob"])
    assert torch.equal(fc.agents_as_rows(batch, "ant")["action_log_prob"][:, 1], batch["ant", "action_log_prob"])


@pytest.mark.parametrize("other", [fc.heads.greedy, fc.heads.epsilon_greedy(0.5)])
def test_noise_of_a_group_does_not_depend_on_the_heads_of_others(other):
    for together in ([], ["ant"]):
        batches = []
        for head in (fc.heads.categorical, other):
            ants = nn.Sequential(nn.Flatten(), mlp(4, 6)) if together else mlp(2, 3)
            own = {
                "ant": fc.torch_policy(ants, head=fc.heads.categorical),
                "bee": fc.torch_policy(mlp(3, 3), head=head),
            }
            batches.append(collect(made(), fc.by_group(own, together=together), 15, seed=4))
        assert torch.equal(*(batch["ant", "action"] for batch in batches))


@pytest.mark.parametrize("name", ["torch", "jax", "players"])
def test_a_policy_that_takes_anothers_place_acts_at_once(name):
    if name == "players":
        env = fc.make_env("pettingzoo/classic/tictactoe_v3", num_envs=3)
        sizes = int(np.prod(env.observation_space["observation"].shape))
        members = [fc.torch_policy(Net(seed, sizes, 9), head=fc.heads.greedy) for seed in range(3)]
        policy, key = fc.by_player(members[:2]), "1"
    else:
        env, policy, key = made(), POLICIES[name](made()), "ant"
        members = [None, None, POLICIES[name](made()).policies["ant"]]
        if name == "torch":
            members[2] = fc.torch_policy(mlp(2, 3, seed=9), head=fc.heads.categorical)
        else:
            members[2].params = members[2].params + 3.0
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    policy.policies[key] = members[2]
    copied = fc.fork(env, state)
    assert_same(fc.rollout(env, policy, state, 4)[1], fc.rollout(env, policy, copied, 4)[1])


class Coming(Leaving):
    """Agents come late, leave without a flag, are never there, or come back, by the times in which they are there."""

    def __init__(self, times):
        super().__init__([*times], [2] * len(times))
        self.times = times

    def reset(self, seed=None, options=None):
        self.time, self.ends = 0, dict.fromkeys(self.times, 0)
        self.agents = self.those()
        return self.seen(self.times), {name: {} for name in self.agents}

    def those(self):
        return [name for name, times in self.times.items() if self.time in times]

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.time += 1
        before, self.agents = self.agents, self.those()
        over = {name: name not in self.agents and name[0] == "a" for name in before}  # the others leave without a flag
        infos = {name: {"pair": np.full(2, self.time)} for name in before}
        reward = dict.fromkeys(before, 1.0)
        return self.seen(self.times), reward, over, dict.fromkeys(before, False), infos


def test_agents_that_come_late_leave_without_a_flag_or_are_never_there():
    times = {"a_0": range(7), "a_1": (), "a_2": range(2, 5), "b_0": range(3), "b_1": (0, 1, 4, 5)}
    env = fc.envs.from_pettingzoo(partial(Coming, times), num_envs=2, info_keys=["pair"])
    batch = collect(env, fc.random_policy(env), 16, seed=1)
    check_parallel(env, batch, partial(Coming, times))
    assert batch["next", "done"][..., 0].nonzero()[:, 1].tolist() == [6, 13] * 2  # with the last agent
    assert not batch["next", "terminated"].any()  # since some agents left without a flag
    for group, names in (("a", ("a_0", "a_1", "a_2")), ("b", ("b_0", "b_1"))):
        rows = fc.agents_as_rows(batch, group)
        for row, name in enumerate(names):
            own = rows[:, row]
            assert torch.equal(own["next", "info", "pair"][..., 0] > 0, own["mask"])
            stays = {"a_0": [7] * 4, "a_1": [], "a_2": [3] * 4, "b_0": [3] * 4, "b_1": [2] * 10}[name]
            for cuts in ((0, 16), (0, 1, 3, 5, 6, 12, 16), range(17)):
                parts = [None]
                for begin, end in pairwise(cuts):
                    parts.append(fc.episode_stats(own[:, begin:end], parts[-1]))
                whole = fc.EpisodeStats.concatenate(parts[1:])
                assert whole.lengths.tolist() == whole.returns.tolist() == stays
            assert fc.episode_stats(fc.split_trajectories(own)).lengths.sum() == sum(stays)
            apart = own.clone()  # each stay with an id of its own
            comes = own["mask"] & ~own["mask"].roll(1, 1)
            apart["collector", "traj_ids"] = 100 * own["collector", "traj_ids"] + comes.cumsum(1)
            assert torch.equal(fc.scale_rewards(own)[0], fc.scale_rewards(apart)[0])
    env = fc.envs.from_pettingzoo(partial(Coming, times), num_envs=2, info_keys=["pairs"])
    with pytest.raises(fc.EnvError, match="no info key 'pairs'"):
        collect(env, fc.random_policy(env), 3, seed=0)


def test_noise_belongs_to_an_agent_whichever_group_it_is_in():
    net = mlp(2, 3)
    batches = []
    for groups in ({"ant": ["ant_0", "ant_1"], "bee": ["bee_0"]}, {"b": ["ant_1"], "a": ["ant_0"], "bee": ["bee_0"]}):
        env = made(groups=groups)
        own = {name: fc.torch_policy(net if name != "bee" else mlp(3, 3), head=fc.heads.categorical) for name in groups}
        batches.append(collect(env, fc.by_group(own), 15, seed=4))
    together, apart = batches
    assert torch.equal(together["ant", "action"], torch.cat([apart["a", "action"], apart["b", "action"]], -1))


def test_parameters_and_collectors():
    env = made()
    policy = POLICIES["torch"](env)
    saved = policy.state_dict()
    assert {name.split(".")[0] for name in saved} == {"ant", "bee"}
    other = {name: torch.zeros_like(leaf) for name, leaf in saved.items()}
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 6, params=other)
    assert batch["ant", "action_log_prob"].exp().sub(1 / 3).abs().max() < 1e-6
    policy.load(other)
    assert all((leaf == 0).all() for leaf in policy.state_dict().values())
    policy.load(saved)
    frames = []
    for kind in (fc.SyncDataCollector, fc.MultiSyncDataCollector):
        make = made if kind is fc.SyncDataCollector else [made]
        with kind(make, policy, frames_per_batch=30, total_frames=60, seed=5) as collector:
            frames.append(torch.cat([each.clone() for each in collector], -1).reshape(3, 20))
    assert_same(*frames)
    assert fc.evaluate(env, policy, episodes=4, seed=0).returns.min() > 0


def test_a_group_that_explores_is_scored():
    env = fc.make_env("pettingzoo/mpe/simple_tag_v3", num_envs=2)
    heads = {"adversary": fc.heads.boltzmann(0.5), "agent": fc.heads.boltzmann(0.7)}
    sizes = {"adversary": 16, "agent": 14}
    policy = fc.by_group({name: fc.torch_policy(nn.Linear(sizes[name], 5), head=heads[name]) for name in heads})
    batch = collect(env, policy, 8)
    for name, part in policy.policies.items():
        rows = fc.agents_as_rows(batch, name)
        torch.testing.assert_close(fc.evaluate_actions(part, None, rows)["action_log_prob"], rows["action_log_prob"])


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_each_lane_of_a_group_explores_by_its_own_value(kind):
    env, head = made(), fc.heads.epsilon_greedy(0.5)
    net = mlp(2, 3)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)))
    ant = fc.torch_policy(net, head=head) if kind == "torch" else fc.jax_policy(jnp_scores, weights, head=head)
    policy = fc.by_group({"ant": ant, "bee": fc.torch_policy(mlp(3, 3), head=fc.heads.categorical)})
    given = {"ant.epsilon": torch.tensor([0.0, 1.0, 0.0])}
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 60, exploration=given)
    seen = batch["ant", "observation"]
    best = (net(seen) if kind == "torch" else torch.from_numpy(np.array(jnp_scores(weights, seen.numpy())))).argmax(-1)
    greedy = (batch["ant", "action"] == best) | ~batch["ant", "mask"]
    assert greedy.all(-1).all(-1).tolist() == [True, False, True]


def jnp_scores(weights, observation):
    return jnp.asarray(observation) @ weights


@pytest.mark.parametrize("done", ["all", "any"])
def test_agents_as_lanes_of_their_own(done):
    """Advantages, statistics and log-probabilities of a group are those of each agent alone."""
    env = made(done=done)
    policy = POLICIES["torch"](env)
    batch = collect(env, policy, 40, seed=6)
    rows = fc.agents_as_rows(batch, "ant")
    for key in ("next", "collector", "done"):
        with pytest.raises(ValueError, match=f"group is '{key}', expected one of .*'ant'"):
            fc.agents_as_rows(batch, key)
    assert rows.batch_size == (3, 2, 40)
    assert rows["state"].shape == (3, 2, 40, 1)
    value = torch.rand(3, 2, 40, 1)
    after = torch.rand(3, 2, 40, 1)
    advantage, _ = fc.gae(rows, value, after)
    for lane in range(3):
        for agent in range(2):
            carried = 0.0
            for t in reversed(range(40)):
                frame, own = batch[lane, t], batch[lane, t]["next", "ant"]
                if not frame["ant", "mask"][agent]:
                    carried = 0.0
                    continue
                leaves = bool(own["done"][agent]) or bool(frame["next", "done"])
                rest = 0.0 if own["terminated"][agent] else after[lane, agent, t].item()
                delta = own["reward"][agent].item() + 0.99 * rest - value[lane, agent, t].item()
                carried = delta + 0.99 * 0.95 * (0.0 if leaves else carried)
                assert abs(advantage[lane, agent, t].item() - carried) < 1e-4
    stats = fc.episode_stats(rows)
    ended = (rows["next", "done"] & ~rows["done"])[..., 0]
    assert len(stats) == ended.sum()
    log_prob = fc.evaluate_actions(policy.policies["ant"], None, rows)["action_log_prob"]
    present = rows["mask"]
    torch.testing.assert_close(log_prob[present], rows["action_log_prob"][present])


def test_an_evaluation_has_the_returns_of_each_agent():
    env, policy = made(), POLICIES["torch"](made())
    whole, *parts = (fc.evaluate(env, policy, episodes=7, seed=0, group=group) for group in (None, "ant", "bee"))
    for lane in range(3):
        (ants, bees), rows = parts, (2 * lane, 2 * lane + 1)
        own = [*(ants.returns[ants.lanes == row] for row in rows), bees.returns[bees.lanes == lane]]
        assert torch.equal(whole.returns[whole.lanes == lane], sum(own))
    assert len({*parts[0].lengths.tolist()}) > 1
    with pytest.raises(ValueError, match=r"group is 'cat', expected one of \['ant', 'bee'\]"):
        fc.evaluate(env, policy, episodes=1, seed=0, group="cat")
    with pytest.raises(TypeError, match=r"group is \['ant'\], expected str.*: name one"):
        fc.evaluate(env, policy, episodes=1, seed=0, group=["ant"])


def test_rewards_of_groups_are_summed_by_agent():
    batch, sums = collect(made(), fc.random_policy(made()), 9, seed=6), fc.MultiStep(gamma=0.9, n_steps=3)
    with pytest.raises(ValueError, match=r"groups \['ant', 'bee'\], .*: call agents_as_rows"):
        sums(batch)
    summed = sums(fc.agents_as_rows(batch, "ant"))
    assert (summed["next", "reward"] != summed["original_reward"]).any()
    batch["steps_to_next_obs"] = torch.ones(3, 9, 1)
    with pytest.raises(ValueError, match="take the batch before MultiStep"):
        fc.agents_as_rows(batch, "ant")


@pytest.mark.parametrize("options", [{"set_truncated": True}, {"compact_obs": True}])
def test_agents_of_a_batch_have_their_ends_however_it_is_collected(options):
    def rows(**options):
        with fc.SyncDataCollector(made(), frames_per_batch=12, total_frames=48, seed=1, **options) as collector:
            return [fc.agents_as_rows(each.clone(), "ant") for each in collector]

    stats, ended = [None, None], 0
    for pair in zip(rows(), rows(**options), strict=True):
        stats = [fc.episode_stats(each, one) for each, one in zip(pair, stats, strict=True)]
        assert torch.equal(stats[0].returns, stats[1].returns)
        assert torch.equal(*(each["next", "terminated"] for each in pair))
        ended += int((pair[0]["next", "done"] & ~pair[0]["done"])[..., -1, 0].sum())
    assert ended


@pytest.mark.parametrize(("do", "error", "says"), [
    (lambda: made(groups={"ant": ["ant_0"]}), ValueError, "expected every agent of .*'bee_0'.* once"),
    (lambda: made(groups={"x": ["ant_0", "ant_1", "bee_0"]}), ValueError, "'x' holds bee_0 .* groups of their own"),
    (lambda: made(groups={"state": ["ant_0", "ant_1"], "b": ["bee_0"]}), ValueError, "a group is named 'state'"),
    (lambda: made(done="one"), ValueError, "done must be one of"),
    (lambda: fc.make_env("pettingzoo/mpe/no_v1"), ValueError, "PettingZoo has no 'mpe/no_v1' here"),
    (lambda: fc.by_group({"ant": 3}), TypeError, "expected a Policy"),
    (lambda: fc.by_group(3), TypeError, "policies is"),
    (lambda: fc.by_group(dict.fromkeys(("a", "a.b"), jax_policy(2))), ValueError, r"\['a.b'\], expected no dots"),
    (lambda: fc.by_group(head(jax_policy(3)), together=["cat"]), ValueError, r"together names \['cat'\]"),
    (lambda: fc.evaluate_actions(fc.by_group(head(jax_policy(3))), None, {}), TypeError, "made of policies.*agents_as"),
    (lambda: collect(made(), fc.by_group({"ant": jax_policy(2)}), 3), ValueError, r"the groups \['ant', 'bee'\]"),
    (lambda: collect(fc.make_env("CartPole-v1"), fc.by_group(head(jax_policy(3))), 3), ValueError, "no groups of"),
    (lambda: fc.gae(batch := collect(made(), fc.random_policy(made()), 3), *2 * [batch["next", "ant", "reward"]]),
     ValueError, "the batch of agents_as_rows"),
])  # fmt: skip
def test_errors(do, error, says):
    with pytest.raises(error, match=says):
        do()


def test_actors_that_have_begun_end_if_a_later_one_cannot_begin(monkeypatch):
    def fails(actor):
        raise RuntimeError("cannot begin")

    env, policy, before = made(), POLICIES["mixed"](made()), torch.get_rng_state()
    state = fc.init(env, policy, seed=0)
    monkeypatch.setattr(JaxActor, "running", fails)
    with pytest.raises(RuntimeError, match="cannot begin"):
        fc.rollout(env, policy, state, 3)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)

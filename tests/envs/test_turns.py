"""Games in turns: PettingZoo's and pgx's, a policy for each player, and the moves of each as trajectories."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import AECEnv
from torch import nn

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed
from tests.support.cases import HIDDEN, Recurrent
from tests.support.compare import assert_same, collect, fresh
from tests.support.running import in_soak, scaled

NAMES = ("ann", "bob", "cay")


class Race(AECEnv):
    """Who moves next is drawn; a move gives rewards to all. Players drop out; a game may be cut."""

    metadata = {"name": "race"}  # noqa: RUF012

    def __init__(self, names=NAMES, wide=False):
        self.possible_agents, self.wide, self.render_mode = list(names), wide, None

    def observation_space(self, agent):
        seen = spaces.Box(-9, 99, (3 + (self.wide and agent == "bob"),), np.float32)
        return spaces.Dict(observation=seen, action_mask=spaces.Box(0, 1, (4,), np.int8))

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.length, self.cut = int(self.random.integers(4, 12)), bool(self.random.integers(2))
        self.rewards = self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.draw()

    def draw(self):
        self.agent_selection = self.agents[int(self.random.integers(len(self.agents)))]
        self.legal = self.random.integers(0, 2, 4).astype(np.int8)
        self.legal[int(self.random.integers(4))] = 1
        self.infos = {name: {"time": self.time} for name in self.agents}

    def observe(self, agent):
        number = self.possible_agents.index(agent)
        return {"observation": np.array([self.time, number, self.length], np.float32), "action_mask": self.legal}

    def step(self, action):
        mover = self.agent_selection
        if self.terminations[mover]:
            assert action is None
            self.agents.remove(mover)
            for held in (self.terminations, self.truncations):
                del held[mover]
            return self.draw()
        assert self.legal[action]
        self.time += 1
        self.rewards = {name: float(self.random.integers(-3, 4)) + action for name in self.agents}
        if self.time >= self.length:
            ends = self.truncations if self.cut else self.terminations
            ends.update(dict.fromkeys(self.agents, True))
        elif len(self.agents) > 2 and self.random.random() < 0.2:
            self.terminations[mover] = True
            return None
        return self.draw()


class Net(nn.Module):
    def __init__(self, seed, inputs=3, choices=4):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = nn.Linear(inputs, choices)

    def forward(self, seen):
        logits = self.layer(seen["observation"].flatten(1).float() / 9)
        return logits.where(seen["action_mask"] != 0, -1e9)


class Remembering(Recurrent):
    def forward(self, seen, hidden):
        logits, hidden = super().forward(seen["observation"].flatten(1).float() / 9, hidden)
        return logits.where(seen["action_mask"] != 0, -1e9), hidden


def legal(params, seen):
    flat = seen["observation"].reshape(len(seen["action_mask"]), -1) / 9
    return jnp.where(seen["action_mask"] != 0, flat @ params, -1e9)


def torch_policy(seed, head=fc.heads.categorical, **sizes):
    return fc.torch_policy(Net(seed, **sizes), head=head)


def jax_policy(seed, inputs=3, choices=4):
    weights = jax.random.normal(jax.random.PRNGKey(seed), (inputs, choices))
    return fc.jax_policy(legal, weights, head=fc.heads.categorical)


def recurrent(seed, inputs=3, choices=4, **options):
    options = {"initial_state": torch.zeros(HIDDEN), "record_state": True} | options
    return fc.torch_policy(Remembering(inputs, choices, seed), head=fc.heads.categorical, **options)


def jax_recurrent(seed):
    def step(params, seen, hidden):
        hidden = jnp.tanh(hidden + seen["observation"].sum(-1, keepdims=True) / 99)
        return legal(params, seen) + hidden[:, :1], hidden

    weights = jax.random.normal(jax.random.PRNGKey(seed), (3, 4))
    return fc.jax_policy(step, weights, head=fc.heads.categorical, initial_state=jnp.zeros(HIDDEN))


POLICIES = {
    "random": fc.random_policy,
    "torch": lambda env: fc.by_player([torch_policy(0), torch_policy(1), torch_policy(2)]),
    "jax": lambda env: fc.by_player([jax_policy(0), jax_policy(1), fc.random_policy(env)]),
    "mixed": lambda env: fc.by_player([torch_policy(0), jax_policy(1), fc.random_policy(env)]),
    "recurrent": lambda env: fc.by_player([recurrent(0), recurrent(1), torch_policy(2)]),
    "mixed recurrent": lambda env: fc.by_player([recurrent(0), jax_recurrent(1), torch_policy(2)]),
    "jax recurrent": lambda env: fc.by_player([jax_recurrent(0), jax_recurrent(1), jax_policy(2)]),
}
LENGTHS = (7, 1, 22)


def made(**kwargs):
    return fc.envs.from_pettingzoo(Race, num_envs=4, info_keys=["time"], **kwargs)


FEW = ["random", "torch", "mixed", "recurrent", "jax recurrent"]


@pytest.mark.parametrize("kind", [*FEW, *in_soak(kind for kind in POLICIES if kind not in FEW)])
def test_the_rows_are_those_of_a_raw_loop(kind):
    env = made()
    batch = collect(env, POLICIES[kind](env), *LENGTHS, seed=1)
    seeds = partial(fold, key_from_seed(1), Purpose.RESET)
    for lane in range(4):
        raw, episode, over = Race(), 0, {}
        raw.reset(seed=seeds(lane, 0)[0])
        for frame in batch[lane].unbind(0):
            mover, seen = raw.agent_selection, raw.observe(raw.agent_selection)
            assert frame["current_player"] == NAMES.index(mover)
            assert all(np.array_equal(frame[key], seen[key]) for key in seen)
            raw.step(int(frame["action"]))
            assert frame["next", "reward"].tolist() == [raw.rewards.get(name, 0.0) for name in NAMES]
            assert frame["next", "info", "time"].tolist() == [raw.infos.get(n, {"time": 0})["time"] for n in NAMES]
            over |= {name: "end" for name, ended in raw.terminations.items() if ended}
            over |= {name: "cut" for name, ended in raw.truncations.items() if ended}
            ended = len(over) == len(NAMES)
            while not ended and raw.terminations[raw.agent_selection]:
                raw.step(None)
            after = raw.observe(raw.agent_selection)
            assert all(np.array_equal(frame["next", key], after[key]) for key in after)
            assert frame["next", "current_player"] == NAMES.index(raw.agent_selection)
            assert frame["next", "done"] == ended
            assert frame["next", "truncated"] == (ended and "cut" in over.values())
            if ended:
                episode, over = episode + 1, {}
                raw.reset(seed=seeds(lane, episode)[0])
    assert episode > 1
    if kind in ("torch", "recurrent"):
        pace = {"wait": "any", "min_ready": 1} if kind == "recurrent" else {}
        assert_same(batch, collect(made(num_workers=2, **pace), POLICIES[kind](made()), *LENGTHS, seed=1))


def test_one_policy_for_all_players_is_that_policy():
    """All get the same noise."""
    policy = torch_policy(3)
    assert_same(collect(made(), policy, 20, seed=2), collect(made(), fc.by_player([policy] * 3), 20, seed=2))


def test_one_policy_in_several_places_acts_with_the_parameters_of_each():
    one, params = torch_policy(0), {str(number): Net(number) for number in range(3)}
    same, others = (fc.by_player(policies) for policies in ([one] * 3, [torch_policy(0) for _ in range(3)]))
    assert_same(*(collect(made(), policy, 40, params=params) for policy in (same, others)))
    assert {policy.module for policy in same.policies.values()} == {one.module}


def test_one_player_who_explores_is_scored():
    policy = fc.by_player([torch_policy(0, fc.heads.boltzmann(0.5)), torch_policy(1), torch_policy(2)])
    batch = collect(made(), policy, 20)
    scores = fc.evaluate_actions(policy.policies["0"], None, batch)["action_log_prob"]
    own = batch["current_player"] == 0
    torch.testing.assert_close(scores[own], batch["action_log_prob"][own])


def test_the_moves_of_a_game_are_counted_across_batches():
    (env, policy, state), batches = fresh("pettingzoo/classic/tictactoe_v3", num_envs=2), [None]
    for _ in range(8):
        state, batch = fc.rollout(env, policy, state, 3)
        batches.append(batch)

    def counted(moves):
        return {*zip(moves["collector", "traj_ids"].tolist(), moves["collector", "step"].tolist(), strict=True)}

    found = set().union(*(counted(fc.player_trajectories(new, old)) for old, new in itertools.pairwise(batches)))
    assert found == counted(fc.player_trajectories(torch.cat(batches[1:], 1)))


def naive(batch, players):
    """The moves of each player of a lane, by a loop: pairs of frames, and sums of rewards."""
    moves, open_ = [], {}
    for frame in batch.unbind(0):
        for player, move in open_.items():
            move["reward"] += frame["next", "reward"][player].item()
        player = int(frame["current_player"])
        open_[player] = {"first": frame, "reward": frame["next", "reward"][player].item(), "player": player}
        over = bool(frame["next", "done"])
        for player in [*open_] if over else [int(frame["next", "current_player"])]:
            if player in open_:
                moves.append(open_.pop(player) | {"last": frame})
        if over:
            open_.clear()
    return [move for player in range(players) for move in moves if move["player"] == player]


@pytest.mark.parametrize("seed", range(scaled(1)))
def test_moves_are_those_of_a_loop(seed):
    env = made()
    policy = POLICIES["recurrent"](env)
    state, batches = fc.init(env, policy, seed=seed), []
    for length in (3, 20, 9):
        state, batch = fc.rollout(env, policy, state, length)
        batches.append(batch)
    whole = torch.cat(batches, 1)
    rows = fc.player_trajectories(whole)
    moves = [naive(whole[lane], 3) for lane in range(4)]
    wanted = [move for player in range(3) for lane in moves for move in lane if move["player"] == player]
    assert rows.batch_size == (len(wanted),)
    for row, move in zip(rows.unbind(0), wanted, strict=True):
        assert row["next", "reward"].tolist() == [move["reward"]]
        assert torch.equal(row["observation"], move["first"]["observation"])
        assert torch.equal(row["next", "observation"], move["last"]["next", "observation"])
        assert row["next", "terminated"] == move["last"]["next", "terminated"]
        assert row["collector", "traj_ids"] == move["first"]["collector", "traj_ids"] * 3 + move["player"]
    parts = [fc.player_trajectories(each, before) for each, before in zip(batches, [None, *batches], strict=False)]
    one, other = (sorted(each["action_log_prob"].tolist()) for each in (rows, torch.cat(parts)))
    assert {*other} <= {*one}
    assert len(one) - len(other) <= 2  # moves whose outcome comes two batches later
    single = fc.player_trajectories(whole[0])
    assert_same(single, rows[rows["collector", "lane"] < 3])
    assert fc.MultiStep(gamma=0.9, n_steps=3)(rows).batch_size == rows.batch_size
    storage, sampler = fc.LazyTensorStorage(1000), fc.samplers.SliceSampler(slice_len=2)
    buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
    buffer.extend(rows)
    drawn = buffer.sample().reshape(4, 2)
    assert (drawn["next", "observation"][:, 0] == drawn["observation"][:, 1]).all()
    # recurrent states have gone on where their player moved only
    for player in range(2):
        own = rows[rows["collector", "lane"] % 3 == player]
        scored = fc.evaluate_actions(policy.policies[str(player)], None, own)
        torch.testing.assert_close(scored["action_log_prob"], own["action_log_prob"], atol=1e-5, rtol=1e-5)
        within = own["collector", "step"][1:] > own["collector", "step"][:-1]
        hidden = own["recurrent"]
        assert (hidden[own["collector", "step"] == 0] == 0).all()
        assert (hidden[1:][within] != 0).any(-1).all()


def test_past_selves_have_lanes_of_their_own():
    """A population acts for a player: each member in its group of lanes."""
    params, _ = torch.func.stack_module_state([Net(seed) for seed in (1, 5)])
    frozen = fc.population(torch_policy(1), params)
    both = fc.by_player([torch_policy(0), frozen, torch_policy(2)])
    batch = collect(made(), both, 25, seed=3)
    for lanes, seed in ((slice(0, 2), 1), (slice(2, 4), 5)):
        alone = collect(made(), fc.by_player([torch_policy(0), torch_policy(seed), torch_policy(2)]), 25, seed=3)
        assert torch.equal(batch["action"][lanes], alone["action"][lanes])
    assert_same(batch, collect(made(num_workers=2), both, 25, seed=3))
    for kind, makes, frames in ((fc.SyncDataCollector, made, 20), (fc.MultiSyncDataCollector, [made, made], 40)):
        with kind(makes, both, frames_per_batch=frames, total_frames=2 * frames, seed=4) as collector:
            assert [each.numel() for each in collector] == [frames] * 2


@pytest.mark.parametrize("kind", ["recurrent", *in_soak(["random", "torch", "jax"])])
def test_games_in_jax(kind):
    """The loop is one program; each policy acts for its player."""
    sizes = {"inputs": 18, "choices": 9}

    def memory(params, seen, hidden):
        return legal(params, seen) + hidden[:, :1], hidden + 1

    weights = jax.random.normal(jax.random.PRNGKey(2), (18, 9))
    counting = fc.jax_policy(memory, weights, head=fc.heads.categorical, initial_state=jnp.zeros(1), record_state=True)
    second = {
        "jax": lambda env: jax_policy(1, **sizes),
        "random": fc.random_policy,
        "torch": lambda env: torch_policy(1, **sizes),
        "recurrent": lambda env: counting,
    }[kind]
    env = fc.make_env("pgx/tic_tac_toe", num_envs=6)
    first = jax_policy(0, **sizes)
    policy = fc.by_player([first, second(env)])
    assert fc.explain(env, policy).loop == "fused"
    batch = collect(env, policy, 12, 12, seed=5)
    assert batch["action_mask"].gather(-1, batch["action"][..., None]).all()
    rows = fc.player_trajectories(batch)
    own = rows[rows["current_player"] == 0]
    scored = fc.evaluate_actions(first, None, fc.interop.to_jax(own.unlock_()))["action_log_prob"]
    np.testing.assert_allclose(scored, own["action_log_prob"], atol=1e-5)
    theirs = rows[rows["current_player"] == 1]
    if kind == "random":
        assert not theirs["action_log_prob"].any()
    if kind == "recurrent":
        assert torch.equal(theirs["recurrent"][:, 0].long(), theirs["collector", "step"])


def test_classic_games():
    env = fc.make_env("pettingzoo/classic/connect_four_v3", num_envs=2)
    batch = collect(env, fc.random_policy(env), 60, seed=0)
    assert batch["observation"].shape == (2, 60, 6, 7, 2)
    assert batch["next", "reward"].sum(-1).eq(0).all()
    stats = fc.evaluate(env, fc.by_player([fc.random_policy(env)] * 2), episodes=6, seed=0)
    assert stats.returns.shape == (6, 2)
    assert stats.returns.sum(-1).eq(0).all()
    assert "same_seed" in fc.testing.check_env("pettingzoo/classic/tictactoe_v3", num_envs=3, steps=40).passed


def swapped():
    env = made()
    one, other = torch_policy(0), fc.random_policy(env)
    state = fc.init(env, fc.by_player([one, other, other]), seed=0)
    return fc.rollout(env, fc.by_player([other, one, other]), state, 2)


keyed = fc.jax_policy(lambda params, seen, key: seen, None, head=fc.heads.categorical)


@pytest.mark.parametrize(("do", "error", "says"), [
    (lambda: made(groups={"a": NAMES}), ValueError, "in turns, which take neither groups nor state"),
    (lambda: fc.envs.from_pettingzoo(partial(Race, wide=True)), ValueError, "bob has the spaces .*expected equal"),
    (lambda: fc.record(made(), fc.random_policy(made()), "x.gif"), ValueError, r"env_kwargs={'render_mode'"),
    (lambda: fc.by_player([]), ValueError, "policies is empty"),
    (lambda: fc.by_player([3]), TypeError, "expected a Policy"),
    (lambda: collect(made(), fc.by_player([torch_policy(0)] * 2), 3), ValueError, "acts for 2 players.*Discrete"),
    (lambda: collect(fc.make_env("CartPole-v1"), fc.by_player([torch_policy(0)]), 3), ValueError, "by_group for"),
    (lambda: swapped(), ValueError, "policy state TorchPolicyState, this policy wants NoneType"),
    (lambda: fc.player_trajectories(fc.rollout(*fresh("CartPole-v1"), 3)[1]), ValueError, "no tensor current_player"),
    (lambda: fc.player_trajectories(made()), TypeError, "the batch is"),
    (lambda: fc.by_player([keyed, torch_policy(0)]).noise(made().action_spec), fc.PolicyError, "take keys of JAX"),
])  # fmt: skip
def test_errors(do, error, says):
    with pytest.raises(error, match=says):
        do()

"""Agents in JAX: groups beside a raw loop, one policy for each group in one compiled loop, and JaxMARL."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.keys import Purpose, key_from_seed
from tests.envs import test_agents
from tests.envs.test_agents import POLICIES
from tests.envs.test_turns import recurrent
from tests.support.agents import AGENTS, CLOCK, GROUPS, check_frames
from tests.support.compare import assert_close, assert_same, collect
from tests.support.envs.jax_counting import folded
from tests.support.running import SCALE, in_soak

LANES, LENGTHS = 3, (15, 15) if SCALE == 1 else (7, 1, 22)  # each length is a program


def seen(time, ends):
    rows = time + ends / 10
    groups = {"ant": jnp.stack([rows[:2]] * 2, -1), "bee": jnp.stack([rows[2:]] * 3, -1)}
    return groups | {"state": time.astype(jnp.float32)[None]}


def reset(key, params):
    state = jnp.int32(0), jax.random.randint(key, (3,), 2, 8)
    return state, seen(*state)


def flags(time, ends):
    """Agents leave at times of their own, come back two steps later, and all leave at 12, or by time."""
    over = (time >= ends) & (time < ends + 2) | (time >= 12)
    by_time = over & (ends % 2 == 0)
    return over & ~by_time, by_time


def step(key, state, actions, params):
    time, ends = state[0] + 1, state[1]
    noise = jax.random.uniform(key)
    rewards = {"ant": actions["ant"] + ends[:2] + noise, "bee": actions["bee"] + ends[2:] + noise}
    terminated, truncated = ({"ant": flag[:2], "bee": flag[2:], "all": flag.all()} for flag in flags(time, ends))
    info = {"ant": {"hit": actions["ant"] * 2}, "clock": time}
    return (time, ends), seen(time, ends), rewards, terminated, truncated, info


def made(num_envs=LANES, **kwargs):
    kwargs = {"groups": GROUPS, "state_space": CLOCK, "info_keys": ["ant.hit", "clock"]} | kwargs
    return fc.envs.from_functions(reset, step, num_envs=num_envs, name="field", **kwargs)


class Field(fc.envs.JaxEnvBase):
    groups, state_space = GROUPS, CLOCK

    def reset(self, key, params):
        return reset(key, params)

    def step(self, key, state, action, params):
        return fc.envs.Transition(*step(key, state, action, params))


def keyed(start, step):
    """The functions of one lane with the keys of its episodes and steps."""
    key = jnp.asarray(key_from_seed(1))

    def begin(lane, episode):
        return start(folded(key, 0, Purpose.RESET, 0, lane, 0, episode))

    def move(lane, t, state, actions):
        actions = {name: jnp.asarray(action.numpy()) for name, action in actions.items()}
        return step(folded(key, 0, Purpose.DYNAMICS, 0, lane, 0, t), state, actions)

    return begin, move


def raw_start(key):
    state, rows = reset(key, None)
    return state, {name: rows[name[:3]][int(name[-1])] for name in AGENTS}


def raw_step(key, state, actions):
    by_group = {"ant": jnp.stack([actions["ant_0"], actions["ant_1"]]), "bee": actions["bee_0"][None]}
    state, rows, reward, terminated, truncated, _ = step(key, state, by_group, None)
    places = [(name, name[:3], int(name[-1])) for name in AGENTS]
    ends = {name: (terminated[group][row], truncated[group][row]) for name, group, row in places}
    return state, *({name: each[group][row] for name, group, row in places} for each in (rows, reward)), ends


@functools.cache
def fused(kind):
    """An environment and a policy, the same for all tests, so that each program is compiled once."""
    return (env := made()), POLICIES[kind](env)


# "mixed" has one of each.
@pytest.mark.parametrize("kind", [kind for kind in POLICIES if SCALE > 1 or kind in ("together", "recurrent")])
def test_the_rows_are_those_of_a_raw_loop(kind):
    env, policy = fused(kind)
    assert fc.explain(env, policy).loop == "fused"
    batch = collect(env, policy, *LENGTHS)
    whole = kind == "random"  # for the others, one lane shows that their actions are those that were executed
    ends = check_frames(env, batch if whole else batch[:1], *keyed(jax.jit(raw_start), jax.jit(raw_step)))
    assert sum(ends.values()) > 3 or not whole
    assert batch["next", "ant", "info", "hit"].equal(2 * batch["ant", "action"])
    assert batch["state"].equal(batch["collector", "step"][..., None].float())
    assert batch["next", "info", "clock"].equal(batch["collector", "step"].int() + 1)


def crossing(policy):
    """The same policy in Torch, step by step."""
    return fc.by_group({name: each_in_torch(part) for name, part in policy.policies.items()})


def each_in_torch(part):
    own = {"initial_state": part.initial_state} if part.initial_state is not None else {}
    return fc.torch_policy(part.module, head=part.head, compile="eager", **own)


@pytest.mark.parametrize("kind", ["recurrent", *in_soak(["torch"])])
def test_a_lowered_policy_acts_as_in_torch(kind):
    """So does its noise: a function of lane, agent and step in every loop."""
    env, policy = fused(kind)
    slow = crossing(policy)
    assert fc.explain(env, slow).loop == "crossing"
    assert_close(collect(env, policy, *LENGTHS), collect(env, slow, *LENGTHS))


@pytest.mark.evening
def test_single_lanes():
    """Those of a class are in `test_torch_agents.py`."""
    alone = made(None)
    batch = collect(alone, POLICIES["mixed"](alone), 5)
    assert batch["ant", "action"].shape == batch["ant", "action_log_prob"].shape == (5, 2)


def test_traced_batches_are_by_group():
    env, in_torch = fused("recurrent")
    policy = fc.lower_policy(in_torch, env)
    key = jnp.asarray(key_from_seed(1))

    @jax.jit
    def run(params):
        state = fc.traced.init(env, policy, params, key=key)
        return fc.traced.rollout(env, policy, params, state, 15)[1]

    arrays = run(policy.params)
    assert arrays["ant"]["action_log_prob"].shape == (15, LANES, 2)
    assert_close(fc.deliver(arrays, env), collect(env, in_torch, 15))


def test_states_files_and_collectors(tmp_path):
    env, policy = fused("recurrent")
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=3), 15)
    fc.save(tmp_path / "state", state)
    _, batch = fc.rollout(env, policy, state, 15)
    assert_same(batch, fc.rollout(env, policy, fc.load(tmp_path / "state", env, policy), 15)[1])
    with fc.SyncDataCollector(env, policy, frames_per_batch=45, total_frames=90, seed=1) as collector:
        got = torch.cat([each.clone() for each in collector], -1)
    assert_same(got, collect(env, policy, 15, 15))
    assert len(fc.evaluate(env, policy, episodes=4, seed=0)) == 4
    env, policy = fused("together")
    rows = fc.agents_as_rows(collect(env, policy, 15), "bee")
    again = fc.evaluate_actions(policy.policies["bee"], None, rows)["action_log_prob"]
    torch.testing.assert_close(again[rows["mask"]], rows["action_log_prob"][rows["mask"]])


def nan_logits(params, x):
    return x[..., :1] * params


LOST = fc.jax_policy(nan_logits, jnp.full(3, jnp.nan), head=fc.heads.epsilon_greedy(0.1))


@pytest.mark.parametrize(("do", "error", "says"), [
    (lambda: made(groups={"ant": 3}), TypeError, "a group is 3"),
    (lambda: made(action_space=spaces.Discrete(2)), ValueError, "expected groups alone"),
    (lambda: made(groups={**GROUPS, "cat": GROUPS["bee"]}), fc.EnvError, r"reset of field .*'cat'\]"),
    (lambda: made(state_space=spaces.Box(0, 9, (2,))), fc.EnvError, r"'state' .* expected float32 \[2\]"),
    (lambda: fc.envs.from_functions(reset, lambda *a: (*step(*a)[:3], 0.0, False), groups=GROUPS), fc.EnvError,
     "flag of 'ant' .* expected bool"),
    (lambda: collect(made(), fc.by_group(POLICIES["jax"](None).policies | {"ant": LOST}), 3), fc.PolicyError, "NaN"),
    (lambda: fc.make_env("jaxmarl/MPE_simple_v9"), ValueError, "did you mean"),
    (lambda: fc.envs.from_jaxmarl("MPE_simple_spread_v3", state=True), ValueError, "share no 'world_state'"),
])  # fmt: skip
def test_errors(do, error, says):
    with pytest.raises(error, match=says):
        do()


# JaxMARL: an id, and keywords for `jaxmarl.make`.
MARL = {
    "spread": ("MPE_simple_spread_v3", {"num_agents": 4, "num_landmarks": 2, "max_steps": 6}),
    "tag": ("MPE_simple_tag_v3", {"max_steps": 8}),
    "overcooked": ("overcooked", {"max_steps": 9}),
    "smax": ("HeuristicEnemySMAX", {"num_allies": 3, "num_enemies": 2, "max_steps": 25}),
    "hanabi": ("hanabi", {"num_agents": 2, "max_life_tokens": 2}),
}
DRAWN = np.random.default_rng(0).integers((1, 1, 2), (6, 5, 12), (50, 3)).tolist()
MARL |= {
    f"spread {n} {m} {steps}": ("MPE_simple_spread_v3", {"num_agents": n, "num_landmarks": m, "max_steps": steps})
    for n, m, steps in DRAWN
}


@pytest.mark.filterwarnings("ignore:OvercookedV2 is now released:DeprecationWarning")
@pytest.mark.parametrize("name", ["spread", *in_soak(name for name in MARL if name != "spread")])
def test_the_frames_are_those_of_jaxmarl(name):
    import jaxmarl

    env_id, kwargs = MARL[name]
    env, raw = fc.make_env(f"jaxmarl/{env_id}", num_envs=2, **kwargs), jaxmarl.make(env_id, **kwargs)
    endless = jaxmarl.make(env_id, **kwargs | ({"max_steps": 10**6} if "max_steps" in kwargs else {}))
    legal = {"smax": "get_avail_actions", "hanabi": "get_legal_moves"}.get(name)

    def observed(rows, state):
        masks = getattr(raw, legal)(state) if legal else {}
        own = {each: rows[each] for each in raw.agents}
        masked = {each: {"observation": own[each], "action_mask": mask != 0} for each, mask in masks.items()}
        return masked if legal else own

    def start(key):
        rows, state = raw.reset(key)
        return state, observed(rows, state)

    def step(key, state, actions):
        rows, after, reward, done, _ = raw.step_env(key, state, actions)
        alone = endless.step_env(key, state, actions)[3]
        both = {each: (alone[each] | alone["__all__"], done[each] | done["__all__"]) for each in raw.agents}
        ends = {each: (terminated, over & ~terminated) for each, (terminated, over) in both.items()}
        return after, observed(rows, after), reward, ends

    batch = collect(env, fc.random_policy(env), 15, 15)
    assert sum(check_frames(env, batch, *keyed(jax.jit(start), jax.jit(step))).values()) > 1
    for group in env.groups if legal else ():
        mask, action = batch[group, "observation", "action_mask"], batch[group, "action"]
        assert mask.gather(-1, action[..., None])[batch[group, "mask"]].all()


@pytest.mark.evening
def test_what_agents_of_jaxmarl_share_and_report():
    keywords = {"num_allies": 2, "num_enemies": 2, "max_steps": 5}
    keywords["groups"] = {"all": ["ally_0", "ally_1", "enemy_0", "enemy_1"]}
    env = fc.make_env("jaxmarl/SMAX", num_envs=2, state=True, **keywords)
    batch = collect(env, fc.random_policy(env), 6)
    assert batch["state"].shape[:2] == (2, 6)
    assert batch["all", "action"].shape == (2, 6, 4)
    with pytest.warns(DeprecationWarning, match="OvercookedV2"):
        env = fc.make_env("jaxmarl/overcooked", num_envs=2, info_keys=["shaped_reward"])
    assert collect(env, fc.random_policy(env), 6)["next", "agent", "info", "shaped_reward"].shape == (2, 6, 2)


def players(env, **options):
    return fc.by_player([recurrent(0, 18, 9, **options), fc.random_policy(env)])


def test_players_of_a_game_in_one_loop():
    """As step by step in Torch: each policy acts, and remembers, where it is the turn of its player."""
    env = fc.make_env("pgx/tic_tac_toe", num_envs=LANES)
    policy, slow = players(env), players(env, compile="eager")
    assert (fc.explain(env, policy).loop, fc.explain(env, slow).loop) == ("fused", "crossing")
    batch = collect(env, policy, *LENGTHS)
    assert_close(batch, collect(env, slow, *LENGTHS))
    assert batch["action_mask"].gather(-1, batch["action"][..., None]).all()
    assert (batch["action_log_prob"][batch["current_player"] == 1] == 0).all()
    assert fc.player_trajectories(batch)["next", "reward"].shape[-1] == 1


@pytest.mark.parametrize("kind", in_soak(["jax", "together"]))
def test_random_steps_have_the_log_probabilities_of_the_executed_actions(kind):
    env = made()
    batch = collect(env, POLICIES[kind](env), 8, random_steps=4)
    for name in GROUPS:
        scores, agents = batch[name, "action_log_prob"], 2 if (kind, name) == ("together", "ant") else 1
        wanted = torch.tensor(-np.log(3) * agents, dtype=torch.float32)
        torch.testing.assert_close(scores[:, :4], wanted.expand_as(scores[:, :4]))
        assert not torch.isclose(scores[:, 4:], wanted).all()


@pytest.mark.parametrize("made", [made, test_agents.made])
def test_what_an_agent_that_leaves_observes_last_is_in_compact_batches(made):
    def batches(**options):
        with fc.SyncDataCollector(made(), frames_per_batch=45, total_frames=90, seed=1, **options) as collector:
            return [batch.clone() for batch in collector]

    left = 0
    for one, other in zip(batches(), batches(compact_obs=True), strict=True):
        assert_same(one, fc.next_observations(other))
        for group in ("ant", "bee"):
            goes = one[group, "mask"] & ~one["next", group, "mask"] & ~one["next", "done"]
            left += int((one["next", group, "observation"][goes] != 0).any(-1).sum())
    assert left

"""What the adapters of JAX suites take and refuse, their spaces, and their options."""

import sys

import brax.envs
import gymnax
import jax
import jax.numpy as jnp
import jumanji
import navix
import numpy as np
import pgx
import pytest
import torch
import xminigrid
from brax.envs.wrappers.training import AutoResetWrapper, EpisodeWrapper
from flax import struct
from gymnasium import spaces
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams
from xminigrid.wrappers import DirectionObservationWrapper, GymAutoResetWrapper

import funcollect as fc
from funcollect import envs
from funcollect.envs.jax_envs.jax_env import reset_lane, step_lane
from funcollect.errors import EnvError
from funcollect.specs import disassemble
from tests.support.compare import assert_same, collect, fresh
from tests.support.envs.jax_suites import LaterWalk, functions_suite, reset, step
from tests.support.running import once

IDS = {
    "gymnax": ("gymnax/CartPole-v1", "gymnax/cartpol-v1", "'CartPole-v1'"),
    "brax": ("brax/fast", "brax/Fasts", "'fast'"),
    "jumanji": ("jumanji/PacMan-v1", "jumanji/Pacman-v0", "'PacMan-v1'"),
    "pgx": ("pgx/tic_tac_toe", "pgx/go9x9", "'go_9x9'"),
    "navix": ("navix/Navix-DoorKey-5x5-v0", "navix/Navix-Doorkey-5x5", "'Navix-DoorKey-5x5-v0'"),
    "xminigrid": ("xminigrid/MiniGrid-DoorKey-5x5", "xminigrid/MiniGrid-Doorkey-5", "'MiniGrid-DoorKey-5x5'"),
    "craftax": ("craftax/Craftax-Symbolic-v1", "craftax/Craftax-Symbolic", "'Craftax-Symbolic-v1'"),
    "mujoco_playground": ("playground/PendulumSwingup", "playground/PendulumSwingUps", "'PendulumSwingup'"),
}


def of_packages(names):
    """The names, marked if `jax-envs` lacks their package."""
    marks = {"craftax": [pytest.mark.needs("craftax")]}
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


@pytest.mark.parametrize("suite", of_packages(IDS))
def test_ids(suite, monkeypatch):
    known, unknown, near = IDS[suite]
    env = fc.make_env(known, num_envs=3)
    assert (repr(env), env.backend) == (f"JaxEnv({known!r}, num_envs=3)", "jax")
    with pytest.raises(ValueError, match=f"has no environment .*did you mean .*{near}"):
        fc.make_env(unknown)
    for name in [name for name in sys.modules if name == suite or name.startswith(f"{suite}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, suite, None)
    package = suite.removeprefix("mujoco_")
    extra = "" if suite == "craftax" else r"pip install 'funcollect\[jax-envs\]', .* "
    says = rf"{package} is not installed: {extra}pip install {package}$"
    with pytest.raises(ImportError, match=says):
        fc.make_env(known)


def test_options_that_a_suite_lacks_and_its_own_instance_are_pointed_to_its_adapter():
    says = "'pgx/tic_tac_toe': .* unexpected keyword argument 'info_keys': leave it out; see funcollect.envs.from_pgx"
    with pytest.raises(TypeError, match=says):
        fc.make_env("pgx/tic_tac_toe", info_keys="a")
    with pytest.raises(TypeError, match=r"pass it alone to funcollect.envs.from_gymnax, .* num_envs="):
        fc.make_env([gymnax.make("CartPole-v1")[0]] * 2)


INSTANCES = {
    "gymnax": lambda: gymnax.make("CartPole-v1")[0],
    "its pair": lambda: gymnax.make("CartPole-v1"),
    "brax": lambda: brax.envs.get_environment("fast"),
    "jumanji": lambda: jumanji.make("Snake-v1"),
    "navix": lambda: navix.make("Navix-Empty-8x8-v0"),
    "pgx": lambda: pgx.make("tic_tac_toe"),
    "xminigrid": lambda: xminigrid.make("MiniGrid-Empty-5x5")[0],
    "its pair too": lambda: xminigrid.make("XLand-MiniGrid-R1-9x9"),
    "craftax": lambda: craftax_env("Craftax-Classic-Symbolic-v1"),
    "FuncEnv": CartPoleFunctional,
}


def craftax_env(name, auto_reset=False):
    from craftax.craftax_env import make_craftax_env_from_name

    return make_craftax_env_from_name(name, auto_reset)


@pytest.mark.parametrize("suite", of_packages(INSTANCES))
def test_instances_of_suites_go_to_their_adapters(suite):
    made = INSTANCES[suite]()
    assert fc.make_env(made, num_envs=2, max_episode_steps=7).max_episode_steps == 7
    assert fc.make_env(lambda: made, num_envs=2).label == fc.make_env(made).label


def test_gymnaxs_pair_has_its_own_parameters():
    env, params = gymnax.make("CartPole-v1")
    made = fc.make_env((env, params.replace(gravity=1.0)), num_envs=2)
    assert made.default_params.gravity == 1.0


@pytest.mark.evening
def test_a_ruleset_may_differ_between_lanes_and_the_limit_is_of_the_parameters():
    """In XLand-MiniGrid a rule puts another tile in place of what the agent holds; here only the objects differ."""
    raw, params = xminigrid.make("XLand-MiniGrid-R1-9x9", max_steps=4)
    env = fc.make_env((raw, params), num_envs=2, param_keys=["ruleset.init_tiles"])
    policy = fc.random_policy(env)
    ball, none = [xminigrid.core.constants.Tiles.BALL, xminigrid.core.constants.Colors.RED], [0, 0]
    tiles = jnp.array([[ball] * 30, [none] * 30], params.ruleset.init_tiles.dtype)[:, : len(params.ruleset.init_tiles)]
    given = params.replace(ruleset=params.ruleset.replace(init_tiles=tiles))
    state, batch = fc.rollout(env, policy, fc.set_env_params(env, fc.init(env, policy, seed=0), given), 9)
    assert batch["next", "truncated"][..., 0].nonzero()[:, 1].tolist() == [3, 7] * 2
    assert not batch["next", "terminated"].any()
    grids = state.env_state.current.state.grid
    balls = (grids == jnp.array(ball)).all(-1).sum((1, 2))
    assert (balls[0], balls[1]) == (len(params.ruleset.init_tiles), 0)


def test_wrappers_of_xland_minigrid_that_reset_are_refused():
    raw, params = xminigrid.make("MiniGrid-Empty-5x5")
    for wrapped in (GymAutoResetWrapper(raw), DirectionObservationWrapper(GymAutoResetWrapper(raw))):
        with pytest.raises(ValueError, match=r"is wrapped in GymAutoResetWrapper, .*: pass the environment that it wr"):
            envs.from_xminigrid(wrapped, params)
    seen = fc.make_env((DirectionObservationWrapper(raw), params)).observation_space
    assert {name: space.shape for name, space in seen.items()} == {"img": (7, 7, 2), "direction": (4,)}


@pytest.mark.evening
@pytest.mark.needs("craftax")
@pytest.mark.parametrize("auto_reset", [False, True])
def test_in_craftax_death_terminates_and_time_truncates(auto_reset):
    raw = craftax_env("Craftax-Classic-Symbolic-v1", auto_reset)
    env = fc.make_env((raw, raw.default_params.replace(max_timesteps=9)))
    state, _ = env.reset(key := jnp.array([3, 4], jnp.uint32), None)
    step = jax.jit(lambda state: env.step(key, state, 0, None))
    for health, timestep, flags in ((9, 3, (False, False)), (-9, 3, (True, False)), (9, 8, (False, True))):
        moved = step(state.replace(player_health=health, timestep=timestep))
        assert (bool(moved.terminated), bool(moved.truncated)) == flags


@struct.dataclass
class CraftedParams:
    max_length: int = 10


class LikeCraftax(LaterWalk):
    """gymnax's class, but neither `max_timesteps` nor `max_steps_in_episode`."""

    default_params = CraftedParams()

    def reset_env(self, key, params):
        return super().reset_env(key, params, None)


class OfPairs(LikeCraftax):
    def reset_env(self, key, params):
        seen, state = super().reset_env(key, params)
        return (seen, seen), state


@pytest.mark.parametrize("kind", [LikeCraftax, OfPairs])
def test_an_environment_that_only_looks_like_gymnaxs_is_refused_as_it_is_made(kind):
    says = rf"from_gymnax cannot adapt {kind.__name__}, .* expected gymnax's interface: .*from_functions"
    with pytest.raises(TypeError, match=says):
        fc.make_env(kind())


class Duck:
    """Of no package, with the members of a kind of environment."""


@pytest.mark.parametrize(("members", "adapter"), [
    ("reset_env", "from_gymnax"),
    ("init num_players num_actions", "from_pgx"),
    ("num_envs single_observation_space single_action_space reset step", "from_torch_vector_env"),
    ("", "from_functions"),
])  # fmt: skip
def test_a_refusal_names_the_adapter_that_takes_such_objects(members, adapter):
    duck = type("Duck", (), dict.fromkeys(members.split()))()
    with pytest.raises(TypeError, match=rf"env is Duck, expected .*{adapter}"):
        fc.make_env(duck)


def delivered(env):
    """What reset and step return, without running them: arrays by shape and dtype."""
    action = jnp.zeros(env.action_spec.shape, jax.dtypes.canonicalize_dtype(env.action_space.dtype))

    def both(key):
        env_state, observation = reset_lane(env, key, None)
        return observation, step_lane(env, key, env_state, action, None)

    return jax.eval_shape(both, jnp.zeros(2, jnp.uint32))


@pytest.mark.parametrize(("name", "rewards"), [
    ("gymnax/MetaMaze-misc", ()),
    ("gymnax/Breakout-MinAtar", ()),
    ("gymnax/Catch-bsuite", ()),  # its own space says int32
    ("jumanji/PacMan-v1", ()),  # named tuples within one
    ("jumanji/Connector-v3", (10,)),
    ("pgx/tic_tac_toe", (2,)),
    ("pgx/2048", ()),
    ("navix/Navix-DoorKey-5x5-v0", ()),
    ("xminigrid/XLand-MiniGrid-R4-13x13", ()),
    pytest.param("craftax/Craftax-Symbolic-v1", (), marks=(pytest.mark.evening, pytest.mark.needs("craftax"))),
    ("brax/fast", ()),
])  # fmt: skip
def test_spaces_are_what_is_delivered(name, rewards):
    env = fc.make_env(name)
    observation, moved = delivered(env)
    for given in (observation, moved.observation):
        parts = disassemble(env.observation_space, given)
        got = [(part.shape, part.dtype) for part in parts]
        assert got == [(leaf.shape, leaf.dtype) for leaf in env.observation_leaves]
    assert moved.reward == jax.ShapeDtypeStruct(rewards, jnp.float32)
    assert moved.terminated == moved.truncated == jax.ShapeDtypeStruct((), bool)


def test_bounds_come_from_the_suite():
    assert fc.make_env("gymnax/Pendulum-v1").action_space == spaces.Box(-2.0, 2.0, (1,))
    cities = fc.make_env("jumanji/MultiCVRP-v0").action_space
    assert (cities.low.min(), cities.high.max(), cities.dtype) == (0, 21, np.int16)
    mask = fc.make_env("pgx/tic_tac_toe").observation_space
    assert (mask["action_mask"].dtype, mask["current_player"]) == (bool, spaces.Discrete(2, dtype=np.int32))


def rollout(env, length=64):
    return collect(env, fc.random_policy(env), length, seed=0)


def test_one_hot_actions_are_the_same_actions():
    plain, hot = (rollout(functions_suite(num_envs=None, one_hot=one_hot).env) for one_hot in (False, True))
    assert hot["action"].shape == (64, 3)
    assert (hot["action"].argmax(-1) - 1 == plain["action"]).all()
    assert set(plain["action"].tolist()) == {-1, 0, 1}
    assert_same(plain["next"], hot["next"])


def test_info_is_recorded_by_name():
    own, sums = functions_suite(info_keys=()).env, {"sums": {"x": jnp.ones(2)}, "sums.y": 3}
    assert delivered(own)[1].info == {}
    nested = lambda *given: (*(moved := step(*given))[:5], moved[5] | sums)  # noqa: E731
    named = {"observation_space": own.observation_space, "info_keys": ["far", "sums.x", "sums.y"]}
    env = envs.from_functions(reset, nested, action_space=own.action_space, num_envs=2, **named)
    infos = (batch := rollout(env, 9))["next", "info"]
    assert (infos["far"] == -batch["next", "reward"][..., 0]).all()
    assert (infos["sums.x"].unique().tolist(), infos["sums.y"].unique().tolist()) == ([1], [3])
    with pytest.raises(ValueError, match=r"gymnax/CartPole-v1 has no info \['discounts'\], expected .*'discount'"):
        delivered(fc.make_env("gymnax/CartPole-v1", info_keys=["discounts"]))


def test_functional_takes_params():
    def speed(*params):
        env, key = envs.from_functional(CartPoleFunctional(), *params), jnp.array([3, 4], jnp.uint32)
        return abs(env.step(key, env.reset(key, None)[0], 0, None).observation[1])

    assert speed(CartPoleParams(force_mag=100.0)) > 5 * speed()


def test_with_64_bits_an_observation_may_be_wider_than_its_space():
    def step(key, place, action, params):
        return place + 0.1, place + 0.1, place[0], place[0] > 9, False

    with jax.enable_x64(True):
        both = {"observation_space": spaces.Box(-np.inf, np.inf, (2,)), "action_space": spaces.Discrete(2)}
        env = envs.from_functions(lambda key, params: (jnp.zeros(2), jnp.zeros(2)), step, **both, num_envs=2)
        env, policy, state = fresh(env)
        state, batch = fc.rollout(env, policy, state, 3)
    assert state.env_state.current.dtype == np.float64
    assert batch["observation"].dtype == batch["next", "reward"].dtype == torch.float32
    assert batch["action"].dtype == batch["collector", "traj_ids"].dtype == torch.int64


@pytest.mark.parametrize("wrap", [AutoResetWrapper, lambda env: EpisodeWrapper(env, 10, 1)])
def test_training_wrappers_are_refused(wrap):
    wrapped = wrap(brax.envs.get_environment("fast"))
    with pytest.raises(ValueError, match=r"is wrapped in (AutoReset|Episode)Wrapper, .*pass env\.unwrapped"):
        envs.from_brax(wrapped)


@pytest.mark.parametrize("adapter", [*(key.removeprefix("mujoco_") for key in IDS), "functional"])
def test_what_is_no_environment_is_refused(adapter):
    with pytest.raises(TypeError, match="env is the class CartPole: make an instance, expected an environment of"):
        getattr(envs, f"from_{adapter}")(gymnax.environments.classic_control.cartpole.CartPole)


def in_halves(*arguments):
    """`step` with a fraction in place of an integer."""
    place, (line, count), *rest = step(*arguments)
    return place, (line, count + 0.5), *rest


@pytest.mark.parametrize(("start", "move", "message"), [
    (lambda *given: reset(*given)[0], step, r"reset of .* returned a dict with the keys \[.*\], expected the pair"),
    (reset, lambda *given: step(*given)[:4], "step returned 4 values, expected"),
    (reset, in_halves, r"'observation.1' that step .* is float32 \[\], expected"),
])  # fmt: skip
def test_functions_are_checked(start, move, message):
    """The other mistakes that the check finds are in tests/core/traced/test_traced.py."""
    observed = spaces.Tuple([spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(10)])
    both = {"observation_space": observed, "action_space": spaces.Discrete(3, start=-1)}
    with pytest.raises((TypeError, EnvError), match=message) as caught:
        envs.from_functions(start, move, **both, name="walk")
    assert "walk" in str(caught.value)


def test_unknown_keywords_beside_an_instance_are_refused():
    raw = brax.envs.get_environment("fast")
    with pytest.raises(TypeError, match="from_brax has no argument env_params, foo for an environment"):
        envs.from_brax(raw, num_envs=2, env_params=None, foo=1)


class Bonus(envs.JaxEnvBase):
    """Pays an attribute of the class, and keeps something for later while it is traced."""

    observation_space, action_space, bonus, kept = spaces.Box(-9, 9, (1,)), spaces.Discrete(2), 1.0, None

    def reset(self, key, params):
        return jnp.zeros(1), jnp.zeros(1)

    def step(self, key, place, action, params):
        if self.kept is None:
            self.kept = np.ones(1)
        return envs.Transition(place + 1, place + 1, self.bonus, place[0] >= 4, False)


def over_a_variable():
    bonus = 1.0

    def step(key, place, action, params):
        return place + 1, place + 1, bonus, place[0] >= 4, False

    def change():
        nonlocal bonus
        bonus = 9.0

    def start(key, params):
        return jnp.zeros(1), jnp.zeros(1)

    both = {"observation_space": Bonus.observation_space, "action_space": Bonus.action_space}
    return envs.from_functions(start, step, **both, num_envs=2), change


def over_an_attribute():
    env = Bonus(num_envs=2)
    env.params = None  # which may be set at any time
    return env, lambda: setattr(env, "bonus", 9.0)


@pytest.mark.parametrize(("make", "compiler"), once([over_an_attribute, over_a_variable], ["xla", "eager"]))
def test_what_a_compiled_function_reads_may_not_be_set(make, compiler):
    env, change = make()
    policy = fc.torch_policy(torch.nn.Linear(1, 2), head=fc.heads.categorical, compile=compiler)
    state = fc.init(env, policy, seed=0)
    for _ in range(2):
        state, _ = fc.rollout(env, policy, state, 8)
    change()
    words = "reads bonus, set since it was compiled, which has no effect: pass changing values in params"
    for use in (lambda: fc.rollout(env, policy, state, 8), lambda: fc.init(env, policy, seed=0)):
        with pytest.raises(EnvError, match=words):
            use()


class Wide(Bonus):
    """Its space has integers that JAX lacks, its observations do not."""

    observation_space = spaces.Box(-(2**62), 2**62, (1,), np.int64)

    def reset(self, key, params):
        return jnp.zeros(1, int), jnp.zeros(1, int)


class Sign(torch.nn.Module):
    def forward(self, observation):
        return torch.cat([observation, -observation], -1).float()


def test_a_policy_is_lowered_for_integers_of_64_bits():
    env = Wide(num_envs=2)
    policy = fc.torch_policy(Sign(), head=fc.heads.categorical, compile="xla")
    batch = collect(env, policy, 8)
    assert fc.explain(env, policy).loop == "fused"
    assert batch["observation"][0, :6, 0].tolist() == [0, 1, 2, 3, 4, 0]

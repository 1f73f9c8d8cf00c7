"""Environments of a user's own, by the base classes or by members alone, and those in Torch that come with it."""

import math

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.envs import ActionSpec, CartPole, Pendulum, Transition, observation_leaves
from funcollect.keys import LaneKeys, Purpose, key_from_seed
from tests.support.compare import assert_same, collect, fresh
from tests.support.envs.jax_counting import counting, counting_policy
from tests.support.envs.own_envs import InParts
from tests.support.running import in_soak

LINE, PUSH = spaces.Box(-99.0, 99.0, (1,)), spaces.Discrete(2)


class JaxWalk(fc.envs.JaxEnvBase):
    observation_space, action_space = LINE, PUSH
    max_episode_steps = 6
    params = (2.0,)

    def reset(self, key, params, /):
        place = jax.random.uniform(key, (1,)) + params[0]
        return place, place

    def step(self, key, place, action, params, /):
        place = place + params[0] * (2 * action - 1)
        return Transition(place, place, place[0], place[0] > 50.0, False, {"length": params[0]})


class TorchWalk(fc.envs.TorchEnvBase):
    observation_space, action_space = LINE, PUSH
    max_episode_steps = 6
    params = (torch.tensor(2.0),)

    def reset(self, key, params, /):
        place = key.uniform(1).float() + params[0]
        return place, place

    def step(self, key, place, action, params, /):
        place = place + params[0] * (2 * action[:, None] - 1)
        ended = place[:, 0] > 50
        info = {"length": torch.as_tensor(params[0]).expand(len(key)), "noise": key.uniform(1)[:, 0]}
        return Transition(place, place, place[:, 0], ended, torch.zeros_like(ended), info)


BOTH = pytest.mark.parametrize("kind", [JaxWalk, TorchWalk])


@BOTH
def test_a_class_is_made_with_the_keywords(kind):
    assert fc.make_env(kind, num_envs=3).num_envs == 3
    assert fc.make_env(kind).num_envs is None
    with pytest.raises(TypeError, match=rf"{kind.__name__}: .*'speed'.*: leave it out, or take it in its __init__"):
        fc.make_env(kind, speed=3)


def collected(env, state=None, length=20, **changes):
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0) if state is None else state
    return fc.rollout(env, policy, state.replace(**changes), length)


@BOTH
def test_parameters_are_values_of_the_state(kind):
    env = kind(3)
    state, batch = collected(env)
    (length,) = jax.tree.leaves(state.env_params)
    assert float(length) == 2
    moved = (batch["next", "observation"] - batch["observation"]).abs()
    assert moved.allclose(torch.tensor(2.0), atol=1e-5)
    assert (batch["next", "info", "length"] == 2).all()
    _, wider = collected(env, state, env_params=(length * 4,))
    assert (wider["next", "observation"] - wider["observation"]).abs().allclose(torch.tensor(8.0), atol=1e-5)


class Branching(JaxWalk):
    def step(self, key, place, action, params, /):
        return super().step(key, place, action, params) if place[0] > 5 else None


def test_code_that_jax_cannot_trace_is_named_with_the_remedy():
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        collected(Branching(2))
    assert "step of Branching(num_envs=2) is traced by JAX" in "".join(caught.value.__notes__)


def lengths(batch):
    """The parameter with which the steps of a batch were made."""
    return set(batch["next", "info", "length"].unique().tolist())


@BOTH
def test_parameters_set_after_a_first_init_hold_from_the_next_init_on(kind):
    env = kind(3)
    state, _ = collected(env)
    for value in (5.0, 7.0):
        env.params = (torch.tensor(value) if kind is TorchWalk else jnp.asarray(value),)
        fresh = fc.init(env, fc.random_policy(env), seed=0)
        assert (fresh.observation["observation",] >= value).all()
        assert lengths(collected(env, fresh)[1]) == {value}
    assert lengths(collected(env, state)[1]) == {2.0}  # a state keeps its own


NUMBERS = [2.0, jnp.asarray(2.0), *in_soak([jnp.float32(2.0), np.float32(2.0)])]


@pytest.mark.parametrize("params", [(number,) for number in NUMBERS], ids=repr)
def test_any_kind_of_number_as_a_parameter_compiles_once(params):
    env, traces = JaxWalk(2), []
    env.params = params

    def apply(params, observation, count):
        traces.append(1)
        return jnp.zeros(len(observation), int), count + 1.0

    policy = fc.jax_policy(apply, (), initial_state=0.0)
    state = fc.init(env, policy, seed=0)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    state, batch = fc.rollout(env, policy, state, 4)
    assert lengths(batch) == {2.0}
    traces.clear()
    for _ in range(2):
        state, _ = fc.rollout(env, policy, fc.reset(env, state), 4)
    assert not traces


SAVED = [(TorchWalk, float), (JaxWalk, np.float32), *in_soak([(TorchWalk, torch.tensor), (JaxWalk, jnp.asarray)])]


@pytest.mark.parametrize(("kind", "number"), SAVED)
def test_a_collector_saves_and_loads_the_parameters_of_its_environment(kind, number, tmp_path):
    def collector(length):
        env = kind(2)
        env.params = (number(length),)
        return fc.SyncDataCollector(env, None, frames_per_batch=8, seed=0)

    with collector(3.0) as saver, collector(9.0) as loader:
        torch.save(saver.state_dict(), tmp_path / "saved")
        loader.load_state_dict(torch.load(tmp_path / "saved", weights_only=True))
        assert lengths(next(iter(loader))) == {3.0}
        loader.load_state_dict({key: value for key, value in saver.state_dict().items() if key != "env_params"})
        with pytest.raises(ValueError, match=r"saved env_params has leaves of the shapes .* same environment"):
            loader.load_state_dict({**saver.state_dict(), "env_params": [torch.zeros(3)]})


IDS = ["torch/CartPole-v1", *in_soak(["pgx/tic_tac_toe", "gymnax/CartPole-v1"])]


@pytest.mark.parametrize("env", [JaxWalk, TorchWalk, *IDS])
def test_make_env_sets_the_limit(env):
    _, batch = collected(fc.make_env(env, num_envs=2, max_episode_steps=3), length=9)
    assert batch["next", "truncated"].sum(1).tolist() == [[3], [3]]
    assert batch["collector", "step"][0].tolist() == [0, 1, 2] * 3
    with pytest.raises(ValueError, match="max_episode_steps is 0, expected at least 1"):
        fc.make_env(env, max_episode_steps=0)


@BOTH
def test_the_limit_truncates_in_the_loop(kind):
    _, batch = collected(env := kind(3))
    assert (batch["next", "truncated"][..., 0] == (batch["collector", "step"] == 5)).all()
    assert not batch["next", "terminated"].any()
    cut = collect(env, fc.random_policy(env), 20, max_frames_per_traj=4)  # earlier than the environment does
    assert (cut["next", "truncated"][..., 0] == (cut["collector", "step"] == 3)).all()
    env = kind(3)
    env.max_episode_steps = None
    assert not collected(env)[1]["next", "done"].any()


def test_steps_of_a_torch_environment_draw_by_lane_and_step():
    _, first = collected(TorchWalk(3), length=8)
    _, whole = collected(TorchWalk(3), length=16)
    noise = whole["next", "info", "noise"]
    assert torch.equal(noise[:, :8], first["next", "info", "noise"])
    assert len(noise.unique()) == noise.numel()
    assert torch.equal(collected(TorchWalk(1), length=16)[1]["next", "info", "noise"][0], noise[0])


class OnlyMembers:
    """The counting environment, without any base class."""

    backend = "jax"
    num_envs = 3
    inner = counting(3)
    observation_space = inner.observation_space
    action_space = spaces.Discrete(3)
    observation_leaves = observation_leaves(observation_space)
    action_spec = ActionSpec(action_space)
    starts = "fresh"
    max_episode_steps = None
    params = None

    def reset(self, key, params, /):
        return self.inner.reset(key, params)

    def step(self, key, env_state, action, params, /):
        return self.inner.step(key, env_state, action, params)


def test_an_environment_needs_no_base_class():
    assert isinstance(OnlyMembers(), fc.envs.JaxEnv)
    assert_same(*(collect(env, counting_policy(), 30) for env in (OnlyMembers(), counting(3))))


def informed(info):
    return {"step": lambda *given: moved(given)._replace(info=info)}


WRONG = {
    "a start alone": ({"reset": lambda self, key, params: jnp.zeros(1)}, r"reset of .* expected the pair"),
    "a tuple": ({"step": lambda self, *given: (given[1], given[1], 0.0)}, "3 values, expected a Transition: return"),
    "a list of infos": (informed([1]), r"the infos that step of .* are a list of \['int'\], expected a dict of arrays"),
    "an info in an info": (informed({"cost": {"fuel": 1}}), r"info 'cost' .* a dict with .*\['fuel'\], .*: give"),
    "a word as info": (informed({"cost": "high"}), "the info 'cost' that step of .* returned is str, expected a"),
    "no reward": ({"step": lambda *given: moved(given)._replace(reward=None)}, "reward that step of .* is NoneType"),
    "no params": ({"reset": lambda self, key: (key, key)}, r"Walk.reset takes \(key\), expected a function of a key"),
    "no key": ({"step": lambda self, x, action: x}, r"Walk.step takes \(x, action\), expected a function of a key"),
    "no space": ({"action_space": None}, "NoneType"),
}


def moved(given):
    """The transition of a step that changes nothing."""
    _, _, place, _, _ = given
    return Transition(place, place, 0.0, False, False)


IN_TORCH = ("no params", "no key", "a list of infos", "an info in an info", "a word as info")
MISTAKES = [*((JaxWalk, case) for case in WRONG), *((TorchWalk, case) for case in IN_TORCH)]


@pytest.mark.parametrize(("kind", "case"), MISTAKES)
def test_mistakes_are_named(kind, case):
    members, message = WRONG[case]
    with pytest.raises((TypeError, fc.EnvError), match=message):
        collected(type("Walk", (kind,), members)(2))


LANES = 6
both = pytest.mark.parametrize(("name", "make"), [("CartPole-v1", CartPole), ("Pendulum-v1", Pendulum)])


def keys(lanes, episodes, seed=0):
    return LaneKeys.of(key_from_seed(seed), Purpose.RESET, torch.tensor(lanes), torch.tensor(episodes))


def start(env, lanes=LANES, seed=0, episode=0):
    return env.reset(keys(list(range(lanes)), [episode] * lanes, seed), None)[0]


def step(env, state, action):
    return env.step(keys([0] * len(state), [0] * len(state)), state, action, None)


def peer(name, state):
    """Gymnasium's environment at the same point."""
    env = gymnasium.make(name, disable_env_checker=True)
    env.reset(seed=0)
    env.unwrapped.state = state.numpy().copy()
    return env


def to_gymnasium(action):
    return int(action) if action.dtype == torch.int64 else action.numpy()


def random_actions(env, count):
    generator = torch.Generator().manual_seed(3)
    if isinstance(env, CartPole):
        return torch.randint(2, (count, LANES), generator=generator)
    return torch.randn(count, LANES, 1, generator=generator) * 2  # some beyond the bounds, where it is clipped


@both
def test_every_step_is_gymnasiums_step(name, make):
    """From the same float64 state and action: the same state, observation, reward and termination."""
    env = make(LANES)
    state, fallen = start(env), 0
    for action in random_actions(env, 60):
        peers = [peer(name, row) for row in state]
        answer = step(env, state, action)
        for lane, other in enumerate(peers):
            observation, reward, terminated, _, _ = other.step(to_gymnasium(action[lane]))
            wanted = torch.from_numpy(np.asarray(other.unwrapped.state, np.float64))
            torch.testing.assert_close(answer.env_state[lane], wanted, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(answer.observation[lane], torch.from_numpy(observation), rtol=2e-7, atol=1e-9)
            assert float(answer.reward[lane]) == pytest.approx(float(reward), rel=2e-7)
            assert bool(answer.terminated[lane]) == terminated
        fallen += int(answer.terminated.sum())
        state = torch.where(answer.terminated[:, None], start(env, episode=fallen), answer.env_state)
    assert fallen > 3 or name == "Pendulum-v1"


@pytest.mark.parametrize("bound", ["position", "angle"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_cart_pole_terminates_beyond_its_bounds_and_not_at_them(bound, sign):
    column, limit = (0, CartPole.max_position) if bound == "position" else (2, CartPole.max_angle)
    state = torch.zeros(2, 4, dtype=torch.float64)
    state[0, column], state[1, column] = sign * limit, sign * math.nextafter(limit, 9)
    assert step(CartPole(2), state, torch.zeros(2).long()).terminated.tolist() == [False, True]


def test_starts_have_gymnasiums_distribution():
    poles, pendulums = start(CartPole(), 4000), start(Pendulum(), 4000)
    for column, bound in [(poles[:, i], 0.05) for i in range(4)] + [(pendulums[:, 0], math.pi), (pendulums[:, 1], 1)]:
        assert column.abs().max() < bound
        assert column.abs().max() > 0.99 * bound
        assert abs(column.mean()) < 4.5 * bound / math.sqrt(3 * 4000)


@both
def test_spaces_are_gymnasiums(name, make):
    other, env = gymnasium.make(name), make()
    assert env.action_space == other.action_space
    assert env.observation_space.shape == other.observation_space.shape
    assert env.observation_space.dtype == other.observation_space.dtype
    assert env.max_episode_steps == gymnasium.spec(name).max_episode_steps
    assert repr(make(3)) == f"{make.__name__}(num_envs=3)"


class Grid(InParts):
    """A walk whose observation is a Dict: the place, and how often each side was chosen."""

    observation_space = spaces.Dict(place=spaces.Box(-99, 99, (1,)), counts=spaces.Dict(left=spaces.Discrete(99)))
    action_space = spaces.Discrete(2)
    max_episode_steps = 5

    def start(self, uniforms):
        return {"place": (uniforms * 10).round(), "left": torch.zeros(len(uniforms), dtype=torch.long)}

    def observe(self, place):
        return {"place": place["place"].float(), "counts": {"left": place["left"]}}

    def move(self, place, action):
        moved = {"place": place["place"] + 2 * action[:, None] - 1, "left": place["left"] + (1 - action)}
        return moved, moved["place"][:, 0].float(), moved["left"] >= 4


@pytest.mark.parametrize("num_envs", [None, 3])
def test_a_subclass_with_a_dict_observation(num_envs):
    env = Grid(num_envs)
    batch = collect(env, fc.random_policy(env), 40)
    left, step = batch["next", "counts", "left"], batch["collector", "step"]
    assert batch["counts", "left"][step == 0].eq(0).all()
    assert torch.equal(left, batch["counts", "left"] + 1 - batch["action"])
    assert torch.equal(batch["next", "place"], batch["place"] + 2.0 * batch["action"][..., None] - 1)
    assert torch.equal(batch["next", "reward"], batch["next", "place"])
    assert torch.equal(batch["next", "terminated"][..., 0], left >= 4)
    assert torch.equal(batch["next", "truncated"][..., 0], step == 4)


@pytest.mark.parametrize(("later", "says"), [
    ({}, r"are \[\], expected \['x'\] as in the steps before"),
    ({"x": torch.ones(2), "y": torch.ones(2)}, r"are \['x', 'y'\], expected \['x'\]"),
    ({"x": torch.ones(2, dtype=torch.int64)}, r"info 'x' .* is torch.int64 \(2,\), expected torch.float32 \(2,\)"),
    ({"x": 1.0}, r"info 'x' .* is float, expected torch.float32 \(2,\)"),
])  # fmt: skip
def test_later_infos_are_like_the_first_ones(later, says):
    class Informed(CartPole):
        def __init__(self, lanes):
            super().__init__(lanes)
            self.infos = [later, {"x": torch.ones(2)}]

        def step(self, *args):
            return super().step(*args)._replace(info=self.infos.pop())

    env, policy, state = fresh(Informed(2))
    with pytest.raises(fc.EnvError, match=says):
        fc.rollout(env, policy, state, 2)

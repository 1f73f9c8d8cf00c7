"""Policies of Torch modules, eager and compiled by `torch.compile`."""

import itertools
import pickle

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions, nn

import funcollect as fc
from funcollect.policies.mlp import Flatten, mlp
from tests.support.compare import assert_same, collect
from tests.support.envs.light_envs import Sampling
from tests.support.running import SCALE, pairwise

ENVS = ["CartPole-v1", "torch/CartPole-v1"]
both = pytest.mark.parametrize("name", ENVS)


def make_env(name, num_envs=3):
    env = fc.make_env(name, num_envs=num_envs, **({} if name.startswith("torch/") else {"max_episode_steps": 7}))
    if name.startswith("torch/"):
        env.max_episode_steps = 7
    return env


def push(observation):
    return (observation[:, 2] > 0).long()


DTYPES = (torch.bool, torch.int8, torch.int64, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
EXTRAS = {str(dtype).partition(".")[2]: lambda x, dtype=dtype: (x * 100).to(dtype) for dtype in DTYPES}
EXTRAS |= {"[P,3,2]": lambda x: x[:, :3, None] * x[:, None, :2], "[P]": lambda x: x[:, 0], "[P,0]": lambda x: x[:, :0]}


@pytest.mark.parametrize(("name", "num_envs"), pairwise(ENVS, [None, 3]))
def test_extras_of_any_shape_and_dtype_are_recorded_as_they_are(name, num_envs):
    policy = fc.torch_policy(lambda x: {"action": push(x), **{key: make(x) for key, make in EXTRAS.items()}})
    batch = collect(make_env(name, num_envs), policy, 80)
    assert batch["next", "done"].any()
    rows = batch["observation"].reshape(-1, 4)
    for key, make in {"action": push, **EXTRAS}.items():
        wanted = make(rows)
        assert batch[key].dtype == wanted.dtype, key
        assert torch.equal(batch[key].reshape(wanted.shape), wanted), key


@pytest.mark.parametrize(("name", "head", "module", "distribution"), [
    ("CartPole-v1", fc.heads.categorical, lambda x: {"logits": x[..., :2]}, distributions.Categorical),
    ("Pendulum-v1", fc.heads.normal, lambda x: {"loc": x[..., :1], "scale": x[..., 1:2].exp()}, distributions.Normal),
])  # fmt: skip
def test_a_dict_holds_what_the_head_reads_and_extras(name, head, module, distribution):
    policy = fc.torch_policy(lambda x: {**module(x), "seen": x}, head=head)
    batch = collect(fc.make_env(name, num_envs=2), policy, 20)
    read = module(batch["observation"])
    for key, wanted in {**read, "seen": batch["observation"]}.items():
        assert torch.equal(batch[key], wanted), key
    score = distribution(**read).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], score.reshape(2, 20))


def test_buffers_that_are_written_in_turn_are_refused():
    buffers = itertools.cycle([torch.zeros(3), torch.zeros(3)])
    policy = fc.torch_policy(lambda x: {"action": push(x), "sum": next(buffers).copy_(x.sum(-1))})
    with pytest.raises(fc.PolicyError, match="after it had been returned"):
        collect(fc.make_env("CartPole-v1", num_envs=3), policy, 70)


class Drawing(nn.Module):
    def forward(self, x):
        return {"action": torch.randint(2, (len(x),)), "drawn": torch.rand(len(x))}


@pytest.mark.parametrize("policy", [Drawing(), Drawing().forward], ids=["module", "function"])
def test_a_module_may_draw_from_the_global_generator_which_is_put_back(policy):
    env, batches = make_env("CartPole-v1"), []
    for seed, lengths in ((0, [30]), (99, [1, 9, 20])):
        torch.manual_seed(seed)
        batches.append(collect(env, fc.torch_policy(policy), *lengths, seed=4))
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(seed).get_state())
    assert_same(*batches)
    assert len(batches[0]["drawn"].unique()) == 90
    assert not torch.equal(batches[0]["drawn"], collect(env, fc.torch_policy(policy), 30, seed=5)["drawn"])


class Angles(gymnasium.ObservationWrapper):
    observation_space = gymnasium.spaces.Dict(angle=gymnasium.spaces.Box(-9, 9, (2,)))

    def observation(self, observation):
        return {"angle": observation[:2]}


def test_an_exception_of_a_module_tells_what_it_was_called_with():
    """A Dict observation, with a recurrent state; and its entries where a plain module names them."""
    env = fc.make_env(lambda: Angles(gymnasium.make("CartPole-v1")), num_envs=3)

    class Named(nn.Module):
        def forward(self, angle):
            return angle.missing

    policy = fc.torch_policy(lambda observation, state: observation + state, initial_state=torch.zeros(5))
    doubles = fc.torch_policy(nn.Linear(4, 2).double(), head=fc.heads.categorical)
    cartpole = fc.make_env("CartPole-v1", num_envs=3)
    for where, acting, error, note in (
        (env, policy, TypeError, "the policy's module was called with ({angle: float32 [3, 2]}, float32 [3, 5])"),
        (env, Named(), AttributeError, "the policy's module was called with (float32 [3, 2])"),
        (cartpole, doubles, RuntimeError, "call module.float(), or pass make_env(dtype=)"),
    ):
        with fc.SyncDataCollector(where, acting, frames_per_batch=30) as collector, pytest.raises(error) as caught:
            next(collector)
        assert any(note in each for each in caught.value.__notes__)


@both
def test_a_device_at_which_everything_is_already_changes_nothing(name):
    module = nn.Linear(4, 2)
    plain = collect(make_env(name), fc.torch_policy(module, head=fc.heads.categorical), 20)
    moved = collect(make_env(name), fc.torch_policy(module, head=fc.heads.categorical, device="cpu"), 20)
    assert_same(plain, moved)
    assert not any(leaf.requires_grad for leaf in plain.values(True, True))
    assert fc.torch_policy(push).run_device is None
    assert fc.torch_policy(push, device="cpu").run_device == torch.device("cpu")


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.9), nn.Linear(3, 2)).eval()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # Inductor's import
def test_compiled_is_eager_within_rounding_and_weights_are_live():
    env, module = fc.make_env("CartPole-v1", num_envs=3), net()
    policy, eager = (fc.torch_policy(module, head=fc.heads.categorical, compile=way) for way in ("inductor", None))
    if SCALE == 1:  # Inductor takes its time; `tests/contracts/test_paths.py` has it
        policy.torch_backend = "eager"
    batch = collect(env, policy, 20)
    assert torch.equal(batch["action"], collect(env, eager, 20)["action"])
    with torch.compiler.set_stance("fail_on_recompile"):
        with torch.no_grad():
            module[3].bias += torch.tensor([0.0, 1000.0])
        batch = collect(env, policy, 20)
        assert (batch["action"] == 1).all()
    with torch.no_grad():
        module[3].bias -= torch.tensor([0.0, 1000.0])
    mode = fc.ExplorationType.DETERMINISTIC
    ours, own = (collect(env, each, 20, exploration_type=mode) for each in (policy, eager))
    torch.testing.assert_close(ours["action_log_prob"], own["action_log_prob"])


def test_training_mode_is_the_modules_own():
    """Of `torch.compile` without Inductor, which takes its time."""
    env, module = fc.make_env("CartPole-v1", num_envs=3), net()
    policy = fc.torch_policy(module, head=fc.heads.categorical, compile="inductor")
    policy.torch_backend = "eager"
    whole = collect(env, policy, 30)["action_log_prob"]
    module.train()
    assert not torch.equal(collect(env, policy, 30)["action_log_prob"], whole)
    module.eval()
    assert torch.equal(collect(env, policy, 30)["action_log_prob"], whole)


def test_a_compiled_policy_is_pickled_without_its_code():
    policy = fc.torch_policy(net(), head=fc.heads.categorical, compile="inductor")
    copied = pickle.loads(pickle.dumps(policy))
    assert copied.compiler == "inductor"
    assert torch.equal(copied.module[3].bias, policy.module[3].bias)


def test_a_compiler_that_is_not_there_is_said(monkeypatch):
    for make, compiler, message in (
        (fc.torch_policy, "jit", r"expected one of \['xla', 'eager', 'inductor', 'cudagraph'\], or None"),
        (fc.tensordict_policy, "inductor", r"expected one of \['xla', 'eager'\], or None"),
        (fc.torch_policy, "callback", r"compile='callback' was removed: leave compile out"),
    ):
        with pytest.raises(ValueError, match=message):
            make(net(), compile=compiler)
    monkeypatch.setenv("CXX", "no-such-compiler")
    policy = fc.torch_policy(net(), head=fc.heads.categorical, compile="inductor")
    with pytest.raises(fc.PolicyError, match=r"needs a C\+\+ compiler, and 'no-such-compiler' is not there"):
        collect(fc.make_env("CartPole-v1"), policy, 3)


@pytest.mark.parametrize("space", [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, ()),
    spaces.Box(0, 9, (2, 3), np.int64),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [2, -3]]),
    spaces.MultiBinary((2, 2)),
    spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.MultiBinary(2)))}),
], ids=str)  # fmt: skip
def test_observations_are_flattened_as_gymnasium_does(space):
    space.seed(0)
    samples = [space.sample() for _ in range(5)]
    batched = gymnasium.vector.utils.batch_space(space, 5)
    stacked = gymnasium.vector.utils.concatenate(space, samples, gymnasium.vector.utils.create_empty_array(space, 5))
    assert stacked in batched
    rows = Flatten(space)(jax.tree.map(torch.as_tensor, stacked))
    wanted = np.stack([spaces.flatten(space, sample) for sample in samples]).astype(np.float32)
    assert torch.equal(rows, torch.from_numpy(wanted))


def test_pixels_are_scaled():
    rows = Flatten(spaces.Box(0, 255, (2, 2), np.uint8))(torch.full((3, 2, 2), 255, dtype=torch.uint8))
    assert torch.equal(rows, torch.ones(3, 4))


ACTIONS = [spaces.Discrete(3, start=5), spaces.MultiDiscrete([[2, 3], [4, 2]]), spaces.Box(-2, 3, (2, 3))]


@pytest.mark.parametrize("space", [*ACTIONS, spaces.Box(-np.inf, np.inf, (2,))], ids=str)
def test_the_network_suits_the_action_space(space):
    env = fc.make_env(lambda: Sampling(spaces.Discrete(3), space), num_envs=2)
    policy = mlp(env, seed=0)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    assert batch["action"].shape == (2, 4, *space.shape)


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.Box(-1, 1, ()), spaces.Box(0, 9, (2,), int)], ids=str)
def test_other_action_spaces_are_refused(space):
    with pytest.raises(ValueError, match=r"mlp needs a Discrete.*the policy random"):
        mlp(fc.make_env(lambda: Sampling(spaces.Discrete(3), space), num_envs=2), seed=0)


def test_the_networks_seed_leaves_torchs_alone():
    env = fc.make_env("CartPole-v1", num_envs=2)
    before = torch.get_rng_state()
    one, same, other = mlp(env, seed=0).params, mlp(env, seed=0).params, mlp(env, seed=1).params
    assert torch.equal(torch.get_rng_state(), before)
    assert (one == same).all()
    assert not (one == other).all()

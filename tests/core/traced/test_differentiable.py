"""Gradients of a rollout, in Torch: against finite differences, and against JAX's own."""

import functools

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import funcollect as fc
from funcollect.envs.jax_envs.instances import from_brax
from funcollect.envs.jax_envs.jax_env import from_functions
from funcollect.interop.memo import memo_of
from tests.support.cases import Recurrent
from tests.support.running import in_soak

LENGTH = 12  # long enough for episodes of seven steps to end


def spring(num_envs=3):
    """A mass on a spring, pushed by the action; its episodes are cut after seven steps."""

    def reset(key, params):
        start = jax.random.normal(key, (2,))
        return (start, jnp.int32(0)), start

    def step(key, before, action, params):
        (place, speed), count = before
        speed = speed + 0.1 * (action[0] - place)
        moved = jnp.stack([place + 0.1 * speed, speed])
        return (moved, count + 1), moved, -(moved**2).sum(), jnp.array(False), count + 1 >= 7

    box = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    push = gymnasium.spaces.Box(-1, 1, (1,))
    return from_functions(reset, step, observation_space=box, action_space=push, num_envs=num_envs)


class Detached(fc.envs.JaxEnvBase):
    """Adds up its actions; `stops` cuts the gradient at each step. At the start it is cut in any case, as brax does."""

    observation_space = action_space = gymnasium.spaces.Box(-99, 99, (1,))
    stops = True

    def reset(self, key, params):
        return jax.lax.stop_gradient(jnp.zeros(1)), jnp.zeros(1)

    def step(self, key, place, action, params):
        place = place + action
        kept = jax.lax.stop_gradient(place) if self.stops else place
        return fc.envs.Transition(kept, kept, place[0], False, False)


class Attached(Detached):
    stops = False


def module_of(inputs, outputs, kind=nn.Linear):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(inputs, outputs)


def loss_of(batch):
    """A loss of all leaves that carry a gradient."""
    parts = [batch["next", "reward"], batch["action"] ** 2, 0.1 * batch["action_log_prob"]]
    return sum(part.mean() for part in parts) + batch["next", "observation"][..., -1, :].sin().sum()


def last_place_by_bias(env, policy):
    _, batch = fc.differentiable_rollout(env, policy, fc.init(env, policy, seed=0), 5)
    return torch.autograd.grad(batch["next", "observation"][0, -1, 0], policy.module.bias)[0].item()


def test_an_environment_that_stops_gradients_is_named_once():
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.weight)
    env, policy = Detached(num_envs=2), fc.torch_policy(module)
    with pytest.warns(UserWarning, match="Detached.* stops gradients in its step"):
        assert last_place_by_bias(env, policy) == 0
    last_place_by_bias(env, policy)
    assert last_place_by_bias(Attached(num_envs=2), policy) == 5


def test_gymnax_lets_gradients_pass_where_it_can():
    raw = gymnax.make("Pendulum-v1")[0]
    if not hasattr(raw, "supports_transition_gradients"):  # releases 0.0.x
        return
    for env in (fc.envs.from_gymnax(raw, num_envs=2), *in_soak([fc.make_env("gymnax/Pendulum-v1", num_envs=2)])):
        module = module_of(3, 1)
        policy = fc.torch_policy(module)
        _, batch = fc.differentiable_rollout(env, policy, fc.init(env, policy, seed=0), 5)
        (gradient,) = torch.autograd.grad(batch["next", "observation"][:, -1].sum(), module.weight)
        assert gradient.any()


def gradients_of(env, policy, module):
    module.zero_grad(set_to_none=True)
    _, batch = fc.differentiable_rollout(env, policy, fc.init(env, policy, seed=0), LENGTH)
    loss_of(batch).backward()
    return batch, {name: param.grad for name, param in module.named_parameters()}


def railway():
    return from_brax("inverted_pendulum", num_envs=3, episode_length=7)


def finite_difference(env, policy, module, direction, size=1e-2):
    """The slope of the loss along `direction`, by the program that computed the gradient."""
    losses = []
    for sign in (1, -1):
        moved = {name: param + sign * size * direction[name] for name, param in module.named_parameters()}
        with torch.no_grad():
            state = fc.init(env, policy, seed=0)
            _, batch = fc.differentiable_rollout(env, policy, state, LENGTH, params=moved)
        losses.append(loss_of(batch.double()).item())
    return (losses[0] - losses[1]) / (2 * size)


class Noting(nn.Linear):
    """Returns a 64-bit integer beside the values that the head reads."""

    def forward(self, x):
        loc, scale = super().forward(x).chunk(2, -1)
        return {"loc": loc, "scale": nn.functional.softplus(scale), "side": (x[:, 0] > 0).long()}


CASES = {
    "spring": (spring, Noting, fc.heads.tanh_normal),
    "spring, plain": (spring, nn.Linear, fc.heads.normal),
    "spring, recurrent": (spring, Recurrent, fc.heads.normal),
    "brax": (railway, nn.Linear, fc.heads.normal),
}


@functools.cache
def made(case):
    """An environment, a module and its policy, shared by all tests, so that JAX compiles each once."""
    make, kind, head = CASES[case]
    env = make()
    module = module_of(*env.observation_space.shape, 2, kind)
    policy = fc.torch_policy(module, head=head, initial_state=torch.zeros(5) if kind is Recurrent else None)
    return env, module, policy


@pytest.mark.parametrize("case", ["spring", "spring, recurrent", *in_soak(["brax"])])
def test_against_finite_differences(case):
    env, module, policy = made(case)
    batch, gradients = gradients_of(env, policy, module)
    assert batch["next", "done"].any()
    size = sum((gradient**2).sum() for gradient in gradients.values()).item() ** 0.5
    direction = {name: gradient / size for name, gradient in gradients.items()}
    assert finite_difference(env, policy, module, direction) == pytest.approx(size, rel=2e-2)


@pytest.mark.parametrize("case", ["spring, recurrent", *in_soak(["spring"])])
def test_it_is_a_rollout_and_others_go_on_from_its_state(case):
    env, _, policy = made(case)
    runs = []
    for collect in (fc.differentiable_rollout, fc.rollout):
        state, batch = collect(env, policy, fc.init(env, policy, seed=0), LENGTH)
        assert batch["next", "done"].any()
        runs.append((batch, fc.rollout(env, policy, state, LENGTH)[1]))
    for got, wanted in zip(*runs, strict=True):
        for path, leaf in wanted.items(include_nested=True, leaves_only=True):
            torch.testing.assert_close(got[path].detach(), leaf)


def test_against_jax():
    env, module, policy = made("spring, plain")
    module.zero_grad(set_to_none=True)
    state = fc.init(env, policy, seed=0)
    _, batch = fc.differentiable_rollout(env, policy, state, LENGTH)
    (batch["next", "observation"].square().sum() + batch["action_log_prob"].sum()).backward()
    weights = {name: jnp.array(param.detach().numpy()) for name, param in module.named_parameters()}
    own = fc.jax_policy(lambda params, x: x @ params["weight"].T + params["bias"], weights, head=fc.heads.normal)

    def loss(params):
        _, arrays = fc.traced.rollout(env, own, params, state.replace(policy_state=None), LENGTH)
        return (arrays["next"]["observation"] ** 2).sum() + arrays["action_log_prob"].sum()

    for name, wanted in jax.jit(jax.grad(loss))(weights).items():
        ours = module.get_parameter(name).grad
        assert ours.abs().max() > 0.1
        torch.testing.assert_close(ours, torch.from_numpy(np.array(wanted)), rtol=1e-4, atol=1e-4)


def test_gradients_go_to_params_that_are_given_and_to_none_that_are_frozen():
    env, module, policy = made("spring, plain")
    _, wanted = gradients_of(env, policy, module)
    module.zero_grad(set_to_none=True)
    params = TensorDict.from_module(module).detach().clone()
    params["weight"].requires_grad_()
    state = fc.init(env, policy, seed=0)
    _, batch = fc.differentiable_rollout(env, policy, state, LENGTH, params=params)
    loss_of(batch).backward()
    torch.testing.assert_close(params["weight"].grad, wanted["weight"])
    assert params["bias"].grad is None
    assert module.weight.grad is None
    with torch.no_grad():
        assert not fc.differentiable_rollout(env, policy, state, LENGTH)[1]["action"].requires_grad


def test_one_program_serves_all_updates():
    env, module = spring(), module_of(2, 1)
    policy = fc.torch_policy(module)
    state = fc.init(env, policy, seed=0)
    for _ in range(3):
        state, batch = fc.differentiable_rollout(env, policy, state, 7)
        (-batch["next", "reward"].mean()).backward()
        with torch.no_grad():
            module.weight -= 0.1 * module.weight.grad
    programs = [each._cache_size() for each in memo_of(fc.lower_policy(policy, env)).values()]
    assert set(programs) == {1}


def test_what_cannot_be_differentiated_is_said():
    module, host, env = nn.Linear(4, 2), fc.make_env("CartPole-v1"), fc.make_env("gymnax/CartPole-v1", num_envs=2)
    policy, function = (fc.torch_policy(each, head=fc.heads.categorical) for each in (module, lambda x: module(x)))
    for where, acting, error, message in (
        (host, policy, TypeError, "expected JaxEnv"),
        (env, fc.random_policy(env), TypeError, "expected one over a Torch module"),
        (env, function, fc.LoweringError, "a plain function is not lowered"),
    ):
        with pytest.raises(error, match=message):
            fc.differentiable_rollout(where, acting, fc.init(where, acting, seed=0), 4)

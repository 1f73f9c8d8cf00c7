"""The fused loop as GPUs run it, on the CPU: lowered for CUDA, and run beside the loop with branches."""

import functools
import re
from itertools import product

import jax
import jax.numpy as jnp
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.core.loops import blocks as blocks_module
from funcollect.core.loops import over_jax
from funcollect.core.loops.blocks import BlockOptions
from funcollect.core.lowered import lower_policy
from funcollect.core.request import Request
from funcollect.core.traced_step.step import SPARES, starts_are_cheap
from funcollect.envs.jax_envs.jax_env import reset_lane, step_lane
from funcollect.interop import to_jax
from funcollect.policies.mlp import mlp
from funcollect.protocols import traced_values
from tests.support.cases import jax_mlp, torch_mlp
from tests.support.compare import assert_same, collect
from tests.support.envs.jax_counting import counting, counting_policy, reset
from tests.support.envs.jax_suites import SUITES, suite_and_policy
from tests.support.running import in_soak

K = 32  # steps of a block
QUICK = ["gymnax", "functions"]  # the others compile for many seconds
NAMES = [*QUICK, *in_soak([name for name in SUITES if name not in QUICK])]


def in_blocks(monkeypatch, **options):
    """Every fused loop runs in blocks, as it does on a GPU."""
    monkeypatch.setattr(over_jax, "waits_for_host", lambda place: True)
    if options:
        monkeypatch.setattr(over_jax.block_loop, "__defaults__", (BlockOptions(**options),))


@pytest.fixture
def blocks(monkeypatch):
    in_blocks(monkeypatch)


def lowered(env, policy, made_each_step):
    """The programs of K steps for CUDA, as the only block or one of several: text, and number of donated leaves."""
    state, request = fc.init(env, policy, seed=0), Request(length=100, random_steps=7)
    loop = over_jax.block_loop(env, policy, state, request, BlockOptions(made_each_step=made_each_step))
    bound = policy.prepare(None), traced_values(request.exploration)
    moved, rest = blocks_module._apart(state)
    moved, (_, rows, _) = loop._begin(K, 2, keep=True)(moved, rest)
    left, short, _ = loop._begun(K)
    others = rest, bound, left, short
    large = len(jax.tree.leaves(moved))
    return loop, [
        (for_cuda(loop.block(K), moved, rows, *others), large + len(rows)),
        (for_cuda(loop.one_block(K, owned=True), moved, *others), 0 if loop.has_spares else large),
        (for_cuda(loop.one_block(K, owned=False), moved, *others), 0),
    ]


def for_cuda(function, *arguments):
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def waits(text):
    """The numbers of loops, branches, calls of the host, and calls of a library (by name) in a program's text."""
    found = [*re.findall(r"stablehlo\.(while|case|if)\b", text), *re.findall(r"custom_call @(\w+)", text)]
    return {name: found.count(name) for name in found}


@functools.cache
def own_waits(name, starts):
    """Those of a suite's own step, and of so many of its starts."""
    env = suite_and_policy(name)[0].env
    key = jnp.zeros(2, jnp.uint32)

    @jax.jit
    def start(keys):
        return [jax.vmap(functools.partial(reset_lane, env), (0, None))(keys + i, env.params) for i in range(starts)]

    @jax.jit
    def step(keys, state, action):
        return jax.vmap(functools.partial(step_lane, env), (0, 0, 0, None))(keys, state, action, env.params)

    keys = jnp.stack([key, key])
    state = fc.init(env, fc.random_policy(env), seed=0).env_state.current
    actions = to_jax(torch.zeros(env.num_envs, *env.action_spec.shape, dtype=env.action_spec.dtype))
    counts = [waits(for_cuda(start, keys)), waits(for_cuda(step, keys, state, actions))]
    return {name: sum(each.get(name, 0) for each in counts) for name in counts[0].keys() | counts[1]}


WAITS, MORE = [("gymnax", None, False), ("functions", mlp, True)], product(NAMES, [None, mlp], [True, False])
MORE = [*(row for row in MORE if row[1:] != (mlp, False)), ("gymnax", torch_mlp, True), ("gymnax", jax_mlp, True)]
WAITS += in_soak(row for row in MORE if row not in WAITS)


@pytest.mark.parametrize(("name", "make", "made_each_step"), WAITS)
def test_neither_a_suite_nor_a_policy_waits_for_the_host(name, make, made_each_step):
    suite, policy = suite_and_policy(name)
    if make:
        policy = make(suite.env)
        policy = policy if policy.backend == "jax" else lower_policy(policy, suite.env)
    loop, programs = lowered(suite.env, policy, made_each_step)
    own = own_waits(name, 1 if made_each_step else SPARES)
    unroll = 4 if made_each_step else 1
    for text, donated in programs:
        found = waits(text)
        assert found.pop("while") <= unroll * own.get("while", 0) + 1
        assert all(count <= unroll * own.get(wait, 0) for wait, count in found.items())
        assert re.search(rf"cond {{\s*%\S+ = stablehlo.constant dense<{K // unroll}> : tensor<i32>", text)
        assert len(re.findall(r"tf\.aliasing_output", text)) == donated
    assert loop.has_spares is not made_each_step


BRANCHED = [("gymnax", "random", False), *in_soak([("gymnax", "network", True)])]  # test_fused_policies.py unrolls
BRANCHED += in_soak(product(NAMES, ["random"], [True, False]))


@pytest.mark.parametrize(("name", "kind", "made_each_step"), BRANCHED)
def test_data_are_those_of_the_loop_with_branches(name, kind, made_each_step, monkeypatch):
    suite, policy = suite_and_policy(name)
    policy = torch_mlp(suite.env) if kind == "network" else policy
    monkeypatch.setattr(over_jax, "waits_for_host", lambda place: False)
    wanted = collect(suite.env, policy, 61, 64, seed=3)
    assert wanted["next", "done"].any()
    in_blocks(monkeypatch, made_each_step=made_each_step)
    assert_same(wanted, collect(suite.env, policy, 61, 64, seed=3))


@pytest.mark.parametrize("starts", [*in_soak(["cached"]), "fresh"])
def test_lanes_that_lack_spare_starts_run_again(starts, monkeypatch):
    """Episodes have two to five steps, so every block lacks starts; cached starts never run out."""
    env, policy = counting(3, starts=starts), counting_policy()
    wanted = collect(env, policy, 64, 61, 64)
    tried = []
    call = over_jax.BlockLoop.__call__

    def noted(self, *args, **kwargs):
        done = call(self, *args, **kwargs)
        tried.append(done is not None)
        return done

    in_blocks(monkeypatch, made_each_step=False)
    monkeypatch.setattr(over_jax.BlockLoop, "__call__", noted)
    assert_same(wanted, collect(env, policy, 64, 61, 64))
    assert tried[0] is all(tried) is (starts == "cached")


def test_a_start_made_at_each_step_has_few_operations_and_no_loop():
    def looping(key, params):
        return reset(jax.lax.fori_loop(0, 3, lambda _, x: x + 1, key), params)

    def long(key, params):
        for _ in range(400):
            key = key + 1
        return reset(key, params)

    found = [starts_are_cheap(counting(2, reset=each), None) for each in (reset, looping, long)]
    assert found == [True, False, False]


@pytest.mark.usefixtures("blocks")
def test_lengths_within_an_eighth_are_one_program(monkeypatch):
    monkeypatch.setattr(blocks_module, "MOST_STEPS", 30)
    traces = []

    def act(params, x):
        traces.append(x)
        return x @ params

    env, policy = Stateless(4), fc.jax_policy(act, jnp.ones((2, 3)), head=fc.heads.categorical)
    state = fc.init(env, policy, seed=0)
    for length in (30, 60):
        fc.rollout(env, policy, state, length)
    once = len(traces)
    for length in (29, 58, 120):  # one, two or four blocks of 30; one alone has a program of its own
        assert fc.rollout(env, policy, state, length)[1].batch_size == (4, length)
    assert len(traces) == once > 0


def test_few_steps_of_the_blocks_are_wasted():
    for length in (*range(1, 300), 1000, 4097):
        steps = blocks_module.steps_per_block(length)
        blocks = -(-length // steps)
        assert 2 <= steps <= 256
        assert blocks == -(-length // 256)
        assert blocks * steps <= max(2, length * 1.15)


@pytest.mark.usefixtures("blocks")
def test_a_rollout_reads_its_steps_only_if_a_value_depends_on_them(monkeypatch):
    env, head = Stateless(2), fc.heads.epsilon_greedy(0.1)
    policy = fc.jax_policy(lambda params, x: x @ params, jnp.ones((2, 3)), head=head)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    seen = []
    with monkeypatch.context() as patch:
        patch.delattr(type(state), "steps_made")
        fc.rollout(env, policy, state, 5)
    fc.rollout(env, policy, state, 5, exploration={"epsilon": lambda frames: seen.append(frames) or 0.2})
    assert seen == [10]


@pytest.mark.parametrize("starts", ["cached", *in_soak(["fresh"])])
def test_a_step_that_crosses_has_no_branch_and_gives_the_same_data(starts, monkeypatch):
    env = counting(3, starts=starts)
    policy = fc.torch_policy(
        lambda x: x["count"].float().view(-1, 1) * torch.arange(3.0), head=fc.heads.categorical, compile="eager"
    )
    wanted = collect(env, policy, 15, 15)
    in_blocks(monkeypatch)
    texts, compile_ = [], over_jax.compiled

    def noting(owner, which, function, **options):
        made = compile_(owner, which, function, **options)
        return made if which[0] != "crossing" or "donate_argnums" not in options else noted(made)

    def noted(made):
        def call(*arguments):
            if not texts:
                texts.append(for_cuda(made, *arguments))
            return made(*arguments)

        return call

    monkeypatch.setattr(over_jax, "compiled", noting)
    assert_same(wanted, collect(env, policy, 15, 15))
    assert waits(texts[0]) == {}


class Stateless(fc.envs.JaxEnvBase):
    observation_space, action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(3)

    def reset(self, key, params, /):
        return (), jax.random.uniform(key, (2,))

    def step(self, key, state, action, params, /):
        return fc.envs.Transition((), jax.random.uniform(key, (2,)), action * 1.0, action == 2, False)


MADE = [*in_soak([lambda: fc.make_env("gymnax/CartPole-v1", num_envs=4)]), lambda: Stateless(4)]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("make", MADE)
def test_an_interrupted_collector_goes_on_though_its_state_was_used_up(make, monkeypatch):
    with fc.SyncDataCollector(make(), None, frames_per_batch=60, seed=0) as one:  # 15 steps, which are not unrolled
        old, ids = one.state, next(one)["collector", "traj_ids"]
        with pytest.raises(ValueError, match="was donated or deleted"):
            fc.rollout(one.env, one.policy, old, 5)
        with monkeypatch.context() as patch:
            patch.setattr(over_jax, "batch_of", ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                next(one)
        if not isinstance(one.env, Stateless):
            one.set_env_params(one.env.default_params)
            one.reset(torch.tensor([True, False, False, True]))
        after = next(one)
        assert (after["collector", "step"][:, 0] == 0).all()
        assert (after["collector", "traj_ids"][:, 0] > ids[:, -1]).all()


def ctrl_c(*_, **__):
    raise KeyboardInterrupt

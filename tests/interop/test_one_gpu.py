"""Both frameworks on one device: every pair of environment and policy, on every route; on the CPU and on a GPU."""

from functools import cache

import pytest
import torch

import funcollect as fc
from benchmarks.gpu.bridges import DTYPES, LANES, LENGTH, TO_JAX, TO_TORCH, dtypes, route
from benchmarks.gpu.pairs import (
    BY_HAND,
    CAPTURED,
    GYMNAX_CARTPOLE,
    ROUTES,
    TORCH_CARTPOLE,
    TWINS,
    Ours,
    contestants,
    make_env,
)
from tests.support.devices import DEVICES, GPU_FIRST

ENVS = {"jax": GYMNAX_CARTPOLE, "torch": TORCH_CARTPOLE}
TORCH_OF = {jax_id: torch_id for torch_id, jax_id in TWINS.items()}
ROUTE_NAMES = [
    pytest.param(backend, name, marks=[pytest.mark.gpu] if name == CAPTURED else [])
    for backend, names in ROUTES.items()
    for name in names
]
each_route = pytest.mark.parametrize(("backend", "name"), ROUTE_NAMES)


@pytest.fixture(params=DEVICES)
def device(request):
    """The device of both frameworks; JAX has one default device in a process."""
    return request.param


of_a_gpu = pytest.mark.parametrize("device", GPU_FIRST, indirect=True)


@cache
def ours(backend, name, device):
    """One pair for several tests, so that it compiles once."""
    return Ours(ROUTES[backend][name], ENVS[backend], LANES, LENGTH, device)


def check_on(device, batch):
    """Every leaf is on the device, and observations follow each other."""
    assert {leaf.device.type for leaf in batch.values(include_nested=True, leaves_only=True)} == {device}
    goes_on = ~batch["next", "done"][:, :-1, 0]
    assert torch.equal(batch["next", "observation"][:, :-1][goes_on], batch["observation"][:, 1:][goes_on])


@of_a_gpu
@each_route
def test_batches_are_on_the_device_with_the_torch_networks_log_probabilities(device, backend, name):
    pair = ours(backend, name, device)
    batch = torch.cat([pair.batch().clone() for _ in range(4)], 1)
    check_on(device, batch)
    assert batch["next", "done"].any()
    assert 0 < batch["action"].float().mean() < 1
    _, policy = ROUTES["torch"]["Torch policy"](TORCH_CARTPOLE, 1, device)
    with torch.no_grad():
        logits = policy.module(batch["observation"].flatten(0, 1)).unflatten(0, batch.batch_size)
    wanted = logits.log_softmax(-1).gather(-1, batch["action"][..., None])[..., 0]
    torch.testing.assert_close(batch["action_log_prob"], wanted, atol=1e-2, rtol=1e-2)  # GPUs round products to TF32
    with fc.SyncDataCollector(pair.env, pair.policy, frames_per_batch=LANES * LENGTH, seed=0) as collector:
        batch = next(collector)
    assert batch.batch_size == (LANES, LENGTH)
    assert batch["observation"].device.type == device


@each_route
def test_every_crossing_shares_its_memory(device, backend, name):
    found = route(ours(backend, name, device))
    assert all(each["shared"] for each in found["crossings"]), found["crossings"]
    if backend == "jax":
        leaves = found["leaves_on_memory_of_jax"]
        assert leaves["observation"]
        assert leaves["next.observation"]
        assert leaves["next.reward"]
        assert leaves["collector.traj_ids"]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "name"), [("jax", "Torch policy, crossing"), ("torch", "JAX policy")])
def test_on_a_gpu_actions_and_observations_cross_at_every_step(backend, name):
    crossings = route(ours(backend, name, "cuda"))["crossings"]
    for way in (TO_TORCH, TO_JAX):
        assert sum(each["count"] for each in crossings if each["way"] == way) >= LENGTH


def test_every_dtype_shares_its_memory(device):
    assert all(each == {TO_TORCH: True, TO_JAX: True} for each in dtypes(device, DTYPES).values())


@of_a_gpu
@pytest.mark.parametrize(("backend", "name"), [each for each in ROUTE_NAMES if str(each.values[1]).startswith("Torch")])
def test_weights_written_in_place_reach_the_next_rollout_only(device, backend, name):
    pair = Ours(ROUTES[backend][name], ENVS[backend], LANES, LENGTH, device)
    before = pair.batch()
    kept = before["action_log_prob"].clone()
    with torch.no_grad():
        for weight in pair.policy.module.parameters():
            weight.zero_()
    after = pair.batch()
    assert torch.equal(before["action_log_prob"], kept)
    torch.testing.assert_close(after["action_log_prob"], torch.full_like(kept, 0.5).log())


@pytest.mark.gpu
def test_cuda_graphs_give_the_data_of_the_plain_loop():
    plain, captured = (
        Ours(ROUTES["torch"][name], TORCH_CARTPOLE, LANES, 70, "cuda") for name in ("Torch policy", CAPTURED)
    )
    one, two = plain.batch(), captured.batch()
    for path in ("observation", "action", "action_log_prob", ("next", "done"), ("collector", "traj_ids")):
        torch.testing.assert_close(one[path][:, :8], two[path][:, :8])  # later ones may differ by rounding
    again = captured.batch()
    assert not torch.equal(two["action"], again["action"])
    goes_on = ~two["next", "done"][:, -1, 0]
    assert goes_on.any()
    assert torch.equal(two["next", "observation"][:, -1][goes_on], again["observation"][:, 0][goes_on])


@of_a_gpu
@pytest.mark.parametrize("env_id", [*TWINS, *TWINS.values()])
def test_random_actions_are_on_the_device_and_those_of_the_cpu(device, env_id):
    env = make_env(env_id, 3, device)
    policy = fc.random_policy(env)
    state, first = fc.rollout(env, policy, fc.init(env, policy, seed=0), 40)
    _, second = fc.rollout(env, policy, state, 33)
    batch = torch.cat([first.clone(), second.clone()], 1)
    check_on(device, batch)
    twin = make_env(TORCH_OF.get(env_id, env_id), 3, "cpu")
    wanted = fc.rollout(twin, policy, fc.init(twin, policy, seed=0), 73)[1]["action"]
    torch.testing.assert_close(batch["action"].cpu(), wanted)


@of_a_gpu
@pytest.mark.parametrize("backend", ENVS)
def test_the_loops_by_hand_count_their_frames(device, backend):
    for name, make in contestants(ENVS[backend], LANES, LENGTH, device).items():
        if name.startswith(BY_HAND):
            loop = make()
            assert loop.run() == loop.run() == LANES * LENGTH
            torch.cuda.empty_cache()  # which takes memory away that a captured loop has let go of
            assert loop.run() == LANES * LENGTH
            loop.close()


@pytest.mark.gpu
@pytest.mark.parametrize("env_id", ENVS.values())
def test_a_network_on_the_cpu_acts_in_an_environment_on_a_gpu(env_id):
    env = make_env(env_id, LANES, "cuda")
    policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical, compile="eager")
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), LENGTH)
    assert batch["next", "reward"].device.type == "cuda"


@pytest.mark.gpu
def test_advantages_on_a_gpu():
    batch = ours("jax", "JAX policy, fused", "cuda").batch()
    values = batch["observation"].sum(-1, keepdim=True), batch["next", "observation"].sum(-1, keepdim=True)
    wanted = fc.gae(batch.cpu(), *(value.cpu() for value in values))
    torch.testing.assert_close([each.cpu() for each in fc.gae(batch, *values)], list(wanted))

"""Weights of policies that derive from `fc.PolicyBase`: sent to workers, saved and loaded, in every collector."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
import torch

import funcollect as fc
from tests.support.policies.own_policies import KINDS, InJax, Layer, Recording, seen_by, until
from tests.support.running import in_soak
from tests.support.workers import multi

ENVS = {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 20}


def sync(policy: Any, env: str = "CartPole-v1", **options: Any) -> Any:
    return fc.SyncDataCollector(fc.make_env(env, **options), policy, frames_per_batch=20, seed=0)


COLLECTORS: dict[str, Callable[[Any], Any]] = {
    "sync": sync,
    "sync, in a loop of JAX": partial(sync, env="gymnax/CartPole-v1", num_envs=2),
    "processes": lambda policy: multi(policy=policy, **ENVS),
    "asynchronous": lambda policy: multi(fc.MultiaSyncDataCollector, "serial", policy=policy, **ENVS),
}
if in_soak([True]):
    COLLECTORS["serial"] = lambda policy: multi(transport="serial", policy=policy, **ENVS)
    COLLECTORS["asynchronous processes"] = lambda policy: multi(fc.MultiaSyncDataCollector, policy=policy, **ENVS)


def states_of(saved: Any) -> list[Any]:
    """The state of each worker, or of the collector itself if it has none."""
    return list(saved["workers"].values()) if "workers" in saved else [saved]


@pytest.fixture(params=COLLECTORS.values(), ids=COLLECTORS.keys())
def make(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_new_params_act(kind: type[Recording], make: Callable[[Any], Any]) -> None:
    policy = kind()
    with make(policy) as collector:
        assert next(seen_by(collector)) == 0
        policy.params = kind.version(1)
        for given, wanted in ((None, 1), (kind.version(2), 2), (policy.state_dict(kind.version(3)), 3), (None, 1)):
            collector.update_policy_weights_(given)
            until(collector, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [True, False])
def test_a_saved_run_goes_on_with_its_weights(own: bool, kind: type[Recording], make: Callable[[Any], Any]) -> None:
    policy = kind()
    with make(policy) as collector:
        if own:
            policy.params = kind.version(5)
        collector.update_policy_weights_(None if own else kind.version(5))
        until(collector, 5)
        file = io.BytesIO()
        saved = collector.state_dict()
        torch.save(saved, file)
    file.seek(0)
    other = kind()
    with make(other) as collector:
        next(collector)
        collector.load_state_dict(torch.load(file, weights_only=True))
        until(collector, 5)
        again = [states_of(each)[-1]["policy_state_dict"] for each in (saved, collector.state_dict())]
        assert again[0].keys() == again[1].keys() != set()
        assert float(other.params["layers"][0].weight.max()) == (5 if own else 0)
        assert isinstance(other.params["layers"][0], Layer)
        other.params = kind.version(6)
        collector.update_policy_weights_()
        until(collector, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_params_of_another_structure_are_refused(kind: type[Recording], make: Callable[[Any], Any]) -> None:
    policy = kind()
    with make(policy) as collector:
        good = kind.version(1)
        (layer,) = good["layers"]
        saved = policy.state_dict(good)
        name = next(name for name in saved if "layers" in name and saved[name].shape == (4, 2))
        for bad, got in (
            (good | {"layers": [layer._replace(weight=layer.weight[:3])]}, "(3, 2)"),
            (good | {"layers": []}, "absent"),
            ({key: each for key, each in saved.items() if key != name}, "absent"),
        ):
            with pytest.raises(ValueError, match="params differ from the policy's own:") as error:
                collector.update_policy_weights_(bad)
            assert f"{name} is {got}, expected (4, 2)" in str(error.value)
            with pytest.raises(ValueError, match="params differ from the policy's own:"):
                policy.load(bad)
        until(collector, 0)


@pytest.mark.parametrize("transport", ["serial", "processes"])
def test_own_params_of_another_structure(transport: str) -> None:
    """Workers get a Torch policy anew; a JAX policy is compiled, so it has to keep its structure."""
    policy, fixed = Recording(), InJax()
    with multi(transport=transport, policy=policy, **ENVS) as collector:
        policy.params = Recording.version(1) | {"more": torch.ones(2)}
        collector.update_policy_weights_()
        until(collector, 1)
    with multi(transport=transport, policy=fixed, **ENVS) as collector:
        fixed.params = InJax.version(1) | {"more": jnp.ones(2)}
        with pytest.raises(ValueError, match=r"own: params.'more'. is \(2,\), expected absent:"):
            collector.update_policy_weights_()
        until(collector, 0)


def test_gradients_are_required_as_before() -> None:
    policy = Recording()
    policy.params["layers"][0].weight.requires_grad_(True)
    policy.load(policy.state_dict(Recording.version(1)))
    assert [(leaf.requires_grad, leaf.is_leaf) for leaf in policy.params["layers"][0]] == [(True, True), (False, True)]
    policy.params = {"w": torch.nn.Parameter(torch.ones(2))}
    policy.load({"w": torch.zeros(2)})
    assert isinstance(policy.params["w"], torch.nn.Parameter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_leaf_that_is_no_array_is_named(kind: type[Recording]) -> None:
    policy = kind()
    policy.params = {"name": "mine"}
    with pytest.raises(TypeError, match=r"the parameter\['name'\] is str, expected an array or a number"):
        policy.state_dict()


class Computed(Recording):
    def __init__(self) -> None:
        self.module = torch.nn.Linear(4, 2)

    @property
    def params(self) -> Any:  # type: ignore[override]
        return dict(self.module.named_parameters())


def test_params_that_cannot_be_set_are_named() -> None:
    policy = Computed()
    with pytest.raises(TypeError, match=r"params of Computed cannot be set, .*: give it a setter, or override load"):
        policy.load(policy.state_dict())


@pytest.mark.parametrize("policy", [None, lambda x: (x[:, 2] > 0).long()])
def test_a_policy_without_weights(policy: Any, make: Callable[[Any], Any]) -> None:
    with make(policy) as collector:
        next(collector)
        collector.update_policy_weights_()
        collector.load_state_dict(collector.state_dict())
        next(collector)
        with pytest.raises(ValueError, match="params were given to a"):
            collector.update_policy_weights_({"weight": torch.ones(2)})

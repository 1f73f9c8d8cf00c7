"""Policies of a user's own in every collector: weights of a `fc.PolicyBase`, and random frames of one with a memory."""

import io
from functools import partial

import jax.numpy as jnp
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

import funcollect as fc
from tests.support.policies import KINDS, InJax, Layer, Recording, seen_by, until
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, in_soak, once, pairwise
from tests.support.workers import multi, ray_collector

ENVS = {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 20}


def sync(policy, env="CartPole-v1", **options):
    return fc.SyncDataCollector(fc.make_env(env, **options), policy, frames_per_batch=20, seed=0)


COLLECTORS = {
    "sync": sync,
    "sync, in a loop of JAX": partial(sync, env="gymnax/CartPole-v1", num_envs=2),
    "processes": lambda policy: multi(policy=policy, **ENVS),
    "asynchronous": lambda policy: multi(fc.MultiaSyncDataCollector, "serial", policy=policy, **ENVS),
}
MORE = {
    "serial": lambda policy: multi(transport="serial", policy=policy, **ENVS),
    "asynchronous processes": lambda policy: multi(fc.MultiaSyncDataCollector, policy=policy, **ENVS),
}
NESTED = {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": 2}
OVER_RAY = {
    "Ray": lambda policy: ray_collector(policy=policy, **ENVS),
    "workers in actors": lambda policy: ray_collector(policy=policy, **ENVS, **NESTED),
}
HERE = [*COLLECTORS, *in_soak(MORE)]
SAVED = once(HERE, KINDS, [True, False])
SAVED += [pytest.param(*each, marks=AN_EVENING_OVER_RAY) for each in pairwise(OVER_RAY, KINDS, [True, False])]
pytestmark = [pytest.mark.usefixtures("ray_cluster_if_marked"), FORKS_OF_RAY]


def weights_in(saved):
    """The weights in a state, those of its last worker if it has some."""
    if isinstance(saved, list):
        return weights_in(saved[-1])
    return weights_in([*saved["workers"].values()]) if "workers" in saved else saved["policy_state_dict"]


def make(name, policy):
    return (COLLECTORS | MORE | OVER_RAY)[name](policy)


@pytest.mark.parametrize(("name", "kind"), once(HERE, KINDS))
def test_new_params_act(name, kind):
    policy = kind()
    with make(name, policy) as collector:
        assert next(seen_by(collector)) == 0
        policy.params = kind.version(1)
        for given, wanted in ((None, 1), (kind.version(2), 2), (policy.state_dict(kind.version(3)), 3), (None, 1)):
            collector.update_policy_weights_(given)
            until(collector, wanted)


@pytest.mark.parametrize(("name", "kind", "own"), SAVED)
def test_a_saved_run_goes_on_with_its_weights(name, kind, own):
    policy = kind()
    with make(name, policy) as collector:
        if own:
            policy.params = kind.version(5)
        collector.update_policy_weights_(None if own else kind.version(5))
        until(collector, 5)
        file = io.BytesIO()
        saved = collector.state_dict()
        torch.save(saved, file)
    file.seek(0)
    other = kind()
    with make(name, other) as collector:
        next(collector)
        collector.load_state_dict(torch.load(file, weights_only=True))
        until(collector, 5)
        again = [weights_in(each) for each in (saved, collector.state_dict())]
        assert again[0].keys() == again[1].keys() != set()
        assert float(other.params["layers"][0].weight.max()) == (5 if own else 0)
        assert isinstance(other.params["layers"][0], Layer)
        other.params = kind.version(6)
        collector.update_policy_weights_()
        until(collector, 6)


@pytest.mark.parametrize(("place", "kind"), once(HERE, KINDS))
def test_params_of_another_structure_are_refused(place, kind):
    policy = kind()
    with make(place, policy) as collector:
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
def test_own_params_of_another_structure(transport):
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


def test_gradients_are_required_as_before():
    policy = Recording()
    policy.params["layers"][0].weight.requires_grad_(True)
    policy.load(policy.state_dict(Recording.version(1)))
    assert [(leaf.requires_grad, leaf.is_leaf) for leaf in policy.params["layers"][0]] == [(True, True), (False, True)]
    policy.params = {"w": torch.nn.Parameter(torch.ones(2))}
    policy.load({"w": torch.zeros(2)})
    assert isinstance(policy.params["w"], torch.nn.Parameter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_leaf_that_is_no_array_is_named(kind):
    policy = kind()
    policy.params = {"name": "mine"}
    with pytest.raises(TypeError, match=r"the parameter\['name'\] is str, expected an array or a number"):
        policy.state_dict()


class Computed(Recording):
    def __init__(self):
        self.module = torch.nn.Linear(4, 2)

    @property
    def params(self):
        return dict(self.module.named_parameters())


def test_params_that_cannot_be_set_are_named():
    policy = Computed()
    with pytest.raises(TypeError, match=r"params of Computed cannot be set, .*: give it a setter, or override load"):
        policy.load(policy.state_dict())


@pytest.mark.parametrize(("name", "policy"), once(HERE, [None, lambda x: (x[:, 2] > 0).long()]))
def test_a_policy_without_weights(name, policy):
    with make(name, policy) as collector:
        next(collector)
        collector.update_policy_weights_()
        collector.load_state_dict(collector.state_dict())
        next(collector)
        with pytest.raises(ValueError, match="params were given to a"):
            collector.update_policy_weights_({"weight": torch.ones(2)})


# Random first frames of a policy that may carry its own action: a warning, since that action was not executed.
HIDDEN = {"hidden": torch.zeros(2)}


def chooses(observation, hidden):
    """Returns its action, which is also its next hidden state."""
    action = (observation[..., 2] + hidden[..., 0] > 0).long()
    return action, torch.stack([action.float(), hidden[..., 1]], -1)


def scores(observation, hidden):
    """Returns logits and a hidden state that follows from the observation."""
    return observation[..., :2], 0.5 * hidden + observation[..., :2]


def on_tensordict(module, *outputs):
    return TensorDictModule(module, ["observation", "hidden"], [*outputs, ("next", "hidden")])


def best():
    return TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])


def in_jax(params, x, hidden):
    return jnp.int32(x[:, 2] + hidden > 0), x[:, 0]


def in_parts(*modules):
    return fc.tensordict_policy(TensorDictSequential(*modules), initial_state=HIDDEN)


CARRIES = {
    "torch": lambda: fc.torch_policy(chooses, initial_state=torch.zeros(2)),
    "jax": lambda: fc.jax_policy(in_jax, None, initial_state=jnp.zeros(())),
    "tensordict": lambda: fc.tensordict_policy(on_tensordict(chooses, "action"), initial_state=HIDDEN),
    "read and written": lambda: fc.tensordict_policy(
        TensorDictModule(lambda x, last: ((x[..., 2] > 0).long(),) * 2, ["observation", "last"], ["action", "last"])
    ),
    "through a part": lambda: in_parts(
        TensorDictModule(lambda x, hidden: x[..., :2] + hidden, ["observation", "hidden"], ["logits"]),
        best(),
        TensorDictModule(lambda action: torch.stack([action.float()] * 2, -1), ["action"], ["embedded"]),
        TensorDictModule(lambda embedded: 2 * embedded, ["embedded"], [("next", "hidden")]),
    ),
}
DOES_NOT = {
    "head": lambda: fc.torch_policy(scores, head=fc.heads.categorical, initial_state=torch.zeros(2)),
    "no state": lambda: fc.torch_policy(lambda x: (x[..., 2] > 0).long()),
    "parts": lambda: in_parts(on_tensordict(scores, "logits"), best()),
}


def collect(policy, frames, workers=False):
    kind = partial(fc.MultiSyncDataCollector, in_process=True, num_workers=1) if workers else fc.SyncDataCollector
    with kind("CartPole-v1", policy, frames_per_batch=8, init_random_frames=frames, seed=0) as run:
        assert next(run).numel() == 8


@pytest.mark.parametrize(("name", "workers"), [*((name, False) for name in CARRIES), ("torch", True)])
def test_a_policy_that_may_carry_its_action_is_warned_of(name, workers):
    says = "init_random_frames is 4 with a recurrent policy that chooses its act"
    with pytest.warns(UserWarning, match=says) as seen:
        collect(CARRIES[name](), 4, workers)
    assert seen[0].filename == __file__
    collect(CARRIES[name](), None, workers)


GAMES = {
    "group": (
        fc.by_group,
        "pettingzoo/mpe/simple_tag_v3",
        {"adversary": CARRIES["torch"], "agent": DOES_NOT["no state"]},
    ),
    "player": (fc.by_player, "pettingzoo/classic/tictactoe_v3", [DOES_NOT["no state"], CARRIES["torch"]]),
}


@pytest.mark.parametrize("name", GAMES)
def test_so_is_one_of_several_policies(name):
    made, env, parts = GAMES[name]
    values = {key: part() for key, part in parts.items()} if name == "group" else [part() for part in parts]
    with pytest.warns(UserWarning, match="recurrent policy that chooses its act"):
        fc.SyncDataCollector(env, made(values), frames_per_batch=8, init_random_frames=4)


@pytest.mark.parametrize("name", DOES_NOT)
def test_other_policies_are_not(name):
    collect(DOES_NOT[name](), 4)

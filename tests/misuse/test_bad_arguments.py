"""Every public callable with bad values for each of its arguments: an error of ours that names argument and value.

What is bad follows from the annotation. A callable, or an argument of it, that is not called here has its reason below.
"""

import inspect
import os
import re
import tempfile
import types
from functools import cache

import jax
import numpy as np
import pytest
import torch
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional
from torch import nn

import funcollect as fc
from funcollect.messages import kind_of, shown
from tests.support.running import SCALE

MODULES = ("envs", "heads", "storages", "samplers", "ring", "jax_ring", "traced", "testing", "interop")
MODULES += ("datasets", "running_statistics")
OWN = (fc.FuncollectError, TypeError, ValueError)
KINDS = ("SyncData", "", "MultiSync", "MultiAsync", "Async", "Multi", "Ray")  # of collectors

# No function, no object, no tree: by the annotations that take one.
FUNCTIONS = "Callable[..., Any]; Callable[[], Any]; Callable[[Any], Any]; Callable[[list[Any]], Any]; Postproc"
OBJECTS = "torch.Generator; RandomSampler; nn.Module; Space; Begin; Advance; TextIO; Iterable[TensorDict]; Logger; Axes"
TREES = "CollectorState; TensorDictBase; EpisodeStats; RingState; SampleSpec; Trajectories; JaxRing"
NOT_NONE = {
    **{key: [0, "x"] for key in f"{FUNCTIONS}; {OBJECTS}".split("; ")},
    **{key: [0, "x", {}] for key in TREES.split("; ")},
    **{key: [0, "CartPole-v1", nn.Linear(4, 2)] for key in ("Env", "JaxEnv", "CollectorBase | Env")},
    **{key: [0, 2.5, ["a"]] for key in ("str | PathLike[str]", "str | os.PathLike[str]")},
    **{key: ["nowhere", 2.5, {}] for key in ("Device", "torch.device | str")},
    **{key: [0, "x", [1]] for key in ("Mapping[str, Any]", "Mapping[Any, Any]")},
    **{key: ["x", 0, True] for key in ("Starts", "Compiler")},
    "int": ["x", 2.5, True, [1]],
    "float": ["x", True, [0.5], {}],
    "bool": ["False", 0, 1, 2.5],
    "str": [0, 2.5, ("a",)],
    "str | Path": [0, 2.5, "", (), ("a", 0), ["a"]],
    "Sequence[str]": [0, "x", {"a": 1}, [0]],
    "ExplorationType": ["random", 0, True],
    "Policy": [0, "x", nn.Linear(4, 2)],
    "Storage | Callable[[], Storage]": [0, "x", fc.LazyTensorStorage],
    "Sampler | Callable[[], Sampler]": [0, "x", fc.MultiStepSampler],
    "float | torch.Tensor": ["x", True, [0.5], {}],
    "bool | int | Sequence[bool | int]": ["x", 2.5, (1, 2, 3)],
    "Head": [0, "x", True],
    "Join": ["x", 2, True],
    "npt.DTypeLike": ["x", 5, np.int32],
    "Shard": [0, "x", (0, 1)],
    "type[Any]": [0, "x", int],
    "torch.layout": ["x", 1],
    "tuple[int, ...]": [0, "x", (2.5,)],
    "Key": [0, "x", np.zeros(3, np.uint32)],
    "EpisodeWindow": ["x", 2.5],
}
SIZES = """
    length frames episodes max_frames frames_per_batch num_envs max_frames_per_traj batch_size max_size n_steps
    num_slices slice_len max_capacity steps frame_skip screen_size stack num_workers max_episode_steps episode_length
    num_threads total_lanes window ndim lanes batches num_collectors num_workers_per_collector fps max_unread waiting
    min_ready max_carry frames_per_batch frames_per_part k
"""
POSITIVE = set(SIZES.split())
COUNTS = {"init_random_frames", "max_policy_lag", "random_steps", "noop_max", "prefetch", "alpha", "beta", "eps"}
COUNTS |= {"max_age", "burn_in", "bootstrap"}
BEYOND = {"seed": [-1, 2**64], "total_frames": [0, -2], "epsilon": [2.0, -0.5]}


def bad_values(name, annotation):
    """Values that an argument of this name and annotation does not take."""
    kinds = [kind.strip() for kind in re.split(r"\|(?![^\[]*\])", annotation)]
    whole = annotation.replace(" | None", "")
    known = NOT_NONE.get(whole)
    if known is None and whole.startswith("Literal"):
        known = ["x", 0, True]
    if known is None:
        lists = [NOT_NONE.get(kind) for kind in kinds if kind != "None"]
        if any(values is None for values in lists):
            return
        known = [value for value in lists[0] or [] if all(value in values for values in lists if values)]
    yield from known
    if "None" not in kinds and whole != "Device":
        yield None
    if name in POSITIVE:
        yield from (0, -1)
    elif name in COUNTS:
        yield -1
    yield from BEYOND.get(name, ())


@cache
def host():
    env = fc.make_env("CartPole-v1", num_envs=2)
    return env, fc.random_policy(env)


@cache
def fused():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    return env, fc.random_policy(env)


def start(pair=host):
    return fc.init(*pair(), seed=0)


def batch():
    state, batch = fc.rollout(*host(), start(), 6)
    fc.close(state)
    return batch


def turns():
    env = fc.make_env("pettingzoo/classic/tictactoe_v3", num_envs=2)
    return fc.step(env, fc.random_policy(env), fc.init(env, fc.random_policy(env), seed=0))[1].unsqueeze(-1)


@cache
def traced_batch():
    zero, no = jax.numpy.zeros((2, 2), jax.numpy.int32), jax.numpy.zeros((2, 2), bool)
    after = {"reward": jax.numpy.zeros((2, 2)), "done": no}
    return {"collector": {"episode": zero, "step": zero}, "next": after, "done": no}


@cache
def saved():
    path = os.path.join(tempfile.mkdtemp(), "state")
    fc.save(path, start(), episodes="restart")
    return path


def statistics():
    return fc.running_statistics.init(host()[0].observation_space)


def ring_state():
    return fc.ring.extend(fc.ring.init(16), batch())[0]


def jax_ring():
    return fc.jax_ring.extend(fc.jax_ring.init(rows(4), steps=8), rows(4))


def rows(steps):
    return {"x": jax.numpy.zeros((steps, 2)), "next": {"done": jax.numpy.zeros((steps, 2), bool)}}


def mlp(params, x):
    return x @ params


def both(pair=host, **others):
    return dict(zip(("env", "policy"), pair(), strict=True)) | others


def torchrl_env():
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


def spaces(prefix=""):
    return {f"{prefix}{name}": getattr(host()[0], name) for name in ("observation_space", "action_space")}


def linear():
    return fc.torch_policy(nn.Linear(4, 2), head=CATEGORICAL)


WEIGHTS = jax.numpy.ones((4, 2))
COLLECTOR = {"create_env_fn": "CartPole-v1", "policy": None, "frames_per_batch": 8}
CATEGORICAL = fc.heads.categorical
STACKED = {"weight": torch.zeros(3, 2, 4), "bias": torch.zeros(3, 2)}
FUNCTIONAL = {"reset": lambda key, params: (key, WEIGHTS[0]), "step": lambda *_: None}
PRIORITIES = {"max_capacity": 8, "alpha": 0.6, "beta": 0.4}
SUITES = {
    "ale": {"game": "Pong"},
    "brax": {"env": "inverted_pendulum"},
    "craftax": {"env": "Craftax-Classic-Symbolic-v1"},
    "envpool": {"task_id": "CartPole-v1"},
    "gymnasium": {"env": "CartPole-v1"},
    "gymnax": {"env": "CartPole-v1"},
    "jaxmarl": {"env": "MPE_simple_spread_v3"},
    "jumanji": {"env": "Snake-v1"},
    "navix": {"env": "Navix-Empty-5x5-v0"},
    "pgx": {"env": "tic_tac_toe"},
    "pettingzoo": {"env": "mpe/simple_spread_v3"},
    "vmas": {"scenario": "navigation"},
    "playground": {"env": "CartpoleBalance"},
    "xminigrid": {"env": "MiniGrid-Empty-5x5"},
}
NOTHING = """
    RandomSampler RecentSampler ReplayBuffer SamplerWithoutReplacement envs.CartPole envs.Pendulum ring.Trajectories
    TensorDictReplayBuffer
"""
# Good arguments for each public callable, made anew for each test.
GOOD = {
    **dict.fromkeys(NOTHING.split(), dict),
    **{f"envs.from_{suite}": given.copy for suite, given in SUITES.items()},
    **{f"{kind}Storage": lambda: {"max_size": 8} for kind in ("LazyMemmap", "LazyTensor", "List")},
    **{name: lambda: {"gamma": 0.9, "n_steps": 3} for name in ("MultiStep", "MultiStepSampler")},
    **{f"{kind}Collector": lambda: COLLECTOR | {"create_env_fn": ["CartPole-v1"]} for kind in KINDS[2:]},
    **{name: lambda: {"env": host()[0], "state": start()} for name in ("fork", "recover", "reset")},
    **{name: lambda: {"batch": batch()} for name in ("episode_stats", "next_observations", "scale_rewards")},
    **{f"{kind}Collector": lambda: COLLECTOR for kind in KINDS[:2]},
    "MultiCollector": lambda: COLLECTOR | {"create_env_fn": ["CartPole-v1"], "sync": True},
    "PrioritizedSampler": lambda: PRIORITIES,
    "PrioritizedSliceSampler": lambda: PRIORITIES | {"num_slices": 2},
    "ReplayReader": lambda: {"directory": "/nowhere"},
    **{f"SliceSampler{kind}": lambda: {"num_slices": 2} for kind in ("", "WithoutReplacement")},
    "TensorDictPrioritizedReplayBuffer": lambda: {"alpha": 1, "beta": 1},
    "Checkpoint": lambda: {"directory": "/nowhere"},
    "apply": lambda: {"env": host()[0], "state": start(), "function": repr},
    "close": lambda: {"state": start()},
    "deliver": lambda: {"arrays": {"x": WEIGHTS}},
    "differentiable_rollout": lambda: both(fused, state=start(fused), length=2),
    "Evaluator": lambda: {"create_env_fn": "CartPole-v1", "policy": None, "episodes": 1, "seed": 0},
    "evaluate": lambda: both(episodes=1, seed=0),
    "evaluate_actions": lambda: {"policy": linear(), "params": None, "batch": batch(), "env": host()[0]},
    "explain": both,
    "gae": lambda: {"batch": batch(), "value": torch.zeros(2, 6, 1), "next_value": torch.zeros(2, 6, 1)},
    "hindsight": lambda: {"buffer": fc.ReplayBuffer(), "reward": lambda achieved, goal, frames: 0},
    "init": lambda: both(seed=0),
    "jax_policy": lambda: {"apply": mlp, "params": WEIGHTS, "head": CATEGORICAL},
    "load": lambda: both(path=saved()),
    "lower": lambda: {"module": nn.Linear(4, 2), "example": torch.zeros(1, 4)},
    "lower_policy": lambda: {"policy": linear(), "env": fused()[0]},
    "make_policy": lambda: {"name": "mlp", "env": host()[0]},
    "agents_as_rows": lambda: {"batch": batch(), "group": "agent"},
    "by_player": lambda: {"policies": [linear()]},
    "player_trajectories": lambda: {"batch": turns()},
    "by_group": lambda: {"policies": {"agent": linear()}},
    "population": lambda: {"policy": linear(), "params": STACKED},
    "normalized": lambda: {"policy": linear(), "stats": statistics()},
    "random_policy": lambda: {"env": host()[0]},
    "profile": lambda: {"target": host()[0], "policy": None, "frames": 20, "length": 10},
    "record": lambda: both(path="/nowhere/x.gif"),
    "rollout": lambda: both(state=start(), length=2),
    "mix": lambda: {"fractions": (0.5, 0.5)},
    "next_values": lambda: {"policy": linear(), "params": None, "batch": batch(), "key": "action", "env": host()[0]},
    "rollout_trajectories": lambda: both(state=start(), count=2),
    "save": lambda: {"path": saved(), "state": start()},
    "set_env_params": lambda: {"env": fused()[0], "state": start(fused), "params": fused()[0].default_params},
    "split_trajectories": lambda: {"batch": batch()},
    "step": lambda: both(state=start()),
    "tensordict_policy": lambda: {"module": nn.Linear(4, 2)},
    "torch_policy": lambda: {"module": nn.Linear(4, 2), "head": CATEGORICAL},
    "track": lambda: {"batches": fc.SyncDataCollector(**COLLECTOR), "disable": True},
    "datasets.from_arrays": lambda: {"arrays": {}},
    "datasets.from_hf": lambda: {"dataset": "/nowhere"},
    "datasets.read_lerobot": lambda: {"folder": "/nowhere"},
    "datasets.read_minari": lambda: {"path_or_id": "/nowhere"},
    "datasets.to_hf": lambda: {"batches": [batch()]},
    "datasets.write_lerobot": lambda: {"folder": tempfile.mkdtemp(), "batches": [batch()], "env": host()[0]},
    "datasets.write_minari": lambda: {"path_or_id": tempfile.mkdtemp(), "batches": [batch()], "env": host()[0]},
    "envs.from_functional": lambda: {"env": CartPoleFunctional()},
    "envs.from_functions": lambda: FUNCTIONAL | spaces(),
    "Shard": lambda: {"index": 1, "count": 2},
    "envs.ActionSpec": lambda: {"space": host()[0].action_space},
    "envs.Group": lambda: {"names": ("ant",), **spaces()},
    "envs.observation_leaves": lambda: {"space": host()[0].observation_space},
    "envs.observation_rows": lambda: {"env": host()[0]},
    "envs.from_torch_vector_env": lambda: {
        "env": types.SimpleNamespace(num_envs=2, device="cpu", step=None, **spaces("single_"))
    },
    "envs.from_torchrl": lambda: {"env": torchrl_env},
    "heads.boltzmann": lambda: {"temperature": 0.1},
    "heads.clipped_normal": lambda: {"scale": 0.1},
    "heads.epsilon_greedy": lambda: {"epsilon": 0.1},
    "heads.from_distribution": lambda: {"distribution": torch.distributions.Beta},
    "ring.Flat": lambda: {"batch_size": 4},
    "ring.Slices": lambda: {"num_slices": 2, "slice_len": 2},
    "ring.extend": lambda: {"state": ring_state(), "batch": batch()},
    "ring.init": lambda: {"storage": 16},
    "ring.sample": lambda: {"state": ring_state(), "key": np.zeros(2, np.uint32), "spec": fc.ring.Flat(2)},
    "ring.snapshot": lambda: {"state": ring_state()},
    "jax_ring.extend": lambda: {"ring": jax_ring(), "batch": rows(1)},
    "jax_ring.held": lambda: {"ring": jax_ring()},
    "jax_ring.init": lambda: {"example": {"x": WEIGHTS}, "steps": 8},
    "jax_ring.sample": lambda: {"ring": jax_ring(), "key": jax.random.key(0), "batch_size": 2},
    "jax_ring.sample_slices": lambda: {"ring": jax_ring(), "key": jax.random.key(0), "num_slices": 1, "slice_len": 2},
    "traced.episode_stats": lambda: {"batch": traced_batch()},
    "traced.evaluate": lambda: both(fused, params=None, key=jax.random.PRNGKey(0), episodes=2),
    "traced.init": lambda: both(fused, params=None, key=jax.random.PRNGKey(0)),
    "traced.partition": lambda: {"state": start(fused), "axis": "devices"},
    "traced.no_stats": lambda: {"state": start(fused), "length": 4},
    "traced.reset": lambda: {"env": fused()[0], "state": start(fused)},
    "traced.rollout": lambda: both(fused, params=None, state=start(fused), length=2),
    "traced.set_env_params": lambda: {"env": fused()[0], "state": start(fused), "params": fused()[0].default_params},
    "traced.step": lambda: both(fused, params=None, state=start(fused)),
    "testing.check_env": lambda: {"env": "CartPole-v1"},
    "testing.check_policy": lambda: {"policy": linear(), "env": "CartPole-v1"},
    "running_statistics.denormalize": lambda: {"stats": statistics(), "observation": torch.zeros(4)},
    "running_statistics.init": lambda: {"space": host()[0].observation_space},
    "running_statistics.merge": lambda: {"one": statistics(), "other": statistics()},
    "running_statistics.normalize": lambda: {"stats": statistics(), "observation": torch.zeros(4)},
    "running_statistics.update": lambda: {"stats": statistics(), "batch": batch()},
    "interop.to_jax": lambda: {"tree": torch.zeros(2)},
    "interop.to_torch": lambda: {"tree": WEIGHTS},
}
RESULTS = """
    CollectorState EpisodeStats Evaluation PendingTrajectories Plan Profile ring.RingState jax_ring.JaxRing
    testing.Report running_statistics.RunningStatistics traced.TracedEpisodeStats
"""
PROTOCOLS = """
    Policy heads.Head storages.Storage samplers.Sampler envs.SavableSnapshots envs.HostEnv envs.JaxEnv envs.Simulators
    envs.SnapshotSimulators envs.TorchEnv envs.DeviceEnv
"""
BASES = "PolicyBase envs.HostEnvBase envs.JaxEnvBase envs.SimulatorsBase envs.TorchEnvBase"
PLAIN_VALUES = "Exploration Noise envs.LaneKeys envs.Renderer envs.Transition"
# Whatever describes an environment goes to `make_env`, whose adapters are called by themselves.
NOT_CALLED = {"make_env", *f"{RESULTS} {PROTOCOLS} {BASES} {PLAIN_VALUES}".split()}
NOT_BOTH = {(f"{kind}SliceSampler", "slice_len"): "num_slices" for kind in ("", "Prioritized")}  # one of them is given
NO_LIMIT = ("max_frames_per_traj", "init_random_frames")
NOT_BAD = {  # callable, argument and value that are good all the same
    *((f"{kind}Collector", argument, "-1") for kind in KINDS for argument in NO_LIMIT),
    ("RayCollector", "reset_at_each_iter", "0"),  # TorchRL's documents pass -False
    *((f"envs.from_{kind}", "num_workers", "0") for kind in ("ale", "gymnasium", "torchrl")),
}


def public():
    """Every public name that can be called, once, with what it stands for."""
    seen = set()
    for prefix, module in [("", fc), *((f"{name}.", getattr(fc, name)) for name in MODULES)]:
        for name in sorted(getattr(module, "__all__", None) or vars(module)):
            value = getattr(module, name)
            error = isinstance(value, type) and issubclass(value, BaseException)
            if name.startswith("_") or isinstance(value, types.ModuleType) or not callable(value) or error:
                continue
            if getattr(value, "__module__", "").startswith("funcollect") and id(value) not in seen:
                seen.add(id(value))
                yield prefix + name, value


def annotated(function):
    """The arguments of a callable with their annotations; those of a TypedDict of keywords too."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            yield parameter.name, str(parameter.annotation)
        elif str(parameter.annotation).startswith("Unpack["):
            scope = vars(inspect.getmodule(function))
            for base in reversed(scope[str(parameter.annotation)[7:-1]].__mro__ or ()):
                yield from ((name, str(kind)) for name, kind in inspect.get_annotations(base).items())


# Each call of these makes an environment, which takes long. All are checked by the same function.
SLOW = {f"envs.from_{suite}" for suite in ("brax", "craftax", "jaxmarl", "jumanji", "navix", "pgx", "playground")}
CASES = [
    pytest.param(
        name,
        function,
        argument,
        [value for value in bad_values(argument, annotation) if (name, argument, repr(value)) not in NOT_BAD][
            : 1 if SCALE == 1 and name in SLOW else None
        ],
        id=f"{name}({argument}=)",
        marks=[pytest.mark.needs(package) for package in ("craftax", "torchrl") if name == f"envs.from_{package}"],
    )
    for name, function in public()
    if name in GOOD
    for argument, annotation in annotated(function)
    if any(True for _ in bad_values(argument, annotation))
]


def test_every_public_callable_is_called():
    assert {name for name, _ in public()} == {*GOOD} | NOT_CALLED


@pytest.mark.parametrize(("name", "function", "argument", "values"), CASES)
def test_bad_values_of_an_argument(name, function, argument, values):
    """The error names the argument and the value, and what was expected or the fix; the other arguments stay good."""
    others = {key: good for key, good in GOOD[name]().items() if key not in (argument, NOT_BOTH.get((name, argument)))}
    parameters = inspect.signature(function).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    for value in values:
        given = others | {argument: value}
        with pytest.raises(OWN) as caught:
            function(*map(given.pop, positional), **given)
        message = str(caught.value)
        assert re.search(rf"\b{argument}\b", message), f"{value!r}: {type(caught.value).__name__}: {message}"
        forms = (shown(value), str(value), kind_of(value).removeprefix("the class "))
        assert any(form in message for form in forms), f"{value!r}: {message}"
        assert "expected" in message or ": " in message, f"{value!r}: {message}"

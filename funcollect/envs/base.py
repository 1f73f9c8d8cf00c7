"""Base classes and checks of all environments, and recognition of other libraries' without importing them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import AtariPreprocessing, TimeLimit
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_function, check_num_envs, check_positive
from funcollect.errors import EnvError
from funcollect.messages import form
from funcollect.protocols import Backend, DeviceEnv, JaxEnv, TorchEnv, Transition
from funcollect.specs import ActionSpec, Group, Leaf, Space, disassemble, observation_leaves
from funcollect.tree import Path

if TYPE_CHECKING:  # a cached property does not fit a protocol's property for pyright
    cached_property = property
else:
    from functools import cached_property


AUTORESET_MODES = ("DISABLED", "NEXT_STEP", "SAME_STEP")
FINAL = ("final_obs", "final_observation")  # the info with last observations: Gymnasium's name, and its older one


def autoreset_mode(env: Any) -> Any:
    """The name of the `AutoresetMode` by which a vector environment resets its lanes; None if it does not say."""
    raw = getattr(env, "unwrapped", env)
    mode, metadata = getattr(raw, "autoreset_mode", None), getattr(raw, "metadata", None)
    inherited = gymnasium.Env.metadata, VectorEnv.metadata  # other classes may have written their mode into these
    if mode is None and metadata and not any(metadata is shared for shared in inherited):
        mode = metadata.get("autoreset_mode")
    return getattr(mode, "name", {known.value: known.name for known in AutoresetMode}.get(str(mode), mode))


def first_then_new(made: list[Any], build: Callable[[], Any]) -> Any:
    """Pop the environment from the list `made`, which holds one at most; build a new one once it is empty."""
    return made.pop() if made else build()


def with_time_limit(
    factory: Callable[..., Any], kwargs: dict[str, Any], *, by_name: bool = False
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Wrap a factory that takes no `max_episode_steps` (by ``**kwargs`` neither, unless `by_name`), to set it later."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return factory, kwargs
    any_keyword = not by_name and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "max_episode_steps" not in kwargs or "max_episode_steps" in parameters or any_keyword:
        return factory, kwargs
    others = dict(kwargs)
    steps = others.pop("max_episode_steps")
    check_positive("max_episode_steps", steps, 500)
    return partial(_limited, factory, steps), others


def _limited(factory: Callable[..., Any], steps: int, **kwargs: Any) -> Any:
    env = factory(**kwargs)
    if isinstance(env, gymnasium.Env):
        return TimeLimit(env, steps)
    if not hasattr(env, "max_episode_steps"):
        what = f"max_episode_steps was given with a factory that does not take it, and that made {type(env).__name__}"
        raise TypeError(f"{what}, expected a gymnasium.Env: leave it out")
    if is_dataclass(env):
        return replace(env, max_episode_steps=steps)  # type: ignore[type-var]
    env.max_episode_steps = steps
    return env


def built(factory: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Call a factory; ValueError if it asks Gymnasium for an id that is not registered in this process."""
    try:
        return factory(**kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        what = f"the factory asks for an id that is not registered in this process ({str(error).rstrip('.')})"
        mend = "name its module ('module:Name-v0', 'ale_py:ALE/Pong-v5'), register it in the factory, or pass the id"
        raise ValueError(f"{what}, and a worker lacks what a script has registered: {mend}") from error


def check_spaces(env: Any) -> None:
    """Raise TypeError unless an environment has both spaces."""
    if missing := [name for name in ("observation_space", "action_space") if not hasattr(env, name)]:
        mend = "set them there, or in its constructor, before super().__init__()"
        raise TypeError(f"{type(env).__name__} lacks {missing}, expected as attributes of the class: {mend}")


def check_pure_functions(owner: str, reset: Any, step: Any, observe: Any = None) -> None:
    """Raise TypeError unless the functions of a JAX or Torch environment take what the loops pass."""
    check_function(f"{owner}reset", reset, "a function of a key and the parameters", 2)
    check_function(f"{owner}step", step, "a function of a key, the state, an action and the parameters", 4)
    if observe is not None:
        check_function(f"{owner}observation_of", observe, "a function of the state and the parameters", 2)


def first_inputs(env: Any, root: dict[Path, Any]) -> dict[Path, Any]:
    """Observations [P, ...] by path, with the `inputs` of `make_env` as at the first step of an episode."""
    while (between := getattr(env, "between", None)) is not None:
        root, env = between.first(root), between.env
    return root


def observer_of(env: object) -> Callable[[Any, Any], Any] | None:
    """The function ``observation_of(env_state, params)`` of a JAX or Torch environment; None if it has none."""
    return getattr(env, "observation_of", None)


def checked_start(env: object, answer: Any) -> tuple[Any, Any]:
    """Return what `reset` of a JAX or Torch environment returned; EnvError unless it is a state and an observation."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        what = f"reset of {env!r} returned {returned(answer)}, expected the pair (env_state, observation)"
        raise EnvError(f"{what}: return both")
    return answer


def fields_of(label: str, answer: Any) -> Transition:
    """The Transition that `step` returned, as one or as a tuple of its fields; TypeError for anything else."""
    if not isinstance(answer, tuple) or len(answer) not in (5, 6):
        wanted = "(env_state, observation, reward, terminated, truncated), and info if there is any: return these"
        raise TypeError(f"{label}: step returned {returned(answer)}, expected {wanted}")
    return Transition(*answer)


def checked_transition(env: JaxEnv | TorchEnv | DeviceEnv, answer: Any) -> Transition:
    """Return what `step` of an environment returned; EnvError unless it is a Transition."""
    if not isinstance(answer, Transition):
        mend = "return funcollect.envs.Transition(env_state, observation, reward, terminated, truncated)"
        raise EnvError(f"step of {env!r} returned {returned(answer)}, expected a Transition: {mend}")
    if not isinstance(answer.info, Mapping):
        raise EnvError(f"the infos that step of {env!r} returned are {form(answer.info)}, expected a dict of arrays")
    in_torch = env.backend == "torch"
    wanted = "a tensor [P, ...]" if in_torch else "an array or a number"
    for name, value in answer.info.items():
        if not (isinstance(value, Tensor) if in_torch else hasattr(value, "dtype") or isinstance(value, (int, float))):
            what = f"the info {name!r} that step of {env!r} returned is {form(value)}, expected {wanted}"
            raise EnvError(f"{what}: give each array a name of its own")
    return answer


def leaves_of(env: JaxEnv | TorchEnv | DeviceEnv | AdaptedEnv, observation: Any, name: str) -> list[tuple[Leaf, Any]]:
    """The leaves of an observation, each with its description; EnvError, with `name` in it, for another structure."""
    space = env.observation_space
    try:
        return [*zip(env.observation_leaves, disassemble(space, observation), strict=True)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = f"{name} is {type(observation).__name__} and lacks the structure of its space {space} ({error!r})"
        raise EnvError(f"{what}: correct the environment or the space") from error


def returned(answer: Any) -> str:
    """Describe the result of an environment's function for a message: a tuple by the number of its values."""
    return f"{len(answer)} values" if type(answer) is tuple else form(answer)


def box(shape: tuple[int, ...], dtype: npt.DTypeLike, low: Any = None, high: Any = None) -> Space:
    """A Box of any dtype, bool included. Missing bounds are the dtype's range, or infinite for floats."""
    dtype = np.dtype(dtype)
    kind: Any = dtype.type  # Gymnasium's annotation knows no bool
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, kind)
    least, most = (-np.inf, np.inf) if dtype.kind not in "iu" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bounds = (least if low is None else low, most if high is None else high)
    lower, upper = (np.broadcast_to(np.clip(bound, least, most).astype(dtype), shape) for bound in bounds)
    return spaces.Box(lower, upper, shape, kind)


def info_place(info: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], str]:
    """The dict that should hold an info, and its key there: dots lead into dicts, unless the whole key exists."""
    outer, _, inner = key.partition(".")
    if key not in info and inner and isinstance(info.get(outer), Mapping):
        return info_place(info[outer], inner)
    return info, key


def info_names(info: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """The names of all infos, dotted for nested dicts, without Gymnasium's masks (``_name``)."""
    names: list[str] = []
    for name in sorted(name for name in map(str, info) if not name.startswith("_")):
        value = info.get(name)
        names += info_names(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [prefix + name]
    return names


class EnvBase:
    """Base class of `HostEnvBase`, `TorchEnvBase` and `JaxEnvBase`: the members that follow from the two spaces."""

    observation_space: Space
    action_space: Space
    num_envs: int | None = None
    truncates: bool = False  # whether the environment itself ends every episode after some number of steps

    def __init__(self, num_envs: int | None = None) -> None:
        check_num_envs(num_envs)
        check_spaces(self)
        if num_envs is not None:
            self.num_envs = num_envs

    @cached_property
    def observation_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of an observation in a batch."""
        return observation_leaves(self.observation_space)

    @cached_property
    def action_spec(self) -> ActionSpec:
        """The encoding of actions in a batch."""
        return ActionSpec(self.action_space)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.num_envs is None else f'num_envs={self.num_envs}'})"


@dataclass(frozen=True, eq=False, kw_only=True)
class AdaptedEnv:
    """Base class of the environments that adapters return."""

    label: str  # its name in messages
    num_envs: int | None
    observation_space: Space
    action_spec: ActionSpec
    observation_leaves: tuple[Leaf, ...]
    backend: Backend
    truncates: bool = False  # whether every episode ends after some number of steps
    between: Any = field(default=None, compare=False)  # the changes that `funcollect.envs.around` makes to its steps

    @property
    def action_space(self) -> Space:
        """The action space of one environment."""
        return self.action_spec.space

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups of agents; empty for an environment of one."""
        return getattr(self.action_spec, "groups", {})

    @override
    def __repr__(self) -> str:
        lanes = "" if self.num_envs is None else f", num_envs={self.num_envs}"
        return f"{self.backend.capitalize()}Env({self.label!r}{lanes})"


def import_extra(module: str, package: str, extra: str | None) -> Any:
    """Import `module` without changing random generators (EnvPool draws); ImportError says how to install it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):  # some print
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        mend = f"pip install {package}"
        mend = f"pip install 'funcollect[{extra}]', or only it: {mend}" if extra else mend
        raise ImportError(f"{package} is not installed: {mend}") from error
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def is_torchrl(env: Any) -> bool:
    """Whether `env` is one of TorchRL's environments."""
    envs = sys.modules.get("torchrl.envs")
    return envs is not None and isinstance(env, envs.EnvBase)


def is_of(library: str, env: Any) -> bool:
    """Whether the environment's class or one of its bases comes from a library, such as ``"envpool"``."""
    return any(base.__module__.partition(".")[0] == library for base in type(env).__mro__)


# By the name in ``from_<suite>``: the package of the suite's classes, and members that identify similar classes.
SUITES: dict[str, tuple[str, tuple[str, ...]]] = {
    "playground": ("mujoco_playground", ("reset", "step", "action_size", "unwrapped")),
    "brax": ("brax", ("reset", "step", "action_size")),
    "gymnax": ("gymnax", ("reset_env",)),
    "jumanji": ("jumanji", ("observation_spec", "action_spec")),
    "craftax": ("craftax", ("reset_env", "step_env", "static_env_params")),
    "jaxmarl": ("jaxmarl", ("reset", "step_env", "agents", "action_space")),
    "navix": ("navix", ("reset", "_step", "action_space")),
    "pgx": ("pgx", ("init", "num_players", "num_actions")),
    "xminigrid": ("xminigrid", ("reset", "step", "default_params", "num_actions")),
    "functional": ("gymnasium", ("initial", "transition", "terminal")),
}


def suite_of(env: Any) -> str | None:
    """The name in `SUITES` of the suite that an instance comes from; None for any other object."""
    if isinstance(env, (type, gymnasium.Env, VectorEnv)):
        return None
    if isinstance(env, FuncEnv):
        return "functional"
    packages = [(suite, package) for suite, (package, _) in SUITES.items() if suite != "functional"]
    return next((suite for suite, package in packages if is_of(package, env)), None)


def adapter_of(env: object) -> str:
    """The fix in the error for an object that `make_env` refuses: an adapter that its members suggest."""
    members = {*dir(env)}  # `hasattr` would evaluate properties
    if {"num_envs", "single_observation_space", "single_action_space", "reset", "step"} <= members:
        return "its members are those of a vector environment over tensors: pass it to from_torch_vector_env"
    if is_of("pettingzoo", env):
        return "pass the class, or a function that makes one; see funcollect.envs.from_pettingzoo"
    similar = (name for name, (_, needed) in SUITES.items() if members.issuperset(needed) and not is_of("dm_env", env))
    if suite := suite_of(env) or next(similar, None):
        return f"pass it alone to funcollect.envs.from_{suite}, which takes its like, with num_envs= for several lanes"
    return "pass one of these, or two pure functions of JAX to funcollect.envs.from_functions"


def refuse_foreign(env: Any) -> None:
    """Raise TypeError for an environment of TorchRL's or a Stable-Baselines3 `VecEnv`: neither is a gymnasium.Env."""
    if is_torchrl(env):
        mend = "for several of TorchRL's environments, pass torchrl.envs.SerialEnv(num_envs, factory)"
        raise TypeError(f"a lane is TorchRL's {type(env).__name__}, expected a gymnasium.Env: {mend}")
    if is_of("stable_baselines3", env) and any(base.__name__ == "VecEnv" for base in type(env).__mro__):
        mend = "pass the functions it was built from, funcollect.make_env([make_one] * 4), or one with num_envs=4"
        raise TypeError(f"env is Stable-Baselines3's {type(env).__name__}, which resets its lanes itself: {mend}")


def has_time_limit(env: Any) -> bool:
    """Whether a Gymnasium environment or `VectorEnv` truncates episodes, or declares it by ``truncates = True``."""
    if getattr(getattr(env, "spec", None), "max_episode_steps", None):
        return True
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            return True
        env = env.env
    return bool(getattr(env, "truncates", False))


def running_statistics(env: Any) -> tuple[str, ...]:
    """The names of wrappers, of `env` or its first lane, that normalise by statistics updated over episodes."""

    def updates(part: Any) -> bool:
        if any(type(value).__name__ == "RunningMeanStd" for value in _attributes(part)):
            return bool(getattr(part, "update_running_mean", True))
        normalises = any(base.__name__.startswith("VecNorm") for base in type(part).__mro__)
        return normalises and not getattr(part, "frozen", False)

    return tuple(dict.fromkeys(type(part).__name__ for part in _parts(env, set()) if updates(part)))


def has_game_of_lives(env: Any) -> bool:
    """Whether `env`, or its first lane, holds an Atari game whose episodes end with its lives."""
    return "ale_py" in sys.modules and any(map(ends_with_lives, _parts(env, set())))


def ends_with_lives(part: Any) -> bool:
    """Whether a layer of an environment ends the episodes of an Atari game with its lives."""
    return isinstance(part, AtariPreprocessing) and part.terminal_on_life_loss


def _parts(env: Any, seen: set[int]) -> Iterator[Any]:
    """Yield `env`, its wrappers and transforms, and those of its first lane, built here if it lives in a process."""
    if id(env) in seen:
        return
    seen.add(id(env))
    yield env
    members: Mapping[str, Any] = vars(env) if isinstance(env, torch.nn.Module) else {}  # as TorchRL's environments are
    if isinstance(env, VectorEnv):
        members = {name: getattr(env, name, None) for name in ("envs", "env_fns")}
    envs = [part for part in _attributes(env) if hasattr(type(part), "step") and hasattr(type(part), "reset")]
    for part in [*envs, *members.get("_modules", {}).values()]:
        yield from _parts(part, seen)
    if lanes := members.get("envs") or members.get("_envs"):
        yield from _parts(lanes[0], seen)
    elif factories := members.get("env_fns") or members.get("create_env_fn"):
        with contextlib.closing(factories[0]()) as lane:
            yield from _parts(lane, seen)


def _attributes(part: Any) -> list[Any]:
    """The values of an instance's attributes, and the values in dicts among them."""
    values = gc.get_referents(part)  # `vars` would make CPython keep them in a dict, which slows down each later read
    for _ in range(2):  # the instance's own dict, if it has one, and the dicts in it
        values += [inner for value in values if type(value) is dict for inner in value.values()]
    return values

"""The members that environments have in common, whether a user writes them or an adapter returns them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.wrappers import TimeLimit
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_function, check_num_envs, check_positive
from funcollect.errors import EnvError
from funcollect.messages import form
from funcollect.protocols import Backend, DeviceEnv, JaxEnv, TorchEnv, Transition
from funcollect.specs import ActionSpec, Leaf, Space, observation_leaves

if TYPE_CHECKING:  # a cached property does not fit a protocol's property for pyright
    cached_property = property
else:
    from functools import cached_property


def autoreset_mode(env: Any) -> Any:
    """How a vector environment resets its lanes, an `AutoresetMode`; None if it does not say.

    Gymnasium's own have an attribute for it. What their `metadata` says may be true of another one, since that dict
    belongs to the class of the environments, or to `gymnasium.Env`.
    """
    raw = getattr(env, "unwrapped", env)
    own = getattr(raw, "autoreset_mode", None)
    metadata = getattr(raw, "metadata", None)
    if own is not None or not metadata or metadata is gymnasium.Env.metadata:
        return own
    return metadata.get("autoreset_mode")


class FirstThenNew:
    """A factory that returns what has been made already once, and from then on what `build` makes.

    Attributes:
        made: what has been made already; None once it has been taken.
    """

    def __init__(self, made: Any, build: Callable[[], Any]) -> None:
        self.made, self._build = made, build

    def taken(self) -> Any:
        """Return what has been made already, once; then None."""
        made, self.made = self.made, None
        return made

    def __call__(self) -> Any:
        """An environment that nobody else uses."""
        return self._build() if self.made is None else self.taken()


def with_time_limit(
    factory: Callable[..., Any], kwargs: dict[str, Any], *, by_name: bool = False
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A factory and its keywords. If it does not take `max_episode_steps`, the limit is set on what it makes.

    It takes that, unless `by_name`, if it takes any keyword.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return factory, kwargs
    kinds = {each.kind for each in parameters.values()}
    takes = "max_episode_steps" in parameters or (inspect.Parameter.VAR_KEYWORD in kinds and not by_name)
    if "max_episode_steps" not in kwargs or takes:
        return factory, kwargs
    others = {name: value for name, value in kwargs.items() if name != "max_episode_steps"}
    check_positive("max_episode_steps", kwargs["max_episode_steps"], 500)
    return partial(_limited, factory, kwargs["max_episode_steps"]), others


def _limited(factory: Callable[..., Any], steps: int, **kwargs: Any) -> Any:
    made = factory(**kwargs)
    if isinstance(made, gymnasium.Env):
        return TimeLimit(made, steps)
    if not hasattr(made, "max_episode_steps"):
        raise TypeError(
            f"max_episode_steps was given with a factory that does not take it, and that made {type(made).__name__}, "
            "expected a gymnasium.Env: leave it out"
        )
    if is_dataclass(made):
        return replace(made, max_episode_steps=steps)  # type: ignore[type-var]
    made.max_episode_steps = steps
    return made


def built(factory: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """What a factory returns; ValueError if it asks Gymnasium for an id that is not registered in this process."""
    try:
        return factory(**kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(
            f"the factory asks for an id that is not registered in this process ({str(error).rstrip('.')}), and a "
            "worker process lacks what a script has registered: name the module in the id ('module:Name-v0', "
            "'ale_py:ALE/Pong-v5'), register it in the factory, or pass the id itself to make_env(…, num_workers=…)"
        ) from error


def check_spaces(env: Any) -> None:
    """Raise TypeError unless an environment has both spaces."""
    if missing := [name for name in ("observation_space", "action_space") if not hasattr(env, name)]:
        raise TypeError(
            f"{type(env).__name__} lacks {missing}, expected as attributes of the class: set them there, or in its "
            "constructor, before super().__init__()"
        )


def ends_episodes(env: object) -> bool:
    """Whether every episode of an environment ends after some number of steps, by itself or by the loop's limit."""
    return bool(getattr(env, "truncates", False) or getattr(env, "max_episode_steps", None))


def check_pure_functions(owner: str, reset: Any, step: Any) -> None:
    """Raise TypeError unless the functions of a JAX or Torch environment take what the loops pass."""
    check_function(f"{owner}reset", reset, "a function of a key and the parameters", 2)
    check_function(f"{owner}step", step, "a function of a key, the state, an action and the parameters", 4)


def checked_start(env: object, answer: Any) -> tuple[Any, Any]:
    """Return what `reset` of a JAX or Torch environment returned; EnvError unless it is a state and an observation."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise EnvError(
            f"reset of {env!r} returned {returned(answer)}, expected the pair (env_state, observation): return both"
        )
    return answer


def checked_transition(env: JaxEnv | TorchEnv | DeviceEnv, answer: Any) -> Transition:
    """Return what `step` of an environment returned; EnvError unless it is a Transition."""
    if not isinstance(answer, Transition):
        raise EnvError(
            f"step of {env!r} returned {returned(answer)}, expected a Transition: return "
            "funcollect.envs.Transition(env_state, observation, reward, terminated, truncated)"
        )
    if not isinstance(answer.info, Mapping):
        raise EnvError(
            f"the infos that step of {env!r} returned are {form(answer.info)}, expected a dict of arrays: name them"
        )
    in_torch = env.backend == "torch"
    for name, value in answer.info.items():
        known = isinstance(value, Tensor if in_torch else (bool, int, float))
        if not known and (in_torch or not hasattr(value, "dtype")):
            wanted = "a tensor [P, ...]" if in_torch else "an array or a number"
            raise EnvError(
                f"the info {name!r} that step of {env!r} returned is {form(value)}, expected {wanted}: give each array "
                "a name of its own"
            )
    return answer


def returned(answer: Any) -> str:
    """What a function of an environment returned, for a message: of a tuple the number of its values."""
    return f"{len(answer)} values" if type(answer) is tuple else form(answer)


class EnvBase:
    """Base class of `HostEnvBase`, `TorchEnvBase` and `JaxEnvBase`: the members that follow from the two spaces.

    Attributes:
        truncates: True if every episode ends after some number of steps, without a limit that the loop sets.
    """

    observation_space: Space
    action_space: Space
    num_envs: int | None = None
    truncates: bool = False

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

    @property
    def action_space(self) -> Space:
        """The action space of one environment."""
        return self.action_spec.space

    @override
    def __repr__(self) -> str:
        lanes = "" if self.num_envs is None else f", num_envs={self.num_envs}"
        return f"{self.backend.capitalize()}Env({self.label!r}{lanes})"

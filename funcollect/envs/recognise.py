"""Import optional libraries on first use, and recognise environments of libraries without importing these."""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit


def import_extra(module: str, package: str, extra: str) -> Any:
    """Import `module`, or raise ImportError with the command that installs `package`.

    The state of the global generators is kept, since an import may draw from them: EnvPool's draws from NumPy's.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(
            f"{package} is not installed: pip install 'funcollect[{extra}]', or only it: pip install {package}"
        ) from error
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def is_torchrl(env: Any) -> bool:
    """Whether `env` is one of TorchRL's environments."""
    envs = sys.modules.get("torchrl.envs")
    return envs is not None and isinstance(env, envs.EnvBase)


def is_envpool(env: Any) -> bool:
    """Whether `env` is a pool of EnvPool's, of any interface."""
    return any(base.__module__.partition(".")[0] == "envpool" for base in type(env).__mro__)


def refuse_foreign(env: Any) -> None:
    """Raise TypeError for an environment of TorchRL's or a Stable-Baselines3 `VecEnv`: neither is a gymnasium.Env."""
    if is_torchrl(env):
        raise TypeError(
            f"a lane is TorchRL's {type(env).__name__}, expected a gymnasium.Env: for several of TorchRL's "
            "environments, pass torchrl.envs.SerialEnv(num_envs, factory)"
        )
    if any(base.__name__ == "VecEnv" and base.__module__.startswith("stable_baselines3") for base in type(env).__mro__):
        raise TypeError(
            f"env is Stable-Baselines3's {type(env).__name__}, which resets its lanes itself: pass the functions that "
            "it was built from, funcollect.make_env([make_one] * 4), or one of them with num_envs=4"
        )


def has_time_limit(env: Any) -> bool:
    """Whether an environment, or one of Gymnasium's vectors, truncates episodes after some number of steps.

    One that does so by itself declares it by an attribute ``truncates = True``.
    """
    spec = getattr(env, "spec", None)
    if spec is not None and spec.max_episode_steps:
        return True
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            return True
        env = env.env
    return bool(getattr(env, "truncates", False))


def running_statistics(env: Any) -> tuple[str, ...]:
    """The names of the wrappers of `env`, or of its first lane, that normalise by statistics updated over episodes.

    These are the wrappers that have a `RunningMeanStd`, such as Gymnasium's `NormalizeObservation`, unless their
    ``update_running_mean`` is False, and TorchRL's `VecNorm` transforms, unless they are frozen.
    """

    def updates(part: Any) -> bool:
        if any(type(value).__name__ == "RunningMeanStd" for value in _attributes(part)):
            return bool(getattr(part, "update_running_mean", True))
        normalises = any(base.__name__.startswith("VecNorm") for base in type(part).__mro__)
        return normalises and not getattr(part, "frozen", False)

    return tuple(dict.fromkeys(type(part).__name__ for part in _parts(env, set()) if updates(part)))


def _parts(env: Any, seen: set[int]) -> Iterator[Any]:
    """Yield `env`, its wrappers, its transforms and the parts of its first lane, but those whose ids are in `seen`.

    If the lanes live in other processes, the first one is built here and closed again.
    """
    if id(env) in seen:
        return
    seen.add(id(env))
    yield env
    own: Mapping[str, Any] = vars(env) if isinstance(env, torch.nn.Module) else {}  # as TorchRL's environments are
    if isinstance(env, VectorEnv):
        own = {name: getattr(env, name, None) for name in ("envs", "env_fns")}
    envs = [part for part in _attributes(env) if hasattr(type(part), "step") and hasattr(type(part), "reset")]
    for part in [*envs, *own.get("_modules", {}).values()]:
        yield from _parts(part, seen)
    if lanes := own.get("envs") or own.get("_envs"):
        yield from _parts(lanes[0], seen)
    elif factories := own.get("env_fns") or own.get("create_env_fn"):
        lane = factories[0]()
        yield from _parts(lane, seen)
        lane.close()


def _attributes(part: Any) -> list[Any]:
    """The values of an instance's attributes, and those in dicts among them.

    `vars` would slow the instance down: after its ``__dict__`` has been read, CPython keeps the attributes in a dict,
    from which a simulator reads them more slowly at every step.
    """
    found = gc.get_referents(part)
    for _ in range(2):
        found += [value for each in found if type(each) is dict for value in each.values()]
    return found

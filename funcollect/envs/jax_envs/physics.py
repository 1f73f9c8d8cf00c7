"""Adapters for brax (https://github.com/google/brax) and https://github.com/google-deepmind/mujoco_playground."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from funcollect.arguments import check_optional_positive, check_positive
from funcollect.envs.base import box, import_extra
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.suites import copy_with, first_observation, of_suite, space_like
from funcollect.errors import EnvError
from funcollect.protocols import Renderer, Starts, Transition

_TRAINING = ("AutoResetWrapper", "EpisodeWrapper", "EvalWrapper", "VmapWrapper")  # in the suites' names
_CAMERA = "track"  # follows the body in most of MuJoCo's models; without it, the camera is free
_HEIGHT, _WIDTH = 240, 320  # those of brax's own pictures


def from_brax(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int = 1000,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw brax one, without its training wrappers.

    Args:
        env: an id such as ``"ant"``, or an instance without wrappers that batch, count or reset.
        episode_length: steps after which an episode is truncated.
        info_keys: the keys of the state's `metrics` that a batch records under ``next.info``.
        **kwargs: for `brax.envs.get_environment`, such as `backend`.
        num_envs, starts, param_keys: see `from_functions`; ``starts="cached"`` is what brax's own autoreset does, and
            the parameters are brax's system.

    Raises the errors of `from_gymnax`, and ValueError for a training wrapper.

    >>> from_brax("inverted_pendulum", num_envs=64)
    JaxEnv('brax/inverted_pendulum', num_envs=64)
    """
    check_positive("episode_length", episode_length, 1000)
    label, raw = of_suite("brax", env, kwargs)
    facts = {"max_episode_steps": episode_length, "param_keys": param_keys}
    drawn = ("pipeline_state", {"qpos": "q", "qvel": "qd"})
    return _over_states(label, raw, "sys", drawn, (num_envs, False, info_keys, starts), facts)


def from_playground(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int | None = None,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw one of MuJoCo Playground, without its training wrappers.

    The physics are MJX's ``"jax"`` implementation, which runs on every device, unless a `config` or
    ``config_overrides={"impl": …}`` names another. The `action_repeat` of the config is not applied.

    Args:
        env: an id such as ``"CartpoleBalance"``, or an instance without wrappers that batch, count or reset.
        episode_length: steps after which an episode is truncated; by default the config's.
        **kwargs: for `mujoco_playground.registry.load`: `config`, `config_overrides`.
        num_envs, info_keys, starts, param_keys: see `from_brax`; the parameters are MJX's model. Resets are slow here,
            so ``starts="cached"`` saves much time.

    Raises the errors of `from_brax`.

    >>> from_playground("CartpoleBalance", num_envs=64)
    JaxEnv('playground/CartpoleBalance', num_envs=64)
    """
    check_optional_positive("episode_length", episode_length)
    label, raw = of_suite("playground", env, kwargs)
    length = raw.unwrapped._config.episode_length if episode_length is None else episode_length
    facts = {"max_episode_steps": length, "param_keys": param_keys}
    drawn = ("data", {name: name for name in ("qpos", "qvel", "xfrc_applied")})
    return _over_states(label, raw, "_mjx_model", drawn, (num_envs, False, info_keys, starts), facts)


def _over_states(label: str, raw: Any, physics: str, drawn: Any, common: Any, facts: Mapping[str, Any]) -> FunctionsEnv:
    """Adapt an environment whose states have `obs`, `reward` and `done`; `physics` is its attribute of parameters."""
    inner = raw
    while inner is not None:
        if type(inner).__name__.endswith(_TRAINING):
            raise ValueError(
                f"{label} is wrapped in {type(inner).__name__}, expected an environment of one lane that neither "
                "counts its steps nor resets itself: pass env.unwrapped"
            )
        inner = vars(inner).get("env")  # the environment that a wrapper wraps

    def under(params: Any) -> Any:
        return raw if params is None else copy_with(raw, "env", lambda inner: setattr(inner, physics, params))

    def reset(key: Any, params: Any) -> tuple[Any, Any]:
        state = under(params).reset(key)
        return state, state.obs

    def step(_: Any, env_state: Any, action: Any, params: Any) -> Transition:
        state = under(params).step(env_state, action)
        return Transition(state, state.obs, state.reward, state.done > 0, False, state.metrics)

    def renderer() -> Any:
        inner = raw.unwrapped
        return mujoco_renderer((inner.sys if physics == "sys" else inner).mj_model, float(inner.dt), *drawn)

    observed, actions = space_like(first_observation(reset)), box((raw.action_size,), "float32", -1.0, 1.0)
    own = getattr(raw.unwrapped, physics, None)
    return jax_env(label, reset, step, observed, actions, *common, default_params=own, renderer=renderer, **facts)


@contextmanager
def mujoco_renderer(model: Any, dt: float, physics: str, names: Mapping[str, str]) -> Iterator[Renderer]:
    """Draw states by MuJoCo; `names` lead from attributes of `MjData` to those of the state's `physics`."""
    mujoco = import_extra("mujoco", "MuJoCo", "jax-envs")
    _check_display()
    data = mujoco.MjData(model)
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, _CAMERA)  # -1, the free one, if there is none
    with closing(mujoco.Renderer(model, height=_HEIGHT, width=_WIDTH)) as renderer:

        def draw(env_state: Any, _: Any) -> Any:
            given = getattr(env_state, physics)
            for name, own in names.items():
                setattr(data, name, np.asarray(getattr(given, own)))
            if data.mocap_pos.size and hasattr(given, "mocap_pos"):  # moved from outside, as targets are
                data.mocap_pos, data.mocap_quat = np.asarray(given.mocap_pos), np.asarray(given.mocap_quat)
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=camera)
            return np.array(renderer.render())

        yield Renderer(1 / dt, draw)


def _check_display() -> None:
    """Raise EnvError where MuJoCo would open a window without a display, by which the process may end."""
    windowed = os.environ.get("MUJOCO_GL", "").lower() not in ("egl", "osmesa")
    if sys.platform == "linux" and windowed and not ({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        raise EnvError(
            "MuJoCo draws in a window unless MUJOCO_GL is set, and there is no display, expected OpenGL by EGL or "
            "OSMesa: install one, and set MUJOCO_GL=egl or osmesa before Python starts"
        )

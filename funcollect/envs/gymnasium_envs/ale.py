"""Atari games by their names, with the usual preprocessing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from funcollect import arguments
from funcollect.envs import base
from funcollect.envs.gymnasium_envs.adapter import from_gymnasium
from funcollect.envs.gymnasium_envs.atari_lanes import EpisodicLife, FireReset
from funcollect.envs.host.host_env import SimulatedEnv

_NOT_OURS = {
    "frameskip": "its name here is frame_skip",
    "obs_type": "observations are screens, in colour with grayscale=False",
    "sound_obs": "observations are screens",
    "continuous": "actions are discrete",
}


def from_ale(
    game: str,
    *,
    num_envs: int | None = None,
    frame_skip: int = 4,
    noop_max: int = 30,
    screen_size: int = 84,
    stack: int = 4,
    grayscale: bool = True,
    terminal_on_life_loss: bool = False,
    fire_reset: bool = False,
    repeat_action_probability: float = 0.25,
    max_episode_steps: int | None = None,
    info_keys: Sequence[str] = (),
    one_hot: bool = False,
    num_workers: int = 0,
    parallel: bool = False,
    timeout: float = 60.0,
    wait: str = "all",
    min_ready: int | None = None,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over an Atari game, seeded by lane: a seeded reset reloads the game, which takes 90 ms.

    Observations are ``[stack, screen_size, screen_size]`` uint8, in colour with a last dimension of 3. Rewards are the
    game's own.

    Args:
        game: its name in ``ALE/<game>-v5``, such as ``"Pong"``.
        frame_skip: frames of the game per step; the action is held.
        noop_max: the largest number of frames without an action at the start of an episode; 0 for none.
        grayscale: whether colours are left out.
        terminal_on_life_loss: whether an episode also terminates when a life is lost. The next one goes on with the
            next life, after a step without an action; a limit on frames and a reset within a life begin another game.
        fire_reset: whether each reset, that to a next life too, presses FIRE and then takes action 2, in games with
            FIRE. As in Stable-Baselines3's `AtariWrapper`, all frames of a step are then taken before a lost life ends
            an episode; without `fire_reset`, Gymnasium's preprocessing ends the step at the frame of the loss.
        repeat_action_probability: that a frame repeats the last action: 0.25 as in Machado et al., 2018, or for example
            0.0 as in Mnih et al., 2015.
        max_episode_steps: steps after which an episode is truncated; the game itself truncates after 108,000 frames.
        **kwargs: for the game: `mode`, `difficulty`, `full_action_space`, `max_num_frames_per_episode`, and
            `render_mode`, ``"rgb_array"`` for `funcollect.record`.
        num_envs, info_keys, one_hot, num_workers, parallel, timeout, wait, min_ready: see `from_gymnasium`.

    Raises ImportError if ale-py or OpenCV is not installed, and otherwise the errors of `from_gymnasium`.

    >>> env = from_ale("Pong", num_envs=4)
    >>> env, env.observation_space.shape, env.seeding
    (HostEnv('ALE/Pong-v5', num_envs=4), (4, 84, 84), 'lane')
    """
    arguments.check_not_given("an Atari game", kwargs, _NOT_OURS)
    base.import_extra("cv2", "opencv-python-headless", "envs")
    screens = {"frame_skip": frame_skip, "screen_size": screen_size}
    for name, value in {**screens, "stack": stack}.items():
        arguments.check_positive(name, value)
    arguments.check_count("noop_max", noop_max)
    arguments.check_number("repeat_action_probability", repeat_action_probability, most=1, example=0.25)
    arguments.check_flags(grayscale=grayscale, terminal_on_life_loss=terminal_on_life_loss, fire_reset=fire_reset)
    breaks_off = terminal_on_life_loss and not fire_reset
    lives = {"noop_max": noop_max, "terminal_on_life_loss": breaks_off, "grayscale_obs": grayscale}
    wrappers = [AtariPreprocessing.wrapper_spec(**screens, **lives)]
    if fire_reset:
        wrappers += [EpisodicLife.wrapper_spec()] * terminal_on_life_loss + [FireReset.wrapper_spec()]
    wrappers.append(FrameStackObservation.wrapper_spec(stack_size=stack))
    if max_episode_steps is not None:
        arguments.check_positive("max_episode_steps", max_episode_steps)
        wrappers.append(TimeLimit.wrapper_spec(max_episode_steps=max_episode_steps))
    gymnasium.register_envs(base.import_extra("ale_py", "ale-py", "envs"))
    try:
        spec = deepcopy(gymnasium.spec(f"ALE/{game}-v5"))
    except gymnasium.error.Error as error:
        raise ValueError(f"there is no Atari game {game!r} ({error}): for 'ALE/Pong-v5' write 'Pong'") from error
    spec.additional_wrappers = tuple(wrappers)
    spec.kwargs |= {"frameskip": 1, "repeat_action_probability": repeat_action_probability}
    if grayscale:
        spec.kwargs["obs_type"] = "grayscale"  # cheaper to fetch, and no wrapper reads colours
    workers: Any = {"num_workers": num_workers, "parallel": parallel, "timeout": timeout}
    workers |= {"wait": wait, "min_ready": min_ready}
    return from_gymnasium(spec, num_envs=num_envs, info_keys=info_keys, one_hot=one_hot, **workers, **kwargs)

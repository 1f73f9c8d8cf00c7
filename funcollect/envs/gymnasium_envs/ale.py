"""Atari games from the Arcade Learning Environment, with the usual wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from funcollect.arguments import check_count, check_flags, check_not_given, check_number, check_positive
from funcollect.envs.gymnasium_envs.adapter import from_gymnasium
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.recognise import import_extra

_OURS = {
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
    repeat_action_probability: float = 0.25,
    max_episode_steps: int | None = None,
    info_keys: Sequence[str] = (),
    one_hot: bool = False,
    num_workers: int = 0,
    parallel: bool = False,
    timeout: float = 60.0,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over an Atari game, seeded by lane: a seeded reset reloads the game, which takes 90 ms.

    Observations are ``[stack, screen_size, screen_size]`` uint8, in colour with a last dimension of 3. Rewards are the
    game's own. A frame repeats the last action with probability 0.25, as in Machado et al., 2018; pass 0.0 for the
    games of Mnih et al., 2015.

    Args:
        game: its name in ``ALE/<game>-v5``, such as ``"Pong"``.
        frame_skip: frames of the game per step; the action is held.
        noop_max: the largest number of frames without an action at the start of an episode; 0 for none.
        screen_size: pixels in each direction.
        stack: the number of screens in an observation.
        grayscale: whether colours are left out.
        terminal_on_life_loss: whether an episode terminates when a life is lost, and not only when the game is over.
            The next episode goes on with the next life, after a step without an action. A limit on frames and a reset
            within a life begin another game.
        repeat_action_probability: the probability that a frame repeats the last action, in [0, 1].
        max_episode_steps: steps after which an episode is truncated; the game itself truncates after 108,000 frames.
        **kwargs: for the game: `mode`, `difficulty`, `full_action_space`, `max_num_frames_per_episode`, and
            `render_mode`, ``"rgb_array"`` for `funcollect.record`.
        num_envs, info_keys, one_hot, num_workers, parallel, timeout: see `from_gymnasium`.

    Raises:
        ImportError: if ale-py or OpenCV is not installed.
        ValueError: for an unknown game, a number out of range, or a keyword argument that is set here.
        TypeError: for something else as a number, or a keyword argument that the game does not take.

    >>> env = from_ale("Pong", num_envs=4)
    >>> env, env.observation_space.shape, env.seeding
    (HostEnv('ALE/Pong-v5', num_envs=4), (4, 84, 84), 'lane')
    """
    check_not_given("an Atari game", kwargs, _OURS)
    import_extra("cv2", "opencv-python-headless", "envs")
    for name, value in {"frame_skip": frame_skip, "screen_size": screen_size, "stack": stack}.items():
        check_positive(name, value)
    check_count("noop_max", noop_max)
    check_number("repeat_action_probability", repeat_action_probability, most=1, example=0.25)
    check_flags(grayscale=grayscale, terminal_on_life_loss=terminal_on_life_loss)
    wrappers = [
        AtariPreprocessing.wrapper_spec(
            noop_max=noop_max,
            frame_skip=frame_skip,
            screen_size=screen_size,
            terminal_on_life_loss=terminal_on_life_loss,
            grayscale_obs=grayscale,
        ),
        FrameStackObservation.wrapper_spec(stack_size=stack),
    ]
    if max_episode_steps is not None:
        check_positive("max_episode_steps", max_episode_steps)
        wrappers.append(TimeLimit.wrapper_spec(max_episode_steps=max_episode_steps))
    gymnasium.register_envs(import_extra("ale_py", "ale-py", "envs"))
    try:
        spec = deepcopy(gymnasium.spec(f"ALE/{game}-v5"))
    except gymnasium.error.Error as error:
        raise ValueError(f"there is no Atari game {game!r} ({error}): for 'ALE/Pong-v5' write 'Pong'") from error
    spec.additional_wrappers = tuple(wrappers)
    spec.kwargs |= {"frameskip": 1, "repeat_action_probability": repeat_action_probability}
    if grayscale:
        spec.kwargs["obs_type"] = "grayscale"  # cheaper to fetch, and no wrapper reads colours
    return from_gymnasium(
        spec,
        num_envs=num_envs,
        num_workers=num_workers,
        parallel=parallel,
        timeout=timeout,
        info_keys=info_keys,
        one_hot=one_hot,
        **kwargs,
    )

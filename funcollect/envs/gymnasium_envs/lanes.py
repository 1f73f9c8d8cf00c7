"""P separate Gymnasium environments as simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import optree
from typing_extensions import override

from funcollect.envs.host.host_env import ONWARD, Camera, SimulatedEnv, SimulatorsBase, call_of, decoder
from funcollect.envs.host.rows import Rows
from funcollect.errors import EnvError
from funcollect.messages import shown
from funcollect.protocols import Outcome

GymEnv = gymnasium.Env[Any, Any]

_FIVE_VALUES = "expected the five values (observation, reward, terminated, truncated, info): use Gymnasium's step API"


class Lanes(SimulatorsBase):
    """One Gymnasium environment per lane, stepped one after the other."""

    def __init__(self, lanes: Sequence[GymEnv], env: SimulatedEnv) -> None:
        """Prepare the environments in `lanes`, described by `env`, without resetting them."""
        self._envs = lanes
        self._steps: list[Callable[[Any], Any]] = [lane.step for lane in lanes]
        self._resets: list[Callable[..., Any]] = [lane.reset for lane in lanes]
        self._alone = self._steps[0] if len(lanes) == 1 else None  # the `step` of the only lane
        self._apart: bool | None = None  # whether lanes return arrays of their own; unknown before the first step
        self._decode = decoder(env.action_spec)
        self._space = env.action_space
        self._info_keys = env.info_keys
        self._first_lane = env.first_lane
        self._rows = Rows.of(env)
        self.observation = self._rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        resets, write = self._resets, self._rows.write_lane
        for lane, seed in zip(lanes, seeds, strict=True):
            try:
                answer = resets[lane](seed=seed)
            except Exception as error:
                old = isinstance(error, TypeError) and "'seed'" in str(error)
                mend = "use Gymnasium's reset API, reset(*, seed=None, options=None)" if old else ONWARD
                where = f"lane {self._first_lane + lane}"
                raise EnvError(f"{where}: reset(seed={seed}) raised {error!r}: {mend}") from error
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise bad_reset(f"lane {self._first_lane + lane}", answer)
            write(lane, answer[0])

    @override
    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Step the lanes of the last `send`. A single lane is stepped here, with fewer Python calls than in `step`."""
        lanes, action = self._sent
        if self._alone is None:
            return lanes, self.step(lanes, action)
        (only,) = self._decode(action)
        answers: list[Any] = []
        try:
            answers.append(self._alone(only))
            observation, reward, terminated, truncated, info = answers[0]
        except Exception as error:
            raise self._located(error, lanes, answers, [only]) from error
        self._rows.write_lane(0, observation)
        picked = self._pick(lanes, (info,)) if self._info_keys else ()
        return lanes, ((reward,), (terminated,), (truncated,), picked)

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        actions = self._decode(action)
        if not self._apart or len(lanes) < len(self._steps):
            return self._step_by_step(lanes, actions)
        answers: list[Any] = []
        append = answers.append
        try:
            for step, lane_action in zip(self._steps, actions, strict=True):
                append(step(lane_action))
            observation, reward, terminated, truncated, info = zip(*answers, strict=True)
        except Exception as error:
            raise self._located(error, lanes, answers, actions) from error
        self._rows.write(observation)
        return reward, terminated, truncated, self._pick(lanes, info) if self._info_keys else ()

    def _step_by_step(self, lanes: Sequence[int], actions: Sequence[Any]) -> Outcome:
        """Step lanes, and copy each one's observation before the next lane is stepped, which may overwrite it."""
        answers: list[Any] = []
        for lane, lane_action in zip(lanes, actions, strict=True):
            try:
                answers.append(self._steps[lane](lane_action))
                observation, _, _, _, _ = answers[-1]
            except Exception as error:
                raise self._located(error, lanes, answers, actions) from error
            self._rows.write_lane(lane, observation)
        observations, reward, terminated, truncated, info = zip(*answers, strict=True)
        if self._apart is None and len(lanes) == len(self._steps):
            leaves: list[Any] = optree.tree_leaves(observations)  # type: ignore[arg-type]
            memory = [leaf.ctypes.data for leaf in leaves if isinstance(leaf, np.ndarray)]
            self._apart = len(set(memory)) == len(memory)
        return reward, terminated, truncated, self._pick(lanes, info) if self._info_keys else ()

    def _pick(self, lanes: Sequence[int], infos: Sequence[Any]) -> list[tuple[Any, ...]]:
        """For each recorded info key, its values in the infos of these lanes; EnvError for one that lacks a key."""
        try:
            return [tuple(info[key] for info in infos) for key in self._info_keys]
        except (KeyError, TypeError) as error:
            for (lane, info), key in product(zip(lanes, infos, strict=True), self._info_keys):
                if not isinstance(info, Mapping) or key not in info:
                    raise no_info_key(self._first_lane + lane, key, info) from error
            raise

    def _located(self, error: Exception, lanes: Sequence[int], answers: Sequence[Any], actions: Any) -> EnvError:
        """The EnvError, which names the lane, for a step that raised after the first lanes had returned `answers`."""
        lanes = [self._first_lane + lane for lane in lanes]
        for lane, answer in zip(lanes, answers, strict=False):
            if not isinstance(answer, (tuple, list)) or len(answer) != 5:
                return EnvError(f"lane {lane}: step returned {shown(answer)}, {_FIVE_VALUES}")
        lane, action = lanes[len(answers)], actions[len(answers)]
        if "values to unpack (expected 5" in str(error):  # by a wrapper, such as that of `max_episode_steps`
            return EnvError(f"lane {lane}: step, within a wrapper: {error}, {_FIVE_VALUES}")
        outside = "" if self._space.contains(action) else f" (the action is not in {self._space}: look at the policy)"
        return EnvError(f"lane {lane}: step({action!r}) raised {error!r}{outside}: {ONWARD}")

    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        """Call a function with the environments of these lanes."""
        return [call_of(self._first_lane + lane, function, self._envs[lane], args) for lane in lanes]

    def camera(self, lane: int) -> Camera:
        """The camera of one lane, for `funcollect.record`."""
        env = self._envs[lane]
        return Camera(env.unwrapped.render_mode, (env.unwrapped.metadata or {}).get("render_fps"), env.render)

    @override
    def close(self) -> None:
        """Close every environment, then raise EnvError for the first one that could not be."""
        failed: list[tuple[int, Exception]] = []
        for lane, env in enumerate(self._envs):
            try:
                env.close()
            except Exception as error:
                failed.append((lane, error))
        for lane, reason in failed:
            where = f"lane {self._first_lane + lane}"
            raise EnvError(f"{where}: close raised {reason!r}: correct that; the others are closed") from reason


def bad_reset(where: str, answer: Any) -> EnvError:
    """The error of a reset that returned anything but a pair."""
    return EnvError(
        f"{where}: reset returned {shown(answer)}, expected the two values (observation, info): use Gymnasium's "
        "reset API"
    )


def no_info_key(lane: int, key: str, info: Any) -> EnvError:
    """The error of a step whose info lacks a recorded key, or is no dict."""
    if not isinstance(info, Mapping):
        return EnvError(f"lane {lane}: step returned the info {shown(info)}, expected a dict: return one")
    return EnvError(
        f"lane {lane}: step returned no info key {key!r}, which info_keys names: there are {sorted(map(str, info))}; "
        "name one that every step returns"
    )

"""P separate Gymnasium environments as simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import gymnasium
from typing_extensions import override

from funcollect.envs.host.host_env import ONWARD, Camera, SimulatorsBase, decoder
from funcollect.envs.host.rows import Rows
from funcollect.errors import EnvError
from funcollect.messages import shown
from funcollect.protocols import Outcome
from funcollect.specs import ActionSpec, Leaf, Space

GymEnv = gymnasium.Env[Any, Any]


class Lane(Protocol):
    """What is asked of a Gymnasium environment here."""

    observation_space: Space

    @property
    def step(self) -> Callable[[Any], Any]:
        """Takes an action."""
        ...

    @property
    def reset(self) -> Callable[..., Any]:
        """Takes a seed, or None."""
        ...

    @property
    def close(self) -> Callable[[], None]:
        """Takes nothing."""
        ...

    @property
    def unwrapped(self) -> Any:
        """The environment within its wrappers."""
        ...

    @property
    def render(self) -> Callable[[], Any]:
        """What it shows."""
        ...


class Lanes(SimulatorsBase):
    """One Gymnasium environment per lane, stepped one after the other."""

    def __init__(
        self, envs: Sequence[Lane], leaves: tuple[Leaf, ...], spec: ActionSpec, info_keys: tuple[str, ...]
    ) -> None:
        self._envs = list(envs)
        self._steps: list[Callable[[Any], Any]] = [env.step for env in envs]
        self._resets: list[Callable[..., Any]] = [env.reset for env in envs]
        self._alone = self._steps[0] if len(envs) == 1 else None
        self._decode = decoder(spec)
        self._space = spec.space
        self._info_keys = info_keys
        self._rows = Rows(envs[0].observation_space, leaves, len(envs))
        self.observation = self._rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        resets, write = self._resets, self._rows.write_lane
        for lane, seed in zip(lanes, seeds, strict=True):
            try:
                answer = resets[lane](seed=seed)
            except Exception as error:
                raise EnvError(f"lane {lane}: reset(seed={seed}) raised {error!r}: {ONWARD}") from error
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise EnvError(
                    f"lane {lane}: reset returned {shown(answer)}, expected the two values (observation, info): "
                    "use Gymnasium's reset API"
                )
            write(lane, answer[0])

    @override
    def receive(self) -> tuple[Sequence[int], Outcome]:
        """One lane is stepped right here: at this size a step's cost is its calls."""
        lanes, action = self._sent
        if self._alone is None:
            return lanes, self.step(lanes, action)
        (only,) = self._decode(action)
        answers: list[Any] = []
        try:
            answers.append(self._alone(only))
            observation, reward, terminated, truncated, info = answers[0]
        except Exception as error:
            raise _located(error, lanes, answers, [only], self._space) from error
        self._rows.write_lane(0, observation)
        picked = self._pick(lanes, (info,)) if self._info_keys else ()
        return lanes, ((reward,), (terminated,), (truncated,), picked)

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        actions = self._decode(action)
        everyone = len(lanes) == len(self._steps)
        steps = self._steps if everyone else [self._steps[lane] for lane in lanes]
        answers: list[Any] = []
        append = answers.append
        try:
            for step, lane_action in zip(steps, actions, strict=True):
                append(step(lane_action))
            observation, reward, terminated, truncated, info = zip(*answers, strict=True)
        except Exception as error:
            raise _located(error, lanes, answers, actions, self._space) from error
        if everyone:
            self._rows.write(observation)
        else:
            for lane, seen in zip(lanes, observation, strict=True):
                self._rows.write_lane(lane, seen)
        return reward, terminated, truncated, self._pick(lanes, info) if self._info_keys else ()

    def _pick(self, lanes: Sequence[int], infos: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            return [tuple(info[key] for info in infos) for key in self._info_keys]
        except (KeyError, TypeError) as error:
            raise _no_info(self._info_keys, lanes, infos) from error

    def camera(self, lane: int) -> Camera:
        """How an environment shows itself."""
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
            raise EnvError(f"lane {lane}: close raised {reason!r}: correct that; the others are closed") from reason


def _no_info(keys: Sequence[str], lanes: Sequence[int], infos: Sequence[Any]) -> EnvError:
    for lane, info in zip(lanes, infos, strict=True):
        if not isinstance(info, Mapping):
            return EnvError(f"lane {lane}: step returned the info {shown(info)}, expected a dict: return one")
        if missing := [key for key in keys if key not in info]:
            return EnvError(
                f"lane {lane}: step returned no info key {missing[0]!r}, which info_keys names: "
                f"there are {sorted(map(str, info))}; name one that every step returns"
            )
    return EnvError(f"the infos {shown(infos)} cannot be read: return dicts")


def _located(error: Exception, lanes: Sequence[int], answers: Sequence[Any], actions: Any, space: Space) -> EnvError:
    for lane, answer in zip(lanes, answers, strict=False):
        if not isinstance(answer, (tuple, list)) or len(answer) != 5:
            return EnvError(
                f"lane {lane}: step returned {shown(answer)}, expected the five values "
                "(observation, reward, terminated, truncated, info): use Gymnasium's step API"
            )
    lane, action = lanes[len(answers)], actions[len(answers)]
    outside = "" if space.contains(action) else f" (the action is not in {space}: look at the policy)"
    return EnvError(f"lane {lane}: step({action!r}) raised {error!r}{outside}: {ONWARD}")

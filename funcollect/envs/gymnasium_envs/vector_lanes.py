"""A Gymnasium `VectorEnv` as simulators: the library resets its lanes, never the environment itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from typing_extensions import override

from funcollect.envs.gymnasium_envs.worker_processes import close_processes, death_of, end_processes
from funcollect.envs.host.host_env import ONWARD, SimulatorsBase, batch_decoder
from funcollect.envs.host.rows import Rows
from funcollect.errors import EnvError
from funcollect.messages import shown
from funcollect.protocols import Outcome
from funcollect.specs import ActionSpec, Leaf


def check_autoreset(env: VectorEnv[Any, Any, Any]) -> None:
    """Raise ValueError unless the vector environment leaves resets to its caller."""
    mode = (env.metadata or {}).get("autoreset_mode")
    if mode != AutoresetMode.DISABLED:
        raise ValueError(
            f"the vector environment resets its lanes itself (autoreset_mode={getattr(mode, 'name', mode)}), expected "
            f"autoreset_mode=AutoresetMode.DISABLED: {_without_autoreset(env)}"
        )


def _without_autoreset(env: VectorEnv[Any, Any, Any]) -> str:
    """How to build the same vector environment so that it leaves resets to its caller."""
    if env.spec is not None:
        name, kind = env.spec.id, "async" if isinstance(env.unwrapped, AsyncVectorEnv) else "sync"
        return (
            f"pass {name!r} with num_envs={env.num_envs}, or build it by gymnasium.make_vec({name!r}, "
            f"num_envs={env.num_envs}, vectorization_mode={kind!r}, "
            'vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED})'
        )
    return f"build {type(env).__name__} with that argument, or pass the list of its functions"


class VectorLanes(SimulatorsBase):
    """A vector environment stepped as a whole and reset by masks."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        leaves: tuple[Leaf, ...],
        spec: ActionSpec,
        info_keys: tuple[str, ...],
        *,
        rebuild: Callable[[], VectorEnv[Any, Any, Any]],
    ) -> None:
        self._env = env
        self._rebuild = rebuild
        self._broken_off = False
        self._info_keys = info_keys
        self._started = False
        self._decode = batch_decoder(spec)
        self._ended: npt.NDArray[np.bool_] = np.zeros(env.num_envs, bool)
        self._rows = Rows(env.single_observation_space, leaves, env.num_envs)
        self.observation = self._rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        if not lanes:
            return  # Gymnasium takes no empty mask
        count = self._env.num_envs
        mask = np.zeros(count, bool)
        mask[list(lanes)] = True
        by_lane: list[int | None] = [None] * count
        for lane, seed in zip(lanes, seeds, strict=True):
            by_lane[lane] = seed
        if self._broken_off and mask.all() and isinstance(self._env, AsyncVectorEnv):
            end_processes(self._env)  # an answer is pending, or a worker is gone: it takes no further call
            self._env = self._rebuild()
        partial = self._started and not mask.all()
        self._broken_off = True
        try:
            answer: Any = self._env.reset(seed=by_lane, options={"reset_mask": mask} if partial else None)  # type: ignore[arg-type]
        except Exception as error:
            raise self._said(f"lanes {list(lanes)}: reset(seed={by_lane})", error) from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvError(
                f"the vector environment: reset returned {shown(answer)}, expected the two values (observation, info): "
                "use Gymnasium's reset API"
            )
        self._started = True
        self._ended[mask] = False
        self._broken_off = False
        self._write(answer[0], lanes)

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        """The environment steps all of its lanes; what the others do is not shown."""
        actions = self._decode(action)
        still = [] if len(lanes) == self._env.num_envs else sorted({*range(self._env.num_envs)} - {*lanes})
        if still:
            some, actions = actions, np.repeat(actions[:1], self._env.num_envs, 0)
            actions[list(lanes)] = some
        self._broken_off = True
        try:
            self._restart(still)
            observation, *answer, info = self._env.step(actions)
        except Exception as error:
            raise self._said("the vector environment: step", error) from error
        self._broken_off = False
        outcome = self._checked(answer)
        self._ended = np.any(outcome[1:] > 0, axis=0)
        self._write(observation, lanes)
        picked = self._pick(info)
        if still:
            outcome = outcome[:, list(lanes)]
            picked = [tuple(values[lane] for lane in lanes) for values in picked]
        flags = outcome[1:] > 0
        return outcome[0].tolist(), flags[0].tolist(), flags[1].tolist(), picked

    def _write(self, observation: Any, lanes: Sequence[int]) -> None:
        """Write the rows of these lanes."""
        others = np.ones(self._env.num_envs, bool)
        others[list(lanes)] = False
        before = [rows.array[others] for rows in self._rows.leaves]
        self._rows.write_batch(observation)
        for rows, old in zip(self._rows.leaves, before, strict=True):
            rows.array[others] = old

    def _said(self, call: str, error: Exception) -> EnvError:
        return EnvError(f"{death_of(self._env, error) or f'{call} raised {error!r}'}: {ONWARD}")

    def _checked(self, answer: Sequence[Any]) -> npt.NDArray[np.float64]:
        """Reward, terminated, truncated: [3, P]."""
        try:
            outcome = np.array(answer, np.float64)
        except (TypeError, ValueError):
            outcome = np.empty(0)
        if outcome.shape != (3, self._env.num_envs):
            raise EnvError(
                f"the vector environment: step returned {shown(answer, 120)} between observation and info, expected "
                f"reward, terminated and truncated with {self._env.num_envs} values each: use Gymnasium's step API"
            )
        return outcome

    def _restart(self, still: list[int]) -> None:
        """A vector environment steps all lanes, so a lane that has ended is started again, unseen."""
        mask = np.zeros(self._env.num_envs, bool)
        mask[still] = self._ended[still]
        if mask.any():
            self._env.reset(options={"reset_mask": mask})

    def _pick(self, info: dict[str, Any]) -> list[tuple[Any, ...]]:
        picked = []
        for key in self._info_keys:
            present = info.get(f"_{key}", np.ones(self._env.num_envs, bool) if key in info else np.zeros(1, bool))
            if not np.all(present):
                raise EnvError(
                    f"lane {int(np.argmin(present))}: step returned no info key {key!r}, which info_keys names: "
                    f"there are {sorted(k for k in info if not k.startswith('_'))}; name one that every step returns"
                )
            picked.append(tuple(info[key]))
        return picked

    @override
    def close(self) -> None:
        if not isinstance(self._env, AsyncVectorEnv):
            self._env.close()
        elif self._broken_off:
            end_processes(self._env)
        else:
            close_processes(self._env)

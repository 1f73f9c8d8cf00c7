"""Simulators over a Gymnasium `VectorEnv`, whose lanes the library resets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from typing_extensions import override

from funcollect.envs.base import autoreset_mode
from funcollect.envs.gymnasium_envs.lanes import bad_reset, no_info_key
from funcollect.envs.host.host_env import ONWARD, SimulatedEnv, SimulatorsBase, batch_decoder, of_everyone
from funcollect.envs.host.rows import Rows
from funcollect.errors import EnvError
from funcollect.messages import shown
from funcollect.protocols import Outcome

GymVectorEnv = VectorEnv[Any, Any, Any]

_TO_DIE = 1.0  # seconds that a process may take to end after its pipe was closed


def check_autoreset(env: GymVectorEnv) -> None:
    """Raise ValueError if the vector environment resets its lanes itself."""
    if (mode := autoreset_mode(env)) == AutoresetMode.DISABLED:
        return
    mend = f"build {type(env).__name__} with that argument, or pass the list of its functions"
    if env.spec is not None:
        name, kind = env.spec.id, "async" if isinstance(env.unwrapped, AsyncVectorEnv) else "sync"
        mend = (
            f"pass {name!r} with num_envs={env.num_envs}, or build it by gymnasium.make_vec({name!r}, "
            f"num_envs={env.num_envs}, vectorization_mode={kind!r}, "
            'vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED})'
        )
    raise ValueError(
        f"the vector environment resets its lanes itself (autoreset_mode={getattr(mode, 'name', mode)}), expected "
        f"autoreset_mode=AutoresetMode.DISABLED: {mend}"
    )


def _end_processes(env: AsyncVectorEnv) -> None:
    """Kill the processes, which may be busy, hung or gone."""
    for process in env.processes:
        process.kill()
    env._state = AsyncState.DEFAULT  # otherwise `close` would wait for answers that do not come
    env.close(terminate=True)


def _failed(env: GymVectorEnv, call: str, error: Exception) -> EnvError:
    """The EnvError for a `call`, in words, that raised `error`. If a process has ended, it names that one instead."""
    if isinstance(env, AsyncVectorEnv) and isinstance(error, (EOFError, OSError)):
        ended = wait([process.sentinel for process in env.processes], _TO_DIE)
        for lane, process in enumerate(env.processes):
            if process.sentinel in ended:
                process.join()  # a process closes its pipes shortly before its exit code can be read
                return EnvError(f"lane {lane}: its process is gone (exit code {process.exitcode}): {ONWARD}")
    return EnvError(f"{call} raised {error!r}: {ONWARD}")


class VectorLanes(SimulatorsBase):
    """A vector environment that is stepped as a whole, and reset by masks."""

    def __init__(self, vector: GymVectorEnv, env: SimulatedEnv, rebuild: Callable[[], GymVectorEnv]) -> None:
        self._env, self._rebuild = vector, rebuild
        self._broken_off = False  # whether the last call of the environment raised, so its processes may be unusable
        self._info_keys = env.info_keys
        self._started = False  # whether all lanes have been reset
        self._decode = batch_decoder(env.action_spec)
        self._ended: npt.NDArray[np.bool_] = np.zeros(vector.num_envs, bool)  # [P]: the last step ended an episode
        self._rows = Rows(env)
        self.observation = self._rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        if not lanes:
            return  # Gymnasium takes no empty mask
        mask = np.isin(np.arange(self._env.num_envs), lanes)
        given = dict(zip(lanes, seeds, strict=True))
        by_lane = [given.get(lane) for lane in range(self._env.num_envs)]
        if self._broken_off and mask.all() and isinstance(self._env, AsyncVectorEnv):
            _end_processes(self._env)  # they accept no call, since an answer is pending or a process has ended
            self._env = self._rebuild()
        partial = self._started and not mask.all()
        self._broken_off = True
        try:
            answer: Any = self._env.reset(seed=by_lane, options={"reset_mask": mask} if partial else None)  # type: ignore[arg-type]
        except Exception as error:
            raise _failed(self._env, f"lanes {list(lanes)}: reset(seed={by_lane})", error) from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise bad_reset("the vector environment", answer)
        self._started = True
        self._ended[mask] = False
        self._broken_off = False
        self._rows.write_batch(answer[0], lanes, of_all=True)

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        actions, everyone = self._decode(action), len(lanes) == self._env.num_envs
        actions = actions if everyone else of_everyone(actions, lanes, self._env.num_envs)
        self._broken_off = True
        try:
            if not everyone and (over := self._ended & np.isin(np.arange(len(self._ended)), lanes, invert=True)).any():
                self._env.reset(options={"reset_mask": over})  # Gymnasium forbids to step a lane after its end
            observation, *answer, info = self._env.step(actions)
        except Exception as error:
            raise _failed(self._env, "the vector environment: step", error) from error
        self._broken_off = False
        outcome = self._checked(answer)
        flags = outcome[1:] > 0
        self._ended = np.any(flags, axis=0)
        picked = self._pick(info)
        self._rows.write_batch(observation, lanes, of_all=True)
        if not everyone:
            outcome, flags = outcome[:, list(lanes)], flags[:, list(lanes)]
            picked = [tuple(values[lane] for lane in lanes) for values in picked]
        return outcome[0].tolist(), flags[0].tolist(), flags[1].tolist(), picked

    def _checked(self, answer: Sequence[Any]) -> npt.NDArray[np.float64]:
        """Reward, terminated and truncated of a step as one array [3, P]; EnvError for other than P values each."""
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

    def _pick(self, info: dict[str, Any]) -> list[tuple[Any, ...]]:
        """For each recorded info key, its P values; EnvError if a lane lacks one."""
        picked = []
        for key in self._info_keys:
            present = info.get(f"_{key}", key in info)  # Gymnasium marks the lanes that returned the key
            if not np.all(present):
                known = {name: values for name, values in info.items() if not name.startswith("_")}
                raise no_info_key(int(np.argmin(present)), key, known)
            picked.append(tuple(info[key]))
        return picked

    @override
    def close(self) -> None:
        if isinstance(self._env, AsyncVectorEnv) and self._broken_off:
            _end_processes(self._env)
            return
        try:
            self._env.close()
        except (EOFError, OSError):
            if not isinstance(self._env, AsyncVectorEnv):
                raise
            _end_processes(self._env)  # one has ended

"""Simulators over a Gymnasium `VectorEnv`, whichever way it resets its lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from typing_extensions import override

from funcollect.arguments import check_choice
from funcollect.envs.base import AUTORESET_MODES, FINAL, autoreset_mode, info_place
from funcollect.envs.gymnasium_envs.lanes import API, TAKEN, Made, bad_reset, no_info_key, own_spaces, rebuild
from funcollect.envs.host import host_env
from funcollect.envs.host.host_env import ONWARD, Opener, Rows, SimulatedEnv, SimulatorsBase, batch_decoder
from funcollect.envs.plain_spaces import STRUCTURED, batch_structure
from funcollect.errors import EnvError, NoResetError
from funcollect.messages import shown
from funcollect.protocols import Outcome, Seeding
from funcollect.specs import map_leaves
from funcollect.tree import Path

GAMES = "AtariVectorEnv"  # of ale-py, which takes one seed for each lane that is reset
_MASKED = ("SyncVectorEnv", "AsyncVectorEnv", GAMES)  # whose resets take a mask in every mode
_TO_DIE = 1.0  # seconds that a process may take to end after its pipe was closed


def over_vector(
    vector: Any, build: Callable[[], Any] | None, mode: str | AutoresetMode | None, max_carry: int | None
) -> tuple[Opener, Seeding, bool]:
    """The opener over a vector environment, its seeding, and whether it can be replayed; ValueError for a bad mode."""
    declared, mode = autoreset_mode(vector), getattr(mode, "name", mode)  # Gymnasium's enum has these names
    if mode is not None:
        check_choice("autoreset_mode", mode, AUTORESET_MODES)
    if mode is not None and declared is not None and mode != declared:
        what = f"autoreset_mode is {mode!r}, and {type(vector).__name__} declares {declared}"
        raise ValueError(f"{what}: leave it out, or build that so")
    masked, games = takes_masks(vector), is_of_kind(vector, GAMES)
    if games and (size := getattr(vector.unwrapped, "batch_size", 0)) not in (0, vector.num_envs):
        what = f"batch_size is {size}, expected that of all lanes, {vector.num_envs}"
        raise ValueError(f"{what}: leave it out, or take EnvPool's games, such as 'envpool/Pong-v5'")
    if (mode := mode or declared) not in AUTORESET_MODES:
        what = f"{type(vector).__name__} does not say how it resets its lanes, expected one of {AUTORESET_MODES}"
        raise ValueError(f"{what}: pass it as autoreset_mode=, or the list of its functions")
    made = Made(vector, build or partial(rebuild, vector, mode))
    if mode == "NEXT_STEP" and not masked:
        return partial(LateLanes, made, max_carry or host_env.MOST_AHEAD), "lane", False
    if max_carry is not None:
        what = f"max_carry is {max_carry}, and {type(vector).__name__} lanes with {mode} never run ahead"
        raise ValueError(f"{what}: leave it out")
    kind = SelfResettingLanes if mode == "SAME_STEP" else VectorLanes
    unseeded = mode == "SAME_STEP" or games  # its resets take no seed for each episode
    return partial(kind, made), "lane" if unseeded else "episode", not unseeded


def is_of_kind(vector: Any, *names: str) -> bool:
    """Whether the innermost environment's class, or a base of it, has one of these names."""
    return any(kind.__name__ in names for kind in type(vector.unwrapped).__mro__)


def takes_masks(vector: Any) -> bool:
    """Whether resets take a mask of lanes, and the next step resets none of these again."""
    processes = isinstance(vector.unwrapped, AsyncVectorEnv) and not vector.unwrapped.shared_memory
    again = processes and autoreset_mode(vector) == "NEXT_STEP"  # those of Gymnasium 1.3 forget that they were reset
    return is_of_kind(vector, *_MASKED) and not again


class VectorLanes(SimulatorsBase):
    """A vector environment that is stepped as a whole, and reset by masks before a step would reset a lane."""

    resets_itself = False  # whether an episode begins in the step in which another ends
    seeds_lanes = True  # whether a reset takes a seed for each lane, also without Gymnasium's masks

    def __init__(self, made: Made, env: SimulatedEnv) -> None:
        self._env, self._rebuild = made(), made.build
        TAKEN[id(self._env)] = self._env
        self._broken_off = False  # whether the last call of the environment raised, so its processes may be unusable
        self._info_keys = env.info_keys
        self._started = False  # whether all lanes have been reset
        self._takes_masks, self._games = takes_masks(self._env), is_of_kind(self._env, GAMES)
        own, decode = own_spaces(env)[1], batch_decoder(env.action_spec)
        self._decode = batch_structure(own, decode) if isinstance(own, STRUCTURED) else decode
        self._ended: npt.NDArray[np.bool_] = np.zeros(self._env.num_envs, bool)  # [P]: the last step ended an episode
        self._late: npt.NDArray[np.bool_] = np.zeros(self._env.num_envs, bool)  # [P]: the next step resets the lane
        self._rows = Rows(env)
        self.observation = self._rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        if not lanes:
            return  # Gymnasium takes no empty mask
        mask = np.isin(np.arange(self._env.num_envs), lanes)
        seed_of = dict(zip(lanes, seeds, strict=True))
        seed: Any = [seed_of.get(lane) for lane in range(self._env.num_envs)]
        if self._games:
            ordered = (seed_of[lane] for lane in sorted(seed_of))
            seed = np.array([-1 if number is None else number % 2**31 for number in ordered])
        elif not (self._takes_masks or self.seeds_lanes):
            seed = seeds[0]  # of all lanes together
        if self._broken_off and mask.all() and isinstance(self._env, AsyncVectorEnv):
            self._end_processes()  # they accept no call, since an answer is pending or a process has ended
            self._env = self._rebuild()
        some = self._started and not mask.all()
        self._broken_off = True
        try:
            answer = self._env.reset(seed=seed, options={"reset_mask": mask} if some else None)
        except Exception as error:
            raise self._failed(f"lanes {list(lanes)}: reset(seed={seed})", error) from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise bad_reset("the vector environment", answer)
        self._started = True
        self._ended[mask] = False
        self._broken_off = False
        self._rows.write_batch(answer[0], lanes, of_all=True)

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        if not (everyone := len(lanes) == self._env.num_envs):
            action = host_env.of_everyone(np.asarray(action), lanes, self._env.num_envs)
        actions = self._decode(action)
        self._broken_off = True
        try:
            if not everyone and not self.resets_itself and self._takes_masks:
                finished = self._ended & np.isin(np.arange(len(self._ended)), lanes, invert=True)
                if finished.any():
                    self._env.reset(options={"reset_mask": finished})  # Gymnasium forbids to step a lane after its end
            observation, *answer, info = self._env.step(actions)
        except Exception as error:
            raise self._failed("the vector environment: step", error) from error
        self._broken_off = False
        outcome = self._checked(answer)
        flags = outcome[1:] > 0
        self._ended = np.any(flags, axis=0)
        if not isinstance(info, Mapping):
            raise EnvError(f"the vector environment: step returned the infos {shown(info)}, expected a dict: {API}")
        picked = self._pick(info)
        self._observe(observation, info, lanes)
        if not everyone:
            outcome, flags = outcome[:, list(lanes)], flags[:, list(lanes)]
            picked = [tuple(values[lane] for lane in lanes) for values in picked]
        return outcome[0].tolist(), flags[0].tolist(), flags[1].tolist(), picked

    def _observe(self, observation: Any, info: Mapping[str, Any], lanes: Sequence[int]) -> None:
        """Write the observations of these lanes after a step; EnvError if they are those of other episodes."""
        self._rows.write_batch(observation, lanes, of_all=True)
        ended = [lane for lane in lanes if self._ended[lane]]
        if not ended or self.resets_itself or not any(name in info for name in FINAL):
            return
        own = {path: rows.copy() for path, rows in self.observation.items()}
        self._write_final(info, ended)
        for path, rows in self.observation.items():
            if not np.array_equal(rows, own[path], equal_nan=rows.dtype.kind == "f"):
                what = "the vector environment begins other episodes in the step of an end, as its infos show"
                raise EnvError(f"{what}, expected that of SAME_STEP alone: declare or pass that mode; {ONWARD}")

    def _write_final(self, info: Mapping[str, Any], ended: Sequence[int]) -> None:
        """Write the last observations of lanes that ended, where the infos have them; else EnvError."""
        name = next((name for name in FINAL if name in info), "")
        reported = info.get(f"_{name}", [bool(name)] * self._env.num_envs)  # Gymnasium's mask of lanes
        if lacking := [lane for lane in ended if not reported[lane]]:
            what = f"lanes {lacking}: the vector environment begins others and does not report the last observations"
            mend = f"add them there, or pass another autoreset_mode; {ONWARD}"
            raise EnvError(f"{what}, expected them in the infos as {FINAL[0]!r}: {mend}")
        for lane in ended:
            self._rows.write_lane(lane, map_leaves(lambda _, rows: rows[lane], info[name]))  # noqa: B023  (at once)

    def _checked(self, answer: Sequence[Any]) -> npt.NDArray[np.float64]:
        """Reward, terminated and truncated of a step as one array [3, P]; EnvError for other than P values each."""
        try:
            outcome = np.array(answer, np.float64)
        except (TypeError, ValueError):
            outcome = np.empty(0)
        if outcome.shape != (3, self._env.num_envs):
            what = f"the vector environment: step returned {shown(answer, 120)} between observation and info"
            wanted = f"reward, terminated and truncated with {self._env.num_envs} values each"
            raise EnvError(f"{what}, expected {wanted}: {API}")
        return outcome

    def _pick(self, info: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """For each recorded info key, its P values; EnvError if a lane lacks one."""
        picked: list[tuple[Any, ...]] = []
        if not self._info_keys or self._late.all():  # no lane's infos are recorded where all are reset
            return picked
        for key in self._info_keys:
            holder, name = info_place(info, key)
            present = holder.get(f"_{name}", name in holder)  # Gymnasium marks the lanes that returned the key
            if not np.all(present := present | self._late):
                raise no_info_key(int(np.argmin(present)), key, info)
            if isinstance(holder[name], Mapping):
                raise host_env.bad_info(key, [holder[name]], TypeError("a dict"))
            picked.append(tuple(holder[name]))
        return picked

    def _failed(self, call: str, error: Exception) -> EnvError:
        """The EnvError for a `call`, in words, that raised; if a process has ended, the error names that instead."""
        if isinstance(self._env, AsyncVectorEnv) and isinstance(error, (EOFError, OSError)):
            ended = wait([process.sentinel for process in self._env.processes], _TO_DIE)
            for lane, process in enumerate(self._env.processes):
                if process.sentinel in ended:
                    process.join()  # a process closes its pipes shortly before its exit code can be read
                    return EnvError(f"lane {lane}: its process is gone (exit code {process.exitcode}): {ONWARD}")
        return EnvError(f"{call} raised {error!r}: {ONWARD}")

    def _end_processes(self) -> None:
        """Kill the processes of an `AsyncVectorEnv`, which may be busy, hung or gone."""
        for process in self._env.processes:
            process.kill()
        self._env._state = AsyncState.DEFAULT  # otherwise `close` would wait for answers that do not come
        self._env.close(terminate=True)

    @override
    def close(self) -> None:
        processes = isinstance(self._env, AsyncVectorEnv)
        if processes and self._broken_off:
            self._end_processes()
            return
        try:
            self._env.close()
        except (EOFError, OSError):
            if not processes:
                raise
            self._end_processes()  # one has ended


class SelfResettingLanes(VectorLanes):
    """A vector environment that begins an episode in the step in which another ends, and else by masks or for all."""

    resets_itself, seeds_lanes = True, False
    _begun: Mapping[Path, Any] = MappingProxyType({})  # [P, ...]: first observations of episodes that the step began

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        asked = [*zip(lanes, seeds, strict=True)]
        missing = [(lane, seed) for lane, seed in asked if seed is not None or not self._ended[lane]]
        if missing and self._started and not self._takes_masks and len(lanes) < self._env.num_envs:
            raise _no_reset([lane for lane, _ in missing])
        if missing:
            missing = missing if self._takes_masks else asked
            super().reset(*zip(*missing, strict=True))
        for lane in {*lanes} - {lane for lane, _ in missing}:
            self._ended[lane] = False
            for path, rows in self.observation.items():
                rows[lane] = self._begun[path][lane]

    @override
    def _observe(self, observation: Any, info: Mapping[str, Any], lanes: Sequence[int]) -> None:
        super()._observe(observation, info, lanes)
        self._ended &= np.isin(np.arange(self._env.num_envs), lanes)  # others that ended were finished before
        if not (ended := [lane for lane in lanes if self._ended[lane]]):
            return
        self._begun = {path: rows.copy() for path, rows in self.observation.items()}
        self._write_final(info, ended)

    @override
    def _pick(self, info: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """As above, but those of lanes that ended come from ``"final_info"``."""
        if not (self._info_keys and self._ended.any()):
            return super()._pick(info)
        columns, final = [], info.get("final_info")
        if not isinstance(final, Mapping):
            what = (
                f"a step that ends episodes returned {shown(final)} as the info 'final_info', which holds their infos"
            )
            raise EnvError(f"{what}, expected a dict: take no info_keys, or NEXT_STEP; {ONWARD}")
        for key in self._info_keys:
            values = []
            for lane, ended in enumerate(self._ended):
                holder, name = info_place(final if ended else info, key)
                marks = holder.get(f"_{name}", True)
                if name not in holder or not (marks is True or marks[lane]):
                    raise no_info_key(lane, key, final if ended else info)
                values.append(holder[name][lane])
            columns.append(tuple(values))
        return columns


class LateLanes(VectorLanes):
    """A vector environment that resets lanes in the step after their end, which also steps all others."""

    least_ready, seeds_lanes = 1, False

    def __init__(self, made: Made, max_carry: int, env: SimulatedEnv) -> None:
        super().__init__(made, env)
        self.most_ahead, spec = max_carry, env.action_spec
        # Valid actions [P, ...] for a step that resets all lanes, and ignores them.
        self._ignored = torch.zeros(self._env.num_envs, *spec.shape, dtype=spec.dtype).numpy() + spec.bounds[0].numpy()

    @property
    def busy(self) -> set[int]:
        """The lanes that the next step resets."""
        return {*self._late.nonzero()[0].tolist()}

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        if self._started and seeds.count(None) == len(seeds) and self._ended[list(lanes)].all():
            self._late[list(lanes)] = True
        elif len(lanes) < self._env.num_envs:
            raise _no_reset(lanes)
        else:
            self._late[:] = False
            super().reset(lanes, seeds)

    def send_some(self, lanes: Sequence[int], action: Any, /) -> None:
        """Keep the actions for `receive_some`."""
        self._sent = lanes, action

    def receive_some(self, least: int, /) -> tuple[Sequence[int], Outcome]:
        """Step all lanes; return those of `send_some`, since the step has reset the others."""
        lanes, action = self._sent
        outcome = self.step(lanes, action) if lanes else self.step(range(self._env.num_envs), self._ignored)
        self._late[:] = False
        return lanes, outcome

    @override
    def _observe(self, observation: Any, info: Mapping[str, Any], lanes: Sequence[int]) -> None:
        super()._observe(observation, info, range(self._env.num_envs))

    @override
    def _checked(self, answer: Sequence[Any]) -> npt.NDArray[np.float64]:
        outcome = super()._checked(answer)
        if outcome[1:, self._late].any():  # only the flags: some vectors leave a reward in the step of a reset
            what = f"lanes {self._late.nonzero()[0].tolist()}: the step after an end ends again"
            raise EnvError(f"{what}, expected that of a reset: correct autoreset_mode, which is NEXT_STEP; {ONWARD}")
        return outcome


def _no_reset(lanes: Sequence[int]) -> NoResetError:
    what = f"lanes {list(lanes)}: a reset within an episode (a limit, or a mask)"
    mend = "set the limit in the simulators, and reset all lanes"
    return NoResetError(f"{what}, but the vector environment resets its lanes itself, expected none: {mend}")

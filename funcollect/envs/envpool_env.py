"""EnvPool's environments, which step all lanes in one call of C++."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from typing_extensions import override

from funcollect.arguments import check_keys, check_not_given, check_num_envs, check_optional_positive, check_positive
from funcollect.envs.base import box, import_extra, info_place
from funcollect.envs.host.host_env import MOST_AHEAD, ONWARD, Rows, SimulatedEnv, SimulatorsBase, batch_decoder
from funcollect.envs.plain_spaces import map_parts
from funcollect.errors import EnvError, NoResetError
from funcollect.files import Uninterrupted
from funcollect.protocols import Outcome
from funcollect.specs import ActionSpec, Space, observation_leaves

Index = npt.NDArray[np.int32]  # lanes, [k]

_OURS = {
    "seed": "pass it to funcollect.init, or to a collector",
    "env_seed": "pass a seed to funcollect.init, or to a collector",
    "env_type": "Gymnasium's interface is used",
    **dict.fromkeys(("parallel", "num_workers"), "EnvPool is parallel itself: num_threads="),
}


def from_envpool(
    task_id: str,
    *,
    num_envs: int | None = None,
    num_threads: int = 1,
    batch_size: int | None = None,
    max_carry: int | None = None,
    info_keys: Sequence[str] = (),
    dtype: npt.DTypeLike | None = None,
    one_hot: bool = False,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over EnvPool, seeded by run: the pool is built with one seed for each lane, once.

    Lanes that are done are reset in the same step, while EnvPool itself would reset them in the next one. EnvPool
    reports an episode that terminates at its time limit as truncated, not as terminated. With ``episodic_life=True``,
    an Atari game goes on after a lost life; a limit on frames and a reset within a life begin another game.

    With `batch_size`, a divisor of `num_envs`, the pool is asynchronous: the policy is called whenever so many lanes
    have answered, and none waits, so that some run ahead of a rollout. At most `max_carry` rows of a lane, 1024 by
    default, open the next batch, with the `policy_version` that made them; which ones depends on time, a lane's own
    data do not.

    `task_id` is one of `envpool.list_all_envs`, such as ``"Pong-v5"``, and `num_threads` step the lanes; the data do
    not depend on their number. `kwargs` are for `envpool.make_gymnasium`: `max_episode_steps`, and the task's own
    options. See `from_gymnasium` for the other arguments.

    Raises ImportError if EnvPool is not installed; ValueError for an unknown task, one for several players, a number
    out of range, an info key that the task does not have, or a keyword argument that is set here; TypeError for a pool
    that is built already, and a keyword argument that the task does not take.

    >>> from_envpool("CartPole-v1", num_envs=8)
    HostEnv('envpool/CartPole-v1', num_envs=8)
    """
    if not isinstance(task_id, str):
        raise TypeError(f"task_id is {type(task_id).__name__}, expected its name: make_env('envpool/CartPole-v1')")
    check_keys("info_keys", info_keys, "x_position")
    check_num_envs(num_envs)
    check_positive("num_threads", num_threads)
    for name, value in ("batch_size", batch_size), ("max_carry", max_carry):
        check_optional_positive(name, value)
    if (num_envs or 1) % (batch_size or 1):
        raise ValueError(f"batch_size is {batch_size}, expected a divisor of num_envs={num_envs or 1}: pass one")
    check_not_given("EnvPool here", kwargs, _OURS)
    apart = batch_size not in (None, num_envs or 1)
    if max_carry is not None and not apart:
        raise ValueError(f"max_carry is {max_carry}, and these lanes never run ahead of a rollout: pass batch_size too")
    envpool = import_extra("envpool", "envpool", "envs")
    config = kwargs | {"num_envs": num_envs or 1, "num_threads": num_threads, "batch_size": batch_size or num_envs or 1}
    spec = _spec_of(envpool, task_id, config, info_keys)
    with warnings.catch_warnings(action="ignore"):  # Gymnasium warns about the bounds of EnvPool's boxes
        space, action_spec = map_parts(_widened, spec.observation_space), ActionSpec(spec.action_space, one_hot)

    def build(seeds: Sequence[int]) -> Any:
        pool = envpool.make_gymnasium(task_id, seed=[seed & (2**31 - 1) for seed in seeds], **config)  # it takes int32
        with warnings.catch_warnings(action="ignore"):
            _ = pool.observation_space  # EnvPool makes it on first use, with a warning
        return pool

    lives = getattr(spec.config, "episodic_life", False)
    opener = partial(AsynchronousLanes, batch_size or 1, max_carry or MOST_AHEAD) if apart else EnvPoolLanes
    return SimulatedEnv(
        label=f"envpool/{task_id}",
        num_envs=num_envs,
        observation_space=space,
        action_spec=action_spec,
        observation_leaves=observation_leaves(space, dtype),
        opener=partial(opener, build, lives),
        info_keys=tuple(info_keys),
        seeding="run",
        forking="none",
        truncates=True,  # its `max_episode_steps` always has a value
    )


def _spec_of(envpool: Any, task_id: str, config: dict[str, Any], info_keys: Sequence[str]) -> Any:
    """EnvPool's description of a task with its options; raises the errors of `from_envpool` if it cannot be adapted."""
    if task_id not in (known := envpool.list_all_envs()):
        near = difflib.get_close_matches(task_id, known, 3, 0.4) or ["CartPole-v1", "Pong-v5"]
        raise ValueError(f"EnvPool has no task {task_id!r}, expected one of envpool.list_all_envs(), such as {near}")
    if "max_episode_steps" in config:
        check_positive("max_episode_steps", config["max_episode_steps"])
    try:
        spec = envpool.make_spec(task_id, **config)
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        what, known = f"EnvPool cannot make {task_id!r} with {config}", envpool.make_spec(task_id).config._fields
        mend = f"leave out the options that the task lacks, it takes {sorted(set(known) - _OURS.keys())}"
        raise TypeError(f"{what}: {reason}; {mend}") from error
    if spec.config.max_num_players > 1:
        raise ValueError(f"{task_id} is for {spec.config.max_num_players} players, expected one: take another task")
    infos = {key.removeprefix("info:") for key in spec.state_array_spec if key.startswith("info:")} | {"elapsed_step"}
    if unknown := [key for key in info_keys if key not in infos]:
        raise ValueError(f"{task_id} has no info key {unknown[0]!r}, expected one of {sorted(infos)}: name one of them")
    return spec


def _widened(space: Space) -> Space:
    """The space with infinite bounds where EnvPool has C++'s least and largest float for unbounded numbers."""
    if not isinstance(space, spaces.Box) or space.dtype is None or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    unbounded = (space.low == limits.tiny) & (space.high == limits.max)
    low, high = np.where(unbounded, -np.inf, space.low), np.where(unbounded, np.inf, space.high)
    return box(space.shape, space.dtype, low, high)


class EnvPoolLanes(SimulatorsBase):
    """The lanes of a pool in synchronous mode, which returns results in the order of the indices that it gets.

    A reset by index begins another game. With `lives`, lanes that are done are reset by a step instead: it ignores the
    action, takes twice as long, and goes on with the game if only a life was lost.
    """

    def __init__(self, build: Callable[[Sequence[int]], Any], lives: bool, env: SimulatedEnv) -> None:
        self._lives, self._build = lives, build
        self._pool: Any = None  # the first reset builds it, from one seed for each lane
        self._decode = batch_decoder(env.action_spec)
        self._info_keys = env.info_keys
        self._num_envs = env.num_envs or 1
        self._ended = np.zeros(self._num_envs, bool)  # [P]: with `lives`, the lane's last step ended an episode
        self._no_action = np.zeros((self._num_envs, *(env.action_space.shape or ())), env.action_space.dtype)
        self._rows = Rows(env)
        self.observation = self._rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        if not lanes:
            return
        new_seeds = [seed for seed in seeds if seed is not None]
        try:
            if new_seeds:  # all lanes get seeds together, in a new pool
                self.close()
                self._pool = self._build(new_seeds)
                self._ended[:] = False
            index = np.array(lanes, np.int32)
            ended, self._ended[index] = self._ended[index], False
            begun = self._begin(index[ended], index[~ended])
        except Exception as error:
            raise EnvError(f"lanes {list(lanes)}: EnvPool's reset raised {error!r}: {ONWARD}") from error
        for some_lanes, observation in begun:
            self._rows.write_batch(observation, some_lanes)

    def _begin(self, lives: Index, games: Index) -> list[tuple[Index, Any]]:
        """Go on with the next life, or begin another game, in these lanes; return them with their observations."""
        begun = [(lives, self._pool.step(self._no_action[lives], lives)[0])] if lives.size else []
        return [*begun, (games, self._pool.reset(games)[0])] if games.size else begun

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        actions = self._decode(action)
        index = None if len(lanes) == self._num_envs else np.array(lanes, np.int32)
        try:
            observation, reward, terminated, truncated, info = self._pool.step(actions, index)
        except Exception as error:
            raise EnvError(f"EnvPool's step raised {error!r}: {ONWARD}") from error
        if self._lives:
            self._ended[... if index is None else index] = terminated | truncated
        infos = [holder[name] for holder, name in (info_place(info, key) for key in self._info_keys)]
        self._rows.write_batch(observation, index)
        return reward, terminated.tolist(), truncated.tolist(), infos

    @override
    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class AsynchronousLanes(EnvPoolLanes):
    """The lanes of a pool in asynchronous mode, which answers for `batch_size` lanes at a time, of any under way."""

    def __init__(self, batch_size: int, max_carry: int, *others: Any) -> None:
        super().__init__(*others)
        self.least_ready, self.most_ahead = batch_size, max_carry
        self.busy: set[int] = set()
        self._begins = np.zeros(self._num_envs, bool)  # [P]: the lane's next answer is that of a reset

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        everyone = len(lanes) == self._num_envs  # whose observations have to be there at once
        if not everyone and (waiting := sorted(self.busy.intersection(lanes))):
            what = f"lanes {waiting}: a reset of lanes whose answers are under way, expected one of all lanes"
            raise NoResetError(f"{what}: reset them all, or leave batch_size out")
        if everyone and self.busy:
            self._drop_answers()
        super().reset(lanes, seeds)
        while everyone and self._begins.any():
            self._answer()

    def _drop_answers(self) -> None:
        """Wait for all lanes. As the pool answers for `least_ready` at a time, others are stepped to make that many."""
        idle = [lane for lane in range(self._num_envs) if lane not in self.busy]
        beside = np.array(idle[: -len(self.busy) % self.least_ready], np.int32)
        if beside.size:
            self._pool.send(self._no_action[beside], beside)
            self.busy.update(beside.tolist())
        while self.busy:
            self._answer()
        self._ended[:] = False  # which of them ended a life is not known any more, so all begin another game

    @override
    def _begin(self, lives: Index, games: Index) -> list[tuple[Index, Any]]:
        with Uninterrupted():
            if lives.size:
                self._pool.send(self._no_action[lives], lives)
            if games.size:
                self._pool._reset(games)
            self._begins[lives] = self._begins[games] = True
            self.busy.update(lives.tolist(), games.tolist())
        return []  # the observations come with later answers

    def _answer(self) -> tuple[Index, Any]:
        """Wait for the pool; return the lanes that were stepped, not reset, and their reward, flags and infos."""
        with Uninterrupted():  # a lost answer would be waited for again
            observation, *outcome, info = self._pool.recv()
            lanes = info["env_id"]
            self.busy.difference_update(lanes.tolist())
        self._rows.write_batch(observation, lanes)
        stepped, self._begins[lanes] = ~self._begins[lanes], False
        infos = [holder[name][stepped] for holder, name in (info_place(info, key) for key in self._info_keys)]
        return lanes[stepped], (*(values[stepped] for values in outcome), infos)

    def send_some(self, lanes: Sequence[int], action: Any, /) -> None:
        """Let the pool step these lanes."""
        if lanes:
            decoded, numbers = self._decode(action), np.array(lanes, np.int32)
            with Uninterrupted():
                self._pool.send(decoded, numbers)
                self.busy.update(lanes)

    def receive_some(self, least: int, /) -> tuple[Sequence[int], Outcome]:
        """Wait for the answers of as many lanes as the pool returns at once; some may be of resets."""
        try:
            lanes, (reward, terminated, truncated, infos) = self._answer()
        except Exception as error:
            raise EnvError(f"EnvPool's step raised {error!r}: {ONWARD}") from error
        if self._lives:
            self._ended[lanes] = terminated | truncated
        return lanes.tolist(), (reward, terminated.tolist(), truncated.tolist(), infos)

"""Adapter for TorchRL's environments: single, `SerialEnv`, `ParallelEnv`, transformed or natively batched."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess, active_children
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_num_envs
from funcollect.envs.base import first_then_new, has_game_of_lives, is_torchrl, running_statistics
from funcollect.envs.host.host_env import ONWARD, Opener, Rows, SimulatedEnv, SimulatorsBase, call_of, of_everyone
from funcollect.envs.host.lane_workers.block import LaneWorkers, refuse_removed
from funcollect.envs.host.lane_workers.simulators import WorkerLanes
from funcollect.envs.torchrl_specs import TorchRLLayout, layout_of, truncates
from funcollect.errors import EnvError, InUseError
from funcollect.keys import generator_state, torch_generator
from funcollect.protocols import Outcome
from funcollect.specs import GroupedSpec, observation_leaves
from funcollect.tree import as_path, key_of, nest, to_tensordict


def from_torchrl(
    env: Any,
    *,
    num_envs: int | None = None,
    num_workers: int = 0,
    parallel: bool = False,
    timeout: float = 60.0,
    wait: str = "all",
    min_ready: int | None = None,
    dtype: npt.DTypeLike | None = None,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over one of TorchRL's: single, `SerialEnv`, `ParallelEnv`, transformed or natively batched.

    Observations have the environment's keys, including those that its transforms add, such as ``step_count``. The
    environment needs one action, whose key may be nested and which a batch holds as ``action`` in the environment's own
    encoding; one reward, which becomes ``reward``; and ``done``, ``terminated`` and ``truncated`` at the root. Or it
    has groups of agents, as `PettingZooEnv` and `VmasEnv`: then a batch has their keys, ``(group, "action")``,
    ``("next", group, "reward")`` and so on, and ``("next", "reward")`` is the sum over all agents.

    Lanes are reset by ``_reset`` masks, through all transforms. The environment is seeded once (``seeding="run"``), by
    its `set_seed`, draws from Torch's global generator in its own state, and cannot be forked. With `num_envs`, each
    lane is a separate environment with its own seed (``seeding="lane"``).

    `env` is an `EnvBase`, which backs one state, or a factory of one, called with `kwargs` for each state. The state
    owns the instance: after a step or reset from outside (``env.rollout(…)``) the next frame is no transition, so
    evaluate on another. With `num_envs`, the factory makes single environments, which may live in workers; None stands
    for the batch that `env` is itself. See `from_gymnasium` for the other arguments.

    Raises TypeError for something else as `env`, and for specs without a Gymnasium space; ValueError for several
    actions or rewards that are not those of groups, several batch dimensions, and keys that collide with a batch's own.

    >>> from torchrl.envs import GymEnv, SerialEnv
    >>> from_torchrl(lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")))
    HostEnv('SerialEnv', num_envs=2)
    """
    refuse_removed(kwargs)
    if refused := sorted(kwargs.keys() & {"info_keys", "one_hot", "replayable"}):
        what = f"{', '.join(refused)} cannot be given for an environment of TorchRL's, which has its own"
        raise TypeError(f"{what}: build it that way")
    check_num_envs(num_envs)
    apart = num_envs is not None or parallel or bool(num_workers)  # each lane is an environment of its own
    if is_torchrl(env) and (apart or kwargs):
        names = [*kwargs, *(["num_envs, or workers,"] if apart else [])]
        raise TypeError(f"{', '.join(names)} cannot be given with an environment that is built: pass a factory")
    workers = LaneWorkers.checked(
        num_envs or 1, parallel=parallel, num_workers=num_workers, timeout=timeout, wait=wait, min_ready=min_ready
    )
    made = partial(_make, env, kwargs)
    first = env if is_torchrl(env) else made()
    if apart and first.batch_size:
        what = f"{type(first).__name__}, which is a batch of {first.batch_size[0]} already"
        raise ValueError(f"num_envs, or workers, were given with {what}: pass a factory of a single environment")
    layout = layout_of(first)
    with torch_generator(generator_state(0)):  # this may build the first lane
        statistics, limited, lives = running_statistics(first), truncates(first), has_game_of_lives(first)
    if lives:
        what = f"{type(first).__name__} restarts its Atari game at each lost life (terminal_on_life_loss=True)"
        warnings.warn(f"{what}, as in TorchRL: for games that go on, pass the gymnasium.Env", stacklevel=3)
    opener: Opener = WorkerLanes
    if workers:
        first.close()
    else:
        make = partial(first_then_new, [first], made)
        opener = partial(SeparateLanes, make) if apart else lambda adapted: TorchRLLanes(make(), layout, adapted)
    name = type(first).__name__
    return SimulatedEnv(
        label=f"{name} in {workers}" if workers else name,
        num_envs=num_envs if apart else first.batch_size[0] if first.batch_size else None,
        observation_space=layout.observation_space,
        action_spec=layout.action,
        observation_leaves=observation_leaves(layout.observation_space, dtype),
        opener=opener,
        info_keys=tuple(".".join(key) for key in layout.reward_keys if isinstance(layout.action, GroupedSpec)),
        seeding="lane" if apart else "run",
        forking="none",
        truncates=limited,
        running_statistics=statistics,
        primers=layout.primers,
        workers=workers,
        open_group=(lambda _, __: partial(SeparateLanes, made)) if workers else None,
    )


def _make(env: Any, kwargs: dict[str, Any]) -> Any:
    """Make an environment by the factory `env`; InUseError for an instance, TypeError for anything else."""
    if is_torchrl(env):
        what = f"this {type(env).__name__} backs a state, or did until that was closed, and cannot be rebuilt"
        raise InUseError(f"{what}: pass a factory instead of an instance")
    if not callable(env):
        raise TypeError(f"env is {type(env).__name__}, expected a torchrl.envs.EnvBase or a factory: pass one")
    with torch_generator(generator_state(0)):  # some environments draw a seed as they are built
        built = env(**kwargs)
    if not is_torchrl(built):
        raise TypeError(f"the factory returned {type(built).__name__}, expected a torchrl.envs.EnvBase: return that")
    return built


_NOTHING = contextlib.nullcontext()


def _no_grad() -> contextlib.AbstractContextManager[Any]:
    """A context without gradients, which is free if they are disabled already, as in a Torch policy's loop."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


class TorchRLLanes(SimulatorsBase):
    """An environment of TorchRL's. A step gets the last root, in which transforms keep values, unless it is `bare`."""

    apply: Callable[..., list[Any]]  # calls a function with the environment; missing if that is a batch

    def __init__(self, env: Any, layout: TorchRLLayout, adapted: SimulatedEnv) -> None:
        self._env, self._layout, self._first_lane = env, layout, adapted.first_lane
        self._batched, spec = bool(env.batch_size), layout.action
        self._groups = isinstance(spec, GroupedSpec)  # whether actions and rewards are those of agents
        self._actions = [
            (as_path(key), partial(spec.of_group, key[0]) if isinstance(spec, GroupedSpec) else None, dtype)
            for key, dtype in layout.actions.items()
        ]
        self._num_envs = env.batch_size[0] if self._batched else 1
        self._threads = torch.get_num_threads()
        self._generator = generator_state(0)
        self._broken_off = False  # whether the last call of the environment raised, so its processes may be unusable
        self._root: TensorDictBase | None = None  # the input of the next step, without the action
        self._restarted = [False] * self._num_envs  # [P]: the lane's next episode has begun in `_root` already
        rows = Rows(adapted)
        self._reads = [(leaf_rows, key_of(leaf_rows.leaf.path)) for leaf_rows in rows.leaves]
        self.observation = rows.arrays
        if not self._batched:
            self.apply = lambda lanes, function, args: [call_of(self._first_lane, function, env, args) for _ in lanes]

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        if not lanes:
            return
        if self._broken_off and len(lanes) == self._num_envs and _processes_of(self._env):
            _end_processes(self._env)  # they accept no call, since an answer is pending or a process has ended
        self._broken_off = True
        try:
            with _no_grad():
                self._root = root = self._reset_root(lanes, seeds[0])  # one seed for the whole environment
        except Exception as error:
            raise self._failed(f"reset of the lanes {list(lanes)}", error) from error
        self._broken_off = False
        for lane in lanes:
            self._restarted[lane] = False
        self._write(root, lanes)

    def _reset_root(self, lanes: Sequence[int], seed: int | None) -> Any:
        """Reset those of the `lanes` that the last step has not restarted, or all with a seed; return the root."""
        if seed is not None:
            self._root = None
            self._generator = generator_state(seed)
        with torch_generator(self._generator):
            if seed is not None:
                self._env.set_seed(seed)
            missing = [lane for lane in lanes if not self._restarted[lane]]
            if self._root is None or len(missing) == self._num_envs:
                return self._env.reset()
            if not missing:
                return self._root
            done = torch.zeros(self._num_envs, 1, dtype=torch.bool)
            done[missing] = True
            for key in self._env.done_keys:
                flags = self._root.get(key)  # [P, 1], or more dimensions for agents
                self._root.set(key, done.view(-1, *[1] * (flags.ndim - 1)).expand_as(flags).to(flags.device, copy=True))
            return self._env.maybe_reset(self._root)

    def _failed(self, what: str, error: Exception) -> EnvError:
        """The EnvError for a call that raised; drops the root, so that the next reset resets the whole environment."""
        self._root = None
        self._restarted = [False] * self._num_envs
        where = "" if self._batched else f"lane {self._first_lane}: "
        return EnvError(f"{where}{type(self._env).__name__}: {what} raised {error!r}: {ONWARD}")

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        self._broken_off = True
        try:
            with _no_grad(), torch_generator(self._generator):
                after = self._step_all(lanes, action)
        except Exception as error:
            raise self._failed("step", error) from error
        self._broken_off = False
        infos: Any = ()
        if self._groups:
            rewards = [after.get(key).reshape(self._num_envs, -1) for key in self._layout.reward_keys]  # [P, n] each
            reward, infos = torch.cat(rewards, -1).sum(-1).tolist(), [r.numpy(force=True)[list(lanes)] for r in rewards]
        else:
            reward = _column(after, self._layout.reward_keys[0])
        columns: Any = (reward, *self._flags(after))
        self._write(after, lanes)
        if len(lanes) < self._num_envs:
            columns = tuple([column[lane] for lane in lanes] for column in columns)
        return *columns, infos

    def _step_all(self, lanes: Sequence[int], action: Any) -> TensorDictBase:
        """Step these lanes, and return TorchRL's ``next``; unless the layout is bare, the root restarts done lanes."""
        tensor = action if isinstance(action, Tensor) else torch.tensor(np.asarray(action))
        tensor = of_everyone(tensor, lanes, self._num_envs) if len(lanes) < self._num_envs else tensor
        tensor, place = tensor if self._batched else tensor[0], self._env.device
        named = {
            path: (tensor if select is None else select(tensor)).to(place or tensor.device, dtype, copy=True)
            for path, select, dtype in self._actions
        }
        if self._layout.bare or self._root is None:  # the actions are all that such a step reads
            alone = to_tensordict(named, ()) if place is None else TensorDict(nest(named), (), device=place)
            after: TensorDictBase = self._env._step(alone) if self._layout.raw else self._env.step(alone).get("next")
            return after
        for path, encoded in named.items():
            self._root.set(key_of(path), encoded)
        stepped, self._root = self._env.step_and_maybe_reset(self._root)
        after = stepped.get("next")
        self._restarted = _column(after, "done")
        return after

    def _flags(self, after: TensorDictBase) -> tuple[list[bool], list[bool]]:
        """Terminated and truncated, [P] each; a lane that is done but not terminated is truncated."""
        done = _column(after, "done")
        if not any(done):
            return done, done.copy()
        terminated = _column(after, "terminated")
        cut = _column(after, "truncated") if self._layout.writes_truncated else [False] * self._num_envs
        return terminated, [c or (d and not t) for c, d, t in zip(cut, done, terminated, strict=True)]

    def _write(self, source: TensorDictBase, lanes: Sequence[int]) -> None:
        for rows, key in self._reads:
            values = source.get(key).numpy(force=True)
            if self._batched:
                rows.write_batch(values, lanes, of_all=True)
            else:
                rows.write_lane(0, values)

    @override
    def close(self) -> None:
        try:
            if self._env.is_closed:
                return
            processes = _processes_of(self._env)
            if processes and (self._broken_off or not processes <= {*active_children()}):
                _end_processes(self._env)
                self._env.close(raise_if_closed=False)  # its transforms
            else:
                self._env.close()
        finally:
            torch.set_num_threads(self._threads)  # which closing a ParallelEnv changes


def _column(source: TensorDictBase, key: Any) -> Any:
    """The values of all lanes under a key, as a list."""
    return source.get(key).reshape(-1).tolist()


class SeparateLanes(SimulatorsBase):
    """Single environments of TorchRL's, one for each lane."""

    def __init__(self, make: Callable[[], Any], env: SimulatedEnv) -> None:
        self.observation = Rows(env).arrays
        self._lanes: list[TorchRLLanes] = []
        for lane in range(env.num_envs or 1):
            memory = {path: array[lane : lane + 1] for path, array in self.observation.items()}
            made, here = make(), replace(env, num_envs=None, first_lane=env.first_lane + lane, memory=memory)
            layout = layout_of(made)
            found, wanted = (layout.observation_space, layout.action.space), (env.observation_space, env.action_space)
            if found != wanted:
                mend = "use equal spaces in one batch"
                raise ValueError(f"lane {here.first_lane} has the spaces {found}, lane 0 has {wanted}: {mend}")
            self._lanes.append(TorchRLLanes(made, layout, here))

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        for lane, seed in zip(lanes, seeds, strict=True):
            self._lanes[lane].reset([0], [seed])

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        outcomes = [self._lanes[lane].step([0], action[row : row + 1]) for row, lane in enumerate(lanes)]
        reward, terminated, truncated = ([outcome[column][0] for outcome in outcomes] for column in range(3))
        infos = [[rows[0] for rows in info] for info in zip(*(outcome[3] for outcome in outcomes), strict=True)]
        return reward, terminated, truncated, infos

    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        """Call a function with the environments of these lanes."""
        return [result for lane in lanes for result in self._lanes[lane].apply([0], function, args)]

    @override
    def close(self) -> None:
        for lanes in self._lanes:
            lanes.close()


def _processes_of(env: Any) -> set[BaseProcess]:
    """The processes of a `ParallelEnv`, under any transforms. It would forward `getattr` to them, hence `vars`."""
    return {process for module in env.modules() for process in vars(module).get("_workers", ())}


def _end_processes(env: Any) -> None:
    """Kill the processes of a `ParallelEnv`, which may be busy, hung or gone; its next call starts new ones."""
    for module in env.modules():
        if "_workers" not in vars(module):
            continue
        for process in {*module._workers} & {*active_children()}:  # without those that TorchRL has reaped
            process.kill()
            process.join()
        for channel in module.parent_channels:
            channel.close()
        module.is_closed = True

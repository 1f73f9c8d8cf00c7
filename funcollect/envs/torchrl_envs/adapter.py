"""TorchRL's environments: one `EnvBase`, a `SerialEnv` or `ParallelEnv`, a transformed or natively batched one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.envs.host.host_env import ONWARD, SimulatedEnv, SimulatorsBase
from funcollect.envs.host.rows import Rows
from funcollect.envs.recognise import is_torchrl, running_statistics
from funcollect.envs.torchrl_envs.processes import close_env, end_workers, workers_of
from funcollect.envs.torchrl_envs.specs import TorchRLLayout, layout_of
from funcollect.errors import EnvError
from funcollect.keys import generator_state, torch_generator
from funcollect.protocols import Outcome, Simulators
from funcollect.specs import Leaf, observation_leaves
from funcollect.tree import Path, key_of, to_tensordict


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchRLEnv(SimulatedEnv):
    """A host environment over TorchRL's.

    Attributes:
        primers: the initial recurrent states, in one environment, that `TensorDictPrimer`s around it declare. They are
            no observations: a policy carries its state itself, and begins with these.
    """

    primers: Mapping[Path, Tensor] = field(default_factory=dict)


def from_torchrl(env: Any, *, dtype: npt.DTypeLike | None = None, **kwargs: Any) -> TorchRLEnv:
    """A host environment over one of TorchRL's: single, `SerialEnv`, `ParallelEnv`, transformed or natively batched.

    Observations have the environment's keys, those that its transforms add (``step_count``, …) among them. There has to
    be one action, under any key, nested or not, which a batch holds as ``action``, in the environment's own encoding;
    one reward, likewise ``reward``; and ``done``, ``terminated`` and ``truncated`` at the root. Lanes are reset by
    ``_reset`` masks, through all transforms. It is seeded once (``seeding="run"``), by its `set_seed`; what it draws
    from Torch's global generator comes from a state of its own, and cannot be forked.

    Args:
        env: an `EnvBase`, which backs one state, or a factory of one, called anew for each further state. An instance
            is the state's from then on: a step or reset from outside (``env.rollout(…)``) moves it on unseen, and the
            next frame is no transition. Evaluate on another.
        dtype: the dtype of floating observations in a batch; float32 unless given.
        **kwargs: for the factory.

    Raises:
        TypeError: for something else as `env`, and for specs without a Gymnasium space.
        ValueError: for several actions, rewards, batch dimensions or groups of done flags; for keys that collide with a
            batch's own.

    >>> from torchrl.envs import GymEnv, SerialEnv
    >>> from_torchrl(lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")))
    HostEnv('SerialEnv', num_envs=2)
    """
    if given := sorted(kwargs.keys() & {"num_envs", "parallel", "info_keys", "one_hot"}):
        raise TypeError(
            f"{', '.join(given)} cannot be given for an environment of TorchRL's, which says so itself: build it that "
            "way, several as torchrl.envs.SerialEnv(num_envs, factory)"
        )
    source = _EnvFactory(env, kwargs)
    layout = layout_of(source.first)
    leaves = observation_leaves(layout.observation_space, dtype)

    def opener() -> Simulators:
        return TorchRLLanes(source.take(), layout, leaves)

    batch_size = source.first.batch_size
    with torch_generator(generator_state(0)):  # it builds a lane where these live in other processes
        statistics = running_statistics(source.first)
    return TorchRLEnv(
        label=type(source.first).__name__,
        num_envs=batch_size[0] if batch_size else None,
        observation_space=layout.observation_space,
        action_spec=layout.action,
        observation_leaves=leaves,
        opener=opener,
        seeding="run",
        forking="none",
        running_statistics=statistics,
        primers=layout.primers,
    )


class _EnvFactory:
    """Gives the environment that was looked at first, then others from the factory."""

    def __init__(self, env: Any, kwargs: dict[str, Any]) -> None:
        if is_torchrl(env):
            if kwargs:
                raise TypeError(
                    f"{', '.join(kwargs)} cannot be given with an environment that is built: pass a factory"
                )
            self._factory: Callable[[], Any] | None = None
            self.first: Any = env
        elif callable(env):
            self._factory = lambda: env(**kwargs)
            self.first = self._built()
        else:
            raise TypeError(f"env is {type(env).__name__}, expected a torchrl.envs.EnvBase or a factory: pass one")
        self._spare: list[Any] = [self.first]

    def _built(self) -> Any:
        assert self._factory is not None
        with torch_generator(generator_state(0)):  # some draw a seed as they are built
            built = self._factory()
        if not is_torchrl(built):
            raise TypeError(
                f"the factory returned {type(built).__name__}, expected a torchrl.envs.EnvBase: return the environment"
            )
        return built

    def take(self) -> Any:
        """An environment that backs no state yet."""
        if self._spare:
            return self._spare.pop()
        if self._factory is None:
            raise ValueError(
                f"this {type(self.first).__name__} backs a state, or did until that was closed, and cannot be rebuilt: "
                "pass a factory instead of an instance"
            )
        return self._built()


_NOTHING = contextlib.nullcontext()


def _no_grad() -> contextlib.AbstractContextManager[Any]:
    """No gradients; a Torch policy's loop has none anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


class TorchRLLanes(SimulatorsBase):
    """An environment of TorchRL's, stepped as a whole.

    Its TensorDict goes on from step to step with every key, so that transforms find what they left there. An
    environment without state or transforms reads nothing but the action, and gets nothing else.
    """

    def __init__(self, env: Any, layout: TorchRLLayout, leaves: tuple[Leaf, ...]) -> None:
        self._env = env
        self._layout = layout
        key = layout.action_key
        self._action_path = key if isinstance(key, tuple) else (key,)
        self._batched = bool(env.batch_size)
        self._num_envs = env.batch_size[0] if self._batched else 1
        self._threads = torch.get_num_threads()
        self._generator = generator_state(0)
        self._broken_off = False  # whether a call of the environment did not end
        self._root: TensorDictBase | None = None
        self._restarted = [False] * self._num_envs  # whether a lane's next episode has begun in _root already
        rows = Rows(layout.observation_space, leaves, self._num_envs)
        self._reads = [(leaf_rows, key_of(leaf_rows.leaf.path)) for leaf_rows in rows.leaves]
        self.observation = rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        """Start an episode in each of `lanes`; a seed for the first of them seeds the whole environment."""
        if not lanes:
            return
        if self._broken_off and len(lanes) == self._num_envs and workers_of(self._env):
            end_workers(self._env)  # an answer is pending, or a process is gone: they take no further call
        self._broken_off = True
        try:
            with _no_grad():
                self._root = root = self._begun(lanes, seeds[0])
        except Exception as error:
            raise self._failed(f"reset of the lanes {list(lanes)}", error) from error
        self._broken_off = False
        for lane in lanes:
            self._restarted[lane] = False
        self._write(root, None if len(lanes) == self._num_envs else self._mask(lanes))

    def _mask(self, lanes: Collection[int]) -> npt.NDArray[np.bool_]:
        """[P], True for `lanes`."""
        mask = np.zeros(self._num_envs, bool)
        mask[list(lanes)] = True
        return mask

    def _begun(self, lanes: Sequence[int], seed: int | None) -> TensorDictBase:
        """The root in which an episode begins in each of `lanes`, unless it has begun there already."""
        if seed is not None:
            self._root = None
            self._generator = generator_state(seed)
        with torch_generator(self._generator):
            if seed is not None:
                self._env.set_seed(seed)
            missing = [lane for lane in lanes if not self._restarted[lane]]
            if self._root is None or len(missing) == self._num_envs:
                fresh: TensorDictBase = self._env.reset()
                return fresh
            return self._reset_some(self._root, missing) if missing else self._root

    def _reset_some(self, root: TensorDictBase, lanes: list[int]) -> TensorDictBase:
        over = torch.from_numpy(self._mask(lanes))[:, None]
        for key in self._env.done_keys:
            root.set(key, over.to(root.get(key).device, copy=True))
        begun: TensorDictBase = self._env.maybe_reset(root)
        return begun

    def _failed(self, what: str, error: Exception) -> EnvError:
        """What the environment raised, said; a reset of all lanes begins from nothing afterwards."""
        self._root = None
        self._restarted = [False] * self._num_envs
        return EnvError(f"{type(self._env).__name__}: {what} raised {error!r}: {ONWARD}")

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        """The environment steps all of its lanes; what the others do is not shown."""
        everyone = len(lanes) == self._num_envs
        self._broken_off = True
        try:
            with _no_grad(), torch_generator(self._generator):
                after = self._advanced(self._encoded(lanes, action))
        except Exception as error:
            raise self._failed("step", error) from error
        self._broken_off = False
        reward = self._column(after, self._layout.reward_key)
        terminated, truncated = self._fates(after)
        self._write(after, None if everyone else self._mask(lanes))
        if not everyone:
            reward, terminated, truncated = ([each[lane] for lane in lanes] for each in (reward, terminated, truncated))
        return reward, terminated, truncated, ()

    def _encoded(self, lanes: Sequence[int], action: Any) -> Tensor:
        """The action as the environment reads it, in memory of its own."""
        tensor = action if isinstance(action, Tensor) else torch.tensor(np.asarray(action))
        if len(lanes) < self._num_envs:  # the other lanes step, too
            some, tensor = tensor, tensor[:1].repeat_interleave(self._num_envs, 0)
            tensor[list(lanes)] = some
        own = tensor if self._batched else tensor[0]
        return own.to(self._env.device or tensor.device, self._layout.action_dtype, copy=True)

    def _advanced(self, action: Tensor) -> TensorDictBase:
        """What one step of all lanes put under ``next``. Unless it is bare, lanes that are done begin anew."""
        if self._layout.bare or self._root is None:
            alone = to_tensordict({self._action_path: action}, ())
            after: TensorDictBase = self._env._step(alone) if self._layout.raw else self._env.step(alone).get("next")
            return after
        self._root.set(self._layout.action_key, action)
        stepped, self._root = self._env.step_and_maybe_reset(self._root)
        after = stepped.get("next")
        self._restarted = self._column(after, "done")
        return after

    def _fates(self, after: TensorDictBase) -> tuple[list[bool], list[bool]]:
        """Terminated and truncated, [P] each; what is done and not terminated is truncated."""
        done = self._column(after, "done")
        if not any(done):
            return done, done.copy()
        terminated = self._column(after, "terminated")
        cut = self._column(after, "truncated") if self._layout.truncates else [False] * self._num_envs
        return terminated, [c or (d and not t) for c, d, t in zip(cut, done, terminated, strict=True)]

    @staticmethod
    def _column(source: TensorDictBase, key: Any) -> list[Any]:
        """[P] numbers or flags."""
        values: list[Any] = source.get(key).reshape(-1).tolist()
        return values

    def _write(self, source: TensorDictBase, mask: npt.NDArray[np.bool_] | None) -> None:
        """Write the observations of the lanes of `mask`, or of all."""
        for rows, key in self._reads:
            values = source.get(key).numpy(force=True)
            if not self._batched:
                rows.write_lane(0, values)
            elif mask is None:
                rows.write_batch(values)
            else:
                before = rows.array[~mask]
                rows.write_batch(values)
                rows.array[~mask] = before

    @override
    def close(self) -> None:
        """Close the environment, and the processes of a `ParallelEnv`."""
        close_env(self._env, broken_off=self._broken_off, threads=self._threads)

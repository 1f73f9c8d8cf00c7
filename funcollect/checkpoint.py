"""Checkpoints of a whole training run: collector, buffer, networks, optimizers and plain values, in one directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optree
from tensordict import TensorDictBase

from funcollect.arguments import check_count, check_kind, check_positive
from funcollect.buffers.storages import ListStorage
from funcollect.core.saving import Episodes, check_episodes, put_back
from funcollect.core.state import flatten_part
from funcollect.files import allow, read_data, sync, write_data
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import shown
from funcollect.trajectories.stats import EpisodeStats, OpenReturn

_KIND = "the values of a checkpoint"
_NAME = re.compile(r"step-(\d+)")
allow(EpisodeStats, OpenReturn)


class Checkpoint:
    """Saves a training run from time to time, keeps the latest checkpoints, and restores one in another process.

    Each checkpoint is a directory, ``step-…``. It is written under another name and renamed last, so a crash leaves the
    previous one whole. A buffer writes only the frames that are new since the last checkpoint. Restoring executes no
    code from the files. Raises TypeError or ValueError if `directory` is no path, or `keep` is below 1.

    >>> import funcollect as fc, tempfile, torch
    >>> directory, module = tempfile.mkdtemp(), torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(module.parameters())
    >>> collector = fc.SyncDataCollector(
    ...     "CartPole-v1", fc.torch_policy(module, head=fc.heads.categorical), frames_per_batch=50, seed=0
    ... )
    >>> batch = next(collector)
    >>> checkpoint = Checkpoint(directory)
    >>> checkpoint.save(1, collector=collector, policy=module, optimizer=optimizer, best=12.5)
    >>> checkpoint.latest()
    1
    >>> checkpoint.restore(collector=collector, policy=module, optimizer=optimizer)["best"]
    12.5
    >>> collector.shutdown()
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        check_kind("directory", directory, (str, os.PathLike), "pass the name of a directory")
        check_positive("keep", keep, example=3)
        self.directory, self.keep = Path(directory), keep

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.directory)!r}, keep={self.keep})"

    def steps(self) -> list[int]:
        """The steps of the existing checkpoints, in increasing order."""
        matches = [_NAME.fullmatch(path.name) for path in self.directory.glob("step-*")]
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> int | None:
        """The step of the latest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        *,
        collector: Any = None,
        buffer: Any = None,
        policy: Any = None,
        optimizer: Any = None,
        episodes: Episodes = "continue",
        **values: Any,
    ) -> None:
        """Write a checkpoint, then delete the oldest ones. An error leaves the other checkpoints as they were.

        Args:
            step: a count that increases from one checkpoint to the next.
            collector: a collector; see its `save`.
            episodes: as `save` of the collector takes it.
            buffer: a `ReplayBuffer`; see its `dumps`.
            policy: a module or any object with `state_dict`, a pytree of parameters, or a dict of both.
            optimizer: an optimizer, a pytree such as the state of optax, or a dict of both.
            values: numbers, strings, arrays, tensors, generators of NumPy and Torch, `EpisodeStats`, and lists, tuples
                and dicts of them. A named tuple comes back as a plain tuple.

        Raises ValueError for a step that is not after the latest one, ReplayError as `save` of the collector does,
        OSError if the files cannot be written, and TypeError for a value that is no plain data, and for items of a
        `ListStorage` that are neither tensors, numbers, strings, lists, tuples and dicts of these, nor TensorDicts of
        tensors.
        """
        check_count("step", step)
        check_episodes(episodes)
        for name, value in values.items():
            if _stateful(value):
                within = f"{'optimizer' if hasattr(value, 'param_groups') else 'policy'}={{'{name}': …}}"
                mend = f"pass it within {within}, a dict of all such objects"
                raise TypeError(f"{name} is {shown(value)}, expected plain data: {mend}")
        memory = None if buffer is None else buffer.state.memory
        if memory is not None and isinstance(memory.storage, ListStorage):
            memory.storage.check_plain()
        if (latest := self.latest()) is not None and step <= latest:
            what = f"step is {step}, expected more than {latest}, that of the latest checkpoint in {self.directory}"
            raise ValueError(f"{what}: pass a later step, or another directory for another run")
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".step-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        fresh = self.directory / f".step-{step}"
        with contextlib.ExitStack() as on_error:
            on_error.callback(shutil.rmtree, fresh, ignore_errors=True)
            if memory is not None:
                on_error.callback(setattr, memory, "dumped", memory.dumped)  # otherwise it would name a deleted dump
            fresh.mkdir()
            given = {"policy": policy, "optimizer": optimizer}
            parts = {name: None if part is None else _saved(part) for name, part in given.items()}
            write_data(fresh / "values", _KIND, {"parts": parts, "values": values})
            if collector is not None:
                collector.save(fresh / "collector", episodes=episodes)
            if buffer is not None:
                earlier = [self._path(other) / "buffer" for other in reversed(self.steps())]
                buffer.dumps(fresh / "buffer", base=next(filter(Path.exists, earlier), None))
            sync(fresh)
            fresh.rename(self._path(step))
            on_error.pop_all()
        sync(self.directory)
        for old in self.steps()[: -self.keep]:
            with contextlib.suppress(OSError):  # renamed first, since a half-deleted one must not count as a checkpoint
                shutil.rmtree(self._path(old).rename(self.directory / f".step-{old}"))

    def restore(
        self,
        *,
        collector: Any = None,
        buffer: Any = None,
        policy: Any = None,
        optimizer: Any = None,
        step: int | None = None,
        episodes: Episodes = "continue",
    ) -> dict[str, Any]:
        """Read a checkpoint into objects that were built like the saved ones, and pytrees like the saved ones.

        Collectors, buffers, modules and optimizers are restored in place. So are the tensors of a pytree that require
        gradients, so that an optimizer over them still applies. `step` selects the checkpoint, by default the latest. A
        run that continues from an earlier one must save into another directory, because here its steps would not come
        after the latest. `episodes` is as in the collector's `restore`. Returns the plain values, ``"step"``, and
        ``"policy"`` and ``"optimizer"`` if they were passed: the same objects, or pytrees with the saved leaves. If a
        collector is restored without other parts that were saved, a UserWarning names these.

        Raises FileNotFoundError if there is no such checkpoint, or it lacks one of these objects, and ValueError for a
        damaged file, another version, or an object that was built differently. After an exception some objects may
        already be restored: restore them all from another checkpoint.
        """
        check_episodes(episodes)
        found = self.latest() if step is None else step
        if found is None or not self._path(found).is_dir():
            what = f"{self.directory} has the checkpoints {self.steps()}, expected {'one' if step is None else step}"
            raise FileNotFoundError(f"{what}: pass the directory and the step of one that was saved")
        path = self._path(found)
        data = read_data(path / "values", _KIND)
        given = {"policy": policy, "optimizer": optimizer, "collector": collector, "buffer": buffer}
        saved_parts = {name for name in given if data["parts"].get(name) is not None or (path / name).exists()}
        for name in (name for name, part in given.items() if part is not None):
            if name not in saved_parts:
                raise FileNotFoundError(f"{path} has no {name}: leave it out, or save it")
        if collector is not None and (missing := sorted(name for name in saved_parts if given[name] is None)):
            what = f"{path} also has {missing}, which were not passed: the run goes on with those that it has"
            warnings.warn(f"{what}; pass {'=, '.join(missing)}= to restore them", stacklevel=2)
        parts = {name: given[name] for name in ("policy", "optimizer") if given[name] is not None}
        for name, part in parts.items():
            current, saved = layouts = [_layout(plain) for plain in (_saved(part), data["parts"][name])]
            if differing := [key for key in {*current, *saved} if current.get(key, ...) != saved.get(key, ...)]:
                first = min(differing)
                now, was = (shown(layout[first]) if first in layout else "not there" for layout in layouts)
                raise ValueError(f"{name} differs from the saved one: {first} is {now}, was {was}: build it as it was")
        if collector is not None:
            collector.restore(path / "collector", episodes=episodes)
        if buffer is not None:
            buffer.loads(path / "buffer")
        restored = {name: _restored(part, data["parts"][name]) for name, part in parts.items()}
        return {**data["values"], **restored, "step": found}

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step}"


def _stateful(part: Any) -> bool:
    """Whether an object can save and load its own state, as modules, optimizers and policies can."""
    loads = hasattr(part, "load_state_dict") or hasattr(part, "load")
    return hasattr(part, "state_dict") and loads and not isinstance(part, TensorDictBase)


def _saved(part: Any) -> Any:
    """A part as plain data: the state of a module or an optimizer, those of a dict with such, or a pytree's leaves."""
    if isinstance(part, dict) and part and any(map(_stateful, part.values())):
        return {"group": {name: _saved(member) for name, member in part.items()}}
    if not _stateful(part):
        leaves, treedef = flatten_part(part)
        if isinstance(treedef, optree.PyTreeSpec):
            names = [".".join(map(str, path)) or "leaf" for path in treedef.paths()]
        else:
            names = [import_jax().tree_util.keystr(path) for path, _ in import_jax().tree.leaves_with_path(part)]
        return {"leaves": leaves, "names": names}
    state = dict(part.state_dict())
    if "param_groups" not in state:
        return {"state": state}
    shapes = [[list(parameter.shape) for parameter in group["params"]] for group in part.param_groups]
    return {"state": state, "kind": type(part).__name__, "shapes": shapes}


def _layout(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes and dtypes of a saved part by name; of an optimizer, whose state begins empty, its parameters'."""
    match saved:
        case {"group": parts}:
            layouts = {name: _layout(part) for name, part in parts.items()}
            return {f"{name}.{key}": kind for name, layout in layouts.items() for key, kind in layout.items()}
        case {"shapes": groups, "kind": kind}:
            return {"class": kind, **{f"parameters of group {number}": shapes for number, shapes in enumerate(groups)}}
    named = dict(zip(saved["names"], saved["leaves"], strict=True)) if "leaves" in saved else saved["state"]
    return {
        name: (str(value.dtype).removeprefix("torch."), *value.shape) if hasattr(value, "shape") else None
        for name, value in named.items()
    }


def _restored(part: Any, saved: Mapping[str, Any]) -> Any:
    """The part with the saved state: the same object, or a pytree like it."""
    if "group" in saved:
        return {name: _restored(member, saved["group"][name]) for name, member in part.items()}
    if "leaves" in saved:
        return put_back("leaves", part, saved["leaves"], in_place=True)
    (part.load_state_dict if hasattr(part, "load_state_dict") else part.load)(saved["state"])
    return part

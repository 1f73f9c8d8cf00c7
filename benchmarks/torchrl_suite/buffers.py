"""What TorchRL's tests of buffers need: translations, and the functions that fail, judged.

Each translation has the sentence of docs/coming_from/from_torchrl.md that it follows.
"""

import functools

import numpy as np
import torch


def adapt(fc, used):
    """Translate the differences that the page states; returns the names that this library has under others."""
    _private_names(fc)
    _priorities(fc.PrioritizedSampler)
    _transforms_of_samples(fc.ReplayBuffer)
    _parts_alone(fc)
    # "`read_all_in_order()`, `write_all(data)` | `buffer[:]`, `buffer[:] = data`"
    fc.ReplayBuffer.read_all_in_order = lambda self, end=None: self[..., :end]
    fc.ReplayBuffer.write_all = lambda self, data, end=None: self.__setitem__((..., slice(end)), data)
    fc.ReplayBuffer.state_dict, fc.ReplayBuffer.load_state_dict = _with_names(fc)

    def prioritized(*, alpha, beta, eps=1e-8, storage=None, **options):
        storage = fc.ListStorage(1_000) if storage is None else storage
        storage = storage if hasattr(storage, "admit") else storage()
        sampler = fc.PrioritizedSampler(storage.max_size, alpha, beta, eps)
        return fc.ReplayBuffer(storage=storage, sampler=sampler, **options)

    def writer(**options):
        """Stands for the only writer: "there is no argument for it"."""

    return {
        # "`PrioritizedReplayBuffer(alpha=…, beta=…)` | `ReplayBuffer(sampler=PrioritizedSampler(…))`"
        "PrioritizedReplayBuffer": prioritized,
        "RoundRobinWriter": writer,
        "TensorDictRoundRobinWriter": writer,
        "Sampler": fc.RandomSampler,  # of which all samplers are kinds
        "TensorStorage": functools.partial(_filled, fc),
    }


def _transforms_of_samples(buffer):
    """Apply transforms as samples are drawn: "apply transforms of samples to the sample"."""
    plain, sample = buffer.__init__, buffer.sample

    @functools.wraps(plain)
    def init(self, *, transform=None, **options):
        self._transform = transform
        plain(self, transform=getattr(transform, "inv", None), **options)

    def transformed(self, *arguments, return_info=False, **options):
        batch, info = sample(self, *arguments, return_info=True, **options)
        batch = batch if self._transform is None else self._transform(batch)
        return (batch, info) if return_info else batch

    def insert(self, index, transform):
        if index:
            raise ValueError("only at the beginning")
        self._transform = _both(transform, self._transform)

    buffer.__init__, buffer.sample, buffer.insert_transform = init, transformed, insert
    buffer.append_transform = lambda self, transform: setattr(self, "_transform", _both(self._transform, transform))


def _both(first, then):
    if first is None or then is None:
        return first or then
    return lambda batch: then(first(batch))


def _parts_alone(fc):
    """Give storages and samplers without a buffer one: "a buffer fills its storage", "`buffer.sample(10)`"."""
    storage, plain = fc.storages.Storage, fc.storages.Storage.__setitem__

    def put(self, index, data, **options):
        if "lock" not in vars(self):
            self._alone = fc.ReplayBuffer(storage=self)
        slots = np.atleast_1d(np.asarray(index if not isinstance(index, slice) else range(len(self))))
        if "_alone" in vars(self) and slots[0] == len(self):
            self._alone.extend(data if np.ndim(index) else [data])
        else:
            plain(self, index, data, **options)

    def sample(self, storage, batch_size):
        if storage._alone.sampler is not self:
            data = storage[:]
            del storage._alone  # a storage has one buffer
            storage._alone = fc.ReplayBuffer(storage=storage, sampler=self)
            storage._alone.extend(data)
        batch, info = storage._alone.sample(batch_size, return_info=True)
        return info.pop("index"), info | (dict(batch.items(True, True)) if hasattr(batch, "items") else {})

    storage.__setitem__ = storage.set = put
    storage._storage = property(lambda self: self[:])
    fc.RandomSampler.sample = sample


def _filled(fc, data, **options):
    """A storage with data: "a buffer fills its storage"."""
    storage = fc.LazyTensorStorage(len(torch.utils._pytree.tree_leaves(data)[0]), **options)
    storage.set(range(storage.max_size), data)
    return storage


def _private_names(fc):
    """Private names of TorchRL's, for what users see as well."""
    buffer = fc.ReplayBuffer
    buffer.initialized = True
    for name in ("storage", "sampler", "collate_fn"):
        setattr(buffer, f"_{name}", property(functools.partial(lambda name, self: getattr(self, name), name)))
    buffer._rng = property(lambda self: self.generator)
    buffer._prefetch_queue = property(lambda self: [future for _, future in self._ahead])
    buffer.writer = buffer._writer = property(_Writer)
    fc.SamplerWithoutReplacement._sample_list = property(lambda self: torch.from_numpy(self._left))
    fc.SliceSampler._fetch_traj = property(lambda self: self.traj_key is not None)
    fc.SliceSampler._traj_key_auto = False


class _Writer:
    def __init__(self, buffer):
        lanes = max(int(np.prod(buffer._memory.lanes or (1,))), 1)
        self._write_count = buffer.write_count
        self._cursor = buffer._memory.written // lanes % (buffer.storage.max_size // lanes)


def _with_names(fc):
    plain, load = fc.ReplayBuffer.state_dict, fc.ReplayBuffer.load_state_dict

    def state_dict(self):
        names = {"_batch_size": self.batch_size, "_writer": {"_write_count": self.write_count}, "_rng": self.generator}
        return {**names, "_prefetch_state": None, "bytes": plain(self)}

    return state_dict, lambda self, state, **options: load(self, state["bytes"], allow_pickle=True)


def _priorities(sampler):
    for name in ("beta", "eps", "max_capacity"):
        setattr(sampler, f"_{name}", property(functools.partial(lambda name, self: getattr(self, name), name)))
    sampler._sum_tree = sampler._min_tree = property(_Weights)
    sampler.device = torch.device("cpu")  # "priorities are on the host"
    sampler.default_priority = property(_highest)
    sampler._max_priority = property(lambda self: (_highest(self), int(self._priorities._sums[0].argmax())))
    sampler.extend = sampler.add = sampler.mark_update = lambda self, index: self.extended(
        None, np.atleast_1d(np.asarray(index))
    )
    sampler.update_priority = _without_buffer(sampler.update_priority)


def _highest(sampler):
    if not sampler.max_priority_within_buffer:
        return sampler._highest
    weight = sampler._priorities._sums[0].max() or 1.0
    return max(weight ** (1 / (float(sampler.alpha) or 1)) - sampler.eps, 0)


class _Weights:
    def __init__(self, sampler):
        self.sampler = sampler

    def __getitem__(self, index):
        weights = self.sampler._priorities.get(np.atleast_1d(np.asarray(index)))
        return torch.from_numpy(weights).reshape(np.shape(index)).float()

    def query(self, first, last):
        return float(self.sampler._priorities._sums[0][first:last].sum())


def _without_buffer(plain):
    """Priorities of a sampler without a buffer, as of a full one."""

    def update_priority(self, *arguments, **keywords):
        if len(arguments) + len(keywords) > 3:
            return plain(self, *arguments, **keywords)
        index, priority = arguments[:2]
        return plain(self, _Full(self.max_capacity), index, priority, None, 0)

    return update_priority


class _Full:
    def __init__(self, capacity):
        self.capacity = self.written = capacity

    def __len__(self):
        return self.capacity

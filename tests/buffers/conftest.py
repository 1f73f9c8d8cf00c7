"""What the tests of buffers share."""

import torch
from tensordict import TensorDict

import funcollect as fc


def numbers(count, start=0):
    return TensorDict({"x": torch.arange(start, start + count)}, [count])


def filled(data, storage=10, sampler=None, *, ndim=1, **options):
    """A buffer that holds `data`; `storage` may be the number of frames of one of tensors."""
    if isinstance(storage, int):
        storage = fc.LazyTensorStorage(storage, ndim=ndim)
    buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, **options)
    buffer.extend(data)
    return buffer

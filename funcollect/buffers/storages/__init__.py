"""Where the frames of a buffer lie: memory, a memory-mapped file, or a list of any objects."""

from funcollect.buffers.storages.memmap_storage import LazyMemmapStorage
from funcollect.buffers.storages.storage import ListStorage, Storage
from funcollect.buffers.storages.tensor_storage import LazyTensorStorage

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage"]

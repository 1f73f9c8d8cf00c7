"""Where the frames of a buffer lie: memory, a memory-mapped file, or a list of any objects."""

from funcollect.buffers.storages.row_storages import LazyMemmapStorage, LazyTensorStorage
from funcollect.buffers.storages.storage import ListStorage, Storage

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage"]

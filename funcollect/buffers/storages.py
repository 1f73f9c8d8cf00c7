"""Where the frames of a buffer lie: memory, a memory-mapped file, or a list of any objects."""

from funcollect.buffers.list_storage import ListStorage
from funcollect.buffers.memmap_storage import LazyMemmapStorage
from funcollect.buffers.row_storage import LazyTensorStorage
from funcollect.buffers.storage import Storage

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage"]

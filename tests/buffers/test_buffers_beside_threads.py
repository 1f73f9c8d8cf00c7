"""A buffer may be read at any moment while another thread extends it."""

import threading
from dataclasses import dataclass

import torch

import funcollect as fc
from funcollect.buffers import ring


def test_between_an_extend_of_the_ring_and_its_new_state(monkeypatch):
    """The rows are written by then, and the buffer does not have the new state yet."""
    looks = []

    @dataclass(frozen=True)
    class Seen(ring.RingState):
        def __post_init__(self):
            if self.version:
                looks.append((len(buffer), repr(buffer), buffer[-1].tolist(), buffer[:].tolist()))

    monkeypatch.setattr(ring, "RingState", Seen)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(5), batch_size=2)
    for start in (0, 3):
        buffer.extend(torch.arange(start, start + 3))
    assert [(count, last, len(every)) for count, _, last, every in looks] == [(3, 2, 3), (5, 4, 5)]
    assert "5 frames" in looks[1][1]


def test_no_thread_comes_between_the_slots_of_an_index_and_their_frames():
    def try_lock():
        free.append(buffer._lock.acquire(blocking=False))
        if free[-1]:
            buffer._lock.release()

    class Index(list):
        """An index in whose evaluation another thread tries to change the buffer."""

        def __array__(self, dtype=None, copy=None):
            thread = threading.Thread(target=try_lock)
            thread.start()
            thread.join()
            return torch.tensor([1]).numpy()

    free = []
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(5))
    buffer.extend(torch.arange(5))
    assert buffer[Index([1])].tolist() == [1]
    assert not any(free)
    assert free

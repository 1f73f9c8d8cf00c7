"""Ctrl-C at any moment: a buffer holds all of an extend or nothing of it, and goes on."""

import itertools
import signal
import sys
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict

import funcollect as fc

STEP = 7  # every so many lines of Python are tried


def frames(first):
    numbers = torch.arange(first, first + 6)
    counted = {"traj_ids": torch.zeros(6, dtype=torch.int64), "step": numbers}
    return TensorDict({"a": numbers, "b": numbers.float(), "collector": counted}, [6])


@contextmanager
def interrupted_after(lines):
    """Ctrl-C once so many lines of the package have run."""
    left = itertools.count(lines, -1)

    def trace(frame, event, _):
        if event == "line" and "funcollect" in frame.f_code.co_filename and next(left) == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def make(by_priority):
    sampler = fc.PrioritizedSampler(8, alpha=1.0, beta=1.0) if by_priority else fc.SliceSampler(slice_len=2)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(8), sampler=sampler, batch_size=4)
    return buffer, buffer.extend(frames(0))


def interrupted(change, by_priority):
    """The buffers whose change was interrupted at one line after another, until it ends first."""
    for lines in itertools.count(0, STEP):
        buffer, slots = make(by_priority)
        try:
            with interrupted_after(lines):
                change(buffer, slots)
            return
        except KeyboardInterrupt:
            yield buffer


@pytest.mark.parametrize("by_priority", [False, True])
def test_an_extend_is_wholly_done_or_not_at_all(by_priority):
    seen = set()
    for buffer in interrupted(lambda buffer, _: buffer.extend(frames(6)), by_priority):
        held = sorted(buffer[:]["a"].tolist())
        assert held == sorted(buffer[:]["b"].tolist())
        assert held in ([*range(6)], [*range(4, 12)])
        seen.add(len(held))
        buffer.extend(frames(held[-1] + 1))
        assert sorted(buffer[:]["a"].tolist()) == [*range(held[-1] - 1, held[-1] + 7)]
        sample = buffer.sample()
        assert (sample["a"] == sample["b"]).all()
    assert seen == {6, 8}


def test_priorities_are_all_set_or_none():
    def change(buffer, slots):
        buffer.update_priority(slots[:3], torch.zeros(3))

    for buffer in interrupted(change, True):
        drawn = {index for _ in range(30) for index in buffer.sample()["a"].tolist()}
        assert drawn in ({*range(6)}, {3, 4, 5})

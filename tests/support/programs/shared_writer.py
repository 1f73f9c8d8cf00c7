"""A process that forks writers of a shared buffer when told to; each writes until it is killed, or this process is.

Run as a script. For each line of input, a directory and the kind of writer, it forks one, which says its process id
when frames are there.
"""

import os
import signal
import sys

import torch
from tensordict import TensorDict

import funcollect as fc

CAPACITY = 500
LANES, STEPS = 3, 10  # of a batch
WIDTH = 600  # numbers of a frame; many, so that an extend takes a while
LENGTH = 25  # of each trajectory
BEHIND = LANES * torch.arange(3, -1, -1)[:, None]  # by how much the numbers in a stack of four are behind its last


def batch_of(first, stacked=False):
    """``[LANES, STEPS]``: the frames of each lane from its step `first` on; a frame's every number says which it is.

    If they are stacked, "early" is a stack of four frames, the last of which has that number.
    """
    time = torch.arange(first, first + STEPS).expand(LANES, STEPS)
    lane = torch.arange(LANES)[:, None].expand(LANES, STEPS)
    name = time * LANES + lane
    early = name[..., None].expand(LANES, STEPS, WIDTH)
    return TensorDict(
        {
            "early": early.unflatten(-1, (4, -1)) - BEHIND if stacked else early,
            "late": -name[..., None].expand(LANES, STEPS, WIDTH),
            "next": {"done": (time % LENGTH == LENGTH - 1)[..., None]},
            "collector": {"traj_ids": time // LENGTH * LANES + lane, "step": time % LENGTH, "lane": lane},
        },
        [LANES, STEPS],
    )


def write(directory, kind, parent):
    stacked = kind == "stacked"
    storage = fc.LazyMemmapStorage(CAPACITY, scratch_dir=directory, ndim=2, frame_stack=4 if stacked else None)
    if kind == "careless":  # says that all is whole, always
        announce = storage._announce
        storage._announce = lambda _, written: announce(0, written)
    buffer = fc.ReplayBuffer(storage=storage)
    first = 0
    while os.getppid() == parent:
        buffer.extend(batch_of(first, stacked))
        first += STEPS
        if first == STEPS * (CAPACITY // (LANES * STEPS) + 1):  # it is full
            print(os.getpid(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
    parent = os.getpid()
    for line in sys.stdin:
        directory, kind = line.split()
        if not os.fork():
            write(directory, kind, parent)
            os._exit(0)

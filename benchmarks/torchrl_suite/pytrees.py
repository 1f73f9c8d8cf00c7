"""Segment trees in Torch, for TorchRL where its C++ extension was built for another version of Torch."""

import torch


class _Tree:
    identity, dtype = 0.0, torch.float32

    def __init__(self, size):
        self.size_ = size
        self.values = torch.full((1 << size.bit_length(),), self.identity, dtype=self.dtype)  # more, as in C++

    @property
    def size(self):
        return self.size_

    def __len__(self):
        return self.size_

    def __getitem__(self, index):
        if isinstance(index, int):
            return self.values[index].item()
        found = self.values[torch.as_tensor(index)].clone()
        return found if isinstance(index, torch.Tensor) else found.numpy()

    def __setitem__(self, index, value):
        index = torch.as_tensor(index)
        value = torch.as_tensor(value, dtype=self.dtype)
        if value.numel() == 1:
            self.values[index] = value.reshape(()).item()
            return
        for slot, each in zip(index.reshape(-1).tolist(), value.reshape(-1).tolist(), strict=True):
            self.values[slot] = each  # in this order, also for a slot that is there twice

    update = __setitem__

    def at(self, index):
        return self[index]

    def query(self, left, right):
        if getattr(left, "ndim", 0):
            bounds = zip(left.tolist(), right.tolist(), strict=True)
            return torch.stack([self._reduce(self.values[first:last]) for first, last in bounds])
        return self._reduce(self.values[int(left) : int(right)]).item()


class _Sum(_Tree):
    @staticmethod
    def _reduce(v):
        return v.sum()

    def scan_lower_bound(self, mass):
        cumulative = self.values.double().cumsum(0)
        if isinstance(mass, (int, float)):
            return int(torch.searchsorted(cumulative, torch.as_tensor(float(mass), dtype=torch.double)))
        found = torch.searchsorted(cumulative, torch.as_tensor(mass).double()).clamp_max(self.size_ - 1)
        return found if isinstance(mass, torch.Tensor) else found.numpy()


class _Min(_Tree):
    identity = float("inf")

    @staticmethod
    def _reduce(v):
        return v.min() if v.numel() else torch.tensor(float("inf"))


def install():
    """Put the trees where TorchRL's samplers look for them."""
    from torchrl.data.replay_buffers import samplers
    from torchrl.data.replay_buffers.samplers import prioritized

    for module in (prioritized, samplers):
        for kind, cls in (("Sum", _Sum), ("Min", _Min)):
            for bits, dtype in ((32, torch.float32), (64, torch.float64)):
                name = f"{kind}SegmentTreeFp{bits}"
                setattr(module, name, type(name, (cls,), {"dtype": dtype}))

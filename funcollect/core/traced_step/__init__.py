"""One traced step over all lanes, used by the fused loop, the crossing loop and `traced`."""

"""Replay buffers: packed rows, the ring over them, storages, samplers, `ReplayBuffer`."""

"""The samplers of a `ReplayBuffer`."""

from funcollect.buffers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from funcollect.buffers.uniform import RandomSampler, Sampler, SamplerWithoutReplacement, SliceSampler

__all__ = [
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
]

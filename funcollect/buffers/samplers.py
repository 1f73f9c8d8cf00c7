"""The samplers of a `ReplayBuffer`."""

from funcollect.buffers.multi_step import MultiStepSampler
from funcollect.buffers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from funcollect.buffers.uniform import RandomSampler, Sampler, SamplerWithoutReplacement, SliceSampler

__all__ = [
    "MultiStepSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
]

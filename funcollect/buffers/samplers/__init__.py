"""The samplers of a `ReplayBuffer`."""

from funcollect.buffers.samplers.multi_step import MultiStepSampler
from funcollect.buffers.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from funcollect.buffers.samplers.uniform import RandomSampler, Sampler, SamplerWithoutReplacement, SliceSampler

__all__ = [
    "MultiStepSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
]

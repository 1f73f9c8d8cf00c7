"""The samplers of a `ReplayBuffer`."""

from funcollect.buffers.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from funcollect.buffers.samplers.uniform import (
    MultiStepSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
)

__all__ = [
    "MultiStepSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
]

"""Samplers for `ReplayBuffer`, which choose the frames of a sample: uniformly, in slices, or by priority."""

from funcollect.buffers.indices import Sampler
from funcollect.buffers.prioritized_samplers import PrioritizedSampler, PrioritizedSliceSampler
from funcollect.buffers.single_frames import RandomSampler, SamplerWithoutReplacement
from funcollect.buffers.slice_samplers import MultiStepSampler, SliceSampler, SliceSamplerWithoutReplacement

__all__ = [
    "MultiStepSampler", "PrioritizedSampler", "PrioritizedSliceSampler", "RandomSampler", "Sampler",
    "SamplerWithoutReplacement", "SliceSampler", "SliceSamplerWithoutReplacement",
]  # fmt: skip

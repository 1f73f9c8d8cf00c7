"""What a policy on a TensorDict wrote at a step, it finds at the next one, in actors too."""

from __future__ import annotations

from typing import Any

import torch

import funcollect as fc
from tests.support.running import FORKS_OF_RAY
from tests.support.stateful_policies import Count

pytestmark = FORKS_OF_RAY


def test_over_ray(ray_cluster: Any) -> None:
    kwargs = {"frames_per_batch": 40, "total_frames": 80, "max_frames_per_traj": 12}
    with fc.RayCollector(["CartPole-v1"] * 2, Count(), **kwargs) as collector:
        for batch in collector:
            later = batch["collector", "traj_ids"] % 2**40 > 1
            assert torch.equal(batch["count"], batch["collector", "step"] + later.long())

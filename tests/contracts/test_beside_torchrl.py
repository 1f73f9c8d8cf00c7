"""What was once wrong in silence, beside TorchRL's collector in the same process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

import funcollect as fc
from tests.support.policies.changing import CHANGES, TENSOR_CHANGES, TensorNet, expected

pytestmark = [
    pytest.mark.needs("torchrl"),
    pytest.mark.filterwarnings("ignore:Creating .*WeightUpdater:DeprecationWarning"),
]


@contextmanager
def both(make_env: Any, policy: Any, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """TorchRL's collector and ours, over environments of TorchRL's."""
    from torchrl.collectors import Collector

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchRL, about its next versions
        theirs = Collector(make_env(), policy, trust_policy=True, **kwargs)
    ours = fc.SyncDataCollector(make_env(), policy, **kwargs)
    try:
        yield theirs, ours
    finally:
        theirs.shutdown()
        ours.shutdown()


def cartpole() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def test_a_changed_module_acts_in_both() -> None:
    torch.manual_seed(0)
    net = TensorNet()
    policy = TensorDictModule(net, ["observation"], ["action", "logits"])
    policy.forward = lambda td: td.update(net(td["observation"]))
    with both(cartpole, policy, frames_per_batch=8, total_frames=-1) as (theirs, ours):
        batches = [iter(theirs), iter(ours)]
        for what, change in (CHANGES | TENSOR_CHANGES).items():
            change(net)
            for batch in map(next, batches):
                torch.testing.assert_close(batch["logits"], expected(net, batch), msg=f"after {what}")
                assert torch.equal(batch["action"], batch["logits"].argmax(-1)), what


class ShowsQpos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has MuJoCo's own array in each info, which the next step writes; or a copy."""

    def __init__(self, env: Any, *, copied: bool) -> None:
        super().__init__(env)
        self._copied = copied

    def _shown(self, info: dict[str, Any]) -> dict[str, Any]:
        qpos = self.unwrapped.data.qpos  # type: ignore[attr-defined]
        return {**info, "qpos": qpos.copy() if self._copied else qpos}

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return observation, self._shown(info)

    def step(self, action: Any) -> Any:
        *answer, info = self.env.step(action)
        return *answer, self._shown(info)


def test_infos_are_those_of_their_steps_as_in_torchrl_if_the_environment_copies_them() -> None:
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper
    from torchrl.envs.libs.gym import default_info_dict_reader

    def pendulum(copied: bool = False) -> Any:
        return ShowsQpos(gymnasium.make("InvertedPendulum-v5", reset_noise_scale=0.0), copied=copied)

    def push(td: Any) -> Any:
        return td.set("action", torch.full((*td.batch_size, 1), 0.5))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = GymWrapper(pendulum(copied=True))
        env.set_info_dict_reader(default_info_dict_reader(["qpos"]))
        theirs = next(iter(Collector(env, push, frames_per_batch=20, total_frames=20, trust_policy=True)))
    kwargs = {"info_keys": ["qpos"]}
    with fc.SyncDataCollector(pendulum, push, frames_per_batch=20, create_env_kwargs=kwargs) as collector:
        ours = next(collector)
    np.testing.assert_allclose(ours["next", "info", "qpos"], theirs["next", "qpos"], rtol=1e-6)
    assert len(ours["next", "info", "qpos"][:5].unique(dim=0)) == 5


@pytest.mark.parametrize("frames", [0, 1, 50, 60, 100, 101])
def test_as_many_frames_are_random_in_both(frames: int) -> None:
    def right(td: Any) -> Any:
        return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))

    def counted(batches: Any) -> int:
        return sum(batch.numel() for batch in batches if not batch["action"].all())

    with both(cartpole, right, frames_per_batch=50, total_frames=300, init_random_frames=frames) as (theirs, ours):
        assert counted(ours) == counted(theirs) == -(-frames // 50) * 50

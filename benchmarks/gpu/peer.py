"""TorchRL's collector over the same CartPole in Torch and the same network; its policy eager, compiled or captured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from benchmarks.contestants.peers import Batches
from benchmarks.gpu.torch_loop import Draws


class Choice(torch.distributions.Categorical):
    """A categorical distribution that reads no value on the host, as `multinomial` and the checks of arguments do."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)  # type: ignore[no-untyped-call]

    @property
    def deterministic_sample(self) -> Tensor:
        return self.mode

    def sample(self, sample_shape: Any = ()) -> Tensor:
        noise = torch.empty_like(self.logits).exponential_()
        return (self.logits - noise.log()).argmax(-1)


class Finished(Batches):
    """Batches that are complete on the device, not only queued."""

    def run(self) -> int:
        frames = super().run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return frames


CAPTURED = "TorchRL, captured policy"
WAYS: dict[str, dict[str, Any]] = {
    "TorchRL": {},
    "TorchRL, compiled policy": {"compile_policy": True},
    CAPTURED: {"cudagraph_policy": True},
}


def ways(device: str) -> Sequence[str]:
    """The names of TorchRL's ways to run the policy; on a CPU the first one alone."""
    return list(WAYS)[: None if device == "cuda" else 1]


def collector(env: Any, module: nn.Module, length: int, **options: Any) -> Finished:
    """TorchRL's collector; a batch has `length` steps of all lanes."""
    from torchrl.collectors import Collector
    from torchrl.modules import ProbabilisticActor

    policy = ProbabilisticActor(
        TensorDictModule(module, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=Choice,
        return_log_prob=True,
    )
    return Finished(
        Collector(
            torchrl_env(env),
            policy,
            frames_per_batch=length * env.num_envs,
            total_frames=-1,
            device=env.device,
            auto_register_policy_transforms=False,
            **options,
        )
    )


def torchrl_env(env: Any) -> Any:
    """A `funcollect.envs` CartPole as TorchRL's `EnvBase`, with the dynamics called directly."""
    from torchrl.data import Binary, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase

    lanes, device = env.num_envs, env.device
    keep = partial(torch.zeros, lanes, 1, device=device)

    class Lanes(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(device=device, batch_size=[lanes])
            place = Unbounded((lanes, 4), device=device, dtype=torch.float64)
            seen, count = Unbounded((lanes, 4), device=device), Unbounded((lanes, 1), device=device, dtype=torch.int64)
            self.observation_spec = Composite(observation=seen, place=place, elapsed=count, shape=(lanes,))
            self.action_spec = Categorical(2, shape=(lanes,), device=device)
            self.reward_spec = Unbounded((lanes, 1), device=device)
            flag = partial(Binary, 1, shape=(lanes, 1), dtype=torch.bool, device=device)
            self.full_done_spec = Composite(done=flag(), terminated=flag(), truncated=flag(), shape=(lanes,))

        def _reset(self, tensordict: Any = None, **_: Any) -> Any:
            place, observation = env.reset(Draws(torch.arange(lanes, device=device)), None)
            elapsed = keep(dtype=torch.int64)
            if tensordict is not None and {"_reset", "place"} <= set(tensordict.keys()):
                mask = tensordict["_reset"]
                place = torch.where(mask, place, tensordict["place"])
                observation = torch.where(mask, observation, tensordict["observation"])
                elapsed = torch.where(mask, elapsed, tensordict["elapsed"])
            return self._answer(place, observation, elapsed, keep(dtype=torch.bool), keep(dtype=torch.bool))

        def _step(self, tensordict: Any) -> Any:
            place, observation, reward, terminated, *_ = env.step(None, tensordict["place"], tensordict["action"], None)
            elapsed = tensordict["elapsed"] + 1
            answer = self._answer(place, observation, elapsed, terminated[:, None], elapsed >= env.max_episode_steps)
            return answer.set("reward", reward[:, None])

        def _answer(
            self, place: Tensor, observation: Tensor, elapsed: Tensor, terminated: Tensor, truncated: Tensor
        ) -> Any:
            flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
            leaves = {"place": place, "observation": observation, "elapsed": elapsed, **flags}
            return TensorDict(leaves, [lanes], device=device)

        def _set_seed(self, seed: int | None) -> None:
            torch.manual_seed(0 if seed is None else seed)

    return Lanes()

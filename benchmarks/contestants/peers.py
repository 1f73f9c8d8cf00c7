"""Other libraries at the same work, set up as their documentation advises; imported only when they are built."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from benchmarks.contestants.networks import discrete, torch_module


class Batches:
    """A collector, ours or TorchRL's: one batch per run."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self._batches = iter(collector)

    def run(self) -> int:
        return int(next(self._batches).numel())

    def close(self) -> None:
        self._collector.shutdown()


class Rollouts:
    """Our rollouts, state in and state out."""

    def __init__(self, env: Any, policy: Any, length: int) -> None:
        import funcollect as fc

        self._env, self._policy, self._length = env, policy, length
        self._state = fc.init(env, policy, seed=0)
        self._rollout, self._close = fc.rollout, fc.close

    def run(self) -> int:
        self._state, batch = self._rollout(self._env, self._policy, self._state, self._length)
        return int(batch.numel())

    def close(self) -> None:
        self._close(self._state)


class Float(nn.Module):
    """TorchRL hands on float64 observations as they are; a cast in the network costs less than its transform."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Tensor) -> Any:
        return self.module(observation.float())


def torchrl_collector(env_id: str, num_envs: int, length: int, *, random: bool) -> Batches:
    """TorchRL's single-process collector over `GymEnv` or `SerialEnv`; without a device, which is faster than "cpu"."""
    from torchrl.collectors import Collector

    return Batches(
        Collector(
            torchrl_env(env_id, num_envs),
            None if random else torchrl_actor(env_id),
            frames_per_batch=length * num_envs,
            total_frames=-1,
            device=None,
            auto_register_policy_transforms=False,
        )
    )


def torchrl_env(env_id: str, num_envs: int) -> Any:
    """`GymEnv`, or a `SerialEnv` of several."""
    from torchrl.envs import GymEnv, SerialEnv

    def make() -> Any:
        return GymEnv(env_id, categorical_action_encoding=True, device=None)

    return make() if num_envs == 1 else SerialEnv(num_envs, make)


def torchrl_actor(env_id: str) -> Any:
    """TorchRL's `ProbabilisticActor` around the network."""
    env = gymnasium.make(env_id)
    actor = probabilistic_actor(torch_module(env), choices=discrete(env))
    env.close()
    return actor


def probabilistic_actor(module: nn.Module, *, choices: bool) -> Any:
    """TorchRL's `ProbabilisticActor` around a module that gives logits, or loc and scale."""
    from tensordict.nn import TensorDictModule
    from torchrl.modules import IndependentNormal, ProbabilisticActor

    keys = ["logits"] if choices else ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(module if choices else Float(module), in_keys=["observation"], out_keys=keys),
        in_keys=keys,
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical if choices else IndependentNormal,
        return_log_prob=True,
    )


class TorchRLLoop:
    """The limit of TorchRL's own parts: its environment and its actor in a loop that stores nothing."""

    def __init__(self, env_id: str, num_envs: int, length: int) -> None:
        self._env = torchrl_env(env_id, num_envs)
        self._actor = torchrl_actor(env_id)
        self._root = self._env.reset()
        self._length = length
        self._frames = length * num_envs

    def run(self) -> int:
        from tensordict.nn import InteractionType, set_interaction_type

        env, actor, root = self._env, self._actor, self._root
        with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
            for _ in range(self._length):
                _, root = env.step_and_maybe_reset(actor(root))
        self._root = root
        return self._frames

    def close(self) -> None:
        self._env.close()


class StableBaselines:
    """Stable-Baselines3's PPO: one `collect_rollouts` over a vector environment per run.

    Its policy has a value network of the same size beside the actor, which it evaluates at every step.
    """

    def __init__(self, env: Any, length: int, *, pixels: bool = False) -> None:
        from stable_baselines3 import PPO

        policy: tuple[str, dict[str, Any]] = ("CnnPolicy", {}) if pixels else ("MlpPolicy", {"net_arch": [64, 64]})
        options = {"n_steps": length, "batch_size": env.num_envs * length, "policy_kwargs": policy[1]}
        self._model = PPO(policy[0], env, device="cpu", seed=0, **options)
        _, self._callback = self._model._setup_learn(total_timesteps=1)

    def run(self) -> int:
        model = self._model
        model.collect_rollouts(model.env, self._callback, model.rollout_buffer, n_rollout_steps=model.n_steps)
        return int(model.n_steps * model.n_envs)

    def close(self) -> None:
        self._model.env.close()


def dummy_loop(env_id: str, num_envs: int, length: int) -> StableBaselines:
    """The same over a `DummyVecEnv`."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    makers = [lambda: gymnasium.make(env_id, disable_env_checker=True)] * num_envs
    return StableBaselines(DummyVecEnv(makers), length)

"""PPO on HalfCheetah with normalised observations and scaled rewards, beside Stable-Baselines3 with `VecNormalize`.

Both have the same hyperparameters and networks. ``python -m benchmarks.studies.learning`` prints the mean return of the
episodes that end in each fifth of the run, for each seed, and what `evaluate` finds at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import ClipAction
from torch import Tensor, nn
from torch.nn import functional

import funcollect as fc
from benchmarks.harness.report import setting
from benchmarks.harness.runner import Options

ENVS, STEPS, EPOCHS, MINIBATCH = 8, 256, 10, 64
GAMMA, LAMBDA, RATE, CLIP = 0.99, 0.95, 3e-4, 0.2
PARTS = 5  # of a run, each with a mean return


class Actor(nn.Module):
    """The mean of the actions, and a deviation that does not depend on the observation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = network(inputs, outputs, 0.01)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Loc and scale."""
        loc = self.net(observation)
        return loc, self.log_std.exp().expand_as(loc)


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two layers of 64 units, as Stable-Baselines3 begins them."""
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make() -> Any:
    return ClipAction(gymnasium.make("HalfCheetah-v5"))


def ours(seed: int, frames: int) -> dict[str, Any]:
    """One run of funcollect."""
    torch.manual_seed(seed)
    env = fc.make_env(make, num_envs=ENVS)
    actor, critic = Actor(17, 6), network(17, 1, 1.0)
    policy = fc.normalized(
        fc.torch_policy(actor, head=fc.heads.normal), fc.running_statistics.init(env.observation_space)
    )
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], RATE, eps=1e-5)
    episodes, scaling, parts = [], None, []
    keywords = {"frames_per_batch": ENVS * STEPS, "total_frames": frames, "seed": seed, "update_statistics": True}
    with fc.SyncDataCollector(env, policy, **keywords) as collector:
        for batch in collector:
            parts.append(fc.episode_stats(batch, parts[-1] if parts else None))
            episodes += [(collector.frames, value) for value in parts[-1].returns.tolist()]
            batch["next", "reward"], scaling = fc.scale_rewards(batch, scaling, gamma=GAMMA)
            scaled = fc.running_statistics.normalize(policy.statistics, batch, clip=10.0)
            seen, after = scaled["observation"], scaled["next", "observation"]
            with torch.no_grad():
                advantage, target = fc.gae(batch, critic(seen), critic(after), gamma=GAMMA, lmbda=LAMBDA)
            rows = [
                leaf.flatten(0, 1)
                for leaf in (seen, batch["action"], batch["action_log_prob"], advantage[..., 0], target[..., 0])
            ]
            for _ in range(EPOCHS):
                for chosen in torch.randperm(ENVS * STEPS).split(MINIBATCH):
                    update(actor, critic, optimizer, *(leaf[chosen] for leaf in rows))
    final = fc.evaluate(env, policy, episodes=ENVS, seed=seed + 100)
    return result(episodes, frames, final.returns.tolist())


def update(actor: Any, critic: Any, optimizer: Any, *rows: Tensor) -> None:
    """One step of the optimizer on a minibatch."""
    observation, action, before, advantage, target = rows
    logp = torch.distributions.Normal(*actor(observation)).log_prob(action).sum(-1)
    ratio = (logp - before).exp()
    gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    loss = loss + 0.5 * functional.mse_loss(critic(observation)[:, 0], target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
    optimizer.step()


def theirs(seed: int, frames: int) -> dict[str, Any]:
    """One run of Stable-Baselines3."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

    episodes = []

    class Recorder(BaseCallback):
        def _on_step(self) -> bool:
            found = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            episodes.extend((self.num_timesteps, float(value)) for value in found)
            return True

    env = VecNormalize(VecMonitor(DummyVecEnv([lambda: gymnasium.make("HalfCheetah-v5")] * ENVS)), gamma=GAMMA)
    model = PPO(
        "MlpPolicy", env, seed=seed, n_steps=STEPS, batch_size=MINIBATCH, n_epochs=EPOCHS, gamma=GAMMA,
        gae_lambda=LAMBDA, learning_rate=RATE, clip_range=CLIP, device="cpu",
    )  # fmt: skip
    model.learn(frames, callback=Recorder())
    env.training, env.norm_reward = False, False
    returns, _ = evaluate_policy(model, env, n_eval_episodes=ENVS, return_episode_rewards=True)
    return result(episodes, frames, returns)


def result(episodes: list[tuple[int, float]], frames: int, final: list[float]) -> dict[str, Any]:
    """The mean return in each part of a run, and that of the evaluation."""
    parts = [
        [value for at, value in episodes if part * frames < at * PARTS <= (part + 1) * frames] for part in range(PARTS)
    ]
    return {"parts": [float(np.mean(part)) if part else None for part in parts], "final": float(np.mean(final))}


def main() -> None:
    """Print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "learning.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, list[Any]] = {"funcollect": [], "stable_baselines3": []}
    for seed in options.seeds:
        for name, run in (("funcollect", ours), ("stable_baselines3", theirs)):
            began = time.perf_counter()
            table[name].append(run(seed, options.frames) | {"seconds": time.perf_counter() - began})
            print(seed, name, table[name][-1], flush=True)
    for name, runs in table.items():
        columns = [[run["parts"][part] for run in runs if run["parts"][part] is not None] for part in range(PARTS)]
        columns.append([run["final"] for run in runs])
        cells = [f"{statistics.mean(column):8.0f} ± {statistics.pstdev(column):5.0f}" for column in columns if column]
        print(f"{name:20}", *cells)
    facts = setting(Options(rounds=len(options.seeds), scale=1.0, only=""))
    options.out.write_text(json.dumps({**facts, "frames": options.frames, "results": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()

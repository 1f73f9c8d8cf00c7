"""RLlib's EnvRunners, in their own virtual environment: `.venv-rllib/bin/python -m benchmarks.rllib_runners 2 2000`.

Reads lines from stdin; for each, every runner samples once, and the number of frames is written to stdout.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

FRAMEWORK = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"}


def sample(length: int, runner: Any) -> Any:
    """The episodes of `length` steps, which go to the driver."""
    return runner.sample(num_timesteps=length, random_actions=False)


def main(runners: int, length: int) -> None:
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    ray.init(num_cpus=runners + 1, include_dashboard=False, log_to_driver=False, logging_level="error")
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=runners, rollout_fragment_length=length)
        .rl_module(model_config=FRAMEWORK)
    )
    group = EnvRunnerGroup(config=config)
    for _ in sys.stdin:
        batches = group.foreach_env_runner(partial(sample, length), local_env_runner=False)
        print(sum(len(episode) for episodes in batches for episode in episodes), flush=True)
    group.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

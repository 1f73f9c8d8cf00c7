"""RLlib's EnvRunners, in their own virtual environment.

`.venv-rllib/bin/python -m benchmarks.contestants.rllib_runners 2 2000` starts 2 runners for samples of 2,000 steps.

Writes to stdout how many seconds the runners took to start and to sample once, Ray being there. Then it reads lines
from stdin; for each, every runner samples once, and the number of frames is written to stdout.
"""

from __future__ import annotations

import sys
import time
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

    ray.init(
        address="local",
        num_cpus=runners,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=runners, rollout_fragment_length=length)
        .rl_module(model_config=FRAMEWORK)
    )
    began = time.perf_counter()
    group = EnvRunnerGroup(config=config)

    def run() -> int:
        batches = group.foreach_env_runner(partial(sample, length), local_env_runner=False)
        return sum(len(episode) for episodes in batches for episode in episodes)

    run()
    print(time.perf_counter() - began, flush=True)
    for _ in sys.stdin:
        print(run(), flush=True)
    group.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

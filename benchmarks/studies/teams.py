"""Independent PPO for groups of agents, beside a loop by hand over PettingZoo's environments.

Both have the same networks and hyperparameters. The agents of a group share a network; in `simple_tag_v3`, the pursuers
and their prey learn at the same time. ``python -m benchmarks.studies.teams`` prints the mean return of an agent of each
group in each fifth of the run, over the seeds, and what an evaluation finds at the end, beside random actions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

import funcollect as fc
from benchmarks.harness.report import setting
from benchmarks.harness.runner import Options
from benchmarks.studies.learning import PARTS, network, result

LANES, STEPS, EPOCHS, MINIBATCH = 8, 128, 10, 512
GAMMA, LAMBDA, RATE, CLIP, ENTROPY = 0.95, 0.95, 1.5e-3, 0.2, 0.01
REWARD_SCALE = 0.1  # of the rewards from which both learn
EPISODES, LENGTH = 80, 25  # of an evaluation
TEAMS = {"simple_spread_v3": {"agent": 3}, "simple_tag_v3": {"adversary": 3, "agent": 1}}


class Team:
    """The networks of a group, which its agents share, and their optimizer."""

    def __init__(self, width: int, choices: int) -> None:
        self.actor, self.critic = network(width, choices, 0.01), network(width, 1, 1.0)
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], RATE, eps=1e-5)

    def update(self, *rows: Tensor) -> None:
        """One step of the optimizer on the rows [F] of a minibatch."""
        logp, before, entropy, value, gain, target = rows
        ratio, gain = (logp - before).exp(), (gain - gain.mean()) / (gain.std() + 1e-8)
        loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        loss = loss + functional.mse_loss(value, target) - ENTROPY * entropy.mean()
        self.optimizer.zero_grad()
        loss.backward()
        for part in (self.actor, self.critic):
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
        self.optimizer.step()


def minibatches(frames: int) -> Iterator[Tensor]:
    """The indices of each minibatch of all epochs."""
    for _ in range(EPOCHS):
        yield from torch.randperm(frames).split(MINIBATCH)


def ours(name: str, seed: int, frames: int) -> dict[str, Any]:
    """One run of funcollect; the result for each group."""
    torch.manual_seed(seed)
    env = fc.make_env(f"pettingzoo/mpe/{name}", num_envs=LANES)
    teams = {key: Team(group.observation_space.shape[0], group.action_space.n) for key, group in env.groups.items()}
    policies = {key: fc.torch_policy(team.actor, head=fc.heads.categorical) for key, team in teams.items()}
    policy, stats = fc.by_group(policies), dict[str, Any]()
    episodes: dict[str, list[Any]] = {key: [] for key in teams}
    keywords = {"frames_per_batch": LANES * STEPS, "total_frames": frames, "seed": seed}
    with fc.SyncDataCollector(env, policy, **keywords) as collector:
        for batch in collector:
            for key, team in teams.items():
                rows = fc.agents_as_rows(batch, key)
                stats[key] = fc.episode_stats(rows, stats.get(key))
                episodes[key] += [(collector.frames, value) for value in stats[key].returns.tolist()]
                learn(team, policies[key], rows)
    sampled = {"episodes": EPISODES, "seed": seed + 100, "exploration_type": fc.ExplorationType.RANDOM}
    final = {key: fc.evaluate(env, policy, group=key, **sampled).returns.tolist() for key in teams}
    return {key: result(episodes[key], frames, final[key]) for key in teams}


def learn(team: Team, policy: Any, rows: Any) -> None:
    """Update a group's networks on the rows [P, n, T] of its agents."""
    rows["next", "reward"] = REWARD_SCALE * rows["next", "reward"]
    with torch.no_grad():
        value, after = team.critic(rows["observation"]), team.critic(rows["next", "observation"])
    advantage, target = (leaf.flatten() for leaf in fc.gae(rows, value, after, gamma=GAMMA, lmbda=LAMBDA))
    rows = rows.flatten()
    for chosen in minibatches(len(rows)):
        some = rows[chosen]
        now = fc.evaluate_actions(policy, None, some)
        value = team.critic(some["observation"])[:, 0]
        logps = now["action_log_prob"], some["action_log_prob"]
        team.update(*logps, now["entropy"], value, advantage[chosen], target[chosen])


class Lanes:
    """PettingZoo's environments, stepped by hand."""

    def __init__(self, name: str, seed: int) -> None:
        module = importlib.import_module(f"mpe2.{name}")
        self.teams = {key: [f"{key}_{agent}" for agent in range(n)] for key, n in TEAMS[name].items()}
        self.envs = [module.parallel_env() for _ in range(LANES)]
        self.seen = [env.reset(seed=1000 * seed + lane)[0] for lane, env in enumerate(self.envs)]
        self.sums = [dict.fromkeys(env.agents, 0.0) for env in self.envs]

    def rows(self, seen: list[Any]) -> dict[str, Tensor]:
        """What the agents of each group observe, [P, n, width]."""
        columns = {key: [[row[name] for name in names] for row in seen] for key, names in self.teams.items()}
        return {key: torch.tensor(np.array(column)) for key, column in columns.items()}

    @torch.no_grad()
    def run(self, teams: dict[str, Team], steps: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """For each group, its columns [T, P, n, ...] and the returns of its agents whose episodes end."""
        columns: dict[str, Any] = {key: [] for key in teams}
        returns: dict[str, list[float]] = {key: [] for key in teams}
        for _ in range(steps):
            before = self.rows(self.seen)
            chances = {key: Categorical(logits=team.actor(before[key])) for key, team in teams.items()}
            actions = {key: chance.sample() for key, chance in chances.items()}
            found = [self._step(lane, actions, returns) for lane in range(LANES)]
            after = self.rows([seen for seen, *_ in found])
            for key, names in self.teams.items():
                logp = chances[key].log_prob(actions[key])
                outcome = torch.tensor(
                    [[[float(part[name]) for part in parts] for name in names] for _, *parts in found]
                )
                columns[key].append((before[key], actions[key], logp, *outcome.unbind(-1), after[key]))
        stacked = {key: [torch.stack(leaf) for leaf in zip(*parts, strict=True)] for key, parts in columns.items()}
        return stacked, returns

    def _step(self, lane: int, actions: dict[str, Tensor], returns: dict[str, list[float]]) -> Any:
        """What an environment returns, before its reset; the returns of an episode that ends are added."""
        env = self.envs[lane]
        groups = [zip(names, actions[key][lane].tolist(), strict=True) for key, names in self.teams.items()]
        by_name = {name: action for group in groups for name, action in group}
        self.seen[lane], reward, terminated, truncated, _ = env.step(by_name)
        found = self.seen[lane], reward, terminated, truncated
        for name, value in reward.items():
            self.sums[lane][name] += value
        if not env.agents:
            for key, names in self.teams.items():
                returns[key] += [self.sums[lane][name] for name in names]
            self.seen[lane], _ = env.reset()
            self.sums[lane] = dict.fromkeys(env.agents, 0.0)
        return found


def by_hand(name: str, seed: int, frames: int) -> dict[str, Any]:
    """One run of the loop; the result for each group."""
    torch.manual_seed(seed)
    lanes = Lanes(name, seed)
    teams = {key: Team(rows.shape[-1], 5) for key, rows in lanes.rows(lanes.seen).items()}
    episodes: dict[str, list[Any]] = {key: [] for key in teams}
    for batch in range(frames // (LANES * STEPS)):
        columns, returns = lanes.run(teams, STEPS)
        for key, team in teams.items():
            episodes[key] += [((batch + 1) * LANES * STEPS, value) for value in returns[key]]
            learn_by_hand(team, *columns[key])
    _, final = Lanes(name, seed + 100).run(teams, EPISODES // LANES * LENGTH)
    return {key: result(episodes[key], frames, final[key]) for key in teams}


def learn_by_hand(team: Team, observation: Tensor, action: Tensor, before: Tensor, *rest: Tensor) -> None:
    """Update a group's networks on columns [T, P, n, ...]."""
    reward, terminated, truncated, following = rest
    with torch.no_grad():
        value, after = team.critic(observation)[..., 0], team.critic(following)[..., 0]
    advantage, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        delta = REWARD_SCALE * reward[t] + GAMMA * after[t] * (1 - terminated[t]) - value[t]
        running = delta + GAMMA * LAMBDA * running * (1 - torch.max(terminated[t], truncated[t]))
        advantage[t] = running
    rows = [leaf.flatten(0, 2) for leaf in (observation, action, before, advantage, advantage + value)]
    for chosen in minibatches(len(rows[0])):
        seen, act, was, gain, target = (leaf[chosen] for leaf in rows)
        chance = Categorical(logits=team.actor(seen))
        team.update(chance.log_prob(act), was, chance.entropy(), team.critic(seen)[:, 0], gain, target)


def random_actions(name: str) -> dict[str, float]:
    """The mean return of an agent of each group whose agents all act at random."""
    env = fc.make_env(f"pettingzoo/mpe/{name}", num_envs=LANES)
    many = {"episodes": 5 * EPISODES, "seed": 0}  # returns of agents at random vary most
    return {key: fc.evaluate(env, fc.random_policy(env), group=key, **many).mean_return for key in env.groups}


def show(results: dict[str, Any]) -> None:
    """Print the mean and the deviation over the seeds, for each part of a run, and for the evaluation."""
    for name, table in results.items():
        for key in TEAMS[name]:
            print(f"{name}, {key}: {table['random'][key]:.1f} at random")
            for contestant in RUNS:
                runs = [run["groups"][key] for run in table[contestant]]
                columns = [
                    [run["parts"][part] for run in runs if run["parts"][part] is not None] for part in range(PARTS)
                ]
                columns.append([run["final"] for run in runs])
                cells = [f"{statistics.mean(each):7.1f} ± {statistics.pstdev(each):4.1f}" for each in columns if each]
                print(f"{contestant:12}", *cells)


RUNS = {"funcollect": ours, "by_hand": by_hand}


def main() -> None:
    """Print a table, and write the JSON after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=51_200, help="steps of an environment with all its agents")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "teams.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {name: {"random": random_actions(name)} | {run: [] for run in RUNS} for name in TEAMS}
    facts = setting(Options(rounds=len(options.seeds), scale=1.0, only=""))
    for seed in options.seeds:
        for name, table in results.items():
            for contestant, run in RUNS.items():
                began = time.perf_counter()
                groups = run(name, seed, options.frames)
                table[contestant].append({"seed": seed, "groups": groups, "seconds": time.perf_counter() - began})
                print(name, contestant, table[contestant][-1], flush=True)
        options.out.write_text(json.dumps({**facts, "frames": options.frames, "results": results}, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()

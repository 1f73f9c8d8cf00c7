"""Environments that show recorded observations whatever the actions are: every path then takes the same decisions."""

import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed


class HostReplay(fc.envs.HostEnvBase):
    """Shows ``table[:, 0]`` at first and ``table[:, t]`` after the step t of a rollout; `table` is [P, T + 1, ...]."""

    def __init__(self, observation_space, action_space, table):
        self.observation_space, self.action_space = observation_space, action_space
        super().__init__(num_envs=len(table))
        self.table = table

    def open(self):
        return ReplayedSimulators(self)

    def show(self, state, table):
        """Go on with another table, which begins where the last one ended."""
        self.table = table
        return state


class ReplayedSimulators(fc.envs.SimulatorsBase):
    """The simulators of a `HostReplay`: a counter."""

    def __init__(self, env):
        super().__init__(env)
        self.env, self.steps = env, 0

    def reset(self, lanes, seeds, /):
        self.observation["observation",][lanes] = self.env.table[lanes, 0]

    def step(self, lanes, action, /):
        self.steps += 1
        self.observation["observation",][lanes] = self.env.table[lanes, row(self.steps, self.env.table)]
        over = np.zeros(len(lanes), bool)
        return np.zeros(len(lanes)), over, over, ()


class TorchReplay(fc.envs.TorchEnvBase):
    """`HostReplay` in Torch; the table is the environment's parameters."""

    def __init__(self, observation_space, action_space, table):
        self.observation_space, self.action_space = observation_space, action_space
        self.params = torch.from_numpy(table)
        super().__init__(num_envs=len(table))

    def reset(self, key, params, /):
        return torch.zeros(len(key), dtype=torch.int64), params[:, 0]

    def step(self, key, steps, action, params, /):
        steps = steps + 1
        over = torch.zeros(len(key), dtype=torch.bool)
        return fc.envs.Transition(steps, params[torch.arange(len(key)), row(steps, params)], over.float(), over, over)

    def show(self, state, table):
        return state.replace(env_params=torch.from_numpy(table))


class JaxReplay(fc.envs.JaxEnvBase):
    """`HostReplay` in JAX; a lane finds its row of the table by the key of its first episode."""

    def __init__(self, observation_space, action_space, table, *, seed):
        self.observation_space, self.action_space = observation_space, action_space
        self.keys = [fold(key_from_seed(seed), Purpose.RESET, lane, 0) for lane in range(len(table))]
        self.params = self._parameters(table)
        super().__init__(num_envs=len(table))

    def _parameters(self, table):
        return jnp.array(self.keys, jnp.uint32), jnp.asarray(table)

    def reset(self, key, params, /):
        keys, table = params
        lane = (keys == key).all(-1).argmax()
        return (lane, jnp.int32(0)), table[lane, 0]

    def step(self, key, state, action, params, /):
        lane, steps = state
        table = params[1]
        return fc.envs.Transition((lane, steps + 1), table[lane, row(steps + 1, table)], 0.0, False, False)

    def show(self, state, table):
        return state.replace(env_params=self._parameters(table))


def row(steps, table):
    """The row of the table after so many steps in all, of which each table holds as many as it has rows but one."""
    return (steps - 1) % (table.shape[1] - 1) + 1


Replay = HostReplay | TorchReplay | JaxReplay


def replay_of(kind, env, table, seed):
    """A replay with this environment's spaces."""
    limits = (0, 255) if table.dtype == np.uint8 else (-np.inf, np.inf)
    space = spaces.Box(*limits, table.shape[2:], table.dtype.type)
    if kind == "jax":
        return JaxReplay(space, env.action_space, table, seed=seed)
    return {"host": HostReplay, "torch": TorchReplay}[kind](space, env.action_space, table)

"""Combines policies into one, with a policy for each player of a game in which one moves at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import optree
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_kind
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Noise
from funcollect.policies.base import PolicyBase, check_policy, device_of, lane_mask, select_program
from funcollect.policies.by_group import GroupPolicy, PartsActor
from funcollect.policies.jax_functions.jax_policy import check_sees_all
from funcollect.policies.numerics import of_kind
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.protocols import Actor, ActorInputs, Columns, Exploration, Policy
from funcollect.specs import PLAYER, ActionSpec, Space
from funcollect.tree import NAMESPACE, moved, select


def by_player(policies: Sequence[Policy]) -> PlayerPolicy:
    """A policy made of policies, by the number of the player for whom each acts.

    It is for games whose observation has ``current_player`` [P]: PettingZoo's turn-based ones, pgx's, and your own. All
    policies are called at each step, on the observation of the player to move, and only that player's outputs count.
    The recurrent state of a player changes only when that player moves, and is reset with each episode. All policies
    get the same noise, a function of the lane and the step. Outputs that the mover's policy lacks are zeros in a batch.

    Parameters are a dict by number, ``{"0": …, "1": …}``, and exploration has names such as ``"1.epsilon"``. One policy
    may act for several players; a frozen past self may be a `population`, with parameters for each group of lanes.

    Raises TypeError for anything but policies; `funcollect.init` raises ValueError for another number of players.

    >>> import torch, funcollect as fc
    >>> class Net(torch.nn.Linear):
    ...     def forward(self, seen):
    ...         return super().forward(seen["observation"].flatten(1).float()).where(seen["action_mask"] != 0, -1e9)
    >>> env = fc.make_env("pettingzoo/classic/tictactoe_v3", num_envs=2)
    >>> policy = by_player([fc.torch_policy(Net(18, 9), head=fc.heads.categorical), fc.random_policy(env)])
    >>> _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> batch["current_player"].shape, batch["next", "reward"].shape
    (torch.Size([2, 8]), torch.Size([2, 8, 2]))
    """
    check_kind("policies", policies, (list, tuple), "pass one for each player, in their order, such as [p, q]")
    for policy in policies:
        check_policy(policy)
        check_sees_all(policy, "a policy by_player", "one that acts alone, for every player")
    if not policies:
        raise ValueError("policies is empty, expected one for each player: pass for example [p, q]")
    return PlayerPolicy({str(number): policy for number, policy in enumerate(policies)}, ())


class PlayerPolicy(GroupPolicy):
    """See `by_player`."""

    def __init__(self, policies: Mapping[str, Policy], together: Sequence[str]) -> None:
        super().__init__(policies, together)
        known = {policy.backend for policy in policies.values() if not isinstance(policy, RandomPolicy)}
        self.backend = "jax" if known == {"jax"} else "torch"  # random ones are both

    @override
    def check(self, spec: ActionSpec, /) -> None:
        for policy in self.policies.values():
            policy.check(spec)

    def check_players(self, space: Space) -> None:
        """Raise ValueError unless an observation space has as many players as there are policies."""
        parts = space.spaces if isinstance(space, spaces.Dict) else {}
        player = parts.get(PLAYER)
        if not isinstance(player, spaces.Discrete) or player.start or int(player.n) != len(self.policies):
            observed = f"{PLAYER!r} in {player}" if player else [*parts] or space
            what = f"a policy by_player acts for {len(self.policies)} players, and the environment observes {observed}"
            mend = "pass as many policies, or take by_group for agents that move together"
            raise ValueError(f"{what}, expected a Dict with {PLAYER!r}, a Discrete with one number for each: {mend}")

    @override
    def noise(self, spec: ActionSpec, /) -> Noise | None:
        """That of the policies if they want one kind, otherwise uniform numbers for `noises`."""
        kinds = {noise for policy in self.policies.values() if (noise := policy.noise(spec)) is not None}
        if len(kinds) < 2:
            return next(iter(kinds), None)
        if any(noise.kind in ("key", "keys") for noise in kinds):
            raise PolicyError("some policies by_player take keys of JAX, expected noise of heads: give each a head")
        return Noise(kind="uniform", shape=(max(noise.words for noise in kinds),))

    def noises(self, noise: Any, spec: ActionSpec) -> dict[str, Any]:
        """The noise [..., P, *shape] of each policy, from the numbers that the method `noise` describes."""
        kinds, noises = {name: policy.noise(spec) for name, policy in self.policies.items()}, dict[str, Any]()
        is_one_kind = len({*kinds.values()} - {None}) < 2
        for name, kind in kinds.items():
            if kind is None or is_one_kind:
                noises[name] = None if kind is None else noise
            else:
                part = of_kind(kind, noise[..., : kind.words])
                noises[name] = part.reshape(*part.shape[:-1], *kind.shape)
        return noises

    @override
    def actor(self, inputs: ActorInputs, /) -> Actor:
        return PlayerActor(self, inputs)

    @override
    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        return PolicyBase.finish(self, columns, spec)

    @override
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: ActionSpec, exploration: Exploration, /
    ) -> tuple[Any, Mapping[str, Any]]:
        player, noises = observation[PLAYER], self.noises(noise, spec)
        after, outputs = {}, []
        for number, (name, policy) in enumerate(self.policies.items()):
            seen, values = self.seen_by(name, observation), self.of_group(name, exploration)
            next_state, answer = policy(params[name], state[name], seen, noises[name], spec, values)
            after[name] = select_state(policy, player != number, state[name], next_state)
            outputs.append(answer)
        return after, _chosen(player, outputs)


class PlayerActor(PartsActor):
    """The actors of all players."""

    _policy: PlayerPolicy

    @override
    def _begin(self, inputs: ActorInputs) -> dict[str, ActorInputs]:
        policy, self._player = self._policy, inputs.observation[PLAYER]
        size, device = (inputs.length, inputs.num_envs), device_of(inputs.observation)
        self._movers = torch.empty(size, dtype=torch.int64, device=device)  # the player that moves, [T, P]
        noises = policy.noises(inputs.noise, inputs.spec)
        return {name: policy.inputs_of(name, inputs, inputs.observation, noises[name]) for name in policy.policies}

    @override
    def _actor_of(self, name: str, inputs: ActorInputs) -> Actor:
        policy = self._policy.policies[name]
        if policy.remembers(inputs.policy_state):
            return _Remembering(policy, inputs, int(name))
        return policy.actor(inputs)

    @override
    def act(self, t: int) -> Any:
        self._movers[t] = torch.as_tensor(self._player)
        return _chosen(self._player, [{"action": actor.act(t)} for actor in self._actors.values()])["action"]

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        for actor in self._actors.values():
            actor.restart(lanes)

    @override
    def finish(self) -> tuple[Any, Columns]:
        finished = {name: actor.finish() for name, actor in self._actors.items()}
        states = {name: state for name, (state, _) in finished.items()}
        return states, _chosen(self._movers, [columns for _, columns in finished.values()])


class _Remembering(Actor):
    """A recurrent policy of one player, called step by step, since its state changes only where the player moves."""

    def __init__(self, policy: Policy, inputs: ActorInputs, number: int) -> None:
        self._policy, self._number, self._actor = policy, number, cast(Any, None)
        self.again(inputs)

    @override
    def again(self, inputs: ActorInputs, /) -> bool:
        self._inputs, self._state, self._held = inputs, inputs.policy_state, list[Columns]()
        return True

    @override
    def act(self, t: int) -> Any:
        inputs = self._inputs
        noise = None if inputs.noise is None else inputs.noise[t : t + 1]
        one_step = inputs._replace(policy_state=self._state, noise=noise, length=1)
        if self._actor is None or not self._actor.again(one_step):
            self._actor = self._policy.actor(one_step)
        with self._actor.running():
            action = self._actor.act(0)
            after, outputs = self._actor.finish()
        waits = torch.as_tensor(inputs.observation[PLAYER] != self._number)
        self._state = select_state(self._policy, waits, self._state, after)
        self._held.append(outputs)
        return action

    @override
    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        mask = lane_mask(lanes, self._inputs.num_envs)
        self._state = select_state(self._policy, mask, self._inputs.initial_state, self._state)

    @override
    def finish(self) -> tuple[Any, Columns]:
        return self._state, {path: torch.cat([step[path] for step in self._held]) for path in self._held[0]}


def select_state(policy: Policy, mask: Any, chosen: Any, other: Any) -> Any:
    """A policy's state: lanes of the mask [P] from `chosen`, the other lanes, and Torch's generator, from `other`."""
    if isinstance(policy, GroupPolicy):
        after = {}
        for name, part in policy.policies.items():
            n = policy.rows_in_lane(name)
            rows = mask if n == 1 else mask.repeat_interleave(n) if isinstance(mask, Tensor) else mask.repeat(n)
            after[name] = select_state(part, rows, chosen[name], other[name])
        return after
    if policy.backend == "jax":
        return select_program()(mask.numpy(force=True) if isinstance(mask, Tensor) else mask, chosen, other)
    if not isinstance(chosen, TorchPolicyState):
        return select(mask, chosen, other)
    held = chosen.carried or other.carried  # nothing before a first step, which stands for zeros
    blank = optree.tree_map(torch.zeros_like, held, namespace=NAMESPACE) if held else None
    states = [(state.recurrent, state.carried or blank) for state in (chosen, other)]
    device = next((device for device in map(device_of, states) if device.type != "cpu"), torch.device("cpu"))
    recurrent, carried = select(mask.to(device), *moved(states, device))
    return other._replace(recurrent=recurrent, carried=carried)


def _chosen(player: Any, outputs: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The outputs [..., P, ...] of the policy of the moving `player` [..., P]; zeros for outputs that it lacks."""
    chosen: dict[Any, Any] = {}
    for name in dict.fromkeys(name for answer in outputs for name in answer):
        values = {number: answer[name] for number, answer in enumerate(outputs) if name in answer}
        if len({tuple(value.shape) for value in values.values()}) > 1:
            shapes = {number: list(value.shape) for number, value in values.items()}
            raise PolicyError(f"the policies of players return {name!r} of the shapes {shapes}, expected equal ones")
        turn, *arrays = _in_one_library([player, *values.values()])
        xp: Any = torch if isinstance(turn, Tensor) else np if isinstance(arrays[0], np.ndarray) else import_jax().numpy
        for number, value in zip(values, arrays, strict=True):
            mask = (turn == number).reshape(*turn.shape, *[1] * (value.ndim - turn.ndim))
            chosen[name] = xp.where(mask, value, chosen[name] if name in chosen else xp.zeros_like(value))
    return chosen


def _in_one_library(arrays: list[Any]) -> list[Any]:
    """The arrays as tensors on the device of the first if one of them is a tensor, otherwise as they are."""
    if not any(isinstance(array, Tensor) for array in arrays):
        return arrays
    tensors = [array if isinstance(array, Tensor) else torch.from_numpy(np.array(array)) for array in arrays]
    return [tensor.to(tensors[0].device) for tensor in tensors]

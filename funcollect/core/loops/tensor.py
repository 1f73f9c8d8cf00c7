"""The loops over environments written in Torch: states are values, and all lanes step at once.

`run_captured` runs CUDA graphs of 32 steps of policy, environment and columns. A graph repeats kernels, but nothing
that Python did around them. So all that changes between launches is an argument: lanes, keys, parameters, exploration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import optree
import torch
from torch import Tensor, nn
from typing_extensions import override

from funcollect.core.batch import NEXT_FLAGS, Book, deliver, restarted
from funcollect.core.loops import eager
from funcollect.core.loops.eager import Stepper, TrajectoryLimit, inputs_of, timed
from funcollect.core.request import NOWHERE, Request, Rollout, given_starts, step_limit
from funcollect.core.state import CollectorState, first_state, origin_of
from funcollect.envs.base import checked_start, checked_transition, leaves_of
from funcollect.errors import EnvError, LoweringError
from funcollect.interop.cuda_graph import CaptureError, CudaGraph, written
from funcollect.interop.memo import memo_of
from funcollect.interop.memory import fixed, reads_together
from funcollect.keys import Key, LaneKeys, Purpose, draw_on_device, torch_generator
from funcollect.messages import shown
from funcollect.policies.torch_modules.torch_policy import TorchActor, TorchPolicy, numbers_on
from funcollect.protocols import ActorInputs, DeviceEnv, Exploration, Policy, TorchEnv, Transition
from funcollect.specs import assemble, disassemble, torch_dtype
from funcollect.tree import NAMESPACE, Path, select

Start = tuple[Any, dict[Path, Tensor]]  # state and observation [P, ...] at the start of an episode

STEPS = 32  # of one graph
_MOST_GRAPHS = 8  # cached for a policy
_ENDS = NEXT_FLAGS[:2]


def init(env: TorchEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`."""
    lane = torch.arange(first_lane, first_lane + (env.num_envs or 1), device=env.device)
    env_state, observation = _begin(env, LaneKeys.of(key, Purpose.RESET, lane, torch.zeros_like(lane)), env.params)
    check_tensors(env, observation, len(lane))
    for leaf in optree.tree_leaves(env_state, namespace=NAMESPACE):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != lane.shape:
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else shown(leaf)
            wanted = f"tensors [{len(lane)}, ...] in nodes that optree knows"
            mend = f"keep constants in params, register classes with optree in {NAMESPACE!r}"
            raise EnvError(f"the env_state that reset of {env} returned holds {got}, expected {wanted}: {mend}")
    return first_state(env, policy, key, lane, total_lanes, env_state=env_state, observation=observation)


def reset(env: TorchEnv, state: CollectorState, lanes: Tensor, *, to: Any = None, **_: bool) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]; states are values and never stale."""
    episode, held, params = state.episode + lanes, (state.env_state, dict(state.observation)), state.env_params
    if to is None:
        start = _begin(env, LaneKeys.of(state.key, Purpose.RESET, state.lane, episode), params)
    else:
        start = given_starts(env, held, to, lambda observe, states: observe(states, params), _differing, by_path)
    env_state, observation = select(lanes, start, held)
    return restarted(state, lanes, episode, env_state=env_state, observation=observation)


def _differing(one: Any, other: Any) -> str:
    def form(leaf: Any) -> Any:
        return getattr(leaf, "dtype", type(leaf)), *getattr(leaf, "shape", ())

    forms: Any = [optree.tree_map(form, tree, namespace=NAMESPACE) for tree in (one, other)]
    return "" if forms[0] == forms[1] else f"{forms[0]}, then {forms[1]}"


def run(env: TorchEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout`."""
    return eager.run(partial(TensorStepper, lanes=TensorLanes.of(state)), env, policy, state, request)


def _begin(env: TorchEnv, keys: LaneKeys, params: Any) -> Start:
    env_state, observation = checked_start(env, timed("environment", env.reset)(keys, params))
    return env_state, by_path(env, observation)


def by_path(env: TorchEnv | DeviceEnv, observation: Any) -> dict[Path, Tensor]:
    """Return the leaves of an observation by their keys in a batch; EnvError unless it has its space's structure."""
    leaves = leaves_of(env, observation, f"the observation of {type(env).__name__}")
    return {leaf.path: value for leaf, value in leaves}


def check_tensors(env: TorchEnv | DeviceEnv, root: dict[Path, Tensor], num_lanes: int) -> None:
    """Raise EnvError unless every leaf is [P, *shape] of the space's dtype."""
    for leaf in env.observation_leaves:
        shape = (num_lanes, *leaf.shape)
        _check_tensor(env, f"observation {leaf.name!r}", root[leaf.path], shape, torch_dtype(leaf.dtype))


def _check_step(env: TorchEnv | DeviceEnv, answer: Any, num_lanes: int) -> None:
    transition = checked_transition(env, answer)
    for name in ("reward", "terminated", "truncated"):
        value = getattr(transition, name)
        dtype = getattr(value, "dtype", torch.float32) if name == "reward" else torch.bool
        _check_tensor(env, name, value, (num_lanes,), dtype)
    check_tensors(env, by_path(env, transition.observation), num_lanes)


def _forms_of(answer: Any) -> list[Any] | None:
    """What `_check_step` looks at; None for no transition."""
    if not isinstance(answer, Transition):
        return None
    leaves = optree.tree_leaves(cast(Any, answer[1:5]), namespace=NAMESPACE)
    return [(getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves]


def _check_tensor(env: TorchEnv | DeviceEnv, name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != (shape, dtype):
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise EnvError(f"{name} of {env} is {got}, expected {dtype} {shape}: correct reset, step or the space")


def reads_wait(device: torch.device) -> bool:
    """Whether reading a tensor of this device would wait for all work on it, so that a loop must not do it."""
    return device.type != "cpu"


def as_read(env: TorchEnv | DeviceEnv, policy: Policy, root: dict[Path, Tensor]) -> Any:
    """Return the memory `root` in the space's structure, as the policy reads it: on the CPU, JAX reads NumPy faster."""
    in_numpy = policy.backend != "torch" and env.device.type == "cpu"
    return assemble(env.observation_space, {path: row.numpy() if in_numpy else row for path, row in root.items()})


class TensorLanes(NamedTuple):
    """All lanes between two steps, with everything that a loop needs to continue: a pytree of tensors [P, ...]."""

    env_state: Any
    env_params: Any
    observation: dict[Path, Tensor]
    lane: Tensor
    episode: Tensor
    step: Tensor  # only kept up to date where trajectories are limited
    finished: Tensor  # lanes that stay finished, bool
    steps: int | Tensor  # since the beginning of the run: an int, or int64 [1] on the device
    start_keys: tuple[Any, Any]  # each lane's key to the starts of its episodes
    step_keys: tuple[Any, Any]  # and to its steps

    @classmethod
    def of(cls, state: CollectorState, keys: Any = None) -> TensorLanes:
        """The lanes of a state, with these keys to starts and to steps, or for None those that follow from its key."""
        if keys is None:
            keys = [LaneKeys.of(state.key, each, state.lane, 0).keys for each in (Purpose.RESET, Purpose.DYNAMICS)]
        fields = state.env_state, state.env_params, dict(state.observation), state.lane, state.episode, state.step
        return cls(*fields, state.terminated | state.truncated, state.steps_made, *keys)


class TensorStepper(Stepper):
    """Steps environments whose lanes are tensors; `state` is needed only for the batch."""

    def __init__(self, env: Any, policy: Policy, state: Any, request: Request, lanes: TensorLanes) -> None:
        super().__init__(env, policy, state, request)
        self.waits = reads_wait(env.device)
        # the observation by key, each [P, ...]: the same memory throughout
        self.root = {leaf.path: fixed(lanes.observation[leaf.path]) for leaf in env.observation_leaves}
        self.observation = as_read(env, policy, self.root)
        self._most = step_limit(env, request)
        self._forms: Any = None  # shapes and dtypes of the transition that was checked last
        self._prepare(lanes)

    @override
    def again(self, state: CollectorState, request: Request) -> bool:
        if step_limit(self.env, request) != self._most:
            return False
        self.state, self.request, lanes = state, request, self._lanes
        for path, root in self.root.items():
            root.copy_(state.observation[path])
        self._prepare(TensorLanes.of(state, (lanes.start_keys, lanes.step_keys)))
        return True

    def _prepare(self, lanes: TensorLanes) -> None:
        columns, count = self._turn_page(self.root, self.root), len(self.root)
        self._reward, self._terminated, self._truncated = columns[-1], self.book.terminated, self.book.truncated
        self.roots, self._nexts = [*zip(columns, self.root.values())], columns[count:-1]  # noqa: B905
        self._lanes, self._env_state, self._episode = lanes, lanes.env_state, lanes.episode
        self._finished, self.ended = lanes.finished, self.waits or not self.request.reset_when_done
        self._limit = None if self._most is None else TrajectoryLimit(lanes.step, self._most)

    def lanes(self) -> TensorLanes:
        """The lanes after all steps."""
        length = self.request.length
        return self._lanes._replace(
            env_state=self._env_state,
            observation=self.root,
            episode=self._episode,
            step=self._lanes.step if self._limit is None else self._limit.steps(length),
            finished=self._finished,
            steps=self._lanes.steps + length,
        )

    @override
    def begin(self) -> None:
        self._move = timed("environment", self.env.step)

    @override
    def step(self, t: int, action: Any) -> Tensor | None:
        """See `Stepper`; the lanes that began another episode are returned as a mask [P]."""
        env, restarting = self.env, self.request.reset_when_done
        with torch.no_grad():
            # a copy, since an environment's state may keep it
            at_hand = isinstance(action, Tensor)
            action = action.to(env.device, copy=True) if at_hand else torch.from_numpy(np.array(action)).to(env.device)
            answer = self._answer(t, action)
            if (forms := _forms_of(answer)) != self._forms:
                _check_step(env, answer, len(self._finished))
                self._forms = forms
            truncated = answer.truncated
            if self._limit is not None:
                truncated = truncated | self._limit.reached(t)
            observed = disassemble(env.observation_space, answer.observation)
            done: Tensor = answer.terminated | truncated
            if not restarting:
                observed = select(self._finished, [column[t] for column, _ in self.roots], observed)
            for column, value in zip(self._nexts, observed, strict=True):
                column[t] = value
            self._reward[t] = answer.reward
            self._terminated[t] = answer.terminated
            self._truncated[t] = truncated
            if answer.info or self.infos:
                self._inform(t, answer)
            for root, value in zip(self.root.values(), self._continue(answer, observed), strict=True):
                root.copy_(value)
            if restarting:
                return self._restart(t, done)
            self._finished = self._finished | done
            return None

    def _inform(self, t: int, answer: Transition) -> None:
        """Record the infos of a step; EnvError unless they are like those of the rollout's first step."""
        env, info = self.env, {("next", "info", name): value for name, value in answer.info.items()}
        if t == 0:
            checked_transition(env, answer)
            self.infos = {path: value.new_empty(self.request.length, *value.shape) for path, value in info.items()}
        if info.keys() != self.infos.keys():
            first, now = ([path[-1] for path in paths] for paths in (self.infos, info))
            raise EnvError(f"the infos of {env} are {now}, expected {first} as in the steps before: return the same")
        for path, value in info.items():
            column = self.infos[path]
            _check_tensor(env, f"info {path[-1]!r}", value, tuple(column.shape[1:]), column.dtype)
            column[t] = value

    def _answer(self, t: int, action: Tensor) -> Any:
        lanes, before = self._lanes, self._env_state
        return self._move(LaneKeys(lanes.lane, lanes.step_keys, lanes.steps + t), before, action, lanes.env_params)

    def _continue(self, answer: Transition, observed: list[Tensor]) -> Iterable[Tensor]:
        """Keep the environment's state; return the observations [P, ...] that the policy reads next."""
        after = answer.env_state
        self._env_state = after if self.request.reset_when_done else select(self._finished, self._env_state, after)
        return observed

    def _restart(self, t: int, done: Tensor) -> Tensor | None:
        """Begin other episodes in the lanes of the mask `done` [P]; return it, or None if it was read and is empty."""
        if not self.waits and not bool(done.any()):
            return None
        self.ended, lanes = True, self._lanes
        self._episode = self._episode + done
        if self._limit is not None:
            self._limit.restart(t, done)
        fresh, root = _begin(self.env, LaneKeys(lanes.lane, lanes.start_keys, self._episode), lanes.env_params)
        self._env_state = select(done, fresh, self._env_state)
        for path, value in root.items():
            self.root[path].copy_(select(done, value, self.root[path]))
        return done

    @override
    def end(self, counters: dict[str, Tensor]) -> tuple[Any, dict[Path, Tensor]]:
        return self._env_state, {path: root.clone() for path, root in self.root.items()}


class _Before(NamedTuple):
    """The arguments of a graph: the lanes before its steps, and what the steps depend on."""

    lanes: TensorLanes
    recurrent: Any
    tensors: dict[str, Tensor]  # the module's parameters and buffers
    noise_keys: tuple[Any, Any]  # each lane's key to its noise
    values: dict[str, Tensor]  # of the exploration


class _After(NamedTuple):
    next: _Before  # the arguments for the next steps: mostly the memory that the graph reads, so that no copy is needed
    columns: dict[Path, Tensor]  # [K, P, ...]
    recorded: list[Tensor]  # [K, P, ...], by the policy's actor


def run_captured(env: TorchEnv, policy: Policy, state: CollectorState, request: Request) -> Rollout:
    """Implement `funcollect.rollout` by CUDA graphs."""
    assert isinstance(policy, TorchPolicy)
    if request.random_steps > state.steps_made:
        return run(env, policy, state, request)  # random actions are drawn on the host
    stepper = Stepper(env, policy, state, request)
    stepper.observation = as_read(env, policy, dict(state.observation))
    inputs = inputs_of(stepper, None)
    if inputs.policy_state.recurrent is not None:  # a graph cannot copy it from the host
        policy_state, initial_state = (part.on(env.device) for part in (inputs.policy_state, inputs.initial_state))
        inputs = inputs._replace(policy_state=policy_state, initial_state=initial_state)
    before: Any = _before(env, policy, state, inputs)
    generator, memory, recorded = inputs.policy_state.generator.clone(), list[Tensor](), list[Tensor]()
    book: Any = None
    with torch_generator(generator, env.device):
        for start in range(0, request.length, STEPS):
            steps = slice(start, min(start + STEPS, request.length))
            after, actor = _launch(env, policy, request, steps.stop - start, inputs, before)
            if book is None:
                rows = {path: column[0] for path, column in after.columns.items() if path not in _ENDS}
                book = Book(rows, single=env.num_envs is None, request=request)
                page = book.page(request.columns)
                recorded = [column.new_empty(request.length, *column.shape[1:]) for column in after.recorded]
                memory = [*page.columns, book.terminated, book.truncated, *recorded]
            torch._foreach_copy_([column[steps] for column in memory], [*after.columns.values(), *after.recorded])
            before = after.next
    with reads_together():
        counters, batch = deliver(state, request, book, page, actor.outputs_of(recorded))
        in_graph: Any = (before.lanes.env_state, before.lanes.observation, before.recurrent)
        env_state, observation, recurrent = optree.tree_map(torch.clone, in_graph, namespace=NAMESPACE)
    policy_state = inputs.policy_state._replace(recurrent=recurrent, generator=generator)
    changes = {"env_state": env_state, "observation": observation, "policy_state": policy_state, **counters}
    return state.replace(steps=state.steps_made + request.length, **changes), batch


def _before(env: TorchEnv, policy: TorchPolicy, state: CollectorState, inputs: ActorInputs) -> _Before:
    steps = torch.full((1,), state.steps_made, device=env.device)  # `torch.tensor` would wait for its copy
    lanes, recurrent = TensorLanes.of(state)._replace(steps=steps), inputs.policy_state.recurrent
    if recurrent is not None:
        recurrent = select(lanes.step == 0, inputs.initial_state.recurrent, recurrent)
    noise_keys = LaneKeys.of(state.key, Purpose.NOISE, lanes.lane, 0).keys
    values = numbers_on(inputs.exploration.values, env.device)
    return _Before(lanes, recurrent, policy.tensors(inputs.params), noise_keys, values)


def _launch(
    env: TorchEnv, policy: TorchPolicy, request: Request, length: int, inputs: ActorInputs, before: Any
) -> tuple[_After, TorchActor]:
    """Make `length` steps by a graph: one that is cached for the policy, or a new one."""
    leaves, treedef = optree.tree_flatten(before, namespace=NAMESPACE)
    function = None if isinstance(policy.module, nn.Module) else policy.module
    cache_key = (origin_of(env), length, request.step_options(env), function, policy.settings.number)
    graphs: list[tuple[Any, CudaGraph[tuple[_After, TorchActor]]]] = memo_of(policy).setdefault("graphs", [])
    for kept, graph in graphs:
        if kept == cache_key and graph.fits(leaves, treedef):
            return graph(leaves)
    request = replace(request, length=length, columns=NOWHERE)
    try:
        graph = CudaGraph(partial(_steps, env, policy, request, inputs), leaves, treedef, env.device)
    except CaptureError as error:
        what = f"compile='cudagraph' cannot capture the steps of {env!r} with this policy ({shown(error, 300)})"
        mend = "read no value of a tensor on the host and make none there, or leave compile out"
        raise LoweringError(f"{what}: {mend}") from error
    graphs[:] = [*graphs[1 - _MOST_GRAPHS :], (cache_key, graph)]
    return graph(leaves)


def _steps(
    env: TorchEnv, policy: TorchPolicy, request: Request, inputs: ActorInputs, before: _Before
) -> tuple[_After, TorchActor]:
    """Make the steps of one graph; return its results, and the actor, which names the outputs."""
    stepper = TensorStepper(env, policy, None, request, before.lanes)
    stepper.begin()
    noise = policy.noise(env.action_spec)
    steps = before.lanes.steps + torch.arange(request.length, device=env.device)
    actor = policy.actor(
        inputs._replace(
            observation=stepper.observation,
            params=before.tensors,
            policy_state=inputs.policy_state._replace(recurrent=before.recurrent),
            noise=None if noise is None else draw_on_device(noise, before.noise_keys, steps),
            exploration=Exploration(inputs.exploration.type, before.values),
            length=request.length,
        )
    )
    with actor.running():
        stepper.make_steps(actor.act, actor.restart)
        tensors = before.tensors | policy.buffers()
        following = before._replace(lanes=stepper.lanes(), recurrent=actor.recurrent, tensors=tensors)
        ends = dict(zip(_ENDS, (stepper.book.terminated, stepper.book.truncated), strict=True))
        recorded = dict(zip(stepper.book.paths, stepper.page.columns))  # noqa: B905  (the counters' paths follow)
        columns = {**stepper.infos, **recorded, **ends}
        return _After(written(before, following), columns, actor.recorded()), actor

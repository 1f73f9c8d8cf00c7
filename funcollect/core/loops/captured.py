"""The loop over Torch environments as CUDA graphs: policy, environment and columns, 32 steps by one launch.

A graph repeats kernels, and nothing that Python did around them. All that changes from one launch to the next is
therefore an argument of the graph: the lanes, keys, parameters, exploration. Which lanes begin another episode is
decided by masks, as in the plain loop on a device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from funcollect.core.batch import deliver
from funcollect.core.loops import tensor
from funcollect.core.loops.eager import step_all
from funcollect.core.loops.tensor import TensorLanes, TensorStepper, as_read
from funcollect.core.request import NOWHERE, Request, inputs_of, step_limit
from funcollect.core.state import CollectorState, origin_of
from funcollect.errors import LoweringError
from funcollect.interop.cuda_graph import CaptureError, CudaGraph, written
from funcollect.interop.memo import memo_of
from funcollect.interop.memory import reads_together
from funcollect.keys import LaneKeys, Purpose, draw_on_device, torch_generator
from funcollect.messages import shown
from funcollect.policies.torch_modules.torch_policy import TorchActor, TorchPolicy
from funcollect.protocols import ActorInputs, Exploration, Policy, TorchEnv
from funcollect.tree import NAMESPACE, Path, select

init, reset, recover, fork = tensor.init, tensor.reset, tensor.recover, tensor.fork

STEPS = 32  # of one graph
_MOST_GRAPHS = 8  # that a policy keeps


class _Before(NamedTuple):
    """What a graph reads: where its steps begin, and what holds for them."""

    lanes: TensorLanes
    recurrent: Any
    tensors: dict[str, Tensor]  # the module's parameters and buffers
    noise_keys: tuple[Any, Any]  # each lane's key to its noise
    values: dict[str, Tensor]  # of the exploration


class _After(NamedTuple):
    """What a graph computes."""

    next: _Before  # where the next steps begin: mostly the memory that the graph reads, so that nothing is copied
    columns: dict[Path, Tensor]  # [K, P, ...]
    recorded: list[Tensor]  # of the policy


def run(env: TorchEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    assert isinstance(policy, TorchPolicy)
    if request.random_steps > state.steps_made:
        return tensor.run(env, policy, state, request)  # random actions are drawn on the host
    inputs = inputs_of(env, policy, state, request, as_read(env, policy, dict(state.observation)), None)
    if inputs.policy_state.recurrent is not None:  # which a graph cannot copy from the host
        policy_state, initial_state = (each.on(env.device) for each in (inputs.policy_state, inputs.initial_state))
        inputs = replace(inputs, policy_state=policy_state, initial_state=initial_state)
    before: Any = _begin(env, policy, state, inputs)
    generator = inputs.policy_state.generator.clone()
    columns: dict[Path, Tensor] = {}
    recorded: list[Tensor] = []
    with torch_generator(generator, env.device):
        for start in range(0, request.length, STEPS):
            steps = slice(start, min(start + STEPS, request.length))
            leaves, treedef = optree.tree_flatten(before, namespace=NAMESPACE)
            after, actor = _graph(env, policy, request, steps.stop - start, inputs, leaves, treedef)(leaves)
            if start == 0:
                columns = {path: request.column(path, column[0]) for path, column in after.columns.items()}
                recorded = [column.new_empty(request.length, *column.shape[1:]) for column in after.recorded]
            rows = [column[steps] for column in (*columns.values(), *recorded)]
            torch._foreach_copy_(rows, [*after.columns.values(), *after.recorded])
            before = after.next
    with reads_together():
        counters, batch = deliver(env, state, request, columns, actor.outputs_of(recorded), on_host=False)
        own: Any = (before.lanes.env_state, before.lanes.observation, before.recurrent)
        env_state, observation, recurrent = optree.tree_map(torch.clone, own, namespace=NAMESPACE)
    return state.replace(
        env_state=env_state,
        observation=observation,
        policy_state=inputs.policy_state._replace(recurrent=recurrent, generator=generator),
        steps=state.steps_made + request.length,
        **counters,
    ), batch


def _begin(env: TorchEnv, policy: TorchPolicy, state: CollectorState, inputs: ActorInputs) -> _Before:
    """What the first graph reads."""
    steps = torch.full((1,), state.steps_made, device=env.device)  # `torch.tensor` would wait for its copy
    lanes = TensorLanes.of(state)._replace(steps=steps)
    recurrent = inputs.policy_state.recurrent
    if recurrent is not None:
        recurrent = select(lanes.step == 0, inputs.initial_state.recurrent, recurrent)
    values = {name: torch.full((), value, device=env.device) for name, value in inputs.exploration.values.items()}
    noise_keys = LaneKeys.of(state.key, Purpose.NOISE, lanes.lane, 0).keys
    return _Before(lanes, recurrent, policy.tensors(inputs.params), noise_keys, values)


def _graph(
    env: TorchEnv,
    policy: TorchPolicy,
    request: Request,
    length: int,
    inputs: ActorInputs,
    leaves: list[Any],
    treedef: Any,
) -> CudaGraph[tuple[_After, TorchActor]]:
    """The graph of `length` steps from a `_Before`, given flat: of those that the policy keeps, or a new one."""
    function = None if isinstance(policy.module, nn.Module) else policy.module
    key = (origin_of(env), length, request.max_frames_per_traj, request.reset_when_done)
    which = (*key, request.exploration_type, function, policy.settings)
    graphs: list[tuple[Any, CudaGraph[tuple[_After, TorchActor]]]] = memo_of(policy).setdefault("graphs", [])
    for kept, graph in graphs:
        if kept == which and graph.fits(leaves, treedef):
            return graph
    request = replace(request, length=length, columns=NOWHERE)
    try:
        graph = CudaGraph(partial(_steps, env, policy, request, inputs), leaves, treedef, env.device)
    except CaptureError as error:
        raise LoweringError(
            f"compile='cudagraph' cannot capture the steps of {env!r} with this policy ({shown(error, 300)}): read no "
            "value of a tensor on the host and make none there, in the environment and in the module, or leave compile "
            "out"
        ) from error
    graphs[:] = [*graphs[1 - _MOST_GRAPHS :], (which, graph)]
    return graph


def _steps(
    env: TorchEnv, policy: TorchPolicy, request: Request, inputs: ActorInputs, before: _Before
) -> tuple[_After, TorchActor]:
    """Make the steps of one graph; return its results, and the actor, which knows the outputs by name."""
    stepper = TensorStepper(env, policy, None, request, before.lanes, step_limit(env, request))
    stepper.begin()
    noise = policy.noise(env.action_spec)
    steps = before.lanes.steps + torch.arange(request.length, device=env.device)
    actor = policy.actor(
        replace(
            inputs,
            observation=stepper.observation,
            params=before.tensors,
            policy_state=inputs.policy_state._replace(recurrent=before.recurrent),
            noise=None if noise is None else draw_on_device(noise, before.noise_keys, steps),
            exploration=Exploration(inputs.exploration.type, before.values),
            length=request.length,
        )
    )
    with actor.running():
        step_all(stepper, actor, request.length)
        following = before._replace(
            lanes=stepper.lanes(), recurrent=actor.recurrent, tensors=before.tensors | policy.buffers()
        )
        return _After(written(before, following), stepper.columns, actor.recorded()), actor

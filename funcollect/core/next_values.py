"""Computes the values of next observations with few calls of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from funcollect.arguments import check_key
from funcollect.core import evaluate_actions as acting
from funcollect.core.evaluate_actions import TIME_MAJOR, Leaves
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.messages import kind_of
from funcollect.policies.base import recurrent_names, split_answer
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.numerics import TORCH, jax_numerics
from funcollect.policies.tensordict_modules.calling import INIT, reads_what_it_wrote
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType, assemble
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import LANE, MASK, STEP, TRAJECTORY_IDS, check_single_steps
from funcollect.tree import Path, as_path, flatten, moved

_FEWEST = 32  # rows in one call of a network in JAX
_DONE: tuple[Path, ...] = (("done",), ("next", "done"))
_Outputs = Callable[[Any, Leaves], Mapping[str, Any]]  # from parameters and rows [N, ...] to the outputs by name


def next_values(
    policy: Policy, params: Any, batch: Mapping[str, Any], key: str | Path = "state_value", *, env: Env | None = None
) -> Any:
    """Return the values of a batch's next observations, for `gae` and similar functions, without gradients.

    Where the next row continues the trajectory, its value ``batch[key]`` is copied. The network runs only for the other
    rows: ends, cuts, and the last step. If ``batch[key]`` was computed with `params`, the result equals that of a
    second pass over all next observations. A recurrent policy has to be made with ``record_state=True``: for these
    rows, it repeats the step and then acts on the next observation.

    `policy` comes from `torch_policy`, `jax_policy` or `tensordict_policy`, and returns the value under `key`. `params`
    None stands for its own; `env` is as for `evaluate_actions`. The `batch` has whole rows of time: a TensorDict
    [*B, T], also with ``compact_obs``; for a policy in JAX, `funcollect.interop.to_jax` of that, or the result of
    `funcollect.traced.rollout`, also inside `jit`.

    Returns the values [*B, T, 1], or [T, P] for a batch of `funcollect.traced`, as `gae` takes them; 0 in padding.
    Raises TypeError, ValueError or PolicyError for a policy, a batch or outputs without what is needed.

    >>> import torch, funcollect as fc
    >>> network = lambda x: {"logits": x[:, :2], "state_value": x.sum(-1, keepdim=True)}
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.torch_policy(network, head=fc.heads.categorical)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    >>> torch.equal(next_values(policy, None, batch), batch["next", "observation"].sum(-1, keepdim=True))
    True
    """
    acting.check_arguments(policy, batch, env)
    check_key("key", key, required=True)
    in_torch = isinstance(policy, TorchPolicy | TensorDictPolicy)
    space = acting.spaces_of(policy, env) if in_torch or isinstance(policy, FunctionPolicy) else None
    if space is None or _carries(policy, space):
        wanted = f"torch_policy, jax_policy, or tensordict_policy over a TensorDictModule, that returns {key!r}"
        raise TypeError(f"policy is {kind_of(policy)}, expected one of {wanted}: pass that")
    check_single_steps(batch)
    path = as_path(key)
    rows = flatten(next_observations(batch) if isinstance(batch, TensorDictBase) else batch)
    xp = TORCH if in_torch else jax_numerics()
    needed, outputs = _reading(xp, policy, space)
    if lacking := [".".join(each) for each in (path, *needed) if each not in rows and each[0] != "next"]:
        wanted = "the policy's value under key, and its recurrent states"
        mend = "return the value from the network, pass key=, make the policy with record_state=True"
        raise ValueError(f"the batch lacks {lacking}, expected {wanted}: {mend}")
    acting.check_keys(xp, rows, [path, LANE, STEP, *needed])
    known = {path, LANE, STEP, TRAJECTORY_IDS, MASK, TIME_MAJOR, *_DONE, *needed}
    rows = {each: rows[each] for each in known if each in rows}

    def values_of(params: Any, rows: Leaves, like: Any) -> Any:
        """The values of the next observations of rows [N, ...], with the last dimensions and the dtype of `like`."""
        found = outputs(params, rows)
        if (name := ".".join(path)) not in found:
            raise PolicyError(f"the policy's outputs are {sorted(found)}, expected {name!r}: return it under that name")
        return xp.cast(found[name].reshape(-1, *like.shape[1:]), like.dtype)

    if isinstance(policy, TorchPolicy | TensorDictPolicy):
        with torch.no_grad():
            values, missing, flat, shape = _from_next_rows(xp, path, needed, rows)
            if len(index := missing.nonzero()[:, 0]):
                picked: Any = {path: leaf[index] for path, leaf in flat.items()}
                picked = moved(picked, policy.run_device) if policy.run_device else picked
                values[index] = values_of(params, picked, values).to(values.device)
            return values.reshape(shape)
    traced = any(isinstance(leaf, import_jax().core.Tracer) for leaf in import_jax().tree.leaves(params))
    program = compiled(policy, ("next values", path, id(space[0])), partial(_in_jax, values_of, path, needed))
    return program(params if traced else policy.prepare(params), rows)


def _carries(policy: Any, spaces: acting.Spaces) -> bool:
    """Whether a module reads keys that it wrote in the step before, which a batch does not hold."""
    roots = [leaf.path for leaf in spaces[1]]
    return isinstance(policy, TensorDictPolicy) and reads_what_it_wrote(policy.module, {*roots, *policy.hidden_states})


def _reading(xp: Any, policy: Any, spaces: acting.Spaces) -> tuple[list[Path], _Outputs]:
    """The keys of the batch that are read, and the function that returns the outputs for the next observations."""
    space, roots = spaces[0], [leaf.path for leaf in spaces[1]]
    nexts = [("next", *root) for root in roots]

    def observation(rows: Leaves, paths: Sequence[Path]) -> Any:
        return assemble(space, {root: rows[path] for root, path in zip(roots, paths, strict=True)})

    if isinstance(policy, TensorDictPolicy):  # the batch has its hidden states after each step
        after = dict(policy.written) | ({INIT: ("next", *INIT)} if policy.reads_init and INIT not in roots else {})

        def of_tensordict(params: Any, rows: Leaves) -> Mapping[str, Any]:
            module, hidden = policy.bound(policy.prepare(params)), {path: rows[key] for path, key in after.items()}
            answer = policy.call_module(module, observation(rows, nexts), hidden or None, ExplorationType.DETERMINISTIC)
            return {".".join(path): leaf for path, leaf in flatten(answer).items()}

        return [*nexts, *after.values()], of_tensordict
    state = policy.initial_state
    names: list[Path] = [] if state is None else [(name,) for name in recurrent_names(xp.leaves(state))]

    def of_network(params: Any, rows: Leaves) -> Mapping[str, Any]:
        network, recurrent, columns = acting.network_of(policy, params), None, iter(names)
        if names:
            recurrent = network(observation(rows, roots), xp.map(lambda _: rows[next(columns)], state))[1]
        return split_answer(network(observation(rows, nexts), recurrent)[0], policy.head)[1]

    return [*nexts, *names, *(roots if names else [])], of_network


def _from_next_rows(xp: Any, path: Path, needed: Sequence[Path], rows: Leaves) -> tuple[Any, Any, dict[Path, Any], Any]:
    """For all N frames, flat: the next rows' values, a mask [N] of missing ones, the inputs; and the result's shape."""
    lead, value = tuple(rows[LANE].shape), rows[path]
    turn, back = acting.turning(rows, lead)
    by_time, last, tail = turn(value), turn(rows[LANE])[:1], tuple(value.shape[len(lead) :])
    values = back(xp.join([by_time[1:], by_time[:1]])).reshape(-1, *tail)
    missing = back(xp.join([acting.breaks(turn, rows), last == last])).reshape(-1)
    if {*_DONE} <= {*rows}:  # an agent may end while its lane, and so its trajectory id, goes on
        missing = missing | (rows["next", "done"] & ~rows["done",]).reshape(-1)
    if MASK in rows:
        mask = rows[MASK].reshape(-1)
        missing, values = missing & mask, xp.select(mask, values, values * 0)
    flat = {path: rows[path].reshape(len(values), *rows[path].shape[len(lead) :]) for path in needed}
    return values, missing, flat, lead + (() if TIME_MAJOR in rows and math.prod(tail) == 1 else tail or (1,))


def _in_jax(values_of: Callable[..., Any], path: Path, needed: Sequence[Path], params: Any, rows: Leaves) -> Any:
    """Trace calls of the network for a fixed number of rows each, as many calls as the missing rows need."""
    jax = import_jax()
    params, rows = jax.lax.stop_gradient((params, rows))
    values, missing, flat, shape = _from_next_rows(jax_numerics(), path, needed, rows)
    count, left, lead = len(values), missing.sum(), rows[LANE].shape
    lanes = count // lead[0 if TIME_MAJOR in rows else -1]
    size = min(count, max(lanes, _FEWEST))  # of a call; every lane lacks its last value
    order = jax.numpy.nonzero(missing, size=-(-count // size) * size, fill_value=count)[0]

    def advance(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        at = jax.lax.dynamic_slice_in_dim(order, carry[0], size)
        found = values_of(params, {path: leaf.at[at].get(mode="clip") for path, leaf in flat.items()}, values)
        return carry[0] + size, carry[1].at[at].set(found, mode="drop")

    return jax.lax.while_loop(lambda carry: carry[0] < left, advance, (0, values))[1].reshape(shape)

"""Torch policies inside a loop that JAX runs: their module lowered to JAX, with weights read at each rollout.

For the caller they stay Torch policies: parameters and states are converted before and after each rollout.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase, set_interaction_type
from torch import Tensor, nn
from typing_extensions import override

from funcollect.errors import LoweringError
from funcollect.interop.bridge import Joined, argument, follow_torch, is_wide, joining, opened, to_torch, torch_view
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.lowering import Lowered, lower_module
from funcollect.interop.lowering.exporting import jax_dtype, leaves_of, plain
from funcollect.interop.memo import codes_of, memo_of
from funcollect.keys import key_from_seed, torch_generator
from funcollect.policies.checks import overlap
from funcollect.policies.jax_functions.jax_policy import FunctionPolicy
from funcollect.policies.tensordict_modules import calling
from funcollect.policies.tensordict_modules.calling import INIT, by_path
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_modules.settings import CONTAINERS, Look, own_attributes, parts_of, referents
from funcollect.policies.torch_modules.skeleton import FunctionModule
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState, lanes_of
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Columns
from funcollect.specs import RESERVED, ActionSpec, ExplorationType, Leaf, Space, assemble, disassemble
from funcollect.tree import NAMESPACE, Path, flatten, moved, select

_ANY = key_from_seed(0)  # initial states do not depend on keys
_TOLERANCE = 1e-3  # relative; rounding is far below it

Source = TorchPolicy | TensorDictPolicy


class LoweredPolicy(FunctionPolicy):
    """See `funcollect.lower_policy`. `params` are the module's current ones, read at each access, as arrays of JAX.

    The module is tried with an example `observation` [P, ...]: LoweringError if it cannot be lowered.
    """

    def __init__(
        self, source: Source, observation: Any, exploration_type: ExplorationType, *, single: bool = False
    ) -> None:
        initial_carry = source.initial_carry(observation)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(initial_carry)[0]):
            raise LoweringError("initial_state requires grad, so it may change: pass a constant one")
        initial = optree.tree_map(lambda leaf: np.asarray(torch.as_tensor(leaf).cpu()), plain(initial_carry))
        record_state = isinstance(source, TorchPolicy) and source.record_state
        super().__init__(self.traced, source.head, initial, record_state=record_state)
        self.source = source
        self.exploration_type = exploration_type  # the interaction type for a TensorDict policy's distributions
        self.single = single  # whether a TensorDict policy's module is called without a batch dimension; P is 1 then
        self.ties = isinstance(source, TensorDictPolicy)
        self._carries_init = isinstance(source, TensorDictPolicy) and INIT in (initial_carry or {})
        self.dtypes: dict[str, torch.dtype] = {}  # of outputs whose dtypes JAX lacks, by dotted name
        self.nested: list[Path] = []  # outputs that have dotted names in the loop
        recurrent = lanes_of(initial_carry, len(leaves_of(observation)[0][0]), source.device)
        self.lowered = self._lowered(_checked_module(source), observation, recurrent)
        _check_answer(self, observation, recurrent)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"

    def _lowered(self, module: nn.Module, observation: Any, recurrent: Any) -> Lowered:
        device = next((parameter.device for parameter in module.parameters()), None)
        sample = (observation, recurrent) if device is None else moved((observation, recurrent), device)
        inputs = self.source.arguments(*sample)
        if isinstance(self.source, TensorDictPolicy):
            batch = TensorDict(inputs[0], batch_size=[len(leaves_of(observation)[0][0])])
            inputs = (batch[0] if self.single else batch,)
        with set_interaction_type(self.exploration_type):
            return lower_module(module, inputs)

    def traced(self, params: Any, observation: Any, state: Any = None) -> Any:
        """The module's answer in traced code; see `FunctionPolicy`."""
        tree, arguments = import_jax().tree, self.source.arguments(observation, state)
        if self.single:
            arguments = tree.map(lambda leaf: leaf[0], arguments)
        with set_interaction_type(self.exploration_type):  # since new shapes may export the module again
            answer = self.lowered.apply(opened(params), *arguments)
        return self.to_outputs(tree.map(lambda leaf: leaf[None], answer) if self.single else answer, state)

    @property
    def params(self) -> Any:
        """Parameters as the loop takes them."""
        return self.prepare(None)

    @override
    def prepare(self, params: Any) -> dict[str, Any]:
        """Copies of parameters, laid out for JAX; `params` are as for the Torch policy, or a result of `prepare`."""
        return self._split(self.lend(params))

    def lend(self, params: Any) -> dict[str, Any] | Joined:
        """As `prepare`, but without a copy: valid in this thread, until its next call of `lend` or `prepare`.

        Call it within `torch_followed`, since Torch may still be writing them.
        """
        array = import_jax().Array
        if isinstance(params, dict) and all(isinstance(leaf, array) for leaf in params.values()):
            return params
        return self._joined(self.source.tensors(self.source.prepare(params)))

    def laid_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copies of tensors by name, as JAX has them."""
        return self._split(self._joined(tensors))

    def _split(self, arrays: dict[str, Any] | Joined) -> dict[str, Any]:
        if not isinstance(arrays, Joined):
            return arrays
        follow_torch(*next(iter(arrays.arrays.values())).devices())
        # Wait for the copy, here and below, so that the memory of the tensors may be written again.
        return import_jax().block_until_ready(compiled(self, "open", opened)(arrays))  # type: ignore[no-any-return]

    def _joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | Joined:
        """The tensors joined as a program's argument; if that is impossible, laid-out copies by name."""
        read = {name: tensors[name] for name in self.lowered.names}
        form = tuple((name, tensor.dtype, tensor.shape, tensor.device) for name, tensor in read.items())
        memo = memo_of(self)
        joins = vars(memo["joined"]) if "joined" in memo else {}
        if form not in joins:
            if not _can_join(read):
                lay_out = compiled(self, "lay out", self.lowered.lay_out)
                arrays = {name: argument(tensor.detach()) for name, tensor in read.items()}
                return import_jax().block_until_ready(lay_out(arrays))  # type: ignore[no-any-return]
            joins = vars(memo.setdefault("joined", threading.local()))  # another thread may still read its own memory
            joins[form] = joining(read, self.lowered.lay_out)
        return joins[form](read)  # type: ignore[no-any-return]

    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        """A copy of `params`, or of the module's own, by name, as Torch tensors."""
        return self.source.state_dict() | ({} if params is None else self.lowered.restore(params))

    def load(self, params: Mapping[str, Any]) -> None:
        """Write arrays such as `params`, or the result of `state_dict`, into the user's module."""
        in_jax = any(isinstance(leaf, import_jax().Array) for leaf in params.values())
        self.source.load(self.state_dict(params) if in_jax else params)

    def enter(self, state: TorchPolicyState, num_lanes: int) -> Any:
        """The recurrent state for the loop, over the same memory. Its ``is_init`` is True only in the initial state."""
        if state.recurrent is None and not self._carries_init:
            return None
        asarray = import_jax().numpy.asarray
        recurrent = optree.tree_map(lambda leaf: asarray(argument(leaf)), plain(state.recurrent))
        if not self._carries_init:
            return recurrent
        return {**(recurrent or {}), INIT: import_jax().numpy.zeros((num_lanes, 1), bool)}

    def leave(self, recurrent: Any, before: TorchPolicyState, fresh: Tensor) -> TorchPolicyState:
        """A copy of the state after the loop, with the structure, dtypes and devices that it had `before`.

        The lanes in `fresh` [P], which are about to begin an episode, get their initial state, as in a loop in Torch.
        """
        leaves, treespec = optree.tree_flatten(before.recurrent, namespace=NAMESPACE)
        if self._carries_init:
            recurrent = {path: leaf for path, leaf in recurrent.items() if path != INIT}
        pairs = zip(import_jax().tree.leaves(recurrent), leaves, strict=True)
        after = [torch_view(new).to(old.device, old.dtype, copy=True) for new, old in pairs]
        if after and bool(fresh.any()):
            start = leaves_of(self.source.init(_ANY, len(fresh)).recurrent)[0]
            initial = [one.to(two.device, two.dtype) for one, two in zip(start, after, strict=True)]
            after = select(fresh.to(after[0].device), initial, after)
        return before._replace(recurrent=optree.tree_unflatten(treespec, after))

    @override
    def finish(self, columns: Columns, spec: ActionSpec, /) -> Columns:
        """The outputs of a loop with the dtypes and nested keys of the Torch policy's."""
        finished = super().finish(columns, spec)
        nested: dict[Path, Path] = {(".".join(path),): path for path in self.nested}
        wide = {path: leaf.to(self.dtypes.get(".".join(path), leaf.dtype)) for path, leaf in finished.items()}
        found = {nested.get(path, path): leaf for path, leaf in wide.items()}
        action = calling.nested_action(calling.paths_of(self.source.module, "out_keys"))
        return found if action is None else found | {action: found["action",]}  # which may be a random one

    def to_outputs(self, answer: Any, recurrent: Any) -> Any:
        """The module's answer to a state in the form that the loop takes: for TensorDicts, outputs by dotted name."""
        if not isinstance(self.source, TensorDictPolicy):
            return answer
        outputs, after = self.source.recorded(calling.with_action(flatten(answer)), recurrent)
        named = {".".join(path): leaf for path, leaf in outputs.items()}
        return named if recurrent is None else (named, after)

    def note(self, answer: Any, observation: Any, recurrent: Any) -> None:
        """Check the answer to an example, and record which outputs are nested and which have dtypes that JAX lacks."""
        hidden: Mapping[Path, Any] = {}
        if isinstance(self.source, TensorDictPolicy):
            outputs, hidden = self.source.recorded(flatten(answer), recurrent)
        else:
            answer = answer if recurrent is None else answer[0]
            outputs = flatten(answer) if isinstance(answer, Mapping) else {}
        self.nested = [path for path in outputs if len(path) > 1]
        extras = [path for path in self.nested if path[0] != "next" or path[1:] not in hidden]
        seen = by_path(observation)
        if taken := [path for path in extras if path[0] in RESERVED or any(overlap(path, other) for other in seen)]:
            raise LoweringError(f"the out_keys {taken} stand where a batch has its own: rename them")
        if other := [path for path, leaf in hidden.items() if leaf.dtype != recurrent[path].dtype]:
            raise LoweringError(f"the hidden states {other} change their dtypes in a step: give initial ones like them")
        dtypes = {".".join(path): leaf.dtype for path, leaf in outputs.items() if isinstance(leaf, Tensor)}
        self.dtypes = {name: dtype for name, dtype in dtypes.items() if jax_dtype(dtype).itemsize < dtype.itemsize}


def _can_join(tensors: Mapping[str, Tensor]) -> bool:
    """Whether there are tensors, all on one GPU that JAX has, and none of 64-bit numbers."""
    devices = {tensor.device for tensor in tensors.values()}
    on_gpu = len(devices) == 1 and devices.pop().type == "cuda" and import_jax().default_backend() == "gpu"
    return on_gpu and not any(is_wide(tensor) for tensor in tensors.values())


def example(space: Space, leaves: Sequence[Leaf], rows: int) -> Any:
    """Random observations [rows, ...] to try a policy with: normal floats, and integers of the space within 32 bits."""
    space = copy.deepcopy(space)
    space.seed(0)
    drawn = np.random.default_rng(0)
    samples = [disassemble(space, space.sample()) for _ in range(rows)]
    flat = {}
    for leaf, column in zip(leaves, map(np.stack, zip(*samples, strict=True)), strict=True):
        values = drawn.standard_normal(column.shape) if leaf.dtype.kind == "f" else column
        if values.dtype in (np.int64, np.uint64):
            values = values.clip(1 - 2**31 if values.dtype == np.int64 else 0, 2**31 - 1)
        flat[leaf.path] = torch.from_numpy(values.astype(leaf.dtype))
    return assemble(space, flat)


def _checked_module(source: Source) -> nn.Module:
    """The policy's module; LoweringError if it cannot be lowered, or if later changes of it could not be noticed."""
    module = source.module
    if not isinstance(module, nn.Module) or isinstance(module, FunctionModule):
        raise LoweringError("a plain function is not lowered, as what it refers to may change: use a torch.nn.Module")
    if isinstance(source, TensorDictPolicy) and not isinstance(module, TensorDictModuleBase):
        raise LoweringError("a function of a TensorDict is not lowered: use a TensorDictModule")
    for prefix, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{type(part).__name__} is a program of TorchScript, which torch.export does not take"
            raise LoweringError(f"{what}: pass its module")
        for name, value in {**own_attributes(part), "forward": type(part).forward}.items():
            if any(isinstance(held, (Tensor, nn.Module)) and held is not part for held in _held(value)):
                what = f"{f'{prefix}.{name}'.removeprefix('.')!r} of {type(module).__name__} holds a tensor or a module"
                why = "beside its parameters, buffers and submodules, where a change would not be seen"
                raise LoweringError(f"{what} {why}: use register_buffer, nn.ParameterList or nn.ModuleList")
    return module


def _held(value: Any, around: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The contents of a container and those inside; what a function or method refers to, globals too; or the value.

    `around` are the containers that the value lies in, in case one holds itself.
    """
    if isinstance(value, FunctionType):
        for code in codes_of(value.__code__):
            yield from map(value.__globals__.get, code.co_names)
    if isinstance(value, FunctionType | MethodType):
        yield from referents(value)
    elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
        if not any(value is each for each in around):
            yield from chain.from_iterable(_held(part, (*around, value)) for part in parts_of(value))
    else:
        yield value


def _check_answer(policy: LoweredPolicy, observation: Any, recurrent: Any) -> None:
    """Raise LoweringError unless `policy` and its module agree, and the module does not change its attributes."""
    source: Any = policy.source
    module: Any = source.bound(None)
    sample: Any = (observation, recurrent)
    look, device = Look.at(module), source.run_device
    with torch.no_grad():
        copied = optree.tree_map(torch.clone, sample if device is None else moved(sample, device))
        eager = source.call_module(module, *copied, policy.exploration_type, single=policy.single)
    if isinstance(source, TensorDictPolicy) and source.rereads(observation):
        _check_forgets(policy, module, *copied)
    if not look.alike():
        raise LoweringError(f"{type(module).__name__} changes its own attributes when called: return them as a state")
    inputs: Any = optree.tree_map(argument, plain(sample if recurrent is not None else sample[:1]))
    params = policy.prepare(None)
    with import_jax().default_matmul_precision("highest"):  # coarser products of a GPU would look like a difference
        ours = import_jax().jit(policy.apply)(params, *inputs)
    eager = plain(eager)
    policy.note(eager, *copied)
    theirs = leaves_of(policy.to_outputs(eager, copied[1]))[0]
    pairs = zip(theirs, map(to_torch, import_jax().tree.leaves(ours)), strict=True)
    error = max((_error(one.cpu(), two.cpu()) for one, two in pairs if one.is_floating_point()), default=0.0)
    if error > _TOLERANCE:
        name = type(module).__name__
        raise LoweringError(f"{name} and its lowered form differ by {error:.1e}: use torch_policy(compile='eager')")


def _check_forgets(policy: LoweredPolicy, module: Any, observation: Any, recurrent: Any) -> None:
    """Raise LoweringError for a policy on a TensorDict that reads its own outputs of the step before.

    A loop of JAX only carries declared states, so a second call with the first outputs has to return the same.
    """
    source: Any = policy.source
    inputs, size, read = source.inputs_of(observation, recurrent, single=policy.single)

    def outputs_from(inputs: dict[Path, Any]) -> dict[Path, Any]:
        generator = torch_generator(torch.get_rng_state(), source.run_device)
        with generator, set_interaction_type(policy.exploration_type):
            return calling.run_module(module, inputs, source.device, size, read)

    def same(one: Any, two: Any) -> bool:
        return one is two or (isinstance(one, Tensor) and torch.equal(one, two))

    first = outputs_from(inputs)
    second = outputs_from(inputs | calling.found_again(first))
    if others := [path for path, leaf in second.items() if not same(first.get(path), leaf)]:
        raise LoweringError(
            f"its {calling.names_of(others)} depend on its outputs of the step before: give these keys a start with "
            "funcollect.tensordict_policy(policy, initial_state={...}), and name them in the in_keys and out_keys"
        )


def _error(one: Tensor, two: Tensor) -> float:
    """The largest difference, relative to the largest absolute value in `one` or 1."""
    scale = float(np.nanmax(one.abs().float().numpy(), initial=1.0))
    return float((one.float() - two.float()).abs().nan_to_num().max()) / scale if one.numel() else 0.0

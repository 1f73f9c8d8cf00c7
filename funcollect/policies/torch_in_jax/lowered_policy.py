"""Torch policies whose module is lowered to JAX: the loop's own function, with weights read at each rollout."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase, set_interaction_type
from torch import Tensor, nn
from typing_extensions import override

from funcollect.errors import LoweringError
from funcollect.interop.bridge import argument, follow_torch, is_wide, to_torch
from funcollect.interop.jax_setup import compiled, import_jax
from funcollect.interop.joined_tensors import Joined, JoinedMemory, opened
from funcollect.interop.lowering import Lowered, lower_module
from funcollect.interop.lowering.structure import leaves_of, plain
from funcollect.interop.memo import memo_of
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_in_jax.embedded_policy import EmbeddedPolicy, Source, check_forgets
from funcollect.policies.torch_modules.function_module import FunctionModule
from funcollect.policies.torch_modules.settings import settings_of, unregistered
from funcollect.tree import moved

_TOLERANCE = 1e-3  # relative; rounding is far below it


class LoweredPolicy(EmbeddedPolicy):
    """See `funcollect.lower_policy`. `params` are the module's current ones, read at each access, as arrays of JAX.

    LoweringError for a module that cannot be lowered, or whose weights a program could not read again.
    """

    @override
    def _try(self, observation: Any, recurrent: Any) -> None:
        module = _checked_module(self.source)
        place = next((parameter.device for parameter in module.parameters()), None)
        inputs = self.source.arguments(*_on(place, (observation, recurrent)))
        if isinstance(self.source, TensorDictPolicy):
            given = TensorDict(inputs[0], batch_size=[len(leaves_of(observation)[0][0])])
            inputs = (given[0] if self.single else given,)
        with set_interaction_type(self.exploration_type):
            self.lowered: Lowered = lower_module(module, inputs)
        _check_answer(self, observation, recurrent)

    @override
    def traced(self, params: Any, observation: Any, state: Any = None) -> Any:
        tree, arguments = import_jax().tree, self.source.arguments(observation, state)
        if self.single:
            arguments = tree.map(lambda leaf: leaf[0], arguments)
        with set_interaction_type(self.exploration_type):  # new shapes export it once more
            answer = self.lowered.apply(opened(params), *arguments)
        return self.to_outputs(tree.map(lambda leaf: leaf[None], answer) if self.single else answer, state)

    @override
    def prepare(self, params: Any) -> dict[str, Any]:
        """Copies of parameters, laid out for JAX; `params` as the Torch policy takes them, or the result of this."""
        return params if self._is_prepared(params) else self.laid_out(self._tensors(params))

    def lend(self, params: Any) -> dict[str, Any] | Joined:
        """The same without a program that copies: only for this thread, until its next call of this or of `prepare`.

        Call it within `torch_followed`, since Torch may still be writing them.
        """
        return params if self._is_prepared(params) else self._joined(self._tensors(params))

    def laid_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copies of tensors by name, as JAX has them."""
        joined = self._joined(tensors)
        if not isinstance(joined, Joined):
            return joined
        follow_torch(*next(iter(joined.arrays.values())).devices())
        copies: dict[str, Any] = compiled(self, "open", opened)(joined)
        import_jax().block_until_ready(copies)  # before the memory is written again
        return copies

    def _is_prepared(self, params: Any) -> bool:
        array = import_jax().Array
        return isinstance(params, dict) and all(isinstance(leaf, array) for leaf in params.values())

    def _tensors(self, params: Any) -> dict[str, Tensor]:
        return self.source.tensors(self.source.prepare(params))

    def _joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | Joined:
        """The tensors as a program's argument; those that cannot be joined as copies by name."""
        read = {name: tensors[name] for name in self.lowered.names}
        which = tuple((name, tensor.dtype, tensor.shape, tensor.device) for name, tensor in read.items())
        memo = memo_of(self)
        memories = vars(memo["joined"]) if "joined" in memo else {}
        if which not in memories and not _can_join(read):
            arrays = {name: argument(tensor.detach()) for name, tensor in read.items()}
            copies: dict[str, Any] = compiled(self, "lay out", self.lowered.lay_out)(arrays)
            import_jax().block_until_ready(copies)  # before the tensors are written again
            return copies
        if which not in memories:
            memories = vars(memo.setdefault("joined", threading.local()))  # another thread may still read its own
            memories[which] = JoinedMemory(read)
        memory = memories[which]
        return Joined(memory.write(read), memory.parts, self.lowered.lay_out)

    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        """A copy of `params`, or of the module's own, by name, as Torch tensors."""
        return self.source.state_dict() | ({} if params is None else self.lowered.restore(params))

    def load(self, params: Mapping[str, Any]) -> None:
        """Write arrays such as `params`, or the result of `state_dict`, into the user's module."""
        jax = any(isinstance(leaf, import_jax().Array) for leaf in params.values())
        self.source.load(self.state_dict(params) if jax else params)


def _can_join(tensors: Mapping[str, Tensor]) -> bool:
    """Whether there are tensors, all on one GPU that JAX has, and none of 64-bit numbers."""
    devices = {tensor.device for tensor in tensors.values()}
    on_gpu = len(devices) == 1 and devices.pop().type == "cuda" and import_jax().default_backend() == "gpu"
    return on_gpu and not any(is_wide(tensor) for tensor in tensors.values())


def _checked_module(source: Source) -> nn.Module:
    """The policy's module; LoweringError if a change of it could not be noticed after it is lowered."""
    module = source.module
    if not isinstance(module, nn.Module) or isinstance(module, FunctionModule):
        raise LoweringError(
            "a plain function is not lowered, since the objects that it refers to may change: use a torch.nn.Module"
        )
    if isinstance(source, TensorDictPolicy) and not isinstance(module, TensorDictModuleBase):
        raise LoweringError("a function of a TensorDict is not lowered: use a TensorDictModule")
    if name := unregistered(module):
        raise LoweringError(
            f"{name!r} of {type(module).__name__} holds a tensor or a module beside its parameters, buffers and "
            "submodules, where a change would not be seen: use register_buffer, nn.ParameterList or nn.ModuleList"
        )
    return module


def _check_answer(policy: LoweredPolicy, observation: Any, recurrent: Any) -> None:
    """Raise LoweringError unless `policy` and its module agree, and the module does not change its attributes."""
    source: Any = policy.source
    module: Any = source.bound(None)
    given: Any = (observation, recurrent)
    before = settings_of(module)
    with torch.no_grad():
        copied = optree.tree_map(torch.clone, _on(source.run_device, given))
        eager = source.call_module(module, *copied, policy.exploration_type, single=policy.single)
    check_forgets(policy, module, *copied)
    if before != settings_of(module):
        raise LoweringError(f"{type(module).__name__} changes its own attributes when called: return them as a state")
    inputs: Any = optree.tree_map(argument, plain(given if recurrent is not None else given[:1]))
    params = policy.prepare(None)
    with import_jax().default_matmul_precision("highest"):  # the rounding of a GPU's products is no difference
        ours = import_jax().jit(policy.apply)(params, *inputs)
    eager = plain(eager)
    policy.note(eager, *copied)
    pairs = zip(
        leaves_of(policy.to_outputs(eager, copied[1]))[0], map(to_torch, import_jax().tree.leaves(ours)), strict=True
    )
    apart = max((_apart(one.cpu(), two.cpu()) for one, two in pairs if one.is_floating_point()), default=0.0)
    if apart > _TOLERANCE:
        name = type(module).__name__
        raise LoweringError(f"{name} and its lowered form differ by {apart:.1e}: use torch_policy(compile='eager')")


def _on(device: torch.device | None, example: Any) -> Any:
    """An example on `device`, or for None where it is."""
    return example if device is None else moved(example, device)


def _apart(one: Tensor, two: Tensor) -> float:
    scale = float(np.nanmax(one.abs().float().numpy(), initial=1.0))
    return float((one.float() - two.float()).abs().nan_to_num().max()) / scale if one.numel() else 0.0

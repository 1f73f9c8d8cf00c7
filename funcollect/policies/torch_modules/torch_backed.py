"""Base class, state and arguments that all policies over a Torch module share."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal, NamedTuple, Self, get_args

import optree
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from funcollect.arguments import check_call
from funcollect.interop.memo import memo_of
from funcollect.keys import Key, Purpose, fold, generator_state, seed_of
from funcollect.messages import clipped, name_of, shown
from funcollect.policies.base import HeadedPolicy, is_flax
from funcollect.policies.torch_modules.settings import ModuleSettings
from funcollect.policies.torch_modules.skeleton import FunctionModule, Skeleton, modules_of
from funcollect.policies.weights import check_shapes
from funcollect.protocols import ActorInputs, Exploration
from funcollect.specs import ActionSpec
from funcollect.tree import flatten, moved, version_of

Compiler = Literal["xla", "eager", "inductor", "cudagraph"]


class TorchPolicyState(NamedTuple):
    """The state that a Torch policy carries from step to step."""

    recurrent: Any  # a pytree of tensors [P, ...], or None
    generator: Tensor  # uint8: the state of Torch's global generator, for modules that draw from it
    carried: Any = None  # by path, the keys that a TensorDict policy wrote and may read at its next step, each [P, ...]

    def on(self, device: torch.device) -> TorchPolicyState:
        """The same state on `device`, except for that of the generator."""
        if self.recurrent is None and self.carried is None:
            return self
        recurrent, carried = moved((self.recurrent, self.carried), device)
        return self._replace(recurrent=recurrent, carried=carried)


def check_module(
    module: Any, expected: str, arguments: int, compiler: Any, compilers: Sequence[str] = get_args(Compiler)
) -> None:
    """Raise unless `module`, an instance, takes so many arguments, and `compiler` is None or one of `compilers`."""
    if isinstance(module, type) or not callable(module):
        raise TypeError(f"module is {shown(module)}, expected {expected}: pass an instance")
    if is_flax(module):
        raise TypeError(f"module is Flax's {type(module).__name__}, expected {expected}: pass its apply to jax_policy")
    check_call("module", module, expected, arguments)
    if compiler == "callback":
        mend = "leave compile out, to call a module that cannot be lowered, or pass 'xla'"
        raise ValueError(f"compile='callback' was removed: {mend}")
    if compiler is not None and compiler not in compilers:
        raise ValueError(f"compile is {compiler!r}, expected one of {list(compilers)}, or None: pass 'xla'")


def lanes_of(initial: Any, num_lanes: int, device: torch.device | None) -> Any:
    """Copies of the recurrent state of one environment for each lane, [P, ...], on `device` or where it is."""
    tensors = optree.tree_map(lambda leaf: torch.as_tensor(leaf, device=device), initial)
    return optree.tree_map(lambda leaf: leaf.expand(num_lanes, *leaf.shape).clone(), tensors)


def has_lazy_layers(policy: Any) -> bool:
    """Whether a policy, or a module, has layers whose first call will make their parameters (`torch.nn.LazyLinear`)."""
    module = policy.module if isinstance(policy, TorchBacked) else policy
    return isinstance(module, nn.Module) and any(map(is_lazy, (*module.parameters(), *module.buffers())))


def replaced(policy: Any, subject: Any) -> Any:
    """The policy over another module or function; `subject` itself if that is a policy as well."""
    if not isinstance(policy, TorchBacked):
        return subject
    policy.replace(subject)
    return policy


def apart(policies: Mapping[str, Any]) -> dict[str, Any]:
    """The policies; a repeated one as twins over its module, since each place has parameters of its own."""
    result: dict[str, Any] = {}
    for name, policy in policies.items():
        repeated = isinstance(policy, TorchBacked) and any(policy is one for one in result.values())
        result[name] = policy.on(policy.device) if repeated else policy
    return result


def named(params: Any) -> dict[str, Any]:
    """Parameters by dotted name, from a module, or from a dict or TensorDict that may be nested."""
    tree = TensorDict.from_module(params) if isinstance(params, nn.Module) else params
    return {".".join(path): leaf for path, leaf in flatten(tree).items()}


class TorchBacked(HeadedPolicy):
    """Base class of policies over a Torch module, or over a function with the parameters of modules it refers to.

    A rollout calls the module's skeleton, a shallow copy with the tensors that `bound` gave it last in this thread. The
    user's module is only read, so a trainer may continue to use it.
    """

    backend: Literal["torch"] = "torch"

    def __init__(
        self, module: Callable[..., Any], device: torch.device | None, initial_state: Any, compiler: Compiler | None
    ) -> None:
        self.device = device  # where the policy runs; None for where the module is
        self.initial_state = initial_state
        self.compiler = compiler  # the user's `compile=`
        self._warned = False  # whether `_warn_of_written_buffers` has warned
        self.replace(module)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self._users_module)})"

    def on(self, device: torch.device | None) -> Self:
        """A policy like this one, over the same module, that runs on another device."""
        twin = copy.copy(self)
        twin.device, twin._warned = device, False
        twin.replace(self.module)
        return twin

    def replace(self, module: Callable[..., Any]) -> None:
        """Run another module, or function, from now on."""
        if not isinstance(module, nn.Module) and (found := modules_of(module)):
            module = FunctionModule(module, found)
        self._module = module
        memo_of(self).pop("skeletons", None)
        self.settings = ModuleSettings(module if isinstance(module, nn.Module) else None)
        if self.device is not None and any(tensor.device != self.device for tensor in self.tensors(None).values()):
            self._check_apart(f"the policy cannot be copied to {self.device}", "move it there before")

    @property
    def _skeleton(self) -> Skeleton:
        """That of this thread: others may bind the module to other parameters meanwhile."""
        memo = memo_of(self)
        own = memo.get("skeletons") or memo.setdefault("skeletons", threading.local())
        if not hasattr(own, "skeleton"):
            own.skeleton = Skeleton(self._module)
        return own.skeleton  # type: ignore[no-any-return]

    def _check_apart(self, consequence: str, way: str) -> None:
        """Raise ValueError if the skeleton would use tensors of the user's module in place of the bound ones."""
        if name := self._skeleton.entangled:
            what = f"{name!r} of {type(self.module).__name__} refers to a submodule or a parameter of the module itself"
            mend = f"{way}, or pass policy_factory, a function that builds it"
            raise ValueError(f"{consequence}: {what}, expected no such reference: {mend}")

    @property
    def module(self) -> Callable[..., Any]:
        """The user's module or function; for a function that refers to modules, a `FunctionModule` over it."""
        return self._module

    @property
    def _users_module(self) -> Callable[..., Any]:
        return self._module.function if isinstance(self._module, FunctionModule) else self._module

    def owns(self, module: Any) -> bool:
        """Whether this is the module or function that the user gave."""
        users = self._users_module
        return module is users or module is self._module or (isinstance(module, MethodType) and module == users)

    @property
    def run_device(self) -> torch.device | None:
        """The device on which the policy runs; None if the user gave none and the module has no parameters."""
        if self.device is not None or not isinstance(self._module, nn.Module):
            return self.device
        return next((parameter.device for parameter in self._module.parameters()), None)

    @property
    def bound_device(self) -> torch.device | None:
        """`run_device` as of the last `bound`."""
        return self.device or next((source[key].device for source, _, key in self._skeleton.parameters.values()), None)

    @property
    def params(self) -> Any:
        """The module's current parameters and buffers, a TensorDict nested as its submodules; None without a module."""
        return TensorDict.from_module(self._module) if isinstance(self._module, nn.Module) else None

    @override
    def prepare(self, params: Any, /) -> dict[str, Tensor] | None:
        """Parameters by dotted name, or None for the module's own; TypeError or ValueError for wrong ones."""
        if params is None:
            return None
        if not isinstance(self._module, nn.Module):
            mend = "pass a torch.nn.Module"
            raise ValueError(f"params were given to a policy that is a function and refers to no module: {mend}")
        matched = self._matched(params)
        self._check_apart("params= cannot act", "pass params=None")
        return matched

    def by_name(self, params: Any) -> dict[str, Any]:
        """By dotted name, parameters in any form that `prepare` takes except None."""
        if not isinstance(params, (nn.Module, Mapping, TensorDictBase)):
            mend = "pass module.state_dict()"
            raise TypeError(f"params is {type(params).__name__}, expected a TensorDict or a state dict: {mend}")
        return named(params)

    def _matched(self, params: Any) -> dict[str, Tensor]:
        own, given = self.tensors(None), self.by_name(params)
        by_tensor = {id(tensor): given[name] for name, tensor in own.items() if name in given}  # one name is enough
        given = {name: by_tensor[id(tensor)] for name, tensor in own.items() if id(tensor) in by_tensor} | given
        wanted = own.keys() & (self._skeleton.parameters.keys() | given.keys())  # buffers may be left out
        kinds = {
            name: tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for name, leaf in given.items()
        }
        check_shapes({name: tuple(own[name].shape) for name in wanted}, kinds)
        return {name: given[name] for name in own if name in given}

    def tensors(self, prepared: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The module's current parameters and buffers by name, replaced by those in `prepared`; none for a function."""
        skeleton = self._skeleton
        skeleton.follow()
        own = {name: source[key] for name, (source, _, key) in (skeleton.parameters | skeleton.buffers).items()}
        return own | (prepared or {})

    def state_dict(self, params: Any = None) -> dict[str, Tensor]:
        """A copy of `params`, or of the module's own, by dotted name. `load` and `prepare` take it."""
        own: Any = self._module if isinstance(self._module, nn.Module) else {}
        leaves = named(own) if params is None else self.by_name(params)
        return {name: leaf.detach().clone() for name, leaf in leaves.items()}

    def load(self, params: Any) -> None:
        """Write `params` into the user's module."""
        if isinstance(self._module, nn.Module):
            given, own = self._matched(params), self.tensors(None)
            with torch.no_grad():
                for name, value in given.items():
                    own[name].copy_(value)

    @override
    def init(self, key: Key, num_envs: int, /) -> TorchPolicyState:
        initial = self.initial_state
        recurrent = None if initial is None else lanes_of(initial, num_envs, self.run_device)
        return TorchPolicyState(recurrent, generator_state(seed_of(fold(key, Purpose.GENERATOR))))

    def initial_carry(self, observation: Any) -> Any:
        """The state that a loop of JAX carries, in one environment at the start of an episode, or None."""
        return self.initial_state

    @override
    def remembers(self, policy_state: TorchPolicyState, /) -> bool:
        return policy_state.recurrent is not None

    @override
    def __call__(
        self, params: Any, state: Any, observation: Any, noise: Any, spec: ActionSpec, exploration: Exploration, /
    ) -> tuple[TorchPolicyState, Mapping[str, Any]]:
        noise, rows = None if noise is None else noise[None], len(optree.tree_leaves(observation)[0])
        actor = self.actor(ActorInputs(observation, params, state, state, noise, exploration, spec, rows, length=1))
        with actor.running():
            actor.act(0)
            state, columns = actor.finish()
        return state, {".".join(path): column[0] for path, column in columns.items()}

    def bound(self, prepared: dict[str, Tensor] | None) -> Callable[..., Any]:
        """The function; or the skeleton with the `prepared` parameters, or the module's own, and copies of buffers."""
        skeleton, device = self._skeleton, self.device
        skeleton.follow()
        self._warn_of_written_buffers()
        for name, (source, target, key) in skeleton.parameters.items():
            tensor = source[key] if prepared is None else prepared[name]
            target[key] = tensor if device is None else tensor.to(device)
        for name, (source, target, key) in skeleton.buffers.items():
            buffer: Any = source[key] if prepared is None else prepared.get(name, source[key])
            target[key] = skeleton.bound_buffers[name] = buffer.detach().to(device or source[key].device, copy=True)
        return skeleton.root

    def buffers(self) -> dict[str, Tensor]:
        """The copies of the module's buffers that `bound` made, as the module has left them."""
        return {name: target[key] for name, (_, target, key) in self._skeleton.buffers.items()}

    def _warn_of_written_buffers(self) -> None:
        """Warn, once, if the module has written the copies of its buffers that `bound` made last."""
        if self._warned or not self._skeleton.bound_buffers:
            return
        now, bound = self.buffers(), self._skeleton.bound_buffers
        if names := [name for name, before in bound.items() if now[name] is not before or version_of(before)]:
            self._warned = True
            warnings.warn(
                f"{type(self._module).__name__} writes its buffers {clipped(str(names))} in its forward pass. Rollouts "
                "and evaluate_actions do not keep that: each begins with the buffers that the module has. Call "
                "module.eval() if they are batch statistics, scale observations with funcollect.normalized, and keep a "
                "memory in a recurrent state (initial_state=)",
                stacklevel=2,
            )

"""Calls a module on a TensorDict, and finds its outputs and the hidden states that it carries as keys.

A TensorDict costs more than a small network at each step. So the first step of a rollout calls a sequence of plain
modules as it is, and records the calls of networks. If its parts, called one after another on a plain dict, give the
same bits from the same random draws, the other steps call these, in half the time.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn

from funcollect.arguments import check_arrays
from funcollect.errors import PolicyError
from funcollect.keys import generator_state, generator_states, set_generator_states, torch_generator
from funcollect.messages import note_arguments
from funcollect.specs import map_leaves
from funcollect.tree import Path, as_path, flatten, key_of, nest, to_tensordict

_KEEP_STATES = ("OrnsteinUhlenbeckProcessModule", "MultiStepActorWrapper")  # of TorchRL: they read more than in_keys

Values = dict[str | Path, Any]

_SEQUENCES = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)
# By the method that samples, whether it draws the action and its log-probability jointly.
_DRAWS = {"ProbabilisticTensorDictModule.forward": False, "SafeProbabilisticModule.forward": True}

INIT: Path = ("is_init",)  # True at the first step of a trajectory, as in TorchRL's InitTracker


def paths_of(module: Any, keys: Literal["in_keys", "out_keys"]) -> list[Path]:
    """The paths of a module's keys; empty for a function."""
    return list(map(as_path, getattr(module, keys, None) or ()))


def _parts(module: Any) -> list[nn.Module]:
    return list(module.modules()) if isinstance(module, nn.Module) else []


def run_module(
    module: Any, inputs: Mapping[Path, Any], device: torch.device | None, size: tuple[int, ...], read: Container[Path]
) -> dict[Path, Any]:
    """Call the module with copies of `inputs` [*size, ...], on `device` or where they are.

    Returns the leaves of its answer that it did not `read`. A nested action is also returned as the action.
    """
    copies = {path: leaf.clone() for path, leaf in inputs.items()}
    batch = TensorDict(nest(copies), size, device=device) if device else to_tensordict(copies, size)
    try:
        answer = module(batch)
    except KeyError as error:
        wanted = paths_of(module, "in_keys")
        if all(path in inputs for path in wanted):
            raise
        what = f"the policy reads the in_keys {names_of(wanted)}, the environment gives {names_of(inputs)}"
        raise PolicyError(f"{what}: name these") from error
    except Exception as error:
        note_arguments(error, "the policy's module", ({".".join(path): leaf for path, leaf in inputs.items()},))
        if not size:
            error.add_note("without num_envs there is no dimension of lanes: make the environment with num_envs=1")
        raise
    if not isinstance(answer, TensorDictBase):
        raise PolicyError(f"the policy returned {type(answer).__name__}, expected the TensorDict: return it")
    return with_action({path: leaf for path, leaf in flatten(answer).items() if path not in read})


def nested_action(written: Iterable[Path]) -> Path | None:
    """The path of the action among the keys that a policy has written, if it is nested: a single one."""
    actions = [path for path in written if path[-1] == "action"]
    return actions[0] if len(actions) == 1 and actions != [("action",)] else None


def with_action(outputs: dict[Path, Any]) -> dict[Path, Any]:
    """The outputs of a policy, with a nested action as the action, too."""
    nested = nested_action(outputs)
    return outputs if nested is None else {**outputs, ("action",): outputs[nested]}


def batched(leaf: Any) -> Any:
    """An output of a single environment as [1, ...]."""
    return leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf


def found_again(outputs: Mapping[Path, Any]) -> dict[Path, Any]:
    """The outputs that a policy which may read earlier outputs finds at its next step: all but the action."""
    return {path: leaf for path, leaf in outputs.items() if path[0] != "next" and path != ("action",)}


def check_hidden(outputs: Mapping[Path, Any], hidden: Mapping[Path, Tensor], written: Mapping[Path, Path]) -> None:
    """Raise PolicyError unless `outputs` hold each hidden state's next value, at its `written` path, in its shape."""
    for path, leaf in hidden.items():
        got = getattr(outputs.get(written[path]), "shape", None)
        if got != leaf.shape:
            what = f"the policy's hidden state {'.'.join(written[path])!r} is {got and tuple(got)}"
            mend = "write it as it is read, or correct its initial state"
            raise PolicyError(f"{what}, expected {tuple(leaf.shape)}: {mend}")


def names_of(paths: Iterable[Path]) -> list[str]:
    """The dotted names of keys, sorted, for messages."""
    return sorted(map(".".join, paths))


def by_path(observation: Any) -> dict[Path, Any]:
    """The leaves of an observation, in a space's structure, by their keys in a batch; a tuple's by their numbers."""
    leaves: dict[str, Any] = {}
    map_leaves(leaves.__setitem__, observation)
    return {tuple(name.split(".")): leaf for name, leaf in leaves.items()}


def read_and_written(module: Any) -> set[Path]:
    """The keys that a module both reads and writes."""
    return {*paths_of(module, "in_keys")} & {*paths_of(module, "out_keys")}


def reads_what_it_wrote(module: Any, given: Collection[Path]) -> bool:
    """Whether a policy may read its outputs of the step before, other than those `given` to it at each step.

    Its keys may say so. Without keys, any function or module may, except most of tensordict's and TorchRL's.
    """
    if read_and_written(module).difference(given):
        return True
    return not isinstance(module, TensorDictModuleBase) or any(
        not _is_of_torchrl(type(part).forward) or any(base.__name__ in _KEEP_STATES for base in type(part).__mro__)
        for part in _parts(module)
        if isinstance(part, TensorDictModuleBase)
    )


def carries_action(module: Any, written: Collection[Path]) -> bool:
    """Whether the part that chooses the action, or a later one that reads its outputs, writes one of these keys."""
    derived: set[Path] = {("action",)}  # the action, and keys written with it or from it
    for part in _parts(module):
        if isinstance(part, TensorDictModuleBase) and not isinstance(part, TensorDictSequential):
            writes = paths_of(part, "out_keys")
            if ("action",) in writes or not derived.isdisjoint(paths_of(part, "in_keys")):
                derived.update(writes)
    return not derived.isdisjoint(written)


def initial_hidden_states(
    module: Any,
    given: Mapping[Any, Any] | None,
    defaults: Mapping[Path, Tensor] | None = None,
    observation: Mapping[Path, Tensor] | None = None,
) -> dict[Path, Tensor]:
    """The value of each hidden state of `module` at the start of an episode, in one environment.

    It is taken from `given`, the user's argument; else from the primer of a part, such as TorchRL's LSTMModule; else
    from `defaults`. Else it is zeros, as in TorchRL's collectors, if the module runs on `observation` without it. A key
    that is read and written is a state only if its value is known: it may be an observation.
    """
    given_states = {} if given is None else _flat(given)
    read, written = paths_of(module, "in_keys"), paths_of(module, "out_keys")
    hidden = sorted(path[1:] for path in written if path[0] == "next" and path[1:] in read)
    if not written:
        hidden = sorted(given_states)
    same_key = {path for path in written if path in read} - set(hidden)
    if unknown := sorted(set(given_states) - set(hidden) - same_key):
        mend = "name keys that it reads and writes, under 'next' or as they are"
        raise ValueError(f"initial_state holds {unknown}, the policy carries {sorted({*hidden, *same_key})}: {mend}")
    known = {**(defaults or {}), **_primed(module), **given_states}
    failure: Exception | None = None
    if observation is not None and any(path not in known for path in hidden):
        try:
            known = _zeros(module, observation, hidden) | known
        except Exception as error:
            failure = error
    if missing := [path for path in hidden if path not in known]:
        name = missing[0][0] if len(missing[0]) == 1 else missing[0]
        raise ValueError(
            f"the policy reads {name!r} and writes it under 'next', so it is carried from step to step, and its value "
            "at the start of an episode is not known: use funcollect.tensordict_policy(policy, initial_state={"
            f"{name!r}: torch.zeros(...)}}), without a batch dimension, or give the module a make_tensordict_primer"
        ) from failure
    return {path: known[path] for path in [*hidden, *sorted(same_key & known.keys())]}


def _flat(given: Mapping[Any, Any]) -> dict[Path, Tensor]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"initial_state is {type(given).__name__}, expected a dict of tensors: pass {{'hidden': torch.zeros(8)}}"
        )
    by_key = {key: value for key, value in given.items() if isinstance(key, tuple)}
    states = {**flatten({key: value for key, value in given.items() if key not in by_key}), **by_key}
    check_arrays("initial_state", [*states.values()])
    return {path: torch.as_tensor(value) for path, value in states.items()}


def _zeros(module: Any, observation: Mapping[Path, Tensor], hidden: Iterable[Path]) -> dict[Path, Tensor]:
    """Zeros like the next hidden states that a copy of the module writes without earlier ones; raises its errors."""
    device = next((leaf.device for part in _parts(module) for leaf in part.parameters()), torch.device("cpu"))
    inputs = {path: leaf[None].to(device) for path, leaf in observation.items()}
    with torch.no_grad(), torch_generator(generator_state(0)):
        answer = flatten(copy.deepcopy(module)(to_tensordict(inputs, (1,))))
    return {path: torch.zeros_like(answer["next", *path][0]) for path in hidden}


def _primed(module: Any) -> dict[Path, Tensor]:
    values: dict[Path, Tensor] = {}
    for part in _parts(module):
        if (make := getattr(part, "make_tensordict_primer", None)) is not None:
            with torch_generator(generator := generator_state(0)):
                values |= flatten(make()(TensorDict({}, batch_size=[])))
            if not torch.equal(generator, generator_state(0)):
                what = f"{type(part).__name__} draws the initial state of an episode at random"
                mend = "pass funcollect.tensordict_policy(policy, initial_state={...}), or leave that part out"
                raise ValueError(f"{what}, expected a fixed one: {mend}")
    return values


class Part(NamedTuple):
    """A module without its TensorDict."""

    run: Callable[..., None]  # writes its answers into `Values`; a second argument is called in place of the network
    network: nn.Module | None = None  # the module that it calls; None for a part that samples


def _calling(part: TensorDictModule) -> Part:
    """A `TensorDictModule` around a module of positional arguments."""
    network, reads, writes = part.module, part.in_keys, part.out_keys

    def run(values: Values, call: Callable[..., Any] | None = None) -> None:
        arguments = tuple([values[key] for key in reads])
        answer = network(*arguments) if call is None else call(network, arguments)
        if len(writes) == 1 and isinstance(answer, Tensor):
            values[writes[0]] = answer
        else:
            values.update(zip(writes, answer, strict=True))

    return Part(run, network)


def _drawing(part: ProbabilisticTensorDictModule, jointly: bool) -> Part:
    """A part that samples one action, `jointly` with its log-probability or before it."""
    (sample,), distribution_of = part.dist_sample_keys, part.get_dist
    log_prob = part.log_prob_key if part.return_log_prob else None

    def run(values: Values, _: Any = None) -> None:
        distribution = distribution_of(values)
        method = "rsample" if distribution.has_rsample else "sample"
        both = getattr(distribution, f"{method}_and_log_prob", None) if jointly else None
        if log_prob is not None and both is not None:
            values[sample], values[log_prob] = both()
            return
        values[sample] = drawn = getattr(distribution, method)()
        if log_prob is not None:
            values[log_prob] = distribution.log_prob(drawn)

    return Part(run)


def plain_parts(module: Any) -> list[Part] | None:
    """The parts of `module` in their order; None unless all of them are plain."""
    if not isinstance(module, nn.Module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    forward: Any = type(module).forward
    inner: Any = getattr(module, "module", None)
    joint = _DRAWS.get(forward.__qualname__) if _is_of_torchrl(type(module)) else None
    if forward in _SEQUENCES:
        parts = list(map(plain_parts, inner.values() if isinstance(inner, nn.ModuleDict) else inner))
        return None if None in parts else list(chain.from_iterable(filter(None, parts)))
    if forward is TensorDictModule.forward and isinstance(inner, nn.Module):
        return [_calling(module)]
    if joint is not None and isinstance(module, ProbabilisticTensorDictModule) and len(module.dist_sample_keys) == 1:
        return [_drawing(module, joint)]
    return None


def _is_of_torchrl(owner: Any) -> bool:
    return owner.__module__.partition(".")[0] in ("tensordict", "torchrl")


def compared(
    parts: list[Part], inputs: Values, device: torch.device, run: Callable[[], Mapping[Path, Any]]
) -> tuple[Mapping[Path, Any], bool]:
    """The outputs of `run`, a call of the policy, and whether the parts write the same from its networks' answers."""
    calls: dict[Any, deque[tuple[Any, ...]]] = defaultdict(deque)

    def note(module: nn.Module, arguments: Any, named: Any, answer: Any) -> None:
        calls[module].append((arguments, named, answer))

    def recall(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        noted, named, answer = calls[module].popleft()
        if named or len(noted) != len(arguments) or not all(map(torch.equal, noted, arguments)):
            raise ValueError("the network was called otherwise")
        return answer

    before = generator_states(device)
    with contextlib.ExitStack() as hooks:
        for network in dict.fromkeys(part.network for part in parts if part.network is not None):
            hooks.callback(network.register_forward_hook(note, with_kwargs=True).remove)
        outputs = run()
    after, values, same = generator_states(device), dict(inputs), False
    set_generator_states(device, before)
    with contextlib.suppress(Exception):  # a part that fails without a TensorDict is called on one
        for part in parts:
            part.run(values, recall)
        pairs = [(leaf, values[key_of(path)]) for path, leaf in outputs.items()]
        equal = all(one is two or (one.dtype == two.dtype and torch.equal(one, two)) for one, two in pairs)
        same = equal and not any(calls.values()) and all(map(torch.equal, generator_states(device), after))
    set_generator_states(device, after)
    return outputs, same

"""Policies that are called on a TensorDict: `TensorDictModule`, TorchRL's actors, functions of a ``tensordict``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_interaction_type
from torch import Tensor

from funcollect.devices import checked_device
from funcollect.errors import PolicyError
from funcollect.keys import Key, Noise, Purpose, fold, generator_state, torch_generator
from funcollect.policies.actor import Columns, Drive, Recorder, lane_mask
from funcollect.policies.binding import TorchBacked
from funcollect.policies.carried import INIT, carried_states, paths
from funcollect.policies.checks import check_action, check_tensor, finished
from funcollect.policies.straight import Part, Values, Witness, straight_parts
from funcollect.policies.torch_policy import TorchPolicyState
from funcollect.specs import RESERVED, ActionSpec, ExplorationType
from funcollect.tree import Path, flatten, key_of, nest, select, to_tensordict

_WORTH_WATCHING = 16  # steps of a rollout, below which the parts of a policy are not looked at


def tensordict_policy(
    module: Callable[..., Any],
    *,
    initial_state: Mapping[Any, Any] | None = None,
    device: torch.device | str | None = None,
) -> TensorDictPolicy:
    """A policy from what is called on a TensorDict [P]; a collector makes it by itself.

    The module reads its in_keys, and writes ``action`` and whatever else is to be recorded, each [P, ...]. A key that
    it reads and also writes as ``("next", key)`` is a hidden state: it is carried from step to step, begins anew with
    each trajectory, and stands in the batch under both keys. ``is_init`` [P, 1], True at a trajectory's first step, is
    there for a module that reads it. ``exploration_type`` sets tensordict's interaction type. What is drawn from
    Torch's global generator comes from a state of its own.

    Args:
        module: a `TensorDictModule` or `TensorDictSequential`, one of TorchRL's actors, or a function of a TensorDict.
        initial_state: the hidden states at the start of an episode, by key, without a batch dimension; unless given,
            those of the module's primers (`make_tensordict_primer`).
        device: where the policy runs; unless given, where its parameters are.

    Raises:
        TypeError: for a module that cannot be called.
        ValueError: for a hidden state of which nothing says how it begins.

    >>> import torch, funcollect as fc
    >>> from tensordict.nn import TensorDictModule
    >>> policy = tensordict_policy(TensorDictModule(lambda x: (x[:, 2] > 0).long(), ["observation"], ["action"]))
    >>> env = fc.make_env("CartPole-v1", num_envs=3)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    >>> batch["action"].shape
    torch.Size([3, 5])
    """
    if isinstance(module, type) or not callable(module):
        raise TypeError(f"the policy is {module!r:.80}, expected a TensorDictModule or a function: pass an instance")
    return TensorDictPolicy(module, checked_device(device), carried_states(module, initial_state))


class TensorDictPolicy(TorchBacked):
    """See `tensordict_policy`.

    Args:
        module: the user's.
        device: where it is to run; None for where it is.
        carried: hidden states at the start of an episode, in one environment.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        device: torch.device | None = None,
        carried: Mapping[Path, Tensor] | None = None,
    ) -> None:
        super().__init__(module, device)
        self.carried = dict(carried or {})
        self.reads_init = INIT in paths(getattr(module, "in_keys", None))

    def noise(self, spec: ActionSpec) -> Noise | None:
        """None: the module draws its own."""

    def init(self, key: Key, num_envs: int) -> TorchPolicyState:
        """The hidden states of each lane, and a generator seeded from the key."""
        hidden = {path: leaf.expand(num_envs, *leaf.shape).clone() for path, leaf in self.carried.items()}
        return TorchPolicyState(hidden or None, generator_state(fold(key, Purpose.GENERATOR)))

    def __call__(
        self,
        params: Any,
        policy_state: TorchPolicyState,
        observation: Any,
        noise: Any,
        exploration_type: ExplorationType,
    ) -> tuple[TorchPolicyState, Mapping[str, Any]]:
        """One step by itself, no trajectory's first: see `funcollect.Policy`."""
        generator = policy_state.generator.clone()
        inputs = flatten(_as_mapping(observation)) | (policy_state.recurrent or {})
        if self.reads_init and INIT not in inputs:
            inputs[INIT] = torch.zeros(next(iter(inputs.values())).shape[0], 1, dtype=torch.bool)
        with torch.no_grad(), set_interaction_type(exploration_type), torch_generator(generator):
            outputs = _outputs(run_module(self.bound(params), inputs, self.device), inputs)
        hidden = {path: outputs.pop(("next", *path)) for path in self.carried}
        named = {".".join(path): leaf for path, leaf in outputs.items()}
        return TorchPolicyState(hidden or None, generator), named

    def actor(self, drive: Drive) -> TensorDictActor:
        """The policy at work in a rollout."""
        return TensorDictActor(self, drive)


class TensorDictActor:
    """One TensorDict per step, as the module wants it, or none where its parts alone do as well."""

    def __init__(self, policy: TensorDictPolicy, drive: Drive) -> None:
        self._drive = drive
        self._module = policy.bound(drive.params)
        self._device = policy.device
        self._generator = drive.policy_state.generator.clone()
        self._inputs = flatten(_as_mapping(drive.observation))
        self._hidden: dict[Path, Tensor] = dict(drive.policy_state.recurrent or {})
        self._never = torch.zeros(drive.num_envs, 1, dtype=torch.bool)
        self._first = self._never if policy.reads_init and INIT not in self._inputs else None
        self._names: list[Path] = []
        self._stateful = bool(self._given())
        self._recorder = Recorder(drive.observation, drive.length, always_copy=self._stateful)
        self._parts = self._plain_parts()
        self._values: Values = {}

    def _given(self) -> dict[Path, Tensor]:
        """What the module reads besides the observation; recorded, as what it writes."""
        return self._hidden if self._first is None else {**self._hidden, INIT: self._first}

    def _plain_parts(self) -> list[Part] | None:
        """The parts that may be called without a TensorDict: of a policy without hidden states that samples."""
        drive = self._drive
        if self._device is not None or self._stateful or not drive.stochastic or drive.length < _WORTH_WATCHING:
            return None
        return straight_parts(self._module)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """No gradients, the asked interaction type, and the global generator running from the policy's state."""
        with torch.no_grad(), set_interaction_type(self._drive.exploration_type), torch_generator(self._generator):
            yield

    def act(self, t: int) -> Any:
        """The action [P, ...] of step `t`."""
        if t == 0:
            written = self._begin()
        elif self._parts is not None:
            written = self._straight(self._parts)
        else:
            written = self._written(t)
        action = written[self._action_at]
        if t == 0 or action.shape[1:] != self._drive.spec.shape:
            check_action(action, self._drive.spec, self._drive.num_envs)
            check_tensor(action)
        if self._stateful:
            self._recorder.append((*written, *self._given().values()))
            self._carry(written)
        else:
            self._recorder.append(written)
        return action

    def _begin(self) -> tuple[Tensor, ...]:
        """The first step, which fixes what is recorded."""
        inputs = {**self._inputs, **self._given()}

        def run() -> dict[Path, Any]:
            return _outputs(run_module(self._module, inputs, self._device), inputs)

        if self._parts is None:
            outputs: Mapping[Path, Any] = run()
        else:
            self._values = {key_of(path): leaf for path, leaf in inputs.items()}
            outputs, as_good = Witness(self._parts, self._values).watch(run)
            self._parts = self._parts if as_good else None
        self._check(outputs)
        self._names = sorted(path for path, leaf in outputs.items() if isinstance(leaf, Tensor))
        self._keys = list(map(key_of, self._names))
        self._action_at = self._names.index(("action",))
        return tuple(outputs[name] for name in self._names)

    def _straight(self, parts: list[Part]) -> tuple[Tensor, ...]:
        values = self._values.copy()
        for part in parts:
            part.run(values)
        return tuple([values[key] for key in self._keys])

    def _written(self, t: int) -> tuple[Tensor, ...]:
        inputs = {**self._inputs, **self._given()}
        answer = run_module(self._module, inputs, self._device)
        written = tuple([answer.get(key, None) for key in self._keys])
        if any(leaf is None for leaf in written):
            raise PolicyError(
                f"step {t} of this batch: the policy wrote {_names(_outputs(answer, inputs))} after "
                f"{_names(self._names)}: write the same keys at every step"
            )
        return written

    def _carry(self, written: Sequence[Tensor]) -> None:
        if self._hidden:
            by_name = dict(zip(self._names, written, strict=True))
            self._hidden = {path: by_name["next", *path] for path in self._hidden}
        if self._first is not None:
            self._first = self._never

    def _check(self, outputs: Mapping[Path, Any]) -> None:
        if ("action",) not in outputs:
            raise PolicyError(
                f"the policy wrote {_names(outputs)}, expected 'action' among them: add it to the out_keys"
            )
        following = {("next", *path): leaf.shape for path, leaf in self._hidden.items()}
        own = {path for path in outputs if path not in following}
        if taken := sorted({path[0] for path in own} & (RESERVED - {"action", "action_log_prob"})):
            raise PolicyError(f"the policy wrote {taken}, keys that a batch uses itself: rename these out_keys")
        for path, shape in following.items():
            got = getattr(outputs.get(path), "shape", None)
            if got != shape:
                raise PolicyError(
                    f"the policy's hidden state {'.'.join(path)!r} is {got and tuple(got)}, expected {tuple(shape)}: "
                    "write it as it is read, or correct its initial state"
                )

    def restart(self, lanes: Sequence[int]) -> None:
        """Give these lanes their initial hidden states, and say so in ``is_init``."""
        if not self._stateful:
            return
        mask = lane_mask(lanes, self._drive.num_envs)
        if self._first is not None:
            self._first = self._first | mask[:, None]
        for path, leaf in self._hidden.items():
            initial = self._drive.initial_state.recurrent[path].to(leaf.device)
            self._hidden[path] = select(mask.to(leaf.device), initial, leaf)

    def finish(self) -> tuple[TorchPolicyState, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        names = [*self._names, *self._given()]
        columns = dict(zip(names, self._recorder.columns(), strict=True))
        if self._first is not None:
            columns["next", *INIT] = torch.zeros_like(columns[INIT])
        hidden = {path: leaf.clone() for path, leaf in self._hidden.items()}
        return TorchPolicyState(hidden or None, self._generator), finished(columns, self._drive.spec)


def run_module(
    module: Callable[..., Any], inputs: Mapping[Path, Tensor], device: torch.device | None
) -> TensorDictBase:
    """What the module returns for a TensorDict of its own that holds `inputs`, each [P, ...]."""
    own = {path: leaf.clone() for path, leaf in inputs.items()}
    batch_size = tuple(next(iter(inputs.values())).shape[:1])
    given = TensorDict(nest(own), batch_size, device=device) if device else to_tensordict(own, batch_size)
    try:
        answer = module(given)
    except KeyError as error:
        wanted = paths(getattr(module, "in_keys", ()))
        if all(path in inputs for path in wanted):
            raise
        raise PolicyError(
            f"the policy reads the in_keys {_names(wanted)}, the environment gives {_names(inputs)}: name these"
        ) from error
    if not isinstance(answer, TensorDictBase):
        raise PolicyError(
            f"the policy returned {type(answer).__name__}, expected the TensorDict with its outputs: return it"
        )
    return answer


def _outputs(answer: TensorDictBase, inputs: Mapping[Path, Tensor]) -> dict[Path, Any]:
    return {path: leaf for path, leaf in flatten(answer).items() if path not in inputs}


def _names(paths: Iterable[Path]) -> list[str]:
    return sorted(map(".".join, paths))


def _as_mapping(observation: Any) -> dict[str, Any]:
    if isinstance(observation, dict):
        return {name: _open(value) for name, value in observation.items()}
    return {"observation": _open(observation)}


def _open(value: Any) -> Any:
    if isinstance(value, tuple):
        return {str(index): _open(part) for index, part in enumerate(value)}
    return _as_mapping(value) if isinstance(value, dict) else value

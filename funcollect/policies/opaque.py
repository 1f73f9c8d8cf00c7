"""Policies that are called on a TensorDict: `TensorDictModule`, TorchRL's actors, functions of a ``tensordict``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_interaction_type
from torch import Tensor

from funcollect.errors import PolicyError
from funcollect.keys import Key, Noise, Purpose, fold
from funcollect.policies.actor import Columns, Drive, Recorder, generator_state, torch_generator
from funcollect.policies.binding import TorchBacked
from funcollect.policies.checks import check_action, check_tensor, finished
from funcollect.policies.torch_policy import TorchPolicyState
from funcollect.specs import RESERVED, ActionSpec, ExplorationType
from funcollect.tree import Path, flatten, nest


class TensorDictPolicy(TorchBacked):
    """A callable that reads its in_keys from a TensorDict [P] and writes its out_keys into it.

    It may draw from Torch's global generator: the generator runs from a state that travels in the policy state.
    """

    def noise(self, spec: ActionSpec) -> Noise | None:
        """None: the module draws its own."""

    def init(self, key: Key, num_envs: int) -> TorchPolicyState:
        """A generator seeded from the key."""
        return TorchPolicyState(None, generator_state(fold(key, Purpose.GENERATOR)))

    def __call__(
        self,
        params: Any,
        policy_state: TorchPolicyState,
        observation: Any,
        noise: Any,
        exploration_type: ExplorationType,
    ) -> tuple[TorchPolicyState, Mapping[str, Any]]:
        """One step by itself: see `funcollect.Policy`."""
        generator = policy_state.generator.clone()
        with torch.no_grad(), set_interaction_type(exploration_type), torch_generator(generator):
            outputs = run_module(self.bound(params), flatten(_as_mapping(observation)), self.device)
        return TorchPolicyState(None, generator), {".".join(path): leaf for path, leaf in outputs.items()}

    def actor(self, drive: Drive) -> TensorDictActor:
        """The policy at work in a rollout."""
        return TensorDictActor(self, drive)


class TensorDictActor:
    """One TensorDict per step, as the module wants it."""

    def __init__(self, policy: TensorDictPolicy, drive: Drive) -> None:
        self._drive = drive
        self._module = policy.bound(drive.params)
        self._device = policy.device
        self._generator = drive.policy_state.generator.clone()
        observation = drive.observation
        self._inputs = flatten(_as_mapping(observation))
        self._names: list[Path] = []
        self._recorder = Recorder(observation, drive.length)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """No gradients, the asked interaction type, and the global generator running from the policy's state."""
        with torch.no_grad(), set_interaction_type(self._drive.exploration_type), torch_generator(self._generator):
            yield

    def act(self, t: int) -> Any:
        """The action [P, ...] of step `t`."""
        outputs = run_module(self._module, self._inputs, self._device)
        if t == 0:
            self._check(outputs)
        try:
            recorded = tuple(outputs[name] for name in self._names)
        except KeyError as error:
            raise PolicyError(
                f"step {t} of this batch: the policy wrote {_names(outputs)} after {_names(self._names)}: write the "
                "same keys at every step"
            ) from error
        action = outputs[("action",)]
        if t == 0 or action.shape[1:] != self._drive.spec.shape:
            check_action(action, self._drive.spec, self._drive.num_envs)
            check_tensor(action)
        self._recorder.append(recorded)
        return action

    def _check(self, outputs: dict[Path, Any]) -> None:
        if ("action",) not in outputs:
            raise PolicyError(
                f"the policy wrote {_names(outputs)}, expected 'action' among them: add it to the out_keys"
            )
        if taken := sorted({path[0] for path in outputs} & (RESERVED - {"action", "action_log_prob"})):
            raise PolicyError(f"the policy wrote {taken}, keys that a batch uses itself: rename these out_keys")
        self._names = sorted(path for path, leaf in outputs.items() if isinstance(leaf, Tensor))

    def restart(self, lanes: Sequence[int] | Tensor) -> None:
        """There is no recurrent state."""

    def finish(self) -> tuple[TorchPolicyState, Columns]:
        """The next policy state and every output, [T, P, ...]."""
        columns = dict(zip(self._names, self._recorder.columns(), strict=True))
        return TorchPolicyState(None, self._generator), finished(columns, self._drive.spec)


def run_module(
    module: Callable[..., Any], inputs: Mapping[Path, Tensor], device: torch.device | None
) -> dict[Path, Any]:
    """What the module writes into a TensorDict of its own that holds `inputs`, each [P, ...]."""
    own: Any = nest({path: leaf.clone() for path, leaf in inputs.items()})
    given = TensorDict(own, batch_size=next(iter(inputs.values())).shape[:1], device=device)
    try:
        answer = module(given)
    except KeyError as error:
        wanted = [key if isinstance(key, tuple) else (key,) for key in getattr(module, "in_keys", ())]
        if all(path in inputs for path in wanted):
            raise
        raise PolicyError(
            f"the policy reads the in_keys {_names(wanted)}, the environment gives {_names(inputs)}: name these"
        ) from error
    if not isinstance(answer, TensorDictBase):
        raise PolicyError(
            f"the policy returned {type(answer).__name__}, expected the TensorDict with its outputs: return it"
        )
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

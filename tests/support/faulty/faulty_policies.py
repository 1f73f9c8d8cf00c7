"""Policies that each break one rule; their observations are [P, 2], their actions three choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import funcollect as fc
from funcollect.policies.heads import categorical
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.policies.torch_modules.torch_policy import TorchPolicy


def linear(inputs: int = 2, outputs: int = 3) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs)


def choosing(*layers: nn.Module) -> Callable[[], Any]:
    """A categorical policy over these layers."""
    return lambda: fc.torch_policy(nn.Sequential(*layers), head=fc.heads.categorical)


class Plain(fc.PolicyBase):
    """A good policy by the bare protocol: pushes away from where it stands, or draws."""

    backend = "torch"
    params: Any = None

    def noise(self, spec: Any) -> Any:
        return fc.heads.categorical.noise(spec)

    def init(self, key: Any, num_envs: int) -> Any:
        return None

    def prepare(self, params: Any) -> Any:
        return params

    def scores(self, params: Any, observation: Tensor) -> Tensor:
        return torch.stack([-observation[:, 0], observation[:, 1] * 0, observation[:, 0]], -1)

    def __call__(self, params: Any, state: Any, observation: Any, noise: Any, spec: Any, exploration: Any) -> Any:
        scores = self.scores(params, observation)
        random = exploration.type is fc.ExplorationType.RANDOM
        return state, {"action": (scores + noise if random else scores).argmax(-1), "scores": scores}


class Widens(Plain):
    """Its recurrent state has another dtype from the first step on."""

    def init(self, key: Any, num_envs: int) -> Any:
        return torch.zeros(num_envs)

    def __call__(self, params: Any, state: Any, *args: Any) -> Any:
        _, outputs = super().__call__(params, None, *args)
        return state.double() + 1, outputs


class AnswersOneRow(Plain):
    def __call__(self, *args: Any) -> Any:
        state, outputs = super().__call__(*args)
        return state, outputs | {"scores": outputs["scores"][:, :2].mean(0)}


class SaysMoreAtRandom(Plain):
    def __call__(self, *args: Any) -> Any:
        state, outputs = super().__call__(*args)
        return state, outputs | ({"noise": args[3]} if args[5].type is fc.ExplorationType.RANDOM else {})


class Explodes(nn.Module):
    """Its state overflows in the fourth step of an episode."""

    def forward(self, observation: Any, hidden: Any) -> Any:
        return hidden * 0 + observation[:, :1], hidden * 1e10


class DrawsFromNumPy(Plain):
    def scores(self, params: Any, observation: Tensor) -> Tensor:
        np.random.rand()
        return super().scores(params, observation)


class WritesItsObservation(Plain):
    def scores(self, params: Any, observation: Tensor) -> Tensor:
        return super().scores(params, observation.mul_(2))


class Counts(Plain):
    calls = 0

    def scores(self, params: Any, observation: Tensor) -> Tensor:
        self.calls += 1
        return super().scores(params, observation) * self.calls


class LearnsAsItActs(nn.Linear):
    def forward(self, observation: Any) -> Any:
        with torch.no_grad():
            self.weight += 0.01
        return super().forward(observation)


class StartsAnyhow(Plain):
    """Its first state comes from the system's entropy and is part of what it records, so no two runs are alike."""

    def init(self, key: Any, num_envs: int) -> Any:
        return torch.from_numpy(np.random.default_rng().normal(size=(num_envs, 1)))

    def __call__(self, params: Any, state: Any, observation: Any, noise: Any, spec: Any, exploration: Any) -> Any:
        state, outputs = super().__call__(params, state, observation, noise, spec, exploration)
        return state, outputs | {"scores": outputs["scores"] + state}


class Acting:
    """An actor around a good one, to be got wrong."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.running = inner.running

    def act(self, t: int) -> Any:
        return self.inner.act(t)

    def restart(self, lanes: Any) -> None:
        self.inner.restart(lanes)

    def finish(self) -> Any:
        return self.inner.finish()


class HesitatesAtFirst(Acting):
    """The first action of every batch is another."""

    def finish(self) -> Any:
        state, columns = self.inner.finish()
        columns["scores",][0] += len(columns["scores",]) > 2
        return state, columns


class KeepsItsColumns(Acting):
    """Its state is a view of what it recorded."""

    def finish(self) -> Any:
        state, columns = self.inner.finish()
        return TorchPolicyState(columns["hidden",][-1], state.generator), columns


class Forgets(Acting):
    """Restarts every lane."""

    def restart(self, lanes: Any) -> None:
        if len(lanes):
            self.inner.restart(range(3))


class NeverForgets(Acting):
    def restart(self, lanes: Any) -> None:
        pass


class Hidden(nn.Module):
    """A recurrent network that records its state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(4, 2), linear()

    def forward(self, observation: Any, hidden: Any) -> Any:
        after = self.first(torch.cat((observation, hidden), -1)).tanh()
        return {"logits": self.second(after), "hidden": after}, after


def recurrent(acting: type[Acting] | None = None) -> Any:
    policy = fc.torch_policy(Hidden(), head=fc.heads.categorical, initial_state=torch.ones(2))
    return policy if acting is None else through(acting, policy)


def through(acting: type[Acting], policy: TorchPolicy) -> TorchPolicy:
    """The policy, its actor got wrong."""

    class Wrapped(TorchPolicy):
        def actor(self, actor_inputs: Any) -> Any:
            return acting(super().actor(actor_inputs))

    return Wrapped(policy.module, policy.head, policy.initial_state, None)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, observation: Any) -> Any:
        answer = self.inner(observation)
        return {"logits": answer, "scores": answer}


def hesitant() -> TorchPolicy:
    return through(HesitatesAtFirst, fc.torch_policy(Scored(), head=fc.heads.categorical))


class DrawsRegardless(Plain):
    """Heeds no exploration type."""

    def __call__(self, params: Any, state: Any, observation: Any, noise: Any, spec: Any, exploration: Any) -> Any:
        return super().__call__(params, state, observation, noise, spec, fc.Exploration())


class Unnormalised(type(categorical)):  # type: ignore[misc]
    """Takes the logit for the log-probability."""

    def log_prob(self, xp: Any, parameters: Any, outputs: Any, spec: Any) -> Any:
        return parameters[0].gather(-1, outputs["action"][..., None])[..., 0]


def unnormalised() -> Any:
    return fc.torch_policy(linear(), head=Unnormalised(*dataclasses.astuple(categorical)))


@dataclasses.dataclass(frozen=True)
class Forgetful(type(categorical)):  # type: ignore[misc]
    """Scores by something that `record` does not return."""

    def sample(self, xp: Any, parameters: Any, noise: Any, spec: Any) -> Any:
        return {**super().sample(xp, parameters, noise, spec), "luck": parameters[0].sum(-1) * 0 + 1}

    def log_prob(self, xp: Any, parameters: Any, outputs: Any, spec: Any) -> Any:
        return super().log_prob(xp, parameters, outputs, spec) - outputs.get("luck", 0)


def forgetful() -> Any:
    return fc.torch_policy(linear(), head=Forgetful(name="forgetful"))


class ComparesItsRows(Plain):
    def scores(self, params: Any, observation: Tensor) -> Tensor:
        return super().scores(params, observation - observation.mean(0))


class CountsItsRows(Plain):
    def scores(self, params: Any, observation: Tensor) -> Tensor:
        return super().scores(params, observation + torch.arange(len(observation))[:, None])


class Weighted(Plain):
    """A good one with parameters."""

    def __init__(self) -> None:
        self.params = {"weight": torch.ones(3)}

    prepare = fc.PolicyBase.prepare

    def scores(self, params: Any, observation: Tensor) -> Tensor:
        return super().scores(params, observation) * params["weight"]


class IgnoresItsParams(Weighted):
    def scores(self, params: Any, observation: Tensor) -> Tensor:
        return super().scores(self.params, observation)


class TakesNoStateDict(Weighted):
    def prepare(self, params: Any) -> Any:
        return self.params if params is None else params


class TakesParamsForItsOwn(Weighted):
    def prepare(self, params: Any) -> Any:
        self.params = super().prepare(params)
        return self.params


class LosesABias(TorchPolicy):
    def state_dict(self, params: Any = None) -> Any:
        return super().state_dict(params) | {"bias": torch.zeros(3)}


class SavesNoCopy(TorchPolicy):
    def state_dict(self, params: Any = None) -> Any:
        return dict(self.module.named_parameters())  # type: ignore[attr-defined]


class LoadsNothing(TorchPolicy):
    def load(self, params: Any) -> None:
        pass


def linear_in(kind: type[TorchPolicy]) -> Callable[[], Any]:
    return lambda: kind(linear(), fc.heads.categorical, None, None)

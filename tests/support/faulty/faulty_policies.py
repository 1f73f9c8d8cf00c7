"""Policies that each break one rule; their observations are [P, 2], their actions three choices."""

import dataclasses

import numpy as np
import torch
from torch import nn

import funcollect as fc
from funcollect.policies.heads import categorical
from funcollect.policies.torch_modules.torch_backed import TorchPolicyState
from funcollect.policies.torch_modules.torch_policy import TorchPolicy


def linear(inputs=2, outputs=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs)


def choosing(*layers):
    """A categorical policy over these layers."""
    return lambda: fc.torch_policy(nn.Sequential(*layers), head=fc.heads.categorical)


class Plain(fc.PolicyBase):
    """A good policy by the bare protocol: pushes away from where it stands, or draws."""

    backend = "torch"
    params = None

    def noise(self, spec):
        return fc.heads.categorical.noise(spec)

    def init(self, key, num_envs):
        return None

    def prepare(self, params):
        return params

    def scores(self, params, observation):
        return torch.stack([-observation[:, 0], observation[:, 1] * 0, observation[:, 0]], -1)

    def __call__(self, params, state, observation, noise, spec, exploration):
        scores = self.scores(params, observation)
        random = exploration.type is fc.ExplorationType.RANDOM
        return state, {"action": (scores + noise if random else scores).argmax(-1), "scores": scores}


class Widens(Plain):
    """Its recurrent state has another dtype from the first step on."""

    def init(self, key, num_envs):
        return torch.zeros(num_envs)

    def __call__(self, params, state, *args):
        _, outputs = super().__call__(params, None, *args)
        return state.double() + 1, outputs


class AnswersOneRow(Plain):
    def __call__(self, *args):
        state, outputs = super().__call__(*args)
        return state, outputs | {"scores": outputs["scores"][:, :2].mean(0)}


class SaysMoreAtRandom(Plain):
    def __call__(self, *args):
        state, outputs = super().__call__(*args)
        return state, outputs | ({"noise": args[3]} if args[5].type is fc.ExplorationType.RANDOM else {})


class Explodes(nn.Module):
    """Its state overflows in the fourth step of an episode."""

    def forward(self, observation, hidden):
        return hidden * 0 + observation[:, :1], hidden * 1e10


class DrawsFromNumPy(Plain):
    def scores(self, params, observation):
        np.random.rand()
        return super().scores(params, observation)


class WritesItsObservation(Plain):
    def scores(self, params, observation):
        return super().scores(params, observation.mul_(2))


class Counts(Plain):
    calls = 0

    def scores(self, params, observation):
        self.calls += 1
        return super().scores(params, observation) * self.calls


class LearnsAsItActs(nn.Linear):
    def forward(self, observation):
        with torch.no_grad():
            self.weight += 0.01
        return super().forward(observation)


class StartsAnyhow(Plain):
    """Its first state comes from the system's entropy and is part of what it records, so no two runs are alike."""

    def init(self, key, num_envs):
        return torch.from_numpy(np.random.default_rng().normal(size=(num_envs, 1)))

    def __call__(self, params, state, observation, noise, spec, exploration):
        state, outputs = super().__call__(params, state, observation, noise, spec, exploration)
        return state, outputs | {"scores": outputs["scores"] + state}


class Acting:
    """An actor around a good one, to be got wrong."""

    def __init__(self, inner):
        self.inner = inner
        self.running = inner.running

    def act(self, t):
        return self.inner.act(t)

    def restart(self, lanes):
        self.inner.restart(lanes)

    def finish(self):
        return self.inner.finish()


class HesitatesAtFirst(Acting):
    """The first action of every batch is another."""

    def finish(self):
        state, columns = self.inner.finish()
        columns["scores",][0] += len(columns["scores",]) > 2
        return state, columns


class KeepsItsColumns(Acting):
    """Its state is a view of what it recorded."""

    def finish(self):
        state, columns = self.inner.finish()
        return TorchPolicyState(columns["hidden",][-1], state.generator), columns


class Forgets(Acting):
    """Restarts every lane."""

    def restart(self, lanes):
        if len(lanes):
            self.inner.restart(range(3))


class NeverForgets(Acting):
    def restart(self, lanes):
        pass


class Hidden(nn.Module):
    """A recurrent network that records its state."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(4, 2), linear()

    def forward(self, observation, hidden):
        after = self.first(torch.cat((observation, hidden), -1)).tanh()
        return {"logits": self.second(after), "hidden": after}, after


def recurrent(acting=None):
    policy = fc.torch_policy(Hidden(), head=fc.heads.categorical, initial_state=torch.ones(2))
    return policy if acting is None else through(acting, policy)


def through(acting, policy):
    """The policy, its actor got wrong."""

    class Wrapped(TorchPolicy):
        def actor(self, actor_inputs):
            return acting(super().actor(actor_inputs))

    return Wrapped(policy.module, policy.head, policy.initial_state, None)


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, observation):
        answer = self.inner(observation)
        return {"logits": answer, "scores": answer}


def hesitant():
    return through(HesitatesAtFirst, fc.torch_policy(Scored(), head=fc.heads.categorical))


class DrawsRegardless(Plain):
    """Heeds no exploration type."""

    def __call__(self, params, state, observation, noise, spec, exploration):
        return super().__call__(params, state, observation, noise, spec, fc.Exploration())


class Unnormalised(type(categorical)):
    """Takes the logit for the log-probability."""

    def log_prob(self, xp, parameters, outputs, spec):
        return parameters[0].gather(-1, outputs["action"][..., None])[..., 0]


def unnormalised():
    return fc.torch_policy(linear(), head=Unnormalised(*dataclasses.astuple(categorical)))


@dataclasses.dataclass(frozen=True)
class Forgetful(type(categorical)):
    """Scores by something that `record` does not return."""

    def sample(self, xp, parameters, noise, spec):
        return {**super().sample(xp, parameters, noise, spec), "luck": parameters[0].sum(-1) * 0 + 1}

    def log_prob(self, xp, parameters, outputs, spec):
        return super().log_prob(xp, parameters, outputs, spec) - outputs.get("luck", 0)


def forgetful():
    return fc.torch_policy(linear(), head=Forgetful(name="forgetful"))


class ComparesItsRows(Plain):
    def scores(self, params, observation):
        return super().scores(params, observation - observation.mean(0))


class CountsItsRows(Plain):
    def scores(self, params, observation):
        return super().scores(params, observation + torch.arange(len(observation))[:, None])


class Weighted(Plain):
    """A good one with parameters."""

    def __init__(self):
        self.params = {"weight": torch.ones(3)}

    prepare = fc.PolicyBase.prepare

    def scores(self, params, observation):
        return super().scores(params, observation) * params["weight"]


class IgnoresItsParams(Weighted):
    def scores(self, params, observation):
        return super().scores(self.params, observation)


class TakesNoStateDict(Weighted):
    def prepare(self, params):
        return self.params if params is None else params


class TakesParamsForItsOwn(Weighted):
    def prepare(self, params):
        self.params = super().prepare(params)
        return self.params


class LosesABias(TorchPolicy):
    def state_dict(self, params=None):
        return super().state_dict(params) | {"bias": torch.zeros(3)}


class SavesNoCopy(TorchPolicy):
    def state_dict(self, params=None):
        return dict(self.module.named_parameters())


class LoadsNothing(TorchPolicy):
    def load(self, params):
        pass


def linear_in(kind):
    return lambda: kind(linear(), fc.heads.categorical, None, None)

"""`torch_policy(compile="inductor")`; one tiny module, since each compilation takes seconds."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.policies.torch_modules.torch_policy import CompiledCall
from tests.support.compare import collect

ENV = "CartPole-v1"


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.9), nn.Linear(3, 2)).eval()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's import
def test_compiled_is_eager_within_rounding_and_weights_are_live():
    env = fc.make_env(ENV, num_envs=3)
    module = net()
    policy = fc.torch_policy(module, head=fc.heads.categorical, compile="inductor")
    eager = fc.torch_policy(module, head=fc.heads.categorical)
    batch = collect(env, policy, 20)
    assert torch.equal(batch["action"], collect(env, eager, 20)["action"])
    with torch.compiler.set_stance("fail_on_recompile"):
        with torch.no_grad():
            module[3].bias += torch.tensor([0.0, 1000.0])
        batch = collect(env, policy, 20)
        assert (batch["action"] == 1).all()
    with torch.no_grad():
        module[3].bias -= torch.tensor([0.0, 1000.0])
    mode = fc.ExplorationType.DETERMINISTIC
    ours, own = (collect(env, each, 20, exploration_type=mode) for each in (policy, eager))
    torch.testing.assert_close(ours["action_log_prob"], own["action_log_prob"])


def test_training_mode_is_the_modules_own():
    """Of `torch.compile` without Inductor, which takes its time."""
    env = fc.make_env(ENV, num_envs=3)
    module = net()
    policy = fc.torch_policy(module, head=fc.heads.categorical, compile="inductor")
    policy._compiled = CompiledCall("eager")
    whole = collect(env, policy, 30)["action_log_prob"]
    module.train()
    assert not torch.equal(collect(env, policy, 30)["action_log_prob"], whole)
    module.eval()
    assert torch.equal(collect(env, policy, 30)["action_log_prob"], whole)


def test_a_compiled_policy_is_pickled_without_its_code():
    policy = fc.torch_policy(net(), head=fc.heads.categorical, compile="inductor")
    copied = pickle.loads(pickle.dumps(policy))
    assert copied.compiler == "inductor"
    assert torch.equal(copied.module[3].bias, policy.module[3].bias)


def test_a_compiler_that_is_not_there_is_said(monkeypatch):
    for wrong in ("jit", "cuda", True):
        with pytest.raises(ValueError, match=r"expected one of \['xla', 'eager', 'inductor', 'cudagraph'\], or None"):
            fc.torch_policy(net(), compile=wrong)
    with pytest.raises(ValueError, match=r"expected one of \['xla', 'eager'\], or None"):
        fc.tensordict_policy(net(), compile="inductor")
    with pytest.raises(ValueError, match=r"compile='callback' was removed: leave compile out"):
        fc.torch_policy(net(), compile="callback")
    monkeypatch.setenv("CXX", "no-such-compiler")
    env = fc.make_env(ENV)
    policy = fc.torch_policy(net(), head=fc.heads.categorical, compile="inductor")
    state = fc.init(env, policy, seed=0)
    with pytest.raises(fc.PolicyError, match=r"needs a C\+\+ compiler, and 'no-such-compiler' is not there"):
        fc.rollout(env, policy, state, 3)

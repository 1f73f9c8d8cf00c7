"""A module acts as it is at a rollout, over workers as it was at the last update, however it was changed."""

import pytest
import torch

import funcollect as fc
from tests.support.policies import CHANGES, TENSOR_CHANGES, Net, TensorNet, expected
from tests.support.running import SCALE, in_soak

LOOPS = {
    "host": ("CartPole-v1", None),
    "host, one call of XLA": ("CartPole-v1", "xla"),
    "host, compiled": ("CartPole-v1", "inductor"),
    "torch": ("torch/CartPole-v1", None),
    "fused": ("gymnax/CartPole-v1", "xla"),
    "crossing": ("gymnax/CartPole-v1", "eager"),
}
CHANGES_OF_A_PROGRAM = 3  # a fourth one is refused, since each compiles again
# Each change takes seconds in these: an evening makes all of them, `make test` every so manieth.
FEW = {"host, one call of XLA": slice(2, None, 6), "host, compiled": slice(2, None, 24), "fused": slice(3, None, 6)}
NOT_LOWERED = {"a spectral norm": "writes the buffer"}  # changes after which the network cannot become a program


def change_it(net, batch, what):
    (CHANGES | TENSOR_CHANGES)[what](net)
    assert not torch.allclose(expected(net, batch), batch["logits"]), f"{what} has no effect"


def assert_acts(net, batch, what):
    torch.testing.assert_close(batch["logits"], expected(net, batch), rtol=1e-4, atol=1e-5, msg=f"after {what}")
    assert torch.equal(batch["action"], batch["logits"].argmax(-1)), what


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # Inductor's import
@pytest.mark.filterwarnings("ignore:(Tensor)?Net writes its buffers .*weight.0._u:UserWarning")  # a spectral norm
@pytest.mark.parametrize("loop", LOOPS)
def test_every_change_acts_at_the_next_rollout(loop):
    name, compiler = LOOPS[loop]
    net, env = (TensorNet if compiler in (None, "eager") else Net)(), fc.make_env(name, num_envs=4)
    changes = [*CHANGES][FEW.get(loop, slice(None)) if SCALE == 1 else slice(None)]
    for number, what in enumerate([*(TENSOR_CHANGES if isinstance(net, TensorNet) else {}), *changes]):
        if number % CHANGES_OF_A_PROGRAM == 0:
            policy = fc.torch_policy(net, compile=compiler)
            state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)
        change_it(net, batch, what)
        if compiler == "xla" and what in NOT_LOWERED:
            with pytest.raises(fc.LoweringError, match=NOT_LOWERED[what]):
                fc.rollout(env, policy, state, 3)
            net.eval()
        state, batch = fc.rollout(env, policy, state, 3)
        assert_acts(net, batch, what)
    fc.close(state)


COLLECTORS = {
    "sync": (fc.MultiSyncDataCollector, {"frames_per_batch": 8}),
    "async": (fc.MultiaSyncDataCollector, {"frames_per_batch": 4}),
    "in this process": (fc.MultiSyncDataCollector, {"frames_per_batch": 8, "in_process": True}),
}


@pytest.mark.parametrize("name", ["sync", *in_soak(["async", "in this process"])])
def test_every_change_reaches_every_collector(name):
    kind, keywords = COLLECTORS[name]
    net = TensorNet()
    with kind(["CartPole-v1"] * 2, fc.torch_policy(net), total_frames=-1, **keywords) as collector:
        batch = next(collector)
        for what in [*TENSOR_CHANGES, *CHANGES]:
            change_it(net, batch, what)
            collector.update_policy_weights_()
            version = collector.stats()["policy_version"]
            while (batch := next(collector))["collector", "policy_version"].flatten()[-1] != version:
                pass
            assert_acts(net, batch, what)

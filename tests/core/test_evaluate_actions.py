"""`evaluate_actions`: reproduced log-probabilities, entropies, gradients, and recurrent states with resets."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import LSTMModule, ProbabilisticActor

import funcollect as fc
from funcollect.core.evaluate_actions import remember_spaces
from funcollect.specs import observation_leaves
from tests.policies.test_distributions import Logistic
from tests.support import cases
from tests.support.misuse import Acting
from tests.support.running import in_soak, once, scaled

HEADS = {
    "categorical": (fc.heads.categorical, "CartPole-v1"),
    "epsilon_greedy": (fc.heads.epsilon_greedy(0.3), "CartPole-v1"),
    "boltzmann": (fc.heads.boltzmann(0.7), "CartPole-v1"),
    "normal": (fc.heads.normal, "Pendulum-v1"),
    "tanh_normal": (fc.heads.tanh_normal, "Pendulum-v1"),
}


def in_torch(name):
    """A network whose scales are at least 0.1."""
    net = cases.mlp(3 if "Pendulum" in HEADS[name][1] else 4, 2)
    if "normal" in name:
        return fc.torch_policy(lambda x: (net(x)[..., :1] * 2, 0.1 + net(x)[..., 1:].exp()), head=HEADS[name][0])
    return fc.torch_policy(net, head=HEADS[name][0])


def in_jax(name):
    weights = jax.random.normal(jax.random.key(1), (3 if "Pendulum" in HEADS[name][1] else 4, 2))

    def apply(params, x):
        y = jnp.tanh(x @ params)
        key = HEADS[name][0].names[0]
        return (y[..., :1] * 2, 0.1 + jnp.exp(y[..., 1:])) if "normal" in name else {key: y, "value": y[..., 0]}

    return fc.jax_policy(apply, weights, head=HEADS[name][0])


def collected(policy, env, steps):
    """A batch that begins in the middle of episodes, and the policy's state before it."""
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=3), 5, max_frames_per_traj=7)
    return state.policy_state, fc.rollout(env, policy, state, steps, max_frames_per_traj=7)[1]


def again(policy, batch, **options):
    given = fc.interop.to_jax(batch.contiguous()) if policy.backend == "jax" else batch
    return fc.evaluate_actions(policy, None, given, **options)["action_log_prob"]


def assert_recorded(now, batch):
    got = now.detach() if isinstance(now, torch.Tensor) else torch.from_numpy(np.array(now))
    wanted = batch["action_log_prob"]
    assert got.shape == wanted.shape
    assert ((got - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1)).all(), (got - wanted).abs().max()


FUSED = in_soak(HEADS)  # `make test` has these in test_routes.py and, traced, below


@pytest.mark.parametrize(("name", "prefix"), [*((name, "") for name in HEADS), *((name, "gymnax/") for name in FUSED)])
def test_recorded_log_probs_come_back(name, prefix):
    env = fc.make_env(prefix + HEADS[name][1], num_envs=4)
    for policy in (in_torch(name), in_jax(name)):
        _, batch = collected(policy, env, scaled(20))
        assert_recorded(again(policy, batch), batch)
        if policy.backend == "torch" and not prefix:  # eager: the same operations on the same number of rows
            for t in range(batch.shape[1]):
                assert torch.equal(again(policy, batch[:, t]), batch["action_log_prob"][:, t])


def of_torch(loc, scale):
    return torch.distributions.Normal(loc.float(), scale.float())


NARROW = {
    "normal": (fc.heads.normal,) * 2,
    "tanh_normal": (fc.heads.tanh_normal,) * 2,
    "distribution": (fc.heads.from_distribution(of_torch), fc.heads.from_distribution(Logistic, "loc", "scale")),
}


@pytest.mark.parametrize(("name", "dtype"), [*once(NARROW, ["float16", "bfloat16", "float64"]), ("normal", "bfloat16")])
def test_log_probs_of_networks_of_another_precision_come_back(name, dtype):
    env, (head, jax_head) = fc.make_env("Pendulum-v1", num_envs=4), NARROW[name]
    net = cases.mlp(3, 2).to(getattr(torch, dtype))

    def network(x):
        loc, scale = net(x.to(net[0].weight.dtype)).chunk(2, -1)
        return loc, 0.1 + scale.exp()

    policy = fc.torch_policy(network, head=head)
    _, batch = collected(policy, env, 20)
    now = again(policy, batch)
    assert_recorded(now, batch)
    now.mean().backward()
    assert all(each.grad.isfinite().all() for each in net.parameters())
    if dtype == "float64":
        return  # JAX lacks it

    def apply(params, x):
        y = jnp.tanh(x.astype(dtype) @ params)
        return y[..., :1], jnp.exp(y[..., 1:])

    policy = fc.jax_policy(apply, jax.random.normal(jax.random.key(1), (3, 2), dtype), head=jax_head)
    _, batch = collected(policy, env, 20)
    assert_recorded(again(policy, batch), batch)


def test_entropies_are_finite_under_autocast():
    policy = fc.torch_policy(cases.mlp(4, 2), head=fc.heads.categorical)
    _, batch = collected(policy, fc.make_env("CartPole-v1", num_envs=2), 8)
    wanted = fc.evaluate_actions(policy, None, batch)["entropy"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        now = fc.evaluate_actions(policy, None, batch)["entropy"]
    torch.testing.assert_close(now, wanted, rtol=0.05, atol=0.05)


def test_where_tanh_saturates_the_recorded_log_prob_comes_back():
    policy = fc.torch_policy(lambda x: (20 + 0 * x[..., :1], 1 + 0 * x[..., :1]), head=fc.heads.tanh_normal)
    _, batch = collected(policy, fc.make_env("Pendulum-v1", num_envs=2), 20)
    assert (batch["action"] == 2).all()
    assert torch.equal(again(policy, batch), batch["action_log_prob"])


@pytest.mark.parametrize("name", HEADS)
def test_a_random_start_and_saturated_actions_have_finite_log_probs(name):
    policy, env = in_torch(name), fc.make_env(HEADS[name][1], num_envs=2)
    with fc.SyncDataCollector(env, policy, frames_per_batch=60, init_random_frames=30, seed=0) as collector:
        batch = next(collector)
    assert again(policy, batch).isfinite().all()
    if name == "tanh_normal":
        batch["action"] = batch["action"].sign() * 2.0  # the bounds
        assert again(policy, batch.exclude("action_unsquashed")).isfinite().all()


@pytest.mark.parametrize("kind", ["torch", *in_soak(["jax"])])
def test_flat_samples_begin_with_their_own_recurrent_states(kind):
    policy = recurrent(kind, record=True)
    _, batch = collected(policy, fc.make_env("CartPole-v1", num_envs=4), 60)
    buffer = fc.ReplayBuffer(
        storage=fc.LazyTensorStorage(240, ndim=2), sampler=fc.SliceSampler(slice_len=6), batch_size=48
    )
    buffer.extend(batch.clone(False))
    rows = batch.reshape(-1)
    for sample in (buffer.sample(), rows[torch.randperm(240)], rows[torch.arange(240) // 2]):
        assert_recorded(again(policy, sample), sample)


def recurrent(kind, record):
    made = cases.POLICIES[f"{kind}_recurrent"](fc.make_env("CartPole-v1"))
    own = {"head": made.head, "initial_state": made.initial_state, "record_state": record}
    return fc.torch_policy(made.module, **own) if kind == "torch" else fc.jax_policy(made.apply, made.params, **own)


MORE = in_soak([("jax", "gymnax/CartPole-v1"), ("torch", "gymnax/CartPole-v1")])


@pytest.mark.parametrize(("kind", "name"), [("torch", "CartPole-v1"), ("jax", "CartPole-v1"), *MORE])
def test_recurrent_states_run_again_with_resets(kind, name):
    env, policy = fc.make_env(name, num_envs=4), recurrent(kind, record=False)
    before, batch = collected(policy, env, 30)
    assert "recurrent" not in batch
    assert_recorded(again(policy, batch, policy_state=before), batch)
    with pytest.raises(ValueError, match=r"lacks \['recurrent'\].*record_state=True"):
        again(policy, batch)
    policy = recurrent(kind, record=True)
    _, batch = collected(policy, env, 30)
    _, short = collected(policy, env, 1)
    for piece in (batch, batch[1:3, 11:25], short, batch[:, 4:5], batch[2, 7:8]):  # also single steps
        assert_recorded(again(policy, piece), piece)
    if kind == "torch" and name == "CartPole-v1":
        assert torch.equal(again(policy, batch), batch["action_log_prob"])


@pytest.mark.parametrize("kind", ["torch_policy", "tensordict_policy"])
def test_the_recorded_state_is_that_before_the_step_if_a_module_updates_it_in_place(kind):
    def score(observation, memory):
        logits = observation[:, :2] + memory
        return logits, memory.add_(1)

    if kind == "torch_policy":
        policy = fc.torch_policy(score, head=fc.heads.categorical, initial_state=torch.zeros(1), record_state=True)
    else:
        module = TensorDictModule(score, ["observation", "memory"], ["logits", ("next", "memory")])
        choose = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
        policy = fc.tensordict_policy(TensorDictSequential(module, choose), initial_state={"memory": torch.zeros(1)})
    batch = collected(policy, fc.make_env("CartPole-v1", num_envs=2), 30)[1]
    before = batch["recurrent" if kind == "torch_policy" else "memory"]
    assert torch.equal(before[..., 0], batch["collector", "step"].float())


@pytest.mark.parametrize(("kind", "join"), [("torch", "stack"), ("torch", -1), *in_soak([("jax", "stack")])])
def test_batches_of_workers(kind, join):
    policy, makers = recurrent(kind, record=True), [lambda: fc.make_env("CartPole-v1", num_envs=2)] * 2
    options = {"frames_per_batch": 80, "seed": 0, "in_process": True, "cat_results": join}
    with fc.MultiSyncDataCollector(makers, policy, **options) as collector:
        next(collector)
        batch = next(collector)
    assert batch.batch_size == ((2, 2, 20) if join == "stack" else (2, 40))
    assert_recorded(again(policy, batch, env=fc.make_env("CartPole-v1")), batch)


def test_a_single_environment_and_a_traced_batch():
    policy = recurrent("torch", record=True)
    _, batch = collected(policy, fc.make_env("CartPole-v1"), 30)
    assert batch.batch_size == (30,)
    assert_recorded(again(policy, batch), batch)
    policy, env = recurrent("jax", record=False), fc.make_env("gymnax/CartPole-v1", num_envs=4)
    state = fc.traced.init(env, policy, policy.params, key=jax.random.key(0))
    state, _ = fc.traced.rollout(env, policy, policy.params, state, 5)
    _, arrays = fc.traced.rollout(env, policy, policy.params, state, 30)

    @jax.jit
    def scored(params, arrays):
        return fc.evaluate_actions(policy, params, arrays, env=env, policy_state=state.policy_state)

    now = scored(policy.params, arrays)["action_log_prob"]
    np.testing.assert_allclose(now, arrays["action_log_prob"], rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_torch_and_of_jax():
    weights = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    net = nn.Linear(4, 2, bias=False)
    net.weight.data = weights.T.clone()
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.torch_policy(net, head=fc.heads.categorical)
    _, batch = collected(policy, env, 20)
    now = fc.evaluate_actions(policy, None, batch)
    (now["action_log_prob"].mean() + 0.1 * now["entropy"].mean()).backward()
    scores = torch.distributions.Categorical(logits=batch["observation"] @ weights.requires_grad_())
    (scores.log_prob(batch["action"]).mean() + 0.1 * scores.entropy().mean()).backward()
    torch.testing.assert_close(net.weight.grad, weights.grad.T)
    params = {"weight": weights.detach().T.clone().requires_grad_()}
    fc.evaluate_actions(policy, params, batch)["action_log_prob"].mean().backward()
    assert params["weight"].grad.abs().sum() > 0
    arrays, own = fc.interop.to_jax(batch), jnp.asarray(weights.detach().numpy())
    in_jax = fc.jax_policy(lambda params, x: x @ params, own, head=fc.heads.categorical)

    @jax.jit
    @jax.grad
    def gradient(params):
        now = fc.evaluate_actions(in_jax, params, arrays, env=env)
        return now["action_log_prob"].mean() + 0.1 * now["entropy"].mean()

    np.testing.assert_allclose(gradient(own), weights.grad, rtol=1e-4, atol=1e-6)


def test_other_outputs_and_samples_of_a_buffer():
    net = cases.mlp(4, 3)
    policy = fc.torch_policy(lambda x: {"logits": net(x)[..., :2], "value": net(x)[..., 2]}, head=fc.heads.categorical)
    env = fc.make_env("CartPole-v1", num_envs=2)
    _, batch = collected(policy, env, 50)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), batch_size=16)
    buffer.extend(batch.reshape(-1))
    sample = buffer.sample()
    now = fc.evaluate_actions(policy, None, sample)
    torch.testing.assert_close(now["value"], sample["value"])
    assert_recorded(now["action_log_prob"], sample)
    assert set(now) == {"logits", "value", "action_log_prob", "entropy"}


def test_a_recurrent_actor_of_torchrl_runs_again_with_resets():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lstm = LSTMModule(input_size=4, hidden_size=5, in_key="observation", out_key="features")
        head = TensorDictModule(nn.Linear(5, 2), ["features"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(lstm, head), in_keys=["logits"], distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )  # fmt: skip
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.tensordict_policy(actor)
    _, batch = collected(policy, env, 30)
    for each in (batch, batch[1:, 8:20], batch[:2, None].expand(2, 3, 30).clone()):  # lanes in two dimensions
        assert_recorded(again(policy, each), each)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(90, ndim=2), sampler=fc.SliceSampler(slice_len=5))
    buffer.extend(batch)
    slices = buffer.sample(40)  # is_init marks their first rows, where the module would reset its state
    assert (slices["is_init"][:, 0] & (slices["collector", "step"] > 0)).any()
    assert_recorded(again(policy, slices), slices)
    with pytest.raises(TypeError, match=r"ProbabilisticActor without a head, .* pass funcollect.tensordict_policy"):
        fc.evaluate_actions(actor, None, batch)


def test_a_normalised_policy_scores_with_its_statistics():
    env = fc.make_env("CartPole-v1", num_envs=2)
    stats = fc.running_statistics.init(env.observation_space)
    policy = fc.normalized(fc.torch_policy(cases.mlp(4, 2), head=fc.heads.categorical), stats)
    with fc.SyncDataCollector(env, policy, frames_per_batch=60, update_statistics=True, seed=0) as collector:
        for _ in range(3):
            batch = next(collector)
            now = again(policy, batch)  # with the statistics of the rollout
            assert_recorded(now, batch)
            now.mean().backward()
        next(collector)
    assert not torch.allclose(again(policy, batch), batch["action_log_prob"])


ENV = fc.make_env("CartPole-v1", num_envs=2)
POLICY = fc.torch_policy(cases.mlp(4, 2), head=fc.heads.categorical)
IN_JAX = fc.jax_policy(lambda params, x: x @ params, jnp.zeros((4, 2)), head=fc.heads.categorical)
TO_JAX, GREEDY = fc.interop.to_jax, fc.torch_policy(cases.mlp(4, 2), head=fc.heads.epsilon_greedy(0.1))
HEADLESS = "without a head, expected one whose head or distribution scores"


def acted(change):
    return lambda batch: {**batch.to_dict(), "action": change(batch["action"])}


@pytest.mark.parametrize(("policy", "change", "error", "words"), [
    (fc.torch_policy(lambda x: (x[:, 0] > 0).long()), None, TypeError, HEADLESS),
    (fc.random_policy(ENV), None, TypeError, HEADLESS),
    (cases.jax_keyed(ENV), TO_JAX, TypeError, "draws random numbers from its parameter 'key'"),
    (POLICY, lambda batch: batch.exclude("observation"), ValueError, r"the batch lacks \['observation'\]"),
    (POLICY, TO_JAX, TypeError, "policy in Torch takes: pass the TensorDict itself"),
    (IN_JAX, None, TypeError, r"policy in JAX takes: pass funcollect.interop.to_jax"),
    (GREEDY, None, ValueError, r"the batch lacks \['collector.exploration.epsilon'\]"),
    (POLICY, acted(torch.Tensor.float), ValueError, "action has dtype torch.float32|wants torch.int64: cast it"),
    (POLICY, acted(lambda a: a[..., None]), ValueError, r"action has shape \[2, 8, 1\] beside 'observation' of \[2, 8"),
    (POLICY, acted(lambda a: a.T), ValueError, r"action has shape \[8, 2\] beside .* expected \[2, 8\]"),
])  # fmt: skip
def test_policies_and_batches_that_do_not_fit(policy, change, error, words):
    _, batch = collected(POLICY, ENV, 8)
    with pytest.raises(error, match=words):
        fc.evaluate_actions(policy, None, batch if change is None else change(batch), env=ENV)


@pytest.mark.parametrize("one_hot", [False, True])
def test_choices_in_jax_that_the_space_does_not_have(one_hot):
    env = fc.make_env("CartPole-v1", num_envs=2, one_hot=one_hot)
    batch = TO_JAX(collected(IN_JAX, env, 8)[1])
    batch["action"] = batch["action"].at[1, 3].add(-2)
    with pytest.raises(ValueError, match=r"action \[1, 3\] is .*-[12].*expected one of .*Discrete\(2\): pass"):
        fc.evaluate_actions(IN_JAX, None, batch, env=env)


def test_an_environment_that_is_not_known_or_known_from_traced_code():
    policy = fc.torch_policy(cases.mlp(4, 2), head=fc.heads.categorical)
    _, batch = collected(POLICY, ENV, 8)
    with pytest.raises(ValueError, match="acted in no environment in this process: pass env="):
        again(policy, batch)
    for one_hot in (False, True):
        fc.init(fc.make_env("CartPole-v1", num_envs=2, one_hot=one_hot), policy, seed=0)
    with pytest.raises(ValueError, match="2 environments with different actions"):
        again(policy, batch)
    for space in (spaces.Box(0, 1, (2, 2)), spaces.Dict(observation=spaces.Box(0, 1, (4,)))):
        policy = fc.torch_policy(cases.mlp(4, 2), head=fc.heads.categorical)
        for seen in (spaces.Box(0, 1, (4,)), space):  # under the same key
            remember_spaces(policy, seen, observation_leaves(seen), ENV.action_spec)
        with pytest.raises(ValueError, match="2 environments with different actions or observations"):
            again(policy, batch)
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    policy = cases.jax_mlp(env)
    state = fc.traced.init(env, policy, policy.params, key=jax.random.PRNGKey(0))
    _, arrays = fc.traced.rollout(env, policy, policy.params, state, 4)
    score = fc.evaluate_actions(policy, policy.params, arrays)["action_log_prob"]
    np.testing.assert_allclose(score, arrays["action_log_prob"], rtol=1e-5)


@pytest.mark.parametrize("kind", ["torch", *in_soak(["jax"])])
def test_a_part_of_a_rollout_with_the_state_before_the_whole_or_of_another_policy(kind):
    policy = recurrent(kind, record=False)
    before, batch = collected(policy, fc.make_env("CartPole-v1", num_envs=4), 8)
    for part, message in (
        (batch[2:], "the batch has 2 lanes, expected 4"),
        (batch[2], "the batch has 1 lanes, expected 4"),
        (batch[[1, 0, 2, 3]], r"the lanes \[1, 0, 2, 3\] at first, expected increasing ones with consecutive steps"),
        (batch[:, ::2], r"consecutive steps, to continue from policy_state: pass the whole rollout"),
    ):
        with pytest.raises(ValueError, match=message):
            again(policy, part, policy_state=before)
    assert_recorded(again(policy, batch[:, :5], policy_state=before), batch[:, :5])
    other = np.zeros((4, 3), np.float32) if kind == "jax" else before._replace(recurrent=torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"policy_state has leaves of the shapes .* pass state.policy_state"):
        again(policy, batch, policy_state=other)


@pytest.mark.parametrize("kind", ["int8", "int64", "uint16", "uint64", *in_soak(["int16", "int32", "uint8", "uint32"])])
def test_discrete_actions_of_every_integer_dtype(kind):
    for space in (spaces.Discrete(3, start=1, dtype=kind), spaces.MultiDiscrete([3, 2], dtype=kind)):
        env = fc.make_env(partial(Acting, space), num_envs=2)
        outputs = env.action_spec.choices
        weights = jnp.linspace(-1, 1, 2 * outputs).reshape(2, outputs)
        in_jax = fc.jax_policy(lambda params, x: x @ params, weights, head=fc.heads.categorical)
        for policy in (in_jax, fc.torch_policy(cases.mlp(2, outputs), head=fc.heads.categorical)):
            _, batch = collected(policy, env, 4)
            assert_recorded(again(policy, batch), batch)

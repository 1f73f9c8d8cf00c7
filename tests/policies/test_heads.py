import inspect
import itertools
import math
import pydoc
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, distributions

import funcollect as fc
from funcollect.errors import PolicyError
from funcollect.keys import draw_ahead, key_from_seed
from funcollect.policies.numerics import TORCH, jax_numerics
from funcollect.specs import ActionSpec
from tests.support.running import in_soak, once, pairwise

SAMPLES = 20_000

BACKENDS = {
    "torch": SimpleNamespace(xp=TORCH, array=torch.clone, compile=lambda function: function),
    "jax": SimpleNamespace(xp=jax_numerics(), array=fc.interop.to_jax, compile=jax.jit),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def with_backends(names, rows):
    """A test for these rows of values, of which the first is the name of a backend."""
    return pytest.mark.parametrize(f"backend, {names}", rows, indirect=["backend"])


def in_torch(result):
    return result if result is None or isinstance(result, Tensor) else torch.from_numpy(np.array(result))


def act(backend, head, answer, spec, *, rows=SAMPLES, mode=False):
    """`rows` actions and their log-probabilities, for one network's answer or for `rows` answers."""

    def widen(part):
        return backend.array(part if part.shape[:1] == (rows,) else part.expand(rows, *part.shape))

    def step(answer, noise):
        parameters = head.parse(backend.xp, answer, spec)
        outputs = head.sample(backend.xp, parameters, noise, spec)
        return outputs["action"], head.log_prob(backend.xp, parameters, outputs, spec)

    described = None if mode else head.noise(spec)
    noise = None if described is None else draw_ahead(described, key_from_seed(3), np.arange(rows), 0, 1)[0]
    wide = tuple(map(widen, answer)) if isinstance(answer, tuple) else widen(answer)
    return tuple(map(in_torch, backend.compile(step)(wide, None if noise is None else backend.array(noise))))


def entropy_of(backend, head, answer, spec):
    """Of an answer, or of the parts of one."""

    def compute(*answer):
        return head.entropy(backend.xp, head.parse(backend.xp, answer if len(answer) > 1 else answer[0], spec), spec)

    return in_torch(backend.compile(compute)(*map(backend.array, answer)))


def assert_frequencies(chosen, wanted):
    """Every count within 4.5 standard deviations of its binomial's mean."""
    found = torch.bincount(chosen, minlength=len(wanted)).double()
    spread = (len(chosen) * wanted * (1 - wanted)).sqrt()
    assert ((found - len(chosen) * wanted).abs() <= 4.5 * spread + 1e-9).all(), (found / len(chosen), wanted)


LOGITS = torch.tensor([0.3, -1.0, 1.5, 0.0, 2.0, -0.7])
SIX, TWO = spaces.Discrete(6), spaces.MultiDiscrete([2, 4])
DISCRETE = [
    (SIX, False),
    (spaces.Discrete(6, start=-2), False),
    (SIX, True),
    (TWO, False),
    (spaces.MultiDiscrete([4, 2], start=[3, -1]), False),
    (spaces.MultiDiscrete([[2], [4]]), False),
    (TWO, True),
]


def components(action, spec):
    """The choices, from 0, by the definition of the spaces: a second way from that of the heads."""
    assert action.shape[1:] == spec.shape
    if spec.one_hot:
        parts = action.split(spec.categories, -1)
        assert all((part.sum(-1) == 1).all() for part in parts)
        return [part.argmax(-1) for part in parts]
    start = np.broadcast_to(spec.start, spec.space.shape or ())
    return list((action - torch.from_numpy(start.copy())).reshape(len(action), -1).unbind(-1))


def mixture(epsilon):
    """The probabilities of epsilon-greedy choices, given values [..., N]."""
    return lambda values: (1 - epsilon) * torch.eye(values.shape[-1])[values.argmax(-1)] + epsilon / values.shape[-1]


CHOOSING = [
    (fc.heads.categorical, lambda values: values.softmax(-1)),
    (fc.heads.boltzmann(0.5), lambda values: (values / 0.5).softmax(-1)),
    *((fc.heads.epsilon_greedy(epsilon), mixture(epsilon)) for epsilon in (0.3, 1.0)),
]


@with_backends("kind, choosing", pairwise(BACKENDS, DISCRETE, CHOOSING))
def test_choices_are_sampled_and_scored_each_by_itself(backend, kind, choosing):
    spec, (head, probabilities) = ActionSpec(*kind), choosing
    action, log_prob = act(backend, head, LOGITS, spec)
    chosen, wanted = components(action, spec), [*map(probabilities, LOGITS.split(spec.categories))]
    for each, shares in zip(chosen, wanted, strict=True):
        assert_frequencies(each, shares.double())
    score = sum(shares.log()[each] for each, shares in zip(chosen, wanted, strict=True))
    torch.testing.assert_close(log_prob, score, rtol=1e-5, atol=1e-6)
    if len(chosen) == 2:
        joint = wanted[0][:, None] * wanted[1]
        assert_frequencies(chosen[0] * len(wanted[1]) + chosen[1], joint.reshape(-1).double())


MODES = [fc.heads.categorical, fc.heads.greedy, fc.heads.epsilon_greedy(0.9)]


@with_backends("kind, head", pairwise(BACKENDS, DISCRETE, MODES))
def test_the_mode_is_the_best_choice(backend, kind, head):
    spec = ActionSpec(*kind)
    answers = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    action, log_prob = act(backend, head, answers, spec, rows=50, mode=True)
    assert (log_prob is None) is (head is fc.heads.greedy)
    for chosen, values in zip(components(action, spec), answers.split(spec.categories, -1), strict=True):
        assert torch.equal(chosen, values.argmax(-1))


BOXES = [spaces.Box(-2, 3, (2,)), spaces.Box(-2, 3, (2, 2)), spaces.Box(-2, 3, ()), spaces.Box(-2, 3, (2,), np.float64)]
boxes = with_backends("space", [*itertools.product(BACKENDS, BOXES)])


def pair(space):
    size = math.prod(space.shape)
    return (torch.linspace(-0.8, 0.9, size).reshape(space.shape), torch.linspace(0.3, 1.4, size).reshape(space.shape))


def assert_moments(sample, loc, scale):
    assert sample.shape[1:] == loc.shape
    sample = sample.double()
    assert ((sample.mean(0) - loc).abs() <= 4.5 * scale / math.sqrt(SAMPLES)).all()
    assert ((sample.std(0) - scale).abs() <= 4.5 * scale / math.sqrt(2 * SAMPLES)).all()


@boxes
def test_normal_samples_its_distribution_and_scores_it(backend, space):
    (loc, scale), spec = pair(space), ActionSpec(space)
    action, log_prob = act(backend, fc.heads.normal, (loc, scale), spec)
    assert_moments(action, loc, scale)
    reference = distributions.Independent(distributions.Normal(loc, scale), len(space.shape))
    torch.testing.assert_close(log_prob, reference.log_prob(action), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(act(backend, fc.heads.normal, (loc, scale), spec, mode=True)[0][0], loc)


@boxes
def test_tanh_normal_samples_its_distribution_and_scores_it(backend, space):
    loc, scale = pair(space)
    action, log_prob = act(backend, fc.heads.tanh_normal, (loc, scale), ActionSpec(space))
    assert_moments(torch.atanh(((action.double() + 2) / 5 * 2 - 1).clamp(-1 + 1e-7, 1 - 1e-7)), loc, scale)
    base = distributions.Normal(loc.double(), scale.double())
    squash = [distributions.transforms.TanhTransform(cache_size=1), distributions.transforms.AffineTransform(0.5, 2.5)]
    reference = distributions.Independent(distributions.TransformedDistribution(base, squash), len(space.shape))
    inside = ((action > -1.99) & (action < 2.99)).reshape(SAMPLES, -1).all(-1)
    assert inside.float().mean() > 0.8
    wanted = reference.log_prob(action[inside].double())
    torch.testing.assert_close(log_prob[inside].double(), wanted, rtol=1e-3, atol=1e-3)
    mode, _ = act(backend, fc.heads.tanh_normal, (loc, scale), ActionSpec(space), mode=True)
    torch.testing.assert_close(mode[0].float(), 0.5 + 2.5 * loc.tanh())


def test_tanh_normal_stays_finite_and_in_bounds_far_out(backend):
    spec = ActionSpec(spaces.Box(np.float32(-0.1), np.float32(0.7), (2,)))
    action, log_prob = act(backend, fc.heads.tanh_normal, (torch.tensor([40.0, -40.0]), torch.ones(2)), spec, rows=100)
    assert all(spec.space.contains(row) for row in action.numpy())
    assert torch.isfinite(log_prob).all()


def test_one_array_is_a_pair_whose_scale_went_through_softplus_and_one_scale_serves_all_lanes(backend):
    spec = ActionSpec(spaces.Box(-1, 1, (3, 2)))
    answer = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0))
    both = (answer[..., :2], torch.nn.functional.softplus(answer[..., 2:]))
    for head in (fc.heads.normal, fc.heads.tanh_normal):
        torch.testing.assert_close(*(act(backend, head, each, spec, rows=7) for each in (answer, both)))
    answer = backend.array(torch.zeros(5, 2)), backend.array(torch.tensor([0.5, 2.0]))
    parameters = fc.heads.normal.parse(backend.xp, answer, ActionSpec(spaces.Box(-1, 1, (2,))))
    assert parameters[1].tolist() == [[0.5, 2.0]] * 5


@pytest.mark.parametrize("space", [SIX, TWO, BOXES[0], *in_soak([each for each, _ in DISCRETE] + BOXES[1:3])], ids=str)
def test_torch_and_jax_act_alike_on_equal_noise(space):
    box = isinstance(space, spaces.Box)
    choosing = (fc.heads.categorical, fc.heads.greedy, fc.heads.epsilon_greedy(0.4))
    for head in (fc.heads.normal, fc.heads.tanh_normal) if box else choosing:
        answer = pair(space) if box else LOGITS
        one, two = (act(each, head, answer, ActionSpec(space), rows=500) for each in BACKENDS.values())
        torch.testing.assert_close(one[0], two[0], check_dtype=False)
        if head is not fc.heads.greedy:
            torch.testing.assert_close(one[1], two[1], check_dtype=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(2, 2), (-3e38, 3e38)])
def test_tanh_normal_refuses_bounds_without_a_finite_width(low, high):
    with pytest.raises(ValueError, match=r"needs bounds with low < high, whose difference is a float32, got Box"):
        fc.heads.tanh_normal.check(ActionSpec(spaces.Box(low, high, (1,))))


BESIDE, PAIR = r"wants \[P, 2\].*; with other outputs beside it, return a dict such as", "the head normal wants a pair"


@pytest.mark.parametrize(("head", "answer", "says"), [
    (fc.heads.categorical, (torch.zeros(3, 2), torch.zeros(3, 1)), BESIDE),
    (fc.heads.normal, (torch.zeros(5, 2), torch.ones(3, 2)), r"\(3, 2\).* \(loc, scale\), each \['P', 2\]"),
    (fc.heads.normal, (torch.zeros(4, 2), torch.zeros(4, 3)), PAIR),
    (fc.heads.normal, torch.zeros(4, 3), PAIR),
    (fc.heads.normal, torch.zeros(4, 2, 2), PAIR),
    (fc.heads.normal, 1, PAIR),
])  # fmt: skip
def test_answers_that_do_not_fit_are_refused(head, answer, says):
    space = spaces.Box(-1, 1, (2,)) if head is fc.heads.normal else spaces.Discrete(2)
    with pytest.raises(PolicyError, match=says):
        head.parse(TORCH, answer, ActionSpec(space))


@with_backends("space, kind", pairwise(BACKENDS, BOXES, ["number", "array"]))
def test_clipped_normal_adds_noise_and_clips(backend, space, kind):
    spec, loc = ActionSpec(space), torch.linspace(-3.0, 2.9, math.prod(space.shape)).reshape(space.shape)
    spread = torch.tensor(0.5) if kind == "number" else pair(space)[1]
    head = fc.heads.clipped_normal(spread.numpy())
    head.check(spec)
    mode, log_prob = act(backend, head, loc, spec, rows=7, mode=True)
    assert log_prob is None
    assert torch.equal(mode, loc.clamp(-2, 3).expand_as(mode))
    noise = draw_ahead(head.noise(spec), key_from_seed(3), np.arange(SAMPLES), 0, 1)[0]
    wanted = (loc + spread * noise).clamp(-2, 3)
    torch.testing.assert_close(act(backend, head, loc, spec)[0], wanted, check_dtype=False)


@pytest.mark.parametrize(("framework", "prefix"), once(["torch", "jax"], ["", "torch/", "gymnax/"]))
def test_a_batch_has_the_clipped_action_of_a_rollouts_own_scale(framework, prefix):
    env, head = fc.make_env(f"{prefix}Pendulum-v1", num_envs=4), fc.heads.clipped_normal(0.1)
    weights = torch.nn.Linear(3, 1)
    policy = fc.torch_policy(weights, head=head)
    if framework == "jax":
        params = fc.interop.to_jax({"w": weights.weight.detach().T.contiguous(), "b": weights.bias.detach()})
        policy = fc.jax_policy(lambda p, x: x @ p["w"] + p["b"], params, head=head)
    state = fc.init(env, policy, seed=0)
    for scale in (None, 0.0, 3.0):
        given = {} if scale is None else {"scale": scale}
        state, batch = fc.rollout(env, policy, state, 50, exploration=given)
        noise = batch["action"] - weights(batch["observation"])
        assert batch["action"].abs().max() <= 2.0
        assert bool((batch["action"].abs() == 2.0).float().mean() > 0.2) is (scale == 3.0)
        assert bool(noise.abs().max() < 1e-5) is (scale == 0.0)
        assert "action_log_prob" not in batch
        recorded = batch["collector", "exploration", "scale"].unique().tolist()
        assert recorded == [pytest.approx(0.1 if scale is None else scale)]
    mode = fc.rollout(env, policy, state, 5, exploration_type=fc.ExplorationType.DETERMINISTIC)[1]
    torch.testing.assert_close(mode["action"], weights(mode["observation"]).clamp(-2, 2))


@pytest.mark.parametrize("name", fc.heads.__all__)
def test_help_says_what_the_network_returns(name):
    text = pydoc.plain(pydoc.render_doc(getattr(fc.heads, name)))
    assert "The network returns" in text
    assert "class _" not in text
    if name not in ("Head", "boltzmann", "clipped_normal", "epsilon_greedy", "from_distribution"):
        assert type(getattr(fc.heads, name)).__doc__ in inspect.getsource(type(getattr(fc.heads, name)))


@with_backends("kind", once(BACKENDS, DISCRETE))
def test_entropies_of_discrete_heads(backend, kind):
    spec = ActionSpec(*kind)
    answer = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    for head, probabilities in CHOOSING:
        parts = map(probabilities, answer.split(spec.categories, -1))
        wanted = sum(distributions.Categorical(probs=part).entropy() for part in parts)
        torch.testing.assert_close(entropy_of(backend, head, [answer], spec), wanted)
    assert torch.equal(entropy_of(backend, fc.heads.epsilon_greedy(0.0), [answer], spec), torch.zeros(5))
    ruled_out = torch.full((5, 6), -math.inf)
    torch.testing.assert_close(entropy_of(backend, fc.heads.epsilon_greedy(1.0), [ruled_out], spec), wanted)
    assert entropy_of(backend, fc.heads.greedy, [answer], spec) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_choice_that_is_ruled_out_leaves_entropy_and_gradient_finite(dtype):
    spec, logits = ActionSpec(spaces.Discrete(3)), torch.tensor([[0.5, -math.inf, 1.0]], dtype=dtype)
    entropy = fc.heads.categorical.entropy(TORCH, (logits.requires_grad_(),), spec)
    torch.testing.assert_close(entropy, distributions.Categorical(logits=logits[:, [0, 2]]).entropy())
    entropy.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_of_16_bits_are_scored_in_32(backend, dtype):
    xp, array = backend.xp, backend.array
    discrete = (ActionSpec(spaces.Discrete(6)), LOGITS[None].to(dtype))
    box = (ActionSpec(spaces.Box(-2, 3, (2,))), torch.tensor([[0.3, -0.2, 0.5, 1.5]]).to(dtype))
    heads = [fc.heads.categorical, fc.heads.boltzmann(0.5), fc.heads.epsilon_greedy(0.0), fc.heads.epsilon_greedy(0.3)]
    cases = [*((head, *discrete) for head in heads), (fc.heads.normal, *box), (fc.heads.tanh_normal, *box)]
    for head, spec, answer in cases:
        wide, narrow = (head.parse(xp, array(each), spec) for each in (answer.float(), answer))
        outputs = head.sample(xp, wide, None, spec)
        assert head.entropy(xp, narrow, spec).tolist() == head.entropy(xp, wide, spec).tolist()
        assert head.log_prob(xp, narrow, outputs, spec).tolist() == head.log_prob(xp, wide, outputs, spec).tolist()


@with_backends("space, width", pairwise(BACKENDS, BOXES, [0.1, 0.5, 1.0, 2.0]))
def test_entropies_of_normal_heads(backend, space, width):
    loc, spec = pair(space)[0], ActionSpec(space)
    answer = loc[None], torch.full_like(loc, width)[None]
    by_normal, squashed = (
        entropy_of(backend, head, answer, spec)[0].double() for head in (fc.heads.normal, fc.heads.tanh_normal)
    )
    normal = distributions.Normal(loc.double(), width)
    torch.testing.assert_close(by_normal.float(), normal.entropy().sum().float())
    nodes = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    raw = loc.double()[..., None] + width * nodes
    slope = 2 * (math.log(2) - raw - torch.nn.functional.softplus(-2 * raw)) + math.log(2.5)
    mean = torch.trapezoid(slope * torch.exp(-0.5 * nodes**2) / math.sqrt(2 * math.pi), nodes)
    assert abs(squashed - (normal.entropy() + mean).sum()) <= 1e-3 * max(1, loc.numel())

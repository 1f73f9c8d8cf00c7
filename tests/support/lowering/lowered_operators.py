"""Expressions that reach every rule, by family, over inputs of one batch size."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.support.lowering.lowered_numerics import With, expressions, of


def inputs(n, seed=0):
    """x, y: float [n, 6]; p: positive; i: int64 in [0, 6); b: bool; image, sequence, volume: channels first."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(n, *shape, generator=generator)

    return {
        "x": normal(6),
        "y": normal(6),
        "p": normal(6).abs() + 0.3,
        "u": torch.rand(n, 6, generator=generator) * 1.6 - 0.8,
        "i": torch.randint(0, 6, (n, 6), generator=generator),
        "b": torch.rand(n, 6, generator=generator) > 0.5,
        "sequence": normal(4, 12),
        "image": normal(4, 9, 8),
        "volume": normal(2, 5, 4, 6),
    }


class Expressions(nn.Module):
    """Every expression of a family, each an output; modules among them keep their parameters."""

    def __init__(self, expressions):
        super().__init__()
        self.parts = nn.ModuleList([each for each in expressions if isinstance(each, nn.Module)])
        self.expressions = expressions

    def forward(self, given):
        return tuple(expression(given) for expression in self.expressions)


class On(nn.Module):
    def __init__(self, name, module):
        super().__init__()
        self.name, self.module = name, module.eval()

    def forward(self, given):
        return self.module(given[self.name])


def _to(name, *modules):
    """These modules applied to the input with this name."""
    return [On(name, module) for module in modules]


def _expressions():
    elementwise = [
        *of("x", torch.abs, torch.ceil, torch.cos, torch.cosh, torch.exp, torch.exp2, torch.expm1, torch.floor),
        *of("x", torch.sign, torch.sgn, torch.sin, torch.sinh, torch.sinc, torch.square, torch.tan, torch.tanh),
        *of("x", torch.trunc, torch.atan, torch.asinh, torch.erf, torch.erfc, torch.sigmoid, torch.round, torch.frac),
        *of("x", torch.neg, torch.deg2rad, torch.rad2deg, torch.positive, lambda x: x.detach() * x),
        *of("x", lambda x: torch.round(x, decimals=2), lambda x: x**2, lambda x: x**3.0, lambda x: 2**x),
        *of("u", torch.acos, torch.asin, torch.atanh, torch.erfinv),
        *of("p", lambda p: torch.acosh(p + 1), torch.log, torch.log10, torch.log1p, torch.log2, torch.sqrt),
        *of("p", torch.rsqrt, torch.reciprocal, torch.digamma, torch.lgamma, lambda p: p**0.5, lambda p: p**p),
        *of("i", lambda i: i + 1, lambda i: i * 0.5, lambda i: i / 2, lambda i: i // 2, lambda i: i % 4, torch.sqrt),
        *of("i", lambda i: torch.div(i - 3, 2, rounding_mode="trunc"), lambda i: 5 - i, lambda i: (i - 3) // 2),
        *of("i", torch.sigmoid, torch.exp, lambda i: i**2, lambda i: torch.fmod(i - 3, 2), torch.abs, torch.neg),
        *of("x y", lambda x, y: torch.add(x, y, alpha=2), lambda x, y: torch.sub(x, y, alpha=0.5), torch.rsub),
        *of("x y", torch.atan2, torch.hypot, lambda x, y: torch.logaddexp(x, y) + torch.logaddexp2(x, y)),
        *of("x", lambda x: torch.rsub(x, 2), lambda x: torch.div(x, 0.3, rounding_mode="trunc")),
        *of("x", lambda x: torch.remainder(x, -0.7), lambda x: torch.fmod(x, 0.7)),
        *of("x p", lambda x, p: x / p, lambda x, p: torch.div(x, p, rounding_mode="floor")),
        *of("x p", lambda x, p: torch.remainder(x, p.detach()), lambda x, p: torch.fmod(x, p.detach())),
        *of("x p", lambda x, p: torch.floor_divide(x.detach(), p.detach())),
        *of("x p", lambda x, p: torch.xlogy(x, p) + torch.xlogy(x, 0.3) + torch.xlogy(0.3, p)),
        *of("x i", lambda x, i: x + i),
        *of("x b", lambda x, b: x * b - 1.5),
        *of("x b", lambda x, b: torch.nan_to_num(torch.where(b, x, float("nan")), 0.5, 1.0, -1.0)),
        *of("p", lambda p: torch.remainder(7.5, p.detach()), lambda p: torch.ops.aten.copysign.Scalar(p, -1.0)),
        *of("p y", torch.copysign),
        *of("x y u", lambda x, y, u: torch.maximum(x, y) + torch.minimum(x, u)),
        *of("x u", lambda x, u: torch.clamp(x, -0.5, 0.5) + torch.clamp(x, u - 1, u + 1)),
        *of("x y", lambda x, y: torch.clamp_min(x, 0.1) + torch.clamp_max(x, 0.1) + torch.clamp(y, min=-0.2)),
        *of("x y", lambda x, y: torch.clamp_min(x, y) + torch.clamp_max(x, y)),
        *of("x y p", lambda x, y, p: torch.addcmul(x, y, p, value=0.3) + torch.addcdiv(x, y, p)),
        *of("x y p", lambda x, y, p: torch.lerp(x, y, 0.3) + torch.lerp(x, y, p)),
        *of("x", lambda x: torch.ops.aten.add.Scalar(x, 0.3, 2) + torch.ops.aten.sub.Scalar(x, 0.7, 3)),
        *of("x", lambda x: torch.ops.aten.mul.Scalar(x, 0.3) + torch.ops.aten.div.Scalar(x, 0.7)),
        *of("x", lambda x: torch.ops.aten.div.Scalar_mode(x, 0.7, rounding_mode="floor")),
    ]
    comparison = [
        lambda g: (g["x"] == g["y"], g["x"] != g["y"], g["x"] < g["y"], g["x"] <= g["y"], g["x"] > g["y"]),
        lambda g: (g["i"] >= g["x"], g["i"] == 2, g["i"] != 2, g["i"] < 2, g["i"] <= 2, g["i"] > 2.5, g["x"] >= 0),
        lambda g: (g["b"] & (g["x"] > 0), g["b"] | (g["x"] > 0), g["b"] ^ (g["x"] > 0), ~g["b"]),
        lambda g: (g["i"] & 3, g["i"] | 8, g["i"] ^ 5, ~g["i"], g["i"] << 2, g["i"] >> 1, g["i"] & g["i"].flip(0)),
        lambda g: (torch.bitwise_left_shift(g["i"], g["i"]), torch.bitwise_right_shift(64, g["i"])),
        lambda g: (torch.bitwise_left_shift(g["i"], 1), torch.bitwise_right_shift(g["i"], 1), g["i"] >> g["i"]),
        lambda g: (g["i"] << g["i"], torch.bitwise_left_shift(1, g["i"]), torch.bitwise_right_shift(g["i"], g["i"])),
        lambda g: (torch.logical_and(g["x"], g["b"]), torch.logical_or(g["b"], g["i"]), torch.logical_not(g["i"])),
        lambda g: torch.logical_xor(g["b"], g["i"]),
        lambda g: (torch.bitwise_and(6, g["i"]), torch.bitwise_or(9, g["i"]), torch.bitwise_xor(5, g["i"])),
        lambda g: (torch.isnan(g["x"] / 0 * 0), torch.isinf(g["x"] / 0), torch.isfinite(1 / g["i"])),
        lambda g: (torch.where(g["b"], g["x"], g["y"]), torch.where(g["b"], g["x"], 0.5), torch.where(g["b"], 1, 0)),
        lambda g: torch.where(g["b"], 0.5, g["x"]),
        lambda g: g["x"].masked_fill(g["b"], -1e9) + g["x"].masked_fill(g["b"], torch.tensor(2.0)),
        lambda g: torch.isclose(g["x"], g["x"] + 1e-9),
    ]
    activation = [
        *of("x", F.relu, F.relu6, F.hardtanh, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.mish),
        *of("x", F.softplus, lambda x: F.softplus(x * 90, beta=2.0), F.logsigmoid, F.elu, F.selu, F.celu),
        *of("x", lambda x: F.elu(x * 90, 0.7), lambda x: F.celu(x, 0.7), F.leaky_relu, F.hardsigmoid, F.hardswish),
        *of("x", F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, lambda x: F.threshold(x, 0.1, 2.0), F.glu),
        *of("x", lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, 0), lambda x: F.softmin(x, 1), F.rrelu),
        *of("x", lambda x: F.softmax(x, -1, dtype=torch.float32), lambda x: F.normalize(x, dim=-1)),
        *_to("x", nn.PReLU(), nn.RReLU()),
        *_to("sequence", nn.PReLU(4)),
    ]
    linear = [
        *_to("x", nn.Linear(6, 3, bias=False)),
        *_to("sequence", nn.Linear(12, 3)),
        *of("x y", lambda x, y: x @ y.T, lambda x, y: torch.mm(x, y.t()), lambda x, y: torch.mv(x, y[0])),
        *of("x y", lambda x, y: torch.dot(x[0], y[1]) + torch.vdot(x[0], y[1]), lambda x, y: torch.outer(x[0], y[0])),
        *of("x y", lambda x, y: torch.cdist(x, y) + torch.cdist(x, y, p=3.0)),
        *of("x y", lambda x, y: torch.dist(x, y) + torch.dist(x, y, 3)),
        *of("x y p", lambda x, y, p: torch.addmm(p[0], x, torch.ones(6, 6), beta=2, alpha=0.5)),
        *of("x y p", lambda x, y, p: torch.addmv(p[:, 0], x, y[0])),
        *of("sequence", lambda s: torch.bmm(s, s.transpose(1, 2)), lambda s: torch.einsum("nck,nck->nc", s, s)),
        *of("sequence", lambda s: torch.baddbmm(s[:, :, :4], s, s.transpose(1, 2))),
        *of("sequence", lambda s: torch.addbmm(s[0, :, :4], s, s.mT, beta=2)),
        With(lambda layer, g: layer(g["x"], g["y"]), nn.Bilinear(6, 6, 3)),
    ]
    convolution = [
        *_to("sequence", nn.Conv1d(4, 6, 3, 2, 1), nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1)),
        *_to("sequence", nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding="same")),
        *_to("image", nn.Conv2d(4, 6, 3), nn.Conv2d(4, 8, (3, 2), (2, 1), (1, 0), bias=False)),
        *_to("image", nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular")),
        *_to("image", nn.Conv2d(4, 6, 3, padding=2, dilation=2), nn.ConvTranspose2d(4, 6, 3, 2, groups=2)),
        *_to("image", nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")),
        *_to("volume", nn.Conv3d(2, 4, 3, padding=1), nn.ConvTranspose3d(2, 4, 2, 2, dilation=2)),
    ]
    pooling = [
        *_to("sequence", nn.MaxPool1d(3, 2), nn.AvgPool1d(3, 2, 1), nn.AdaptiveAvgPool1d(5), nn.AdaptiveMaxPool1d(5)),
        *_to("image", nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.MaxPool2d(2, 1, dilation=2)),
        *_to("image", nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(2, divisor_override=3)),
        *_to("image", nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AvgPool2d(2, ceil_mode=True)),
        *_to("image", nn.AdaptiveAvgPool2d((1, 1)), nn.AdaptiveAvgPool2d((4, 3)), nn.AdaptiveMaxPool2d((4, 8))),
        *_to("image", nn.AdaptiveAvgPool2d((None, 2)), nn.Upsample(scale_factor=2), nn.PixelShuffle(2)),
        *_to("image", nn.Upsample(size=(12, 12), mode="bilinear")),
        *_to("volume", nn.MaxPool3d(2), nn.AvgPool3d(2, padding=1)),
        *_to("volume", nn.AdaptiveAvgPool3d((2, 3, 4)), nn.AdaptiveMaxPool3d(2)),
        lambda g: F.max_pool2d(g["image"], 2, return_indices=True)[0],
        lambda g: F.max_pool3d(g["volume"], 2, return_indices=True)[0],
    ]
    normalisation = [
        *_to("x", nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6), nn.BatchNorm1d(6)),
        *_to("x", *(way(nn.Linear(6, 3)) for way in (parametrizations.weight_norm, parametrizations.spectral_norm))),
        *_to("x", nn.Dropout(0.5)),
        *_to("image", nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((9, 8))),
        *_to("image", nn.BatchNorm2d(4, track_running_stats=False), nn.LocalResponseNorm(2), nn.Dropout2d()),
        *of("x", lambda x: x.norm(dim=-1), lambda x: x.norm(p=1), lambda x: torch.linalg.vector_norm(x, 3, -1)),
        *of("x", lambda x: x.norm(float("inf"), dim=0), lambda x: torch.linalg.vector_norm(x, 0, -1, keepdim=True)),
        *of("x", lambda x: (x * 0).norm(dim=-1), lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5)[0]),
        lambda g: torch.native_group_norm(g["image"], None, None, g["image"].shape[0], 4, 72, 2, 1e-5)[0],
    ]
    attention = [
        lambda g: F.scaled_dot_product_attention(g["image"], g["image"], g["image"], is_causal=True),
        lambda g: F.scaled_dot_product_attention(g["image"], g["image"], g["image"], g["image"][0, 0, :, :1]),
        lambda g: F.scaled_dot_product_attention(g["sequence"], g["sequence"], g["sequence"], g["b"][:, None, :4]),
        lambda g: F.scaled_dot_product_attention(g["image"], *[g["image"][:, :2]] * 2, scale=0.2, enable_gqa=True),
        With(_padded, nn.MultiheadAttention(12, 3, batch_first=True)),
    ]
    reduction = [
        *of("x", torch.sum, torch.mean, torch.amax, torch.amin, torch.max, torch.min, torch.var, torch.std),
        *of("p", torch.prod, lambda p: p.prod(-1), lambda p: p.cumprod(-1), lambda p: p.sum((0, 1), keepdim=True)),
        *of("x", lambda x: x.sum(-1), lambda x: x.mean(0, keepdim=True), lambda x: x.amax(-1)),
        *of("x", lambda x: x.amin((0, 1))),
        *of("x", lambda x: tuple(x.max(-1)), lambda x: tuple(x.min(0, keepdim=True)), lambda x: x.argmax(-1)),
        *of("x", lambda x: (x.argmin(0), x.argmax()), lambda x: x.var(-1, correction=0), lambda x: x.std(-1)),
        *of("x", lambda x: torch.var_mean(x, -1), lambda x: torch.std_mean(x, -1), lambda x: x.logsumexp(-1)),
        *of("x", lambda x: x.cumsum(-1), lambda x: x.logcumsumexp(-1), lambda x: tuple(x.topk(3))),
        *of("x", lambda x: tuple(x.topk(2, 1, largest=False)), lambda x: tuple(x.sort(-1, descending=True))),
        *of("x", lambda x: tuple(x.sort(stable=True, dim=1)), lambda x: x.argsort(-1)),
        *of("b", torch.any, torch.all, lambda b: b.any(-1), lambda b: b.all(0), lambda b: b.sum(-1)),
        *of("b", lambda b: b.any((0, 1)), lambda b: b.all((0, 1)), lambda b: b.float().mean()),
        *of("i", torch.sum, lambda i: i.sum(-1), lambda i: i.cumsum(-1), lambda i: tuple(i.max(-1)), torch.prod),
        *of("i", lambda i: i.sum(-1, dtype=torch.float32), lambda i: i.argsort(dim=-1, stable=True)),
    ]
    indexing = [
        *_to("i", nn.Embedding(6, 3, padding_idx=2)),
        *of("i", lambda i: F.one_hot(i, 6)),
        *of("x i", lambda x, i: x.gather(1, i) + x.take_along_dim(i, 1), lambda x, i: x.gather(1, i[:, :2])),
        *of("x i", lambda x, i: x.index_select(1, i[0]), lambda x, i: x.scatter(1, i[:, :1], 2.0)),
        *of("x i", lambda x, i: x[:, i[0]] + x[torch.arange(x.shape[0]), i[:, 0]][:, None]),
        *of("x i", lambda x, i: x.detach().scatter(1, i, 0.5, reduce="multiply")),
        *of("x", lambda x: torch.zeros_like(x).index_put((torch.tensor([0]), torch.tensor([1])), x[0, :1])),
        *of("x y", lambda x, y: x.index_put((torch.tensor([0, 0]),), y[:1], accumulate=True)),
        *of("x b", _written),
        *of("x i y", lambda x, i, y: x.scatter(1, i[:, :1], y[:, :1]), lambda x, i, y: x.scatter_add(1, i, y)),
        *of("x i y", lambda x, i, y: x.scatter_reduce(1, i, y, "sum") + x.scatter_reduce(1, i, y, "amax")),
        *of("x i y", lambda x, i, y: x.detach().scatter(1, i, y.detach(), reduce="add")),
        *of("x y", lambda x, y: x.select_scatter(y[:, 0], 1, 2) + x.slice_scatter(y[:, :2], 1, 2, 4)),
        *of("x y", lambda x, y: x.index_add(1, torch.tensor([0, 2, 2]), y[:, :3], alpha=0.5)),
        *of("x", lambda x: torch.searchsorted(torch.linspace(-1, 1, 5), x)),
        *of("x", lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5), right=True)),
        *of("x", lambda x: (torch.bucketize(0.3, x[0].sort()[0]), torch.searchsorted(x[0].sort()[0], 0.3))),
    ]
    shape = [
        *of("image", lambda v: v.flatten(1), lambda v: v.permute(0, 2, 3, 1), lambda v: v.transpose(1, -1)),
        *of("image", lambda v: v.reshape(v.shape[0], 4, -1), lambda v: v[:, 1:3, ::2, -1], lambda v: v[..., None]),
        *of("image", lambda v: v.chunk(3, -1), lambda v: v.split(3, 2), lambda v: v.split([1, 3], 1), torch.squeeze),
        *of("image", lambda v: v[:, :1].squeeze(1), lambda v: v[:, :1, :1].squeeze((1, 2)), lambda v: v.unbind(1)),
        *of("image", lambda v: v.flip((2, 3)), lambda v: v.roll((1, 2), (2, 3)), lambda v: v.roll(3), lambda v: v.mT),
        *of("image", lambda v: F.pad(v, (1, 2, 0, -1), value=0.5), lambda v: F.pad(v, (1, 2, 3, 1), "reflect")),
        *of("image", lambda v: F.pad(v, (1, 2, 3, 1), "replicate"), lambda v: v.tril(1) + v.triu(-1), torch.clone),
        *of("image", lambda v: v.diagonal(0, 2, 3), lambda v: v.contiguous().view(-1, 8), lambda v: v.narrow(1, 1, 2)),
        *of("volume", lambda v: F.pad(v, (1, 1, 1, 1, 1, 1), "replicate"), lambda v: F.pad(v, (1,) * 6, "reflect")),
        *of("sequence", lambda s: F.pad(s, (1, 2), "reflect"), lambda s: F.pad(s, (1, 2), "replicate")),
        *of("x", lambda x: x[:, None].expand(-1, 3, -1), lambda x: x.repeat(1, 2), lambda x: x.tile(2), torch.t),
        *of("x", lambda x: x.repeat_interleave(2, 1), lambda x: x.unflatten(1, (2, 3)), lambda x: x.movedim(0, 1)),
        lambda g: torch.cat([g["x"], g["y"]], -1) + torch.cat([torch.zeros(0), g["x"].repeat(1, 2)], 1),
        lambda g: torch.stack([g["x"], g["y"]], 1),
        lambda g: g["x"][0].repeat_interleave(torch.tensor([1, 0, 2, 1, 1, 3]), output_size=8),
        *of("x", lambda x: x.unfold(1, 3, 2), lambda x: x.detach().view(torch.int32)),
        lambda g: torch.broadcast_to(g["x"][0], g["y"].shape) + g["y"],
    ]
    creation = [
        lambda g: g["x"] + torch.full((6,), 2.0) + torch.ones(6) + torch.zeros(6) + torch.tensor([1.0]),
        lambda g: torch.full_like(g["x"], 3) + torch.zeros_like(g["x"]) + torch.ones_like(g["x"]),
        lambda g: g["x"].new_full((6,), 2) + g["x"].new_zeros(6) + g["x"].new_ones(6) + g["x"].new_tensor(2.0),
        lambda g: g["x"].new_empty(6).fill_(1.0) + torch.empty(6).fill_(2.0) + torch.empty_like(g["x"]).fill_(1.0),
        lambda g: torch.arange(g["x"].shape[0]) + torch.arange(0, 1, 0.5)[1],
        lambda g: g["x"] + torch.linspace(0, 1, 6) + torch.eye(6)[0] + torch.eye(2, 6)[1],
        lambda g: g["x"] + torch.linspace(-7, 5, 6, dtype=torch.int64),
        *of("x", lambda x: (x.int(), x.long(), x.bool(), x.detach().to(torch.float16))),
        *of("i", lambda i: i.float()),
        *of("b", lambda b: b.float()),
        *of("x", lambda x: torch.scalar_tensor(2.0) * x, lambda x: torch.linspace(-1.5, x[0, 0], 4)),
        *of("x", lambda x: torch.linspace(x[0, 0], x[0, 1], 4) + torch.linspace(x[0, 0], 1.5, 4)),
    ]
    return locals()


def _padded(layer, g):
    return layer(*[g["sequence"]] * 3, key_padding_mask=g["b"][:, :4] & g["b"][:, 1:5] & g["b"][:, 2:])


def _written(x, mask):
    """Written in place, which the export turns into values."""
    x = x.clone()
    x[mask] = 0.5
    x[:, 0] += 1
    x[:, 1:3] = x[:, 3:5] * 2
    return x


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)  # the modules among them have the same parameters in each run
    FAMILIES = _expressions() | expressions()

"""Expressions of `lowered_operators` for complex numbers, linear algebra, order statistics and sampled images."""

import torch
from torch import linalg, nn
from torch.nn import functional as F

from funcollect.interop.lowering.exporting import plain
from tests.support.running import in_soak

aten = torch.ops.aten
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
WINDOW = torch.hann_window(4)
QUANTILES = (2, 13) <= TORCH < (2, 15)  # before, they cannot be exported; since, their ranks are float64


def _extremes(x):
    """The extremes along an axis; Torch has their derivative since 2.13."""
    return (x if TORCH >= (2, 13) else x.detach()).aminmax(dim=1)


def _quantiles():
    ways = ("linear", "lower", "higher")
    return [
        *of("x", *(lambda x, w=w: x.quantile(0.3, 1, interpolation=w) for w in ways)),
        *of("x", *(lambda x, w=w: x.quantile(0.3, interpolation=w) for w in ("midpoint", "nearest"))),
        *of("x", lambda x: x.nanquantile(torch.tensor([0.1, 0.8]), -1, keepdim=True), lambda x: x.quantile(0.5)),
        *of("x", lambda x: _tied(x.detach()).nanquantile(0.3, 1)),
    ]


class With(nn.Module):
    """A function of a module, whose parameters it keeps, and the inputs."""

    def __init__(self, function, module):
        super().__init__()
        self.function, self.module = function, module.eval()

    def forward(self, given):
        return self.function(self.module, given)


def of(names, *functions):
    """These functions of the inputs with these names."""
    return [lambda g, f=f: plain(f(*(g[name] for name in names.split()))) for f in functions]


def _on(make, *functions):
    return [lambda g, f=f: plain(f(*make(g))) for f in functions]


def _complex(g):
    return (torch.complex(g["x"], g["y"]),)


def _signal(g):
    return (torch.complex(g["image"], g["image"].flip(1)),)


def _square(g):
    return (g["image"][:, :, :4, :4] * 0.5,)


def _positive(g):
    """A positive definite matrix, and a right-hand side."""
    matrix = g["image"][:, 0, :4, :4]
    return matrix @ matrix.mT + 2 * torch.eye(4), g["image"][:, 1, :4, :3]


def _tall(g):
    return (g["image"][:, :2, :5, :3],)


def _with_scales(g):
    return g["image"][:, :2, :5, :3], g["image"][:, 0, :2, :3], g["image"][:, 1:3, :5, :4]


def _pairs(x):
    return torch.view_as_real(x.resolve_conj()) * 0.3


def _factored(a, b):
    factors, pivots = linalg.lu_factor(a)
    systems = [(left, adjoint) for left in (True, False) for adjoint in (True, False)]
    return [linalg.lu_solve(factors, pivots, b if x else b.mT, left=x, adjoint=y) for x, y in systems], pivots


def _projectors(vectors):
    """Projections onto eigenvectors, which do not depend on their signs."""
    return vectors[..., :, None, :] * vectors[..., None, :, :]


def _tied(x):
    """`x` rounded, so that some values are equal, with NaN in some rows."""
    x = (x * 2).round()
    return torch.where(torch.arange(x.shape[0])[:, None] + torch.arange(6) == 2, torch.nan, x)


def _grid(g):
    """[N, 5, 6, 2], partly outside the image, and on its borders."""
    rows = torch.linspace(-1, 1, 5)[:, None, None] * torch.tensor([1.0, 0.3])
    return g["x"][:, None, :, None] * 0.7 + rows


def _sampled(g):
    ways = [
        ("bilinear", "reflection", False),
        ("bicubic", "reflection", True),
        *in_soak([("bilinear", "zeros", True), ("nearest", "border", False)]),  # `Far` of `test_lowering` has such, too
        *in_soak([("bicubic", "zeros", False), ("bicubic", "border", True)]),  # which Torch takes long to export
    ]
    return [F.grid_sample(g["image"], _grid(g), mode, pad, align_corners=corners) for mode, pad, corners in ways]


def _sampled_volume(g):
    grid = torch.stack([_grid(g)[..., 0], _grid(g)[..., 1], _grid(g)[..., 0] * 0.5], -1)[:, None]
    return F.grid_sample(g["volume"], grid, padding_mode="border", align_corners=False)


def _bags(mode):
    def bags(layer, g):
        flat, starts = g["i"].flatten(), torch.tensor([0, 3, 3, 7])  # an empty bag, and one that takes the rest
        return layer(g["i"]), layer(flat, starts)

    return bags, nn.EmbeddingBag(6, 3, mode=mode, padding_idx=2)


def _weighted_bags(layer, g):
    starts = torch.tensor([0, 4, 9, 12])
    whole = F.embedding_bag(g["i"].flatten()[:12], layer.weight, starts, include_last_offset=True)
    alone = aten._embedding_bag_forward_only(layer.weight.detach(), g["i"].flatten(), starts)[0]
    return layer(g["i"], per_sample_weights=g["x"]), whole, alone


def expressions():
    """The families by name."""
    fft = torch.fft
    complex_ = [
        *_on(_complex, _pairs, lambda z: _pairs(z.conj()), lambda z: _pairs(torch.conj_physical(z)), torch.abs),
        *_on(_complex, torch.angle, lambda z: z.conj().imag * 2, lambda z: z.real),
        *_on(_complex, lambda z: _pairs(z.sgn()), linalg.norm),
        *_on(_complex, lambda z: _pairs(z * z / (z + 3) + 2j), lambda z: _pairs(z.exp() + z.tanh()), lambda z: z.var()),
        *_on(_complex, lambda z: _pairs(z @ z.mH), lambda z: _pairs(torch.vdot(z[0], z[1])), lambda z: z == z.conj()),
        *_on(_complex, lambda z: z.detach().to(torch.bool), lambda z: _pairs(torch.einsum("bi,bj->ij", z, z.conj()))),
        *of("x", torch.angle, lambda x: _pairs(torch.view_as_complex(x.reshape(-1, 3, 2)) ** 2)),
        *of("x", lambda x: _pairs(aten._conj_physical(torch.complex(x, x))), lambda x: _pairs(x.to(torch.complex64))),
        lambda g: _pairs(torch.polar(g["p"], g["x"])),
        *of("sequence", *(lambda s, n=n: _pairs(fft.fft(s, norm=n)) for n in ("backward", "ortho", "forward"))),
        *of("sequence", *(lambda s, n=n: _pairs(fft.rfft(s, norm=n)) for n in ("backward", "ortho", "forward"))),
        *_on(_signal, *(lambda z, n=n: _pairs(fft.ifft(z, norm=n)) for n in ("backward", "ortho", "forward"))),
        *_on(_signal, *(lambda z, n=n: fft.irfft(z, norm=n) * 0.3 for n in ("backward", "ortho", "forward"))),
        *of("image", lambda v: _pairs(fft.rfft2(v, norm="forward")), lambda v: _pairs(fft.fft2(v, norm="ortho"))),
        *of("image", lambda v: fft.irfft2(fft.rfft2(v), s=v.shape[-2:]), lambda v: _pairs(fft.rfft(v, n=11, dim=-2))),
        *of("image", lambda v: _pairs(fft.fftshift(fft.fftn(v, dim=(1, 2, 3), norm="ortho")))),
        *of("image", lambda v: _pairs(fft.ihfft2(v))),
        *_on(_signal, lambda z: fft.hfft(z, norm="ortho"), lambda z: fft.irfftn(z, dim=(-1, -2)), fft.irfft2),
        *_on(_signal, lambda z: fft.hfft2(z, norm="ortho"), lambda z: _pairs(fft.ifft2(z))),
        *_on(_signal, lambda z: fft.irfft(z, n=9), lambda z: _pairs(fft.fft(z, n=5)), lambda z: fft.irfft(z, n=20) * 3),
        lambda g: g["x"] + fft.fftfreq(6, 0.5) + fft.rfftfreq(10),
        *of("sequence", lambda s: _pairs(torch.stft(s[:, 0], 4, 2, window=WINDOW, return_complex=True))),
    ]
    factorisation = [
        *_on(_positive, lambda a, b: linalg.cholesky(a), lambda a, b: linalg.cholesky(a, upper=True)),
        *_on(_positive, lambda a, b: tuple(linalg.cholesky_ex(a))),
        *([] if TORCH >= (2, 15) else _on(_positive, lambda a, b: torch.cholesky(a))),
        *_on(_positive, lambda a, b: linalg.eigvalsh(a), lambda a, b: _projectors(linalg.eigh(a, UPLO="U")[1])),
        *_on(_positive, lambda a, b: torch.lu_unpack(*linalg.lu_factor(a))[1], lambda a, b: torch.logdet(a)),
        *_on(_square, linalg.det, lambda a: tuple(linalg.slogdet(a)), lambda a: tuple(linalg.lu(a)), linalg.matrix_exp),
        *_on(_square, lambda a: linalg.matrix_power(a, 3), lambda a: tuple(linalg.lu_factor_ex(a)), linalg.cond),
        *_on(_tall, linalg.svdvals, lambda a: linalg.svd(a, full_matrices=False)[1], lambda a: tuple(linalg.qr(a))),
        *_on(_tall, lambda a: tuple(linalg.qr(a.mT)), lambda a: linalg.qr(a.detach(), "r")[1]),
        *_on(_tall, lambda a: _projectors(linalg.svd(a, full_matrices=False)[0]), lambda a: linalg.lu(a)[2]),
        *_on(_tall, *(lambda a, p=p: linalg.matrix_norm(a, p) for p in ("fro", "nuc", 1, -2))),
        *_on(_with_scales, lambda v, s, x: linalg.householder_product(v, s)),
        *_on(_with_scales, *(lambda v, s, x, t=t: torch.ormqr(v, s, x, transpose=t) for t in (True, False))),
        *_on(_with_scales, lambda v, s, x: torch.ormqr(v, s, x.mT, left=False)),
    ]
    solution = [
        *_on(_positive, lambda a, b: linalg.inv(a), lambda a, b: tuple(linalg.inv_ex(a)), linalg.solve),
        *_on(_positive, lambda a, b: tuple(linalg.solve_ex(a, b)), lambda a, b: linalg.solve(a, b.mT, left=False)),
        *_on(_positive, lambda a, b: linalg.solve(a, b[..., 0]), lambda a, b: linalg.matrix_power(a, -2), _factored),
        *_on(_positive, lambda a, b: linalg.solve_triangular(a, b, upper=True), lambda a, b: a.inverse() @ b),
        *_on(_positive, lambda a, b: linalg.solve_triangular(a, b.mT, upper=False, left=False, unitriangular=True)),
        *_on(_positive, lambda a, b: torch.triangular_solve(b, a, transpose=True)[0]),
        *_on(_positive, lambda a, b: torch.cholesky_solve(b, linalg.cholesky(a))),
        *_on(_positive, lambda a, b: torch.cholesky_inverse(linalg.cholesky(a, upper=True), upper=True)),
        *_on(_positive, lambda a, b: linalg.pinv(a, hermitian=True), lambda a, b: linalg.matrix_rank(a.detach())),
        *_on(_tall, linalg.pinv, lambda a: linalg.pinv(a.mT, rtol=1e-3), lambda a: torch.pinverse(a, 1e-4)),
        *_on(_tall, lambda a: linalg.pinv(a.detach(), atol=1.5), lambda a: linalg.pinv(a, torch.tensor(1e-4))),
        *_on(_tall, lambda a: aten.linalg_pinv.default(a, 1e-4), lambda a: linalg.matrix_rank(a.detach(), tol=1.5)),
        *_on(_tall, lambda a: linalg.matrix_rank(a.detach(), tol=torch.tensor(1.5))),
        *_on(_tall, lambda a: linalg.matrix_rank(a.detach(), atol=torch.tensor(1.5))),
        *_on(_tall, lambda a: linalg.matrix_rank(a.detach(), rtol=0.5)),
    ]
    selection = [
        *of("x", torch.median, torch.nanmedian, lambda x: x.median(1), lambda x: x.nanmedian(0, keepdim=True)),
        *of("x", lambda x: x.kthvalue(2), lambda x: x.cummax(1), lambda x: x.cummin(0), _extremes),
        *(_quantiles() if QUANTILES else []),
        *of("x", lambda x: _tied(x.detach()).cummax(1), lambda x: _tied(x.detach()).cummin(0), torch.nanmean),
        *of("x", lambda x: _tied(x.detach()).median(1), lambda x: _tied(x.detach()).nanmedian(1)[0], torch.msort),
        *of("x", lambda x: _tied(x.detach()).nanmedian()),
        *of("i", torch.median, lambda i: i.median(0)[0], lambda i: i.mode(1), lambda i: i.cummax(0)),
        *of("x", lambda x: (x * 2).round().detach().mode(0), lambda x: x[0, 0].cummin(0), lambda x: x[0, 0].median(0)),
        *of("x", lambda x: (x[0, 0].mode(0), x[0, 0].kthvalue(1), x[0, 0].nanmedian(0))),
        *of("x", lambda x: x.std(unbiased=False)),
    ]
    sampling = [
        _sampled,
        _sampled_volume,
        lambda g: F.affine_grid(g["x"].reshape(-1, 2, 3), [g["x"].shape[0], 3, 5, 4], align_corners=False),
        *of("image", lambda v: F.interpolate(v, (12, 5), mode="bicubic")),
        *of("image", lambda v: F.interpolate(v, scale_factor=1.7)),
        *of("sequence", lambda s: F.interpolate(s, 7, mode="nearest-exact")),
    ]
    bags = [With(*_bags(mode)) for mode in ("mean", "max", "sum")]
    return {
        "complex": complex_,
        "factorisation": factorisation,
        "solution": solution,
        "selection": selection,
        "sampling": sampling,
        "bags": [*bags, With(_weighted_bags, nn.EmbeddingBag(6, 3, mode="sum"))],
    }

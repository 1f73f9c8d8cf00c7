"""Networks to lower that use complex numbers, linear algebra, bags or grids, with inputs for a batch size."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.support.lowering.lowered_modules import vectors


class Rotary(nn.Module):
    """Attention whose queries and keys [B, T, H, E] are turned by complex numbers of absolute value 1."""

    def __init__(self, length=6, heads=2, width=8):
        super().__init__()
        self.heads, self.project, self.out = heads, nn.Linear(10, 3 * heads * width), nn.Linear(heads * width, 3)
        angles = torch.outer(torch.arange(length), 100.0 ** -torch.linspace(0, 1, width // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(-2).type_as(x)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        given = (each.transpose(1, 2) for each in (self.turned(query), self.turned(key), value))
        return self.out(F.scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2).flatten(-2))


class Spectral(nn.Module):
    """A layer of a Fourier neural operator [B, C, X]: the lowest modes are mixed by complex weights."""

    def __init__(self, channels=3, modes=4, *, pairs=False):
        super().__init__()
        weight = torch.randn(channels, channels, modes, 2) / 4
        self.weight = nn.Parameter(weight if pairs else torch.view_as_complex(weight))
        self.bypass, self.modes = nn.Conv1d(channels, channels, 1), modes

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        spectrum = torch.fft.rfft(x)
        mixed = torch.zeros_like(spectrum)
        mixed[..., : self.modes] = torch.einsum("bix,iox->box", spectrum[..., : self.modes], weight)
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.bypass(x))


class SpatialTransformer(nn.Module):
    """An image [B, 3, 8, 8] sampled at places that it determines itself."""

    def __init__(self):
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 6))

    def forward(self, x):
        where = self.locate(x).view(-1, 2, 3) + torch.eye(2, 3)
        grid = F.affine_grid(where, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode="mean", padding_idx=0), nn.Linear(4, 3)

    def forward(self, indices):
        return self.head(self.bag(indices))


class Masked(nn.Module):
    """A transformer's encoder that is given a mask, and what it should know of it."""

    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder, self.options = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), options

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(x, mask=mask, **self.options)


class Whitened(nn.Module):
    """A vector that is decorrelated by a covariance that the network learns, and its log-probability."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        covariance = self.factor @ self.factor.T + torch.eye(5)
        lower = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(lower, x.mT, upper=False).mT
        return white, white.square().sum(-1) + torch.logdet(covariance), torch.linalg.solve(covariance, x.mT)


def orthogonal(name, wide=4):
    return lambda: parametrizations.orthogonal(nn.Linear(5, wide), orthogonal_map=name)


NETWORKS = {
    "rotary embedding": (Rotary, vectors(6, 10)),
    "spectral, complex weights": (Spectral, vectors(3, 16)),
    "spectral, pairs": (lambda: Spectral(pairs=True), vectors(3, 15)),
    "spatial transformer": (SpatialTransformer, vectors(3, 8, 8)),
    "bags": (Bags, lambda n: torch.randint(0, 9, (n, 6))),
    "masked encoder": (lambda: Masked(is_causal=True), vectors(4, 16)),
    "whitened": (Whitened, vectors(5)),
    "orthogonal, matrix exponential": (orthogonal("matrix_exp"), vectors(5)),
    "orthogonal, Cayley": (orthogonal("cayley"), vectors(5)),
    "orthogonal, Householder": (orthogonal("householder", 7), vectors(5)),
}

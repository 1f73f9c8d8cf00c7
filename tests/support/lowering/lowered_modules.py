"""Modules to lower, with inputs for a batch size: policies, and networks that use rarer operators."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class NatureCNN(nn.Module):
    def __init__(self, channels=4, size=84, actions=6):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            features = self.body(torch.zeros(1, channels, size, size)).shape[1]
        self.head = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, actions))

    def forward(self, frames):
        return self.head(self.body(frames.float() / 255.0))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.two(F.relu(self.one(F.relu(x))))


class Impala(nn.Module):
    """The residual network of IMPALA, for frames of 24 x 24."""

    def __init__(self):
        super().__init__()
        stages, channels = [], 3
        for width in (8, 16, 16):
            stages += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.MaxPool2d(3, 2, 1),
                Residual(width),
                Residual(width),
            ]
            channels = width
        self.body = nn.Sequential(*stages, nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 3 * 3, 5)

    def forward(self, frames):
        return self.head(F.relu(self.body(frames / 255.0)))


class CellPolicy(nn.Module):
    """A recurrent policy of one step: (observation, state) -> (logits, next state)."""

    def __init__(self, kind):
        super().__init__()
        self.encoder = nn.Linear(5, 8)
        self.cell = kind(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, observation, state):
        state = self.cell(torch.tanh(self.encoder(observation)), state)
        return self.head(state[0] if isinstance(state, tuple) else state), state


class LayerPolicy(nn.Module):
    """A recurrent policy over time [B, T, 5], whose state has the batch dimension first."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(5, 6, 2, batch_first=True, **options)
        self.head = nn.Linear(6 * (1 + self.rnn.bidirectional), 3)

    def forward(self, observation, state):
        state = tuple(each.transpose(0, 1).contiguous() for each in state)
        hidden, state = self.rnn(observation, state if isinstance(self.rnn, nn.LSTM) else state[0])
        return self.head(hidden), state


class Transformer(nn.Module):
    """Self-attention over a short history, with learned places and a causal mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.places = nn.Parameter(torch.randn(8, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, history):
        x = self.embed(history) + self.places[: history.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.encoder(x, mask=mask, is_causal=True))[:, -1]


def mlp(activation):
    return nn.Sequential(nn.Linear(5, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 3))


def actor_critic():
    body = TensorDictModule(nn.Sequential(nn.Linear(5, 16), nn.Tanh()), ["observation"], ["hidden"])
    actor = TensorDictModule(nn.Linear(16, 3), ["hidden"], [("agent", "logits")])
    critic = TensorDictModule(nn.Linear(16, 1), ["hidden"], ["state_value"])
    return TensorDictSequential(body, actor, critic)


def vectors(*shape):
    return lambda n: torch.randn(n, *shape)


def frames(*shape):
    return lambda n: torch.randint(0, 256, (n, *shape), dtype=torch.uint8)


def several(*makers):
    return lambda n: tuple(make(n) for make in makers)


def tensordict(**makers):
    return lambda n: TensorDict({name: make(n) for name, make in makers.items()}, batch_size=[n])


class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.vector = nn.Linear(5, 8)
        self.actor, self.critic = nn.Linear(40, 3), nn.Linear(40, 1)

    def forward(self, observation):
        parts = [self.image(observation["image"]), F.relu(self.vector(observation["vector"]))]
        both = torch.cat(parts, -1)
        return {"logits": self.actor(both), "value": self.critic(both).squeeze(-1)}


POLICIES = {
    "mlp tanh": (lambda: mlp(nn.Tanh), vectors(5)),
    "nature cnn": (NatureCNN, frames(4, 84, 84)),
    "impala": (Impala, lambda n: 255 * torch.rand(n, 3, 24, 24)),
    "gru cell": (lambda: CellPolicy(nn.GRUCell), several(vectors(5), vectors(6))),
    "lstm cell": (lambda: CellPolicy(nn.LSTMCell), several(vectors(5), several(vectors(6), vectors(6)))),
    "gru layers": (lambda: LayerPolicy(nn.GRU), several(vectors(4, 5), lambda n: (torch.randn(n, 2, 6),))),
    "lstm layers": (lambda: LayerPolicy(nn.LSTM), several(vectors(4, 5), several(vectors(2, 6), vectors(2, 6)))),
    "lstm both ways": (
        lambda: LayerPolicy(nn.LSTM, bidirectional=True, bias=False),
        several(vectors(4, 5), several(vectors(4, 6), vectors(4, 6))),
    ),
    "transformer": (Transformer, vectors(6, 5)),
    "image and vector": (Multi, lambda n: ({"image": torch.randn(n, 3, 9, 9), "vector": torch.randn(n, 5)},)),
    "tensordict sequential": (actor_critic, tensordict(observation=vectors(5))),
}


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


# Complex numbers, linear algebra, bags or grids.
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

"""Policies that act on observations normalised by running statistics, which are part of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn
from typing_extensions import override

from funcollect import running_statistics
from funcollect.arguments import check_kind, check_number
from funcollect.policies.jax_functions.jax_policy import JaxPolicy
from funcollect.policies.population import Population
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.policies.weights import matched
from funcollect.protocols import Policy
from funcollect.running_statistics import EPSILON, RunningStatistics, check_alike
from funcollect.specs import Leaf, map_leaves


def normalized(policy: Policy, stats: RunningStatistics, *, clip: float = 10.0) -> NormalizedTorch | NormalizedJax:
    """A policy that acts on normalised observations; batches hold the raw ones.

    Its parameters are the pair (trainable, statistics): those of `policy`, for gradients and optimizers, and `stats`.
    Both are sent to workers as one version, and are saved together. In Torch, parameters or a network may be passed
    without statistics: the policy then keeps its own.

    Args:
        policy: a policy made by `torch_policy` or `jax_policy`. It stays as it is, and shares its parameters.
        stats: see `funcollect.running_statistics`. Setting the attribute `statistics` replaces them, which compiles
            nothing. Collectors with ``update_statistics=True`` add each batch to them.
        clip: the largest absolute value of a normalised observation.

    Raises:
        TypeError: for another kind of policy, or statistics of the other framework.

    >>> import torch, funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> stats = fc.running_statistics.init(env.observation_space)
    >>> policy = fc.normalized(fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical), stats)
    >>> trainable, stats = policy.params
    """
    check_kind("stats", stats, RunningStatistics, "pass funcollect.running_statistics.init(env.observation_space)")
    check_number("clip", clip, positive=True, example=10.0)
    if isinstance(policy, Population):
        raise TypeError("policy is a population, expected one member: normalise that, and make a population of it")
    if isinstance(policy, Normalized):
        raise TypeError("the policy is normalised already: set its statistics, or pass the policy below")
    in_torch = isinstance(stats.count, Tensor)
    if isinstance(policy, TorchPolicy) and in_torch:
        return NormalizedTorch(policy, stats, clip)
    if isinstance(policy, JaxPolicy) and not in_torch:
        return NormalizedJax(policy, stats, clip)
    what = f"policy is {type(policy).__name__} with statistics of {'Torch' if in_torch else 'JAX'}"
    others = "jax_policy with running_statistics.init(space, backend='jax')"
    raise TypeError(f"{what}, expected a policy of torch_policy with those of Torch, or of {others}")


class Normalized:
    """Base class of normalised policies in Torch and in JAX; see `normalized`."""

    clip: float  # the largest absolute value of a normalised observation
    params: Any  # the pair (trainable, statistics)

    @property
    def statistics(self) -> RunningStatistics:
        """The statistics that the policy acts with; in Torch a copy."""
        return self.params[1]  # type: ignore[no-any-return]

    @statistics.setter
    def statistics(self, stats: RunningStatistics) -> None:
        check_alike(self.statistics, stats)
        self._act_with(stats)

    def _act_with(self, stats: RunningStatistics) -> None:
        """Act with these statistics from the next rollout on."""
        self.params = (self.params[0], stats)

    def as_pair(self, params: Any) -> tuple[Any, RunningStatistics]:
        """The pair (trainable, statistics), from parameters in any form that `prepare` takes except None."""
        return matched(self.params, params, "jax")  # type: ignore[no-any-return]


class NormalizedJax(Normalized, JaxPolicy):
    """See `normalized`. `params` may be set: the next rollout reads the pair."""

    def __init__(self, policy: JaxPolicy, stats: RunningStatistics, clip: float) -> None:
        inner = policy.apply

        @wraps(inner)  # since its signature shows whether it takes keys
        def apply(params: Any, observation: Any, *others: Any, **keywords: Any) -> Any:
            trainable, stats = params
            return inner(trainable, running_statistics.normalize(stats, observation, clip=clip), *others, **keywords)

        self.take_over(policy, apply=apply, params=(policy.params, stats), clip=clip)


class NormalizedModule(nn.Module):
    """Calls a module, or a function, on normalised observations. The statistics are buffers, some also in float32."""

    def __init__(
        self, module: Callable[..., Any], stats: RunningStatistics, clip: float, keys: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.policy = module
        self.statistics = nn.Module()
        for name, tensor in _buffers(stats).items():
            self.statistics.register_buffer(name, tensor)
        self.names = sorted(stats.mean)
        self.clip, self.keys = clip, keys

    def forward(self, *inputs: Any) -> Any:
        """Call the module with the normalised observation in place of the observation."""
        names = self.keys or (self.names[0] if isinstance(inputs[0], Tensor) else "",)
        normal = [map_leaves(self._scaled, value, name) for name, value in zip(names, inputs, strict=False)]
        return self.policy(*normal, *inputs[len(names) :])

    def _scaled(self, name: str, value: Tensor) -> Tensor:
        if name not in self.names:
            return value
        number = self.names.index(name)
        shift, deviation = (getattr(self.statistics, f"{part}{number}") for part in ("shift", "deviation"))
        scaled: Tensor = (value - shift) / deviation
        return scaled.clamp(-self.clip, self.clip)


def _buffers(stats: RunningStatistics) -> dict[str, Tensor]:
    buffers = {"count": stats.count}
    for number, name in enumerate(sorted(stats.mean)):
        mean, variance = stats.mean[name], stats.variance[name]
        buffers |= {f"mean{number}": mean, f"variance{number}": variance, f"shift{number}": mean.float()}
        buffers[f"deviation{number}"] = (variance + EPSILON).sqrt().float()
    return {name: tensor.detach().clone() for name, tensor in buffers.items()}


class NormalizedTorch(Normalized, TorchPolicy):
    """See `normalized`. Its module is a `NormalizedModule`, which holds the policy's module and the statistics."""

    _module: NormalizedModule

    def __init__(self, policy: TorchPolicy, stats: RunningStatistics, clip: float) -> None:
        module = NormalizedModule(policy.module, stats, clip, policy.keys)
        module.statistics.to(policy.run_device)
        self.take_over(policy, clip=clip, _warned=False)
        self.replace(module)

    @override
    def owns(self, module: Any) -> bool:
        return super().owns(module) or module is self._module.policy

    @property
    @override
    def params(self) -> tuple[TensorDict | None, RunningStatistics]:
        module = self._module.policy
        trainable = TensorDict.from_module(module) if isinstance(module, nn.Module) else None
        return trainable, self._statistics_in(dict(self._module.statistics.named_buffers()))

    def _statistics_in(self, buffers: Mapping[str, Tensor]) -> RunningStatistics:
        mean, variance = (
            {name: buffers[f"{part}{number}"].clone() for number, name in enumerate(self._module.names)}
            for part in ("mean", "variance")
        )
        return RunningStatistics(buffers["count"].clone(), mean, variance)

    @override
    def _act_with(self, stats: RunningStatistics) -> None:
        self._module.statistics.load_state_dict(_buffers(stats))

    @override
    def as_pair(self, params: Any) -> tuple[Any, RunningStatistics]:
        if isinstance(params, tuple):
            return params
        by_name = self.by_name(params)
        trainable, stats = (
            {name.removeprefix(part): leaf for name, leaf in by_name.items() if name.startswith(part)}
            for part in ("policy.", "statistics.")
        )
        return trainable, self._statistics_in(stats) if stats else self.statistics

    @override
    def by_name(self, params: Any) -> dict[str, Any]:
        """The parameters of the whole module, from the pair, from all by name, or from those of the network alone."""
        if not isinstance(params, tuple) or len(params) != 2:
            by_name = super().by_name(params)
            if by_name.keys() <= self.tensors(None).keys():
                return by_name
            params = by_name, self.statistics
        trainable, stats = params
        check_kind("the statistics in params", stats, RunningStatistics, "pass the pair (trainable, statistics)")
        parts = {"policy": super().by_name({} if trainable is None else trainable), "statistics": _buffers(stats)}
        return {f"{part}.{name}": leaf for part, leaves in parts.items() for name, leaf in leaves.items()}


def check_statistics(policy: Normalized, leaves: Sequence[Leaf]) -> None:
    """Raise ValueError unless an environment has the observations of the policy's statistics, in the same shapes."""
    shapes = {leaf.name: list(leaf.shape) for leaf in leaves}
    for name, mean in policy.statistics.mean.items():
        if list(mean.shape) != shapes.get(name):
            what = f"the policy's statistics of {name!r} have the shape {list(mean.shape)}, the observations {shapes}"
            mend = "make them with funcollect.running_statistics.init(env.observation_space)"
            raise ValueError(f"{what}, expected the same: {mend}")

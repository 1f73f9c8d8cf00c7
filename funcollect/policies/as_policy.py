"""Policies for an environment: what a user passes, and what has a name.

A name is built in, or an entry point ``name = "module:factory"`` of an installed package. ``factory(env, **options)``
returns a `Policy`. The package is imported when its policy is asked for, so a broken one affects no other.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from funcollect.arguments import check_call, checked_device
from funcollect.errors import PluginError
from funcollect.interop.jax_setup import default_device_type, import_jax
from funcollect.messages import kind_of, shown
from funcollect.policies.base import policies_of
from funcollect.policies.random_policy import RandomPolicy
from funcollect.policies.tensordict_modules.calling import initial_hidden_states
from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictPolicy
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.policies.torch_modules.torch_policy import TorchPolicy
from funcollect.protocols import Env, Policy, is_env, is_policy

GROUP = "funcollect.policies"

_FILE = "entry_points.txt"


def as_policy(policy: Any, env: Env, device: torch.device | str | None = None) -> Policy:
    """The policy that a collector over `env` runs, on `device` or where it is.

    `policy` is a `Policy`; None for random actions; a `TensorDictModule`, or a callable with one argument that is
    named ``tensordict`` or ``td`` or annotated as a TensorDict; or any other module or function from observation to
    action. For a Dict space it may take the keys as arguments, by their names or all in their order.

    TypeError for a policy that cannot be called, or takes other arguments; ValueError for a device that does not exist,
    or a policy that cannot be copied to it.
    """
    place = checked_device(device, "policy_device")
    if isinstance(policy, type):
        raise TypeError(f"policy is the class {policy.__name__}, expected an instance: build it, {policy.__name__}()")
    kind = type(policy)
    of_torchrl = kind.__name__ == "RandomPolicy" and kind.__module__.startswith("torchrl")
    if policy is None or (of_torchrl and policy.action_spec is None):  # a collector has to give it the spec
        return RandomPolicy(env.action_spec)
    if is_policy(policy):
        return policy if place is None else _placed(policy, env, place)
    if not callable(policy):
        what = f"policy is {shown(policy)}, expected a Policy, a torch.nn.Module, a function from observation to action"
        raise TypeError(f"{what}, or None for random actions: pass one of these")
    try:
        signature = inspect.signature(policy.forward if isinstance(policy, nn.Module) else policy)
        parameters = list(signature.parameters.values())
    except (TypeError, ValueError):
        parameters = []  # they cannot be inspected
    required = [one for one in parameters if one.default is one.empty and one.kind != one.VAR_KEYWORD]
    if isinstance(policy, TensorDictModuleBase) or (len(required) == 1 and _is_tensordict(required[0])):
        return _on_tensordict(policy, env, place)
    keys, wanted = [], "one argument, the observation (a recurrent policy: funcollect.torch_policy with initial_state=)"
    if isinstance(env.observation_space, spaces.Dict):
        all_keys = [*env.observation_space.spaces]
        keys = _keys_of_arguments(all_keys, parameters, [parameter.name for parameter in required])
        wanted += f", or one for each of some of its keys {all_keys}, by their names"
    check_call("policy", policy, wanted, len(keys) or 1)
    return TorchPolicy(policy, None, None, place, keys=keys)


def _placed(policy: Policy, env: Env, place: torch.device) -> Policy:
    """The policy on a device; ValueError for one that cannot be moved there. Users' own classes place themselves."""
    if isinstance(policy, TorchBacked):
        of_env = default_device_type() if env.backend == "jax" else getattr(env, "device", "cpu")
        return policy if (policy.run_device or torch.device(of_env)) == place else policy.on(place)
    for part in policies_of(policy):
        if isinstance(part, RandomPolicy):
            continue
        in_jax = part.backend == "jax"
        actual = torch.device(default_device_type()) if in_jax else getattr(part, "run_device", None)
        if actual is not None and (actual.type != place.type if in_jax else actual != place):
            mend = "set JAX_PLATFORMS" if in_jax else "make its parts there, with torch_policy(…, device=…)"
            what = f"policy_device is {place}, but a {type(policy).__name__} runs on {actual}, with its parameters"
            raise ValueError(f"{what}, expected that device: {mend}, or leave policy_device out")
    return policy


def _on_tensordict(policy: Any, env: Env, place: torch.device | None) -> TensorDictPolicy:
    """A policy on a TensorDict. Its hidden states start as in its own primers, else the environment's, else at zero."""
    observation = {leaf.path: torch.from_numpy(np.zeros(leaf.shape, leaf.dtype)) for leaf in env.observation_leaves}
    primers = env.primers if env.backend == "host" else None
    hidden_states = initial_hidden_states(policy, None, primers, observation)
    if taken := sorted({leaf.path for leaf in env.observation_leaves} & set(hidden_states)):
        what = f"the environment delivers {['.'.join(path) for path in taken]}"
        mend = "take the TensorDictPrimer out of the environments inside, the policy's state needs none"
        raise ValueError(f"{what}, which the policy carries from step to step: {mend}")
    return TensorDictPolicy(policy, place, hidden_states)


def _keys_of_arguments(keys: list[str], parameters: list[inspect.Parameter], required: list[str]) -> list[str]:
    """The keys that a policy takes as arguments, as in TorchRL: those it names, else all of them; [] for one dict."""
    named = [parameter.name for parameter in parameters if parameter.name in keys]
    if named and set(required) <= set(keys):
        if [one.name for one in parameters if one.kind != one.KEYWORD_ONLY][: len(named)] != named:
            what = f"the policy's arguments {named} are keys of the observation, which are passed by position"
            raise TypeError(f"{what}, expected them before all others and not keyword-only: reorder its arguments")
        return named
    return keys if len(required) == len(keys) > 1 else []


def _is_tensordict(argument: inspect.Parameter) -> bool:
    kind = argument.annotation
    by_text = isinstance(kind, str) and "TensorDict" in kind
    by_class = inspect.isclass(kind) and issubclass(kind, TensorDictBase)
    return by_text or by_class or argument.name in ("tensordict", "td")


def make_policy(name: str, env: Env, /, **options: Any) -> Policy:
    """A policy by name, made for an environment.

    Args:
        name: ``"mlp"`` (an untrained Torch network), ``"random"``, or what an installed package offers; if several
            packages offer one name, ``"package:name"``. ``funcollect policies`` lists them all.
        env: the environment for whose spaces the policy is made.
        **options: arguments of the policy's factory.

    Raises:
        ValueError: for a name that no package offers, or that several do.
        TypeError: if `env` is not an environment, or the factory does not take these options.
        PluginError: for a policy that cannot be imported or made, or a factory that does not return a policy.

    >>> import funcollect as fc
    >>> policy = make_policy("mlp", fc.make_env("CartPole-v1", num_envs=2), seed=1)
    """
    return find_policy(name).make(env, **options)


def find_policy(name: str) -> PolicyPlugin:
    """Return the policy that is offered under `name`, not yet imported; the errors of `make_policy`."""
    if not isinstance(name, str):
        raise TypeError(f"name is {shown(name)}, expected a str: pass for example 'mlp', or use the policy as it is")
    offers = offered_policies()
    wanted = _canonical(name)
    for short, plugin in offers.items():
        if short == name or (plugin.package and _canonical(plugin.address) == wanted):
            return plugin
    if same := {address: plugin for address, plugin in offers.items() if plugin.name == name}:
        what = f"{' and '.join(plugin.origin for plugin in same.values())} each offer a policy {name!r}"
        raise ValueError(f"{what}, expected one: say which, {' or '.join(map(repr, same))}")
    mend = f"install the package that offers it ({GROUP})"
    raise ValueError(f"there is no policy {name!r}, expected one of {list(offers)}: {mend}")


def offered_policies() -> dict[str, PolicyPlugin]:
    """Every policy by its shortest unique name: ``"name"``, as built-in ones have it, else ``"package:name"``.

    >>> list(offered_policies())[:2]
    ['mlp', 'random']
    """
    offers = [*_BUILT_IN, *sorted(_installed(), key=lambda plugin: plugin.name)]
    uses = Counter(plugin.name for plugin in offers)
    return {plugin.address if plugin.package and uses[plugin.name] > 1 else plugin.name: plugin for plugin in offers}


def _installed() -> Iterator[PolicyPlugin]:
    """The policies of packages on `sys.path`, read package by package, so that a broken one does not hide others."""
    seen = set()
    for package in distributions():
        if GROUP not in (package.read_text(_FILE) or ""):
            continue
        name, version = package.name or "unnamed", package.version or "?"
        if (same := _canonical(f"{name}:")) in seen:
            continue  # hidden by an earlier folder on `sys.path`
        seen.add(same)
        try:
            entries = package.entry_points.select(group=GROUP)
        except Exception as error:
            yield PolicyPlugin("?", _FILE, name, version, fault=f"cannot be read from its {_FILE}: {_message(error)}")
        else:
            yield from (PolicyPlugin(entry.name, entry.value, name, version) for entry in entries)


def _canonical(address: str) -> str:
    """An address with the package's name normalised, as package indices normalise it."""
    package, _, name = address.rpartition(":")
    return f"{re.sub(r'[-_.]+', '-', package).lower()}:{name}"


@dataclass(frozen=True)
class PolicyPlugin:
    """A policy that can be made by name."""

    name: str
    source: str  # its factory, ``"module:function"``
    package: str = ""  # the distribution that offers it; empty for a built-in one
    version: str = ""
    fault: str = ""  # why it cannot be loaded, if that is known already

    @property
    def address(self) -> str:
        """The unique name of a package's policy."""
        return f"{self.package}:{self.name}"

    @property
    def origin(self) -> str:
        """The distribution that offers it, for messages."""
        return f"{self.package} {self.version}" if self.package else "built in"

    def load(self) -> Callable[..., Any]:
        """Import the factory; PluginError if that fails, or if it is no function of an environment."""
        if self.fault:
            raise self._broken(self.fault)
        if self.package:
            import_jax()  # so that JAX has the library's settings before the package imports it
        with self._working("imported"):
            factory: Callable[..., Any] = EntryPoint(self.name, self.source, GROUP).load()
        what = f"is {shown(factory)}"
        try:
            signature = inspect.signature(factory)
            what = f"takes {signature}"
            signature.bind_partial(None)
        except (TypeError, ValueError) as error:
            raise self._broken(f"{what}, expected a function of the environment: (env, **options) -> Policy") from error
        return factory

    def takes(self, option: str) -> bool:
        """Whether the factory has a parameter of that name; PluginError if it cannot be loaded."""
        return option in inspect.signature(self.load()).parameters

    def make(self, env: Env, /, **options: Any) -> Policy:
        """The policy for an environment: see `make_policy`."""
        if not is_env(env):
            raise TypeError(f"env is {kind_of(env)}, expected an Env: make one with funcollect.make_env")
        factory = self.load()
        signature = inspect.signature(factory)
        try:
            signature.bind(None, **options)
        except TypeError as error:
            what = f"the policy {self.name!r} ({self.origin}) was given the options {sorted(options)}: {error}"
            raise TypeError(f"{what}: it takes {list(signature.parameters)[1:]}") from error
        with self._working(f"made for {env!r}"):
            policy = factory(env, **options)
        if not is_policy(policy):
            raise self._broken(
                f"is {kind_of(policy)} as its factory returns it, expected a Policy: use jax_policy or torch_policy"
            )
        return policy

    @contextlib.contextmanager
    def _working(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # raised by the package's code
            raise self._broken(f"cannot be {what}: {_message(error)}") from error

    def _broken(self, what: str) -> PluginError:
        return PluginError(f"the policy {self.name!r} ({self.origin}) {what}", reason=what)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_BUILT_IN = (
    PolicyPlugin("mlp", "funcollect.policies.mlp:mlp"),
    PolicyPlugin("random", "funcollect.policies.random_policy:random_policy"),
)

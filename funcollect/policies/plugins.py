"""Policies by name: built in, or offered by installed packages through the entry-point group ``funcollect.policies``.

An entry point is ``name = "module:factory"``; the factory is called as ``factory(env, **options)`` and returns a
`Policy`. A package is imported when its policy is asked for, so a broken package affects no other.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from operator import attrgetter
from typing import Any

from funcollect.errors import PluginError
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import kind_of, shown
from funcollect.protocols import Env, Policy, is_env, is_policy

__all__ = ["GROUP", "PolicyPlugin", "find_policy", "make_policy", "offered_policies"]

GROUP = "funcollect.policies"

_FILE = "entry_points.txt"
_WANTED = "expected a function of the environment: (env, **options) -> Policy"


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
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = make_policy("mlp", env, seed=1)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> batch["action_log_prob"].shape
    torch.Size([2, 4])
    """
    return find_policy(name).make(env, **options)


def find_policy(name: str) -> PolicyPlugin:
    """Return the policy that is offered under `name`, not yet imported; the errors of `make_policy`."""
    if not isinstance(name, str):
        raise TypeError(f"name is {shown(name)}, expected a str: pass for example 'mlp', or use the policy as it is")
    offers = offered_policies()
    if name in offers:
        return offers[name]
    if same := {address: plugin for address, plugin in offers.items() if plugin.name == name}:
        raise ValueError(
            f"{' and '.join(plugin.origin for plugin in same.values())} each offer a policy {name!r}, expected one: "
            f"say which, {' or '.join(map(repr, same))}"
        )
    for plugin in offers.values():
        if plugin.package and _canonical(name) == _canonical(plugin.address):
            return plugin
    raise ValueError(
        f"there is no policy {name!r}, expected one of {list(offers)}: install the package that offers it into this "
        f"environment, under the entry-point group {GROUP!r}"
    )


def offered_policies() -> dict[str, PolicyPlugin]:
    """Every policy by its shortest unique name: ``"name"``, else ``"package:name"``. Nothing is imported.

    A built-in name always stands for the built-in policy.

    >>> list(offered_policies())[:2]
    ['mlp', 'random']
    """
    offers = [*_BUILT_IN, *sorted(_installed(), key=attrgetter("name"))]
    taken = Counter(plugin.name for plugin in offers)
    plain = (not plugin.package or taken[plugin.name] == 1 for plugin in offers)
    return {plugin.name if short else plugin.address: plugin for plugin, short in zip(offers, plain, strict=True)}


def _installed() -> Iterator[PolicyPlugin]:
    """The policies of packages on `sys.path`, read package by package, so that a broken one does not hide others."""
    seen = set()
    for package in distributions():
        if GROUP not in (package.read_text(_FILE) or ""):
            continue
        name, version = package.name or "unnamed", package.version or "?"
        if (same := _canonical(f"{name}:")) in seen:
            continue  # an earlier folder hides it
        seen.add(same)
        try:
            entries = package.entry_points.select(group=GROUP)
        except Exception as error:
            yield PolicyPlugin("?", _FILE, name, version, fault=f"cannot be read from its {_FILE}: {_message(error)}")
        else:
            yield from (PolicyPlugin(entry.name, entry.value, name, version) for entry in entries)


def _canonical(address: str) -> str:
    """An address with the package's name normalised, as package indices compare it."""
    package, _, name = address.rpartition(":")
    return f"{re.sub(r'[-_.]+', '-', package).lower()}:{name}"


@dataclass(frozen=True)
class PolicyPlugin:
    """A policy that can be made by name.

    Attributes:
        name: the name under which it is offered.
        source: its factory, ``"module:function"``.
        package, version: the distribution that offers it; empty for a built-in one.
        fault: why it cannot be loaded, if that is known already.
    """

    name: str
    source: str
    package: str = ""
    version: str = ""
    fault: str = ""

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
            import_jax()  # before the package does, which would leave JAX without the library's settings
        with self._working("imported"):
            factory = EntryPoint(self.name, self.source, GROUP).load()
        try:
            signature = inspect.signature(factory)
        except (TypeError, ValueError) as error:
            raise self._broken(f"is {shown(factory)}, {_WANTED}") from error
        try:
            signature.bind_partial(None)
        except TypeError:
            raise self._broken(f"takes {signature}, {_WANTED}") from None
        return factory  # type: ignore[no-any-return]

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
            raise TypeError(
                f"the policy {self.name!r} ({self.origin}) was given the options {sorted(options)}: {error}: it takes "
                f"{list(signature.parameters)[1:]}"
            ) from error
        with self._working(f"made for {env!r}"):
            policy = factory(env, **options)
        if not is_policy(policy):
            raise self._broken(
                f"is {kind_of(policy)} as its factory returns it, expected a Policy: the factory should wrap it with "
                "funcollect.jax_policy or funcollect.torch_policy"
            )
        return policy

    @contextlib.contextmanager
    def _working(self, what: str) -> Iterator[None]:
        """Raise PluginError for whatever a package's own code raises."""
        try:
            yield
        except (Exception, SystemExit) as error:
            raise self._broken(f"cannot be {what}: {_message(error)}") from error

    def _broken(self, what: str) -> PluginError:
        return PluginError(f"the policy {self.name!r} ({self.origin}) {what}", reason=what)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_BUILT_IN = (
    PolicyPlugin("mlp", "funcollect.policies.mlp:mlp"),
    PolicyPlugin("random", "funcollect.policies.random_policy:random_policy"),
)

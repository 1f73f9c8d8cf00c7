"""Policies by name: built in, or offered by installed packages through the entry-point group ``funcollect.policies``.

An entry point is ``name = "module:factory"``; the factory is called as ``factory(env, **options)`` and returns a
`Policy`. A package is imported when its policy is asked for, and what goes wrong in it is told of it alone.
"""

from __future__ import annotations

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
from funcollect.messages import shown
from funcollect.protocols import Env, Policy, is_env, is_policy

__all__ = ["GROUP", "PolicyPlugin", "find_policy", "make_policy", "offered_policies"]

GROUP = "funcollect.policies"
Factory = Callable[..., Any]

_FILE = "entry_points.txt"


def make_policy(name: str, env: Env, /, **options: Any) -> Policy:
    """A policy by name, made for an environment.

    Args:
        name: ``"mlp"`` (an untrained Torch network), ``"random"``, or what an installed package offers; where several
            packages offer one name, ``"package:name"``. ``funcollect policies`` lists them all.
        env: the environment, whose spaces the policy is made for.
        **options: for the policy's factory.

    Raises:
        ValueError: for a name that nobody offers, or several packages do.
        TypeError: for something that is no environment, or options that the factory does not take.
        PluginError: for a policy that cannot be imported or made, or is none.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = make_policy("mlp", env, seed=1)
    >>> state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    >>> batch["action_log_prob"].shape
    torch.Size([2, 4])
    """
    return find_policy(name).make(env, **options)


def find_policy(name: str) -> PolicyPlugin:
    """What is offered under `name`, not yet imported.

    Raises:
        TypeError: for something that is no name.
        ValueError: for a name that nobody offers, or several packages do.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {shown(name)}, expected a str: pass for example 'mlp', or use the policy as it is")
    offers = offered_policies()
    if name in offers:
        return offers[name]
    same = {address: plugin for address, plugin in offers.items() if plugin.name == name}
    if same:
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
    """Every policy by the shortest name that means it: ``"name"``, else ``"package:name"``; nothing is imported.

    A built-in name is never taken by a package.

    >>> list(offered_policies())[:2]
    ['mlp', 'random']
    """
    offers = [*_BUILT_IN, *sorted(_installed(), key=attrgetter("name"))]
    taken = Counter(plugin.name for plugin in offers)
    plain = (not plugin.package or taken[plugin.name] == 1 for plugin in offers)
    return {plugin.name if short else plugin.address: plugin for plugin, short in zip(offers, plain, strict=True)}


def _installed() -> Iterator[PolicyPlugin]:
    """What the packages on `sys.path` offer; unlike `importlib.metadata.entry_points`, one at a time."""
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
            yield PolicyPlugin("?", _FILE, name, version, fault=f"cannot be read from its {_FILE}: {_told(error)}")
        else:
            yield from (PolicyPlugin(entry.name, entry.value, name, version) for entry in entries)


def _canonical(address: str) -> str:
    """An address with the package's name as package indices compare it."""
    package, _, name = address.rpartition(":")
    return f"{re.sub(r'[-_.]+', '-', package).lower()}:{name}"


@dataclass(frozen=True)
class PolicyPlugin:
    """A policy that can be made by name.

    Attributes:
        name: what it is offered as.
        source: where its factory is, ``"module:function"``.
        package, version: of the distribution that offers it; empty for a built-in one.
        fault: why it can't be loaded, where that is known already.
    """

    name: str
    source: str
    package: str = ""
    version: str = ""
    fault: str = ""

    @property
    def address(self) -> str:
        """The name that no other package's policy has."""
        return f"{self.package}:{self.name}"

    @property
    def origin(self) -> str:
        """Who offers it, as a person reads it."""
        return f"{self.package} {self.version}" if self.package else "built in"

    def load(self) -> Factory:
        """The factory, imported.

        Raises:
            PluginError: where that fails, or it is no function of an environment.
        """
        if self.fault:
            raise self._broken(self.fault)
        if self.package:
            import_jax()  # before the package does, which would leave JAX without the library's settings
        try:
            factory = EntryPoint(self.name, self.source, GROUP).load()
        except (Exception, SystemExit) as error:  # a package's own code may raise anything
            raise self._broken(f"cannot be imported: {_told(error)}") from error
        try:
            inspect.signature(factory).bind_partial(None)
        except (TypeError, ValueError) as error:
            raise self._broken(f"is {shown(factory)}, expected a function (env, **options) -> Policy") from error
        return factory  # type: ignore[no-any-return]

    def takes(self, option: str) -> bool:
        """Whether the factory has a parameter of that name.

        Raises:
            PluginError: as `load` does.
        """
        return option in inspect.signature(self.load()).parameters

    def make(self, env: Env, /, **options: Any) -> Policy:
        """The policy for an environment: see `make_policy`."""
        if not is_env(env):
            raise TypeError(f"env is {type(env).__name__}, expected an Env: make one with funcollect.make_env")
        factory = self.load()
        self._check_options(factory, options)
        try:
            policy = factory(env, **options)
        except (Exception, SystemExit) as error:
            raise self._broken(f"cannot be made for {env!r}: {_told(error)}") from error
        if not is_policy(policy):
            kind = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
            raise self._broken(
                f"is {kind} as its factory returns it, expected a Policy: the factory should wrap it with "
                "funcollect.jax_policy or funcollect.torch_policy"
            )
        return policy

    def _check_options(self, factory: Factory, options: dict[str, Any]) -> None:
        takes = inspect.signature(factory)
        try:
            takes.bind(None, **options)
        except TypeError as error:
            _, *names = takes.parameters
            raise TypeError(
                f"the policy {self.name!r} ({self.origin}) was given the options {sorted(options)}: {error}: it takes "
                f"{names}"
            ) from error

    def _broken(self, what: str) -> PluginError:
        return PluginError(f"the policy {self.name!r} ({self.origin}) {what}", reason=what)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_BUILT_IN = (
    PolicyPlugin("mlp", "funcollect.policies.mlp:mlp"),
    PolicyPlugin("random", "funcollect.policies.random_policy:random_policy"),
)

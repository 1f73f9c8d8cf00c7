"""Checks of arguments for all layers. Each raises an error with the rule, the value and the fix."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from funcollect.messages import clipped, shown


def check_positive(name: str, value: Any, example: int = 128, *, least: int = 1) -> None:
    """Raise unless `value` is an int of at least `least`, 1 by default."""
    if not is_int(value):
        wanted = "a positive int" if least else "an int of at least 0"
        raise TypeError(f"{name} is {shown(value)}, expected {wanted}: pass for example {name}={example}")
    if value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}: pass for example {name}={example}")


def check_count(name: str, value: Any) -> None:
    """Raise unless `value` is an int that is not negative."""
    check_positive(name, value, 0, least=0)


def check_optional_positive(name: str, value: Any) -> None:
    """Raise unless `value` is a positive int, or None."""
    if value is not None:
        check_positive(name, value)


def is_int(value: Any) -> bool:
    """Whether this is an int of Python's or NumPy's, and no flag."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_not_given(where: str, kwargs: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise ValueError for a keyword argument that is in `reasons`, which say why the caller cannot set it."""
    for name in kwargs:
        if name in reasons:
            raise ValueError(f"{name} cannot be given to {where} ({reasons[name]}): leave it out")


class Foreign(NamedTuple):
    """A keyword of TorchRL that is not one of ours."""

    why: str  # what there is instead
    ignored: Callable[[Any, Mapping[str, Any]], bool] = lambda value, call: True  # whether it changes nothing in a call


def unset(value: Any, call: Mapping[str, Any]) -> bool:
    """Whether a foreign keyword is None."""
    return value is None


def unset_or_false(value: Any, call: Mapping[str, Any]) -> bool:
    """Whether a foreign keyword is None or False."""
    return value is None or value is False


def without_foreign(what: str, foreign: Mapping[str, Foreign], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call without the foreign ones that may be ignored; TypeError if another one is foreign."""
    refused = {
        name: value for name, value in given.items() if name in foreign and not foreign[name].ignored(value, given)
    }
    if named := [f"{name}={shown(value)} ({foreign[name].why})" for name, value in refused.items()]:
        raise TypeError(f"{what} does not take {', '.join(named)}: leave it out")
    return {name: value for name, value in given.items() if name not in foreign}


def check_num_envs(num_envs: Any) -> None:
    """Raise ValueError unless `num_envs` is a positive int, or None."""
    if num_envs is not None and (not is_int(num_envs) or num_envs < 1):
        what = f"num_envs is {shown(num_envs)}, expected a positive int, or None for no batch dimension"
        raise ValueError(f"{what}: pass for example num_envs=8")


def check_flags(**values: Any) -> None:
    """Raise TypeError unless every value is a bool."""
    for name, value in values.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} is {shown(value)}, expected a bool: pass True or False")


def check_number(
    name: str, value: Any, *, most: float = math.inf, positive: bool = False, example: float = 0.5
) -> None:
    """Raise unless `value` is a finite number in [0, `most`], and not 0 if it must be `positive`."""
    least = "a positive number" if positive else "a number of at least 0"
    rule = f"expected {f'a number in [0, {most}]' if most < math.inf else least}: pass for example {name}={example}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}, {rule}")
    if not 0 <= float(value) <= most or value == math.inf or (positive and value == 0):
        raise ValueError(f"{name} is {value}, {rule}")


def check_key(name: str, key: Any, *, required: bool = False) -> None:
    """Raise TypeError unless `key` is a string or a tuple of strings, as in a TensorDict, or None if not `required`."""
    path = (key,) if isinstance(key, str) else key
    whole = isinstance(path, tuple) and path and all(isinstance(part, str) and part for part in path)
    if not whole and (required or key is not None):
        raise TypeError(f"{name} is {shown(key)}, expected a key: a string, or a tuple of strings")


def check_keys(name: str, keys: Any, example: str) -> None:
    """Raise unless `keys` is a list or tuple of strings without repetitions."""
    if not isinstance(keys, Sequence) or isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"{name} is {shown(keys)}, expected a list of strings, such as [{example!r}]")
    if len(set(keys)) < len(keys):
        raise ValueError(f"{name} is {list(keys)}, expected each key once: leave the others out")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of the strings in `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {sorted(choices)}, but is {shown(value)}: choose one of them")


def check_function(name: str, value: Any, what: str, arguments: int) -> None:
    """Raise TypeError unless `value` can be called with so many positional arguments; `what` names them."""
    if not callable(value):
        raise TypeError(f"{name} is {shown(value)}, expected {what}: pass one")
    check_call(name, value, what, arguments)


def check_call(name: str, function: Any, what: str, arguments: int, *keywords: str) -> None:
    """Raise TypeError if neither a function nor the one it wraps takes so many arguments and these `keywords`."""
    if isinstance(function, nn.Module):
        function = getattr(function, "_orig_mod", function)  # the module that torch.compile was given
        if type(function).__call__ is nn.Module.__call__:
            function = function.forward
    for follow_wrapped in (False, True):
        try:
            signature = inspect.signature(function, follow_wrapped=follow_wrapped)
        except (TypeError, ValueError):  # some builtin functions have none
            return
        try:
            signature.bind(*range(arguments), **dict.fromkeys(keywords))
            return
        except TypeError:
            pass
    mend = "change its parameters, or bind the others with functools.partial"
    raise TypeError(f"{name} takes {signature}, expected {what}: {mend}")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], mend: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`; `mend` is the fix that the message names."""
    if not isinstance(value, kind):
        names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{name} is {shown(value)}, expected {names}: {mend}")


def check_arrays(name: str, leaves: Sequence[Any]) -> None:
    """Raise TypeError unless each of an argument's leaves is an array or a number."""
    for leaf in leaves:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, Real):
            raise TypeError(f"{name} holds {shown(leaf)}, expected arrays: pass the state of one environment")


def checked_device(device: torch.device | str | None, name: str = "device") -> torch.device | None:
    """Return a device with its index, or None for None; ValueError if Torch cannot allocate memory on it."""
    if device is None:
        return None
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:  # depends on the device
        reason = clipped(str(error).splitlines()[0], 200)
        what = f"{name} is {str(device)!r}, expected a device that Torch has here ({reason})"
        raise ValueError(f"{what}: choose another, such as 'cpu' or 'cuda:0'") from error

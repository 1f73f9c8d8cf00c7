"""`apply`: calls a function on every lane's environment between two rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from funcollect.arguments import check_function
from funcollect.core.checks import check_state
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import Array, CollectorState
from funcollect.protocols import Env, SimulatorsOfLanes


def apply(
    env: Env, state: CollectorState[Array], function: Callable[..., Any], *args: Any
) -> tuple[CollectorState[Array], list[Any]]:
    """Call a function on the environment of every lane, wherever it lives, and return what it returned.

    It acts from the next step on, and in all later episodes: to make a task harder, to move an object, to read a
    counter. The observation at the root of the next frame remains the one that was there. `fork` repeats the calls on
    its copies, and so do processes that replace lost ones, before their lanes' episodes begin. Functions are not saved:
    `save` refuses to save episodes after a call, even of a function that only reads, unless ``episodes="restart"``;
    call it again after `load`. `evaluate` runs environments as they were made.

    Args:
        env: an environment over Gymnasium's or TorchRL's single environments, one for each lane.
        state: the state to continue from; afterwards it is stale.
        function: called as ``function(lane_env, *args)``, with the environment as the factory returned it.
        args: further arguments. With `num_workers` function, arguments and results are sent by cloudpickle.

    Returns:
        The next state, and the results in the order of lanes.

    Raises:
        TypeError: for an environment without an object for each lane, and for a function, arguments or results that
            cannot be sent. `state` can still be used. If the results cannot be sent, the function has been called all
            the same.
        StaleStateError: if the state has been superseded by a later one.
        EnvError: if the function raises, or a process is lost. `recover` begins new episodes; lanes in which the
            function had returned have been changed, so let it set values rather than add to them, and call it again.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> state = fc.init(env, fc.random_policy(env), seed=0)
    >>> state, forces = fc.apply(env, state, lambda lane: lane.unwrapped.force_mag)
    >>> forces
    [10.0, 10.0]
    """
    check_state(env, state, "apply")
    check_function("function", function, "a function of one lane's environment and args", 1 + len(args))
    handle = state.env_state
    if not isinstance(handle, SimulatorHandle) or not isinstance(handle.simulation.simulators, SimulatorsOfLanes):
        raise TypeError(
            f"{env} has no object for each lane that a function could be called with, expected an environment over "
            "single environments of Gymnasium's or TorchRL's: over JAX use funcollect.set_env_params, over Torch "
            "state.replace(env_params=...)"
        )
    simulation = handle.claim()
    try:
        results = simulation.apply(function, args)
    except TypeError:  # the function was called in all lanes, or in none
        handle.give_back()
        raise
    return state.changed(env_state=simulation.release()), results

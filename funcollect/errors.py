"""Every error that the library raises by a name of its own.

Bad arguments raise `ValueError` or `TypeError`. The classes here name what goes wrong later, inside a run; each also
derives from the built-in class that a caller would expect.
"""


class FuncollectError(Exception):
    """Base of the library's named errors."""


class StaleStateError(FuncollectError, RuntimeError):
    """A state over real simulators was used after a later state had taken its place."""


class ClosedError(FuncollectError, RuntimeError):
    """The simulators behind a state, or a collector, were closed before this use."""


class ReplayError(FuncollectError, RuntimeError):
    """A simulator could not be brought to the same point again by replaying its seed and actions."""


class EnvError(FuncollectError, RuntimeError):
    """An environment raised, or answered outside its own spaces. Names the lane."""


class PolicyError(FuncollectError, ValueError):
    """A policy answered with missing, misshapen, mistyped or non-finite outputs."""


class PluginError(FuncollectError, RuntimeError):
    """A policy offered by name cannot be imported or made, or is none. Names it, and the package that offers it.

    Attributes:
        reason: the same without the names.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerError(FuncollectError, RuntimeError):
    """A worker of a collector died, hung or raised.

    Attributes:
        worker: its index.
        lane: the lane in which it raised, counted over all workers; None where none is known.
        traceback: the worker's own, or for a hang its Python stack; empty where there is none.
    """

    def __init__(self, message: str, worker: int = 0, lane: int | None = None, traceback: str = "") -> None:
        super().__init__(message, worker, lane, traceback)
        self.worker = worker
        self.lane = lane
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.args[0]}\n\n{self.traceback}" if self.traceback else str(self.args[0])


class EvaluationError(FuncollectError, RuntimeError):
    """An evaluation reached its frame limit before every lane had its episodes, or cannot be had of an environment."""


class CheckError(FuncollectError, AssertionError):
    """A conformance check of `funcollect.testing` failed.

    Attributes:
        check: the name of the check.
        report: the `Report` of the checks before it.
    """

    def __init__(self, message: str, check: str = "", report: object = None) -> None:
        super().__init__(message, check, report)
        self.check = check
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


class BridgeError(FuncollectError, ValueError):
    """An array cannot go between JAX and Torch as it is: a value would change, or the other side has no such dtype."""


class LoweringError(FuncollectError, TypeError):
    """A Torch module cannot be lowered to JAX: an operator is missing, or it does what a pure function cannot."""

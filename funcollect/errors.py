"""The library's exceptions, for faults inside a run. Each also derives from a built-in exception."""


class FuncollectError(Exception):
    """Base class of the library's errors."""


class StaleStateError(FuncollectError, RuntimeError):
    """A state over simulators was used after a later state had superseded it."""


class ClosedError(FuncollectError, RuntimeError):
    """A collector, or the simulators of a state, were used after they had been closed."""


class ReplayError(FuncollectError, RuntimeError):
    """A state cannot be copied or saved: its episodes cannot be replayed, or a replay gave other results."""


class EnvError(FuncollectError, RuntimeError):
    """An environment raised, or returned something that its spaces do not allow. The message names the lane."""


class InUseError(EnvError, ValueError):
    """An environment instance is in use by a state, and no other instance can be made."""


class NoResetError(EnvError):
    """Simulators that reset all lanes together, or by themselves, were asked to reset some of them."""


class NotCalledError(EnvError):
    """The process of some lanes had ended before a function was called, so it was called in no lane."""


class PolicyError(FuncollectError, ValueError):
    """A policy returned outputs that are missing or not finite, or have the wrong shape or dtype."""


class PluginError(FuncollectError, RuntimeError):
    """A policy that a package offers by name cannot be made, or is no policy; `reason` is the message without names."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class WorkerError(FuncollectError, RuntimeError):
    """The collector's worker number `worker` died, hung or raised; `lane`, if known, is counted over all workers.

    `traceback` is the worker's traceback, or its Python stack if it hung; empty if there is neither.
    """

    def __init__(self, message: str, worker: int = 0, lane: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.worker, self.lane, self.traceback = worker, lane, traceback

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.traceback}" if self.traceback else super().__str__()


class EvaluationError(FuncollectError, RuntimeError):
    """An evaluation reached its frame limit too early, or the environment cannot be evaluated."""


class CheckError(FuncollectError, AssertionError):
    """The conformance check `check` of `funcollect.testing` failed; `report` lists the checks that passed before it."""

    def __init__(self, message: str, check: str = "", report: object = None) -> None:
        super().__init__(message)
        self.check, self.report = check, report


class BridgeError(FuncollectError, ValueError):
    """An array cannot cross between JAX and Torch: a value would change, or the other side lacks the dtype."""


class LoweringError(FuncollectError, TypeError):
    """A Torch module cannot be lowered to JAX: it uses an unknown operator, or is not a pure function."""

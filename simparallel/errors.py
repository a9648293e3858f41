"""Every exception that simparallel raises on purpose.

There is one class per cause that a caller can act on, derived from the builtin exception that a caller
would expect. A message names the caller, the broken rule, the numbers, and a way out. Facts that code
may want to read (ranks, steps, call sites) are attributes.

Errors are pickled between processes, so their whole state is the message, a dict of facts, and notes.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[SimParallelError], message: str, facts: dict[str, Any]) -> SimParallelError:
    return cls(message, **facts)


class SimParallelError(Exception):
    """Base of all errors below: `SimParallelError("what happened, what to do", rank=3)`.

    Facts become attributes: `error.rank == 3`. They must be plain data, since they are pickled.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        notes = {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None
        return _rebuild, (type(self), self.args[0], self.facts), notes

    def __eq__(self, other: object) -> bool:
        same_class = type(other) is type(self)
        return same_class and (other.args, other.facts) == (self.args, self.facts)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.args))


class InputError(SimParallelError, ValueError):
    """An argument breaks a rule; raised before anything is changed."""


class _InLayer(SimParallelError):
    """An error to which modules add the name of the layer as it propagates. Fact: `layer`, once it is known."""

    passed: Any = None  # the last module that it propagated through

    def add_layer(self, name: str) -> None:
        """Prepend a name to the layer in the message: `fc2` becomes `body.fc2`."""
        inner = self.facts.get("layer")
        self.layer = self.facts["layer"] = f"{name}.{inner}" if inner else name
        message = self.args[0].removesuffix(f" In layer {inner}.")
        self.args = (f"{message.rstrip('.')}. In layer {self.layer}.",)


class ShapeError(_InLayer, InputError):
    """Shapes or sizes do not fit an operation. Fact: `layer`, if a module was called."""


class OutOfRangeError(InputError, IndexError):
    """An index is outside of a tensor."""


class UnknownNameError(InputError, KeyError):
    """A name is unknown."""

    # KeyError's own __str__ would show the repr of the text.
    __str__ = Exception.__str__


class DTypeError(SimParallelError, TypeError):
    """A dtype does not fit an operation."""


class LabelError(InputError):
    """A class label is not a valid class. Facts: `label`, `position`, `num_classes`."""


class DataError(InputError):
    """A data file is missing, malformed or not the expected one. Facts: `path`, `offset` (byte, or None)."""


class CheckpointError(SimParallelError, RuntimeError):
    """A checkpoint cannot be written, is missing or damaged, or does not fit. Fact: `path`."""


class LayoutError(InputError):
    """A mesh, layout or strategy is malformed or does not fit a tensor."""


class StrategyError(LayoutError):
    """A strategy is not legal for an op. Facts: `op`, `rule`, `nearest` (similar legal strategies)."""


class ClusterError(InputError):
    """A description of hardware is malformed or unknown."""


class RankTableError(InputError):
    """A rank table cannot be read, or breaks a rule. Facts: `path`, `line` (None for the whole file)."""


class AutogradError(SimParallelError, RuntimeError):
    """Autograd cannot compute a gradient: no gradient path, graph already consumed, ..."""


class CaptureError(SimParallelError, RuntimeError):
    """A CUDA graph cannot repeat a captured step. Fact: `step`, its name."""


class DeviceMismatchError(SimParallelError, RuntimeError):
    """Tensors of one operation are on different devices. Facts: `op`, `devices`."""


class NonFiniteLossError(SimParallelError, ArithmeticError):
    """The loss is NaN or infinite. Facts: `rank`, `step`, `value`."""


class UnusedParameterError(SimParallelError, RuntimeError):
    """Parameters of a DistributedDataParallel model got no gradient. Fact: `names`."""


class UnevenInputsError(SimParallelError, RuntimeError):
    """Some ranks have run out of inputs before others. Fact: `ranks` (without inputs)."""


class StateDictError(SimParallelError, KeyError):
    """A state dict does not fit the module. Facts: `missing`, `unexpected`."""

    # KeyError's own __str__ would show the repr of the text.
    __str__ = Exception.__str__


class CommError(SimParallelError, RuntimeError):
    """A communication call cannot be completed."""


class CollectiveMismatchError(CommError):
    """Ranks of one group made different calls. Facts: `group`, `seq`, `calls` (rank -> text)."""


class DeadlockError(CommError):
    """All ranks wait for each other: no progress is possible. Fact: `waiting` (rank -> text)."""


class DeadlineError(CommError, TimeoutError):
    """A wait exceeded its time limit. Facts: `rank`, `missing`, `timeout_s`."""


class RankFailedError(CommError):
    """Another rank failed, died or ended, so this call can never finish. Facts: `rank`, `cause`."""


class SharedMemoryError(SimParallelError, MemoryError):
    """Shared memory could not be allocated. Facts: `needed_bytes`, `available_bytes`."""


class DeviceOutOfMemoryError(_InLayer, MemoryError):
    """A device is out of memory. Facts: `needed_bytes`, `limit_bytes`, `live`, `layer`; on a GPU `pool_bytes`."""


class LaunchError(SimParallelError, RuntimeError):
    """Device processes could not be started, or a function or result could not be sent."""


class SearchError(SimParallelError, RuntimeError):
    """No choice of candidates fits into a limit of memory. Facts: `least_bytes`, `limit_bytes`."""


class PlanError(SimParallelError, RuntimeError):
    """A plan of strategies cannot be read, or does not fit the program. Facts: `op`, `expected`."""


class ScheduleError(SimParallelError, RuntimeError):
    """A pipeline schedule does not run. Facts: `rank`, `cell`, `stage`, `microbatch`."""


class UnknownValueError(SimParallelError, RuntimeError):
    """A program without data asks for a value. Fact: `place`, the line that asks."""


class RunFailedError(SimParallelError, RuntimeError):
    """A run on several ranks failed; the root cause comes first.

    Facts: `rank` (of the root cause), `exit_code` (for a command), `reports` (rank -> dict).
    `__cause__` is the original exception; None if there is none, or if it cannot be sent from its process.
    """


class NotEquivalentError(SimParallelError, AssertionError):
    """A parallel program's result differs from that on one device, see `testing.assert_equivalent`.

    Facts: `step` (None for a result of the whole program), `phase`, `name`, `rank`, `index`, `value`, `expected`,
    `world_size`, `case` (name -> drawn value or shape).
    """


def __dir__() -> list[str]:
    """List the errors alone, for tab completion."""
    own = {name for name, found in globals().items() if getattr(found, "__module__", "") == __name__}
    return sorted(name for name in globals() if name.startswith("__") or name in own and name[0] != "_")

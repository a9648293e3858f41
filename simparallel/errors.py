"""Every exception that simparallel raises on purpose.

One class per cause that a caller can act on; each is also the builtin that a caller would
expect. A message says who, which rule was broken, the numbers, and the way out. Facts that
code may want to read (ranks, steps, call sites) ride along as attributes.

Errors cross process borders, so the whole state is the message and a dict of facts.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[SimParallelError], message: str, facts: dict[str, Any]) -> SimParallelError:
    return cls(message, **facts)


class SimParallelError(Exception):
    """Base of all errors below: `SimParallelError("what happened, what to do", rank=3)`.

    Facts become attributes: `error.rank == 3`. They must be plain data (they are pickled).
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.facts)

    def __eq__(self, other: object) -> bool:
        same_class = type(other) is type(self)
        return same_class and (other.args, other.facts) == (self.args, self.facts)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.args))


class InputError(SimParallelError, ValueError):
    """An argument breaks a rule that could be checked before anything happened."""


class _InLayer(SimParallelError):
    """An error that learns the layer it comes from on its way out. Fact: `layer`, once that is known."""

    passed: Any = None  # the module it went through last

    def add_layer(self, name: str) -> None:
        """Say the layer, from the inside out: `fc2`, then `body.fc2`, …"""
        inner = self.facts.get("layer")
        self.layer = self.facts["layer"] = f"{name}.{inner}" if inner else name
        message = self.args[0].removesuffix(f" In layer {inner}.")
        self.args = (f"{message.rstrip('.')}. In layer {self.layer}.",)


class ShapeError(_InLayer, InputError):
    """Shapes or sizes do not fit an operation. Fact: `layer`, where a module was called."""


class OutOfRangeError(InputError, IndexError):
    """An index lies outside of a tensor."""


class DTypeError(SimParallelError, TypeError):
    """A dtype does not fit an operation."""


class LabelError(InputError):
    """A class label lies outside the classes. Facts: `label`, `position`, `num_classes`."""


class DataError(InputError):
    """A data file is missing, malformed or not the expected one. Facts: `path`, `offset` (byte, or None)."""


class CheckpointError(SimParallelError, RuntimeError):
    """A checkpoint cannot be written, is missing or damaged, or does not fit. Fact: `path`."""


class LayoutError(InputError):
    """A mesh, layout or strategy is malformed or does not fit a tensor."""


class StrategyError(LayoutError):
    """An op cannot be cut this way. Facts: `op`, `rule`, `nearest` (strategies that are legal)."""


class ClusterError(InputError):
    """A description of hardware is malformed or unknown."""


class RankTableError(InputError):
    """A rank table cannot be read, or breaks a rule. Facts: `path`, `line` (None for the whole file)."""


class AutogradError(SimParallelError, RuntimeError):
    """The tape cannot do what was asked: no gradient path, graph already consumed, ..."""


class DeviceMismatchError(SimParallelError, RuntimeError):
    """Tensors of one operation are on different devices. Facts: `op`, `devices`."""


class NonFiniteLossError(SimParallelError, ArithmeticError):
    """The loss is NaN or infinite. Facts: `rank`, `step`, `value`."""


class UnusedParameterError(SimParallelError, RuntimeError):
    """Parameters of a DistributedDataParallel model got no gradient. Fact: `names`."""


class UnevenInputsError(SimParallelError, RuntimeError):
    """Some ranks have no more inputs, and others have. Fact: `ranks` (those that have none)."""


class StateDictError(SimParallelError, KeyError):
    """A state dict does not fit the module. Facts: `missing`, `unexpected`."""

    __str__ = Exception.__str__  # KeyError would show the repr of the text


class CommError(SimParallelError, RuntimeError):
    """A communication call cannot go on."""


class CollectiveMismatchError(CommError):
    """Ranks of one group made different calls. Facts: `group`, `seq`, `calls` (rank -> text)."""


class DeadlockError(CommError):
    """Every rank waits for another one: no progress is possible. Fact: `waiting` (rank -> text)."""


class DeadlineError(CommError, TimeoutError):
    """A wait outlasted its limit. Facts: `rank`, `missing`, `timeout_s`."""


class RankFailedError(CommError):
    """Another rank failed, died or left, so this call can never finish. Facts: `rank`, `cause`."""


class SharedMemoryError(SimParallelError, MemoryError):
    """Shared memory could not be had. Facts: `needed_bytes`, `available_bytes`."""


class DeviceOutOfMemoryError(_InLayer, MemoryError):
    """A simulated device has no room. Facts: `needed_bytes`, `limit_bytes`, `live`, `layer`."""


class LaunchError(SimParallelError, RuntimeError):
    """Device processes could not be started, or a function or result could not be sent."""


class BenchError(SimParallelError, RuntimeError):
    """A peer of a measurement could not be set up, or does not answer. Fact: `peer`."""


class RunFailedError(SimParallelError, RuntimeError):
    """A run on several ranks failed; the root cause comes first.

    Facts: `rank` (of the root cause), `exit_code` (for a command), `reports` (rank -> dict).
    The original exception is `__cause__`; None where it cannot be sent from its process, or there is none.
    """


def __dir__() -> list[str]:
    """For tab completion: the errors alone."""
    own = {name for name, found in globals().items() if getattr(found, "__module__", "") == __name__}
    return sorted(name for name in globals() if name.startswith("__") or name in own and name[0] != "_")

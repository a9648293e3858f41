"""Traces: the events of every device of a run, measured, printed and exported; and the calls of a step."""

from simparallel.trace.calls import CallTrace
from simparallel.trace.trace import Trace

__all__ = ["CallTrace", "Trace"]

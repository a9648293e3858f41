"""Traces: what every device of a run did, measured, printed and exported."""

from simparallel.trace.trace import Trace

__all__ = ["Trace"]

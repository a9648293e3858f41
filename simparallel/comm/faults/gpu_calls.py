"""Calls on GPUs that check for faults, like `calls.FaultyCall`."""

from __future__ import annotations

from simparallel.comm.faults.calls import FaultyCall
from simparallel.comm.gpu.link import GpuCall


class FaultyGpuCall(FaultyCall, GpuCall):
    """A collective on GPUs that checks for faults in each phase."""

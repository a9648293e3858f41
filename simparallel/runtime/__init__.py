"""Processes: the host, the devices, launching, logs, and what is told when something fails."""

from simparallel.runtime.launch import Cluster, Results, launch
from simparallel.runtime.rank import progress

__all__ = ["Cluster", "Results", "launch", "progress"]

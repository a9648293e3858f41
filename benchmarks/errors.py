"""The error of the benchmarks."""

from simparallel.errors import SimParallelError


class BenchError(SimParallelError, RuntimeError):
    """A library to compare with could not be set up, or does not answer. Fact: `peer`."""

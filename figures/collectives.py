"""Time of an all-reduce over its size on 2, 4 and 8 ranks, beside gloo, Open MPI, MPICH and memcpy."""

from typing import Any

from benchmarks import collectives

MEASURED = "some minutes, and `python -m benchmarks --setup` before it"


def draw() -> Any:
    return collectives.figure(collectives.main(ops=["all_reduce"], out=None))

"""A rank whose arrays are on a GPU: its streams, memory, clock and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from simparallel.arrays.cuda.device import Gpu, gpu_of_rank, use_gpu
from simparallel.arrays.cuda.ranges import nvtx_of
from simparallel.arrays.cuda.recorder import GpuRecorder
from simparallel.backend import Array, is_on_gpu, set_reader_gate
from simparallel.comm import Communicator
from simparallel.comm.gpu.calls import GpuCalls


def _home(gpu: Gpu, recorder: GpuRecorder, array: Array, requires_grad: bool) -> Array:
    if not is_on_gpu(array):
        recorder.copy_in(array.nbytes)
    return gpu.home(array, requires_grad)


def _read(gpu: Gpu, recorder: GpuRecorder) -> None:
    recorder.note_read()
    gpu.synchronize("a value of the GPU")


@contextmanager
def on_gpu(communicator: Communicator, recorder: GpuRecorder, memory_bytes: int | None) -> Iterator[Gpu]:
    """Compute and communicate on the rank's GPU inside the block. Collective: all ranks enter it together.

    `memory_bytes`: limit of its memory pool; None for CuPy's own limit.

    Raises:
        InputError: CuPy can use no GPU, or SIMPARALLEL_NVTX or SIMPARALLEL_GPU_LINK is wrong.
    """
    with use_gpu(gpu_of_rank(recorder.local_rank)) as gpu:
        recorder.home = partial(_home, gpu, recorder)
        # `use_gpu` restores the gate at the end.
        set_reader_gate(partial(_read, gpu, recorder))
        gpu.nvtx = nvtx_of(gpu.cuda)
        recorder.start(gpu)
        gpu.memory.account = recorder.memory
        gpu.memory.limit_to(memory_bytes)
        communicator.media[gpu.xp.ndarray] = GpuCalls(communicator, gpu)
        yield gpu

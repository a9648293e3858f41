"""DataParallel: one process, several devices, a thread for each, a part of every batch on each device.

PyTorch's `nn.DataParallel`. Every forward copies the model from the main device to the others, cuts the batch, runs
the replicas in threads and copies the outputs back; backward adds the gradients on the main device. It takes one line
of code, and is slower than `DistributedDataParallel`, which copies no model, distributes the reduction over the
ranks, overlaps it with backward, and has one interpreter per device. The trace shows all of that;
`figures/data_parallel.py` draws a step of both: 360 and 129 µs of simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from simparallel.backend import Part, random_state
from simparallel.clock.notes import note_once
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError
from simparallel.machine.devices import SIM, Device
from simparallel.nn import Module
from simparallel.parallel.replicas.replicate import check_places, parallel_apply, replicate
from simparallel.parallel.replicas.scatter_gather import _tensors, gather, scatter


class DataParallel(Module):
    """A model whose batches are computed on several devices of one process.

    The result, and after `backward` the gradients of `module`, are the same as for the whole batch on one device. Batch
    norm computes statistics on each part separately, as in PyTorch; the first part updates its running statistics.
    Dropout drops the same elements as on one device (with `dim=0`).

    Args:
        module: the model; its parameters and buffers on `device_ids[0]`.
        device_ids: "sim:k", or k; by default all devices of this rank (`devices_per_rank=`, or as many as have been
            named). With a single device, the module is moved there and called directly.
        output_device: device to gather the output on; by default `device_ids[0]`.
        dim: the dim of the samples, in all inputs and outputs.

    Raises:
        InputError: a device is not simulated, or is listed twice.
        DeviceMismatchError: (when called) a parameter or buffer is not on `device_ids[0]`.
        Errors of `module`; the message begins with the replica and its device.

    Cost: for n devices n-1 copies of the model out of the main device in forward, and n-1 gradients into it in
    backward, one after the other; one interpreter launches the operations of all devices.

    Example:
        >>> model = sp.parallel.DataParallel(sp.nn.Linear(3, 2), device_ids=[0, 1])
        >>> model(sp.Tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).shape
        (2, 2)
    """

    _is_wrapper = True

    def __init__(
        self, module: Module, device_ids: Sequence[Any] | None = None, output_device: Any = None, dim: int = 0
    ) -> None:
        super().__init__()
        self.device_ids = _all_devices() if device_ids is None else [Device(d) for d in device_ids]
        if not self.device_ids or len(set(self.device_ids)) != len(self.device_ids):
            raise InputError(f"DataParallel: device_ids={device_ids!r} must name at least one device, and each once.")
        self.output_device = self.device_ids[0] if output_device is None else Device(output_device)
        # Now, so that an unknown device is refused here and not in the first forward.
        for device in (*self.device_ids, self.output_device):
            _check_device(device)
        self.module = module
        self.dim = dim
        if len(self.device_ids) == 1:
            module.to(self.device_ids[0])
            if device_ids is None:
                note_once(
                    "DataParallel: this rank has one device, so there is one replica. For several start it with "
                    "simparallel run --devices-per-rank N, or name the devices, as in device_ids=[0, 1]."
                )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        check_places(self.module, self.device_ids[0])
        # A small batch may give fewer parts than devices; a single part needs no replicas.
        all_inputs, all_kwargs = self.scatter(inputs, kwargs, self.device_ids)
        if len(all_inputs) == 1:
            return self.gather([self.module(*all_inputs[0], **all_kwargs[0])], self.output_device)
        replicas = self.replicate(self.module, self.device_ids[: len(all_inputs)])
        outputs = self.parallel_apply(replicas, all_inputs, all_kwargs)
        return self.gather(outputs, self.output_device)

    # The four steps. A subclass may override each of them.

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Return the arguments of each replica."""
        # Without inputs only the main device runs.
        if not inputs and not kwargs:
            return [()], [{}]
        parts = scatter((inputs, kwargs), device_ids, self.dim)
        return [given for given, _ in parts], [named for _, named in parts]

    def replicate(self, module: Module, device_ids: Sequence[Any]) -> list[Module]:
        """Return a copy of the model for each device."""
        return replicate(module, device_ids)

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Return the replicas' outputs."""
        parts = _parts([next(iter(_tensors(given)), None) for given in zip(inputs, kwargs, strict=True)], self.dim)
        with_parts = [_ReplicaWithPart(replica, part) for replica, part in zip(replicas, parts, strict=True)]
        return parallel_apply(with_parts, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join the replicas' outputs into one."""
        return gather(outputs, output_device, self.dim)

    def extra_repr(self) -> str:
        return f"device_ids=[{', '.join(self.device_ids)}], output_device={self.output_device}, dim={self.dim}"


class _ReplicaWithPart:
    """A replica that knows its part of the batch, which its random masks depend on."""

    def __init__(self, replica: Any, part: Part) -> None:
        self._replica, self._part = replica, part

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        # Thread-local; the thread ends with this call, so nothing is restored.
        random_state.given_part = self._part
        return self._replica(*inputs, **kwargs)


def _parts(samples: list[Any], dim: int) -> list[Part]:
    """Return for each replica the samples before its part and those of the whole batch, both divided by its own.

    Args:
        samples: for each replica a tensor of its part of this rank's batch, which may be a part of a larger batch; None
            counts as one sample.
        dim: of the samples.
    """
    before, whole = random_state.part
    sizes = [1 if x is None else x.shape[dim] for x in samples]
    total, start = sum(sizes), 0
    parts: list[Part] = []
    # Fractions, since the samples before a part need not be a multiple of its size.
    for size in sizes:
        unit = max(size, 1)
        parts.append((Fraction(before * total + start, unit), Fraction(whole * total, unit)))
        start += size
    return parts


def _all_devices() -> list[Device]:
    recorder = current_recorder()
    if recorder is None:
        return [Device("sim:0")]
    # The launcher's number, or else the devices up to the highest that the program has named.
    count = recorder.num_devices or max(device.index for device in recorder.devices) + 1
    return [Device("sim", k) for k in range(count)]


def _check_device(device: Device) -> None:
    if device.type != SIM:
        raise InputError(f"DataParallel: {device} is not a simulated device; write 'sim:0', 'sim:1', … or 0, 1, …")
    recorder = current_recorder()
    if recorder is not None:
        recorder.of(device)

"""`TwoClockRecorder`: an interpreter that starts operations, and a device that runs them later.

On a GPU the interpreter returns from an operation once it has started it. It is ahead of a device that has much to do,
and the time that it takes is hidden; a device with little to do waits for it. It stops at the reads of values, and in
operations that read some, until the device has done all before.
"""

from __future__ import annotations

from typing import Any

from simparallel.clock.recorder import Recorder
from simparallel.errors import InputError
from simparallel.machine.cluster import picoseconds
from simparallel.machine.device import COPY, READ
from simparallel.machine.devices import Device
from simparallel.machine.products import MatrixProduct


class TwoClockRecorder(Recorder):
    """A recorder with a clock of the interpreter, if the described device runs beside one; else as `Recorder`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.has_two_clocks = self.cluster.device.has_interpreter
        if self.has_two_clocks:
            self.launcher = self.new_launcher(self.moment(), 0)
        # Id of a price, which is kept -> the interpreter's time [ps].
        self._host_ps: dict[int, int] = {}

    def price(
        self,
        name: str,
        flops: int,
        size_bytes: int,
        itemsize: int,
        results: int = 0,
        is_product: bool = False,
        products: tuple[MatrixProduct, ...] = (),
    ) -> tuple[int, int, int]:
        """Return (duration on the device [ps], flops, bytes), see `Recorder.price`."""
        if not self.has_two_clocks:
            return super().price(name, flops, size_bytes, itemsize, results, is_product, products)
        device, factor = self.cluster.device, self.cluster.device_factor(self.rank)
        device_s = device.device_s(flops, size_bytes, itemsize, is_product, name, results, products)
        price = picoseconds(device_s * factor), flops, size_bytes
        self._host_ps[id(price)] = picoseconds(device.host_s(name, flops, size_bytes, results) * factor)
        return price

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: tuple[int, int, int], layer: str = ""
    ) -> None:
        """Start work when the interpreter has reached it, see `Recorder.compute`."""
        if self.has_two_clocks:
            assert self.launcher is not None
            if name in self.cluster.device.host_waits:
                self.launcher.wait(self.moment())
            self.launcher.launch_ps = self._host_ps[id(price)]
        super().compute(name, kind, wall_start_ns, wall_end_ns, price, layer)

    def read(self) -> None:
        """Let the interpreter wait for the device and read a value."""
        if self.has_two_clocks:
            self._spend(READ, 0, waits=True)

    def copy_in(self, size_bytes: int) -> None:
        """Let the interpreter copy a host array to the device."""
        if self.has_two_clocks:
            self._spend(COPY, size_bytes)

    def _spend(self, name: str, size_bytes: int, *, waits: bool = False) -> None:
        assert self.launcher is not None
        if waits:
            self.launcher.wait(self.moment())
        host_s = self.cluster.device.host_s(name, 0, size_bytes, 1)
        self.launcher.spend(picoseconds(host_s * self.cluster.device_factor(self.rank)))

    def _add(self, device: Device) -> Recorder:
        if self.has_two_clocks:
            raise InputError(f"{self.cluster.name} describes one device for each rank: there is no {device}.")
        return super()._add(device)

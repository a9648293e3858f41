"""A described device: its peaks, its memory, and the share of both that an operation reaches."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields
from itertools import islice
from math import exp, log, log1p
from typing import NamedTuple

from simparallel.errors import ClusterError
from simparallel.machine.numbers import check_known, check_number, check_sources
from simparallel.machine.products import MatrixProduct, MatrixUnits

PS_PER_S = 10**12


def picoseconds(seconds: float) -> int:
    """Convert seconds to integer picoseconds, rounded to nearest: the only rounding of simulated time."""
    return round(seconds * PS_PER_S)


@dataclass(frozen=True)
class Curve:
    """A fraction as a function of size: straight lines between points in log-log scale, constant beyond the ends.

        >>> half = sp.cluster.Curve(((1e6, 0.5), (1e8, 1.0)))
        >>> half(1e5), half(1e6), round(half(1e7), 3), half(1e9)
        (0.5, 0.5, 0.707, 1.0)

    Args:
        points: (size, fraction), sizes ascending and above 0, fractions above 0 and at most 1. A fraction may fall, as
            that of a cache does, but not rise faster than the size, or more work would take less time.

    Raises:
        ClusterError: no points, or points that break a rule. Fact: `key`.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple((size, fraction) for size, fraction in self.points)
        object.__setattr__(self, "points", points)
        if not points:
            raise ClusterError("curve: points is empty; give at least one (size, fraction).", key="points")
        for size, fraction in points:
            check_number("curve", "points", size, 1e-12, 1e30)
            check_number("curve", "points", fraction, 1e-9, 1.0)
        for (size, fraction), (next_size, next_fraction) in zip(points, points[1:], strict=False):
            if next_size <= size or next_fraction / fraction > next_size / size * (1 + 1e-12):
                raise ClusterError(
                    f"curve: point ({next_size:g}, {next_fraction:g}) after ({size:g}, {fraction:g}): sizes must "
                    "ascend, and a fraction may not rise faster than the size, or more work would take less time.",
                    key="points",
                )
        object.__setattr__(self, "_sizes", [size for size, _ in points])

    def __call__(self, size: float) -> float:
        """Return the fraction at `size`."""
        after = bisect_right(self._sizes, size)  # type: ignore[attr-defined]
        if after == 0 or after == len(self.points):
            return self.points[min(after, len(self.points) - 1)][1]
        (size_a, fraction_a), (size_b, fraction_b) = self.points[after - 1 : after + 1]
        return fraction_a * (size / size_a) ** (log(fraction_b / fraction_a) / log(size_b / size_a))


def _entry(table: dict[int, float] | dict[int, Curve], itemsize: int) -> int:
    # Small items run at least as fast as the next larger ones; sizes beyond the table take its last entry.
    larger = [size for size in table if size >= itemsize]
    return min(larger) if larger else max(table)


class Measured(NamedTuple):
    """A measured shape of an operation: its work, and the ratio of its time to the uncorrected one of its `OpCost`."""

    flops: int
    size_bytes: int
    results: int
    factor: float


# What `DeviceSpec.host_costs` calls the reads of values and the copies of host arrays.
READ, COPY = "read of a value", "copy to the device"
# What runs the operations of a device, see `DeviceSpec.software`, and how images lie in its memory.
SOFTWARE = ("plain", "eager", "fused")
MEMORY_FORMATS = ("contiguous", "channels_last")
# Type of a described device -> bytes of each float32 item of a program there, and of the operands of its products. TF32
# is float32 that products round to 19 bits.
DTYPES = {"float32": (4, 4), "tf32": (4, 3), "bfloat16": (2, 2), "float16": (2, 2), "float8": (2, 1)}
# Number of nearest shapes that correct a price; weight of a shape at distance 0; weight of no correction.
_NEAREST, _EXACT, _FAR = 4, 100.0, 0.5


@dataclass(frozen=True)
class OpCost:
    """The measured cost of an operation: launch_s + work at its own rates, corrected by the nearest measured shapes.

    The number of results distinguishes operations of equal flops and bytes: products with long and with short inner
    dims, views of large and of small tensors, an optimizer with few and with many parameters.

    The correction is the mean of log(factor) over the nearest shapes, in log scale of flops, bytes and results,
    weighted by 1 / distance^2. Far from all shapes it vanishes.

    Args:
        launch_s: the time of an operation without work; at least that of the interpreter.
        s_per_flop, s_per_byte, s_per_result: seconds per flop, per byte moved in memory, and per result: an element
            of an op's output, or a tensor that an optimizer changes.
        shapes: (flops, bytes, results, factor) of measured shapes.

    Raises:
        ClusterError: a number out of range. Fact: `key`.
    """

    launch_s: float
    s_per_flop: float = 0.0
    s_per_byte: float = 0.0
    s_per_result: float = 0.0
    shapes: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple(Measured(*each) for each in self.shapes))
        for name in ("launch_s", "s_per_flop", "s_per_byte", "s_per_result"):
            check_number("op cost", name, getattr(self, name), 0.0, 1e6)
        for *work, factor in self.shapes:
            check_number("op cost", "shapes", min(work), 0, 1 << 100)
            check_number("op cost", "shapes", factor, 1e-6, 1e6)

    def plain_s(self, flops: int, size_bytes: int, results: int = 0) -> float:
        """Return the time [s] without a correction."""
        work_s = flops * self.s_per_flop + size_bytes * self.s_per_byte + results * self.s_per_result
        return self.launch_s + work_s

    def time_s(self, flops: int, size_bytes: int, results: int = 0) -> float:
        """Return the time [s]."""
        place = log1p(flops), log1p(size_bytes), log1p(results)
        each = sorted(
            (sum((log1p(a) - b) ** 2 for a, b in zip(near[:3], place, strict=True)), log(near.factor))
            for near in self.shapes
        )
        weights, total = _FAR, 0.0
        for distance, correction in islice(each, _NEAREST):
            weight = 1 / (distance + 1 / _EXACT)
            weights, total = weights + weight, total + weight * correction
        return self.plain_s(flops, size_bytes, results) * exp(total / weights)


class DeviceWork(NamedTuple):
    """An operation, as far as the time of a device depends on it.

    Attributes:
        name: of the operation.
        flops: floating-point operations.
        size_bytes: bytes moved in memory.
        itemsize: bytes of an item, which choose the peak.
        results: elements of its output, or tensors that an optimizer changes; for measured costs.
        is_product: whether the flops are those of a matrix product.
        products: the shapes of its matrix products, for devices with `matrix_units`.
        casts: bytes moved by each kernel that casts operands of the products.
        beside: bytes moved by other kernels of the operation, before and after the one that computes.
        share: of the bandwidth of other operations, what this one reaches.
        least_s: time [s] that the kernel takes at least, where it has fewer blocks than a device has multiprocessors.
    """

    name: str = ""
    flops: int = 0
    size_bytes: int = 0
    itemsize: int = 4
    results: int = 0
    is_product: bool = False
    products: tuple[MatrixProduct, ...] = ()
    casts: tuple[int, ...] = ()
    beside: int = 0
    share: float = 1.0
    least_s: float = 0.0

    def with_operands(self, dtype: str) -> DeviceWork:
        """Return the operation with the operands that products have in a described type, see `ClusterSpec.dtype`.

        One kernel casts the operands of a product to FP8, as in NVIDIA's Transformer Engine: it reads the wider type,
        and writes each operand and its transpose, which serve two products, so a product pays for half. Operands whose
        sides are no multiples of 16 elements, convolutions and attention stay in the wider type; so does attention in
        TF32 (PyTorch's kernel for float32 does not round to it).
        """
        itemsize, narrow = DTYPES[dtype]
        kinds = {each.kind for each in self.products}
        if not self.is_product or self.itemsize != itemsize or narrow == itemsize or "attention" in kinds:
            return self
        if narrow > 2:
            return self._replace(itemsize=narrow)
        if kinds != {"product"} or any((each.n | each.k) % 16 for each in self.products):
            return self
        sizes = [each.batch * (each.m + each.n) * each.k for each in self.products]
        moved = self.size_bytes - (itemsize - narrow) * sum(sizes)
        casts = tuple((itemsize // 2 + narrow) * size for size in sizes)
        return self._replace(itemsize=narrow, size_bytes=moved, casts=casts)


# A communication, or a graph of operations, as an interpreter starts it.
ISSUE = DeviceWork(size_bytes=1)


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator.

    Args:
        name: name in traces.
        peak_flops_per_s: item size [bytes] -> peak of matrix products [flop/s]; a size that is not listed uses the next
            larger one, or else the largest. 3 is TF32.
        memory_bandwidth_bytes_per_s: bandwidth of the device's memory.
        memory_bytes: capacity of the device's memory.
        launch_s: fixed cost of one operation (kernel launch and host overhead).
        notes: anything else worth knowing.
        vector_flops_per_s: like `peak_flops_per_s`, for operations that are not matrix products; empty for the same.
        matmul_efficiency: item size [bytes] -> fraction of the peak that a matrix product reaches, by its flops; sizes
            as for the peak, empty for all of it.
        memory_efficiency: fraction of the memory bandwidth that an operation reaches, by the bytes it moves; None for
            all of it.
        op_costs: name of an operation, such as "Linear.backward" -> its measured cost, in place of the roofline.
        host_costs: name of an operation -> the measured time that the interpreter takes to start it, on a device that
            computes beside the interpreter; READ and COPY are reads of values, and copies of host arrays. Empty if
            `op_costs` include the interpreter.
        op_start_s: the time that the interpreter takes to start an operation that `host_costs` lack, or a
            communication, on a device that computes beside it; 0 for `launch_s` if there are `host_costs`, or else for
            a device without an interpreter. Views and reads of values take none of it. An operation of PyTorch takes 59
            µs in a training step, forward, backward and optimizer alike (measured on a host of an H100, with a step of
            an MLP).
        host_waits: names of the operations for which the interpreter waits until the device has done all before.
        software: what runs an operation: "plain", each array operation by itself, as in NumPy; "eager", the kernels of
            today's frameworks, one for an operation: attention that stores no scores, norms that read their input
            twice (`Op.eager_work`); or "fused", those of a compiler that joins neighbours, which only closed forms
            know, and which a run takes as "eager".
        memory_format: how images lie in memory, for software but "plain": "contiguous", plane by plane (NCHW), as
            PyTorch has them by default, or "channels_last", pixel by pixel (NHWC), as tensor cores take them.
        matrix_units: what computes matrix products, by their shapes, in place of `matmul_efficiency`; None for products
            that depend on their flops alone.
        sources: field -> where its numbers come from: "data sheet", "measured" or "assumed", and a text after a colon.

    Raises:
        ClusterError: a number out of range, no peak, or a source of unknown kind. Fact: `key`, the field.
    """

    name: str
    peak_flops_per_s: dict[int, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_s: float
    notes: str = ""
    vector_flops_per_s: dict[int, float] = field(default_factory=dict)
    matmul_efficiency: dict[int, Curve] = field(default_factory=dict)
    memory_efficiency: Curve | None = None
    op_costs: dict[str, OpCost] = field(default_factory=dict)
    host_costs: dict[str, OpCost] = field(default_factory=dict)
    op_start_s: float = 0.0
    host_waits: tuple[str, ...] = ()
    software: str = "plain"
    memory_format: str = "contiguous"
    matrix_units: MatrixUnits | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner = f"device {self.name!r}"
        if not self.peak_flops_per_s:
            raise ClusterError(
                f"{owner}: peak_flops_per_s is empty; give a number for each element size, such as {{4: 1e12}}.",
                key="peak_flops_per_s",
            )
        for name in ("peak_flops_per_s", "vector_flops_per_s"):
            for size, peak in getattr(self, name).items():
                check_number(owner, f"{name}[{size}]", peak)
        for name in ("memory_bandwidth_bytes_per_s", "memory_bytes", "launch_s"):
            check_number(owner, name, getattr(self, name))
        check_number(owner, "op_start_s", self.op_start_s, 0.0)
        check_known(owner, "software", self.software, SOFTWARE)
        check_known(owner, "memory_format", self.memory_format, MEMORY_FORMATS)
        check_sources(owner, self.sources, (each.name for each in fields(self)[1:-1] if each.name != "notes"))

    def peak(self, itemsize: int, is_product: bool = True) -> float:
        """Return the peak [flop/s] for items of `itemsize` bytes, of matrix products or of other operations."""
        rates = self.peak_flops_per_s if is_product else self.vector_flops_per_s or self.peak_flops_per_s
        return rates[_entry(rates, itemsize)]

    def time_ps(self, flops: int, size_bytes: int, itemsize: int, is_product: bool = False, factor: float = 1.0) -> int:
        """Return the time [ps] of one operation: launch cost plus max(flops / rate, bytes / bandwidth), a roofline.

        An operation without work, such as a reshape, is a view and takes no time: no kernel is launched. Beside an
        interpreter, the longer part counts: the device's, or the interpreter's; runs have a clock for each.

        Args:
            flops, size_bytes, itemsize, is_product: see `DeviceWork`.
            factor: how much slower than described this device is.
        """
        work = DeviceWork("", flops, size_bytes, itemsize, is_product=is_product)
        return picoseconds(max(self.host_s(work), self.device_s(work)) * factor)

    def host_s(self, work: DeviceWork) -> float:
        """Return the time [s] that the interpreter takes to start an operation.

        0 for a device that no interpreter runs beside, see `op_start_s`.
        """
        if not self.has_interpreter:
            return 0.0
        cost = self.host_costs.get(work.name)
        if cost is not None:
            return cost.time_s(work.flops, work.size_bytes, work.results)
        if self.op_start_s:
            return self.op_start_s * (1 + len(work.casts)) if work.flops or work.size_bytes else 0.0
        return self.launch_s

    @property
    def has_interpreter(self) -> bool:
        """Whether the device computes beside an interpreter that starts its operations, with a clock of its own."""
        return bool(self.host_costs) or self.op_start_s > 0

    def device_s(self, work: DeviceWork) -> float:
        """Return the time [s] of an operation on the device alone; one of `op_costs` takes what was measured."""
        name, flops, size_bytes, itemsize, results, is_product, products, casts, beside, share, least_s = work
        measured = self.op_costs.get(name)
        if measured is not None:
            return measured.time_s(flops, size_bytes, results)
        if flops == 0 and size_bytes == 0:
            return 0.0
        bytes_per_s = self._bytes_per_s(size_bytes)
        memory_s = size_bytes / (bytes_per_s * share)
        peak = self.peak(itemsize, is_product)
        if is_product and self.matrix_units is not None:
            compute_s = self.matrix_units.peak_s(flops, products, peak, bytes_per_s, itemsize)
        else:
            compute_s = flops / peak
            if is_product and self.matmul_efficiency and flops:
                compute_s /= self.matmul_efficiency[_entry(self.matmul_efficiency, itemsize)](flops)
        launch_s = 0.0 if self.host_costs else self.launch_s
        cast_s = sum(launch_s + moved / self._bytes_per_s(moved) for moved in casts)
        beside_s = beside / self._bytes_per_s(beside)
        return launch_s + max(compute_s, memory_s, least_s) + cast_s + beside_s

    def _bytes_per_s(self, size_bytes: int) -> float:
        """Return the bandwidth that an operation reaches which moves so many bytes."""
        reached = self.memory_efficiency(size_bytes) if self.memory_efficiency is not None and size_bytes else 1.0
        return self.memory_bandwidth_bytes_per_s * reached

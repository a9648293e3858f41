"""`simparallel cluster`, `expected-busbw` and `calibrate`: described hardware, its expected bandwidth, this machine."""

from __future__ import annotations

import argparse
from functools import partial

from simparallel.algorithms import DIRECT, names
from simparallel.base.argparse_checks import at_least_one, numbers
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_seconds
from simparallel.cli import flags
from simparallel.cli.ranktable import warned
from simparallel.errors import InputError
from simparallel.machine.busbw import CONVENTION, expected_busbw
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, describe, load_cluster, this_gpu_file, this_host_file
from simparallel.machine.hostfile import read_host_file
from simparallel.machine.ranktable.reading import load

SIZES = [4**power for power in range(5, 17)]  # 1 KiB to 4 GiB


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `simparallel cluster`."""
    command.add_argument("cluster", metavar="CLUSTER", help=flags.HARDWARE)
    _add_places(command)
    flags.add(command, "out", help="write it to a JSON file, to edit it and to use it as CLUSTER")


def add_busbw(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `simparallel expected-busbw`."""
    flags.add(command, "cluster", required=True, help=flags.HARDWARE)
    _add_places(command)
    command.add_argument("--op", choices=CONVENTION, default="all_reduce", help="default %(default)s")
    command.add_argument("--sizes", type=numbers, metavar="BYTES,…", default=SIZES, help="default 1 KiB to 4 GiB")
    command.add_argument("--ranks", type=numbers, metavar="N,…", help="the group (default: all ranks)")
    command.add_argument("--algorithm", choices=names(), default=DIRECT, help="default: what a library chooses")


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `simparallel calibrate`."""
    flags.add(
        command,
        "out",
        help=f"where to write it (default {this_host_file()}: this-host; of a GPU {this_gpu_file()}: this-gpu)",
    )
    command.add_argument("--quick", action="store_true", help="in less than a minute, with larger errors; not of a GPU")
    flags.add(command, "array", help="cupy measures the first GPU (this-gpu)")


def _add_places(command: argparse.ArgumentParser) -> None:
    flags.add(command, "world_size")
    places = command.add_mutually_exclusive_group()
    places.add_argument("--rank-table", metavar="FILE", help="nodes and device numbers as in this rank table")
    places.add_argument("--hostfile", metavar="FILE", help='nodes as in this host file, with lines "host slots=8"')


def _cluster(options: argparse.Namespace) -> ClusterSpec:
    at_least_one(n=options.world_size)
    if options.rank_table:
        table = warned(load(options.rank_table))
        count = options.world_size or table.world_size
        return describe(count, options.cluster, nodes=table.nodes_for(count), device_ids=table.device_ids)
    if options.hostfile:
        nodes = read_host_file(options.hostfile)
        count = sum(map(len, nodes))
        if options.world_size not in (None, count):
            raise InputError(f"-n {options.world_size}: {options.hostfile} has {count} ranks; leave -n out.")
        return describe(count, options.cluster, nodes=nodes)
    return load_cluster(options.cluster, options.world_size)


def main(options: argparse.Namespace) -> None:
    """Print a cluster.

    Raises:
        ClusterError, RankTableError, InputError: the cluster cannot be described.
        OSError: it cannot be written.
    """
    cluster = _cluster(options)
    print(cluster.table())
    if options.out:
        cluster.save(options.out)
        print(f"written: {options.out}")


def calibrate(options: argparse.Namespace) -> None:
    """Measure this machine or its GPU, and write the description.

    Raises:
        InputError: there is no GPU that CuPy can use, or `--quick` for a GPU.
        OSError: it cannot be written.
    """
    from simparallel.predict.calibration import calibrate as measure

    measure(options.out, quick=options.quick, array=options.array, tell=partial(print, flush=True))


def busbw(options: argparse.Namespace) -> None:
    """Print the bandwidth that a collective should reach.

    Raises:
        ClusterError, RankTableError, InputError: the cluster cannot be described, or a size is below 1.
    """
    for size in options.sizes:
        at_least_one(sizes=size)
    cluster = _cluster(options)
    factor, what = CONVENTION[options.op]
    num_ranks = len(options.ranks or range(cluster.world_size))
    print(
        f"{cluster.name}: {options.op} of {num_ranks} ranks, as modelled\n"
        f"size = {what}; algbw = size / time; busbw = algbw x {factor} (nccl-tests); 1 GB = 10^9 bytes\n"
    )
    rows: list[tuple[str, ...]] = [("size", "time", "algbw", "busbw", "algorithm")]
    for row in expected_busbw(cluster, options.op, options.sizes, options.ranks, options.algorithm):
        rates = (f"{rate / 1e9:.2f} GB/s" for rate in (row.algorithm_bandwidth, row.bus_bandwidth))
        rows.append((format_bytes(row.size_bytes), format_seconds(row.time_ps / PS_PER_S), *rates, row.algorithm))
    print(*aligned(rows, ">>>><"), sep="\n")

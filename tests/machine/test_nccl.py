"""NCCL's choices, worked out by hand from its tables; what holds for all of them; and public logs of nccl-tests."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import ClusterError
from simparallel.machine.busbw import expected_busbw
from simparallel.machine.cluster import PRESETS, ClusterSpec, LinkSpec, describe
from simparallel.machine.nccl import ChannelSearch, Nccl, channels

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LIBRARIES = {"a100": Nccl("ampere", "amd"), "h100": Nccl("hopper", "intel")}
# The clocks of an H100 and of an A100 [GHz]: so much longer are the latencies of the latter.
SLOW = 1.83 / 1.41
WITH_NCCL = sorted(name for name, preset in PRESETS.items() if preset.library)


def dgx(gpus, size, **fields):
    """Return a cluster of DGX A100 or DGX H100 with NCCL."""
    return replace(describe(size, f"dgx-{gpus}"), library=replace(LIBRARIES[gpus], **fields))


def priced(cluster, op, size_bytes, ranks=None, **how):
    cost = cluster.collective(op, size_bytes, tuple(ranks or range(cluster.world_size)), **how)
    return cost.time_ps / 1e6, cost.algorithm


# --- channels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "ranks", "algorithm", "expected"),
    [
        # 240 of 240 GB/s by 6 channels of 40, which are doubled
        (dgx("a100", 8), range(8), "ring", (12, 20.0, 0.0)),
        # 360 of 370.8 GB/s by 6 channels of 60, which are doubled
        (dgx("h100", 8), range(8), "ring", (12, 30.0, 0.0)),
        # 720 of 721.8 GB/s by 8 channels of 90, which are doubled
        (describe(8, "b200-8"), range(8), "ring", (16, 45.0, 0.0)),
        # A GPU carries 9 times the speed of a channel: 9 x 40 of 370.8 GB/s, 9 x 80 of 721.8, 5 x 60 of 370.8
        (dgx("h100", 8), range(8), "nvls", (8, 40.0, 0.0)),
        (describe(8, "b200-8"), range(8), "nvls", (8, 80.0, 0.0)),
        (dgx("h100", 8), range(4), "nvls", (4, 60.0, 0.0)),
        # 24 of 25 GB/s for each port; a tree of two nodes has 30 inside: 8 x 30 of 240 GB/s
        (dgx("a100", 16), range(16), "ring", (8, 24.0, 24.0)),
        (dgx("a100", 16), range(16), "tree", (8, 30.0, 24.0)),
        # 45 and not 48: 8 x 48 is more than 370.8 GB/s
        (dgx("h100", 16), range(16), "ring", (8, 45.0, 45.0)),
        (dgx("h100", 16), range(16), "nvlstree", (8, 40.0, 48.0)),
        # One port each, 48 of 50 GB/s, doubled
        (dgx("h100", 16), (0, 8), "ring", (2, 24.0, 24.0)),
        # 4 ports of 100 Gb/s
        (describe(16, "p4de"), range(16), "ring", (4, 12.0, 12.0)),
    ],
)
def test_channels_are_those_of_the_search(cluster, ranks, algorithm, expected):
    assert channels(cluster.library, cluster.spread(tuple(ranks)))[algorithm] == ChannelSearch(*expected)


# --- choices, by hand ----------------------------------------------------------------------------------
# Latency [us] + bytes / bandwidth; 1 GB/s is 1000 bytes a us.


@pytest.mark.parametrize(
    ("cluster", "op", "size", "ranks", "algorithm", "time_us"),
    [
        # 14 steps of 0.6; LL has 87.7 of 240 x 0.5 GB/s, and 8/14 of that for the vector
        (dgx("a100", 8), "all_reduce", 32 * KIB, range(8), "ring LL",
         SLOW * (6.6 + 14 * 0.6) + 32768 / (87.7e3 * 8 / 14)),
        # LL128: 14 steps of 1.9; 0.92 of 240 = 220.8, less than 12 x 20
        (dgx("a100", 8), "all_reduce", 8 * MIB, range(8), "ring LL128",
         SLOW * (14 + 14 * 1.9) + 2**23 / (220.8e3 * 8 / 14)),
        (dgx("a100", 8), "all_reduce", GIB, range(8), "ring Simple",
         SLOW * (8.4 + 14 * 3.4) + 2**30 / (240e3 * 8 / 14)),
        # LL has 141 of 360 x 0.5
        (dgx("h100", 8), "all_reduce", 512 * KIB, range(8), "ring LL", 6.6 + 14 * 0.6 + 2**19 / (141e3 * 8 / 14)),
        # on the wire, 0.85 of 370.8 / (1 + 1/8); 16 channels of 8 heads take 128 KiB at a time, which are copied twice
        (dgx("h100", 8), "all_reduce", GIB, range(8), "NVLS", 25 + (2**30 + 2 * 2**24) / (370.8e3 * 0.85 / 1.125)),
        # less than 2 x 128 x 32 KiB: 16 KiB at a time
        (dgx("h100", 8), "all_reduce", 4 * MIB, range(8), "NVLS", 25 + (2**22 + 2 * 2**21) / (370.8e3 * 0.85 / 1.125)),
        # 4 x 60 x 0.85 x 3/4 x 2 = 306 is less than the ring's 360
        (dgx("h100", 4), "all_reduce", GIB, range(4), "ring Simple", 8.4 + 6 * 3.4 + 2**30 / (360e3 * 4 / 6)),
        # 24 channels; less than 64 x 192 x 128 KiB: 64 KiB at a time
        (describe(8, "b200-8"), "all_reduce", GIB, range(8), "NVLS",
         25 + (2**30 + 2 * 192 * 2**16) / (721.8e3 * 0.74 / 1.125)),
        # 7 steps of 3.4; a gathered vector passes 7/8 times
        (dgx("a100", 8), "all_gather", GIB, range(8), "ring Simple",
         SLOW * (8.4 + 7 * 3.4) + 2**30 / (240e3 * 8 / 7)),
        (dgx("a100", 8), "broadcast", GIB, range(8), "ring Simple", SLOW * (8.4 + 3.4) + 2**30 / 240e3),
        # Two nodes. LL of the tree: 8 x 30 x 0.92 = 220.8, at most 8 x 23.6 = 188.8; / 3.8 = 49.7, at most 22.5 with
        # AMD; half of it, and 0.7 for 32 KiB (index 9)
        (dgx("a100", 16), "all_reduce", 32 * KIB, range(16), "tree LL",
         SLOW * (6.8 + 2 * (7 * 0.6 + 5)) + 32768 / (22.5e3 / 2 * 0.7)),
        # LL128 of the tree: 188.8 x 120/128 = 177, at most 8 x 20; half of it, and 0.6 for 1 MiB (index 14)
        (dgx("a100", 16), "all_reduce", MIB, range(16), "tree LL128",
         SLOW * (14 + 2 * (7 * 1.25 + 8.5)) + 2**20 / (160e3 / 2 * 0.6)),
        # LL128 of the ring: 28 steps inside, at least 2.0 of the processor, and 2 between; 192 x 0.92, at most 160
        (dgx("a100", 16), "all_reduce", 32 * MIB, range(16), "ring LL128",
         SLOW * (14 + 28 * 2.0 + 2 * 4) + 2**25 / (160e3 * 16 / 30)),
        # Simple of the ring: 28 steps of 3 x 2.0, 2 of 14, and all 1.4 times as long; 8 x 24 = 192
        (dgx("a100", 16), "all_reduce", GIB, range(16), "ring Simple",
         1.4 * SLOW * (8.4 + 28 * 6 + 2 * 14) + 2**30 / (192e3 * 16 / 30)),
        # NVLSTree: 40 x 0.85 x 7/8 x 2 = 59.5, 2 x 48 between, at most 57.7 a channel
        (dgx("h100", 16), "all_reduce", GIB, range(16), "NVLSTree",
         25 + 2 * 20.9 + (2**30 + 2 * 2**24) / (8 * 57.7e3 * 16 / 30)),
        # 8 nodes: 45.5 of min(59.5, 48, 45.5) a channel, and 64 KiB at a time
        (dgx("h100", 64), "all_reduce", GIB, range(64), "NVLSTree",
         25 + 2 * 3 * 20.9 + (2**30 + 2 * 2**23) / (8 * 45.5e3 * 64 / 126)),
        # One GPU on each of 2 nodes: the latency of the tree between them, once; 48 x 0.5, at most 39 with Intel
        (dgx("h100", 16), "all_reduce", KIB, (0, 8), "ring LL", 6.6 + 2 * 5 + 1024 / (24e3 * 2 / 2)),
        # EFA: 75 us once for LL, twice for Simple
        (describe(16, "p4de"), "all_reduce", 0, range(16), "tree LL",
         SLOW * (6.8 + 2 * (7 * 0.6 + 5)) + 2 * 75),
        (describe(16, "l40s-8"), "reduce", 0, range(8), "ring LL", 6.6 + 1.0),
    ],
)  # fmt: skip
def test_choices_and_times_by_hand(cluster, op, size, ranks, algorithm, time_us):
    found_us, found = priced(cluster, op, size, ranks)
    assert found == algorithm
    assert found_us == pytest.approx(time_us, abs=1e-3)


def test_stated_algorithms_and_protocols():
    """On 1,024 GPUs a ring takes many times as long as the tree that the tuner chooses."""
    cluster = dgx("a100", 1024)
    chosen_us, chosen = priced(cluster, "all_reduce", 16 * MIB)
    ring_us, ring = priced(cluster, "all_reduce", 16 * MIB, algorithm="ring")
    assert (chosen, ring) == ("tree LL128", "ring LL128")
    # 2 x 127 steps between nodes, and 2 x 896 of at least 2.0 inside
    assert ring_us == pytest.approx(SLOW * (14 + 1792 * 2.0 + 254 * 4) + 2**24 / (160e3 * 1024 / 2046), abs=1e-3)
    assert ring_us > 10 * chosen_us
    stated = replace(cluster, library=replace(cluster.library, algorithms=("ring",)))
    assert priced(stated, "all_reduce", 16 * MIB) == (ring_us, ring)
    simple = replace(cluster, library=replace(cluster.library, protocols=("Simple",)))
    assert priced(simple, "all_reduce", 8)[1] == "tree Simple"
    # A tree has no broadcast: the collective on messages is priced, step by step.
    assert priced(cluster, "broadcast", 8, algorithm="tree")[1] == "tree"


# --- what holds for all --------------------------------------------------------------------------------

sizes = st.integers(0, 10 * GIB) | st.integers(0, 2 * MIB)
OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)


@given(st.sampled_from(["ascend910b-8", "ascend910c-384"]), st.integers(1, 5), st.sampled_from(OPS), sizes, sizes)
def test_hccl_grows_with_bytes_and_servers(name, nodes, op, size_a, size_b):
    few, more = (replace(describe(8 * k, name, nodes=k), rules="hccl-a2") for k in (nodes, nodes + 1))
    small, large = sorted((size_a, size_b))
    times = [
        c.collective(op, n, tuple(range(c.world_size))).time_ps for c, n in ((few, small), (few, large), (more, large))
    ]
    assert times[0] <= times[1]
    if op == "all_reduce":
        assert times[1] <= times[2] or nodes == 1  # a mesh alone is slow


def test_hccl_chooses_between_servers():
    """Two steps of 60 us a server more for a ring, log2 of the servers for NHR; then the bytes through a rail each."""
    cluster = replace(describe(32, "ascend910b-8", nodes=4), rules="hccl-a2")
    mesh_us = 2 * (5 + MIB / 8 / 56e3)  # one step of 5 us, on 7 links of 56 GB/s
    rail_us = 2 * (2 * 60 + MIB / 8 * 3 / 4 / 25e3)
    cost = cluster.collective("all_reduce", MIB, tuple(range(32)))
    assert (cost.time_ps / 1e6, cost.algorithm) == (pytest.approx(mesh_us + rail_us), "NHR")
    # From 1 MiB for each rank on, both overlap.
    cost = cluster.collective("all_reduce", 32 * MIB, tuple(range(32)))
    assert cost.time_ps / 1e6 == pytest.approx(2 * (2 * 60 + 4 * MIB * 3 / 4 / 25e3))
    two = cluster.collective("all_gather", MIB, (0, 8))
    assert (two.time_ps / 1e6, two.algorithm) == (pytest.approx(60 + MIB / 2 / 25e3), "ring")
    assert cluster.collective("all_reduce", MIB, tuple(range(8))).algorithm == "fullmesh"


@st.composite
def calls(draw):
    """(cluster of a preset, op, group)"""
    nodes = draw(st.integers(1, 5))
    name = draw(st.sampled_from([*WITH_NCCL, "a100", "h100"]))
    cluster = dgx(name, 8 * nodes) if name in LIBRARIES else describe(8 * nodes, name, nodes=nodes)
    ranks = draw(st.permutations(range(cluster.world_size)))
    return cluster, draw(st.sampled_from(OPS)), tuple(ranks[: draw(st.integers(1, cluster.world_size))])


@given(calls(), sizes, sizes)
def test_time_grows_with_bytes(call, size_a, size_b):
    cluster, op, ranks = call
    small, large = (cluster.collective(op, size, ranks).time_ps for size in sorted((size_a, size_b)))
    assert 0 <= small <= large
    assert (small == 0) == (len(ranks) == 1)


@given(st.sampled_from(WITH_NCCL), st.sampled_from(["tree", "ring"]), st.integers(3, 5), st.integers(2, 7), sizes)
def test_time_grows_with_ranks_within_an_algorithm(name, algorithm, nodes, count, size):
    """On parts of a node, and on nodes from three on: the tables differ for one, two, and more of them."""
    stated = replace(describe(48, name, nodes=6), library=replace(PRESETS[name].library, algorithms=(algorithm,)))
    few, more = (stated.collective("all_reduce", size, tuple(range(8 * k))).time_ps for k in (nodes, nodes + 1))
    assert few <= more
    few, more = (stated.collective("all_reduce", size, tuple(range(p))).time_ps for p in (count, count + 1))
    assert few <= more


@given(calls(), sizes)
def test_slow_links_and_plugins_take_longer(call, size):
    cluster, op, ranks = call
    cost = cluster.collective(op, size, ranks).time_ps
    assert cost <= replace(cluster, slow_links={ranks[0]: 2.0}).collective(op, size, ranks).time_ps
    late = replace(cluster, library=replace(cluster.library, network_latency_s=1e-3))
    assert cost <= late.collective(op, size, ranks).time_ps
    assert cluster.collective(op, size, tuple(reversed(ranks))).time_ps == cost


def test_described_links_count():
    """A slower port is a slower ring, below the lowest speed of the search, too."""
    times = []
    for rate in (50e9, 25e9, 1e9, 1e7):
        cluster = replace(dgx("h100", 16), node_link=LinkSpec(5e-6, rate))
        times.append(priced(cluster, "all_reduce", GIB, algorithm="ring")[0])
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2**30 / (8 * 10) * 30 / 16, rel=1e-3)


def test_one_price_in_all_forms():
    """Online, dry, from the solver, and as expected bandwidth."""

    def work():
        sp.all_reduce(np.zeros(1 << 16, np.float32))

    cluster = describe(4, "p5")
    cost = cluster.collective("all_reduce", 1 << 18, tuple(range(4)))
    (event,) = (
        e for e in sp.launch(work, device=cluster, world_size=4, transport="inline").trace.events if e.rank == 0
    )
    assert (event.sim_end_ps - event.sim_start_ps, event.algorithm) == (cost.time_ps, cost.algorithm)
    assert sp.dry_run(work, world_size=4, cluster=cluster).makespan_s == cost.time_ps / 1e12
    assert expected_busbw(cluster, "all_reduce", [1 << 18])[0].time_ps == cost.time_ps
    tree = cluster.collective("all_reduce", 1 << 18, tuple(range(4)), algorithm="tree")
    assert expected_busbw(cluster, "all_reduce", [1 << 18], algorithm="tree")[0].time_ps == tree.time_ps


@pytest.mark.parametrize("size_bytes", [KIB, 64 * MIB])
def test_host_pays_for_each_call_once(size_bytes):
    """Small collectives follow each other at the pace of the interpreter, large ones at that of the devices."""

    def work():
        for _ in range(5):
            sp.all_reduce(np.zeros(size_bytes // 4, np.float32))

    cluster = describe(8, "dgx-h100")
    start_ps = round(cluster.device.op_start_s * 1e12)
    each_ps = cluster.collective("all_reduce", size_bytes, tuple(range(8))).time_ps
    prediction = sp.dry_run(work, world_size=8, cluster=cluster)
    assert round(prediction.makespan_s * 1e12) == each_ps + 4 * max(start_ps, each_ps)


@pytest.mark.parametrize("name", WITH_NCCL)
def test_saved_library_is_read_back(name, tmp_path):
    cluster = describe(16, name, nodes=2)
    cluster.save(tmp_path / "c.json")
    assert ClusterSpec.load(tmp_path / "c.json") == cluster
    assert "gpus" in cluster.table()


@pytest.mark.parametrize(
    "fields",
    [
        {"gpus": "kepler"}, {"cpus": "power"}, {"algorithms": ("rings",)}, {"protocols": ("ll",)},
        {"network_latency_s": float("nan")}, {"sources": {"gpu": "assumed"}},
    ],
    ids=str,
)  # fmt: skip
def test_bad_libraries_are_named(fields):
    with refused(ClusterError, key=next(iter(fields))):
        Nccl(**{"gpus": "hopper", "cpus": "intel"} | fields)


# --- public logs ---------------------------------------------------------------------------------------

LOGS = json.loads((Path(__file__).with_name("nccl_logs.json")).read_text())
# The host of a process of nccl-tests starts a call on one of its GPUs after the other. Each takes so many microseconds,
# and more for each channel, of 32 KiB or more of the vector: both from the log under "calibration", up to 1 MiB.
CALL_US, CHANNEL_US, CHANNELS, CHANNEL_BYTES = 3.8, 0.24, 24, 32 * KIB
PRESET_OF = {"a100": "dgx-a100", "h100": "dgx-h100", "b200": "b200-8"}


def errors(name, *, has_host=True, late_us=0.0):
    """Return ln(predicted / published) of a run, from 32 KiB on; the GPUs wait for a host that is behind them.

    Args:
        has_host: False for a host that takes no time.
        late_us: what each call takes beyond the prediction.
    """
    run = LOGS["runs"][name]
    preset = "p4de" if "plugin_us" in run else PRESET_OF[run["device"]]
    cluster = describe(run["gpus"], preset, nodes=run["nodes"])
    cluster = replace(cluster, library=replace(cluster.library, cpus=run["cpus"]))
    each_us, found = run.get("gpus_of_process", 1) * has_host, []
    for size, us in ((size, us) for of, size, us in LOGS["rows"] if of == name and size >= 32 * KIB):
        host_us = each_us * (CALL_US + CHANNEL_US * min(CHANNELS, size // CHANNEL_BYTES))
        found.append(log((max(host_us, priced(cluster, run.get("op", "all_reduce"), size)[0]) + late_us) / us))
    return found


def median_p90(names, **how):
    found = np.abs([error for name in names for error in errors(name, **how)])
    return np.median(found), np.quantile(found, 0.9)


def runs_of(kind):
    return [name for name, run in LOGS["runs"].items() if run["kind"] == kind and name not in LOGS["calibration"]]


@pytest.mark.parametrize(
    ("kind", "median", "p90"), [("within", 0.08, 0.27), ("between", 0.09, 0.46), ("other", 0.1, 0.49)]
)
def test_public_logs_of_nccl_tests(kind, median, p90):
    """Bounds just above what is reached, without the run under "calibration".

    The aims are 0.15 and 0.40 within a node, and a median of 0.20 between nodes.
    """
    assert all(run["url"] and run["where"] and run["software"] for run in LOGS["runs"].values())
    found = median_p90(runs_of(kind))
    assert found[0] <= median
    assert found[1] <= p90


def test_costs_at_another_place_miss_the_aims():
    """A host that starts 8 GPUs at no cost, and 20 us more for each call on the devices."""
    assert median_p90(runs_of("within"), has_host=False)[1] > 0.40
    assert median_p90(["p5, one node"], late_us=20.0)[1] > 0.40

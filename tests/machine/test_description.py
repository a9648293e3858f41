"""Cluster files, presets, and the sources of their numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

import simparallel as sp
from simparallel.errors import ClusterError
from simparallel.machine.cluster import (
    PRESETS,
    ClusterSpec,
    DeviceSpec,
    LinkSpec,
    describe,
    load_cluster,
    this_host_file,
    with_device,
)
from simparallel.machine.numbers import KINDS
from simparallel.machine.ranktable import make_rank_table

FILE = """{
  "world_size": 16,
  "name": "two nodes",  // by hand
  "nodes": 2,
  "device": {
    "name": "chip",
    "peak_flops_per_s": {"2": 1e14, "4": 1e13},
    "memory_bandwidth_bytes_per_s": 1e12,
    "memory_bytes": 8e10,
    "launch_s": 5e-6,
    "matmul_efficiency": {"2": {"points": [[1e9, 0.5], [1e12, 0.9]]}}
  },
  "link": {"latency_s": 2e-6, "bandwidth_bytes_per_s": 1e11, "segments": [[65536, 3e-6, 2e11]]},
  "node_link": {"latency_s": 5e-6, "bandwidth_bytes_per_s": 25000000000},
  "slow_links": {"3": 2, "0-1": 1.5},
}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "c.json").write_text(FILE)
    return str(tmp_path / "c.json")


def test_cluster_file_by_hand(path):
    cluster = load_cluster(path)
    assert (cluster.world_size, len(cluster.nodes), cluster.device.memory_bytes) == (16, 2, 80 * 10**9)
    assert cluster.slow_links == {3: 2.0, (0, 1): 1.5}
    assert cluster.device.matmul_efficiency[2](1e9) == 0.5
    assert cluster.link.segments[0].from_bytes == 65536
    cluster.save(path)
    assert ClusterSpec.load(path) == cluster
    assert '"nodes": 2,' in Path(path).read_text()


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"latency_s": 5e-6', '"latncy_s": 5e-6', "node_link.latncy_s"),
        ('"latency_s": 5e-6, ', "", "node_link.latency_s"),
        ('"latency_s": 5e-6', '"latency_s": -5e-6', "node_link.latency_s"),
        ('"latency_s": 5e-6', '"latency_s": 1e999', "node_link.latency_s"),
        ('"latency_s": 5e-6', '"latency_s": NaN', None),
        ('"latency_s": 5e-6', '"latency_s": "5 µs"', "node_link.latency_s"),
        ('"latency_s": 5e-6', '"latency_s": 5e-6, "latency_s": 6e-6', None),
        ("25000000000", "9" * 40, None),
        ("25000000000", "1e30", "node_link.bandwidth_bytes_per_s"),
        ("25000000000", "true", "node_link.bandwidth_bytes_per_s"),
        ('"4": 1e13', '"four": 1e13', "device.peak_flops_per_s"),
        ('"4": 1e13', '"4": 0', "device.peak_flops_per_s"),
        ("8e10", "8.5", "device.memory_bytes"),
        ("[1e12, 0.9]", "[1e12, 1.9]", "device.matmul_efficiency.2.points"),
        ("[1e12, 0.9]", "[1e12]", "device.matmul_efficiency.2.points[1]"),
        ("[[65536, 3e-6, 2e11]]", "[[65536, 3e-6, 0]]", "link.segments"),
        ('"nodes": 2', '"nodes": 3', "nodes"),
        ('"nodes": 2', '"nodes": [[0, 1], [2]]', "nodes"),
        ('"0-1": 1.5', '"0-16": 1.5', "slow_links"),
        ('"0-1": 1.5', '"0-1-2": 1.5', "slow_links"),
        ('"name": "two nodes",', '"tpu_cores": 3,', "tpu_cores"),
        ('"device": {', '"device": 3, "tiers": {', "device"),
        (FILE, "[]", None),
        (FILE, "", None),
    ],
)
def test_bad_cluster_files_are_named(path, tmp_path, old, new, key):
    assert old in FILE
    (tmp_path / "c.json").write_text(FILE.replace(old, new, 1))
    line = FILE[: FILE.index(old)].count("\n") + 1
    with refused(ClusterError, path=path, key=key, line=line) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_missing_cluster_file_is_named(tmp_path):
    with refused(ClusterError, path=str(tmp_path / "no.json"), line=None, key=None):
        describe(2, str(tmp_path / "no.json"))
    with refused(ClusterError, path=str(tmp_path) + "/", line=None):
        load_cluster(f"{tmp_path}/")


def test_world_larger_than_its_cluster(path):
    assert load_cluster(path, 3).nodes == ((0, 1, 2),)
    with refused(ClusterError):
        load_cluster(path, 17)
    with refused(ClusterError):
        sp.launch(sp.get_rank, world_size=32, device=path, transport="inline")
    assert list(sp.launch(sp.get_node_rank, world_size=10, device=path, transport="inline")) == [0] * 8 + [1] * 2


def test_own_nodes_and_links_replace_those_of_a_file(path):
    link = LinkSpec(1e-6, 1e9)
    cluster = describe(8, path, link, 4, link)
    assert (cluster.link, cluster.node_link, len(cluster.nodes)) == (link, link, 4)
    assert describe(8, cluster) == cluster


# --- presets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_number_of_a_preset_has_a_source(name):
    size = PRESETS[name].node_size or 8
    for cluster in (load_cluster(name), describe(2 * size, name, nodes=2)):
        head, *rows = cluster.table().splitlines()
        assert str(cluster.world_size) in head
        assert len(rows) > 6
        assert all(re.search(rf"  ({'|'.join(KINDS)})(:|$)", row) for row in rows if "notes" not in row)
    assert "data sheet" in cluster.table() or name in ("this-host", "ascend910b-8", "ascend910c-384")
    assert len(cluster.nodes) == 2


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.node_size == 8])
@pytest.mark.parametrize("world_size", [1, 2, 8, 16, 64])
def test_ranks_fill_nodes_of_eight(name, world_size):
    cluster = describe(world_size, name)
    assert [len(node) for node in cluster.nodes] == [min(world_size, 8)] * max(world_size // 8, 1)
    table = make_rank_table(max(world_size // 8, 1), min(world_size, 8))
    assert describe(world_size, name, nodes=table.nodes).nodes == cluster.nodes
    # In a node it is faster than between nodes, and islands are faster than the node.
    times = [cluster.message(10**9, 0, rank).time_ps for rank in (1, 4, 8) if rank < world_size]
    assert times == sorted(times)


def test_islands_follow_the_cards():
    cluster = describe(16, "ascend910-8")
    assert [tier.groups for tier in cluster.tiers] == [tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))]
    assert describe(4, "ascend910-8", device_ids=(4, 5, 6, 7)).tiers[0].groups == ((0, 1, 2, 3),)
    assert [tier.groups for tier in describe(1, "ascend910-8", device_ids=(5,)).tiers] == [((0,),)]


def test_presets_with_a_table_are_run():
    table = make_rank_table(2, 8)
    results = sp.launch(sp.get_node_rank, world_size=16, device="dgx-h100", rank_table=table, transport="inline")
    assert list(results) == [0] * 8 + [1] * 8
    assert results.trace.cluster.device_ids == tuple(range(8)) * 2


def test_other_device_keeps_ranks_and_nodes():
    cluster = describe(4, nodes=2)
    assert with_device(cluster, "ascend910").nodes == cluster.nodes
    assert with_device(describe(16), "dgx-h100").nodes == describe(16, "dgx-h100").nodes


def test_this_host_is_read_from_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    guess = describe(2, "this-host")
    assert "assumed" in guess.table()
    assert guess.device_factor(0) <= describe(1 << 12, "this-host").device_factor(0)
    device = replace(guess.device, launch_s=1e-3, sources={"launch_s": "measured: 2026-01-01"})
    replace(guess, device=device).save(this_host_file())
    for world_size in (1, 2, 5):
        assert describe(world_size, "this-host").device == device
        assert len(describe(world_size, "this-host").nodes[0]) == world_size
    this_host_file().write_text("{")
    with refused(ClusterError):
        describe(2, "this-host")


def test_numbers_without_a_source_are_assumed():
    cluster = ClusterSpec(1, DeviceSpec("own", {4: 1e12}, 1e12, 10**9, 0.0, notes="mine"), LinkSpec(0.0, 1e9))
    rows = cluster.table().splitlines()[1:]
    assert all(row.endswith("  assumed") for row in rows if "notes" not in row)
    assert "mine" in cluster.table()

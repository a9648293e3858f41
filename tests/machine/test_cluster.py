"""The described hardware: costs of work and communication."""

from __future__ import annotations

import numpy as np
import pytest
from data_sheets import SHEETS, Sheet
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import ClusterError
from simparallel.machine.cluster import PRESETS, ClusterSpec, DeviceSpec, LinkSpec, Traffic, describe, picoseconds

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "barrier",
)  # fmt: skip
# 1 byte/ps of memory, 1 flop/ps in float32, 2 in float16: prices can be computed by hand.
DEVICE = DeviceSpec("plain", {2: 2e12, 4: 1e12}, 1e12, 10**9, launch_s=1e-9)
LINK = LinkSpec(latency_s=1e-9, bandwidth_bytes_per_s=1e12)
CLUSTER = ClusterSpec(64, DEVICE, LINK)

collectives = st.sampled_from(COLLECTIVES)
sizes = st.integers(0, 10**12)
groups = st.integers(1, 64).map(lambda n: tuple(range(n)))


@given(collectives, sizes, sizes, groups)
def test_collective_cost_grows_with_bytes(op, size_a, size_b, ranks):
    """Costs are integers, at least 0, and no less for more bytes."""
    small, large = (CLUSTER.collective(op, size, ranks) for size in sorted((size_a, size_b)))

    assert 0 <= small.time_ps <= large.time_ps
    assert 0 <= small.sent_bytes <= large.sent_bytes
    assert all(isinstance(number, int) for cost in (small, large) for number in (cost.time_ps, cost.sent_bytes))


@given(collectives, sizes)
def test_collective_of_one_rank_is_free(op, size):
    assert CLUSTER.collective(op, size, (3,)) == Traffic(0, 0)


@given(st.integers(0, 10**6), st.integers(2, 32))
def test_ring_all_reduce_is_two_passes_of_the_ring(chunk, num_ranks):
    size, ranks = chunk * num_ranks, tuple(range(num_ranks))
    cost = CLUSTER.collective("all_reduce", size, ranks, algorithm="ring")

    # 2 (p - 1) steps of 1000 ps latency and chunk bytes at 1 byte/ps
    assert cost == Traffic(2 * (num_ranks - 1) * (1000 + chunk), 2 * (num_ranks - 1) * chunk)


# --- choices of communication libraries --------------------------------------------------------------

NODE_LINK = LinkSpec(latency_s=5e-9, bandwidth_bytes_per_s=1e11)  # 5000 ps, 10 ps a byte
shapes = st.tuples(st.integers(1, 12), st.integers(1, 8))  # nodes, members of each


def on_nodes(nodes, members, node_link=NODE_LINK):
    return describe(nodes * members, DEVICE, LINK, nodes, node_link)


def log2(count):
    return (count - 1).bit_length()


@given(st.integers(0, 10**6), st.integers(2, 32))
def test_one_node_takes_faster_of_ring_and_tree(chunk, p):
    """Closed forms: 2 (p - 1) steps with a p-th each, or up and down a tree with all of it."""
    cost = CLUSTER.collective("all_reduce", chunk * p, tuple(range(p)))

    times = {"ring": 2 * (p - 1) * (1000 + chunk), "tree": 2 * (log2(p) * 1000 + chunk * p)}
    assert cost.time_ps == min(times.values())
    assert times[cost.algorithm] == cost.time_ps
    assert cost.sent_bytes == 2 * (p - 1) * chunk  # as a ring, if that is faster
    half = CLUSTER.collective("reduce_scatter", chunk * p, tuple(range(p)))
    assert half.time_ps == min((p - 1) * (1000 + chunk), 2 * log2(p) * 1000 + (p - 1) * chunk + chunk * p)


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(2, 8))
def test_all_reduce_between_nodes_in_closed_form(chunk, k, g):
    """Every device drives its own port."""
    p = k * g
    size = chunk * p
    cost = on_nodes(k, g).collective("all_reduce", size, tuple(range(p)))

    inside, between = 2 * (g - 1) * (1000 + size / g), 2 * (k - 1) * (5000 + 10 * size / g / k)
    tree_between = 2 * (log2(k) * 5000 + 10 * size / g)
    times = {
        "ring": 2 * ((p - k) * 1000 + (k - 1) * 5000 + (p - 1) * chunk * max(1, 10 / g)),
        "tree": 2 * (log2(g) * 1000 + log2(k) * 5000 + size * max(1, 10 / g)),
        "hierarchical": min(inside, 4 * log2(g) * 1000 + 2 * (size + size * (g - 1) / g)) + min(between, tree_between),
    }  # fmt: skip
    assert cost.time_ps == pytest.approx(min(times.values()), abs=1)
    assert times[cost.algorithm] == pytest.approx(cost.time_ps, abs=1)


@given(collectives, sizes, shapes)
def test_collectives_respect_lower_bounds(op, size, shape):
    """Chan et al. 2007, with the better link everywhere; and the bytes that must leave a node through all its ports."""
    (k, g), p = shape, shape[0] * shape[1]
    time_ps = on_nodes(k, g).collective(op, size, tuple(range(p))).time_ps

    share = {"all_reduce": 2 * (p - 1) / p, "broadcast": p > 1, "reduce": p > 1, "barrier": 0}.get(op, (p - 1) / p)
    out = {"all_reduce": 2 * (k - 1) / k, "broadcast": k > 1, "reduce": k > 1, "barrier": 0}.get(op, (k - 1) / k)
    at_least = max(log2(p) * 1000, share * size if k == 1 else 0, out * size * 10 / g)
    assert time_ps >= at_least * (1 - 1e-9) - 1


@given(collectives, sizes, shapes)
def test_equal_links_are_no_slower_than_one_node(op, size, shape):
    """Ports that leave a node cannot hurt much: one level more for a barrier's tree."""
    k, g = shape
    ranks = tuple(range(k * g))
    alike = on_nodes(k, g, LINK).collective(op, size, ranks).time_ps
    flat = describe(k * g, DEVICE, LINK).collective(op, size, ranks).time_ps
    assert alike <= 2 * flat + 2000


@given(sizes, shapes)
def test_all_reduce_is_at_most_its_two_halves(size, shape):
    cluster, ranks = on_nodes(*shape), tuple(range(shape[0] * shape[1]))
    whole, first, second = (
        cluster.collective(op, size, ranks) for op in ("all_reduce", "reduce_scatter", "all_gather")
    )

    assert whole.time_ps <= first.time_ps + second.time_ps + 2
    assert abs(whole.sent_bytes - first.sent_bytes - second.sent_bytes) <= 1


def test_uneven_and_shuffled_groups():
    """The nodes of the ranks count, not their order; a node with one member has one port."""
    nodes = ((0, 1, 2), (3, 4, 5))
    cluster = describe(6, DEVICE, LINK, nodes, NODE_LINK)
    size = 6 * 10**6
    whole = cluster.collective("all_reduce", size, tuple(range(6)))
    assert cluster.collective("all_reduce", size, (5, 0, 3, 2, 1, 4)) == whole
    uneven = cluster.collective("all_reduce", size, (0, 1, 2, 3))
    assert uneven.time_ps == 2 * (2 * 1000 + 5000 + size * 3 // 4 * 10)
    assert uneven.algorithm == "ring"


def test_event_names_the_algorithm():
    def work():
        sp.all_reduce(np.ones(2, np.float32))
        sp.all_reduce(np.ones(4_000_000, np.float32))
        sp.all_reduce(np.ones(2, np.float32), algorithm="ring")

    trace = sp.launch(work, world_size=4, transport="inline").trace
    assert [event.algorithm for event in trace.events if event.rank == 0] == ["tree", "ring", "ring"]


def test_custom_device_needs_its_links():
    assert describe(1, DEVICE).device is DEVICE
    assert describe(2, PRESETS["ascend910"][0]).link == PRESETS["ascend910"][1]
    for settings in ({}, {"nodes": 2, "link": LINK}):
        with refused(ClusterError):
            describe(4, DEVICE, **settings)
    with refused(ClusterError):
        describe(1, DEVICE, devices_per_rank=2)


@given(sizes, sizes)
def test_messages(size_a, size_b):
    small, large = sorted((size_a, size_b))

    assert CLUSTER.message(small, 0, 1).time_ps <= CLUSTER.message(large, 0, 1).time_ps
    assert CLUSTER.message(small, 0, 1) == Traffic(1000 + small, small)
    assert CLUSTER.message(large, 2, 2) == Traffic(0, 0)


@given(st.integers(0, 10**15), st.integers(0, 10**12), st.sampled_from((2, 4)))
def test_device_time_is_a_roofline(flops, size_bytes, itemsize):
    compute_ps = flops / (2 if itemsize == 2 else 1)

    launch_ps = 1000 if flops or size_bytes else 0  # a view launches nothing
    expected_ps = launch_ps + max(compute_ps, size_bytes)
    assert DEVICE.time_ps(flops, size_bytes, itemsize) == pytest.approx(expected_ps, abs=1)


def test_unlisted_item_size_uses_next_larger_peak():
    assert [DEVICE.peak(size) for size in (1, 2, 3, 4, 8)] == [2e12, 2e12, 1e12, 1e12, 1e12]


def test_every_preset_has_a_record():
    assert {
        name: Sheet(
            preset.node_size, preset.device.memory_bytes / 1e9, preset.device.memory_bandwidth_bytes_per_s / 1e12,
            preset.device.peak(2) / 1e12,
        )
        for name, preset in PRESETS.items() if name != "this-host"
    } == SHEETS  # fmt: skip


def test_every_preset_has_links_between_its_nodes():
    for preset in PRESETS.values():
        assert preset.node_link.bandwidth_bytes_per_s <= preset.link.bandwidth_bytes_per_s


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_found_by_name(name, tmp_path, monkeypatch):
    # This machine may have been calibrated.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    cluster = describe(8, name)

    assert (cluster.world_size, cluster.device, cluster.link) == (8, *PRESETS[name][:2])
    assert cluster.name == f"8 x {cluster.device.name}"
    assert cluster.device.peak(2) >= cluster.device.peak(4)


def test_own_devices_and_links_are_taken():
    cluster = describe(2, DEVICE, LINK)

    assert cluster == ClusterSpec(2, DEVICE, LINK, "2 x plain")


def test_picoseconds_round_to_nearest():
    assert [picoseconds(s) for s in (0, 1e-12, 1.4e-12, 1.6e-12, 1)] == [0, 1, 1, 2, 10**12]


@pytest.mark.parametrize(
    "call",
    [
        lambda: describe(8, "tpu"),
        lambda: describe(0),
        lambda: describe(-2),
        lambda: describe(True),
        lambda: describe(2.0),
        lambda: CLUSTER.collective("all_sum", 8, (0, 1)),
        lambda: DeviceSpec("d", {}, 1e12, 1, 0.0),
        lambda: DeviceSpec("d", {4: 0.0}, 1e12, 1, 0.0),
        lambda: DeviceSpec("d", {4: 1.0}, -1.0, 1, 0.0),
        lambda: DeviceSpec("d", {4: 1.0}, 1.0, 0, 0.0),
        lambda: DeviceSpec("d", {4: np.inf}, 1.0, 1, 0.0),
        lambda: DeviceSpec("d", {4: 1.0}, 1.0, 1, -1e-6),
        lambda: LinkSpec(-1.0, 1.0),
        lambda: LinkSpec(float("nan"), 1.0),
        lambda: LinkSpec(0.0, 0.0),
    ],
)
def test_bad_values_are_named(call):
    with refused(ClusterError):
        call()


def test_cluster_name_counts_ranks_and_devices() -> None:
    assert describe(4).name == "4 x a100"
    assert describe(1, devices_per_rank=2).name == "1 rank x 2 a100"
    assert describe(2, devices_per_rank=4).name == "2 ranks x 4 a100"

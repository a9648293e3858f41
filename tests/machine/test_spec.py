"""Properties of prices on any described cluster: tiers, topologies, segments, ports and slow links."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import ClusterError
from simparallel.machine.cluster import (
    ClusterSpec,
    Curve,
    DeviceSpec,
    Jitter,
    LinkSpec,
    Tier,
    Traffic,
    describe,
    picoseconds,
)
from simparallel.machine.device import SOFTWARE, OpCost
from simparallel.machine.library_times import TIMES
from simparallel.testing.strategies import clusters, links

DEVICE = DeviceSpec("plain", {2: 2e12, 4: 1e12}, 1e12, 10**9, launch_s=1e-9)
LINK = LinkSpec(latency_s=1e-9, bandwidth_bytes_per_s=1e12)  # 1000 ps, 1 ps a byte
WIDE = LinkSpec(latency_s=5e-9, bandwidth_bytes_per_s=1e11)  # 5000 ps, 10 ps a byte

ops = st.sampled_from(sorted(TIMES))
sizes = st.integers(0, 10**10)


@st.composite
def calls(draw, **kinds):
    """(cluster, group of any ranks)"""
    cluster = draw(clusters(**kinds))
    ranks = draw(st.permutations(range(cluster.world_size)))
    return cluster, tuple(ranks[: draw(st.integers(1, cluster.world_size))])


def changed(cluster, change):
    """Apply a change to all links."""
    return replace(
        cluster,
        link=change(cluster.link),
        node_link=change(cluster.node_link),
        tiers=tuple(replace(tier, link=change(tier.link)) for tier in cluster.tiers),
    )


def scaled(latency, bandwidth):
    def change(link):
        segments = tuple((start, a * latency, b * bandwidth) for start, a, b in link.segments)
        return replace(
            link, latency_s=link.latency_s * latency, segments=segments,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth,
        )  # fmt: skip

    return change


@given(calls(), ops, sizes | st.integers(0, 2 * 10**6), sizes | st.integers(0, 2 * 10**6))
def test_price_grows_with_bytes_on_any_cluster(call, op, size_a, size_b):
    cluster, ranks = call
    small, large = (cluster.collective(op, size, ranks) for size in sorted((size_a, size_b)))
    assert 0 <= small.time_ps <= large.time_ps
    if len(ranks) == 1:
        assert large == Traffic(0, 0)
    small, large = (cluster.message(size, ranks[0], ranks[-1]) for size in sorted((size_a, size_b)))
    assert small.time_ps <= large.time_ps


@given(calls(), ops, sizes, st.booleans())
def test_price_grows_with_latency_and_slower_links(call, op, size, is_latency):
    cluster, ranks = call
    slower = changed(cluster, scaled(2.0, 1.0) if is_latency else scaled(1.0, 0.5))
    for before, after in (
        (cluster.collective(op, size, ranks), slower.collective(op, size, ranks)),
        (cluster.message(size, ranks[0], ranks[-1]), slower.message(size, ranks[0], ranks[-1])),
    ):
        assert before.time_ps <= after.time_ps


@given(calls(), ops, sizes, st.integers(0, 10**12))
def test_doubling_everything_doubles_the_price(call, op, size, flops):
    cluster, ranks = call
    slower = changed(cluster, scaled(2.0, 0.5))
    once, twice = (each.collective(op, size, ranks).time_ps for each in (cluster, slower))
    assert abs(twice - 2 * once) <= 1  # each is rounded
    once, twice = (DEVICE.time_ps(flops, size, 4, factor=factor) for factor in (1.0, 2.0))
    assert abs(twice - 2 * once) <= 1


@given(calls(), ops, sizes, st.data())
def test_order_of_ranks_and_equal_units_do_not_matter(call, op, size, data):
    cluster, ranks = call
    shuffled = tuple(data.draw(st.permutations(ranks)))
    assert cluster.collective(op, size, shuffled).time_ps == cluster.collective(op, size, ranks).time_ps
    # All ranks, one node further on.
    cluster, step = replace(cluster, slow_links={}), len(cluster.nodes[0])
    moved = tuple((rank + step) % cluster.world_size for rank in range(cluster.world_size))
    everyone = tuple(range(cluster.world_size))
    assert cluster.collective(op, size, moved).time_ps == cluster.collective(op, size, everyone).time_ps


@given(calls(topologies=("switch",)), ops, sizes)
def test_prices_respect_lower_bounds_on_any_tiers(call, op, size):
    """Chan et al. 2007, with the best link everywhere: one port for each rank."""
    cluster, ranks = call
    p, time_ps = len(ranks), cluster.collective(op, size, ranks).time_ps
    all_links = [cluster.link, cluster.node_link, *(tier.link for tier in cluster.tiers)]
    latency_s = min(segment.latency_s for link in all_links for segment in link.all_segments)
    bandwidth = max(segment.bandwidth_bytes_per_s for link in all_links for segment in link.all_segments)
    share = {"all_reduce": 2 * (p - 1) / p, "broadcast": p > 1, "reduce": p > 1, "barrier": 0, "new_group": 0}
    moved_s = share.get(op, (p - 1) / p) * size / bandwidth
    assert time_ps >= max((p - 1).bit_length() * latency_s, moved_s) * 1e12 * (1 - 1e-9) - 1


@given(ops, sizes, st.integers(1, 8), links(), links())
def test_one_node_or_one_rank_per_node_is_flat(op, size, count, inside, between):
    """Also for islands: a tier at which nobody meets has no price."""
    ranks = tuple(range(count))
    flat = ClusterSpec(count, DEVICE, inside).collective(op, size, ranks)
    one_node = ClusterSpec(count, DEVICE, inside, nodes=1, node_link=between)
    apart = ClusterSpec(count, DEVICE, between, nodes=count, node_link=inside)
    islands = ClusterSpec(count, DEVICE, inside, tiers=(Tier("island", between, count),))
    for cluster in (one_node, apart, islands):
        assert cluster.collective(op, size, ranks) == flat


@given(calls(), sizes, st.sampled_from(["all_reduce", "all_gather"]))
def test_links_of_a_group_carry_its_rate(call, size, op):
    """The smallest capacity / share of a group's links is the rate of its ring."""
    cluster, ranks = call
    cluster = changed(cluster, lambda link: replace(link, segments=()))
    assume(len(ranks) > 1)
    spread = cluster.spread(ranks).of_size(size)
    rate = min(use.capacity_bytes_per_s / use.share for use in cluster.links_of(ranks))
    assert rate == pytest.approx(1 / spread.passing_s(1.0))
    one_way = cluster.links_of(ranks[:2], one_way=True)
    assert {use.name for use in one_way} <= {use.name for use in cluster.links_of(ranks[:2])}
    names = [use.name for use in cluster.links_of(ranks)]
    assert len(set(names)) == len(names)
    # All groups agree on what a link can carry.
    capacity = {use.name: use.capacity_bytes_per_s for use in cluster.links_of(range(cluster.world_size))}
    assert all(capacity.get(use.name, use[1]) == use[1] for use in cluster.links_of(ranks))


@given(calls(), st.integers(1, 5), st.data())
def test_saved_cluster_is_read_back_exactly(call, itemsize, data):
    cluster, fraction = call[0], data.draw(st.floats(0.1, 1.0))
    curve = Curve(((1.0, fraction / 2), (3.0, fraction)))
    device = replace(
        DEVICE, launch_s=fraction / 3, vector_flops_per_s={itemsize: 1e9 / 7}, memory_efficiency=curve,
        matmul_efficiency={4: curve}, sources={"launch_s": "measured: here"},
    )  # fmt: skip
    cluster = replace(
        cluster, device=device, stragglers={0: 1 + fraction}, jitter=Jitter(fraction, 3), sharing=curve,
        device_ids=data.draw(st.sampled_from([(), tuple(range(7, 7 + cluster.world_size))])),
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        cluster.save(path := f"{folder}/c.json")
        assert ClusterSpec.load(path) == cluster
    # Whole racks: the ports of a part of one are those of its ranks.
    rack = len(cluster.tiers[-1].groups[0])
    part = cluster.with_ranks(count := rack * data.draw(st.integers(1, cluster.world_size // rack)))
    size, ranks = data.draw(sizes), tuple(range(count))
    assert part.collective("all_reduce", size, ranks) == cluster.collective("all_reduce", size, ranks)


# --- tiers, by hand ------------------------------------------------------------------------------------


def test_islands_and_racks_are_nearer():
    """Two nodes of two islands of two."""
    fast = LinkSpec(5e-10, 2e12)
    cluster = ClusterSpec(8, DEVICE, LINK, nodes=2, node_link=WIDE, tiers=(Tier("island", fast, 4),))
    assert cluster.message(1000, 0, 1).time_ps == 500 + 500
    assert cluster.message(1000, 0, 2).time_ps == 1000 + 1000
    assert cluster.message(1000, 3, 4).time_ps == 5000 + 10000
    racks = ClusterSpec(
        8, DEVICE, LINK, nodes=4, node_link=replace(WIDE, latency_s=9e-9), tiers=(Tier("rack", WIDE, 2, True),)
    )
    assert [racks.message(0, 0, other).time_ps for other in (1, 2, 4)] == [1000, 5000, 9000]


def test_three_levels_in_closed_form():
    """A large all_reduce goes through islands of 2 in nodes of 2 islands, on 2 nodes, phase by phase."""
    fast = LinkSpec(5e-10, 2e12)
    cluster = ClusterSpec(8, DEVICE, LINK, nodes=2, node_link=WIDE, tiers=(Tier("island", fast, 4),))
    n = 8 * 10**9
    # A ring of the 4 ranks of a node: half of 3/4 n flows between its islands. Then rings of 2 rails with 1/4 of it.
    phases = 2 * (500 + 1000 + 500 + n * 3 // 8) + 2 * (5000 + 10 * (n // 4) // 2)
    assert cluster.collective("all_reduce", n, tuple(range(8))) == Traffic(phases, 2 * 7 * n // 8)
    assert cluster.collective("all_reduce", n, tuple(range(8))).algorithm == "hierarchical"


@given(st.integers(0, 10**6), st.integers(2, 8))
def test_full_mesh_uses_all_links_at_once(chunk, p):
    mesh = ClusterSpec(8, DEVICE, replace(LINK, topology="mesh"))
    ranks, size = tuple(range(p)), chunk * p
    assert mesh.collective("all_reduce", size, ranks).time_ps == 2 * (1000 + chunk)
    assert mesh.collective("all_to_all", size, ranks).time_ps == 1000 + chunk
    assert mesh.collective("barrier", 0, ranks).time_ps == 1000
    assert mesh.message(chunk, 0, 1).time_ps == 1000 + chunk


def test_ring_has_two_links_a_device():
    ring = ClusterSpec(8, DEVICE, replace(LINK, topology="ring"))
    n = 8 * 10**6
    cost = ring.collective("all_reduce", n, tuple(range(8)))
    assert (cost.time_ps, cost.algorithm) == (2 * (7 * 1000 + 7 * n // 8 // 2), "ring")
    assert ring.collective("all_gather", n, (0, 1)).time_ps == 1000 + n // 2


def test_ports_limit_what_leaves_a_node():
    ranks, n = tuple(range(8)), 8 * 10**6

    def time_ps(ranks=ranks, **settings):
        return describe(8, DEVICE, LINK, 2, replace(WIDE, **settings)).collective("broadcast", n, ranks).time_ps

    assert time_ps(ports=2) - 7000 == 2 * (time_ps() - 7000)  # the latency of a tree
    assert time_ps(ports=1, ranks=(0, 4)) == time_ps(ranks=(0, 4)) == 5000 + 10 * n
    assert time_ps(oversubscription=2.0) == time_ps(ports=2)
    assert time_ps(oversubscription=4.0, ranks=(0, 4)) == time_ps(ranks=(0, 4))  # alone, it has a whole port
    assert time_ps(oversubscription=8.0, ranks=(0, 4)) == 5000 + 20 * n
    shared = describe(8, DEVICE, LINK, 2, replace(WIDE, ports=2))
    # Each of 4 peers outside gets an eighth through half a port; a step of a ring is as slow as that.
    assert shared.collective("all_to_all", n, ranks).time_ps == 3 * (1000 + n // 8) + 4 * (5000 + 20 * n // 8)
    ring = shared.collective("all_gather", n, ranks, algorithm="ring").time_ps
    assert ring == 7 * (5000 + 20 * n // 8)


def test_node_alone_in_its_rack_limits_nothing_there():
    """Nodes of 4, 4 and 1 ranks; the last has a quarter of a port to other nodes of its rack, of which it has none."""
    rack = Tier("rack", replace(WIDE, oversubscription=4.0), (tuple(range(8)), (8,)), True)
    nodes = (tuple(range(4)), tuple(range(4, 8)), (8,))
    cluster = ClusterSpec(9, DEVICE, LINK, nodes=nodes, node_link=LINK, tiers=(rack,))
    assert cluster.collective("broadcast", 10**6, (0, 4, 8)).time_ps == 5000 + 1000 + 10 * 10**6


def test_segments_cost_no_more_than_larger_sizes():
    """LL, then Simple: the switch is where they cost the same, or where the segment begins if that is later."""
    cluster = ClusterSpec(2, DEVICE, replace(LINK, segments=((8000, 5e-9, 4e12),)))
    before, after = (link.latency_s + size / link[1] for size in (7999, 8000) for link in (cluster.link.step(size),))
    assert before > after  # each by its own segment
    assert [cluster.message(size, 0, 1).time_ps for size in (0, 1000, 6000, 7000, 8000, 9000)] == [
        1000, 2000, 7000, 7000, 7000, 7250,
    ]  # fmt: skip
    slower = ClusterSpec(2, DEVICE, replace(LINK, segments=((8000, 1e-9, 0.5e12),)))
    assert [slower.message(size, 0, 1).time_ps for size in (7999, 8000)] == [8999, 17000]


def test_slow_link_slows_its_groups_alone():
    cluster = ClusterSpec(4, DEVICE, LINK, slow_links={(1, 2): 3.0, 3: 2.0})
    plain = ClusterSpec(4, DEVICE, LINK)
    for ranks, factor in (((0, 1), 1), ((0, 2), 1), ((1, 2), 3), ((0, 3), 2), ((0, 1, 2, 3), 3)):
        for op in ("all_reduce", "all_to_all"):
            assert cluster.collective(op, 10**6, ranks).time_ps == factor * plain.collective(op, 10**6, ranks).time_ps
    assert [cluster.message(500, *pair).time_ps for pair in ((0, 1), (2, 1), (3, 0))] == [1500, 4500, 3000]


def test_measured_calls_replace_the_model():
    """Linear in the number of ranks, and on one node only."""
    measured = {"all_reduce": {2: LinkSpec(1e-9, 1e12), 4: LinkSpec(3e-9, 0.5e12, segments=((1000, 3e-9, 1e12),))}}
    cluster = ClusterSpec(16, DEVICE, LINK, nodes=2, node_link=WIDE, measured=measured)
    found = {p: cluster.collective("all_reduce", 500, tuple(range(p))) for p in (1, 2, 3, 4, 8)}
    assert [cost.time_ps for cost in found.values()] == [0, 1500, 2750, 4000, 8000]
    assert found[3].algorithm == "measured"
    assert cluster.collective("all_reduce", 500, (0, 8)).algorithm != "measured"
    assert cluster.collective("all_gather", 500, (0, 1)).algorithm != "measured"
    with TemporaryDirectory() as folder:
        noted = replace(cluster, calibration={"date": "2026-01-01", "residuals": [0.5, {"p50": 1}]})
        noted.save(path := f"{folder}/c.json")
        assert ClusterSpec.load(path) == noted
    assert "all_reduce of 4" in cluster.table()


def test_equal_places_are_equal_keys():
    """Groups of the same shape are priced alike, so that one of them may stand for all."""
    cluster = describe(32, "ascend910-8")
    assert len({cluster.spread(ranks) for ranks in ((0, 1), (6, 7), (30, 31))}) == 1
    assert len({cluster.spread(ranks) for ranks in ((0, 1), (0, 4), (0, 8))}) == 3


# --- devices ---------------------------------------------------------------------------------------------


def test_curve_between_its_points():
    curve = Curve(((1e3, 0.25), (1e5, 1.0)))
    assert [curve(size) for size in (1, 1e3, 1e5, 1e9)] == [0.25, 0.25, 1.0, 1.0]
    assert curve(1e4) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(0.01, 1)), min_size=1, max_size=5), sizes, sizes)
def test_more_work_takes_no_less_time(points, size_a, size_b):
    points = sorted(dict(points).items())
    rising = [(b[1] / a[1]) <= b[0] / a[0] for a, b in zip(points, points[1:], strict=False)]
    assume(all(rising))
    curve = Curve(tuple(points))
    device = replace(DEVICE, matmul_efficiency={4: curve}, memory_efficiency=curve)
    small, large = sorted((size_a, size_b))
    assert device.time_ps(small, 0, 4, True) <= device.time_ps(large, 0, 4, True) + 1
    assert device.time_ps(0, small, 4) <= device.time_ps(0, large, 4) + 1


def test_products_and_other_ops_have_their_own_peaks():
    device = replace(DEVICE, vector_flops_per_s={4: 1e11}, matmul_efficiency={2: Curve(((1e3, 0.5),))}, launch_s=0.0)
    assert [device.time_ps(10**6, 0, 4, is_product) for is_product in (True, False)] == [2 * 10**6, 10**7]
    assert device.time_ps(10**6, 0, 2, True) == 10**6
    assert replace(device, memory_efficiency=Curve(((1.0, 0.25),))).time_ps(0, 1000, 4) == 4000


def test_straggler_and_shared_cores_slow_a_rank():
    cluster = ClusterSpec(4, DEVICE, LINK, stragglers={2: 1.5}, sharing=Curve(((2, 1.0), (2000, 0.001))))
    assert [round(cluster.device_factor(rank), 9) for rank in range(4)] == [2, 2, 3, 2]


@given(st.sampled_from(["lognormal", "uniform"]), st.integers(0, 2**40), st.integers(0, 1000))
def test_jitter_is_a_function_of_seed_rank_and_number(kind, seed, rank):
    jitter = Jitter(0.1, seed, kind)
    first, again, other = (
        [factor for factor, _ in zip(jitter.factors(each), range(300), strict=False)] for each in (rank, rank, rank + 1)
    )
    assert first == again != other
    assert abs(sorted(first)[150] - 1) < 0.05
    assert kind == "lognormal" or all(0.9 <= factor < 1.1 for factor in first)


# --- rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 24])
def test_hccl_takes_whole_servers_and_rings(size):
    cluster = describe(size, "ascend910-8")
    assert cluster.rules == "hccl"
    for ranks in ((0,), (0, 1), (2, 3), (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8)), (0, 8), (4, 5, 12, 13)):
        if max(ranks) < size:
            cluster.check_group(ranks)
            cluster.collective("all_reduce", 100, ranks)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (3, 4), (0, 1, 4, 5), (0, 1, 2, 3, 4, 5), (0, 1, 11, 12)], ids=str)
def test_hccl_refuses_other_groups(ranks):
    cluster = describe(16, "ascend910-8")
    with refused(ClusterError, ranks=ranks):
        cluster.check_group(ranks)
    with refused(ClusterError, ranks=ranks):
        cluster.collective("all_reduce", 100, ranks)
    replace(cluster, rules="").collective("all_reduce", 100, ranks)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
def test_hccl_refuses_other_clusters(size):
    with refused(ClusterError):
        describe(size, "ascend910-8")


def test_hccl_counts_cards_by_device_id():
    describe(2, "ascend910-8", device_ids=(4, 5))
    with refused(ClusterError):
        describe(2, "ascend910-8", device_ids=(3, 4))


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: Curve(()),
        lambda: Curve(((1.0, 0.5), (1.0, 0.6))),
        lambda: Curve(((1.0, 0.1), (2.0, 0.9))),
        lambda: Curve(((1.0, 1.5),)),
        lambda: Curve(((float("nan"), 0.5),)),
        lambda: Jitter(-0.1),
        lambda: Jitter(0.1, -1),
        lambda: Jitter(0.1, 0, "normal"),
        lambda: LinkSpec(0.0, 1.0, topology="torus"),
        lambda: LinkSpec(0.0, 1.0, ports=0),
        lambda: LinkSpec(0.0, 1.0, oversubscription=0.5),
        lambda: LinkSpec(0.0, 1.0, topology="mesh", oversubscription=2.0),
        lambda: LinkSpec(0.0, 1.0, segments=((0, 0.0, 1.0),)),
        lambda: LinkSpec(0.0, 1.0, segments=((10, 0.0, 1.0), (5, 0.0, 1.0))),
        lambda: LinkSpec(0.0, 1.0, segments=((10, -1.0, 1.0),)),
        lambda: LinkSpec(0.0, 1.0, sources={"latency_s": "guessed"}),
        lambda: LinkSpec(0.0, 1.0, sources={"latency": "assumed"}),
        lambda: ClusterSpec(4, DEVICE, LINK, tiers=(Tier("island", LINK, ((0, 1), (2,))),)),
        lambda: ClusterSpec(4, DEVICE, LINK, nodes=2, node_link=LINK, tiers=(Tier("odd", LINK, ((0, 2), (1, 3))),)),
        lambda: ClusterSpec(4, DEVICE, LINK, nodes=2, node_link=WIDE, tiers=(Tier("rack", LINK, 1),)),
        lambda: ClusterSpec(4, DEVICE, LINK, tiers=(Tier("node", LINK, 2),)),
        lambda: ClusterSpec(4, DEVICE, LINK, device_ids=(0, 1)),
        lambda: ClusterSpec(2, DEVICE, LINK, device_ids=(1, 1)),
        lambda: ClusterSpec(2, DEVICE, LINK, rules="nccl"),
        lambda: ClusterSpec(2, DEVICE, LINK, dtype="float64"),
        lambda: ClusterSpec(2, DEVICE, LINK, dtype="float8"),
        lambda: ClusterSpec(2, replace(DEVICE, op_costs={"Add": OpCost(1e-6)}), LINK, dtype="bfloat16"),
        lambda: ClusterSpec(2, DEVICE, LINK, stragglers={2: 1.5}),
        lambda: ClusterSpec(2, DEVICE, LINK, measured={"all_reduce": {1: LINK}}),
        lambda: ClusterSpec(2, DEVICE, LINK, measured={"all_sum": {2: LINK}}),
        lambda: ClusterSpec(2, DEVICE, LINK, stragglers={0: 0.0}),
        lambda: ClusterSpec(2, DEVICE, LINK, slow_links={(0, 0): 2.0}),
        lambda: ClusterSpec(2, DEVICE, LINK).collective("barrier", 0, (0, 2)),
        lambda: ClusterSpec(2, DEVICE, LINK).with_ranks(3),
        lambda: describe(8, "dgx-h10"),
        lambda: describe(16, "dgx-h100", nodes=[range(9), range(9, 16)]),
    ],
)
def test_bad_descriptions_are_named(call):
    with refused(ClusterError):
        call()


def test_every_pair_of_a_mesh_has_its_own_link():
    mesh = ClusterSpec(3, DEVICE, replace(LINK, topology="mesh"))
    uses = {use.name: use[1:] for use in mesh.links_of((0, 1, 2))}
    assert uses == {f"node: rank {a} port 0 to rank {b}": (1e12, 0.5) for a, b in permutations(range(3), 2)}


# --- in a run --------------------------------------------------------------------------------------------


def work():
    x = sp.Tensor(np.ones((64, 64), np.float32))
    sp.all_reduce((x @ x + x).data)


def times(cluster):
    """Run `work` on a cluster; return (rank, name) -> time of its event."""
    trace = sp.launch(work, world_size=cluster.world_size, device=cluster, transport="inline").trace
    return {(event.rank, event.name): event.sim_end_ps - event.sim_start_ps for event in trace.events}


def test_run_prices_products_stragglers_and_jitter():
    device = replace(DEVICE, vector_flops_per_s={4: 1e9}, matmul_efficiency={4: Curve(((1.0, 0.5),))}, launch_s=0.0)
    cluster = ClusterSpec(2, device, LINK, stragglers={1: 3.0})
    found = times(cluster)
    assert [found[rank, "MatMul"] for rank in (0, 1)] == [2 * 2 * 64**3, 3 * 2 * 2 * 64**3]
    assert [found[rank, "Add"] for rank in (0, 1)] == [64**2 * 1000, 3 * 64**2 * 1000]
    noisy = replace(cluster, jitter=Jitter(0.2, seed=1))
    assert times(noisy) == times(noisy) != found
    factors = next(noisy.jitter.factors(0))
    assert times(noisy)[0, "MatMul"] == round(found[0, "MatMul"] * factors)
    assert times(noisy)[0, "all_reduce"] == found[0, "all_reduce"]


@pytest.mark.parametrize("software", SOFTWARE)
def test_run_prices_the_kernels_of_its_software(software):
    device, x = replace(DEVICE, software=software, launch_s=0.0), np.ones((64, 64), np.float32)

    def norm():
        sp.functions.layer_norm(sp.Tensor(x, requires_grad=True)).sum().backward()

    events = sp.launch(norm, device=ClusterSpec(1, device, LINK), transport="inline").trace.events
    op = sp.ops.LayerNorm()
    for event, needs in zip((event for event in events if "LayerNorm" in event.name), (None, (True,)), strict=True):
        cost = op.cost(op._plan([x]), software, needs)
        assert (event.flops, event.size_bytes) == cost[1:3]
        assert event.sim_end_ps - event.sim_start_ps == picoseconds(device.device_s(cost))


def test_unknown_software_is_refused():
    with refused(ClusterError, key="software"):
        replace(DEVICE, software="fast")


def test_new_group_follows_the_rules_of_hccl():
    def program():
        sp.new_group([0, 1])
        with refused(ClusterError, ranks=(3, 4)):
            sp.new_group([3, 4])
        return sp.new_group([4, 5]).size

    assert list(sp.launch(program, world_size=8, device="ascend910-8", transport="inline")) == [2] * 8


@pytest.mark.parametrize("op", [sp.ops.MatMul(), sp.ops.Linear(), sp.ops.Einsum("ij,jk->ik"), sp.ops.Add()], ids=repr)
def test_products_are_known_by_their_op(op):
    assert op.is_matrix_product == (not isinstance(op, sp.ops.Add))
    assert not sp.ops.Einsum("ij,ij->ij").is_matrix_product

"""Links and clusters: numbers have few significant bits, so that doubling and halving are exact."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from simparallel.machine.cluster import DEFAULT_DEVICE, PRESETS, ClusterSpec, DeviceSpec, LinkSpec, Segment, Tier
from simparallel.testing.strategies.values import Draw


@st.composite
def links(draw: Draw, topologies: Sequence[str] = ("switch", "mesh", "ring")) -> LinkSpec:
    """Draw links of any latency, bandwidth, topology and number of ports, with up to two segments by size.

    Args:
        topologies: names to choose from.
    """
    number = st.integers(1, 64)
    starts = sorted(draw(st.sets(st.integers(1, 10**6), max_size=2)))
    segments = tuple(Segment(start, draw(number) * 2.0**-30, draw(number) * 2.0**30) for start in starts)
    topology = draw(st.sampled_from(tuple(topologies)))
    return LinkSpec(
        draw(number) * 2.0**-30,
        draw(number) * 2.0**30,
        topology=topology,
        ports=draw(st.none() | st.integers(1, 4)),
        oversubscription=draw(st.sampled_from([1.0, 2.0, 4.0])) if topology == "switch" else 1.0,
        segments=segments,
    )


@st.composite
def clusters(
    draw: Draw, device: DeviceSpec | None = None, *, max_units: int = 3,
    topologies: Sequence[str] = ("switch", "mesh", "ring"),
) -> ClusterSpec:  # fmt: skip
    """Draw clusters: islands in nodes in racks, each level of 1 to `max_units` units, and slow links.

    Args:
        draw: supplied by Hypothesis.
        device: the devices; by default those of a run that names none.
        max_units: maximum number of islands of a node, nodes of a rack, racks, and devices of an island.
        topologies: of the links.

    Example:
        >>> from hypothesis import given
        >>> from simparallel.testing.strategies import clusters
        >>> @given(clusters(max_units=2))
        ... def test_a_step_takes_time(cluster):
        ...     assert sp.dry_run(step, world_size=cluster.world_size, cluster=cluster).step_time_s > 0
    """
    islands, nodes, racks, size = (draw(st.integers(1, max_units)) for _ in range(4))
    world_size = islands * nodes * racks * size
    any_links = links(topologies)
    tiers = (
        Tier("island", draw(any_links), islands * nodes * racks),
        Tier("rack", draw(any_links), racks, True),
    )  # fmt: skip
    ranks = st.integers(0, world_size - 1)
    pairs = st.lists(ranks, min_size=2, max_size=2, unique=True).map(tuple) if world_size > 1 else st.nothing()
    slow = draw(st.dictionaries(ranks | pairs, st.sampled_from([1.0, 2.0, 4.0]), max_size=2))
    return ClusterSpec(
        world_size, PRESETS[DEFAULT_DEVICE].device if device is None else device, draw(any_links), nodes=nodes * racks,
        node_link=draw(any_links), tiers=tiers, slow_links=slow,
    )  # fmt: skip

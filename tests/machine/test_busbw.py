"""Expected bus bandwidth, and host files."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.errors import ClusterError, InputError
from simparallel.machine.busbw import CONVENTION, bus_factor, expected_busbw
from simparallel.machine.cluster import DeviceSpec, LinkSpec, describe
from simparallel.machine.hostfile import read_host_file

DEVICE = DeviceSpec("plain", {4: 1e12}, 1e12, 10**9, 0.0)
FREE = LinkSpec(0.0, 1e10)  # without latency


@given(st.sampled_from(sorted(CONVENTION)), st.integers(2, 16), st.integers(1, 10**6))
def test_bus_bandwidth_is_that_of_the_links(op, p, chunk):
    """Whatever the number of ranks: nccl-tests' reason for the factors."""
    (row,) = expected_busbw(describe(p, DEVICE, FREE), op, [chunk * p])
    assert row.bus_bandwidth == pytest.approx(1e10, rel=1e-6)
    assert row.algorithm_bandwidth == pytest.approx(1e10 / bus_factor(op, p), rel=1e-6)


def test_factors_are_those_of_nccl_tests():
    found = {op: bus_factor(op, 8) for op in CONVENTION}
    assert found == {
        "all_reduce": 1.75, "broadcast": 1, "reduce": 1,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 0.875),
    }  # fmt: skip
    with refused(InputError):
        bus_factor("barrier", 8)


def test_one_rank_has_no_bandwidth():
    (row,) = expected_busbw(describe(2), "all_reduce", [1000], [1])
    assert (row.time_ps, row.bus_bandwidth) == (0, 0.0)


# --- host files ------------------------------------------------------------------------------------------


def test_host_file_gives_the_nodes(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# mine\nnode1 slots=2 max_slots=8\n\n  node2:3  # a comment\nnode3\nnode1\nfe80::1 slots=1\n")
    assert read_host_file(path) == ((0, 1, 6), (2, 3, 4), (5,), (7,))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a slots=0", 1), ("a\nb slots=-1", 2), ("a slots=x", 1), ("a slots = 8", 1), (":8", 1),
        ("a 8", 1), ("a slots=" + "9" * 99, 1), ("a slots=1048577", 1), ("a slots=1048576\nb", 2), ("", None),
        ("# a", None), ("\x00" * 600000, None),
    ],
)  # fmt: skip
def test_bad_host_files_are_named(tmp_path, text, line):
    path = tmp_path / "hosts"
    path.write_text(text)
    with refused(ClusterError, path=str(path), line=line):
        read_host_file(path)


def test_missing_host_file_is_named(tmp_path):
    with refused(ClusterError, line=None):
        read_host_file(tmp_path / "none")

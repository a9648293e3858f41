"""Traces for other tools: CSV, torch.profiler's files in HolisticTraceAnalysis, Chakra's execution traces."""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from refusals import refused
from test_critical_path import exchange
from test_trace import small_trace, traces

import simparallel as sp
from simparallel.clock.event import Event
from simparallel.errors import InputError
from simparallel.trace import Trace, chakra
from simparallel.trace.export import FORMATS

no_fixture_check = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
LISTS = ("group", "live_bytes", "step_ps")
TEXTS = ("stream", "name", "kind", "algorithm", "layer")


@no_fixture_check
@given(traces())
def test_csv_has_every_event(tmp_path: Path, trace: Trace) -> None:
    (path,) = trace.export(tmp_path / "t.csv", "csv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [
        Event(**{
            name: text if name in TEXTS else tuple(map(int, text.split())) if name in LISTS else int(text)
            for name, text in row.items()
        })
        for row in rows
    ] == trace.events  # fmt: skip


def test_chrome_is_what_load_reads(tmp_path: Path) -> None:
    trace = small_trace()
    assert Trace.load(*trace.export(tmp_path / "t.json", "chrome")) == trace


def test_unknown_format(tmp_path: Path) -> None:
    with refused(InputError, format="perfetto"):
        small_trace().export(tmp_path / "t", "perfetto")
    assert os.listdir(tmp_path) == []
    assert FORMATS == ("chrome", "kineto", "chakra", "csv")


def values(node: Any) -> dict[str, Any]:
    """Return the attributes of a node of Chakra."""
    found = {}
    for attribute in node.attr:
        which = attribute.WhichOneof("value")
        value = getattr(attribute, which)
        found[attribute.name] = list(value.values) if which == "int64_list" else value
    return found


def read_chakra(path: Path) -> tuple[Any, list[Any]]:
    """Return the metadata and the nodes of a file."""
    from google.protobuf import proto

    found = chakra.messages()
    with open(path, "rb") as file:
        head = proto.parse_length_prefixed(found["GlobalMetadata"], file)
        return head, list(iter(lambda: proto.parse_length_prefixed(found["Node"], file), None))


def test_chakra_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chakra.messages.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "google.protobuf", None)
    with refused(InputError):
        small_trace().export(tmp_path / "t", "chakra")


def test_chakra_has_every_event(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    trace = sp.launch(exchange, world_size=2, transport="inline").trace
    paths = trace.export(tmp_path / "et", "chakra")
    assert [path.name for path in paths] == ["trace.0.et", "trace.1.et"]
    for rank, path in enumerate(paths):
        head, nodes = read_chakra(path)
        events = sorted(trace.select(ranks=rank).events, key=lambda e: (e.sim_start_ps, e.sim_end_ps))
        assert head.version == "0.0.4"
        assert [node.name for node in nodes] == [event.name for event in events]
        assert [values(node)["duration_ps"] for node in nodes] == [e.sim_end_ps - e.sim_start_ps for e in events]
        kinds = {"all_reduce": 7, "send": 5, "recv": 6}
        assert [node.type for node in nodes] == [kinds.get(event.name, 4) for event in events]
        for node, event in zip(nodes, events, strict=True):
            assert all(0 < before < node.id for before in node.data_deps)
            assert all(events[i - 1].sim_end_ps <= event.sim_start_ps for i in node.data_deps if event.name != "recv")
            if event.name == "all_reduce":
                assert (values(node)["comm_type"], values(node)["comm_size"]) == (0, event.size_bytes)
                assert values(node)["comm_group"] == [0, 1]
            if event.kind == "p2p":
                assert (values(node)["comm_src"], values(node)["comm_dst"]) == event.group


def replayed(nodes: list[Any]) -> int:
    """Return the end of the last node if each starts when those that it depends on have ended."""
    ends: dict[int, int] = {}
    for node in nodes:
        ends[node.id] = max((ends[i] for i in node.data_deps), default=0) + values(node)["duration_ps"]
    return max(ends.values())


def overlapped() -> None:
    layers = sp.nn.Sequential(*[sp.nn.Linear(64, 64) for _ in range(4)])
    model = sp.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.01)
    x = sp.Tensor(np.ones((8, 64), np.float32))
    for _ in range(2):
        model(x).sum().backward()


def test_chakra_replays_to_the_makespan(tmp_path: Path) -> None:
    """Of alike ranks each one's own dependencies give its time: nobody waits for others."""
    pytest.importorskip("google.protobuf")
    trace = sp.launch(overlapped, world_size=2, transport="inline").trace
    for path in trace.export(tmp_path / "et", "chakra"):
        assert replayed(read_chakra(path)[1]) == round(trace.makespan_s * 1e12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_holistic_trace_analysis_sees_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap, compute, exposed communication and idle time of every rank."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    analysis = pytest.importorskip("hta.trace_analysis")
    trace = sp.launch(overlapped, world_size=2, transport="inline").trace
    # Four steps: one is no iteration for the tool, and it cannot read fewer than 128 events of a rank.
    events = [
        e._replace(step=step, sim_start_ps=e.sim_start_ps + step * 10**9, sim_end_ps=e.sim_end_ps + step * 10**9)
        for e in trace.events
        for step in range(4)
    ]
    trace = Trace(events, trace.cluster)
    trace.export(tmp_path, "kineto")
    found = analysis.TraceAnalysis(trace_dir=str(tmp_path), include_last_profiler_step=True)
    overlap = found.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    times = found.get_temporal_breakdown(visualize=False).set_index("rank")
    waits = found.get_idle_time_breakdown(ranks=[0, 1], visualize=False)[0]
    for row in trace.summary():
        rank, hidden_s = row["rank"], row["communication_time_s"] - row["exposed_communication_s"]
        assert overlap[rank] == pytest.approx(100 * hidden_s / row["communication_time_s"], abs=0.01)
        assert overlap[rank] > 1
        assert times["compute_time(us)"][rank] == pytest.approx(row["compute_time_s"] * 1e6)
        assert times["non_compute_time(us)"][rank] == pytest.approx(row["exposed_communication_s"] * 1e6)
        assert times["idle_time(us)"][rank] == pytest.approx(row["idle_time_s"] * 1e6)
        # From the first to the last event of the compute stream.
        work = [event for event in trace.select(ranks=rank).events if event.stream == "compute"]
        span_ps = work[-1].sim_end_ps - work[0].sim_start_ps
        idle = waits[(waits["rank"] == rank) & (waits["stream"] == 7)]["idle_time"].sum()
        assert idle == pytest.approx(span_ps / 1e6 - row["compute_time_s"] * 1e6, abs=0.1)

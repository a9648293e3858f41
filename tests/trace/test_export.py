"""Traces for other tools: CSV, torch.profiler's files in HolisticTraceAnalysis, Chakra's execution traces."""

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from refusals import refused
from test_critical_path import exchange
from test_trace import small_trace, traces

import simparallel as sp
from simparallel.clock.event import Event
from simparallel.errors import InputError
from simparallel.trace import Trace
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


def wire_of(data: bytes) -> list[tuple[int, Any]]:
    """Return (number, value) of the fields of a message of Protocol Buffers: integers, and the bytes of all else."""
    found, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        value: Any
        value, at = varint(data, at)
        if key & 7:
            value, at = data[at : at + value], at + value
        found.append((key >> 3, value))
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a place, of 64 bits with a sign, and the place behind it."""
    stop = next(i for i in range(at, len(data)) if data[i] < 128) + 1
    value = sum((byte & 127) << 7 * i for i, byte in enumerate(data[at:stop]))
    return value - (value >> 63 << 64), stop


def varints(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found


class Node(NamedTuple):
    id: int
    name: str
    type: int
    data_deps: list[int]
    values: dict[str, Any]


def values(attributes: Iterable[bytes]) -> dict[str, Any]:
    """Return the attributes of a message."""
    found = {}
    for (_, name), (number, value) in map(wire_of, attributes):
        kinds = {9: int, 10: lambda value: varints(dict(wire_of(value)).get(1, b"")), 27: bool, 29: bytes.decode}
        found[name.decode()] = kinds[number](value)
    return found


def read_chakra(path: Path) -> tuple[Any, list[Any]]:
    """Return the version, and the nodes of a file."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        size, at = varint(data, at)
        messages.append(wire_of(data[at : at + size]))
        at += size
    nodes = []
    for fields in messages[1:]:
        one = dict(fields)
        own = values(value for number, value in fields if number == 10)
        nodes.append(Node(one[1], one[2].decode(), one[3], varints(one[5]), own))
    return messages[0][0][1].decode(), nodes


# Message -> (field, number, type, is repeated), of `et_def.proto`; a type is one of FieldDescriptorProto, or a message.
SCHEMA: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "Int64List": (("values", 1, "INT64", True),),
    "AttributeProto": (
        ("name", 1, "STRING", False), ("int64_val", 9, "INT64", False), ("int64_list", 10, "Int64List", False),
        ("bool_val", 27, "BOOL", False), ("string_val", 29, "STRING", False),
    ),
    "GlobalMetadata": (("version", 1, "STRING", False), ("attr", 2, "AttributeProto", True)),
    "Node": (
        ("id", 1, "UINT64", False), ("name", 2, "STRING", False), ("type", 3, "INT32", False),
        ("data_deps", 5, "UINT64", True), ("start_time_micros", 6, "UINT64", False),
        ("duration_micros", 7, "UINT64", False), ("attr", 10, "AttributeProto", True),
    ),
}  # fmt: skip


def test_protobuf_reads_chakra(tmp_path: Path) -> None:
    """The library of Protocol Buffers finds the same fields."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="chakra.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in SCHEMA.items():
        described = file.message_type.add(name=message)
        for name, number, kind, is_repeated in fields:
            field = described.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL
            field.type = kinds.TYPE_MESSAGE if kind in SCHEMA else getattr(kinds, f"TYPE_{kind}")
            if kind in SCHEMA:
                field.type_name = f".ChakraProtoMsg.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    head, node = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    )
    (path,) = small_trace().export(tmp_path / "t", "chakra")
    version, nodes = read_chakra(path)
    with open(path, "rb") as opened:
        assert proto.parse_length_prefixed(head, opened).version == version
        found = list(iter(lambda: proto.parse_length_prefixed(node, opened), None))
    assert [(n.id, n.name, n.type, list(n.data_deps)) for n in found] == [n[:4] for n in nodes]
    for one, own in zip(found, nodes, strict=True):
        read = {
            a.name: a.string_val or list(a.int64_list.values) if type(own.values[a.name]) in (str, list)
            else a.bool_val if type(own.values[a.name]) is bool else a.int64_val
            for a in one.attr
        }  # fmt: skip
        assert read == own.values


def test_chakra_has_every_event(tmp_path: Path) -> None:
    trace = sp.launch(exchange, world_size=2, transport="inline").trace
    paths = trace.export(tmp_path / "et", "chakra")
    assert [path.name for path in paths] == ["trace.0.et", "trace.1.et"]
    for rank, path in enumerate(paths):
        version, nodes = read_chakra(path)
        events = sorted(trace.select(ranks=rank).events, key=lambda e: (e.sim_start_ps, e.sim_end_ps))
        assert version == "0.0.4"
        assert [node.name for node in nodes] == [event.name for event in events]
        assert [node.values["duration_ps"] for node in nodes] == [e.sim_end_ps - e.sim_start_ps for e in events]
        kinds = {"all_reduce": 7, "send": 5, "recv": 6}
        assert [node.type for node in nodes] == [kinds.get(event.name, 4) for event in events]
        for node, event in zip(nodes, events, strict=True):
            assert all(0 < before < node.id for before in node.data_deps)
            assert all(events[i - 1].sim_end_ps <= event.sim_start_ps for i in node.data_deps if event.name != "recv")
            if event.name == "all_reduce":
                assert (node.values["comm_type"], node.values["comm_size"]) == (0, event.size_bytes)
                assert node.values["comm_group"] == [0, 1]
            if event.kind == "p2p":
                assert (node.values["comm_src"], node.values["comm_dst"]) == event.group


def replayed(nodes: list[Any]) -> int:
    """Return the end of the last node if each starts when those that it depends on have ended."""
    ends: dict[int, int] = {}
    for node in nodes:
        ends[node.id] = max((ends[i] for i in node.data_deps), default=0) + node.values["duration_ps"]
    return max(ends.values())


def overlapped() -> None:
    layers = sp.nn.Sequential(*[sp.nn.Linear(64, 64) for _ in range(4)])
    model = sp.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.01)
    x = sp.Tensor(np.ones((8, 64), np.float32))
    for _ in range(2):
        model(x).sum().backward()


def test_chakra_replays_to_the_makespan(tmp_path: Path) -> None:
    """Of alike ranks each one's own dependencies give its time: nobody waits for others."""
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

"""Traces as Chrome JSON: an exact round trip, fit for its viewers; other files are refused."""

import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from refusals import refused
from test_trace import small_trace, traces

from simparallel.clock.event import lane_names
from simparallel.errors import InputError
from simparallel.machine.cluster import DeviceSpec, LinkSpec, describe
from simparallel.trace import Trace, chrome

no_fixture_check = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@no_fixture_check
@given(traces(), st.sampled_from(["sim", "wall"]))
def test_round_trip_is_exact(tmp_path: Path, trace: Trace, clock: str) -> None:
    path = tmp_path / "new" / "trace.json"
    trace.save(path, clock=clock)
    loaded = Trace.load(path)
    assert loaded == trace
    first = path.read_bytes()
    loaded.save(path, clock=clock)
    assert path.read_bytes() == first
    assert os.listdir(path.parent) == ["trace.json"]


def test_round_trip_of_own_hardware(tmp_path: Path) -> None:
    device = DeviceSpec("mine", {2: 2e12, 4: 1e12}, 1e11, 10**9, 0.0, notes="slow")
    trace = Trace([], describe(3, device, LinkSpec(1e-6, 1e9)), name="own")
    trace.save(tmp_path / "t.json")
    assert Trace.load(tmp_path / "t.json") == trace


@no_fixture_check
@given(traces(), st.sampled_from(["sim", "wall"]))
def test_json_suits_its_viewers(tmp_path: Path, trace: Trace, clock: str) -> None:
    trace.save(tmp_path / "t.json", clock=clock)
    data = json.loads((tmp_path / "t.json").read_text())
    rows = data["traceEvents"]
    slices = [row for row in rows if row["ph"] == "X"]
    assert len(slices) == len(trace)
    assert data["otherData"]["clock"] == clock
    assert data["otherData"]["cluster"]["world_size"] == trace.cluster.world_size

    times = [row["ts"] for row in rows if "ts" in row]
    assert times == sorted(times)
    assert all(time >= 0 for time in times)

    # A viewer truncates to ns. Even then no two slices of a thread may overlap.
    spans = defaultdict(list)
    for row in slices:
        start = int(row["ts"] * 1000)
        spans[row["pid"], row["tid"]].append((start, start + int(row["dur"] * 1000)))
        args = row["args"]
        if clock == "sim":
            assert spans[row["pid"], row["tid"]][-1] == (args["sim_start_ps"] // 1000, args["sim_end_ps"] // 1000)
        else:
            assert row["dur"] == pytest.approx((args["wall_end_ns"] - args["wall_start_ns"]) / 1000)
    for thread in spans.values():
        assert all(before[1] <= after[0] for before, after in pairwise(thread))

    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert set(names) == set(spans)
    for rank in trace.ranks:
        called = {name for (of, _, _), name in lane_names(trace.events).items() if of == rank}
        assert called <= {name for (pid, _), name in names.items() if pid == rank}
        if clock == "sim":  # one thread for each stream
            assert len(trace.streams(rank)) == sum(pid == rank for pid, _ in names)
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert processes == {rank: f"rank {rank}" for rank in trace.ranks}


@no_fixture_check
@given(traces(), st.sampled_from(["sim", "wall"]))
def test_arrows_link_the_ranks_of_a_collective(tmp_path: Path, trace: Trace, clock: str) -> None:
    trace.save(tmp_path / "t.json", clock=clock)
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for before, row in pairwise(rows):
        if row["ph"] in "stf":
            assert before["ph"] == "X"  # it is bound to the slice before it
            assert all(before[key] == row[key] for key in ("pid", "tid", "ts", "name"))
            assert row["bp"] == "e"
            arrows[row["id"]].append(row | before["args"])
    for arrow in arrows.values():
        assert [row["ph"] for row in arrow] == ["s", *"t" * (len(arrow) - 2), "f"]
        assert len({(*row["group"], row["seq"]) for row in arrow}) == 1
        assert len({row["pid"] for row in arrow}) == len(arrow)
    calls = defaultdict(set)
    for event in trace.events:
        if event.seq >= 0:
            calls[event.kind, event.group, event.seq].add(event.rank)
    assert sum(map(len, arrows.values())) == sum(len(ranks) for ranks in calls.values() if len(ranks) > 1)


def test_restarted_numbers_get_their_own_arrows(tmp_path: Path) -> None:
    first = small_trace()
    later = [e._replace(sim_start_ps=e.sim_start_ps + 10**6, sim_end_ps=e.sim_end_ps + 10**6) for e in first.events]
    Trace(first.events + later, first.cluster).save(tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sorted((row["id"], row["ph"]) for row in rows if "id" in row) == [(0, "f"), (0, "s"), (1, "f"), (1, "s")]


def test_unknown_clock(tmp_path: Path) -> None:
    with refused(InputError):
        small_trace().save(tmp_path / "t.json", clock="sundial")
    assert os.listdir(tmp_path) == []


def edited(**changes: Any) -> str:
    """Return a valid trace's text with its first slice, or its top level, changed."""
    trace = small_trace()
    data = json.loads(chrome.dumps(trace.events, trace.cluster))
    row = next(row for row in data["traceEvents"] if row["ph"] == "X")
    for key, value in changes.items():
        place = row["args"] if key in row["args"] else row if key in row else data["otherData"]
        place[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"traceEvents": 3}',
        '{"traceEvents": []}',
        '{"traceEvents": [], "otherData": {"format": "simparallel-trace-0"}}',
        edited(name=3),
        edited(step="one"),
        edited(seq=True),
        edited(sim_start_ps=1.5),
        edited(group=7),
        edited(group=["a"]),
        edited(args={}),
        edited(args=None),
        edited(sim_end_ps=-1),
        edited(pid=9),
        edited(cluster=None),
        edited(cluster={"world_size": 2}),
        '{"traceEvents": [1], "otherData": {"format": "simparallel-trace-1", "name": ""}}',
        '{"traceEvents": [], "otherData": {"format": "simparallel-trace-1"}}',
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with refused(InputError) as caught:
        Trace.load(path)
    assert caught.value.facts["path"] == str(path)
    assert len(str(caught.value)) < 1000


def test_missing_and_binary_files_are_refused_by_name(tmp_path: Path) -> None:
    with refused(InputError):
        Trace.load(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with refused(InputError):
        Trace.load(tmp_path / "binary.json")


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        small_trace().save(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.json"]

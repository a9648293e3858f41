"""The HTML page of a trace without a browser: its data is the trace's, whatever its texts are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from test_trace import small_trace, traces

import simparallel as sp
from simparallel.clock.event import lane_names
from simparallel.machine.cluster import describe
from simparallel.trace import Trace

HOSTILE = ("</script><script>alert(1)</script>", "<!--", "]]>", "\u2028", "{{data}}", "{{script}}", '"\\', "", "\x00")


def data_of(page: str) -> dict[str, Any]:
    """Return the data of a page, found as a browser finds it: up to the first end of a script element."""
    return json.loads(page.split('id="data">', 1)[1].split("</script", 1)[0])


def unpacked(column: Any, count: int) -> list[int]:
    if isinstance(column, dict):
        return [column["of"][place] for place in column["at"]]
    return column if isinstance(column, list) else [column] * count


def starts(differences: list[int]) -> list[int]:
    return [sum(differences[: i + 1]) for i in range(len(differences))]


@given(traces())
def test_page_has_every_event(trace: Trace) -> None:
    page = trace.html()
    assert trace.html() == page
    data = data_of(page)
    count = data["count"]
    assert count == len(trace)
    columns = {name: unpacked(column, count) for name, column in data["columns"].items()}
    lanes = list(lane_names(trace.events))
    sim_0 = min((event.sim_start_ps for event in trace.events), default=0)
    wall_0 = min((event.wall_start_ns for event in trace.events), default=0)
    shown = list(
        zip(
            [lanes[row] for row in columns["row"]],
            [data["names"][name] for name in columns["name"]],
            [data["kinds"][kind]["id"] for kind in columns["kind"]],
            [tuple(data["groups"][group]) for group in columns["group"]],
            [time + sim_0 for time in starts(columns["sim_start"])],
            [time + wall_0 for time in starts(columns["wall_start"])],
            *(columns[name] for name in ("sim_span", "wall_span", "step", "seq", "flops", "size_bytes", "sent_bytes")),
            strict=True,
        )
    )
    assert sorted(shown) == sorted(
        (
            (e.rank, e.device, e.stream), e.name, e.kind, e.group, e.sim_start_ps, e.wall_start_ns,
            e.sim_end_ps - e.sim_start_ps, e.wall_end_ns - e.wall_start_ns, e.step, e.seq, e.flops, e.size_bytes,
            e.sent_bytes,
        )
        for e in trace.events
    )  # fmt: skip
    order = [(row, sim) for row, sim in zip(columns["row"], starts(columns["sim_start"]), strict=True)]
    assert order == sorted(order)
    assert [shown[i][1] for i in data["path"]] == [event.name for event in trace.critical_path()]


@given(st.lists(st.sampled_from(HOSTILE) | st.text(), min_size=3, max_size=3))
def test_hostile_texts_stay_data(texts: list[str]) -> None:
    name, layer, title = texts
    trace = small_trace()
    trace = Trace([e._replace(name=name, layer=layer) for e in trace.events], trace.cluster, name=title)
    page, plain = trace.html(), small_trace().html()
    assert data_of(page)["names"] == [name]
    assert data_of(page)["layers"] == list(dict.fromkeys(["", layer]))
    # As many elements as in the page of a harmless trace.
    for tag in ("<script", "</script", "<!--", "<title", "</title"):
        assert page.count(tag) == plain.count(tag)


def test_page_needs_no_network() -> None:
    page = small_trace().html()
    assert "default-src 'none'" in page
    # Addresses would be requests; the only one is that of an empty icon.
    assert re.findall(r'(?:src|href)="([^"]*)"|url\(|@import|fetch\(|https?://', page) == ["data:,"]


@pytest.mark.parametrize(
    "events", [[], small_trace().events[:1], [small_trace().events[0]._replace(sim_end_ps=0)]], ids=len
)
def test_few_events_are_shown(events: list[Any], tmp_path: Path) -> None:
    """None, one, and one that takes no time."""
    trace = Trace(events, describe(2))
    path = trace.html(tmp_path / "new" / "page.html")
    assert path.read_text() == trace.html()
    assert data_of(path.read_text())["count"] == len(events)


def record_memory() -> None:
    x = sp.Tensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward()


def test_memory_is_on_the_page() -> None:
    trace = sp.launch(record_memory, world_size=2, transport="inline", record="full").trace
    memory = data_of(trace.html())["memory"]
    assert [track["rank"] for track in memory["tracks"]] == [0, 1]
    assert "activations" in memory["categories"]
    for track in memory["tracks"]:
        live = [unpacked(column, len(track["events"])) for column in track["live"]]
        noted = [e.live_bytes for e in trace.select(ranks=track["rank"]).events if e.live_bytes]
        assert [sum(values) for values in zip(*live, strict=True)] == [sum(values) for values in noted]


@given(traces())
def test_shares_of_a_rank_add_up(trace: Trace) -> None:
    for clock, rest in (("sim", "idle"), ("wall", "other")):
        shares = data_of(trace.html())["shares"][clock]
        assert [share["rank"] for share in shares] == trace.ranks
        for share in shares:
            assert list(share["parts"]) == ["compute", "exposed", rest]
            assert all(part >= 0 for part in share["parts"].values())
            whole = sum(share["parts"].values())
            # Step numbers at random overlap: the time of all steps is then shorter than that of the events.
            assert whole == pytest.approx(1) if clock == "sim" and trace.makespan_s else whole >= 0.999


def test_wall_shares_are_those_of_wall_times() -> None:
    """Of 10 ns the rank computes 4, and communicates 6, of which 2 beside computing; then 5 ns of a step not kept."""
    event = small_trace().events[0]
    times = {"compute": (0, 4), "comm world": (2, 8)}
    kept = [
        event._replace(stream=stream, step=step, wall_start_ns=at + start, wall_end_ns=at + end)
        for step, at in ((0, 0), (2, 15))
        for stream, (start, end) in times.items()
    ]
    kept += [event._replace(step=step, wall_start_ns=at, wall_end_ns=at) for step, at in ((0, 10), (2, 25))]
    (share,) = data_of(Trace(kept, describe(2)).html())["shares"]["wall"]
    assert share["parts"] == pytest.approx({"compute": 0.4, "exposed": 0.4, "other": 0.2})


def test_notebook_shows_short_traces() -> None:
    """The timeline in a frame of its own; of a long trace a sentence."""
    trace = small_trace()
    shown = trace._repr_html_()
    assert shown.count("<iframe") == 1
    assert "allow-same-origin" not in shown
    many = Trace([trace.events[0]._replace(wall_end_ns=10 + i) for i in range(5001)], trace.cluster)
    assert "<iframe" not in many._repr_html_()
    assert ".html(path)" in many._repr_html_()
    assert "<iframe" not in Trace([], describe(1))._repr_html_()

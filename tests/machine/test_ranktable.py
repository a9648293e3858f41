"""Rank tables: published ones are read; every broken rule is reported with its line, and nothing else is raised."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from mutations import mutated
from refusals import refused

from simparallel.cli import main
from simparallel.errors import ClusterError, InputError, RankTableError
from simparallel.machine.ranktable import (
    FORMS,
    RankDevice,
    RankTable,
    RankTableWarning,
    Server,
    format_rank_table,
    load,
    make_rank_table,
    merge_rank_tables,
    parse_rank_table,
    read_rank_table,
)
from simparallel.machine.ranktable.jsontext import MAX_BYTES
from simparallel.runtime.joined.identity import check_servers

# As published with MindSpore 1.7: masked addresses, all numbers as texts.
PUBLISHED = """{
  "version": "1.0",
  "server_count": "2",
  "server_list": [
    {
      "server_id": "10.*.*.*",
      "device": [
        {"device_id": "0","device_ip": "192.1.27.6","rank_id": "0"},
        {"device_id": "1","device_ip": "192.2.27.6","rank_id": "1"}],
      "host_nic_ip": "reserve"
    },
    {
      "server_id": "10.*.*.*",
      "device": [
        {"device_id": "0","device_ip": "192.1.27.8","rank_id": "2"},
        {"device_id": "1","device_ip": "192.2.27.8","rank_id": "3"}],
      "host_nic_ip": "reserve"
    }
  ],
  "status": "completed"
}"""
# As published with MindSpore 0.2: one comma too many, so not JSON.
PUBLISHED_LAB = """{
    "board_id": "0x0000",
    "chip_info": "910",
    "deploy_mode": "lab",
    "group_count": "1",
    "group_list": [
        {
            "device_num": "2",
            "server_num": "1",
            "group_name": "",
            "instance_count": "2",
            "instance_list": [
                {"devices": [{"device_id": "0","device_ip": "192.1.27.6"}],"rank_id": "0","server_id": "10.*.*.*"},
                {"devices": [{"device_id": "1","device_ip": "192.2.27.6"}],"rank_id": "1","server_id": "10.*.*.*"},
                ]
        }
    ],
    "para_plane_nic_location": "device",
    "para_plane_nic_name": ["eth0","eth1"],
    "para_plane_nic_num": "2",
    "status": "completed"
}
"""
GOOD = {form: format_rank_table(make_rank_table(2, 2, ["10.0.0.1", "10.0.0.2"]), form) for form in FORMS}


def flaws(table: RankTable) -> tuple[str, ...]:
    """Return the warnings but that of HCCL, which takes servers of eight cards: the tables here are smaller."""
    return tuple(warning for warning in table.warnings if "HCCL" not in warning)


# --- good tables ----------------------------------------------------------------------------------------


def test_published_tables_are_read() -> None:
    table = parse_rank_table(PUBLISHED, "a.json")
    assert (table.form, table.world_size, table.nodes) == ("1.0", 4, ((0, 1), (2, 3)))
    assert table.device_ids == (0, 1, 0, 1)
    assert [re.match(r"a\.json:\d+", warning)[0] for warning in flaws(table)] == ["a.json:6", "a.json:13"]

    lab = parse_rank_table(PUBLISHED_LAB, "b.json")
    assert (lab.form, lab.nodes) == ("lab", ((0, 1),))
    assert lab.warnings == (
        "b.json:14: a comma before ] is not JSON; left out",
        "b.json:13: group_list[0].instance_list[0].server_id: 10.*.*.* is masked",
    )
    for text in (PUBLISHED, PUBLISHED_LAB):
        with refused(RankTableError):
            parse_rank_table(text, strict=True)


@st.composite
def tables(draw: st.DrawFn) -> RankTable:
    """Draw servers of uneven sizes, ranks in any order, device numbers with gaps."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    addresses = draw(st.permutations([f"10.1.{i}.{j}" for i in range(3) for j in range(1, 9)]))
    servers = []
    for number, size in enumerate(sizes):
        ids = draw(st.lists(st.integers(0, 15), min_size=size, max_size=size, unique=True))
        devices = [RankDevice(i, addresses.pop(), next(ranks)) for i in ids]
        servers.append(Server(f"server-{number}", tuple(sorted(devices, key=lambda d: d.rank_id))))
    return RankTable(tuple(servers))


@given(tables(), st.permutations(FORMS))
def test_written_tables_are_read_again(table: RankTable, forms: list[str]) -> None:
    for form in forms:
        again = parse_rank_table(format_rank_table(table, form), strict=False)
        assert (again.servers, again.form) == (table.servers, form)
        assert sorted(rank for node in again.nodes for rank in node) == list(range(table.world_size))
        json.loads(format_rank_table(table, form))


@given(st.integers(1, 5), st.integers(1, 9))
def test_made_tables_have_no_flaw(num_servers: int, devices: int) -> None:
    table = make_rank_table(num_servers, devices)
    assert table.nodes == tuple(tuple(range(s * devices, (s + 1) * devices)) for s in range(num_servers))
    for form in FORMS:
        warned = parse_rank_table(format_rank_table(table, form)).warnings
        assert all("HCCL: a " in warning for warning in warned)
        assert len(warned) == (devices not in ((1, 2, 4, 8) if num_servers == 1 else (8,)))


@pytest.mark.parametrize(
    ("cards", "rule"),
    [
        ([[0, 1, 2, 3]], ""), ([[4, 7]], ""), ([[5]], ""), ([list(range(8))] * 2, ""),
        ([[0, 1, 2]], "1, 2, 4 or 8 cards"), ([[3, 4]], "two rings"), ([[0, 1, 6, 7]], "two rings"),
        ([[0, 1, 2, 3]] * 2, "several servers needs all 8"), ([list(range(8)), [0]], "several servers needs all 8"),
    ],
)  # fmt: skip
def test_rules_of_hccl(cards: list[list[int]], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that HCCL would refuse is read with one warning, and refused with --strict."""
    table, ranks = make_rank_table(len(cards)), iter(range(99))
    servers = tuple(
        replace(server, devices=tuple(replace(server.devices[card], rank_id=next(ranks)) for card in own))
        for server, own in zip(table.servers, cards, strict=True)
    )
    (tmp_path / "t.json").write_text(format_rank_table(replace(table, servers=servers)))
    warned = load(tmp_path / "t.json").warnings
    assert len(warned) == bool(rule)
    assert all(rule in warning for warning in warned)
    assert main.main(["rank-table", "check", "--strict", str(tmp_path / "t.json")]) == (2 if rule else 0)
    assert rule in capsys.readouterr().err


def test_largest_table_can_be_read_again() -> None:
    table = make_rank_table(512, 8)
    for form in FORMS:
        assert parse_rank_table(format_rank_table(table, form)).servers == table.servers
    with refused(InputError):
        make_rank_table(513, 8)


def test_form_lab_refuses_equal_addresses() -> None:
    """Form "lab" refuses servers that it could not distinguish."""
    with refused(InputError):
        format_rank_table(make_rank_table(2, 2, ["a", "a"]), "lab")
    masked = make_rank_table(2, 2, ["10.*.*.*"] * 2)
    assert parse_rank_table(format_rank_table(masked, "lab")).nodes == masked.nodes


def test_numbers_need_no_quotes() -> None:
    text = re.sub(r'"(\d+)"', r"\1", GOOD["lab"])
    assert parse_rank_table(text).servers == parse_rank_table(GOOD["lab"]).servers


TOLERATED = {
    "byte order mark": ("\ufeff" + GOOD["1.0"], 1),
    "comment": (GOOD["1.0"].replace('"1.0",', '"1.0", // old'), 2),
    "comma before }": (GOOD["1.0"].replace('"completed"', '"completed",'), 22),
    "unknown key": (GOOD["1.0"].replace('"status"', '"more": {"a": [1]}, "status"'), 22),
    "other version": (GOOD["1.0"].replace('"1.0"', '"1.2"'), 2),
    "no device_ip": (GOOD["1.0"].replace('"device_ip": "192.1.27.6", ', ""), 8),
    "empty device_ip": (GOOD["1.0"].replace('"192.1.27.6"', '""'), 8),
    "one address twice": (GOOD["1.0"].replace("10.0.0.2", "10.0.0.1"), 14),
    "other number of nics": (GOOD["lab"].replace('"para_plane_nic_num": "2"', '"para_plane_nic_num": 1'), 22),
}


@pytest.mark.parametrize("what", TOLERATED)
def test_small_flaws_are_warnings_with_a_line(what: str) -> None:
    text, line = TOLERATED[what]
    table = parse_rank_table(text, "t.json")
    assert table.servers
    assert [warning.split(": ")[0] for warning in flaws(table)] == [f"t.json:{line}"]
    with refused(RankTableError) as caught:
        parse_rank_table(text, "t.json", strict=True)
    assert caught.value.line == line


def test_warnings_are_few_and_appear_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("// x\n" * 1000 + GOOD["1.0"])
    with pytest.warns(RankTableWarning) as caught:
        read_rank_table(path)
    assert len(caught) == 1
    assert "and 981 more warnings" in str(caught[0].message)
    path.write_text(format_rank_table(make_rank_table(1, 2), "lab"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_rank_table(path)


# --- bad tables -----------------------------------------------------------------------------------------


def cases() -> dict[str, tuple[str, int]]:
    """Return name -> (text, line of the error)."""
    found: dict[str, tuple[str, int]] = {}

    def change(form: str, name: str, old: str, new: str, line: int) -> None:
        assert old in GOOD[form], (name, old)
        found[f"{form}: {name}"] = (GOOD[form].replace(old, new, 1), line)

    one, lab = "1.0", "lab"
    # not JSON
    found |= {
        "empty": ("", 1),
        "spaces": (" \n\n ", 3),
        "a list": ("[1]", 1),
        "a number": ("3", 1),
        "a text": ('"x"', 1),
        "null": ("null", 1),
        "nothing in it": ("{}", 1),
        "two values": (GOOD[one] + "{}", 24),
        "cut off": (GOOD[one][:300], 12),
        "deep": ("[" * 200_000, 1),
        "deep inside": ('{"version": ' + "[" * 70 + "]" * 70 + "}", 1),
        "NaN": (GOOD[one].replace('"2"', "NaN"), 3),
        "Infinity": (GOOD[one].replace('"2"', "-Infinity"), 3),
        "single quotes": (GOOD[one].replace('"', "'"), 2),
        "open text": (GOOD[one].replace('"1.0"', '"1.0'), 2),
        "text over lines": (GOOD[one].replace("1.0", "1.\n0"), 2),
        "bad escape": (GOOD[one].replace('"1.0"', r'"\x"'), 2),
        "half a character": (GOOD[one].replace('"10.0.0.1"', r'"\ud800"'), 6),
        "control character": (GOOD[one].replace("1.0", "1\x01"), 2),
        "long number": (GOOD[one].replace('"2"', "1" * 5000), 3),
        "leading zero": (GOOD[one].replace('"2"', "02"), 3),
        "plus": (GOOD[one].replace('"2"', "+2"), 3),
        "block comment": ("/* x */" + GOOD[one], 1),
        "two commas": (GOOD[one].replace('"1.0",', '"1.0",,'), 2),
        "comma first": ("{," + GOOD[one][1:], 1),
        "no colon": (GOOD[one].replace('"version":', '"version"'), 2),
        "no comma": (GOOD[one].replace('"1.0",', '"1.0"'), 3),
        "wrong bracket": (GOOD[one].replace("  ],\n  \"status", "  },\n  \"status"), 21),
        "key is a number": (GOOD[one].replace('"version"', "1"), 2),
        "key twice": (GOOD[one].replace('"server_count": "2"', '"version": "1.0"'), 3),
        "word": (GOOD[one].replace('"2"', "None"), 3),
    }  # fmt: skip
    # form 1.0
    change(one, "both forms", '"status"', '"group_list": [], "status"', 1)
    change(one, "no status", ',\n  "status": "completed"', "", 1)
    change(one, "not completed", "completed", "initializing", 22)
    change(one, "status is a number", '"completed"', "1", 22)
    change(one, "no version", '"version": "1.0",', "", 1)
    change(one, "no server_count", '"server_count": "2",', "", 1)
    change(one, "server_count", '"server_count": "2"', '"server_count": "3"', 3)
    change(one, "server_count is a word", '"server_count": "2"', '"server_count": "two"', 3)
    change(one, "server_count is true", '"server_count": "2"', '"server_count": true', 3)
    change(one, "server_count is a fraction", '"server_count": "2"', '"server_count": 2.0', 3)
    change(one, "server_count is empty", '"server_count": "2"', '"server_count": ""', 3)
    change(one, "server_count in other digits", '"server_count": "2"', '"server_count": "٢"', 3)
    found["1.0: server_list is an object"] = (
        '{"version": "1.0",\n"server_count": 1,\n"server_list": {},\n"status": "completed"}', 3,
    )  # fmt: skip
    found["1.0: server_list is empty"] = (
        '{"version": "1.0",\n"server_count": 0,\n"server_list": [],\n"status": "completed"}', 3,
    )  # fmt: skip
    found["1.0: a server is a string"] = (
        '{"version": "1.0",\n"server_count": 1,\n"server_list": [\n"a"],\n"status": "completed"}',
        4,
    )  # fmt: skip
    change(one, "no server_id", '"server_id": "10.0.0.1",', "", 5)
    change(one, "empty server_id", '"10.0.0.1"', '""', 6)
    change(one, "server_id is a number", '"10.0.0.1"', "10", 6)
    change(one, "server_id moves the cursor", '"10.0.0.1"', r'"\u001b[2J"', 6)
    change(one, "long server_id", '"10.0.0.1"', f'"{"x" * 300}"', 6)
    change(one, "no device list", '"device": [', '"devices": [', 5)
    change(one, "host_nic_ip is a list", '"reserve"', "[]", 11)
    change(one, "no device_id", '"device_id": "0", ', "", 8)
    change(one, "device_id twice", '"device_id": "1"', '"device_id": "0"', 9)
    change(one, "negative device_id", '"device_id": "1"', '"device_id": -1', 9)
    change(one, "device_id with a space", '"device_id": "1"', '"device_id": " 1"', 9)
    change(one, "device_ip", "192.1.27.6", "192.1.27.256", 8)
    change(one, "device_ip is a name", "192.1.27.6", "localhost", 8)
    change(one, "device_ip is null", '"192.1.27.6"', "null", 8)
    change(one, "device_ip twice", "192.2.27.6", "192.1.27.6", 9)
    change(one, "no rank_id", ', "rank_id": "3"', "", 17)
    change(one, "rank_id twice", '"rank_id": "3"', '"rank_id": "0"', 17)
    change(one, "gap in ranks", '"rank_id": "1"', '"rank_id": "4"', 9)
    change(one, "huge rank_id", '"rank_id": "3"', '"rank_id": "70000"', 17)
    change(one, "very huge rank_id", '"rank_id": "3"', '"rank_id": 12345678901', 17)
    change(one, "rank_id is a list", '"rank_id": "3"', '"rank_id": ["3"]', 17)
    # form lab
    change(lab, "no group_count", '"group_count": "1",', "", 1)
    change(lab, "group_count", '"group_count": "1"', '"group_count": "2"', 5)
    change(lab, "device_num", '"device_num": "4"', '"device_num": "8"', 8)
    change(lab, "no device_num", '"device_num": "4",', "", 7)
    change(lab, "server_num", '"server_num": "2"', '"server_num": "1"', 9)
    change(lab, "instance_count", '"instance_count": "4"', '"instance_count": 5', 11)
    change(lab, "no instance_list", '"instance_list"', '"instances"', 7)
    change(lab, "no rank_id", '"rank_id": "0", ', "", 13)
    change(lab, "rank_id twice", '"rank_id": "1"', '"rank_id": "0"', 14)
    change(lab, "no server_id", ', "server_id": "10.0.0.1"', "", 13)
    change(lab, "no devices", '"devices": [{"device_id": "0", "device_ip": "192.1.27.6"}]', '"devices": []', 13)
    change(lab, "two devices", '"devices": [', '"devices": [{"device_id": "5", "device_ip": "192.1.1.1"}, ', 13)
    change(lab, "device_id twice", '"device_id": "1"', '"device_id": "0"', 14)
    change(lab, "device_ip", "192.2.27.6", "192.2.27", 14)
    change(lab, "nic num is a word", '"para_plane_nic_num": "2"', '"para_plane_nic_num": "x"', 22)
    change(lab, "nic names are a string", '["eth0", "eth1"]', '"eth0"', 21)
    change(lab, "not completed", "completed", "", 23)
    text = GOOD[lab].replace('"group_count": "1"', '"group_count": "2"')
    found["lab: two groups"] = (text.replace('    }\n  ],\n  "para', '    }, {}\n  ],\n  "para'), 18)
    return found


BAD = cases()


def test_there_are_many_bad_tables() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize("what", BAD)
def test_bad_tables_are_reported_with_path_and_line(what: str, tmp_path: Path) -> None:
    text, line = BAD[what]
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8")
    with refused(RankTableError) as caught:
        read_rank_table(path)
    error = caught.value
    assert (error.path, error.line) == (str(path), line), str(error)
    assert str(error).startswith(f"{path}:{line}: ")
    assert str(error).isprintable()


@pytest.mark.parametrize("data", [b" " * (MAX_BYTES + 1), b"\xff\xfe{\x00}\x00", b'{"a": "\xe4"}', b"\x00"])
def test_undecodable_bytes(data: bytes) -> None:
    with refused(RankTableError):
        parse_rank_table(data)


def test_unreadable_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (MAX_BYTES + 1))
    for path in (tmp_path, tmp_path / "large", tmp_path / "none", tmp_path / "pipe", "/dev/zero", "x" * 5000, "a\0b"):
        with refused(RankTableError) as caught:
            read_rank_table(path)
        assert caught.value.line is None


# --- mutations ------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    st.sampled_from([*GOOD.values(), PUBLISHED, PUBLISHED_LAB]), st.randoms(use_true_random=False), st.integers(1, 6)
)
def test_mutated_tables_are_read_or_refused(text: str, rng: random.Random, count: int) -> None:
    data = mutated(text.encode(), rng, count)
    line, table = 1, None
    try:
        table = parse_rank_table(data, "t.json")
    except RankTableError as error:
        line = error.line
    assert 1 <= line <= data.count(b"\n") + 1
    if table is not None:
        assert sorted(itertools.chain(*table.nodes)) == list(range(table.world_size))


@given(st.sampled_from(sorted(GOOD)), st.data())
def test_replaced_values_are_read_or_refused(form: str, data: st.DataObject) -> None:
    """Any JSON value in place of another raises at most a RankTableError."""
    root = json.loads(GOOD[form])
    node, key = root, data.draw(st.sampled_from(sorted(root)))
    while isinstance(node[key], dict | list) and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("1"),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        )
    )
    try:
        table = parse_rank_table(json.dumps(root))
    except RankTableError:
        return
    assert table.world_size == 4


@pytest.mark.parametrize("unit", ["[1,", '{"a":[', "//\n", '"\\u0041', "{", "0 ", "\n"])
def test_large_files_stay_small_in_memory(unit: str) -> None:
    data = (unit * (MAX_BYTES // len(unit))).encode()
    tracemalloc.start()
    with refused(RankTableError):
        parse_rank_table(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


# --- the command, and clusters --------------------------------------------------------------------------


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["rank-table", "make", "--servers", "2", "--devices", "8", "--out", "t.json"]) == 0
    assert main.main(["rank-table", "convert", "t.json", "--out", "lab.json"]) == 0
    assert main.main(["rank-table", "check", "t.json", "lab.json"]) == 0
    out, err = capsys.readouterr()
    assert "lab.json: form lab, servers: 2, devices: 16" in out
    assert "server 127.0.0.2: ranks 8 … 15" in out
    assert err == ""
    assert main.main(["rank-table", "convert", "lab.json"]) == 0
    assert capsys.readouterr().out == Path("t.json").read_text()
    assert main.main(["rank-table", "make", "--form", "lab", "--server-id", "10.*.*.*"]) == 0
    Path("masked.json").write_text(capsys.readouterr().out)
    assert main.main(["rank-table", "check", "masked.json"]) == 0
    assert "masked.json:13: " in capsys.readouterr().err
    assert main.main(["rank-table", "check", "--strict", "masked.json"]) == 2
    assert main.main(["rank-table", "make", "--servers", "0"]) == 2
    assert main.main(["rank-table", "make", "--out", "t.json/x"]) == 2
    assert main.main(["run", "--rank-table", "none.json", "x.py"]) == 2


def test_cluster_of_another_size_is_refused() -> None:
    table = make_rank_table(2, 8)
    assert table.nodes_for(16) == table.nodes_for(16, 2) == table.nodes
    for world_size, nodes in ((8, 1), (16, 4)):
        with refused(ClusterError):
            table.nodes_for(world_size, nodes)


# --- merging -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4))
def test_merged_tables_keep_their_servers_in_order(sizes: list[tuple[int, int]]) -> None:
    tables = []
    for number, (servers, devices) in enumerate(sizes):
        made = make_rank_table(servers, devices, [f"10.{number}.0.{i + 1}" for i in range(servers)])
        renamed = [
            replace(
                server,
                devices=tuple(
                    replace(d, device_ip=d.device_ip.replace("192.", f"{number + 1}.")) for d in server.devices
                ),
            )
            for server in made.servers
        ]
        tables.append(replace(made, servers=tuple(renamed)))
    merged = merge_rank_tables(tables)
    assert [s.server_id for s in merged.servers] == [s.server_id for t in tables for s in t.servers]
    assert [rank for node in merged.nodes for rank in node] == list(range(sum(a * b for a, b in sizes)))
    assert merged.device_ids == tuple(i for table in tables for i in table.device_ids)
    assert parse_rank_table(format_rank_table(merged)).servers == merged.servers


def test_tables_with_a_server_in_common_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, address in (("a.json", "10.0.0.1"), ("b.json", "10.0.0.1"), ("c.json", "10.0.0.2")):
        table = make_rank_table(1, 2, [address])
        text = format_rank_table(table).replace("192.", "191.") if name == "b.json" else format_rank_table(table)
        (tmp_path / name).write_text(text)
    a, b, c = (str(tmp_path / name) for name in ("a.json", "b.json", "c.json"))
    for files, told in (((a, b), "server 10.0.0.1 is in"), ((a, c), "device_ip 192"), ((a, a), "is in")):
        assert main.main(["rank-table", "merge", *files]) == 2
        assert told in capsys.readouterr().err
    assert main.main(["rank-table", "merge", b, c, "--out", str(tmp_path / "d.json")]) == 0
    assert load(tmp_path / "d.json").nodes == ((0, 1), (2, 3))
    with refused(InputError):
        merge_rank_tables([])
    with refused(InputError):
        merge_rank_tables([make_rank_table(1, 4096), make_rank_table(1, 1, ["x"])])


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4))
def test_made_tables_merge(sizes: list[tuple[int, int]]) -> None:
    """Tables made apart, with the same addresses, become one without a flaw but HCCL's, in which ranks can meet."""
    merged = merge_rank_tables([make_rank_table(servers, devices) for servers, devices in sizes])
    again = parse_rank_table(format_rank_table(merged))
    assert all("HCCL" in warning for warning in again.warnings)
    assert [len(node) for node in again.nodes] == [devices for servers, devices in sizes for _ in range(servers)]
    assert [rank for node in again.nodes for rank in node] == list(range(again.world_size))
    check_servers(again)

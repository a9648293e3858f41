"""Processes started one by one: their ranks, how they find each other, how they end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from leaks import no_leaks  # noqa: F401 (a fixture for all tests here)
from refusals import refused

from simparallel.errors import LaunchError
from simparallel.machine.ranktable import RankTable, format_rank_table, load, make_rank_table
from simparallel.runtime import preflight
from simparallel.runtime.joined import rendezvous, sockets
from simparallel.runtime.joined.identity import RankIdentity, identify, is_here
from simparallel.runtime.joined.rendezvous import Meeting, meet

LAB = """{
    "board_id": "0x0000", "chip_info": "910", "deploy_mode": "lab", "group_count": "1",
    "group_list": [{"device_num": "2", "server_num": "1", "group_name": "", "instance_count": "2", "instance_list": [
        {"devices": [{"device_id": "0","device_ip": "192.1.27.6"}],"rank_id": "0","server_id": "10.*.*.*"},
        {"devices": [{"device_id": "1","device_ip": "192.2.27.6"}],"rank_id": "1","server_id": "10.*.*.*"},
        ]}],
    "para_plane_nic_location": "device", "para_plane_nic_name": ["eth0","eth1"], "para_plane_nic_num": "2",
    "status": "completed"
}"""
RUN = """
export RANK_TABLE_FILE=./rank_table.json
export RANK_SIZE=2
for((i=0;i<$RANK_SIZE;i++))
do
    rm -rf device$i
    mkdir device$i
    cp ./training.py ./device$i
    cd ./device$i
    export DEVICE_ID=$i
    echo "start training for device $i"
    env > env$i.log
    pytest -s -v -p no:cacheprovider ./training.py > train.log$i 2>&1 &
    cd ../
done
wait
"""
TRAINING = """
import os
import simparallel as sp
sp.init()

def test_train():
    x = sp.Tensor([float(sp.get_rank() + 1)])
    sp.all_reduce(x)
    print("loss is", x.item(), sp.get_rank(), os.environ["RANK_ID"], os.environ["DEVICE_ID"])
"""


def write_table(folder: Path, servers: int, devices: int, address: str = "127.0.0.{}") -> str:
    ids = [address.format(number + 1) for number in range(servers)]
    path = folder / "table.json"
    path.write_text(format_rank_table(make_rank_table(servers, devices, ids)))
    return str(path)


# --- identification of ranks --------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_table_gives_every_rank(servers: int, devices: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, servers * devices - 1))
    with tempfile.TemporaryDirectory() as folder:
        table = {"RANK_TABLE_FILE": write_table(Path(folder), servers, devices), "RANK_SIZE": str(servers * devices)}
        place = {"DEVICE_ID": str(rank % devices), "SERVER_ID": str(rank // devices), "DEVICE_NUM": str(devices)}
        for variables in ({"RANK_ID": str(rank)}, place, {"RANK_ID": str(rank), **place}):
            found = identify({**table, **variables})
            assert (found.rank, found.world_size, found.node) == (rank, servers * devices, rank // devices)
            assert found.device_id == rank % devices
            other = identify({**table, "RANK_ID": "0"})
            assert found.key == other.key
            again = found.command_of(0)
            assert ("RANK_ID=0" in again) == ("RANK_ID" in variables)
            assert ("DEVICE_ID=0" in again) == ("DEVICE_ID" in variables)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, (3, 8, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, (5, 8, 1)),
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, (1, 2, 0)),
        ({"RANK": "1", "RANK_ID": "1", "RANK_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, (1, 2, 0)),
    ],
)  # fmt: skip
def test_variables_give_the_rank(variables: dict[str, str], found: tuple[int, int, int]) -> None:
    identity = identify(variables)
    assert (identity.rank, identity.world_size, identity.node) == found


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "4"}, {"RANK_SIZE": "4"},
        {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "4"},
        {"RANK": "1", "RANK_ID": "2", "WORLD_SIZE": "4"},
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "203.0.113.9"},
        {"RANK": "1", "WORLD_SIZE": "4", "SIMPARALLEL_RANK_PROCESS": "1 1 4  "},
        {"T": "2x2", "DEVICE_ID": "1"}, {"T": "2x2", "DEVICE_ID": "2"},
        {"T": "2x2", "SERVER_ID": "2", "DEVICE_ID": "1"}, {"T": "2x2"},
        {"T": "2x2", "RANK_ID": "1", "DEVICE_ID": "0"},
        {"T": "2x2", "RANK_ID": "1", "RANK_SIZE": "8"},
        {"T": "2x2 8.8.8.{}", "RANK_ID": "1"},
    ],
)  # fmt: skip
def test_variables_without_a_rank_are_refused(variables: dict[str, str], tmp_path: Path) -> None:
    if "T" in variables:
        size, _, address = variables.pop("T").partition(" ")
        servers, _, devices = size.partition("x")
        path = write_table(tmp_path, int(servers), int(devices), address or "127.0.0.{}")
        variables["RANK_TABLE_FILE"] = path
    with refused(LaunchError):
        identify(variables)


def test_jobs_have_different_keys(tmp_path: Path) -> None:
    plain = {"RANK": "0", "WORLD_SIZE": "2"}
    more: list[dict[str, str]] = [
        {}, {"MASTER_PORT": "1"}, {"SIMPARALLEL_JOB_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"},
        {"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"RANK_TABLE_FILE": write_table(tmp_path, 1, 2)},
    ]  # fmt: skip
    assert len({identify({**plain, **one}).key for one in more}) == len(more)
    assert identify({**plain, "MASTER_ADDR": "127.0.0.1"}).key == identify({**plain, "MASTER_ADDR": "localhost"}).key


def test_addresses_of_this_machine() -> None:
    assert all(map(is_here, ("localhost", "127.0.0.1", "127.0.0.2", socket.gethostname(), "0.0.0.0")))
    assert not any(map(is_here, ("203.0.113.9", "8.8.8.8", "no such name")))


def test_placeholders_count_as_this_machine(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(LAB)
    found = identify({"RANK_TABLE_FILE": str(tmp_path / "lab.json"), "DEVICE_ID": "1"})
    assert (found.rank, found.world_size) == (1, 2)
    assert any("comma" in note for note in found.notes)
    for address in ("192.0.2.{}", "198.51.100.{}", "node-{}"):
        path = write_table(tmp_path, 2, 1, address)
        assert identify({"RANK_TABLE_FILE": path, "RANK_ID": "1"}).node == 1


# --- rendezvous: threads in place of processes ----------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    tmp_path_factory.getbasetemp()  # of all tests, in the usual place
    with tempfile.TemporaryDirectory(prefix="of-a-test-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert list(Path(folder).glob("simparallel-*")) == []  # nothing is left over


def rank_of(rank: int, size: int, **more: Any) -> RankIdentity:
    return replace(RankIdentity(rank, size, 0, None, 1, given={"RANK": str(rank)}), **more)


def met(identities: list[RankIdentity], limit_s: float = 5.0) -> list[Any]:
    """Return the result of `meet` for each rank, or its error."""
    found: list[Any] = [None] * len(identities)

    def one(number: int) -> None:
        try:
            found[number] = meet(identities[number], limit_s, lambda text: None)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(identities))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def give_back(meetings: list[Any]) -> None:
    for meeting in meetings:
        if isinstance(meeting, Meeting):
            sockets.close_all(meeting.lives.values())
            meeting.segment.close_fd()


@pytest.mark.parametrize("size", [2, 3, 9])
def test_ranks_meet_in_one_memory(size: int) -> None:
    nodes = [rank % 2 for rank in range(size)]
    found = met([rank_of(rank, size, node=nodes[rank], device_id=7) for rank in range(size)])
    for rank, meeting in enumerate(found):
        assert meeting.nodes == [list(range(0, size, 2)), list(range(1, size, 2))]
        assert meeting.device_ids == [7] * size
        assert set(meeting.lives) == set(range(size)) - {rank}
        meeting.segment.words[meeting.segment.map.sleeping(rank)] = rank + 1
    control = found[0].segment.map
    for meeting in found:
        assert [meeting.segment.words[control.sleeping(rank)] for rank in range(size)] == list(range(1, size + 1))
        assert {meeting.segment.words[control.pid(rank)] for rank in range(size)} == {os.getpid()}
    give_back(found)


def test_jobs_at_one_time_do_not_meet() -> None:
    found = met([rank_of(rank, 2, job=(job,)) for job in "ab" for rank in range(2)])
    first = [meeting.segment.map.sleeping(0) for meeting in found][0]
    found[0].segment.words[first] = 5
    assert [meeting.segment.words[first] for meeting in found] == [5, 5, 0, 0]
    give_back(found)


def test_missing_ranks_are_named() -> None:
    found = met([rank_of(rank, 5) for rank in (0, 2, 4)], 0.2)
    for error in found:
        assert isinstance(error, LaunchError)
        assert error.facts["missing"] == [1, 3]
        assert "RANK=1 " in str(error)


def test_ranks_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before the first one reserves memory for all."""
    monkeypatch.setattr(preflight, "available_memory", lambda: 8 << 30)
    with refused(LaunchError, available_bytes=8 << 30):
        meet(rank_of(0, 999_999_999), 0.0, lambda text: None)


@pytest.mark.parametrize(
    ("stray", "told"),
    [
        (rank_of(0, 2), "process .* already"), (rank_of(1, 3), "rank 1 of 3, and .* job of 2 ranks"),
    ],
)  # fmt: skip
def test_strays_are_refused_and_the_job_continues(stray: RankIdentity, told: str) -> None:
    found: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: found.update(first=met([rank_of(0, 2)])[0]))
    refused: list[str] = []
    thread.start()
    while not isinstance(found.get("stray"), LaunchError):  # until the first rank leads
        if not any(Path(tempfile.gettempdir()).glob("*/*.sock")):
            continue
        found["stray"] = met([stray])[0]
    found["second"] = met([rank_of(1, 2)])[0]
    thread.join()
    assert not refused
    assert re.search(f"was refused.*{told}", str(found["stray"]))
    assert isinstance(found["first"], Meeting)
    assert isinstance(found["second"], Meeting)
    give_back(list(found.values()))


def leading(action: Callable[[socket.socket], None]) -> Any:
    """Return the result of a rank whose leader waits for it, while `action` talks to that leader first."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(met([rank_of(0, 2)], 3.0)))
    thread.start()
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(next(Path(tempfile.gettempdir()).glob("*/*.sock"))))
                action(stranger)
            break
        except (StopIteration, ConnectionError):
            continue
    found.extend(met([rank_of(1, 2)]))
    thread.join()
    return found


@pytest.mark.parametrize("words", [b"{}", b"[]", b"{", b"\xff" * 9, b'{"rank": 1}', b"[" * 5000, b""])
def test_garbage_does_no_harm(words: bytes) -> None:
    found = leading(lambda stranger: words and stranger.send(words))
    assert all(isinstance(meeting, Meeting) for meeting in found)
    give_back(found)


@pytest.mark.parametrize("wrong", ["fields", "layout", "life"])
def test_other_versions_are_refused(wrong: str) -> None:
    hello = asdict(rendezvous.Hello(rendezvous.ControlMap(1).num_words, 1, 2, 0, None))
    answers: list[Any] = []

    def say(stranger: socket.socket) -> None:
        changed = {"fields": {"another": "x"}, "layout": {"layout": 1}}.get(wrong, {})
        life = sockets.own_life()
        sockets.send(stranger, {**hello, **changed}, [] if wrong == "life" else [life])
        os.close(life)
        answers.append(sockets.receive(stranger)[0])

    found = leading(say)
    assert list(answers[0]) == ["refused"]
    assert all(isinstance(meeting, Meeting) for meeting in found)
    give_back(found)


def test_rank_that_ends_during_joining_is_named() -> None:
    hello = rendezvous.Hello(rendezvous.ControlMap(1).num_words, 1, 4, 0, None)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(met([rank_of(0, 4), rank_of(2, 4)], 1.0)))
    thread.start()
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                one.connect(str(next(Path(tempfile.gettempdir()).glob("*/*.sock"))))
                life = sockets.own_life()
                sockets.send(one, asdict(hello), [life])
                os.close(life)
                assert sockets.receive(one)[0] in ({"leader": 0}, {"leader": 2})
            break
        except (StopIteration, ConnectionError):
            continue
    thread.join()
    assert all(isinstance(error, LaunchError) for error in found)
    culprits = [error.facts.get("rank") for error in found]
    assert 1 in culprits
    # A rank that came only later leads its own meeting, and names the ranks that did not arrive there.
    assert all(rank == 1 or 1 in error.facts["missing"] for rank, error in zip(culprits, found, strict=True))


def test_files_of_a_dead_job_are_removed() -> None:
    folder = Path(tempfile.gettempdir(), f"simparallel-{os.getuid()}")
    folder.mkdir(mode=0o700)
    key = rank_of(0, 2).key
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(folder / f"{key}.sock"))
    (folder / f"{key}.lock").touch()
    found = met([rank_of(0, 2), rank_of(1, 2)])
    assert all(isinstance(meeting, Meeting) for meeting in found)
    give_back(found)


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_shared_folder_is_refused(what: str, tmp_path: Path) -> None:
    folder = Path(tempfile.gettempdir(), f"simparallel-{os.getuid()}")
    if what == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif what == "a link":
        folder.symlink_to(tmp_path)
    else:
        folder.touch()
    with pytest.raises(LaunchError, match=str(folder)):
        meet(rank_of(0, 2), 1.0, print)
    folder.rmdir() if what == "open to others" else folder.unlink()


# --- processes -----------------------------------------------------------------------------------------------

CASES = {
    "good": (0, ""), "before": (1, "rank 2 did not arrive"),
    "kill": (1, r"rank 2 \(pid \d+\) (was killed by SIGKILL|ended)"),
    "raise": (1, "rank 2 failed with ZeroDivisionError: on purpose"),
    "exit3": (1, r"rank 2 returned from its function.*sys\.exit\(3\)"),
    "_exit": (1, r"rank 2 \(pid \d+\) (exited with code 5|ended)"),
    "loop": (1, "stopped in its own code, outside of collectives: rank 2 failed with ValueError"),
    "sleep": (1, "stopped in its own code, outside of collectives: rank 2 failed with ValueError"),
    "interrupt": (1, "rank 2 failed with KeyboardInterrupt"),
    "after": (1, r"its wait for the end of the other ranks: rank 2 \(pid \d+\) (was killed by SIGKILL|ended)"),
}  # fmt: skip
OWN_CODES = {
    "good": 0,
    "before": -9,
    "kill": -9,
    "raise": 1,
    "exit3": 3,
    "_exit": 5,
    "loop": 1,
    "sleep": 1,
    "after": -9,
}


def run_cases(folder: Path, size: int, *cases: str, **environment: str) -> dict[str, Any]:
    program = Path(__file__).parents[1] / "joining.py"
    done = subprocess.run(
        [sys.executable, program, folder, str(size), *cases], capture_output=True, text=True, timeout=120,
        env={**os.environ, "TMPDIR": tempfile.gettempdir(), "PYTHONUNBUFFERED": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.process
@pytest.mark.parametrize("without", ["", "pidfd,memfd,futex"])
def test_every_end_is_reported_to_other_ranks(without: str, tmp_path: Path) -> None:
    """And leaves nothing behind, see the fixtures: `ROUNDS=100 pytest …` for more of them."""
    cases = list(CASES) if not without else ["good", "kill", "_exit", "raise"]
    cases *= int(os.environ.get("ROUNDS", "1"))
    for name, told in run_cases(tmp_path, 3, *cases, SIMPARALLEL_DISABLE=without).items():
        case = name.split()[0]
        code, text = CASES[case]
        assert told["codes"][:2] == [code, code], (case, (tmp_path / f"{case}.0").read_text())
        if case in OWN_CODES:
            assert told["codes"][2] == OWN_CODES[case], case
        for rank in (0, 1):
            written = (tmp_path / f"{case}.{rank}").read_text()
            assert re.search(text, written), (case, written)
            if case == "good":
                assert f"trace [{rank}] all_reduce\n" in written
            if case != "before":
                assert f"sum 3.0 {rank} 3 {rank}\n" in written
        if case in ("kill", "_exit", "after") and not without:
            assert "killed by" in written or "exited with" in written
            assert "all_reduce(sum) float32 (1,) at" in written  # the last op of the dead, with its number
            assert "#1" in written


@pytest.mark.process
def test_unreceived_messages_are_an_error(tmp_path: Path) -> None:
    told = run_cases(tmp_path, 2, "unreceived")["unreceived 0"]
    assert told["codes"] == [0, 1]
    assert "rank 1 ended without receiving 1 message" in (tmp_path / "unreceived.1").read_text()


@pytest.mark.process
def test_eight_pytests_as_a_tutorial_starts_them(tmp_path: Path) -> None:
    """MindSpore's run.sh with the table that it prints, comma and all; here with two devices."""
    (tmp_path / "rank_table.json").write_text(LAB)
    (tmp_path / "training.py").write_text(TRAINING)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        ["bash", "-c", RUN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, "PATH": path, "TMPDIR": tempfile.gettempdir()},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        written = (tmp_path / f"device{rank}" / f"train.log{rank}").read_text()
        assert f"loss is 3.0 {rank} {rank} {rank}\n" in written
        assert "1 passed" in written
        assert ("taken from the folder above" in written) == (rank == 0)


WITHOUT_INIT = """
import sys
import simparallel as sp
from simparallel.compat import mindspore as ms
from simparallel.compat.mindspore.communication import get_group_size, get_rank
from simparallel.clock.recorder import current_recorder
ms.set_context(device_target="Ascend")
ms.runtime.set_memory(max_size="2MB")
if sys.argv[1] == "numbers":
    print(get_rank(), get_group_size())
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
network = ms.nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
model = ms.Model(network, optimizer=ms.nn.SGD(network.trainable_params(), 0.5))
x = sp.Tensor([float(sp.get_rank() + 1)])
sp.all_reduce(x)
trace = sp.Trace.of_this_rank()
print("sum", x.item(), sp.get_rank(), trace.cluster.name, current_recorder().memory.limit_bytes)
"""


@pytest.mark.process
def test_mindspore_ranks_join_without_init(tmp_path: Path) -> None:
    """A published program calls `init` only as a script, but pytest imports it: `get_rank` and `Model` join, too."""
    environment = {**os.environ, "RANK_TABLE_FILE": write_table(tmp_path, 1, 2), "RANK_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_INIT, first],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "TMPDIR": tempfile.gettempdir(), "DEVICE_ID": str(rank)},
        )
        for rank, first in enumerate(("numbers", "model"))
    ]
    for rank, process in enumerate(ranks):
        written = process.communicate(timeout=60)[0]
        assert f"sum 3.0 {rank} 2 x ascend910 2000000" in written, written
        assert "trains alone" not in written


@pytest.mark.process
def test_command_for_each_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import simparallel as sp\nfrom simparallel.clock.recorder import current_recorder\n"
        "sp.init()\nx = sp.Tensor([float(sp.get_rank() + 1)])\nsp.all_reduce(x)\n"
        "places = x.to('sim:1').device, sp.get_node_rank(), sp.get_local_rank(), sp.get_num_nodes()\n"
        "print('sum', x.item(), *places, current_recorder().cluster.dtype)\n"
        "if sp.get_rank() == 1: raise ValueError('on node 1')\nwhile True: pass\n"
    )
    words = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--devices-per-rank=2",
        "--dtype=bfloat16",
        "--master_port=1234",
        "train.py",
    ]
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "simparallel", "torchrun", f"--node_rank={node}", *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": tempfile.gettempdir(), "MPLBACKEND": "Agg"},
        )
        for node in (1, 0)
    ]
    written = [command.communicate(timeout=120)[0] for command in commands][::-1]
    assert [command.returncode for command in commands] == [1, 1], written
    for node, text in enumerate(written):
        assert f"[rank {node}] sum 3.0 sim:1 {node} 0 2 bfloat16\n" in text
        assert (tmp_path / f"runs/train/node{node}/worker_{node}.log").exists()
        assert (tmp_path / f"runs/train/node{node}/trace.json").exists()
        assert (tmp_path / f"runs/train/node{node}/error_rank{node}.json").exists()
    assert "rank 1 of 2 failed: ValueError: on node 1" in written[1]
    assert "rank 1 failed with ValueError: on node 1" in written[0]


def test_tables_of_both_forms_have_one_key(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(LAB)
    table: RankTable = load(tmp_path / "lab.json")
    (tmp_path / "new.json").write_text(format_rank_table(table, "1.0"))
    keys = {identify({"RANK_TABLE_FILE": str(tmp_path / n), "RANK_ID": "0"}).key for n in ("lab.json", "new.json")}
    assert len(keys) == 1

"""`benchmarks collectives`: exchanges, the peers' protocol, peers left out, tables, JSON, figure.

A script, `FAKE_MPIEXEC`, plays the peers, so nothing is installed. No timing is asserted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from benchmarks import adasum, collectives, environments
from benchmarks.__main__ import main, parser
from benchmarks.collectives import MEMCPY, OURS, SHARED, Memcpy, Row, format_size, our_turn, table
from benchmarks.contest import MAX_COUNT, Result, fitting
from benchmarks.environments import PEERS
from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.peers import exchange as ex
from benchmarks.peers.vhdd import Vhdd
from simparallel.errors import InputError
from simparallel.view import plot_collectives, save_figure

SCRIPTS = str(Path(ex.__file__).parent)
FAKE_MPIEXEC = f"""#!{sys.executable}
import sys, time
sys.path.insert(0, {SCRIPTS!r})
import numpy as np
from serve import AbstractPeer, serve

mode, directory = open(__file__ + ".mode").read(), sys.argv[-1]

class Alone(AbstractPeer):
    rank, ranks, version = 0, 1, "Fake 1"

    def call(self, exchange):
        if mode == "raises" and exchange.op == "broadcast":
            raise OSError("out of luck")
        if mode == "dies" and exchange.op == "broadcast":
            sys.exit("out of breath")
        if mode == "hangs" and exchange.op == "broadcast":
            time.sleep(100)
        def call():
            if exchange.op in ex_cut:
                exchange.received[...] = exchange.sent + (mode == "lies")
            return exchange.received
        return call

    def barrier(self):
        pass

    def gather(self, value):
        return [value]

from exchange import CUT as ex_cut
print("a launcher may talk", flush=True)
if mode == "never starts":
    time.sleep(100)
serve(Alone(), directory)
"""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("SIMPARALLEL_BENCH_DIR", str(tmp_path / "bench"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def fake_mpich(mode: str) -> None:
    """Make an environment whose mpiexec plays a peer of one rank."""
    binaries = PEERS["mpich"].directory / "bin"
    binaries.mkdir(parents=True)
    (binaries / "mpiexec").write_text(FAKE_MPIEXEC)
    (binaries / "mpiexec").chmod(0o755)
    (binaries / "mpiexec.mode").write_text(mode)
    (binaries.parent / environments.READY).write_text(json.dumps(PEERS["mpich"].requirements))


def nothing_is_left(folder: Path) -> bool:
    """Check that no job directory is left, and no process that names one."""
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return not list(folder.iterdir()) and not any(str(folder).encode() in line for line in lines)


# --- exchanges ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_adasum_passes_the_check_and_a_sum_does_not(ranks: int) -> None:
    results = sp.launch(our_turn, ("adasum", 40, 1, True, False), world_size=ranks, transport="inline")
    assert all(right for _, right in results)
    exchange = ex.Exchange("adasum", 0, 2, 40, ex.private)
    exchange.fill()
    assert not exchange.is_right(exchange.sent * 2)


class _World:
    """The methods of an MPI communicator that `Vhdd` uses, on our ranks."""

    def __init__(self, group: sp.Group | None = None) -> None:
        self._group = group
        self.rank, self.size = sp.get_rank(), sp.get_world_size()

    def Split(self, color: int, key: int) -> _World:
        colors = np.concatenate([[value] for value in sp.all_gather_object(color)])
        groups = [sp.new_group(np.flatnonzero(colors == c).tolist()) for c in sorted(set(colors.tolist()))]
        return _World(next(group for group in groups if group.rank is not None))

    def Sendrecv(self, x: np.ndarray, dst: int, _: int, received: np.ndarray, src: int, __: int) -> None:
        work = sp.isend(x, dst)
        sp.recv(received, src)
        work.wait()

    def Allreduce(self, x: np.ndarray, total: np.ndarray, op: str) -> None:
        total[...] = x
        sp.all_reduce(total, op, self._group)


def _by_vhdd(vectors: list[np.ndarray]) -> np.ndarray:
    x = vectors[sp.get_rank()].copy()
    Vhdd(_World(), "sum")(x)
    return x


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_horovods_algorithm_gives_adasum(ranks: int) -> None:
    vectors = [np.random.default_rng(rank).normal(size=37).astype(np.float32) for rank in range(ranks)]
    for result in sp.launch(_by_vhdd, (vectors,), world_size=ranks, transport="inline"):
        np.testing.assert_allclose(result, sp.adasum(vectors), rtol=1e-4, atol=1e-5)


@pytest.mark.matrices
@pytest.mark.process
def test_bench_adasum_prints_a_table_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(environments.DIRECTORY_VARIABLE, str(tmp_path))  # no peers
    monkeypatch.setattr(adasum, "TURN_S", 1e-4)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert main(["adasum", "-n", "2", "--sizes", "4096,131072", "--rounds", "1"]) == 0
    note, *out = capsys.readouterr().out.splitlines()
    assert note.startswith("note: OPENBLAS_CORETYPE=Haswell makes NumPy's OpenBLAS use")
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert out[0].split()[:2] == ["2", "ranks"]
    assert [line.split()[:2] for line in out[1:]] == [["4", "KiB"], ["128", "KiB"]]
    assert main(["adasum", "-n", "2", "--sizes", "64", "--rounds", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(times > [0] for times in document["times_s"]["64 B"].values())
    for bad in ("-n 3", "--peers torch", "--sizes 0"):
        assert main(f"adasum {bad}".split()) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("op", ex.OPS)
def test_our_collectives_pass_the_check(op: str, ranks: int) -> None:
    """Our collectives pass the check that every contender has to pass."""
    elements = ex.num_elements(op, 40, ranks)
    results = sp.launch(our_turn, (op, elements, 1, True, False), world_size=ranks, transport="inline")

    assert all(right for _, right in results)
    assert all(seconds > 0 for seconds, _ in results)


@pytest.mark.parametrize("op", ex.OPS[:-1])
def test_wrong_result_is_seen(op: str) -> None:
    exchange = ex.Exchange(op, 0, 2, ex.num_elements(op, 40, 2), ex.private)
    exchange.fill()
    assert exchange.received is not None

    assert not exchange.is_right(np.full_like(exchange.received, 77))
    assert not exchange.is_right(np.zeros(1, np.float32))


def test_size_means_the_longest_vector() -> None:
    assert ex.num_elements("all_reduce", 4, 8) == 1
    assert ex.num_elements("all_gather", 4, 8) == 8  # one element for each rank
    assert ex.num_elements("all_gather", 1 << 20, 8) == 1 << 18
    assert ex.num_elements("scatter", 100, 8) == 24
    assert ex.num_elements("barrier", 1 << 20, 8) == 0


def test_turn_fits_its_time() -> None:
    assert fitting(1e-3, 0.03) == 30
    assert fitting(10.0, 0.03) == 1
    assert fitting(0.0, 0.03) == MAX_COUNT


# --- environments ---------------------------------------------------------------------------------


def test_setup_creates_missing_environments_once(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def do(peer: environments.Peer, what: str, command: list[str]) -> None:
        peer.directory.mkdir(parents=True, exist_ok=True)
        (peer.directory / "pyvenv.cfg").touch()
        commands.append(command)

    monkeypatch.setattr(environments, "_do", do)
    told: list[str] = []
    assert not PEERS["mpich"].is_ready
    assert main(["--setup", "--peers", "mpich"]) == 0
    environments.setup(["mpich", "torch"], told.append)

    assert [command[1:3] for command in commands] == [
        ["-m", "venv"],
        ["-m", "pip"],
        ["-c", "from mpi4py import MPI"],
        ["-m", "venv"],
        ["-m", "pip"],
        ["-c", "import torch.distributed"],
    ]
    assert "mpich" in commands[1]
    assert "torch==2.13.0" in commands[4]
    assert told[0] == f"mpich: is there, in {PEERS['mpich'].directory}"
    assert PEERS["torch"].is_ready
    assert not PEERS["openmpi"].is_ready


def test_setup_offline_reports_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(BenchError):
        environments._do(PEERS["mpich"], "filled", [sys.executable, "-c", "raise SystemExit('no route')"])
    with refused(BenchError):
        environments._do(PEERS["mpich"], "made", ["/no/such/python"])


def test_setup_does_not_delete_foreign_files() -> None:
    directory = PEERS["mpich"].directory
    directory.mkdir(parents=True)
    (directory / "thesis.txt").touch()
    with refused(BenchError):
        environments.setup(["mpich"], lambda line: None)
    assert (directory / "thesis.txt").exists()


# --- a peer's job ---------------------------------------------------------------------------------


@pytest.mark.process
def test_job_answers_and_ends(tmp_path: Path) -> None:
    fake_mpich("good")
    job = Job(PEERS["mpich"], 1)
    assert job.version == "Fake 1"
    for op in ex.OPS:
        assert job.turn(op, ex.num_elements(op, 64, 1), 2, True) > 0
    job.close()
    job.close()
    assert nothing_is_left(tmp_path / "tmp")


@pytest.mark.process
@pytest.mark.parametrize("mode", ["lies", "raises", "dies", "hangs"])
def test_peer_failure_is_reported(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.job.END_LIMIT_S", 0.2)
    fake_mpich(mode)
    job = Job(PEERS["mpich"], 1, turn_limit_s=0.3 if mode == "hangs" else 30)
    with pytest.raises(BenchError, match="MPICH"):
        job.turn("scatter" if mode == "lies" else "broadcast", 16, 1, True)
    job.close()
    assert nothing_is_left(tmp_path / "tmp")


@pytest.mark.process
def test_peer_that_does_not_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.job.END_LIMIT_S", 0.2)
    fake_mpich("never starts")
    with refused(BenchError):
        Job(PEERS["mpich"], 1, start_limit_s=0.3)
    (PEERS["mpich"].directory / "bin" / "mpiexec").unlink()
    with refused(BenchError):
        Job(PEERS["mpich"], 1)
    assert nothing_is_left(tmp_path / "tmp")


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.matrices
@pytest.mark.process
def test_without_peers_memcpy_is_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    rows = collectives.main(ranks=[2], sizes=[4, 1 << 17], rounds=1, turn_s=1e-4, out="figures/c.svg")

    assert len(rows) == 2 * (len(ex.OPS) - 1) + 1
    for row in rows:
        others = {SHARED, MEMCPY} if row.op != "barrier" else set()
        assert set(row.result.times_s) == {OURS, *others}
        assert row.best_peer is row.ratio_to_best_peer is None
    out = capsys.readouterr().out
    for name in PEERS:
        setup = f"python -m benchmarks --setup --peers {name}"
        assert f"{name} is not measured, it has no environment; make it: {setup}" in out
    assert "all_reduce, 2 ranks" in out
    assert "128 KiB" in out
    assert Path("figures/c.svg").read_text().startswith("<?xml")


@pytest.mark.process
def test_command_prints_json_with_peers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake_mpich("good")
    arguments = "collectives -n 1 --sizes 64 --rounds 1 --ops all_reduce,barrier --picture c.png --json"
    assert main(arguments.split()) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["peers"] == {"MPICH": "Fake 1"}
    assert set(document["missing"]) == {"torch", "openmpi"}
    reduced, barrier = document["rows"]
    assert (reduced["op"], reduced["ranks"], reduced["size_bytes"]) == ("all_reduce", 1, 64)
    assert set(reduced["median_s"]) == {OURS, SHARED, "MPICH", MEMCPY}
    assert all(len(times) == 1 for times in reduced["times_s"].values())
    ours, best = reduced["median_s"][OURS], reduced["median_s"]["MPICH"]
    assert reduced["best_peer"] == "MPICH"
    assert reduced["ratio_to_best_peer"] == pytest.approx(ours / best)
    assert reduced["bandwidth_bytes_per_s"][OURS] == pytest.approx(64 / ours)
    assert set(barrier["median_s"]) == {OURS, "MPICH"}
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    assert nothing_is_left(tmp_path / "tmp")


@pytest.mark.process
def test_failed_peer_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A peer that fails is left out from there on; the other contenders continue."""
    fake_mpich("raises")
    rows = collectives.main(
        ranks=[1], ops=["scatter", "broadcast", "gather"], sizes=[64], rounds=1, turn_s=1e-4, out=None
    )

    assert [row.best_peer for row in rows] == ["MPICH", None, None]
    assert "left out from here on: MPICH failed at broadcast: OSError: out of luck" in capsys.readouterr().out


@pytest.mark.process
def test_interrupt_ends_all_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Memcpy, op: str, elements: int, count: int, check: bool) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Memcpy, "turn", interrupted)
    fake_mpich("good")
    arguments = "collectives -n 1 --sizes 64 --rounds 1 --ops all_reduce"
    assert main(arguments.split()) == 130
    assert nothing_is_left(tmp_path / "tmp")


BAD_INPUT = {
    "nothing to do": ([], "choose what to measure: step, ddp, zero, collectives, "),
    "rounds": (["collectives", "--rounds", "0"], "--rounds 0"),
    "ranks": (["collectives", "-n", "2,0"], "ranks: 0"),
    "op": (["collectives", "--ops", "all_reduce,allreduce"], "'allreduce' is not a collective"),
    "size": (["collectives", "--sizes", "0"], "sizes: 0"),
    "peer": (["collectives", "--peers", "nccl"], "'nccl' is not a peer"),
    "peer to set up": (["--setup", "--peers", "nccl"], "'nccl' is not a peer"),
    "figure": (["collectives", "--picture", "a.jpg"], "a.jpg"),
    "odd": (["redistribution", "-n", "4,3"], "-n 3: must be an even number of at least 2"),
    "alone": (["redistribution", "-n", "1"], "-n 1: must be an even number"),
    "no power": (["adasum", "-n", "6"], "Horovod's algorithm needs a power of two; use 4 or 8."),
    "power of zero": (["adasum", "-n", "1"], "use 2."),
    "no model": (["step", "--models", "nothing"], "--models nothing: no such model; choose from MLP"),
    "no rounds": (["step", "--rounds", "0"], "--rounds 0: must be at least 1"),
}


@pytest.mark.parametrize("case", BAD_INPUT, ids=str)
def test_bad_input_is_refused_before_the_start(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = BAD_INPUT[case]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "ranks" not in captured.out


def test_unwritable_figure_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line with the name of the file, before anything is measured."""
    monkeypatch.setattr(collectives, "contenders_of", None)
    assert main(["collectives", "--picture", "/proc/picture.svg"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("simparallel: /proc/picture.svg")
    assert error.count("\n") == 1


def test_models_do_not_swallow_the_benchmark() -> None:
    assert parser().parse_args(["--models", "mlp,gpt", "step"]).models == ["mlp", "gpt"]


# --- table and figure -----------------------------------------------------------------------------


def row(size_bytes: int, **times_s: list[float]) -> Row:
    times = {{"ours": OURS, "memcpy": MEMCPY}.get(name, name): values for name, values in times_s.items()}
    peers = tuple(name for name in times if name not in (OURS, MEMCPY))
    return Row("all_reduce", 2, size_bytes, Result("all_reduce", times), peers)


def test_table_shows_ratio_to_best_peer() -> None:
    """The table has a line for each size, with the ratio to the best peer and to memcpy."""
    rows = [
        row(4, ours=[2e-6, 3e-6] * 2, a=[1e-6, 1.5e-6, 1e-6, 1e-6], b=[3e-6] * 4, memcpy=[1e-7] * 4),
        row(1 << 20, ours=[1e-3], b=[2e-3], memcpy=[1e-4]),
    ]
    head, small, large = (line.split("  ") for line in table(rows, [OURS, "a", "b", MEMCPY]).splitlines())
    small, large = ([cell.strip() for cell in line if cell.strip()] for line in (small, large))

    assert "all_reduce, 2 ranks" in head
    assert small == ["4 B", "2.5 µs", "1 µs", "3 µs", "100 ns", "0.0016", "25.00", "2.00"]
    assert large == ["1 MiB", "1 ms", "-", "2 ms", "100 µs", "1.05", "10.00", "0.50"]
    assert rows[1].best_peer == "b"


def test_sizes_have_binary_units() -> None:
    assert [format_size(n) for n in (4, 1000, 1024, 1 << 25, 1536)] == ["4 B", "1000 B", "1 KiB", "32 MiB", "1.5 KiB"]


def test_figure_has_panel_per_collective_and_size(tmp_path: Path) -> None:
    """A panel for each collective and number of ranks; equal points give equal bytes."""
    points = {
        (op, ranks): {OURS: [(4.0, 1e-6), (4096.0, 1e-5)], "MPICH": [(4.0, 2e-6)], MEMCPY: [(4.0, 1e-7)]}
        for op in ("all_reduce", "gather")
        for ranks in (2, 4, 8)
    }
    files = []
    for name in ("a.svg", "b.svg"):
        figure = plot_collectives(points, ours=[OURS, SHARED], limit=MEMCPY)
        files.append(save_figure(figure, tmp_path / name).read_bytes())

    assert files[0] == files[1]
    assert [ax.get_title() for ax in figure.axes] == [
        f"{op}, {ranks} ranks" for op in ("all_reduce", "gather") for ranks in (2, 4, 8)
    ]
    ours, peer, _ = figure.axes[0].get_lines()
    assert ours.get_linewidth() > 2 * peer.get_linewidth()
    assert ours.get_marker() != peer.get_marker()  # not distinguished by colour alone


def test_figure_of_nothing_is_refused() -> None:
    with refused(InputError):
        plot_collectives({})
    with refused(InputError):
        plot_collectives({("all_reduce", 2): {OURS: [(0, 1e-6)]}})

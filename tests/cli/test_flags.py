"""Options of `simparallel run`, in the spelling of several launchers."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.cli import main, run_flags
from simparallel.errors import InputError, RankTableError
from simparallel.machine.ranktable import format_rank_table, make_rank_table
from simparallel.runtime.log_folder import link_logs

SCRIPT = """
import os, sys
import simparallel as sp

sp.init()
sp.log(loss=2.3)
print("epoch: 0 step: 0, loss is 2.3", *sys.argv[1:])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DEVICE_ID")
open(f"rank{sp.get_rank()}.txt", "w").write(" ".join(os.environ[name] for name in names))
"""


def request(*words: str, script: Sequence[str] = ("train.py",)) -> run_flags.Request:
    return run_flags.request(main.parser().parse_args(["run", *words, *script]))


@given(st.integers(1, 8), st.integers(1, 8))
def test_two_numbers_give_the_third(nodes: int, per_node: int) -> None:
    total = nodes * per_node
    ways = (
        [f"--nodes={nodes}", f"--nproc-per-node={per_node}"],
        [f"--nnodes={nodes}", f"-n{total}"],
        [f"--worker_num={total}", f"--local_worker_num={per_node}"],
        [f"--world_size={total}", f"--nproc_per_node={per_node}", f"--nnodes={nodes}"],
    )
    for way in ways:
        found = request(*way)
        assert (found.world_size, found.nodes) == (total, nodes)


def test_defaults() -> None:
    found = request()
    assert (found.world_size, found.nodes, found.rank_table, found.notes) == (1, 1, None, ())
    assert found.log_dir == Path("runs/train")
    assert request("--nproc-per-node", "4").world_size == 4
    assert request("--nodes", "2").world_size == 2


@pytest.mark.parametrize(
    "words",
    [
        "-n 5 --nodes 2",
        "-n 8 --nodes 2 --nproc-per-node 3",
        "--worker_num 6 --local_worker_num 4",
        "-n 2 --local_worker_num 4",
        "--nodes 0",
        "--devices-per-rank 0",
        "--nproc-per-node -1",
        "-n 0",
        "--timeout -1",
        "--timeout nan",
        "--cluster-time-out 0",
        "--node_rank 1",
        "--nnodes=1 --node_rank=1 --nproc_per_node=4",
        "--nnodes 2 --node_rank 1 --transport mpi",
        "--nnodes 2 --node_rank -2",
        "--master_port 70000",
        "--out a --output-filename b",
        "--mpiexec mpirun",
    ],
)
def test_contradictions_are_refused(words: str) -> None:
    with refused(InputError):
        request(*words.split())


def test_missing_rank_table_is_refused() -> None:
    with refused(RankTableError):
        request("--rank-table", "missing.json")


@pytest.mark.parametrize("words", ["--join maybe", "--nnodes 1:2", "-n x", "--transport tcp"])
def test_meaningless_values_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        request(*words.split())
    assert "error: argument" in capsys.readouterr().err


def test_rank_table_sets_world_and_nodes(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(format_rank_table(make_rank_table(2, 8)))
    table = ["--rank-table", str(path)]
    for words in ([], ["-n", "16"], ["--nodes", "2"], ["--nproc-per-node", "8"]):
        found = request(*table, *words)
        assert (found.world_size, found.nodes) == (16, 2)
    for words in (["-n", "8"], ["--nodes", "1"], ["--nproc-per-node", "4"]):
        with refused(InputError):
            request(*table, *words)


def test_ignored_flags_are_noted() -> None:
    assert "waits for its ranks all the same" in request("--join=False").notes[0]
    assert "all 2 nodes" in request("--nnodes=2", "--node-rank=0", "--transport=mpi").notes[0]
    assert request("--join=True", "--node-rank=0").notes == ()


@pytest.mark.parametrize("node", range(2))
def test_node_rank_asks_for_that_node(node: int) -> None:
    found = request("--worker_num=8", "--local_worker_num=4", f"--node_rank={node}")
    assert (found.world_size, found.nodes, found.node, found.start_timeout_s) == (8, 2, node, 300.0)
    assert request("--worker_num=8", "--local_worker_num=4", "--node_rank=-1").node is None
    assert request("--nnodes=2", f"--node_rank={node}", "--cluster_time_out=5").start_timeout_s == 5.0


def test_node_on_another_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --nnodes=2 --node_rank=1 --master_addr=203.0.113.9 train.py"
    assert main.main(words.split()) == 2
    assert "--transport mpi" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "world_size"),
    [
        ("msrun train.py", 8), ("msrun --worker_num=4 train.py", 4), ("torchrun train.py", 1),
        ("msrun --local_worker_num=4 --worker_num=4 train.py", 4), ("torchrun --nproc_per_node=3 train.py", 3),
        ("torchrun --standalone --nnodes=2 --nproc-per-node=2 train.py", 4), ("run -np 2 train.py", 2),
    ],
)  # fmt: skip
def test_other_launchers_by_name(words: str, world_size: int) -> None:
    assert run_flags.request(main.parser().parse_args(words.split())).world_size == world_size


def test_launchers_have_their_own_defaults() -> None:
    """msrun's as MindSpore documents them; each launcher's front is its framework's."""
    options = {name: main.parser().parse_args([name, "train.py"]) for name in run_flags.LAUNCHERS}
    assert {name: given.framework for name, given in options.items()} == {
        "run": None, "torchrun": "torch", "msrun": "mindspore",
    }  # fmt: skip
    found = {name: run_flags.request(given) for name, given in options.items()}
    assert found["msrun"].environment == {"MASTER_PORT": "8118"}
    assert found["msrun"].log_dir == Path(".")
    assert found["msrun"].log_links == "1/rank.{rank}/stdout"
    assert found["msrun"].start_timeout_s == 600
    assert found["run"].environment == found["torchrun"].environment == {}
    assert found["run"].log_dir == found["torchrun"].log_dir == Path("runs/train")
    assert main.parser().parse_args(["msrun", "--as", "none", "train.py"]).framework == "none"


def test_other_flags_of_msrun() -> None:
    found = request("--worker_log_name={hostname}_{ip}_{x}", "--bind_core=True", "--tail_worker_log=0,2")
    assert found.log_links.format(rank=3) == f"{platform.node()}_127.0.0.1_{{x}}_3.log"
    assert found.echo == (0, 2)
    assert "not bound to cores" in found.notes[0]
    assert request("--tail_worker_log=-1").echo is True
    assert request("--bind_core=False").notes == ()
    with refused(InputError):
        request("--worker_log_name=../x")
    # msrun's usual name: the logs themselves have it.
    Path("worker_0.log").touch()
    link_logs(Path("."), [[0]], request("--worker_log_name=worker").log_links)
    assert not Path("worker_0.log").is_symlink()


def test_simulated_runs_predict_what_was_asked_for() -> None:
    words = ["--cluster=dgx-a100", "--dtype=bfloat16", "--devices-per-rank=2", "-n16", "--nodes=2", "--sim_level=0"]
    told = main._prediction(main._options(["run", *words, "train.py", "8"]), request(*words))
    found = main._options(told)
    assert found.dtype == "bfloat16"
    assert (found.cluster, found.devices_per_rank, found.world_size, found.nodes) == ("dgx-a100", 2, 16, 2)
    assert (found.script, found.arguments) == ("train.py", ["8"])


@pytest.mark.parametrize(
    ("words", "script", "arguments", "is_module"),
    [
        ("python train.py --lr 1", "train.py", ["--lr", "1"], False), ("python3 -u train.py", "train.py", [], False),
        ("python -m package.train x", "package.train", ["x"], True), ("train.py python", "train.py", ["python"], False),
        ("pytest -s test_x.py", "pytest", ["-s", "test_x.py"], True),
    ],
)  # fmt: skip
def test_leading_python_is_left_out(words: str, script: str, arguments: list[str], is_module: bool) -> None:
    given = ["run", "-n", "8", "--merge-stderr-to-stdout", "--allow-run-as-root", *words.split()]
    options = main.parser().parse_args(given)
    run_flags.without_python(options)
    assert (options.script, options.arguments, options.module) == (script, arguments, is_module)


@pytest.mark.parametrize("words", ["python", "python -c pass", "python -X dev x.py", "python -m"])
def test_python_options_are_refused(words: str) -> None:
    with refused(InputError):
        run_flags.without_python(main.parser().parse_args(["run", *words.split()]))


# --- commands as published, on processes ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    Path("train.py").write_text(SCRIPT)


def told(rank: int) -> list[str]:
    return Path(f"rank{rank}.txt").read_text().split()


@pytest.mark.process
def test_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own example; the launcher before torchrun gave --local_rank, too."""
    words = "run --nproc_per_node=2 --nnodes=2 --master_addr=192.168.1.1 --master_port=1234 --no-use-env"
    assert main.main([*words.split(), "train.py", "--lr", "0.1"]) == 0
    for rank in range(4):
        assert told(rank) == [*map(str, (rank, rank % 2, 4, rank // 2)), "192.168.1.1", "1234", str(rank % 2)]
        text = f"epoch: 0 step: 0, loss is 2.3 --local_rank={rank % 2} --lr 0.1\n"
        assert Path(f"runs/train/node_{rank // 2}/worker_{rank}.log").read_text() == text
    assert json.loads(Path("runs/train/metrics.json").read_text())["cluster"] == "4 x a100 on 2 nodes"


@pytest.mark.process
def test_msrun_and_the_layout_of_mpirun(capfd: pytest.CaptureFixture[str]) -> None:
    """MindSpore's own examples: `msrun …` with its folder, and `mpirun --output-filename log_output`."""
    words = "msrun --worker_num=2 --local_worker_num=2 --log_dir=msrun_log --join=True --tail_worker_log=1"
    assert main.main([*words.split(), "--cluster_time_out=300", "train.py"]) == 0
    assert {"scheduler.log", "worker_0.log", "worker_1.log"} <= {path.name for path in Path("msrun_log").iterdir()}
    assert Path("msrun_log/1/rank.1/stdout").read_text() == "epoch: 0 step: 0, loss is 2.3\n"
    assert told(1)[-2:] == ["8118", "1"]
    printed = capfd.readouterr().out
    assert "[rank 1] epoch" in printed
    assert "[rank 0]" not in printed
    # Links under another name are the run's own files, and go with the next run.
    assert main.main(["msrun", "--worker_num=1", "--log_dir=msrun_log", "--worker_log_name=mine", "train.py"]) == 0
    assert Path("msrun_log/mine_0.log").read_text() == "epoch: 0 step: 0, loss is 2.3\n"
    assert not Path("msrun_log/1/rank.1/stdout").exists()

    assert main.main(["run", "-n", "2", "--output-filename", "log_output", "train.py"]) == 0
    for rank in range(2):
        assert Path(f"log_output/1/rank.{rank}/stdout").read_text() == "epoch: 0 step: 0, loss is 2.3\n"


@pytest.mark.process
def test_sixteen_devices_of_a_rank_table() -> None:
    Path("rank_table_16pcs.json").write_text(format_rank_table(make_rank_table(2, 8, ["10.*.*.*"] * 2)))
    assert main.main(["run", "--rank-table", "rank_table_16pcs.json", "train.py"]) == 0
    for rank in range(16):
        assert told(rank)[:4] == list(map(str, (rank, rank % 8, 16, rank // 8)))
        assert told(rank)[-1] == str(rank % 8)


@pytest.mark.process
def test_launchers_mean_their_frameworks(capfd: pytest.CaptureFixture[str]) -> None:
    """Without --as: the front, and a script that imports no framework runs as it is; a simulated run is predicted."""
    text = "import simparallel as sp\nsp.init()\nprint('file', __file__, __name__, __package__)\n"
    Path("mine.py").write_text(text)
    theirs = "import mindspore as ms\nfrom mindspore.communication import init\n"
    theirs += "init()\nprint(ms.nn.Dense(4, 2)(ms.Tensor([[1.0] * 4])).shape)\n"
    Path("theirs.py").write_text(theirs)
    assert main.main(["msrun", "--worker_num=1", "--log_dir=a", "mine.py"]) == 0
    assert main.main(["run", "-n", "1", "--log-dir=b", "mine.py"]) == 0
    assert Path("a/worker_0.log").read_text() == Path("b/worker_0.log").read_text() != ""
    # In a process of its own, because a prediction installs the front where it runs.
    words = "simparallel msrun --worker_num=4 --sim_level=1 --sim_rank_id=2 theirs.py"
    ended = subprocess.run([sys.executable, "-m", *words.split()], capture_output=True, text=True, timeout=60)
    assert "    4          0" in ended.stdout, ended.stderr
    assert not Path("worker_0.log").exists()
    assert main.main(["msrun", "--worker_num=3", "--log_dir=a", "theirs.py"]) == 0
    assert Path("a/worker_1.log").read_text() == "(1, 2)\n"
    # MindSpore's default device is Ascend, and HCCL would refuse three of them.
    assert json.loads(Path("a/metrics.json").read_text())["cluster"] == "3 x ascend910"
    assert Path("a/worker_0.log").read_text().count("server 0 has cards 0–2. HCCL: ") == 1
    assert main.main(["msrun", "--as", "none", "--worker_num=1", "--log_dir=a", "theirs.py"]) == 1
    told = capfd.readouterr().err
    assert "No module named 'mindspore'" in told
    assert "front in its place: simparallel run --as mindspore -n N theirs.py" in told

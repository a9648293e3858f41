"""`simparallel cluster` and `simparallel expected-busbw`."""

from __future__ import annotations

from pathlib import Path

import pytest

from simparallel.cli import main
from simparallel.machine.cluster import describe, load_cluster
from simparallel.machine.ranktable import format_rank_table, make_rank_table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("table.json").write_text(format_rank_table(make_rank_table(2, 8)))
    Path("hosts").write_text("a slots=8\nb slots=4\n")


def told(capsys, *arguments, code=0):
    assert main.main(list(arguments)) == code
    return capsys.readouterr()


def test_cluster_is_shown_and_saved(capsys):
    out = told(capsys, "cluster", "dgx-h100", "-n", "16", "--out", "c.json").out
    assert out.startswith("16 x h100 on 2 nodes: 16 ranks, 2 nodes\ndevice     peak_flops_per_s[1]  ")
    assert out.endswith("written: c.json\n")
    assert load_cluster("./c.json") == describe(16, "dgx-h100")
    assert told(capsys, "cluster", "c.json").out == out.replace("written: c.json\n", "")


def test_nodes_of_a_rank_table_or_host_file(capsys):
    assert "16 ranks, 2 nodes, 4 x island" in told(capsys, "cluster", "ascend910-8", "--rank-table", "table.json").out
    assert "12 ranks, 2 nodes" in told(capsys, "cluster", "dgx-a100", "--hostfile", "hosts").out


def test_expected_busbw_states_its_convention(capsys):
    out = told(capsys, "expected-busbw", "--cluster", "a100", "-n", "4", "--sizes", "4,4000000000").out
    assert out == (
        "4 x a100: all_reduce of 4 ranks, as modelled\n"
        "size = the array of each rank; algbw = size / time; busbw = algbw x 2(n-1)/n (nccl-tests); 1 GB = 10^9 bytes\n"
        "\n"
        "size   time        algbw        busbw  algorithm\n"
        " 4 B  12 µs    0.00 GB/s    0.00 GB/s  tree\n"
        "4 GB  20 ms  199.82 GB/s  299.73 GB/s  ring\n"
    )
    out = told(capsys, "expected-busbw", "--cluster", "dgx-a100", "--op", "all_gather", "--ranks", "0,1").out
    assert "of 2 ranks" in out
    assert "size = the gathered array" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["cluster", "dgx-h10"], "Did you mean dgx-h100?"),
        (["cluster", "no.json"], "no.json: cannot be read: No such file"),
        (["cluster", "a100", "-n", "0"], "-n 0: must be at least 1"),
        (["cluster", "a100", "-n", "8", "--rank-table", "table.json"], "world_size=8"),
        (["cluster", "a100", "-n", "8", "--hostfile", "hosts"], "hosts has 12 ranks"),
        (["expected-busbw", "--cluster", "ascend910-8", "--ranks", "3,4"], "HCCL"),
        (["expected-busbw", "--cluster", "a100", "-n", "2", "--ranks", "0,2"], "rank 2 is not one of 0 … 1"),
        (["expected-busbw", "--cluster", "a100", "--sizes", "0"], "--sizes 0: must be at least 1"),
    ],
)
def test_bad_clusters_are_refused(capsys, arguments, text):
    assert text in told(capsys, *arguments, code=2).err

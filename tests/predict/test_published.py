"""The published tables: copied without a slip, and what the closed forms say of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import median

import pytest

from benchmarks import published as programs
from simparallel.machine.cluster import describe
from simparallel.simulate.transformer import GPTShape
from simparallel.simulate.transformer_memory import MEGATRON_ADAM
from simparallel.simulate.transformer_time import Efficiency, step_time

SCRIPT = Path(__file__).parents[2] / "figures" / "published.py"
spec = importlib.util.spec_from_file_location("published", SCRIPT)
published = importlib.util.module_from_spec(spec)
spec.loader.exec_module(published)


@pytest.fixture(scope="module")
def rows():
    return published.all_rows()


def raw(name):
    return published.read(name)["rows"]


def test_enough_rows_of_enough_publications(rows):
    unseen = [row for row in rows if row.paper != published.CALIBRATION]
    assert len(unseen) >= 30
    assert len({row.paper for row in unseen}) >= 2
    assert all(table["url"] and table["where"] and table["assumed"] for table in published.tables())


def test_page_has_what_is_predicted(rows):
    """Each row, the memory, the prose; the whole page is a document, because it predicts all rows five times."""
    text = published.PAGE.read_text()
    assert published.INTRODUCTION in text
    assert published.READING in text
    _, _, *expected = published.markdown((), map(published.line, rows))
    assert [line for line in (*expected, *published.memory_lines()) if f"{line}\n" not in text] == []


@pytest.mark.documents
def test_page_is_what_the_script_writes(rows):
    """If it is not: python figures/published.py."""
    assert published.PAGE.read_text() == published.page(rows)


def test_tables_of_programs_are_whole():
    for table in programs.tables():
        assert all(table[key] for key in ("url", "where", "checked", "software", "assumed"))
        for row in table["rows"]:
            assert row["hardware"] in programs.HARDWARE
            assert row["type"] in ("mixed", "tf32")
            assert 1 <= row["gpus"] <= 8
            # Within a factor of 20 of the slowest: a slip of a digit would show.
            assert 20 < row["samples_per_s"] / row["gpus"] < 4000
    assert len(programs.runs()) > 80


def test_page_of_programs_has_what_is_predicted():
    """The digest, the prose, and two cheap rows; `python -m benchmarks.published` predicts all, in two minutes."""
    text = programs.PAGE.read_text()
    assert programs.INTRODUCTION.format(digest=programs.digest()) in text
    assert programs.READING in text
    first = [row for row in programs.runs() if row.program == "resnet50" and row.gpus == 1][:2]
    assert [line for line in list(programs.markdown((), [row.line() for row in first]))[2:] if line not in text] == []


# Tables have columns that follow from others: a slip in copying would show.
def test_aggregate_of_narayanan_table1():
    for row in raw("narayanan2021_table1"):
        total = row["gpus"] * row["hardware_tflops_per_gpu"] / 1000
        assert total == pytest.approx(row["published_aggregate_pflops"], rel=0.01)


def test_parameters_of_narayanan_table1():
    table = published.read("narayanan2021_table1")
    for name, sizes in table["models"].items():
        assert GPTShape(**sizes).num_parameters / 1e9 == pytest.approx(float(name.rstrip("B")), abs=0.1)


def test_days_of_narayanan_table2():
    for row in raw("narayanan2021_table2"):
        flops = 8 * 300e9 * float(row["model"].rstrip("B")) * 1e9
        days = flops / (row["gpus"] * row["hardware_tflops_per_gpu"] * 1e12) / 86400
        assert days == pytest.approx(row["published_days_for_300e9_tokens"], rel=0.04)


def test_utilisation_of_published_times():
    """Korthikanti et al. and Jiang et al. give the time and the MFU, by the formulas of GPTShape.flops."""
    for name in ("korthikanti2022_table5", "megascale2024_table2"):
        table = published.read(name)
        for row in table["rows"]:
            timed = published.Row(table, row)
            peaks = timed.plan.world_size * 312e12
            for key, recompute in (("published_mfu_percent", "none"), ("published_hfu_percent", "selective")):
                if row.get(key):
                    flops = timed.plan.shape.flops(timed.plan.global_batch, recompute)
                    assert 100 * flops / (timed.published_s * peaks) == pytest.approx(row[key], abs=0.3)


def test_parameters_and_mfu_of_llm_foundry():
    table = published.read("llm_foundry")
    for row in table["rows"]:
        plan = published.plan_of(table, row)
        shape, parameters = plan.shape, row["published_parameters"]
        assert shape.num_parameters == parameters
        flops = 6 * parameters + 12 * shape.num_layers * shape.width * shape.length
        peaks = row["gpus"] * published.HARDWARE[row["hardware"]][1].peak(2)
        assert 100 * flops * row["tokens_per_s"] / peaks == pytest.approx(row["published_mfu_percent"], rel=0.002)


def test_zero_memory_to_the_printed_digit():
    for row in raw("zero2020_table1"):
        digits = len(row["gigabytes"].partition(".")[2])
        # The table rounds some cells and cuts others.
        assert abs(published.zero_gigabytes(row) - float(row["gigabytes"])) < 10**-digits


def test_zero_memory_of_figure1():
    cells = {
        row["zero_stage"]: row for row in raw("zero2020_table1") if (row["parameters"], row["data"]) == (7.5e9, 64)
    }
    assert [round(published.zero_gigabytes(cells[stage]), 1) for stage in (1, 2, 3)] == [31.4, 16.6, 1.9]


def test_korthikanti_memory():
    table = published.read("korthikanti2022_memory")
    for row in table["rows"]:
        for name, size in published.korthikanti_memory(table, row).items():
            assert size == pytest.approx(row[name], rel=0.05), (row["model"], name)


def test_products_reach_what_one_block_reaches():
    """The share of an A100's peak makes the median of table 4 right."""
    table, cluster = published.read("korthikanti2022_table4"), describe(8, "a100")
    cluster = published.replace(cluster, device=published.replace(published.A100, software="fused"))
    ratios = []
    for row in table["rows"]:
        plan = published.plan_of(table, row | {"model": "22B"})
        times = []
        for layers in (1, 2):
            shaped = published.replace(plan, shape=published.replace(plan.shape, num_layers=layers))
            time = step_time(shaped, cluster, Efficiency(), MEGATRON_ADAM)
            times.append(time.compute_ps + time.tensor_ps)
        ratios.append((times[1] - times[0]) / (row["combined_ms"] * 1e9))
    assert median(ratios) == pytest.approx(1, abs=0.002)
    assert ratios == pytest.approx([1] * 5, abs=0.05)


def test_megatron_steps_are_close(rows):
    errors = [abs(row.error) for row in rows if row.plan.tensor > 1 and row.paper != published.CALIBRATION]
    assert median(errors) < 0.1


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2, 3], [5, 6, 9], 1), ([1, 2, 3], [3, 2, 1], -1), ([1, 2, 2, 3], [1, 2, 3, 4], 0.9486832980505138)],
)
def test_rank_correlation(a, b, expected):
    assert published.rank_correlation(a, b) == pytest.approx(expected)

"""Files of `old_files`, written by commit 825eb74, are read as what they were then."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simparallel as sp
from simparallel.cli.main import main
from simparallel.parallel.pipeline import Schedule, pipeline_schedule

FOLDER = Path(__file__).with_name("old_files")


def saved_again(load: Callable[[Path], Any], name: str, folder: Path) -> tuple[Any, Any]:
    """Return the JSON of a file, and that of the file that is written from what was loaded."""
    load(FOLDER / name).save(folder / name)
    old, new = (json.loads((place / name).read_text("utf-8")) for place in (FOLDER, folder))
    return old, new


def holds(new: Any, old: Any) -> bool:
    """Return whether `new` has all that `old` has; objects of `new` may have more keys."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and holds(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(holds, new, old))
    return type(new) is type(old) and new == old


def test_what_a_file_lacks_is_noticed() -> None:
    """The comparison of this file finds lost keys, items and changed values, and accepts new keys."""
    old = {"a": [1, {"b": None}]}
    assert holds({"a": [1, {"b": None, "c": 2}]}, old)
    assert not any(holds(new, old) for new in ({}, {"a": [1]}, {"a": [1, {}]}, {"a": [1.0, {"b": None}]}))


def test_old_files_name_no_module() -> None:
    """Modules may move, because no file names one."""
    paths = sorted(path for path in FOLDER.iterdir() if path.is_file())
    assert len(paths) > 20
    for path in paths:
        assert not re.search(r"simparallel[./]\w|__module__|\.py(?!:)", path.read_text("utf-8")), path.name


# --- plans ----------------------------------------------------------------------------------------

PLANS = {
    "classifier": (8, 4, "114 µs a step; data parallelism 515 µs; elimination, optimal in the model"),
    "command": (16, 7, "193 µs a step; data parallelism 217 µs; elimination, optimal in the model"),
    "edited": (4, 4, "data parallelism 70 µs; elimination, edited, edited, edited"),
    "gpt": (2, 27, "180 µs a step; data parallelism 233 µs; elimination, optimal in the model"),
    "moves": (4, 6, "1.86 ms a step; data parallelism 1.89 ms; elimination, optimal in the model"),
    "saved_memory": (
        2,
        8,
        "269 µs a step; data parallelism 107 µs; elimination with Pareto lists, optimal in the model",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_old_plan_is_read_whole(name: str, tmp_path: Path) -> None:
    devices, ops, title = PLANS[name]
    plan = sp.Plan.load(FOLDER / f"plan_{name}.json")
    assert (plan.device_num, len(plan)) == (devices, ops)
    assert plan.title.endswith(title)
    old, new = saved_again(sp.Plan.load, f"plan_{name}.json", tmp_path)
    assert holds(new, old)


def test_old_plan_explains_its_strategies() -> None:
    explained = str(sp.Plan.load(FOLDER / "plan_moves.json").explain("CrossEntropy"))
    assert explained.startswith("CrossEntropy on 4096x512 4096, train.py:106;")
    assert "chosen   ((4, 1), (4,))  33.6 µs  18.6 µs      10 µs" in explained
    assert "input 1, from argument: forward slice; 5.03 µs" in explained


def classifier(plan: str | None) -> float:
    net = sp.nn.Sequential(sp.nn.Linear(8, 16), sp.nn.ReLU(), sp.nn.Linear(16, 4))
    loss_fn = sp.nn.CrossEntropyLoss()
    step = sp.AutoParallel(lambda x, y: loss_fn(net(x), y), "auto", plan=plan)
    return step(np.ones((8, 8), np.float32), np.arange(8) % 4).item()


def test_old_plan_is_executed() -> None:
    """The plan cuts the batch of the first layer, and the features that the last one sums."""
    whole = sp.launch(classifier, (None,), world_size=1, transport="inline")[0]
    cut = sp.launch(classifier, (str(FOLDER / "plan_edited.json"),), world_size=4, transport="inline")
    np.testing.assert_allclose(cut, [whole] * 4, rtol=1e-6)


def language_model() -> int:
    net = sp.models.gpt(16, 8, num_layers=1, num_heads=2, width=8)
    parallel = sp.AutoParallel(
        lambda x, y: sp.functions.cross_entropy(net(x).reshape(-1, 16), y).backward(),
        "auto",
        plan=str(FOLDER / "plan_gpt.json"),
    )
    parallel(np.zeros((4, 8), int), np.zeros(32, int))
    return len(parallel.plan)


def test_old_plan_of_a_model_fits_its_calls() -> None:
    assert sp.dry_run(language_model, world_size=2, cluster="dgx-h100").values == {0: 27, 1: 27}


# --- traces ---------------------------------------------------------------------------------------

TRACES: dict[str, tuple[str, int, int, dict[str, int]]] = {
    "dry": ("prediction · 2 x ascend910", 22, 120005379, {"forward": 6, "backward": 6, "p2p": 8, "collective": 2}),
    "run": (
        "2 x h100 on 2 nodes", 20, 55003680, {"forward": 4, "backward": 4, "optimizer": 2, "p2p": 2, "collective": 8},
    ),
    "totals": ("2 x a100", 26, 384003388, {"forward": 4, "backward": 6, "optimizer": 4, "p2p": 2, "collective": 10}),
    "wall": ("2 ranks x 2 a100", 6, 6000080, {"copy": 4, "collective": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_old_trace_is_read_whole(name: str, tmp_path: Path) -> None:
    title, num_events, makespan_ps, kinds = TRACES[name]
    trace = sp.Trace.load(FOLDER / f"trace_{name}.json")
    assert (trace.title, len(trace), round(trace.makespan_s * 1e12)) == (title, num_events, makespan_ps)
    assert Counter(event.kind for event in trace.events) == kinds
    assert trace.is_whole == (name != "totals")
    trace.save(tmp_path / "again.json", clock="wall" if name == "wall" else "sim")
    old, new = (
        json.loads(path.read_text("utf-8")) for path in (FOLDER / f"trace_{name}.json", tmp_path / "again.json")
    )
    assert holds(new, old)


def test_old_trace_keeps_numbers_of_its_events() -> None:
    """Bytes between ranks, totals of dropped events, memory, layers and the steps of a ring."""
    run, totals, dry, wall = (sp.Trace.load(FOLDER / f"trace_{name}.json") for name in ("run", "totals", "dry", "wall"))
    assert run.communication_matrix().tolist() == [[0, 170], [122, 0]]
    assert [(row["steps"], row["sent_bytes"], row["flops"]) for row in totals.summary()] == [
        (12, 522, 960),
        (12, 474, 960),
    ]
    assert {event.layer for event in dry.events} == {"", "0", "1"}
    assert {len(event.live_bytes) for event in run.events} == {0, 6}
    # They are drawn without the categories that came later.
    assert "parameters" in run.memory().get_legend_handles_labels()[1]
    assert run.html()
    assert {event.step_ps for event in wall.events} == {(), (3000040, 3000040)}
    assert {event.device for event in wall.events} == {0, 1}


# --- schedules ------------------------------------------------------------------------------------

# File -> (the schedule, where its stages are, makespan).
SCHEDULES: dict[str, tuple[Callable[[], Schedule] | None, str, int]] = {
    "1f1b": (partial(pipeline_schedule, "1f1b", 2, 4), "loop", 15),
    "interleaved": (partial(pipeline_schedule, "interleaved_1f1b", 2, 4), "loop", 27),
    "zbv": (partial(pipeline_schedule, "zbv", 2, 4), "v", 25),
    "dualpipe": (partial(pipeline_schedule, "dualpipe", 4, 8), "bidirectional", 26),
    "searched": (None, "loop", 10),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_old_schedule_is_read_whole(name: str) -> None:
    make, placement, makespan = SCHEDULES[name]
    path = FOLDER / f"schedule_{name}.csv"
    schedule = Schedule.load_csv(path, placement=placement)
    schedule.check()
    assert f"; makespan {makespan}, " in str(schedule)
    assert schedule.to_csv() == path.read_text("utf-8")
    if make is not None:
        assert schedule.actions == make().actions


# --- hardware -------------------------------------------------------------------------------------

CLUSTERS = {
    "cluster_preset": (16, "16 x h100 on 2 nodes", (8, 8)),
    "cluster_all_fields": (16, "16 x ascend910 on 2 nodes", (8, 8)),
    "cluster_uneven": (6, "own", (4, 2)),
    "calibration_host": (1, "this-host", (1,)),
    "calibration_gpu": (1, "this-gpu", (1,)),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_old_description_is_read_whole(name: str, tmp_path: Path) -> None:
    cluster = sp.cluster.load_cluster(FOLDER / f"{name}.json")
    assert (cluster.world_size, cluster.name, tuple(map(len, cluster.nodes))) == CLUSTERS[name]
    old, new = saved_again(sp.cluster.ClusterSpec.load, f"{name}.json", tmp_path)
    assert holds(new, old)


def test_old_description_keeps_what_it_slows() -> None:
    """Stragglers, slow links, jitter, tiers and device numbers."""
    spec = sp.cluster.load_cluster(FOLDER / "cluster_all_fields.json")
    assert (spec.stragglers, spec.slow_links) == ({3: 1.5}, {2: 2.0, (0, 4): 3.0})
    assert (spec.jitter, spec.rules) == (sp.cluster.Jitter(0.1, 7), "hccl")
    assert (spec.device_ids, spec.devices_per_rank) == (tuple(range(8)) * 2, 2)
    assert [(tier.name, len(tier.groups)) for tier in spec.tiers] == [("island", 4)]


def layer() -> None:
    net = sp.nn.Linear(4, 4)
    net(np.ones((2, 4), np.float32)).sum().backward()


def test_old_calibrations_give_their_prices() -> None:
    """The measured costs of operations, cores that are shared, and measured collectives."""
    host, gpu = (sp.cluster.load_cluster(FOLDER / f"calibration_{name}.json") for name in ("host", "gpu"))
    assert {"Linear", "Linear.backward", "SGD.step"} <= {*host.device.op_costs} & {*gpu.device.op_costs}
    assert {"read of a value", "copy to the device", "Linear"} <= {*gpu.device.host_costs}
    assert "SGD.step" in gpu.device.host_waits
    assert host.sharing(2) == 0.6396479395887701
    assert sorted(host.measured) == ["all_reduce", "barrier"]
    assert {spec.calibration["date"] for spec in (host, gpu)} == {"2026-11-27T00:55:41+00:00"}
    for name in ("host", "gpu"):
        path = str(FOLDER / f"calibration_{name}.json")
        assert sp.dry_run(layer, cluster=path, unknown=0.0).step_time_s > 0


# --- ranks ----------------------------------------------------------------------------------------


def test_old_rank_tables_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank-table", "check", *(str(FOLDER / f"rank_table_{form}.json") for form in ("1_0", "lab"))]) == 0
    out, err = capsys.readouterr()
    assert "form 1.0, servers: 2, devices: 16" in out
    assert "server 10.0.0.2: ranks 8 … 15" in out
    assert "form lab, servers: 1, devices: 4" in out
    assert "10.*.*.* is masked" in err


def test_old_host_file_is_read() -> None:
    assert sp.cluster.read_host_file(FOLDER / "hostfile") == ((0, 1, 3), (2,))

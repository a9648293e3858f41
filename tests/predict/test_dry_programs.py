"""Whole programs in a dry run: the events and the memory of a real run, and errors where they ask for values."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import programs
import pytest
from hypothesis import given, settings, strategies as st
from programs import PROGRAMS

import simparallel as sp
from simparallel import functions as F, nn, optim
from simparallel.errors import RunFailedError, UnknownValueError
from simparallel.machine.cluster import describe
from simparallel.machine.device import DTYPES
from simparallel.parallel import DistributedDataParallel
from simparallel.predict.dry_run import dry_run
from simparallel.runtime.launcher.settings import Described

cloudpickle.register_pickle_by_value(programs)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """When the collector frees a dropped model is no part of a program."""
    gc.disable()
    yield
    gc.enable()


def observed(results: Any) -> tuple[Any, ...]:
    """Return all events of each device without wall times, and the memory."""
    events = [event._replace(wall_start_ns=0, wall_end_ns=0) for event in results.trace.events]
    # Replicas are threads, so the devices of a rank note their events in any order.
    return sorted(events, key=lambda event: (event.rank, event.device)), results.memory


def check_equal(real: Any, dry: Any) -> None:
    expected, actual = observed(real), observed(dry)
    # One by one first: the first difference says more than all events.
    for one, other in zip(expected[0], actual[0], strict=False):
        assert other == one
    assert actual == expected


@pytest.mark.matrices
@pytest.mark.parametrize("name", PROGRAMS)
def test_dry_program_observed_as_real(name: str) -> None:
    function, args, world_size, described = PROGRAMS[name]
    real = sp.launch(function, args, world_size=world_size, transport="inline", record="full", **described)
    check_equal(real, dry_run(function, args, world_size=world_size, fold=False, **described))


def beside_interpreter(
    world_size: int, settings: dict[str, Any], software: str = "plain", dtype: str = "float32"
) -> dict[str, Any]:
    """Return the settings of a launch with an interpreter beside each device, which computes in a described type."""
    described = {name: settings[name] for name in settings if name in Described.__annotations__}
    cluster = describe(world_size, **described)
    peaks = {1: 600e12, 2: 300e12, 3: 150e12, 4: 20e12}
    device = replace(cluster.device, op_start_s=7e-6, software=software, peak_flops_per_s=peaks)
    others = {name: settings[name] for name in settings if name not in described}
    return others | {"device": replace(cluster, device=device, dtype=dtype)}


@pytest.mark.matrices
@pytest.mark.parametrize(
    ("name", "software", "dtype"),
    [*zip(list(PROGRAMS)[::3], cycle(("plain", "eager")), cycle((*list(DTYPES)[1:], "float32")), strict=False)],
)
def test_programs_beside_interpreters(name: str, software: str, dtype: str) -> None:
    function, args, world_size, described = PROGRAMS[name]
    described = beside_interpreter(world_size, described, software, dtype)
    real = sp.launch(function, args, world_size=world_size, transport="inline", record="full", **described)
    check_equal(real, dry_run(function, args, world_size=world_size, fold=False, **described))


@pytest.mark.process
def test_processes_beside_interpreters() -> None:
    function, args, world_size, described = PROGRAMS["ddp[small buckets]"]
    alone = dry_run(function, args, world_size=world_size, fold=False, **described)
    described = beside_interpreter(world_size, described)
    real = sp.launch(function, args, world_size=world_size, record="full", echo=False, **described)
    dry = dry_run(function, args, world_size=world_size, fold=False, **described)
    check_equal(real, dry)
    # Red control: the device alone is faster.
    assert alone.makespan_s < dry.makespan_s


def captured_steps(count: int) -> None:
    """Add ten times in each step, which is captured."""

    @sp.captured
    def step(x: Any) -> Any:
        for _ in range(10):
            x = x + 1
        return x

    x = sp.Tensor(np.ones(4, np.float32))
    for _ in range(count):
        step(x)


def test_captured_step_costs_one_start() -> None:
    described = beside_interpreter(1, {})
    real = sp.launch(captured_steps, (6,), world_size=1, transport="inline", record="full", **described)
    check_equal(real, dry_run(captured_steps, (6,), **described))
    starts_ps = [event.sim_start_ps for event in real.trace.events]
    # The third call captures; the graph then runs as fast as the device.
    assert starts_ps[:30] == list(range(0, 30 * 7_000_000, 7_000_000))
    assert starts_ps[30] == 31 * 7_000_000
    ends_ps = [event.sim_end_ps for event in real.trace.events]
    assert starts_ps[31:40] == ends_ps[30:39]


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ddp[small buckets]", "float32"),
        ("auto_parallel[layouts data_parallel]", "bfloat16"),
        ("messages[tensors]", "bfloat16"),
    ],
)
def test_dry_program_observed_as_processes(name: str, dtype: str) -> None:
    function, args, world_size, described = PROGRAMS[name]
    described = described | {"dtype": dtype}
    real = sp.launch(function, args, world_size=world_size, record="full", echo=False, **described)
    check_equal(real, dry_run(function, args, world_size=world_size, fold=False, **described))


@pytest.mark.parametrize("name", ["other_collectives[tensors]", "other_collectives[arrays]", "collectives_on_the_tape"])
def test_roots_run_in_a_folded_run(name: str) -> None:
    function, args, world_size, described = PROGRAMS[name]
    whole = dry_run(function, args, world_size=world_size, fold=False, **described)
    folded = dry_run(function, args, world_size=world_size, **described)

    def told(prediction: Any, rank: int) -> list[Any]:
        events = [event for event in prediction.trace.events if event.rank == rank]
        return [(e.name, e.sim_start_ps, e.sim_end_ps, e.flops, e.size_bytes, e.live_bytes) for e in events]

    for rank, like in enumerate(folded.stands_for):
        assert told(folded, like) == told(whole, rank)


LAYERS: dict[str, Callable[[Any, int, int], list[nn.Module]]] = {
    "linear": lambda dtype, a, b: [nn.Linear(a, b, dtype=dtype)],
    "relu": lambda dtype, a, b: [nn.Linear(a, b, bias=False, dtype=dtype), nn.ReLU()],
    "norm": lambda dtype, a, b: [nn.LayerNorm(a, dtype=dtype), nn.Linear(a, b, dtype=dtype), nn.GELU()],
    "batch norm": lambda dtype, a, b: [nn.Linear(a, b, dtype=dtype), nn.BatchNorm1d(b, dtype=dtype)],
    "dropout": lambda dtype, a, b: [nn.Dropout(0.5), nn.Linear(a, b, dtype=dtype), nn.Sigmoid()],
}
OPTIMIZERS = {"SGD": optim.SGD, "Adam": optim.Adam, "RMSprop": optim.RMSprop, "LAMB": optim.LAMB}


def train(layers: list[tuple[str, int]], dtype: str, optimizer: str, cap_mb: float, rows: int, steps: int) -> None:
    sp.manual_seed(0)
    sizes = [3, *(size for _, size in layers)]
    parts = [LAYERS[name](np.dtype(dtype), a, b) for (name, b), a in zip(layers, sizes, strict=False)]
    model = DistributedDataParallel(nn.Sequential(*sum(parts, [])), bucket_cap_mb=cap_mb)
    stepper = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    for _ in range(steps):
        stepper.zero_grad()
        (model(np.ones((rows, 3), dtype)) ** 2).mean().backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.integers(1, 5)), min_size=1, max_size=4),
    st.sampled_from(("float32", "float64", "float16")),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from((1e-5, 1e-4, 25.0)),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_dry_network_observed_as_real(
    layers: list[tuple[str, int]], dtype: str, optimizer: str, cap_mb: float, rows: int, steps: int, world_size: int
) -> None:
    args = layers, dtype, optimizer, cap_mb, rows, steps
    with np.errstate(all="ignore"):
        real = sp.launch(train, args, world_size=world_size, transport="inline", record="full")
    check_equal(real, dry_run(train, args, world_size=world_size, fold=False))


# --- values that a dry run does not know --------------------------------------------------------------


def unknown_loss() -> Any:
    model = nn.Linear(3, 1)
    return (model(np.ones((2, 3), np.float32)) ** 2).mean()


def decide() -> None:
    if unknown_loss().item() > 1:
        raise AssertionError


def repeat() -> None:
    loss = unknown_loss()
    while loss > 0.1:
        loss = loss / 2


def select() -> None:
    y = nn.Linear(3, 2)(np.ones((2, 3), np.float32))
    y[y > 0].sum()


def find() -> None:
    y = nn.Linear(3, 2)(np.ones((2, 3), np.float32))
    np.nonzero(y.numpy())


def convert() -> None:
    np.asarray(unknown_loss())


def compute_elsewhere() -> None:
    np.linalg.norm(nn.Linear(3, 1).weight.numpy())


def add_up() -> None:
    total = 0.0
    total += float(unknown_loss().detach())


def list_() -> None:
    unknown_loss().tolist()


def write() -> None:
    total = sp.Tensor([0.0])
    total += unknown_loss()  # no longer known
    if total > 1:
        raise AssertionError


def receive() -> None:
    buffer = sp.Tensor(np.zeros(()), dtype="float32")
    sp.sendrecv(unknown_loss().detach(), 0, buffer, 0)
    bool(buffer)


def save() -> None:
    sp.save({"weight": nn.Linear(3, 1).weight}, "weights")


def stop() -> None:
    model = nn.Linear(3, 1)
    rows = sp.data.NumpySlicesDataset((np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))).batch(2)
    trained = sp.Model(model, nn.MSELoss(), optim.SGD(model.parameters()))
    trained.train(3, rows, [sp.EarlyStopping("loss")], progress=False)


ASKING = (decide, repeat, select, find, convert, compute_elsewhere, add_up, list_, write, receive, save, stop)


@pytest.mark.parametrize("program", ASKING, ids=lambda program: program.__name__)
def test_question_for_a_value_is_refused(
    program: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFailedError) as found:
        dry_run(program)
    error = found.value.__cause__
    assert isinstance(error, UnknownValueError)
    assert error.facts["place"].startswith(f"{Path(__file__).name}:")
    assert not list(tmp_path.iterdir())


def test_given_value_decides() -> None:
    values = count()

    def program() -> None:
        asked = [
            unknown_loss().item(),
            float(unknown_loss().detach()),
            int(unknown_loss().detach()),
            unknown_loss() > 5,
        ]
        assert asked[:3] == [0, 1, 2]
        assert asked[3]
        assert unknown_loss().item() == 4

    dry_run(program, unknown=lambda: next(values))
    dry_run(decide, unknown=0.5)
    with pytest.raises(RunFailedError, match="AssertionError"):
        dry_run(decide, unknown=2)


def test_unknown_numbers_are_printed() -> None:
    printed: list[str] = []

    def program() -> None:
        loss = unknown_loss()
        number = loss.item()
        weight = nn.Linear(3, 1).weight
        printed.extend(map(str, (loss, number, f"{number:.3f}", f"{2 * number + 1:.1f}", round(number, 2), f"{loss}")))
        printed.extend(map(repr, (loss, weight, weight.numpy(), loss.numpy().sum())))

    dry_run(program)
    assert printed == [
        *("?",) * 6,
        "Tensor(?, shape=(), dtype=float32, requires_grad=True)",
        "Parameter(?, shape=(1, 3), dtype=float32, requires_grad=True, name='weight')",
        "DryArray(shape=(1, 3), dtype=float32)",
        "?",
    ]


def test_known_values_stay_known() -> None:
    def program() -> None:
        labels = sp.Tensor(np.arange(4))
        assert sp.all_reduce(np.array([sp.get_rank()])).item() == 1
        assert F.one_hot(labels, 4).sum().item() == 4
        assert labels[labels > 1].tolist() == [2, 3]
        assert optim.clip_grad_norm_([sp.Tensor(np.ones(2), requires_grad=True)], 1.0) == 0

    dry_run(program, world_size=2, fold=False)


def test_nothing_is_computed_in_a_dry_run() -> None:
    """Red control: a step that would take hours."""

    def program() -> None:
        size = 40_000
        w = nn.Parameter(np.empty((size, size), np.float32))
        y = (w @ w).sum()
        y.backward()
        assert math.prod(w.grad.shape) == size * size

    assert dry_run(program).peak_bytes > 2 * 4 * 40_000**2

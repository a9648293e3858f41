"""How ranks exchange arrays on GPUs: NCCL, shared GPU memory, host memory; on the stand-in, with its race detector."""

from __future__ import annotations

import os
import pickle
import signal
import time
from itertools import product
from pathlib import Path
from typing import Any

import array_backends
import numpy as np
import pytest
from array_backends import LINKS, linked
from hypothesis import given, strategies as st
from refusals import refused
from stand_in import strict, strict_cuda, strict_nccl

import simparallel as sp
from simparallel import backend
from simparallel.arrays.captures import running
from simparallel.comm.gpu import calls, ipc
from simparallel.errors import (
    CollectiveMismatchError,
    DeadlineError,
    DeviceMismatchError,
    InputError,
    RankFailedError,
    RunFailedError,
)
from simparallel.testing import faults

SIZE = 3
GPU = pytest.mark.parametrize("link", LINKS)
TRANSPORTS = pytest.mark.parametrize(
    "transport", ["inline", pytest.param("shm", marks=[pytest.mark.process, pytest.mark.matrices])]
)


def ours(size: int = 6, seed: int = 0) -> sp.Tensor:
    """Return integers that differ by rank, on the rank's GPU."""
    return sp.Tensor(np.random.default_rng([seed, sp.get_rank()]).integers(0, 9, size).astype("float32"))


def run(function: Any, *args: Any, transport: str = "inline", size: int = SIZE, **settings: Any) -> list[Any]:
    return list(sp.launch(function, args, world_size=size, transport=transport, array="cupy", **settings))


# --- the choice ------------------------------------------------------------------------------------------------------


def place(host: str, bus: str, reached: Any = None, nccl: bool = True, asked: str = "") -> dict[str, Any]:
    return {"host": host, "bus": bus, "reached": [bus] if reached is None else reached, "nccl": nccl, "asked": asked}


@pytest.mark.parametrize(
    ("members", "shares_memory", "kind"),
    [
        ([place("a", "0"), place("a", "1")], True, "nccl"),
        ([place("a", "0"), place("b", "0")], False, "nccl"),
        ([place("a", "0"), place("a", "0")], True, "ipc"),
        ([place("a", "0", "01", nccl=False), place("a", "1", "01", nccl=False)], True, "ipc"),
        ([place("a", "0", nccl=False), place("a", "1", nccl=False)], True, "host"),
        ([place("a", "0", "01", nccl=False), place("a", "1", nccl=False)], True, "host"),
        ([place("a", "0"), place("a", "0")], False, "host"),
        ([place("a", "0"), place("b", "0", nccl=False)], False, "host"),
        ([place("a", "0", asked="host"), place("a", "1", asked="host")], True, "host"),
        ([place("a", "0", asked="ipc"), place("a", "0", asked="ipc")], True, "ipc"),
    ],
)
def test_choice(members: Any, shares_memory: bool, kind: str) -> None:
    assert calls.choose(members, shares_memory=shares_memory)[0] == kind


@pytest.mark.parametrize("asked", [("nccl", "nccl"), ("ipc", "host"), ("tcp", "tcp")])
def test_impossible_request_is_refused(asked: tuple[str, str]) -> None:
    with refused(InputError):
        calls.choose([place("a", "0", asked=one) for one in asked], shares_memory=True)


def reduced() -> list[float]:
    return sp.all_reduce(ours()).tolist()


@pytest.mark.parametrize(("devices", "link"), [(8, "nccl"), (1, "ipc"), (2, "ipc")])
def test_choice_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], devices: int, link: str
) -> None:
    """Two of three ranks share a GPU where there are two."""
    monkeypatch.setattr(strict_cuda, "num_devices", devices)
    if devices == 2:
        monkeypatch.setattr(strict_cuda.runtime, "deviceCanAccessPeer", lambda *numbers: 1)
    run(lambda: [reduced(), reduced()])
    notes = [line for line in capfd.readouterr().err.splitlines() if "note" in line]
    assert len(notes) == 1
    assert calls._NAMES[link] in notes[0]


# --- values ----------------------------------------------------------------------------------------------------------


def several_groups() -> list[Any]:
    """Use overlapping groups with other orders of ranks, and a group in reverse."""
    first, second = sp.new_group([0, 1]), sp.new_group([2, 1])
    reverse = sp.new_group([2, 1, 0])
    x, results = ours(), []
    works = [sp.all_reduce(x * 1, group=group, async_op=True) for group in (first, second) if group.rank is not None]
    results += [work.wait().tolist() for work in works]
    results.append(sp.all_gather(x, group=reverse).tolist())
    return [*results, sp.reduce_scatter(x, group=reverse).tolist(), sp.broadcast(x, 1).tolist()]


def crossing() -> list[Any]:
    """Start collectives of two groups in an order that differs by rank; each is the first of its group."""
    groups = [sp.new_group([0, 1, 2]), sp.new_group([2, 1, 0])]
    turn = 1 if sp.get_rank() == 1 else -1
    works = {group.name: sp.all_reduce(ours(1 << 19), group=group, async_op=True) for group in groups[::turn]}
    return [float(works[group.name].wait().sum().item()) for group in groups]


def growing() -> list[Any]:
    """Reduce growing sizes while earlier calls are in progress, and 0 and 1 elements."""
    results = []
    for size in (0, 1, 1 << 10, 1 << 19, 3, 1 << 20):
        arrays = [ours(size, seed) for seed in range(3)]
        works = [sp.all_reduce(x, async_op=True) for x in arrays]
        results += [float(work.wait().sum().item()) for work in works]
    return results


def strided() -> list[Any]:
    """Use arguments and results that are not contiguous, and large enough to share the work."""
    x = sp.Tensor(np.arange(1 << 19, dtype="float32").reshape(512, -1) % 7 + sp.get_rank()).data.T
    y = sp.all_reduce(x, "max")
    out = sp.Tensor(np.zeros((512, 1024), "float32")).data.T
    return [float(a.sum()) for a in (y, sp.all_reduce(x, out=out), sp.broadcast(x, 2))]


def own_results() -> list[Any]:
    """Write results to arrays that overlap the argument."""
    x = ours(8).data
    a = sp.all_reduce(x[:6], out=x[2:]).tolist()
    y = ours(9).data
    b = sp.all_gather(y[3 * sp.get_rank() :][:3], out=y).tolist()
    z = ours(9).data
    return [a, b, sp.reduce_scatter(z, out=z[:3]).tolist(), sp.all_to_all(z, out=z).tolist()]


def reductions() -> list[Any]:
    results = []
    for dtype, op in product(("float32", "float16", "int64", "uint8", "int16", "bool"), calls_ops()):
        x = sp.Tensor(ours().numpy().astype(dtype))
        if not (dtype.startswith("float") and op in ("and", "xor", "lor")) and not (op == "mean" and dtype[0] != "f"):
            results.append(sp.all_reduce(x, op).tolist())
    return results


def calls_ops() -> tuple[str, ...]:
    return "sum", "mean", "prod", "max", "min", "and", "xor", "lor"


PROGRAMS = several_groups, crossing, growing, strided, own_results, reductions


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@GPU
def test_programs_over_each_link(link: str, program: Any) -> None:
    """Programs give NumPy's bits: sums of small integers are exact in any order."""
    expected = list(sp.launch(program, world_size=SIZE, transport="inline"))
    with linked(link):
        assert run(program) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("transport", ["inline", "shm"])
@pytest.mark.parametrize("link", LINKS)
def test_programs_on_a_gpu(monkeypatch: pytest.MonkeyPatch, link: str, transport: str, program: Any) -> None:
    """Use NCCL where there are enough GPUs; else ranks share one, or access each other's memory."""
    if link == "nccl" and (backend.device_count() < SIZE or not backend.gpu_nccl().available):
        pytest.skip(f"needs {SIZE} GPUs and a CuPy with NCCL")
    monkeypatch.setenv(calls.VARIABLE, link)
    settings = array_backends.ArrayBackend("cupy").run_settings
    found = list(sp.launch(program, world_size=SIZE, transport=transport, **settings))
    assert found == list(sp.launch(program, world_size=SIZE, transport="inline"))


@pytest.mark.process
@pytest.mark.parametrize(
    "link", ["ipc", *(pytest.param(link, marks=pytest.mark.matrices) for link in ("nccl", "host"))]
)
def test_processes_over_each_link(link: str) -> None:
    expected = list(sp.launch(several_groups, world_size=SIZE))
    with linked(link):
        assert run(several_groups, transport="shm") == expected


@pytest.mark.matrices
@pytest.mark.process
def test_shared_memory_gives_the_bits_of_the_host() -> None:
    """Even where the order of a sum matters."""
    expected = list(sp.launch(rounding, world_size=4))
    with linked("ipc"):
        assert run(rounding, transport="shm", size=4) == expected


def rounding() -> bytes:
    x = sp.Tensor(np.random.default_rng(sp.get_rank()).standard_normal(1 << 19).astype("float32"))
    return bytes(sp.all_reduce(x).numpy().tobytes())


@given(st.integers(1, 5), st.integers(0, 40), st.sampled_from(["sum", "mean", "max"]), st.data())
def test_any_size_over_any_link(size: int, count: int, op: str, data: Any) -> None:
    link = data.draw(st.sampled_from(sorted(LINKS)))
    parts = [np.random.default_rng(rank).integers(-9, 9, (size, count)) * size for rank in range(size)]

    def program() -> list[Any]:
        x = sp.Tensor(parts[sp.get_rank()].astype("float32"))
        return [
            sp.reduce_scatter(x, 0, op).tolist(),
            sp.all_to_all(x, 0, 1).tolist(),
            sp.all_gather(x, 1).tolist(),
            sp.reduce(x * 1, size - 1, op).tolist(),
        ]

    whole = np.stack(parts).astype("float32")
    total = {"sum": whole.sum(0), "mean": whole.mean(0), "max": whole.max(0)}[op]
    with linked(link):
        found = run(program, size=size)
    for rank, (scattered, exchanged, gathered, at_last) in enumerate(found):
        np.testing.assert_array_equal(scattered, total[rank : rank + 1])
        np.testing.assert_array_equal(exchanged, np.concatenate(whole[:, rank : rank + 1], 1))
        np.testing.assert_array_equal(gathered, np.concatenate(whole, 1))
        if rank == size - 1:
            np.testing.assert_array_equal(at_last, total)


# --- streams ---------------------------------------------------------------------------------------------------------


def early(polls: bool) -> list[float]:
    x = ours()
    work = sp.all_reduce(x, async_op=True)
    for _ in range(9):
        sp.comm.current().progress()
    while polls and not work.is_completed():
        pass
    y = (x.data + 1).sum()
    work.wait()
    return [float(y), float(x.data.sum() + 6)]


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_result_before_wait_is_a_race(link: str) -> None:
    """The host is done long before the GPU: only `wait`, or a work that is completed, orders the streams."""
    with linked(link), pytest.raises(RunFailedError, match="StreamRaceError"):
        run(early, False)
    with linked(link):
        assert all(found == expected for found, expected in run(early, True))


def dropped() -> sp.Tensor:
    """Return an array that a work still changes."""
    x = ours()
    sp.all_reduce(x, async_op=True)
    return x


@pytest.mark.parametrize(
    "transport", ["inline", pytest.param("shm", marks=[pytest.mark.process, pytest.mark.matrices])]
)
@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_work_without_wait_ends_with_the_rank(link: str, transport: str) -> None:
    expected = [x.tolist() for x in sp.launch(dropped, world_size=SIZE, transport="inline")]
    with linked(link):
        assert [x.tolist() for x in run(dropped, transport=transport)] == expected


def leaving() -> int:
    """Return at once on one rank, while another one computes longer than any rank waits."""
    reduced()
    return hold_up(1.0) if sp.get_rank() == 1 else 0


def hold_up(seconds: float) -> int:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass
    return 0


@pytest.mark.matrices
@pytest.mark.process
@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_end_of_a_rank_waits_for_no_other(link: str) -> None:
    with linked(link):
        assert run(leaving, transport="shm", timeout_s=0.5) == [0] * SIZE


def gathers() -> float:
    """Gather eight times what fits a few times."""
    x, total = ours(1 << 17), 0.0
    for _ in range(8):
        whole = sp.all_gather(x)
        total += float(whole.sum().item())
        del whole
    return total


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_memory_is_free_after_wait(link: str) -> None:
    with linked(link):
        run(gathers, device_memory="7MB")
        with pytest.raises(RunFailedError, match="DeviceOutOfMemoryError"):
            run(gathers, device_memory="2MB")


def two_groups() -> list[float]:
    """Start collectives of two groups in an order that differs by rank, and read the result of the second first."""
    groups = [sp.new_group([0, 1, 2]), sp.new_group([2, 1, 0])]
    turn = 1 if sp.get_rank() == 1 else -1
    first, second = (sp.all_reduce(ours(), group=group, async_op=True) for group in groups[::turn])
    return [float(work.wait().sum().item()) for work in (second, first)]


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_read_lets_other_collectives_go_on(link: str) -> None:
    with linked(link):
        assert len({tuple(sorted(found)) for found in run(two_groups)}) == 1


def special(dtype: str) -> list[Any]:
    """NaN in a maximum, and sums that float16 rounds."""
    values = np.array([np.nan if sp.get_rank() == 1 else 1.0, 2048.0 if sp.get_rank() == 0 else 1.0], dtype)
    return [str(sp.all_reduce(sp.Tensor(values.copy()), op).tolist()) for op in ("max", "min", "sum", "mean")]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@GPU
def test_special_values_are_those_of_the_host(link: str, dtype: str) -> None:
    expected = list(sp.launch(special, (dtype,), world_size=SIZE, transport="inline"))
    with linked(link):
        assert run(special, dtype) == expected


def on_own_stream() -> list[float]:
    gpu = running.device
    assert gpu is not None
    x = ours()
    stream = gpu.cuda.Stream(non_blocking=True)
    stream.wait_event(gpu.mark(gpu.compute))
    with stream:
        y = sp.all_reduce(x * 2) + 1
    gpu.compute.wait_event(gpu.mark(stream))
    return y.tolist()


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_collective_on_the_current_stream(link: str) -> None:
    with linked(link):
        assert len(set(map(tuple, run(on_own_stream)))) == 1


def elsewhere() -> None:
    gpu = running.device
    assert gpu is not None
    x = ours()
    with gpu.cuda.Device(gpu.number + 1):
        sp.all_reduce(x)


def test_array_of_another_gpu_is_refused() -> None:
    with linked("nccl"), pytest.raises(RunFailedError) as caught:
        run(elsewhere)
    assert isinstance(caught.value.__cause__, DeviceMismatchError)


def failing() -> None:
    reduced()
    raise ValueError("an error of the program")


@pytest.mark.parametrize(
    "transport", ["inline", pytest.param("shm", marks=[pytest.mark.process, pytest.mark.matrices])]
)
@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_error_of_the_program_stays(monkeypatch: pytest.MonkeyPatch, link: str, transport: str) -> None:
    """Also if NCCL cannot abort; and failed runs leave no memory behind."""

    def refuse(self: Any) -> None:
        raise strict_nccl.NcclError("no abort")

    if transport == "inline":
        monkeypatch.setattr(strict_nccl.NcclCommunicator, "abort", refuse)
    before = len(strict_cuda._allocated), len(strict_cuda._kept_events)
    with linked(link), pytest.raises(RunFailedError, match="an error of the program"):
        run(failing, transport=transport)
    assert (len(strict_cuda._allocated), len(strict_cuda._kept_events)) == before


def test_failure_of_the_gpu_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event behind an operation that failed is never passed."""

    def program() -> None:
        monkeypatch.setattr(strict_cuda.runtime, "eventQuery", lambda event: 700)
        ours().numpy()

    with linked("ipc"), pytest.raises(RunFailedError, match="CUDA error 700"):
        run(program, size=1)


def endless() -> None:
    """Start collectives and read nothing; one rank dies."""
    x = ours()
    sp.all_reduce(x)
    if sp.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    link = next(iter(sp.comm.current().media.values()))._links[0]
    link._comm.allReduce(x.data.data.ptr, x.data.data.ptr, 6, strict_nccl.NCCL_FLOAT32, 0, link.stream.ptr)
    while not link.stream.done:
        pass


@pytest.mark.process
def test_watchdog_aborts_beside_a_busy_thread() -> None:
    """The rank's thread waits inside of CUDA, where it cannot look at the others."""
    with linked("nccl"), pytest.raises(RunFailedError, match="rank 1"):
        run(endless, transport="shm")


def training_step() -> tuple[list[str], list[str]]:
    waits = []
    for wrap in (False, True):
        model: Any = sp.nn.Sequential(sp.nn.Linear(6, 4), sp.nn.ReLU(), sp.nn.Linear(4, 2))
        model = sp.parallel.DistributedDataParallel(model) if wrap else model
        optimizer, x = sp.optim.Adam(model.parameters()), ours(12).reshape(2, 6)
        for _ in range(2):
            with strict.host_waits() as names:
                loss = (model(x) ** 2).sum()
                optimizer.zero_grad()
                loss.backward(check_finite=False)
                optimizer.step()
        waits.append(names)
    return waits[0], waits[1]


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_step_of_ddp_waits_for_no_gpu(link: str) -> None:
    with linked(link):
        for alone, together in run(training_step):
            assert alone == together == []


def test_steps_through_the_host_wait() -> None:
    """Red control: copies through the host do wait."""
    with linked("host"):
        assert all(together for _, together in run(training_step))


# --- errors ----------------------------------------------------------------------------------------------------------


def one_on_the_host() -> None:
    x = ours()
    sp.all_reduce(x.numpy().copy() if sp.get_rank() == 1 else x)


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_host_and_gpu_arrays_are_a_mismatch(link: str) -> None:
    """Both at the first call, where GPUs connect, and at later ones."""

    def later() -> None:
        reduced()
        one_on_the_host()

    for program in (one_on_the_host, later):
        with linked(link), pytest.raises(RunFailedError) as caught:
            run(program)
        assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def different_shapes() -> None:
    reduced()
    sp.all_reduce(ours(3 + sp.get_rank() // 2))


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_mismatch_starts_nothing(link: str) -> None:
    with linked(link), pytest.raises(RunFailedError) as caught:
        run(different_shapes)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def bad_out(case: str) -> None:
    x = ours()
    arguments: dict[str, Any] = {
        "shape": {"out": ours(5)},
        "dtype": {"out": sp.Tensor(np.zeros(6, "float64"))},
        "op": {"op": "median"},
    }[case]
    sp.all_reduce(x, **arguments)


@pytest.mark.parametrize("case", ["shape", "dtype", "op"])
def test_bad_arguments_are_refused(case: str) -> None:
    with linked("ipc"), pytest.raises(RunFailedError) as caught:
        run(bad_out, case)
    assert isinstance(caught.value.__cause__, sp.errors.InputError | sp.errors.ShapeError | sp.errors.DTypeError)


def repeated() -> None:
    for _ in range(4):
        reduced()


@pytest.mark.process
@pytest.mark.parametrize(
    ("link", "phase"),
    [
        ("ipc", "reduce"),
        # Each phase, and each link at several; the other pairs with all faults.
        *(
            pytest.param(
                link, phase, marks=pytest.mark.matrices if (link == "nccl") is (i % 2 == 0) else pytest.mark.faults
            )
            for i, phase in enumerate(("enter", "published", "reduce", "leave", "returned"))
            for link in ("nccl", "ipc")
            if (link, phase) != ("ipc", "reduce")
        ),
    ],
)
def test_death_at_any_phase_is_told(link: str, phase: str) -> None:
    """The others raise, and name the rank; the next run on fresh ranks works."""
    with linked(link), sp.Cluster(SIZE, array="cupy", echo=False, timeout_s=30) as cluster:
        fault = faults.inject(rank=1, op="all_reduce", seq=5, phase=phase, action="SIGKILL")
        with fault, pytest.raises(RunFailedError) as caught:
            cluster.run(repeated)
        assert "rank 1" in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
        assert cluster.run(reduced)[0] == cluster.run(reduced)[1]


def never_started() -> None:
    """Let a GPU wait for a collective that the other ranks never start on their GPUs."""
    x = ours()
    sp.all_reduce(x * 1)
    if sp.get_rank() == 0:
        link = next(iter(sp.comm.current().media.values()))._links[0]
        link._comm.allReduce(x.data.data.ptr, x.data.data.ptr, 6, strict_nccl.NCCL_FLOAT32, 0, link.stream.ptr)
        link.gpu.compute.wait_event(link.gpu.mark(link.stream))
        x.numpy()


def test_wait_for_a_gpu_has_a_limit() -> None:
    with linked("nccl"), pytest.raises(RunFailedError) as caught:
        run(never_started, timeout_s=0.5)
    assert isinstance(caught.value.__cause__, DeadlineError | RankFailedError)


class BrokenNccl(strict_nccl.NcclCommunicator):
    def check_async_error(self) -> None:
        raise strict_nccl.NcclError("NCCL_ERROR_REMOTE_ERROR: a peer has gone")


def test_error_of_nccl_names_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_nccl, "NcclCommunicator", BrokenNccl)
    with linked("nccl"), pytest.raises(RunFailedError, match="NCCL failed in world"):
        run(never_started)


# --- nothing is left -------------------------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.matrices
@pytest.mark.process
@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_warm_ranks_leave_nothing(link: str) -> None:
    """No shared memory is left, and no files of the stand-in's NCCL."""
    folders = set(Path("/tmp").glob("strict-nccl-*"))
    with linked(link), sp.Cluster(SIZE, array="cupy", echo=False) as cluster:
        counts = []
        for _ in range(4):
            cluster.run(growing)
            counts.append(list(cluster.run(open_files)))
    assert counts[1] == counts[-1]
    assert set(Path("/tmp").glob("strict-nccl-*")) == folders


def test_programs_reach_both_ways_of_all_reduce() -> None:
    """The programs above reach both ways of an all_reduce."""
    assert ipc.ROOMS == 2
    assert 4 * (1 << 18) <= ipc.SHARED_WORK_BYTES < 4 << 19


def test_all_backends_are_linked() -> None:
    assert set(array_backends.LINKS) == set(calls.LINKS)

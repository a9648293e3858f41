"""Communication hooks: float16 transfer and PowerSGD."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.clock.event import COMPUTE
from simparallel.errors import InputError
from simparallel.nn import Linear, Module, Parameter, Sequential
from simparallel.parallel import DistributedDataParallel, PowerSGDState
from simparallel.parallel.ddp import comm_hooks
from simparallel.parallel.ddp.distributed import MIB

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Weights(Module):
    """Parameters of any shapes; the caller chooses their gradients."""

    def __init__(self, shapes: Any, dtype: Any = np.float64) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"w{i}", Parameter(np.zeros(shape, dtype)))

    def forward(self, grads: list[np.ndarray]) -> sp.Tensor:
        terms = [(p * g).sum() for p, g in zip(self.parameters(), grads, strict=True)]
        return sum(terms[1:], terms[0])


SHAPES = ((6, 8), (5,), (9, 2, 3), (), (4, 4), (1, 7), (0, 3), (12, 12))


def gradients(rank: int, step: int, shapes: Any = SHAPES, dtype: Any = np.float64) -> list[np.ndarray]:
    rng = np.random.default_rng((rank, step))
    return [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def mean_of(size: int, step: int) -> list[np.ndarray]:
    return [np.mean(parts, axis=0) for parts in zip(*(gradients(r, step) for r in range(size)), strict=True)]


def reduced(state: Any, hook: Any, steps: int, cap_bytes: int = 10**6, dtype: Any = np.float64) -> Any:
    """Return the gradients after each step, and the state."""
    ddp = DistributedDataParallel(Weights(SHAPES, dtype), bucket_cap_mb=cap_bytes / MIB)
    ddp.register_comm_hook(state, hook)
    found = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(gradients(sp.get_rank(), step, dtype=dtype)).backward()
        found.append([np.array(p.grad.data) for p in ddp.parameters()])
    return found, state


# --- simple hooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_float16_transfer(world, dtype):
    """Rounded to float16, summed in float32, rounded once more."""

    def program():
        return reduced(None, comm_hooks.fp16_compress_hook, 2, 300, dtype)[0]

    for found in world.run(3, program):
        for step, grads in enumerate(found):
            parts = zip(*(gradients(r, step, dtype=dtype) for r in range(3)), strict=True)
            for got, (a, b, c) in zip(grads, parts, strict=True):
                narrow = [np.asarray(part, np.float16).astype(np.float32) for part in (a, b, c)]
                expected = ((narrow[0] + narrow[1] + narrow[2]) / 3).astype(np.float16)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got, expected)


def test_float16_halves_the_bytes(inline):
    def program(hook: Any):
        reduced(None, hook, 1, dtype="float32")

    plain, narrow = (
        inline.run(2, program, hook).trace for hook in (comm_hooks.mean_hook, comm_hooks.fp16_compress_hook)
    )

    def size_bytes(trace):
        return [e.size_bytes for e in trace.events if e.name == "all_reduce" and e.rank == 0]

    assert size_bytes(plain) == [2 * size for size in size_bytes(narrow)]
    assert [e.kind for e in narrow.events if e.name == "cast_gradients" and e.rank == 1] == ["backward"] * 2


def test_wrapped_hook_gets_float16(inline):
    def program():
        seen = []

        def hook(state: Any, bucket: Any) -> Any:
            seen.append((bucket.buffer().dtype.name, len(bucket.parameters())))
            return sp.all_reduce(bucket.buffer(), "max", async_op=True)

        found, _ = reduced(None, comm_hooks.fp16_compress_wrapper(hook), 1, dtype="float32")
        return seen, found[0][1]

    for seen, grad in inline.run(2, program):
        assert seen == [("float16", 8)]
        expected = np.maximum(*(gradients(r, 0)[1].astype(np.float32).astype(np.float16) for r in range(2)))
        np.testing.assert_array_equal(grad, expected)


def test_state_may_be_a_group(inline):
    def alone():
        groups = [sp.new_group([0, 1]), sp.new_group([2])]
        group = groups[sp.get_rank() // 2]
        ddp = DistributedDataParallel(Weights(SHAPES), process_group=group)
        ddp.register_comm_hook(None, comm_hooks.sum_hook)  # None: the group of the model
        ddp(gradients(sp.get_rank(), 0)).backward()
        return [np.array(p.grad.data) for p in ddp.parameters()]

    first, second, third = inline.run(3, alone)
    for a, b, c, ours in zip(first, second, third, gradients(2, 0), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(c, ours)

    def with_state():
        ddp = DistributedDataParallel(Weights(SHAPES))
        halves = [sp.new_group([0, 1]), sp.new_group([2, 3])]
        ddp.register_comm_hook(halves[sp.get_rank() // 2], comm_hooks.allreduce_hook)
        ddp(gradients(sp.get_rank(), 0)).backward()
        return np.array(ddp.module.w1.grad.data)

    results = inline.run(4, with_state)
    for rank, got in enumerate(results):
        pair = [gradients(r, 0)[1] for r in (rank // 2 * 2, rank // 2 * 2 + 1)]
        np.testing.assert_array_equal(got, (pair[0] + pair[1]) / 2)


# --- PowerSGD -------------------------------------------------------------------------------------------


def is_compressed(shape: tuple[int, ...], rank: int, rate: float) -> bool:
    n, m = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (0, 0)
    return (n + m) * min(n, m, rank) * rate < n * m


settings = st.fixed_dictionaries(
    {
        "matrix_approximation_rank": st.integers(1, 3),
        "start_powerSGD_iter": st.integers(0, 2),
        "min_compression_rate": st.sampled_from((0.2, 1, 2)),
        "use_error_feedback": st.booleans(),
        "warm_start": st.booleans(),
    }
)


def test_powersgd_matches_the_paper(inline):
    """Beside a few lines of NumPy on the mean gradient, for any settings, ranks and buckets."""

    def paper(size: int, steps: int, setting: dict[str, Any], first_q: dict[Any, np.ndarray]) -> list[Any]:
        r = setting["matrix_approximation_rank"]
        q: dict[int, np.ndarray] = {}
        error: dict[int, Any] = dict.fromkeys(range(len(SHAPES)), 0.0)
        outputs = []
        for step in range(steps):
            output = mean_of(size, step)
            for i, shape in enumerate(SHAPES):
                if step < setting["start_powerSGD_iter"] or not is_compressed(
                    shape, r, setting["min_compression_rate"]
                ):
                    continue
                m = output[i].reshape(shape[0], -1) + error[i]
                if i not in q or not setting["warm_start"]:
                    q[i] = first_q[i, step]
                p, _ = np.linalg.qr(m @ q[i])
                q[i] = m.T @ p
                if setting["use_error_feedback"]:
                    error[i] = m - p @ q[i].T
                output[i] = (p @ q[i].T).reshape(shape)
            outputs.append(output)
        return outputs

    def program(setting: dict[str, Any], cap_bytes: int):
        drawn: dict[Any, np.ndarray] = {}
        state = PowerSGDState(**setting)

        def hook(state: Any, bucket: Any) -> Any:
            step = state.iter
            work = comm_hooks.powerSGD_hook(state, bucket)
            factors = state._factors[bucket.index()]
            numbers = {id(p): i for i, p in enumerate(model.parameters())}
            for matrix in factors.matrices:
                drawn[numbers[id(bucket.parameters()[matrix.number])], step] = np.array(matrix.q)
            return work

        model = Weights(SHAPES)
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap_bytes / MIB)
        ddp.register_comm_hook(state, hook)
        found = []
        for step in range(4):
            ddp.zero_grad()
            ddp(gradients(sp.get_rank(), step)).backward()
            found.append([np.array(p.grad.data) for p in model.parameters()])
        return found, drawn

    def body(case: Any) -> None:
        size, setting, cap_bytes = case
        results = inline.run(size, program, setting, cap_bytes)
        expected = paper(size, 4, setting, results[0][1])
        for found, _ in results:
            for step, grads in enumerate(found):
                for got, wanted, first in zip(grads, expected[step], results[0][0][step], strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-9)
                    assert got.tobytes() == first.tobytes()

    caps = st.sampled_from((10**6, 800, 1))
    inline.check(st.tuples(st.integers(1, 8), settings, caps), body, parts=2)


@pytest.mark.process
def test_powersgd_gives_processes_the_same_bits():
    def program():
        return reduced(PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=1), comm_hooks.powerSGD_hook, 4)[
            0
        ]

    with World("shm") as world, World("inline") as inline:
        results = world.run(3, program)
        (expected, *_) = inline.run(3, program)
    for found in results:
        for grads, wanted in zip(found, expected, strict=True):
            for got, other in zip(grads, wanted, strict=True):
                assert got.tobytes() == other.tobytes()


def test_error_feedback_loses_nothing(inline):
    """The reduced gradients of all steps, plus the remaining error, are the sum of all mean gradients."""

    def program(feedback: bool):
        state = PowerSGDState(start_powerSGD_iter=0, min_compression_rate=0.5, use_error_feedback=feedback)
        found, _ = reduced(state, comm_hooks.powerSGD_hook, 6)
        (factors,) = state._factors.values()
        errors = {len(SHAPES) - 1 - m.number: m.error for m in factors.matrices}
        return [sum(grads[i] for grads in found) for i in range(len(SHAPES))], errors

    for feedback in (True, False):
        results = inline.run(3, program, feedback)
        totals, errors = results[0]
        assert len(errors) >= 3
        for i, shape in enumerate(SHAPES):
            expected = sum(mean_of(3, step)[i] for step in range(6))
            left = 0.0
            if feedback and i in errors:
                left = np.mean([rank_errors[i] for _, rank_errors in results], axis=0).reshape(shape)
            equal = np.allclose(totals[i] + left, expected, rtol=0, atol=1e-10)
            lossy = i in errors and min(shape) > 1  # one row already has rank 1
            assert equal == (feedback or not lossy)


def test_low_rank_gradient_is_exact(inline):
    def program():
        rng = np.random.default_rng(0)
        grads = [rng.standard_normal((12, 2)) @ rng.standard_normal((2, 10))]
        ddp = DistributedDataParallel(Weights([(12, 10)]))
        ddp.register_comm_hook(
            PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0), comm_hooks.powerSGD_hook
        )
        ddp(grads).backward()
        np.testing.assert_allclose(ddp.module.w0.grad.data, grads[0], atol=1e-12)
        return True

    assert all(inline.run(2, program))


def test_zero_gradient_keeps_the_warm_start(inline):
    def program():
        ddp = DistributedDataParallel(Weights([(12, 10)]))
        state = PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0, use_error_feedback=False)
        ddp.register_comm_hook(state, comm_hooks.powerSGD_hook)
        rng = np.random.default_rng(0)
        low = rng.standard_normal((12, 2)) @ rng.standard_normal((2, 10))
        for grad in (np.zeros((12, 10)), low, low):
            ddp.zero_grad()
            ddp([grad]).backward()
        np.testing.assert_allclose(ddp.module.w0.grad.data, low, atol=1e-10)
        return True

    assert all(inline.run(1, program))


def test_powersgd_reports_compression(inline):
    def program():
        state = PowerSGDState(matrix_approximation_rank=1, start_powerSGD_iter=2)
        reduced(state, comm_hooks.powerSGD_hook, 3)
        return state.compression_stats(), state.iter

    whole = sum(int(np.prod(shape)) for shape in SHAPES)
    sent = sum(
        shape[0] + int(np.prod(shape[1:])) if is_compressed(shape, 1, 2) else int(np.prod(shape)) for shape in SHAPES
    )
    total = 2 * whole + sent
    assert list(inline.run(2, program)) == [((3 * whole / total, 3 * whole, total), 3)] * 2
    assert PowerSGDState().compression_stats() == (0.0, 0, 0)


def test_powersgd_products_take_the_peak_of_products():
    """A device whose other operations are slow multiplies as fast as before."""

    def program():
        reduced(PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0), comm_hooks.powerSGD_hook, 1)

    spec = sp.cluster.describe(2)
    slow = replace(spec, device=replace(spec.device, vector_flops_per_s={8: 1e6}))
    durations = [
        [
            event.sim_end_ps - event.sim_start_ps
            for event in prediction.trace.events
            if event.name.startswith("PowerSGD")
        ]
        for prediction in (sp.dry_run(program, world_size=2, cluster=each) for each in (spec, slow))
    ]
    assert durations[0] == durations[1] != []


def test_model_learns_with_compressed_gradients(inline):
    """Least squares by gradients of rank 1 with error feedback: the same solution."""

    def program():
        rng = np.random.default_rng(0)
        x, solution = rng.standard_normal((40, 12)), rng.standard_normal((12, 12))
        rows = slice(sp.get_rank() * 20, sp.get_rank() * 20 + 20)
        model = Linear(12, 12, bias=False, dtype=np.float64)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(PowerSGDState(start_powerSGD_iter=5), comm_hooks.powerSGD_hook)
        optimizer = sp.optim.SGD(ddp.parameters(), lr=1.0)
        loss_fn = sp.nn.MSELoss()
        for _ in range(300):
            loss = loss_fn(ddp(x[rows]), (x @ solution)[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss)

    assert max(inline.run(2, program)) < 1e-3


@pytest.mark.parametrize(
    "setting",
    [{"matrix_approximation_rank": 0}, {"start_powerSGD_iter": -1}, {"random_seed": 1.5}, {"min_compression_rate": 0}],
)
def test_bad_settings_are_refused(setting):
    with refused(InputError):
        PowerSGDState(**setting)


def test_powersgd_needs_its_state(inline):
    def program():
        ddp = DistributedDataParallel(Weights([(3, 3)]))
        ddp.register_comm_hook(None, comm_hooks.powerSGD_hook)
        with refused(InputError):
            ddp(gradients(0, 0, [(3, 3)])).backward()
        return True

    assert all(inline.run(1, program))


# --- time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mean_hook", "fp16_compress_hook", "powerSGD_hook"])
def test_hooks_overlap_with_backward(world, name):
    def program():
        model = Sequential(*[Linear(64, 64, dtype=np.float64) for _ in range(4)])
        ddp = DistributedDataParallel(model, bucket_cap_mb=40_000 / MIB)
        state = PowerSGDState(start_powerSGD_iter=0) if name == "powerSGD_hook" else None
        ddp.register_comm_hook(state, getattr(comm_hooks, name))
        ddp(np.ones((8, 64))).sum().backward()
        return len(ddp._reducer.buckets)

    results = world.run(2, program)
    assert list(results) == [4, 4]
    for rank in range(2):
        own = [event for event in results.trace.events if event.rank == rank]
        products = [e for e in own if e.name.endswith(".backward") and e.stream == COMPUTE]
        sent = [e for e in own if e.name == "all_reduce"]
        assert sent[0].sim_start_ps < max(e.sim_end_ps for e in products)
        if name == "powerSGD_hook":  # the Qs follow at the end of backward
            assert sent[-1].sim_start_ps >= max(e.sim_end_ps for e in products)

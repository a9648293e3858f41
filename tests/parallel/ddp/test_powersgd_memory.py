"""PowerSGD's state from step to step: an overflow does not spoil it, and a checkpoint keeps it."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from refusals import refused
from test_comm_hooks import SHAPES, Weights, gradients, mean_of

import simparallel as sp
from simparallel import nn, optim
from simparallel.errors import StateDictError
from simparallel.parallel import DistributedDataParallel, PowerSGDState
from simparallel.parallel.ddp import comm_hooks
from simparallel.parallel.ddp.distributed import MIB
from simparallel.train import CheckpointConfig, Model, ModelCheckpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["test_comm_hooks"])

SETTINGS = st.fixed_dictionaries(
    {
        "matrix_approximation_rank": st.integers(1, 3),
        "start_powerSGD_iter": st.integers(0, 2),
        "min_compression_rate": st.sampled_from((0.2, 1, 2)),
        "use_error_feedback": st.booleans(),
        "warm_start": st.booleans(),
    }
)
CAPS = st.sampled_from((10**6, 800, 1))


def wrapped(state: PowerSGDState, cap_bytes: int, dtype: Any = np.float64) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Weights(SHAPES, dtype), bucket_cap_mb=cap_bytes / MIB)
    ddp.register_comm_hook(state, comm_hooks.powerSGD_hook)
    return ddp


def reduce(ddp: DistributedDataParallel, grads: list[np.ndarray]) -> list[np.ndarray]:
    ddp.zero_grad()
    ddp(grads).backward(check_finite=False)
    return [np.array(parameter.grad.data) for parameter in ddp.parameters()]


def errors_of(state: PowerSGDState) -> list[Any]:
    return [errors for bucket in state.state_dict()["buckets"].values() for errors in bucket["errors"]]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        (x is y is None) or np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True)
    )


# --- overflows ------------------------------------------------------------------------------------------


# The weights that shrink at rank 1 and rate 0.5, in the order of the bucket, which is the reverse of the model's.
COMPRESSED = [7, 5, 4, 2, 0]


def test_overflow_keeps_the_state(inline):
    """An overflow on any rank, in any weight: NaN for all in this step, and the other steps lose nothing."""

    def program(culprit: int, number: int, value: float):
        state = PowerSGDState(start_powerSGD_iter=0, min_compression_rate=0.5)
        ddp = wrapped(state, 10**6)
        rank = sp.get_rank()
        outputs = [reduce(ddp, gradients(rank, step)) for step in range(2)]
        before = errors_of(state)
        broken = gradients(rank, 2)
        if rank == culprit:
            broken[number].flat[0] = value
        with np.errstate(invalid="ignore"):
            overflowed = reduce(ddp, broken)
        assert same(errors_of(state), before)
        outputs += [reduce(ddp, gradients(rank, step)) for step in range(3, 5)]
        return overflowed, outputs, errors_of(state)

    def body(case: Any) -> None:
        size, culprit, number, value = case
        results = inline.run(size, program, culprit % size, number, value)
        left: dict[int, Any] = dict.fromkeys(range(len(SHAPES)), 0.0)
        for position, i in enumerate(COMPRESSED):
            left[i] = np.mean([errors[position] for *_, errors in results], axis=0).reshape(SHAPES[i])
        for overflowed, outputs, errors in results:
            assert not np.isfinite(overflowed[number]).all()
            assert same(overflowed, results[0][0])
            assert len(errors) == len(COMPRESSED)
            for i in range(len(SHAPES)):
                total = sum(grads[i] for grads in outputs)
                expected = sum(mean_of(size, step)[i] for step in (0, 1, 3, 4))
                np.testing.assert_allclose(total + left[i], expected, rtol=0, atol=1e-10)

    numbers = st.sampled_from([i for i, shape in enumerate(SHAPES) if 0 not in shape])
    values = st.sampled_from((np.inf, -np.inf, np.nan))
    inline.check(st.tuples(st.integers(1, 3), st.integers(0, 2), numbers, values), body)


def test_overflowing_product_counts_as_overflow(inline):
    """The gradients are finite, but their sums are not."""

    def program():
        state = PowerSGDState(start_powerSGD_iter=0)
        ddp = wrapped(state, 10**6, np.float32)
        rank = sp.get_rank()
        reduce(ddp, gradients(rank, 0, dtype=np.float32))
        with np.errstate(all="ignore"):
            overflowed = reduce(ddp, [np.full(shape, 3e38, np.float32) for shape in SHAPES])
        after = [reduce(ddp, gradients(rank, step, dtype=np.float32)) for step in range(1, 4)]
        return np.isfinite(overflowed[7]).all(), all(np.isfinite(g).all() for grads in after for g in grads)

    assert inline.run(2, program) == [(False, True)] * 2


def test_loss_scale_recovers(inline):
    """One overflow is one skipped step."""

    def program():
        sp.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(32, 32))
        state = PowerSGDState(start_powerSGD_iter=0, matrix_approximation_rank=2)
        ddp.register_comm_hook(state, comm_hooks.powerSGD_hook)
        optimizer, scaler = optim.SGD(ddp.parameters(), lr=0.01), optim.GradScaler(init_scale=2.0**10)
        steps = []
        for step in range(6):
            x = np.random.default_rng((step, sp.get_rank())).standard_normal((4, 32)).astype(np.float32)
            loss = (ddp(x) ** 2).mean() * (1e36 if step == 2 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            steps.append(scaler.step(optimizer))
            scaler.update()
        return steps, scaler.get_scale()

    assert inline.run(2, program) == [([True, True, False, True, True, True], 2.0**9)] * 2


# --- saving and loading -----------------------------------------------------------------------------------


def test_resumes_with_the_same_bits(inline):
    def program(setting: dict[str, Any], cap_bytes: int, stop: int):
        rank = sp.get_rank()
        straight_state = PowerSGDState(**setting)
        straight = wrapped(straight_state, cap_bytes)
        expected = [reduce(straight, gradients(rank, step)) for step in range(5)]
        first = PowerSGDState(**setting)
        ddp = wrapped(first, cap_bytes)
        got = [reduce(ddp, gradients(rank, step)) for step in range(stop)]
        second = PowerSGDState(**setting)
        second.load_state_dict(first.state_dict())
        third = PowerSGDState(**setting)
        third.load_state_dict(second.state_dict())  # saved again before its first step
        ddp = wrapped(third, cap_bytes)
        got += [reduce(ddp, gradients(rank, step)) for step in range(stop, 5)]
        return got, expected, third.compression_stats(), straight_state.compression_stats()

    def body(case: Any) -> None:
        size, setting, cap_bytes, stop = case
        for got, expected, *stats in inline.run(size, program, setting, cap_bytes, stop):
            assert all(same(a, b) for a, b in zip(got, expected, strict=True))
            assert stats[0] == stats[1]

    inline.check(st.tuples(st.integers(1, 3), SETTINGS, CAPS, st.integers(0, 4)), body)


def test_state_may_be_restored_while_in_use(inline):
    """As in a restore whose other parts fail."""

    def program():
        state = PowerSGDState(start_powerSGD_iter=0, min_compression_rate=0.5)
        ddp = wrapped(state, 800)
        reduce(ddp, gradients(sp.get_rank(), 0))
        saved = state.state_dict()
        expected = reduce(ddp, gradients(sp.get_rank(), 1))
        state.load_state_dict(saved)
        return same(reduce(ddp, gradients(sp.get_rank(), 1)), expected)

    assert all(inline.run(2, program))


def test_errors_start_anew_on_other_ranks(inline):
    def save():
        state = PowerSGDState(start_powerSGD_iter=0)
        reduce(wrapped(state, 10**6), gradients(sp.get_rank(), 0))
        return state.state_dict()

    def go_on(saved: dict[str, Any]):
        state = PowerSGDState(start_powerSGD_iter=0)
        state.load_state_dict(saved)
        ddp = wrapped(state, 10**6)
        if sp.get_rank() == 0:
            with pytest.warns(RuntimeWarning, match="saved on 2 ranks, this run has 3"):
                got = reduce(ddp, gradients(0, 1))
        else:
            got = reduce(ddp, gradients(sp.get_rank(), 1))
        again = PowerSGDState(start_powerSGD_iter=0)
        without = saved["buckets"]["0"] | {"errors": [0 * error for error in saved["buckets"]["0"]["errors"]]}
        again.load_state_dict(saved | {"ranks": 3, "buckets": {"0": without}})
        return same(got, reduce(wrapped(again, 10**6), gradients(sp.get_rank(), 1)))

    saved = inline.run(2, save)
    assert any(np.any(error) for error in saved[0]["buckets"]["0"]["errors"])
    assert all(inline.run(3, go_on, saved[0]))


def test_bad_states_are_refused():
    def of(**changed: Any) -> PowerSGDState:
        state = PowerSGDState(start_powerSGD_iter=0, min_compression_rate=0.5)
        reduce(wrapped(state, 10**6), gradients(0, 0))
        loaded = PowerSGDState(start_powerSGD_iter=0, min_compression_rate=0.5)
        loaded.load_state_dict(state.state_dict() | changed)
        return loaded

    with refused(StateDictError):
        of(more=1)
    with refused(StateDictError):
        of(matrix_approximation_rank=3)
    with refused(StateDictError):
        reduce(wrapped(of(), 800), gradients(0, 1))


class Stop(sp.Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == self.after:
            run_context.request_stop()


def train(folder: Any, stop: int | None, resume: bool) -> np.ndarray:
    sp.manual_seed(0)
    rank = sp.get_rank()
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((8, 32)).astype(np.float32), rng.integers(0, 32, 8)) for _ in range(8)]
    data = [(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]) for x, y in data]
    ddp = DistributedDataParallel(nn.Linear(32, 32))
    ddp.register_comm_hook(PowerSGDState(start_powerSGD_iter=1), comm_hooks.powerSGD_hook)
    callbacks = [ModelCheckpoint("net", folder, CheckpointConfig(100))]
    if stop is not None:
        callbacks.append(Stop(stop))
    model = Model(ddp, nn.CrossEntropyLoss(), optim.SGD(ddp.parameters(), lr=0.5))
    model.train(1, data, callbacks, resume=resume, progress=False)
    return np.array(ddp.module.weight.data)


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_training_is_resumed_with_the_same_bits(tmp_path, transport):
    def launch(folder: str, stop: int | None, resume: bool = False) -> Any:
        return sp.launch(train, (tmp_path / folder, stop, resume), world_size=2, transport=transport)

    expected = launch("whole", None)
    launch("part", 5)
    assert same(launch("part", None, resume=True), expected)

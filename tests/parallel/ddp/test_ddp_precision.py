"""DistributedDataParallel in mixed precision: one device with the same casts, exactly."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from refusals import refused

import simparallel as sp
from simparallel import nn, optim
from simparallel.autograd import no_grad
from simparallel.compat import torch
from simparallel.errors import CollectiveMismatchError, DTypeError, InputError, RunFailedError
from simparallel.parallel import DistributedDataParallel, MixedPrecision
from simparallel.parallel.ddp import comm_hooks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
FP16 = MixedPrecision(np.float16, np.float16, np.float16)
LOST = 2.0**-12  # in float16, beside 1


class Net(nn.Module):
    """A frozen layer, one used twice, and one that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 3).requires_grad_(False)
        self.tied = nn.Linear(3, 3)
        self.twin = self.tied
        self.sometimes = nn.Linear(3, 3)
        for parameter in self.parameters():
            parameter.data[...] = integers(parameter.shape, 0)

    def forward(self, x: Any, both: bool) -> sp.Tensor:
        self.seen = x.dtype, self.stem.weight.dtype, self.tied.bias.dtype
        h = self.stem(x)
        return self.twin(self.tied(h)) + (self.sometimes(h) if both else 0.0)


def integers(shape: Any, seed: int) -> np.ndarray:
    """Return ±1 or ±2, plus a little that float16 cannot hold."""
    rng = np.random.default_rng((seed, *shape))
    values = rng.integers(1, 3, shape) * rng.choice((-1, 1), shape) + LOST
    return values.astype(np.float32)


def networks() -> nn.Module:
    sp.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def grads_of(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else np.array(p.grad.data) for p in model.parameters()]


# --- one device with the same casts -------------------------------------------------------------------


class Case(NamedTuple):
    rows: tuple[tuple[int, ...], ...]  # of each micro-step and rank
    both: tuple[bool, ...]  # of each rank
    kind: str  # "default", "find_unused_parameters" or "static_graph"
    as_view: bool
    param_dtype: Any
    reduce_dtype: Any


@st.composite
def cases(draw: Any) -> Case:
    size, dtypes = draw(st.integers(1, 4)), st.sampled_from((None, "float16", "float32", "float64"))
    kind = draw(st.sampled_from(("default", "find_unused_parameters", "static_graph")))
    rows = draw(st.lists(st.tuples(*[st.integers(0, 3)] * size), min_size=1, max_size=3))
    both = (True,) * size if kind == "default" else draw(st.tuples(*[st.booleans()] * size))
    return Case(tuple(rows), both, kind, draw(st.booleans()), draw(dtypes), draw(dtypes))


def batch(rows: int, step: int, rank: int) -> np.ndarray:
    return integers((rows, 2), 10 * step + rank)


def on_ranks(case: Case) -> Any:
    rank = sp.get_rank()
    ddp = DistributedDataParallel(
        Net(),
        mixed_precision=MixedPrecision(case.param_dtype, case.reduce_dtype),
        bucket_cap_mb=60 / (1 << 20),
        gradient_as_bucket_view=case.as_view,
        **({} if case.kind == "default" else {case.kind: True}),
    )
    for step, rows in enumerate(case.rows):
        ddp.require_backward_grad_sync = step == len(case.rows) - 1
        y = ddp(batch(rows[rank], step, rank), case.both[rank])
        assert {*ddp.module.seen, y.dtype} == {np.dtype(case.param_dtype or SINGLE)}
        y.sum().backward()
    assert {p.dtype for p in ddp.parameters()} == {x.dtype for x in ddp.state_dict().values()} == {SINGLE}
    return grads_of(ddp)


def on_one_device(case: Case, rank: int) -> list[Any]:
    """Return the sums of a rank's gradients, in float32."""
    dtype, sums = case.param_dtype or SINGLE, [0.0] * 6
    for step, rows in enumerate(case.rows):
        net = Net().to(dtype)
        net(batch(rows[rank], step, rank).astype(dtype), case.both[rank]).sum().backward()
        for i, grad in enumerate(grads_of(net)):
            sums[i] = sums[i] + (0.0 if grad is None else grad.astype(np.float32))
    return sums


def test_equals_one_device_with_the_same_casts(world):
    def body(case: Case) -> None:
        size, travel = len(case.both), case.reduce_dtype or case.param_dtype or SINGLE
        each = [on_one_device(case, rank) for rank in range(size)]
        used = [False, False, True, True, any(case.both), any(case.both)]
        for got in world.run(size, on_ranks, case):
            for i, mine in enumerate(got):
                assert (mine is not None) == used[i]
                if used[i]:
                    wide = [np.asarray(sums[i]).astype(travel).astype(np.result_type(travel, SINGLE)) for sums in each]
                    mean = (sum(wide) / wide[0].dtype.type(size)).astype(travel).astype(np.float32)
                    np.testing.assert_array_equal(mine, mean)
                    assert mine.dtype == SINGLE

    world.check(cases(), body)


def test_float16_differs_from_float32():
    """Red control: inputs and weights have digits that float16 cannot hold."""
    case = Case(((2,),), (True,), "default", True, None, None)
    wide, narrow = on_one_device(case, 0), on_one_device(case._replace(param_dtype="float16"), 0)
    assert not np.array_equal(wide[2], narrow[2])


@pytest.mark.parametrize("mixed", [MixedPrecision("float32", "float32", "float32"), MixedPrecision()])
def test_float32_is_the_same_bits(inline, mixed):
    def program(mixed_precision):
        ddp = DistributedDataParallel(networks(), mixed_precision=mixed_precision)
        optimizer = optim.Adam(ddp.parameters(), lr=0.1)
        x = np.random.default_rng(sp.get_rank()).standard_normal((3, 5, 2)).astype(np.float32)
        for rows in x:
            optimizer.zero_grad()
            (ddp(rows) ** 2).mean().backward()
            optimizer.step()
        return {name: value.tobytes() for name, value in ddp.state_dict().items()}

    assert list(inline.run(3, program, mixed)) == list(inline.run(3, program, None))


# --- buffers --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Writes into one buffer, and replaces the other by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.ones(1, np.float32))
        self.register_buffer("written", np.zeros(1, np.float32))
        self.register_buffer("assigned", np.zeros(1, np.float32))
        self.register_buffer("count", np.zeros(1, np.int64))

    def forward(self, x: Any) -> sp.Tensor:
        self.seen = self.written.dtype, self.assigned.dtype, self.count.dtype
        self.written.data[...] += 1 + LOST
        self.assigned = self.assigned + (1 + LOST)
        self.count.data[...] += 1
        return x * self.weight


def test_buffers_have_their_dtype_in_forward(world):
    def program():
        ddp = DistributedDataParallel(Counting(), mixed_precision=MixedPrecision(buffer_dtype=np.float16))
        for _ in range(3):
            y = ddp(np.ones((2, 1), np.float32))
            assert y.dtype == SINGLE
            y.sum().backward()
        assert ddp.module.seen == (HALF, HALF, np.int64)
        return {name: (value.dtype, value.tolist()) for name, value in ddp.module.state_dict().items()}

    for state in world.run(2, program):
        assert state["written"] == state["assigned"] == (SINGLE, [3.0])  # 3 + 3 * LOST in float32
        assert state["count"] == (np.int64, [3])


def test_batch_norm_keeps_statistics_of_float16(inline):
    """One device whose buffers are float16."""

    def program():
        ddp = DistributedDataParallel(networks(), mixed_precision=FP16, broadcast_buffers=False)
        for step in range(3):
            ddp(batch(4, step, sp.get_rank()))
        ddp.eval()
        return ddp.module.state_dict(), ddp(batch(4, 3, sp.get_rank())).numpy()

    for rank, (state, y) in enumerate(inline.run(2, program)):
        alone = networks().half()
        for step in range(3):
            alone(batch(4, step, rank).astype(np.float16))
        np.testing.assert_array_equal(alone.eval()(batch(4, 3, rank).astype(np.float16)).numpy(), y)
        for name, value in alone.state_dict().items():
            if "running" in name:
                assert (state[name].dtype, state[name].tolist()) == (SINGLE, value.tolist())
        networks().load_state_dict(state)


# --- beside the wrapper's other features ------------------------------------------------------------------


def test_overflow_on_one_rank_skips_all_steps(world):
    def program():
        ddp = DistributedDataParallel(networks(), mixed_precision=FP16)
        optimizer, scaler = optim.SGD(ddp.parameters(), 0.1), optim.GradScaler(init_scale=2.0**10)
        steps = []
        for step in range(3):
            optimizer.zero_grad()
            factor = 1e4 if (step, sp.get_rank()) == (1, 1) else 1.0
            scaler.scale((ddp(batch(4, step, 0)).float() * factor).sum()).backward()
            assert {p.grad.dtype for p in ddp.parameters()} == {SINGLE}
            steps.append(scaler.step(optimizer))
            scaler.update()
        return steps, scaler.get_scale(), [p.numpy().tobytes() for p in ddp.parameters()]

    results = world.run(2, program)
    assert results[0] == results[1]
    assert results[0][:2] == ([True, False, True], 2.0**9)


def test_hook_gets_the_reduced_dtype(inline):
    """The hook sums float16 buckets; `.grad` is float32 again."""

    def program():
        ddp = DistributedDataParallel(networks(), mixed_precision=MixedPrecision(reduce_dtype="float16"))
        seen = []

        def hook(state, bucket):
            seen.append(bucket.buffer().dtype)
            return comm_hooks.sum_hook(state, bucket)

        ddp.register_comm_hook(None, hook)
        ddp(batch(4, 0, 0)).sum().backward()
        return set(seen), {p.grad.dtype for p in ddp.parameters()}, ddp.module[3].bias.grad.tolist()

    assert list(inline.run(3, program)) == [({HALF}, {SINGLE}, [12.0, 12.0])] * 3


def test_ranks_may_have_different_numbers_of_inputs(inline):
    def program():
        ddp = DistributedDataParallel(nn.Linear(2, 1), mixed_precision=FP16)
        rank, grads = sp.get_rank(), []
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(rank + 1):
                ddp.zero_grad()
                ddp(batch(2, step, rank)).sum().backward()
                grads.append(ddp.module.weight.grad.numpy().copy())
        return grads

    results = inline.run(3, program)
    for step in range(3):
        active = range(step, 3)
        sums = [batch(2, step, rank).astype(np.float16).sum(0, np.float32) for rank in active]
        mean = (sum(sums) / np.float32(len(sums))).astype(np.float16)
        for rank in active:
            np.testing.assert_array_equal(results[rank][step][0], mean)


def test_checkpoint_inside_repeats_the_casts(inline):
    class Again(nn.Module):
        def __init__(self, keeps):
            super().__init__()
            self.net, self.keeps = networks(), keeps

        def forward(self, x):
            return self.net(x) if self.keeps else nn.checkpoint(self.net, x)

    def program(keeps):
        ddp = DistributedDataParallel(Again(keeps), mixed_precision=FP16)
        ddp(batch(4, 0, sp.get_rank())).sum().backward()
        return [grad.tolist() for grad in grads_of(ddp)], ddp.module.net[1].running_mean.tolist()

    assert list(inline.run(2, program, True)) == list(inline.run(2, program, False))


def test_copies_and_evaluation_have_the_precision(inline):
    def program():
        ddp = DistributedDataParallel(networks(), mixed_precision=FP16)
        with no_grad():
            assert ddp(batch(3, 0, 0)).dtype == HALF
        again = copy.deepcopy(ddp)
        assert again.mixed_precision == FP16
        assert again(batch(3, 0, 0)).dtype == HALF
        assert ddp.module(batch(3, 0, 0)).dtype == SINGLE
        DistributedDataParallel(ddp.module, mixed_precision=FP16)(batch(3, 0, 0)).sum().backward()
        return repr(ddp)

    assert "param_dtype=dtype('float16')" in inline.run(2, program)[0]


# --- refused settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_two_kinds_of_mixed_precision_are_refused(inline, level):
    def program():
        mixed = nn.auto_mixed_precision(networks(), level)
        with refused(InputError):
            DistributedDataParallel(mixed, mixed_precision=FP16)
        ddp = DistributedDataParallel(networks(), mixed_precision=FP16)
        with refused(InputError):
            nn.auto_mixed_precision(nn.Sequential(ddp), level)
        return ddp(batch(3, 0, 0)).dtype

    assert list(inline.run(1, program)) == [HALF]


def test_settings_are_checked():
    assert pickle.loads(pickle.dumps(FP16)) == FP16 == MixedPrecision("float16", "half", torch.float16)
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        with refused(DTypeError):
            MixedPrecision(**{name: np.int8})
        with refused(DTypeError):
            MixedPrecision(**{name: "bfloat16"})
    with refused(InputError):
        DistributedDataParallel(networks(), mixed_precision=np.float16)


def test_different_precision_on_ranks_is_found(inline):
    def program():
        DistributedDataParallel(networks(), mixed_precision=(FP16, MixedPrecision("float32"))[sp.get_rank()])

    with refused(RunFailedError) as caught:
        inline.run(2, program)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def test_torch_front_has_mixed_precision(inline):
    def program():
        from simparallel.compat.torch.nn.parallel.distributed import _MixedPrecision

        settings = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
        model = torch.nn.parallel.DistributedDataParallel(networks(), mixed_precision=settings)
        loss = model(torch.tensor(batch(3, 0, 0))).sum()
        loss.backward()
        return loss.dtype, {p.grad.dtype for p in model.parameters()}

    assert list(inline.run(2, program)) == [(HALF, {SINGLE})] * 2

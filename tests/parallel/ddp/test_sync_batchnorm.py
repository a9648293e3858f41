"""SyncBatchNorm: one device with the whole batch, forward, backward and running statistics."""

from __future__ import annotations

import copy
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.arrays.seam import kernels_of
from simparallel.errors import InputError, RunFailedError, ShapeError
from simparallel.nn import BatchNorm1d, BatchNorm2d, Linear, ReLU, Sequential
from simparallel.parallel import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make(c: int, momentum: float | None, dtype: Any, sync: bool, dims: int = 4) -> Any:
    kind = BatchNorm2d if dims == 4 else BatchNorm1d
    layer: Any = kind(c, momentum=momentum, dtype=dtype)
    layer.weight.data[...] = np.arange(c) - 1.5
    layer.bias.data[...] = 0.25 * np.arange(c)
    return convert_sync_batchnorm(layer) if sync else layer


def pass_through(layer: Any, x: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    """Return y, and the gradients of x, weight and bias."""
    leaf = sp.Tensor(x, requires_grad=True)
    y = layer(leaf)
    y.backward(dy)
    return [np.array(t.data) for t in (y, leaf.grad, layer.weight.grad, layer.bias.grad)]


def statistics(layer: Any) -> list[np.ndarray]:
    return [np.array(buffer.data) for buffer in layer.buffers()]


def part(seed: int, rows: int, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = 3 + rng.standard_normal((rows, *shape)) * np.arange(1, shape[0] + 1).reshape(-1, *(1,) * (len(shape) - 1))
    return x.astype(dtype), rng.standard_normal((rows, *shape)).astype(dtype)


cases = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(lambda rows: sum(rows) > 1),
    st.sampled_from(((3,), (2, 5), (3, 2, 2), (1, 3, 1))),
    st.sampled_from((0.1, None)),
    st.sampled_from(("float64", "float32")),
)


def check(world: World, case: Any) -> None:
    """Give each rank its rows of the batch, perhaps none; two batches, so that statistics move twice."""
    rows, shape, momentum, dtype = case
    dims = len(shape) + 1

    def device():
        layer = make(shape[0], momentum, dtype, True, dims)
        rank = sp.get_rank()
        found = [pass_through(layer, *part(10 * step + rank, rows[rank], shape, dtype)) for step in range(2)]
        return found, statistics(layer)

    single = make(shape[0], momentum, dtype, False, dims)
    tolerance = 1e-10 if dtype == "float64" else 2e-4
    results = world.run(len(rows), device)
    for step in range(2):
        parts = [part(10 * step + rank, count, shape, dtype) for rank, count in enumerate(rows)]
        expected = pass_through(single, *map(np.concatenate, zip(*parts, strict=True)))
        found = [results[rank][0][step] for rank in range(len(rows))]
        together = [
            np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found]),
            # Every rank's gradient is its own part's; summed over both steps, as .grad is.
            sum(f[2] for f in found), sum(f[3] for f in found),
        ]  # fmt: skip
        for a, b in zip(together, expected, strict=True):
            scale = max(1.0, abs(b).max())
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
    for _, moved in results:
        assert [a.tobytes() for a in moved] == [b.tobytes() for b in results[0][1]]
        for a, b in zip(moved, statistics(single), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance)


def test_equals_one_device_with_the_whole_batch(inline):
    inline.check(cases, lambda case: check(inline, case))


@pytest.mark.process
def test_equals_one_device_on_processes():
    with World("shm") as world:
        check(world, ([2, 0, 1], (3, 2, 2), 0.1, "float64"))


def test_one_sample_per_rank(inline):
    """A local batch norm would have no variance at all."""
    check(inline, ([1, 1], (4,), 0.1, "float64"))
    with refused(ShapeError):
        BatchNorm1d(4)(np.ones((1, 4), np.float32))


def test_images_of_different_sizes(inline):
    """Statistics count elements, not samples."""
    xs = [part(0, 2, (2, 3, 3), "float64")[0], part(1, 1, (2, 2, 5), "float64")[0]]

    def device():
        layer = make(2, 0.1, "float64", True)
        y = layer(xs[sp.get_rank()])
        return y.numpy(), statistics(layer)

    single = make(2, 0.1, "float64", False)
    flat = np.concatenate([x.transpose(1, 0, 2, 3).reshape(2, -1) for x in xs], axis=1)
    expected = single(flat.T.reshape(-1, 2, 1, 1).copy()).numpy().reshape(-1, 2)
    results = inline.run(2, device)
    found = np.concatenate([y.transpose(0, 2, 3, 1).reshape(-1, 2) for y, _ in results])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for a, b in zip(results[0][1], statistics(single), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_counts_are_exact_beyond_float32(inline):
    """More elements than 2^24: a context that counts, without the elements."""
    from simparallel.autograd import Plan, Spec, Work
    from simparallel.nn.sync_batchnorm import SyncContext

    size = 2**24 + 1

    def device():
        spec = Spec((size, 1), np.dtype(np.float32))
        context = SyncContext(kernels_of[np], (True,), Plan((spec,), spec, {"n": size, "c": 1}, Work(0, 0)), None)  # type: ignore[arg-type]
        total = context.sum_over("n", np.ones(1, np.float32))
        return total.tolist(), context.sizes("n"), context.sizes("c")

    assert list(inline.run(3, device)) == [([3.0], 3 * size, 1)] * 3


def test_whole_batch_of_one_is_refused_on_all_ranks(inline):
    def device():
        SyncBatchNorm(2)(np.ones((int(sp.get_rank() == 1), 2), np.float32))

    with refused(RunFailedError) as caught:
        inline.run(2, device)
    assert isinstance(caught.value.__cause__, ShapeError)


def test_eval_mode_is_local(inline):
    """After eval() nothing is communicated, so each rank may evaluate any number of times."""

    def device():
        layer = make(3, 0.1, "float64", True)
        layer(part(sp.get_rank(), 2, (3, 2, 2), "float64")[0])
        layer.eval()
        sp.barrier()
        x = part(7, 2, (3, 2, 2), "float64")[0]
        free: Any = SyncBatchNorm(3, track_running_stats=False, dtype=np.float64).eval()
        if sp.get_rank() == 1:
            return layer(x).numpy(), free(x).numpy()
        return None

    results = inline.run(2, device)
    names = [event.name for event in results.trace.events if event.rank == 1]
    assert names.index("barrier") == len(names) - names[::-1].index("barrier") - 1
    assert "all_reduce" not in names[names.index("barrier") :]
    alone = BatchNorm2d(3, track_running_stats=False, dtype=np.float64)(part(7, 2, (3, 2, 2), "float64")[0])
    np.testing.assert_allclose(results[1][1], alone.numpy(), rtol=1e-12)


def test_outside_a_run_equals_batch_norm():
    x, dy = part(0, 4, (3, 2, 2), "float64")
    layers = [make(3, 0.1, "float64", sync) for sync in (False, True)]
    for a, b in zip(*(pass_through(layer, x, dy) for layer in layers), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(statistics, layers), strict=True):
        np.testing.assert_array_equal(a, b)


# --- convert ----------------------------------------------------------------------------------------


def test_convert_keeps_tensors_and_settings():
    """Every batch norm is replaced once, with its tensors, settings and mode."""
    shared = BatchNorm1d(3, eps=0.1, momentum=None, affine=False)
    model = Sequential(Linear(3, 3), BatchNorm1d(3), Sequential(shared, ReLU(), shared))
    model[1].eval()
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    tensors = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]

    converted: Any = sp.nn.SyncBatchNorm.convert_sync_batchnorm(model)

    assert converted is model
    assert sp.nn.SyncBatchNorm is sp.parallel.SyncBatchNorm
    assert [type(layer).__name__ for layer in model.modules()].count("SyncBatchNorm") == 2
    assert model[2][0] is model[2][2]
    assert (model[2][0].eps, model[2][0].momentum, model[2][0].affine) == (0.1, None, False)
    assert not model[1].training
    assert model[2][0].training
    assert [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()] == names
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == tensors
    before = model[1]
    assert convert_sync_batchnorm(model)[1] is before  # once is enough
    with pytest.raises(AttributeError):
        _ = sp.nn.NoSuchLayer


def test_converting_again_takes_the_new_group(inline):
    def device():
        model = convert_sync_batchnorm(Sequential(BatchNorm1d(1)))
        weight = model[0].weight
        groups = [sp.new_group([rank]) for rank in range(2)]
        convert_sync_batchnorm(model, groups[sp.get_rank()])
        x = np.array([[0.0], [2.0]], np.float32) + 10 * sp.get_rank()
        return model(x).numpy().ravel().tolist(), model[0].weight is weight

    for y, is_kept in inline.run(2, device):
        np.testing.assert_allclose(y, [-1, 1], rtol=1e-4)  # the mean of this rank alone
        assert is_kept


def test_converted_model_can_be_copied_and_sent(inline):
    def device():
        model = convert_sync_batchnorm(Sequential(BatchNorm1d(2)), sp.new_group([0, 1]))
        twin = copy.deepcopy(model)
        assert twin[0].process_group is model[0].process_group
        x = np.full((1, 2), float(sp.get_rank()), np.float32)
        return twin(x).numpy(), twin[0].running_mean.data, model[0].running_mean.data

    y, moved, still = inline.run(2, device)[0]
    np.testing.assert_allclose(y, -1, rtol=1e-3)
    np.testing.assert_allclose(moved, 0.05)
    assert not still.any()


# --- inside a model in training ------------------------------------------------------------------------


def train(
    sync_model: Any, rows: tuple[int, ...], rank: int | None, group: Any = None, **settings: Any
) -> list[np.ndarray]:
    """Make three steps of Adam on this rank's rows, or on all; statistics are the group's."""
    size = len(rows)
    model, scale = sync_model, 1.0
    if rank is not None:
        converted = convert_sync_batchnorm(sync_model, group)
        model, scale = DistributedDataParallel(converted, **settings), float(size)
    optimizer = sp.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        parts = [part(100 * step + r, n, (3,), "float64") for r, n in enumerate(rows)]
        x, c = parts[rank] if rank is not None else map(np.concatenate, zip(*parts, strict=True))
        optimizer.zero_grad()
        ((model(x) * c).sum() * (scale / sum(rows))).backward()
        optimizer.step()
    return [np.array(tensor.data) for tensor in (*sync_model.parameters(), *sync_model.buffers())] + [
        value for state in optimizer.state_dict()["state"].values() for value in state.values()
    ]


def network() -> Any:
    sp.manual_seed(3)
    return Sequential(
        Linear(3, 4, dtype=np.float64),
        BatchNorm1d(4, dtype=np.float64),
        ReLU(),
        Linear(4, 5, dtype=np.float64),
        BatchNorm1d(5, dtype=np.float64),
        Linear(5, 3, dtype=np.float64),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"bucket_cap_mb": 1e-4}, {"bucket_cap_mb": 1e-6, "find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)  # fmt: skip
def test_training_equals_one_device(world, settings):
    """Parameters, running statistics and Adam's moments; buckets and statistics share a group."""
    for rows in ((4,), (3, 2), (0, 3, 4)):
        expected = train(network(), rows, None)
        for got in world.run(len(rows), lambda rows=rows: train(network(), rows, sp.get_rank(), **settings)):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_training_equals_one_device_for_any_parts(inline):
    """The same on 1 to 8 ranks with any parts of the batch, none included."""

    def body(rows):
        expected = train(network(), rows, None)
        for got in inline.run(len(rows), lambda: train(network(), rows, sp.get_rank(), bucket_cap_mb=1e-4)):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)

    parts = st.lists(st.integers(0, 4), min_size=1, max_size=8).map(tuple)
    inline.check(parts.filter(lambda rows: sum(rows) > 2), body, parts=2)


def test_statistics_in_a_group_of_their_own(inline):
    def device():
        rank, rows = sp.get_rank(), (2, 3)
        return train(network(), rows, rank, sp.new_group([0, 1]))

    expected = train(network(), (2, 3), None)
    results = inline.run(2, device)
    for got in results:
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
    assert {event.stream for event in results.trace.events if event.name == "all_reduce"} == {"comm world", "comm 1"}


@pytest.mark.parametrize("mode", ["find_unused_parameters", "static_graph"])
def test_different_graphs_keep_the_collective_order(world, mode):
    """One rank reaches a bucket before the statistics, the other after them: buckets wait for the end."""

    class Fork(sp.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()
            self.stems = sp.nn.ModuleList([Linear(3, 3, dtype=np.float64) for _ in range(3)])

        def forward(self, x, stem):
            return self.body(self.stems[stem](x))

    def device():
        sp.manual_seed(1)
        model = DistributedDataParallel(convert_sync_batchnorm(Fork()), bucket_cap_mb=1e-6, **{mode: True})
        rank = sp.get_rank()
        for _ in range(2):
            model.zero_grad()
            model(part(rank, 3, (3,), "float64")[0], rank).sum().backward()
        return [None if p.grad is None else np.array(p.grad.data) for p in model.parameters()]

    first, second = world.run(2, device)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert first[-1] is None  # the third stem, which no rank used
    assert first[-3] is not None


def test_local_statistics_differ(inline):
    """Red control: with local batch norms the ranks get something else."""

    def device():
        rank = sp.get_rank()
        return pass_through(make(3, 0.1, "float64", False, 2), *part(rank, 3, (3,), "float64"))[0]

    whole, _ = map(np.concatenate, zip(*(part(r, 3, (3,), "float64") for r in range(2)), strict=True))
    expected = make(3, 0.1, "float64", False, 2)(whole).numpy()
    assert abs(np.concatenate(list(inline.run(2, device))) - expected).max() > 0.01


def test_bad_settings():
    with refused(InputError):
        SyncBatchNorm(0)
    with refused(ShapeError):
        SyncBatchNorm(2)(np.ones(2, np.float32))

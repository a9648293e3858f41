"""DistributedDataParallel in all its variants: one device with the whole batch, exactly."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.autograd import no_grad
from simparallel.errors import CollectiveMismatchError, InputError, RunFailedError, UnusedParameterError
from simparallel.nn import Linear, Module, ReLU, Sequential
from simparallel.parallel import DistributedDataParallel
from simparallel.parallel.ddp import comm_hooks
from simparallel.parallel.ddp.distributed import MIB

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# --- one property for all variants ------------------------------------------------------------------


class Branches(Module):
    """A pass takes one of two branches; `idle` is never used; `stem` is frozen, `tied` used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Linear(3, 3, dtype=np.float64).requires_grad_(False)
        self.left = Linear(3, 4, dtype=np.float64)
        self.right = Sequential(Linear(3, 4, dtype=np.float64), ReLU())
        self.idle = Linear(2, 2, dtype=np.float32)
        self.tied = Linear(4, 4, dtype=np.float64)
        self.narrow = Linear(3, 4, dtype=np.float32)

    def forward(self, x: Any, branch: int) -> sp.Tensor:
        h = (self.left, self.right)[branch](self.stem(x))
        return self.tied(self.tied(h)) + self.narrow(np.asarray(x, np.float32))


class Everything(Branches):
    """The same with every parameter in use."""

    def forward(self, x: Any, branch: int) -> sp.Tensor:
        unused = sum((p.sum() for p in (*self.idle.parameters(), *self.right.parameters())), sp.Tensor(0.0))
        return super().forward(x, 0) + unused * 2.0


class Case(NamedTuple):
    rows: tuple[tuple[tuple[int, ...], ...], ...]  # of each step, micro-step and rank
    branches: tuple[tuple[tuple[int, ...], ...], ...]
    kind: str  # "default", "dynamic" (find_unused_parameters) or "static"
    cap_bytes: int | None
    as_view: bool
    hook: str | None
    keep_grads: bool  # no zero_grad between steps


@st.composite
def cases(draw: Any) -> Case:
    size = draw(st.integers(1, 8))
    kind = draw(st.sampled_from(("default", "dynamic", "static")))
    steps = draw(st.integers(1, 2))  # larger numbers would need more than 53 bits
    micro_steps = draw(st.integers(1, 3))
    per_rank = st.tuples(*[st.integers(0, 3)] * size)
    rows = draw(st.tuples(*[st.tuples(*[per_rank] * micro_steps)] * steps))
    choice = st.integers(0, 1)
    if kind == "static":  # every rank its own branch, always the same
        branches = ((draw(st.tuples(*[choice] * size)),) * micro_steps,) * steps
    else:
        branches = draw(st.tuples(*[st.tuples(*[st.tuples(*[choice] * size)] * micro_steps)] * steps))
    hook = draw(st.sampled_from((None, "mean_hook", "sum_hook")))
    return Case(
        rows,
        branches,
        kind,
        draw(st.sampled_from((None, 1, 60, 150, 400))),
        draw(st.booleans()),
        hook,
        hook != "sum_hook" and draw(st.booleans()),
    )


def make_model(case: Case, seed: int) -> Branches:
    model = Everything() if case.kind == "default" else Branches()
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.data[...] = rng.integers(-1, 2, parameter.shape)
    return model


def part(step: int, micro: int, rank: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((step, micro, rank))
    return rng.integers(-1, 2, (rows, 3)).astype(float), rng.integers(-1, 2, (rows, 4)).astype(float)


def make_optimizer(model: Module) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return sp.optim.SGD(trained, lr=2.0**-6, momentum=0.5)


def state_of(model: Module, optimizer: Any) -> list[np.ndarray | None]:
    grads = [None if p.grad is None else np.array(p.grad.data) for p in model.parameters()]
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [np.array(p.data) for p in model.parameters()] + grads + moments


def train_single(case: Case) -> list[np.ndarray | None]:
    """Train on all parts of all ranks, in one process."""
    model = make_model(case, 0)
    optimizer = make_optimizer(model)
    for step, (rows, branches) in enumerate(zip(case.rows, case.branches, strict=True)):
        if not case.keep_grads:
            optimizer.zero_grad()
        for micro, (counts, chosen) in enumerate(zip(rows, branches, strict=True)):
            losses = [
                (model(x, branch) * c).sum()
                for rank, (count, branch) in enumerate(zip(counts, chosen, strict=True))
                for x, c in (part(step, micro, rank, count),)
            ]
            sum(losses[1:], losses[0]).backward()
        optimizer.step()
    return state_of(model, optimizer)


def train(case: Case) -> list[np.ndarray | None]:
    rank, size = sp.get_rank(), sp.get_world_size()
    model = make_model(case, rank)  # the first rank's weights win
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=case.cap_bytes and case.cap_bytes / MIB,
        gradient_as_bucket_view=case.as_view,
        find_unused_parameters=case.kind == "dynamic",
        static_graph=case.kind == "static",
    )
    if case.hook:
        ddp.register_comm_hook(None, getattr(comm_hooks, case.hook))
    optimizer = make_optimizer(model)
    scale = 1.0 if case.hook == "sum_hook" else float(size)
    for step, (rows, branches) in enumerate(zip(case.rows, case.branches, strict=True)):
        if not case.keep_grads:
            optimizer.zero_grad()

        def backward(micro: int, step: int = step, rows: Any = rows, branches: Any = branches) -> None:
            x, c = part(step, micro, rank, rows[micro][rank])
            ((ddp(x, branches[micro][rank]) * c).sum() * scale).backward()

        with ddp.no_sync():
            for micro in range(len(rows) - 1):
                backward(micro)
        backward(len(rows) - 1)
        optimizer.step()
    return state_of(model, optimizer)


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        np.testing.assert_array_equal(a, b)


def test_every_variant_equals_one_device(inline):
    """Parameters, gradients and momentum, for any sizes of the ranks' parts, none included."""

    def body(case: Case) -> None:
        expected = train_single(case)
        for got in inline.run(len(case.rows[0][0]), train, case):
            assert_equal(got, expected)

    inline.check(cases(), body)


@pytest.mark.process
def test_variants_on_processes():
    dynamic = Case((((1, 0), (2, 3)),) * 2, (((0, 1), (0, 0)),) * 2, "dynamic", 60, False, None, False)
    static = dynamic._replace(kind="static", as_view=True, branches=(((0, 1), (0, 1)),) * 2)
    with World("shm") as world:
        for case in (dynamic, static):
            expected = train_single(case)
            for got in world.run(2, train, case):
                assert_equal(got, expected)


# --- layers of every kind with parameters ---------------------------------------------------------------


class Layers(Module):
    """Images to numbers, through a layer of every kind that writes its gradients directly into the bucket."""

    def __init__(self) -> None:
        super().__init__()
        wide: dict[str, Any] = {"dtype": np.float64}
        self.image = Sequential(sp.nn.Conv2d(2, 4, 3, padding=1, **wide), sp.nn.GroupNorm(2, 4, **wide), ReLU())
        self.grouped = sp.nn.Conv2d(4, 4, 3, groups=2, **wide)
        self.many = sp.nn.Conv2d(4, 18, 2, **wide)  # enough channels for another order in memory
        self.last = sp.nn.Conv2d(18, 2, 1, bias=False, **wide)
        self.words = sp.nn.Embedding(5, 6, **wide)
        self.norms = Sequential(sp.nn.LayerNorm(6, **wide), sp.nn.RMSNorm(6, **wide), Linear(6, 3, **wide))

    def forward(self, images: Any, words: Any) -> sp.Tensor:
        h = self.last(self.many(self.grouped(self.image(images))))
        return h.sum() + self.norms(self.words(words)).sum()


def layers_data(rank: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((rank, step))
    return rng.standard_normal((rows, 2, 5, 5)), rng.integers(0, 5, (rows, 2))


def train_layers(rows: tuple[int, ...], as_view: bool | None) -> list[Any]:
    """Make two steps on this rank's rows; on all rows if `as_view` is None."""
    sp.manual_seed(4)
    model = Layers()
    optimizer = sp.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    net, rank, scale = model, 0, 1.0
    if as_view is not None:
        rank, scale = sp.get_rank(), float(len(rows))
        net = DistributedDataParallel(model, bucket_cap_mb=2000 / MIB, gradient_as_bucket_view=as_view)
    for step in range(2):
        parts = [layers_data(r, step, count) for r, count in enumerate(rows)]
        images, words = map(np.concatenate, zip(*parts, strict=True)) if as_view is None else parts[rank]
        optimizer.zero_grad()
        (net(images, words) * scale).backward()
        if as_view:  # no copy was necessary
            for bucket in net._reducer.buckets:
                assert all(p.grad.data is view for p, view in zip(bucket.tensors, bucket.views, strict=True))
        optimizer.step()
    return state_of(model, optimizer)


def test_layers_of_every_kind_equal_one_device(inline):
    """Within rounding; on 1 to 8 ranks, with any parts, none included."""
    parts = st.lists(st.integers(0, 2), min_size=1, max_size=8).filter(any).map(tuple)

    def body(case: tuple[tuple[int, ...], bool]) -> None:
        expected = train_layers(case[0], None)
        for got in inline.run(len(case[0]), train_layers, *case):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9 * max(1, abs(b).max()))

    inline.check(st.tuples(parts, st.booleans()), body, parts=2)


# --- accumulation -------------------------------------------------------------------------------------


def linear(seed: int = 0) -> Linear:
    model = Linear(3, 2, dtype=np.float64)
    for parameter in model.parameters():
        parameter.data[...] = np.random.default_rng(seed).integers(-3, 4, parameter.shape)
    return model


def grads_of(model: Module) -> list[np.ndarray]:
    return [np.array(p.grad.data) for p in model.parameters()]


def test_accumulation_equals_the_big_batch(inline):
    """As in the textbook: loss / accumulation_steps, backward adds up, then a step."""
    x = np.random.default_rng(1).standard_normal((32, 3))
    y = np.random.default_rng(2).standard_normal((32, 2))
    loss_fn = sp.nn.MSELoss()

    def accumulate(accumulation_steps: int) -> list[np.ndarray]:
        network = linear()
        network.zero_grad()
        for images, labels in zip(np.split(x, accumulation_steps), np.split(y, accumulation_steps), strict=True):
            loss = loss_fn(network(images), labels)
            loss = loss / accumulation_steps
            loss.backward()
        return grads_of(network)

    def distributed(accumulation_steps: int) -> list[np.ndarray]:
        rank, size = sp.get_rank(), sp.get_world_size()
        ddp = DistributedDataParallel(linear())
        parts = np.split(np.arange(32), size * accumulation_steps)[rank::size]
        for i, rows in enumerate(parts):
            loss = loss_fn(ddp(x[rows]), y[rows]) / accumulation_steps
            if i + 1 < accumulation_steps:
                with ddp.no_sync():
                    loss = loss_fn(ddp(x[rows]), y[rows]) / accumulation_steps
                    loss.backward()
            else:
                loss.backward()
        return grads_of(ddp)

    whole = accumulate(1)
    for steps in (2, 8, 32):
        for got, expected in zip(accumulate(steps), whole, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12)
    for size, steps in ((1, 4), (2, 4), (4, 2)):
        for grads in inline.run(size, distributed, steps):
            for got, expected in zip(grads, whole, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_no_sync_sends_nothing(inline):
    def program():
        ddp = DistributedDataParallel(linear())
        x = np.full((1, 3), float(sp.get_rank()))
        sp.barrier()
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
            for _ in range(2):
                ddp(x).sum().backward()
        local = grads_of(ddp)
        assert ddp.require_backward_grad_sync
        sp.barrier()
        ddp(x).sum().backward()
        return local, grads_of(ddp)

    results = inline.run(2, program)
    for rank, (local, reduced) in enumerate(results):
        assert local[0].tolist() == [[2.0 * rank] * 3] * 2
        assert reduced[0].tolist() == [[1.5] * 3] * 2  # the mean of 0 and 3
    names = [event.name for event in results.trace.events if event.rank == 0]
    first, second = [i for i, name in enumerate(names) if name == "barrier"]
    assert "all_reduce" not in names[first:second]
    assert names[second:].count("all_reduce") == 1


def test_forward_decides_about_no_sync(inline):
    """As in PyTorch: a backward outside the block does not reduce if its forward was inside."""

    def program():
        ddp = DistributedDataParallel(linear())
        x = np.full((1, 3), float(sp.get_rank()))
        with ddp.no_sync():
            loss = ddp(x).sum()
        loss.backward()
        return grads_of(ddp)[0][0, 0]

    assert list(inline.run(2, program)) == [0.0, 1.0]


def test_several_forward_passes_before_backward(inline):
    def program(together: bool):
        ddp = DistributedDataParallel(linear())
        losses = [ddp(np.full((1, 3), float(k + sp.get_rank()))).sum() for k in range(3)]
        with no_grad():
            ddp(np.ones((1, 3)))  # an evaluation in between changes nothing
        if together:
            (losses[0] + losses[1] + losses[2]).backward()
        else:
            for loss in losses:
                loss.backward()
        return grads_of(ddp)[0][0, 0]

    for together in (True, False):
        assert list(inline.run(2, program, together)) == [4.5, 4.5]  # mean of 0 + 1 + 2 and 1 + 2 + 3


# --- two models, groups of ranks --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["init_sync", "find_unused_parameters"])
def test_two_models_in_one_backward(world, mode):
    """With unused parameters allowed, ranks may also reach the models in different orders, and here they do."""

    def program():
        rank = sp.get_rank()
        a, b = (DistributedDataParallel(linear(seed), bucket_cap_mb=1 / MIB, **{mode: True}) for seed in (1, 2))
        x = np.full((1, 3), rank + 1.0)
        first, second = (a, b) if rank and mode == "find_unused_parameters" else (b, a)
        one = first(x).sum() * (2.0 if first is a else 3.0)
        two = second(x).sum() * (2.0 if second is a else 3.0)
        (one + two).backward()
        return grads_of(a)[0][0, 0], grads_of(b)[0][0, 0]

    assert list(world.run(2, program)) == [(3.0, 4.5)] * 2  # the mean of 1 and 2, times 2 and 3


def test_module_belongs_to_its_newest_wrapper(inline):
    def program():
        model = linear()
        old, new = (DistributedDataParallel(model) for _ in range(2))
        sp.barrier()
        new(np.ones((1, 3))).sum().backward()
        with refused(InputError):
            old(np.ones((1, 3)))
        return True

    results = inline.run(2, program)
    events = [event.name for event in results.trace.events if event.rank == 0]
    assert events[events.index("barrier") :].count("all_reduce") == 1


def test_process_group_is_alias_of_group(inline):
    def program():
        group = sp.new_group([1, 0])
        ddp = DistributedDataParallel(linear(sp.get_rank()), [0], 0, process_group=group)
        assert ddp.process_group is group
        with refused(InputError):
            DistributedDataParallel(linear(), process_group=group, group=sp.new_group([0, 1]))
        return np.array(ddp.module.weight.data)

    for weight in inline.run(2, program):
        np.testing.assert_array_equal(weight, linear(1).weight.data)


def test_several_devices_of_one_rank_are_refused():
    with refused(InputError):
        DistributedDataParallel(linear(), device_ids=[0, 1])


# --- buffers ------------------------------------------------------------------------------------------


class Counting(Module):
    """Buffers of two dtypes, which each rank changes differently."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("total", np.full((2, 2), float(sp.get_rank())))
        self.register_buffer("calls", np.array(10 * sp.get_rank()))
        self.register_buffer("nothing", np.zeros((0, 3)))

    def forward(self, x: Any) -> sp.Tensor:
        seen = float(self.total.data[0, 0]), int(self.calls.data)
        self.total.data += sp.get_rank() + 1.0
        self.calls.data += 1
        self.seen = seen
        return self.layer(x)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_are_broadcast_before_each_forward(world, broadcast_buffers):
    def program():
        model = Counting()
        ddp = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
        seen = []
        for _ in range(3):
            ddp(np.ones((1, 3))).sum().backward()
            seen.append(model.seen)
        with ddp.no_sync():  # the next forward passes do not change them
            ddp(np.ones((1, 3))).sum().backward()
            seen.append(model.seen)
            ddp(np.ones((1, 3))).sum().backward()
            seen.append(model.seen)
        return seen

    first, second = world.run(2, program)
    assert first == [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
    own = [(0.0, 0), (2.0, 1), (4.0, 2), (6.0, 3), (8.0, 4)]
    assert second == ([*first[:4], (5.0, 4)] if broadcast_buffers else own)


def test_init_sync_can_be_left_to_the_caller(inline):
    def program():
        ddp = DistributedDataParallel(linear(sp.get_rank()), init_sync=False)
        ddp(np.ones((1, 3))).sum().backward()
        return np.array(ddp.module.weight.data), grads_of(ddp)[0]

    for rank, (weight, grad) in enumerate(inline.run(2, program)):
        np.testing.assert_array_equal(weight, linear(rank).weight.data)
        assert grad[0, 0] == 1.0


# --- gradients as views, or not -------------------------------------------------------------------------


@pytest.mark.parametrize("as_view", [True, False])
def test_gradient_as_bucket_view(inline, as_view):
    def program():
        ddp = DistributedDataParallel(linear(), gradient_as_bucket_view=as_view)
        ddp(np.full((1, 3), 1.0)).sum().backward()
        kept = ddp.module.weight.grad.data
        ddp.zero_grad()
        ddp(np.full((1, 3), 2.0)).sum().backward()
        shared = any(np.shares_memory(kept, bucket.flat) for bucket in ddp._reducer.buckets)
        return shared, kept[0, 0], ddp.module.weight.grad.data[0, 0]

    assert list(inline.run(2, program)) == [(as_view, 2.0 if as_view else 1.0, 2.0)] * 2


# --- unused parameters --------------------------------------------------------------------------------


def test_globally_unused_parameter_keeps_its_gradient(inline):
    """To the bit, although the mean of three equal numbers need not be that number."""

    def program():
        model = Branches()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        for parameter in model.right.parameters():
            parameter.grad = sp.Tensor(np.full(parameter.shape, 0.1))
        ddp(np.ones((1, 3)), 0).sum().backward()
        ddp.module.left.zero_grad()
        ddp(np.ones((1, 3)), 1).sum().backward()  # now in the bucket
        before = [p.grad.data.copy() for p in model.right.parameters()]
        ddp(np.ones((1, 3)), 0).sum().backward()
        for parameter, grad in zip(model.right.parameters(), before, strict=True):
            np.testing.assert_array_equal(parameter.grad.data, grad)
        return model.idle.weight.grad is None

    assert all(inline.run(3, program))


def test_parameter_may_be_frozen_after_wrapping(inline):
    def program():
        model = Sequential(linear(), Linear(2, 1, dtype=np.float64))
        ddp = DistributedDataParallel(model)
        model[0].requires_grad_(False)
        ddp(np.full((1, 3), float(sp.get_rank()))).sum().backward()
        return model[0].weight.grad is None, model[1].weight.grad.data[0, 0]

    (frozen, grad), other = inline.run(2, program)
    assert frozen
    assert other == (frozen, grad)


def test_static_graph_that_changes_is_an_error(inline):
    def program(first: int, second: int):
        ddp = DistributedDataParallel(Branches(), static_graph=True)
        for branch in (first, second):
            ddp(np.ones((1, 3)), branch).sum().backward()

    with refused(RunFailedError) as caught:
        inline.run(2, program, 0, 1)
    assert isinstance(caught.value.__cause__, UnusedParameterError)
    assert re.search(r"static_graph=True, but .* (left|right)", str(caught.value.__cause__))


def test_parameter_used_in_no_sync_only_is_reduced(inline):
    """The last micro-step does not reach it, but its accumulated gradient is waiting."""

    class Two(Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = linear(1), linear(2)

        def forward(self, x, both):
            return self.always(x) + self.sometimes(x) if both else self.always(x)

    def program():
        ddp = DistributedDataParallel(Two())
        x = np.full((1, 3), float(sp.get_rank()))
        with ddp.no_sync():
            ddp(x, True).sum().backward()
        ddp(x, False).sum().backward()
        with refused(UnusedParameterError):  # it got no gradient since
            ddp(x, False).sum().backward()
        return [grad[0, 0] for grad in grads_of(ddp)[::2]]

    assert list(inline.run(3, program)) == [[2.0 + rank, 1.0] for rank in range(3)]


# --- the bucket interface -----------------------------------------------------------------------------


def test_hook_sees_tensor_borders_in_buckets(world):
    """Adasum needs this: it works on each parameter by itself."""

    def program():
        model = Branches()
        ddp = DistributedDataParallel(model, bucket_cap_mb=100 / MIB, find_unused_parameters=True)
        seen: list[Any] = []

        def hook(state: list[Any], bucket: Any) -> Any:
            assert bucket.buffer().ndim == 1
            start = 0
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                assert parameter.shape == gradient.shape
                piece = bucket.buffer()[start : start + gradient.size]
                assert piece.size == 0 or np.shares_memory(piece, gradient)
                start += gradient.size
            assert start == bucket.buffer().size
            state.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
            total = sp.all_gather(bucket.buffer()).reshape(2, -1)
            return total[0] - total[1]  # an array, not a Work: the wait was necessary

        ddp.register_comm_hook(seen, hook)
        (ddp(np.ones((1, 3)), 0).sum() * float(5 - 2 * sp.get_rank())).backward()
        return seen, np.array(model.narrow.bias.grad.data)

    for seen, grad in world.run(2, program):
        assert [index for index, _, _ in seen] == list(range(len(seen)))
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        assert sum(number for _, _, number in seen) == 10
        np.testing.assert_array_equal(grad, [2.0] * 4)


def test_bad_hooks_are_refused(inline):
    def program():
        ddp = DistributedDataParallel(linear())
        with refused(InputError):
            ddp.register_comm_hook(None, "mean")
        ddp.register_comm_hook(None, lambda state, bucket: np.zeros(3))
        with refused(InputError):
            ddp.register_comm_hook(None, comm_hooks.mean_hook)
        with refused(InputError):
            ddp(np.ones((1, 3))).sum().backward()
        return True

    assert all(inline.run(2, program))


def test_hooks_that_differ_are_found(inline):
    """Red control: ranks must register the same hook."""

    def program():
        ddp = DistributedDataParallel(linear())
        ddp.register_comm_hook(None, (comm_hooks.mean_hook, comm_hooks.sum_hook)[sp.get_rank()])
        ddp(np.ones((1, 3))).sum().backward()

    with refused(RunFailedError) as caught:
        inline.run(2, program)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


# --- arrays of a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [None, "fp16_compress_hook", "powerSGD_hook", "mixed precision"])
def test_device_arrays(inline, arrays, hook):
    """Host and device arrays do not mix, and the values are NumPy's, to the bit on the stand-in."""
    xp = arrays.xp

    def program(on_device: bool):
        rank = sp.get_rank()
        model: Any = Sequential(
            Linear(6, 12, dtype=np.float32), sp.nn.BatchNorm1d(12), ReLU(), Linear(12, 8, dtype=np.float32)
        )
        rng = np.random.default_rng(0)
        for parameter in model.parameters():
            parameter.data[...] = rng.integers(-1, 2, parameter.shape)
        x = np.random.default_rng(rank).standard_normal((3, 6)).astype(np.float32)
        if on_device:
            x = xp.asarray(x)
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = xp.asarray(tensor.data)
        is_mixed = hook == "mixed precision"
        ddp = DistributedDataParallel(
            sp.parallel.convert_sync_batchnorm(model),
            find_unused_parameters=True,
            bucket_cap_mb=500 / MIB,
            mixed_precision=sp.parallel.MixedPrecision("float16", "float32", "float16") if is_mixed else None,
        )
        if hook and not is_mixed:
            state = sp.parallel.PowerSGDState(start_powerSGD_iter=1) if hook == "powerSGD_hook" else None
            ddp.register_comm_hook(state, getattr(comm_hooks, hook))
        for _ in range(3):
            ddp.zero_grad()
            ddp(sp.Tensor(x)).sum().backward()
        grads = [p.grad.data for p in model.parameters()]
        assert all(isinstance(g, arrays.type if on_device else np.ndarray) for g in grads)
        return [np.array(g.get() if on_device else g) for g in grads] + [
            sp.get_namespace(b.data) is xp for b in model.buffers()
        ]

    for host, device in zip(inline.run(2, program, False), inline.run(2, program, True), strict=True):
        for a, b in zip(host[:-3], device[:-3], strict=True):
            arrays.after(10).assert_equal(b, a)
        assert device[-3:] == [True] * 3

"""Convolution and pooling cut along height and width: halos forward and backward, their bytes, illegal cuts."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import nn, ops
from simparallel.arrays.host.windows import windows
from simparallel.autograd import Tensor, functions as F
from simparallel.clock.recorder import current_recorder
from simparallel.errors import StrategyError
from simparallel.layout.boxes import box_of, intersection, within
from simparallel.layout.layout import Layout
from simparallel.parallel import AutoParallel, distribute_tensor, implicit_redistributions, implicit_replication
from simparallel.parallel.operator import interpreter
from simparallel.parallel.operator.explain import Input
from simparallel.parallel.operator.op_call import OpCall

# Cuts of height and width; at least as many devices.
CUTS = ((2, 1), (1, 2), (2, 2), (4, 1), (1, 3), (2, 4))


def _divisible(cut):
    """List (kernel, stride, dilation, padding, image size) of all windows along one dim that allows this many cuts."""
    found = []
    for setting in product(range(1, 5), range(1, 5), (1, 2), range(4), range(1, 13)):
        kernel, stride, dilation, padding, size = setting
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        if room >= 0 and size % cut == 0 and (room // stride + 1) % cut == 0:
            found.append(setting)
    return found


DIVISIBLE = {cut: _divisible(cut) for cut in (1, 2, 3, 4)}
POOLS = {cut: [one for one in found if one[2] == 1 and 2 * one[3] <= one[0]] for cut, found in DIVISIBLE.items()}


@st.composite
def calls(draw, name):
    """Draw (op, inputs, strategy, number of devices): height or width is cut, and perhaps other dims."""
    cuts = draw(st.sampled_from(CUTS))
    legal = DIVISIBLE if name == "Conv2d" else POOLS
    kernel, stride, dilation, padding, size = zip(*(draw(st.sampled_from(legal[cut])) for cut in cuts), strict=True)
    n, c, o, groups = (draw(st.integers(1, 2)) for _ in range(4))
    room = 12 // prod(cuts)  # for more devices

    def other_cut(size):
        nonlocal room
        cut = draw(st.sampled_from([1, size])) if size <= room else 1
        room //= cut
        return cut

    cut_n, cut_c = other_cut(n), other_cut(c)
    devices = prod(cuts) * cut_n * cut_c
    seed = draw(st.integers(0, 1 << 30))
    if name != "Conv2d":
        op = getattr(ops, name)(kernel, stride, padding, *([draw(st.booleans())] if name == "AvgPool2d" else ()))
        shapes, strategy = [(n, c, *size)], ((cut_n, cut_c, *cuts),)
    elif groups == 1:
        op, cut_o = ops.Conv2d(stride, padding, dilation), other_cut(o)
        shapes = [(n, c, *size), (o, c, *kernel), (o,)]
        strategy = (cut_n, cut_c, *cuts), (cut_o, cut_c, 1, 1), (cut_o,)
        devices *= cut_o
    else:  # the groups are cut as the channels would be
        op = ops.Conv2d(stride, padding, dilation, c)
        shapes = [(n, c * o, *size), (c, o, *kernel), (c,)]
        strategy = (cut_n, cut_c, *cuts), (cut_c, 1, 1, 1), (cut_c,)
    devices *= other_cut(2)  # which repeat
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(-4, 5, shape).astype(np.float64) for shape in shapes]
    return op, inputs, strategy, devices


def run_serial(op, inputs):
    leaves = [Tensor(x, requires_grad=True) for x in inputs]
    y = op(*leaves)
    dy = np.random.default_rng(5).integers(-4, 5, y.shape).astype(y.dtype)
    y.backward(dy)
    return y.numpy(), dy, [leaf.grad.numpy() for leaf in leaves]


def run_cut(op, inputs, dy, layouts):
    """Return output, gradients, and the bytes that this rank received as messages, forward and backward."""
    leaves = [distribute_tensor(x, layout, requires_grad=True) for x, layout in zip(inputs, layouts, strict=True)]
    start = received()
    y = op(*leaves)
    forward = received() - start
    whole = y.full_tensor()
    start = received()
    whole.backward(dy)
    counted = [forward, received() - start]
    return whole.numpy(), [leaf.grad.full_tensor().numpy() for leaf in leaves], counted


def received():
    """Return the bytes that this rank has received as messages so far."""
    return sum(e.size_bytes for e in current_recorder().events if e.name == "recv")


def check(op, inputs, strategy, devices):
    y, dy, grads = run_serial(op, inputs)
    op.shard(strategy)
    call = OpCall(op, [Input(ops.Spec(x.shape, x.dtype)) for x in inputs], devices)
    layouts = list(call.sharding.input_layouts)
    plan = op.plan(*(x.shape for x in inputs), device_num=devices, dtype=np.float64)
    results = sp.launch(run_cut, (op, inputs, dy, layouts), world_size=devices, transport="inline")

    same = (
        np.testing.assert_array_equal
        if type(op) is not ops.AvgPool2d
        else lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    )
    for found, found_grads, _ in results:
        same(found, y)
        for gradient, expected in zip(found_grads, grads, strict=True):
            same(gradient, expected)
    received = [counted for _, _, counted in results]
    halo = call.window_cut.halo
    assert [[8 * halo.received[rank], 8 * halo.given[rank]] for rank in halo.source.mesh.ranks] == received
    for exchanges, counted in ((plan.forward, 0), (plan.backward[0], 1)):
        explained = sum(e.bytes_per_rank for e in exchanges if e.collective == "messages")
        assert explained == max(counts[counted] for counts in received)
    return plan


@pytest.mark.parametrize("name", ["Conv2d", "MaxPool2d", "AvgPool2d"])
@settings(max_examples=2 * settings.default.max_examples)
@given(data=st.data())
def test_dividing_cuts_match_one_device(name, data):
    check(*data.draw(calls(name)))


@pytest.mark.parametrize("cuts", [(2, 1), (2, 2)])
def test_winograd_inputs_are_widened(cuts):
    x, w = (integers(*shape).astype(np.float32) for shape in ((2, 4, 12, 8), (4, 4, 3, 3)))
    op = ops.Conv2d(1, 1, method="winograd")
    y, dy, grads = run_serial(op, [x, w])
    op.shard(((1, 1, *cuts), (1, 1, 1, 1)))
    devices = prod(cuts)
    layouts = OpCall(op, [Input(ops.Spec(a.shape, a.dtype)) for a in (x, w)], devices).sharding.input_layouts
    for found, found_grads, _ in sp.launch(run_cut, (op, [x, w], dy, layouts), world_size=devices, transport="inline"):
        for a, b in zip((found, *found_grads), (y, *grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)


def integers(*shape):
    return np.random.default_rng(shape).integers(-4, 5, shape).astype(np.float64)


@pytest.mark.parametrize(
    ("op", "shapes", "cuts", "received", "returned"),
    [
        # 3 x 3 windows need a row of each neighbour, 8 pixels of 8 bytes; in the middle two.
        (ops.Conv2d(1, 1), [(1, 1, 8, 8), (1, 1, 3, 3)], (4, 1), 128, 128),
        # and a corner, from the diagonal neighbour
        (ops.Conv2d(1, 1), [(1, 1, 8, 8), (1, 1, 3, 3)], (2, 2), 72, 72),
        # "same" pads at the bottom only
        (ops.Conv2d(2, "same"), [(1, 1, 8, 8), (1, 1, 3, 3)], (2, 1), 64, 64),
        # three rows at each side are more than the two that a neighbour has
        (ops.Conv2d(1, 3), [(1, 1, 8, 8), (1, 1, 7, 7)], (4, 1), 320, 320),
        # adjacent windows, or windows with gaps between them
        (ops.MaxPool2d(2), [(1, 1, 8, 8)], (4, 2), 0, 0),
        (ops.AvgPool2d(1, 2), [(1, 1, 8, 8)], (4, 1), 0, 0),
        (ops.Conv2d(3, 0), [(1, 1, 12, 6), (1, 1, 2, 2)], (4, 2), 0, 0),
        # dilation reaches two rows further
        (ops.Conv2d(1, 2, 2), [(1, 1, 8, 8), (1, 1, 3, 3)], (4, 1), 256, 256),
        # the first and the last rank see padding only, and give their rows away
        (ops.Conv2d(1, 4), [(1, 1, 4, 8), (1, 1, 1, 1)], (4, 1), 64, 64),
        (ops.Conv2d(1, 4), [(1, 1, 4, 8), (1, 1, 1, 1)], (4, 4), 48, 16),
    ],
)  # fmt: skip
def test_halo_covers_the_windows(op, shapes, cuts, received, returned):
    strategy = ((1, 1, *cuts), *[(1,) * len(shape) for shape in shapes[1:]])
    plan = check(op, [integers(*shape) for shape in shapes], strategy, prod(cuts))

    messages = [e for e in plan.forward if e.collective == "messages"]
    back = [e for e in plan.backward[0] if e.collective == "messages"]
    assert [e.bytes_per_rank for e in messages] == [received] * bool(received)
    assert [e.bytes_per_rank for e in back] == [returned] * bool(returned)
    assert ("halo of the windows" in str(plan)) == bool(received)


@given(st.data())
def test_windows_of_a_slice_match_the_whole(data):
    """Every pixel of every window is the same one, or padding in both."""
    cut = data.draw(st.sampled_from([1, 2, 3, 4]))
    kernel, stride, dilation, padding, size = data.draw(st.sampled_from(DIVISIBLE[cut]))
    whole = windows((size, size), (kernel, kernel), (stride, stride), (padding, padding), (dilation, dilation))
    count = whole.out[0] // cut
    for chunk in range(cut):
        ((start, stop), columns), part = whole.part((chunk * count, 0), (count, whole.out[1]))
        if cut == 1 and stop == size:
            assert part.before == whole.before
        assert columns[0] == 0
        for p, tap in product(range(count), range(kernel)):
            pixel = (chunk * count + p) * stride + tap * dilation - padding
            found = p * stride + tap * dilation - part.before[0]
            if 0 <= pixel < size:
                assert start <= pixel < stop
                assert found == pixel - start
            else:
                assert not 0 <= found < part.image[0]
        last = (count - 1) * stride + dilation * (kernel - 1) + 1
        assert part.padded[0] == last


class Network(nn.Module):
    """conv -> norm -> relu -> pool -> conv -> pool: cut dims stay cut."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool, self.conv2 = nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 2, 3, padding="same")
        self.mean = nn.AvgPool2d(2)

    def forward(self, x):
        return self.mean(self.conv2(self.pool(F.relu(self.norm(self.conv1(x))))))


X = np.random.default_rng(0).standard_normal((2, 2, 16, 16))


def step(layout=None):
    """Return output and gradients of x and of the parameters, the output's layout, and the redistributions."""
    sp.manual_seed(3)
    net = Network()
    x = Tensor(X, requires_grad=True) if layout is None else distribute_tensor(X, layout, requires_grad=True)
    with implicit_replication(), implicit_redistributions() as moved:
        y = net(x)
        whole = y.full_tensor()
        whole.backward(np.random.default_rng(1).standard_normal(whole.shape))
    grads = [x.grad, *(p.grad for p in net.parameters())]
    return whole.numpy(), [g.full_tensor().numpy() for g in grads], y.layout, moved


SQUARE, ROWS = Layout((2, 2), ("a", "b")), Layout((4,), ("a",))
LAYOUTS = [
    SQUARE("None", "None", "a", "b"),
    SQUARE("a", "None", "b", "None"),
    SQUARE("None", "None", ("b", "a"), "None"),
    ROWS("None", "None", "None", "a"),
]


def compare_steps(layout, world):
    y, grads, _, _ = step()
    for found, found_grads, lies, moved in world.run(4, step, layout):
        np.testing.assert_allclose(found, y, rtol=1e-6, atol=1e-9)
        for gradient, expected in zip(found_grads, grads, strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
        assert lies.axes_by_dim == layout.axes_by_dim
        assert not moved


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.axes_by_dim))
def test_network_follows_the_cut_of_its_images(layout, inline):
    compare_steps(layout, inline)


@pytest.mark.process
def test_network_cut_both_ways_between_processes(processes):
    compare_steps(LAYOUTS[0], processes)


def test_missing_halo_gradient_is_found(monkeypatch):
    """Red control: without the neighbours' share the gradient of x must fail the comparison."""
    compile_halo = interpreter.compile_halo

    def forgetful(cut, rank):
        moves = compile_halo(cut, rank)
        own = box_of(cut.halo.source, rank, cut.halo.shape)
        index = within(intersection(own, cut.halo.needs[rank]), cut.halo.needs[rank])
        return moves._replace(narrow=lambda dy: dy[index])

    monkeypatch.setattr(interpreter, "compile_halo", forgetful)
    with pytest.raises(AssertionError, match="Not equal|Mismatched"):
        check(ops.Conv2d(1, 1), [integers(1, 1, 8, 8), integers(1, 1, 3, 3)], ((1, 1, 2, 1), (1, 1, 1, 1)), 2)


def test_explanation_of_network_matches_traffic():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.init.initializer("normal", [2, 1, 3, 3])
            self.conv = ops.Conv2d(1, 1).shard(((1, 1, 4, 1), (1, 1, 1, 1)))
            self.pool = ops.MaxPool2d(3, 2, 1).shard(((1, 1, 4, 1),))

        def forward(self, x):
            return self.pool(self.conv(x, self.weight))

    explained = Cut().explain((1, 1, 16, 8), device_num=4)
    assert [(row.exchange.collective, row.phase) for row in explained.rows] == [
        ("messages", "forward"),
        ("messages", "forward"),
        ("messages", "backward"),
        ("all_reduce", "backward"),
    ]

    def program():
        net = Cut()
        x = np.ones((1, 1, 16, 8), np.float32)
        AutoParallel(net)(x)  # the first step cuts the parameters
        before = len(current_recorder().events)
        AutoParallel(lambda x: net(x).backward(np.ones((1, 2, 2, 4), np.float32)))(x)
        step = current_recorder().events[before:]
        shown = [e.kind for e in step if e.name == "Halo"]
        # The images need no gradient; and the pool's first windows stay inside the first slice.
        assert shown == ["forward"] * (1 if sp.get_rank() == 0 else 2) + ["backward"]
        summed = [e.sent_bytes for e in step if e.kind == "collective" and e.name == "all_reduce"]
        return sum(e.size_bytes for e in step if e.name == "recv"), summed

    results = sp.launch(program, world_size=4, transport="inline")
    sizes = [row.exchange.bytes_per_rank for row in explained.rows]
    assert max(received for received, _ in results) == sum(sizes[:3])
    assert all(summed == sizes[3:] for _, summed in results)


@pytest.mark.parametrize("cuts", [(1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 2, 2), (2, 2, 1, 1), (1, 2, 1, 2)])
@pytest.mark.parametrize("size", [(4, 6), (8, 2), (12, 10)])
def test_adaptive_windows_stay_inside_slices(cuts, size):
    """12 x 10 pixels: the windows overlap where the sizes do not divide, but not where both are cut. No exchange."""
    x, dy = integers(2, 2, 12, 10), integers(2, 2, *size)
    whole = Tensor(x, requires_grad=True)
    expected = ops.AdaptiveAvgPool2d(size)(whole)
    expected.backward(dy)

    def device():
        op = ops.AdaptiveAvgPool2d(size).shard((cuts,))
        assert not op.plan(x.shape, device_num=4).forward
        leaf = distribute_tensor(x, Layout((4,), ("a",))(*["None"] * 4), requires_grad=True)
        y = op(leaf)
        assert y.layout.cuts == cuts
        y.full_tensor().backward(dy)
        return y.full_tensor().numpy(), leaf.grad.full_tensor().numpy()

    for found, gradient in sp.launch(device, world_size=4, transport="inline"):
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gradient, whole.grad.numpy(), rtol=1e-12, atol=1e-12)


CONV, IMAGE, KERNEL = ops.Conv2d(1, 1), (1, 1, 8, 8), (1, 1, 3, 3)


@pytest.mark.parametrize(
    ("op", "shapes", "strategy"),
    [
        (CONV, [(1, 1, 9, 8), KERNEL], ((1, 1, 2, 1), (1,) * 4)),
        (ops.Conv2d(2), [IMAGE, KERNEL], ((1, 1, 2, 1), (1,) * 4)),
        (ops.MaxPool2d(3, 1), [IMAGE], ((1, 1, 1, 4),)),
        (CONV, [IMAGE, (1, 1, 4, 4)], ((1, 1, 1, 1), (1, 1, 2, 1))),
        (ops.AdaptiveAvgPool2d(3), [IMAGE], ((1, 1, 2, 1),)),
        (ops.AdaptiveAvgPool2d((3, 1)), [IMAGE], ((1, 1, 2, 2),)),
    ],
)  # fmt: skip
def test_cuts_that_do_not_divide_are_refused(op, shapes, strategy):
    with refused(StrategyError) as caught:
        op.shard(strategy).plan(*shapes, device_num=4)
    for nearest in caught.value.nearest:
        assert op.shard(nearest).plan(*shapes, device_num=4)
    assert caught.value.nearest


def test_op_without_strategy_gathers_uncuttable_dim():
    """Three windows over eight rows in two halves: the image is gathered along them."""

    def device():
        x = distribute_tensor(integers(1, 1, 8, 4), Layout((2,), ("a",))("None", "None", "a", "None"))
        with implicit_redistributions() as moved:
            y = ops.MaxPool2d(3, 2)(x)
        assert len(moved) == 1
        return y.full_tensor().numpy()

    expected = ops.MaxPool2d(3, 2)(Tensor(integers(1, 1, 8, 4))).numpy()
    for found in sp.launch(device, world_size=2, transport="inline"):
        np.testing.assert_array_equal(found, expected)

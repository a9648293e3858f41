"""Convolution and pooling: every method against all windows at once, memory orders, threads, modules."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, strategies as st
from op_records.image import conv2d
from refusals import refused

from simparallel import nn
from simparallel.arrays.host.windows import windows
from simparallel.autograd import Conv2d, MaxPool2d, Spec, Tensor, functions as F
from simparallel.errors import DTypeError, InputError, ShapeError
from simparallel.testing import check_gradients

WINOGRAD_ERROR = 2e-5  # times the largest sum of absolute products, in float32
MANY = 17  # number of channels from which a pixel's channels are adjacent in memory


def integers(seed, *shapes):
    """Return small integers as float64, one array for each shape; more elements than Hypothesis can draw."""
    generator = np.random.Generator(np.random.Philox(seed))
    return [generator.integers(-4, 5, shape).astype(float) for shape in shapes]


def normal(seed, *shapes):
    generator = np.random.Generator(np.random.Philox(seed))
    return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]


def forward_and_backward(op, dy, *arrays):
    """Return [y, dx, dw, ...]."""
    leaves = [Tensor(array, requires_grad=True) for array in arrays]
    y = op(*leaves)
    y.backward(dy)
    return [y.numpy(), *(leaf.grad.numpy() for leaf in leaves)]


def assert_adjoint(op, dy, x, w, dx, dw):
    """Check <dy, conv(e, w)> = <dx, e> and <dy, conv(x, e)> = <dw, e>, which define the gradients of a bilinear map."""
    ex, ew = integers(7, x.shape, w.shape)

    assert np.sum(dy * conv2d(op, ex, w)) == np.sum(dx * ex)
    assert np.sum(dy * conv2d(op, x, ew)) == np.sum(dw * ew)


@st.composite
def conv_calls(draw):
    """Draw (op, shape of x, shape of w): few and many channels, kernels of all kinds."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    size = tuple(max(1, r - 2 * p) + draw(st.integers(0, 9)) for r, p in zip(reach, padding, strict=True))
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    channels, out_channels = draw(st.sampled_from((1, 3, 16, MANY))), draw(st.sampled_from((1, 2, 16, MANY)))
    op = Conv2d(stride, draw(st.sampled_from((padding, "same"))), dilation, groups)
    num = draw(st.integers(0, 3))
    return op, (num, groups * channels, *size), (groups * out_channels, channels, *kernel)


@given(call=conv_calls(), seed=st.integers(0, 100))
def test_conv2d_exact_on_integers(call, seed):
    """Forward and backward are exact on integers, whatever the memory order of the input."""
    op, x_shape, w_shape = call
    x, w, b = integers(seed, x_shape, w_shape, w_shape[:1])
    (dy,) = integers(seed + 1, op.infer(Spec(x.shape, x.dtype), Spec(w.shape, w.dtype)).shape)
    y, dx, dw, db = forward_and_backward(op, dy, x, w, b)

    np.testing.assert_array_equal(y, conv2d(op, x, w, b))
    assert_adjoint(op, dy, x, w, dx, dw)
    np.testing.assert_array_equal(db, dy.sum(axis=(0, 2, 3)))
    in_order = np.ascontiguousarray(x.transpose(2, 3, 0, 1)).transpose(2, 3, 0, 1)
    np.testing.assert_array_equal(op(Tensor(in_order), Tensor(w)).numpy(), conv2d(op, x, w))


@given(call=conv_calls(), seed=st.integers(0, 100))
def test_conv2d_on_device_is_exact_on_integers(arrays, call, seed):
    """There dx is one product with the turned kernel where the stride is 1, and windows are copied in words."""
    op, x_shape, w_shape = call
    x, w, b = integers(seed, x_shape, w_shape, w_shape[:1])
    (dy,) = integers(seed + 1, op.infer(Spec(x.shape, x.dtype), Spec(w.shape, w.dtype)).shape)
    found = forward_and_backward(op, *map(arrays.on_device, (dy, x, w, b)))
    for one, other in zip(found, forward_and_backward(op, dy, x, w, b), strict=True):
        np.testing.assert_array_equal(one, other)


def test_unaligned_images_are_gathered(arrays):
    """The memory of a view begins between two words."""
    x, w = integers(0, (6, 6, 1, 16), (16, 16, 3, 3))
    buffer = arrays.on_device(np.concatenate([np.zeros(1), x.reshape(-1)]))
    image = buffer[1:].reshape(x.shape).transpose(2, 3, 0, 1)
    found = Conv2d()(Tensor(image), Tensor(arrays.on_device(w)))
    np.testing.assert_array_equal(found.numpy(), conv2d(Conv2d(), x.transpose(2, 3, 0, 1), w))


@given(
    image=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    padding=st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.just("same")),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    num=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_winograd_is_close_to_direct_summation(image, padding, channels, num, seed):
    if padding != "same":
        image = tuple(max(size, 3 - 2 * pad) for size, pad in zip(image, padding, strict=True))
    x, w = normal(seed, (num, channels[0], *image), (channels[1], channels[0], 3, 3))
    op, direct = Conv2d(1, padding, method="winograd"), Conv2d(1, padding, method="direct")
    (dy,) = normal(seed + 1, op(Tensor(x), Tensor(w)).shape)
    found = forward_and_backward(op, dy, x, w)
    expected = forward_and_backward(direct, *(array.astype(float) for array in (dy, x, w)))
    bounds = forward_and_backward(direct, *(abs(array.astype(float)) for array in (dy, x, w)))

    for actual, right, bound in zip(found, expected, bounds, strict=True):
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, right, rtol=0, atol=WINOGRAD_ERROR * bound.max())


@pytest.mark.parametrize("shape", [(2, 64, 13, 9), (1, 32, 70, 31), (33, 160, 5, 4), (2, 300, 6, 6)])
def test_winograd_splits_many_channels(shape):
    """Several blocks of filters, and several chunks of tile rows."""
    x, w = normal(0, shape, (2 * shape[1], shape[1], 3, 3))
    op, direct = Conv2d(1, 1), Conv2d(1, 1, method="direct")
    (dy,) = normal(1, (shape[0], 2 * shape[1], *shape[2:]))
    by_winograd, directly = forward_and_backward(op, dy, x, w), forward_and_backward(direct, dy, x, w)

    assert op(Tensor(x, requires_grad=True), Tensor(w))._node.ctx.by_winograd
    for a, b in zip(by_winograd, directly, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * abs(b).max())
        assert (a != b).any()  # another method was used


def test_winograd_runs_on_device_arrays(arrays):
    x, w = normal(0, (2, 4, 7, 6), (3, 4, 3, 3))
    op = Conv2d(1, 1, method="winograd")
    leaves = [Tensor(arrays.on_device(array), requires_grad=True) for array in (x, w)]
    y = op(*leaves)
    y.backward(arrays.xp.ones(y.shape, dtype=y.dtype))
    expected = forward_and_backward(op, np.ones(y.shape), x, w)

    for tensor, right in zip((y, *(leaf.grad for leaf in leaves)), expected, strict=True):
        arrays.assert_equal(tensor.numpy(), right)


def test_float64_and_integers_are_summed_directly():
    x, w = integers(0, (1, 32, 6, 6), (32, 32, 3, 3))
    for dtype in (np.float64, np.int64):
        y = F.conv2d(x.astype(dtype), w.astype(dtype), padding=1, method="winograd")

        assert y.dtype == dtype
        np.testing.assert_array_equal(y.numpy(), conv2d(Conv2d(1, 1), x, w))


def test_results_do_not_share_scratch_memory():
    """Another call, also on another thread, leaves earlier results unchanged."""
    calls = [normal(seed, (2, 32, 9, 9), (32, 32, 3, 3), (2, 32, 9, 9)) for seed in range(8)]

    def run(call):
        x, w, dy = call
        results = forward_and_backward(Conv2d(1, 1), dy, x, w)
        return results + forward_and_backward(Conv2d(2, 1), dy[:, :, :5, :5], x, w)

    one_by_one = [run(call) for call in calls]
    copies = [[array.copy() for array in results] for results in one_by_one]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(run, calls))

    for kept, copied, other in zip(one_by_one, copies, at_once, strict=True):
        for a, b, c in zip(kept, copied, other, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)


def test_conv2d_keeps_nothing_but_its_inputs():
    for channels in (2, MANY, 32):
        x, w = normal(0, (2, channels, 8, 8), (channels, channels, 3, 3))
        y = F.conv2d(Tensor(x, requires_grad=True), w, padding=1)
        z = F.conv2d(y, w, padding=1)
        kept = [value for value in vars(z._node.ctx).values() if isinstance(value, np.ndarray)]

        assert sum(array.nbytes for array in kept) == y.data.nbytes + w.nbytes
        assert any(np.shares_memory(array, y.data) for array in kept)  # the right memory order was kept


def test_conv2d_counts_its_flops():
    x, w, b = (Spec(shape, np.dtype("f4")) for shape in ((5, 6, 9, 8), (4, 3, 3, 2), (4,)))
    op = Conv2d((2, 1), (1, 0), groups=2)
    size = 5 * 4 * 5 * 7

    assert op.infer(x, w, b).shape == (5, 4, 5, 7)
    assert op.work(x, w).flops == 2 * size * 3 * 3 * 2
    assert op.work(x, w, b).flops == 2 * size * 3 * 3 * 2 + size
    assert op.work_backward((True, True), op.work(x, w)).flops == 2 * op.work(x, w).flops


@given(size=st.integers(1, 20), kernel=st.integers(1, 6), stride=st.integers(1, 4), dilation=st.integers(1, 3))
def test_same_padding_gives_one_window_a_stride(size, kernel, stride, dilation):
    at = windows((size, size), (kernel, kernel), (stride, stride), "same", (dilation, dilation))

    assert at.out[0] == -(-size // stride)
    assert 0 <= at.after[0] - at.before[0] <= 1


def test_max_pool_gradient_goes_to_first_maximum():
    x = Tensor(np.array([[[[1.0, 3, 3], [3, 3, 0], [3, 0, 0]]]]), requires_grad=True)
    MaxPool2d(2, 1)(x).backward(np.array([[[[1.0, 2], [4, 8]]]]))

    np.testing.assert_array_equal(x.grad.numpy(), [[[[0, 3, 0], [4, 8, 0], [0, 0, 0]]]])


def test_max_pool_of_infinities_and_of_integers():
    x = np.full((1, 1, 2, 2), -np.inf)
    assert MaxPool2d(2, padding=1)(Tensor(x)).numpy().max() == -np.inf
    np.testing.assert_array_equal(F.max_pool2d(np.full((1, 1, 2, 2), -7), 2, padding=1).numpy(), -7)


def test_bad_calls_are_refused():
    x, w = np.zeros((2, 4, 5, 5)), np.zeros((6, 4, 3, 3))
    with refused(ShapeError):
        F.conv2d(x, np.zeros((6, 3, 3, 3)))
    with refused(ShapeError):
        F.conv2d(x, w, groups=3)
    with refused(ShapeError):
        F.conv2d(x, w, dilation=4)
    with refused(ShapeError):
        F.conv2d(x[0], w)
    with refused(ShapeError):
        F.max_pool2d(x[0, 0], 2)
    with refused(ShapeError):
        F.adaptive_avg_pool2d(np.zeros((1, 1, 0, 2)), 1)
    for settings in (
        {"stride": 0},
        {"padding": "full"},
        {"padding": -1},
        {"dilation": (1, 2, 3)},
        {"groups": 0},
        {"method": "fft"},
    ):
        with refused(InputError):
            F.conv2d(x, w, **settings)
    with refused(InputError):
        F.max_pool2d(x, 2, padding=2)


def test_gradients_of_a_small_network_of_images():
    x, w, v = (array / 3 for array in integers(3, (2, 3, 7, 6), (4, 3, 3, 3), (2, 4, 2, 2)))

    def network(x, w, v):
        hidden = F.avg_pool2d(F.conv2d(x, w, padding="same", stride=(1, 2)).tanh(), 2, padding=1)
        return F.adaptive_avg_pool2d(F.conv2d(hidden, v, dilation=(1, 1)), (2, 1))

    check_gradients(network, [x, w, v])


# --- modules -----------------------------------------------------------------------------------------


def test_conv2d_module_follows_pytorch():
    """The constructor, the initial values and the repr are PyTorch's."""
    layer = nn.Conv2d(6, 8, (3, 5), 2, padding=(1, 2), groups=2)
    bound = 1 / np.sqrt(3 * 3 * 5)

    assert layer.weight.shape == (8, 3, 3, 5)
    assert layer.bias.shape == (8,)
    assert abs(layer.weight.numpy()).max() <= bound
    assert abs(layer.weight.numpy()).max() > 0.9 * bound
    assert abs(layer.bias.numpy()).max() <= bound
    assert layer(np.zeros((2, 6, 9, 9), np.float32)).shape == (2, 8, 5, 5)
    assert repr(layer) == "Conv2d(6, 8, kernel_size=(3, 5), stride=(2, 2), padding=(1, 2), groups=2)"
    assert repr(nn.Conv2d(1, 2, 3, bias=False)) == "Conv2d(1, 2, kernel_size=(3, 3), bias=False)"


def test_pooling_modules_show_their_settings():
    x = np.zeros((1, 2, 6, 6), np.float32)

    assert nn.MaxPool2d(3, 2, 1)(x).shape == nn.AvgPool2d(3, 2, 1)(x).shape == (1, 2, 3, 3)
    assert nn.AdaptiveAvgPool2d((1, 4))(x).shape == (1, 2, 1, 4)
    assert repr(nn.MaxPool2d(2)) == "MaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0))"
    assert "count_include_pad=False" in repr(nn.AvgPool2d(2, count_include_pad=False))
    assert repr(nn.AdaptiveAvgPool2d(1)) == "AdaptiveAvgPool2d(output_size=(1, 1))"


def test_modules_refuse_bad_settings():
    """Bad settings are refused by the constructor."""
    for bad in ((0, 2, 3), (2, 2.5, 3), (2, 2, 0), (3, 4, 3, 1, 0, 1, 2), (3, 4, 3, 1, 0, 1, 1, True, "reflect")):
        with refused(InputError):
            nn.Conv2d(*bad)
    with refused(DTypeError):
        nn.Conv2d(1, 1, 1, dtype=np.int64)


# --- transposed, and in another size ------------------------------------------------------------------


def test_transposed_settings_are_checked_and_shown():
    layer = nn.ConvTranspose2d(4, 6, 3, 2, 1, (1, 0), groups=2, bias=False)
    text = "kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), output_padding=(1, 0), groups=2, bias=False"
    assert repr(layer) == f"ConvTranspose2d(4, 6, {text})"
    assert layer.weight.shape == (4, 3, 3, 3)
    table = nn.summary(layer, (1, 4, 5, 5))
    assert (table[0].output_shape, table[0].num_parameters) == ((1, 6, 10, 9), 108)
    assert table[0].work_flops > 0
    for settings in (
        {"padding": "valid"},
        {"padding": "same", "stride": 2, "output_padding": 1},
        {"output_padding": 1},
        {"groups": 3},
        {"padding_mode": "reflect"},
    ):
        with refused(InputError):
            nn.ConvTranspose2d(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **settings})


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (2, 3), (4, 1), (5, 2)])
def test_same_transpose_is_gradient_of_same_conv(kernel, stride):
    """A transposed convolution with padding "same" is the gradient of such a convolution."""
    x, w, image = integers(0, (1, 2, 3, 4), (2, 1, kernel, kernel), (1, 1, 3 * stride, 4 * stride))
    image = Tensor(image, requires_grad=True)
    F.conv2d(image, w, stride=stride, padding="same").backward(x)
    y = F.conv_transpose2d(x, w, stride=stride, padding="same")
    np.testing.assert_array_equal(y.numpy(), image.grad.numpy())


def test_resizing_layer_is_checked_and_shown():
    layer = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
    assert repr(layer) == "Upsample(scale_factor=2, mode='bilinear', align_corners=True)"
    (x,) = integers(0, (1, 2, 2, 3))
    assert nn.Upsample((4, 3))(x).numpy().tolist() == x.repeat(2, axis=2).tolist()
    check_gradients(layer, [x])
    for settings in (
        {},
        {"size": 2, "scale_factor": 2},
        {"size": 2, "mode": "bicubic"},
        {"size": 2, "align_corners": True},
        {"size": 2, "recompute_scale_factor": True},
    ):
        with refused(InputError):
            nn.Upsample(**settings)
    with refused(ShapeError):
        layer(x[0])

"""Norms, embedding, dropout, attention and losses as modules; containers, hooks, summary, initialisers."""

from __future__ import annotations

import copy
import pickle
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.autograd import Tensor, functions as F, no_grad
from simparallel.backend import manual_seed, random_state
from simparallel.errors import DTypeError, InputError, LabelError, ShapeError
from simparallel.nn.init import _normal_quantile
from simparallel.testing import check_gradients
from simparallel.testing.strategies import arrays


def floats(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


# --- softmax ---------------------------------------------------------------------------------------------


@given(st.data())
def test_softmax_rows_sum_to_one(data):
    """The rows sum to 1 and log_softmax is finite, however wide the range of the inputs."""
    dtype = data.draw(st.sampled_from((np.float16, np.float32, np.float64)))
    values = (0.0, 1.0, -1.0, 300.0, -300.0, 3e4, -3e4)
    x = data.draw(arrays((3, 4), dtype, values=values))
    y = F.softmax(x).numpy()

    np.testing.assert_allclose(y.sum(1), 1, rtol=2e-3 if dtype == np.float16 else 1e-6)
    log_y = F.log_softmax(x).numpy()
    assert np.isfinite(log_y).all()
    assert (log_y <= 0).all()


# --- cross-entropy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [10, 103, 105, 500, 1e4])
def test_expanded_cross_entropy_has_no_nan_at_any_gap(gap):
    """The original takes log(e^-gap) * 0, which is NaN in float32 from a gap of about 104 on."""
    z = np.array([[gap, 0, 0], [0, 0, gap]], np.float32)
    labels = np.array([0, 1])
    losses = {}
    for name, loss in (("fused", nn.CrossEntropyLoss()), ("expanded", nn.SoftmaxCrossEntropyExpand(sparse=True))):
        logits = Tensor(z, requires_grad=True)
        loss(logits, labels).backward()
        losses[name] = logits.grad.numpy()
        assert np.isfinite(losses[name]).all()
    np.testing.assert_allclose(losses["fused"], losses["expanded"], atol=1e-6)
    dense = nn.SoftmaxCrossEntropyExpand()(z, np.eye(3, dtype=np.float32)[labels])
    np.testing.assert_allclose(
        dense.numpy(), nn.SoftmaxCrossEntropyWithLogits()(z, np.eye(3, dtype=np.float32)[labels]).numpy()
    )
    with np.errstate(all="ignore"):  # red control: the naive formula
        naive = np.log(np.exp(z - gap) / np.exp(z - gap).sum(1, keepdims=True)) * np.eye(3)[labels]
    assert np.isnan(naive).any() == (gap > 104)


def test_expanded_cross_entropy_has_the_right_gradient():
    check_gradients(lambda z: F.cross_entropy_expand(z, np.array([0, 2])), [floats(2, 3)])


def test_cross_entropy_weights_and_ignored_labels():
    """Class weights, ignored labels, and labels of more than one dim."""
    logits, weight = floats(2, 3, 4, dtype=np.float64), np.array([1.0, 2.0, 0.5])
    labels = np.array([[0, 1, 2, -100], [2, 2, -100, 0]])
    loss = nn.CrossEntropyLoss(weight=weight, ignore_index=-100)
    logp = np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
    rows = [(weight[c], logp[n, c, i]) for n in range(2) for i, c in enumerate(labels[n]) if c != -100]
    expected = -sum(w * p for w, p in rows) / sum(w for w, _ in rows)

    np.testing.assert_allclose(loss(logits, labels).numpy(), expected)
    np.testing.assert_allclose(nn.NLLLoss(weight=weight, ignore_index=-100)(logp, labels).numpy(), expected)
    none = nn.CrossEntropyLoss("none", ignore_index=-100)(logits, labels)
    assert none.shape == labels.shape
    assert none.numpy()[0, 3] == 0
    assert "weight" in loss.state_dict()
    check_gradients(lambda z: loss(z, labels), [logits])


def test_mean_of_no_rows_is_zero():
    logits = Tensor(floats(2, 3), requires_grad=True)
    loss = F.cross_entropy(logits, np.array([-100, -100]), ignore_index=-100)
    loss.backward()

    assert loss.item() == 0
    assert not logits.grad.numpy().any()


def test_negative_label_needs_ignore_index():
    with refused(LabelError):
        nn.CrossEntropyLoss()(floats(2, 3), np.array([0, -100]))


# --- other losses ----------------------------------------------------------------------------------------


def test_binary_losses_at_the_ends_are_finite():
    x = Tensor(np.array([0.0, 1.0, 0.0, 1.0], np.float32), requires_grad=True)
    target = np.array([0, 0, 1, 1], np.float32)
    loss = nn.BCELoss("none")(x, target)
    loss.backward(np.ones(4, np.float32))
    np.testing.assert_allclose(loss.numpy(), [0, 100, 100, 0])
    assert np.isfinite(x.grad.numpy()).all()

    z = Tensor(np.array([-1e4, 1e4], np.float32), requires_grad=True)
    loss = nn.BCEWithLogitsLoss("sum")(z, np.array([1, 1], np.float32))
    loss.backward()
    assert loss.item() == 1e4
    np.testing.assert_allclose(z.grad.numpy(), [-1, 0])
    with refused(InputError):
        nn.BCELoss()(np.float32([1.5]), np.float32([1]))


def test_losses_refuse_bad_inputs():
    with refused(ShapeError):
        nn.MSELoss()(floats(2, 3), floats(3))
    with refused(DTypeError):
        nn.L1Loss()(np.arange(3), np.arange(3))
    with refused(InputError):
        nn.MSELoss("average")
    with refused(InputError):
        nn.CrossEntropyLoss(label_smoothing=2)


# --- norms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_moves_its_running_statistics(momentum):
    x = 3 + 2 * floats(4, 5, 3, 3)
    norm = nn.BatchNorm2d(5, momentum=momentum)
    mean, var = np.zeros(5), np.ones(5)
    for i in range(3):
        y = norm(x + i)
        share = momentum or 1 / (i + 1)
        mean += share * ((x + i).mean((0, 2, 3)) - mean)
        var += share * ((x + i).var((0, 2, 3), ddof=1) - var)
        np.testing.assert_allclose(y.numpy().mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(norm.running_var.numpy(), var, rtol=1e-5)
    assert norm.num_batches_tracked.item() == 3

    norm.eval()
    expected = (x - mean[:, None, None]) / np.sqrt(var[:, None, None] + norm.eps)
    np.testing.assert_allclose(norm(x).numpy(), expected, rtol=1e-4, atol=1e-5)
    assert norm.num_batches_tracked.item() == 3
    norm.reset_parameters()
    assert norm.running_var.numpy().tolist() == [1] * 5


def test_batch_norm_without_affine_or_tracking():
    """Batch norm without parameters or statistics; copies have their own buffers; bad shapes are refused."""
    x = floats(4, 3)
    plain = nn.BatchNorm1d(3, affine=False, track_running_stats=False).eval()
    np.testing.assert_allclose(plain(x).numpy().mean(0), 0, atol=1e-6)
    assert plain.state_dict() == {}

    norm = nn.BatchNorm1d(3)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        other(x)  # its own buffers, not the original's
        assert other.num_batches_tracked.item() == 1
        assert norm.num_batches_tracked.item() == 0
    with refused(ShapeError):
        norm(x[:1])
    with refused(ShapeError):
        norm(floats(4, 2))


def test_training_batch_keeps_evaluation_graph_valid():
    norm = nn.BatchNorm1d(3, eps=1e-12).eval()
    x = Tensor(floats(4, 3), requires_grad=True)
    y = norm(x)
    norm.train()(100 + floats(4, 3))  # moves the running statistics in place
    y.sum().backward()

    np.testing.assert_allclose(norm.weight.grad.numpy(), x.data.sum(0), rtol=1e-5)
    np.testing.assert_array_equal(x.grad.numpy(), np.ones((4, 3)))


def test_batch_norm_keeps_the_order_in_memory():
    x = np.ascontiguousarray(floats(2, 4, 4, 3)).transpose(0, 3, 1, 2)  # channels last
    y = nn.BatchNorm2d(3)(Tensor(x, requires_grad=True))
    assert y.data.strides == x.strides
    np.testing.assert_allclose(y.numpy(), nn.BatchNorm2d(3)(np.ascontiguousarray(x)).numpy(), atol=1e-6)
    check_gradients(F.batch_norm, [x, floats(3), floats(3)])
    check_gradients(F.batch_norm, [x.swapaxes(2, 3)[:, :, ::2], floats(3), floats(3)])  # neither memory order


def test_checkpoint_repeats_mask_and_counts_once():
    part = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    x = Tensor(floats(8, 3), requires_grad=True)
    manual_seed(1)
    plain = part(x)
    plain.sum().backward()
    expected = x.grad.numpy()
    manual_seed(1)
    part[1].reset_running_stats()
    x.grad = None
    again = nn.checkpoint(part, x)
    again.sum().backward()

    np.testing.assert_array_equal(again.numpy(), plain.numpy())
    np.testing.assert_array_equal(x.grad.numpy(), expected)
    assert part[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm2d(4), (3, 4, 2, 2)),
        (lambda: nn.LayerNorm((2, 2)), (3, 4, 2, 2)),
        (lambda: nn.RMSNorm(2), (3, 4, 2)),
        (lambda: nn.GroupNorm(2, 4), (3, 4, 2, 2)),
    ],
)
def test_float16_inputs_have_float32_statistics(make, shape):
    x = (200 + 8 * floats(*shape)).astype(np.float16)  # squares overflow float16
    norm = make()
    y = norm(x)

    assert y.dtype == np.float16
    np.testing.assert_allclose(y.numpy(), make()(x.astype(np.float32)).numpy(), atol=2e-3)


def test_norms_refuse_bad_shapes():
    with refused(ShapeError):
        nn.LayerNorm(3)(floats(2, 4))
    with refused(InputError):
        nn.GroupNorm(3, 4)
    with refused(InputError):
        nn.BatchNorm1d(0)
    with refused(InputError):
        nn.LayerNorm(3, eps=-1)


# --- embedding and dropout -----------------------------------------------------------------------------------


def test_embedding_adds_the_gradients_of_equal_ids():
    table = nn.Embedding(5, 3, padding_idx=-1)
    assert not table.weight.numpy()[4].any()
    table(np.array([[1, 1], [4, 0]])).sum().backward()

    assert table.weight.grad.numpy()[:, 0].tolist() == [1, 2, 0, 0, 0]
    with refused(LabelError):
        table(np.array([0, 5]))
    with refused(DTypeError):
        table(np.array([0.0]))


def test_dropout_is_seeded_and_changes_every_call():
    def masks(seed):
        manual_seed(seed)
        first, second = nn.Dropout(0.5), nn.Dropout(0.5)
        x = np.ones((8, 16), np.float32)
        return [layer(x).numpy() for layer in (first, first, second)]

    a, b, other = masks(3), masks(3), masks(4)
    for mine, same, different in zip(a, b, other, strict=True):
        np.testing.assert_array_equal(mine, same)
        assert (mine != different).any()
    assert (a[0] != a[1]).any()
    assert (a[0] != a[2]).any()
    assert random_state.drawn == 0  # initial weights do not depend on it


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    x = Tensor(np.ones((100, 1000)), requires_grad=True)
    layer = nn.Dropout(p)
    y = layer(x)
    y.backward(np.ones(y.shape))

    assert abs((y.numpy() == 0).mean() - p) < 0.01
    assert abs(y.numpy().mean() - 1) < 0.03
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
    assert layer.eval()(x) is x


def test_dropout2d_drops_whole_channels():
    x = np.random.default_rng(0).random((50, 40, 3, 2)).astype(np.float32) + 1
    x[:2, :2] = np.nan, np.inf
    image = Tensor(x, requires_grad=True)
    layer = nn.Dropout2d(0.25)
    y = layer(image)
    y.backward(np.ones(y.shape, np.float32))
    factors = image.grad.numpy()
    assert set(np.unique(factors)) == {0, np.float32(4 / 3)}
    assert (factors == factors[:, :, :1, :1]).all()
    assert abs((factors == 0).mean() - 0.25) < 0.04
    np.testing.assert_array_equal(y.numpy()[2:], (x * factors)[2:])
    assert layer.eval()(image) is image
    with refused(ShapeError):
        layer(np.ones((2, 3), np.float32))


@pytest.mark.parametrize("cuts", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)])
def test_dropout2d_does_not_depend_on_cuts(cuts):
    x = np.ones((4, 6, 2, 3), np.float32)

    def program(cut):
        sp.manual_seed(5)
        layer, halved = nn.Dropout2d(0.5), sp.ops.Mul()
        step = lambda x: layer((halved.shard((cuts, ())) if cut else halved)(x, 1.0))  # noqa: E731
        return (sp.AutoParallel(step) if cut else step)(Tensor(x)).numpy()

    whole = program(False)
    for part in sp.launch(program, (True,), world_size=2, transport="inline"):
        np.testing.assert_array_equal(part, whole)


# --- attention -----------------------------------------------------------------------------------------------


def test_causal_attention_hides_the_future():
    module = nn.MultiheadAttention(8, 2, causal=True)
    x = floats(3, 5, 8)
    y = module(x)
    changed = x.copy()
    changed[:, 3:] += 1

    assert y.shape == x.shape
    np.testing.assert_array_equal(module(changed).numpy()[:, :3], y.numpy()[:, :3])
    assert (module(changed).numpy()[:, 3:] != y.numpy()[:, 3:]).any()
    seen = np.tril(np.ones((5, 5), bool))
    module.causal = False
    np.testing.assert_allclose(module(x, mask=seen).numpy(), y.numpy(), atol=1e-6)
    assert module(x, floats(3, 7, 8)).shape == x.shape
    with refused(InputError):
        nn.MultiheadAttention(8, 3)


def test_query_without_keys_gives_zero():
    q = Tensor(floats(2, 3), requires_grad=True)
    y = F.scaled_dot_product_attention(q, floats(4, 3), floats(4, 3), np.array([[False] * 4, [True] * 4]))
    y.backward(np.ones((2, 3), np.float32))

    assert not y.numpy()[0].any()
    assert y.numpy()[1].any()
    assert np.isfinite(q.grad.numpy()).all()


def test_attention_keeps_memory_order_of_heads():
    heads = [Tensor(floats(2, 5, 3, 4, seed=i), requires_grad=True) for i in range(3)]
    y = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads)).transpose(1, 2)

    assert y.data.flags.c_contiguous


# --- containers, hooks, summary ------------------------------------------------------------------------------


def test_module_list_and_dict_register_members():
    layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    layers.append(nn.Linear(2, 1)).insert(0, nn.Identity())
    assert [type(m).__name__ for m in layers] == ["Identity", "Linear", "ReLU", "Linear"]
    assert set(layers.state_dict()) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert len(layers[1:3]) == 2
    assert layers[-1] is layers[3]
    layers[0] = nn.Tanh()
    assert isinstance(layers[0], nn.Tanh)

    heads = nn.ModuleDict({"a": nn.Linear(2, 2)})
    heads["b"] = nn.ReLU()
    heads["b"] = nn.Tanh()
    assert (list(heads), "a" in heads, len(heads)) == (["a", "b"], True, 2)
    assert dict(heads.items())["b"] is heads["b"]
    del heads["a"]
    assert list(heads.parameters()) == []
    for misuse in (lambda: layers.append(3), lambda: heads.update({"a.b": nn.ReLU()}), lambda: layers.insert(0, 3)):
        with refused(InputError):
            misuse()


def test_module_hooks_run_in_order_until_removed():
    """Hooks see and change inputs and outputs, in order, until removed."""
    module, seen = nn.Linear(2, 2), []
    before = module.register_forward_pre_hook(lambda m, inputs: seen.append("before") or (inputs[0] * 0,))
    after = module.register_forward_hook(lambda m, inputs, y: seen.append("after"))
    twice = module.register_forward_hook(lambda m, inputs, y: y * 2.0)
    x = Tensor(floats(1, 2))
    np.testing.assert_array_equal(module(x).numpy()[0], 2 * module.bias.numpy())
    assert seen == ["before", "after"]
    for remove in (before, after, twice, twice):
        remove()
    np.testing.assert_array_equal(module(x).numpy(), module.forward(x).numpy())
    assert seen == ["before", "after"]


def test_summary_lists_shapes_parameters_and_costs():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    table = nn.summary(model, (5, 3, 4))
    by_name = {layer.name: layer for layer in table}

    assert by_name["1"].output_shape == (5, 4)
    assert by_name["1"].num_parameters == 12 * 4 + 4
    assert by_name["1"].work_flops == (2 * 12 + 1) * 5 * 4
    assert table[0].num_parameters == 52 + 8 + 10
    assert table[0].work_flops == sum(layer.work_flops for layer in table[1:])
    assert model.training
    assert model[2].num_batches_tracked.item() == 0
    assert model._hooks is None or not model._hooks.after
    text = repr(table)
    assert "1: Linear" in text
    assert "70 parameters" in text
    assert nn.summary(nn.Embedding(3, 2), (4,), dtype=np.int64)[0].output_shape == (4, 2)
    with refused(InputError):
        nn.summary(model, "12")


# --- initial values --------------------------------------------------------------------------------------------


def test_normal_quantile_is_right():
    p = np.concatenate([np.linspace(1e-9, 0.03, 50), np.linspace(0.03, 0.97, 50), 1 - np.linspace(1e-9, 0.03, 50)])

    np.testing.assert_allclose(_normal_quantile(p), [NormalDist().inv_cdf(v) for v in p], rtol=2e-9, atol=1e-9)


def test_truncated_normal_stays_within_its_limits():
    x = nn.init.trunc_normal_(Tensor(np.empty((100, 100))), 0.5, 1.0, -0.5, 1.5).numpy()

    assert -0.5 <= x.min() < -0.49
    assert 1.49 < x.max() <= 1.5
    assert abs(x.mean() - 0.5) < 0.02
    with refused(InputError):
        nn.init.trunc_normal_(Tensor(np.empty(3)), low=2, high=1)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (6, 2, 2)])
def test_orthogonal_rows_or_columns(shape):
    x = nn.init.orthogonal_(Tensor(np.empty(shape)), gain=2.0).numpy().reshape(shape[0], -1)
    gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x

    np.testing.assert_allclose(gram, 4 * np.eye(len(gram)), atol=1e-12)


def test_module_reprs():
    with no_grad():
        assert repr(nn.LayerNorm(3)) == "LayerNorm((3,), eps=1e-05, elementwise_affine=True)"
        assert repr(nn.Dropout(0.25)) == "Dropout(p=0.25)"
        assert repr(nn.GroupNorm(1, 2)) == "GroupNorm(1, 2, eps=1e-05, affine=True)"
        assert repr(nn.Embedding(3, 2, padding_idx=-1)) == "Embedding(3, 2, padding_idx=2)"
        assert repr(nn.CrossEntropyLoss(label_smoothing=0.1)).startswith("CrossEntropyLoss(reduction='mean', label")
        assert "momentum=0.1" in repr(nn.BatchNorm2d(3))
        assert repr(nn.Softmax(1)) == "Softmax(dim=1)"
        assert repr(nn.GELU("tanh")) == "GELU(approximate='tanh')"


def test_activation_modules_match_functions():
    x = floats(2, 3)
    for module, function in (
        (nn.GELU(), F.gelu),
        (nn.SiLU(), F.silu),
        (nn.Softmax(0), lambda x: F.softmax(x, 0)),
        (nn.LogSoftmax(-1), F.log_softmax),
    ):
        np.testing.assert_array_equal(module(x).numpy(), function(x).numpy())


def test_cross_entropy_smooth_matches_mindspore():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 4)), rng.integers(0, 4, 6)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets = np.where(np.eye(4)[labels] == 1, 1 - 0.1, 0.1 / 3)
    rows = -(targets * log_probabilities).sum(axis=1)
    for reduction, expected in (("mean", rows.mean()), ("sum", rows.sum()), ("none", rows)):
        loss = nn.CrossEntropySmooth(sparse=True, reduction=reduction, smooth_factor=0.1, num_classes=4)
        np.testing.assert_allclose(loss(Tensor(logits), labels).numpy(), expected, rtol=1e-12)
        dense = nn.CrossEntropySmooth(sparse=False, reduction=reduction, smooth_factor=0.1, num_classes=4)
        np.testing.assert_allclose(dense(Tensor(logits), targets).numpy(), expected, rtol=1e-12)
    for bad in ({"num_classes": 1}, {"num_classes": 4, "smooth_factor": 0.8}, {"num_classes": 4, "reduction": "best"}):
        with refused(InputError):
            nn.CrossEntropySmooth(**bad)
    with refused(ShapeError):
        nn.CrossEntropySmooth(num_classes=5)(Tensor(logits), labels)

"""Tensor-, sequence- and data-parallel layers: one mechanism, equal to the layers on one device."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import functions as F, nn
from simparallel.errors import LayoutError
from simparallel.layout.layout import Layout
from simparallel.parallel import (
    ColumnParallelLinear,
    ParallelTransformerBlock,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    distribute_module,
    distribute_tensor,
    implicit_replication,
)

MESH = Layout((2, 2), ("dp", "tp"))
X = np.random.default_rng(0).standard_normal((4, 6, 8))


def grads_of(module):
    return {name: p.grad.full_tensor().numpy() for name, p in module.named_parameters()}


def compare(serial, parallel, x=X, dims=("dp", "None", "None"), world_size=4, names=None):
    """Compare forward, gradient of x and gradients of all parameters with the module on one device."""
    sp.manual_seed(3)
    alone = serial()
    x0 = sp.Tensor(x, requires_grad=True)
    y0 = alone(x0)
    dy = np.random.default_rng(1).standard_normal(y0.shape)
    y0.backward(dy)
    expected = {(names or {}).get(n, n): g for n, g in grads_of(alone).items()}

    def device():
        sp.manual_seed(3)
        module = parallel()
        x1 = distribute_tensor(x, MESH(*dims), requires_grad=True)
        y1 = module(x1).full_tensor()
        y1.backward(dy)
        return y1.numpy(), x1.grad.full_tensor().numpy(), grads_of(module)

    results = sp.launch(device, world_size=world_size, transport="inline")
    for y, dx, grads in results:
        np.testing.assert_allclose(y, y0.numpy(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(dx, x0.grad.numpy(), rtol=1e-8, atol=1e-12)
        assert set(grads) == set(expected)
        for name, gradient in grads.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-8, atol=1e-10, err_msg=name)
    return results.trace


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gather", [True, False])
def test_column_parallel(bias, gather):
    compare(
        lambda: nn.Linear(8, 12, bias, np.float64),
        lambda: ColumnParallelLinear(8, 12, MESH, "tp", bias, gather, np.float64),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scatter", [None, 1])
def test_row_parallel(bias, scatter):
    compare(
        lambda: nn.Linear(8, 12, bias, np.float64),
        lambda: RowParallelLinear(8, 12, MESH, "tp", bias, scatter, np.float64),
        dims=("dp", "None", "tp"),
    )


def test_column_row_pair_communicates_once_each_way():
    def pair():
        first = ColumnParallelLinear(8, 16, MESH, dtype=np.float64)
        return nn.Sequential(first, nn.ReLU(), RowParallelLinear(16, 8, MESH, dtype=np.float64))

    def alone():
        return nn.Sequential(nn.Linear(8, 16, dtype=np.float64), nn.ReLU(), nn.Linear(16, 8, dtype=np.float64))

    trace = compare(alone, pair)
    along_tp = [e for e in trace.events if e.rank == 0 and e.group == (0, 1) and e.name == "all_reduce"]
    assert len(along_tp) == 2  # the sum of the output, and the gradient of the input


def test_sequence_parallel_norm():
    compare(lambda: nn.LayerNorm(8, dtype=np.float64), lambda: SequenceParallelLayerNorm(8, MESH, dtype=np.float64))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_transformer_block(sequence_parallel):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(8, dtype=np.float64), nn.LayerNorm(8, dtype=np.float64)
            self.attention = nn.MultiheadAttention(8, 4, causal=True, dtype=np.float64)
            self.up, self.down = nn.Linear(8, 32, dtype=np.float64), nn.Linear(32, 8, dtype=np.float64)
            self.gelu = nn.GELU(approximate="tanh")

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.down(self.gelu(self.up(self.norm2(x))))

    trace = compare(
        Block, lambda: ParallelTransformerBlock(8, 4, MESH, sequence_parallel=sequence_parallel, dtype=np.float64)
    )
    names = {e.name for e in trace.events if e.group == (0, 1)}
    assert ("reduce_scatter" in names) == sequence_parallel


@pytest.mark.parametrize("size", [12, 13, 1])
def test_vocabulary_parallel_embedding_and_loss(size):
    ids = np.random.default_rng(2).integers(0, size, (4, 6))
    sp.manual_seed(3)
    table = nn.Embedding(size, 8, dtype=np.float64)
    logits = table(sp.Tensor(ids)) @ table.weight.transpose(0, 1)
    loss0 = F.cross_entropy(logits.reshape(24, size), sp.Tensor(ids.reshape(-1)))
    loss0.backward()

    def device():
        sp.manual_seed(3)
        cut = VocabParallelEmbedding(size, 8, MESH, dtype=np.float64)
        x = distribute_tensor(ids, MESH("dp", "None"))
        logits = F.linear(cut(x), cut.weight).reshape(24, size)
        assert logits.layout.cuts == (2, 2)
        labels = distribute_tensor(ids.reshape(-1), MESH("dp"))
        loss = VocabParallelCrossEntropy()(logits, labels)
        with refused(LayoutError):
            VocabParallelCrossEntropy()(logits.redistribute(MESH("dp", "None")), labels)
        loss.backward()
        return float(loss), cut.weight.grad.full_tensor().numpy()

    for loss, gradient in sp.launch(device, world_size=4, transport="inline"):
        assert loss == pytest.approx(float(loss0), rel=1e-12)
        np.testing.assert_allclose(gradient, table.weight.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_vocab_loss_of_a_score_for_each_pixel():
    """The classes are dim 1, whatever follows."""
    x, labels = np.random.default_rng(0).standard_normal((4, 6, 2)), np.arange(8).reshape(4, 2) % 6

    def device():
        cut = distribute_tensor(labels, MESH("dp", "None"))
        with refused(LayoutError):
            VocabParallelCrossEntropy()(distribute_tensor(x, MESH("dp", "None", "tp")), cut)
        return VocabParallelCrossEntropy()(distribute_tensor(x, MESH("dp", "tp", "None")), cut).full_tensor().item()

    expected = F.cross_entropy(x, labels).item()
    assert sp.launch(device, world_size=4, transport="inline") == pytest.approx([expected] * 4, rel=1e-12)


def test_vocab_loss_on_an_axis_of_one_device():
    """The same program runs for every size of the axis, also 1."""

    def device():
        layout = sp.Layout((2, 1), ("dp", "tp"))
        logits = distribute_tensor(np.arange(8.0).reshape(4, 2), layout("dp", "tp"))
        return float(VocabParallelCrossEntropy()(logits, distribute_tensor(np.array([0, 1, 0, 1]), layout("dp"))))

    expected = float(F.cross_entropy(sp.Tensor(np.arange(8.0).reshape(4, 2)), sp.Tensor(np.array([0, 1, 0, 1]))))
    assert sp.launch(device, world_size=2, transport="inline") == pytest.approx([expected] * 2)


def test_batch_norm_on_a_cut_batch_is_synchronised():
    x = np.random.default_rng(4).standard_normal((8, 3, 2, 2))
    trace = compare(
        lambda: nn.BatchNorm2d(3, dtype=np.float64),
        lambda: distribute_module(nn.BatchNorm2d(3, dtype=np.float64), MESH),
        x=x,
        dims=(("dp", "tp"), "None", "None", "None"),
    )
    assert any(e.name == "all_reduce" and len(e.group) == 4 for e in trace.events)


def test_dropout_does_not_depend_on_the_cut():
    x = np.ones((4, 6, 8))

    def device(dims):
        sp.manual_seed(5)
        drop = nn.Dropout(0.5)
        return drop(distribute_tensor(x, MESH(*dims))).full_tensor().numpy()

    sp.manual_seed(5)
    expected = nn.Dropout(0.5)(sp.Tensor(x)).numpy()
    for dims in (("dp", "None", "tp"), ("None", "tp", "dp")):
        for found in sp.launch(device, (dims,), world_size=4, transport="inline"):
            np.testing.assert_array_equal(found, expected)


def test_whole_model_cut_by_names():
    ids = np.random.default_rng(2).integers(0, 16, (4, 8))
    cuts = {"*.up.weight": ("tp", "None"), "*.up.bias": ("tp",), "*.down.weight": ("None", "tp")}

    def make():
        sp.manual_seed(1)
        return sp.models.gpt(16, 8, num_layers=1, num_heads=2, width=8)

    alone = make()
    logits0 = alone(sp.Tensor(ids))
    F.cross_entropy(logits0.reshape(32, 16), sp.Tensor(ids.reshape(-1))).backward()
    expected = grads_of(alone)

    def device():
        model = distribute_module(make(), MESH, cuts)
        with implicit_replication():
            logits = model(distribute_tensor(ids, MESH("dp", "None")))
            labels = distribute_tensor(ids.reshape(-1), MESH("dp"))
            F.cross_entropy(logits.reshape(32, 16), labels).backward()
        return logits.full_tensor().numpy(), grads_of(model)

    for logits, grads in sp.launch(device, world_size=4, transport="inline"):
        np.testing.assert_allclose(logits, logits0.numpy(), rtol=1e-4, atol=1e-5)
        for name, gradient in grads.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


def trained_steps(make_net, x, y, optimizer):
    net = make_net()
    optimizer = optimizer(net.parameters())
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        norms.append(sp.optim.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()
    return [p.full_tensor().numpy() for p in net.parameters()], norms


@pytest.mark.parametrize(
    "make_optimizer", [lambda p: sp.optim.Adam(p, 0.1), lambda p: sp.optim.LAMB(p, 0.1)], ids=["Adam", "LAMB"]
)
@pytest.mark.parametrize("hidden", [7, 5, 1])
def test_training_with_slices_of_unequal_size(hidden, make_optimizer):
    """7 over 4: 2, 2, 2, 1; 5: 2, 2, 1 and nothing; drawn slice by slice, clipped by the whole tensor's norm."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((3, 6)), rng.standard_normal((3, 2))

    def make():
        sp.manual_seed(4)
        sizes = ((6, hidden), (hidden, 2))
        return nn.Sequential(*(nn.Linear(*each, dtype=np.float64) for each in sizes))

    expected, norms = trained_steps(make, sp.Tensor(x), sp.Tensor(y), make_optimizer)

    def device():
        flat = sp.Layout((4,), ("tp",))

        def make_cut():
            with sp.no_init_parameters():
                net = make()
            rows = {"0.weight": ("tp", "None"), "0.bias": ("tp",), "1.weight": ("None", "tp")}
            return distribute_module(net, flat, rows)

        held = make_cut()[0].weight
        assert held.data.shape == flat("tp", "None").local_shape((hidden, 6), sp.get_rank())
        batch = [distribute_tensor(each, flat("None", "None")) for each in (x, y)]
        return trained_steps(make_cut, *batch, make_optimizer)

    for found, found_norms in sp.launch(device, world_size=4, transport="inline"):
        np.testing.assert_allclose(found_norms, norms, rtol=1e-9)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_unmatched_names_change_nothing():
    def device():
        linear = nn.Linear(4, 4)
        with refused(LayoutError):
            distribute_module(linear, MESH, {"weights": ("tp", "None")})
        with refused(LayoutError):
            distribute_module(linear, MESH, {"bias": ("tp",), "weight": ("tp",)})
        with refused(LayoutError):
            ColumnParallelLinear(4, 4, MESH, gather_output=True)(np.ones((2, 4), np.float32))
        return linear.weight.layout is None and linear.bias.layout is None

    assert all(sp.launch(device, world_size=4, transport="inline"))

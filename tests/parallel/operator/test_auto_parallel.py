"""Whole programs cut over devices: equal to one device, explained traffic, parameters without data."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import functions as F, nn, ops, optim
from simparallel.clock.recorder import current_recorder
from simparallel.errors import (
    AutogradError,
    DeviceOutOfMemoryError,
    InputError,
    LayoutError,
    RunFailedError,
    StrategyError,
)
from simparallel.layout.layout import Layout
from simparallel.nn.init import initializer
from simparallel.parallel import (
    AutoParallel,
    ColumnParallelLinear,
    distribute_tensor,
    explicit_redistribution,
    implicit_redistributions,
    no_init_parameters,
    quick_redistribution,
)

SIZES = (64, 32, 32, 10)


class Network(nn.Module):
    """The network of the tutorial on operator-level parallelism, smaller."""

    def __init__(self, kind="tuples", sizes=SIZES):
        super().__init__()
        a, b, c, d = sizes
        self.fc1_weight = initializer("normal", [a, b])
        self.fc2_weight = initializer("normal", [b, c])
        self.fc3_weight = initializer("normal", [c, d])
        layout, flat = Layout((2, 2, 2), ("dp", "sp", "mp")), Layout((8,), ("tp",))
        first, second = {
            "tuples": (((2, 4), (4, 1)), ((1, 8), (8, 1))),
            "layouts": (
                (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")),
                (flat("None", "tp"), flat("tp", "None")),
            ),
        }[kind]
        self.matmul1 = ops.MatMul().shard(first)
        self.relu1 = ops.ReLU().shard(((4, 1),))
        self.matmul2 = ops.MatMul().shard(second)
        self.relu2 = ops.ReLU().shard(((8, 1),))
        self.matmul3 = ops.MatMul()

    def forward(self, x):
        x = x.reshape(x.shape[0], -1)
        x = self.relu1(self.matmul1(x, self.fc1_weight))
        x = self.relu2(self.matmul2(x, self.fc2_weight))
        return self.matmul3(x, self.fc3_weight)


def batches(count=3, size=32):
    rng = np.random.default_rng(5)
    return [(rng.standard_normal((size, 8, 8)), rng.integers(0, 10, size)) for _ in range(count)]


def train(kind, parallel, deferred=False, dataset="full_batch", make_optimizer=None):
    sp.manual_seed(1)
    with no_init_parameters() if deferred else nullcontext():
        net = Network(kind)
        for p in net.parameters():
            assert deferred == (p.initial is not None)
        make = make_optimizer or (lambda params: optim.SGD(params, lr=0.5, momentum=0.9))
        optimizer = make(list(net.parameters()))
    grad_fn = sp.value_and_grad(lambda x, t: F.cross_entropy(net(x), t), optimizer.parameters)

    def step(x, t):
        loss, grads = grad_fn(x, t)
        optimizer(grads)
        return loss

    run = AutoParallel(step, dataset_strategy=dataset) if parallel else step
    losses = []
    for x, t in batches():
        x = x.astype(np.float32)
        if dataset == "data_parallel":
            x, t = (np.split(a, 8)[sp.get_rank()] for a in (x, t))
        elif isinstance(dataset, tuple):  # repeats are at the left: rank r feeds chunk r % 4
            x, t = (np.split(a, 4)[sp.get_rank() % 4] for a in (x, t))
        losses.append(float(run(*(x, t) if parallel else (sp.Tensor(x), sp.Tensor(t)))))
    held = sum(p.data.size for p in net.parameters())
    return losses, [p.full_tensor().numpy() for p in net.parameters()], held


@pytest.mark.parametrize("kind", ["tuples", "layouts"])
@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel", ((4, 1, 1), (4,))])
@pytest.mark.parametrize("deferred", [False, True])
def test_tutorial_programs_equal_one_device(kind, dataset, deferred):
    losses, weights, held = train(kind, parallel=False)

    for found, found_weights, found_held in sp.launch(
        train, (kind, True, deferred, dataset), world_size=8, transport="inline"
    ):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for a, b in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert found_held < held / 3


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.LAMB(p, lr=0.01), lambda p: optim.LARS(p, lr=0.5, coefficient=0.1), lambda p: optim.AdamW(p),
        # Steps of Newton and Schulz enlarge rounding, up to 480 times.
        lambda p: optim.Muon([matrix for matrix in p if matrix.ndim == 2], lr=0.01),
    ],
)  # fmt: skip
def test_optimizers_see_the_whole_parameter(make):
    """Norms are of the whole tensor, not of the slice."""
    losses, weights, _ = train("tuples", parallel=False, make_optimizer=make)

    found, found_weights, _ = sp.launch(
        train, ("tuples", True, True, "full_batch", make), world_size=8, transport="inline"
    )[3]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(found_weights, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.process
def test_between_processes_and_with_log_files(tmp_path):
    losses, _, _ = train("tuples", parallel=False)

    def program():
        found = train("tuples", True)[0]
        for i, loss in enumerate(found):
            print(f"epoch: 0 step: {i}, loss is {loss}")
        return found

    results = sp.launch(program, world_size=8, log_dir=tmp_path)
    np.testing.assert_allclose(results[7], losses, rtol=1e-5)
    for rank in range(8):
        assert f"epoch: 0 step: 0, loss is {losses[0]:.4f}"[:30] in (tmp_path / f"worker_{rank}.log").read_text()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kind", ["tuples", "layouts"])
def test_explanation_matches_traffic(kind, quick):
    way = quick_redistribution if quick else nullcontext
    with way():
        explained = Network(kind).explain((32, 8, 8), device_num=8)

    def program():
        with way():
            return steps()

    def steps():
        net, x = Network(kind), batches()[0][0].astype(np.float32)
        run = AutoParallel(lambda x: net(x).backward(np.ones((4, 10), np.float32)))
        run(x)  # the first step cuts the parameters, and the ranks exchange their shapes
        recorder = current_recorder()
        before = len(recorder.events)
        run(x)
        events = [e for e in recorder.events[before:] if len(e.group) > 1]
        received = sum(e.size_bytes for e in events if e.name == "recv")
        return [(e.name, e.sent_bytes) for e in events if e.kind == "collective" and e.sent_bytes], received

    rows = [(row.exchange.collective, row.exchange.bytes_per_rank) for row in explained.rows]
    collectives = [row for row in rows if row[0] != "messages"]
    results = sp.launch(program, world_size=8, transport="inline")
    for found, _ in results:
        assert found[:-2] == collectives[:-2]
        assert sorted(found) == sorted(collectives)  # gradients of two groups may end in either order
    assert max(received for _, received in results) == sum(size for name, size in rows if name == "messages")
    assert explained.total_bytes == sum(size for _, size in rows)
    assert len(collectives) >= 6


def test_explanation_reads_well():
    explained = Network().explain((32, 8, 8), device_num=8)

    text = str(explained)
    assert "8 devices, 6 ops" in text
    assert "all_reduce(sum) [0, 1, 2, 3], [4, 5, 6, 7]" in text
    assert "test_auto_parallel.py" in text
    assert explained.parameters["fc1_weight"][1].cuts == (4, 1)
    assert explained._repr_html_().startswith("<table>")


def test_explanation_names_layers_and_gradients():
    net = sp.nn.Sequential(sp.nn.Linear(8, 16), sp.nn.ReLU(), sp.nn.Linear(16, 4))
    explained = net.explain((16, 8), device_num=4, dataset_strategy="data_parallel")
    (row,) = explained.rows  # they travel together
    assert (row.where, row.exchange.collective) == ("4 parameters", "all_reduce")
    assert row.exchange.why == "gradients of 2.weight, 2.bias, 0.weight, 0.bias"
    assert row.exchange.bytes_per_rank == round(2 * 3 / 4 * 4 * sum(p.size for p in net.parameters()))
    (where,) = {row.where.partition(":")[0] for row in Tied().explain((16, 4), device_num=4).rows}
    assert where == "fc"
    assert repr(explained) == str(explained)
    plan = sp.ops.MatMul().shard(((2, 2), (2, 1))).plan((4, 4), (4, 4), device_num=4)
    assert repr(plan) == str(plan)
    assert "\n" in repr(plan)


class Tied(nn.Module):
    """One parameter used twice: its gradients are summed one by one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.fc(F.relu(self.fc(x)))


@pytest.mark.parametrize("cap", [1, 300, 1 << 20])
def test_gradients_are_bucketed_and_arrive_once(monkeypatch, cap):
    """At any bucket size, hooks are called once, after the sum, and gradients are one device's."""
    monkeypatch.setattr("simparallel.parallel.operator.gradient_sums.CAP_BYTES", cap)
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (8, 4)).astype(np.float64)

    def make():
        net = nn.Sequential(nn.Linear(4, 6, dtype=np.float64), nn.ReLU(), nn.Linear(6, 4, dtype=np.float64))
        for p in net.parameters():
            p.data = np.random.default_rng(p.size).integers(-2, 3, p.shape).astype(np.float64)
        return net

    def program():
        net, seen = make(), []
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append((p.shape, p.grad.numpy().copy())))
        step = AutoParallel(lambda x: net(x).sum().backward())
        step(x), step(x)
        return [p.grad.numpy() for p in net.parameters()], len(seen), seen[:4]

    net = make()
    for _ in range(2):
        net(sp.Tensor(x)).sum().backward()
    for grads, count, first in sp.launch(program, world_size=4, transport="inline"):
        assert count == 8
        for p, grad in zip(net.parameters(), grads, strict=True):
            np.testing.assert_array_equal(grad, p.grad.numpy())
            np.testing.assert_array_equal(2 * next(g for shape, g in first if shape == p.shape), grad)


def test_failed_backward_leaves_no_pending_sum(monkeypatch):
    monkeypatch.setattr("simparallel.parallel.operator.gradient_sums.CAP_BYTES", 1)

    def program():
        a, b = sp.Tensor(np.ones((4, 4)), requires_grad=True), sp.Tensor(np.ones((4, 4)), requires_grad=True)

        def stop(gradient):
            raise ValueError("stop")

        def step(x, fails):
            y = x @ a
            if fails:
                y.register_hook(stop)
            (y @ b).sum().backward()

        run = AutoParallel(step)
        with pytest.raises(ValueError, match="stop"):
            run(np.ones((4, 4)), True)  # the sum of b is pending
        run(np.ones((4, 4)), False)
        return a.grad.numpy(), b.grad.numpy()

    for a, b in sp.launch(program, world_size=2, transport="inline"):
        np.testing.assert_array_equal(a, np.full((4, 4), 16.0))
        np.testing.assert_array_equal(b, np.full((4, 4), 16.0))


def test_ops_without_strategy_follow_their_inputs():
    """A GPT cut by its batch alone: slices, transposes and reshapes move no activation."""
    explained = sp.models.gpt(num_layers=1).explain((8, 64), device_num=8, dtype=np.int64)
    assert [row for row in explained.rows if row.phase == "forward"] == []
    assert all("gradient" in row.exchange.why for row in explained.rows)
    follower = Network().explain((32, 8, 8), device_num=8).ops[-1]
    assert follower.layouts["inputs"][0].cuts == (8, 1)


def test_implicit_movement_warns(monkeypatch):
    told, cut = [], ops.ReLU().shard(((1, 4),))
    monkeypatch.setattr("simparallel.parallel.operator.auto.warnings.warn", lambda text, **kwargs: told.append(text))

    def program(network):
        run = AutoParallel(network)
        run(np.ones((64, 64), np.float32)), run(np.ones((64, 64), np.float32))

    sp.launch(program, (lambda x: cut(x)[:3],), world_size=4, transport="inline")
    assert told == []
    sp.launch(program, (lambda x: cut(x)[:, :3],), world_size=4, transport="inline")
    (text,) = told  # once for these shapes, on one rank
    assert "redistribute 1 inputs" in text
    assert "12.3 kB" in text  # 3/4 of 64 x 64 float32


PURPOSES = {
    "a scalar": lambda x, w, mean: (x * w).mean() if mean else (x * w).sum(),
    "a pending sum": lambda x, w, mean: (x * w).mean(0).exp() if mean else (x * w).sum(0).exp(),
    "whole at the end": lambda x, w, mean: (x * w).mean(0) if mean else (x * w).sum(0),
}


@pytest.mark.parametrize("network", PURPOSES.values(), ids=PURPOSES)
def test_purpose_of_op_collectives_is_compared(network):
    """Sum on some ranks and Mean on one exchange equal arrays; their purpose is compared as well."""

    def program(differs):
        w = sp.Tensor(np.ones((8, 2)), requires_grad=True)
        run = AutoParallel(lambda x: network(x, w, differs and sp.get_rank() == 1))
        return run(np.ones((8, 2))).numpy()

    with refused(RunFailedError):
        sp.launch(program, (True,), world_size=2, transport="inline")
    np.testing.assert_array_equal(*sp.launch(program, (False,), world_size=2, transport="inline"))


def test_implicit_redistributions_are_listed():
    """They are listed and on the trace; strict mode refuses them."""

    def program():
        net = Network()
        run = AutoParallel(net)
        run(batches()[0][0].astype(np.float32))
        listed = [str(implicit) for implicit in run.redistributions]
        assert any("all_to_all" in text and "MatMul" in text for text in listed)
        events = [e.name for e in current_recorder().events]
        assert events.count("Redistribute") >= 2  # they are on the trace, too
        with refused(StrategyError):
            AutoParallel(net, strict=True)(batches()[0][0].astype(np.float32))
        return len(listed)

    assert sp.launch(program, world_size=8, transport="inline")[0] >= 4


def test_model_larger_than_a_device_trains_on_eight():
    sizes = (256, 256, 256, 16)  # 0.5 MB of weights, a device has less

    def program(deferred):
        with no_init_parameters() if deferred else nullcontext():
            net = Network(sizes=sizes)
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        grad_fn = sp.value_and_grad(lambda x, t: F.cross_entropy(net(x), t), optimizer.parameters)

        def step(x, t):
            loss, grads = grad_fn(x, t)
            optimizer(grads)
            return loss

        return float(AutoParallel(step)(np.ones((16, 16, 16), np.float32), np.arange(16) % 16))

    settings = {"world_size": 8, "transport": "inline", "device_memory": "450KB"}
    assert sp.launch(program, (True,), **settings)[0] == pytest.approx(np.log(16), rel=0.01)
    with pytest.raises(RunFailedError) as caught:
        sp.launch(program, (False,), **settings)
    assert isinstance(caught.value.__cause__, DeviceOutOfMemoryError)


@pytest.mark.parametrize("fill", [nn.init.normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.ones_])
def test_slice_is_drawn_as_part_of_the_whole(fill):
    from simparallel.nn.deferred import materialize

    index = (slice(3, 6), slice(2, 9), slice(0, 2))
    sp.manual_seed(7)
    whole = fill(nn.Parameter(np.empty((8, 9, 4)))).numpy()
    sp.manual_seed(7)
    with no_init_parameters():
        deferred = fill(nn.Parameter(np.empty((8, 9, 4))))
    assert np.isnan(deferred.numpy()).all()
    np.testing.assert_array_equal(materialize(deferred, index), whole[index])
    assert materialize_whole(fill) == whole.tolist()


def materialize_whole(fill):
    sp.manual_seed(7)
    with no_init_parameters():
        deferred = fill(nn.Parameter(np.empty((8, 9, 4))))
    return (deferred * 1.0).numpy().tolist()  # an op on plain tensors draws the whole mask


def test_plain_and_sharded_tensors_do_not_mix():
    layout = Layout((2,), ("dp",))

    def program():
        x = distribute_tensor(np.ones((4, 2)), layout("dp", "None"))
        with refused(LayoutError):
            x + sp.Tensor(np.ones((4, 2)))
        assert float((x * 2.0).sum()) == 16.0  # numbers are whole everywhere
        for read in (x.numpy, lambda: np.asarray(x)):
            with refused(LayoutError):
                read()
        assert (x.shape, x.data.shape, len(x), x.size) == ((4, 2), (2, 2), 4, 8)
        with refused(LayoutError):
            sp.Tensor(np.ones(4)).redistribute(layout("dp"))
        return True

    assert all(sp.launch(program, world_size=2, transport="inline"))


def test_partial_sum_is_reduced_when_needed():
    """A partial sum passes through linear ops and is reduced once, at its first use."""
    layout = Layout((2,), ("k",))

    def program():
        x = distribute_tensor(np.arange(8.0).reshape(2, 4), layout("None", "k"))
        w = distribute_tensor(np.arange(12.0).reshape(4, 3), layout("k", "None"), requires_grad=True)
        y = x @ w
        assert y.layout.partial == ("k",)
        assert (-y.reshape(6)).layout.partial == ("k",)  # linear: it passes the sum on
        assert (y + y).layout.partial == ("k",)
        with refused(LayoutError):
            y.numpy()
        z = y.relu() if hasattr(y, "relu") else F.relu(y)
        assert z.layout.partial == ()
        assert y.layout.partial == ()  # reduced once, for all uses
        z.full_tensor().sum().backward()
        np.testing.assert_array_equal(z.full_tensor().numpy(), np.maximum(X @ W, 0))
        np.testing.assert_array_equal(w.grad.full_tensor().numpy(), X.T @ (X @ W > 0).astype(float))
        return True

    X, W = np.arange(8.0).reshape(2, 4), np.arange(12.0).reshape(4, 3)
    assert all(sp.launch(program, world_size=2, transport="inline"))


def test_strict_blocks_without_auto_parallel():
    """Lists of implicit redistributions and strict blocks work outside AutoParallel."""
    layout = Layout((2,), ("a",))

    def program():
        x = distribute_tensor(np.ones((4, 4)), layout("a", "None"))
        w = distribute_tensor(np.ones((4, 4)), layout("a", "None"))
        with implicit_redistributions() as noted:
            x @ w
        assert len(noted) == 1
        assert "all_gather" in str(noted[0])
        with explicit_redistribution(), refused(StrategyError):
            x @ w
        with explicit_redistribution():
            return (x @ w.redistribute(layout("None", "None"))).layout == layout("a", "None")

    assert all(sp.launch(program, world_size=2, transport="inline"))


@pytest.mark.parametrize(
    "settings", [{"parallel_mode": "fast"}, {"dataset_strategy": "half"}, {"dataset_strategy": ((1,),)}]
)
def test_bad_settings(settings):
    with refused(InputError):
        AutoParallel(lambda a, b: a, **settings)(np.ones(2), np.ones(2))


def test_global_norm_is_clipped():
    layout = Layout((4,), ("a",))
    values = np.arange(1.0, 9.0)

    def program():
        cut = distribute_tensor(values, layout("a"), requires_grad=True)
        whole = distribute_tensor(values, layout("None"), requires_grad=True)
        ((cut * 2.0).sum() + (whole * 3.0).sum()).backward()
        norms = [optim.clip_grad_norm_([cut, whole], 1e9, p) for p in (2.0, 1.0, np.inf)]
        optim.clip_grad_norm_([cut, whole], 1.0)
        return [*norms, float(np.linalg.norm(whole.grad.data))]

    for two, one, largest, clipped in sp.launch(program, world_size=4, transport="inline"):
        assert two == pytest.approx(np.sqrt(8 * 4 + 8 * 9))
        assert one == pytest.approx(8 * 2 + 8 * 3)
        assert largest == 3.0
        assert clipped == pytest.approx(np.sqrt(72 / 104), rel=1e-5)


def test_function_is_sharded_by_its_arguments():
    layout = Layout((4,), ("d",))

    def program():
        scaled = sp.shard(lambda x, w: (x @ w, w), ((4, 1), layout("None", "None")), out_strategy=((2, 2), (1, 1)))
        weight = sp.Tensor(np.eye(4), requires_grad=True)
        y, w = scaled(np.arange(32.0).reshape(8, 4), weight)
        assert (y.layout.cuts, w.layout.cuts) == ((2, 2), (1, 1))
        (y * y).sum().backward()
        with refused(StrategyError):
            scaled(np.ones((6, 4)), np.eye(4))
        with refused(StrategyError):
            scaled(np.ones((8, 4)))
        return y.full_tensor().numpy(), weight.grad.full_tensor().numpy()

    x = np.arange(32.0).reshape(8, 4)
    for y, dw in sp.launch(program, world_size=4, transport="inline"):
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(dw, x.T @ (2 * x))


def test_script_may_limit_the_memory():
    def program():
        sp.set_memory(max_size="1MB")
        with refused(DeviceOutOfMemoryError):
            sp.Tensor(np.ones((400, 400))) * 2.0
        with refused(InputError):
            sp.set_memory("much")
        sp.set_memory(max_size="28GB")
        return float((sp.Tensor(np.ones((400, 400))) * 2.0).sum())

    assert sp.launch(program, world_size=1, transport="inline")[0] == 320_000


@pytest.mark.parametrize("dataset", ["data_parallel", "full_batch", ((2, 1), (2, 1))])
def test_arguments_of_different_shape_are_refused(dataset):
    """Arguments whose shapes differ between ranks are refused before the step runs."""
    called = []

    def program():
        rank, layer = sp.get_rank(), nn.Linear(4, 2)

        def step(x, t):
            called.append(rank)
            return ((layer(x) - t) ** 2).mean()

        run = AutoParallel(step, dataset_strategy=dataset)
        run(np.ones((4, 4), np.float32), np.ones((4, 2), np.float32))
        with refused(LayoutError):
            run(np.ones((3 - rank, 4), np.float32), np.ones((3 - rank, 2), np.float32))
        run(np.ones((2, 4), np.float32), np.ones((2, 2), np.float32))  # the control: a shorter last batch

    sp.launch(program, world_size=2, transport="inline")
    assert sorted(called) == [0, 0, 1, 1]


def test_loss_scaling_and_accumulation():
    """On 0-dim values backward yields NumPy scalars."""
    x = np.random.default_rng(0).standard_normal((4, 3))

    def train(is_cut):
        sp.manual_seed(0)
        layer = nn.Linear(3, 2, dtype=np.float64)
        optimizer, scaler = optim.SGD(layer.parameters(), 0.1), optim.GradScaler(init_scale=8.0)

        def step(x):
            for part in (2.0, -4.0):
                scaler.scale(-(layer(x) ** 2).mean() * 3.0 / part).backward()
            scaler.step(optimizer)
            scaler.update()

        (AutoParallel(step) if is_cut else step)(sp.Tensor(x))
        weight = layer.weight
        return (weight if weight.placement is None else weight.full_tensor()).numpy().copy()

    (alone,) = sp.launch(train, (False,), world_size=1, transport="inline")
    for found in sp.launch(train, (True,), world_size=2, transport="inline"):
        np.testing.assert_allclose(found, alone, rtol=1e-12)


def test_overflow_in_one_slice_skips_all_steps():
    def program():
        sp.manual_seed(0)
        layout = Layout((2,), ("tp",))
        layer = ColumnParallelLinear(4, 4, layout, "tp")
        x = distribute_tensor(np.ones((2, 4), np.float32), layout("None", "None"))
        optimizer = optim.SGD(layer.parameters(), 0.5)
        scaler, steps = optim.GradScaler(init_scale=16.0), []
        for i in range(3):
            optimizer.zero_grad()
            scaler.scale((layer(x) ** 2).mean()).backward()
            if i == 1 and sp.get_rank() == 0:
                layer.weight.grad.data[0, 0] = np.inf
            steps.append(scaler.step(optimizer))
            scaler.update()
        return steps, scaler.get_scale()

    assert list(sp.launch(program, world_size=2, transport="inline")) == [([True, False, True], 8.0)] * 2


def test_uneven_last_batch_is_reported():
    def program():
        run = AutoParallel(lambda x: (x**2).mean(), dataset_strategy="data_parallel")
        run(np.ones((4, 4), np.float32))
        run(np.ones((3 + sp.get_rank(), 4), np.float32))  # known to rank 1

    with refused(RunFailedError):
        sp.launch(program, world_size=2, transport="inline")


@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel"])
def test_explanation_of_transformer_matches_traffic(dataset):
    """Integer inputs, tied weights, a table of positions: one collective for all parameters that are used once."""
    explained = sp.models.gpt(num_layers=1, width=16).explain(
        (8, 4), device_num=4, dtype=np.int64, dataset_strategy=dataset
    )

    def program():
        net, tokens = sp.models.gpt(num_layers=1, width=16), np.arange(32).reshape(8, 4)
        if dataset == "data_parallel":
            tokens = np.split(tokens, 4)[sp.get_rank()]

        def step(tokens):
            y = net(tokens)
            y.backward(np.ones(y.shape, np.float32))

        run = AutoParallel(step, dataset_strategy=dataset)
        run(tokens)
        recorder = current_recorder()
        before = len(recorder.events)
        run(tokens)
        events = [e for e in recorder.events[before:] if len(e.group) > 1]
        return sorted((e.name, e.sent_bytes) for e in events if e.kind == "collective" and e.sent_bytes)

    expected = sorted((row.exchange.collective, row.exchange.bytes_per_rank) for row in explained.rows)
    assert sp.launch(program, world_size=4, transport="inline") == [expected] * 4
    assert len(expected) == 4  # the tied table twice, the positions' sum over the batch, all others


def _two_products(cuts, steps):
    """Train two products, outside of `AutoParallel` where there are no cuts; return (loss, layouts, weights)."""
    w, v = nn.Parameter(np.arange(32.0).reshape(8, 4)), nn.Parameter(np.ones((4, 2)))
    first, second = (ops.MatMul().shard(cut) for cut in cuts)
    optimizer = optim.SGD([w, v], 2.0**-20)
    step = sp.value_and_grad(lambda x: (second(first(x, w), v)).sum(), [w, v])
    if steps is AutoParallel:
        step = AutoParallel(step, gather_results=False)
    for _ in range(2):
        loss, grads = step(sp.Tensor(np.arange(32.0).reshape(4, 8)))
        optimizer(grads)
    return float(loss), [g.layout for g in grads], [p.full_tensor().numpy() for p in (w, v)]


CUTS = ((1, 2), (2, 1)), ((2, 1), (1, 1))


def test_results_may_stay_sharded():
    loss, _, weights = _two_products(CUTS, None)

    for found, layouts, cut in sp.launch(_two_products, (CUTS, AutoParallel), world_size=2, transport="inline"):
        assert found == loss
        assert [layout.cuts for layout in layouts] == [(2, 1), (1, 1)]
        for a, b in zip(cut, weights, strict=True):
            np.testing.assert_array_equal(a, b)


def test_strategy_on_plain_tensors_is_refused():
    with refused(RunFailedError):
        sp.launch(_two_products, (CUTS, None), world_size=2, transport="inline")


def test_strategy_on_one_rank_is_noted(capfd):
    relu = ops.ReLU().shard(((4,),))

    assert sp.launch(lambda: relu(sp.Tensor([-1.0, 2.0])).tolist(), world_size=1, transport="inline") == [[0.0, 2.0]]
    assert "there is one rank" in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_second_backward_says_that_the_step_did_it(mode):
    net = nn.Linear(4, 2)

    def step(x):
        loss = net(x).sum()
        loss.backward()
        return loss

    loss = AutoParallel(step, mode)(np.ones((2, 4), np.float32))
    before = net.weight.grad.numpy().copy()
    for again in (loss, loss * 2 + net.bias.sum()):
        with refused(AutogradError):
            again.backward()
    np.testing.assert_array_equal(net.weight.grad.numpy(), before)


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_backward_may_be_called_outside(mode):
    def gradients(mode):
        net = nn.Linear(4, 2, dtype=np.float64)
        net.weight.data[...] = np.arange(8.0).reshape(2, 4)
        step = lambda x: (net(x) ** 2).sum()  # noqa: E731
        (step if mode is None else AutoParallel(step, mode))(sp.Tensor(np.eye(4))).backward()
        return net.weight.grad.numpy() if mode is None else net.weight.grad.full_tensor().numpy()

    sp.set_seed(0)
    whole = gradients(None)
    sp.set_seed(0)
    for found in sp.launch(gradients, (mode,), world_size=2, transport="inline"):
        np.testing.assert_array_equal(found, whole)


def _product_with_a_large_weight(cuts, mode):
    sp.manual_seed(3)
    with no_init_parameters():
        weight = initializer("normal", [64, 512])
    product = ops.MatMul() if cuts is None else ops.MatMul().shard(cuts)
    step = AutoParallel(lambda x: product(x, weight).sum(), mode)
    return step(np.ones((2, 64), np.float32)).item(), weight.data.nbytes


@pytest.mark.parametrize("cuts", [((1, 1), (1, 8)), ((1, 8), (8, 1)), None])
def test_weight_larger_than_a_device(cuts):
    mode = "semi_auto" if cuts else "auto"
    whole, size_bytes = _product_with_a_large_weight(None, mode)
    args, limit = (cuts, mode), 100_000
    assert size_bytes > limit
    results = sp.launch(_product_with_a_large_weight, args, world_size=8, transport="inline", device_memory=limit)
    for found, own_bytes in results:
        assert found == pytest.approx(whole, rel=1e-4)
        assert own_bytes < limit


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
@pytest.mark.parametrize("kind", ["branch", "factor"])
def test_ranks_that_run_different_ops_are_refused(kind, mode):
    def run():
        weight, rank = nn.Parameter(np.ones((4, 2))), sp.get_rank()

        def step(x):
            y = x @ weight
            if kind == "factor":
                y = y * (1.0 + rank)
            elif rank == 1:
                y = y * 2
            return (y * y).sum()

        AutoParallel(step, mode)(np.ones((2, 4)))

    with refused(RunFailedError):
        sp.launch(run, world_size=2, transport="inline")

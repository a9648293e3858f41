"""MindSpore's front: names of members, cells under the auto-parallel context, collectives, and smaller names."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.comm import current
from simparallel.compat import mindspore as ms
from simparallel.compat.mindspore import Layout, communication, nn, ops
from simparallel.compat.mindspore.communication import GlobalComm
from simparallel.compat.mindspore.ops import operations as P
from simparallel.errors import InputError, RunFailedError
from simparallel.parallel.operator import auto

# --- names of members --------------------------------------------------------------------------------

NORMS = {
    "BatchNorm1d": (lambda nn_: nn_.BatchNorm1d(4), (3, 4)),
    "BatchNorm2d": (lambda nn_: nn_.BatchNorm2d(4), (3, 4, 2, 2)),
    "SyncBatchNorm": (lambda nn_: nn_.SyncBatchNorm(4), (3, 4, 2, 2)),
    "GroupNorm": (lambda nn_: nn_.GroupNorm(2, 4), (3, 4, 2, 2)),
    "LayerNorm": (lambda nn_: nn_.LayerNorm((4,)), (3, 4)),
}
MINDSPORES = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}


@pytest.mark.parametrize("name", NORMS)
def test_norms_have_mindspore_names(name):
    """The same layer: only the names under which it registers, lists and saves its members differ."""
    make, shape = NORMS[name]
    ours, theirs = make(sp.nn), make(nn)
    assert [MINDSPORES.get(key, key) for key in ours.state_dict()] == list(theirs.state_dict())
    assert [p.name for p in theirs.trainable_params()] == ["gamma", "beta"]
    assert theirs.gamma is theirs.weight
    assert [key for key, _ in nn.SequentialCell([theirs]).named_parameters()] == ["0.gamma", "0.beta"]
    theirs.weight = sp.nn.Parameter(np.array([1.0, 2.0, 3.0, 4.0], np.float32))
    assert dict(theirs.named_parameters()).keys() == {"gamma", "beta"}
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    if name == "LayerNorm":
        ours.eps = theirs.eps
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for network in (theirs, deepcopy(theirs), sp.parallel.convert_sync_batchnorm(deepcopy(theirs))):
        np.testing.assert_array_equal(network(x).numpy(), ours(x).numpy())
        assert "weight" not in dict(network.named_parameters())
        ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    del theirs.bias
    assert not hasattr(theirs, "beta")
    with refused(InputError):
        theirs.register_parameter("weight", None)


def test_other_layers_keep_their_names():
    assert list(nn.Dense(2, 3).state_dict()) == ["weight", "bias"]
    assert list(nn.Conv2d(2, 3, 1, has_bias=True).state_dict()) == ["weight", "bias"]
    assert list(nn.Embedding(2, 3).state_dict()) == ["embedding_table"]
    assert nn.BatchNorm2d(2, affine=False).gamma is None


def test_moving_statistics_have_initial_values():
    mean = np.array([1.0, 2.0], np.float32)
    for kind in (nn.BatchNorm2d, nn.SyncBatchNorm):
        norm = kind(2, moving_mean_init=ms.Tensor(mean), moving_var_init=0.5)
        assert norm.moving_mean.tolist() == [1.0, 2.0]
        assert norm.moving_variance.tolist() == [0.5, 0.5]
        norm(np.ones((2, 2, 1, 1), np.float32))
        norm.reset_running_stats()
        assert norm.running_mean.tolist() == [1.0, 2.0]
        assert sp.parallel.convert_sync_batchnorm(norm).moving_mean.tolist() == [1.0, 2.0]
    assert kind(2, moving_mean_init=0, moving_var_init=1).state_dict().keys() == norm.state_dict().keys()


def test_mixed_precision_of_renamed_members():
    """The casts of gamma and beta, which hide the parameters, are what the layer's weight and bias are."""
    network = nn.SequentialCell([nn.LayerNorm((4,)), nn.Dense(4, 2)])
    ms.train.auto_mixed_precision(network, "O3")
    assert {p.dtype for p in network.trainable_params()} == {np.dtype("float16")}
    assert network(np.ones((2, 4), np.float32)).shape == (2, 2)


def test_cell_without_prefix_leaves_names():
    inner = nn.SequentialCell([nn.Dense(2, 2)])

    class Outer(nn.Cell):
        def __init__(self, auto_prefix):
            super().__init__(auto_prefix=auto_prefix)
            self._network = inner

    Outer(auto_prefix=False)
    assert inner[0].weight.name == "0.weight"
    Outer(auto_prefix=True)
    assert inner[0].weight.name == "_network.0.weight"
    assert isinstance(inner, nn.Cell)


# --- the context cuts --------------------------------------------------------------------------------


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = (ms.Parameter(ms.common.initializer.initializer("ones", s)) for s in ([6, 8], [8, 4]))
        self.matmul1, self.relu, self.matmul2 = ops.MatMul(), ops.ReLU(), ops.MatMul()

    def construct(self, x):
        return self.matmul2(self.relu(self.matmul1(x, self.w1)), self.w2)


def train(form, mode, data):
    """Train three steps; return the losses, a prediction, the weights and the layouts' cuts."""
    if mode is not None:
        ms.set_auto_parallel_context(parallel_mode=mode, dataset_strategy=data)
    net = Network()
    rng = np.random.default_rng(0)
    for parameter in net.get_parameters():
        parameter.set_data(rng.integers(-2, 3, parameter.shape).astype(np.float32))
    if mode is not None:
        net.matmul1.shard(((2, 2), (2, 1)))
        net.relu.shard(((4, 1),))
    x, label = rng.integers(-2, 3, (8, 6)).astype(np.float32), rng.integers(0, 4, 8)
    if data == "data_parallel" and mode is not None:
        x, label = x[sp.get_rank() :: 4], label[sp.get_rank() :: 4]
    loss_fn, optimizer = nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.125)

    def forward_fn(data, label):
        logits = net(data)
        return loss_fn(logits, label), logits

    grad_fn = ms.value_and_grad(forward_fn, None, net.trainable_params(), has_aux=True)

    def step(data, label):
        (loss, logits), grads = grad_fn(data, label)
        optimizer(grads)
        assert form == "jit" or logits.numpy().shape == (8, 4)
        return loss

    steps = {
        "jit": ms.jit(step), "plain": step, "cell": nn.TrainOneStepCell(nn.WithLossCell(net, loss_fn), optimizer),
    }  # fmt: skip
    losses = [float(steps[form](ms.Tensor(x), ms.Tensor(label))) for _ in range(3)]
    if form == "cell":
        assert (steps["cell"]._step.plan is not None) == (mode == "auto_parallel")
    whole = [p.full_tensor().numpy() for p in net.get_parameters()]
    cuts = [p.layout.cuts for p in net.get_parameters() if p.layout is not None]
    return losses, np.sort(net(ms.Tensor(x)).numpy(), axis=0), whole, cuts


@pytest.mark.parametrize("data", ["full_batch", "data_parallel"])
@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("form", ["jit", "plain", "cell"])
def test_context_cuts_operators(form, mode, data):
    """Four ranks that only the context tells to cut train and predict as one device does."""
    (one,) = sp.launch(train, (form, None, data), world_size=1, transport="inline")
    many = sp.launch(train, (form, mode, data), world_size=4, transport="inline")
    for losses, predicted, whole, cuts in many:
        assert losses == pytest.approx(one[0], rel=1e-5)
        np.testing.assert_allclose(predicted, one[1], rtol=1e-4, atol=1e-5)
        for a, b in zip(whole, one[2], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert cuts[0] == (2, 1)
    assert sum(event.sent_bytes for event in many.trace.events) > 0


@pytest.mark.parametrize("form", ["jit", "plain", "cell"])
def test_no_context_cuts_nothing(form):
    """Red control: without the context a strategy on plain tensors is refused."""

    def program():
        train(form, "semi_auto_parallel", "full_batch")
        ms.reset_auto_parallel_context()
        ops.MatMul().shard(((2, 2), (2, 1)))(ms.Tensor(np.ones((2, 2))), ms.Tensor(np.ones((2, 2))))

    with refused(RunFailedError):
        sp.launch(program, world_size=4, transport="inline")


def test_gradients_of_arguments_are_whole():
    """Outside of any step, gradients of arguments come back whole, those of weights as the weights are cut."""

    def program():
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")
        w = ms.Parameter(ms.Tensor(np.ones((4, 2), np.float32)))
        matmul = ops.MatMul().shard(((2, 1), (1, 2)))
        x = ms.Tensor(np.arange(8, dtype=np.float32).reshape(2, 4))
        loss, (dx, (dw,)) = ms.value_and_grad(lambda x: matmul(x, w).sum(), 0, [w])(x)
        return (
            float(loss),
            dx.numpy().tolist(),
            dw.full_tensor().numpy().tolist(),
            ms.grad(lambda x: matmul(x, w).sum())(x),
        )

    for loss, dx, dw, again in sp.launch(program, world_size=4, transport="inline"):
        assert (loss, dx, again.numpy().tolist()) == (56.0, [[2.0] * 4] * 2, [[2.0] * 4] * 2)
        assert dw == [[4.0] * 2, [6.0] * 2, [8.0] * 2, [10.0] * 2]


def test_cut_function_can_be_sent_and_is_forgotten():
    """It goes to other processes by cloudpickle; what a rank keeps of it ends with it, as in a loop that makes many."""
    step = ms.jit(lambda x: ops.ReLU().shard(((2, 1),))(x))

    def program():
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")
        x = ms.Tensor(np.array([[-1.0, 2.0]] * 2))
        kept = current().kept
        for _ in range(3):
            assert ms.grad(lambda x: ops.ReLU()(x).sum())(x).numpy().tolist() == [[0.0, 1.0]] * 2
        gc.collect()
        assert step(x).numpy().tolist() == [[0.0, 2.0]] * 2
        return len(kept[sp.AutoParallel])

    sent = cloudpickle.loads(cloudpickle.dumps(program))
    assert list(sp.launch(sent, world_size=2, transport="inline")) == [1, 1]


def test_calls_of_a_cell_are_compared_once(monkeypatch):
    """Ranks compare calls of new shapes only, also of a Model's evaluation; a cell that was cut is freed."""
    compared, compare = [], auto.check_same_calls
    monkeypatch.setattr(auto, "check_same_calls", lambda calls: (compared.append(len(calls)), compare(calls)))

    class Doubled(nn.Cell):
        def construct(self, x):
            return x + x

    def program():
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")
        cell, x = Doubled(), np.ones((2, 2), np.float32)
        freed = weakref.ref(cell)
        for rows in (x, x, x[:1], x):
            cell(ms.Tensor(rows))
        del cell
        gc.collect()
        model = sp.Model(sp.nn.ReLU(), sp.nn.MSELoss(), metrics={"loss"})
        model.eval([(x, x)] * 3)
        for _ in range(3):
            model.predict(sp.Tensor(x))
        return freed()

    assert list(sp.launch(program, world_size=2, transport="inline")) == [None, None]
    assert sorted(compared) == [1] * 6 + [2] * 2


def test_plans_and_dry_runs_of_cells():
    """A network explained, or run dry, under a context that cuts is cut once."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")
    net = Network()
    net.matmul1.shard(((2, 2), (2, 1)))
    try:
        planned = net.explain((8, 6), device_num=4)
    finally:
        ms.reset_auto_parallel_context()
    assert "MatMul" in str(planned)

    def program():
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", dataset_strategy="full_batch")
        made = Network()
        made.matmul1.shard(((2, 2), (2, 1)))
        ms.jit(made)(sp.Tensor(np.ones((8, 6), np.float32)))

    real, dry = sp.launch(program, world_size=4, transport="inline"), sp.dry_run(program, world_size=4)
    assert sum(e.sent_bytes for e in real.trace.events) == sum(e.sent_bytes for e in dry.trace.events) > 0


def test_train_cell_was_made_for_another_context():
    net = nn.Dense(2, 2)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1))
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    try:
        with refused(InputError):
            step(np.ones((1, 2), np.float32), np.ones((1, 2), np.float32))
    finally:
        ms.reset_auto_parallel_context()


# --- collectives -------------------------------------------------------------------------------------


def test_collectives_as_objects():
    def program():
        rank = sp.get_rank()
        x = ms.Tensor(np.arange(4.0) + rank, requires_grad=True)
        found = [P.AllReduce()(x), ops.AllReduce(ops.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)(x)]
        found += [P.AllGather()(x), P.ReduceScatter(P.ReduceOp.SUM)(x), *P.Broadcast(1)((x,))]
        found[0].sum().backward()
        found += [x.grad, P.AllReduce(ops.ReduceOp.MAX)(x.detach()), P.AllReduce(ops.ReduceOp.PROD)(x.detach())]
        return [y.numpy().tolist() for y in found]

    for rank, found in enumerate(sp.launch(program, world_size=2, transport="inline")):
        each = [np.arange(4.0), np.arange(4.0) + 1]
        total = each[0] + each[1]
        expected = [total, total, np.concatenate(each), total[2 * rank : 2 * rank + 2], each[1], np.full(4, 2.0)]
        expected += [np.maximum(*each), each[0] * each[1]]
        assert found == [array.tolist() for array in expected]


def test_groups_have_names():
    def program():
        rank = communication.get_rank()
        communication.create_group("even", [0, 2])
        assert communication.get_group_size("hccl_world_group") == 3
        with refused(InputError):
            P.AllReduce(group="odd")
        if rank == 1:
            return 1.0
        assert (communication.get_rank("even"), communication.get_group_size("even")) == (rank // 2, 2)
        return float(P.AllReduce(group="even")(ms.Tensor(np.ones(1)))[0])

    assert list(sp.launch(program, world_size=3, transport="inline")) == [2.0, 1.0, 2.0]


# --- smaller names -----------------------------------------------------------------------------------


@given(st.sampled_from(["mean", "sum", "none", None]), st.integers(1, 4))
def test_loss_base_reduces(reduction, n):
    class Absolute(nn.LossBase):
        def construct(self, x, y):
            return self.get_loss(ops.abs(x - y), 2.0)

    x = np.arange(2.0 * n).reshape(2, n)
    found = Absolute(reduction)(ms.Tensor(x), ms.Tensor(np.zeros((2, n)))).numpy()
    np.testing.assert_allclose(found, 2 * x if reduction in ("none", None) else getattr(2 * x, reduction)())
    assert Absolute().get_axis(ms.Tensor(x)) == (0, 1)


def test_loss_base_checks_its_reduction():
    with refused(InputError):
        nn.LossBase("median")


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 4)])
def test_bias_add_adds_to_channels(shape):
    x, b = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32), np.array([1.0, 2.0, 3.0], np.float32)
    expected = x + b.reshape(-1, *(1,) * (len(shape) - 2))
    np.testing.assert_array_equal(P.BiasAdd()(ms.Tensor(x), ms.Tensor(b)).numpy(), expected)


def test_max_pool_by_either_version():
    x = ms.Tensor(np.random.default_rng(0).integers(-9, 9, (2, 3, 5, 5)).astype(np.float32))
    expected = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="same")(x).numpy()
    np.testing.assert_array_equal(P.MaxPool(kernel_size=3, strides=2, pad_mode="SAME")(x).numpy(), expected)
    np.testing.assert_array_equal(P.MaxPool(padding="same", ksize=3, strides=2)(x).numpy(), expected)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_pad_is_numpys(mode):
    x, widths = np.arange(24.0).reshape(2, 3, 4), ((0, 0), (1, 2), (0, 3))
    np.testing.assert_array_equal(nn.Pad(widths, mode.upper())(ms.Tensor(x)).numpy(), np.pad(x, widths, mode))
    with refused(InputError):
        nn.Pad(widths, "SYMMETRIC")


def test_layout_takes_names():
    assert Layout((2, 2), name=("dp", "mp"))("dp", "None") == sp.Layout((2, 2), ("dp", "mp"))("dp", "None")
    assert Layout((2, 2), ("dp", "mp"))("dp", "mp").tensor_map == (1, 0)
    assert isinstance(sp.Layout((2,), ("dp",)), Layout)


def test_grad_operation_takes_what_it_is_told():
    net = nn.Dense(2, 1, weight_init=ms.Tensor(np.array([[2.0, 3.0]], np.float32)), bias_init="zeros")
    x = ms.Tensor(np.array([[1.0, 4.0], [5.0, 6.0]], np.float32))
    ones, sens = np.full((2, 1), 1.0, np.float32), ms.Tensor(np.full((2, 1), 10.0, np.float32))
    assert ops.GradOperation()(net)(x).numpy().tolist() == [[2.0, 3.0]] * 2
    assert P.GradOperation(sens_param=True)(net)(x, sens).numpy().tolist() == [[20.0, 30.0]] * 2
    (dx,) = ops.GradOperation(get_all=True)(net)(x)
    dw, db = ops.GradOperation(get_by_list=True)(net, net.trainable_params())(x)
    assert (dx.numpy().tolist(), dw.numpy().tolist(), db.numpy().tolist()) == ([[2.0, 3.0]] * 2, [[6.0, 10.0]], [2.0])
    (dx,), (dw, db) = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(net)(x, ms.Tensor(ones))
    assert (dx.numpy().tolist(), dw.numpy().tolist(), db.numpy().tolist()) == ([[2.0, 3.0]] * 2, [[6.0, 10.0]], [2.0])


def test_get_context_reads_settings():
    ms.set_context(mode=ms.GRAPH_MODE, device_id=3)
    assert (ms.get_context("mode"), ms.context.get_context("device_id")) == (ms.GRAPH_MODE, 3)


def test_metric_converts_data():
    assert nn.Metric.__new__(nn.Metric)._convert_data(ms.Tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_callbacks_print_global_steps(capsys):
    """A log of lines "global_step: 1, loss: …" is a callback of three lines; `LossMonitor` never printed it."""

    class GlobalStep(ms.Callback):
        def epoch_end(self, run_context):
            params = run_context.original_args()
            print(f"global_step: {params.cur_step_num - 1}, loss: {float(params.net_outputs):.3f}")

    net = nn.Dense(2, 2)
    model = ms.Model(net, nn.CrossEntropyLoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    batches = [(np.ones((2, 2), np.float32), np.zeros(2, np.int32))] * 3
    model.train(2, batches, callbacks=[GlobalStep()], dataset_sink_mode=True, progress=False)
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "global_step: 2",
        "global_step: 5",
    ]


NUMPYS = {
    "ACos": np.arccos, "Asin": np.arcsin, "Atan": np.arctan, "Ceil": np.ceil, "Cos": np.cos, "Cosh": np.cosh,
    "Expm1": np.expm1, "Floor": np.floor, "Log1p": np.log1p, "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh,
    "Tan": np.tan, "Trunc": np.trunc, "Rsqrt": lambda x: 1 / np.sqrt(x), "acos": np.arccos, "asin": np.arcsin,
    "atan": np.arctan, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "expm1": np.expm1, "floor": np.floor,
    "log1p": np.log1p, "sin": np.sin, "sinh": np.sinh, "square": np.square, "tan": np.tan, "trunc": np.trunc,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPYS)
def test_elementwise_names(name):
    x, op = np.array([0.25, 0.5], np.float32), getattr(ops, name)
    found = op()(ms.Tensor(x)) if name[0].isupper() else op(ms.Tensor(x))
    np.testing.assert_allclose(found.numpy(), NUMPYS[name](x), rtol=1e-6)


def test_binary_names():
    a, b = np.array([3, 5]), np.array([5, 1])
    for name, expected in {"bitwise_and": a & b, "bitwise_or": a | b, "bitwise_xor": a ^ b}.items():
        op = getattr(ops, "".join(part.capitalize() for part in name.split("_")))
        assert op()(ms.Tensor(a), ms.Tensor(b)).tolist() == expected.tolist()
        assert getattr(ops, name)(ms.Tensor(a), ms.Tensor(b)).tolist() == expected.tolist()
    for name, wanted in {"ge": a >= b, "gt": a > b, "le": a <= b, "ne": a != b}.items():
        assert getattr(ops, name)(ms.Tensor(a), ms.Tensor(b)).tolist() == wanted.tolist()
    assert ops.masked_fill(ms.Tensor(a), ms.Tensor(a > 4), 9).tolist() == [3, 9]


def test_gradients_stand_in_composite_too():
    assert ops.composite.GradOperation()(lambda x: x * x)(ms.Tensor([1.0, 2.0])).tolist() == [2.0, 4.0]


def test_positions_of_maxima_are_refused():
    with refused(InputError):
        nn.MaxPool2d(2, return_indices=True)


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_optimizer_levels_name_the_way(level):
    with refused(InputError):
        ms.parallel.AutoParallel(nn.Dense(2, 2)).hsdp(optimizer_level=level)

"""`nn.checkpoint` gives the same gradients, and keeps no intermediate result."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import functions as F, nn, optim
from simparallel.autograd import Tensor, no_grad, value_and_grad
from simparallel.backend import manual_seed
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import AutogradError
from simparallel.machine.cluster import describe
from simparallel.parallel import AutoParallel, DistributedDataParallel

X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        manual_seed(3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.loose = [nn.Parameter(np.full(3, 0.5, np.float32))]  # in a list: not registered
        self.frozen = nn.Parameter(np.full(3, 2.0, np.float32), requires_grad=False)

    def body(self, x):
        return self.drop(self.norm(self.second(x).tanh())) * self.loose[0] * self.frozen

    def forward(self, x):
        return self.body(x)


def leaves(net):
    return [*net.parameters(), *net.loose]


def plain(part, *inputs):
    return part(*inputs)


# Ways to run the same part: (how to run a part, net, x, hidden tensor) -> result.
WAYS = {
    "module": lambda run, net, x, h: run(net, h),
    "method": lambda run, net, x, h: run(net.body, h),
    "lambda": lambda run, net, x, h: run(lambda v: net.body(v), h),
    "closure alone": lambda run, net, x, h: run(lambda: net.body(h)),
    "twice": lambda run, net, x, h: run(lambda v: net.body(v) * h + v, h),
    "partial": lambda run, net, x, h: run(partial(lambda a, b: net.body(b) + a, x), h),
    "in a dict": lambda run, net, x, h: run(lambda d: net.body(d["h"][0]), {"h": [h]}),
    "nested": lambda run, net, x, h: run(lambda v: run(lambda w: run(net.second, w) + net.body(w), v) * v, h),
    "in a row": lambda run, net, x, h: run(net.body, run(lambda v: v * net.first.bias, h)),
    "identity": lambda run, net, x, h: net.body(run(lambda v: v, h)),
    "a view": lambda run, net, x, h: net.body(run(lambda v: v.reshape(4, 3), h)),
    "a weight": lambda run, net, x, h: net.body(h) * run(lambda: net.loose[0]),
    "unused input": lambda run, net, x, h: net.body(h) + run(lambda v: net.first.weight.sum(), h),
}


@pytest.mark.parametrize("way", WAYS)
@given(x_needs=st.booleans(), h_is_leaf=st.booleans(), frozen=st.booleans())
def test_leaves_get_the_same_gradients(way, x_needs, h_is_leaf, frozen):
    def gradients(run):
        net = Net().to(np.float64)
        net.loose = [nn.Parameter(np.full(3, 0.5))]
        net.first.weight.requires_grad_(not frozen)
        x = Tensor(X.astype(np.float64), requires_grad=x_needs)
        h = x if h_is_leaf else net.first(x)
        heard = []
        for leaf in leaves(net):
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda p: heard.append(p.shape))
        y = WAYS[way](run, net, x, h)
        y.backward(X if y.shape else None)
        grads = [None if p.grad is None else p.grad.numpy() for p in (x, *leaves(net))]
        return [y.numpy(), *(b.numpy().copy() for b in net.buffers()), *grads], sorted(heard)

    (expected, hooks), (found, hooks_found) = gradients(plain), gradients(nn.checkpoint)

    assert hooks == hooks_found
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:  # the uses of a tensor may be added up in another order
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_nothing_to_differentiate_stays_off_the_tape():
    net = Net().requires_grad_(False)
    net.loose[0].requires_grad_(False)

    assert not nn.checkpoint(net.body, Tensor(X)).requires_grad
    with no_grad():
        assert not nn.checkpoint(Net(), Tensor(X, requires_grad=True)).requires_grad


def test_kept_graph_runs_back_twice():
    net = Net()
    y = nn.checkpoint(lambda x: net.body(x), Tensor(X)).sum()
    y.backward(retain_graph=True)
    once = net.second.weight.grad.numpy().copy()
    y.backward()

    np.testing.assert_array_equal(net.second.weight.grad.numpy(), 2 * once)


def test_rerun_keeps_other_graphs_valid():
    layer, x = nn.Linear(3, 3), Tensor(X, requires_grad=True)
    losses = [nn.checkpoint(layer, x).sum(), (layer(x) * layer(x)).sum(), nn.checkpoint(layer, x).sum()]
    for loss in losses:
        loss.backward()
    once = layer.weight.grad.numpy().copy()
    layer.zero_grad()
    (layer(x).sum() * 2.0 + (layer(x) * layer(x)).sum()).backward()

    np.testing.assert_allclose(layer.weight.grad.numpy(), once, rtol=1e-5, atol=1e-5)


def test_value_and_grad_through_checkpoint():
    net = Net().eval()
    found = value_and_grad(lambda x: nn.checkpoint(lambda v: net.body(v), x).sum(), 0, [net.second.weight])(Tensor(X))
    expected = value_and_grad(lambda x: net.body(x).sum(), 0, [net.second.weight])(Tensor(X))

    np.testing.assert_array_equal(found[1][0].numpy(), expected[1][0].numpy())
    np.testing.assert_array_equal(found[1][1][0].numpy(), expected[1][1][0].numpy())


# --- saved memory ------------------------------------------------------------------------------------


def test_intermediate_results_are_freed():
    between = []

    def part(x):
        h = (x * 2.0).tanh()
        between.append(weakref.ref(h.data))
        return (h * h).sum()

    gc.disable()
    try:
        x = Tensor(X, requires_grad=True)
        y = nn.checkpoint(part, x)
        assert between.pop()() is None
        y.backward()
        assert between.pop()() is None
    finally:
        gc.enable()


def test_chain_of_parts_has_small_memory_peak():
    """A chain of checkpointed parts has less than half the memory peak."""

    def peak(run):
        recorder = Recorder(0, describe(1))
        with use_recorder(recorder):
            h = Tensor(np.ones(1 << 12, np.float32), requires_grad=True)
            for _ in range(8):
                h = run(lambda v: v.tanh().exp().sigmoid().tanh(), h)
            h.sum().backward()
        return recorder.memory.peak

    assert peak(nn.checkpoint) < peak(plain) / 2


# --- changes in between ------------------------------------------------------------------------------


def changes(net):
    optimizer = optim.SGD(net.second.parameters(), 0.1)
    for p in net.second.parameters():
        p.grad = Tensor(np.ones(p.shape, np.float32))
    return {
        "step": optimizer.step,
        "load": lambda: net.load_state_dict(net.state_dict()),
        "init": lambda: nn.init.uniform_(net.second.weight),
        "zeros": lambda: nn.init.zeros_(net.second.bias),
        "orthogonal": lambda: nn.init.orthogonal_(net.second.weight),
    }


@pytest.mark.parametrize("change", changes(Net()))
@pytest.mark.parametrize("run", [plain, nn.checkpoint])
def test_weight_changed_in_place_is_noticed(run, change):
    net = Net()
    x = Tensor(X, requires_grad=True)
    y = run(lambda v: net.body(v * net.second.bias), x)
    changes(net)[change]()
    with refused(AutogradError):
        y.sum().backward()
    assert x.grad is None


def test_other_weights_may_change():
    net = Net()
    y = nn.checkpoint(net.body, Tensor(X))
    nn.init.zeros_(net.first.weight)
    y.sum().backward()

    assert net.second.weight.grad is not None


def test_replaced_weight_keeps_the_gradient():
    def gradient(run):
        weight = nn.Parameter(np.arange(3, dtype=np.float32))
        y = run(lambda: (weight * weight).tanh().sum())
        weight.data = weight.data + 1
        y.backward()
        assert weight.data[0] == 1
        return weight.grad.numpy()

    np.testing.assert_array_equal(gradient(nn.checkpoint), gradient(plain))


def other_leaf(turn, x):
    return x * Tensor(np.ones(3, np.float32), requires_grad=True)


WEIGHTS = nn.Parameter(np.ones(3)), nn.Parameter(np.ones(3))


def other_weight(turn, x):
    return x * WEIGHTS[turn]


@pytest.mark.parametrize(
    ("part", "allowed"),
    [
        (other_leaf, False),
        (other_weight, False),
        (lambda turn, x: x.detach() * 1.0 if turn else x * 1.0, False),
        (lambda turn, x: (x * 1.0)[turn:], False),
        (lambda turn, x: x if turn else x * 1.0, True),
        (lambda turn, x: None if turn else x * 1.0, False),
    ],
)
def test_part_that_differs_in_the_rerun_is_refused(part, allowed):
    turn = iter((0, 1))
    x = Tensor(X, requires_grad=True)
    y = nn.checkpoint(lambda v: part(next(turn), v), x)
    if allowed:  # the same tensors and the same shape: allowed
        y.sum().backward()
        return
    with refused(AutogradError):
        y.sum().backward()
    assert x.grad is None
    assert x.is_leaf


def into_the_input(net, x):
    x += 1.0


def into_an_item(net, x):
    x[0] = 1.0


def into_a_weight(net, x):
    with no_grad():
        net.second.weight *= 2.0


@pytest.mark.parametrize("write", [into_the_input, into_an_item, into_a_weight])
def test_part_that_writes_its_inputs_is_refused(write):
    net, x = Net(), Tensor(X.copy())
    with refused(AutogradError):
        nn.checkpoint(lambda v: [write(net, v), net.body(v)][1], x)
    with no_grad():  # allowed without a rerun
        nn.checkpoint(lambda v: [write(net, v), net.body(v)][1], x)


def test_part_may_write_its_own_tensors():
    net = Net()

    def part(v):
        mask = Tensor(np.ones((4, 3), np.float32))
        mask[0] = 0.0
        v = v.clone()
        v += 1.0
        return net.body(v * mask)

    def gradient(run):
        net.zero_grad()
        run(part, Tensor(X)).sum().backward()
        return net.second.weight.grad.numpy()

    net.drop.eval()
    np.testing.assert_array_equal(gradient(nn.checkpoint), gradient(plain))


def test_failed_rerun_leaves_the_tape_unchanged():
    turn = iter((0, 1))
    h = Tensor(X, requires_grad=True) * 2.0
    y = nn.checkpoint(lambda v: (v * 2.0).reshape((4, 3) if next(turn) == 0 else (5, 5)), h)
    with refused(sp.errors.ShapeError):
        y.sum().backward()
    assert not h.is_leaf
    assert (h * 1.0).requires_grad


def test_one_tensor_is_needed():
    with refused(AutogradError):
        nn.checkpoint(lambda x: (x, x), Tensor(X))


# --- surroundings ------------------------------------------------------------------------------------


class Around(nn.Module):
    """Checkpoints in a forward pass: of a child, of a method, and of a function."""

    def __init__(self, run):
        super().__init__()
        self.net, self.run = Net(), run

    def forward(self, x):
        h = self.run(self.net.first, x)
        h = self.run(lambda v: self.net.body(v) * self.net.second.bias + F.linear(v, self.net.first.weight), h)
        return self.run(self.tail, h)

    def tail(self, h):
        return (h * h).sum()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_mixed_precision_is_the_same_both_times(level):
    def gradients(run):
        model = nn.auto_mixed_precision(Around(run), level)
        model(Tensor(X)).backward()
        assert model.net.second.weight is model.net.second._parameters["weight"]  # the weights are restored
        return [p.grad.numpy() for p in model.parameters() if p.requires_grad]

    for a, b in zip(gradients(plain), gradients(nn.checkpoint), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rerun_uses_the_same_device():
    def program():
        with sp.device("sim:1"):
            x = Tensor(X, requires_grad=True)
            y = nn.checkpoint(lambda v: v * Tensor(np.full(3, 2.0, np.float32)), x)
        y.sum().backward()
        return x.grad.numpy().tolist()

    assert sp.launch(program, world_size=1, transport="inline", devices_per_rank=2) == [np.full((4, 3), 2.0).tolist()]


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_under_ddp_each_parameter_arrives_once(settings):
    def train(run):
        model = DistributedDataParallel(Around(run), **settings)
        heard = []
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: heard.append(p.shape))
        grads = []
        for _ in range(2):
            model.zero_grad()
            model(Tensor(X + sp.get_rank())).backward()
            grads += [p.grad.numpy().copy() for p in model.parameters() if p.requires_grad]
        return grads, len(heard), [b.numpy().copy() for b in model.buffers()]

    def ranks(run):
        return sp.launch(train, (run,), world_size=2, transport="inline")

    for expected, found in zip(ranks(plain), ranks(nn.checkpoint), strict=True):
        assert expected[1] == found[1] == 2 * 6
        for a, b in zip(expected[0] + expected[2], found[0] + found[2], strict=True):
            np.testing.assert_array_equal(a, b)


def test_checkpointed_ddp_model_broadcasts_buffers():
    """A checkpointed DDP model broadcasts its buffers before every forward pass, as the plain one."""

    def train(run):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        for step in range(3):
            run(model, Tensor(X * (1 + sp.get_rank() + step))).sum().backward()
        model.eval()
        model(Tensor(X))
        return model.module[1].running_mean.numpy()

    expected, found = (sp.launch(train, (run,), world_size=2, transport="inline") for run in (plain, nn.checkpoint))
    np.testing.assert_array_equal(expected, found)


def test_sharded_parts_keep_their_layout():
    def train(run):
        first, second = sp.ops.MatMul().shard(((2, 1), (1, 2))), sp.ops.MatMul().shard(((1, 2), (2, 1)))
        w, v = nn.Parameter(np.arange(12.0).reshape(3, 4)), nn.Parameter(np.arange(8.0).reshape(4, 2))

        def step(x):
            h = run(lambda h: first(h, w), x)
            run(lambda h: F.relu(second(h, v)), h).sum().backward()
            return w.grad, v.grad

        return [grad.numpy() for grad in AutoParallel(step)(np.arange(6.0).reshape(2, 3))]

    expected, found = (sp.launch(train, (run,), world_size=4, transport="inline") for run in (plain, nn.checkpoint))
    np.testing.assert_array_equal(expected[0][0], found[3][0])
    np.testing.assert_array_equal(expected[0][1], found[3][1])

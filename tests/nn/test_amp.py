"""Mixed precision: dtypes of the computation, training, and skipped overflows."""

import copy

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import data, nn, optim
from simparallel.autograd import Tensor, no_grad
from simparallel.errors import InputError, NonFiniteLossError

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)


class Spy(nn.Module):
    """Records the dtype of its input."""

    def forward(self, x):
        self.seen = x.dtype
        return x


class LayerNorm(nn.Module):
    """Stands in for a normalisation: float32 at O2 because of its name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(np.ones(4, np.float32))

    def forward(self, x):
        self.seen = x.dtype, self.weight.dtype
        return x * self.weight


def network():
    sp.manual_seed(0)
    return nn.Sequential(Spy(), nn.Linear(4, 4), Spy(), LayerNorm(), Spy(), nn.Linear(4, 2), Spy())


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("level", "spies", "norm"),
    [
        ("O0", [SINGLE] * 4, (SINGLE, SINGLE)),
        ("O1", [SINGLE] * 4, (SINGLE, SINGLE)),
        ("O2", [HALF] * 4, (SINGLE, SINGLE)),
        ("O3", [HALF] * 4, (HALF, HALF)),
    ],
)
def test_dtypes_of_each_level(level, spies, norm):
    plain, net = network()(X), network()
    names = [name for name, _ in net.named_parameters()]
    assert nn.auto_mixed_precision(net, level) is net
    y = net(X)
    assert [m.seen for m in net if isinstance(m, Spy)] == spies
    assert net[3].seen == norm
    assert y.dtype == SINGLE
    np.testing.assert_allclose(y.numpy(), plain.numpy(), rtol=0 if level == "O0" else 1e-2, atol=2e-3)
    assert np.array_equal(y.numpy(), plain.numpy()) == (level == "O0")
    y.sum().backward()
    kept = HALF if level == "O3" else SINGLE
    assert {p.dtype for p in net.parameters()} == {p.grad.dtype for p in net.parameters()} == {kept}
    assert [name for name, _ in net.named_parameters()] == names == list(net.state_dict())


def test_norms_need_no_casts_around_them():
    """The same bits as with float32 inputs and rounded results, in every gradient."""
    x = np.random.default_rng(1).standard_normal((4, 3, 6, 6)).astype(np.float16)
    for module in (nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.LayerNorm(6)):
        found = []
        for casts in (False, True):
            leaf = sp.Tensor(x, requires_grad=True)
            module.zero_grad()
            y = module(leaf.astype("f4") if casts else leaf).astype("f2")
            (y * y).sum().backward()
            found.append([y.numpy(), leaf.grad.numpy(), *(p.grad.numpy() for p in module.parameters())])
        for a, b in zip(*found, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_products_save_float16_for_backward(level):
    layer = nn.auto_mixed_precision(nn.Linear(4, 2), level)
    y = layer(X)
    node = y._node.inputs[0]  # above the cast to float32
    assert node.op.name == "Linear"
    assert (node.ctx.x.dtype, node.ctx.w.dtype) == (HALF, HALF)


def test_gradients_match_float32():
    """Gradients equal the float32 gradients within float16's precision."""
    plain, net = network(), nn.auto_mixed_precision(network(), "O2")
    for model in (plain, net):
        (model(X) * model(X)).sum().backward()
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        np.testing.assert_allclose(q.grad.numpy(), p.grad.numpy(), rtol=2e-2, atol=5e-3)


class Tied(nn.Module):
    """Uses a child's weight outside the child, as a GPT uses its embedding."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.twin = self.body
        self.spy = Spy()

    def forward(self, x):
        return self.spy(self.twin(self.body(x)) @ self.body.weight)


def test_parent_may_use_a_childs_weight():
    net = nn.auto_mixed_precision(Tied(), "O2")
    y = net(X)
    assert net.spy.seen == HALF
    y.sum().backward()
    assert net.body.weight.grad.dtype == SINGLE
    assert net.body.weight is net._modules["body"]._parameters["weight"]  # the weights are restored
    assert [name for name, _ in net.named_parameters()] == ["body.weight"]


def test_part_may_run_alone():
    net = nn.auto_mixed_precision(network(), "O2")
    assert net[1](X).dtype == HALF
    assert net[3](X).dtype == HALF
    assert net[3].seen == (SINGLE, SINGLE)


def test_checkpoint_computes_again_in_float16():
    grads = []
    for again in (False, True):
        net = nn.auto_mixed_precision(network(), "O2")
        head, tail = net[:2], net[2:]
        y = tail(nn.checkpoint(head, X) if again else head(X))
        net[2].seen = None
        (y * y).sum().backward()
        assert net[0].seen == HALF
        grads.append([p.grad.numpy() for p in net.parameters()])
    assert all(np.array_equal(a, b) for a, b in zip(*grads, strict=True))


def test_failed_forward_restores_the_weights():
    net = nn.auto_mixed_precision(network(), "O2")
    with pytest.raises(Exception, match="Linear"):
        net(X[:, :3])
    assert all(p.dtype == SINGLE for p in (net[1].weight, net[5].weight))
    assert net(X).dtype == SINGLE


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_copy_is_independent(level):
    net = nn.auto_mixed_precision(network(), level)
    twin = copy.deepcopy(net)
    for p in net.parameters():
        p.data[...] = 0
    assert np.abs(twin(X).numpy()).sum() > 0
    assert not net(X).numpy().any()
    twin(X).sum().backward()
    assert net[1].weight.grad is None
    assert twin[1].weight.grad is not None


def test_no_grad_and_integers_are_kept():
    net = nn.auto_mixed_precision(nn.Sequential(Spy()), "O2")
    assert net(np.arange(3)).dtype == np.int64
    with no_grad():
        assert nn.auto_mixed_precision(network(), "O2")(X).requires_grad is False


class Many(nn.Module):
    def forward(self, pair, *, options):
        return {"a": pair[0], "b": [options["x"], pair[1]]}


def test_inputs_and_outputs_of_any_shape():
    net = nn.auto_mixed_precision(Many(), "O3")
    y = net((Tensor(X), X), options={"x": np.arange(2)})
    assert (y["a"].dtype, y["b"][0].dtype, y["b"][1].dtype) == (SINGLE, np.int64, SINGLE)


def test_own_lists():
    net = nn.custom_mixed_precision(network(), white_list=[LayerNorm])
    net(X)
    assert net[3].seen == (HALF, HALF)
    net = nn.custom_mixed_precision(network(), black_list=["Linear"])
    net(X)
    assert net[3].seen == (HALF, HALF)
    for arguments in ({}, {"white_list": [], "black_list": []}):
        with refused(InputError):
            nn.custom_mixed_precision(network(), **arguments)
    with refused(InputError):
        nn.custom_mixed_precision(network(), white_list=[3])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_repeated_call_changes_new_modules_only(level):
    """As in a script that makes two Models of one network."""
    once, twice = (nn.auto_mixed_precision(network(), level) for _ in range(2))
    before = [module.__dict__.get("forward") for module in twice.modules()]
    assert nn.auto_mixed_precision(twice, level) is twice
    assert [module.__dict__.get("forward") for module in twice.modules()] == before
    np.testing.assert_array_equal(twice(X).numpy(), once(X).numpy())
    twice[1] = nn.Linear(4, 4)
    nn.auto_mixed_precision(twice, level)
    half = Tensor(X.astype(HALF))
    assert twice[1](half).dtype == once[1](half).dtype


def test_bad_arguments_are_refused():
    with refused(InputError):
        nn.auto_mixed_precision(network(), "O4")
    with refused(InputError):
        nn.auto_mixed_precision(lambda x: x, "O2")
    for level, other in (("O1", "O2"), ("O2", "O3"), ("O3", "O1")):
        net = nn.auto_mixed_precision(network(), level)
        with refused(InputError):
            nn.auto_mixed_precision(net, other)
        with refused(InputError):
            nn.auto_mixed_precision(nn.Sequential(net), level)  # a part is not the whole network
    with refused(InputError):
        nn.auto_mixed_precision(nn.Linear(2, 2, dtype=np.float64), "O2")


# --- training ----------------------------------------------------------------------------------------


def train_digits(level, epochs=6):
    sp.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    net = nn.auto_mixed_precision(net, level)
    optimizer = optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scaler = optim.GradScaler(optim.DynamicLossScaleManager(2.0**10, scale_window=50))
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in data.DataLoader(data.digits(), 60, shuffle=True):
            optimizer.zero_grad()
            scaler.scale(loss_fn(net(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    images, labels = data.digits("test")[:]
    with no_grad():
        return float((net(images).numpy().argmax(1) == labels).mean()), scaler.get_scale()


def test_o2_trains_the_digits_as_well_as_float32():
    plain, _ = train_digits("O0")
    mixed, scale = train_digits("O2")
    assert plain > 0.92
    assert abs(mixed - plain) < 0.015
    assert scale > 2**10  # the scale has grown meanwhile


def test_overflow_in_float16_skips_the_step():
    net = nn.auto_mixed_precision(nn.Linear(4, 2), "O2")
    before = net.state_dict()
    optimizer = optim.SGD(net.parameters(), 0.1)
    scaler = optim.GradScaler(optim.DynamicLossScaleManager(2.0**17))
    done, skipped = False, -1
    while not done:
        skipped += 1
        optimizer.zero_grad()
        scaler.scale((net(X) * 4.0).sum()).backward()  # 4 * 2**17 exceeds 65,504
        done = scaler.step(optimizer)
        scaler.update()
        same = all(np.array_equal(before[name], value) for name, value in net.state_dict().items())
        assert same != done
    assert 1 <= skipped < 7
    assert scaler.get_scale() == 2.0 ** (17 - skipped)


def test_overflow_in_forward_is_nonfinite_loss():
    net = nn.auto_mixed_precision(nn.Linear(4, 2), "O2")
    with refused(NonFiniteLossError), np.errstate(invalid="ignore", over="ignore"):
        net(X * 1e6).sum().backward()


def test_small_gradients_survive_only_with_a_scale():
    """Why the loss is scaled: 2e-8 is 0 in float16."""
    grads = []
    for scale in (1.0, 2.0**12):
        net = nn.auto_mixed_precision(nn.Linear(4, 2, bias=False), "O2")
        scaler = optim.GradScaler(optim.FixedLossScaleManager(scale))
        scaler.scale((net(np.ones((1, 4), np.float32)) * 2e-8).sum()).backward()
        scaler.unscale_(optim.SGD(net.parameters()))
        grads.append(net.weight.grad.numpy())
    assert not grads[0].any()
    np.testing.assert_allclose(grads[1], 2e-8, rtol=1e-3)

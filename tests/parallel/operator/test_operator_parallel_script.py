"""The two scripts of MindSpore's tutorial on operator-level parallelism, as printed.

The text is the tutorial's; changes are listed beside `TEXT`. The scripts leave `has_aux` out of `value_and_grad`, so
the logits take part in the gradient, as in MindSpore: a computation by hand gives the expected values.
"""

from __future__ import annotations

import re
import types
from functools import cache

import numpy as np
import pytest

import simparallel as sp

STEPS, BATCH = 3, 32
pytestmark = pytest.mark.filterwarnings("ignore:value_and_grad. forward_fn returns 2 Tensors")

# nn.Cell and construct are nn.Module and forward, nn.SGD is optim.SGD, ms.float32 is np.float32, set_memory is in `ms`
# itself; the data set is made in memory, there are fewer steps, and the losses are kept for the test.
TEXT = '''
import simparallel as ms
from simparallel import init

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_memory(max_size="28GB")
init()
ms.set_seed(1)

from simparallel import nn, ops, optim
from simparallel.nn.init import initializer
from simparallel import Layout

class Network(nn.Module):
    """Network"""
    def __init__(self):
        super().__init__()
        self.flatten = ops.Flatten()
        self.fc1_weight = ms.Parameter(initializer("normal", [28*28, 512], np.float32))
        self.fc2_weight = ms.Parameter(initializer("normal", [512, 512], np.float32))
        self.fc3_weight = ms.Parameter(initializer("normal", [512, 10], np.float32))
        {strategies}
        self.matmul3 = ops.MatMul()

    def forward(self, x):
        x = self.flatten(x)
        x = self.matmul1(x, self.fc1_weight)
        x = self.relu1(x)
        x = self.matmul2(x, self.fc2_weight)
        x = self.relu2(x)
        logits = self.matmul3(x, self.fc3_weight)
        return logits

from simparallel import no_init_parameters

with no_init_parameters():
    net = Network()
    optimizer = optim.SGD(net.trainable_params(), 1e-2)

loss_fn = nn.CrossEntropyLoss()

def forward_fn(data, target):
    logits = net(data)
    loss = loss_fn(logits, target)
    return loss, logits

grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)

def train_step(inputs, targets):
    (loss_value, _), grads = grad_fn(inputs, targets)
    optimizer(grads)
    return loss_value

from simparallel.parallel import AutoParallel

parallel_net = AutoParallel(train_step, parallel_mode="semi_auto")

for epoch in range(1):
    i = 0
    for image, label in data_set:
        loss_output = parallel_net(image, label)
        losses.append(float(loss_output))
        if i % 10 == 0:
            print("epoch: %s, step: %s, loss is %s" % (epoch, i, loss_output))
        i += 1
'''

TUPLES = """
        self.matmul1 = ops.MatMul().shard(((2, 4), (4, 1)))
        self.relu1 = ops.ReLU().shard(((4, 1),))
        self.matmul2 = ops.MatMul().shard(((1, 8), (8, 1)))
        self.relu2 = ops.ReLU().shard(((8, 1),))
"""
LAYOUTS = """
        layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
        layout2 = Layout((8,), ("tp",))
        self.matmul1 = ops.MatMul().shard((layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
        self.relu1 = ops.ReLU().shard(((4, 1),))
        self.matmul2 = ops.MatMul().shard((layout2("None", "tp"), layout2("tp", "None")))
        self.relu2 = ops.ReLU().shard(((8, 1),))
"""
ALONE = re.sub(r"\.shard\(.*\)\n", "\n", TUPLES)


def data_set():
    rng = np.random.default_rng(7)
    return [
        (rng.standard_normal((BATCH, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, BATCH, np.int32))
        for _ in range(STEPS)
    ]


def run(strategies):
    """Return the script's losses, and its final weights."""
    names = {"np": np, "data_set": data_set(), "losses": []}
    script = types.ModuleType("script")
    script.__dict__.update(names)
    exec(compile(TEXT.replace("{strategies}", strategies.strip()), "script", "exec"), script.__dict__)
    return script.losses, [p.full_tensor().numpy() for p in script.net.parameters()]


@cache
def by_hand():
    """Make the same steps in NumPy: the cotangent of the logits is the loss's, plus 1."""
    sp.manual_seed(1)
    sizes = [(28 * 28, 512), (512, 512), (512, 10)]
    w1, w2, w3 = (sp.nn.init.initializer("normal", size).numpy().astype(np.float64) for size in sizes)
    losses = []
    for image, label in data_set():
        x = image.reshape(BATCH, -1).astype(np.float64)
        a = np.maximum(x @ w1, 0)
        b = np.maximum(a @ w2, 0)
        z = b @ w3
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log(p[np.arange(BATCH), label]).mean())
        dz = (p - np.eye(10)[label]) / BATCH + 1.0
        db = (dz @ w3.T) * (b > 0)
        da = (db @ w2.T) * (a > 0)
        w1, w2, w3 = w1 - 1e-2 * x.T @ da, w2 - 1e-2 * a.T @ db, w3 - 1e-2 * b.T @ dz
    return losses, [w1, w2, w3]


def assert_close(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def test_script_on_one_device_matches_numpy():
    found, expected = sp.launch(run, (ALONE,), world_size=1, transport="inline")[0], by_hand()
    assert_close(found, expected)
    assert expected[0][0] == pytest.approx(np.log(10), abs=0.1)
    without_logits = abs(found[1][2] - sp.nn.init.initializer("normal", (512, 10)).numpy()).max()
    assert without_logits > 1e-2  # the extra ones have an effect


@pytest.mark.parametrize("strategies", [TUPLES, LAYOUTS], ids=["tuples", "layouts"])
def test_script_on_eight_devices_matches_numpy(strategies):
    expected = by_hand()
    for found in sp.launch(run, (strategies,), world_size=8, transport="inline"):
        assert_close(found, expected)


@pytest.mark.process
def test_script_in_processes_writes_device_logs(tmp_path):
    results = sp.launch(run, (LAYOUTS,), world_size=8, log_dir=tmp_path)

    assert_close(results[5], by_hand())
    for rank in range(8):
        assert "epoch: 0, step: 0, loss is 2.2989" in (tmp_path / f"worker_{rank}.log").read_text()
    assert (tmp_path / "scheduler.log").exists()

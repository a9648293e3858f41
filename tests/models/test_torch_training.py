"""Whole trainings beside PyTorch (the extra "bench"), from the same weights on the same batches."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import World

import simparallel as sp
from simparallel import models, optim
from simparallel.autograd import Tensor

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
from oracles_torch import assert_near, generator, to_float64  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from benchmarks.peers import torch_models  # noqa: E402


def twins(make, torch_model, dtype):
    """Return one of our models and PyTorch's with the same weights: by position, shapes match one by one."""
    sp.manual_seed(0)
    ours, theirs = make(), getattr(torch_models, torch_model)()
    if dtype == "float64":
        ours, theirs = to_float64(ours), theirs.double()
    for parameter, their_parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert parameter.shape == tuple(their_parameter.shape)
        their_parameter.data = torch.tensor(parameter.numpy())
    return ours, theirs


def images(step, num, *shape):
    """Return one of four batches in turn, so that there is something to learn."""
    rng = generator(100 + step % 4)
    return rng.standard_normal((num, *shape)), rng.integers(0, 10, num)


def tokens(step, num, length):
    text = generator(100 + step % 4).integers(0, 256, (num, length + 1))
    return text[:, :-1], text[:, 1:]


def losses_of(ours, theirs, batches, optimizer="SGD", **settings):
    """Train both, a step on each batch; return our losses and PyTorch's."""
    ours_optimizer = getattr(optim, optimizer)(ours.parameters(), **settings)
    their_optimizer = getattr(torch.optim, optimizer)(theirs.parameters(), **settings)
    dtype, found = next(ours.parameters()).dtype, []
    for data, labels in batches:
        data = data.astype(dtype) if data.dtype.kind == "f" else data
        logits, their_logits = ours(Tensor(data)), theirs(torch.tensor(data))
        classes, labels = logits.shape[-1], labels.reshape(-1)
        loss = sp.functions.cross_entropy(logits.reshape(-1, classes), labels)
        their_loss = cross_entropy(their_logits.reshape(-1, classes), torch.tensor(labels))
        for one, its_optimizer in ((loss, ours_optimizer), (their_loss, their_optimizer)):
            its_optimizer.zero_grad()
            one.backward()
            its_optimizer.step()
        found.append((loss.item(), their_loss.item()))
    return np.array(found).T


def mlp_batch(step):
    return images(step, 32, 784)


def lenet_batch(step):
    return images(step, 8, 1, 28, 28)


def resnet_batch(step):
    """Return four images of 16 x 16, not 32 x 32: steps in float64 take long."""
    return images(step, 4, 3, 16, 16)


def gpt_batch(step):
    return tokens(step, 2, 48)


def resnet18():
    return models.resnet18(10, "cifar")


SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
MLP = models.mlp, "mlp", mlp_batch
LENET = models.lenet5, "lenet", lenet_batch
RESNET = resnet18, "resnet18_cifar", resnet_batch
GPT = models.gpt, "gpt", gpt_batch


@pytest.mark.matrices
@pytest.mark.parametrize(
    ("make", "torch_model", "batch", "num_steps", "settings"),
    [
        pytest.param(*MLP, 20, SGD, id="mlp"),
        pytest.param(*MLP, 20, {"optimizer": "Adam"}, id="mlp-adam"),
        pytest.param(*LENET, 20, SGD, id="lenet"),
        pytest.param(*RESNET, 3, SGD | {"lr": 0.01}, id="resnet18", marks=pytest.mark.slow),
        pytest.param(*GPT, 6, {"optimizer": "AdamW"}, id="gpt"),
    ],
)
def test_training_agrees_with_torch(make, torch_model, batch, num_steps, settings):
    """Losses of all steps, parameters and running statistics at the end: float64, 1e-11."""
    ours, theirs = twins(make, torch_model, "float64")
    losses, their_losses = losses_of(ours, theirs, map(batch, range(num_steps)), **settings)
    assert_near(losses, their_losses, 1e-11)
    for own, their in ((ours.parameters(), theirs.parameters()), (ours.buffers(), theirs.buffers())):
        for tensor, their_tensor in zip(own, their, strict=True):
            assert_near(tensor, their_tensor.detach(), 1e-11)
    if num_steps > 5:
        assert losses[-4:].mean() < losses[:4].mean()


# In float32 a ReLU may fall on either side of its kink, and Adam makes a whole step of a gradient that
# is all rounding (as for the keys' bias): so SGD; and one step for ResNet-18, where minimal filtering rounds
# more, one step.
@pytest.mark.parametrize(
    ("make", "torch_model", "batch", "num_steps"),
    [
        pytest.param(*MLP, 20, id="mlp"),
        pytest.param(*LENET, 20, id="lenet"),
        pytest.param(*RESNET, 1, id="resnet18"),
        pytest.param(*GPT, 5, id="gpt"),
    ],
)
def test_losses_in_float32_agree_with_torch(make, torch_model, batch, num_steps):
    """Relative 1e-5."""
    ours, theirs = twins(make, torch_model, "float32")
    losses, their_losses = losses_of(ours, theirs, map(batch, range(num_steps)), **SGD)
    assert_near(losses, their_losses, 1e-5)


def test_data_parallel_training_agrees_with_torch():
    """Two ranks with half of each batch, and PyTorch alone with all of it: parameters after 5 steps."""
    single, theirs = twins(models.mlp, "mlp", "float64")
    start = single.state_dict()

    def program():
        model = to_float64(models.mlp())
        model.load_state_dict(start)
        model = sp.parallel.DistributedDataParallel(model)
        optimizer = optim.SGD(model.parameters(), **SGD)
        rows = slice(16 * sp.get_rank(), 16 * (sp.get_rank() + 1))
        for step in range(5):
            x, labels = mlp_batch(step)
            optimizer.zero_grad()
            sp.functions.cross_entropy(model(Tensor(x[rows])), labels[rows]).backward()
            optimizer.step()
        return [parameter.numpy().copy() for parameter in model.parameters()]

    losses_of(single, theirs, map(mlp_batch, range(5)), **SGD)
    with World("inline") as world:
        results = world.run(2, program)
    for result in results:
        for parameter, their_parameter in zip(result, theirs.parameters(), strict=True):
            assert_near(parameter, their_parameter.detach())

"""Models: sizes, names of parameters, shapes, and that they learn."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from refusals import refused

from simparallel import manual_seed, models, nn, no_init_parameters, optim
from simparallel.autograd import Tensor, functions as F
from simparallel.errors import DTypeError, InputError, ShapeError


def num_parameters(model):
    return sum(prod(parameter.shape) for parameter in model.parameters())


def losses(model, shape, num_steps=8, lr=0.05):
    """Return the losses of some steps on one batch of noise."""
    generator = np.random.Generator(np.random.Philox(0))
    x = Tensor(generator.standard_normal(shape, dtype=np.float32))
    labels = generator.integers(0, 10, shape[0])
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    found = []
    for _ in range(num_steps):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_mlp_init_is_normal_with_zero_biases():
    manual_seed(0)
    model = models.mlp()
    linears = [layer for layer in model if isinstance(layer, nn.Linear)]

    assert num_parameters(model) == 669_706
    assert [layer.weight.shape for layer in linears] == [(512, 784), (512, 512), (10, 512)]
    assert all(not layer.bias.numpy().any() for layer in linears)
    assert abs(linears[0].weight.numpy().std() - 0.01) < 1e-4
    assert model(np.zeros((2, 1, 28, 28), np.float32)).shape == (2, 10)


@pytest.mark.parametrize("image_size", [28, 32])
def test_lenet_learns(image_size):
    manual_seed(0)
    model = models.lenet5(image_size=image_size)
    found = losses(model, (8, 1, image_size, image_size), num_steps=20)

    assert num_parameters(model) == 61_706
    assert found[-1] < 0.5 * found[0]


def test_lenet_refuses_other_images():
    with refused(InputError):
        models.LeNet5(image_size=30)


def test_gpt_takes_lists_arrays_and_single_sequences():
    model = models.gpt(7, 5, num_layers=1, num_heads=2, width=4)
    both = model(Tensor(np.array([[1, 2, 3], [4, 5, 6]]))).numpy()

    assert both.shape == (2, 3, 7)
    for tokens in ([[1, 2, 3], [4, 5, 6]], np.array([[1, 2, 3], [4, 5, 6]])):
        np.testing.assert_array_equal(model(tokens).numpy(), both)
    for tokens in ([1, 2, 3], np.array([1, 2, 3]), Tensor(np.array([1, 2, 3]))):
        np.testing.assert_allclose(model(tokens).numpy(), both[0], rtol=1e-5, atol=1e-7)
    for tokens in ([[[1]]], [0] * 6):
        with refused(ShapeError):
            model(tokens)
    with refused(DTypeError):
        model([0.5])


@pytest.mark.parametrize(
    ("make", "stem", "classes", "count"),
    [
        (models.resnet18, "imagenet", 1000, 11_689_512),
        (models.resnet50, "imagenet", 1000, 25_557_032),
        (models.resnet18, "cifar", 10, 11_173_962),
    ],
)
def test_resnets_match_torchvision_parameters(make, stem, classes, count):
    with no_init_parameters():  # their shapes alone
        model = make(classes, stem)
    names = {name: parameter.shape for name, parameter in model.named_parameters()}

    assert num_parameters(model) == count
    assert names["conv1.weight"] == ((64, 3, 7, 7) if stem == "imagenet" else (64, 3, 3, 3))
    assert {"bn1.bias", "layer1.0.conv1.weight", "layer4.1.bn2.weight", "fc.bias"} < set(names)
    assert names["layer2.0.downsample.0.weight"][2:] == (1, 1)
    assert ("layer1.0.downsample.0.weight" in names) == (make is models.resnet50)


def test_resnet18_learns():
    manual_seed(0)
    model = models.resnet18(10, stem="cifar")
    found = losses(model, (4, 3, 8, 8), num_steps=3, lr=0.01)

    assert found[-1] < found[0]
    assert model(np.zeros((1, 3, 16, 16), np.float32)).shape == (1, 10)


def test_resnet50_takes_images_of_any_size():
    model = models.resnet50(7)

    assert model(np.zeros((1, 3, 33, 20), np.float32)).shape == (1, 7)


def test_resnet_refuses_an_unknown_stem():
    with refused(InputError):
        models.resnet18(stem="mnist")


def test_gpt_parameter_count_and_tied_tables():
    width, vocabulary, length = 128, 256, 64
    model = models.gpt()
    block = 12 * width * width + 13 * width  # qkv, out, up, down with biases, two norms

    assert num_parameters(model) == (vocabulary + length) * width + 4 * block + 2 * width
    assert "tokens.weight" in dict(model.named_parameters())


def test_gpt_sees_no_future_token():
    manual_seed(0)
    model = models.gpt(vocabulary=11, length=8, num_layers=2, num_heads=2, width=16)
    tokens = np.arange(16).reshape(2, 8) % 11
    changed = tokens.copy()
    changed[:, 5:] = 3
    first, second = (model(Tensor(t)).numpy() for t in (tokens, changed))

    assert first.shape == (2, 8, 11)
    assert np.array_equal(first[:, :5], second[:, :5])
    assert not np.allclose(first[:, 5:], second[:, 5:])


def test_gpt_learns_a_sequence_by_heart():
    manual_seed(0)
    model = models.gpt(vocabulary=7, length=12, num_layers=2, num_heads=2, width=32)
    text = np.array([0, 3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 2])
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = F.cross_entropy(model(Tensor(text[None, :-1]))[0], text[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert loss.item() < 0.1
    assert model(Tensor(text[None, :-1])).numpy()[0].argmax(axis=1).tolist() == text[1:].tolist()


def test_gpt_refuses_bad_settings():
    with refused(InputError):
        models.gpt(width=10, num_heads=4)
    with refused(ShapeError):
        models.gpt(length=8)(Tensor(np.zeros((1, 9), int)))

"""The PyTorch front beside PyTorch: the same expression gives the same values, dtypes and gradients."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import backend
from simparallel.compat import torch as front
from simparallel.errors import InputError, RunFailedError, ShapeError

torch = pytest.importorskip("torch")

ROWS = np.array([[0.5, -1.0, 2.0, 0.25], [1.5, 1.5, -0.5, 3.0], [0.0, 2.5, 1.0, -2.0]], np.float32)
LABELS = np.array([0, 3, 1])
IMAGES = np.arange(50, dtype=np.float32).reshape(1, 2, 5, 5) % 7
CREATED = (
    "torch.arange(0)",
    "torch.arange(5)",
    "torch.arange(1, 6, 2)",
    "torch.arange(end=4)",
    "torch.arange(start=1, end=4)",
    "torch.arange(0, 1, 0.25)",
    "torch.arange(3, dtype=torch.float64)",
    "torch.zeros(2, 3)",
    "torch.zeros((2, 3), dtype=None)",
    "torch.zeros(size=(2, 3), dtype=torch.int64)",
    "torch.zeros(())",
    "torch.ones(np.int64(3))",
    "torch.ones(torch.tensor(3))",
    "torch.randint(1, (3,)), torch.randint(4, 5, (3,)), torch.randint(high=1, size=(2,))",
)
COMPUTED = (
    "torch.max(x), torch.min(x), torch.max(x, 1 - x), torch.min(x, 1 - x)",
    "torch.max(x, 1)",
    "torch.max(x, dim=0, keepdim=True)",
    "torch.min(x, 1)",
    "torch.clamp(x, min=0), torch.clamp(x, max=1), torch.clip(x, 0, 1)",
    "F.softmax(x), F.softmax(images[0]), F.log_softmax(x)",
    "F.cross_entropy(x, y), F.cross_entropy(x, torch.tensor([0, -100, 1]), ignore_index=-100)",
    "F.cross_entropy(x, y, torch.arange(1.0, 5.0))",
    "F.cross_entropy(x, F.softmax(x, 1).detach()), nn.CrossEntropyLoss()(x, F.softmax(x, 1).detach())",
    "nn.CrossEntropyLoss(torch.arange(1.0, 5.0))(x, y)",
    "F.nll_loss(x, y, torch.arange(1.0, 5.0)), nn.NLLLoss(ignore_index=-100)(x, torch.tensor([0, -100, 1]))",
    "F.one_hot(y), F.one_hot(y, 5)",
    "F.batch_norm(x, torch.ones(4), 2 * torch.ones(4))",
    "F.batch_norm(x, None, None, 2 * torch.ones(4), torch.ones(4), True)",
    "F.layer_norm(x, (4,), torch.arange(4.0), torch.ones(4))",
    "F.layer_norm(x, [3, 4]), F.rms_norm(x, (4,))",
    "F.max_pool2d(images, 2, 2, 0, 1, True), nn.MaxPool2d(2, 2, 0, 1, False, True)(images)",
    "F.avg_pool2d(images, 2, 2, 1, True, False), nn.AvgPool2d(2, 2, 1, True, False)(images)",
)
METHODS = (
    "torch.add(x, 1 - x, alpha=2), torch.sub(x, x * x, alpha=0.5), x.add(2, alpha=3), x.sub(x, alpha=-1)",
    "x.tril(), x.triu(1), torch.tril(x, -1), torch.triu(images, -2)",
    "x.diag(), x.diag(2), torch.diag(x, -1), x[0].diag(1), torch.diag(x[:, 0], -2)",
    "x.roll(1), x.roll((1, -2), (0, 1)), torch.roll(x, 5, 1), torch.roll(images, -3)",
    "x.norm(), x.norm(1, 0), x.norm(float('inf'), 1, True), torch.norm(x, 3, dim=1), x.norm('fro')",
    "torch.norm(x - x), torch.norm(x - x, 1, 0)",
    "torch.meshgrid(x[0], x[:, 0], indexing='xy'), torch.meshgrid([x[0], x[1]], indexing='ij')",
    "x.amax(1), torch.amin(x, 0, keepdim=True), x.amin((0, 1))",
    "x.mm(x.t()), torch.mm(x, torch.t(x)), images[0].bmm(images[0]), torch.bmm(images[0], images[0])",
    "x.matmul(x[0]), x[0].t(), x[0, 0].t()",
    "images.view_as(images.contiguous()), x[0].expand_as(x), x.t().contiguous().view(-1), x.repeat(2, 1), x.dim()",
    "x.eq(0.5), x.ne(y[:, None]), x.lt(1), x.le(1.5), x.gt(x[0]), x.ge(0)",
    "x.add(1), x.sub(x.mul(2)), x.neg(), torch.add(x, x), torch.mul(x, 2), torch.sub(x, 1)",
    "x.long(), x.int(), x.bool(), y.float(), y.double(), x.half()",
    "x.detach().clone().add_(1).mul_(2).sub_(x.detach()).div_(4).clamp_(max=1), x.detach().clone().zero_()",
    "torch.zeros(3, 4).copy_(x[0].detach()).masked_fill_(x.detach() > 1, 7), torch.ones(3).fill_(2)",
    "torch.ones(3, 4).scatter_reduce(1, torch.tensor([[0, 0, 3, 1]] * 3), x, 'sum')",
    "torch.LongTensor([1, 2]), torch.FloatTensor([[1], [2]]), torch.BoolTensor([0, 1]), torch.DoubleTensor(2, 3).shape",
    "torch.empty_like(x).shape, torch.inference_mode()(torch.relu)(x)",
)
LOADED = (
    "DataLoader([np.ones(2), np.zeros(2)], 2)",
    "DataLoader([1, 2, 3], 2)",
    "DataLoader([(1, np.ones(2)), (2, np.ones(2))], 2)",
    "DataLoader(['a', 'b'], 2)",
)


def test_functions_of_the_front_are_torchs():
    """The front takes all functions of simparallel but those it names, so one that PyTorch lacks would be seen here."""
    names = [*front.functions.__all__, *front.creation.__all__]
    assert {"relu", "zeros"} <= set(names)
    assert [name for name in names if not hasattr(torch, name)] == []


def evaluate(expression: str, torch) -> tuple[list, list]:
    """Return the Tensors of an expression in a framework, and the gradients of x and of the images."""
    x, images = (torch.tensor(array, requires_grad=True) for array in (ROWS, IMAGES))
    names = {"torch": torch, "np": np, "nn": torch.nn, "F": torch.nn.functional, "x": x, "images": images}
    found = flat(eval(expression, {**names, "y": torch.tensor(LABELS), "DataLoader": torch.utils.data.DataLoader}))
    for part in found:
        if getattr(part, "requires_grad", False):
            (part * part).sum().backward()
    return found, [leaf.grad for leaf in (x, images)]


def flat(value) -> list:
    if isinstance(value, (tuple, list)) or hasattr(value, "batch_size"):
        return [part for entry in value for part in flat(entry)]
    return [value]


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize("expression", CREATED + COMPUTED + METHODS + LOADED)
def test_expression_matches_torch(expression):
    ours, theirs = evaluate(expression, front), evaluate(expression, torch)
    for mine, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        if not isinstance(other, torch.Tensor):
            assert mine == (tuple(other) if isinstance(other, torch.Size) else other)
            continue
        assert str(mine.dtype) == str(other.dtype).removeprefix("torch.")
        assert mine.shape == tuple(other.shape)
        np.testing.assert_allclose(mine.detach().numpy(), other.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_arguments_without_a_meaning_are_refused():
    x, ones = front.tensor(ROWS), front.ones(4)
    with refused(InputError):
        front.nn.functional.batch_norm(x, ones, ones, training=True)
    with refused(InputError):
        front.nn.functional.batch_norm(x, None, None)
    with refused(ShapeError):
        front.nn.functional.layer_norm(x, (3,))
    with refused(InputError):
        front.nn.MaxPool2d(2, return_indices=True)


NUMBERS = st.integers(-20, 20) | st.integers(-80, 80).map(lambda n: n / 8)
DTYPES = st.sampled_from(("uint8", "int8", "int16", "int32", "int64", "float32", "float64"))


@given(NUMBERS, NUMBERS, NUMBERS, DTYPES | st.none())
def test_arange_matches_torch(start, end, step, dtype):
    """PyTorch drops the fractions of start and step for integers; a step of 0 leads nowhere."""
    kinds = [{} if dtype is None else {"dtype": getattr(module, dtype)} for module in (front, torch)]
    is_whole = "int" in (dtype or "") or (dtype is None and all(isinstance(n, int) for n in (start, end, step)))
    if (end - start) * step < 0 or (int(step) if is_whole else step) == 0:
        with refused(InputError):
            front.arange(start, end, step, **kinds[0])
        return
    found, expected = front.arange(start, end, step, **kinds[0]), torch.arange(start, end, step, **kinds[1])
    assert str(expected.dtype) == f"torch.{found.dtype}"
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


@given(NUMBERS, NUMBERS, st.integers(0, 9), DTYPES)
def test_linspace_matches_torch(start, end, steps, dtype):
    """Where the exact value is whole, PyTorch's processor may round to either side of it."""
    if dtype == "uint8":
        start, end = abs(start), abs(end)
    found = front.linspace(start, end, steps, getattr(front, dtype)).numpy()
    expected = torch.linspace(start, end, steps, dtype=getattr(torch, dtype)).numpy()
    assert found.dtype == expected.dtype
    if "int" in dtype:
        exact = [int(start) + Fraction(int(end) - int(start), max(steps - 1, 1)) * i for i in range(steps)]
        assert found.tolist() == [int(x) if x.denominator == 1 else y for x, y in zip(exact, expected, strict=True)]
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_linspace_refuses_what_a_dtype_cannot_hold():
    for bad in ((0, 300, 3, front.uint8), (-1, 5, 3, front.uint8), (0, 5, -1)):
        with refused(InputError):
            front.linspace(*bad)


def test_cuda_by_name_is_a_simulated_device(monkeypatch):
    """Without a GPU, `to("cuda")` means what `cuda()` means, for Tensors and modules."""
    # The stand-in for CuPy counts as a GPU.
    monkeypatch.setattr(backend, "_stand_ins", tuple)
    x, model = front.ones(2, requires_grad=True), front.nn.Linear(2, 1)
    for name in ("cuda", "cuda:0", front.device("cuda"), front.device("cuda:0")):
        assert x.to(name).device == x.cuda().device == front.zeros(1, device=name).device == "sim:0"
        assert model.to(name) is model
        assert model(x.to(name)).device == "sim:0"
    assert x.to("cuda:1").device == "sim:1"
    names = sp.launch(lambda: str(front.ones(1).to("cuda").device), world_size=2, transport="inline")
    assert names == ["sim:0", "sim:0"]
    with refused(RunFailedError), sp.Cluster(2, transport="inline") as cluster:
        cluster.run(lambda: front.ones(1).to("cuda:0") if sp.get_rank() else None)

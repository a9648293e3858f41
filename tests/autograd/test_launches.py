"""How many kernels a GPU would start, counted on the stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from stand_in.strict import launches, xp

import simparallel as sp
from simparallel.arrays.cuda import arrays as cuda_arrays
from simparallel.clock.recorder import current_recorder


def test_what_starts_a_kernel() -> None:
    x, host = xp.asarray(np.arange(6.0).reshape(2, 3)), np.ones(2)
    with launches() as names:
        x + 1, 1 - x, -x, x @ x.T, x == x
        xp.exp(x), xp.add(x, x, out=x), x.sum(), xp.concatenate([x] * 9), xp.concatenate([x, x])
        x[0] += 1
        x[xp.asarray(host).astype(int)]
        x[:, 0] = 2
        xp.add.at(x, (0, 1), 1.0)
        x.fill(0)
    arithmetic = ["add", "sub", "neg", "matmul", "eq"]
    functions = ["exp", "add", "sum", "concatenate", *["concatenate"] * 2]
    writes = ["iadd", "asarray", "astype", "getitem", "setitem", "add.at", "fill"]
    assert names == [*arithmetic, *functions, *writes]


def test_what_starts_none() -> None:
    """Views, shapes, memory that is only reserved, and arrays without elements."""
    x = xp.asarray(np.ones((2, 3)))
    with launches() as names:
        x.reshape(3, 2), x.T, x[1:], x[None], x.astype("float64", copy=False), xp.ascontiguousarray(x)
        xp.split(x, 2), xp.broadcast_to(x, (4, 2, 3)), xp.empty(3), xp.empty_like(x), xp.result_type(x, x)
        x[:0] + 1, xp.zeros(0)
    assert names == []


CONVOLUTIONS = {
    "pixels": (16, 24, {"kernel_size": 3, "padding": 1}),
    "strided": (16, 32, {"kernel_size": 3, "stride": 2}),
    "one pixel": (16, 16, {"kernel_size": 1}),
    "planes": (3, 8, {"kernel_size": 5}),
    "groups": (8, 8, {"kernel_size": 3, "groups": 4}),
}


def launches_of(channels: int, outputs: int, settings: dict[str, Any], batch: int, size: int) -> list[str]:
    """Return the launches of forward and backward, which sum squares: a sum of dy would begin with a broadcast."""
    layer = sp.nn.Conv2d(channels, outputs, bias=False, **settings)
    layer.weight.data = xp.asarray(layer.weight.data)
    x = sp.Tensor(xp.ones((batch, channels, size, size), "float32"), requires_grad=True)
    with launches() as names:
        (layer(x) ** 2).sum().backward()
    return names


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_of_many_images_starts_as_many(name: str) -> None:
    few, many = (launches_of(*CONVOLUTIONS[name], *sizes) for sizes in ((2, 9), (24, 41)))
    assert len(few) == len(many)
    assert "matmul" in many


@pytest.mark.parametrize("name", ["pixels", "planes", "groups"])
def test_convolution_takes_parts_for_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole = launches_of(*CONVOLUTIONS[name], 4, 12)
    monkeypatch.setattr(cuda_arrays, "CHUNK_BYTES", 1 << 16)
    assert len(launches_of(*CONVOLUTIONS[name], 4, 12)) > len(whole)


def test_gathered_windows_leave_room_on_a_small_device() -> None:
    def program() -> None:
        x = sp.Tensor(np.ones((24, 16, 64, 64), np.float32), requires_grad=True)
        (sp.nn.Conv2d(16, 24, 3, padding=1)(x) ** 2).sum().backward()

    sp.launch(program, world_size=1, transport="inline", array="cupy", device_memory="90MB")


def test_attention_to_more_keys_starts_as_many() -> None:
    def names_of(length: int) -> list[str]:
        q, k, v = (sp.Tensor(xp.ones((2, 2, length, 4), "float32"), requires_grad=True) for _ in range(3))
        for _ in range(2):  # the first call makes the mask, which the others share
            with launches() as names:
                (sp.functions.scaled_dot_product_attention(q, k, v, is_causal=True) ** 2).sum().backward()
        return names

    few, many = names_of(3), names_of(64)
    assert len(few) == len(many)
    assert "arange" not in many


def attention(length: int, queries: int, settings: dict[str, Any], dtype: str) -> list[np.ndarray]:
    """Return the result and the gradients of an attention in float64, for a mask that hides some keys, too."""
    rng = np.random.default_rng(0)
    shapes = (2, 3, queries, 4), (3, length, 4), (2, 1, length, 5)
    inputs = [sp.Tensor(xp.asarray(rng.standard_normal(shape)), requires_grad=True) for shape in shapes]
    if dtype:
        values = rng.standard_normal((2, 1, queries, length))
        mask = sp.Tensor(xp.asarray(values > 0 if dtype == "bool" else values), requires_grad=dtype == "float64")
        settings = {**settings, "attn_mask": mask}
        inputs += [mask] if dtype == "float64" else []
    y = sp.functions.scaled_dot_product_attention(*inputs[:3], **settings)
    y.backward(xp.asarray(rng.standard_normal(y.shape)))
    return [y.numpy(), *(tensor.grad.numpy() for tensor in inputs)]


@pytest.mark.parametrize("mask", ["", "bool", "float64"])
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"scale": 0.25}], ids=str)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2000))
def test_attention_in_blocks_is_the_same(
    mask: str, settings: dict[str, Any], length: int, queries: int, chunk_bytes: int
) -> None:
    whole = attention(length, queries, settings, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_arrays, "CHUNK_BYTES", chunk_bytes)
        for found, expected in zip(attention(length, queries, settings, mask), whole, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_attention_in_blocks_needs_less_memory() -> None:
    """All scores take 12 MB. A small device has room for blocks of them."""

    def program() -> int:
        shape = (12, 4, 256, 4)
        q, k, v = (sp.Tensor(np.ones(shape, np.float32), requires_grad=True) for _ in range(3))
        (sp.functions.scaled_dot_product_attention(q, k, v, is_causal=True) ** 2).sum().backward()
        return current_recorder().memory.peak

    settings = {"world_size": 1, "transport": "inline", "array": "cupy"}
    (whole,) = sp.launch(program, **settings)
    (blocks,) = sp.launch(program, **settings, device_memory="8MB")
    assert blocks < whole / 2


def small_gpt() -> sp.nn.Module:
    return sp.models.gpt(64, 32, num_layers=2, num_heads=2, width=32)


# Model, inputs, labels, optimizer, kernels of a step.
STEPS: dict[str, tuple[Any, Any, Any, Any, int]] = {
    "LeNet-5": (sp.models.lenet5, np.ones((8, 1, 28, 28), np.float32), np.zeros(8, int), sp.optim.SGD, 75),
    "ResNet-18": (sp.models.resnet18, np.ones((4, 3, 32, 32), np.float32), np.zeros(4, int), sp.optim.SGD, 695),
    "GPT": (small_gpt, np.zeros((4, 32), int), np.zeros((4, 32), int), sp.optim.AdamW, 190),
}


@pytest.mark.parametrize("name", STEPS)
def test_step_starts_few_kernels(name: str) -> None:
    """A change of these numbers is no error: lower them, or say why they rise."""
    make, x, labels, optimizer_type, expected = STEPS[name]
    model = make().to("cuda:0")
    optimizer = optimizer_type(model.parameters(), lr=0.1)
    inputs, targets = (sp.Tensor(array).to("cuda:0") for array in (x, labels.reshape(-1)))
    # The first step makes the state and the arrays that calls share.
    for _ in range(2):
        with launches() as names:
            optimizer.zero_grad()
            scores = model(inputs)
            sp.functions.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets).backward()
            optimizer.step()
    assert len(names) == expected

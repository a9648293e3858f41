"""How many kernels a GPU would start, counted on the stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import simparallel as sp
from simparallel.autograd.kernels import im2col
from simparallel.testing.strict import launches, xp


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
    monkeypatch.setattr(im2col, "GATHERED_ON_GPU_BYTES", 1 << 16)
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

    few, many = names_of(3), names_of(70)
    assert len(few) == len(many)
    assert "arange" not in many

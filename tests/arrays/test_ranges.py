"""NVTX ranges: their names, their nesting, also after errors, and none unless they are switched on."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from gpu_facts import needs_cupy
from refusals import refused
from stand_in import strict, strict_cuda

import simparallel as sp
from simparallel.arrays.cuda.ranges import VARIABLE
from simparallel.arrays.seam import named_range
from simparallel.errors import InputError, ShapeError

ON_GPU: dict[str, Any] = {"world_size": 1, "transport": "inline", "array": "cupy"}


def tree(noted: list[str]) -> list[Any]:
    """Return the ranges as nested lists: [name, [inner range ...], ...]."""
    open_lists: list[list[Any]] = [[]]
    for name in noted:
        if name:
            inner = [name]
            open_lists[-1].append(inner)
            open_lists.append(inner)
        else:
            open_lists.pop()
    assert len(open_lists) == 1, "a range was not ended"
    return open_lists[0]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(VARIABLE, "1")

    def run(program: Any, **settings: Any) -> list[Any]:
        with strict.ranges() as noted:
            sp.launch(program, **{**ON_GPU, **settings})
        return tree(noted)

    return run


def step() -> None:
    model, images = sp.nn.Linear(4, 3), np.ones((2, 4), np.float32)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    with sp.record_function("step"):
        loss = sp.functions.cross_entropy(model(sp.Tensor(images)), np.zeros(2, np.int64))
        loss.backward(check_finite=False)
        with sp.record_function("update"):
            sp.all_reduce(model.weight.grad)
            optimizer.step()
            optimizer([None, None])


@pytest.mark.parametrize("record", ["off", "summary"])
def test_operations_are_shown_as_ranges(shown: Any, record: str) -> None:
    expected = [
        "step", ["Linear"], ["CrossEntropy"], ["CrossEntropy.backward"], ["Linear.backward"],
        ["update", ["all_reduce"], ["SGD"], ["SGD"]],
    ]  # fmt: skip
    assert shown(step, record=record) == [expected]


class AbstractRefusal(sp.ops.Op):
    """An op whose name begins with Abstract, so that it is none of the library's."""

    rule = "... -> ..."

    def __init__(self, fails_backward: bool = False) -> None:
        self.fails_backward = fails_backward

    def forward(self, ctx: Any, x: Any) -> Any:
        if not self.fails_backward:
            raise ShapeError("refused")
        return x + 1

    def backward(self, ctx: Any, dy: Any) -> Any:
        raise ShapeError("refused")


def failing_step() -> None:
    x = sp.Tensor(np.ones(3, np.float32), requires_grad=True)
    with pytest.raises(ShapeError):
        AbstractRefusal()(x)
    with pytest.raises(ShapeError):
        AbstractRefusal(True)(x).sum().backward()
    optimizer = sp.optim.SGD([x], lr=0.1)
    with pytest.raises(InputError):
        optimizer([])
    x.sum().backward(check_finite=False)
    optimizer.update = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        optimizer.step()
    with pytest.raises(ValueError, match="mine"):
        marked(x)


@sp.record_function("mark")
def marked(x: sp.Tensor) -> None:
    with named_range("block"):
        sp.functions.relu(x)
        raise ValueError("mine")


def test_errors_leave_no_range_open(shown: Any) -> None:
    found = shown(failing_step)
    assert found[:5] == [
        ["AbstractRefusal"],
        ["AbstractRefusal"],
        ["Sum"],
        ["Sum.backward"],
        ["AbstractRefusal.backward"],
    ]
    assert found[5:] == [["SGD"], ["Sum"], ["Sum.backward"], ["SGD"], ["mark", ["block", ["ReLU"]]]]


def test_open_range_is_found() -> None:
    """Red control: `tree` finds a range that is left open."""
    with pytest.raises(AssertionError, match="not ended"):
        tree(["a", "b", ""])


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with strict.ranges() as noted:
        sp.launch(step, **ON_GPU)
    assert noted == []


def test_run_without_a_gpu_shows_nothing(shown: Any) -> None:
    assert shown(step, array="numpy") == []


def test_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with refused(sp.errors.RunFailedError):
        sp.launch(step, **ON_GPU)


def test_cupy_without_nvtx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(strict_cuda.nvtx, "available", False)
    with refused(sp.errors.RunFailedError):
        sp.launch(step, **ON_GPU)


@needs_cupy
def test_ranges_of_cupy_have_these_names() -> None:
    nvtx = pytest.importorskip("cupy", minversion="14.2").cuda.nvtx
    assert isinstance(nvtx.available, bool)
    assert nvtx.RangePush.__doc__.startswith("RangePush(message, int id_color=-1)")
    assert list(inspect.signature(strict_cuda.nvtx.RangePush).parameters) == ["message", "id_color"]
    # Without a profiler, these calls do nothing.
    nvtx.RangePush("name")
    nvtx.RangePop()

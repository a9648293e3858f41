"""The picture of a tape: a box for each tensor behind the result, numbered in the order of forward."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Annotation
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError
from simparallel.view import plot_tape


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def boxes(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if not isinstance(text, Annotation)]


def test_boxes_and_arrows_of_a_tape() -> None:
    x = sp.Tensor([1.0, 2.0], requires_grad=True)
    w = sp.Tensor([3.0, 4.0], requires_grad=True)
    data = sp.Tensor([5.0, 6.0])
    ax = plot_tape((x * w + x * data).sum(), {"x": x}, title="A tape")
    assert sorted(boxes(ax)) == sorted(
        ["x\n(2,)", "leaf\n(2,)", "data\n(2,)", "0: Mul\n(2,)", "1: Mul\n(2,)", "2: Add\n(2,)", "3: Sum\n()"]
    )
    assert sum(isinstance(text, Annotation) for text in ax.texts) == 2 + 2 + 2 + 1
    assert ax.get_title(loc="left") == "A tape"


def test_inputs_stand_left_of_their_results() -> None:
    x = sp.Tensor([1.0], requires_grad=True)
    ax = plot_tape(((x * 2).tanh() + x).sum())
    places = {text.get_text().split("\n")[0]: text.get_position()[0] for text in ax.texts if text.get_text()}
    row = [places[name] for name in ("leaf", "0: Mul", "1: Tanh", "2: Add", "3: Sum")]
    assert row == sorted(row)
    assert len(set(row)) == 5


def test_tape_without_ops_is_refused() -> None:
    with refused(InputError):
        plot_tape(sp.Tensor([1.0], requires_grad=True))
    x = sp.Tensor([1.0], requires_grad=True)
    for _ in range(61):
        x = x + x
    with refused(InputError):
        plot_tape(x)

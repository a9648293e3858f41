"""The gradient of a redistributed tensor is summed on its way back: half the bytes of a whole sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import simparallel as sp

LAYOUT = sp.Layout((2, 2), ("dp", "tp"))
DIMS = ["None", "dp", "tp", ("dp", "tp"), ("tp", "dp")]
# Ways to use a redistributed weight: how often, and with what around it.
USES: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "once": lambda x, w, seen: x @ w,
    "twice": lambda x, w, seen: x @ w + (x * 2.0) @ w,
    "with itself": lambda x, w, seen: (x @ w) * w.sum(),
    "with a hook": lambda x, w, seen: (w.register_hook(lambda g: seen.append(g.full_tensor().numpy())), x @ w)[1],
    "in a checkpoint": lambda x, w, seen: sp.nn.checkpoint(lambda x, w: x @ w, x, w),
    "reshaped": lambda x, w, seen: x @ w.reshape(4, 16).reshape(8, 8),
}


def _arrays(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(-4, 5, (8, 8)).astype(np.float64), draw.integers(-4, 5, (8, 8)).astype(np.float64)


def _step(use: str, stored: tuple[Any, ...], target: tuple[Any, ...], of_x: tuple[Any, ...], explicit: bool) -> Any:
    """Return the gradient of a weight that is stored in one layout and used in another, and what a hook saw of it."""
    x, w = _arrays(1)
    seen: list[Any] = []
    weight = sp.distribute_tensor(w, LAYOUT(*stored), requires_grad=True)
    inputs = sp.distribute_tensor(x, LAYOUT(*of_x))
    used = weight.redistribute(LAYOUT(*target)) if explicit else weight
    for _ in range(2):  # the second backward through the same nodes leaves nothing behind
        loss = USES[use](inputs, used, seen).sum()
        loss.backward(retain_graph=True)
    return weight.grad.full_tensor().numpy(), seen


def _alone(use: str) -> Any:
    x, w = _arrays(1)
    weight = sp.Tensor(w, requires_grad=True)
    whole: list[Any] = []
    uses = {**USES, "with a hook": USES["once"]}
    for _ in range(2):
        uses[use](sp.Tensor(x), weight, whole).sum().backward()
    return weight.grad.numpy()


@pytest.mark.parametrize("use", USES)
@given(st.data(), st.booleans())
def test_gradients_are_those_of_one_device(use, data, explicit):
    def drawn() -> tuple[Any, ...]:
        first = data.draw(st.sampled_from(DIMS))
        taken = {first} if isinstance(first, str) else set(first)
        left = [d for d in DIMS if not taken & ({d} if isinstance(d, str) else set(d)) or d == "None"]
        return first, data.draw(st.sampled_from(left))

    layouts = drawn(), drawn(), drawn()
    expected = _alone(use)
    for found, seen in sp.launch(_step, (use, *layouts, explicit), world_size=4, transport="inline"):
        np.testing.assert_array_equal(found, expected)
        for gradient in seen:
            np.testing.assert_array_equal(gradient, expected / 2)


def _traffic(uses_twice: bool) -> tuple[np.ndarray, list[tuple[str, int]]]:
    x, w = _arrays(2)
    inputs = sp.distribute_tensor(x, sp.Layout((4,), ("dp",))("dp", "None"))
    weight = sp.distribute_tensor(w, sp.Layout((4,), ("dp",))("dp", "None"), requires_grad=True)
    used = weight.redistribute(sp.Layout((4,), ("dp",))("None", "None"))
    loss = (inputs @ used).sum() + (used * 3.0).sum() if uses_twice else (inputs @ used).sum()
    recorder = sp.clock.recorder.current_recorder()
    before = len(recorder.events)
    loss.backward()
    found = [(e.name, e.sent_bytes) for e in recorder.events[before:] if e.kind == "collective" and len(e.group) > 1]
    return weight.grad.full_tensor().numpy(), found


def test_way_back_moves_half_the_bytes():
    size_bytes, x = 8 * 8 * 8, _arrays(2)[0]
    for gradient, traffic in sp.launch(_traffic, (False,), world_size=4, transport="inline"):
        np.testing.assert_array_equal(gradient, x.sum(0)[:, None] + np.zeros(8))
        assert traffic == [("reduce_scatter", size_bytes * 3 // 4)]
    # The other use is whole on every rank, so the addends of this one are summed before they meet it.
    for gradient, traffic in sp.launch(_traffic, (True,), world_size=4, transport="inline"):
        np.testing.assert_array_equal(gradient, x.sum(0)[:, None] + 3 + np.zeros(8))
        assert traffic == [("all_reduce", 2 * size_bytes * 3 // 4)]

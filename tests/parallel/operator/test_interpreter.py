"""Interpreters come with tensors and blocks: an import changes no op, and copies of a tensor keep theirs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel.errors import LayoutError
from simparallel.nn.deferred import DRAWING
from simparallel.parallel import distribute_tensor, implicit_replication, no_init_parameters
from simparallel.parallel.operator.interpreter import SHARDED

IMPORT = """
import sys
from types import ModuleType
import simparallel as sp

def state():
    owners = [module for name, module in sys.modules.items() if name.startswith("simparallel.autograd")]
    owners += [sp.Tensor, sp.ops.Op, *sp.ops.Op.registry.values()]
    return {
        (owner.__name__, name): id(value)
        for owner in owners for name, value in vars(owner).items() if not isinstance(value, ModuleType)
    }

def changes():
    return sorted(key for key, value in state().items() if key[0] in names and before.get(key) != value)

before = state()
names = {name for name, _ in before}
import simparallel.parallel
print(changes())
sp.ops.Op.rule = sp.Tensor.cut = None
print(changes())
"""


@pytest.mark.process
def test_importing_parallel_changes_no_op() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[('Op', 'rule'), ('Tensor', 'cut')]"], done.stderr


@pytest.mark.parametrize("interpreter", [SHARDED, DRAWING])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_the_same_interpreter(interpreter: Any, copied: Callable[[Any], Any]) -> None:
    assert copied(interpreter) is interpreter


def test_tensors_carry_their_interpreter(inline) -> None:
    def program() -> list[Any]:
        x = distribute_tensor(np.ones((2, 2)), sp.Layout((2,), ("dp",))("dp", "None"), requires_grad=True)
        y = x * x
        y.sum().backward()
        tensors = [x, y, y.detach(), x.grad, copy.deepcopy(x), y.full_tensor(), y.to_local(), sp.Tensor([1.0])]
        return [tensor.interpreter for tensor in tensors]

    for found in inline.run(2, program):
        assert found == [SHARDED] * 5 + [None] * 3


@pytest.mark.parametrize("is_cut", [False, True])
def test_op_draws_what_it_needs(inline, is_cut: bool) -> None:
    """Beside a sharded input, a parameter without data is drawn by slices, whichever comes first."""

    def program() -> Any:
        drawn: list[int] = []

        def recipe(start: int, count: int) -> np.ndarray:
            drawn.append(count)
            return np.arange(start, start + count)

        with no_init_parameters():
            w = sp.nn.Parameter(np.empty((4, 2)))
            w.initial = recipe
        assert w.interpreter is DRAWING
        x = sp.Tensor(np.ones((2, 2)))
        if is_cut:
            x = distribute_tensor(x, sp.Layout((2,), ("dp",))("None", "None"))
        with implicit_replication():
            y = sp.ops.MatMul().shard(((2, 1), (1, 1)))(w, x) if is_cut else sp.ops.MatMul()(w, x)
        return sum(drawn), w.initial, (y.full_tensor() if is_cut else y).numpy().tolist()

    expected = (np.arange(8).reshape(4, 2) @ np.ones((2, 2))).tolist()
    for count, left, y in inline.run(2, program):
        assert (count, left, y) == (4 if is_cut else 8, None, expected)


def _trained(make):
    """Train one parameter for two steps; return its layouts and its elements."""
    weight = sp.nn.Parameter(make(np.arange(12.0).reshape(6, 2)), name="w")
    optimizer = sp.optim.SGD([weight], 0.25, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()
    layouts = weight.layout, weight.grad.layout, sp.Tensor(weight).layout
    return layouts, weight.full_tensor().numpy().tolist()


def test_a_parameter_of_a_sharded_tensor_is_sharded():
    layout = sp.Layout((2,), ("a",))("a", "None")

    _, whole = _trained(lambda x: x)

    def run():
        return _trained(lambda x: distribute_tensor(x, layout))

    for layouts, found in sp.launch(run, world_size=2, transport="inline"):
        assert layouts == (layout,) * 3
        assert found == whole


def test_a_parameter_of_an_unfinished_sum_is_refused():
    def run():
        layout = sp.Layout((2,), ("a",))
        x = distribute_tensor(np.ones((2, 4)), layout("None", "a"))
        w = distribute_tensor(np.ones((4, 2)), layout("a", "None"))
        y = x @ w
        with refused(LayoutError):
            sp.nn.Parameter(y)
        return sp.nn.Parameter(y.redistribute(layout("None", "None"))).full_tensor().numpy().tolist()

    assert sp.launch(run, world_size=2, transport="inline") == [[[4.0, 4.0]] * 2] * 2


def test_recomputed_part_leaves_its_plain_input(inline) -> None:
    """Its input is a leaf of the second run, but no parameter: it is neither cut nor copied."""

    def program() -> Any:
        linear = sp.nn.Linear(3, 4, dtype=np.float64)
        sp.parallel.distribute_module(linear, sp.Layout((2,), ("tp",)), {"weight": ("tp", "None")})
        x = sp.Tensor(np.ones((2, 3)), requires_grad=True) * 2
        data = x.data
        with implicit_replication():
            sp.nn.checkpoint(linear, x).sum().backward()
        return x.placement, x.data is data

    assert inline.run(2, program) == [(None, True)] * 2

"""Only `arrays`, and the medium of GPUs in `comm`, know where an array is."""

from __future__ import annotations

import ast
import operator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from stand_in.strict import launches

import simparallel
from simparallel.arrays.captures import running
from simparallel.arrays.host.arrays import HostArrays
from simparallel.arrays.seam import arrays_of, device_of, for_each, kernels_of, totals
from simparallel.backend import in_memory_order, to_host
from simparallel.base import dry_arrays

ROOT = Path(simparallel.__file__).parent
SEAM = "arrays/", "comm/gpu/"
QUESTIONS = {"is_on_gpu", "gpu_of"}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Each file of the package, parsed."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def forks(tree: ast.AST) -> list[str]:
    """Return the places that ask for the type of an array."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2]
    return [text for call in calls if "ndarray" in (text := ast.unparse(call)) and text.startswith("isinstance(")]


def questions(tree: ast.AST) -> list[str]:
    """Return the places that ask for a GPU, and the imports of the GPU's own files."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("simparallel.arrays.cuda"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Name) and node.id in QUESTIONS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith((".gpu", "running.device")):
            found.append(ast.unparse(node))
    return found


def test_autograd_does_not_fork_on_types_of_arrays(trees: dict[str, ast.Module]) -> None:
    """What is left: an argument that may be an array, and the value of a loss, which every step reads."""
    found = {file: places for file, tree in trees.items() if file.startswith("autograd/") and (places := forks(tree))}
    assert sum(map(len, found.values())) <= 2, found


def test_kernels_do_not_fork_on_types_of_arrays(trees: dict[str, ast.Module]) -> None:
    found = {file: places for file, tree in trees.items() if file.startswith("arrays/") and (places := forks(tree))}
    assert sum(map(len, found.values())) <= 1, found


def test_few_files_ask_for_gpus(trees: dict[str, ast.Module]) -> None:
    """The array libraries, ranks and calibrations of GPUs, and captured steps."""
    found = {file: q for file, tree in trees.items() if not file.startswith(SEAM) and (q := questions(tree))}
    assert len(found) <= 5, found


def test_forks_and_questions_are_found() -> None:
    source = (
        "from simparallel.arrays.cuda.device import Gpu\nif gpu_of(x) or not isinstance(x, np.ndarray) or self.gpu: ..."
    )
    assert len(forks(ast.parse(source))) == 1
    assert len(questions(ast.parse(source))) == 3


def test_cupy_is_not_changed(trees: dict[str, ast.Module]) -> None:
    """No file of the package sets an attribute of an array library."""
    targets = [
        ast.unparse(target)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    assert [target for target in targets if target.startswith(("xp.", "cupy.", "np.", "self.xp."))] == []


def test_kernels_of_each_library(arrays: Any) -> None:
    x, here, dry = arrays.on_device(np.ones(3)), np.ones(3), dry_arrays.empty((3,))
    assert [type(arrays_of(array)) is HostArrays for array in (x, here, dry)] == [False, True, True]
    assert arrays_of(here, x) is arrays_of(x) is kernels_of[arrays.xp]
    assert (device_of(x), device_of(here), device_of(dry)) == ("cuda:0", None, None)
    assert running.device is None


def double(xp: Any, x: Any, factor: float) -> None:
    x *= factor


def itself(xp: Any, x: Any) -> Any:
    return x


@given(st.permutations(range(3)), st.tuples(*[st.integers(2, 4)] * 3), st.sampled_from(["alike", "spread", "rows"]))
def test_elements_are_visited_in_memory_order(arrays: Any, axes: list[int], sizes: tuple[int, ...], other: str) -> None:
    """Kernels visit elements in C order, so they get views in which that is the order of memory."""
    back = np.argsort(axes).tolist()

    def put(x: np.ndarray) -> Any:
        return arrays.on_device(np.ascontiguousarray(x.transpose(axes))).transpose(back)

    def noted(function: Any) -> Any:
        def noting(x: Any, *others: Any) -> Any:
            orders.append(x.flags.c_contiguous)
            return function(x, *others)

        return noting

    orders: list[bool] = []
    x, y = np.arange(prod(sizes)).reshape(sizes) % 7.0, np.arange(prod(sizes)).reshape(sizes) % 5.0
    if other == "spread":
        y = y[:1, :1, :1]
        given = [put(x), arrays.xp.broadcast_to(arrays.on_device(y), sizes)]
    else:
        y = y[0] if other == "rows" else y
        given = [put(x), arrays.on_device(y) if other == "rows" else put(y)]
    z = in_memory_order(noted(arrays.xp.add), *given)
    assert (orders, z.strides) == ([True], given[0].strides)
    arrays.assert_equal(z, x + y)
    elementwise = kernels_of[arrays.xp].elementwise
    for found in (elementwise(operator.add, *given), elementwise(operator.iadd, *given), given[0]):
        arrays.assert_equal(found, x + y)
    padded = arrays.xp.zeros([size + 2 for size in sizes])
    elementwise(arrays.xp.copyto, padded[1:-1, 1:-1, 1:-1], given[0])
    arrays.assert_equal(padded, np.pad(x + y, 1))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=4))
def test_arrays_in_several_places_are_computed(arrays: Any, parts: list[tuple[int, bool]]) -> None:
    given = [np.arange(size, dtype=np.float32) for size, _ in parts]
    mixed = [arrays.on_device(x) if is_away else x.copy() for x, (_, is_away) in zip(given, parts, strict=True)]
    for_each(double, [([x], [2.0]) for x in mixed])
    assert totals(mixed, lambda x: x.sum().item(), itself) == [2 * x.sum() for x in given]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=2), *[st.integers(1, 5)] * 3, *[st.booleans()] * 2)
def test_stacks_of_transposed_matrices_are_multiplied(
    arrays: Any, stack: list[int], m: int, k: int, n: int, turns_a: bool, turns_b: bool
) -> None:
    """By one kernel, without copies."""
    a, b = np.arange(prod(stack) * m * k).reshape(*stack, m, k) % 5.0, np.arange(k * n).reshape(k, n) % 7.0
    b = np.stack([b, b + 1])[np.arange(prod(stack)) % 2].reshape(*stack, k, n)
    x, y = (
        arrays.on_device(np.ascontiguousarray(z.swapaxes(-1, -2))).swapaxes(-1, -2) if turns else arrays.on_device(z)
        for z, turns in ((a, turns_a), (b, turns_b))
    )
    with launches() as names:
        found = kernels_of[arrays.xp].matmul(x, y)
    np.testing.assert_array_equal(to_host(found), a @ b, strict=True)
    assert arrays.name == "cupy" or names == ["matmul"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(data=st.data())
def test_kernels_agree(arrays: Any, dtype: str, data: st.DataObject) -> None:
    """Each kernel gives the same on the host and on a GPU, exactly on small integers."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, columns, taps = (data.draw(st.integers(1, 5)) for _ in range(3))
    x, y, z = (rng.integers(-3, 4, (2, rows, columns)).astype(dtype) for _ in range(3))
    ids = rng.integers(0, rows, rows)

    def results(kernels: HostArrays, put: Any) -> list[Any]:
        a, b, dy, at = put(x), put(y), put(z), put(ids)
        tap_list, grads = [put(x + i) for i in range(taps)], [put(np.zeros_like(x)) for _ in range(taps)]
        largest = kernels.window_maxima(tap_list)
        kernels.give_to_first(dy, largest, tap_list, grads, is_apart)
        total, spread = put(np.zeros((rows, columns), dtype)), put(np.zeros((rows, columns), dtype))
        kernels.add_rows(total, at, put(x[0]), put(inside))
        kernels.add_at(spread, (at, slice(None)), put(y[0]))
        found = [kernels.masked(a, b > 0), kernels.where_positive(a, b), largest, *grads]
        found += [total, spread, kernels.unbroadcast(a, (1, columns)), kernels.einsum("bij,bkj->bik", a, b)]
        found += [kernels.sum_rows(a[0]), kernels.channel_sums(a)]
        return [*found, kernels.column_softmax_gradient(a + 0, b), kernels.product(a[0], b[0].T)]

    is_apart, inside = data.draw(st.booleans()), np.ones(rows, bool)
    expected = results(kernels_of[np], lambda array: array.copy())
    found = results(kernels_of[arrays.xp], arrays.on_device)
    arrays.assert_all_equal(found, expected)

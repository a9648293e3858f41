"""Device matrices, layouts of tensors, and legal strategies of ops."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from simparallel.autograd.op import Op
from simparallel.layout.candidates import candidates
from simparallel.layout.layout import Layout
from simparallel.testing.strategies.values import Draw, Shape


@st.composite
def device_matrices(draw: Draw, device_num: int | None = None, *, max_axes: int = 3, max_size: int = 3) -> Shape:
    """Draw shapes of device matrices, such as (2, 1, 3).

    Args:
        draw: supplied by Hypothesis.
        device_num: number of devices, as a product of the sizes; by default any sizes of 1 to `max_size`.
        max_axes: maximum number of axes; with `device_num` there is at least one.
        max_size: largest size of an axis; unused with `device_num`.

    Example:
        >>> from hypothesis import given
        >>> from simparallel.testing.strategies import device_matrices
        >>> @given(device_matrices(8))
        ... def test_mesh(matrix):
        ...     assert sp.Mesh(matrix, tuple("abc"[: len(matrix)])).size == 8
    """
    if device_num is None:
        return tuple(draw(st.lists(st.integers(1, max_size), max_size=max_axes)))
    matrix: list[int] = []
    left = device_num
    for _ in range(draw(st.integers(0, max_axes - 1))):
        matrix.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= matrix[-1]
    return (*matrix, left)


@st.composite
def layouts(
    draw: Draw, shape: Shape, device_matrix: Shape | None = None, *, names: Sequence[str] | None = None,
    divides: bool = False, permuted: bool = True,
) -> Layout:  # fmt: skip
    """Draw layouts of a tensor: axes cut dims in any order, and some may cut none.

    Args:
        draw: supplied by Hypothesis.
        shape: shape of the tensor.
        device_matrix: sizes of the axes; by default any of up to three axes.
        names: of the axes of `device_matrix`; by default "axis0", ...
        divides: every cut divides its dim, as `shard` requires; by default slices may be unequal, or empty.
        permuted: the ranks may have any order in the matrix.

    Example:
        >>> from hypothesis import given
        >>> from simparallel.testing.strategies import layouts
        >>> @given(layouts((4, 6)))
        ... def test_slices_cover_the_tensor(layout):
        ...     held = np.zeros((4, 6), bool)
        ...     for rank in layout.rank_list:
        ...         held[layout.slices(rank, (4, 6))] = True
        ...     assert held.all()
    """
    matrix = draw(device_matrices()) if device_matrix is None else device_matrix
    names = [f"axis{i}" for i in range(len(matrix))] if names is None else names
    rank_list = draw(st.permutations(range(prod(matrix)))) if permuted and draw(st.booleans()) else None
    dims: list[tuple[str, ...]] = [()] * len(shape)
    left = list(shape)
    for name, size in draw(st.permutations(list(zip(names, matrix, strict=True)))):
        free = [d for d, n in enumerate(left) if not divides or (n and n % size == 0)]
        dim = draw(st.sampled_from([None, *free]))
        if dim is not None:
            dims[dim] = (*dims[dim], name)
            left[dim] //= size
    entries = ["None" if not axes else axes[0] if len(axes) == 1 else axes for axes in dims]
    return Layout(matrix, tuple(names), rank_list)(*entries)


@st.composite
def strategies_for(
    draw: Draw, op: Op, shapes: Sequence[Shape], device_num: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Draw legal strategies of an op: the argument of `op.shard` for inputs of these shapes.

    Args:
        draw: supplied by Hypothesis.
        op: such as `sp.ops.MatMul()`.
        shapes: global shapes of its inputs.
        device_num: number of devices; by default 1 to 8. A strategy may use fewer: the others hold replicas.

    Example:
        >>> from hypothesis import given
        >>> from simparallel.testing.strategies import strategies_for
        >>> @given(strategies_for(sp.ops.MatMul(), [(4, 6), (6, 8)], device_num=4))
        ... def test_matmul(strategy):
        ...     assert sp.ops.MatMul().shard(strategy).plan((4, 6), (6, 8), device_num=4)
    """
    devices = draw(st.integers(1, 8)) if device_num is None else device_num
    rule = op.rule_for(*map(tuple, shapes))
    found = candidates(rule, tuple(map(tuple, shapes)), devices, op.repeat, op.axis_order)
    return draw(st.sampled_from([candidate.in_strategy for candidate in found]))

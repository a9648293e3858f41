"""The autograd graph behind a Tensor, also called its tape: which op made it from which tensors, back to the leaves."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from simparallel.errors import InputError
from simparallel.view.style import GREEN, ORANGE, SKY, arrow, axes, head, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simparallel.autograd import Tensor
    from simparallel.autograd.tape import Node

# Width and height of a box, and the distances between boxes.
_BOX, _STEP = (1.7, 0.62), (2.5, 1.0)
_MOST_BOXES = 60


def plot_tape(
    root: Tensor, names: Mapping[str, Tensor] | None = None, *, title: str | None = None, ax: Any = None
) -> Axes:
    """Draw the autograd graph: a box for each op in the order of forward, from left to right, and one for each leaf.

    Backward runs along the arrows in the other direction, from the highest number to the lowest.

    Args:
        root: the result, such as a loss, before its backward, which frees the graph.
        names: name -> leaf, such as {"weight": w} or `dict(model.named_parameters())`.
        title: title of the axes.
        ax: axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        InputError: the graph behind `root` is empty, or has more than 60 boxes.
    """
    depths = _depths(root)
    if len(depths) < 2 or len(depths) > _MOST_BOXES:
        raise InputError(
            f"plot_tape: the autograd graph has {len(depths)} tensors, expected 2 to {_MOST_BOXES}. It begins at "
            "leaves with requires_grad=True, and backward frees it."
        )
    columns: dict[int, list[Any]] = {}
    for source, depth in depths.values():
        columns.setdefault(depth, []).append(source)
    tallest = max(map(len, columns.values()))
    places = {
        id(source): (_STEP[0] * column, _STEP[1] * (row + (tallest - len(sources)) / 2))
        for column, sources in columns.items()
        for row, source in enumerate(sources)
    }
    ax = axes(ax, 1.25 * len(columns) + 1.0, 0.62 * tallest + 0.7)
    numbers = sorted(x.number for x, _ in depths.values() if not x.is_leaf)
    called = {id(leaf): name for name, leaf in (names or {}).items()}
    for x, _ in depths.values():
        if not x.is_leaf:
            text, color = f"{numbers.index(x.number)}: {type(x.op).__name__}", ORANGE if x is root._node else SKY
            for source in x.inputs:
                _draw_arrow(ax, places[id(source)], places[id(x)])
        else:
            text = called.get(id(x), "leaf" if x.requires_grad else "data")
            color = GREEN if x.requires_grad else "0.85"
        _draw_box(ax, places[id(x)], f"{text}\n{x.shape}", color)
    ax.set(xlim=(-0.1, _STEP[0] * len(columns) - 0.6), ylim=(_STEP[1] * tallest - 0.2, -0.2))
    ax.set_axis_off()
    head(ax, title)
    return ax


def _depths(root: Tensor) -> dict[int, tuple[Any, int]]:
    """Return id -> (node or leaf, column) for the autograd graph of root. A leaf stands just before its first use."""
    found: dict[int, Node] = {}
    waiting: list[Any] = [root._node or root]
    while waiting:
        node = waiting.pop()
        if not node.is_leaf and id(node) not in found:
            found[id(node)] = node
            waiting += node.inputs
    made = sorted(found.values(), key=attrgetter("number"))
    depths: dict[int, tuple[Any, int]] = {}
    for node in made:
        before = [depths[id(source)][1] for source in node.inputs if id(source) in depths]
        depths[id(node)] = node, max(before, default=0) + 1
    for node in made:
        for source in node.inputs:
            depths.setdefault(id(source), (source, depths[id(node)][1] - 1))
    return depths or {id(root): (root, 0)}


def _draw_box(ax: Any, corner: tuple[float, float], text: str, color: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0.04"
    ax.add_patch(FancyBboxPatch(corner, *_BOX, boxstyle=shape, facecolor=color, edgecolor="0.4", alpha=0.6))
    write(ax, corner[0] + _BOX[0] / 2, corner[1] + _BOX[1] / 2, text, 8)


def _draw_arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    middle = _BOX[1] / 2
    arrow(ax, (start[0] + _BOX[0] + 0.04, start[1] + middle), (end[0] - 0.04, end[1] + middle), color="0.4")

"""The autograd graph behind a Tensor, its tape: which op made it from which tensors, back to the leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simparallel.errors import InputError
from simparallel.view.style import GREEN, ORANGE, SKY, arrow, axes, head, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simparallel.autograd import Tensor

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
    columns: dict[int, list[Tensor]] = {}
    for tensor, depth in depths.values():
        columns.setdefault(depth, []).append(tensor)
    tallest = max(map(len, columns.values()))
    places = {
        id(tensor): (_STEP[0] * column, _STEP[1] * (row + (tallest - len(tensors)) / 2))
        for column, tensors in columns.items()
        for row, tensor in enumerate(tensors)
    }
    ax = axes(ax, 1.25 * len(columns) + 1.0, 0.62 * tallest + 0.7)
    numbers = sorted(tensor._node.number for tensor, _ in depths.values() if tensor._node)
    called = {id(leaf): name for name, leaf in (names or {}).items()}
    for tensor, _ in depths.values():
        if (node := tensor._node) is None:
            text, color = called.get(id(tensor), "leaf" if tensor.requires_grad else "data"), GREEN
            color = color if tensor.requires_grad else "0.85"
        else:
            text, color = f"{numbers.index(node.number)}: {type(node.op).__name__}", ORANGE if tensor is root else SKY
            for source in node.inputs:
                _draw_arrow(ax, places[id(source)], places[id(tensor)])
        _draw_box(ax, places[id(tensor)], f"{text}\n{tensor.shape}", color)
    ax.set(xlim=(-0.1, _STEP[0] * len(columns) - 0.6), ylim=(_STEP[1] * tallest - 0.2, -0.2))
    ax.set_axis_off()
    head(ax, title)
    return ax


def _depths(root: Tensor) -> dict[int, tuple[Tensor, int]]:
    """Return id -> (tensor, column) of all tensors behind root. A leaf stands just before its first use."""
    found = {id(root): root}
    waiting = [root]
    while waiting:
        last = waiting.pop()._node
        for source in last.inputs if last else ():
            if id(source) not in found:
                found[id(source)] = source
                waiting.append(source)
    made = sorted(((t, t._node) for t in found.values() if t._node), key=lambda pair: pair[1].number)
    depths: dict[int, tuple[Tensor, int]] = {}
    for tensor, node in made:
        before = [depths[id(source)][1] for source in node.inputs if id(source) in depths]
        depths[id(tensor)] = tensor, max(before, default=0) + 1
    for tensor, node in made:
        for source in node.inputs:
            depths.setdefault(id(source), (source, depths[id(tensor)][1] - 1))
    return depths or {id(root): (root, 0)}


def _draw_box(ax: Any, corner: tuple[float, float], text: str, color: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0.04"
    ax.add_patch(FancyBboxPatch(corner, *_BOX, boxstyle=shape, facecolor=color, edgecolor="0.4", alpha=0.6))
    write(ax, corner[0] + _BOX[0] / 2, corner[1] + _BOX[1] / 2, text, 8)


def _draw_arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    middle = _BOX[1] / 2
    arrow(ax, (start[0] + _BOX[0] + 0.04, start[1] + middle), (end[0] - 0.04, end[1] + middle), color="0.4")

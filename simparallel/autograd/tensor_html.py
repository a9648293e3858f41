"""Tensors in notebooks: shape and dtype, small values, and the location of a cut tensor's slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simparallel.backend import has_data, to_host
from simparallel.base.html import table

if TYPE_CHECKING:
    from simparallel.autograd.tensor import Tensor

# Of dims longer than _MOST, only _EDGE entries at each end are shown.
_MOST = 12
_EDGE = 4


def tensor_html(tensor: Tensor) -> str:
    """Return the HTML of a tensor; a tensor that is cut shows the values of this rank's slice."""
    place, data = tensor.placement, tensor.data
    facts = [f"Tensor {tensor.name!r}" if tensor.name else "Tensor", f"shape {tensor.shape}", str(tensor.dtype)]
    facts += ["requires_grad"] * tensor.requires_grad
    parts = []
    if place is not None:
        facts.append(f"slice {data.shape} on this rank")
        parts.append(place.layout.slices_html(tensor.shape))
    title = ", ".join(facts)
    if not has_data(data) or not data.size or data.ndim > 2:
        return f"{table([], title=title)}{''.join(parts)}"
    values = to_host(data)
    rows = np.atleast_2d(values)
    shown = [[_text(rows[i, j]) if min(i, j) >= 0 else "…" for j in _places(rows.shape[1])] for i in _places(len(rows))]
    # The first row of a table is its head.
    head = [f"{j}" if j >= 0 else "…" for j in _places(rows.shape[1])]
    return table([head, *shown], title=title) + "".join(parts)


def _places(size: int) -> list[int]:
    """Return the indices shown along a dim; -1 stands for those left out."""
    return list(range(size)) if size <= _MOST else [*range(_EDGE), -1, *range(size - _EDGE, size)]


def _text(value: np.generic) -> str:
    return f"{value:.4g}" if isinstance(value, np.floating) else str(value)

"""One tensor under six layouts of a 2 x 4 mesh: its slices, and the ranks that hold them."""

from typing import Any

import simparallel as sp

SHAPE = 8, 8
MESH = sp.Layout((2, 4), ("dp", "tp"))
LAYOUTS = (
    ("None", "None"), ("dp", "None"), ("None", "tp"),
    ("dp", "tp"), ("tp", "dp"), (("dp", "tp"), "None"),
)  # fmt: skip


def draw() -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(10, 7.6), layout="constrained")
    for ax, row in zip(axes, (LAYOUTS[:3], LAYOUTS[3:]), strict=True):
        sp.view.plot_slices([(f"layout{dims}".replace("'", '"'), MESH(*dims), SHAPE) for dims in row], ax=ax)
    figure.suptitle('layout = sp.Layout((2, 4), ("dp", "tp"))', fontsize=13, fontweight="bold")
    return figure

"""Three redistributions on four ranks: what each rank holds before and after each step, and the bytes in between."""

from typing import Any

import simparallel as sp
from simparallel.layout.redistribution import plan_redistribution

SHAPE = 512, 512
LINE, MESH = sp.Layout((4,), ("x",)), sp.Layout((2, 2), ("dp", "tp"))
PAIRS = (
    ("rows to columns", LINE("x", "None"), LINE("None", "x")),
    ("gather", LINE("x", "None"), LINE("None", "None")),
    ("partial sums to slices", MESH("None", "None").with_partial(("dp", "tp")), MESH("dp", "None")),
)


def draw() -> Any:
    import matplotlib.pyplot as plt

    # A column for each layout.
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.3), width_ratios=[6.5, 6.5, 10.7], layout="constrained")
    for ax, (title, source, target) in zip(axes, PAIRS, strict=True):
        sp.view.plot_redistribution(plan_redistribution(source, target, SHAPE), ax=ax, title=title)
    figure.supxlabel(f"float32 tensor of shape {SHAPE}: 1.05 MB; hatched: an addend of a sum", fontsize=12)
    return figure

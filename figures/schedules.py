"""Pipeline schedules with their bubbles and critical paths, on four ranks and eight micro-batches."""

from typing import Any

import simparallel as sp

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe_v")


def draw() -> Any:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(NAMES), 1, figsize=(13, 2.1 * len(NAMES)), layout="constrained")
    for name, ax in zip(NAMES, axes, strict=True):
        sp.view.plot_schedule(sp.pipeline_schedule(name), ax, critical_path=True)
    axes[-1].set_xlabel("time, in units of the forward of one stage", fontsize=11)
    return figure

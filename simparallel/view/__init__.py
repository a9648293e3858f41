"""Pictures. The only package that uses matplotlib, which it imports when it draws."""

from simparallel.view.adasum import plot_accuracies, plot_costs, plot_orthogonality, plot_vectors
from simparallel.view.collectives import plot_collectives
from simparallel.view.curves import plot_loss
from simparallel.view.memory import plot_memory
from simparallel.view.pipeline import plot_schedule
from simparallel.view.pipeline_tradeoff import plot_schedule_tradeoff
from simparallel.view.save import save_figure
from simparallel.view.slices import plot_slices
from simparallel.view.timeline import plot_timeline

__all__ = [
    "plot_accuracies", "plot_collectives", "plot_costs", "plot_loss", "plot_memory",
    "plot_orthogonality", "plot_schedule", "plot_schedule_tradeoff", "plot_slices",
    "plot_timeline", "plot_vectors", "save_figure",
]  # fmt: skip

"""Pictures. The only package that uses matplotlib, which it imports when it draws."""

from simparallel.base.hints import answer_unknown_names
from simparallel.view.adasum import plot_orthogonality, plot_vectors
from simparallel.view.algorithms import animate_algorithms, plot_algorithms
from simparallel.view.cells import plot_cells
from simparallel.view.chunks import plot_chunks
from simparallel.view.collectives import plot_collectives
from simparallel.view.curves import plot_loss
from simparallel.view.landscape import plot_search_landscape
from simparallel.view.matrix import plot_communication_matrix
from simparallel.view.memory import plot_memory
from simparallel.view.overlap import plot_overlap
from simparallel.view.pipeline import plot_schedule
from simparallel.view.pipeline_tradeoff import plot_schedule_tradeoff
from simparallel.view.redistribution import plot_redistribution
from simparallel.view.save import save_animation, save_figure
from simparallel.view.scaling import plot_scaling
from simparallel.view.slices import plot_slices
from simparallel.view.tape import plot_tape
from simparallel.view.timeline import plot_both_clocks, plot_timeline

__all__ = [
    "animate_algorithms", "plot_algorithms", "plot_both_clocks", "plot_cells", "plot_chunks",
    "plot_collectives", "plot_communication_matrix", "plot_loss", "plot_memory", "plot_orthogonality",
    "plot_overlap", "plot_redistribution", "plot_scaling", "plot_schedule", "plot_schedule_tradeoff",
    "plot_search_landscape", "plot_slices", "plot_tape", "plot_timeline", "plot_vectors", "save_animation",
    "save_figure",
]  # fmt: skip

answer_unknown_names(__name__)

"""`mindspore.context`: settings of a rank's training."""

from simparallel.compat.front import take as _take
from simparallel.world import context as _context

_take(globals(), _context, """
GRAPH_MODE PYNATIVE_MODE ParallelMode get_auto_parallel_context get_context reset_auto_parallel_context
set_auto_parallel_context set_context
""")  # fmt: skip

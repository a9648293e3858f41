"""MindSpore's names, of versions 0.2 to 2.x, for features that exist in simparallel.

Values are NumPy's: a dtype is `np.dtype`, `Tensor` and `Parameter` are simparallel's. Operations run one by one in both
modes, with the same results.
"""

import simparallel as _sp
from simparallel.compat.front import take as _take
from simparallel.compat.mindspore import (
    boost,
    common,
    communication,
    context,
    dataset,
    nn,
    ops,
    parallel,
    runtime,
    train,
)
from simparallel.compat.mindspore.common import *

_take(globals(), _sp, """
GRAPH_MODE PYNATIVE_MODE Model ParallelMode get_auto_parallel_context load_checkpoint load_param_into_net
reset_auto_parallel_context save_checkpoint set_auto_parallel_context set_context set_seed
""")  # fmt: skip
_take(globals(), context, "get_context")
_take(globals(), parallel, """
AutoParallel Layout get_algo_parameters reset_algo_parameters set_algo_parameters
sync_pipeline_shared_parameters
""")  # fmt: skip
_take(globals(), train, """
Callback CheckpointConfig DynamicLossScaleManager EarlyStopping FixedLossScaleManager History
LearningRateScheduler LossMonitor ModelCheckpoint TimeMonitor
""")  # fmt: skip

# The version of MindSpore whose names these are; programs may compare it.
__version__ = "2.6.0"

"""MindSpore's names, of versions 0.2 to 2.x, for features that exist in simparallel.

Values are NumPy's: a dtype is `np.dtype`, `Tensor` and `Parameter` are simparallel's. Operations run one by one in both
modes, with the same results.
"""

from simparallel import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    Model,
    ParallelMode,
    get_auto_parallel_context,
    load_checkpoint,
    load_param_into_net,
    reset_auto_parallel_context,
    save_checkpoint,
    set_auto_parallel_context,
    set_context,
    set_seed,
)
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
from simparallel.compat.mindspore.context import get_context
from simparallel.compat.mindspore.parallel import (
    AutoParallel,
    Layout,
    get_algo_parameters,
    reset_algo_parameters,
    set_algo_parameters,
    sync_pipeline_shared_parameters,
)
from simparallel.compat.mindspore.train import (
    Callback,
    CheckpointConfig,
    DynamicLossScaleManager,
    EarlyStopping,
    FixedLossScaleManager,
    History,
    LearningRateScheduler,
    LossMonitor,
    ModelCheckpoint,
    TimeMonitor,
)

# The version of MindSpore whose names these are; programs may compare it.
__version__ = "2.6.0"

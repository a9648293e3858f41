"""`mindspore.train`: the training loop, callbacks, loss scaling, checkpoints."""

from simparallel.nn import auto_mixed_precision
from simparallel.optim import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from simparallel.train import *
from simparallel.world.context import ParallelMode

# Not MindSpore's.
del CheckpointManager, CheckpointReader, TensorSlice, load, save  # noqa: F821

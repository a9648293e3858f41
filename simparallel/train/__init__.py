"""Training around the step: `Model`, callbacks, metrics, checkpoints."""

from simparallel.base.hints import answer_unknown_names
from simparallel.train.callback import Callback, RunContext
from simparallel.train.checkpoint import (
    CheckpointManager,
    CheckpointReader,
    TensorSlice,
    load,
    load_checkpoint,
    load_param_into_net,
    save,
    save_checkpoint,
)
from simparallel.train.control import (
    CheckpointConfig,
    EarlyStopping,
    History,
    LearningRateScheduler,
    LossMonitor,
    ModelCheckpoint,
    TimeMonitor,
)
from simparallel.train.metrics import (
    F1,
    MAE,
    MSE,
    Accuracy,
    Fbeta,
    Loss,
    Metric,
    Precision,
    Recall,
    Top1CategoricalAccuracy,
    Top5CategoricalAccuracy,
    TopKCategoricalAccuracy,
    get_metric_fn,
)
from simparallel.train.model import Model

__all__ = [
    "F1", "MAE", "MSE", "Accuracy", "Callback", "CheckpointConfig", "CheckpointManager", "CheckpointReader",
    "EarlyStopping", "Fbeta", "History", "LearningRateScheduler", "Loss", "LossMonitor", "Metric", "Model",
    "ModelCheckpoint", "Precision", "Recall", "RunContext", "TensorSlice", "TimeMonitor",
    "Top1CategoricalAccuracy", "Top5CategoricalAccuracy", "TopKCategoricalAccuracy", "get_metric_fn",
    "load", "load_checkpoint", "load_param_into_net", "save", "save_checkpoint",
]  # fmt: skip

answer_unknown_names(__name__)

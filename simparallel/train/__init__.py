"""Training around the step: checkpoints."""

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

__all__ = [
    "CheckpointManager", "CheckpointReader", "TensorSlice",
    "load", "load_checkpoint", "load_param_into_net", "save", "save_checkpoint",
]  # fmt: skip

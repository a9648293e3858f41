"""Optimizers, learning-rate schedules, gradient clipping and loss scaling."""

from simparallel.optim import schedules
from simparallel.optim.adam import Adam, AdamW
from simparallel.optim.layerwise import LAMB, LARS
from simparallel.optim.loss_scale import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    GradScaler,
    LossScaleManager,
    all_finite,
)
from simparallel.optim.momentum import Momentum
from simparallel.optim.norms import clip_grad_norm_, clip_grad_value_
from simparallel.optim.optimizer import Optimizer
from simparallel.optim.rmsprop import RMSprop
from simparallel.optim.scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, StepLR
from simparallel.optim.sgd import SGD

__all__ = [
    "LAMB", "LARS", "SGD", "Adam", "AdamW", "CosineAnnealingLR", "DynamicLossScaleManager",
    "FixedLossScaleManager", "GradScaler", "LRScheduler", "LambdaLR", "LossScaleManager", "Momentum",
    "Optimizer", "RMSprop", "StepLR", "all_finite", "clip_grad_norm_", "clip_grad_value_", "schedules",
]  # fmt: skip

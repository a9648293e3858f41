"""Optimizers, learning-rate schedules, gradient clipping and loss scaling."""

from simparallel.base.hints import answer_unknown_names
from simparallel.optim import lr_scheduler, schedules
from simparallel.optim.adam import Adam, Adamax, AdamW, NAdam, RAdam
from simparallel.optim.adaptive import Adadelta, Adagrad, RMSprop
from simparallel.optim.layerwise import LAMB, LARS
from simparallel.optim.loss_scale import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    GradScaler,
    LossScaleManager,
    all_finite,
)
from simparallel.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from simparallel.optim.momentum import Momentum
from simparallel.optim.muon import Muon
from simparallel.optim.norms import clip_grad_norm_, clip_grad_value_
from simparallel.optim.optimizer import Optimizer
from simparallel.optim.sgd import SGD

__all__ = [
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ChainedScheduler", "ConstantLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "DynamicLossScaleManager", "ExponentialLR", "FixedLossScaleManager",
    "GradScaler", "LAMB", "LARS", "LRScheduler", "LambdaLR", "LinearLR", "LossScaleManager", "Momentum", "MultiStepLR",
    "Muon", "NAdam", "OneCycleLR", "Optimizer", "PolynomialLR", "RAdam", "RMSprop", "ReduceLROnPlateau", "SGD",
    "SequentialLR", "StepLR", "all_finite", "clip_grad_norm_", "clip_grad_value_", "lr_scheduler", "schedules",
]  # fmt: skip

answer_unknown_names(__name__)

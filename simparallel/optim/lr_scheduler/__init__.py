"""Schedulers in PyTorch's manner: an object beside the optimizer, told when to go on."""

from simparallel.optim.lr_scheduler.base import LambdaLR, LRScheduler
from simparallel.optim.lr_scheduler.decay import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    StepLR,
)
from simparallel.optim.lr_scheduler.one_cycle import OneCycleLR
from simparallel.optim.lr_scheduler.plateau import ReduceLROnPlateau

__all__ = [
    "CosineAnnealingLR", "ExponentialLR", "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "OneCycleLR",
    "ReduceLROnPlateau", "StepLR",
]  # fmt: skip

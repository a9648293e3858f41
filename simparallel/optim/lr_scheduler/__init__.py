"""Learning-rate schedulers as in PyTorch: objects that set the rates of an optimizer in each `step()`."""

from simparallel.optim.lr_scheduler.base import LambdaLR, LRScheduler
from simparallel.optim.lr_scheduler.cyclic import CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR
from simparallel.optim.lr_scheduler.decay import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
from simparallel.optim.lr_scheduler.plateau import ReduceLROnPlateau
from simparallel.optim.lr_scheduler.together import ChainedScheduler, SequentialLR

__all__ = [
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
    "SequentialLR", "StepLR",
]  # fmt: skip

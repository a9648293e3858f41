"""Optimizers, with PyTorch's formulas and defaults."""

from simparallel.optim.adam import Adam, AdamW
from simparallel.optim.optimizer import Optimizer
from simparallel.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]

"""Modules, layers, losses and initialisers, with PyTorch's names."""

from simparallel.nn import init
from simparallel.nn.amp import auto_mixed_precision, custom_mixed_precision
from simparallel.nn.layers import Flatten, Identity, Linear, ReLU, Sequential, Sigmoid, Tanh
from simparallel.nn.losses import CrossEntropyLoss
from simparallel.nn.module import Module, Parameter
from simparallel.nn.recompute import checkpoint
from simparallel.nn.state import LoadResult

__all__ = [
    "CrossEntropyLoss", "Flatten", "Identity", "Linear", "LoadResult", "Module", "Parameter", "ReLU",
    "Sequential", "Sigmoid", "Tanh", "auto_mixed_precision", "checkpoint", "custom_mixed_precision", "init",
]  # fmt: skip

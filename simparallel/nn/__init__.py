"""Modules, layers, losses and initializers, with PyTorch's names."""

from simparallel.base.hints import answer_unknown_names
from simparallel.nn import init
from simparallel.nn.amp import auto_mixed_precision, custom_mixed_precision
from simparallel.nn.containers import ModuleDict, ModuleList, Sequential
from simparallel.nn.conv import AdaptiveAvgPool2d, AvgPool2d, Conv1d, Conv2d, ConvTranspose2d, MaxPool2d
from simparallel.nn.init import initializer
from simparallel.nn.layers import (
    GELU,
    Dropout,
    Dropout2d,
    Embedding,
    Flatten,
    Identity,
    LeakyReLU,
    Linear,
    LogSoftmax,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
    Upsample,
)
from simparallel.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    CrossEntropySmooth,
    HuberLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
    SoftmaxCrossEntropyExpand,
    SoftmaxCrossEntropyWithLogits,
)
from simparallel.nn.module import Module, Parameter
from simparallel.nn.normalization import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm
from simparallel.nn.recompute import checkpoint
from simparallel.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from simparallel.nn.state import LoadResult
from simparallel.nn.summary import LayerSummary, Summary, summary
from simparallel.nn.sync_batchnorm import SyncBatchNorm
from simparallel.nn.transformer import (
    MultiheadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "AdaptiveAvgPool2d", "AvgPool2d", "BCELoss", "BCEWithLogitsLoss", "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d",
    "ConvTranspose2d", "CrossEntropyLoss", "CrossEntropySmooth", "Dropout", "Dropout2d", "Embedding", "Flatten", "GELU",
    "GRU", "GRUCell", "GroupNorm", "HuberLoss", "Identity", "L1Loss", "LSTM", "LSTMCell", "LayerNorm", "LayerSummary",
    "LeakyReLU", "Linear", "LoadResult", "LogSoftmax", "MSELoss", "MaxPool2d", "Module", "ModuleDict", "ModuleList",
    "MultiheadAttention", "NLLLoss", "Parameter", "RMSNorm", "RNN", "RNNCell", "ReLU", "Sequential", "SiLU", "Sigmoid",
    "SmoothL1Loss", "Softmax", "SoftmaxCrossEntropyExpand", "SoftmaxCrossEntropyWithLogits", "Summary", "SyncBatchNorm",
    "Tanh", "Transformer", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder",
    "TransformerEncoderLayer", "Upsample", "auto_mixed_precision", "checkpoint", "custom_mixed_precision", "init",
    "initializer", "summary",
]  # fmt: skip

answer_unknown_names(__name__)

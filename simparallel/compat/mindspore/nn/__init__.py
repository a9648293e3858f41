"""`mindspore.nn`: cells, losses and optimizers, with MindSpore's arguments."""

from __future__ import annotations

from typing import Any
from weakref import WeakMethod as _WeakMethod

from simparallel import functions, nn, optim
from simparallel.arrays.host.windows import as_pair
from simparallel.autograd.ops.loss import check_reduction as _check_reduction
from simparallel.clock.notes import note_once
from simparallel.comm import Group
from simparallel.compat.cutting import cut, kept
from simparallel.compat.front import FrontType, front, refuse, take, unused
from simparallel.compat.mindspore.nn import utils
from simparallel.compat.mindspore.nn.pipelines import PipelineCell, PipelineGradReducer, sync_pipeline_shared_parameters
from simparallel.errors import InputError
from simparallel.optim import FixedLossScaleManager as _FixedLossScaleManager
from simparallel.parallel import DistributedGradReducer
from simparallel.parallel.operator.interpreter import sharder
from simparallel.train import F1, MAE, MSE, Accuracy, Fbeta, Loss, Metric, Precision, Recall
from simparallel.train.step import TrainStep
from simparallel.world.context import ParallelMode, SettingsRead, get_auto_parallel_context
from simparallel.world.rank import get_world_size

# --- cells and layers ------------------------------------------------------------------------------------------

# Layers whose arguments are MindSpore's.
_SAME = """
AdaptiveAvgPool2d BCEWithLogitsLoss Dropout2d Flatten HuberLoss Identity L1Loss LogSoftmax MSELoss ReLU
RMSNorm Sigmoid SiLU Softmax Tanh Upsample
"""
take(globals(), nn, _SAME, CellList="ModuleList", SequentialCell="Sequential")


class Cell(nn.Module, metaclass=FrontType):
    """Base of everything with parameters, see `sp.nn.Module`; its subclasses define `construct`.

    Where the auto-parallel context cuts operators, a call outside of `AutoParallel` is cut, too.

    Args:
        auto_prefix: False names the parameters below this cell without the names of its attributes.
        flags: no effect.
    """

    is_front = True

    def __init__(self, auto_prefix: bool = True, flags: Any = None) -> None:
        super().__init__()
        unused("Cell", flags=flags)
        self._is_wrapper = not auto_prefix

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        by = cut()
        if by is None:
            return super().__call__(*inputs, **kwargs)
        # The cached function must not keep the cell alive.
        call: Any = _WeakMethod(super().__call__)
        return kept(self, by, lambda *xs, **named: call()(*xs, **named))(*inputs, **kwargs)


@front(nn.Linear, in_channels="in_features", out_channels="out_features", has_bias="bias")
def Dense(
    in_channels: int,
    out_channels: int,
    weight_init: Any = None,
    bias_init: Any = None,
    has_bias: bool = True,
    activation: Any = None,
    dtype: Any = "float32",
) -> None:
    """y = x @ weight.T + bias, see `sp.nn.Linear`."""
    refuse("Dense", "call it after the layer", activation=activation)


@front(nn.Conv2d, group="groups", has_bias="bias")
def Conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any = 1,
    pad_mode: str = "same",
    padding: Any = 0,
    dilation: Any = 1,
    group: int = 1,
    has_bias: bool = False,
    weight_init: Any = None,
    bias_init: Any = None,
    data_format: str = "NCHW",
    dtype: Any = "float32",
) -> dict[str, Any]:
    """A convolution, see `sp.nn.Conv2d`."""
    refuse("Conv2d", "give NCHW", data_format=data_format != "NCHW")
    return {"padding": _padding("Conv2d", pad_mode, padding)}


@front(nn.ConvTranspose2d, group="groups", has_bias="bias")
def Conv2dTranspose(
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any = 1,
    pad_mode: str = "same",
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
    group: int = 1,
    has_bias: bool = False,
    weight_init: Any = None,
    bias_init: Any = None,
    dtype: Any = "float32",
) -> dict[str, Any]:
    """A transposed convolution, see `sp.nn.ConvTranspose2d`.

    With pad_mode="same" y is `stride` times as large as x; with "valid" it is at least that large.
    """
    extra = output_padding
    if pad_mode != "pad":
        refuse(
            "Conv2dTranspose",
            "only pad_mode='pad' takes it",
            output_padding=output_padding if output_padding not in (0, (0, 0)) else None,
        )
    if pad_mode == "valid":
        given = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        pairs = (as_pair("Conv2dTranspose", name, value, 1) for name, value in given.items())
        # With "valid" MindSpore's size is max(stride * size of x, PyTorch's size): output padding adds the difference.
        extra = tuple(max(step - gap * (k - 1) - 1, 0) for k, step, gap in zip(*pairs, strict=True))
    return {"padding": _padding("Conv2dTranspose", pad_mode, padding), "output_padding": extra}


def _norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float = 0.9,
    affine: bool = True,
    gamma_init: Any = "ones",
    beta_init: Any = "zeros",
    moving_mean_init: Any = "zeros",
    moving_var_init: Any = "ones",
    use_batch_statistics: bool | None = None,
    data_format: str = "NCHW",
    dtype: Any = "float32",
) -> dict[str, Any]:
    """See `sp.nn.BatchNorm2d`; `momentum` is the decay factor of the running statistics."""
    refuse("BatchNorm", "give NCHW", data_format=data_format != "NCHW")
    refuse("BatchNorm", "call eval() or train()", use_batch_statistics=use_batch_statistics)
    # MindSpore's momentum weighs the old statistics, PyTorch's and ours the new ones. Rounded, so that 1 - 0.9 is 0.1.
    return {"momentum": round(1 - momentum, 12)}


_MEMBERS = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
_GAMMA_AND_BETA = {"gamma_init": "weight_init", "beta_init": "bias_init"}
_INITIAL = {**_GAMMA_AND_BETA, "moving_mean_init": "running_mean_init", "moving_var_init": "running_var_init"}
BatchNorm1d = front(nn.BatchNorm1d, "BatchNorm1d", _MEMBERS, **_INITIAL)(_norm)
BatchNorm2d = front(nn.BatchNorm2d, "BatchNorm2d", _MEMBERS, **_INITIAL)(_norm)


@front(nn.SyncBatchNorm, members=_MEMBERS, **_INITIAL)
def SyncBatchNorm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float = 0.9,
    affine: bool = True,
    gamma_init: Any = "ones",
    beta_init: Any = "zeros",
    moving_mean_init: Any = "zeros",
    moving_var_init: Any = "ones",
    use_batch_statistics: bool | None = None,
    process_groups: list[list[int]] | None = None,
    dtype: Any = "float32",
) -> dict[str, Any]:
    """Batch norm over the batches of all ranks, or of each of `process_groups`; see `sp.nn.SyncBatchNorm`.

    Args:
        process_groups: ranks that share their statistics, [[0, 1], [2, 3]]; a rank in none of them is alone. Each
            group has its own running statistics.

    Raises:
        InputError: `process_groups` is not a list of lists, names a rank twice, or names an unknown rank.

    Collective: yes, with `process_groups`.
    """
    settings = _norm(num_features, eps, momentum, use_batch_statistics=use_batch_statistics)
    return {**settings, "process_group": None if process_groups is None else _own_group(process_groups)}


def _own_group(process_groups: list[list[int]]) -> Group | None:
    if not isinstance(process_groups, list) or not all(isinstance(ranks, list) for ranks in process_groups):
        raise InputError(
            f"SyncBatchNorm: process_groups={process_groups!r} must be a list of lists of ranks, [[0, 1], [2, 3]]."
        )
    named = [rank for ranks in process_groups for rank in ranks]
    if len(set(named)) < len(named):
        raise InputError(
            f"SyncBatchNorm: process_groups={process_groups!r} names a rank twice; it can be in one of them."
        )
    # Ranks in no group get groups of one, because every rank must take part in creating groups.
    alone = [(rank,) for rank in range(get_world_size()) if rank not in named]
    return sharder().groups.mine((*map(tuple, process_groups), *alone))


@front(nn.GroupNorm, members=_MEMBERS, **_GAMMA_AND_BETA)
def GroupNorm(
    num_groups: int,
    num_channels: int,
    eps: float = 1e-5,
    affine: bool = True,
    gamma_init: Any = "ones",
    beta_init: Any = "zeros",
    dtype: Any = "float32",
) -> None:
    """Normalise groups of channels, see `sp.nn.GroupNorm`."""


@front(nn.LayerNorm, members=_MEMBERS, **_GAMMA_AND_BETA, epsilon="eps")
def LayerNorm(
    normalized_shape: Any,
    begin_norm_axis: int = -1,
    begin_params_axis: int = -1,
    gamma_init: Any = "ones",
    beta_init: Any = "zeros",
    epsilon: float = 1e-7,
    dtype: Any = "float32",
) -> None:
    """Normalise the last dims, see `sp.nn.LayerNorm`."""
    # Our layer normalises exactly the last dims, so only that start is possible.
    dims = -len(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else -1
    refuse("LayerNorm", f"only {dims} fits", begin_norm_axis=begin_norm_axis if begin_norm_axis != dims else None)
    refuse("LayerNorm", f"only {dims} fits", begin_params_axis=begin_params_axis if begin_params_axis != dims else None)


@front(
    nn.Embedding,
    members={"weight": "embedding_table"},
    vocab_size="num_embeddings",
    embedding_size="embedding_dim",
    embedding_table="weight_init",
)
def Embedding(
    vocab_size: int,
    embedding_size: int,
    use_one_hot: bool = False,
    embedding_table: Any = "normal",
    dtype: Any = "float32",
    padding_idx: int | None = None,
) -> None:
    """Rows by index, see `sp.nn.Embedding`."""
    unused("Embedding", use_one_hot=use_one_hot or None)


class Pad(Cell):
    """Pad each dim by its pair of widths; mode "CONSTANT" pads zeros, "REFLECT" mirrors at the border elements."""

    def __init__(self, paddings: Any, mode: str = "CONSTANT") -> None:
        super().__init__()
        refuse("Pad", "choose CONSTANT or REFLECT", mode=mode if mode not in ("CONSTANT", "REFLECT") else None)
        self._widths, self._mode = [width for pair in reversed(paddings) for width in pair], mode.lower()

    def construct(self, x: Any) -> Any:
        return functions.pad(x, self._widths, self._mode)


@front(nn.MaxPool2d)
def MaxPool2d(
    kernel_size: Any = 1,
    stride: Any = 1,
    pad_mode: str = "valid",
    padding: Any = 0,
    dilation: Any = 1,
    return_indices: bool = False,
    ceil_mode: bool = False,
    data_format: str = "NCHW",
) -> dict[str, Any]:
    """The maximum of windows, see `sp.nn.MaxPool2d`."""
    refuse("MaxPool2d", "give NCHW", data_format=data_format != "NCHW")
    refuse("MaxPool2d", "see docs/not_here.md for the positions of the maxima", return_indices=return_indices)
    return {"padding": _padding("MaxPool2d", pad_mode, padding)}


@front(nn.AvgPool2d)
def AvgPool2d(
    kernel_size: Any = 1,
    stride: Any = 1,
    pad_mode: str = "valid",
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    data_format: str = "NCHW",
) -> dict[str, Any]:
    """The mean of windows, see `sp.nn.AvgPool2d`; with pad_mode="same" padding does not count."""
    refuse("AvgPool2d", "give NCHW", data_format=data_format != "NCHW", divisor_override=divisor_override)
    counts = count_include_pad and pad_mode != "same"
    return {"padding": _padding("AvgPool2d", pad_mode, padding), "count_include_pad": counts}


@front(nn.Dropout)
def Dropout(keep_prob: float | None = None, p: float | None = None, dtype: Any = None) -> dict[str, Any]:
    """Zero elements with probability `p`, or keep them with `keep_prob`; see `sp.nn.Dropout`."""
    unused("Dropout", dtype=dtype)
    # `keep_prob` is the argument of MindSpore before 2.0.
    return {"p": p if p is not None else 0.5 if keep_prob is None else 1 - keep_prob}


@front(nn.GELU)
def GELU(approximate: bool = True) -> dict[str, Any]:
    return {"approximate": "tanh" if approximate else "none"}


@front(nn.LeakyReLU, alpha="negative_slope")
def LeakyReLU(alpha: float = 0.2) -> None:
    """x, or alpha x where it is negative."""


def _padding(who: str, pad_mode: str, padding: Any) -> Any:
    """Translate `padding`; four numbers in MindSpore are top, bottom, left, right."""
    if pad_mode != "pad":
        # "same" and "valid" determine the padding themselves.
        refuse(who, "only pad_mode='pad' pads by it", padding=padding if padding not in (0, (0, 0, 0, 0)) else None)
        return pad_mode if pad_mode == "same" else 0
    if isinstance(padding, (tuple, list)) and len(padding) == 4:
        top, bottom, left, right = padding
        refuse(who, "pad with sp.functions.pad", padding=padding if (top, left) != (bottom, right) else None)
        return top, left
    return padding


# --- losses ------------------------------------------------------------------------------------------


class LossBase(Cell):
    """Base of losses: `construct` returns `self.get_loss(losses)`, their "mean", "sum", or with "none" all of them."""

    def __init__(self, reduction: str | None = "mean") -> None:
        super().__init__()
        self.reduction = _check_reduction(type(self).__name__, reduction or "none")

    def get_axis(self, x: Any) -> tuple[int, ...]:
        """Return the numbers of the dims of x."""
        return tuple(range(x.ndim))

    def get_loss(self, x: Any, weights: Any = 1.0) -> Any:
        """Return the reduction of x * weights."""
        losses = x * weights
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


def SoftmaxCrossEntropyWithLogits(sparse: bool = False, reduction: str = "none") -> nn.Module:
    """Return the cross-entropy of logits with class numbers (`sparse`), or with distributions."""
    return nn.CrossEntropyLoss(reduction) if sparse else nn.SoftmaxCrossEntropyWithLogits(reduction)


@front(nn.CrossEntropyLoss)
def CrossEntropyLoss(
    weight: Any = None, ignore_index: int | None = None, reduction: str = "mean", label_smoothing: float = 0.0
) -> None:
    """See `sp.nn.CrossEntropyLoss`; a label of -100 is an error unless `ignore_index` asks for it."""


@front(nn.NLLLoss)
def NLLLoss(weight: Any = None, ignore_index: int | None = None, reduction: str = "mean") -> None:
    """See `sp.nn.NLLLoss`; a label of -100 is an error unless `ignore_index` asks for it."""


@front(nn.SmoothL1Loss)
def SmoothL1Loss(beta: float = 1.0, reduction: str = "none") -> None:
    """See `sp.nn.SmoothL1Loss`."""


@front(nn.BCELoss)
def BCELoss(weight: Any = None, reduction: str = "mean") -> None:
    refuse("BCELoss", "multiply the losses of reduction='none'", weight=weight)


# --- optimizers --------------------------------------------------------------------------------------

Momentum, Optimizer = optim.Momentum, optim.Optimizer


@front(optim.SGD, learning_rate="lr")
def SGD(
    params: Any,
    learning_rate: Any = 0.1,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    loss_scale: float = 1.0,
) -> None:
    """See `sp.optim.SGD`."""
    refuse("SGD", "use Momentum, which has it", loss_scale=loss_scale if loss_scale != 1.0 else None)


@front(optim.RMSprop, learning_rate="lr", decay="alpha")
def RMSProp(
    params: Any,
    learning_rate: Any = 0.1,
    decay: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-10,
    use_locking: bool = False,
    centered: bool = False,
    loss_scale: float = 1.0,
    weight_decay: float = 0.0,
) -> dict[str, Any]:
    """See `sp.optim.RMSprop`, which adds `epsilon` to the root; MindSpore adds it under the root."""
    unused("RMSProp", use_locking=use_locking or None)
    refuse("RMSProp", "use Momentum, which has it", loss_scale=loss_scale if loss_scale != 1.0 else None)
    # sqrt(v + epsilon) = sqrt(v) + sqrt(epsilon) for v = 0, where the term matters most.
    return {"eps": epsilon**0.5}


@front(optim.Adam, learning_rate="lr", use_amsgrad="amsgrad")
def Adam(
    params: Any,
    learning_rate: Any = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    use_locking: bool = False,
    use_nesterov: bool = False,
    weight_decay: float = 0.0,
    loss_scale: float = 1.0,
    use_amsgrad: bool = False,
) -> dict[str, Any]:
    """See `sp.optim.Adam`."""
    unused("Adam", use_locking=use_locking or None)
    refuse("Adam", "use NAdam", use_nesterov=use_nesterov)
    refuse("Adam", "use Momentum, which has it", loss_scale=loss_scale if loss_scale != 1.0 else None)
    return {"betas": (beta1, beta2)}


@front(optim.AdamW, learning_rate="lr")
def AdamWeightDecay(
    params: Any,
    learning_rate: Any = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> dict[str, Any]:
    """See `sp.optim.AdamW`, which corrects the bias of the moments; MindSpore's optimizer does not."""
    note_once("AdamWeightDecay corrects the bias of the moments here, so its first steps are other than MindSpore's.")
    return {"betas": (beta1, beta2)}


@front(optim.LAMB, learning_rate="lr")
def Lamb(
    params: Any,
    learning_rate: Any,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> dict[str, Any]:
    """See `sp.optim.LAMB`."""
    return {"betas": (beta1, beta2)}


# --- training cells ----------------------------------------------------------------------------------


class WithLossCell(Cell):
    """loss_fn(backbone(data), label) as a cell."""

    def __init__(self, backbone: Cell, loss_fn: Any) -> None:
        super().__init__()
        self._backbone, self._loss_fn = backbone, loss_fn

    def construct(self, data: Any, label: Any) -> Any:
        return self._loss_fn(self._backbone(data), label)


class TrainOneStepCell(Cell):
    """A step of training as a cell: loss, gradients, update; see `sp.Model`.

    Args:
        network: takes all fields of a batch, and returns the loss.
        optimizer: of its parameters.
        sens: factor of the gradients, which the optimizer divides by: give it as its `loss_scale`.
    """

    def __init__(self, network: Cell, optimizer: Any, sens: float = 1.0) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer
        reduces = get_auto_parallel_context("parallel_mode") == ParallelMode.DATA_PARALLEL
        self._read = SettingsRead("parallel_mode", "gradients_mean", "dataset_strategy", "search_mode")
        self._step = TrainStep(network, None, optimizer, _FixedLossScaleManager(sens, False), reduces, cut(True))

    # The step is cut as a whole, and may search for strategies.
    __call__ = nn.Module.__call__

    def construct(self, *inputs: Any) -> Any:
        self._read.check("TrainOneStepCell")
        return self._step(inputs)

"""Mixed precision: compute in float16, keep float32 where float16 would lose too much.

Source: Micikevicius et al. 2018, "Mixed precision training"; the levels and names are MindSpore's. Modules are changed
in place: names, types and (except at O3) `state_dict()` stay the same, only `forward` is wrapped. Scale the loss as
well (`simparallel.optim.GradScaler`): small gradients underflow to 0 in float16.

A forward in float16 also saves its activations for backward in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.functions import cast
from simparallel.autograd.tree_map import change_each
from simparallel.backend import is_array
from simparallel.base.checks import check_choice
from simparallel.errors import InputError
from simparallel.nn.hooks import is_reduced
from simparallel.nn.module import Module
from simparallel.nn.normalization import AbstractBatchNorm, GroupNorm, LayerNorm
from simparallel.rank_local import RankLocal, per_rank

M = TypeVar("M", bound=Module)
Listed = Sequence[type[Module] | str]
Hidden = tuple[Module, str, Tensor]

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
LEVELS = ("O0", "O1", "O2", "O3")
# Names of classes; their subclasses count as well.
WHITE_LIST: tuple[str, ...] = (
    "Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "MultiheadAttention",
)  # fmt: skip
NORMS: tuple[str, ...] = (
    "BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LayerNorm", "GroupNorm",
    "InstanceNorm1d", "InstanceNorm2d", "RMSNorm", "NormalizedLinear",
)  # fmt: skip
# Modules whose op computes float16 in float32; that of RMSNorm chooses eps by the dtype of its input.
WIDENING = (AbstractBatchNorm, GroupNorm, LayerNorm)
LOSSES: tuple[str, ...] = (
    "CrossEntropyLoss", "CrossEntropySmooth", "MSELoss", "L1Loss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss",
    "SmoothL1Loss", "HuberLoss",
)  # fmt: skip
BLACK_LIST: tuple[str, ...] = NORMS + LOSSES


def auto_mixed_precision(model: M, level: str = "O0") -> M:
    """Change `model` to compute in float16 at the given level; returns it.

    | level | computes in float16 | stays in float32 |
    |---|---|---|
    | O0 | nothing | everything, the model is unchanged |
    | O1 | the modules of `WHITE_LIST` (matrix products, convolutions) | all others |
    | O2 | all but `BLACK_LIST` | normalisations, losses; the parameters (master weights) |
    | O3 | everything, parameters and buffers are float16 themselves | nothing |

    The model's output is float32 at every level, for the loss. At O1 and O2 the parameters stay float32 and are cast
    anew in each forward, so gradients arrive in float32 and small updates are not lost. O3 replaces the arrays: choose
    it before creating the optimizer and DistributedDataParallel. Calling it again at the same level changes only
    modules that are new in the model.

    Args:
        model: its floating-point parameters must be float32.
        level: "O0", "O1", "O2" or "O3".

    Raises:
        InputError: unknown level; a model that was changed in another way before, in whole or in part; parameters that
            are not float32 or, at O3, belong to a DistributedDataParallel.
    """
    check_choice("auto_mixed_precision", "level", level, LEVELS)
    if level == "O0":
        return model
    if level == "O1":
        return _apply_white(model, "auto_mixed_precision", WHITE_LIST)
    if level == "O2":
        return _apply_black(model, "auto_mixed_precision", BLACK_LIST)
    _check(model, "auto_mixed_precision", (level,))
    for name, parameter in model.named_parameters():
        if is_reduced(parameter):
            raise InputError(
                f"auto_mixed_precision: O3 replaces the parameters, but the float32 gradient of {name} belongs to a "
                "DistributedDataParallel or a fully_shard. Choose O3 for the bare model, then wrap it and make the "
                "optimizer."
            )
    model.zero_grad()
    model.to(HALF)
    _wrap(model, HALF, SINGLE)
    return _changed(model, (level,))


def custom_mixed_precision(model: M, *, white_list: Listed | None = None, black_list: Listed | None = None) -> M:
    """Change `model` as at O1 with a custom white list, or as at O2 with a custom black list; returns it.

    Args:
        model: its floating-point parameters must be float32.
        white_list: Module classes, or their names, that compute in float16.
        black_list: Module classes, or their names, that stay in float32.

    Raises:
        InputError: none or both of the lists; else as for `auto_mixed_precision`.
    """
    if (white_list is None) == (black_list is None):
        raise InputError("custom_mixed_precision: give either white_list or black_list.")
    if white_list is not None:
        return _apply_white(model, "custom_mixed_precision", _names(white_list))
    return _apply_black(model, "custom_mixed_precision", _names(black_list or ()))


# --- choosing modules ---------------------------------------------------------------------------


def _apply_white(model: M, who: str, names: Sequence[str]) -> M:
    _check(model, who, ("only", *names))
    for module in _outermost(model, names):
        _wrap(module, HALF, SINGLE, ())
    return _changed(model, ("only", *names))


def _apply_black(model: M, who: str, names: Sequence[str]) -> M:
    _check(model, who, ("all but", *names))
    # Unlisted modules compute in float16; `names` keeps the parameters below listed ones in float32.
    for module in list(_without(model, names)):
        _wrap(module, HALF, None, names)
    # Listed modules get float32 inputs. A loss returns float32, any other result continues in float16. This package's
    # norms compute float16 in float32 themselves: casts around them would give the same bits, and move more bytes.
    for module in _outermost(model, names):
        inputs = None if isinstance(module, WIDENING) else SINGLE
        _wrap(module, inputs, None if _is_listed(module, LOSSES) else HALF)
    # The model's own output is float32.
    _wrap(model, None, SINGLE)
    return _changed(model, ("all but", *names))


def _is_listed(module: Module, names: Sequence[str]) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _without(module: Module, names: Sequence[str]) -> Iterator[Module]:
    """Yield the modules of the tree, except listed modules and their subtrees."""
    if not _is_listed(module, names):
        yield module
        for child in module.children():
            yield from _without(child, names)


def _outermost(module: Module, names: Sequence[str]) -> list[Module]:
    """Return the listed modules that are not inside another listed module, each once."""
    if _is_listed(module, names):
        return [module]
    found = [m for child in module.children() for m in _outermost(child, names)]
    return list({id(m): m for m in found}.values())


def _names(listed: Listed) -> list[str]:
    for entry in listed:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, Module)):
            raise InputError(f"custom_mixed_precision: {entry!r} is neither a Module class nor its name.")
    return [entry if isinstance(entry, str) else entry.__name__ for entry in listed]


def _check(model: Module, who: str, how: tuple[str, ...]) -> None:
    """Raise InputError unless the model is unchanged, or was changed as a whole in the same way."""
    if not isinstance(model, Module):
        raise InputError(f"{who}: expected a Module, got {type(model).__name__}.")
    again = model.__dict__.get("_mixed_precision") == how
    if not again:
        check_unchanged(model, who)
    dtypes = (SINGLE, HALF) if again and how == ("O3",) else (SINGLE,)
    for name, parameter in model.named_parameters():
        if parameter.dtype not in dtypes:
            raise InputError(
                f"{who}: parameter {name} has dtype {parameter.dtype}; the model must be built in float32."
            )


def check_unchanged(model: Module, who: str) -> None:
    """Refuse a model that computes in mixed precision already, in whole or in part.

    Raises:
        InputError: names the module.
    """
    for name, module in model.named_modules():
        if "_mixed_precision" in module.__dict__:
            raise InputError(
                f"{who}: {name or 'the model'} was converted to mixed precision in another way before; choose one "
                "way, or rebuild the model."
            )


def _changed(model: M, how: tuple[str, ...]) -> M:
    """Record how the model was changed: the same call again changes nothing more."""
    model.__dict__["_mixed_precision"] = how
    return model


# --- running a module in another precision ------------------------------------------------------


def _wrap(
    module: Module, inputs: np.dtype | None, output: np.dtype | None, excluded: Sequence[str] | None = None
) -> None:
    """Wrap forward to run in this precision; a module wrapped with the same settings stays as it is."""
    wrapped = module.__dict__.get("forward")
    while isinstance(wrapped, InPrecision):
        if wrapped.settings == (inputs, output, excluded):
            return
        wrapped = wrapped._before
    module.__dict__["forward"] = InPrecision(module, inputs, output, excluded)
    module.__dict__.setdefault("_mixed_precision", ())


class _Hiding(RankLocal):
    """The casts that hide parameters on this rank, in their order."""

    casts: list[Hidden] = per_rank(list)


_hiding = _Hiding()


def hidden_casts() -> tuple[Hidden, ...]:
    """Return the casts that hide parameters now, each with its module and the parameter's name."""
    return tuple(_hiding.casts)


@contextmanager
def hiding(casts: Iterable[Hidden]) -> Iterator[None]:
    """Hide parameters by these casts inside the block, except parameters that are hidden already."""
    now = _hiding.casts
    before = len(now)
    try:
        for module, name, cast_ in casts:
            if name not in module.__dict__:
                module.__dict__[name] = cast_
                now.append((module, name, cast_))
        yield
    finally:
        for module, name, _ in now[before:]:
            # The name may be gone already: forward removes the cast of a buffer by assigning to it.
            module.__dict__.pop(name, None)
        del now[before:]


class InPrecision:
    """A module's forward on inputs of another dtype, and on casts of the parameters below it.

    While forward runs, a cast is stored in the instance's `__dict__` under the parameter's name, where it hides the
    registered parameter. So `self.weight` is the cast, also in a parent that uses a child's weight (tied embeddings),
    and also when a part of the model runs alone, as in the recomputation of a checkpoint.

    Args:
        module: the module.
        inputs: dtype of floating-point inputs, None leaves them.
        output: dtype of floating-point outputs, None leaves them.
        excluded: names of classes: parameters are cast to `inputs`, except in and below their modules; None casts none.
        buffers: dtype of floating-point buffers, None leaves them. Values that forward writes into such a cast are
            copied back to the buffer.
        forward: function to call; None for the module's own forward.
    """

    def __init__(
        self,
        module: Module,
        inputs: np.dtype | None,
        output: np.dtype | None,
        excluded: Sequence[str] | None,
        *,
        buffers: np.dtype | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self._module, self._inputs, self._output, self._excluded = module, inputs, output, excluded
        self._buffers = buffers
        self._before: Callable[..., Any] | None = forward or module.__dict__.get("forward")

    @property
    def settings(self) -> tuple[Any, ...]:
        return self._inputs, self._output, self._excluded

    def bind(self, module: Module) -> InPrecision:
        """Return the same wrapper for a replica of the module."""
        bound = InPrecision(module, self._inputs, self._output, self._excluded)
        bound._before = getattr(self._before, "bind", lambda _: self._before)(module)
        return bound

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        forward = self._before or type(self._module).forward.__get__(self._module)
        # Overflow to infinity is expected here; loss scaling detects it in the loss or the gradients.
        with np.errstate(over="ignore"):
            parameters = [] if self._excluded is None else self._casts("_parameters", self._inputs, self._excluded)
            buffers = self._casts("_buffers", self._buffers)
            tensors: list[Any] = [module._buffers[name] for module, name, _ in buffers]
            try:
                with hiding((*parameters, *buffers)):
                    y = forward(*_convert(inputs, self._inputs), **_convert(kwargs, self._inputs))
                return _convert(y, self._output)
            finally:
                _write_back(buffers, tensors)

    def _casts(self, registry: str, dtype: np.dtype | None, excluded: Sequence[str] = ()) -> list[Hidden]:
        """Return the casts to hide tensors by, each with its module and name."""
        # By id of the tensor: a tied parameter is cast once.
        casts: dict[int, Tensor] = {}
        found: list[Hidden] = []
        for module in () if dtype is None else _without(self._module, excluded):
            for name, tensor in module.__dict__[registry].items():
                # A name in `__dict__` is already hidden by an outer module.
                if tensor is not None and tensor.dtype.kind == "f" and name not in module.__dict__:
                    if id(tensor) not in casts:
                        casts[id(tensor)] = cast(tensor, dtype)
                    found.append((module, name, casts[id(tensor)]))
        return found


def _write_back(casts: Iterable[Hidden], buffers: Iterable[Tensor]) -> None:
    """Copy values that forward wrote into casts back to the buffers."""
    for (module, name, cast_), buffer in zip(casts, buffers, strict=True):
        now = module._buffers.get(name)
        if now is buffer:
            if cast_ is not buffer:
                buffer.data[...] = cast_.data
        # Forward assigned another tensor.
        elif now is not None:
            module._buffers[name] = cast(now, buffer.dtype)


def _convert(value: Any, dtype: np.dtype | None) -> Any:
    """Cast every floating-point tensor and array in `value`, at any depth, to `dtype`."""
    if dtype is None:
        return value

    def converted(item: Any) -> Any:
        if isinstance(item, Tensor):
            return cast(item, dtype) if item.dtype.kind == "f" and item.dtype != dtype else item
        return item.astype(dtype) if is_array(item) and item.dtype.kind == "f" and item.dtype != dtype else item

    return change_each(value, converted)

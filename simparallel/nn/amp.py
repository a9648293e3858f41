"""Mixed precision: compute in float16, keep float32 where float16 would lose too much.

Micikevicius et al. 2018, "Mixed precision training"; the levels and names are MindSpore's. Modules
are changed in place and stay what they are: names, types and `state_dict()` remain, only `forward`
is wrapped. Scale the loss as well (`simparallel.optim.GradScaler`): small gradients are 0 in float16.

Where forward runs in float16, so does everything it saves for backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.functions import cast
from simparallel.autograd.nested import change_each
from simparallel.backend import is_array
from simparallel.errors import InputError
from simparallel.nn.hooks import is_reduced
from simparallel.nn.module import Module

M = TypeVar("M", bound=Module)
Listed = Sequence[type[Module] | str]
Hidden = tuple[Module, str, Tensor]

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
LEVELS = ("O0", "O1", "O2", "O3")
# Names of classes; a class derived from one of them counts as well.
WHITE_LIST: tuple[str, ...] = (
    "Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "MultiheadAttention",
)  # fmt: skip
NORMS: tuple[str, ...] = (
    "BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LayerNorm", "GroupNorm",
    "InstanceNorm1d", "InstanceNorm2d", "RMSNorm", "NormalizedLinear",
)  # fmt: skip
LOSSES: tuple[str, ...] = (
    "CrossEntropyLoss", "CrossEntropySmooth", "MSELoss", "L1Loss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss",
    "SmoothL1Loss", "HuberLoss",
)  # fmt: skip
BLACK_LIST: tuple[str, ...] = NORMS + LOSSES


def auto_mixed_precision(model: M, level: str = "O0") -> M:
    """Change `model` to compute in float16 as far as `level` says; returns it.

    | level | computes in float16 | stays in float32 |
    |---|---|---|
    | O0 | nothing | everything, the model is unchanged |
    | O1 | the modules of `WHITE_LIST` (matrix products, convolutions) | all others |
    | O2 | all but `BLACK_LIST` | normalisations, losses; the parameters (master weights) |
    | O3 | everything, parameters and buffers are float16 themselves | nothing |

    The model's output is float32 at every level, for the loss. At O1 and O2 the parameters stay
    float32 and are cast anew in each forward, so that gradients arrive in float32 and small
    updates are not lost. At O3 the arrays are replaced: choose it before the optimizer and
    DistributedDataParallel are made.

    Args:
        model: its floating-point parameters must be float32.
        level: "O0", "O1", "O2" or "O3".

    Raises:
        InputError: unknown level, a model that was changed before, parameters that are not float32, or (O3) that
            belong to a DistributedDataParallel.
    """
    if level not in LEVELS:
        raise InputError(f"auto_mixed_precision: level={level!r}, choose from {', '.join(LEVELS)}.")
    if level == "O0":
        return model
    _check(model, "auto_mixed_precision")
    if level == "O1":
        return _apply_white(model, WHITE_LIST)
    if level == "O2":
        return _apply_black(model, BLACK_LIST)
    for name, parameter in model.named_parameters():
        if is_reduced(parameter):
            raise InputError(
                f"auto_mixed_precision: O3 replaces the parameters, but the float32 gradient of {name} belongs to a "
                "DistributedDataParallel. Choose O3 for the bare model, then wrap it and make the optimizer."
            )
    model.zero_grad()
    model.to(HALF)
    _wrap(model, HALF, SINGLE)
    return model


def custom_mixed_precision(
    model: M, *, white_list: Listed | None = None, black_list: Listed | None = None
) -> M:
    """As O1 with a white list of one's own, or as O2 with a black list of one's own.

    Args:
        model: its floating-point parameters must be float32.
        white_list: Module classes, or names of them, that compute in float16.
        black_list: those that do not.

    Raises:
        InputError: none or both of the lists; else as for `auto_mixed_precision`.
    """
    if (white_list is None) == (black_list is None):
        raise InputError("custom_mixed_precision: give either white_list or black_list.")
    _check(model, "custom_mixed_precision")
    if white_list is not None:
        return _apply_white(model, _names(white_list))
    return _apply_black(model, _names(black_list or ()))


# --- which module computes how ------------------------------------------------------------------


def _apply_white(model: M, names: Sequence[str]) -> M:
    for module in _outermost(model, names):
        _wrap(module, HALF, SINGLE, ())
    model.__dict__["_mixed_precision"] = True
    return model


def _apply_black(model: M, names: Sequence[str]) -> M:
    for module in list(_without(model, names)):
        _wrap(module, HALF, None, names)
    for module in _outermost(model, names):
        _wrap(module, SINGLE, None if _is_listed(module, LOSSES) else HALF)
    _wrap(model, None, SINGLE)
    return model


def _is_listed(module: Module, names: Sequence[str]) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _without(module: Module, names: Sequence[str]) -> Iterator[Module]:
    """The modules of the tree, but not listed ones and what is below these."""
    if not _is_listed(module, names):
        yield module
        for child in module.children():
            yield from _without(child, names)


def _outermost(module: Module, names: Sequence[str]) -> list[Module]:
    """The listed modules that are below no other listed one, each once."""
    if _is_listed(module, names):
        return [module]
    found = [m for child in module.children() for m in _outermost(child, names)]
    return list({id(m): m for m in found}.values())


def _names(listed: Listed) -> list[str]:
    for entry in listed:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, Module)):
            raise InputError(f"custom_mixed_precision: {entry!r} is neither a Module class nor its name.")
    return [entry if isinstance(entry, str) else entry.__name__ for entry in listed]


def _check(model: Module, who: str) -> None:
    if not isinstance(model, Module):
        raise InputError(f"{who}: need a Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if "_mixed_precision" in module.__dict__:
            raise InputError(
                f"{who}: {name or 'the model'} was changed to mixed precision before; do it once."
            )
    for name, parameter in model.named_parameters():
        if parameter.dtype != SINGLE:
            raise InputError(
                f"{who}: parameter {name} has dtype {parameter.dtype}; the model must be built in float32."
            )


# --- running a module in another precision ------------------------------------------------------


def _wrap(
    module: Module, inputs: np.dtype | None, output: np.dtype | None, apart: Sequence[str] | None = None
) -> None:
    module.__dict__["forward"] = _InPrecision(module, inputs, output, apart)
    module.__dict__["_mixed_precision"] = True


class _Hiding(threading.local):
    """The casts that hide parameters on this thread, in the order in which they came."""

    def __init__(self) -> None:  # once in each thread
        self.casts: list[Hidden] = []


_hiding = _Hiding()


def _uncover(casts: list[Hidden], before: int) -> None:
    """Hide no more than the first `before` do."""
    for module, name, _ in casts[before:]:
        del module.__dict__[name]
    del casts[before:]


def hidden_casts() -> tuple[Hidden, ...]:
    """The casts that hide parameters now, each with its module and the parameter's name."""
    return tuple(_hiding.casts)


@contextmanager
def hiding(casts: Iterable[Hidden]) -> Iterator[None]:
    """Inside the block these casts hide parameters, where none does already."""
    now = _hiding.casts
    before = len(now)
    try:
        for module, name, cast_ in casts:
            if name not in module.__dict__:
                module.__dict__[name] = cast_
                now.append((module, name, cast_))
        yield
    finally:
        _uncover(now, before)


class _InPrecision:
    """A module's forward on inputs of another dtype, and on casts of the parameters below it.

    A cast lies in the instance's `__dict__` under the parameter's name while forward runs, where
    it hides the registered parameter. So `self.weight` is the cast, also in a parent that uses a
    child's weight (tied embeddings), and also when a part of the model runs alone, as in the
    recomputation of a checkpoint.

    Args:
        inputs: dtype of floating-point inputs, None leaves them.
        output: dtype of floating-point outputs, None leaves them.
        apart: cast the parameters to `inputs`, but not below modules of these names; None casts none.
    """

    def __init__(
        self, module: Module, inputs: np.dtype | None, output: np.dtype | None,
        apart: Sequence[str] | None,
    ) -> None:  # fmt: skip
        self._module, self._inputs, self._output, self._apart = module, inputs, output, apart
        self._before: Callable[..., Any] | None = module.__dict__.get("forward")

    def bind(self, module: Module) -> _InPrecision:
        """The same for a replica of the module."""
        bound = _InPrecision(module, self._inputs, self._output, self._apart)
        bound._before = getattr(self._before, "bind", lambda _: self._before)(module)
        return bound

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        forward = self._before or type(self._module).forward.__get__(self._module)
        now = _hiding.casts
        before = len(now)
        # An overflow becomes infinite, and is found in the loss or in the gradients.
        with np.errstate(over="ignore"):
            try:
                self._hide(now)
                y = forward(*_convert(inputs, self._inputs), **_convert(kwargs, self._inputs))
                return _convert(y, self._output)
            finally:
                if len(now) > before:
                    _uncover(now, before)

    def _hide(self, now: list[Hidden]) -> None:
        if self._apart is None or self._inputs is None:
            return
        casts: dict[int, Tensor] = {}  # a tied parameter is cast once
        for module in _without(self._module, self._apart):
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype.kind != "f" or name in module.__dict__:
                    continue  # the caller hides it already
                if id(parameter) not in casts:
                    casts[id(parameter)] = cast(parameter, self._inputs)
                module.__dict__[name] = casts[id(parameter)]
                now.append((module, name, casts[id(parameter)]))


def _convert(value: Any, dtype: np.dtype | None) -> Any:
    """`value` with every floating-point tensor and array in it, at any depth, in `dtype`."""
    if dtype is None:
        return value

    def converted(item: Any) -> Any:
        if isinstance(item, Tensor):
            return cast(item, dtype) if item.dtype.kind == "f" and item.dtype != dtype else item
        return (
            item.astype(dtype) if is_array(item) and item.dtype.kind == "f" and item.dtype != dtype else item
        )

    return change_each(value, converted)

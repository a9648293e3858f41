"""Recurrent networks: RNN, LSTM and GRU, layers and cells, with PyTorch's names and weights.

One step, with a = W_ih x_t + b_ih and r = W_hh h_(t-1) + b_hh, in rows of `hidden_size` for each gate:

RNN    h = tanh(a + r), or relu
LSTM   i, f, o = sigmoid(a + r), g = tanh(a + r); c = f c + i g; h = o tanh(c).   Order: i, f, g, o
GRU    z, s = sigmoid(a + r), n = tanh(a_n + s r_n); h = n + z (h - n).   Order: s, z, n
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

import simparallel.nn.init as init
from simparallel.autograd import Tensor, functions as F
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import get_namespace
from simparallel.base.checks import check_choice, check_integer
from simparallel.base.dry_new import uninitialized
from simparallel.errors import ShapeError
from simparallel.nn.layers import Dropout, check_floating
from simparallel.nn.module import Module, Parameter

# (h,), for an LSTM (h, c).
State = tuple[Tensor, ...]


class AbstractRecurrent(Module):
    """Base of layers and cells: gates, weights, and a step."""

    gates: ClassVar[int] = 1
    num_states: ClassVar[int] = 1
    nonlinearity: str | None = None

    def _step(self, a: Tensor, r: Tensor, state: State) -> State:
        raise TypeError(f"{type(self).__name__} does not define _step")

    def __init__(self, input_size: int, hidden_size: int, bias: bool, dtype: Any) -> None:
        super().__init__()
        self.input_size = check_integer(type(self).__name__, "input_size", input_size, 1)
        self.hidden_size = check_integer(type(self).__name__, "hidden_size", hidden_size, 1)
        self.bias = bool(bias)
        self._dtype = check_floating(self, dtype)

    def _add_weights(self, input_size: int, suffix: str) -> None:
        rows = self.gates * self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, input_size), "weight_hh": (rows, self.hidden_size)}
        if self.bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        for name, shape in shapes.items():
            self.register_parameter(name + suffix, Parameter(uninitialized(shape, self._dtype)))

    def reset_parameters(self) -> None:
        """Draw new initial values: all uniform in ±1 / sqrt(hidden_size)."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self._parameters.values():
            if parameter is not None:
                init.uniform_(parameter, -bound, bound)

    def _weights(self, suffix: str) -> tuple[Any, Any, Any, Any]:
        """Return weight_ih, weight_hh, bias_ih, bias_hh."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return tuple(self._parameters.get(name + suffix) for name in names)  # type: ignore[return-value]

    def _states(self, hx: Any, shape: tuple[int, ...], x: Tensor) -> State:
        """Return the given states as Tensors, or zeros. Raises ShapeError."""
        if hx is None:
            zeros = get_namespace(x.data).zeros(shape, self._parameters_dtype)
            return (Tensor._result(zeros, None, x._device),) * self.num_states
        states = tuple(map(as_tensor, hx)) if self.num_states > 1 else (as_tensor(hx),)
        if len(states) != self.num_states or any(state.shape != shape for state in states):
            given = ", ".join(str(state.shape) for state in states)
            each = "h and c" if self.num_states > 1 else "h"
            raise ShapeError(f"{type(self).__name__}: the state has shapes {given}, expected {each} of shape {shape}.")
        return states

    @property
    def _parameters_dtype(self) -> Any:
        return next(p.dtype for p in self._parameters.values() if p is not None)

    def _check_features(self, x: Tensor, dims: tuple[int, int]) -> None:
        if x.ndim not in dims or x.shape[-1] != self.input_size:
            raise ShapeError(
                f"{type(self).__name__}: x has shape {x.shape}, expected {dims[0]} or {dims[1]} dims, the last one of "
                f"{self.input_size} features."
            )


class AbstractLayers(AbstractRecurrent):
    """x: (t, n, input_size), or (n, t, input_size) with batch_first, or (t, input_size) without a batch.

    Called as `layer(x, hx=None)` with a state hx; returns (y, state). y: (t, n, d * hidden_size), with the dims in the
    order of x: the features of the last layer; d is 2 if bidirectional, with both directions side by side, else 1.
    State: h of shape (num_layers * d, n, hidden_size), layer after layer, forward before backward direction. The
    initial state is zero unless given; the returned state is the state after the last step.

    Args:
        input_size: features of x.
        hidden_size: features of h.
        num_layers: number of layers; each reads the output of the previous one.
        bias: whether the layers have biases.
        batch_first: the batch is dim 0 of x and y (not of states).
        dropout: probability of dropping an element between layers, in training.
        bidirectional: a second half of each layer reads x in reverse.
        dtype: floating-point dtype of the parameters.

    Attributes:
        weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0: Parameters of layer 0, and so on; with the suffix _reverse
            for the second direction. Rows are ordered by gate, see the module; uniform in ±1 / sqrt(hidden_size).

    Raises:
        InputError: a bad setting. When called, ShapeError for x or a state of another shape.
    """

    _shown = {"num_layers": 1, "bias": True, "batch_first": False, "bidirectional": False, "nonlinearity": None}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, dtype)
        self.num_layers = check_integer(type(self).__name__, "num_layers", num_layers, 1)
        self.batch_first, self.bidirectional = bool(batch_first), bool(bidirectional)
        self.between = Dropout(dropout)
        self._directions = ("", "_reverse") if bidirectional else ("",)
        size = self.input_size
        for layer in range(self.num_layers):
            for direction in self._directions:
                self._add_weights(size, f"_l{layer}{direction}")
            size = self.hidden_size * len(self._directions)
        self.reset_parameters()

    def forward(self, x: Any, hx: Any = None) -> tuple[Tensor, Any]:
        x = as_tensor(x)
        self._check_features(x, (2, 3))
        has_batch = x.ndim == 3
        if not has_batch:
            # A batch of one, removed again at the end.
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        if x.shape[0] == 0:
            raise ShapeError(f"{type(self).__name__}: the sequence has no steps.")
        shape: tuple[int, ...] = (self.num_layers * len(self._directions), x.shape[1], self.hidden_size)
        if not has_batch:
            hx = None if hx is None else _map(hx, lambda state: as_tensor(state).unsqueeze(1))
        states = self._states(hx, shape, x)
        ends: list[State] = []
        for layer in range(self.num_layers):
            halves = []
            for number, direction in enumerate(self._directions):
                begin = tuple(state[layer * len(self._directions) + number] for state in states)
                steps, end = self._run(x, begin, f"_l{layer}{direction}", bool(number))
                halves.append(F.stack(steps, 0))
                ends.append(end)
            x = halves[0] if len(halves) == 1 else F.cat(halves, -1)
            if layer + 1 < self.num_layers:
                x = self.between(x)
        last = tuple(F.stack([end[i] for end in ends], 0) for i in range(self.num_states))
        if not has_batch:
            x, last = x.squeeze(1), tuple(state.squeeze(1) for state in last)
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, last if self.num_states > 1 else last[0]

    def _run(self, x: Tensor, state: State, suffix: str, is_reverse: bool) -> tuple[list[Tensor], State]:
        """Return h of each step, and the state after the last step."""
        weight_ih, weight_hh, bias_ih, bias_hh = self._weights(suffix)
        # One product gives the inputs' contribution to all steps; only the recurrent part has to run step by step.
        inputs, step = F.linear(x, weight_ih, bias_ih), self._step
        steps = []
        for t in reversed(range(x.shape[0])) if is_reverse else range(x.shape[0]):
            state = step(inputs[t], F.linear(state[0], weight_hh, bias_hh), state)
            steps.append(state[0])
        return steps[::-1] if is_reverse else steps, state

    def extra_repr(self) -> str:
        dropout = f"dropout={self.between.p}" if self.between.p else ""
        return ", ".join(filter(None, (f"{self.input_size}, {self.hidden_size}", super().extra_repr(), dropout)))


class RNN(AbstractLayers):
    __doc__ = "Elman network, with tanh or relu (`nonlinearity`).\n\n    " + (AbstractLayers.__doc__ or "")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: Any = np.float32,
    ) -> None:
        check_choice("RNN", "nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype)
        self.nonlinearity = nonlinearity

    def _step(self, a: Tensor, r: Tensor, state: State) -> State:
        return (F.relu(a + r) if self.nonlinearity == "relu" else F.tanh(a + r),)


class LSTM(AbstractLayers):
    __doc__ = "Hochreiter and Schmidhuber 1997, with forget gates. A state is a pair (h, c).\n\n    " + (
        AbstractLayers.__doc__ or ""
    )
    gates, num_states = 4, 2

    def _step(self, a: Tensor, r: Tensor, state: State) -> State:
        i, f, g, o = F.chunk(a + r, 4, -1)
        c = F.sigmoid(f) * state[1] + F.sigmoid(i) * F.tanh(g)
        return F.sigmoid(o) * F.tanh(c), c


class GRU(AbstractLayers):
    __doc__ = "Cho et al. 2014, in the form of cuDNN.\n\n    " + (AbstractLayers.__doc__ or "")
    gates = 3

    def _step(self, a: Tensor, r: Tensor, state: State) -> State:
        (a_s, a_z, a_n), (r_s, r_z, r_n) = F.chunk(a, 3, -1), F.chunk(r, 3, -1)
        n = F.tanh(a_n + F.sigmoid(a_s + r_s) * r_n)
        return (n + F.sigmoid(a_z + r_z) * (state[0] - n),)


class AbstractCell(AbstractRecurrent):
    """x: (n, input_size) or (input_size,).   One step; returns the new state.

    Args:
        input_size: features of x.
        hidden_size: features of h.
        bias: whether the cell has biases.
        dtype: floating-point dtype of the parameters.

    Attributes:
        weight_ih, weight_hh, bias_ih, bias_hh: Parameters, uniform in ±1 / sqrt(hidden_size) at first.

    Raises:
        InputError: a bad setting. When called, ShapeError for x or a state of another shape.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, dtype: Any = np.float32) -> None:
        super().__init__(input_size, hidden_size, bias, dtype)
        self._add_weights(self.input_size, "")
        self.reset_parameters()

    def forward(self, x: Any, hx: Any = None) -> Any:
        x = as_tensor(x)
        self._check_features(x, (1, 2))
        state = self._states(hx, (*x.shape[:-1], self.hidden_size), x)
        weight_ih, weight_hh, bias_ih, bias_hh = self._weights("")
        after = self._step(F.linear(x, weight_ih, bias_ih), F.linear(state[0], weight_hh, bias_hh), state)
        return after if self.num_states > 1 else after[0]

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")


class RNNCell(AbstractCell):
    __doc__ = "One step of `RNN`, with tanh or relu (`nonlinearity`).   " + (AbstractCell.__doc__ or "")
    _step = RNN._step

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", dtype: Any = np.float32
    ) -> None:
        check_choice("RNNCell", "nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(input_size, hidden_size, bias, dtype)
        self.nonlinearity = nonlinearity


class LSTMCell(AbstractCell):
    __doc__ = "One step of `LSTM`; a state is a pair (h, c).   " + (AbstractCell.__doc__ or "")
    gates, num_states = 4, 2
    _step = LSTM._step


class GRUCell(AbstractCell):
    __doc__ = "One step of `GRU`.   " + (AbstractCell.__doc__ or "")
    gates = 3
    _step = GRU._step


def _map(hx: Any, change: Callable[[Any], Any]) -> Any:
    return tuple(map(change, hx)) if isinstance(hx, (tuple, list)) else change(hx)

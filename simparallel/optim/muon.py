"""Muon: steps along the momentum of a matrix, made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from simparallel.arrays.host.sums import wider
from simparallel.arrays.seam import arrays_of
from simparallel.autograd import Tensor
from simparallel.backend import Array, get_namespace
from simparallel.base.checks import check_integer, check_number
from simparallel.clock.memory import BUFFERS
from simparallel.clock.recorder import Recorder, observer_of
from simparallel.errors import InputError
from simparallel.optim.optimizer import Group, Optimizer, settings_among
from simparallel.optim.owners import on_owners

# Of the ratio of rates, by the name of `adjust_lr_fn`; torch.optim.Muon's constants.
RATIOS: dict[str | None, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / max(columns, 1))),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
RATIOS[None] = RATIOS["original"]
_MATRICES = "matrices"  # in the queue of a step


class Muon(Optimizer):
    """b = b + (1 - momentum) (g - b);   p = p - lr weight_decay p - lr r orthogonal(g + momentum (b - g))

    where r is the factor of `adjust_lr_fn`. Without `nesterov`, the step is along orthogonal(b). Jordan et al. 2024,
    "Muon: an optimizer for hidden layers in neural networks". Arguments, defaults and factors are those of
    `torch.optim.Muon`; but that multiplies matrices in bfloat16, and this class in the dtype of the state.
    orthogonal(x) is near U V' of the singular value decomposition x = U S V': x is divided by its norm, then `ns_steps`
    Newton-Schulz iterations, x = a x + (b A + c A A) x with A = x x', bring the singular values to 0.7 … 1.2. Give
    biases, norms and embeddings to another optimizer, such as AdamW.

    An update needs the whole matrix. Where ranks have slices of it (`fully_shard`, tensor parallelism), one of these
    ranks is its owner: it gathers the slices of the momentum, and sends back the slices of the result. Owners are
    chosen by longest processing time first. The result is bit-identical to that of an uncut matrix.

    Args:
        params: Tensors of 2 dims, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        weight_decay: decay of the weights, decoupled as in `AdamW`, 0 or more.
        momentum: share of b that is kept, 0 or more.
        nesterov: use Nesterov momentum.
        ns_coefficients: (a, b, c).
        eps: the least norm to divide by, 0 or more.
        ns_steps: number of steps, 0 or more.
        adjust_lr_fn: the factor r for a matrix of m rows and n columns: "original", or None, sqrt(max(1, m / n));
            "match_rms_adamw" 0.2 sqrt(max(m, n)), for rates of AdamW: Liu et al. 2025, "Muon is scalable for LLM
            training".

    Raises:
        InputError: a parameter of another number of dims; and as `Optimizer`, with DTypeError and AutogradError.

    Collective: `step`, if a parameter is cut.
    Cost: two all_to_alls a step, for all matrices with slices on the same ranks; each receives (P-1)/P of the bytes of
        a rank's slices.
    """

    state_names = ("momentum_buffer",)
    numbers = ("lr", "weight_decay", "momentum", "eps")
    flags = ("nesterov",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        super().__init__(params, settings_among(locals()))

    def check(self, group: Group) -> None:
        super().check(group)
        check_integer(self._name, "ns_steps", group["ns_steps"])
        factors, name = group["ns_coefficients"], group["adjust_lr_fn"]
        if not isinstance(factors, (tuple, list)) or len(factors) != 3:
            raise InputError(f"{self._name}: ns_coefficients={factors!r} must be three numbers.")
        for i, factor in enumerate(factors):
            check_number(self._name, f"ns_coefficients[{i}]", factor, low=-math.inf)
        if name not in RATIOS:
            raise InputError(f"{self._name}: adjust_lr_fn={name!r} must be one of {', '.join(map(repr, RATIOS))}.")

    def _check_param(self, i: int, param: Any, known: set[Tensor]) -> None:
        super()._check_param(i, param, known)
        if param.ndim != 2:
            raise InputError(
                f"{self._name}: params[{i}] has shape {param.shape}, and only matrices can be made orthogonal; give "
                "parameters of other than 2 dims to another optimizer, such as AdamW."
            )

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        b, momentum = self._remembered(param, group)["momentum_buffer"], group["momentum"]
        direction = get_namespace(b).empty_like(b)
        observer_of(param._device).memory.hold(direction, BUFFERS)
        numbers, nesterov = (1 - momentum, momentum), group["nesterov"]
        self._apply(_momentum, param, grad, [b, direction], numbers, 1, nesterov=nesterov)
        if self._queued is None or not (arrays_of(b).joins_updates or param.placement):
            self._finish([(param, direction, group)])
        else:
            # One all_to_all carries the slices of all matrices.
            self._queued.setdefault(_MATRICES, []).append((param, direction, group))

    def _compute_queued(self) -> None:
        entries = (self._queued or {}).pop(_MATRICES, [])
        super()._compute_queued()
        self._finish(entries)
        super()._compute_queued()

    def _finish(self, entries: list[tuple[Tensor, Array, Group]]) -> None:
        """Make the directions orthogonal, and update the parameters along them. Collective: yes, for slices.

        Args:
            entries: each parameter, its direction, and its group.
        """
        together: dict[Any, list[tuple[Tensor, Array, Group]]] = {}
        for entry in entries:
            param, direction, group = entry
            ranks = param.interpreter.slice_group(param) if param.interpreter else None
            if ranks is not None:
                together.setdefault((ranks, direction.dtype), []).append(entry)
            elif direction.size:
                self._move(param, self._orthogonal(*entry), group)
        for (ranks, _), cut in together.items():
            on_owners(self._orthogonal, cut, [self.matrix_work(param, group)[0] for param, _, group in cut], ranks)
            for entry in cut:
                self._move(*entry)

    def _orthogonal(self, param: Tensor, whole: Array, group: Group) -> Array:
        """Return `orthogonal` of a matrix; record its cost and its memory."""
        observer = observer_of(param._device)
        start_ns = observer.begin("Muon.orthogonal")
        found = orthogonal(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        observer.memory.hold(found, BUFFERS)
        if isinstance(observer, Recorder):
            observer.work("Muon.orthogonal", "optimizer", start_ns, *self.matrix_work(param, group), found.itemsize)
        return found

    def _move(self, param: Tensor, direction: Array, group: Group) -> None:
        lr, ratio = group["lr"], RATIOS[group["adjust_lr_fn"]](*param.shape)
        self._apply(_muon, param, direction, [], (1 - lr * group["weight_decay"], lr * ratio), 1)

    def work(self, group: Group) -> tuple[int, int]:
        # b 3, direction 3 with Nesterov, step 3; read grad, direction twice and p, write these; read and write b
        return 6 + 3 * group["nesterov"], 7

    def matrix_work(self, param: Tensor, group: Group) -> tuple[int, int]:
        (m, n), steps, itemsize = sorted(param.shape), group["ns_steps"], wider(param.dtype).itemsize
        flops = 3 * m * n + steps * (4 * m * m * n + 2 * m**3 + 3 * m * m + 2 * m * n)
        return flops, itemsize * (5 * m * n + steps * (8 * m * n + 9 * m * m))


def _momentum(
    xp: Any, p: Array, g: Array, b: Array, direction: Array, new: float, kept: float, temporary: Array | None = None,
    *, nesterov: bool,
) -> None:  # fmt: skip
    change = xp.subtract(g, b, out=temporary)
    change *= new
    b += change  # = momentum b + (1 - momentum) g
    if nesterov:
        change = xp.subtract(b, g, out=temporary)
        change *= kept
        xp.add(change, g, out=direction)
    else:
        direction[...] = b


def _muon(xp: Any, p: Array, direction: Array, factor: float, rate: float, temporary: Array | None = None) -> None:
    p *= factor
    p -= xp.multiply(direction, rate, out=temporary)


def orthogonal(x: Array, coefficients: tuple[float, float, float], steps: int, eps: float) -> Array:
    """Return a matrix near U V' of x = U S V', by Newton-Schulz iterations; see `Muon`. x does not change."""
    a, b, c = map(float, coefficients)
    arrays, is_tall = arrays_of(x), x.shape[0] > x.shape[1]
    xp = arrays.xp
    x = x / xp.maximum(xp.sqrt((x * x).sum()), float(eps))
    if is_tall:
        x = x.T
    for _ in range(steps):
        gram = arrays.matmul(x, x.T)
        factor = arrays.matmul(gram, gram)
        factor *= c
        gram *= b
        factor += gram
        x = a * x + arrays.matmul(factor, x)
    return xp.ascontiguousarray(x.T) if is_tall else x

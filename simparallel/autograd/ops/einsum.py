"""Einstein summation: the subscripts are the op's rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

from simparallel.arrays.host.sums import wider
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Spec, Work, instance
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import InputError, ShapeError

_TENSOR = re.compile(r"[a-zA-Z]*(?:\.\.\.)?[a-zA-Z]*")


class Einsum(Op):
    """y = the sum of the product of the inputs over the letters that "->" drops, as in `np.einsum`

    Every letter is a dim and may be cut; if a dropped letter is cut, y is a partial sum. "..." stands for leading
    dims that broadcast. A tensor has each letter at most once (`functions.einsum` takes diagonals first). float16 is
    summed in float32.

    Args:
        equation: such as "bik,bkj->bij". Without "->", y has the letters that occur once, in alphabetical order.

    Raises:
        InputError: the equation is not valid, or a tensor has a letter twice.
    """

    def __init__(self, equation: str) -> None:
        self.equation = explicit(equation)
        left, right = self.equation.split("->")
        self._left, self._right = left.split(","), right
        for tensor in (*self._left, right):
            letters = tensor.replace("...", "")
            if len(set(letters)) < len(letters):
                raise InputError(f"Einsum: {tensor!r} in {equation!r} has a letter twice; use functions.einsum.")

    @property
    def is_matrix_product(self) -> bool:
        shared = set.intersection(*(set(tensor) for tensor in self._left)) if len(self._left) > 1 else set()
        return bool(shared - set(self._right) - {"."})

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        if len(shapes) != len(self._left):
            raise ShapeError(f"{self.equation!r} takes {len(self._left)} tensors, got {len(shapes)}")
        sides = (", ".join(map(_spaced, self._left)), _spaced(self._right))
        return " -> ".join(sides)

    def forward(self, ctx: Context, *arrays: Array) -> Array:
        dtype = ctx.plan.output.dtype
        ctx.operands = tuple(array.astype(wider(array.dtype), copy=False) for array in arrays)
        y = ctx.arrays.einsum(self.equation, *ctx.operands, optimize=True)
        return y.astype(dtype) if y.base is None else y.astype(dtype, copy=True)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return [self._gradient(ctx, i, dy) if needed else None for i, needed in enumerate(ctx.needs)]

    def _gradient(self, ctx: Context, i: int, dy: Array) -> Array:
        """Compute the gradient of input i: the product of dy and the other inputs, summed over the letters i lacks."""
        # One einsum gives the letters of input i that also occur in y or in another input.
        own = self._left[i]
        others = [tensor for j, tensor in enumerate(self._left) if j != i]
        arrays = [array for j, array in enumerate(ctx.operands) if j != i]
        known = set("".join((self._right, *others)))
        found = "".join(letter for letter in own.replace("...", "") if letter in known)
        spread = "..." if any("..." in tensor for tensor in (self._right, *others)) else ""
        equation = f"{','.join((self._right, *others))}->{spread}{found}"
        gradient = ctx.arrays.einsum(equation, dy.astype(wider(dy.dtype), copy=False), *arrays, optimize=True)
        # Letters that occur in this input alone were summed in forward: broadcast the gradient along them.
        shape = ctx.plan.inputs[i].shape
        lead = len(shape) - len(own.replace("...", "")) if "..." in own else 0
        extra = gradient.ndim - len(found)
        at = own.index("...") if "..." in own else 0
        letters = own.replace("...", "")
        gradient = gradient.reshape(
            *gradient.shape[:extra],
            *(gradient.shape[extra + found.index(letter)] if letter in known else 1 for letter in letters),
        )
        # The dims of "..." come first here: sum those that were broadcast, then move them to their place in input i.
        sizes = (*shape[:at], *shape[at + lead :])
        gradient = ctx.xp.broadcast_to(gradient, (*gradient.shape[:extra], *sizes))
        gradient = ctx.arrays.unbroadcast(gradient, (*shape[at : at + lead], *sizes))
        order = (*range(lead, lead + at), *range(lead), *range(lead + at, len(shape)))
        return gradient.transpose(order).astype(dy.dtype)

    def work(self, *inputs: Spec) -> Work:
        sizes: dict[str, int] = {}
        for tensor, spec in zip(self._left, inputs, strict=True):
            letters = tensor.replace("...", "")
            at = tensor.index("...") if "..." in tensor else len(letters)
            named = (*spec.shape[:at], *spec.shape[len(spec.shape) - len(letters) + at :])
            sizes.update(zip(letters, named, strict=True))
        y = self.infer(*inputs)
        spread = prod(y.shape[: len(y.shape) - len(self._right.replace("...", ""))])
        flops = prod(sizes.values()) * spread * max(2 * len(inputs) - 2, 1)
        return Work(max(flops, prod(y.shape)), y.size_bytes + sum(spec.size_bytes for spec in inputs))


def _spaced(tensor: str) -> str:
    return " ".join(re.findall(r"\.\.\.|[a-zA-Z]", tensor))


def explicit(equation: Any) -> str:
    """Remove blanks from the equation and add "->" if it is missing.

    Raises:
        InputError: the equation is not valid.
    """
    if not isinstance(equation, str):
        raise InputError(f"einsum: the equation comes first, as text such as 'ij,jk->ik'; got {equation!r:.80}.")
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    tensors = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    bad = [tensor for tensor in (*tensors, right) if not _TENSOR.fullmatch(tensor)]
    unknown = sorted(set(right.replace("...", "")) - set(left))
    if bad or unknown or ("..." in left) != ("..." in right):
        why = (
            f"{bad[0]!r} is not a list of letters"
            if bad
            else f"{unknown[0]!r} is not a letter of any input"
            if unknown
            else "'...' has to stand on both sides"
        )
        raise InputError(f"einsum: {equation!r}: {why}; write it as 'ij,jk->ik'.")
    return f"{left}->{right}"


@function()
def einsum(equation: str, *operands: Any) -> Tensor:
    """Compute an Einstein summation, as `np.einsum` and `torch.einsum`: `einsum("bik,bkj->bij", x, y)`.

    Args:
        equation: see `Einsum`; a letter that occurs twice in a tensor selects the diagonal of these dims.
        operands: a tensor, an array or a list for each part of the equation; or one list of them.

    Raises:
        InputError: the equation cannot be read. ShapeError: it does not fit the shapes.
    """
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    tensors = [as_tensor(value) for value in given]
    left, right = explicit(equation).split("->")
    parts = left.split(",")
    if len(parts) == len(tensors):
        for i, part in enumerate(parts):
            parts[i], tensors[i] = _diagonal(part, tensors[i])
    return instance(Einsum, f"{','.join(parts)}->{right}")(*tensors)


def _diagonal(part: str, x: Tensor) -> tuple[str, Tensor]:
    """Take the diagonal over repeated letters. Return the remaining letters and the tensor."""
    letters = part.replace("...", "")
    twice = next((letter for letter in letters if letters.count(letter) > 1), None)
    if twice is None:
        return part, x
    if x.ndim < len(letters):
        raise ShapeError(f"einsum: {part!r} needs {len(letters)} dims, got shape {x.shape}.")
    head, _, tail = part.partition("...") if "..." in part else (part, "", "")
    first, second = [
        i if i < len(head) else i + x.ndim - len(letters) for i, letter in enumerate(letters) if letter == twice
    ][:2]
    if x.shape[first] != x.shape[second]:
        raise ShapeError(f"einsum: {twice!r} is {x.shape[first]} and {x.shape[second]} in shape {x.shape}.")
    # Move the pair to the front and merge it into one dim of size n * n: its diagonal is every (n + 1)-th element.
    rest = [i for i in range(x.ndim) if i not in (first, second)]
    size = x.shape[first]
    flat = x.permute(first, second, *rest).reshape(size * size, *(x.shape[i] for i in rest))
    kept_head = head.replace(twice, "")
    kept = f"{kept_head}...{tail.replace(twice, '')}" if "..." in part else kept_head
    diagonal = flat[:: size + 1] if size else flat
    place = len(kept_head)
    order = (*range(1, place + 1), 0, *range(place + 1, diagonal.ndim))
    named = f"{kept_head}{twice}{kept[place:]}"
    return _diagonal(named, diagonal.permute(*order))

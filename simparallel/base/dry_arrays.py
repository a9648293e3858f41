"""Arrays without data: NumPy arrays whose memory is reserved and never touched.

A `DryArray` has everything of an array but its elements: shape, dtype, strides, views, the array that owns its memory.
So an op makes the same views and copies of dry arrays as of real ones, keeps as many bytes for backward, and computes
nothing. The operating system allocates memory only when it is first written, so these arrays take none, of any size.

Every function of NumPy that would read elements is one of three kinds here: a ufunc, whose result follows from shapes
and dtypes; a function with an entry in `_RULES`; or a function written in Python, which runs on dry arrays itself.
All others raise `UnknownValueError`, and so does a program that asks for an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from operator import mul
from types import BuiltinFunctionType
from typing import Any

import numpy as np

from simparallel.backend import has_data, register_namespace
from simparallel.base.callsite import LIBRARIES, user_line
from simparallel.base.system import AddressSpace, address_space
from simparallel.errors import UnknownValueError
from simparallel.rank_local import RankLocal

# From this size on, an array gets a memory mapping of its own; NumPy's allocator is faster for smaller ones.
_LARGE_BYTES = 1 << 20


def _unknown(what: str) -> UnknownValueError:
    place = user_line(LIBRARIES)
    return UnknownValueError(
        f"{what} at {place}: a dry run, or a rank that runs another stage of a pipeline, knows shapes and dtypes, but "
        "no values. Decide by something else, such as the number of the step; print or add up item() in place of "
        "float(); or, in a dry run, give the value: dry_run(..., unknown=1.0).",
        place=place,
    )


def _has_elements(found: Any) -> bool:
    if isinstance(found, (tuple, list)):
        return len(found) > 0 and all(map(_has_elements, found))
    return isinstance(found, (np.ndarray, np.generic)) and not isinstance(found, DryArray)


class _Unknown:
    """Conversions and decisions that need a value: they take the one that the caller has given, or raise an error."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise _unknown("numpy.asarray()")

    # Python would turn an `UnknownNumber` into a plain NaN here, and a decision by NaN raises no error.
    def __bool__(self) -> bool:
        return bool(_given("a decision by a value"))

    def __float__(self) -> float:
        return float(_given("float()"))

    def __int__(self) -> int:
        return int(_given("int()"))

    def __index__(self) -> int:
        return int(_given("an index"))

    def __str__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return str(self)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, where a function of NumPy only writes elements."""


class DryArray(_Unknown, np.ndarray):
    """An array of a shape and dtype without elements. Made by `empty`; results of dry arrays are dry."""

    @property
    def base(self) -> Any:
        """The array that owns the memory, as in a real run; None if it is this one."""
        return None if isinstance(super().base, AddressSpace) else super().base

    # --- computing: the results have shapes and no elements ------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **settings: Any) -> Any:
        if method == "at":
            return None
        if out is not None and all(one is not None for one in out):
            out = tuple(map(without_data, out))
            return out[0] if len(out) == 1 else out
        if method == "reduce":
            return _reduced(ufunc, inputs[0], **settings)
        if method != "__call__":
            return _RULES_OF_METHODS[method](ufunc, *inputs, **settings)
        if ufunc.signature is not None:
            return _products(ufunc, inputs, settings.get("axes"))
        return _elementwise(ufunc, inputs, settings.get("dtype"))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rule = _RULES.get(function)
        if rule is not None:
            return rule(*args, **kwargs)
        if isinstance(function._implementation, BuiltinFunctionType) and function not in _METADATA:
            raise _unknown(f"numpy.{function.__name__}")
        # A function in Python calls ufuncs and functions with rules. NumPy's own method would refuse `DryScalar`.
        with np.errstate(all="ignore"):
            found = function._implementation(*args, **kwargs)
        # Some of them convert their arguments to plain arrays first: the result then comes from unwritten memory.
        if _has_elements(found):
            raise _unknown(f"numpy.{function.__name__}")
        return found

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        # NumPy's own operator reads a 0-d exponent, to choose a faster function.
        return np.power(self, other)

    # --- methods that would copy elements -------------------------------------------------------------

    def copy(self, order: Any = "C") -> Any:
        return _like(self, order=order)

    def astype(  # type: ignore[override]
        self, dtype: Any, order: Any = "K", casting: Any = "unsafe", subok: bool = True, copy: bool = True
    ) -> Any:
        is_right = self.dtype == np.dtype(dtype)
        if order == "C":
            is_right = is_right and self.flags.c_contiguous
        return self if is_right and not copy else _like(self, dtype, order)

    def reshape(self, *shape: Any, order: Any = "C", copy: Any = None) -> Any:
        if reshapes_in_place(self, shape, order):
            return super().reshape(*shape, order=order)
        # NumPy reshapes a copy, too, and returns a view of it.
        return super(DryArray, self.copy(order)).reshape(*shape, order=order)

    def ravel(self, order: Any = "C") -> Any:
        return super().ravel() if self.flags.c_contiguous else self.flatten()

    def flatten(self, order: Any = "C") -> Any:
        return empty((self.size,), self.dtype)

    def __getitem__(self, key: Any) -> Any:
        items = key if isinstance(key, tuple) else (key,)
        if any(isinstance(item, (np.ndarray, list, DryScalar)) for item in items):
            return _selected(self, items)
        found = super().__getitem__(key)
        return found if isinstance(found, np.ndarray) else DryScalar(self.dtype)

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    __setitem__ = fill = sort = partition = put = _nothing

    def argsort(self, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:  # type: ignore[override]
        return empty(self.shape if axis is not None else (self.size,), np.intp)

    def argmax(self, axis: Any = None, out: Any = None, *, keepdims: bool = False) -> Any:
        return _reduced(np.maximum, self, axis=axis, keepdims=keepdims, dtype=np.intp)

    argmin = argmax

    def take(self, indices: Any, axis: Any = None, out: Any = None, mode: Any = "raise") -> Any:
        return _take(self, indices, axis, out)

    def repeat(self, repeats: Any, axis: Any = None) -> Any:
        shape = list(self.shape if axis is not None else (self.size,))
        axis = axis or 0
        shape[axis] = int(np.broadcast_to(repeats, (shape[axis],)).sum())
        return empty(shape, self.dtype)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy("K")

    def byteswap(self, inplace: bool = False) -> Any:
        return self if inplace else self.copy()

    def argpartition(self, kth: Any, axis: int = -1, kind: Any = None, order: Any = None) -> Any:  # type: ignore[override]
        return empty(self.shape, np.intp)

    def searchsorted(self, v: Any, side: Any = "left", sorter: Any = None) -> Any:
        return _result(np.shape(v), np.intp)

    def dot(self, other: Any, out: Any = None) -> Any:
        return _dot(self, other, out)

    def cumsum(self, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        return _accumulated(np.add, self, axis, dtype)

    def cumprod(self, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        return _accumulated(np.multiply, self, axis, dtype)

    def round(self, decimals: int = 0, out: Any = None) -> Any:  # type: ignore[override]
        return _scalar(self.copy("K")) if out is None else out

    # --- values ---------------------------------------------------------------------------------------

    def item(self, *args: Any) -> Any:
        return value_of("item()")

    def __repr__(self) -> str:
        return f"DryArray(shape={self.shape}, dtype={self.dtype})"

    def __str__(self) -> str:
        return repr(self) if self.shape else "?"

    def __reduce__(self) -> Any:
        return empty, (self.shape, self.dtype)


def _refused(name: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise _unknown(f"{name}()")

    return refuse


_READING = "choose compress dump dumps getfield nonzero tobytes tofile tolist tostring trace"
for _name in _READING.split():
    setattr(DryArray, _name, _refused(_name))


class DryScalar(_Unknown, np.lib.mixins.NDArrayOperatorsMixin):
    """The counterpart of a NumPy scalar, which a full reduction gives: it is not an array, and takes no memory."""

    def __init__(self, dtype: Any) -> None:
        self._array = empty((), dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._array, name)
        return (lambda *args, **kwargs: _scalar(value(*args, **kwargs))) if callable(value) else value

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        inputs = tuple(x._array if isinstance(x, DryScalar) else x for x in inputs)
        return self._array.__array_ufunc__(ufunc, method, *inputs, **settings)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(plain, value))
            return value._array if isinstance(value, DryScalar) else value

        return self._array.__array_function__(function, types, plain(args), {k: plain(v) for k, v in kwargs.items()})

    def __getitem__(self, key: Any) -> Any:
        return self._array[key]

    def reshape(self, *shape: Any) -> Any:
        return self if shape in ((), ((),)) else empty((1,), self._array.dtype).reshape(*shape)

    __repr__ = _Unknown.__str__


class UnknownNumber(float):
    """A number that a dry run does not know: it may be printed and computed with; a decision by it raises an error."""

    def __new__(cls) -> UnknownNumber:
        return super().__new__(cls, math.nan)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        return empty(()).__array_ufunc__(ufunc, method, *inputs, **settings)

    def _computed(self, *_: Any) -> UnknownNumber:
        return self

    def _asked(self, *_: Any) -> Any:
        raise _unknown("a decision by a value")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __neg__ = __abs__ = __round__ = _computed  # type: ignore[assignment]
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __trunc__ = _asked
    __hash__ = float.__hash__

    __repr__ = __str__ = _Unknown.__str__
    __format__ = _Unknown.__format__


class _Given(RankLocal):
    """What a dry run takes for unknown values, as its caller has said: a number, or a function that returns one.

    Attributes:
        new: in a dry run, makes the array of a parameter from its shape and dtype.
    """

    value: Any = None
    new: Callable[[Any, Any], np.ndarray] | None = None


given = _Given()


def value_of(what: str) -> Any:
    """Return the value that the caller of the dry run gives for unknown ones, or an `UnknownNumber`."""
    if given.value is not None:
        return _given(what)
    return UnknownNumber()


def _given(what: str) -> Any:
    if given.value is None:
        raise _unknown(what)
    return given.value() if callable(given.value) else given.value


# --- new arrays ---------------------------------------------------------------------------------------


def empty(shape: Any, dtype: Any = float, order: Any = "C", strides: Any = None, **_: Any) -> DryArray:
    """Return a new array without data."""
    size_bytes = np.dtype(dtype).itemsize * (math.prod(shape) if isinstance(shape, (tuple, list)) else int(shape))
    memory = address_space(size_bytes) if size_bytes >= _LARGE_BYTES else None
    return np.ndarray.__new__(DryArray, shape, dtype, memory, 0, strides, order if order in ("C", "F") else "C")


def dried(array: np.ndarray) -> DryArray:
    """Return an array like a real one, but without data."""
    return array if isinstance(array, DryArray) else _like(array)


def without_data(array: np.ndarray) -> DryArray:
    """Return a view without data of an array, into which a dry run has written unknown values."""
    return array if isinstance(array, DryArray) else array.view(DryArray)


def _like(array: Any, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, **_: Any) -> DryArray:
    dtype = array.dtype if dtype is None else np.dtype(dtype)
    shape = array.shape if shape is None else tuple(np.atleast_1d(shape).tolist())
    if order in ("K", "A") and (array.flags.c_contiguous or (order == "K" and len(shape) != array.ndim)):
        order = "C"
    if order != "K" or array.flags.f_contiguous:
        return empty(shape, dtype, "F" if order == "F" or (order != "C" and array.flags.f_contiguous) else "C")
    return _ordered(shape, array.strides, dtype)


def _ordered(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> DryArray:
    """Return an array whose dims have the same order in memory as with these strides, like NumPy's order "K"."""
    size, found = np.dtype(dtype).itemsize, [0] * len(shape)
    for dim in sorted(range(len(shape)), key=lambda d: (abs(strides[d]), -d)):
        found[dim] = size
        size *= max(shape[dim], 1)
    return empty(shape, dtype, strides=tuple(found))


def _plain(x: DryArray) -> np.ndarray:
    return np.ndarray.view(x, np.ndarray)


def _result(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new array, or a scalar in place of a 0-d array, as NumPy's functions do."""
    return empty(shape, dtype) if shape else DryScalar(dtype)


def _scalar(value: Any) -> Any:
    return DryScalar(value.dtype) if isinstance(value, DryArray) and not value.shape else value


def reshapes_in_place(x: np.ndarray, shape: tuple[Any, ...], order: str) -> bool:
    """Return whether NumPy reshapes an array without a copy: a new dim begins wherever the old strides have a gap.

    Since 2.1 NumPy itself can be asked, by `copy=False`.
    """
    is_fortran = order == "F" or (order == "A" and x.flags.fnc)
    if not x.size or (x.flags.f_contiguous if is_fortran else x.flags.c_contiguous):
        return True
    sizes = tuple(shape[0]) if np.iterable(shape[0]) else shape
    sizes = tuple(x.size // (abs(math.prod(sizes)) or 1) if size == -1 else size for size in sizes)
    towards_front = slice(None) if is_fortran else slice(None, None, -1)
    begins = set(accumulate(sizes[towards_front], mul))
    inner, step = 1, None
    for size, stride in zip(x.shape[towards_front], x.strides[towards_front], strict=True):
        if size > 1:
            if step not in (None, stride) and inner not in begins:
                return False
            inner, step = inner * size, stride * size
    return True


# --- ufuncs -------------------------------------------------------------------------------------------


def _kind(value: Any) -> Any:
    """Return a key for the dtype that a value has in NumPy's promotion: Python's numbers are weaker than arrays."""
    if isinstance(value, (np.ndarray, np.generic, DryScalar)):
        return value.dtype
    if isinstance(value, UnknownNumber):
        return float
    return type(value) if isinstance(value, (bool, int, float, complex)) else np.asarray(value).dtype


@lru_cache(maxsize=4096)
def _dtypes(ufunc: np.ufunc, kinds: tuple[Any, ...], dtype: Any) -> tuple[np.dtype, ...]:
    """Return the dtypes of the results, found by one call on single elements."""
    ones = [np.ones(1, kind) if isinstance(kind, np.dtype) else kind(1) for kind in kinds]
    given = {} if dtype is None else {"dtype": dtype}
    with np.errstate(all="ignore"):
        if ufunc.signature is not None:
            ones = [one.reshape(1, 1) for one in ones]
        found = ufunc(*ones, **given)
    return tuple(np.asarray(one).dtype for one in (found if isinstance(found, tuple) else (found,)))


def _broadcast(inputs: tuple[Any, ...], dtypes: tuple[np.dtype, ...]) -> list[Any]:
    """Return new arrays of the operands' common shape, laid out in memory as NumPy's iterator chooses."""
    arrays = [x for x in inputs if isinstance(x, np.ndarray)]
    shapes = {x.shape for x in arrays}
    shape = shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*map(np.shape, inputs))
    if not shape:
        return [DryScalar(dtype) for dtype in dtypes]
    if all(x.flags.c_contiguous for x in arrays):
        return [empty(shape, dtype) for dtype in dtypes]
    plain = [np.ndarray.view(x, np.ndarray) for x in arrays]
    flags = [["readonly"]] * len(plain) + [["writeonly", "allocate"]]
    it = np.nditer([*plain, None], ["zerosize_ok"], flags, op_dtypes=[None] * len(plain) + [np.dtype(bool)])  # type: ignore[arg-type]
    return [_ordered(shape, it.operands[-1].strides, dtype) for dtype in dtypes]


def _elementwise(ufunc: np.ufunc, inputs: tuple[Any, ...], dtype: Any) -> Any:
    made = _broadcast(inputs, _dtypes(ufunc, tuple(map(_kind, inputs)), dtype))
    return made[0] if len(made) == 1 else tuple(made)


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))


@lru_cache(maxsize=4096)
def _reduced_dtype(ufunc: np.ufunc, kind: np.dtype) -> np.dtype:
    return np.asarray(ufunc.reduce(np.ones(1, kind))).dtype


def _reduced(ufunc: np.ufunc, x: Any, axis: Any = 0, dtype: Any = None, keepdims: bool = False, **_: Any) -> Any:
    dtype = np.dtype(dtype) if dtype is not None else _reduced_dtype(ufunc, x.dtype)
    axes = _axes(axis, x.ndim)
    if keepdims and x.ndim:
        return empty(tuple(1 if d in axes else n for d, n in enumerate(x.shape)), dtype)
    kept = [d for d in range(x.ndim) if d not in axes]
    shape = tuple(x.shape[d] for d in kept)
    if not shape:
        return DryScalar(dtype)
    return _ordered(shape, tuple(x.strides[d] for d in kept), dtype)


def _accumulated(ufunc: np.ufunc, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None) -> Any:
    dtype = np.dtype(dtype) if dtype is not None else _reduced_dtype(ufunc, x.dtype)
    return empty((x.size,) if axis is None else x.shape, dtype)


def _products(ufunc: np.ufunc, inputs: tuple[Any, ...], axes: Any) -> Any:
    if ufunc is not np.matmul:
        raise _unknown(f"numpy.{ufunc.__name__}")
    a, b = inputs
    dtype = _dtypes(np.multiply, (_kind(a), _kind(b)), None)[0]
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))
    return _result(shape, dtype)


_RULES_OF_METHODS: dict[str, Callable[..., Any]] = {
    "accumulate": _accumulated,
    "outer": lambda ufunc, a, b, **_: empty(
        (*np.shape(a), *np.shape(b)), _dtypes(ufunc, (_kind(a), _kind(b)), None)[0]
    ),
    "reduceat": lambda ufunc, x, indices, axis=0, **_: empty(
        tuple(len(indices) if d == axis % x.ndim else n for d, n in enumerate(x.shape)), x.dtype
    ),
}


# --- functions that NumPy implements in C -------------------------------------------------------------


def _selected(x: DryArray, items: tuple[Any, ...]) -> Any:
    """Return x[items], where some items are arrays: the shape follows from theirs."""
    arrays = []
    for item in items:
        if isinstance(item, (np.ndarray, list, DryScalar)):
            array = item if isinstance(item, (np.ndarray, DryScalar)) else np.asarray(item)
            if array.dtype == bool and isinstance(array, (DryArray, DryScalar)):
                raise _unknown("a selection by a mask")
            # The shape does not depend on the values of positions.
            is_dry = isinstance(array, (DryArray, DryScalar))
            arrays.append(np.broadcast_to(np.intp(0), array.shape) if is_dry else array)
        else:
            arrays.append(item)
    first = arrays[0]
    if len(arrays) == 1 and first.dtype != bool:
        return _result((*first.shape, *x.shape[1:]), x.dtype)
    if all(isinstance(a, np.ndarray) for a in arrays):
        rest = x.ndim - sum(a.ndim if a.dtype == bool else 1 for a in arrays)
        taken = [a.nonzero()[0] if a.dtype == bool else a for a in arrays]
        shape = np.broadcast_shapes(*(a.shape for a in taken))
        return _result((*shape, *x.shape[x.ndim - rest :]), x.dtype)
    # Index a byte that stands for all elements: NumPy itself places the dims, and orders them in memory.
    found = np.broadcast_to(np.uint8(0), x.shape)[tuple(arrays)]
    if not isinstance(found, np.ndarray):
        return DryScalar(x.dtype)
    made = _ordered(found.shape, found.strides, x.dtype)
    return made if found.base is None else made[...]


def _take(x: Any, indices: Any, axis: Any = None, out: Any = None, mode: Any = "raise") -> Any:
    if out is not None:
        return out
    shape = np.shape(indices)
    if axis is None:
        return _result(shape, x.dtype)
    axis %= x.ndim
    return _result((*x.shape[:axis], *shape, *x.shape[axis + 1 :]), x.dtype)


def _concatenate(arrays: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: Any = None) -> Any:
    if out is not None:
        return out
    arrays = [x if isinstance(x, np.ndarray) else np.asarray(x) for x in arrays]
    dtype = np.result_type(*arrays) if dtype is None else dtype
    if axis is None:
        return empty((sum(x.size for x in arrays),), dtype)
    shape = list(arrays[0].shape)
    shape[axis] = sum(x.shape[axis] for x in arrays)
    # NumPy orders the dims by the sums of the operands' strides.
    strides = tuple(map(sum, zip(*(map(abs, x.strides) for x in arrays), strict=True)))
    return empty(shape, dtype) if all(x.flags.c_contiguous for x in arrays) else _ordered(tuple(shape), strides, dtype)


def _where(condition: Any, *choices: Any) -> Any:
    if not choices:
        raise _unknown("numpy.where")
    dtype = np.result_type(*(x.dtype if isinstance(x, (np.ndarray, DryScalar)) else x for x in choices))
    made = _broadcast((condition, *choices), (dtype,))[0]
    return made if isinstance(made, np.ndarray) else empty((), dtype)


def _dot(a: Any, b: Any, out: Any = None) -> Any:
    if out is not None:
        return out
    dtype = _dtypes(np.multiply, (_kind(a), _kind(b)), None)[0]
    if not np.ndim(a) or not np.ndim(b):
        return _result(np.broadcast_shapes(np.shape(a), np.shape(b)), dtype)
    rest = (*b.shape[:-2], *b.shape[-1:]) if b.ndim > 1 else ()
    return _result((*a.shape[:-1], *rest), dtype)


def _einsum(subscripts: str, *operands: Any, out: Any = None, **settings: Any) -> Any:
    if out is not None:
        return out
    terms, _, result = subscripts.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    batch: tuple[int, ...] = ()
    for term, x in zip(terms.split(","), operands, strict=True):
        head, dots, tail = term.partition("...")
        stop = x.ndim - len(tail)
        sizes.update(zip(head, x.shape, strict=False))
        sizes.update(zip(tail, x.shape[stop:], strict=True))
        batch = np.broadcast_shapes(batch, x.shape[len(head) : stop]) if dots else batch
    head, dots, tail = result.partition("...")
    shape = (*(sizes[c] for c in head), *(batch if dots else ()), *(sizes[c] for c in tail))
    dtype = np.result_type(*(x.dtype for x in operands))
    operands = tuple(x._array if isinstance(x, DryScalar) else x for x in operands)
    layouts = tuple((x.shape, x.strides) for x in operands)
    strides, is_view = _einsum_order(subscripts, layouts, settings.get("optimize", False))
    if strides is None:
        return DryScalar(dtype)
    made = _ordered(shape, strides, dtype)
    return made[...] if is_view else made


@lru_cache(maxsize=4096)
def _einsum_order(subscripts: str, layouts: tuple[Any, ...], optimize: Any) -> tuple[tuple[int, ...] | None, bool]:
    """Return the strides of an einsum of small arrays, None for a scalar; and whether the result is a view."""
    if optimize:
        whole = [np.broadcast_to(np.uint8(0), shape) for shape, _ in layouts]
        optimize = np.einsum_path(subscripts, *whole, optimize=optimize)[0]
    small = [_plain(_ordered(tuple(min(n, 2) for n in shape), strides, np.uint8)) for shape, strides in layouts]
    found = np.einsum(subscripts, *small, optimize=optimize)
    return found.strides if isinstance(found, np.ndarray) else None, found.base is not None


def _pad(x: Any, pad_width: Any, mode: Any = "constant", **_: Any) -> Any:
    widths = np.broadcast_to(pad_width, (x.ndim, 2))
    return empty(tuple(n + int(a) + int(b) for n, (a, b) in zip(x.shape, widths, strict=True)), x.dtype)


_RULES: dict[Any, Callable[..., Any]] = {
    np.empty_like: _like, np.zeros_like: _like, np.ones_like: _like,
    np.concatenate: _concatenate, np.where: _where, np.take: _take, np.dot: _dot, np.einsum: _einsum,
    np.vdot: lambda a, b: DryScalar(_dtypes(np.multiply, (_kind(a), _kind(b)), None)[0]),
    np.inner: lambda a, b: _dot(a, b if np.ndim(b) < 2 else b.T),
    np.array2string: lambda *_, **__: "?",
    np.pad: _pad, np.copyto: _nothing, np.place: _nothing, np.putmask: _nothing, np.put_along_axis: _nothing,
    np.fill_diagonal: _nothing,
    np.copy: lambda x, order="K", subok=False: _like(x, order=order),
    np.broadcast_to: lambda x, shape, subok=False: np.broadcast_to._implementation(  # type: ignore[attr-defined]
        x, shape, True
    ),
    np.array_equal: lambda *_, **__: bool(empty((), bool)),
    np.bincount: lambda x, weights=None, minlength=0: empty((minlength,), np.intp if weights is None else np.float64),
    np.linalg.qr: lambda a, mode="reduced": (
        empty((*a.shape[:-1], min(a.shape[-2:])), a.dtype),
        empty((*a.shape[:-2], min(a.shape[-2:]), a.shape[-1]), a.dtype),
    ),
    np.linalg.inv: lambda a: empty(a.shape, a.dtype), np.linalg.cholesky: lambda a, **_: empty(a.shape, a.dtype),
    np.linalg.solve: lambda a, b: empty(b.shape, np.result_type(a, b)),
    np.isclose: lambda a, b, *_, **__: _elementwise(np.equal, (a, b), None),
}  # fmt: skip
# Functions in C that read no element.
_METADATA = {np.may_share_memory, np.shares_memory, np.result_type, np.can_cast, np.min_scalar_type}


# --- the namespace ------------------------------------------------------------------------------------


class DryNamespace:
    """`numpy`, with functions that make dry arrays from shapes; all others dispatch on their arguments."""

    empty = zeros = ones = staticmethod(empty)
    without_data = staticmethod(without_data)
    full = staticmethod(
        lambda shape, value, dtype=None, **_: empty(shape, np.asarray(value).dtype if dtype is None else dtype)
    )

    @staticmethod
    def arange(*args: Any, dtype: Any = None, **_: Any) -> DryArray:
        return dried(np.arange(*args, dtype=dtype))

    @staticmethod
    def eye(rows: int, columns: int | None = None, k: int = 0, dtype: Any = float, **_: Any) -> DryArray:
        return empty((rows, rows if columns is None else columns), dtype)

    @staticmethod
    def asarray(x: Any, dtype: Any = None, **_: Any) -> Any:
        if isinstance(x, (list, tuple)) and not all(map(has_data, x)):
            x = np.stack([DryNamespace.asarray(one) for one in x])
        elif isinstance(x, DryScalar):
            x = x._array
        elif isinstance(x, UnknownNumber):
            x = empty(())
        if isinstance(x, DryArray):
            return x if dtype is None else x.astype(dtype, copy=False)
        return np.asarray(x, dtype)

    @staticmethod
    def array(x: Any, dtype: Any = None, **_: Any) -> Any:
        x = DryNamespace.asarray(x, dtype)
        return x.copy()

    @staticmethod
    def ascontiguousarray(x: Any, dtype: Any = None, **_: Any) -> Any:
        if not isinstance(x, DryArray):
            return np.ascontiguousarray(x, dtype)
        return x.astype(x.dtype if dtype is None else dtype, "C", copy=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


xp = DryNamespace()
for _scalar_type in (DryScalar, UnknownNumber):
    register_namespace(DryArray, xp, _scalar_type, is_dry=True)

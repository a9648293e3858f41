"""The rule of an op: one line of text that states how its loop nest touches its tensors.

    "m k, k n -> m n"        k is in the inputs only, so it is summed: if k is cut, y is Partial
    "... , ... -> ..."       any leading dims, aligned at the right, broadcast as in NumPy
    "n [v], n -> "           the op completes [v] itself (through `ctx`); y is a scalar
    "n {h} -> n {h}"         {h} may not be cut
    "n c h -> n (c h)"       (c h) is one dim, the product of its factors, the first outermost
    "(c=3 h=4) -> c h"       an input dim that is split states the sizes of its factors
    "1 c -> c 5"             a dim of exactly this size; in the output a new dim, which may not be cut
    "n -> n v=5"             a new dim that may be cut: each rank makes its slice
    "n c <h>, o c {k} -> n o <h>=6"   a sliding window reads <h>: it may be cut where the windows
                             allow, with an exchange of halos; the output states its own size

A rule is pure text and integers, independent of arrays, devices and strategies.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import NamedTuple

from simparallel.errors import ShapeError

Shape = tuple[int, ...]

# "...", (c h), [v] and {h}; then <h> or a word, which may state a size.
_TOKEN = re.compile(r"\.\.\.|\([\w= ]*\)|\[\w+\]|\{\w+\}|(?:<\w+>|\w+)(?:=\d+)?")


class Dim(NamedTuple):
    """One dim of one tensor in a rule.

    Attributes:
        names: one name; several for a factored dim; () for "..." and a number.
        kind: "plain", "completed", "whole" (may not be cut), "factored", "ellipsis", "fixed" or "window".
        sizes: sizes that the rule states: factors of a split dim, fixed and new dims.
    """

    names: tuple[str, ...]
    kind: str
    sizes: tuple[int, ...] = ()


class Place(NamedTuple):
    """One dim of one tensor in a call: its named dims and its size.

    Attributes:
        names: named dims that it consists of, outermost first; () for a dim that is broadcast or of a fixed size.
        sizes: size of each named dim.
        size: size of the dim.
        kind: as `Dim.kind`; a dim of "..." is "plain", or "fixed" where it is broadcast.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    size: int
    kind: str


class Rule(NamedTuple):
    """A parsed rule: the dims of every input, and of the output."""

    text: str
    inputs: tuple[tuple[Dim, ...], ...]
    output: tuple[Dim, ...]


def _parse_dim(token: str) -> Dim:
    if token == "...":
        return Dim((), "ellipsis")
    if token.isdigit():
        return Dim((), "fixed", (int(token),))
    if token[0] == "(":
        factors = [factor.split("=") for factor in token[1:-1].split()]
        sizes = tuple(int(factor[1]) for factor in factors if len(factor) == 2)
        return Dim(tuple(factor[0] for factor in factors), "factored", sizes)
    if token[0] == "[":
        return Dim((token[1:-1],), "completed")
    if token[0] == "{":
        return Dim((token[1:-1],), "whole")
    name, _, size = token.partition("=")
    sizes = (int(size),) if size else ()
    if name[0] == "<":
        return Dim((name[1:-1],), "window", sizes)
    return Dim((name,), "plain", sizes)


def _parse_tensor(text: str) -> tuple[Dim, ...]:
    # `findall` skips text that is no token, so check that there is none.
    leftover = _TOKEN.sub("", text).strip()
    if leftover:
        raise ValueError(f"rule: cannot read {leftover!r} in {text!r}")
    return tuple(_parse_dim(token) for token in _TOKEN.findall(text))


@lru_cache(maxsize=4096)
def parse(text: str) -> Rule:
    """Parse a rule. Raise ValueError with the offending part."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r} has no '->'")
    inputs = tuple(_parse_tensor(part) for part in left.split(","))
    return Rule(text, inputs, _parse_tensor(right))


def _align(dims: tuple[Dim, ...], shape: Shape) -> list[tuple[Dim, tuple[int, ...]]]:
    """Pair each dim of a tensor with its sizes; "..." takes all dims that are left."""
    places = [i for i, dim in enumerate(dims) if dim.kind == "ellipsis"]
    extra = len(shape) - len(dims) + len(places)
    if extra < 0 or (not places and extra != 0):
        raise ShapeError(f"needs {len(dims) - len(places)} dims, got shape {shape}")
    # Without "..." each dim takes one size; "..." takes the rest, which may be none.
    pairs, position = [], 0
    for dim in dims:
        width = extra if dim.kind == "ellipsis" else 1
        pairs.append((dim, shape[position : position + width]))
        position += width
    return pairs


@lru_cache(maxsize=65536)
def bind(text: str, shapes: tuple[Shape, ...]) -> dict[str, int]:
    """Return the sizes of the named dims for these input shapes.

    "..." binds the broadcast leading dims: the key "..." holds their number of elements, the keys
    "...0", "...1", … hold their sizes from the left.

    Raises:
        ShapeError: the number of dims or a size does not fit.
    """
    rule = parse(text)
    if len(shapes) != len(rule.inputs):
        raise ShapeError(f"takes {len(rule.inputs)} tensors, got {len(shapes)}")
    sizes: dict[str, int] = {}
    leading: Shape = ()
    for dims, shape in zip(rule.inputs, shapes, strict=True):
        for dim, found in _align(dims, shape):
            # Leading dims have no names in the text: they broadcast, and get their names below.
            if dim.kind == "ellipsis":
                leading = broadcast(leading, found)
            elif dim.sizes and (prod(dim.sizes),) != found:
                raise ShapeError(f"a dim of size {found[0]} must be {prod(dim.sizes)}, shapes {_join(shapes)}")
            # Stated sizes are those of the factors of a split dim; a dim of fixed size, such as 1, has no name.
            factors = dim.sizes or found if dim.names else ()
            for name, size in zip(dim.names, factors, strict=True):
                if sizes.setdefault(name, size) != size:
                    raise ShapeError(
                        f"dim '{name}' is {sizes[name]} in one tensor and {size} in another, shapes {_join(shapes)}"
                    )
    sizes["..."] = prod(leading)
    sizes.update({f"...{i}": size for i, size in enumerate(leading)})
    return sizes


def output_shape(text: str, shapes: tuple[Shape, ...]) -> Shape:
    """Return the shape of the output that follows from the rule and these input shapes."""
    sizes = bind(text, shapes)
    shape: list[int] = []
    for dim in parse(text).output:
        if dim.kind == "ellipsis":
            # "..." itself is a key, too.
            num_leading = sum(name.startswith("...") for name in sizes) - 1
            shape += [sizes[f"...{i}"] for i in range(num_leading)]
        elif dim.sizes:
            shape.append(prod(dim.sizes))
        else:
            shape.append(prod(sizes[name] for name in dim.names))
    return tuple(shape)


@lru_cache(maxsize=65536)
def places(text: str, shapes: tuple[Shape, ...]) -> tuple[tuple[tuple[Place, ...], ...], tuple[Place, ...]]:
    """Return the dims of every input and of the output of a call with these shapes, by name and size.

    Raises:
        ShapeError: the shapes do not fit the rule.
    """
    rule, sizes = parse(text), bind(text, shapes)
    count = sum(name.startswith("...") for name in sizes) - 1
    inputs = tuple(_place(dims, shape, sizes, count) for dims, shape in zip(rule.inputs, shapes, strict=True))
    return inputs, _place(rule.output, output_shape(text, shapes), sizes, count)


@lru_cache(maxsize=65536)
def input_names(text: str, shapes: tuple[Shape, ...]) -> tuple[str, ...]:
    """Return the named dims of the inputs in the order of the rule's text; "..." stands for all leading dims."""
    sizes = bind(text, shapes)
    leading = [name for name in sizes if name.startswith("...") and name != "..."]
    names = (leading if dim.kind == "ellipsis" else dim.names for dims in parse(text).inputs for dim in dims)
    return tuple(dict.fromkeys(name for each in names for name in each))


def _place(dims: tuple[Dim, ...], shape: Shape, sizes: dict[str, int], count: int) -> tuple[Place, ...]:
    """Name the dims of one tensor; "..." stands for `count` dims at most, aligned at the right."""
    found = []
    for dim, own in _align(dims, shape):
        if dim.kind == "ellipsis":
            # A tensor with fewer leading dims than the broadcast shape lacks the leftmost ones.
            for i, size in enumerate(own, count - len(own)):
                name = f"...{i}"
                # A dim of size 1 that is broadcast belongs to no named dim, so no cut applies to it.
                is_whole = sizes[name] == size
                found.append(Place((name,), (size,), size, "plain") if is_whole else Place((), (), size, "fixed"))
        # Under a window the output has another size than the input, and a new dim occurs in no input: in both cases
        # the size of this tensor holds, not the size bound to the name.
        elif dim.kind == "window" or (dim.sizes and dim.kind == "plain"):
            found.append(Place(dim.names, own, own[0], dim.kind))
        else:
            factors = dim.sizes or tuple(sizes[name] for name in dim.names)
            found.append(Place(dim.names, factors if dim.names else (), own[0], dim.kind))
    return tuple(found)


def broadcast(a: Shape, b: Shape) -> Shape:
    """Broadcast two shapes as in NumPy.

    Raises:
        ShapeError: a size differs and is not 1.
    """
    ndim = max(len(a), len(b))
    wide_a, wide_b = (1,) * (ndim - len(a)) + a, (1,) * (ndim - len(b)) + b
    result = []
    for i, (size_a, size_b) in enumerate(zip(wide_a, wide_b, strict=True)):
        if size_a != size_b and 1 not in (size_a, size_b):
            raise ShapeError(
                f"shapes {a} and {b} do not broadcast: dim {i - ndim} is {size_a} and {size_b}; "
                "make the sizes equal, or one of them 1"
            )
        result.append(size_b if size_a == 1 else size_a)
    return tuple(result)


def dim_names(count: int) -> list[str]:
    """Return `count` names for rules that depend on the number of dims: d0, d1, …"""
    return [f"d{i}" for i in range(count)]


def _join(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(map(str, shapes))

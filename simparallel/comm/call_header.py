"""The header that every rank publishes for every collective, and the error for headers that differ.

Words 0 … 15 have to be equal on all ranks of the group. The rest, the note, tells peers where this rank's payload is.
In shared memory the headers of all ranks are contiguous, so one comparison of bytes covers all of them.

    0 tag (of a message), or a digest of the purpose   1 op   2 reduce op   3 root   4 dtype
    5 dims (dim, or split and concat dim; dim and digest of the input_splits of a reduce_scatter)
    6 ndim   7 … 14 shape (the last word holds a digest if there are more than 8 dims)
    15 the number of the algorithm
    in a new_group: 6 … 14 the ranks, as a shape
    in an all_reduce of a list: 5 digest of the shapes   6 number of arrays   7 … 14 their sizes
    16 call site   17 simulated time at the call [ps]   18 offset of the payload in the arena
    19 payload [bytes]   20 1 if the payload is the user's own array, 2 if it has no data (in a message: the number of
    the reply that its sender asked for)   21 seq
    in a message: 23 2 if the payload has no data
    in a scatter: 22 dtype   23 ndim   24 … 31 shape of the array that the root gives to each rank
    if the payload is exposed in pieces: 22 offset of the second piece
    24 … 31 if word 0 is set and the op is no scatter: the purpose in UTF-8, cut to 64 bytes

The purpose names the op or reducer that makes a call on behalf of the user, such as "DDP 1, bucket 0". Calls of
different purposes are different calls, even if their arrays look alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from simparallel.algorithms import names
from simparallel.algorithms.reduction import ALIASES
from simparallel.base.units import format_ranks
from simparallel.comm.collective import COLLECTIVES, OBJECT_OPS
from simparallel.errors import CollectiveMismatchError, InputError

OP_NAMES = ("none", "send", *COLLECTIVES)
OP_CODES = {name: code for code, name in enumerate(OP_NAMES)}
# An all_reduce with a reduction of its own.
OP_CODES["adasum"] = OP_CODES["all_reduce"]
# Instead of an algorithm's number: the arrays are on GPUs.
ON_GPUS = 255
REDUCE_OPS = ("-", "sum", "mean", "prod", "max", "min", "and", "or", "adasum", "adasum of layers", "xor",
              "land", "lor", "lxor")  # fmt: skip
REDUCE_CODES = {name: code for code, name in enumerate(REDUCE_OPS)}
REDUCE_CODES |= {alias: REDUCE_CODES[name] for alias, name in ALIASES.items()}

TAG, OP, REDUCE, ROOT, DTYPE, DIMS, NDIM, SHAPE, ALGORITHM = 0, 1, 2, 3, 4, 5, 6, 7, 15
PURPOSE, LISTED = TAG, DIMS
COMPARED = 16
SITE, SIM_PS, OFFSET, NBYTES, EXPOSURE, SEQ = 16, 17, 18, 19, 20, 21
GIVEN_DTYPE, GIVEN_NDIM, GIVEN_SHAPE = 22, 23, 24
OTHER_OFFSET, FORM = 22, 23
# How a payload is exposed: as a copy, whole or piece by piece, or as the user's own array; or not at all, because in a
# dry run it has no data.
COPIED, OWN_ARRAY, NO_DATA = range(3)
# First word of the purpose.
PURPOSE_TEXT = 24
USED = 32
MAX_GIVEN_DIMS = USED - GIVEN_SHAPE
_SHAPE_WORDS = ALGORITHM - SHAPE


def digest(text: str) -> int:
    """Hash `text` to 63 bits, never 0; an accidental collision is negligible, a deliberate one is possible."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little") >> 1 or 1


def encode_dtype(dtype: np.dtype) -> int:
    """Encode a dtype's text as a number that can be decoded; a text of 8 bytes or more becomes a negative hash."""
    if dtype.fields is not None:  # `dtype.str` of a structured dtype has only its size
        try:
            return -digest(str(dtype.descr))
        except ValueError:  # fields out of order, or overlapping
            return -digest(str(dtype))
    # A positive code is the text itself, for the errors; a hash can only be compared.
    text = dtype.str.encode()
    return int.from_bytes(text, "little") if len(text) < 8 else -digest(dtype.str)


def decode_dtype(code: int) -> str:
    if code <= 0:
        return f"a dtype with a long name [{-code:x}]" if code else "-"
    try:
        dtype = np.dtype(_dtype_text(code))
    # Errors show damaged words as numbers, because describing a header must never raise.
    except (TypeError, ValueError, SyntaxError):
        return _damaged(code)
    # The name omits the byte order, and another byte order is another dtype.
    order = "" if dtype.isnative else " big-endian" if dtype.str[0] == ">" else " little-endian"
    return dtype.name + order


def _dtype_text(code: int) -> str:
    return code.to_bytes(8, "little").rstrip(b"\0").decode()


def encode(
    op: str,
    reduce_op: str = "-",
    root: int = 0,
    dtype: np.dtype | None = None,
    shape: tuple[int, ...] = (),
    dims: int = 0,
    listed: Sequence[tuple[int, ...]] = (),
) -> array[int]:
    """Encode the header of a call, without the words that change from call to call.

    For a list of arrays, `listed` has their shapes, and `shape` their sizes. For a new group, `shape` has its ranks.
    """
    words = array("q", bytes(8 * USED))
    words[OP], words[REDUCE], words[ROOT] = OP_CODES[op], REDUCE_CODES[reduce_op], root
    words[DTYPE] = encode_dtype(dtype) if dtype is not None else 0
    words[DIMS] = dims
    words[NDIM] = len(shape)
    words[SHAPE : SHAPE + min(len(shape), _SHAPE_WORDS)] = array("q", shape[:_SHAPE_WORDS])
    # More dims than words: the last word stands for all of them.
    if len(shape) > _SHAPE_WORDS:
        words[ALGORITHM - 1] = digest(str(shape))
    if listed:
        words[LISTED] = digest(str(tuple(listed)))
    return words


def encode_purpose(words: array[int], purpose: str) -> None:
    """Write to a header which op or reducer makes the call: a hash of its name, and the name's first bytes."""
    words[PURPOSE] = digest(purpose)
    # A scatter needs these words for the shape of the root's arrays.
    if words[OP] != OP_CODES["scatter"]:
        text = purpose.encode(errors="replace")[: 8 * (USED - PURPOSE_TEXT)].ljust(8 * (USED - PURPOSE_TEXT), b"\0")
        words[PURPOSE_TEXT:USED] = array("q", text)


def encode_given(words: array[int], shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Store shape and dtype of the root's arrays, which the other ranks do not know from their own call.

    Raises:
        InputError: more dims than the header holds, or a dtype whose text is too long for it.
    """
    code = encode_dtype(dtype)
    if len(shape) > MAX_GIVEN_DIMS or code < 0:
        raise InputError(
            f"an array of {len(shape)} dims and dtype {dtype} cannot be announced to its receivers: at most "
            f"{MAX_GIVEN_DIMS} dims and dtypes with short names; reshape it, or view it as bytes."
        )
    words[GIVEN_DTYPE], words[GIVEN_NDIM] = code, len(shape)
    words[GIVEN_SHAPE : GIVEN_SHAPE + len(shape)] = array("q", shape)


# Cached, because receivers get the same description in every step.
@lru_cache(maxsize=1024)
def decode_given(dtype: int, ndim: int, *shape: int) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of the root's arrays, from the words of its note."""
    return shape[:ndim], np.dtype(_dtype_text(dtype))


def describe(words: Sequence[int]) -> str:
    """Describe a header in words: `all_reduce(sum) float32 (20, 2)`. Never raises: words may be damaged."""
    name = text = _name(OP_NAMES, words[OP])
    if words[REDUCE]:
        text += f"({_name(REDUCE_OPS, words[REDUCE])})"
    # The bytes that carry an object are not the user's array.
    if name == "new_group" or words[DTYPE] and name not in OBJECT_OPS:
        sizes = ["*" if size == -1 else str(size) for size in words[SHAPE : SHAPE + min(words[NDIM], _SHAPE_WORDS)]]
        if words[NDIM] > _SHAPE_WORDS:
            sizes[-1] = "…"
        shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
        if words[LISTED] and words[OP] == OP_CODES["all_reduce"]:
            shape = f"list of {words[NDIM]}, sizes {shape}, shapes #{words[LISTED]:016x}"
        text += f" of ranks {shape}" if name == "new_group" else f" {decode_dtype(words[DTYPE])} {shape}"
    if name in COLLECTIVES and COLLECTIVES[name].root:
        text += f" root {words[ROOT]}"
    if words[DIMS] and words[OP] != OP_CODES["all_reduce"]:
        first, splits = words[DIMS] & 0xFF, words[DIMS] >> 8
        if splits and words[OP] == OP_CODES["reduce_scatter"]:
            text += f" dim {first - 1}, input_splits #{splits & (1 << 56) - 1:014x}"
        else:
            text += f" dim {' -> '.join(map(str, decode_dims(words[DIMS])))}"
    if words[ALGORITHM] == ON_GPUS:
        text += " on GPUs"
    elif words[ALGORITHM]:
        text += f" by {_name(names(), words[ALGORITHM])}"
    if words[PURPOSE] and words[OP] != OP_CODES["send"]:
        text += f" for {_purpose(words)}"
    return text


def _purpose(words: Sequence[int]) -> str:
    text = b"" if words[OP] == OP_CODES["scatter"] else array("q", words[PURPOSE_TEXT:USED]).tobytes()
    name = text.rstrip(b"\0").decode(errors="ignore")
    return name or f"#{words[PURPOSE] & (1 << 64) - 1:016x}"


def _name(names: Sequence[str], code: int) -> str:
    return names[code] if 0 <= code < len(names) else _damaged(code)


def _damaged(code: int) -> str:
    return f"<damaged: {code:#x}>"


def encode_dims(*dims: int) -> int:
    """Pack up to seven dims (0 … 254) into one word; 0 means none."""
    return int.from_bytes(bytes(dim + 1 for dim in dims), "little")


def encode_splits(dim: int, splits: Sequence[int]) -> int:
    """Pack a dim and a digest of the sizes of its parts into one word."""
    # The lowest byte is the dim, the other bits are the digest.
    return digest(str(tuple(splits))) >> 8 << 8 | encode_dims(dim)


def decode_dims(word: int) -> list[int]:
    return [byte - 1 for byte in word.to_bytes(8, "little", signed=word < 0).rstrip(b"\0")]


_FIELDS = {"purpose": (PURPOSE,), "op": (OP,), "reduce op": (REDUCE,), "root": (ROOT,), "dtype": (DTYPE,),
           "shape": tuple(range(NDIM, ALGORITHM)), "dim": (DIMS,)}  # fmt: skip


def mismatch_error(
    group_name: str, headers: Mapping[int, Sequence[int]], sites: dict[int, str], me: int
) -> CollectiveMismatchError:
    """Build the error for headers that differ; ranks that made the same call share one line.

    Args:
        headers: rank -> header words.
        sites: rank -> call site.
        me: the rank that raises.
    """
    # Most ranks made the same call, so the error names each call once, with its ranks.
    calls: dict[str, list[int]] = {}
    for rank, words in headers.items():
        calls.setdefault(f"{describe(words)} at {sites[rank]}", []).append(rank)
    differing = [
        name
        for name, places in _FIELDS.items()
        if len({tuple(words[place] for place in places) for words in headers.values()}) > 1
    ]
    ops = {words[OP] for words in headers.values()}
    if "shape" in differing and ops == {OP_CODES["new_group"]}:
        differing[differing.index("shape")] = "ranks"
    if "dim" in differing and ops == {OP_CODES["all_reduce"]}:
        differing[differing.index("dim")] = "shapes in the list"
    if "dim" in differing and ops == {OP_CODES["reduce_scatter"]}:
        firsts = {words[DIMS] & 0xFF for words in headers.values()}
        differing[differing.index("dim")] = "dim" if len(firsts) > 1 else "input_splits"
    algorithms = {words[ALGORITHM] for words in headers.values()}
    if len(ops) == 1 and len(algorithms) > 1:
        differing.append("place of the arrays, host or GPU" if ON_GPUS in algorithms else "algorithm")
    lines = [f"  {format_ranks(ranks)} called {call}" for call, ranks in calls.items()]
    # The described calls look equal, so a word was overwritten: name it.
    if len(calls) == 1:
        for place in range(COMPARED):
            values = {rank: words[place] for rank, words in headers.items()}
            if len(set(values.values())) > 1:
                differing.append(f"word {place} of the header")
                lines += [f"  rank {rank} has {value:#x} in word {place}" for rank, value in values.items()]
    seq = headers[me][SEQ]
    return CollectiveMismatchError(
        f"{group_name}, collective #{seq}: ranks made different calls.\n"
        + "\n".join(lines)
        + f"\nThey differ in: {', '.join(differing)}. No data was changed. All ranks of a group must make "
        "the same calls, with the same shapes and dtypes, in the same order.",
        group=group_name,
        seq=int(seq),
        calls={rank: f"{describe(words)} at {sites[rank]}" for rank, words in headers.items()},
    )

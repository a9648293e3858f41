"""What CuPy 14.2 lacks of NumPy 2.4: names, keywords, methods of ufuncs, dtypes. `strict` refuses it.

Found by comparing `dir()` and `inspect.signature` of both packages, and by calls without a GPU: CuPy checks the
arguments before it looks for one. A test compares the tables with CuPy where it is installed. Keywords that CuPy
calls by another name (`stack(tup)` for `stack(arrays)`) count as lacking. Types are left out.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _table(text: str) -> dict[str, frozenset[str]]:
    rows = (line.split(":") for line in text.strip().splitlines())
    return {name.strip(): _names(values) for name, values in rows}


NAMES = _names("""
    asmatrix block bmat busday_count busday_offset bytes_ char clongdouble core ctypeslib datetime64
    datetime_as_string datetime_data dtypes einsum_path emath errstate f2py float128 frompyfunc fromregex
    get_include geomspace getbufsize geterr geterrcall histogram_bin_edges info insert is_busday isnat longdouble ma
    matrix matvec memmap nanpercentile nanquantile ndenumerate nditer nested_iters object_ polyder polydiv
    polyint rec recarray record setbufsize seterr seterrcall show_runtime spacing str_ strings test timedelta64
    typecodes unstack vecdot vecmat void __array_namespace_info__
    """)
NAMES_IN_LINALG = _names("diagonal matrix_norm multi_dot outer svdvals tensordot trace vecdot vector_norm")
METHODS = _names("ctypes getfield resize setfield setflags to_device")

# Function -> keywords that only NumPy's takes.
KEYWORDS = _table(
    """
    all: where
    amax: initial where
    amin: initial where
    any: where
    arange: device like
    argpartition: kind order
    argsort: order stable
    array: like ndmax object
    array_str: a
    asanyarray: device like
    asarray: device like
    ascontiguousarray: like
    asfortranarray: like
    astype: device
    broadcast_arrays: subok
    broadcast_to: subok
    clip: max min where dtype casting order subok
    copy: subok
    corrcoef: x
    count_nonzero: keepdims
    cov: m
    delete: obj
    ediff1d: ary
    einsum: casting order out
    empty: device like
    empty_like: device
    extract: arr
    eye: device like
    flip: m
    fliplr: m
    flipud: m
    full: device like
    full_like: device
    histogram: a
    identity: like
    indices: sparse
    intersect1d: ar1 ar2
    isin: kind
    lexsort: axis
    linspace: device
    load: encoding fix_imports max_header_size
    max: initial where
    mean: where
    min: initial where
    nanmax: initial where
    nanmean: where
    nanmin: initial where
    nanprod: initial where
    nanstd: correction mean where
    nansum: initial where
    nanvar: correction mean where
    ones: device like
    ones_like: device
    partition: kind order
    percentile: weights
    prod: initial where
    quantile: weights
    require: like
    reshape: shape
    rot90: m
    show_config: mode
    sort: order stable
    stack: arrays
    std: correction mean where
    sum: initial where
    take: mode
    take_along_axis: arr
    tri: like
    trim_zeros: axis
    union1d: ar1 ar2
    unique: sorted
    unpackbits: count
    unravel_index: shape
    var: correction mean where
    zeros: device like
    zeros_like: device
    """
)
KEYWORDS_IN_LINALG = _table(
    """
    cholesky: upper
    matrix_power: a
    matrix_rank: A hermitian rtol
    pinv: hermitian rtol
    svd: hermitian
    """
)
KEYWORDS_OF_METHODS = _table(
    """
    all: where
    any: where
    argpartition: kind order
    argsort: order stable
    clip: where dtype casting order subok
    max: initial where
    mean: where
    min: initial where
    partition: kind order
    prod: initial where
    sort: order stable
    std: correction mean where
    sum: initial where
    take: mode
    var: correction mean where
    """
)
# Keywords that no ufunc of CuPy takes; `matmul` lacks only the first two.
KEYWORDS_OF_UFUNCS = _names("where subok order signature axes axis keepdims")
KEYWORDS_OF_MATMUL = _names("where subok")

# Method of ufuncs -> the ufuncs that have it; all have `outer`.
UFUNC_METHODS = _table(
    """
    reduce: add multiply
    accumulate: add multiply
    reduceat: add
    at: add bitwise_and bitwise_or bitwise_xor maximum minimum subtract
    """
)
# ufunc -> dtypes of the array that its `at` changes.
DTYPES_OF_AT = _table(
    """
    add: int32 int64 uint32 uint64 float16 float32 float64
    subtract: int32 uint32
    maximum: int32 int64 uint32 uint64 float32 float64
    minimum: int32 int64 uint32 uint64 float32 float64
    bitwise_and: int32 int64 uint32 uint64
    bitwise_or: int32 int64 uint32 uint64
    bitwise_xor: int32 int64 uint32 uint64
    """
)
# Codes of the dtypes of arrays: bool, integers, float16, float32, float64, complex64 and complex128.
DTYPES = frozenset("?bBhHiIlLqQefdFD")
# Flags of an array.
FLAGS = _names("c_contiguous f_contiguous forc fnc owndata")

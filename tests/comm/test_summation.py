"""Adasum as a function: cases by hand, its properties, and properties that it lacks."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.base.adasum import BLOCK, coefficients, moments
from simparallel.errors import DTypeError, InputError, ShapeError

RTOL = {"float64": 2e-14, "float32": 3e-7, "float16": 1.5e-3}  # times the root of the sum of squared norms
EXACT = 2e-14
KINDS = (
    "gaussian", "correlated", "anticorrelated", "orthogonal", "identical", "parallel", "zeros", "one left",
    "one zero", "pairs of zeros", "wide scale", "tiny", "near parallel", "integers",
)  # fmt: skip


# --- oracles -------------------------------------------------------------------------------------------


def exact_pair(a: list[Fraction], b: list[Fraction]) -> list[Fraction]:
    dot, aa, bb = (sum(map(Fraction.__mul__, x, y)) for x, y in ((a, b), (a, a), (b, b)))
    first, second = (1 - dot / (2 * square) if square else 1 for square in (aa, bb))
    return [x * first + y * second for x, y in zip(a, b, strict=True)]


def fold(level: list[Any], pair: Any = exact_pair) -> Any:
    """Combine neighbours first; a vector without a partner waits."""
    while len(level) > 1:
        joined = [pair(*two) for two in zip(level[::2], level[1::2], strict=False)]
        level = joined + level[2 * len(joined) :]
    return level[0]


def exact(vectors: list[np.ndarray]) -> np.ndarray:
    """Compute in rational arithmetic, rounded once to float64."""
    total = fold([[Fraction(float(x)) for x in v.ravel()] for v in vectors])
    return np.array([float(x) for x in total]).reshape(vectors[0].shape)


def size_of(vectors: list[np.ndarray]) -> float:
    return math.sqrt(sum(float((v.astype(float) ** 2).sum()) for v in vectors))


def assert_near(result: np.ndarray, expected: np.ndarray, vectors: list[np.ndarray], rtol: float = EXACT):
    distance = float(np.linalg.norm((result.astype(float) - expected.astype(float)).ravel()))
    assert distance <= rtol * size_of(vectors)


# --- inputs --------------------------------------------------------------------------------------------


def make(kind: str, count: int, dim: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(count, dim))
    common = rng.normal(size=dim)
    if kind == "correlated":
        g = common + 0.1 * g
    elif kind == "anticorrelated":
        g = common * np.where(np.arange(count) % 2, -1, 1)[:, None] + 0.1 * g
    elif kind == "orthogonal":
        g = np.where(np.arange(dim) % count == np.arange(count)[:, None], g, 0.0)
    elif kind == "identical":
        g = np.tile(common, (count, 1))
    elif kind == "parallel":
        g = np.outer(rng.integers(1, 5, count) * rng.choice([-1, 1], count), common)
    elif kind == "zeros":
        g *= 0
    elif kind == "one left":
        g[np.arange(count) != rng.integers(count)] = 0
    elif kind == "one zero":
        g[rng.integers(count)] = 0
    elif kind == "pairs of zeros":
        g[np.arange(count) // 2 % 2 == 0] = 0
    elif kind == "wide scale":
        g *= 10.0 ** rng.integers(-3, 4, count)[:, None]
    elif kind == "tiny":
        g *= 1e-3
    elif kind == "near parallel":
        g = common * rng.uniform(0.5, 2, count)[:, None] + 1e-6 * g
    elif kind == "integers":
        g = rng.integers(-3, 4, (count, dim)).astype(float)
    return list(g)


@st.composite
def groups(draw: Any, counts: Any = (1, 2, 4, 8), kinds: Any = KINDS, dims: Any = (1, 2, 3, 7, 17, 33)) -> Any:
    count, dim = draw(st.sampled_from(counts)), draw(st.sampled_from(dims))
    return make(draw(st.sampled_from(kinds)), count, dim, draw(st.integers(0, 2**31)))


pairs = groups(counts=(2,))


def partials(vectors: list[np.ndarray]) -> list[np.ndarray]:
    """Return the values of all inner nodes of the tree."""
    found: list[np.ndarray] = []

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found.append(sp.adasum([a, b]))
        return found[-1]

    fold(list(vectors), pair)
    return found


def cancels(vectors: list[np.ndarray]) -> bool:
    """Tell if an inner node of the tree vanishes but for rounding, so that its direction is random."""
    found = []

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        both = sp.adasum([a, b])
        found.append(np.linalg.norm(both) < 1e-8 * max(np.linalg.norm(a), np.linalg.norm(b)))
        return both

    fold([v.astype(float) for v in vectors], pair)
    return any(found)


# --- hand cases ----------------------------------------------------------------------------------------

E1, E2, ZERO = (1, 0), (0, 1), (0, 0)
HAND = [
    ([(3, 0), (0, 4)], (3, 4)),  # orthogonal: the sum
    ([(2, 2), (2, 2)], (2, 2)),  # identical
    ([(1, 0), (3, 0)], (2, 0)),  # parallel: the mean
    ([(1, 0), (-3, 0)], (-1, 0)),  # antiparallel: the mean
    ([(1, 0), (1, 1)], (1.25, 0.75)),
    ([(1, 0), (0, 0)], (1, 0)),  # zero is the identity
    ([E1, (-1, 0), E1, E1], E1),  # a partial result of zero; the mean would be half of it
    ([E1, E2, E1, ZERO], (1.25, 0.75)),  # the same vectors in another order:
    ([E1, E1, E2, ZERO], (1, 1)),
    ([E1, E1, E2], (1, 1)),  # no power of two: as if filled up with zeros
]


@pytest.mark.parametrize(("vectors", "expected"), HAND)
def test_by_hand(vectors, expected):
    for dtype in RTOL:
        result = sp.adasum([np.array(v, dtype) for v in vectors])
        assert result.dtype == dtype
        assert result.tolist() == list(expected)


# --- against exact arithmetic --------------------------------------------------------------------------


@given(groups(counts=(1, 2, 3, 4, 5, 7, 8, 16)), st.sampled_from(sorted(RTOL)))
def test_matches_exact_tree_rounded_once(vectors, dtype):
    stored = [v.astype(dtype) for v in vectors]
    assume(not cancels(stored))
    expected = exact(stored)
    result = sp.adasum(stored)
    assert_near(result, expected, stored, RTOL[dtype])
    if dtype == "float16":
        assert_near(result, expected.astype(np.float16), stored, 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_products_are_summed_in_float64(dtype, scale):
    g = np.random.default_rng(0).normal(size=(2, 2 * BLOCK + 7)).astype(dtype)
    a, b = g[0] * dtype_one(dtype, scale), (-g[0] + dtype_one(dtype, 1e-2) * g[1]) * dtype_one(dtype, scale)
    wide = [a.astype(float), b.astype(float)]
    assert sp.adasum([a, b]).tolist() == sp.adasum(wide).astype(dtype).tolist()
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = 1 - np.dot(a, b) / (2 * np.dot(a, a)), 1 - np.dot(a, b) / (2 * np.dot(b, b))
        assert sp.adasum([a, b]).tolist() != (a * narrow[0] + b * narrow[1]).tolist()  # the red control


def dtype_one(dtype: str, value: float) -> Any:
    return np.dtype(dtype).type(value)


# --- properties of a pair ------------------------------------------------------------------------------


@given(pairs)
def test_p1_symmetric(g):
    assert sp.adasum(g).tolist() == sp.adasum(g[::-1]).tolist()


@given(groups(counts=(2,), kinds=("orthogonal",)))
def test_p2_the_sum_of_orthogonal_vectors_bit_for_bit(g):
    assert sp.adasum(g).tolist() == (g[0] + g[1]).tolist()


@given(pairs, st.floats(1e-3, 1e3), st.sampled_from((-1, 1)))
def test_p3_the_mean_of_collinear_vectors(g, factor, sign):
    a, b = g[0], factor * sign * g[0]
    if a.any():
        assert_near(sp.adasum([a, b]), (a + b) / 2, [a, b])
    assert not sp.adasum([a, -a]).any()


@given(pairs)
def test_p4_p5_equal_vectors_and_zero(g):
    a, zero = g[0], np.zeros_like(g[0])
    assert sp.adasum([a, a]).tolist() == a.tolist()
    assert sp.adasum([a, zero]).tolist() == sp.adasum([zero, a]).tolist() == a.tolist()
    assert sp.adasum([zero, zero]).tolist() == zero.tolist()


@given(pairs, st.floats(-1e3, 1e3), st.integers(-200, 200))
def test_p6_scaling_both_scales_the_result(g, factor, exponent):
    a, b = g
    assert_near(sp.adasum([a * factor, b * factor]), sp.adasum(g) * factor, [a * factor, b * factor])
    power = 2.0**exponent
    assert sp.adasum([a * power, b * power]).tolist() == (sp.adasum(g) * power).tolist()


@given(pairs, st.integers(0, 99))
def test_p7_rotations(g, seed):
    dim = g[0].size
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))
    if all(v.any() for v in g):
        assert_near(sp.adasum([q @ v for v in g]), q @ sp.adasum(g), g, 1e-13)


@given(groups(), st.integers(0, 99))
def test_p8_order_of_the_elements_and_zeros_behind(g, seed):
    order = np.random.default_rng(seed).permutation(g[0].size)
    whole = [np.round(v * 8) for v in g]  # exact products
    assert sp.adasum([v[order] for v in whole[:2]]).tolist() == sp.adasum(whole[:2])[order].tolist()
    assert_near(sp.adasum([v[order] for v in g]), sp.adasum(g)[order], g, 1e-12)
    padded = [np.concatenate([v, np.zeros(5)]) for v in g]
    assert_near(sp.adasum(padded), np.concatenate([sp.adasum(g), np.zeros(5)]), g)


@given(pairs)
def test_p9_to_p11_norms_and_angles(g):
    a, b = g
    norm_a, norm_b, s = np.linalg.norm(a), np.linalg.norm(b), size_of(g)
    result, total = sp.adasum(g), a + b
    if not (norm_a and norm_b):
        return
    cos = float(a @ b) / norm_a / norm_b
    square = (norm_a**2 + norm_b**2) * (1 - 0.75 * cos**2) + norm_a * norm_b * cos**3 / 2
    assert abs(float(result @ result) - square) <= 1e-13 * s**2
    slack = EXACT * s
    norm = np.linalg.norm(result)
    assert np.linalg.norm(total / 2) <= norm + slack
    assert norm <= s + slack
    assert s <= norm_a + norm_b + slack
    along = (norm_a**2 + norm_b**2) * (1 - cos**2 / 2) + norm_a * norm_b * cos
    assert abs(float(result @ total) - along) <= 1e-13 * s**2
    assert along >= -1e-15 * s**2


@given(pairs)
def test_p12_the_mean_of_two_gram_schmidt_sums(g):
    a, b = g
    if a.any() and b.any():
        first = a + (b - (a @ b) / (a @ a) * a)
        second = b + (a - (a @ b) / (b @ b) * b)
        assert_near(sp.adasum(g), (first + second) / 2, g)


@given(pairs, st.floats(0.01, 10))
def test_p13_affine_in_each_argument(g, t):
    a, b = g
    if a.any():
        at = {x: sp.adasum([x * a, b]) for x in (t, 1.0, 2.0)}
        assert_near(at[t], at[1.0] + (t - 1) * (at[2.0] - at[1.0]), [10 * a, b], 1e-13)


def test_p14_discontinuous_at_zero():
    a = np.array([1.0, 0.0])
    for tiny in (1e-17, 1e-150, 1e-170, 1e-300, 5e-324):  # squares of the last three are not representable
        assert sp.adasum([a, a * tiny]).tolist() == [0.5, 0.0]
        assert sp.adasum([a * tiny, a]).tolist() == [0.5, 0.0]
    assert sp.adasum([a, a * 0]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("scales", [(1e-300, 1e300), (1e200, 1e200), (1e-200, 1e-200), (1e-320, 1.0)])
def test_vectors_whose_squares_overflow(scales):
    vectors = [np.array([1.0, 0.5]) * scales[0], np.array([-1.0, 2.0]) * scales[1]]
    np.testing.assert_allclose(sp.adasum(vectors), exact(vectors), rtol=1e-14)


# --- properties of the tree ----------------------------------------------------------------------------


@given(groups(counts=(2, 3, 4, 5, 8, 16)))
def test_p15_the_orthogonality_ratio_is_at_most_1(g):
    assert size_of([sp.adasum(g)]) <= size_of(g) * (1 + 1e-14)


@given(groups(counts=(2, 4, 8), kinds=("parallel", "identical")), st.randoms())
def test_p16_mean_of_collinear_vectors_in_any_order(g, random):
    random.shuffle(g)
    if all(size_of([partial]) > 1e-6 * size_of(g) for partial in partials(g)):  # zero but for rounding
        assert_near(sp.adasum(g), sum(g) / len(g), g, 1e-8)


@given(groups(counts=(2, 3, 4, 8), kinds=("orthogonal", "zeros", "one left")), st.randoms())
def test_p17_sum_of_orthogonal_vectors_in_any_order(g, random):
    random.shuffle(g)
    assert_near(sp.adasum(g), sum(g), g)


@given(groups(counts=(4, 8), kinds=("gaussian", "correlated")), st.integers(1, 7))
def test_p18_siblings_commute(g, flip):
    flip %= len(g)
    assert sp.adasum([g[i ^ flip] for i in range(len(g))]).tolist() == sp.adasum(g).tolist()


@pytest.mark.parametrize(("count", "distinct"), [(2, 1), (4, 3)])
def test_p18_number_of_results_of_all_orders(count, distinct):
    g = make("correlated", count, 5, 3)
    results = {tuple(sp.adasum(list(order))) for order in itertools.permutations(g)}
    assert len(results) == distinct


def test_p18_eight_vectors_have_315_results():
    """All 40,320 orders of the leaves, the inner nodes computed once: a node is a set of leaves with its halves."""
    g = make("correlated", 8, 3, 3)

    def trees(leaves: tuple[int, ...]) -> list[tuple[float, ...]]:
        if len(leaves) == 1:
            return [tuple(g[leaves[0]])]
        first, *rest = leaves
        return [
            tuple(sp.adasum([np.array(x), np.array(y)]))
            for others in itertools.combinations(rest, len(leaves) // 2 - 1)
            for x in trees((first, *others))
            for y in trees(tuple(leaf for leaf in rest if leaf not in others))
        ]

    assert len(set(trees(tuple(range(8))))) == 315


def test_p19_not_associative():
    a, b, c = (np.array(v, float) for v in ((1, 0), (1, 1), (0, 2)))
    np.testing.assert_allclose(sp.adasum([sp.adasum([a, b]), c]), [0.8088, 2.1103], atol=5e-5)
    np.testing.assert_allclose(sp.adasum([a, sp.adasum([b, c])]), [1.2206, 1.8824], atol=5e-5)


@given(groups(counts=(2, 4, 8), dims=(1,)))
def test_p21_numbers_give_their_mean(g):
    if all(abs(float(v[0])) > 1e-6 * size_of(g) for v in [*g, *partials(g)]):
        assert_near(sp.adasum(g), sum(g) / len(g), g, 1e-8)


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 4))
def test_p22_mean_result_follows_the_mean_gradient(seed, support, dim):
    rng = np.random.default_rng(seed)
    xs = list(rng.normal(size=(support, dim)) + rng.normal(size=dim))
    mean = sum(xs) / support
    expectation = sum(sp.adasum([x, y]) for x in xs for y in xs) / support**2
    projector = sum(np.outer(x, x) / (x @ x) for x in xs) / support
    np.testing.assert_allclose(expectation, 2 * mean - projector @ mean, atol=1e-12)
    norm, longer = np.linalg.norm(mean), np.linalg.norm(expectation)
    assert norm * (1 - 1e-9) <= longer <= 2 * norm * (1 + 1e-9)
    assert float(expectation @ mean) >= (2 * math.sqrt(2) / 3 - 1e-9) * norm * longer


@given(st.integers(0, 2**31))
def test_p23_two_steps_of_least_squares_in_both_orders(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 4))
    x /= np.linalg.norm(x, axis=1, keepdims=True) / 1.7
    y, w, lr = rng.normal(size=2), rng.normal(size=4), 1 / 1.7**2

    def gradient(i: int, w: np.ndarray) -> np.ndarray:
        return (x[i] @ w - y[i]) * x[i]

    ends = []
    for order in ((0, 1), (1, 0)):
        end = w
        for i in order:
            end = end - lr * gradient(i, end)
        ends.append(end)
    np.testing.assert_allclose(
        sum(ends) / 2, w - lr * sp.adasum([gradient(0, w), gradient(1, w)]), rtol=1e-12, atol=1e-13
    )


@given(groups())
def test_idempotent_and_identity_for_one_vector(g):
    assert_near(sp.adasum([g[0]] * 8), g[0], g)
    assert sp.adasum(g[:1]).tolist() == g[0].tolist()
    assert not np.shares_memory(sp.adasum(g[:1]), g[0])


# --- properties that do not hold -----------------------------------------------------------------------


def test_p24_may_point_against_the_sum_of_four():
    g = [np.array(v, float) for v in ((-2, -2), (2, -1), (0, 2), (0, 2))]
    result = sp.adasum(g)
    np.testing.assert_allclose(result, [0.193, -0.723], atol=5e-4)
    assert float(result @ sum(g)) == pytest.approx(-0.72, abs=5e-3)
    assert sp.adasum([np.array([x]) for x in (-2.0, 0.0, 1.5, 1.5)]).tolist() == [-0.25]  # the sum is 1


def test_four_may_give_less_than_their_mean():
    """For a pair, the norm of the mean is a lower bound (P10)."""
    g = [np.array(v, float) for v in ((1, 0), (-1, 1e-3), (1, 0), (1, 0))]
    cancelled = [sp.adasum(g[:2]), sp.adasum(g[2:])]
    assert np.linalg.norm(cancelled[0]) < 1e-2
    ratios = []
    for seed in range(300):
        vectors = make("integers", 4, 2, seed)
        mean = np.linalg.norm(sum(vectors) / 4)
        if mean:
            ratios.append(np.linalg.norm(sp.adasum(vectors)) / mean)
    assert min(ratios) < 0.5


def test_neither_linear_nor_monotonic():
    a, b = np.array([1.0, 0.0]), np.array([1.0, 1.0])
    assert sp.adasum([a * 2, b]).tolist() != (sp.adasum([a, b]) * 2).tolist()
    longer = sp.adasum([a * 3, b])
    assert longer[1] < sp.adasum([a, b])[1]  # an element of a grew, one of the result shrank


def strided(g: list[np.ndarray]) -> np.ndarray:
    """The pairing (i, i + n/2)."""
    while len(g) > 1:
        half = len(g) // 2
        g = [sp.adasum([g[i], g[i + half]]) for i in range(half)]
    return g[0]


def left_fold(g: list[np.ndarray]) -> np.ndarray:
    total = g[0]
    for x in g[1:]:
        total = sp.adasum([total, x])
    return total


@pytest.mark.parametrize("count", [4, 8, 16])
def test_differs_from_mean_sum_fold_strided_tree(count):
    g = make("wide scale", count, 33, 1)
    others = [sum(g), sum(g) / count, left_fold(g), strided(g)]
    for other in others:
        assert np.linalg.norm(sp.adasum(g) - other) > 10 * RTOL["float16"] * size_of(g)


SHAPES = [(4, 3), (4,), (2, 4), (2,), (1,), ()]


def test_layers_are_summed_one_by_one():
    """Each layer is summed by itself; flattening all layers into one vector changes the result."""
    rng = np.random.default_rng(5)
    ranks = [[rng.normal(size=shape) + 0.5 for shape in SHAPES] for _ in range(4)]
    result = sp.adasum(ranks)
    flat = sp.adasum([np.concatenate([x.ravel() for x in layers]) for layers in ranks])
    for i, shape in enumerate(SHAPES):
        assert result[i].shape == shape
        assert result[i].tolist() == sp.adasum([layers[i] for layers in ranks]).tolist()
    gap = np.linalg.norm(np.concatenate([x.ravel() for x in result]) - flat) / np.linalg.norm(flat)
    assert gap > 0.01


def test_one_parallel_and_one_orthogonal_layer():
    g = [[np.full(32, 1.0), np.eye(32)[i]] for i in range(2)]
    parallel, orthogonal = sp.adasum(g)
    assert parallel.tolist() == [1.0] * 32
    assert orthogonal.tolist() == [1.0, 1.0] + [0.0] * 30
    flat = sp.adasum([np.concatenate(layers) for layers in g])
    assert np.abs(flat[:32] - 1).max() > 0.01


# --- refusals, other arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vectors", "error"),
    [
        ([], InputError),
        ([[1.0, 0.0], [0.0, 1.0]], InputError),
        ([1.0, 2.0], InputError),
        ([sp.Tensor([1.0]), sp.Tensor([2.0])], InputError),
        ([np.ones(2), [np.ones(2)]], InputError),
        ([[np.ones(2)], [np.ones(2), np.ones(2)]], ShapeError),
        ([np.ones(2), np.ones(3)], ShapeError),
        ([np.ones(2), np.ones(2, np.float32)], DTypeError),
        ([np.ones(2, int), np.ones(2, int)], DTypeError),
        ([np.ones(2, complex)] * 2, DTypeError),
        ([np.ones(2, np.longdouble)] * 2, DTypeError),
    ],
)
def test_refused(vectors, error):
    with refused(error):
        sp.adasum(vectors)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8])
def test_strict_takes_powers_of_two_only(count):
    vectors = make("gaussian", count, 3, count)
    if count in (1, 2, 4, 8):
        assert sp.adasum(vectors, strict=True).tolist() == sp.adasum(vectors).tolist()
    else:
        padded = vectors + [np.zeros(3)] * (8 - count)
        assert sp.adasum(vectors).tolist() == sp.adasum(padded).tolist()
        with refused(InputError):
            sp.adasum(vectors, strict=True)


def test_empty_and_byte_swapped_vectors():
    assert sp.adasum([np.zeros((0, 3))] * 4).shape == (0, 3)
    swapped = [v.astype(">f4") for v in make("gaussian", 2, 5, 0)]
    assert sp.adasum(swapped).dtype == np.dtype(">f4")
    assert sp.adasum(swapped).tolist() == sp.adasum([v.astype("f4") for v in swapped]).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_number_poisons_its_layer_only(bad):
    g = [[np.array([1.0, 2.0]), np.array([bad if i == 1 else 1.0, 1.0])] for i in range(4)]
    good, poisoned = sp.adasum(g)
    assert np.isfinite(good).all()
    assert np.isnan(poisoned).all()


def test_gpu_arrays_stay_on_the_gpu(arrays):
    g = make("correlated", 4, 7, 0)
    result = sp.adasum([arrays.on_device(v) for v in g])
    assert isinstance(result, arrays.type)
    arrays.assert_equal(result, sp.adasum(g))


@example(np.zeros(3), np.ones(3))
@given(*(st.integers(0, 99).map(lambda seed: make("gaussian", 1, 9, seed)[0]),) * 2)
def test_moments_and_coefficients(a, b):
    found = moments(a, b)
    np.testing.assert_allclose(found, [a @ b, a @ a, b @ b], rtol=1e-14)
    first, second = coefficients(found)
    assert_near(first * a + second * b, sp.adasum([a, b]), [a, b])

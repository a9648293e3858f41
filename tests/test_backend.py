"""Arrays and counter-based random numbers: any slice of a stream can be drawn anywhere."""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import backend
from simparallel.backend import manual_seed, random_state
from simparallel.errors import InputError

DRAWS = [backend.random_bits, backend.random_uniform, backend.random_normal]


@pytest.fixture(autouse=True)
def _restored_seed():
    before = random_state.seed, random_state.drawn
    yield
    random_state.seed, random_state.drawn = before


@pytest.mark.parametrize("draw", DRAWS)
@given(
    seed=st.integers(0, 2**64 - 1),
    offset=st.one_of(st.just(0), st.integers(0, 2**40)),
    bounds=st.lists(st.integers(0, 40), min_size=2, max_size=2).map(sorted),
)
def test_slice_equals_slice_of_the_whole(draw, seed, offset, bounds):
    start, stop = bounds
    whole = draw(seed, "weights", offset, 40)

    np.testing.assert_array_equal(draw(seed, "weights", offset + start, stop - start), whole[start:stop])
    assert whole.shape == (40,)


@pytest.mark.parametrize("draw", DRAWS)
def test_seeds_and_streams_differ_and_equal_ones_agree(draw):
    drawn = [draw(seed, stream, 0, 8) for seed in (0, 1) for stream in ("a", "b", "ab")]

    assert len({array.tobytes() for array in drawn}) == 6
    np.testing.assert_array_equal(draw(1, "ab", 0, 8), drawn[5])


def test_uniform_and_normal_have_their_moments():
    uniform = backend.random_uniform(7, "moments", 0, 20000)
    normal = backend.random_normal(7, "moments", 0, 20000)

    assert uniform.min() >= 0
    assert uniform.max() < 1
    # 5 standard errors of the mean and of the variance of 20000 draws
    assert abs(uniform.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / 20000)
    assert abs(uniform.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / 20000)
    assert abs(normal.mean()) < 5 / np.sqrt(20000)
    assert abs(normal.var() - 1) < 5 * np.sqrt(2 / 20000)
    assert abs(np.corrcoef(normal[:-1], normal[1:])[0, 1]) < 5 / np.sqrt(20000)


@given(st.integers(0, 1000), st.integers(0, 60))
def test_permutation_is_a_permutation(seed, size):
    order = backend.random_permutation(seed, "order", size)

    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    np.testing.assert_array_equal(order, backend.random_permutation(seed, "order", size))


def test_permutations_of_two_epochs_differ():
    assert backend.random_permutation(0, "a", 50).tolist() != backend.random_permutation(0, "b", 50).tolist()


def test_streams_start_afresh_with_the_seed():
    manual_seed(np.int64(5))
    first = [random_state.next_stream("weight"), random_state.next_stream("mask")]
    manual_seed(5)

    assert random_state.seed == 5
    assert [random_state.next_stream("weight"), random_state.next_stream("mask")] == first
    assert len({*first, random_state.next_stream("weight")}) == 3


def test_every_thread_counts_for_itself():
    manual_seed(3)
    seen = []

    def rank():
        seen.append((random_state.seed, random_state.next_stream("weight")))

    expected = (0, "weight/1")
    random_state.next_stream("weight")
    for _ in range(2):
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join()

    assert seen == [expected, expected]


@pytest.mark.parametrize("seed", [-1, 1.5, "7", True, None])
def test_bad_seeds_are_refused(seed):
    with refused(InputError):
        manual_seed(seed)


def test_host_arrays():
    x = np.ones(3)

    assert backend.get_namespace(x, 2.0) is np
    assert backend.is_array(x)
    assert not backend.is_array([1.0])
    assert not backend.is_array(np.float64(1))
    assert backend.to_host(x) is x
    assert backend.to_device_like(x, np.zeros(1)) is x
    np.testing.assert_array_equal(backend.to_host([1, 2]), np.array([1, 2]))


@pytest.fixture
def _restored_precision():
    before = sp.get_float32_matmul_precision()
    yield
    sp.set_float32_matmul_precision(before)


class FakeProducts:
    """CuPy's module of products, with a list of its calls."""

    COMPUTE_TYPE_DEFAULT, COMPUTE_TYPE_TF32 = "float32", "TF32"

    def __init__(self):
        self.chosen = []

    def set_compute_type(self, dtype, compute_type):
        self.chosen.append((np.dtype(dtype).name, compute_type))


@pytest.mark.usefixtures("_restored_precision")
def test_precision_is_told_to_cupy(monkeypatch):
    products = FakeProducts()
    cupy = SimpleNamespace(_core=SimpleNamespace(_routines_linalg=products))
    monkeypatch.setattr(backend, "_usable_cupy", lambda: cupy)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=type(None)))
    for precision in ("high", "highest"):
        sp.set_float32_matmul_precision(precision)
        assert sp.get_float32_matmul_precision() == precision
    assert products.chosen == [("float32", "TF32"), ("float32", "float32")]


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed; its settings need no GPU")
@pytest.mark.usefixtures("_restored_precision")
def test_cupy_has_the_precisions(monkeypatch):
    """CuPy sets float32 without a GPU, and asks the GPU whether it has TF32."""
    cupy, has_gpu = pytest.importorskip("cupy"), not backend.why_no_gpu()
    monkeypatch.setattr(backend, "_usable_cupy", lambda: cupy)
    products = cupy._core._routines_linalg
    sp.set_float32_matmul_precision("highest")
    assert products.get_compute_type(np.float32) == products.COMPUTE_TYPE_DEFAULT
    if not has_gpu:
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            sp.set_float32_matmul_precision("high")
    else:
        sp.set_float32_matmul_precision("high")
        assert products.get_compute_type(np.float32) == products.COMPUTE_TYPE_TF32


@pytest.mark.usefixtures("_restored_precision")
def test_precision_leaves_numpys_values():
    a = np.random.default_rng(0).standard_normal((50, 50)).astype(np.float32)
    products = []
    for precision in ("highest", "high"):
        sp.set_float32_matmul_precision(precision)
        products.append((sp.Tensor(a) @ sp.Tensor(a)).numpy())
    np.testing.assert_array_equal(*products)


@pytest.mark.usefixtures("_restored_precision")
@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_run_starts_with_the_precision_of_its_launcher(transport):
    """A warm process, too, takes the precision of the next run."""
    with sp.Cluster(2, transport=transport) as cluster:
        for precision in ("high", "highest"):
            sp.set_float32_matmul_precision(precision)
            assert list(cluster.run(sp.get_float32_matmul_precision)) == [precision] * 2


@pytest.mark.parametrize("precision", ["medium", "tf32", None, True])
def test_other_precisions_are_refused(precision):
    with refused(InputError):
        sp.set_float32_matmul_precision(precision)

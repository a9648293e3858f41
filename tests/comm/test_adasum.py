"""all_reduce(op="adasum") matches `adasum` on the whole vectors, with the same bits on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import test_summation
from hypothesis import given, strategies as st
from oracles import World
from refusals import refused
from test_summation import KINDS, left_fold, make, size_of

import simparallel as sp
from simparallel.algorithms import names
from simparallel.algorithms.rehearsal import play, rehearse
from simparallel.base import blas
from simparallel.comm import current
from simparallel.comm.direct import direct_adasum
from simparallel.comm.direct.direct_adasum import CACHED, SliceTree, segments
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.errors import CollectiveMismatchError, DTypeError, InputError, RunFailedError, ShapeError
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec

for module in (sys.modules[__name__], test_summation):  # devices need not import Hypothesis
    cloudpickle.register_pickle_by_value(module)

HOME = str(Path(sp.__file__).parents[1])
BIG = SLOT_BYTES // 8 + 7  # float64 elements that no slot holds
# Partial results of these may vanish but for rounding, and then their direction is random.
CANCELLING = ("parallel", "anticorrelated", "integers")
ROUNDED = {"float64": 1e-15, "float32": 3e-7, "float16": 1.5e-3}  # for algorithms that round partial results


def reduced(ranks: list[list[np.ndarray]], algorithm: str | None, shared: bool) -> tuple[list[np.ndarray], bytes]:
    """Return this rank's layers after the all-reduce, made as one call."""
    xs = []
    for layer in ranks[sp.get_rank()]:
        x = sp.empty(layer.shape, layer.dtype, shared=shared)
        x[...] = layer
        xs.append(x)
    given = xs[0] if len(xs) == 1 else xs
    assert sp.all_reduce(given, op="adasum", algorithm=algorithm) is given
    return [x.copy() for x in xs], b"".join(x.tobytes() for x in xs)


def assert_adasum(results: Any, ranks: list[list[np.ndarray]], rounds: bool) -> None:
    assert len({bits for _, bits in results}) == 1
    for i, result in enumerate(results[0][0]):
        vectors = [layers[i] for layers in ranks]
        wide = sp.adasum([v.astype(float) for v in vectors])
        distance = np.abs(result.astype(float) - wide)
        slack = ROUNDED[str(result.dtype)] if rounds else 1e-15
        if not rounds:
            with np.errstate(over="ignore"):
                unit = np.spacing(np.abs(wide).astype(result.dtype)).astype(float)
            distance = np.maximum(distance - unit / 2 * (1 + 1e-9), 0)  # one rounding, at the end
        assert float(np.linalg.norm(distance)) <= slack * size_of(vectors)


@st.composite
def cases(draw: Any) -> Any:
    shapes = draw(st.sampled_from([[(5,)], [(4, 3), (4,), (2, 4), (1,), ()], [(BIG,)], [(3,), (70, 90), (0,), (11,)]]))
    dtype = draw(st.sampled_from(sorted(ROUNDED)))
    kinds, seed = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)), draw(st.integers(0, 2**20))
    algorithm = draw(st.sampled_from((None, "direct", *names()[1:])))
    return shapes, dtype, kinds, seed, algorithm, draw(st.booleans())


def layered(shapes: Any, dtype: str, kinds: list[str], seed: int, count: int) -> list[list[np.ndarray]]:
    """Make the layers of each rank; layer i is of kind i."""
    layers = [make(kinds[i % len(kinds)], count, int(np.prod(shape)), seed + i) for i, shape in enumerate(shapes)]
    return [[layer[r].astype(dtype).reshape(s) for layer, s in zip(layers, shapes, strict=True)] for r in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
def test_p20_every_algorithm_gives_the_layer_trees(world, count):
    """P20: every algorithm gives Adasum's tree of each layer, on every rank."""
    if world.transport == "shm" and count not in (2, 3, 4):
        pytest.skip("enough processes; see the test below")

    def check(case: Any) -> None:
        shapes, dtype, kinds, seed, algorithm, shared = case
        if algorithm == "ring" or (algorithm == "halving_doubling" and count == 3):
            algorithm = "tree"
        rounds = algorithm in ("tree", "halving_doubling")
        if rounds or max(map(np.prod, shapes)) > 1000:
            kinds = [kind if kind not in CANCELLING else "gaussian" for kind in kinds]
        ranks = layered(shapes, dtype, kinds, seed, count)
        assert_adasum(world.run(count, reduced, ranks, algorithm, shared), ranks, rounds)

    world.check(cases(), check, parts=4)


@pytest.mark.process
@pytest.mark.parametrize(
    ("count", "dtype", "algorithm"), [(8, "float32", "halving_doubling"), (9, "float64", "direct")]
)
def test_many_processes(count, dtype, algorithm):
    ranks = layered([(3,), (130, 90), (BIG,)], dtype, ["gaussian", "correlated"], 7, count)
    with World("shm") as world:
        assert_adasum(world.run(count, reduced, ranks, algorithm, False), ranks, algorithm != "direct")


@pytest.mark.process
def test_threads_and_processes_give_the_same_bits(inline):
    count = 4
    ranks = layered([(300, 91), (BIG,)], "float32", ["gaussian", "wide scale"], 3, count)
    with World("shm") as world:
        assert (
            world.run(count, reduced, ranks, None, False)[0][1] == inline.run(count, reduced, ranks, None, False)[0][1]
        )


# --- effects of flattening and of a fold ---------------------------------------------------------------


def gap(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Return the relative distance of two sets of layers."""
    one, two = (np.concatenate([x.ravel() for x in layers]) for layers in (a, b))
    return float(np.linalg.norm(one - two) / np.linalg.norm(one))


def both_ways(ranks: list[list[np.ndarray]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    mine = ranks[sp.get_rank()]
    flat = np.concatenate([x.ravel() for x in mine])
    sp.all_reduce(flat, "adasum")
    borders = np.cumsum([x.size for x in mine])[:-1]
    return reduced(ranks, None, False)[0], np.split(flat, borders)


@pytest.mark.parametrize("size", [30, BIG])
def test_flattening_the_model_changes_the_result(inline, size):
    ranks = layered([(size,), (size,)], "float64", ["identical", "orthogonal"], 1, 4)
    by_layer, flat = inline.run(4, both_ways, ranks)[0]
    assert gap(by_layer, flat) > 0.1
    assert gap(flat, [sp.adasum([np.concatenate(g) for g in ranks])]) < 1e-15


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_ring_starts_each_layer_at_another_rank(inline, count):
    ranks = layered([(9,), (7,), (5,), (4, 3), (BIG,)], "float64", ["correlated", "wide scale"], 2, count)
    results = inline.run(count, reduced, ranks, "ring", False)
    assert len({bits for _, bits in results}) == 1
    for i, result in enumerate(results[0][0]):
        vectors = [layers[i] for layers in ranks]
        start = i % count
        expected = left_fold(vectors[start:] + vectors[:start])
        assert np.linalg.norm(result - expected) <= 1e-15 * size_of(vectors)
        if count > 3:
            assert np.linalg.norm(result - sp.adasum(vectors)) > 1e-3 * size_of(vectors)


# --- ledgers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_halving_doubling_traffic(count):
    """An all_reduce's bytes, plus three float64 numbers for each exchange of products."""
    levels, num_elements = count.bit_length() - 1, 16 * count
    ledger = rehearse("halving_doubling", "adasum", count, num_elements, np.float64)
    for entry in ledger.entries:
        products = levels * (levels + 1) // 2
        assert len(entry.steps) == entry.total.sent_messages == 2 * levels + products
        assert entry.total.sent_bytes == 2 * (count - 1) * num_elements * 8 // count + 24 * products


@pytest.mark.parametrize("num_layers", [1, 4, 8])
def test_ring_is_busy_with_many_layers(num_layers):
    count, size = 4, 6
    layers = (size,) * num_layers
    xs = [np.ones(size * num_layers) for _ in range(count)]
    ledger = play("ring", "adasum", [(x, layers) for x in xs])
    assert all(x.tolist() == [1.0] * x.size for x in xs)
    assert {len(entry.steps) for entry in ledger.entries} == {2 * (count - 1)}
    assert ledger.total.sent_bytes == 2 * (count - 1) * size * num_layers * 8
    most = max(step.sent_bytes for entry in ledger.entries for step in entry.steps)
    assert most == size * 8 * max(1, num_layers // count)


def test_only_powers_of_two_halve(inline):
    ranks = layered([(5,)], "float64", ["gaussian"], 0, 3)
    with refused(RunFailedError) as caught:
        inline.run(3, reduced, ranks, "halving_doubling", False)
    assert isinstance(caught.value.__cause__, InputError)
    with sp.Cluster(3, transport="inline", algorithm="halving_doubling", echo=False) as cluster:
        assert_adasum(cluster.run(reduced, ranks, None, False), ranks, False)  # by direct, the default


# --- numbers, shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, BIG])
@pytest.mark.parametrize("shared", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("scales", [(1e-170, 1.0), (1e200, 1e-200), (1e-300, 1e300), (0.0, 1e-180)])
def test_vectors_whose_squares_overflow(world, size, shared, scales):
    vectors = [v * scale for v, scale in zip(make("gaussian", 2, size, 1), scales, strict=True)]
    results = world.run(2, lambda: reduced([[v] for v in vectors], None, shared[sp.get_rank()]))
    for (result,), _ in results:
        assert result.tolist() == sp.adasum(vectors).tolist()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", sorted(ROUNDED))
def test_shared_and_private_arrays_mix(world, count, dtype):
    ranks = layered([(3,), (BIG, 2)], dtype, ["gaussian", "correlated"], 5, count)
    assert_adasum(world.run(count, lambda: reduced(ranks, None, sp.get_rank() % 2 == 0)), ranks, False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("size", [4, BIG])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bad_number_poisons_its_layer_on_every_rank(inline, bad, size, dtype):
    ranks = layered([(size,), (size,)], dtype, ["gaussian"], 0, 4)
    ranks[2][1][size // 2] = bad
    for (good, poisoned), _ in inline.run(4, reduced, ranks, None, False):
        assert np.isfinite(good).all()
        assert np.isnan(poisoned).all()


def test_more_layers_than_a_slot_has_room_for(inline):
    count = 4
    ranks = layered([(3,)] * 1500, "float64", ["gaussian", "one zero", "correlated"], 0, count)
    assert_adasum(inline.run(count, reduced, ranks, None, True), ranks, False)


def with_strides(vectors: list[np.ndarray]) -> np.ndarray:
    x = np.zeros((vectors[0].size, 3))
    x[:, 1] = vectors[sp.get_rank()]
    sp.all_reduce(x[:, 1], "adasum")
    assert not x[:, [0, 2]].any()
    return x[:, 1].copy()


@pytest.mark.parametrize("size", [5, BIG])
def test_arrays_with_gaps(inline, size):
    vectors = make("correlated", 4, size, 0)
    for result in inline.run(4, with_strides, vectors):
        assert np.linalg.norm(result - sp.adasum(vectors)) <= 1e-15 * size_of(vectors)


def in_a_group(vectors: list[np.ndarray]) -> Any:
    group = sp.new_group([3, 0, 1])
    x = vectors[sp.get_rank()].copy()
    return sp.all_reduce(x, "adasum", group=group) if group.rank is not None else None


@pytest.mark.parametrize("size", [5, BIG])
def test_group_order_is_leaf_order(world, size):
    vectors = make("correlated", 4, size, 4)
    results = world.run(4, in_a_group, vectors)
    for rank in (0, 1, 3):
        np.testing.assert_allclose(results[rank], sp.adasum([vectors[r] for r in (3, 0, 1)]), rtol=1e-12)


def several_at_once(vectors: list[np.ndarray]) -> Any:
    mine = vectors[sp.get_rank()]
    xs = [mine.copy() for _ in range(3)]
    works = [sp.all_reduce(x, "adasum", async_op=True) for x in xs]
    total = sp.all_reduce(mine.copy(), "sum")
    listed = sp.all_reduce([mine.copy(), mine[:2].copy()], "adasum", async_op=True)
    sums = sp.all_reduce([mine.copy(), mine[:2].copy()], "sum")
    return [work.wait() for work in reversed(works)], total, listed.wait(), sums


@pytest.mark.parametrize("size", [5, BIG])
def test_async_adasum_among_other_collectives(world, size):
    vectors = make("correlated", 3, size, 4)
    for xs, total, listed, sums in world.run(3, several_at_once, vectors):
        for x in (*xs, listed[0]):
            np.testing.assert_allclose(x, sp.adasum(vectors), rtol=1e-12)
        np.testing.assert_allclose(listed[1], sp.adasum([v[:2] for v in vectors]), rtol=1e-12)
        np.testing.assert_allclose(total, sum(vectors), rtol=1e-12)
        np.testing.assert_allclose(sums[1], sum(v[:2] for v in vectors), rtol=1e-12)


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 5), st.integers(1, 6))
def test_segments_are_the_layers_within_a_part(layers, position, count):
    total = sum(layers)
    part = slice(total * position // count, total * (position + 1) // count) if position < count else slice(0, total)
    owner = [i for i, size in enumerate(layers) for _ in range(size)]
    found = list(segments(tuple(layers), part))
    assert [i for i, start, stop in found for _ in range(start, stop)] == owner[part]
    assert all(a[2] == b[1] for a, b in pairwise(found))


def taken_through(vectors: list[np.ndarray]) -> tuple[np.ndarray, int]:
    """Return the result for a slice that is the whole vector, and the number of measurements."""
    slices, looks = SliceTree(vectors, [(0, 0, vectors[0].size)], 1), 0
    while len(slices.rows) > 1:
        if slices.plan(slices.products()):
            looks += 1
            slices.set_halves(slices.measure_halves())
        out = np.empty_like(vectors[0])
        slices.join(out)
    return out, looks


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("size", [3, CACHED + 5])
@pytest.mark.parametrize("threads", [1, None])  # in long strips and in short ones
def test_two_levels_at_once_give_the_tree(count, size, threads, monkeypatch):
    monkeypatch.setattr(blas, "_threads", threads)
    vectors = make("correlated", count, size, count)
    result, looks = taken_through(vectors)
    assert looks == 0
    assert np.linalg.norm(result - sp.adasum(vectors)) <= 2e-15 * size_of(vectors)


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("noise", [1e-2, 1e-5, 1e-7, 0.0])
def test_nearly_cancelled_halves_are_checked(count, noise, monkeypatch):
    rng = np.random.default_rng(1)
    vectors = make("gaussian", count, 300, 2)
    vectors[1] = -vectors[0] + noise * rng.normal(size=300)
    result, looks = taken_through(vectors)
    assert looks == 1
    assert np.linalg.norm(result - sp.adasum(vectors)) <= 1e-14 / (noise or 1.0) * size_of(vectors)
    monkeypatch.setattr(direct_adasum, "_CANCELLED", 0.0)
    if 0 < noise < 1e-6:  # red control: the result of the products alone
        unseen, looks = taken_through(vectors)
        assert looks == 0
        assert np.linalg.norm(unseen - sp.adasum(vectors)) > 1e-6 * size_of(vectors)


@pytest.mark.parametrize("core", [None, "SkylakeX"])  # on this machine, and with the kernel for small products
def test_equal_vectors_have_equal_products(core, tmp_path):
    """Bit for bit, or g and -g would leave something."""
    if core and "X86_V4" not in np.show_config(mode="dicts")["SIMD Extensions"]["found"]:
        pytest.skip("this processor cannot run that kernel")
    code = """
import numpy as np
from simparallel.base import blas
from simparallel.comm.direct.direct_adasum import _grams
rng = np.random.default_rng(0)
print(blas.has_small_kernel())
for rows in (2, 3, 4):
    for size in (1, 5, 64, 777, 2048, 8192):
        row = rng.normal(size=(3, 1, size))
        found = _grams(np.ascontiguousarray(row * rng.choice([-1, 1], (rows, 1))))
        assert found.shape == (rows, rows, 1)
        assert len(set(abs(found).ravel())) == 1, (rows, size, found)
        np.testing.assert_allclose(abs(found[0, 0, 0]), (row**2).sum(), rtol=1e-12)
"""
    environment = {**os.environ, "PYTHONPATH": HOME} | ({"OPENBLAS_CORETYPE": core} if core else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    if core and blas.core()[0].startswith("openblas"):
        assert done.stdout == "True\n"


# --- refusals, events ----------------------------------------------------------------------------------


def refusal_of(call: str) -> str:
    x = np.ones(4)
    calls = {
        "integers": lambda: sp.all_reduce(np.ones(4, int), "adasum"),
        "complex": lambda: sp.all_reduce(np.ones(4, complex), "adasum"),
        "two dtypes": lambda: sp.all_reduce([x, np.ones(4, np.float32)], "adasum"),
        "empty list": lambda: sp.all_reduce([], "adasum"),
        "read-only": lambda: sp.all_reduce([np.broadcast_to(x, (2, 4))], "adasum"),
        "layers": lambda: current().adasum(x, [1, 2]),
        "reduce": lambda: sp.reduce(x, op="adasum"),
    }
    try:
        calls[call]()
    except Exception as error:
        assert x.tolist() == [1.0] * 4
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("integers", DTypeError, "int64"), ("complex", DTypeError, "complex128"),
        ("two dtypes", DTypeError, "float32"), ("empty list", InputError, "empty"),
        ("read-only", InputError, "read-only"), ("layers", ShapeError, "3 elements"),
        ("reduce", InputError, "'adasum'"),
    ],
)  # fmt: skip
def test_bad_calls_change_nothing(inline, call, error, said):
    for text in inline.run(2, refusal_of, call):
        assert text.startswith(error.__name__)
        assert said in text


def differently() -> None:
    sp.all_reduce([np.ones(4), np.ones(2)] if sp.get_rank() else [np.ones(2), np.ones(4)], "adasum")


def test_different_layer_borders_mismatch(world):
    with refused(RunFailedError) as caught:
        world.run(2, differently)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def one_call(algorithm: str) -> None:
    sp.all_reduce(np.ones(1000), "adasum", algorithm=algorithm)


@pytest.mark.parametrize(
    ("algorithm", "sim_ps"),
    [("direct", 7 * 1000 + 12000), ("halving_doubling", 7 * 1000 + 12000), ("tree", 4 * 9000), ("naive", 6 * 9000)],
)
def test_its_event_is_priced_as_published(algorithm, sim_ps):
    """1 ps a byte, 1000 ps a message; 8000 bytes on 4 ranks."""
    spec = ClusterSpec(4, DeviceSpec("plain", {4: 1e12}, 1e12, 10**9, 0.0), LinkSpec(1e-9, 1e12))
    with sp.Cluster(4, device=spec.device, link=spec.link, transport="inline", echo=False) as cluster:
        cluster.run(one_call, algorithm)
        events = [event for event in cluster.trace.events if event.name == "adasum"]
    assert len(events) == 4
    assert {event.sim_end_ps - event.sim_start_ps for event in events} == {sim_ps}

"""Ranks may mix methods within one collective: at once or in steps, own memory or a staging copy."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import numpy as np
import oracles
import pytest
from hypothesis import given, settings, strategies as st
from oracles import World

import simparallel as sp
from simparallel.comm.memory.segment import SLOT_BYTES

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
SLOT = SLOT_BYTES // 8  # elements
SIZES = (0, 12, SLOT - SLOT % 12, SLOT - SLOT % 12 + 12, 24 * SLOT)  # of float64, cut by up to four ranks
Way = tuple[bool, bool, bool]  # in steps, in the arena, with a place for the result
Step = tuple[str, int, int, list[Way]]  # op, elements, root, and the method of each rank


@st.composite
def programs(draw: Any) -> tuple[int, list[Step]]:
    ranks = draw(st.integers(2, 4))
    way = st.tuples(st.booleans(), st.booleans(), st.booleans())
    step = st.tuples(
        st.sampled_from(OPS),
        st.sampled_from(SIZES),
        st.integers(0, ranks - 1),
        st.lists(way, min_size=ranks, max_size=ranks),
    )
    return ranks, draw(st.lists(step, min_size=1, max_size=8))


def given_by(rank: int, size: int, number: int) -> np.ndarray:
    return (np.arange(size) % 7 + 10.0 * rank + number).astype(np.float64)


def play(steps: list[Step]) -> list[Any]:
    me, ranks, found, works = sp.get_rank(), sp.get_world_size(), [], []
    for number, (op, size, root, ways) in enumerate(steps):
        in_steps, shared, has_out = ways[me]

        def room(count: int, shared: bool = shared) -> np.ndarray:
            return sp.empty(count, np.float64, shared=shared)

        x = room(size)
        x[...] = given_by(me, size, number)
        settings: dict[str, Any] = {"async_op": in_steps}
        if op in ("broadcast", "scatter"):
            settings["src"] = root
        if op in ("reduce", "gather"):
            settings["dst"] = root
        argument: Any = x
        if op == "scatter":
            argument = list(x.reshape(ranks, -1)) if me == root else None
        is_target = op not in ("reduce", "gather") or me == root
        if has_out and op != "broadcast" and is_target:
            count = {"all_gather": size * ranks, "reduce_scatter": size // ranks, "scatter": size // ranks}
            settings["out"] = [room(size) for _ in range(ranks)] if op == "gather" else room(count.get(op, size))
        result = getattr(sp, op)(argument, **settings)
        works.append(result)
        found.append(None if in_steps else _kept(result))
    return [
        _kept(work.wait()) if kept is None and work is not None else kept
        for work, kept in zip(works, found, strict=True)
    ]


def _kept(result: Any) -> Any:
    return [np.array(part) for part in result] if isinstance(result, list) else np.array(result)


def expected(ranks: int, steps: list[Step]) -> list[list[Any]]:
    """Return the expected results by step and rank; None where nothing is guaranteed."""
    wanted = []
    for number, (op, size, root, _) in enumerate(steps):
        xs = [given_by(rank, size, number) for rank in range(ranks)]
        if op == "scatter":
            wanted.append(oracles.scatter([x.reshape(ranks, -1) for x in xs], root))
        elif op in ("broadcast", "reduce", "gather"):
            wanted.append(getattr(oracles, op)(xs, root))
        else:
            wanted.append(getattr(oracles, op)(xs))
    return wanted


@given(programs())
@settings(max_examples=60)
def test_ranks_may_mix_methods(world: World, program: tuple[int, list[Step]]) -> None:
    ranks, steps = program
    results = world.run(ranks, play, steps)
    for number, wanted in enumerate(expected(ranks, steps)):
        for rank in range(ranks):
            if wanted[rank] is not None:
                np.testing.assert_array_equal(np.array(results[rank][number]), np.array(wanted[rank]))


def shifted(size: int) -> list[Any]:
    """Run collectives of float64 in the arena, four bytes after a multiple of eight."""
    me, ranks = sp.get_rank(), sp.get_world_size()

    def given() -> np.ndarray:
        x = sp.empty(2 * size + 1, np.float32, shared=True)[1:].view(np.float64)
        x[...] = given_by(me, size, 0)
        return x

    calls: list[Any] = [
        sp.all_reduce, lambda x: sp.broadcast(x, src=1), lambda x: sp.reduce(x, dst=0), sp.all_gather,
        sp.reduce_scatter, sp.all_to_all, lambda x: sp.gather(x, dst=0),
        lambda x: sp.scatter(list(x.reshape(ranks, -1)) if me == 0 else None), lambda x: sp.all_reduce(x, "adasum"),
    ]  # fmt: skip
    found = [call(given()) for call in calls]
    found += [sp.all_gather(given(), out=sp.empty(2 * size * ranks + 1, np.float32, shared=True)[1:].view(float))]
    return [None if result is None else _kept(result) for result in found]


@pytest.mark.parametrize("size", [12, 2 * SLOT, 24 * SLOT])
def test_shared_arrays_may_start_anywhere(world: World, size: int) -> None:
    results = world.run(2, shifted, size)
    xs = [given_by(rank, size, 0) for rank in range(2)]
    lists = [list(x.reshape(2, -1)) for x in xs]
    wanted = [
        oracles.all_reduce(xs), oracles.broadcast(xs, 1), oracles.reduce(xs, 0), oracles.all_gather(xs),
        oracles.reduce_scatter(xs), oracles.all_to_all(xs), oracles.gather(xs, 0), oracles.scatter(lists, 0),
        None, oracles.all_gather(xs),
    ]  # fmt: skip
    for number, expectation in enumerate(wanted):
        for rank in range(2):
            if expectation is not None and expectation[rank] is not None:
                np.testing.assert_array_equal(np.array(results[rank][number]), np.array(expectation[rank]), str(number))
    plain = sp.launch(
        lambda: sp.all_reduce(given_by(sp.get_rank(), size, 0), "adasum"), world_size=2, transport="inline"
    )
    np.testing.assert_array_equal(results[1][8], plain[1])

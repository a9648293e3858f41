"""`help` documents shapes, errors and costs, and names only places that a reader can reach."""

import inspect
import math
import re

import pytest
from hypothesis import given, strategies as st

import simparallel as sp
from simparallel.machine.cluster import describe

# Bytes that a rank sends, as the docstrings put it; `root` sends or gets the rest.
COSTS = {
    "all_reduce": "2 (P-1)/P * x.nbytes",
    "broadcast": "x.nbytes",
    "reduce": "x.nbytes",
    "all_gather": "(P-1) * x.nbytes",
    "reduce_scatter": "(P-1)/P * x.nbytes",
    "all_to_all": "(P-1)/P * x.nbytes",
    "gather": "x.nbytes",
    "scatter": "(P-1) * part.nbytes",
}


@pytest.mark.parametrize("name", [*COSTS, "barrier", "send", "recv", "adasum_layers", "new_group"])
def test_collectives_document_shapes_errors_costs(name: str) -> None:
    text = inspect.getdoc(getattr(sp.collectives, name)) or ""
    assert "Collective:" in text
    assert "Raises:\n" in text
    assert "RankFailedError" in text
    if name not in ("barrier", "new_group"):
        assert "Args:\n" in text
    if name in COSTS:
        assert f"Cost: {COSTS[name]} [bytes]" in text


@pytest.mark.parametrize("name", COSTS)
@given(st.integers(2, 9), st.integers(1, 50))
def test_documented_costs_match_the_model(name: str, ranks: int, elements: int) -> None:
    part = 8 * elements * ranks  # each rank has one part, or sends one
    vector = part * ranks if name in ("all_gather", "gather", "scatter") else part
    told = COSTS[name].replace("2 (", "2 * (").replace("x.nbytes", "n").replace("part.nbytes", "n")
    assert re.fullmatch(r"[-()*/ 12Pn]+", told)
    expected = eval(told, {"P": ranks, "n": part})
    # A root, or the end of the chain, sends another amount: everything, or nothing.
    position = 0 if name in ("scatter", "broadcast") else 1
    sent = describe(ranks).collective(name, vector, tuple(range(ranks)), position=position).sent_bytes
    assert math.isclose(sent, expected, abs_tol=1)


def test_signatures_show_no_internals() -> None:
    for name in sp.__all__:
        thing = getattr(sp, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            shown = str(inspect.signature(thing))
            assert " object at 0x" not in shown, name
            assert not re.search(r"\b_\w+(:|=)", shown), (name, shown)


def test_hooks_are_explained() -> None:
    hooks = [name for name in vars(sp.Callback) if name.endswith(("begin", "end"))]
    assert len(hooks) == 18
    assert all(getattr(sp.Callback, name).__doc__ for name in hooks)


def test_names_that_docstrings_mention_can_be_reached() -> None:
    assert isinstance(sp.launch(sp.get_rank, world_size=1, transport="inline"), sp.Results)
    assert issubclass(sp.data.NumpySlicesDataset, sp.data.SourceDataset)
    for name in ("ranks", "rank", "size"):
        assert f"\n    {name}:" in str(inspect.getdoc(sp.Group))
    for name in ("trace", "spec", "world_size"):
        assert f"\n    {name}:" in str(inspect.getdoc(sp.Cluster))

"""Calls with equal arguments but different purposes are different calls, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.comm import call_header as h, current
from simparallel.errors import CollectiveMismatchError, RunFailedError
from simparallel.parallel import DistributedDataParallel, Join


def refusal_of(world: World, program: Any, *args: Any) -> str:
    """Return the text of the mismatch that every rank raises."""
    with refused(RunFailedError) as caught:
        world.run(2, program, *args)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert set(caught.value.reports) == {0, 1}
    for report in caught.value.reports.values():
        assert "CollectiveMismatchError" in report["summary"]
    return str(caught.value.__cause__)


NAMED = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "barrier")


def named(name: str, purposes: tuple[str, str], is_async: bool = False) -> Any:
    x = np.full((2, 2), 1.0 + sp.get_rank())
    communicator = current()
    getattr(communicator, name)(*[x] * (name != "barrier"))  # the same call without a name
    with communicator.for_purpose(purposes[sp.get_rank()]):
        result = getattr(communicator, name)(*[x] * (name != "barrier"), async_op=is_async)
        return result.wait() if is_async else result


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_purpose_is_compared(world, name, is_async):
    text = refusal_of(world, named, name, ("Sum of x", "Mean of x"), is_async)
    assert "for Sum of x" in text
    assert "for Mean of x" in text
    assert "They differ in: purpose" in text


@pytest.mark.parametrize("name", NAMED)
def test_equal_names_change_nothing(world, name):
    got, expected = (world.run(2, named, name, purposes) for purposes in (("Sum", "Sum"), ("", "")))
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_equal(mine, other)


def test_long_purposes_differ_beyond_shown_text(world):
    names = "é" * 40 + "1", "é" * 40 + "2"
    assert "for éé" in refusal_of(world, named, "all_reduce", names)


def test_scatter_reports_purpose_digest(world):
    def program() -> None:
        with current().for_purpose(f"stage {sp.get_rank()}"):
            sp.scatter([np.ones(2)] * 2 if sp.get_rank() == 0 else None)

    assert f"for #{h.digest('stage 1'):016x}" in refusal_of(world, program)


def test_shapes_with_equal_crc_are_distinguished(world):
    shapes = ((4, 24, 216), (32, 36, 18)), ((8, 18, 144), (24, 8, 108))

    def program() -> None:
        sp.all_reduce([np.zeros(shape, np.int8) for shape in shapes[sp.get_rank()]])

    assert "shapes in the list" in refusal_of(world, program)


# --- DistributedDataParallel ------------------------------------------------------------------------


def net() -> sp.nn.Module:
    sp.manual_seed(0)
    return sp.nn.Sequential(sp.nn.Linear(2, 2), sp.nn.Linear(2, 2))


def batch() -> np.ndarray:
    return np.full((1, 2), sp.get_rank() + 1.0, np.float32)


def freeze_later(ranks: tuple[int, ...], settings: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(net(), **settings)
    ddp(batch()).sum().backward()
    if sp.get_rank() in ranks:
        ddp.module[0].weight.requires_grad = False
    ddp.zero_grad()
    for _ in range(2):
        ddp(batch()).sum().backward()
    frozen = ddp.module[0].weight.grad
    return ddp.module[0].bias.grad.numpy().tolist(), None if frozen is None else frozen.numpy().any()


SETTINGS = ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 1e-6})


@pytest.mark.parametrize("settings", SETTINGS)
def test_parameter_frozen_on_one_rank_is_refused(world, settings):
    assert "frozen: 0.weight" in refusal_of(world, freeze_later, (1,), settings)


@pytest.mark.parametrize("settings", SETTINGS)
def test_parameter_frozen_on_all_ranks_is_skipped(world, settings):
    first, second = world.run(2, freeze_later, (0, 1), settings)
    assert first == second
    assert not first[1]


def test_join_with_frozen_parameter(world):
    """A rank without inputs joins the reductions of a model with a frozen parameter."""

    def program() -> Any:
        ddp = DistributedDataParallel(net())
        ddp.module[0].weight.requires_grad = False
        with Join(ddp):
            for _ in range(1 + sp.get_rank()):
                ddp(batch()).sum().backward()
        return ddp.module[0].bias.grad.numpy().tolist()

    assert len(list(world.run(2, program))) == 2


def two_models(orders: tuple[str, str], *, is_copy: bool = False) -> list[Any]:
    models = {name: DistributedDataParallel(sp.nn.Linear(2, 2)) for name in "ab"}
    if is_copy and sp.get_rank() == 0:
        models["unused"] = type(models["a"]).__deepcopy__(models["a"], {})
    if is_copy:
        models["c"] = DistributedDataParallel(sp.nn.Linear(2, 2))
    losses = {name: model(batch()).sum() for name, model in models.items()}
    for name in orders[sp.get_rank()]:
        losses[name].backward()
    return [model.module.weight.grad.numpy().tolist() for name, model in models.items() if name in orders[0]]


def test_swapped_backwards_of_two_models_mismatch(world):
    text = refusal_of(world, two_models, ("ab", "ba"))
    assert "for DDP 1, bucket 0" in text
    assert "for DDP 2, bucket 0" in text


def test_copied_model_on_one_rank_raises_nothing(world):
    def program() -> list[Any]:
        return two_models(("abc", "abc"), is_copy=True)

    first, second = world.run(2, program)
    assert first == second == [[[1.5, 1.5]] * 2] * 3

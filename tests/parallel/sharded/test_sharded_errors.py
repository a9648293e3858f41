"""What `fully_shard` refuses, and what cannot go wrong in silence."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from refusals import refused
from sharded_programs import gpt, mlp, shard

import simparallel as sp
from simparallel.errors import AutogradError, InputError, LayoutError, ShapeError, UnusedParameterError
from simparallel.parallel import fully_shard


@pytest.mark.parametrize("letters", ["SPS", "SSR", "SRS", "RRR", "RRS", "RSR", "PSS", "RPP", "SPR", "XSS"])
def test_combinations_without_a_step_are_refused(letters):
    with refused(InputError):
        fully_shard(mlp(), parameter=letters[0], gradient=letters[1], state=letters[2])


def _scalar() -> Any:
    net = mlp()
    net.scale = sp.nn.Parameter(np.float32(1.0))
    return fully_shard(net)


def _two_dtypes() -> Any:
    return fully_shard(sp.nn.Sequential(sp.nn.Linear(2, 2), sp.nn.Linear(2, 2, dtype=np.float64)))


def _with_state() -> Any:
    net = mlp()
    step = sp.optim.Adam(net.parameters())
    net(np.ones((1, 5), np.float32)).sum().backward()
    step.step()
    net.zero_grad()
    return fully_shard(net)


def _with_gradient() -> Any:
    net = mlp()
    net(np.ones((1, 5), np.float32)).sum().backward()
    return fully_shard(net)


def _tied_between_groups() -> Any:
    net = sp.nn.Sequential(sp.nn.Linear(3, 3), sp.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    fully_shard(net[0])
    return fully_shard(net)


REFUSED: dict[str, Callable[[], Any]] = {
    "no module": lambda: fully_shard(3),  # type: ignore[type-var]
    "a flag": lambda: fully_shard(mlp(), reshard_after_forward=2),  # type: ignore[arg-type]
    "freed and kept": lambda: fully_shard(mlp(), parameter="R", reshard_after_forward=True),
    "a policy": lambda: fully_shard(mlp(), mp_policy="float16"),  # type: ignore[arg-type]
    "buffers": lambda: fully_shard(mlp(), mp_policy=sp.parallel.MixedPrecision(buffer_dtype="float16")),
    "twice": lambda: fully_shard(fully_shard(mlp())),
    "an axis": lambda: fully_shard(mlp(), axis=3),
    "two axes": lambda: fully_shard(mlp(), axis=("replicate", "shard")),
    "a mesh": lambda: fully_shard(mlp(), sp.Mesh((1,), ("dp",))),
    "a scalar": _scalar,
    "two dtypes": _two_dtypes,
    "with state": _with_state,
    "with gradients": _with_gradient,
    "in a DDP": lambda: fully_shard(sp.parallel.DistributedDataParallel(mlp()).module),
    "mixed precision": lambda: fully_shard(sp.nn.auto_mixed_precision(mlp(), "O1")),
    "tied between groups": _tied_between_groups,
}


@pytest.mark.parametrize("what", REFUSED)
def test_modules_that_cannot_be_groups(what):
    with refused(InputError):
        REFUSED[what]()


def test_copies_are_refused():
    from copy import deepcopy
    from pickle import dumps

    net = fully_shard(mlp())
    for copied in (deepcopy, dumps):
        with pytest.raises(TypeError, match="sharded and cannot be"):
            copied(net)


def _both(program: Callable[[], None]) -> Any:
    return sp.launch(program, world_size=2, transport="inline")


def test_root_outside_of_groups_is_refused():
    def program() -> None:
        model = gpt()
        for block in model.blocks:
            fully_shard(block)
        step = sp.optim.Adam(model.parameters())
        before = {name: p.data.copy() for name, p in model.named_parameters()}
        with refused(InputError):
            model(np.zeros((1, 8), np.int64)).sum().backward()
        step.zero_grad()
        for name, p in model.named_parameters():
            np.testing.assert_array_equal(p.data, before[name])

    _both(program)


class _Rule(sp.optim.SGD):
    """A rule of a user, which writes into `param.data`."""

    def update(self, param: Any, grad: Any, group: Any) -> None:
        param.data[...] -= grad


@pytest.mark.parametrize("letters", ["SSS", "RSS"])
def test_gathered_parameters_are_never_stale(letters):
    """Parameters that were gathered ahead, or are kept whole, are gathered again after any write."""

    def program() -> None:
        model = fully_shard(sp.nn.Linear(4, 3), parameter=letters[0], gradient=letters[1], state=letters[2])
        x = np.ones((1, 4), np.float32)
        for value in (1.0, 2.0):
            model.unshard()
            for p in model.parameters():
                # Nobody would see a write past the Tensor.
                with pytest.raises(ValueError, match="read-only"):
                    p.data[...] = value
                sp.nn.init.constant_(p, value)
            assert model(x).tolist() == [[5 * value] * 3]
        model(x).sum().backward()
        _Rule(model.parameters(), lr=1).step()
        assert model(x).tolist() == [[5.0] * 3]
        for p in model.parameters():
            p.data = np.full(p.data.shape, 3.0, np.float32)
        assert model(x).tolist() == [[15.0] * 3]
        model.unshard()
        model.reshard()
        model.load_full_state_dict({"weight": np.zeros((3, 4), np.float32), "bias": np.ones(3, np.float32)})
        assert model(x).tolist() == [[1.0] * 3]

    _both(program)


@pytest.mark.parametrize("what", ["replaced", "converted"])
@pytest.mark.parametrize("letters", ["RPR", "RSS", "SSS"])
def test_parameters_that_are_not_those_of_the_group(what, letters):
    def program() -> None:
        model = shard(mlp(), letters)
        if what == "replaced":
            model[2].weight = sp.nn.Parameter(np.zeros((9, 7), np.float32))
        else:
            model.double()
        with refused(InputError):
            model(np.ones((2, 5), np.float32))

    _both(program)


def test_changes_before_backward_are_an_error():
    def program(letters: str) -> None:
        model = shard(mlp(), letters)
        step = sp.optim.SGD(model.parameters(), lr=0.1)
        losses = [model(np.ones((2, 5), np.float32)).sum() for _ in range(2)]
        losses[0].backward()
        step.step()
        with pytest.raises(AutogradError, match="has changed since forward"):
            losses[1].backward()

    for letters in ("SSS", "RSS"):
        sp.launch(program, (letters,), world_size=3, transport="inline")


def test_unused_parameters_are_named():
    class Net(sp.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = sp.nn.Linear(3, 3), sp.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    def program() -> None:
        with refused(UnusedParameterError):
            fully_shard(Net())(np.ones((1, 3), np.float32)).sum().backward()

    _both(program)


def test_stored_parameter_outside_of_its_module():
    def program() -> None:
        model = gpt()
        fully_shard(model.tokens)
        with refused(LayoutError):
            model(np.zeros((1, 8), np.int64))

    _both(program)


def test_whole_parameter_outside_of_its_module():
    """Every rank has the values, but nobody would reduce the gradient of this use."""

    class Tied(sp.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.norm = sp.nn.Linear(4, 3, bias=False), sp.nn.LayerNorm(3)

        def forward(self, x: Any) -> Any:
            return self.norm(self.into(x)) @ self.into.weight.T.T

    def program() -> None:
        model, x = Tied(), np.ones((2, 4), np.float32)
        for part in (model.into, model):
            fully_shard(part, **dict(zip(("parameter", "gradient", "state"), "RPR", strict=True)))
        with refused(LayoutError):
            model(x)
        with sp.no_grad():
            model(x)
        # A penalty is the same on all ranks.
        penalty = (model.into.weight * model.into.weight).sum() * 0.5
        penalty.backward()
        np.testing.assert_array_equal(model.into.weight.grad.numpy(), model.into.weight.numpy())

    _both(program)


def test_automatic_parallelism_is_refused():
    def program() -> None:
        model = shard(mlp(), "SSS")
        with refused(InputError):
            sp.parallel.AutoParallel(lambda x: model(x))(np.ones((2, 5), np.float32))

    _both(program)


@pytest.mark.parametrize("letters", ["SSS", "RPR"])
def test_wrapping_again_is_refused(letters):
    def program() -> None:
        with refused(InputError):
            sp.parallel.DistributedDataParallel(shard(mlp(), letters))

    _both(program)


@pytest.mark.parametrize("what", ["another mesh", "the axis of stages", "groups made later"])
def test_groups_that_a_pipeline_cannot_have(what):
    def program() -> None:
        mesh, model = sp.Mesh((2, 1), ("pp", "shard")), mlp()
        groups = {"another mesh": sp.Mesh((1, 2), ("pp", "shard")), "the axis of stages": mesh}.get(what)
        if groups is not None:
            fully_shard(model[0], groups, axis="pp" if groups is mesh else "shard")
        with refused(InputError):
            pipeline = sp.parallel.Pipeline(model, sp.nn.CrossEntropyLoss(), 2, mesh=mesh, balance=(3, 2))
            fully_shard(model[0], mesh)
            pipeline.step(np.ones((2, 5), np.float32), np.zeros(2, np.int64))

    _both(program)


@pytest.mark.parametrize("axes", [("shard",), ("tp",), ("dp", "tp")])
def test_parameters_that_are_cut_along_another_axis(axes):
    """Ranks that share slices have the same part of the others: only axes of the mesh, besides the group's own, cut."""

    def program() -> None:
        layer = sp.nn.Linear(4, 6)
        sp.distribute_module(layer, sp.Layout((2, 1)[: len(axes)], axes), {"weight": (axes, "None")})
        with refused(InputError):
            fully_shard(layer, sp.Mesh((1, 2), ("tp", "shard")))

    _both(program)


def test_errors_leave_the_parameters_in_place():
    def program() -> None:
        model = shard(gpt(), "SSS")
        before = dict(model.named_parameters())
        with pytest.raises(ShapeError):
            model(np.zeros((1, 9), np.int64))
        assert dict(model.named_parameters()) == before
        model(np.zeros((1, 8), np.int64)).sum().backward()

    _both(program)


def test_model_of_a_pipeline_is_refused():
    def program() -> None:
        mesh = sp.Mesh((2, 2), ("pp", "shard"))
        model = fully_shard(mlp(), mesh)
        pipeline = sp.parallel.Pipeline(model, sp.nn.CrossEntropyLoss(), microbatches=2, mesh=mesh, balance=(3, 2))
        with refused(InputError):
            pipeline.step(np.ones((2, 5), np.float32), np.zeros(2, np.int64))

    sp.launch(program, world_size=4, transport="inline")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("letters", ["RPR", "RSS", "SSS"])
def test_whole_parameters_cannot_be_kept(letters, ranks):
    class Cached(sp.nn.Linear):
        def forward(self, x: Any) -> Any:
            self.__dict__["cache"] = self.weight
            return super().forward(x)

    def program() -> None:
        model = shard(sp.nn.Sequential(sp.nn.Linear(4, 3), Cached(3, 3), sp.nn.Linear(3, 2)), letters)
        model(np.ones((1, 4), np.float32)).sum().backward()
        with refused(LayoutError):
            model[1].cache * 2

    sp.launch(program, world_size=ranks, transport="inline")


def test_one_rank_is_as_strict_as_many():
    model = gpt()
    for block in model.blocks:
        fully_shard(block)
    step = sp.optim.Adam(model.parameters())
    x = np.zeros((1, 8), np.int64)
    with pytest.raises(InputError, match="no group has"):
        model(x).sum().backward()
    step.zero_grad()
    fully_shard(model)
    model(x).sum().backward()
    with pytest.raises(LayoutError, match="only where the forward of its module"):
        model.norm.weight * np.ones(8, np.float32)
    with pytest.raises(InputError, match="AutoParallel"):
        sp.parallel.AutoParallel(lambda x: model(x))(x)
    model.norm.weight = sp.nn.Parameter(np.ones(8, np.float32))
    with pytest.raises(InputError, match="was replaced"):
        model(x)


def test_steps_with_gradients_that_wait_are_refused():
    def program() -> None:
        model = shard(mlp(), "RPS")
        step = sp.optim.Adam(model.parameters())
        with model.no_sync():
            loss = model(np.ones((2, 5), np.float32)).sum()
        loss.backward()
        with refused(ShapeError):
            step.step()

    _both(program)


def test_discarded_models_are_freed():
    """Without the garbage collector: nothing refers to a group in a circle, or after its last use."""

    def program() -> None:
        model = shard(mlp(), "SSS")
        for _ in range(2):
            model(np.ones((2, 5), np.float32)).sum().backward()
        flats = [weakref.ref(part._sharded.flat) for part in model.modules() if hasattr(part, "_sharded")]
        gc.collect()
        gc.disable()
        try:
            del model
            assert [flat() for flat in flats] == [None] * len(flats)
        finally:
            gc.enable()

    sp.launch(program, world_size=2)


class _Table(sp.nn.Module):
    """A module whose result is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = sp.nn.Parameter(np.arange(6, dtype=np.float32).reshape(3, 2))

    def forward(self) -> Any:
        return self.weight


@pytest.mark.parametrize("letters", ["RSS", "SSS"])
def test_a_parameter_may_be_the_result(letters):
    class Net(sp.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = _Table(), sp.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x * self.table())

    def program() -> None:
        model, x = Net(), np.full((3, 2), 2, np.float32)
        expected = model(x).numpy()
        for part in (model.table, model):
            fully_shard(part, parameter=letters[0], gradient=letters[1], state=letters[2])
        y = model(x)
        np.testing.assert_array_equal(y.numpy(), expected)
        y.sum().backward()
        slopes = 2 * model.layer.weight.full_tensor().numpy().sum(axis=0)
        np.testing.assert_allclose(model.table.weight.grad.full_tensor().numpy(), np.tile(slopes, (3, 1)), rtol=1e-6)
        with sp.no_grad():
            np.testing.assert_array_equal(model(x).numpy(), expected)

    _both(program)


def test_only_floating_point_inputs_are_cast():
    class Net(sp.nn.Linear):
        def forward(self, x: Any, rows: Any = None) -> Any:
            assert x.dtype == np.float16
            assert type(rows) is np.ndarray
            return super().forward(x)[rows]

    def program() -> None:
        model = fully_shard(Net(3, 2), mp_policy=sp.parallel.MixedPrecision("float16"))
        assert model(np.ones((2, 3), np.float32), rows=np.array([1])).shape == (1, 2)

    _both(program)


@pytest.mark.parametrize("letters", ["SSS", "RPR"])
def test_group_of_a_table_that_another_stage_reads(letters):
    """Code between the children of a pipeline reads a stored parameter; left whole, the pipeline sums its gradient."""

    def program() -> None:
        mesh, model = sp.Mesh((2, 2), ("pp", "shard")), gpt()
        fully_shard(model.tokens, mesh, **dict(zip(("parameter", "gradient", "state"), letters, strict=True)))
        stages = [["tokens", "positions", "blocks.0"], ["blocks.1", "norm", "tokens.weight"]]
        pipeline = sp.parallel.Pipeline(model, lambda y, labels: y.sum(), 2, mesh=mesh, stages=stages)
        with refused(InputError):
            pipeline.step(np.zeros((2, 8), np.int64), np.zeros(2, np.int64))

    sp.launch(program, world_size=4, transport="inline")

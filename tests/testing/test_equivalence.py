"""`assert_equivalent` takes right programs, and finds the first difference of wrong ones, with the smallest case."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused
from users_layers import ColumnParallel, CopyToRanks, GatherFromRanks, RowParallel

import simparallel as sp
from simparallel import nn
from simparallel.errors import CollectiveMismatchError, InputError, NotEquivalentError, RunFailedError
from simparallel.testing import assert_equivalent, check_gradients
from simparallel.testing.compare import Tolerance, first_difference

LABELS = np.arange(8) % 3
BATCH = [(8, 4), LABELS]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def cut_by_layouts(model: nn.Module) -> nn.Module:
    layout = sp.Layout((4,), ("tp",))
    return sp.distribute_module(model, layout, {"0.weight": ("tp", "None"), "0.bias": ("tp",)})


def plan() -> sp.Plan:
    def capture() -> sp.Plan:
        sp.set_seed(0)
        net, loss_fn = network(), nn.CrossEntropyLoss()
        step = sp.AutoParallel(lambda x, y: loss_fn(net(x), y).backward(), "auto")
        step(np.ones((8, 4), np.float32), LABELS)
        return step.plan

    return sp.launch(capture, world_size=4, transport="inline")[0]


class Products(nn.Module):
    """An op as an attribute, for strategies by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.arange(32, dtype=np.float32).reshape(4, 8) / 32)
        self.matmul = sp.ops.MatMul()

    def forward(self, x):
        return self.matmul(x, self.weight)


# --- strategies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        sp.parallel.DistributedDataParallel,
        "auto",
        {"0": ((1, 1), (4, 1), (4,))},
        {"0": ((1, 4), (1, 4), (1,)), "2.Linear": ((2, 1), (1, 1), (1,))},
        cut_by_layouts,
        "pipeline",
        partial(sp.parallel.Pipeline, microbatches=3, schedule="gpipe", stages=[["0"], ["1", "2"]]),
        lambda model: sp.AutoParallel(model),
    ],
)
def test_right_strategies_pass(strategy):
    size = 2 if strategy == "pipeline" or isinstance(strategy, partial) else 4
    assert_equivalent(network, BATCH, loss_fn=nn.CrossEntropyLoss(), strategy=strategy, world_size=size)


def test_plan_and_strategy_of_an_op_pass():
    assert_equivalent(network, BATCH, loss_fn=nn.CrossEntropyLoss(), strategy=plan())
    assert_equivalent(Products, (8, 4), strategy={"matmul": ((2, 2), (2, 1))})
    assert_equivalent(Products(), (8, 4), strategy="ddp", optimizer=partial(sp.optim.Adam, lr=0.01))


def test_dropout_and_tied_weights_pass():
    """A module is copied for each rank, and keeps its own state."""
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    before = model.state_dict()

    assert_equivalent(model, (4, 4), strategy="ddp", world_size=(1, 2, 4))
    assert_equivalent(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), (8, 4), strategy="semi_auto")
    assert all(np.array_equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.process
def test_processes_compute_as_one_device(world):
    assert_equivalent(network, BATCH, loss_fn=nn.CrossEntropyLoss(), strategy="ddp", world_size=2, transport=world)


def test_sum_in_place_of_mean_is_found():
    def summed(model):
        ddp = sp.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, sp.parallel.comm_hooks.sum_hook)
        return ddp

    with refused(NotEquivalentError, step=0, phase="gradient", name="0.weight", rank=0, index=(0, 0), world_size=4):
        assert_equivalent(network, BATCH, loss_fn=nn.CrossEntropyLoss(), strategy=summed)


def test_other_initial_weights_are_found():
    """DDP copies the weights of the first rank; a model that is only seeded differently is found."""

    def own_weights():
        sp.set_seed(sp.get_rank())
        return network()

    assert_equivalent(own_weights, (8, 4), strategy="ddp")
    with refused(NotEquivalentError, step=None, phase="initial value", name="0.weight", rank=1):
        assert_equivalent(own_weights, (8, 4), strategy=lambda model: model)


def test_parallel_layers_of_the_package():
    """Weights and results with a Layout are compared whole."""
    layers = {sp.parallel.ColumnParallelLinear: (3, 8), sp.parallel.RowParallelLinear: (8, 3)}
    for layer, (n, m) in layers.items():
        parallel = partial(layer, n, m, sp.Layout((2,), ("tp",)))
        assert_equivalent(partial(nn.Linear, n, m), (2, n), parallel=parallel, world_size=2)


def test_rank_with_another_output_is_found():
    def shifted(model):
        return lambda x: model(x) + np.float32([0.0, 0.5 * (sp.get_rank() == 1), 0.0])

    with refused(NotEquivalentError, step=0, phase="output", rank=1, index=(0, 1)):
        assert_equivalent(network, (8, 4), strategy=shifted)


def test_optimizer_without_state_is_found():
    """A state that no rank has is a difference, too."""
    made = []

    def optimizer(params):
        made.append(sp.optim.SGD(params, lr=0.1, momentum=0.0 if made else 0.9))
        return made[-1]

    with refused(NotEquivalentError, step=0, phase="optimizer state momentum_buffer", name="0.weight"):
        assert_equivalent(network, (8, 4), strategy="ddp", optimizer=optimizer)


def test_batch_norm_without_sync_is_found():
    def model():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model())
    assert_equivalent(synced, (8, 4), strategy="ddp", world_size=2)
    with refused(NotEquivalentError, step=0, phase="output"):
        assert_equivalent(model, (8, 4), strategy="ddp", world_size=2)


# --- layers of users --------------------------------------------------------------------------------------

SIZES = {"n": st.integers(1, 5), "m": st.integers(1, 6), "batch": st.integers(1, 3)}


def check_layer(layer, mistake):
    assert_equivalent(
        lambda n, m: nn.Linear(n, m), lambda batch, n: (batch, n), parallel=lambda n, m: layer(n, m, mistake),
        sizes=SIZES, world_size=4, max_examples=20,
    )  # fmt: skip


@pytest.mark.parametrize("layer", [ColumnParallel, RowParallel])
def test_right_layers_pass(layer):
    check_layer(layer, "")


SMALLEST = {"n": 1, "m": 1, "batch": 1}


@pytest.mark.matrices
@pytest.mark.parametrize(
    ("layer", "mistake", "phase"),
    [
        (ColumnParallel, "no sum of the input's gradient", "gradient of input"),
        (ColumnParallel, "size rounded down", "initial value"),
        (RowParallel, "bias on every rank", "output"),
        (RowParallel, "no sum", "output"),
    ],
)
def test_wrong_layers_fail_at_the_smallest_case(layer, mistake, phase):
    with refused(NotEquivalentError, phase=phase, world_size=2, case=SMALLEST):
        check_layer(layer, mistake)


def test_cases_drawn_as_inputs():
    shapes = st.tuples(st.integers(1, 4), st.just(3))

    assert_equivalent(lambda: nn.Linear(3, 2), shapes, strategy="ddp", max_examples=10)
    with refused(NotEquivalentError, case={"inputs": "(1, 3)"}, world_size=2):
        assert_equivalent(
            lambda: nn.Linear(3, 2), shapes, parallel=lambda: RowParallel(3, 2, "bias on every rank"), max_examples=10
        )


@given(st.integers(1, 4), st.integers(1, 3))
def test_inside_a_property(n, batch):
    assert_equivalent(lambda: nn.Linear(n, 2), (batch, n), parallel=lambda: RowParallel(n, 2), world_size=2, steps=1)


class Interleaved(nn.Module):
    """A Linear whose ranks hold every n-th output."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(np.zeros((size // sp.get_world_size(), 3), np.float32))

    def forward(self, x):
        y = GatherFromRanks.apply(CopyToRanks.apply(x) @ self.weight.T)
        ranks = sp.get_world_size()
        return y.reshape(len(y.data), ranks, -1).permute(0, 2, 1).reshape(len(y.data), -1)


def test_parts_of_another_form():
    """Rows 0, 2, ... on rank 0, rows 1, 3, ... on rank 1: `slices` says so."""
    model = partial(nn.Linear, 3, 4, bias=False)
    check = partial(assert_equivalent, model, (2, 3), parallel=lambda: Interleaved(4), world_size=2)

    check(slices=lambda name, whole, rank, world_size: whole[rank::world_size])
    with refused(NotEquivalentError, phase="output"):
        check()
    with refused(NotEquivalentError, phase="initial value", name="weight"):
        check(slices=lambda name, whole, rank, world_size: whole[:1])


def test_layer_without_a_parameter_is_found():
    with refused(NotEquivalentError, phase="initial value", name="bias"):
        assert_equivalent(nn.Linear(3, 2, bias=False), (2, 3), parallel=lambda: RowParallel(3, 2), world_size=2)


@pytest.mark.parametrize("mistake", ["", "no sum of the input's gradient"])
def test_gradients_of_a_parallel_layer(mistake):
    """`check_gradients` runs on ranks: every rank changes the same input."""

    def program():
        layer = ColumnParallel(3, 4, mistake).double()
        layer.weight.data[...] = 1.0 + sp.get_rank()
        check_gradients(layer, [np.linspace(-1.0, 1.0, 6).reshape(2, 3)])

    if not mistake:
        sp.launch(program, world_size=2, transport="inline")
    else:
        with pytest.raises(RunFailedError) as caught:
            sp.launch(program, world_size=2, transport="inline")
        assert type(caught.value.__cause__) is AssertionError


class Block(nn.Module):
    def __init__(self, column=nn.Linear, row=nn.Linear):
        super().__init__()
        self.first, self.second = column(4, 6), row(6, 2)

    def forward(self, x):
        return self.second(self.first(x) ** 2)


@pytest.mark.parametrize("kinds", [(), (ColumnParallel, RowParallel)], ids=["whole", "cut"])
@pytest.mark.parametrize("place", ["0.first", "0.second", "1", ""])
def test_layer_is_named(place, kinds):
    """The layer whose output is wrong on ranks; none if the mistake is outside of all layers."""

    def parallel(is_wrong=True):
        model = nn.Sequential(Block(*kinds), nn.Linear(2, 2))
        dict(model.named_modules())[place].register_forward_hook(lambda module, x, y: y + float(is_wrong))
        return model

    check = partial(assert_equivalent, nn.Sequential(Block(), nn.Linear(2, 2)), (3, 4), world_size=2)
    check(parallel=partial(parallel, False))
    with pytest.raises(NotEquivalentError) as caught:
        check(parallel=parallel)
    _, _, told = str(caught.value).partition(" The first layer whose output differs is ")
    assert told == (f"{place!r}." if place else "")


# --- whole programs ---------------------------------------------------------------------------------------


def train(mistake=""):
    sp.set_seed(0)
    rank, ranks = sp.get_rank(), sp.get_world_size()
    model = nn.Linear(4, 2)
    wrapped = model if mistake == "no ddp" else sp.parallel.DistributedDataParallel(model)
    optimizer = sp.optim.Adam(model.parameters(), lr=0.01)
    x = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
    losses = []
    for _ in range(2):
        loss = (wrapped(np.split(x, ranks)[rank]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(sp.all_reduce(loss, "mean").item() if mistake != "own loss" else loss.item())
    return {"losses": losses, "model": model, "optimizer": optimizer, "ranks": (rank, "text", None)}


def test_programs():
    assert_equivalent(train, per_rank=["ranks[0]"])
    with refused(NotEquivalentError, step=None, phase="result", name="ranks[0]", rank=1, value=1, expected=0):
        assert_equivalent(train)
    with refused(NotEquivalentError, name="losses[0]", rank=0):
        assert_equivalent(train, "own loss", per_rank=["ranks"])
    with refused(NotEquivalentError, name="optimizer.state.0.exp_avg"):
        assert_equivalent(train, ["no ddp"], per_rank=["ranks"], world_size=2)


def test_program_that_fails_by_itself():
    """The error of the run is raised as it is."""
    with pytest.raises(RunFailedError) as caught:
        assert_equivalent(lambda: sp.all_reduce(np.ones(1 + sp.get_rank())), world_size=2)
    assert type(caught.value.__cause__) is CollectiveMismatchError


@pytest.mark.parametrize(
    "call",
    [
        lambda: assert_equivalent(nn.Linear(2, 2), (2, 2)),
        lambda: assert_equivalent(nn.Linear(2, 2), (2, 2), strategy="ddp", parallel=network),
        lambda: assert_equivalent(3),
        lambda: assert_equivalent(nn.Linear(2, 2), (3, 2), strategy="ddp", world_size=2),
        lambda: assert_equivalent(nn.Linear(2, 2), (2, 2), strategy="dpd"),
    ],
)
def test_bad_arguments(call):
    with refused(InputError):
        call()


def test_name_of_no_call():
    with pytest.raises(RunFailedError) as caught:
        assert_equivalent(network, BATCH, loss_fn=nn.CrossEntropyLoss(), strategy={"fc": ((1, 1), (4, 1))})
    assert isinstance(caught.value.__cause__, InputError)


# --- comparisons ------------------------------------------------------------------------------------------

KEY = (None, "result", "x")


def difference(one, *ranks, **tolerance):
    return first_difference({KEY: one}, [{KEY: x} for x in ranks], Tolerance(**tolerance))


@pytest.mark.parametrize(
    ("one", "ranks"),
    [
        (np.arange(4.0), [np.arange(4.0)] * 2),
        (np.arange(4.0), [np.arange(3.0), np.array([3.0])]),
        (np.eye(3), [np.eye(3)[:, :1], np.eye(3)[:, 1:1], np.eye(3)[:, 1:]]),
        (np.array([np.nan, np.inf]), [np.array([np.nan, np.inf])]),
        (np.float32([1.0]), [np.float32([1.00001])]),
        (None, [np.zeros(2)]),
        (np.zeros(2), [None]),
        (1.0, [1.0 + 1e-6]),
        ("text", ["text"]),
        (np.nan, [np.nan]),
    ],
)
def test_equal_values(one, ranks):
    assert difference(one, *ranks) is None


@pytest.mark.parametrize(
    ("one", "ranks", "rank", "at"),
    [
        (np.arange(4.0), [np.arange(4.0), np.array([0.0, 1.0, 5.0, 3.0])], 1, (2,)),
        (np.arange(4.0), [np.arange(3.0), np.array([4.0])], 1, (0,)),
        (np.arange(4.0), [np.arange(3.0), np.arange(2.0)], 0, None),
        (np.arange(4.0), [np.eye(2)], 0, None),
        (np.array([np.inf]), [np.array([-np.inf])], 0, (0,)),
        (np.array([1.0]), [np.array([np.nan])], 0, (0,)),
        (np.float32([1.0]), [np.float32([1.001])], 0, (0,)),
        (np.array([1]), [np.array([2])], 0, (0,)),
        (None, [np.ones(2)], 0, (0,)),
        (1.0, [1.0, 1.01], 1, None),
        ("text", ["test"], 0, None),
        (True, [False], 0, None),
    ],
)
def test_unequal_values(one, ranks, rank, at):
    found = difference(one, *ranks)
    assert (found.rank, found.at) == (rank, at)


def test_missing_values():
    """A rank that holds other phases of a name lacks this one; a stage without the name does not."""
    one = {(0, "gradient", "w"): np.ones(1), (0, "parameter", "w"): np.ones(1)}
    half = {(0, "gradient", "w"): np.ones(1)}

    assert first_difference(one, [one, {}], Tolerance()) is None
    assert first_difference(one, [one, half], Tolerance()).rank == 1
    assert first_difference(one, [half, half], Tolerance()).key == (0, "parameter", "w")
    assert first_difference(one, [half, half], Tolerance(), optional=["parameter"]) is None
    assert first_difference({KEY: 1}, [{KEY: 1}, {}], Tolerance()).rank == 1
    assert first_difference({}, [{}, {KEY: 1}], Tolerance()).value == "a value"


def test_tolerances():
    assert difference(1.0, 1.1, rtol=0.2) is None
    assert difference(np.ones(2), np.full(2, 1.1), rtol=0.0, atol=0.2) is None
    assert difference(np.ones(2), np.full(2, 1.1), rtol=0.0, atol=0.05) is not None


FACTOR, ORDER = "; each is ", "; they are the same values as on one device, in another order"


@given(st.permutations(range(1, 9)), st.integers(1, 8), st.sampled_from([2, 3]))
def test_factor_needs_four_different_numbers(numbers, count, factor):
    one = np.array(numbers[:count], float)
    told = difference(one, factor * one).details
    assert (f"{FACTOR}{factor} times" in told) == (count >= 4)
    repeated = np.resize(one[:3], 12)
    assert FACTOR not in difference(repeated, factor * repeated).details


@given(st.permutations(range(1, 9)), st.booleans())
def test_permuted_values_are_recognised(numbers, is_cut):
    one, other = np.arange(1.0, 9.0), np.array(numbers, float)
    found = difference(one, *(np.split(other, [3]) if is_cut else [one, other]))
    if found is not None:
        is_telling = np.sum(one != other) >= 4
        assert found.details.endswith(f"{ORDER}.") or not is_telling
        changed = other + (other == 8)
        assert ORDER not in difference(one, changed).details

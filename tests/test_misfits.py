"""Errors about shapes that do not fit: the roles, the numbers, the way out, the layer."""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import functions as F, nn
from simparallel.autograd import Op
from simparallel.clock.memory import MemoryAccount
from simparallel.errors import ClusterError, InputError, ShapeError, SimParallelError

sizes = st.integers(1, 6)


def zeros(*shape: int) -> sp.Tensor:
    return sp.Tensor(np.zeros(shape, np.float32))


@given(st.lists(sizes, min_size=1, max_size=3), sizes, sizes, st.integers(0, 3))
def test_linear_error_names_features_and_layer(lead: list[int], k: int, n: int, depth: int) -> None:
    model: nn.Module = nn.Linear(k, n)
    for _ in range(depth):
        model = nn.Sequential(nn.Identity(), model)
    with refused(ShapeError) as caught:
        model(zeros(*lead, k + 1))
    message = str(caught.value)
    assert f"x {(*lead, k + 1)} has {k + 1} features, the layer's weight {(n, k)} takes {k}: " in message
    assert f"or make the layer Linear({k + 1}, {n})" in message
    if depth:
        assert message.endswith(f". In layer {'.'.join('1' * depth)}.")
        assert caught.value.facts == {"layer": ".".join("1" * depth)}
    else:
        assert "In layer" not in message
    assert pickle.loads(pickle.dumps(caught.value)) == caught.value


CASES: dict[str, Callable[[], Any]] = {
    "images into a linear layer": lambda: nn.Linear(8, 3)(zeros(5, 2, 4)),
    "a number into a linear layer": lambda: nn.Linear(8, 3)(zeros()),
    "channels": lambda: nn.Conv2d(3, 4, 3)(zeros(2, 1, 8, 8)),
    "channels last": lambda: nn.Conv2d(3, 4, 3)(zeros(2, 8, 8, 3)),
    "one image": lambda: nn.Conv2d(3, 4, 3)(zeros(3, 8, 8)),
    "grey images": lambda: nn.Conv2d(1, 4, 3)(zeros(5, 8, 8)),
    "rows and labels": lambda: nn.CrossEntropyLoss()(zeros(4, 9), np.zeros(3, int)),
    "labels of two dims": lambda: F.cross_entropy(zeros(4, 9), np.zeros((4, 1), int)),
    "one-hot labels": lambda: F.cross_entropy(zeros(4, 9), np.zeros((4, 9), int)),
    "scores of one row": lambda: F.nll_loss(zeros(9), np.zeros(9, int)),
    "weights": lambda: F.cross_entropy(zeros(4, 9), np.zeros(4, int), weight=zeros(8)),
    "losses of two tensors": lambda: nn.MSELoss()(zeros(4, 1), zeros(4)),
    "two tensors of other sizes": lambda: nn.L1Loss()(zeros(4, 1), zeros(3)),
    "a loss of three": lambda: sp.value_and_grad(lambda x: x * 2)(np.ones(3)),
    "matrices": lambda: zeros(2, 3) @ zeros(2, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_names_the_way_out(case: str) -> None:
    with refused(ShapeError):
        CASES[case]()


@given(st.sampled_from(sorted(Op.registry)), st.lists(st.lists(sizes, max_size=5).map(tuple), max_size=4))
def test_shape_errors_are_always_worded(name: str, shapes: list[tuple[int, ...]]) -> None:
    """Wording a shape error never fails itself."""
    try:
        op = Op.registry[name]()
        op.check_count(len(shapes))
    except (TypeError, InputError):
        return  # needs settings, or another number of inputs
    told = op.misfit(*shapes)
    assert told is None or isinstance(told, str)


def plain_ops() -> Iterator[Op]:
    """Ops that need no settings."""
    for kind in Op.registry.values():
        with contextlib.suppress(TypeError, InputError):
            yield kind()


def test_any_number_of_inputs_is_worded() -> None:
    """A number of inputs that an op does not take is an error of ours."""
    x = sp.Tensor(np.ones((2, 2), np.float32))
    for op in plain_ops():
        for count in range(7):
            with contextlib.suppress(SimParallelError):
                op(*[x] * count)


def test_number_of_inputs_names_them() -> None:
    for inputs in ([], [zeros(2, 2)], [zeros(2, 2)] * 4):
        with refused(InputError):
            sp.ops.Conv2d()(*inputs)
    with refused(InputError):
        sp.ops.MatMul().shard(((1, 2), (2, 1))).plan((2, 2), device_num=2)


def test_op_of_a_user_may_take_any_number() -> None:
    class AbstractSum(Op):
        rule = "..., ... -> ..."

        def forward(*args: Any) -> Any:
            return args[2] + args[3]

    assert AbstractSum()(zeros(2), zeros(2)).shape == (2,)


def test_error_names_its_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Any) -> Any:
            return self.norm(x)

    with refused(ShapeError, layer="norm"):
        Net()(zeros(2, 4, 5, 5))


REFUSED: dict[str, Callable[[], Any]] = {
    "a number as model": lambda: sp.parallel.DistributedDataParallel(3),  # type: ignore[arg-type]
    "a number as step": lambda: sp.AutoParallel(3),  # type: ignore[arg-type]
    "a number as function": lambda: sp.value_and_grad(3, 0),  # type: ignore[arg-type]
    "a number as group": lambda: sp.get_rank(3),  # type: ignore[arg-type]
    "a number as group, again": lambda: sp.get_world_size(3),  # type: ignore[arg-type]
    "a number as figure": lambda: sp.view.save_figure(3, "x.png"),  # type: ignore[arg-type]
    "ranks as text": lambda: sp.Cluster("2"),  # type: ignore[arg-type]
    "ranks as a float": lambda: sp.Cluster(2.0),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_wrong_types_are_reported(case: str) -> None:
    with refused(ClusterError if case.startswith("ranks") else InputError):
        REFUSED[case]()


def test_request_beyond_whole_memory_says_so() -> None:
    account = MemoryAccount(1000, "rank 0")
    with refused(sp.errors.DeviceOutOfMemoryError):
        account.make_room(2000, "Linear")

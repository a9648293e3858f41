"""Checkpoints in `old_files/checkpoints`, which commit 825eb74 wrote with `write`, load with the values stated here."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import simparallel as sp
from simparallel import nn, optim
from simparallel.layout.sharding import placement
from simparallel.train import CheckpointConfig, CheckpointManager, CheckpointReader, Model, ModelCheckpoint, TensorSlice
from simparallel.train.checkpoint import arrays as blocks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OLD = Path(__file__).parents[1] / "old_files" / "checkpoints"

DTYPES = ("f2", "f4", "f8", "?", "c8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
ARRAYS = {
    **{f"of.{dtype}": np.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES},
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.float32),
}
PLAIN = {
    "numbers": [None, True, 3, -(2**70), 0.1, math.nan, math.inf, -math.inf, np.float32(0.1), np.int64(-4)],
    "tuple": (1, ("two", [])),
    3: {"$tensor": "not a reference", "a.b": {}},
    (1, 2): "ü\n",
}
NESTED = {"a.b": np.arange(3), "a": {"b": np.arange(4.0)}, "plain": PLAIN, "state": {0: [np.array(True)]}}

WEIGHT = np.arange(8 * 4, dtype=np.float64).reshape(8, 4)
BIAS = np.arange(100, 108, dtype=np.float64)
MODEL = {
    "body.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "body.bias": np.array([7, 8], np.float32),
    "norm.weight": np.array([9, 10], np.float32), "norm.bias": np.array([11, 12], np.float32),
    "norm.running_mean": np.array([13, 14], np.float32), "norm.running_var": np.array([15, 16], np.float32),
    "norm.num_batches_tracked": np.array(17), "tied": np.arange(6, dtype=np.float32).reshape(2, 3),
}  # fmt: skip


class Net(nn.Module):
    """A model with buffers and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.tied = self.body.weight


class Cut(nn.Module):
    """A model that holds this rank's slices of WEIGHT and BIAS; BIAS is tied."""

    def __init__(self, mesh: sp.Layout, dims: tuple[Any, Any], scale: float) -> None:
        super().__init__()
        for name, whole, dim in (("weight", WEIGHT, dims[0]), ("bias", BIAS, dims[1])):
            layout = mesh(*dim)
            parameter = nn.Parameter(scale * whole[layout.slices(sp.get_rank(), whole.shape)])
            parameter.placement = placement(layout, whole.shape)
            setattr(self, name, parameter)
        self.tied = self.bias


class Holder:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def network() -> Net:
    model = Net()
    model.load_state_dict(MODEL)
    return model


class Parts:
    """All parts of a training on one rank, in the saved state if `moved`, else in their first one."""

    def __init__(self, moved: bool) -> None:
        sp.init()
        sp.manual_seed(3 if moved else 5)
        self.model = network() if moved else Net()
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.scheduler = optim.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.scaler = optim.GradScaler(optim.DynamicLossScaleManager(64.0, scale_window=3))
        self.sampler = sp.data.DataLoader(sp.data.TensorDataset(np.arange(10)), 2, shuffle=True)
        if moved:
            self.optimizer([np.full(p.shape, i + 1, np.float32) for i, p in enumerate(self.model.parameters())])
            self.model.load_state_dict(MODEL)
            self.scheduler.step()
            next(iter(self.sampler))


PARTS = ("model", "optimizer", "scheduler", "scaler", "sampler")
CUTS = {
    1: ((1,), ("a",), (("None", "None"), ("None",))),
    2: ((2,), ("a",), (("None", "a"), ("a",))),
    4: ((2, 2), ("a", "b"), (("b", "a"), ("a",))),
    8: ((2, 4), ("a", "b"), ((("b", "a"), "None"), (("a", "b"),))),
}  # ranks -> shape and names of the mesh, dims of WEIGHT and BIAS


def write_one(folder: str) -> None:
    parts = Parts(moved=True)
    own = {"callback": Holder({"best": 0.25})}
    tensors = {"more": np.arange(5)}
    CheckpointManager(folder).save(
        300, **{name: getattr(parts, name) for name in PARTS}, own=own, tensors=tensors, extra=PLAIN
    )


def write_two(folder: str) -> None:
    """Save what is not alike on the two ranks, and two saves of one step."""
    sp.init()
    rank = sp.get_rank()
    model = Holder({"alike": np.arange(4.0), "mean": np.full(3, rank, np.float32)})
    own = {"each": Holder({"rank": rank, "x": np.array([rank])}), **({"last": Holder(("of", rank))} if rank else {})}
    rows = TensorSlice((3, 2), (slice(2 * rank, 2 + rank), slice(None)), np.arange(6).reshape(3, 2)[2 * rank :][:2])
    for step in (1, 2):
        CheckpointManager(folder).save(
            step, model=model, sampler=Holder({"number": rank}), own=own, tensors={"rows": rows}, random=False
        )


def write_four(folder: str) -> None:
    """Save slices of more than one block."""
    sp.init()
    mesh, names, dims = CUTS[4]
    model = Cut(sp.Layout(mesh, names), dims, 1.0)
    optimizer = optim.Adam(model.parameters(), lr=0.25, betas=(0.5, 0.5))
    optimizer([2 * parameter.data for parameter in model.parameters()])
    for parameter, saved in zip(model.parameters(), Cut(sp.Layout(mesh, names), dims, 1.0).parameters(), strict=True):
        parameter.data[...] = saved.data
    CheckpointManager(folder).save(7, model=model, optimizer=optimizer, random=False)


def train(folder: str, stop_after: int | None, resume: bool) -> tuple[dict[str, np.ndarray], list[int]]:
    """Train for two epochs of four steps; return the state and the steps that were seen."""
    sp.init()
    x = np.arange(8, dtype=np.float32).reshape(8, 1) - 3
    rows = sp.data.NumpySlicesDataset((x, 2 * x), num_shards=sp.get_world_size(), shard_id=sp.get_rank(), shuffle=False)
    layer = nn.Linear(1, 1)
    layer.load_state_dict({"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)})
    network = sp.parallel.DistributedDataParallel(layer)
    model = Model(network, nn.MSELoss(), optim.SGD(network.parameters(), lr=2**-6, momentum=0.5))
    seen, kept = Seen(stop_after), ModelCheckpoint("net", folder, CheckpointConfig(keep_checkpoint_max=1))
    model.train(2, rows.batch(1), callbacks=[seen, kept], resume=resume)
    return layer.state_dict(), seen.steps


class Seen(sp.Callback):
    """Notes the steps, and stops the training after one."""

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after = stop_after
        self.steps: list[int] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.steps.append(run_context.original_args().cur_step_num)
        if self.steps[-1] == self.stop_after:
            run_context.request_stop()


def run(program: Any, ranks: int, *arguments: Any) -> list[Any]:
    return list(sp.launch(program, arguments, world_size=ranks, transport="inline", echo=False))


def write(folder: Path) -> None:
    """Write a checkpoint in every form."""
    sp.save_checkpoint(network(), folder / "model.safetensors")
    sp.save_checkpoint(ARRAYS, folder / "arrays.safetensors")
    sp.save(NESTED, folder / "nested.safetensors")
    run(write_one, 1, str(folder / "one"))
    run(write_two, 2, str(folder / "two"))
    usual, blocks.BLOCK_BYTES = blocks.BLOCK_BYTES, 32
    try:
        run(write_four, 4, str(folder / "four"))
    finally:
        blocks.BLOCK_BYTES = usual
    run(train, 2, str(folder / "training"), 3, False)


@pytest.fixture(scope="module", params=["old", "new"])
def folder(request: Any, tmp_path_factory: Any) -> Iterator[Path]:
    """The old checkpoints, and those of today's code."""
    if request.param == "old":
        yield OLD
    else:
        made = tmp_path_factory.mktemp("new")
        write(made)
        yield made


def same(found: Any, expected: Any) -> None:
    """Compare values, types and dtypes at all levels."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for left, right in zip(found, expected, strict=True):
            same(left, right)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_equal(found, expected)


def test_model_file_loads(folder):
    model = Net()
    same(sp.load_checkpoint(folder / "model.safetensors", model, strict_load=True), dict(sorted(MODEL.items())))
    same(dict(sorted(model.state_dict().items())), dict(sorted(MODEL.items())))
    assert model.tied is model.body.weight


def test_arrays_of_all_dtypes_load(folder):
    same(sp.load_checkpoint(folder / "arrays.safetensors"), dict(sorted(ARRAYS.items())))


def test_nested_file_loads(folder):
    same(sp.load(folder / "nested.safetensors"), NESTED)


def restore_one(folder: str) -> None:
    found, expected = Parts(moved=False), Parts(moved=True)
    state, callback = sp.backend.random_state.state_dict(), Holder()
    sp.manual_seed(5)
    restored = CheckpointManager(folder).restore(
        **{name: getattr(found, name) for name in PARTS}, own={"callback": callback}
    )
    assert (restored.step, restored.world_size, callback.state) == (300, 1, {"best": 0.25})
    same(restored.extra, PLAIN)
    same(sp.backend.random_state.state_dict(), state)
    same({name: found.model.state_dict()[name] for name in MODEL}, MODEL)
    momentum = [found.optimizer.state_dict()["state"][i]["momentum_buffer"] for i in range(4)]
    same(momentum, [np.full(p.shape, i + 1, np.float32) for i, p in enumerate(found.model.parameters())])
    assert (found.optimizer.param_groups[0]["lr"], found.scaler.get_scale()) == (0.25, 64.0)
    for name in ("scheduler", "scaler", "sampler"):
        same(getattr(found, name).state_dict(), getattr(expected, name).state_dict())


def test_all_parts_of_one_rank_load(folder):
    run(restore_one, 1, str(folder / "one"))
    with CheckpointReader(next((folder / "one").iterdir())) as reader:
        same(reader.read("more"), np.arange(5))
        assert sorted(reader.parts()) == sorted([*PARTS, "random", "own.callback"])


def restore_two(folder: str) -> tuple[Any, ...]:
    sp.init()
    parts = {"model": Holder(), "sampler": Holder(), "own": {name: Holder() for name in ("each", "last", "new")}}
    if sp.get_world_size() != 2:
        del parts["sampler"]
    manager = CheckpointManager(folder)
    restored = manager.restore(**parts, random=False)
    with manager.open(1) as reader:
        rows = reader.read("rows", (slice(1, 3), slice(1, 2)))
    sampler = parts["sampler"].state if "sampler" in parts else None
    return parts["model"].state, sampler, [part.state for part in parts["own"].values()], rows, restored.step


@pytest.mark.filterwarnings("ignore:.*saved different values:RuntimeWarning")
@pytest.mark.parametrize("ranks", [2, 3])
def test_differing_ranks_load(folder, ranks):
    for rank, found in enumerate(run(restore_two, ranks, str(folder / "two"))):
        own = rank if ranks == 2 else 0
        state = {"alike": np.arange(4.0), "mean": np.full(3, own, np.float32)}
        each = {"rank": own, "x": np.array([own])}
        rows, sampler = np.array([[3], [5]]), {"number": rank} if ranks == 2 else None
        same(found, (state, sampler, [each, ("of", 1), None], rows, 2))


def restore_four(folder: str) -> None:
    sp.init()
    mesh, names, dims = CUTS[sp.get_world_size()]
    model, expected = (Cut(sp.Layout(mesh, names), dims, scale) for scale in (-1.0, 1.0))
    optimizer = optim.Adam(model.parameters(), lr=0.5)
    assert CheckpointManager(folder).restore(model=model, optimizer=optimizer, random=False).step == 7
    same({n: model.state_dict()[n] for n in ("weight", "bias", "tied")}, expected.state_dict())
    state = optimizer.state_dict()
    assert (state["param_groups"][0]["lr"], state["param_groups"][0]["betas"]) == (0.25, (0.5, 0.5))
    for i, saved in enumerate(expected.parameters()):
        # Of the gradient 2 x: 0.5 (2 x), 0.5 (2 x)^2.
        same(state["state"][i]["exp_avg"], saved.data)
        same(state["state"][i]["exp_avg_sq"], 2 * saved.data**2)


@pytest.mark.parametrize("ranks", CUTS)
def test_cut_training_loads_on_other_meshes(folder, ranks):
    run(restore_four, ranks, str(folder / "four"))


def test_stopped_training_resumes(folder, tmp_path):
    shutil.copytree(folder / "training", tmp_path / "part")
    found = run(train, 2, str(tmp_path / "part"), None, True)
    whole = run(train, 2, str(tmp_path / "whole"), None, False)
    assert [steps for _, steps in found] == [[4, 5, 6, 7, 8]] * 2
    same([state for state, _ in found], [state for state, _ in whole])

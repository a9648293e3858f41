"""`array="cupy"`: whole programs give the bits of NumPy, on a stand-in for CuPy; without a GPU, one clear error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import backend, nn
from simparallel.errors import InputError
from simparallel.testing import strict

WORLD_SIZE = 4


def batches(size: int = 8) -> Any:
    """Yield the rank's batches of the digits, shuffled."""
    images, labels = sp.data.digits("train")[: 4 * WORLD_SIZE * size]
    dataset = sp.data.TensorDataset(images, labels)
    sampler = sp.data.DistributedSampler(dataset, shuffle=True)
    yield from sp.data.DataLoader(dataset, size, sampler=sampler)


def steps(model: Any, optimizer: Any, loss_fn: Any = sp.functions.cross_entropy, inputs: Any = None) -> dict[str, Any]:
    """Train, and return the losses, the state of the model, and the type of its arrays."""
    losses = []
    for x, y in batches() if inputs is None else inputs:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kinds = {type(parameter.data) for parameter in model.parameters()}
    return {"losses": losses, "state": model.state_dict(), "kinds": {kind.__name__ for kind in kinds}}


def one_device() -> Any:
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    return steps(model, sp.optim.AdamW(model.parameters(), lr=0.01))


def data_parallel() -> Any:
    model = sp.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)))
    return steps(model, sp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def synchronised_norm() -> Any:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16)))
    model = sp.parallel.DistributedDataParallel(nn.Sequential(model, nn.Linear(16, 10)))
    return steps(model, sp.optim.LAMB(model.parameters(), lr=0.01))


def adasum() -> Any:
    model = nn.Linear(64, 10)
    optimizer = sp.parallel.AdasumOptimizer(sp.optim.SGD(model.parameters(), lr=0.1))
    return steps(model, optimizer)


def convolutions() -> Any:
    model = sp.parallel.DistributedDataParallel(sp.models.lenet5())
    rng = np.random.default_rng(sp.get_rank())
    inputs = [(rng.standard_normal((4, 1, 28, 28), np.float32), np.arange(4)) for _ in range(2)]
    return steps(model, sp.optim.Adam(model.parameters()), inputs=inputs)


def cut_operators() -> Any:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)
            self.relu = sp.ops.ReLU().shard(((2, 2),))

        def forward(self, x: Any) -> Any:
            return self.second(self.relu(self.first(x)))

    network = Network()
    model = sp.AutoParallel(network)
    images, labels = sp.data.digits("train")[:32]
    optimizer = sp.optim.Momentum(network.parameters(), 0.1, 0.9)
    losses = []
    for _ in range(2):
        loss = sp.functions.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kinds = {type(parameter.data).__name__ for parameter in network.parameters()}
    return {"losses": losses, "state": network.state_dict(), "kinds": kinds}


def gpt() -> Any:
    model = sp.models.gpt()
    ddp = sp.parallel.DistributedDataParallel(model)
    tokens = np.random.default_rng(sp.get_rank()).integers(0, 64, (2, 2, 9))
    inputs = [(row[:, :-1], row[:, 1:]) for row in tokens]

    def loss_fn(logits: Any, y: Any) -> Any:
        return sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))

    return steps(ddp, sp.optim.SGD(ddp.parameters(), lr=0.1), loss_fn, inputs)


def pipeline() -> Any:
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    pipe = sp.parallel.Pipeline(model, nn.CrossEntropyLoss(), microbatches=4, stages=["0", "1", "2", "4"])
    optimizer = sp.optim.Adam(pipe.parameters())
    images, labels = sp.data.digits("train")[:32]
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(pipe.step(images, labels).item())
        optimizer.step()
    return {"losses": losses, "state": pipe.state_dict(), "kinds": {type(p.data).__name__ for p in pipe.parameters()}}


def checkpoint(folder: str) -> Any:
    model = sp.parallel.DistributedDataParallel(nn.Linear(64, 10))
    optimizer = sp.optim.Adam(model.parameters())
    steps(model, optimizer)
    manager = sp.CheckpointManager(folder)
    manager.save(1, model=model, optimizer=optimizer)
    other = sp.parallel.DistributedDataParallel(nn.Linear(64, 10))
    again = sp.optim.Adam(other.parameters())
    manager.restore(model=other, optimizer=again)
    return steps(other, again)


PROGRAMS = (
    one_device, data_parallel, synchronised_norm, adasum, convolutions, cut_operators, gpt, pipeline, checkpoint,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_gives_the_bits_of_numpy(program: Any, tmp_path: Path) -> None:
    """Losses, weights and buffers after training; every parameter is on the device."""
    size = 1 if program is one_device else WORLD_SIZE
    found = {}
    for array in ("numpy", "cupy"):
        args = (str(tmp_path / array),) if program is checkpoint else ()
        found[array] = sp.launch(program, args, world_size=size, transport="inline", array=array)
    for ours, theirs in zip(found["cupy"], found["numpy"], strict=True):
        assert ours["kinds"] <= {strict.StrictArray.__name__}
        assert theirs["kinds"] <= {"ndarray"}
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6 if program is gpt else 0, abs=0)
        assert ours["state"].keys() == theirs["state"].keys()
        for name, value in theirs["state"].items():
            # NumPy's attention has a kernel of its own, which adds in another order.
            tolerance = 1e-5 if program is gpt else 0.0
            np.testing.assert_allclose(ours["state"][name], value, rtol=0, atol=tolerance, strict=True)
    assert any(ours["kinds"] for ours in found["cupy"])


@pytest.fixture
def no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_namespaces", {})


def test_without_cupy(no_stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with refused(InputError):
        sp.Cluster(2, array="cupy")


@pytest.mark.parametrize("driver", ["missing", "old", "no GPU"])
def test_cupy_without_a_usable_gpu(no_stand_in: None, monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    def fails() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")

    runtime = SimpleNamespace(
        driverGetVersion=lambda: 0 if driver == "missing" else 12040,
        getDeviceCount=(lambda: 0) if driver == "no GPU" else fails,
    )
    cupy: Any = ModuleType("cupy")
    cupy.__version__, cupy.ndarray = "14.2.0", type("ndarray", (), {})
    cupy.cuda = SimpleNamespace(runtime=runtime, is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with refused(InputError):
        sp.Cluster(2, array="cupy")


def test_wrong_library() -> None:
    with refused(InputError):
        sp.Cluster(2, array="jax")

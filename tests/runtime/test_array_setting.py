"""`array="cupy"`: whole programs give NumPy's results, to the bit on a stand-in; without a GPU, one clear error.

On a GPU the programs run on threads and on processes, whose CUDA contexts start after the fork.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import array_backends
import numpy as np
import pytest
from array_backends import name_of
from refusals import refused

import simparallel as sp
from simparallel import backend, nn
from simparallel.errors import InputError

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
    return {"losses": losses, "state": model.state_dict(), "kinds": kinds_of(model.parameters())}


def kinds_of(parameters: Any) -> set[str]:
    return {name_of(type(parameter.data)) for parameter in parameters}


def one_device() -> Any:
    # A bias would have no gradient but rounding, which AdamW scales up.
    model = nn.Sequential(
        nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )
    return steps(model, sp.optim.AdamW(model.parameters(), lr=0.01))


def data_parallel() -> Any:
    model = sp.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)))
    return steps(model, sp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def synchronised_norm() -> Any:
    # A bias would have no gradient but rounding, which LAMB scales up.
    model = nn.Sequential(nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = sp.parallel.DistributedDataParallel(nn.Sequential(model, nn.Linear(16, 10)))
    return steps(model, sp.optim.LAMB(model.parameters(), lr=0.01))


def matrices_on_owners() -> Any:
    model = nn.Sequential(nn.Linear(64, 9, bias=False), nn.GELU(), nn.Linear(9, 10, bias=False))
    sp.parallel.fully_shard(model)
    return {**steps(model, sp.optim.Muon(model.parameters())), "state": model.full_state_dict()}


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
    return {"losses": losses, "state": network.state_dict(), "kinds": kinds_of(network.parameters())}


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
    return {"losses": losses, "state": pipe.state_dict(), "kinds": kinds_of(pipe.parameters())}


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
    one_device, data_parallel, synchronised_norm, matrices_on_owners, adasum, convolutions, cut_operators, gpt,
    pipeline, checkpoint,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_program_on_device_equals_numpy(arrays: Any, transport: str, program: Any, tmp_path: Path) -> None:
    """Losses, weights and buffers after training; every parameter is on the device."""
    size = 1 if program is one_device else WORLD_SIZE
    found = {}
    for array, settings in (("numpy", {}), ("cupy", arrays.run_settings)):
        args = (str(tmp_path / array),) if program is checkpoint else ()
        found[array] = list(sp.launch(program, args, world_size=size, transport=transport, **settings))
    # NumPy's attention and convolutions cut their products for the cache, and BLAS adds products of another size in
    # another order; LAMB's norms are added up in float64 on a GPU.
    if program in (gpt, convolutions, synchronised_norm):
        arrays = arrays.reordered()
    for ours, theirs in zip(found["cupy"], found["numpy"], strict=True):
        assert ours.pop("kinds") <= {arrays.type_name}
        assert theirs.pop("kinds") <= {"numpy.ndarray"}
        arrays.after(10 * arrays.steps).assert_all_equal(ours, theirs)


@pytest.mark.parametrize("wrong", ["", "Linear.backward", "BatchNorm", "Dropout.backward"])
def test_rounding_is_told_from_errors(wrong: str) -> None:
    """Within the tolerances of a GPU, values may be rounded otherwise; red control: an op may not be 1% wrong."""
    expected, gpu = (
        sp.launch(one_device, world_size=1, transport="inline")[0],
        array_backends.ArrayBackend("cupy", 10.0),
    )
    with array_backends.other_rounding(wrong, 0.01):
        found = sp.launch(one_device, world_size=1, transport="inline", array="cupy")[0]
    with pytest.raises(AssertionError) if wrong else nullcontext():
        gpu.assert_all_equal((found["losses"], found["state"]), (expected["losses"], expected["state"]))


def shared_batch() -> Any:
    """Train on 32 images, divided among the ranks."""
    model = sp.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    images, labels = (part[:32] for part in sp.data.digits("train")[:])
    own = slice(sp.get_rank() * 32 // sp.get_world_size(), (sp.get_rank() + 1) * 32 // sp.get_world_size())
    return steps(model, sp.optim.Adam(model.parameters(), lr=0.01), inputs=[(images[own], labels[own])] * 4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_ranks_of_one_gpu_train_like_one(arrays: Any, transport: str, size: int) -> None:
    one, many = (
        list(sp.launch(shared_batch, world_size=count, transport=transport, **arrays.run_settings))
        for count in (1, size)
    )
    close = array_backends.ArrayBackend(arrays.name, 10.0, is_exact=False)
    for rank in many:
        close.assert_all_equal(rank["state"], one[0]["state"])
        arrays.assert_all_equal(rank["state"], many[0]["state"])


def random_numbers() -> dict[str, Any]:
    sp.manual_seed(3 + sp.get_rank())
    layers = nn.Sequential(nn.Linear(8, 6), nn.LSTM(6, 4), nn.Conv2d(2, 3, 3), nn.Embedding(5, 4))
    ones = sp.Tensor(np.ones((4, 50), np.float32))
    drop = nn.Dropout(0.25)
    masks = [drop(ones).numpy(), drop(ones).numpy(), sp.functions.dropout(ones, 0.5).numpy()]
    order = [y.tolist() for _, y in batches()]
    return {"weights": layers.state_dict(), "masks": masks, "order": order}


@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_random_numbers_are_numpys_bits(arrays: Any, transport: str) -> None:
    """Initial weights, dropout masks and the order of data, on a GPU as well."""
    on_device, on_host = (
        list(sp.launch(random_numbers, world_size=2, transport=transport, **settings))
        for settings in (arrays.run_settings, {})
    )
    array_backends.ArrayBackend("strict").assert_all_equal(on_device, on_host)


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

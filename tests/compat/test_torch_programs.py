"""Programs in PyTorch's names: what they save, draw, spawn and exchange; one of them beside PyTorch."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel.clock.notes import forget_notes
from simparallel.compat import torch as front
from simparallel.compat.torch import backends, distributed as dist
from simparallel.compat.torch.distributed import fsdp, optim as distributed_optim
from simparallel.errors import CheckpointError, InputError

torch = pytest.importorskip("torch")
SPAWN = Path(__file__).parents[2] / "examples" / "torch_distributed" / "spawn.py"


def losses_of_torch() -> list[float]:
    """Return the losses of the example in PyTorch on one process, whose batches are those of both ranks together."""
    spec = spec_from_file_location("spawn", SPAWN)
    spec.loader.exec_module(program := module_from_spec(spec))
    model, data = program.Net(), program.Waves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found = []
    for _ in range(3):
        total = 0.0
        for x, y in torch.utils.data.DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * len(y)
        scheduler.step()
        found.append(total / len(data))
    return found


@pytest.mark.process
def test_spawned_ranks_train_as_in_torch():
    ended = subprocess.run(
        [sys.executable, "-m", "simparallel.compat", "torch", str(SPAWN)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stdout.splitlines() if "epoch" in line]
    expected = [f"loss {loss:.4f}" for loss in losses_of_torch()]
    assert len(told) == 3
    for line, loss in zip(told, expected, strict=True):
        assert loss in line


SHARDED = Path(__file__).with_name("sharded_states.py")


def _losses_of_sharded(folder: Path, *before: str, strategies: tuple[str, ...] = ()) -> dict[str, list[float]]:
    command = [sys.executable, *before, str(SHARDED), str(folder / "meeting"), *strategies]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    told = [line.partition("losses ")[2].split() for line in ended.stdout.splitlines() if "losses " in line]
    return {name: list(map(float, losses)) for name, *losses in told}


def _losses_of_one_process() -> list[float]:
    """Return the losses of rank 1, with gradients from the batches of all ranks, in PyTorch on one process."""
    spec = spec_from_file_location("sharded_states", SHARDED)
    spec.loader.exec_module(program := module_from_spec(spec))
    model, found = program.Net(), []
    optimizer = program.adam(model.parameters())
    for step in range(3):
        parts = [[program.batch(rank, step + micro) for micro in range(2)] for rank in range(4)]
        losses = [sum(torch.nn.functional.cross_entropy(model(x), y) / 2 for x, y in part) for part in parts]
        (sum(losses) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[1].item())
    return found


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_sharded_states_train_as_in_torch(tmp_path):
    """FSDP2, its hybrid, ZeroRedundancyOptimizer and FSDP in PyTorch's names."""
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    found = _losses_of_sharded(tmp_path, "-m", "simparallel.compat", "torch", strategies=strategies)
    assert list(found) == ["ddp", "zero", "fsdp2", "kept", "hsdp", *strategies]
    expected = _losses_of_one_process()
    for name, losses in found.items():
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=name)
    assert found["zero"] == found["ddp"]


@pytest.mark.matrices
def test_sharded_states_beside_torch_over_gloo(tmp_path):
    found = _losses_of_sharded(tmp_path, "-m", "simparallel.compat", "torch")
    for name, losses in _losses_of_sharded(tmp_path).items():
        np.testing.assert_allclose(found[name], losses, rtol=1e-5, err_msg=name)


REFUSED_STATES: dict[str, Callable[[], Any]] = {
    "offload": lambda: fsdp.fully_shard(front.nn.Linear(2, 2), offload_policy=True),
    "placement": lambda: fsdp.fully_shard(front.nn.Linear(2, 2), shard_placement_fn=lambda p: None),
    "a list": lambda: fsdp.fully_shard([front.nn.Linear(2, 2)]),
    "output dtype": lambda: fsdp.MixedPrecisionPolicy(output_dtype=front.float32),
    "no cast": lambda: fsdp.MixedPrecisionPolicy(front.float16, cast_forward_inputs=False),
    "ignored modules": lambda: fsdp.FullyShardedDataParallel(front.nn.Linear(2, 2), ignored_modules=[1]),
    "overlap": lambda: distributed_optim.ZeroRedundancyOptimizer(
        front.nn.Linear(2, 2).parameters(), front.optim.Adam, overlap_with_ddp=True
    ),
}


@pytest.mark.parametrize("what", REFUSED_STATES)
def test_sharded_states_that_do_not_exist(what):
    with refused(InputError):
        REFUSED_STATES[what]()


def test_names_of_sharded_states_are_found():
    for name in ("FullyShardedDataParallel", "ZeroRedundancyOptimizer"):
        with pytest.raises(AttributeError, match=r"here it is torch.distributed.(fsdp|optim)"):
            getattr(front, name)
    module = fsdp.fully_shard(front.nn.Linear(2, 2))
    assert isinstance(module, fsdp.FSDPModule)
    with pytest.raises(AttributeError, match="in the order of the last step"):
        module.set_modules_to_forward_prefetch([])


def test_spawn_refuses_to_return_early():
    with refused(InputError):
        front.multiprocessing.spawn(print, nprocs=2, join=False)


def test_saved_state_comes_back(tmp_path):
    model = front.nn.Linear(3, 2)
    optimizer = front.optim.Adam(model.parameters())
    model(front.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": 0.5, "name": None,
        "shape": (1, 2), "loss": front.tensor(0.25), "ids": [front.arange(3), True, "text"],
    }  # fmt: skip
    front.save(state, tmp_path / "state.pt")
    found = front.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    assert list(found) == list(state)
    assert isinstance(found["loss"], sp.Tensor)
    assert (found["epoch"], found["best"], found["name"], found["shape"]) == (3, 0.5, None, (1, 2))
    assert [found["ids"][0].tolist(), *found["ids"][1:]] == [[0, 1, 2], True, "text"]
    assert found["ids"][0].dtype == front.int64
    for path in ({"cpu": "cpu"}, lambda storage, location: storage, front.device("cpu")):
        assert front.load(tmp_path / "state.pt", path)["loss"].item() == 0.25
    other = front.nn.Linear(3, 2)
    other.load_state_dict(found["model"])
    again = front.optim.Adam(other.parameters())
    again.load_state_dict(found["optimizer"])
    assert other.weight.tolist() == model.weight.tolist()
    assert again.state_dict()["state"][0]["exp_avg"].tolist() == optimizer.state_dict()["state"][0]["exp_avg"].tolist()


def test_state_in_an_open_file(tmp_path):
    state = {"x": front.arange(6).reshape(2, 3), "step": 4}
    buffer = io.BytesIO()
    front.save(state, buffer)
    with open(tmp_path / "state.pt", "w+b") as file:
        front.save(state, file)
        for place in (buffer, file):
            place.seek(0)
            found = front.load(place)
            assert (found["x"].tolist(), found["step"]) == ([[0, 1, 2], [3, 4, 5]], 4)
    with pytest.raises(CheckpointError, match="it looks like a pickle"):
        front.load(io.BytesIO(b"PK" + bytes(20)))


def test_load_refuses_pickles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(2)}, "archive.pt")
    torch.save({"x": torch.ones(2)}, "pickle.pt", _use_new_zipfile_serialization=False)
    for name in ("archive.pt", "pickle.pt"):
        with pytest.raises(CheckpointError, match="it looks like a pickle.*safetensors.torch.save_file"):
            front.load(name)
    with refused(CheckpointError):
        front.save(front.nn.Linear(1, 1), "model.pt")


def test_multinomial_draws_by_weight():
    sp.manual_seed(3)
    weights = front.tensor([[0.0, 1.0, 3.0], [5.0, 0.0, 0.0]])
    drawn = front.multinomial(weights, 4000, replacement=True).numpy()
    assert drawn.shape == (2, 4000)
    assert set(drawn[0]) == {1, 2}
    assert set(drawn[1]) == {0}
    assert abs((drawn[0] == 2).mean() - 0.75) < 0.03
    assert {tuple(sorted(front.multinomial(weights[0], 2).tolist())) for _ in range(20)} == {(1, 2)}
    for bad in ((weights, 2), (front.tensor([-1.0, 1.0]), 1), (front.tensor([float("inf"), 1.0]), 1)):
        with refused(InputError):
            front.multinomial(*bad)


def test_draws_in_place():
    x = front.zeros(3000)
    assert x.normal_(2.0, 0.5) is x
    assert abs(x.mean().item() - 2.0) < 0.05
    assert abs(x.std().item() - 0.5) < 0.05
    with pytest.raises(sp.errors.AutogradError):
        front.zeros(2, requires_grad=True).add_(1)
    with pytest.raises(sp.errors.AutogradError):
        (front.ones(2, requires_grad=True) * 2).zero_()


def test_random_sampler_with_replacement():
    data = range(10)
    sampler = front.utils.data.RandomSampler(data, replacement=True, num_samples=10**10)
    loader = iter(front.utils.data.DataLoader(data, batch_size=4, sampler=sampler))
    assert len(sampler) == 10**10
    batches = [next(loader).tolist() for _ in range(500)]
    assert {len(batch) for batch in batches} == {4}
    counts = np.bincount(np.concatenate(batches), minlength=10)
    assert counts.min() > 150
    assert next(iter(sampler)) in data
    few = front.utils.data.RandomSampler(data, True, 7)
    orders = [list(few), list(few)]
    assert [len(order) for order in orders] == [7, 7]
    assert orders[0] != orders[1]
    with refused(sp.errors.StateDictError):
        front.utils.data.RandomSampler(range(7)).load_state_dict(few.state_dict())
    assert sorted(front.utils.data.RandomSampler(data)) == list(data)
    with refused(InputError):
        front.utils.data.RandomSampler(data, num_samples=3)


def test_messages_groups_and_futures():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        sent, got = front.full((2,), float(rank)), front.zeros(2)
        messages = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        own, groups = dist.new_subgroups(2)
        mine = [None]
        dist.scatter_object_list(mine, [{"for": r} for r in range(size)] if rank == 1 else None, src=1)
        x = front.full((2,), float(rank))
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] / size)
        return got.tolist(), list(own.ranks), len(groups), mine, future.wait().tolist()

    results = sp.launch(program, world_size=4, transport="inline")
    for rank, found in enumerate(results):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        assert found == ([(rank - 1) % 4] * 2, pair, 2, [{"for": rank}], [1.5, 1.5])


def test_hook_may_return_a_future():
    def hook(group, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    def program(hook):
        model = front.nn.parallel.DistributedDataParallel(front.nn.Linear(2, 1))
        if hook is not None:
            model.register_comm_hook(None, hook)
        model(front.full((1, 2), float(sp.get_rank() + 1))).sum().backward()
        return [p.grad.tolist() for p in model.parameters()]

    found = [list(sp.launch(program, (each,), world_size=2, transport="inline")) for each in (hook, None)]
    assert found[0] == found[1]


def test_settings_of_libraries_are_noted_once(capsys):
    forget_notes()
    for _ in range(2):
        backends.cuda.matmul.allow_tf32 = True
        front.compile(front.nn.Linear(1, 1))
        with front.autocast("cuda", dtype=front.bfloat16):
            assert front.ones(1, dtype=front.bfloat16).dtype == front.float32
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert backends.cuda.matmul.allow_tf32
    front.set_float32_matmul_precision("medium")
    front.set_float32_matmul_precision("highest")
    assert front.compile(mode="max-autotune")(abs) is abs


def test_accelerator_names_the_ranks_devices():
    def program():
        rank = sp.get_rank()
        front.accelerator.set_device_index(rank)
        place = front.device(f"{front.accelerator.current_accelerator()}:{rank}")
        return str(front.ones(1).to(place).device), front.accelerator.current_device_index()

    assert list(sp.launch(program, world_size=2, transport="inline")) == [("sim:0", 0), ("sim:0", 1)]

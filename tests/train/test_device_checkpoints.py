"""Checkpoints of device arrays: the files of NumPy's, and values that come back to the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import array_backends
import numpy as np
import pytest
from array_backends import name_of

import simparallel as sp
from simparallel import nn, optim

WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)


def trained(on_device: Any) -> tuple[nn.Module, optim.Optimizer]:
    """Return a model with buffers and its optimizer, after one step of exact numbers."""
    sp.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = model if on_device is None else model.to("cuda:0")
    optimizer = optim.Adam(model.parameters())
    for parameter in model.parameters():
        ones = np.ones(parameter.shape, np.float32)
        parameter.grad = ones if on_device is None else on_device(ones)
    optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module) -> list[sp.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_saved_state_dict_is_numpys(arrays: Any, tmp_path: Path) -> None:
    """`save` and `load`, with the optimizer's state; numbers of one step may differ on a GPU."""
    (model, optimizer), (_, same) = trained(arrays.on_device), trained(None)
    sp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file")
    loaded = sp.load(tmp_path / "file")
    other, its_optimizer = trained(arrays.on_device)
    for parameter in other.parameters():
        parameter.data[...] = 0
    other.load_state_dict(loaded["model"])
    its_optimizer.load_state_dict(loaded["optimizer"])

    arrays.assert_all_equal(loaded["optimizer"], same.state_dict())
    assert all(type(tensor.data) is arrays.type for tensor in tensors_of(other))
    array_backends.ArrayBackend("strict").assert_all_equal(other.state_dict(), model.state_dict())
    array_backends.ArrayBackend("strict").assert_all_equal(its_optimizer.state_dict(), optimizer.state_dict())


def test_tensors_themselves_are_saved(arrays: Any, tmp_path: Path) -> None:
    """A dict of Tensors and arrays of the device, without a `state_dict`."""
    values = np.arange(6.0).reshape(2, 3)
    sp.save_checkpoint({"a": sp.Tensor(arrays.on_device(values)), "b": arrays.on_device(values).T}, tmp_path / "file")
    loaded = sp.load_checkpoint(tmp_path / "file")
    np.testing.assert_array_equal(loaded["a"], values)
    np.testing.assert_array_equal(loaded["b"], values.T)


def test_checkpoint_loads_into_a_device_model(arrays: Any, tmp_path: Path) -> None:
    """The file of a model on the device is that of one on the host, and fits both."""
    model, _ = trained(arrays.on_device)
    host = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    host.load_state_dict(model.state_dict())
    sp.save_checkpoint(model, tmp_path / "device")
    sp.save_checkpoint(host, tmp_path / "host")
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()
    again = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("cuda:0")
    assert sp.load_param_into_net(again, sp.load_checkpoint(tmp_path / "host")) == ([], [])
    assert all(type(tensor.data) is arrays.type for tensor in tensors_of(again))
    array_backends.ArrayBackend("strict").assert_all_equal(again.state_dict(), model.state_dict())


class Cut(nn.Module):
    """A model that holds this rank's slice of a matrix."""

    def __init__(self, layout: sp.Layout, whole: np.ndarray) -> None:
        super().__init__()
        self.w = nn.Parameter(whole[layout.slices(sp.get_rank(), whole.shape)].copy())


def save_and_cut_again(folder: str) -> tuple[tuple[slice, ...], np.ndarray, str]:
    """Save a matrix cut by rows, and load it cut by columns."""
    mesh = sp.Layout((sp.get_world_size(),), ("dp",))
    rows, columns = mesh("dp", "None"), mesh("None", "dp")
    manager = sp.CheckpointManager(folder)
    manager.save(1, model=Cut(rows, WHOLE), layouts={"w": rows})
    model = Cut(columns, np.zeros_like(WHOLE))
    manager.restore(model=model, layouts={"w": columns})
    return columns.slices(sp.get_rank(), WHOLE.shape), model.w.numpy(), name_of(type(model.w.data))


@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_slices_on_devices_are_cut_again(arrays: Any, transport: str, tmp_path: Path) -> None:
    settings = {"world_size": 2, "transport": transport, **arrays.run_settings}
    for slices, values, kind in sp.launch(save_and_cut_again, (str(tmp_path),), **settings):
        np.testing.assert_array_equal(values, WHOLE[slices])
        assert kind == arrays.type_name

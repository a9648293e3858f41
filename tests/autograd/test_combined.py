"""Methods that combine ops: the same values on device arrays and on a second device, the same shapes in a dry run."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel.backend import to_host
from simparallel.errors import InputError

METHODS = {
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "diag": lambda x: x.diag(1),
    "matrix": lambda x: x[0].diag(-1),
    "roll": lambda x: x.roll(2),
    "roll_dims": lambda x: x.roll((1, -1), (0, 1)),
    "norm": lambda x: x.norm(dim=1),
    "contiguous": lambda x: x.t().contiguous(),
    "in_place": lambda x: x.clone().add_(1).mul_(2).clamp_(max=9),
    "copy": lambda x: x.clone().copy_(x[0]),
    "zero": lambda x: x.clone().fill_(2).zero_(),
    "normal": lambda x: x.clone().normal_(1.0, 2.0),
    "scatter_reduce": lambda x: x.scatter_reduce(1, [[0, 0, 3, 1]] * 3, x, "sum"),
    "multinomial": lambda x: x.multinomial(2),
}
X = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def on_host(name: str) -> np.ndarray:
    sp.manual_seed(1)
    return METHODS[name](sp.Tensor(X)).numpy()


@pytest.mark.parametrize("name", METHODS)
def test_method_on_device_arrays(arrays, name):
    expected = on_host(name)
    sp.manual_seed(1)
    found = METHODS[name](sp.Tensor(arrays.xp.asarray(X)))
    assert isinstance(found.data, arrays.type)
    np.testing.assert_allclose(to_host(found.data), expected, rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_method_on_another_device(name):
    expected = on_host(name)
    sp.manual_seed(1)
    found = METHODS[name](sp.Tensor(X, device="sim:1"))
    assert found.device == "sim:1"
    np.testing.assert_array_equal(found.numpy(), expected)


def test_methods_in_a_dry_run():
    """All but multinomial, which reads values."""

    def program():
        return {name: method(sp.Tensor(X)).shape for name, method in METHODS.items() if name != "multinomial"}

    expected = {name: on_host(name).shape for name in METHODS if name != "multinomial"}
    assert list(sp.launch(program, world_size=1, transport="inline")) == [expected]
    shapes = []
    sp.dry_run(lambda: shapes.append(program()), world_size=1)
    assert shapes == [expected]


def test_scatter_reduce_names_the_page():
    with refused(InputError):
        sp.Tensor(X).scatter_reduce(1, [[0, 0, 3, 1]] * 3, X, "amax")

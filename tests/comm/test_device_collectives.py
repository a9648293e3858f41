"""Every collective and message on device arrays: NumPy's bits, in arrays of the device, on threads and on processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_backends
import numpy as np
import pytest
from array_backends import name_of

import simparallel as sp
from simparallel import functions as F
from simparallel.backend import is_array, to_host
from simparallel.comm.collective import COLLECTIVES
from simparallel.comm.gpu.link import ON_GPU

SIZE = 3
DTYPES = ("float32", "float16", "int64")


def payload(dtype: str, seed: int = 0) -> Any:
    """Return this rank's array, small integers of shape (6, 2); on its GPU in a run with array="cupy"."""
    values = np.random.default_rng([seed, sp.get_rank()]).integers(0, 4, (6, 2)).astype(dtype)
    return sp.Tensor(values)


def parts(x: Any, root: int) -> list[Any] | None:
    return [x * i for i in range(SIZE)] if sp.get_rank() == root else None


def own(x: Any) -> Any:
    return x[: sp.get_rank() + 1]


# Name -> calls. `x` is a Tensor or its array, and has to be of floating point for "adasum".
CALLS: dict[str, list[Callable[[Any], Any]]] = {
    "barrier": [lambda x: sp.barrier()],
    "all_reduce": [
        lambda x: sp.all_reduce(x),
        lambda x: sp.all_reduce(x, "max", algorithm="ring"),
        lambda x: sp.all_reduce([x, x * 1]),
        lambda x: sp.all_reduce(x, async_op=True).wait(),
        lambda x: sp.all_reduce(x, out=x * 0),
    ],
    "adasum": [lambda x: sp.all_reduce(x.astype("float32"), "adasum")],
    "broadcast": [lambda x: sp.broadcast(x, 1), lambda x: sp.broadcast(x, 2, async_op=True).wait()],
    "reduce": [lambda x: sp.reduce(x, 1)],
    "all_gather": [
        lambda x: sp.all_gather(x, 1),
        lambda x: sp.all_gather(own(x), uneven=True),
        lambda x: sp.all_gather(x, algorithm="ring", async_op=True).wait(),
    ],
    "reduce_scatter": [lambda x: sp.reduce_scatter(x), lambda x: sp.reduce_scatter(x, input_splits=[1, 2, 3])],
    "all_to_all": [
        lambda x: sp.all_to_all(x, 0, 1),
        lambda x: sp.all_to_all(x, input_splits=[1, 2, 3], output_splits=[sp.get_rank() + 1] * SIZE),
    ],
    "gather": [lambda x: sp.gather(x, 2), lambda x: sp.gather(own(x), 0, uneven=True)],
    "scatter": [
        lambda x: sp.scatter(parts(x, 1), 1),
        lambda x: sp.scatter(parts(x, 0), async_op=True).wait(),
        lambda x: sp.scatter(parts(x, 2), 2, out=x * 1),
    ],
    "scan": [lambda x: sp.scan(x)],
    "exscan": [lambda x: sp.exscan(x)],
    "new_group": [lambda x: sp.all_reduce(x, group=sp.new_group([2, 0, 1]))],
    "all_gather_object": [lambda x: sp.all_gather_object({"x": x, "rank": sp.get_rank()})],
    "broadcast_object": [lambda x: sp.broadcast_object([x, "text"], 1)],
    "gather_object": [lambda x: sp.gather_object((x, sp.get_rank()), 2)],
    # Messages around the ring.
    "sendrecv": [lambda x: sp.sendrecv(x, (sp.get_rank() + 1) % SIZE, x * 0, (sp.get_rank() - 1) % SIZE)],
    "isend": [
        lambda x: (sp.isend(x, (sp.get_rank() + 1) % SIZE), sp.irecv(x * 0, (sp.get_rank() - 1) % SIZE).wait())[1]
    ],
    "send": [lambda x: sp.send(x, 1) if sp.get_rank() == 0 else sp.recv(x * 0, 0) if sp.get_rank() == 1 else None],
}
# Names of the functions that gradients pass through.
ON_THE_TAPE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: F.all_reduce(x, "mean"),
    "all_gather": lambda x: F.all_gather(x, 1),
    "reduce_scatter": lambda x: F.reduce_scatter(x),
    "all_to_all": lambda x: F.all_to_all(x, 0, 1),
    "broadcast": lambda x: F.broadcast(x, 1),
    "reduce": lambda x: F.reduce(x, 2),
    "gather_to": lambda x: F.stack(F.gather_to(x, 1)),
    "scatter_from": lambda x: F.scatter_from(parts(x, 1), 1),
}


def found(value: Any) -> Any:
    """Return a result on the host, and the types of its arrays."""
    if isinstance(value, sp.Tensor):
        value = value.data
    if is_array(value):
        return to_host(value).copy(), name_of(type(value))
    if isinstance(value, dict):
        return {key: found(one) for key, one in value.items()}
    return [found(one) for one in value] if isinstance(value, (list, tuple)) else value


def program(name: str) -> list[Any]:
    results = []
    for call in CALLS[name]:
        for dtype in DTYPES:
            for kind in ("Tensor", "array"):
                x = payload(dtype)
                x = x if kind == "Tensor" else x.data
                results.append(found([call(x), x]))
    return results


def tape_program(name: str) -> list[Any]:
    x = payload("float32")
    x.requires_grad = True
    y = ON_THE_TAPE[name](x)
    ((y**2).sum() + x.sum()).backward()
    return found([y, x.grad])


def types_of(value: Any) -> set[str]:
    """Return the types of arrays that `found` noted."""
    if isinstance(value, tuple):
        return {value[1]}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {kind for one in items for kind in types_of(one)}


def values_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return value[0]
    if isinstance(value, dict):
        return {key: values_of(one) for key, one in value.items()}
    return [values_of(one) for one in value] if isinstance(value, list) else value


def check(arrays: Any, transport: str, function: Any, name: str) -> None:
    settings: dict[str, Any] = {"world_size": SIZE, "transport": transport}
    on_device = list(sp.launch(function, (name,), **settings, **arrays.run_settings))
    on_host = list(sp.launch(function, (name,), **settings))
    assert {kind for rank in on_device for kind in types_of(rank)} == {arrays.type_name}
    arrays.assert_all_equal([values_of(rank) for rank in on_device], [values_of(rank) for rank in on_host], name)


@pytest.mark.parametrize("name", sorted({*COLLECTIVES, *CALLS}))
@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_collective_of_device_arrays(arrays: Any, transport: str, name: str) -> None:
    """The input after the call, too."""
    check(arrays, transport, program, name)


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("link", array_backends.LINKS)
def test_collective_over_each_link(link: str, name: str) -> None:
    with array_backends.linked(link):
        check(array_backends.ArrayBackend("strict"), "inline", program, name)
        if name in ON_THE_TAPE:
            check(array_backends.ArrayBackend("strict"), "inline", tape_program, name)


@pytest.mark.parametrize("name", sorted(ON_THE_TAPE))
@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_gradient_of_device_collective(arrays: Any, transport: str, name: str) -> None:
    check(arrays, transport, tape_program, name)

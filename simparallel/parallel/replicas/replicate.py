"""Copy a module to several devices, and run the copies in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from itertools import count
from types import SimpleNamespace
from typing import Any

from simparallel.autograd import Coalesce, Replicate, Tensor
from simparallel.autograd.op import instance
from simparallel.autograd.tape import FlatSlice, Node, grad_mode
from simparallel.backend import random_state
from simparallel.clock.recorder import current_recorder, use_recorder
from simparallel.comm import current, is_running, use_communicator
from simparallel.errors import DeviceMismatchError, InputError
from simparallel.machine.devices import Device, current_device
from simparallel.nn import Module
from simparallel.parallel.replicas.scatter_gather import _tensors

# --- replicate ----------------------------------------------------------------------------------


def replicate(network: Module, devices: Sequence[Any], detach: bool = False) -> list[Module]:
    """Copy `network` to each device; the first device has to hold its parameters.

    The copies are differentiable: backward adds the gradients of all replicas on the first device. Parameters
    of one dtype are copied as one flat tensor. The first replica holds the original parameters and buffers, so its
    writes to a buffer stay; writes of the other replicas are lost.

    Args:
        network: a Module. The replicas share its other attributes.
        devices: "sim:k", or k.
        detach: the copies get no gradients.

    Returns:
        One Module per device.

    Raises:
        InputError: `devices` is empty.
        DeviceMismatchError: a parameter or buffer is not on `devices[0]`.

    Cost: the bytes of all parameters and buffers for every device but the first, out of one port; in backward the
    same bytes in the other direction.
    """
    targets = [Device(device) for device in devices]
    if not targets:
        raise InputError("replicate: devices is empty; give at least one.")
    modules = list(network.modules())
    check_places(network, targets[0])
    # By id: a tensor that several modules share stays shared in each replica.
    tensors = [*network.parameters(), *network.buffers()]
    # Replica 0 holds the originals.
    copies = [{id(x): x.detach() if detach else x for x in tensors}, *({} for _ in targets[1:])]
    groups: dict[Any, dict[int, Tensor]] = {}
    for key, x in copies[0].items():
        # One flat tensor has one dtype, and either a gradient or none.
        groups.setdefault((x.dtype, x.requires_grad), {})[key] = x
    # One copy per group and device: small tensors would cost the latency of a copy each.
    if len(targets) > 1:
        for group in groups.values():
            flat = instance(Coalesce)(*group.values())
            for device, found in zip(targets[1:], copies[1:], strict=True):
                found.update(_parts(instance(Replicate, device)(flat), group))
    return [_filled(modules, found) for found in copies]


def check_places(network: Module, device: Device) -> None:
    """Raise DeviceMismatchError unless all parameters and buffers are on `device`."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.device is not device:
            raise DeviceMismatchError(
                f"{type(network).__name__}: parameters and buffers must be on {device}, the first device, but "
                f"{name} is on {tensor.device}. Call module.to('{device}').",
                op="replicate",
                devices=[str(device), str(tensor.device)],
            )


def _filled(modules: list[Module], tensors: dict[int, Tensor]) -> Module:
    """Return copies of the modules that hold `tensors` in place of their own parameters and buffers."""
    # Make all replicas before linking them: a module may occur at several places of the network.
    made = {id(module): module._replica() for module in modules}
    for module, replica in zip(modules, made.values(), strict=True):
        for registry in ("_parameters", "_buffers"):
            for name, tensor in module.__dict__[registry].items():
                # An outer mixed-precision wrapper may hide the parameter behind a cast of the same name.
                replica.__dict__.pop(name, None)
                replica.__dict__[registry][name] = None if tensor is None else tensors[id(tensor)]
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else made[id(child)]
    return made[id(modules[0])]


def _parts(flat: Tensor, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return views of `flat` in the shapes of `tensors`, one after another, each with a graph node."""
    parts: dict[int, Tensor] = {}
    start = 0
    for key, x in tensors.items():
        stop, node = start + x.size, None
        if flat.requires_grad:
            op = FlatSlice(f"replicate({start}:{stop})", start, flat.size)
            node = Node(op, SimpleNamespace(needs=(True,)), (flat,))  # type: ignore[arg-type]
        parts[key] = Tensor._result(flat.data[start:stop].reshape(x.shape), node, flat._device)
        start = stop
    return parts


# --- parallel_apply -----------------------------------------------------------------------------


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Any] | None = None,
) -> list[Any]:
    """Call `modules[k](*inputs[k], **kwargs_tup[k])` for every k, each in its own thread.

    A thread inherits the caller's rank, grad mode and random state; new tensors are created on its device. Afterwards
    the caller's random state continues from that of the first thread. Only the caller may call collectives.

    Args:
        modules: Modules or functions, one per device.
        inputs: for each a tuple of arguments, or a single argument.
        kwargs_tup: for each a dict of named arguments.
        devices: for each its device; by default the device of its first Tensor.

    Returns:
        The results, in order.

    Raises:
        InputError: lists of different lengths.
        Errors of a module; the message begins with the number of the replica and its device.
    """
    num = len(modules)
    named = [{}] * num if kwargs_tup is None else list(kwargs_tup)
    if not num == len(inputs) == len(named) == (num if devices is None else len(devices)):
        raise InputError(
            f"parallel_apply: {num} modules, {len(inputs)} inputs, {len(named)} kwargs"
            f"{'' if devices is None else f' and {len(devices)} devices'}; expected one of each for every replica."
        )
    arguments = [given if isinstance(given, (tuple, list)) else (given,) for given in inputs]
    places = (
        [_place(value) for value in zip(arguments, named, strict=True)]
        if devices is None
        else [Device(device) for device in devices]
    )
    # Takes the caller's state now, before the threads start.
    state = _InheritedState(places)
    results: list[Any] = [None] * num
    errors: list[BaseException | None] = [None] * num

    def call(k: int) -> None:
        try:
            with state.of_thread(k):
                results[k] = modules[k](*arguments[k], **named[k])
        # Any exception, KeyboardInterrupt included, is raised again in the caller's thread.
        except BaseException as error:
            errors[k] = error

    # A new thread starts with empty context variables: run it in a copy of the caller's.
    threads = [threading.Thread(target=copy_context().run, args=(call, k), name=f"replica {k}") for k in range(num)]
    with state:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # After all threads have ended; the first replica's error wins, on every run.
    for k, error in enumerate(errors):
        if error is not None:
            raise _named(error, f"replica {k} on {places[k]}")
    return results


def _place(value: Any) -> Device:
    return next((x.device for x in _tensors(value) if isinstance(x, Tensor)), current_device())


class _InheritedState:
    """The thread-local state that replica threads inherit from the caller, and the state that the caller takes back."""

    def __init__(self, places: Sequence[Device]) -> None:
        self._places = places
        self._recorder = current_recorder()
        self._communicator = current() if is_running() else None
        self._grad_mode = grad_mode.enabled, grad_mode.recomputing, grad_mode.read
        self._drawn, self._part = random_state.snapshot(), random_state.part
        self._drawn_after = self._drawn
        # Threads draw node numbers from interleaved ranges, so backward visits the nodes in one order at any timing.
        first = next(grad_mode.numbers)
        self._numbers = [count(first + 1 + k, len(places)) for k in range(len(places))]
        self._stack = ExitStack()

    @contextmanager
    def of_thread(self, k: int) -> Iterator[None]:
        """Give the calling thread, number k, this state inside the block."""
        grad_mode.enabled, grad_mode.recomputing, grad_mode.read = self._grad_mode
        grad_mode.numbers = self._numbers[k]
        random_state.restore(self._drawn)
        random_state.given_part = self._part
        with ExitStack() as stack:
            stack.enter_context(use_recorder(self._recorder))
            if self._communicator is not None:
                stack.enter_context(use_communicator(self._communicator))
            stack.enter_context(self._places[k])
            # Not in a `finally`: after an error the caller keeps its random state.
            yield
            if k == 0:
                self._drawn_after = random_state.snapshot()

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._stack.enter_context(self._recorder.threads(self._places))

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        random_state.restore(self._drawn_after)
        # The caller's next node comes after all nodes of the threads.
        grad_mode.numbers = count(max((next(numbers) for numbers in self._numbers), default=0))


def _named(error: BaseException, who: str) -> BaseException:
    """Return the same error; its message, or else a note, begins with the name of the replica."""
    if error.args and isinstance(error.args[0], str) and str(error) == error.args[0]:
        error.args = (f"{who}: {error.args[0]}", *error.args[1:])
    else:
        error.add_note(f"raised by {who}")
    return error

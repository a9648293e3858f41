"""`Optimizer`: parameter groups, state, the step and its cost on the simulated clock."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Self

from simparallel.arrays.captures import refuse, running
from simparallel.arrays.host.sums import wider
from simparallel.arrays.seam import arrays_of, for_each, kernels_of
from simparallel.autograd import Tensor, enable_grad
from simparallel.autograd.tape import mark_changed
from simparallel.autograd.tensor import common_device
from simparallel.backend import DRY_TYPES, Array, get_namespace, is_array, to_device_like, to_host
from simparallel.base.checks import check_flags, check_number
from simparallel.clock.memory import OPTIMIZER
from simparallel.clock.recorder import Recorder, observer_of
from simparallel.errors import AutogradError, DTypeError, InputError, ShapeError, StateDictError
from simparallel.machine.devices import Device
from simparallel.optim.blocks import PIECE_BYTES, converted, in_one_kernel
from simparallel.optim.schedules import Rate, as_schedule
from simparallel.rank_local import RankLocal, per_rank
from simparallel.world.rank import note_if_alone

_PACKAGE = f"{__name__.partition('.')[0]}."
Group = dict[str, Any]  # {"params": [Tensor, ...], "lr": 0.1, ...}
EXTRAS = ("initial_lr",)  # keys of a group besides its settings, written by learning-rate schedulers
State = dict[Tensor, dict[str, Any]]


class _Living(RankLocal):
    """The optimizers that this rank has made and that still exist, by their number in order of creation."""

    outlasts_runs = True
    optimizers: weakref.WeakValueDictionary[int, Optimizer] = per_rank(weakref.WeakValueDictionary)
    numbers: Iterator[int] = per_rank(count)


_living = _Living()


def optimizers_of(params: Iterable[Tensor] | None = None) -> list[Optimizer]:
    """Return the optimizers that this rank has made, or those for any of these parameters; the oldest first."""
    living = [optimizer for _, optimizer in sorted(_living.optimizers.items())]
    if params is None:
        return living
    wanted = set(map(id, params))
    return [optimizer for optimizer in living if any(id(param) in wanted for param in optimizer._params())]


def _compute(key: tuple[Any, ...], calls: list[Any]) -> None:
    """Compute updates of parameters on a GPU in one kernel.

    Args:
        key: what they share: the function of `_apply`, the dtype to compute in, whether the gradients are scaled, and
            the settings.
        calls: for each parameter its arrays and its numbers, see `for_each`.
    """
    compute, dtype, is_scaled, settings = key
    for_each(in_one_kernel, calls, update=compute, dtype=dtype, scaled=is_scaled, **dict(settings))


def settings_among(arguments: Mapping[str, Any]) -> Group:
    """Return the settings among the arguments of an optimizer's constructor, which are its `locals()`."""
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Call the closure with gradients enabled and return its result; None without one."""
    if closure is None:
        return None
    with enable_grad():
        return closure()


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """The settings of a group, and the values that depend on them only.

    Attributes:
        settings: the settings, checked.
        names: names of the arrays in the state of each parameter.
        factor: factor of the gradients, -1 to maximize.
        flops: floating-point operations for each element of a parameter.
        moved_bytes: item size of a parameter in bytes -> bytes moved in memory for each element.
    """

    settings: list[Any]
    names: tuple[str, ...]
    factor: float
    flops: int
    moved_bytes: dict[int, int]


class StageParameters(list[Any]):
    """The parameters of this rank's pipeline stages. May be empty: a stage that is only an activation has none."""


class Optimizer:
    """Base of the optimizers. A subclass defines `check`, `update` and `work`.

    State and arithmetic for float16 parameters are float32.

    Args:
        params: Tensors, or dicts `{"params": Tensors, "lr": ...}` with their own settings.
        defaults: settings of groups that do not name them. "lr" may be a number, a list or 1-D array (one rate for
            each step), or a callable: number of the step, from 0 -> rate.

    Attributes:
        param_groups: list of dicts: "params" and the settings. Change `group["lr"]` to schedule it by hand, or see
            `simparallel.optim.LRScheduler`, which adds "initial_lr", the first rate.
        schedules: for each group its rates as a callable, or None if "lr" is a plain number.
        state: parameter -> name -> array or number.
        is_updating: a step calls `update`.

    Raises:
        InputError: no parameters, except for those of a stage; one of them twice, or a setting out of range.
        DTypeError: a parameter that is not floating point.
        AutogradError: a parameter that was computed by an op.
    """

    state_names: ClassVar[tuple[str, ...]] = ()  # arrays in `state`, each of the parameter's shape
    state_options: ClassVar[tuple[str, ...]] = ()  # arrays in `state` that only some settings need
    state_counts: ClassVar[tuple[str, ...]] = ()  # integers in `state`
    state_numbers: ClassVar[Mapping[str, float]] = {}  # numbers in `state`, with their first values

    numbers: ClassVar[tuple[str, ...]] = ()  # settings that are 0 or more
    flags: ClassVar[tuple[str, ...]] = ()  # settings that are True or False
    is_updating = False

    _name: ClassVar[str] = "Optimizer"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._name = cls.__name__

    def __init__(self, params: Iterable[Tensor] | Iterable[Mapping[str, Any]], defaults: Group) -> None:
        self.defaults = defaults
        self.param_groups: list[Group] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.schedules: list[Rate | None] = []
        self._num_steps = self._num_held = 0
        self._plans: dict[int, _GroupPlan] = {}  # by id of a group
        self._pieces_scratch: dict[Any, list[Array]] = {}
        self._scratch: dict[Tensor, Array] = {}
        # During a step: function, dtype, whether scaled and settings -> updates on a GPU, which one kernel makes.
        self._queued: dict[Any, list[Any]] | None = None
        if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
            is_model = callable(getattr(params, "parameters", None))
            way_out = f"{self._name}(model.parameters(), …)" if is_model else "[params]"
            raise InputError(f"{self._name}: params must be a list of Tensors or of dicts; write {way_out}.")
        entries: list[Any] = params if isinstance(params, StageParameters) else list(params)
        if not entries and entries is not params:
            raise InputError(f"{self._name}: the list of parameters is empty; give at least one parameter.")
        for group in entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]:
            self.add_param_group(group)
        _living.optimizers[next(_living.numbers)] = self

    # --- for subclasses to define ----------------------------------------------------------------

    def check(self, group: Group) -> None:
        """Raise InputError for settings out of range: those of `numbers` and `flags`, and more in a subclass."""
        for name in self.numbers:
            check_number(self._name, name, group[name])
        check_flags(self._name, group, self.flags)

    def remembers(self, group: Group) -> tuple[str, ...]:
        """Return the names of the arrays in the state of each parameter of this group."""
        return self.state_names

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        """Change `param.data` in place. `grad`, of the same shape, and the same dtype or float32, must not change.

        On a GPU a step collects the updates of all parameters, and computes them at its end. A subclass that overrides
        this method computes each update at once.
        """
        raise TypeError(f"{self._name} has no update(param, grad, group): define it, or override step().")

    def work(self, group: Group) -> tuple[int, int]:
        """Return (flops, memory accesses) for each element of a parameter, for the simulated clock."""
        raise TypeError(f"{self._name} has no work(group): define it to return (flops, memory accesses) of an element.")

    def matrix_work(self, param: Tensor, group: Group) -> tuple[int, int]:
        """Return flops and bytes of the matrix products of one update, which get separate events on the clock."""
        return 0, 0

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the gradients for `optimizer(grads)`."""
        return self._params()

    # --- for users -------------------------------------------------------------------------------

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add parameters with their own settings; the defaults give the rest. Raise InputError, see the class."""
        if not isinstance(group, Mapping) or "params" not in group:
            raise InputError(f"{self._name}: a group is a dict with the key 'params', got {group!r}.")
        is_of_stage = isinstance(group["params"], StageParameters)
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        unknown = sorted(set(group) - {"params", *self.defaults, *EXTRAS})
        if unknown:
            known = ", ".join(self.defaults)
            raise InputError(f"{self._name}: unknown settings {', '.join(unknown)}; known: {known}.")
        if not params and not is_of_stage:
            raise InputError(f"{self._name}: group {len(self.param_groups)} has no parameters.")
        known_params = set(self._params())
        for i, param in enumerate(params):
            self._check_param(i, param, known_params)
            known_params.add(param)
        full = {**self.defaults, **group, "params": params}
        full["lr"], schedule = as_schedule(self._name, full.get("lr"), self._num_steps)
        self._check(full)
        self.param_groups.append(full)
        self.schedules.append(schedule)

    def restricted_to(self, params: Iterable[Tensor]) -> Self:
        """Return a new optimizer with the same settings for some of the parameters, without state.

        Raises:
            InputError: none of `params` belongs to this optimizer.
        """
        wanted, twin = set(params), copy(self)
        pairs = [
            ({**group, "params": [param for param in group["params"] if param in wanted]}, schedule)
            for group, schedule in zip(self.param_groups, self.schedules, strict=True)
        ]
        twin.param_groups = [group for group, _ in pairs if group["params"]]
        twin.schedules = [schedule for group, schedule in pairs if group["params"]]
        if not twin.param_groups:
            raise InputError(f"{self._name}: none of these parameters belongs to this optimizer.")
        twin.state, twin._pieces_scratch, twin._scratch, twin._num_held, twin._plans = {}, {}, {}, 0, {}
        return twin

    def follow(self, other: Optimizer) -> None:
        """Copy the position in the schedules from `other`, and its settings for parameters that both have."""
        if other is self:
            return
        self._num_steps = other._num_steps
        settings = {param: group for group in other.param_groups for param in group["params"]}
        for group in self.param_groups:
            source = next((settings[param] for param in group["params"] if param in settings), group)
            group.update({name: value for name, value in source.items() if name != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or with False to zeros in place."""
        if running.step:
            refuse("calls zero_grad", "Call it before the captured step.")
        for param in self._params():
            if set_to_none:
                param._grad = None
            elif param.grad is not None:
                param.grad.data.fill(0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient in `.grad`.

        Args:
            closure: called first, with gradients enabled; it computes the gradients, and returns the loss.

        Returns:
            The result of the closure; None without one.

        Raises:
            ShapeError, DTypeError, DeviceMismatchError, InputError: a gradient or a setting does not fit, or a
                parameter is read-only; no parameter was changed.
            DeviceOutOfMemoryError: no room for the state of the optimizer; no parameter was changed.
        """
        loss = None if closure is None else call_closure(closure)
        self._step([param._grad for param in self._params()])
        return loss

    def __call__(self, grads: Sequence[Tensor | Array | None]) -> None:
        """`step()` with these gradients, in the order of the parameters; `.grad` is not touched.

        Raises:
            As `step`.
        """
        self._step(list(grads))

    def __repr__(self) -> str:
        text = f"{self._name} ("
        for i, group in enumerate(self.param_groups):
            settings = sorted((name, value) for name, value in group.items() if name != "params")
            text += f"\nParameter Group {i}\n" + "".join(f"    {name}: {value}\n" for name, value in settings)
        return text + ")"

    # --- saving and loading ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain dicts, lists, numbers and host copies of arrays; numbers stand for parameters.

        Returns:
            `{"state": {number: {name: array or number}}, "param_groups": [{setting: ..., "params": numbers}]}`,
            and "num_steps" if a learning rate follows a schedule.
        """
        number = {param: i for i, param in enumerate(self._params())}
        groups = [{**group, "params": [number[p] for p in group["params"]]} for group in self.param_groups]
        state = {
            number[param]: {k: to_host(v).copy() if is_array(v) else v for k, v in values.items()}
            for param, values in self.state.items()
        }
        steps = {"num_steps": self._num_steps} if any(self.schedules) else {}
        return {"state": state, "param_groups": groups, **steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load settings and state; on an error, change nothing. Settings that were not saved keep their values.

        Raises:
            StateDictError: not the state dict of an optimizer, or groups, names, shapes or dtypes differ.
            InputError: a setting out of range.
        """
        groups, state, num_steps = _checked_state_dict(self, state_dict)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            # In place: a schedule may hold the dict.
            group.update(loaded)
        self.state, self._num_steps, self._num_held = state, num_steps, 0

    # --- inside ----------------------------------------------------------------------------------

    def _check(self, group: Group) -> None:
        """Call `check`, and check the settings that all optimizers have."""
        self.check(group)
        for name in EXTRAS:
            if name in group:
                check_number(self._name, name, group[name])

    def _plan(self, group: Group) -> _GroupPlan:
        """Return the plan of a group; if its settings have changed, check them, and make a new one."""
        settings = [group[name] for name in self.defaults]
        plan = self._plans.get(id(group))
        if plan is None:
            note_if_alone(f"{self._name}.step")
        if plan is None or plan.settings != settings:
            self.check(group)
            names, (flops, accesses) = self.remembers(group), self.work(group)
            # The state of a float16 parameter is float32.
            moved_bytes = {size: accesses * size + 2 * len(names) * max(4 - size, 0) for size in (2, 4, 8, 16)}
            plan = self._plans[id(group)] = _GroupPlan(settings, names, self._factor(group), flops, moved_bytes)
        return plan

    def element_work(self, param: Tensor) -> tuple[int, int, int, int] | None:
        """Return the cost of a parameter in a step, for each of its elements; None for one of another optimizer.

        Returns:
            Flops, bytes moved in memory, bytes of the widest item, bytes of the state.
        """
        for group in self.param_groups:
            if any(param is own for own in group["params"]):
                plan, itemsize = self._plan(group), param.dtype.itemsize
                flops, moved_bytes = (count // max(param.size, 1) for count in self.matrix_work(param, group))
                state_bytes = len(plan.names) * wider(param.dtype).itemsize
                return plan.flops + flops, plan.moved_bytes[itemsize] + moved_bytes, itemsize, state_bytes
        return None

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _check_param(self, i: int, param: Any, known: set[Tensor]) -> None:
        if not isinstance(param, Tensor):
            raise InputError(f"{self._name}: params[{i}] is a {type(param).__name__}, expected a Tensor.")
        if not param.is_leaf:
            raise AutogradError(f"{self._name}: params[{i}] was computed by an op; only leaves can be trained.")
        if param.dtype.kind != "f":
            raise DTypeError(f"{self._name}: params[{i}] has dtype {param.dtype}, expected floating point.")
        if param in known:
            raise InputError(f"{self._name}: params[{i}] is listed twice; it would be updated twice per step.")

    def _step(self, grads: list[Any]) -> None:
        if running.step:
            refuse(f"calls {self._name}.step, which uses numbers on the host", "Call it after the captured step.")
        observer = observer_of(None)
        try:
            start_ns = observer.begin(self._name)
            params = self._params()
            if len(grads) != len(params):
                raise InputError(f"{self._name}: {len(grads)} gradients were given for {len(params)} parameters.")
            # All checks before the first update: a step happens whole or not at all.
            plans = [self._plan(group) for group in self.param_groups]
            arrays = [self._checked_grad(i, p, g) for i, (p, g) in enumerate(zip(params, grads, strict=True))]
            rates = [schedule and schedule(self._num_steps) for schedule in self.schedules]
            for rate in rates:
                if rate is not None:
                    check_number(self._name, f"lr of step {self._num_steps}", rate)
            if observer.memory.limit_bytes is not None:
                self._make_room(arrays)
            for group, rate in zip(self.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
            self._num_steps += 1
            remaining = iter(zip(params, arrays, strict=True))
            # Device -> flops, bytes, widest item, tensors.
            work: dict[Device | None, list[int]] = {}
            # Code of a user after `super().update(…)` would see the old values.
            is_own = str(getattr(self.update, "__module__", "")).startswith(_PACKAGE)
            self._queued = {} if is_own else None
            self.is_updating = True
            try:
                for group, plan in zip(self.param_groups, plans, strict=True):
                    for _ in group["params"]:
                        param, grad = next(remaining)
                        if grad is None:
                            continue
                        self.update(param, grad, group)
                        total = work.setdefault(param._device, [0, 0, 0, 0])
                        total[0] += plan.flops * grad.size
                        total[1] += plan.moved_bytes[param._data.itemsize] * grad.size
                        total[2] = max(total[2], grad.itemsize)
                        total[3] += 1
            finally:
                # After an error, too: the states of these parameters have changed already.
                if self._queued:
                    self._compute_queued()
                self._queued = None
                self.is_updating = False
            mark_changed(param for param, grad in zip(params, arrays, strict=True) if grad is not None)
            observer.end_step(f"{self._name}.step", start_ns, work)
            if isinstance(observer, Recorder):
                # State and scratch arrays come in the first steps, and stay.
                num_kept = len(self._scratch) + sum(map(len, (*self.state.values(), *self._pieces_scratch.values())))
                if num_kept != self._num_held:
                    self._hold()
                    self._num_held = num_kept
        except BaseException:
            observer.abandon()
            raise

    def _make_room(self, grads: list[Array | None]) -> None:
        """Raise DeviceOutOfMemoryError if a device has no room for the state that this step will allocate."""
        needed: dict[Device | None, int] = {}
        remaining = iter(grads)
        for group in self.param_groups:
            names = self.remembers(group)
            for param in group["params"]:
                missing = [name for name in names if name not in self.state.get(param, ())]
                if next(remaining) is not None and missing:
                    size_bytes = len(missing) * param.data.size * wider(param.dtype).itemsize
                    needed[param._device] = needed.get(param._device, 0) + size_bytes
        for device, size_bytes in needed.items():
            observer_of(device).memory.make_room(size_bytes, f"{self._name}'s state")

    def _hold(self) -> None:
        """Count state and scratch arrays on their devices; beyond the limit, too, because they are in use already."""
        held = [(p._device, array) for p, values in self.state.items() for array in values.values() if is_array(array)]
        held += [(p._device, array) for p, array in self._scratch.items()]
        held += [(None, array) for scratch in self._pieces_scratch.values() for array in scratch]
        for device, array in held:
            observer_of(device).memory.hold(array, OPTIMIZER, is_limited=False)

    def _checked_grad(self, i: int, param: Tensor, grad: Any) -> Array | None:
        if grad is None:
            return None
        array, data = grad, param._data
        if isinstance(grad, Tensor):
            array = grad._data
            if grad._device is not param._device:
                common_device(f"{self._name}, parameter {i} and its gradient", (param, grad))
        is_same_kind = type(array) is type(data) or (
            is_array(array) and type(arrays_of(array)) is type(arrays_of(data))
        )
        if not is_same_kind:
            raise InputError(
                f"{self._name}: the gradient of parameter {i} is a {type(array).__name__}, "
                f"expected {type(data).__name__} like the parameter."
            )
        if array.shape != data.shape:
            layout = getattr(grad, "layout", None)
            hint = (
                " It is this rank's addend of an unfinished sum: run a backward outside of no_sync() to reduce it."
                if layout and layout.partial
                else ""
            )
            raise ShapeError(
                f"{self._name}: the gradient of parameter {i} has shape {array.shape}, expected {data.shape}.{hint}"
            )
        if array.dtype != data.dtype and array.dtype != wider(data.dtype):
            raise DTypeError(
                f"{self._name}: the gradient of parameter {i} has dtype {array.dtype}, expected {param.dtype}; "
                f"use grad.astype({str(param.dtype)!r})."
            )
        if not getattr(data.flags, "writeable", True):  # CuPy's have no such flag
            raise InputError(
                f"{self._name}: parameter {i} of shape {data.shape} is read-only (a broadcast or frozen array); "
                "create it from a copy."
            )
        return array

    def _remembered(self, param: Tensor, group: Group) -> dict[str, Any]:
        """Return the state of a parameter; new arrays are zeros."""
        state = self.state.get(param)
        if state is None:
            state = self.state[param] = {**dict.fromkeys(self.state_counts, 0), **self.state_numbers}
        for name in self._plans[id(group)].names:
            if name not in state:
                xp = get_namespace(param.data)
                state[name] = xp.zeros_like(param.data, dtype=wider(param.dtype), order="C")
        return state

    def _factor(self, group: Group) -> float:
        """Return the factor of the gradients."""
        return -1.0 if group.get("maximize") else 1.0

    def _apply(
        self,
        compute: Callable[..., None],
        param: Tensor,
        grad: Array,
        state: Sequence[Array | None],
        numbers: Sequence[float],
        num_scratch: int,
        factor: float = 1.0,
        **settings: Any,
    ) -> None:
        """Call `compute(xp, p, g, *state, *numbers, *scratch, **settings)`, which changes p and the state in place.

        In host memory it runs on pieces of the arrays, which stay in the cache; on a GPU in one kernel for all
        parameters at the end of the step, see `for_each`, without `scratch`. A float16 parameter is updated in float32,
        the dtype of its state (1e-8, Adam's eps, is 0 in float16).

        Args:
            compute: a module-level function of elements.
            param: the parameter.
            grad: its gradient, which does not change.
            state: arrays in the dtype to compute in; None for absent ones.
            numbers: numbers that may change from step to step; on a GPU some may be 0-d arrays.
            num_scratch: number of work arrays, for `out`.
            factor: factor of the gradient.
            settings: see `for_each`.
        """
        p = param._data
        xp, dtype = get_namespace(p), p.dtype if p.dtype.itemsize >= 4 else wider(p.dtype)
        # Rates of a schedule may be NumPy's numbers, which would change the dtype of the arithmetic.
        if kernels_of[xp].joins_updates:
            key, call = (compute, dtype, factor != 1, tuple(settings.items())), ([p, grad, *state], [*numbers, factor])
            if self._queued is None:
                _compute(key, [call])
            else:
                self._queued.setdefault(key, []).append(call)
            return
        numbers = [*map(float, numbers)]
        # In loops, because each comprehension would be a call.
        arrays, num_copies, is_flat = [p, grad, *state], 2 if factor != 1 or dtype != p.dtype else 0, True
        for array in arrays:
            is_flat &= array is None or array.flags.c_contiguous
        num_arrays, num_scratch, size = len(arrays), num_scratch + num_copies, p.size
        length = min(PIECE_BYTES // dtype.itemsize, max(size, 1)) if is_flat else max(size, 1)
        if is_flat:
            arrays = [None if array is None else array.reshape(-1) for array in arrays]
            scratch = self._pieces_scratch.get((dtype, num_scratch))
            if scratch is None or len(scratch[0]) < length:
                scratch = [xp.empty(length, dtype) for _ in range(num_scratch)]
                self._pieces_scratch[dtype, num_scratch] = scratch
        else:
            scratch = [xp.empty_like(p, dtype=dtype) for _ in range(num_scratch)]
        starts = range(0, size, length)
        # Pieces of an array without data are alike.
        for start in starts[:1] if type(p) in DRY_TYPES else starts:
            part = [*arrays, *scratch]
            if is_flat:
                stop = min(start + length, size)
                for i, array in enumerate(part):
                    if array is not None:
                        part[i] = array[start:stop] if i < num_arrays else array[: stop - start]
            for pieces in converted(part, factor) if num_copies else (part,):
                compute(xp, *pieces[:num_arrays], *numbers, *pieces[num_arrays:], **settings)

    def _compute_queued(self) -> None:
        """Compute the queued updates of parameters on a GPU."""
        queued, self._queued = self._queued or {}, {}
        for key, calls in queued.items():
            _compute(key, calls)

    def _temporary(self, param: Tensor) -> Array | None:
        """Return a work array of the parameter's shape, the same one in every step; float32 for float16.

        None on a GPU, where a kernel needs no memory for intermediate results.
        """
        if arrays_of(param._data).joins_updates:
            return None
        if param not in self._scratch:
            self._scratch[param] = get_namespace(param.data).empty_like(param.data, dtype=wider(param.dtype))
        return self._scratch[param]


# --- checks of a saved state before it is loaded ----------------------------------------------------------


def _checked_state_dict(optimizer: Optimizer, state_dict: Any) -> tuple[list[Group], State, int]:
    """Return the groups and the state that an optimizer would have after loading, and its number of steps.

    Raises:
        StateDictError, InputError: see `Optimizer.load_state_dict`.
    """
    saved_groups, saved_state = _saved_parts(optimizer, state_dict)
    params = optimizer._params()
    groups = _checked_groups(optimizer, saved_groups)
    numbers = [number for group in saved_groups for number in group["params"]]
    # Parameters are saved by number: they match by position, group by group.
    param_of = dict(zip(numbers, params, strict=True))
    state: State = {}
    for number, values in saved_state.items():
        if int(number) not in param_of:
            raise StateDictError(f"{optimizer._name}: the state of parameter {number} belongs to no saved group.")
        param = param_of[int(number)]
        state[param] = _checked_state(optimizer, number, param, values)
    return groups, state, int(state_dict.get("num_steps", 0))


def _saved_parts(optimizer: Optimizer, state_dict: Any) -> tuple[Sequence[Mapping[str, Any]], Mapping[Any, Any]]:
    """Return the groups and the state of a saved optimizer."""
    if _is_saved(state_dict):
        return state_dict["param_groups"], state_dict["state"]
    if not isinstance(state_dict, Mapping):
        found = f"a {type(state_dict).__name__}"
    else:
        found = f"the keys {', '.join(map(repr, state_dict)) or 'of an empty dict'}"
    # Users often pass a whole checkpoint: name the entry that is an optimizer's state.
    inner = [key for key, value in state_dict.items() if _is_saved(value)] if found[0] == "t" else []
    advice = f"; its entry {inner[0]!r} is one, give that" if inner else ""
    raise StateDictError(
        f"{optimizer._name}: load_state_dict needs the dict that state_dict() returned, with 'state' and "
        f"'param_groups'; got {found}{advice}."
    )


def _is_saved(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= set(value):
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups)
    )


def _checked_groups(optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> list[Group]:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise StateDictError(
            f"{optimizer._name}: groups of {saved_sizes} parameters were saved, but this optimizer has {sizes}."
        )
    groups = [
        {**group, **saved, "params": group["params"]}
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True)
    ]
    for group in groups:
        unknown = sorted(set(group) - {"params", *optimizer.defaults, *EXTRAS})
        if unknown:
            raise StateDictError(
                f"{optimizer._name} has no settings {', '.join(unknown)}; the state belongs to another optimizer."
            )
        optimizer._check(group)
    return groups


def _checked_state(optimizer: Optimizer, number: Any, param: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy one parameter's saved state to its array type and device."""
    required = {*optimizer.state_names, *optimizer.state_counts, *optimizer.state_numbers}
    if not isinstance(values, Mapping) or not required <= set(values) <= required | {*optimizer.state_options}:
        have = ", ".join(sorted(values)) if isinstance(values, Mapping) else f"a {type(values).__name__}"
        raise StateDictError(
            f"{optimizer._name}: parameter {number} was saved with {have}; expected {', '.join(sorted(required))}. The "
            "state belongs to another optimizer."
        )
    loaded: dict[str, Any] = {name: int(values[name]) for name in optimizer.state_counts}
    loaded |= {name: float(values[name]) for name in optimizer.state_numbers}
    dtype = wider(param.dtype)
    for name in (*optimizer.state_names, *optimizer.state_options):
        if name not in values:
            continue
        array = to_host(values[name]).copy()
        # PyTorch saves the state of float16 parameters in float16.
        if array.shape != param.data.shape or array.dtype not in (dtype, param.dtype):
            raise StateDictError(
                f"{optimizer._name}: {name} of parameter {number} has shape {array.shape} and dtype "
                f"{array.dtype}, expected {param.data.shape} and {dtype}."
            )
        loaded[name] = to_device_like(array.astype(dtype, copy=False), param.data)
    return loaded

"""`assert_equivalent`: compare a program on many ranks with the same program on one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import is_array, to_host
from simparallel.base.checks import check_choice
from simparallel.errors import InputError, NotEquivalentError, RunFailedError
from simparallel.nn import Module
from simparallel.optim import Optimizer
from simparallel.parallel.operator.auto import MODES
from simparallel.testing.compare import RESULT, Record, Slices, Tolerance, case_text, first_difference, first_layer
from simparallel.testing.ranks import Ranks
from simparallel.testing.training import LAYERS, LOSS, OPTIONAL, OUTPUT, TrainingRun, arrays_of, is_shape, momentum


def assert_equivalent(
    program: Module | Callable[..., Any],
    inputs: Any = (),
    *,
    strategy: Any = None,
    parallel: Callable[..., Module] | None = None,
    slices: Slices | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = momentum,
    steps: int = 2,
    world_size: int | Sequence[int] = 4,
    transport: str | Ranks = "inline",
    sizes: Mapping[str, Any] | None = None,
    per_rank: Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    max_examples: int = 50,
    timeout_s: float = 20.0,
) -> None:
    """Check that a parallel program computes the same result as one device.

    With `strategy` or `parallel`, `program` is a model. It is trained for some steps on one device and on ranks. After
    each step the output, the loss, the gradients of parameters and inputs, the parameters, the state of the optimizer
    and the buffers are compared, and at the end the output in evaluation.

    With neither of them, `program` is a whole program for ranks, such as a training function. It runs on one rank and
    on `world_size` ranks, with `inputs` as its arguments. Its result (numbers, arrays, Tensors, objects with a
    `state_dict`, in dicts, lists and tuples) must be the same on every rank, and on one rank.

    Args:
        program: a Module; a function that returns one; or the program for ranks.
        inputs: a tuple or list of the arguments, or a single one. For a model, a tuple of integers stands for a
            float32 array of this shape. With `loss_fn` the last one is the labels. Also Hypothesis strategies
            for arguments or shapes, or a function of `sizes` that returns arguments or shapes.
        strategy: the way to make the model parallel:
            "ddp": `DistributedDataParallel`; each rank has an equal part of the batch, and the loss is a mean.
            A dict: name of an op's attribute, a layer, or a call -> the argument of `shard`, as under `AutoParallel`.
            A `Plan`, or "auto", which searches for one.
            "pipeline", or `functools.partial(sp.parallel.Pipeline, schedule=..., ...)`, which gets model and loss.
            A function that is called with the model on each rank and returns the parallel one.
        parallel: called on each rank, returns your own parallel model, which gets the weights of one device by name.
            A tensor smaller than on one device holds a slice of one dim, in the order of the ranks.
        slices: (name, whole, rank, world_size) -> the part of a parameter on this rank, where it is no such slice.
        loss_fn: (output, labels) -> loss; by default the mean of (output + 1)².
        optimizer: takes parameters, returns an optimizer; by default SGD with momentum.
        steps: number of training steps.
        world_size: number of ranks, or several numbers. Where cases are drawn, a number n means 1 to n.
        transport: "inline", "shm", or warm ranks: the fixture `world` or a `Ranks`.
        sizes: name -> Hypothesis strategy or list of values. The functions `program`, `parallel` and `inputs` get
            the values of those that are among their arguments.
        per_rank: names of results that may differ between ranks, such as "losses" or "history[0]".
        rtol, atol: a difference may be `atol` + `rtol` times the largest number of the array. By default 1e-4 and 1e-6
            for float32 and Python floats, 1e-9 and 1e-12 for float64, 1e-2 and 1e-3 for float16, 0 for integers.
        seed: of weights and masks.
        max_examples: how many cases are drawn; needs Hypothesis.
        timeout_s: seconds that a rank waits for another one.

    Raises:
        NotEquivalentError: an AssertionError with the first difference: step, phase, name, rank, index, both numbers,
            and the smallest failing case if cases are drawn.
        RunFailedError: the parallel program fails by itself, for example because its ranks call different collectives.
        InputError: arguments that do not fit each other.

    Cost: a training run on one device and one on ranks for each case; some milliseconds for a small model on threads.

    Example:
        >>> net = sp.nn.Sequential(sp.nn.Linear(4, 8), sp.nn.ReLU(), sp.nn.Linear(8, 2))
        >>> sp.testing.assert_equivalent(net, (8, 4), strategy="ddp")
        >>> sp.testing.assert_equivalent(net, (8, 4), strategy="pipeline", world_size=2)
        >>> sp.testing.assert_equivalent(lambda: sp.all_reduce(np.ones(3), "mean"))
    """
    __tracebackhide__ = True
    is_training = strategy is not None or parallel is not None
    if strategy is not None and parallel is not None:
        raise InputError("assert_equivalent: give strategy= or parallel=, not both.")
    if not callable(program):
        raise InputError(f"assert_equivalent: program is {program!r}, expected a Module or a function.")
    names = ("ddp", "pipeline", *MODES)
    if isinstance(strategy, str):
        check_choice("assert_equivalent", "strategy", strategy, names)
    if isinstance(program, Module) and not is_training:
        raise InputError("assert_equivalent: a model needs strategy= or parallel=.")
    check = partial(
        _check_training if is_training else _check_program,
        program, tolerance=Tolerance(rtol, atol), slices=slices, per_rank=tuple(per_rank),
        settings={"loss_fn": loss_fn, "optimizer": optimizer, "steps": steps, "seed": seed, "strategy": strategy},
        parallel=parallel,
    )  # fmt: skip
    pool: AbstractContextManager[Any] = nullcontext(transport)
    if isinstance(transport, str):
        pool = Ranks(transport, timeout_s=timeout_s)
    with pool as ranks:
        if sizes or _is_drawn(inputs):
            found = _smallest(partial(check, ranks=ranks), inputs, dict(sizes or {}), world_size, max_examples)
            if found is not None:
                # Without the frames of the search.
                raise found.with_traceback(None) from None
            return
        for count in [world_size] if isinstance(world_size, int) else world_size:
            check(inputs, {}, count, {}, ranks=ranks)


# --- one case -------------------------------------------------------------------------------------------


def _check_training(
    program: Any, inputs: Any, sizes: Mapping[str, Any], world_size: int, case: Mapping[str, Any], *, ranks: Any,
    parallel: Any, tolerance: Tolerance, slices: Slices | None, per_rank: tuple[str, ...], settings: dict[str, Any],
) -> None:  # fmt: skip
    """Compare a training run on ranks with one on one device."""
    values = arrays_of(_with_sizes(inputs, sizes) if callable(inputs) else inputs)
    make = partial(deepcopy, program) if isinstance(program, Module) else partial(_with_sizes, program, sizes)
    strategy = settings["strategy"]
    training = TrainingRun(make, values, **{**settings, "strategy": None})
    if strategy == "ddp" and (len(values[0]) % world_size or len(values[0]) == 0):
        if case:
            return  # the drawn batch has no equal parts
        raise InputError(
            f"assert_equivalent: a batch of {len(values[0])} samples is not divisible by {world_size} ranks, and the "
            "mean of means of unequal parts is not the mean of the batch."
        )
    one = _run_alone(training)
    training = replace(
        training.after(one), strategy=strategy, slices=slices,
        parallel=None if parallel is None else partial(_with_sizes, parallel, sizes),
    )  # fmt: skip
    try:
        records = list(ranks.run(world_size, training))
    except RunFailedError as error:
        if isinstance(error.__cause__, NotEquivalentError):
            raise _with_case(error.__cause__, world_size, case) from None
        raise
    layers = [record.pop(LAYERS) for record in (one, *records)]
    found = first_difference(one, records, tolerance, slices, OPTIONAL)
    if found is not None:
        if found.key[:2] in ((0, OUTPUT), (0, LOSS)) and (layer := first_layer(layers[0], layers[1:], tolerance)):
            found = found._replace(details=f"{found.details} The first layer whose output differs is {layer!r}.")
        raise found.error(world_size, case)


def _check_program(
    program: Any, inputs: Any, sizes: Mapping[str, Any], world_size: int, case: Mapping[str, Any], *, ranks: Any,
    tolerance: Tolerance, per_rank: tuple[str, ...], **unused: Any,
) -> None:  # fmt: skip
    """Compare the results of a program on ranks with its result on one rank."""
    args = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    call = partial(_flat_result, program, tuple(args), dict(sizes), per_rank)
    one = _run_alone(call)
    found = first_difference(one, list(ranks.run(world_size, call)), tolerance)
    if found is not None:
        raise found.error(world_size, case)


def _run_alone(call: Callable[[], Any]) -> Any:
    with Ranks("inline") as ranks:
        return ranks.run(1, call)[0]


def _flat_result(program: Any, args: tuple[Any, ...], sizes: Mapping[str, Any], per_rank: tuple[str, ...]) -> Record:
    found: Record = {}
    _flatten(_with_sizes(program, sizes, *args), "", found)
    return {key: value for key, value in found.items() if not _is_below(key[2], per_rank)}


def _is_below(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in names)


def _flatten(value: Any, path: str, found: Record) -> None:
    """Add the leaves of a result to `found`, under their paths. Collective: yes, if a Tensor is cut."""
    if isinstance(value, Tensor):
        value = to_host(value.detach().full_tensor().data)
    elif is_array(value):
        value = to_host(value)
    elif hasattr(value, "state_dict") and not isinstance(value, type):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for name, item in value.items():
            _flatten(item, f"{path}.{name}" if path else str(name), found)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _flatten(item, f"{path}[{i}]", found)
    else:
        found[None, RESULT, path] = np.array(value) if isinstance(value, np.ndarray) else value


def _with_sizes(fn: Callable[..., Any], sizes: Mapping[str, Any], *args: Any) -> Any:
    """Call `fn` with those sizes that are among its arguments."""
    if not sizes:
        return fn(*args)
    known = inspect.signature(fn).parameters
    return fn(*args, **{name: value for name, value in sizes.items() if name in known})


# --- drawn cases ----------------------------------------------------------------------------------------


def _is_drawn(inputs: Any) -> bool:
    items = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    # The class is not imported: Hypothesis is needed only where it is used.
    return any(_is_strategy(item) for item in items)


def _is_strategy(value: Any) -> bool:
    return any(kind.__name__ == "SearchStrategy" for kind in type(value).__mro__)


def _smallest(
    check: Callable[..., None], inputs: Any, sizes: dict[str, Any], world_size: int | Sequence[int], max_examples: int
) -> Exception | None:
    """Return the error of the smallest failing case; None if none fails."""
    from hypothesis import HealthCheck, find, settings, strategies as st
    from hypothesis.errors import NoSuchExample

    counts = range(1, world_size + 1) if isinstance(world_size, int) else sorted(world_size)
    drawn = {name: x if _is_strategy(x) else st.sampled_from(list(x)) for name, x in sizes.items()}
    if _is_strategy(inputs) or not _is_drawn(inputs):
        given = inputs if _is_strategy(inputs) else st.just(inputs)
    else:
        given = st.tuples(*(x if _is_strategy(x) else st.just(x) for x in inputs))
    cases = st.tuples(st.sampled_from(counts), st.fixed_dictionaries(drawn), given)

    def error_of(case: Any) -> Exception | None:
        count, chosen, values = case
        shown = {**chosen, "inputs": _shapes_text(values)} if _is_drawn(inputs) else dict(chosen)
        try:
            check(values, chosen, count, shown)
        except NotEquivalentError as error:
            return error
        except RunFailedError as error:
            error.add_note(f"Smallest failing case: {case_text(count, shown)}.")
            return error
        return None

    chosen = settings(
        max_examples=max_examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        case = find(cases, lambda case: error_of(case) is not None, settings=chosen)
    except NoSuchExample:
        return None
    return error_of(case)


def _shapes_text(values: Any) -> str:
    items = (values,) if is_shape(values) or not isinstance(values, (tuple, list)) else values
    return ", ".join(str(x.shape) if hasattr(x, "shape") else str(x) for x in items)


def _with_case(error: NotEquivalentError, world_size: int, case: Mapping[str, Any]) -> NotEquivalentError:
    """Return the error of a rank with the drawn case in its text and facts."""
    text = error.args[0]
    if case:
        text = text.replace(f"At world_size {world_size}", f"Smallest failing case: {case_text(world_size, case)}", 1)
    return NotEquivalentError(text, **{**error.facts, "case": dict(case)})

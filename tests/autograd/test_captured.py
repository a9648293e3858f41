"""`captured`: launches of a graph equal calls of the step itself, on a stand-in for a GPU and on a GPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_backends import ArrayBackend
from hypothesis import given, settings, strategies as st
from op_records import op_calls
from refusals import refused
from stand_in.strict import host_waits, launches, xp

import simparallel as sp
from simparallel import nn
from simparallel.arrays.cuda.capture import Capture
from simparallel.arrays.cuda.device import Gpu, use_gpu
from simparallel.autograd import Op, Tensor
from simparallel.autograd.tensor import scale_loss
from simparallel.backend import get_namespace, random_state, to_host
from simparallel.clock.recorder import current_recorder
from simparallel.errors import CaptureError, LabelError, NonFiniteLossError

STEPS = 7


def in_a_run(program: Callable[..., Any], *args: Any, array: str = "numpy") -> Any:
    return sp.launch(program, args, world_size=1, transport="inline", array=array, record="full")[0]


def on_a_gpu(program: Callable[..., Any], *args: Any) -> Any:
    return in_a_run(program, *args, array="cupy")


def cross_entropy(logits: Any, y: Any) -> Any:
    return sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), y)


def images(size: int, channels: int = 1, pixels: int = 28) -> Callable[[np.random.Generator], Any]:
    shape = size, channels, pixels, pixels
    return lambda rng: (rng.standard_normal(shape, np.float32), rng.integers(0, 10, size))


def tokens(rng: np.random.Generator) -> Any:
    text = rng.integers(0, 16, (2, 7))
    return text[:, :-1], text[:, 1:].reshape(-1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    block = sp.models.resnet.BasicBlock(4, 8, 2)
    return nn.Sequential(stem, block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class Recomputed(nn.Module):
    """Layers whose forward runs a second time in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU())
        self.last = nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        return self.last(nn.checkpoint(self.second, self.first(x.reshape(len(x), 64))))


def gpt() -> nn.Module:
    return sp.models.gpt(16, 6, num_layers=2, num_heads=2, width=8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[np.random.Generator], Any]]] = {
    "mlp": (mlp, images(6, 1, 8)),
    "recomputed": (Recomputed, images(6, 1, 8)),
    "lenet": (sp.models.lenet5, images(3)),
    "resnet": (resnet, images(2, 3, 8)),
    "gpt": (gpt, tokens),
}


def facts_of(model: nn.Module, losses: list[Any]) -> dict[str, Any]:
    """Return the state that a captured step must leave behind like the step itself."""
    recorder = current_recorder()
    assert recorder is not None
    events = [(e.name, e.kind, e.stream, e.step, e.sim_start_ps, e.sim_end_ps, e.layer) for e in recorder.events]
    gradients = [None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]
    values = [loss.numpy().copy() for loss in losses]
    return {
        "losses": values, "state": model.state_dict(), "gradients": gradients, "events": events,
        "random": random_state.state_dict(),
    }  # fmt: skip


def train(name: str, is_captured: bool, zero: str = "none", parts: int = 1) -> dict[str, Any]:
    """Train on changing batches; each update sums the gradients of `parts` of them."""
    sp.manual_seed(3)
    make, batch = MODELS[name]
    model, rng, losses = make(), np.random.default_rng(0), []
    optimizer = sp.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Any, y: Any) -> Any:
        with sp.record_function("step"):
            loss = cross_entropy(model(sp.Tensor(x)), sp.Tensor(y))
            loss.backward()
        return loss

    run = sp.captured(step) if is_captured else step
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=zero == "none")
        losses += [run(*batch(rng)) for _ in range(parts)]
        optimizer.step()
    if is_captured:
        # With the default, the first of several parts makes gradients, and the others add to them.
        expected = min(parts, 2) if zero == "none" else 1
        assert run.num_graphs == (0 if current_gpu_is_none() else expected)
    return facts_of(model, losses)


def current_gpu_is_none() -> bool:
    return sp.Tensor([0.0]).device.type != "cuda"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("zero", "parts"),
    [("none", 1), *(pytest.param(*p, marks=pytest.mark.matrices) for p in (("zeros", 1), ("none", 3)))],
)
def test_training_equals_the_step_itself(name: str, zero: str, parts: int) -> None:
    """Losses, weights, running statistics, gradients, events with simulated times and random counters are equal."""
    itself, captured = (on_a_gpu(train, name, is_captured, zero, parts) for is_captured in (False, True))
    ArrayBackend("strict").assert_all_equal(captured, itself)


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_numpys(name: str) -> None:
    itself, in_host_memory = (in_a_run(train, name, is_captured) for is_captured in (False, True))
    ArrayBackend("strict").assert_all_equal(in_host_memory, itself)
    # NumPy's attention and convolutions cut their products for the cache, so their sums have another order.
    arrays = ArrayBackend("strict") if name == "mlp" else ArrayBackend("strict", 0.1, is_exact=False)
    arrays.assert_all_equal(on_a_gpu(train, name, True), itself)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_training_on_a_gpu(name: str) -> None:
    """Products inside a capture are not CuPy's own, so bits may differ."""
    itself, captured = (on_a_gpu(train, name, is_captured) for is_captured in (False, True))
    ArrayBackend("cupy", 10.0).assert_all_equal(captured, itself)


def launched_input(arrays: ArrayBackend, *, from_graph: bool) -> Any:
    """Return an input of a graph as its operations read it; with `from_graph` it lies in memory of the graph."""
    with use_gpu(Gpu(0)) as gpu, pytest.MonkeyPatch.context() as patch:
        capture, x = Capture(gpu), arrays.xp.ones(4)
        if from_graph:
            patch.setattr(gpu.memory, "allocate", capture._pool.malloc)
        with capture.recording():
            freed = x + 1
            zeros = freed * 0
            del freed
            y = capture.add_input(lambda: np.full(4, 5.0)) + zeros
        capture.launch()
        return to_host(y).tolist()


def test_graph_does_not_overwrite_its_inputs(arrays: ArrayBackend) -> None:
    """The host fills them before a launch, so no operation of the graph may write to their memory."""
    assert launched_input(arrays, from_graph=False) == [5.0] * 4
    # Red control: memory that was freed in the capture is used again.
    assert launched_input(arrays, from_graph=True) == [2.0] * 4


def several_kinds(is_captured: bool) -> dict[str, Any]:
    """Use batches of two sizes, in training and in evaluation, on and off the tape, with two seeds."""
    model, rng, losses, passes = mlp(), np.random.default_rng(0), [], 0
    size = {"scale": 1.0}

    def step(x: Any, y: Any, weight: float) -> Any:
        loss = cross_entropy(model(sp.Tensor(x)), sp.Tensor(y)) * weight * scale
        if loss.requires_grad:
            loss.backward(check_finite=False)
        return {"loss": loss, "size": len(x), "x": (sp.Tensor(x) + 1,)}

    scale = size["scale"]
    run = sp.captured(step, max_graphs=30) if is_captured else step
    for seed in (0, 1):
        sp.manual_seed(seed)
        for batch in (4, 6):
            for training in (True, False):
                for weight in (1, 1.0, 2.0):
                    for _ in range(4):
                        model.train(training)
                        model.zero_grad()
                        x, y = images(batch, 1, 8)(rng)
                        passes += 1
                        scale = float(passes % 2)
                        if training:
                            found = run(x, y, weight)
                        else:
                            with sp.no_grad():
                                found = run(x, y, weight=weight)
                        assert found["size"] == batch
                        losses += [found["loss"], found["x"][0]]
    return facts_of(model, losses)


def test_each_kind_of_call_has_its_graph() -> None:
    itself, captured = (on_a_gpu(several_kinds, is_captured) for is_captured in (False, True))
    ArrayBackend("strict").assert_all_equal(captured, itself)


def kept_results(is_captured: bool) -> list[Any]:
    x = sp.Tensor(np.ones(3, np.float32))

    def step(factor: Any) -> Any:
        return x * sp.Tensor(factor)

    run = sp.captured(step, warmups=0) if is_captured else step
    results = [run(np.full(3, i, np.float32)) for i in range(4)]
    return [y.tolist() for y in results]


def test_results_of_earlier_calls_stay() -> None:
    assert on_a_gpu(kept_results, True) == on_a_gpu(kept_results, False)


def counted() -> Any:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    x, y = (sp.Tensor(array).data for array in images(6, 1, 8)(np.random.default_rng(0)))
    found = []

    @sp.captured
    def step(x: Any, y: Any) -> Any:
        loss = cross_entropy(model(sp.Tensor(x)), sp.Tensor(y))
        loss.backward()
        return loss

    for _ in range(5):
        model.zero_grad()
        with launches() as names, host_waits() as waits:
            step(x, y)
        found.append((names, waits))
    return found


def test_launch_starts_one_graph() -> None:
    """A launch also copies two arguments, the mask and the result, and waits once, as the step itself."""
    found = on_a_gpu(counted)
    assert [len(names) > 30 for names, _ in found] == [True, True, False, False, False]
    names, waits = found[-1]
    assert names == ["setitem", "setitem", "asarray", "setitem", "graph", "copy"]
    assert all(each == ["get"] for _, each in found)


def traced() -> None:
    model = sp.nn.Linear(4, 3)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.01)

    def forward_backward(x: Any) -> Any:
        loss = (model(sp.Tensor(x)) ** 2).sum()
        loss.backward()
        return loss

    step = sp.captured(forward_backward)
    for number in range(6):
        optimizer.zero_grad()
        step(np.full((2, 4), number, np.float32))
        optimizer.step()


def test_trace_has_the_events_of_all_calls() -> None:
    """Of the capture, whose operations have no times on the GPU, and of each launch."""
    host, gpu = (
        sp.launch(traced, world_size=1, transport="inline", array=array, record="full").trace.events
        for array in ("numpy", "cupy")
    )
    assert [(e.name, e.sim_start_ps, e.sim_end_ps) for e in gpu] == [
        (e.name, e.sim_start_ps, e.sim_end_ps) for e in host
    ]


def changed_number(is_seen: bool) -> list[float]:
    """Multiply by the number of the call: an attribute, which graphs ignore, or a variable."""

    class Settings:
        factor = 0.0

    x, factor = sp.Tensor(np.ones(2, np.float32)), 0.0

    def by_variable() -> Any:
        return x * factor

    def by_attribute() -> Any:
        return x * Settings.factor

    step = by_variable if is_seen else by_attribute
    run, found = sp.captured(step, warmups=1), []
    for call in range(5):
        factor = Settings.factor = float(call)
        found.append(run().tolist()[0])
    return found


def test_numbers_of_the_host_are_those_of_capture() -> None:
    """Red control: the comparison finds a step that depends on state that a graph cannot see."""
    expected = in_a_run(changed_number, False)
    assert expected == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert on_a_gpu(changed_number, True) == expected
    assert on_a_gpu(changed_number, False) == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_number_that_a_step_names_is_seen() -> None:
    factor = 0.0

    def program() -> list[float]:
        nonlocal factor
        x = sp.Tensor(np.ones(2, np.float32))
        run, found = sp.captured(lambda: x * factor, warmups=1), []
        for call in (0, 0, 0, 1, 1, 1, 0):
            factor = float(call)
            found.append(run().tolist()[0])
        assert run.num_graphs == 2
        return found

    assert on_a_gpu(program) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_oldest_graph_is_freed() -> None:
    def program() -> int:
        run = sp.captured(lambda x: sp.Tensor(x) + 1, warmups=0, max_graphs=2)
        for size in (1, 2, 1, 3, 1):
            assert run(np.zeros(size)).tolist() == [1.0] * size
        return run.num_graphs

    assert on_a_gpu(program) == 2


def moved_parameter(is_captured: bool) -> list[Any]:
    """Move a parameter and a gradient to other memory, which a graph would not use."""
    weight, found = nn.Parameter(np.ones(2, np.float32)), []

    def step() -> Any:
        y = (weight * weight).sum()
        y.backward()
        return y

    run = sp.captured(step, warmups=1) if is_captured else step
    for call in range(8):
        if call == 4:
            weight.data = np.full(2, 3.0, np.float32)
        if call == 6:
            weight.grad = sp.Tensor(np.full(2, 7.0, np.float32)).data
        found += [run().item(), weight.grad.tolist()]
    return found


def test_memory_may_move() -> None:
    assert on_a_gpu(moved_parameter, True) == on_a_gpu(moved_parameter, False)


def outdated() -> None:
    weight = nn.Parameter(np.ones(2, np.float32))

    @sp.captured(warmups=0)
    def step() -> Any:
        y = (weight * 2).sum()
        y.backward()
        return y

    step()
    factor, x = weight.grad, nn.Parameter(np.ones(2, np.float32))
    y = (x * factor).sum()
    weight.grad = None
    step()
    with refused(sp.errors.AutogradError):
        y.backward()


def test_launch_changes_the_versions_of_gradients() -> None:
    on_a_gpu(outdated)


def test_bad_values_are_found_after_a_launch() -> None:
    def program() -> list[str]:
        model = nn.Linear(2, 3)

        @sp.captured(warmups=0)
        def step(x: Any, y: Any) -> Any:
            loss = cross_entropy(model(sp.Tensor(x)), sp.Tensor(y))
            loss.backward()
            return loss

        good, names = (np.ones((2, 2), np.float32), np.array([0, 2])), []
        for x, y in ((good[0], np.array([0, 3])), good, (good[0], np.array([0, 3])), (good[0] * np.inf, good[1]), good):
            model.zero_grad()
            try:
                names.append(type(step(x, y)).__name__)
            except (LabelError, NonFiniteLossError) as error:
                names.append(type(pickle.loads(pickle.dumps(error))).__name__)
                assert model.weight.grad is None
        return names

    assert on_a_gpu(program) == ["LabelError", "Tensor", "LabelError", "NonFiniteLossError", "Tensor"]


WRONG: dict[str, Callable[[Any], Any]] = {}


def wrong(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    WRONG[function.__name__] = function
    return function


@wrong
def reads_a_value(model: Any) -> Any:
    return model(sp.Tensor(np.ones((1, 2)))).sum().item()


@wrong
def branches(model: Any) -> Any:
    return 1 if model.weight.sum() > 0 else 2


@wrong
def updates(model: Any) -> Any:
    sp.optim.SGD(model.parameters(), lr=0.1).step()


@wrong
def clears_gradients(model: Any) -> Any:
    model.zero_grad()


@wrong
def reduces(model: Any) -> Any:
    sp.all_reduce(model.weight.data)


@wrong
def calls_hooks(model: Any) -> Any:
    handle = model.weight.register_post_accumulate_grad_hook(lambda leaf: None)
    with handle:
        model.weight.sum().backward()


@wrong
def changes_gradients(model: Any) -> Any:
    y = model.weight * 2
    y.register_hook(lambda gradient: gradient)
    y.sum().backward()


@wrong
def scales_the_loss(model: Any) -> Any:
    scale_loss(model.weight.sum(), 2.0).backward()


@wrong
def returns_the_tape(model: Any) -> Any:
    return model.weight.sum()


@pytest.mark.parametrize("array", ["numpy", "cupy"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_step_is_refused(name: str, array: str) -> None:
    """The first call raises, on the host and on the GPU."""

    def program() -> None:
        model = nn.Linear(2, 2)

        def step() -> Any:
            return WRONG[name](model)

        step.__qualname__ = name
        with refused(CaptureError, step=name):
            sp.captured(step)()

    in_a_run(program, array=array)


LATE: dict[str, Callable[[Any, Any], Any]] = {
    "copies_from_the_host": lambda model, x: sp.Tensor(np.ones(3)) + 1,
    "copies_by_the_library": lambda model, x: get_namespace(model.weight.data).asarray(np.ones(3)),
    "selects_by_a_mask": lambda model, x: x.data[x.data > 0],
    "waits_for_the_stream": lambda model, x: xp.cuda.get_current_stream().synchronize(),
    "reads_an_array": lambda model, x: to_host(x.data),
    "averages_all_batches": lambda model, x: model.norm(x).detach(),
    "writes_into_an_argument": lambda model, x: x.__iadd__(1),
    "loads_a_batch": lambda model, x: next(iter(sp.data.DataLoader(sp.data.TensorDataset(np.ones((4, 99))), 2)))[0],
    "multiplies_by_dot": lambda model, x: xp.dot(x.data, x.data.T),
    "multiplies_arrays": lambda model, x: x.data @ x.data.T,
}


@pytest.mark.parametrize("name", LATE)
def test_capture_is_refused(name: str) -> None:
    """Only the capture, after the warm-up calls, can refuse; the GPU computes as before."""

    def program() -> Any:
        model = nn.Linear(2, 2)
        model.norm = nn.BatchNorm1d(2, momentum=None)

        def step(x: Any) -> Any:
            model.weight.sum().backward()
            sp.functions.dropout(x, 0.5)
            return LATE[name](model, x)

        step.__qualname__ = name
        run, x = sp.captured(step, warmups=1), sp.Tensor(np.ones((2, 2), np.float32))
        # The first call makes a gradient, the others add to it.
        run(x), run(x)
        before, gradient = random_state.snapshot(), model.weight.grad.tolist()
        with refused(CaptureError, step=name):
            run(x)
        assert random_state.snapshot() == before
        assert model.weight.grad.tolist() == gradient
        return (model(x) * 0).tolist()

    assert on_a_gpu(program) == [[0.0, 0.0], [0.0, 0.0]]


def test_arrays_of_a_gpu_need_a_rank() -> None:
    run = sp.captured(np.negative)
    with refused(CaptureError, step="negative"):
        run(sp.Tensor(xp.asarray(np.ones(2))))


def test_arguments_are_checked() -> None:
    @sp.captured
    def negate(x: Any) -> Any:
        return -x

    with refused(CaptureError):
        negate(nn.Parameter(np.ones(2)))

    def program() -> None:
        with refused(CaptureError):
            negate({1, 2})

    on_a_gpu(program)


@pytest.mark.parametrize("settings", [{"warmups": -1}, {"max_graphs": 0}, {"step": 3}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with refused(sp.errors.InputError):
        sp.captured(**{"step": print, **settings})


def test_step_may_call_another_one() -> None:
    def program() -> Any:
        add = sp.captured(lambda x: x + 1, warmups=0)
        twice = sp.captured(lambda x: add(add(x)), warmups=0)
        found = [twice(sp.Tensor(np.full(2, i, np.float32))).tolist() for i in range(3)]
        return found, add.num_graphs, twice.num_graphs

    assert on_a_gpu(program) == ([[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], 0, 1)


def test_stream_of_the_program_is_left() -> None:
    """Operations on another stream would not be part of the graph."""

    def program() -> list[float]:
        run, found = sp.captured(lambda x: x + 1, warmups=0), []
        other = xp.cuda.Stream(non_blocking=True)
        for i in range(3):
            x = sp.Tensor(np.full(1, i, np.float32))
            with other:
                y = run(x)
            found += y.tolist()
        return found

    assert on_a_gpu(program) == [1.0, 2.0, 3.0]


def test_number_of_kinds_is_bounded() -> None:
    def program() -> int:
        run = sp.captured(lambda x, factor: x * factor, warmups=1)
        x = sp.Tensor(np.ones(2, np.float32))
        for i in range(600):
            assert run(x, i).tolist() == [i, i]
        return len(run._mine.kinds)

    assert on_a_gpu(program) <= 256


def test_captured_step_can_be_sent_to_ranks() -> None:
    run = pickle.loads(pickle.dumps(sp.captured(cross_entropy, warmups=5)))
    assert (run.step, run.warmups, run.__doc__) == (cross_entropy, 5, cross_entropy.__doc__)


def data_parallel(is_captured: bool) -> Any:
    """Train on two ranks; a captured step leaves the reduction of gradients to a call after it."""
    sp.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = sp.parallel.DistributedGradReducer(model.parameters(), mean=True)
    rng, losses = np.random.default_rng(sp.get_rank()), []

    def step(x: Any, y: Any) -> Any:
        loss = cross_entropy(model(sp.Tensor(x)), sp.Tensor(y))
        loss.backward()
        return loss

    run = sp.captured(step) if is_captured else step
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(run(rng.standard_normal((5, 8), np.float32), rng.integers(0, 4, 5)).item())
        optimizer(reducer([parameter.grad for parameter in model.parameters()]))
    return losses, model.state_dict(), run.num_graphs if is_captured else 1


def test_ranks_reduce_after_the_step() -> None:
    """Ranks that are threads share the captured function of a module, and each has its own graphs."""
    itself, captured = (
        list(sp.launch(data_parallel, (flag,), world_size=2, transport="inline", array="cupy"))
        for flag in (False, True)
    )
    ArrayBackend("strict").assert_all_equal(captured, itself)


# --- every op ------------------------------------------------------------------------------------------------

# Ops with work on the host that depends on values (here Dropout's call number is on the GPU), or with copies from it.
UNCAPTURED = {"BinaryCrossEntropy", "CrossEntropy", "Dropout", "Index", "NLL", "Replicate", "ToDevice"}


def forward_and_backward(op: Op, *arrays: Any) -> list[Any]:
    leaves = [Tensor(array, requires_grad=array.dtype.kind == "f") for array in arrays]
    y = op(*leaves)
    if y.requires_grad:
        y.backward(get_namespace(y.data).ones(y.shape, dtype=y.dtype), check_finite=False)
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.matrices
@pytest.mark.parametrize("name", sorted(Op.registry))
@settings(max_examples=5)
@given(data=st.data())
def test_every_op_captured_equals_itself(name: str, data: Any) -> None:
    """Compare for the arguments of the capture, and for others of the same shapes."""
    dtype = data.draw(st.sampled_from((np.float32, np.float64, np.float16)))
    op, inputs = data.draw(op_calls(name, dtype))
    others = [array[::-1].copy() if array.ndim and array.dtype.kind == "f" else array for array in inputs]
    with use_gpu(Gpu(0)):
        run = sp.captured(lambda *arrays: forward_and_backward(op, *arrays), warmups=1)
        for arrays in (inputs, inputs, others):
            on_device = [xp.asarray(array) for array in arrays]
            itself = [to_host(x.data) for x in forward_and_backward(op, *on_device)]
            try:
                captured = [to_host(x.data) for x in run(*on_device)]
            except CaptureError:
                assert name in UNCAPTURED
                return
            ArrayBackend("strict").assert_all_equal(captured, itself)

"""DataParallel and its four steps match one device, for any number of devices."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.backend import random_state
from simparallel.clock.event import COMPUTE, COPY_IN, COPY_OUT
from simparallel.clock.notes import forget_notes
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import DeviceMismatchError, DeviceOutOfMemoryError, InputError, LabelError, ShapeError
from simparallel.machine.cluster import PRESETS, DeviceSpec, LinkSpec, describe
from simparallel.machine.devices import current_device
from simparallel.parallel import DataParallel, gather, parallel_apply, replicate, scatter

Pair = namedtuple("Pair", "left right")
batch_sizes, device_counts = st.integers(1, 13), st.integers(1, 8)


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float64)


def with_integers(model):
    for seed, parameter in enumerate(model.parameters()):
        parameter.data[...] = integers(*parameter.shape, seed=seed)
    return model


def recorder_of(num_devices=8, **settings):
    return Recorder(0, describe(1, devices_per_rank=num_devices), **settings)


# --- scatter and gather -----------------------------------------------------------------------------


def chunks(x, n, dim=0):
    """Return the parts of torch.chunk."""
    size = max(1, -(-x.shape[dim] // n))
    return np.split(x, range(size, x.shape[dim], size), dim)


@given(batch_sizes, device_counts, st.sampled_from((0, 1, -1)))
def test_scatter_matches_chunk_and_gather_inverts(size, num_devices, dim):
    shape = (3, size) if dim else (size, 3)
    x = sp.Tensor(integers(*shape), requires_grad=True)
    labels = np.arange(size).reshape((1, size) if dim else (size, 1))
    given_inputs = (x, {"labels": labels, "name": "n", "pair": Pair([x, 2.5], None)}, [], {})
    parts = scatter(given_inputs, range(num_devices), dim)

    expected = chunks(x.data, num_devices, dim)
    assert len(parts) == len(expected)
    for k, (part, wanted) in enumerate(zip(parts, expected, strict=True)):
        first, second, *rest = part
        assert rest == [[], {}]
        assert (second["name"], second["pair"].left[1], second["pair"].right) == ("n", 2.5, None)
        for y in (first, second["pair"].left[0]):
            assert np.array_equal(y.data, wanted)
            assert y.device == f"sim:{k}"
        assert second["labels"].device == f"sim:{k}"
    target = num_devices - 1
    joined = gather([(p[0], Pair([p[1]["labels"]], None)) for p in parts], target, dim)
    assert np.array_equal(joined[0].data, x.data)
    assert np.array_equal(joined[1].left[0].data, labels)
    assert joined[0].device == joined[1].left[0].device == f"sim:{target}"
    (joined[0] * 2).sum().backward()
    assert np.array_equal(x.grad.data, np.full(shape, 2.0))
    assert x.grad.device == "sim:0"


def test_bad_scatter_and_gather_are_refused():
    x = sp.Tensor(np.ones((8, 2)))
    with refused(ShapeError):
        scatter((x, np.ones((1, 2))), [0, 1, 2, 3])
    with refused(ShapeError):
        scatter(sp.Tensor(1.0), [0, 1])
    with refused(InputError):
        gather([], 0)
    for outputs in [[1.0, 2.0], [x, None], [None, x], [[x], [x, x]], [{"a": x}, {"b": x}]]:
        with refused(InputError):
            gather(outputs, 0)


def test_numbers_become_a_vector_with_a_warning():
    with pytest.warns(UserWarning, match="become a vector"):
        y = gather([sp.Tensor(1.0), sp.Tensor(2.0, device=1)], 0)
    assert y.numpy().tolist() == [1, 2]


# --- replicate ----------------------------------------------------------------------------------


class Odd(sp.nn.Module):
    """Tied, frozen and unused parameters, two dtypes, buffers, an attribute."""

    def __init__(self):
        super().__init__()
        self.a, self.b = sp.nn.Linear(3, 3, dtype=np.float64), sp.nn.Linear(3, 3, dtype=np.float64)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.narrow = sp.nn.Parameter(np.ones(3, np.float32))
        self.unused = sp.nn.Parameter(np.ones(2))
        self.absent = sp.nn.Linear(3, 3, bias=False)
        self.register_buffer("seen", np.zeros(2))
        self.note = ["shared"]

    def forward(self, x, scale=1.0):
        self.seen.data += 1
        return self.b(self.a(x).relu() * scale) + self.narrow


@given(st.integers(1, 4), st.booleans())
def test_replicas_are_copies_whose_gradients_add_up(num_devices, detach):
    net = with_integers(Odd())
    replicas = replicate(net, range(num_devices), detach)
    assert [type(replica) for replica in replicas] == [Odd] * num_devices
    outputs = []
    for k, replica in enumerate(replicas):
        assert replica.note is net.note
        assert replica.b.weight is replica.a.weight
        for (name, p), (other, q) in zip(replica.named_parameters(), net.named_parameters(), strict=True):
            assert (name, p.device) == (other, f"sim:{k}")
            assert np.array_equal(p.data, q.data)
            assert np.shares_memory(p.data, q.data) == (k == 0)
            assert p.requires_grad == (q.requires_grad and not detach)
        outputs.append(replica(sp.Tensor(integers(2, 3, seed=k), device=k)).to("sim:0"))
    assert net.seen.numpy().tolist() == [1, 1]  # of the first replica alone
    loss = sum(outputs[1:], outputs[0]).sum()
    if detach:
        assert not loss.requires_grad
        return
    for again in (1, 2):
        loss.backward(retain_graph=True)
        whole = with_integers(Odd())
        for k in range(num_devices):
            whole(sp.Tensor(integers(2, 3, seed=k))).sum().backward()
        for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None or not p.grad.data.any(), name
            else:
                assert p.grad.device == "sim:0"
                assert np.array_equal(p.grad.data, again * q.grad.data), name


def test_failed_backward_can_be_repeated():
    """Also while the error, and with it the pending gradient, is still alive."""
    with use_recorder(recorder_of(memory_bytes=10_000)) as recorder:
        net = sp.nn.Linear(1, 500, bias=False)
        loss = replicate(net, [0, 1])[1](sp.Tensor(np.ones((1, 1), np.float32), device=1)).sum()
        recorder.memory.limit_bytes = recorder.memory.total + 100
        with refused(DeviceOutOfMemoryError) as caught:
            loss.backward(retain_graph=True)
        recorder.memory.limit_bytes = None
        loss.backward()
    assert caught.value is not None
    assert np.array_equal(net.weight.grad.data, np.ones((500, 1)))


def test_synchronised_norms_are_refused():
    net = sp.nn.SyncBatchNorm.convert_sync_batchnorm(sp.nn.Sequential(sp.nn.BatchNorm1d(3)))
    with refused(InputError):
        DataParallel(net, [0, 1])(np.ones((4, 3), np.float32))


def test_replicate_refuses_module_on_other_device():
    net = sp.nn.Sequential(sp.nn.Linear(2, 2), sp.nn.BatchNorm1d(2))
    net[1].to("sim:1")
    with refused(DeviceMismatchError):
        replicate(net, [0, 1])
    with refused(InputError):
        replicate(net, [])


# --- parallel_apply -----------------------------------------------------------------------------


def test_threads_inherit_the_callers_context():
    seen = {}

    def look(k, *, word):
        seen[k] = (
            threading.current_thread().name,
            str(current_device()),
            word,
            sp.get_rank(),
            random_state.next_call("s"),
        )
        with np.errstate(divide="raise"):
            pass
        return (
            sp.Tensor([1.0]).device,
            (sp.Tensor([1.0], requires_grad=True) * 2).requires_grad,
            np.geterr()["divide"],
        )

    sp.manual_seed(7)
    random_state.next_call("s")
    with sp.no_grad(), np.errstate(divide="ignore"):
        found = parallel_apply([look] * 3, [(0,), 1, [2]], [{"word": w} for w in "abc"], devices=[2, 0, "sim:1"])
    assert found == [(f"sim:{d}", False, "ignore") for d in (2, 0, 1)]
    assert seen == {k: (f"replica {k}", f"sim:{d}", w, 0, 1) for k, d, w in ((0, 2, "a"), (1, 0, "b"), (2, 1, "c"))}
    assert random_state.next_call("s") == 2
    assert str(current_device()) == "sim:0"


def test_default_devices_follow_the_inputs():
    def where(value):
        return str(current_device())

    assert parallel_apply([where] * 3, [sp.Tensor([1.0], device=2), ({"x": [sp.Tensor([1.0], device=1)]},), 5]) == [
        "sim:2",
        "sim:1",
        "sim:0",
    ]
    with refused(InputError):
        parallel_apply([where] * 2, [1], devices=[0])


class Rude(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("no"), "replica 1 on sim:3: no"),
        (ShapeError("short", rank=3), "replica 1 on sim:3: short"),
        (KeyError("key"), "'key'"),
        (Rude(3, "x"), "(3, 'x')"),
        (SystemExit(4), "4"),
    ],
)
def test_errors_name_the_replica_and_keep_their_type(error, shown):
    def work(value):
        if value:
            raise error
        return value

    with pytest.raises(type(error)) as caught:
        parallel_apply([work] * 3, [0, 1, 0], devices=[0, 3, 2])
    assert caught.value is error
    assert str(error) == shown
    assert shown.startswith("replica") or error.__notes__ == ["raised by replica 1 on sim:3"]
    if isinstance(error, ShapeError):
        assert error.rank == 3


# --- DataParallel -------------------------------------------------------------------------------


def small():
    return sp.nn.Sequential(sp.nn.Linear(3, 5, dtype=np.float64), sp.nn.ReLU(), sp.nn.Linear(5, 2, dtype=np.float64))


def outcome(model, net, size, **kwargs):
    """Return output and gradients, all integers."""
    x = sp.Tensor(integers(size, 3, seed=9), requires_grad=True)
    y = model(x, **kwargs)
    (y * integers(*y.shape, seed=8)).sum().backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert {str(g.device) for g in (*grads, x.grad)} == {"sim:0"}
    return [y.data, x.grad.data, *(g.data for g in grads)]


@given(batch_sizes, device_counts, st.sampled_from((small, Odd)), st.booleans(), st.data())
def test_equals_one_device_exactly(size, num_devices, make, recorded, data):
    order = [0, *data.draw(st.permutations(range(1, num_devices)))]
    output = data.draw(st.sampled_from(order))
    kwargs = {"scale": 2.0} if make is Odd else {}
    whole, net = with_integers(make()), with_integers(make())
    expected = outcome(whole, whole, size, **kwargs)
    with use_recorder(recorder_of() if recorded else None):
        model = DataParallel(net, device_ids=order, output_device=f"sim:{output}")
        found = outcome(lambda *x, **k: model(*x, **k).to("sim:0"), net, size, **kwargs)
        assert model(sp.Tensor(integers(size, 3))).device == f"sim:{output}"

    used = [a for a in expected if a.any()]
    for a, b in zip(used, [b for b in found if b.any()], strict=True):
        assert np.array_equal(a, b)


def test_empty_batch_goes_to_the_main_device():
    model = DataParallel(sp.nn.Linear(3, 2), device_ids=[0, 1])
    ((x,),) = scatter((np.zeros((0, 3)),), ["sim:1", "sim:0"])
    assert (x.shape, x.device) == ((0, 3), "sim:1")
    y = model(np.zeros((0, 3), np.float32))
    y.sum().backward()

    assert y.shape == (0, 2)
    assert not model.module.weight.grad.numpy().any()


@given(batch_sizes, device_counts, st.integers(0, 3))
def test_masks_match_the_whole_batch(size, num_devices, calls):
    def run(wrap):
        sp.manual_seed(5)
        layer = wrap(sp.nn.Sequential(sp.nn.Dropout(0.4), sp.nn.Flatten(0, 1), sp.nn.Dropout(0.3)))
        x = sp.Tensor(np.ones((size, 3, 2), np.float32))
        return [layer(x).data for _ in range(calls + 1)]

    for a, b in zip(run(lambda m: m), run(lambda m: DataParallel(m, range(num_devices))), strict=True):
        assert np.array_equal(a, b)


def test_masks_of_ranks_and_in_a_checkpoint():
    """Two ranks with two devices each; the recomputation drops the same elements."""

    class Part(sp.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.drop = sp.nn.Parameter(np.ones(3)), sp.nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x * self.scale)

    class Checkpointed(sp.nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return sp.nn.checkpoint(self.part, x)

    def train(wrap, recompute):
        rank, size = sp.get_rank(), sp.get_world_size()
        part = Part()
        net = wrap(Checkpointed(part) if recompute else part)
        x = sp.Tensor(integers(12, 3)[rank * 12 // size : (rank + 1) * 12 // size], requires_grad=True)
        y = net(x)
        y.sum().backward()
        return y.data, x.grad.data

    alone = sp.launch(train, (lambda m: m, False), world_size=1, transport="inline")[0]
    for recompute in (False, True):
        ranks = sp.launch(
            train,
            (lambda m: sp.parallel.DistributedDataParallel(DataParallel(m, [0, 1, 2])), recompute),
            world_size=2,
            transport="inline",
        )
        for whole, parts in zip(alone, zip(*ranks, strict=True), strict=True):
            assert np.array_equal(whole, np.concatenate(parts))


def test_training_with_all_features():
    """Optimizer, tracing off and on, state dict, deep copy, no_grad, mixed precision."""

    def train(wrap):
        sp.manual_seed(2)
        net = small()
        model = wrap(net)
        optimizer = sp.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            loss = (model(sp.Tensor(integers(7, 3, seed=step))) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return net, model

    (whole, _), (net, model) = train(lambda m: m), train(lambda m: DataParallel(m, [0, 1, 2]))
    for p, q in zip(whole.parameters(), net.parameters(), strict=True):
        np.testing.assert_allclose(p.data, q.data, rtol=1e-12)
    assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    twin = copy.deepcopy(model)
    x = sp.Tensor(integers(4, 3))
    with sp.no_grad():
        y = twin(x)
    assert not y.requires_grad
    assert np.array_equal(y.data, model(x).data)
    assert "device_ids=[sim:0, sim:1, sim:2], output_device=sim:0, dim=0" in repr(model)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("inside", [True, False])
def test_mixed_precision_inside_and_outside(level, inside):
    def run(devices):
        sp.manual_seed(0)
        net = sp.nn.Sequential(sp.nn.Linear(4, 8), sp.nn.LayerNorm(8), sp.nn.ReLU(), sp.nn.Linear(8, 2))
        mixed = sp.nn.auto_mixed_precision(net, level) if inside else net
        model = DataParallel(mixed, devices)
        model = model if inside else sp.nn.auto_mixed_precision(model, level)
        y = model(sp.Tensor(np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)))
        y.sum().backward()
        return [y.data, *(p.grad.data for p in net.parameters())]

    for a, b in zip(run([0]), run([0, 1, 2]), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=5e-3, atol=5e-3)


def test_batch_norm_uses_statistics_of_each_part():
    x = np.random.default_rng(0).standard_normal((7, 3))
    net, first, second = (sp.nn.BatchNorm1d(3, dtype=np.float64) for _ in range(3))
    model = DataParallel(net, [0, 1])
    for _ in range(2):
        y = model(sp.Tensor(x))
        expected = np.concatenate([first(x[:4]).data, second(x[4:]).data])
    assert np.array_equal(y.data, expected)
    for (name, mine), of_first in zip(net.named_buffers(), first.buffers(), strict=True):
        assert np.array_equal(mine.data, of_first.data), name
    y.sum().backward()
    assert net.weight.grad is not None
    net.eval()
    np.testing.assert_array_equal(model(sp.Tensor(x)).data, net(sp.Tensor(x)).data)


def test_inputs_of_the_replicas():
    calls = []

    class Note(sp.nn.Module):
        def forward(self, *inputs, **kwargs):
            calls.append((str(current_device()), len(inputs), sorted(kwargs)))
            return {"y": [inputs[0] if inputs else next(iter(kwargs.values()), None)]}

    model = DataParallel(Note(), [0, 1, 2, 3])
    assert model() == {"y": [None]}
    assert calls == [("sim:0", 0, [])]
    assert model(x=np.arange(5))["y"][0].numpy().tolist() == [0, 1, 2, 3, 4]
    assert sorted(calls[1:]) == [(f"sim:{k}", 0, ["x"]) for k in range(3)]
    calls.clear()
    model(sp.Tensor(np.ones((1, 2))), None, flag=3)
    assert calls == [("sim:0", 2, ["flag"])]


def test_devices_come_from_the_run_by_default():
    assert DataParallel(small()).device_ids == ["sim:0"]
    with use_recorder(recorder_of(3)):
        assert DataParallel(small()).device_ids == ["sim:0", "sim:1", "sim:2"]
    with use_recorder(Recorder(0, describe(1))):
        sp.Tensor([1.0]).to("sim:1")
        assert DataParallel(small()).device_ids == ["sim:0", "sim:1"]
    net = small()
    DataParallel(net, ["sim:2"])
    assert {str(p.device) for p in net.parameters()} == {"sim:2"}


def test_bad_devices_are_refused():
    for ids in ([], [0, "sim:0"], ["cuda:0"], ["gpu"]):
        with refused(InputError):
            DataParallel(small(), ids)
    with use_recorder(recorder_of(2)), refused(InputError):
        DataParallel(small(), [0, 1, 2])
    with refused(DeviceMismatchError):
        DataParallel(small(), [1, 0])(sp.Tensor(integers(4, 3)))


def test_failed_replica_leaves_the_model_usable():
    model = DataParallel(sp.nn.Sequential(sp.nn.Linear(3, 2), sp.nn.ReLU()), [0, 1])

    def loss(labels):
        losses = DataParallel(sp.nn.CrossEntropyLoss("none"), [0, 1])
        return losses(model(np.ones((4, 3), np.float32)), np.array(labels)).mean()

    # Another test may have left a thread of a library, such as tqdm's monitor.
    before = threading.active_count()
    with refused(LabelError):
        loss([0, 1, 0, 5])
    loss([0, 1, 0, 1]).backward()
    assert model.module[0].weight.grad is not None
    assert threading.active_count() == before
    with use_recorder(Recorder(0, describe(1), memory_bytes=20_000)), refused(DeviceOutOfMemoryError):
        DataParallel(sp.nn.Sequential(sp.nn.Linear(3, 200), sp.nn.ReLU()), [0, 1])(np.ones((200, 3), np.float32))


# --- on the trace ---------------------------------------------------------------------------------


def mlp(width=64):
    sp.manual_seed(0)
    return sp.nn.Sequential(sp.nn.Linear(width, width), sp.nn.ReLU(), sp.nn.Linear(width, 10))


def steps(wrap, batch_size, num_steps=2, width=64):
    model = wrap(mlp(width))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        x = np.ones((batch_size, width), np.float32)
        loss = sp.functions.cross_entropy(model(x), np.zeros(batch_size, np.int64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def traced_steps(num_devices, per_device=16, **settings):
    """Trace (DataParallel on one rank, DistributedDataParallel on as many ranks), one step each."""
    settings = {"transport": "inline", "echo": False, **settings}
    one = sp.launch(steps, (DataParallel, per_device * num_devices), devices_per_rank=num_devices, **settings)
    many = sp.launch(steps, (sp.parallel.DistributedDataParallel, per_device), world_size=num_devices, **settings)
    return one.trace.select(steps=1), many.trace.select(steps=1)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_slower_than_distributed_as_traced(num_devices):
    """Slower than DistributedDataParallel, and the trace shows why: copies one after the other through one port."""
    # Each operation ends before the next one is launched, so that starts are launches.
    preset = PRESETS["a100"]
    quick = replace(preset.device, software="plain", matrix_units=None)
    one, many = traced_steps(num_devices, device=quick, link=preset.link)
    assert one.makespan_s > 1.5 * many.makespan_s

    model_bytes = 4 * sum(p.size for p in mlp().parameters())
    copies = [e for e in one.events if e.kind == "copy"]
    for name, device, stream in (("Replicate to", 0, COPY_OUT), ("Replicate.backward from", 0, COPY_IN)):
        found = [e for e in copies if e.name.startswith(name)]
        assert [(e.device, e.stream, e.size_bytes) for e in found] == [(device, stream, model_bytes)] * (
            num_devices - 1
        )
        for before, after in zip(found, found[1:], strict=False):
            assert after.sim_start_ps >= before.sim_end_ps  # one port: one after the other
    for name in ("Scatter to", "Gather from", "Gather.backward to"):
        assert len([e for e in copies if e.name.startswith(name)]) == num_devices - 1
    sent = sum(row["sent_bytes"] for row in one.summary()[:1])
    assert sent > many.summary()[0]["sent_bytes"]
    # One interpreter: no two launches of this rank overlap.
    launch_ps = round(one.cluster.device.launch_s * 10**12)
    backward = sorted(e.sim_start_ps for e in one.events if e.stream == COMPUTE and e.kind == "backward")
    assert min(b - a for a, b in zip(backward, backward[1:], strict=False)) >= launch_ps
    launched = [e.sim_start_ps for e in one.events if e.kind == "forward" and e.device == 1]
    assert min(b - a for a, b in zip(launched, launched[1:], strict=False)) >= num_devices * launch_ps
    gathered = min(e.sim_start_ps for e in copies if e.name.startswith("Gather from"))
    assert gathered >= launched[0] + (len(launched) - 1) * num_devices * launch_ps
    twins = [e for e in many.events if e.kind == "backward" and e.name == "ReLU.backward"]
    assert len({e.sim_start_ps for e in twins}) == 1  # of each rank, at the same time


def test_as_fast_without_links_and_launches():
    """Red control for the reasons above: without link and launch costs, only the additions are left."""
    free = DeviceSpec("free", {4: 1e9, 8: 1e9}, 1e15, 10**9, launch_s=0.0)
    one, many = traced_steps(4, device=free, link=LinkSpec(0.0, 1e18))
    assert one.makespan_s < 1.2 * many.makespan_s


def test_time_is_reproducible_and_memory_per_device():
    """Simulated events are the same in every run, and each device's memory counts its replica."""

    def run():
        results = sp.launch(steps, (DataParallel, 30), devices_per_rank=4, transport="inline", echo=False)
        events = [e._replace(wall_start_ns=0, wall_end_ns=0) for e in results.trace.events]
        return events, results.memory[0]["devices"]

    (first, memory), (second, _) = run(), run()
    assert first == second
    model_bytes = 4 * sum(p.size for p in mlp().parameters())
    for k in (1, 2, 3):
        assert memory[f"sim:{k}"]["at_peak"]["parameters"] == 0
        assert memory[f"sim:{k}"]["peak_bytes"] > model_bytes  # its replica, freed after the step
        assert memory[f"sim:{k}"]["live"]["activations"] == 0


def test_one_device_is_noted(capsys):
    """A rank with one device has one replica: said once, unless the program names that device itself."""
    forget_notes()

    def program():
        sp.parallel.DataParallel(sp.nn.Linear(2, 2), device_ids=[0])
        for _ in range(2):
            model = sp.parallel.DataParallel(sp.nn.Linear(2, 2))
        return len(model.device_ids)

    assert list(sp.launch(program, world_size=1, transport="inline", devices_per_rank=2)) == [2]
    assert "replica" not in capsys.readouterr().err
    assert list(sp.launch(program, world_size=1, transport="inline")) == [1]
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 1
    assert "one replica" in notes[0]
    assert "--devices-per-rank" in notes[0]

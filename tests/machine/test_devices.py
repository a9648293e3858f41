"""Several simulated devices in one process: names, copies, their clocks, memories and lanes."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.clock.event import COMPUTE, COPY_IN, COPY_OUT
from simparallel.clock.recorder import Recorder, WorkPrice, use_recorder
from simparallel.errors import ClusterError, DeviceMismatchError, DeviceOutOfMemoryError, InputError, LayoutError
from simparallel.machine.cluster import DeviceSpec, LinkSpec, describe
from simparallel.machine.devices import FIRST, Device, current_device
from simparallel.trace import Trace

F = sp.functions
SLOW = DeviceSpec("slow", {4: 1e9, 8: 1e9}, 1e12, 10**9, launch_s=0.0)  # computing takes time, launches take none
LINK = LinkSpec(1e-6, 1e9)


def recorder_of(num_devices=None, device=SLOW, **settings):
    return Recorder(0, describe(1, device, LINK, devices_per_rank=num_devices), **settings)


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float64)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [("cpu", "sim:0"), ("sim", "sim:0"), ("sim:0", "sim:0"), ("sim:12", "sim:12"), (3, "sim:3"), ("cuda", "cuda:0")],
)
def test_names(name, meant):
    device = sp.device(name)
    assert (str(device), device.type, device.index) == (meant, meant[: meant.index(":")], int(meant.split(":")[1]))
    assert device is sp.device(meant) is sp.device(device.type, device.index) is sp.device(device)
    assert device == meant
    assert pickle.loads(pickle.dumps(device)) is copy.deepcopy(device) is copy.copy(device) is device


@pytest.mark.parametrize("name", ["", "gpu:0", "sim:-1", "sim:", "sim:x", "cpu:1", "sim:1:2", -1, None, True, 1.5])
def test_bad_names_are_refused(name):
    with refused(InputError):
        sp.device(name)


def test_context_sets_the_default_device():
    with sp.device("sim:2") as device:
        assert current_device() is device
        layer = sp.nn.BatchNorm1d(3)
        with sp.device("cpu"):
            inner = sp.Tensor([1.0])
        y = F.add(np.ones(3), 1.0)
    assert current_device() is FIRST
    assert inner.device == "sim:0"
    assert {str(x.device) for x in (*layer.parameters(), *layer.buffers(), y)} == {"sim:2"}
    with refused(InputError), sp.device("cuda:0"):
        pass


# --- tensors ------------------------------------------------------------------------------------


@given(st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_copies_pass_gradients_back(source, target, recorded):
    with use_recorder(recorder_of() if recorded else None):
        x = sp.Tensor(integers(2, 3), requires_grad=True, device=source)
        y = x.to(target) if source % 2 else x.to(device=f"sim:{target}")
        if source == target:
            assert y is x
        else:
            assert not np.shares_memory(x.data, y.data)
        assert (x.device, y.device) == (f"sim:{source}", f"sim:{target}")
        (y * integers(2, 3, seed=1)).sum().backward()
        assert x.grad.device == x.device
        assert np.array_equal(x.grad.numpy(), integers(2, 3, seed=1))


def test_to_takes_devices_dtypes_and_tensors():
    x = sp.Tensor(np.ones(3, np.float32), device="sim:1")
    other = sp.Tensor(np.ones(1, np.float16), device=2)
    found = [
        x.to(*args, **kwargs)
        for args, kwargs in [
            (("float64",), {}),
            ((np.float64,), {}),
            (("sim:3", np.float64), {}),
            ((np.float64, 3), {}),
            ((other,), {}),
            ((), {"dtype": "int64"}),
            ((), {"device": "cpu", "dtype": "float16"}),
        ]
    ]
    assert [(str(y.device), str(y.dtype)) for y in found] == [
        ("sim:1", "float64"),
        ("sim:1", "float64"),
        ("sim:3", "float64"),
        ("sim:3", "float64"),
        ("sim:2", "float16"),
        ("sim:1", "int64"),
        ("sim:0", "float16"),
    ]
    assert x.to("float32") is x.to("sim:1") is x.to(x) is x
    assert x.astype("float64").dtype == np.float64
    for bad in [(), ("gpu:1",), ("sim:1", "sim:2"), ("float16", "float32"), (other, "sim:0"), ("sim:x",)]:
        with refused(InputError):
            x.to(*bad)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_to_takes_every_spelling_of_a_dtype(name):
    """A name, a type or a dtype; NumPy says that `np.dtype("float64") == None` is True."""
    for dtype in (name, getattr(np, name), np.dtype(name), sp.Tensor(np.ones(1, name)).dtype):
        assert sp.Tensor([1.5]).to(dtype).dtype == name
        layer = sp.nn.BatchNorm1d(2).to(dtype)
        assert {str(x.dtype) for x in (*layer.parameters(), layer.running_mean)} == {name}


def test_results_stay_on_their_device():
    x = sp.Tensor(integers(4, 3), requires_grad=True, device="sim:1")
    made = [
        x.detach(), x.clone(), copy.deepcopy(x), pickle.loads(pickle.dumps(x.detach())), sp.Tensor(x), x[1], x[[0, 2]],
        x[x > 0], x * 2, 2 - x, x + np.ones(3), np.ones(3) * x, x > 0, F.where(x > 0, x, 0.0),
        F.concat([x, np.ones((1, 3))]),
        F.cross_entropy(x, np.zeros(4, int)), F.embedding(np.array([1, 2]), x), x.max(0), sp.nn.Dropout(0.5)(x),
        F.cross_entropy(x.reshape(2, 3, 2), np.zeros((2, 2), int)),
    ]  # fmt: skip
    assert {str(y.device) for y in made} == {"sim:1"}
    assert "device='sim:1'" in repr(x)
    assert "device" not in repr(x.to("cpu"))


def test_mixed_devices_are_refused():
    """Tensors on different devices are refused before anything is computed."""
    x, w = sp.Tensor(integers(2, 3)), sp.Tensor(integers(4, 3), requires_grad=True, device="sim:1")
    with use_recorder(recorder_of()) as recorder:
        with refused(DeviceMismatchError) as caught:
            F.linear(x, w)
        assert recorder.events == []
    assert (caught.value.op, caught.value.devices) == ("Linear", ["sim:0", "sim:1"])
    with refused(DeviceMismatchError):
        (w * 2).backward(sp.Tensor(integers(4, 3)))
    assert w.grad is None
    with refused(InputError):
        sp.Tensor(x, device="sim:1")
    with refused(InputError):
        sp.Tensor([1.0], device="cuda:0")


def test_statistics_on_other_device_are_refused():
    """Running statistics and gradients are not inputs of an op, and are checked as well."""
    x = sp.Tensor(integers(3, 2), device="sim:1")
    norm = sp.nn.BatchNorm1d(2, affine=False, dtype=np.float64)
    with refused(DeviceMismatchError):
        norm(x)
    assert norm.num_batches_tracked.item() == 0
    assert norm.to("sim:1")(x).device == "sim:1"

    w, v = (sp.nn.Parameter(np.ones(2), device="sim:1") for _ in range(2))
    here = sp.Tensor(np.ones(2))
    v.grad = sp.Tensor(np.ones(2), device="sim:1")
    for name in ("grad", "data"):
        with refused(DeviceMismatchError):
            setattr(w, name, here)
    optimizer = sp.optim.SGD([v, w], lr=0.5)
    with refused(DeviceMismatchError):
        optimizer([v.grad, here])
    assert v.data.tolist() == w.data.tolist() == [1, 1]
    optimizer([v.grad, np.ones(2)])  # a plain array counts as on the parameter's device
    assert v.data.tolist() == w.data.tolist() == [0.5, 0.5]


def test_gpu_arrays_keep_their_device(arrays):
    x = sp.Tensor(arrays.on_device(np.arange(3.0)), requires_grad=True)
    assert x.device == (x * 2).device == "cuda:0"
    host = x.to("cpu")
    assert host.device == "sim:0"
    assert isinstance(host.data, np.ndarray)
    (host.to("sim:1") * np.arange(3.0)).sum().backward()
    assert isinstance(x.grad.data, arrays.type)
    assert x.grad.numpy().tolist() == [0, 1, 2]
    with use_recorder(recorder_of()) as recorder:  # on the clock of the first device
        assert (x + arrays.on_device(np.ones(3))).device == "cuda:0"
        assert [e.device for e in recorder.events] == [0]
    back = host.detach().to("cuda:0")
    assert isinstance(back.data, arrays.type)
    assert back.to("cuda") is back


def test_gpu_that_does_not_exist():
    with refused(InputError):
        sp.Tensor(np.ones(3)).to("cuda:5")


# --- modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [None, 1])
def test_values_from_elsewhere_need_no_device(num_devices):
    x = sp.Tensor(np.ones(3), device="sim:1")
    with use_recorder(recorder_of(num_devices)) as recorder:
        assert x.tolist() == [1, 1, 1]
    assert list(recorder.devices) == [FIRST]


class Split(sp.nn.Module):
    """The first layer on one device, the second on another; or the same network whole, on one device."""

    def __init__(self, devices=("sim:0", "sim:1"), width=4, dtype=np.float64):
        super().__init__()
        self.devices = devices
        self.first = sp.nn.Linear(width, width, dtype=dtype)
        self.second = sp.nn.Linear(width, width, dtype=dtype)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data[...] = integers(*parameter.shape, seed=seed)
        self.first.to(devices[0])
        self.second.to(devices[1])

    def forward(self, x):
        x = self.first(x.to(self.devices[0])).relu()
        return self.second(x.to(self.devices[1]))


def trained(devices, optimizer, num_steps=3, **settings):
    net = Split(devices)
    step = optimizer(net.parameters(), **settings)
    for i in range(num_steps):
        loss = (net(sp.Tensor(integers(8, 4, seed=i))) ** 2).mean()
        net.zero_grad()
        loss.backward()
        sp.nn.checkpoint(net.second, sp.Tensor(integers(2, 4), device=devices[1])).sum().backward()
        step.step()
    return net, step


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [(sp.optim.SGD, {"lr": 0.01, "momentum": 0.9}), (sp.optim.AdamW, {}), (sp.optim.LAMB, {})],
)
def test_split_model_trains_as_a_whole_one(optimizer, settings):
    with use_recorder(recorder_of()) as recorder:
        split, split_step = trained(("sim:2", "sim:1"), optimizer, **settings)
    whole, whole_step = trained(("sim:0", "sim:0"), optimizer, **settings)

    for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert np.array_equal(p.data, q.data), name
        assert p.device == p.grad.device == ("sim:2" if "first" in name else "sim:1")
    for mine, other in zip(
        split_step.state_dict()["state"].values(), whole_step.state_dict()["state"].values(), strict=True
    ):
        for key in mine:
            assert np.array_equal(mine[key], other[key])
    updates = [event for event in recorder.events if event.kind == "optimizer"]
    assert sorted((event.device, event.step) for event in updates) == [(d, s) for d in (1, 2) for s in range(3)]
    for device in ("sim:1", "sim:2"):
        account = recorder.of(Device(device)).memory
        assert account.live["parameters"] == account.live["gradients"] == 8 * (16 + 4)
    assert recorder.memory.live["parameters"] == 0


def test_state_dict_and_deep_copies_of_a_split_model():
    net, other = Split(), Split(("sim:3", "sim:0"))
    for parameter in net.parameters():
        parameter.data += 1
    other.load_state_dict(net.state_dict())
    twin = copy.deepcopy(net)
    for p, q, r in zip(net.parameters(), other.parameters(), twin.parameters(), strict=True):
        assert np.array_equal(p.data, q.data)
        assert p.device == r.device
        assert not np.shares_memory(p.data, r.data)
    assert [str(p.device) for p in other.parameters()] == ["sim:3", "sim:3", "sim:0", "sim:0"]


def test_module_to_moves_all_in_place_once():
    net = sp.nn.Sequential(sp.nn.Linear(3, 3), sp.nn.BatchNorm1d(3), sp.nn.Linear(3, 3))
    net[2].weight = net[0].weight
    net(sp.Tensor(integers(4, 3).astype(np.float32))).sum().backward()
    before, dtypes = list(net.parameters()), [b.dtype for b in net.buffers()]
    values = net.state_dict()
    assert net.to("sim:1", np.float64) is net

    assert list(map(id, net.parameters())) == list(map(id, before))
    assert net[2].weight is net[0].weight
    for x in (*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())):
        assert x.device == "sim:1"
    assert {p.dtype for p in net.parameters()} == {p.grad.dtype for p in net.parameters()} == {np.dtype(np.float64)}
    assert [b.dtype for b in net.buffers()] == [np.float64 if d.kind == "f" else d for d in dtypes]
    for name, value in net.state_dict().items():
        assert np.array_equal(value, values[name])
    net(sp.Tensor(integers(4, 3), device="sim:1")).sum().backward()
    with refused(DeviceMismatchError):
        net(sp.Tensor(integers(4, 3)))
    with refused(InputError):
        net.to("int64")
    with use_recorder(recorder_of(2)), refused(InputError):
        net.to("sim:7")
    assert {str(p.device) for p in net.parameters()} == {"sim:1"}


def test_deferred_parameters_follow_to():
    """Parameters without data are drawn on the device they were moved to."""

    def make():
        sp.manual_seed(3)
        return sp.nn.Linear(4, 3)

    with sp.parallel.no_init_parameters():
        net = make()
    with use_recorder(recorder_of()) as recorder:
        net.to("sim:1", "float64")
        assert recorder.events == []
    y = net(sp.Tensor(np.ones((2, 4)), device="sim:1"))
    assert (y.device, y.dtype) == ("sim:1", np.float64)
    np.testing.assert_allclose(net.weight.data, make().weight.data, rtol=1e-6)


def test_sharded_tensors_stay_on_the_first_device():
    x = sp.parallel.distribute_tensor(integers(2, 2), sp.Layout((1,), ("a",))("a", "None"))
    assert x.device == (x * 2).device == "sim:0"
    with refused(LayoutError):
        x.to("sim:1")
    assert x.full_tensor().to("sim:1").device == "sim:1"


# --- clocks, memories, lanes ----------------------------------------------------------------------


def spans(events, **wanted):
    chosen = [e for e in events if all(getattr(e, key) == value for key, value in wanted.items())]
    return [(e.sim_start_ps, e.sim_end_ps) for e in chosen]


def pipelined(num_parts, recorder, width=64):
    with use_recorder(recorder):
        net = Split(width=width, dtype=np.float32)
        begin_ps = max(r.now_ps for r in recorder.devices.values())
        for r in recorder.devices.values():
            r.join(begin_ps)
        parts = sp.Tensor(np.ones((64, width), np.float32)).split(64 // num_parts)
        loss = sum((net(part) for part in parts[1:]), net(parts[0])).sum()
        loss.backward()
    return begin_ps, [e for e in recorder.events if e.sim_start_ps >= begin_ps]


def test_copies_are_events_on_both_devices():
    """A copy is an event on both devices, priced by the link between them."""
    recorder = recorder_of()
    pipelined(1, recorder)
    cost = recorder.cluster.copy(64 * 64 * 4)
    assert cost.time_ps == 1_000_000 + 64 * 64 * 4 * 1000
    sent = [e for e in recorder.events if e.stream == COPY_OUT and e.size_bytes == 64 * 64 * 4]
    received = [e for e in recorder.events if e.stream == COPY_IN and e.size_bytes == 64 * 64 * 4]
    assert [(e.device, e.name) for e in sent[-2:]] == [(0, "ToDevice to sim:1"), (1, "ToDevice.backward to sim:0")]
    assert [(e.device, e.name) for e in received[-2:]] == [
        (1, "ToDevice from sim:0"),
        (0, "ToDevice.backward from sim:1"),
    ]
    for a, b in zip(sent, received, strict=True):
        assert (a.sim_start_ps, a.sim_end_ps, a.seq, a.group) == (b.sim_start_ps, b.sim_end_ps, b.seq, b.group)
        assert a.sim_end_ps - a.sim_start_ps == cost.time_ps
        assert (a.sent_bytes, b.sent_bytes) == (a.size_bytes, 0)


def test_devices_wait_for_their_inputs_only():
    times = {}
    for num_parts in (1, 4):
        recorder = recorder_of()
        begin_ps, events = pipelined(num_parts, recorder)
        times[num_parts] = max(e.sim_end_ps for e in events) - begin_ps
        by_stream = {}
        for e in sorted(events, key=lambda e: e.sim_start_ps):
            assert e.sim_start_ps >= by_stream.get((e.device, e.stream), 0)  # streams are serial
            by_stream[e.device, e.stream] = e.sim_end_ps
        arrivals = spans(events, device=1, stream=COPY_IN)
        stage = spans(events, device=1, name="Linear")
        for (_, arrived), (start, _) in zip(arrivals, stage, strict=False):
            assert start >= arrived
        other = spans(events, device=0, name="Linear")
        overlap = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in other for b in stage)
        assert (overlap > 0) == (num_parts > 1)
    assert times[4] < 0.8 * times[1]  # the two devices work at the same time


def test_one_interpreter_launches_all_operations():
    """The launches of all devices follow each other, as one interpreter makes them."""
    device = DeviceSpec("launching", {4: 1e18, 8: 1e18}, 1e18, 10**9, launch_s=1e-6)
    recorder = recorder_of(device=device)
    with use_recorder(recorder):
        xs = [sp.Tensor(np.ones(1), device=k) for k in range(4)]
        for _ in range(5):
            for x in xs:
                x.exp()
    starts = sorted(e.sim_start_ps for e in recorder.events)
    assert starts == [i * 1_000_000 for i in range(20)]
    alone = recorder_of(device=device)
    with use_recorder(alone):
        for _ in range(20):
            xs[0].exp()
    assert [e.sim_start_ps for e in alone.events] == starts  # one device never waits for launches


def test_threads_share_one_interpreter():
    """Each of three threads gets every third launch; afterwards the one interpreter continues at the latest time."""
    recorder = recorder_of(device=DeviceSpec("launching", {4: 1e18, 8: 1e18}, 1e18, 10**9, launch_s=1e-6))
    devices = [Device(k) for k in range(3)]
    for device in devices:
        recorder.of(device)
    with recorder.threads(devices):
        for device, count in zip(devices, (4, 2, 0), strict=True):
            for _ in range(count):
                recorder.of(device).compute("op", "forward", 0, 0, WorkPrice(1_000_000, 1_000_000))
    recorder.of(devices[2]).compute("op", "forward", 0, 0, WorkPrice(1_000_000, 1_000_000))
    assert [start for start, _ in spans(recorder.events, device=0)] == [0, 3_000_000, 6_000_000, 9_000_000]
    assert [start for start, _ in spans(recorder.events, device=1)] == [0, 3_000_000]
    assert spans(recorder.events, device=2) == [(12_000_000, 13_000_000)]


def test_item_makes_the_interpreter_wait():
    recorder = recorder_of()
    with use_recorder(recorder):
        x = sp.Tensor(np.ones((64, 64)), device="sim:1")
        y = (x @ x).sum()
        sp.Tensor(1.0, device="sim:2").exp()
        before = recorder.of(Device("sim:2")).now_ps
        y.item()
        sp.Tensor(1.0, device="sim:2").exp()
    done = recorder.of(Device("sim:1")).now_ps
    assert before < done
    assert spans(recorder.events, device=2)[-1][0] >= done


def test_events_are_reproducible():
    runs = [[e._replace(wall_start_ns=0, wall_end_ns=0) for e in pipelined(4, recorder_of())[1]] for _ in range(2)]
    assert runs[0] == runs[1]


def test_each_device_has_its_own_memory():
    with use_recorder(recorder_of(memory_bytes=10_000)) as recorder:
        x = sp.Tensor(np.ones(1000, np.float32))
        y = x.to("sim:1")
        assert recorder.of(Device("sim:1")).memory.total == 4000
        assert recorder.memory.total == 4000
        z = y.exp()
        with refused(DeviceOutOfMemoryError):
            y.exp()
        with refused(DeviceOutOfMemoryError):
            x.to("sim:1")
        x.to("sim:2")
        del y, z
        assert recorder.of(Device("sim:1")).memory.total == 0
        assert set(recorder.memory_summary()["devices"]) == {"sim:0", "sim:1", "sim:2"}


def test_number_of_devices_can_be_limited():
    with use_recorder(recorder_of(2)):
        x = sp.Tensor([1.0])
        x.to("sim:1")
        for use in (lambda: x.to("sim:2"), lambda: sp.Tensor([1.0], device=2), lambda: sp.nn.Linear(1, 1).to("sim:2")):
            with refused(InputError):
                use()
        with sp.device("sim:2"), refused(InputError):
            F.exp(np.ones(1))
        sp.init(devices_per_rank=3)
        x.to("sim:2")
        with refused(InputError):
            sp.init(devices_per_rank=1)
    with refused(ClusterError):
        describe(1, devices_per_rank=0)


def split_ranks(dtype):
    """Train two stages on two devices, on two ranks that share each batch."""
    net = Split(width=4, dtype=dtype)
    ddp = sp.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-6)
    rank = sp.get_rank()
    ddp(sp.Tensor(integers(4, 4)[2 * rank : 2 * rank + 2])).sum().backward()
    return [np.array(p.grad.data) for p in net.parameters()]


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_split_model_under_data_parallelism(transport):
    results = sp.launch(split_ranks, (np.float64,), world_size=2, transport=transport, devices_per_rank=2, echo=False)
    net = Split()
    net(sp.Tensor(integers(4, 4))).sum().backward()
    for rank in range(2):
        for found, p in zip(results[rank], net.parameters(), strict=True):
            assert np.array_equal(found * 2, p.grad.data)  # the mean of the ranks' sums
        assert set(results.memory[rank]["devices"]) == {"sim:0", "sim:1"}
        assert results.trace.devices(rank) == [0, 1]
    made = [e for e in results.trace.events if (e.rank, e.device, e.name) == (0, 1, "Linear.backward")]
    reduced = [e for e in results.trace.events if e.rank == 0 and e.name == "all_reduce"]
    assert min(e.sim_start_ps for e in reduced) >= min(e.sim_end_ps for e in made)


CALLS_OF_TWO_DEVICES = {
    "a list": lambda x, y: sp.all_reduce([x, y])[1],
    "a list, later": lambda x, y: sp.all_reduce([x, y], async_op=True).wait()[1],
    "an array": lambda x, y: sp.all_reduce(y),
    "a result elsewhere": lambda x, y: sp.all_reduce(y, out=x.to("sim:2")),
    "a list of results": lambda x, y: sp.gather(y, out=[x.to("sim:2")])[0],
}


@pytest.mark.parametrize("call", CALLS_OF_TWO_DEVICES)
def test_collective_waits_for_devices_of_its_arrays(call):
    """The devices continue once they have the result."""

    def program():
        x = sp.Tensor(np.zeros((40, 40)))
        y = x.to("sim:1")
        for _ in range(5):
            y = y @ y
        F.exp(CALLS_OF_TWO_DEVICES[call](x, y))

    events = sp.launch(program, world_size=1, transport="inline", devices_per_rank=3).trace.events
    made = max(e.sim_end_ps for e in events if e.name == "MatMul")
    (communicated,) = [e for e in events if e.kind == "collective"]
    used = next(e for e in events if e.name == "Exp")
    assert communicated.sim_start_ps >= made > 0
    assert used.sim_start_ps >= communicated.sim_end_ps


# --- pictures ---------------------------------------------------------------------------------------


def test_lanes_arrows_and_rows(tmp_path):
    recorder = recorder_of()
    pipelined(2, recorder)
    trace = Trace(recorder.events, recorder.cluster)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace

    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert list(lanes.values()) == [f"sim:{d} {s}" for d in (0, 1) for s in (COMPUTE, COPY_IN, COPY_OUT)]
    ends = {}
    for row in rows:
        if row["ph"] in "stf":
            ends.setdefault(row["id"], []).append(lanes[row["tid"]])
    copies = [e for e in trace.events if e.stream == COPY_OUT]
    assert len(ends) == len(copies)
    assert {frozenset(pair) for pair in ends.values()} == {
        frozenset({"sim:0 copy out", "sim:1 copy in"}),
        frozenset({"sim:1 copy out", "sim:0 copy in"}),
    }

    assert [(row["rank"], row["device"]) for row in trace.summary()] == [(0, 0), (0, 1)]
    assert [line.split()[:2] for line in trace.table().splitlines()[2:6]] == [
        ["rank", "device"],
        ["[ms]", "[ms]"],
        ["0", "0"],
        ["0", "1"],
    ]
    assert trace.streams(0, 1) == [COMPUTE, COPY_IN, COPY_OUT]
    labels = [label.get_text() for label in trace.timeline().get_yticklabels()]
    assert [label.split("$   ")[-1] for label in labels] == list(lanes.values())

"""Described types: a device computes in another type than the program, whose values stay float32."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import simparallel as sp
from simparallel import functions as F, models, nn
from simparallel.clock.recorder import current_recorder
from simparallel.machine.cluster import describe
from simparallel.machine.device import DTYPES, DeviceWork
from simparallel.machine.products import MatrixProduct
from simparallel.predict.dry_run import dry_run
from simparallel.simulate.config import read_config
from simparallel.simulate.prediction import with_products
from simparallel.simulate.program import decoder
from simparallel.simulate.transformer import TrainingPlan
from simparallel.simulate.transformer_memory import ModelStates
from simparallel.simulate.transformer_time import Efficiency, step_time

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1408}
LLAMA |= {"num_attention_heads": 4, "vocab_size": 512}
NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), (6, 12)),
    "lenet": (models.lenet5, (4, 1, 28, 28)),
    "resnet": (lambda: models.resnet18(10, "cifar"), (2, 3, 32, 32)),
    "gpt": (lambda: models.gpt(32, 16, num_layers=2, num_heads=2, width=16), (2, 16)),
}


def step(name, dtype, updates=True):
    """Train a net in a type for two steps, or compute its gradients alone."""
    make, shape = NETS[name]
    net = make().to(dtype)
    account = getattr(current_recorder().memory, "described", None)
    if account is not None:
        # The casts of parameters held more than a step may.
        account.peak = account.total
    optimizer = sp.optim.SGD(net.parameters(), lr=0.1)
    x = np.zeros(shape, np.int64 if name == "gpt" else dtype)
    for _ in range(2):
        logits = net(sp.Tensor(x))
        optimizer.zero_grad()
        logits = logits.reshape(-1, logits.shape[-1])
        F.cross_entropy(logits, np.zeros(logits.shape[0], np.int64)).backward()
        if updates:
            optimizer.step()


def work(run):
    """Return name, flops, bytes and time of all events, but for the casts of new parameters."""
    return [
        (event.name, event.flops, event.size_bytes, event.sim_end_ps - event.sim_start_ps)
        for event in run.trace.events
        if event.name != "Cast"
    ]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("software", ["eager", "plain"])
def test_described_as_16_bits_is_a_float16_program(name, software):
    cluster = describe(1, "dgx-h100")
    cluster = replace(cluster, device=replace(cluster.device, software=software))
    half = dry_run(step, (name, np.float16), cluster=cluster)
    described = dry_run(step, (name, np.float32), cluster=cluster, dtype="bfloat16")
    assert work(described) == work(half)
    # Red control.
    assert work(dry_run(step, (name, np.float32), cluster=cluster)) != work(half)
    # The arithmetic of an optimizer for float16 is in float32.
    half, described = (
        dry_run(step, (name, dtype, False), cluster=cluster, dtype=name_of)
        for dtype, name_of in ((np.float16, None), (np.float32, "bfloat16"))
    )
    assert software == "plain" or described.software_bytes == half.software_bytes


@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree"])
def test_floats_alone_are_sent_in_the_described_type(algorithm):
    def program():
        for dtype in (np.float32, np.int32, np.float64, bool):
            x = np.ones(6000, dtype)
            sp.all_reduce(x, "max")
            sp.broadcast(x, 1)
            sp.scatter([x, x] if sp.get_rank() == 1 else None, 1)
            (sp.send if sp.get_rank() == 0 else sp.recv)(x, 1 - sp.get_rank())

    runs = [
        sp.launch(program, world_size=2, transport="inline", algorithm=algorithm, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]
    count = Counter[Any]()
    for one, other in zip(*(run.trace.events for run in runs), strict=True):
        count[one.rank, one.kind] += 1
        is_float = count[one.rank, one.kind] <= (3 if one.kind == "collective" else 1)
        assert other.size_bytes == one.size_bytes // (2 if is_float else 1)
        assert other.sent_bytes == one.sent_bytes // (2 if is_float else 1)
    # The program keeps its values and its own memory.
    assert runs[0].memory == runs[1].memory


shapes = st.integers(1, 64).map(lambda n: 16 * n)


@given(st.integers(1, 3), shapes, shapes, shapes)
def test_fp8_operands_are_read_once_written_twice(batch, m, n, k):
    """The casts of forward and backward together read each operand once, and write it twice."""
    forward = MatrixProduct(batch, m, n, k)
    products = (forward, forward._replace(n=k, k=n), forward._replace(m=k, k=m))
    elements = batch * (m * k + k * n + m * n)
    work = DeviceWork("", 6 * batch * m * n * k, 6 * elements, 2, 0, True, products)
    found = work.with_operands("float8")
    assert sum(found.casts) == (2 + 1 + 1) * elements
    # Each product reads two operands of one byte, and writes a result of two.
    assert found.size_bytes == work.size_bytes - 2 * elements
    assert (found.itemsize, found.flops) == (1, work.flops)
    device = describe(1, "dgx-h100").device
    # One start for the products, and one for each cast.
    assert device.host_s(found) == 4 * device.host_s(work)
    assert device.device_s(found._replace(casts=())) <= device.device_s(work)
    assert device.device_s(found) > device.device_s(found._replace(casts=())) + 3 * device.launch_s


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["product", "convolution", "attention"])
def test_types_of_operands(dtype, kind):
    itemsize = DTYPES[dtype][0]
    work = DeviceWork("", 2 * 64**3, 3 * itemsize * 64**2, itemsize, 0, True, (MatrixProduct(1, 64, 64, 64, kind),))
    narrow = {("tf32", "product"): 3, ("tf32", "convolution"): 3, ("float8", "product"): 1}
    assert work.with_operands(dtype).itemsize == narrow.get((dtype, kind), itemsize)
    # Other types than that of the program's floats, other work, and odd sizes stay.
    for other in (work._replace(itemsize=8), work._replace(is_product=False)):
        assert other.with_operands(dtype) == other
    odd = work._replace(products=(MatrixProduct(1, 64, 60, 64),))
    assert odd.with_operands("float8") == odd


@settings(max_examples=5)
@given(st.sampled_from(["bfloat16", "float8", "tf32"]), st.integers(1, 4), st.sampled_from([256, 512]))
def test_closed_form_is_the_dry_run_of_each_type(dtype, count, length):
    shape = read_config(LLAMA, length)
    itemsize = DTYPES[dtype][0]
    plan = TrainingPlan(shape, micro_batch=count, fused_attention=True, item_bytes=itemsize)
    cluster = describe(1, "dgx-h100")
    # A program has some starts more: lookups, and what the loss needs.
    cluster = replace(cluster, device=replace(cluster.device, op_start_s=0.0))

    def program():
        net = decoder(shape, False, np.dtype(np.float32))
        optimizer, tokens = sp.optim.AdamW(net.parameters()), np.zeros((count, length), np.int64)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(tokens).reshape(-1, 512), tokens.reshape(-1)).backward()
            optimizer.step()

    states = ModelStates(itemsize, itemsize, 2 * itemsize)
    closed = step_time(plan, with_products(cluster, dtype), states=states)
    dry = dry_run(program, cluster=Efficiency().achieved(cluster), dtype=dtype)
    assert closed.step_s == pytest.approx(dry.step_time_s, rel=0.04)


def test_mixed_precision_keeps_what_its_kernels_do():
    """Convolutions and batch norm of float16 are computed in float32 here, and in registers on a device."""

    def program(level):
        net = nn.auto_mixed_precision(models.resnet18(10, "cifar"), level)
        net(np.zeros((64, 3, 32, 32), np.float32)).sum().backward()

    # Without their parameters, of 11.2 million floats each.
    whole, mixed = (dry_run(program, (level,), cluster="dgx-h100").software_bytes for level in ("O0", "O2"))
    assert mixed - 45e6 < 0.8 * (whole - 45e6)


def test_another_type_of_the_same_program():
    whole = dry_run(step, ("mlp", np.float32), cluster="dgx-h100")
    assert "in float8" in whole.with_(dtype="float8").table()
    assert "float" not in whole.table()
    assert whole.with_(dtype="float8").with_(dtype="float32").makespan_s == whole.makespan_s


def test_type_of_a_saved_cluster(tmp_path):
    spec = describe(8, "dgx-h100", dtype="tf32")
    spec.save(tmp_path / "typed.json")
    read = describe(8, str(tmp_path / "typed.json"))
    assert (read, read.dtype, describe(8, read, dtype="float8").dtype) == (spec, "tf32", "float8")
    assert "tf32" in spec.table()


def test_device_that_a_program_chooses_keeps_the_type():
    def program():
        sp.set_context(device_target="Ascend")
        step("mlp", np.float32)

    run = sp.launch(program, world_size=1, transport="inline", dtype="bfloat16")
    assert (run.trace.cluster.device.name, run.trace.cluster.dtype) == ("ascend910", "bfloat16")

"""Memory of a program is freed with its last reference: no cycles wait for the garbage collector.

An array in a cycle keeps its memory until the collector runs, so the next step uses other memory, which is in no
cache; and the memory account shows more than the program needs.
"""

import gc
from collections import Counter

import numpy as np
import pytest

import simparallel as sp
from simparallel.parallel import AutoParallel, DistributedDataParallel


def collectives(size):
    """Call each collective on arrays of `size` elements."""
    x = np.ones(size, np.float32)
    pair = sp.new_group((0, 1))

    def step():
        sp.all_reduce(x, "max")
        sp.all_reduce(sp.empty(size, shared=True), "min", pair)
        sp.all_gather(x)
        sp.all_to_all(x)
        sp.reduce_scatter(x)
        sp.gather(x)
        sp.scatter([x, x] if sp.get_rank() == 0 else None)
        sp.broadcast(x)
        sp.all_reduce(x, "adasum")
        sp.all_reduce(x, "max", algorithm="ring")
        sp.barrier()
        sp.all_gather(x, async_op=True).wait()
        sp.all_gather(sp.Tensor(x), async_op=True).wait()
        other = 1 - sp.get_rank()
        works = [sp.isend(x, other), sp.irecv(np.empty_like(x), other)]
        for work in works:
            work.wait()
        sp.all_gather_object({"rank": other})

    return step


def training(wrap):
    net = sp.nn.Sequential(sp.nn.Linear(8, 64), sp.nn.BatchNorm1d(64), sp.nn.ReLU(), sp.nn.Linear(64, 4))
    net = wrap(net)
    optimizer = sp.optim.Adam(net.parameters())
    x, t = np.ones((16, 8), np.float32), np.arange(16) % 4

    def step():
        optimizer.zero_grad()
        sp.functions.cross_entropy(net(sp.Tensor(x)), sp.Tensor(t)).backward()
        optimizer.step()

    return step


def sharded():
    matmul = sp.ops.MatMul().shard(((1, 2), (2, 1)))
    w = sp.Tensor(np.ones((8, 4), np.float32), requires_grad=True)
    grad_fn = sp.value_and_grad(lambda x: matmul(x, w).mean(), None, [w])
    run = AutoParallel(lambda x: grad_fn(x)[0])
    return lambda: run(np.ones((16, 8), np.float32))


PROGRAMS = {
    "small collectives": lambda: collectives(64),
    "large collectives": lambda: collectives(1 << 20),
    "one device": lambda: training(lambda net: net),
    "DDP": lambda: training(DistributedDataParallel),
    "SyncBatchNorm": lambda: training(sp.nn.SyncBatchNorm.convert_sync_batchnorm),
    "DataParallel": lambda: training(lambda net: sp.parallel.DataParallel(net, ["sim:0", "sim:1"])),
    "strategies": sharded,
    "a cycle": lambda: lambda: (lambda one: one.append(one))([np.ones(4)]),  # red control
}


def left_to_the_collector(name):
    step = PROGRAMS[name]()
    for _ in range(3):  # objects made only once may have cycles
        step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            step()
        gc.collect()
        return Counter(f"{type(x).__name__} {getattr(x, '__qualname__', '')}" for x in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("name", PROGRAMS)
def test_step_leaves_no_garbage_cycles(processes, name):
    for left in processes.run(2, left_to_the_collector, name):
        assert bool(left) == (name == "a cycle"), left

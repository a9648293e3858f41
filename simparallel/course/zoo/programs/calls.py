"""Mistakes with the order, the arguments and the groups of collectives."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import X, Y
from simparallel.errors import CollectiveMismatchError, CommError


@wrong(lesson=2, raises=CollectiveMismatchError, says="They differ in: reduce op")
def different_order():
    """Ranks call collectives in different orders.

    A hang, or a maximum where a sum should be.

    Elsewhere: NCCL and gloo do not compare calls. TORCH_DISTRIBUTED_DEBUG=DETAIL compares the collectives, but not
    their reduction. For MPI the program is erroneous, and no error is guaranteed.
    """
    rows = np.array(X[sp.get_rank() :: sp.get_world_size()])
    if sp.get_rank() == 0:  # -
        total, largest = sp.all_reduce(rows.sum(0)), sp.all_reduce(rows.max(0), "max")  # -
    else:  # -
        largest, total = sp.all_reduce(rows.max(0), "max"), sp.all_reduce(rows.sum(0))  # -
    # + total, largest = sp.all_reduce(rows.sum(0)), sp.all_reduce(rows.max(0), "max")
    return total, largest


@wrong(lesson=2, raises=CommError, says="They differ in: op")
def collective_on_rank_0():
    """A collective is called on rank 0 alone.

    A hang, often in a line that only logs.

    Elsewhere: A hang in MPI and gloo. With NCCL a watchdog of PyTorch ends the job after 10 minutes by default.
    """
    loss = np.square(Y[sp.get_rank() :: sp.get_world_size()]).mean(0)
    # + sp.all_reduce(loss, "mean")
    if sp.get_rank() == 0:
        sp.all_reduce(loss, "mean")  # -
        sp.log(loss=loss[0])
    return sp.broadcast(loss)


@wrong(lesson=2, raises=CollectiveMismatchError, says="They differ in: shape")
def unequal_parts():
    """The parts of a gather have different shapes.

    Wrong numbers, a hang or a crash in the middle of the transfer.

    Elsewhere: NCCL may hang or give wrong numbers, and gloo aborts the process (NVIDIA/nccl#1394). MPI has Allgatherv
    for such parts.
    """
    rows = np.array_split(X[:23], sp.get_world_size())[sp.get_rank()]
    return sp.all_gather(rows)  # -
    # + return sp.all_gather(rows, uneven=True)


@wrong(lesson=2, raises=CollectiveMismatchError, says="They differ in: dtype")
def different_dtypes():
    """One rank sends float64, the others float32.

    Bytes of one type are read as the other.

    Elsewhere: NCCL takes the type from each rank's own call: one rank may go on with wrong numbers while another hangs
    (ray-project/ray#49300).
    """
    rows = X[sp.get_rank() :: sp.get_world_size()]
    total = rows.sum(0)
    if sp.get_rank() == 1:
        total = total + np.zeros(4)  # -
        # + total = total + np.zeros(4, np.float32)
    return sp.all_reduce(total)


@wrong(lesson=2, raises=CollectiveMismatchError, says="They differ in: root")
def different_roots():
    """Every rank broadcasts from itself.

    Every rank keeps its own values, or the next call hangs.

    Elsewhere: TORCH_DISTRIBUTED_DEBUG=DETAIL does not compare the root; with NCCL the next operation may hang
    (pytorch/pytorch#39706).
    """
    weights = np.full(4, float(sp.get_rank()))
    sp.broadcast(weights, src=sp.get_rank())  # -
    # + sp.broadcast(weights, src=0)
    return weights


@wrong(lesson=2, raises=CommError, says="They differ in: ranks", world_size=4)
def group_on_members_only():
    """A group is made on its members alone.

    new_group waits for ranks that never call it, or mixes groups up.

    Elsewhere: torch.distributed.new_group has to be called on all ranks, unless use_local_synchronization=True.
    MPI_Comm_split is called by all ranks, MPI_Comm_create_group by the members.
    """
    half = [0, 1] if sp.get_rank() < 2 else [2, 3]
    group = sp.new_group(half)  # -
    # + groups = {0: sp.new_group([0, 1]), 2: sp.new_group([2, 3])}
    # + group = groups[half[0]]
    return sp.all_reduce(np.ones(3), group=group)


@wrong(lesson=2, raises=CommError, says="They differ in: ranks", world_size=4)
def groups_in_other_order():
    """Ranks make the same groups in different orders.

    new_group hangs, or groups are mixed up.

    Elsewhere: torch.distributed.new_group asks for one order on all ranks.
    """
    pairs = [(0, 1), (2, 3)]
    if sp.get_rank() >= 2:  # -
        pairs.reverse()  # -
    groups = {}
    for pair in pairs:
        groups[pair] = sp.new_group(pair)
    own = (0, 1) if sp.get_rank() < 2 else (2, 3)
    return sp.all_reduce(np.ones(3), group=groups[own])


@wrong(lesson=2, says="result")
def changed_during_async():
    """An array is changed while a collective reads it.

    Sometimes the sum has the old values, sometimes the new ones.

    Elsewhere: An error for MPI, NCCL and torch.distributed, which none of them reports.
    """
    gradient = X[sp.get_rank() :: sp.get_world_size()].sum(0)
    work = sp.all_reduce(gradient, async_op=True)
    gradient *= 0.5  # -
    work.wait()
    # + gradient *= 0.5
    return gradient


@wrong(lesson=2, says="result")
def handle_not_waited_for():
    """The result of an asynchronous collective is used before wait().

    Sometimes the result is finished, sometimes it is not.

    Elsewhere: With NCCL the kernel that uses the result may run before the collective. For MPI a request has to be
    completed first.
    """
    gradient = X[sp.get_rank() :: sp.get_world_size()].sum(0)
    work = sp.all_reduce(gradient, async_op=True)
    # + work.wait()
    used = gradient * 0.5
    work.wait()  # -
    return used


@wrong(lesson=8, raises=CommError, says="They differ in: op")
def barrier_in_except():
    """A rank catches its error and calls a barrier.

    The ranks meet in different calls. The error is hidden, and the job hangs.

    Elsewhere: torch.distributed waits until its timeout. mpi4py.run ends the job after an exception that no code
    catches.
    """
    rows = X[sp.get_rank() :: sp.get_world_size()]
    try:
        index = 12 if sp.get_rank() == 1 else 3  # -
        # + index = 3
        loss = sp.all_reduce(rows[index].copy(), "mean")
    except IndexError:
        sp.barrier()
        raise
    return loss


@wrong(lesson=8, raises=ZeroDivisionError, says="division by zero", world_size=4)
def one_rank_raises():
    """One rank fails, and the others wait for it.

    The others hang, and the error is far up in the log.

    Elsewhere: torchrun ends the other processes and names the first failure. MPI ends the job if the process exits
    with an error.
    """
    samples = [12, 6, 6, 0]
    count = samples[sp.get_rank()]
    mean = sum(Y[:count, 0].tolist()) / count  # -
    # + mean = sum(Y[:count, 0].tolist()) / max(count, 1)
    return sp.all_reduce(np.array([mean]))

"""Mistakes with messages between two ranks."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import X
from simparallel.errors import CommError, DeadlockError


@wrong(
    "Two ranks receive before they send",
    lesson=8,
    seen="A hang, each time.",
    raises=DeadlockError,
    says="recv(",
    elsewhere="A hang in MPI and torch.distributed. The tool MUST finds such circles in MPI programs.",
)
def both_receive_first():
    other = 1 - sp.get_rank()
    got = np.empty_like(X)
    sp.recv(got, other)  # -
    # + message = sp.irecv(got, other)
    sp.send(X, other)
    # + message.wait()
    return got


@wrong(
    "Two ranks send to each other, and then receive",
    lesson=8,
    seen="It works while messages are small enough to be stored on the way, and hangs with large ones. "
    "ssend, as here, stores none.",
    raises=DeadlockError,
    says="ssend(",
    elsewhere="MPI_Send may return at once or wait for the receiver, which depends on the library and the "
    "network. MPI_Sendrecv is right for any size.",
)
def both_send_first():
    other = 1 - sp.get_rank()
    got = np.empty_like(X)
    sp.ssend(X, other)  # -
    sp.recv(got, other)  # -
    # + sp.sendrecv(X, other, got, other)
    return got


@wrong(
    "Tags are swapped",
    lesson=8,
    seen="The receiver waits for a tag that comes later.",
    raises=DeadlockError,
    says="tag=1",
    elsewhere="A hang in MPI. The NCCL backend of torch.distributed has no tags: there messages are taken in the "
    "order of the calls, and the two values would be swapped.",
)
def swapped_tags():
    if sp.get_rank() == 0:
        sp.ssend(X.sum(0), 1, tag=0)
        sp.ssend(X.max(0), 1, tag=1)
        return None
    total, largest = np.empty(4, np.float32), np.empty(4, np.float32)
    sp.recv(largest, 0, tag=1)  # -
    sp.recv(total, 0, tag=0)
    # + sp.recv(largest, 0, tag=1)
    return total, largest


@wrong(
    "A ring receives from the wrong neighbour",
    lesson=2,
    seen="A hang, although every rank sends once and receives once.",
    raises=CommError,
    says="recv(",
    elsewhere="A hang in MPI, NCCL and gloo.",
    world_size=4,
)
def wrong_neighbour():
    rank, size = sp.get_rank(), sp.get_world_size()
    got = np.empty(1)
    sp.send(np.array([float(rank)]), (rank + 1) % size)
    sp.recv(got, (rank + 1) % size)  # -
    # + sp.recv(got, (rank - 1) % size)
    return got


@wrong(
    "A message is sent that no rank receives",
    lesson=8,
    seen="The run ends, and the next message with this tag would be the old one.",
    raises=CommError,
    says="without receiving 1 message",
    elsewhere="MPI gives no error if the library has stored the message.",
)
def message_not_received():
    rank, size = sp.get_rank(), sp.get_world_size()
    got = np.zeros(4, np.float32)
    if rank + 1 < size:
        sp.send(X[rank], rank + 1)
    is_first = rank <= 1  # -
    # + is_first = rank == 0
    if not is_first:
        sp.recv(got, rank - 1)
    return got

"""Mistakes with messages between two ranks."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import X
from simparallel.errors import CommError, DeadlockError


@wrong(lesson=8, raises=DeadlockError, says="recv(")
def both_receive_first():
    """Two ranks receive before they send.

    A hang, each time.

    Elsewhere: A hang in MPI and torch.distributed. The tool MUST finds such circles in MPI programs.
    """
    other = 1 - sp.get_rank()
    got = np.empty_like(X)
    sp.recv(got, other)  # -
    # + message = sp.irecv(got, other)
    sp.send(X, other)
    # + message.wait()
    return got


@wrong(lesson=8, raises=DeadlockError, says="ssend(")
def both_send_first():
    """Two ranks send to each other, and then receive.

    It works while messages are small enough to be stored on the way, and hangs with large ones. ssend, as here, stores
    none.

    Elsewhere: MPI_Send may return at once or wait for the receiver, which depends on the library and the network.
    MPI_Sendrecv is right for any size.
    """
    other = 1 - sp.get_rank()
    got = np.empty_like(X)
    sp.ssend(X, other)  # -
    sp.recv(got, other)  # -
    # + sp.sendrecv(X, other, got, other)
    return got


@wrong(lesson=8, raises=DeadlockError, says="tag=1")
def swapped_tags():
    """Tags are swapped.

    The receiver waits for a tag that comes later.

    Elsewhere: A hang in MPI. The NCCL backend of torch.distributed has no tags: there messages are taken in the order
    of the calls, and the two values would be swapped.
    """
    if sp.get_rank() == 0:
        sp.ssend(X.sum(0), 1, tag=0)
        sp.ssend(X.max(0), 1, tag=1)
        return None
    total, largest = np.empty(4, np.float32), np.empty(4, np.float32)
    sp.recv(largest, 0, tag=1)  # -
    sp.recv(total, 0, tag=0)
    # + sp.recv(largest, 0, tag=1)
    return total, largest


@wrong(lesson=2, raises=CommError, says="recv(", world_size=4)
def wrong_neighbour():
    """A ring receives from the wrong neighbour.

    A hang, although every rank sends once and receives once.

    Elsewhere: A hang in MPI, NCCL and gloo.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    got = np.empty(1)
    sp.send(np.array([float(rank)]), (rank + 1) % size)
    sp.recv(got, (rank + 1) % size)  # -
    # + sp.recv(got, (rank - 1) % size)
    return got


@wrong(lesson=8, raises=CommError, says="without receiving 1 message")
def message_not_received():
    """A message is sent that no rank receives.

    The run ends, and the next message with this tag would be the old one.

    Elsewhere: MPI gives no error if the library has stored the message.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    got = np.zeros(4, np.float32)
    if rank + 1 < size:
        sp.send(X[rank], rank + 1)
    is_first = rank <= 1  # -
    # + is_first = rank == 0
    if not is_first:
        sp.recv(got, rank - 1)
    return got

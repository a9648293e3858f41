"""Scripts that the launcher of another program started: each process becomes an MPI rank."""

from __future__ import annotations

from simparallel.clock.recorder import Recorder, set_recorder
from simparallel.comm.communicator import Communicator, join_run
from simparallel.comm.leaving import Leaving
from simparallel.comm.mpi import transport as mpi
from simparallel.comm.mpi.medium import MPI_MESSAGES
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.machine.cluster import describe


def join(timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Make this process its MPI rank until it ends; return False if MPI knows of no other process.

    The end of the process is checked like the end of any run. A rank that fails reports it to the others, and then
    ends the job.

    Collective: over all processes of the launcher.
    """
    everyone = mpi.world()
    if everyone.size == 1:
        return False
    transport = mpi.MpiTransport(everyone.Dup(), timeout_s)
    recorder = Recorder(transport.rank, describe(everyone.size, nodes=mpi.nodes_of(everyone)))
    communicator = Communicator(transport, recorder, medium=MPI_MESSAGES)
    transport.start()
    set_recorder(recorder)
    join_run(communicator)
    # Its exit hook runs before MPI's, which was registered earlier.
    Leaving(communicator, transport)
    return True

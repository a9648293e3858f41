"""Ranks and nodes: `init` joins the run of a launcher; `get_rank` and others return the place of the rank in it."""

from __future__ import annotations

import os

from simparallel.base.units import format_type_of
from simparallel.clock.memory import parse_bytes
from simparallel.clock.notes import note_once
from simparallel.clock.recorder import Recorder, current_recorder, describe_device, set_recorder
from simparallel.comm import Group, current, is_running
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec, describe
from simparallel.world.launchers import foreign_launcher, is_batch_script
from simparallel.world.process import become_rank

# Value: the rank's pid, then a mark of its variables. Processes that a rank starts inherit it, but differ in pid.
CHILD_VARIABLE = "SIMPARALLEL_RANK_PROCESS"


def init(
    devices_per_rank: int | None = None, *, timeout_s: float | None = None, start_timeout_s: float | None = None
) -> None:
    """Join the run that started this process, or become a world of one rank.

    A script calls it once, before anything else of this module. It may be called again.

    Processes that were started one by one, by a shell loop, several `pytest` runs or torchrun, become the ranks of one
    job until they end, if their environment has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or RANK_TABLE_FILE with
    RANK_ID or DEVICE_ID. They all have to be on this machine. So do the processes of mpiexec, mpirun or srun, by the
    variables of PMI, Slurm or Open MPI; with mpi4py installed they communicate over MPI, on any number of machines.
    If several launchers describe this process, the first of RANK, PMI, Slurm and Open MPI counts. Rank 0 prints a line
    that says how the ranks met.

    Ranks use as many BLAS threads as those of `launch`, and start with the same `random` and `np.random`, unless the
    program has seeded them since it imported this package. Numbers that it drew from `random` in that time count as
    seeding: Python does not tell them apart. So seed `random` yourself if you draw before this call.

    Args:
        devices_per_rank: number of simulated devices of this rank, sim:0 to sim:n-1; None leaves it to the launcher,
            or else to the device names in use.
        timeout_s: how long a rank waits for another one (default 60 s); a run of simparallel's own launcher keeps the
            launcher's limit.
        start_timeout_s: how long processes that were started one by one wait for each other (default 300 s).

    Collective: yes, if the processes join each other.

    Raises:
        LaunchError: another launcher started several processes, which cannot be connected here; variables contradict
            each other; or one of the processes that were started one by one never arrived, ended too early, or does
            not belong to the job.
        InputError: `devices_per_rank` is not a positive integer, or leaves out a device in use.
    """
    # A rank of our own launcher, or of an earlier call, is in its run already.
    if not is_running():
        before, joined = current_recorder(), False
        if foreign_launcher(os.environ):
            from simparallel.runtime.joined.join import join

            joined = join(timeout_s, start_timeout_s)
        elif is_batch_script(os.environ) and os.environ.get("SLURM_NTASKS", "1") != "1":
            tasks = os.environ["SLURM_NTASKS"]
            note_once(
                f"init: SLURM_NTASKS={tasks}, but this process is the job script's own and none of srun's, and so runs "
                f"alone. To run {tasks} ranks, write srun before its command."
            )
        if joined:
            become_rank(current().world_size, keep_own=True)
            if before is not None:
                # `set_context` and `set_memory` may come before `init`: the rank keeps the device that they describe.
                describe_device(before.cluster.device)
                if before.memory.limit_bytes is not None:
                    set_memory(before.memory.limit_bytes)
        elif before is None:
            set_recorder(Recorder(0, describe(1)))
    recorder = current_recorder()
    if devices_per_rank is not None and recorder is not None:
        recorder.set_num_devices(devices_per_rank)


def _unjoined_run() -> dict[str, str]:
    """Return what `foreign_launcher` finds if this process could still join that run."""
    # A process that a rank has started inherits its variables, but is no rank.
    return {} if is_running() or CHILD_VARIABLE in os.environ else foreign_launcher(os.environ)


def init_if_described() -> None:
    """Call `init` if this process is not a rank yet, and its environment says that it is one of several.

    Collective: as `init`.

    Raises:
        LaunchError: see `init`.
    """
    if _unjoined_run():
        init()


def note_if_alone(who: str) -> None:
    """Note once that this process works alone, although its environment says that it is one of several."""
    if found := _unjoined_run():
        variables = " ".join(f"{name}={text}" for name, text in found.items())
        note_once(
            f"{who}: this process is one of several by its environment ({variables}), but it never called init(), and "
            "so trains alone. Call init() first, or unset these variables."
        )


def get_rank(group: Group | None = None) -> int:
    """Return this rank, 0 … world size - 1; 0 outside of a run. With a group: its position there.

    Raises:
        InputError: not a group, or not a member of it.
    """
    if group is None:
        return current().rank
    _check_group("get_rank", group)
    if group.rank is None:
        raise InputError(f"get_rank: rank {current().rank} is not a member of {group.name}.")
    return group.rank


def get_world_size(group: Group | None = None) -> int:
    """Return the number of ranks; 1 outside of a run. With a group: the number of its members."""
    if group is None:
        return current().world_size
    _check_group("get_world_size", group)
    return group.size


def _check_group(who: str, group: Group) -> None:
    if not hasattr(group, "ranks"):
        raise InputError(f"{who}: group={group!r} is {format_type_of(group)}, expected a group of sp.new_group.")


get_group_size = get_world_size  # MindSpore's name


def get_local_rank() -> int:
    """Return this rank's number on its node, 0 … local world size - 1."""
    return _ranks_of_node().index(get_rank())


def get_local_world_size() -> int:
    """Return the number of ranks on this rank's node; all of them if there is one node."""
    return len(_ranks_of_node())


def get_node_rank() -> int:
    """Return the number of this rank's node, 0 … number of nodes - 1."""
    return _cluster().node_of(get_rank())


def get_nodes() -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node."""
    return _cluster().nodes


def get_num_nodes() -> int:
    """Return the number of nodes; 1 unless the run was launched with more."""
    return len(_cluster().nodes)


def node_group() -> Group:
    """Return the group of the ranks on this rank's node, in order.

    Collective: over all ranks at the first call of a run; later calls do not communicate.
    """
    return current().node_group()


def _ranks_of_node() -> tuple[int, ...]:
    return _cluster().nodes[get_node_rank()]


def _cluster() -> ClusterSpec:
    # A thread that the rank's program has started has no recorder of its own.
    recorder = current_recorder() or current().recorder
    return recorder.cluster if recorder is not None else describe(get_world_size())


def set_memory(max_size: str | int) -> None:
    """Limit the memory of this rank's device from now on; MindSpore's `runtime.set_memory`.

    Args:
        max_size: such as "28GB", or a number of bytes. `launch(..., device_memory=...)` sets it for all ranks.

    Raises:
        InputError: not a size.
        DeviceOutOfMemoryError: the device already holds more; the limit is unchanged.
    """
    # Outside of a run there is no memory account yet: make the recorder that `init` would make.
    limit_bytes = parse_bytes(max_size)
    recorder = current_recorder()
    if recorder is None:
        set_recorder(recorder := Recorder(0, describe(1)))
    recorder.limit_memory(limit_bytes)

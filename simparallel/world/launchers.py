"""The variables by which launchers tell a process its rank: torchrun's and MindSpore's, PMI, Slurm, Open MPI, PMIx.

Their order is that of `LAUNCHERS`: the first that describes this process counts, and those after it have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class LauncherNames(NamedTuple):
    """The names of a launcher's variables; names in one tuple are synonyms.

    Attributes:
        name: its name, for messages.
        rank, size: the rank, and the number of ranks.
        local_rank, local_size: the rank among those of its node, and their number.
        node, nodes: the number of the node, and how many there are.
        job: ids that are equal for the ranks of one job, and differ between jobs.
        is_mpi: whether MPI can connect its processes.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    is_mpi: bool = True


TORCHRUN = LauncherNames(
    "torchrun", ("RANK", "RANK_ID"), ("WORLD_SIZE", "RANK_SIZE"), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",),
    ("GROUP_RANK", "NODE_RANK", "SERVER_ID"), is_mpi=False,
)  # fmt: skip
SLURM = LauncherNames(
    "Slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (), ("SLURM_NODEID",),
    ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), ("SLURM_STEP_ID",),
)  # fmt: skip
LAUNCHERS = (
    TORCHRUN,
    # MPICH's and Intel MPI's mpiexec, and Slurm's plugin; Cray's PMI has the other local names.
    LauncherNames(
        "PMI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    SLURM,
    LauncherNames(
        "Open MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",), job=("PMIX_NAMESPACE",),
    ),
    # It gives a process its own rank only.
    LauncherNames("PMIx", ("PMIX_RANK",), job=("PMIX_NAMESPACE",)),
)  # fmt: skip
_NAMES = tuple(name for launcher in LAUNCHERS for names in launcher[1:7] for name in names)


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `LAUNCHERS` that describe this process, without their job ids; empty ones are unset."""
    found = {name: environment[name] for name in _NAMES if environment.get(name)}
    if "SLURM_PROCID" not in found or is_batch_script(environment):
        # salloc and sbatch describe the whole job, before any srun.
        return {name: text for name, text in found.items() if not name.startswith("SLURM_")}
    for of_step, of_job in (SLURM.size, SLURM.nodes):
        if of_step in found:
            found.pop(of_job, None)
    return found


def is_batch_script(environment: Mapping[str, str]) -> bool:
    """Return whether this process is the script of sbatch itself, and no task of an srun in it."""
    return environment.get("ENVIRONMENT") == "BATCH" and not {*SLURM.job, SLURM.size[0]} & environment.keys()


def foreign_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which this process is one of several; a rank where the number of ranks is missing."""
    given = launcher_variables(environment)
    found: dict[str, str] = {}
    for launcher in LAUNCHERS:
        sizes = {name: given[name] for name in launcher.size if name in given}
        # Whether they are numbers is checked where they are used.
        found |= {name: text for name, text in sizes.items() if text.lstrip("0") not in ("", "1")}
        # PMIx never has a size of its own; another launcher may have stated it, which is 1 if it is not in `found`.
        is_stated = sizes or (not launcher.size and any(names in given for one in LAUNCHERS for names in one.size))
        found |= {} if is_stated else {name: given[name] for name in launcher.rank if name in given}
    if environment.get("RANK_TABLE_FILE") and (environment.get("RANK_ID") or environment.get("DEVICE_ID")):
        # The table states the number of ranks.
        found.pop("RANK_ID", None)
        found["RANK_TABLE_FILE"] = environment["RANK_TABLE_FILE"]
    return found
